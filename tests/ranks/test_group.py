"""Messages, tensors and the mesh of several ranks; and one rank's view of another's silence."""

from __future__ import annotations

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from shared_offload.errors import ConfigError, RankError
from shared_offload.ranks import peers
from shared_offload.ranks.board import Board
from shared_offload.ranks.facts import RankFacts, member_facts
from shared_offload.ranks.group import Ranks, shared_devices
from shared_offload.ranks.peers import Peers
from shared_offload.ranks.run import run_ranks


def test_the_mesh_and_what_goes_over_it(driver):
    """Four forked ranks check their groups; see `mesh` in driver.py for what they compare."""
    run = driver("mesh", world=4)
    assert run.end(40) == [0, 0, 0, 0], run.stderr()
    results = [json.loads((run.folder / f"mesh{rank}").read_text()) for rank in range(4)]
    assert [r["place"] for r in results] == [[0, 0], [0, 1], [1, 0], [1, 1]]  # cfg, seq
    assert [r["seq_sum"] for r in results] == [0 + 1, 0 + 1, 2 + 3, 2 + 3]
    assert [r["cfg_sum"] for r in results] == [0 + 2, 1 + 3, 0 + 2, 1 + 3]
    assert all(r["gathered"] == [0, 10, 20, 30] for r in results)
    assert all(r["tensor"] == [[2.0, -1.5], "torch.bfloat16"] for r in results)
    assert all(r["pids"] == run.pids() for r in results)
    assert all(r["closed_twice"] for r in results)


def on_gpus(driver, backend: str, devices: list[str]) -> None:
    run = driver("gpu", world=2)
    assert run.end(90) == [0, 0], run.stderr()
    results = [json.loads((run.folder / f"gpu{rank}").read_text()) for rank in range(2)]
    assert results == [[backend, [1.0] * 3, [0, 1, 2, 3], device] for device in devices]


@pytest.mark.multigpu
def test_each_rank_with_a_gpu_of_its_own_uses_nccl(driver):
    on_gpus(driver, "nccl", ["cuda:0", "cuda:1"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="ranks share a GPU only when they must")
def test_ranks_that_share_a_gpu_use_gloo(driver):
    on_gpus(driver, "gloo", ["cuda:0", "cuda:0"])


@pytest.mark.gpu
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_killed_in_a_collective_on_gpus(driver, who):
    run = driver("gpu kill", who, world=2)
    run.wait_ready()
    codes = run.end(15)
    assert codes[1 - who] == 1, run.stderr()
    assert run.stderr().count("RankError: rank") == 1, run.stderr()


def test_a_lone_process_has_the_same_interface_and_no_group():
    with Ranks.start(RankFacts(), torch.device("cpu")) as ranks:
        assert ranks.seq_group is ranks.cfg_group is ranks.world_group is None
        assert not torch.distributed.is_initialized()
        assert (ranks.is_first, ranks.seq_rank, ranks.cfg_rank) == (True, 0, 0)
        assert ranks.gather_json({"a": 1}) == [{"a": 1}]
        assert ranks.broadcast_json("x") == "x"
        tensor = torch.ones(2)
        assert ranks.broadcast_tensor(tensor) is tensor
        ranks.barrier()
        with ranks.stage("step"):
            pass
    ranks.close()


def test_a_mesh_of_another_size_is_an_error():
    with pytest.raises(ConfigError) as caught:
        Ranks.start(RankFacts(), torch.device("cpu"), seq_p_size=2)
    assert (caught.value.facts["needed"], caught.value.facts["found"]) == (2, 1)


def test_a_rank_that_does_not_answer_is_named():
    store = HashStore()
    boards = [Board(store, rank, 3, 0.3) for rank in (0, 2)]

    def ask(board: Board) -> list[object]:
        with pytest.raises(RankError) as caught:
            board.gather("here")
        return caught.value.facts["ranks"]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, boards)) == [[1], [1]]


def test_a_waiting_rank_burns_no_cpu():
    board = Board(HashStore(), 1, 2, 1.0)
    before = time.process_time()
    with pytest.raises(RankError):
        board.broadcast()
    assert time.process_time() - before < 0.2


def test_ranks_on_one_gpu_are_found():
    def member(rank: int, pci: str | None, boot: str = "a"):
        return dataclasses.replace(member_facts(rank, pci), boot_id=boot)

    one = [member(0, "0000:01:00.0"), member(1, "0000:01:00.0"), member(2, "0000:02:00.0")]
    assert [[m.rank for m in group] for group in shared_devices(one)] == [[0, 1]]
    assert shared_devices([member(0, "0000:01:00.0"), member(1, "0000:01:00.0", "b")]) == []
    assert shared_devices([member(0, None), member(1, None)]) == []


def test_silence_of_another_host_is_a_loss_and_a_beat_is_life(monkeypatch):
    monkeypatch.setattr(peers, "SILENCE_SECONDS", 0.3)
    store = HashStore()
    facts = [RankFacts(rank=rank, world_size=2) for rank in range(2)]
    far = dataclasses.replace(member_facts(1), boot_id="far")  # its pid means nothing here
    here, there = Peers(store, facts[0], member_facts(0)), Peers(store, facts[1], far)
    for _ in range(4):  # slow, yet beating
        there.beat("step")
        here.refresh()
        assert here.lost() is None
        time.sleep(0.15)
    time.sleep(0.3)
    here.refresh()
    lost = here.lost()
    assert lost is not None
    assert (lost.rank, lost.stage) == (1, "step")
    there.leave()
    assert here.lost() is None, "a rank that has finished is no loss"


def test_only_the_first_failure_stands_and_only_one_rank_prints():
    store = HashStore()
    both = [Peers(store, RankFacts(rank=r, world_size=2), member_facts(r)) for r in range(2)]
    losses = [peer.loss_of(rank) for rank, peer in enumerate(both)]
    assert both[1].publish(losses[1]) == losses[1]
    assert both[0].publish(losses[0]) == losses[1]
    assert both[0].published() == losses[1]
    assert [peer.claim_printing() for peer in both] == [True, False]


def test_a_lone_process_returns_its_exit_code(capfd):
    def fails(watch):
        with watch.stage("load"):
            raise ConfigError("steps is 0", key="infer_steps")

    assert run_ranks(fails, RankFacts()) == 2
    assert capfd.readouterr().err == "ConfigError: steps is 0\n"
    assert run_ranks(lambda _watch: 0, RankFacts()) == 0
