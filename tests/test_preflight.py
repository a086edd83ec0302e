"""Start-up checks: plain values in, errors out; and one collective run over a shared board."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

from shared_offload.errors import CheckpointError, ConfigError, PreflightError, Problems
from shared_offload.preflight import checks as preflight
from shared_offload.preflight import plan as plans
from shared_offload.preflight.checks import GIB, GpuReport, Preflight, RankReport
from shared_offload.ranks.board import Board
from shared_offload.ranks.facts import RankFacts
from shared_offload.weights.architecture import Architecture

I2V_14B = Architecture(
    model_type="i2v",
    dim=5120,
    ffn_dim=13824,
    freq_dim=256,
    in_dim=36,
    out_dim=16,
    num_heads=40,
    num_layers=40,
    text_len=512,
    eps=1e-6,
)


def gpu(uuid: str, name: str = "NVIDIA H200", free: int = 139 * GIB) -> GpuReport:
    return GpuReport(uuid=uuid, name=name, total=140 * GIB, free=free)


def report(rank: int, holds: GpuReport | None = None, **changes) -> RankReport:
    base = RankReport(
        rank=rank,
        hostname="a",
        host="a",
        local_world_size=2,
        visible=2,
        gpu=holds or gpu(f"GPU-{rank}"),
        files={},
        settings="",
        errors=(),
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("heads", "valid"),
    [(40, [1, 2, 4, 5, 8, 10, 20, 40]), (12, [1, 2, 3, 4, 6, 12])],
)
def test_heads_that_do_not_divide_list_what_would(heads, valid):
    (error,) = preflight.check_heads(heads, 7, 0)
    assert isinstance(error, ConfigError)
    assert error.facts["valid"] == valid
    assert error.hint == f"use {', '.join(map(str, valid[:-1]))} or {valid[-1]}"
    for size in range(1, heads + 1):
        assert (preflight.check_heads(heads, size, 0) == []) == (size in valid)


def test_valid_head_counts_stop_at_the_visible_gpus():
    (error,) = preflight.check_heads(40, 3, 8)
    assert error.facts["valid"] == [1, 2, 4, 5, 8]
    assert "8 visible GPUs" in error.hint


def test_the_number_of_ranks_is_the_product():
    assert preflight.check_world(8, 4, 2) == []
    (error,) = preflight.check_world(4, 4, 2)
    assert (error.facts["needed"], error.facts["found"]) == (8, 4)


def test_fewer_gpus_than_ranks_is_an_error_and_more_a_hint():
    few = [report(0, visible=1), report(1, gpu("GPU-0"), visible=1)]
    errors, _ = preflight.check_gpu_count(few, allow_shared_gpu=False)
    assert [(e.facts["needed"], e.facts["found"]) for e in errors] == [(2, 1)]
    assert preflight.check_gpu_count(few, allow_shared_gpu=True) == ([], [])
    more = [report(0, visible=8), report(1, visible=8)]
    errors, warnings = preflight.check_gpu_count(more, allow_shared_gpu=False)
    assert errors == []
    assert "8 GPUs are visible" in warnings[0]
    assert "2 are used" in warnings[0]


def test_two_ranks_on_one_gpu_of_one_host():
    same = gpu("GPU-x")
    errors, _ = preflight.check_gpu_count([report(0, same), report(1, same)], False)
    assert errors[0].facts["ranks"] == [0, 1]
    apart = [report(0, same), report(1, same, host="b")]
    assert preflight.check_gpu_count(apart, False)[0] == []
    assert preflight.check_gpu_count([report(0, same), report(1, same)], True)[0] == []


def test_a_host_without_a_gpu_is_named():
    bare = [report(0), report(1, visible=0, hostname="b", host="b")]
    errors, _ = preflight.check_gpu_count(bare, False)
    assert ["on b" in str(error) for error in errors] == [True]


def test_unequal_gpus_are_a_warning():
    assert preflight.check_gpu_kinds([report(0), report(1)]) == []
    (warning,) = preflight.check_gpu_kinds([report(0), report(1, gpu("GPU-1", "NVIDIA L4"))])
    assert "NVIDIA L4 (140 GiB): rank 1" in warning


def test_gpu_memory_counts_every_rank_that_shares_a_gpu():
    needs = {"block weights": 6 * GIB, "other weights": 2 * GIB}
    tight = gpu("GPU-x", free=10 * GIB)
    assert preflight.check_gpu_memory([report(0, tight)], needs) == []
    (error,) = preflight.check_gpu_memory([report(0, tight), report(1, tight)], needs)
    assert (error.facts["needed"], error.facts["found"]) == (16 * GIB, 10 * GIB)
    assert "block weights 6.0" in str(error)


def test_gpu_plan_of_the_14b_model():
    plan = plans.gpu_plan(
        I2V_14B,
        frames=81,
        height=480,
        width=832,
        block_weights=2 * 404_255_744,
        dtype_nbytes=2,
        seq_p_size=8,
        branches=2,
    )
    # Published: 241,340,224 parameters outside the blocks, 32,760 tokens for this size.
    assert plan["other weights"] == 2 * 241_340_224
    one = plans.gpu_plan(
        I2V_14B,
        frames=81,
        height=480,
        width=832,
        block_weights=0,
        dtype_nbytes=2,
        seq_p_size=1,
        branches=2,
    )
    assert one["activations or VAE"] == 2 * 32_760 * 5120 * 7
    assert plan["activations or VAE"] < one["activations or VAE"]
    assert plans.total_of(plan) == sum(plan.values())


def test_files_that_only_some_ranks_see():
    seen, blind = {"/w/a": (5, 1), "/w/b": (7, 1)}, {"/w/a": (5, 9), "/w/b": None}
    reports = [report(0, files=seen), report(1, files=blind, hostname="far")]
    (error,) = preflight.check_files(reports)
    assert error.facts["path"] == "/w/b"
    assert error.facts["ranks"] == [1]
    assert "far" in str(error)
    other = report(1, files={"/w/a": (6, 1), "/w/b": (7, 1)})
    (error,) = preflight.check_files([report(0, files=seen), other])
    assert error.facts["sizes"] == [5, 6]
    nowhere = {"/w/a": None}  # whoever wants the file says so; it is no difference between ranks
    assert preflight.check_files([report(0, files=nowhere), report(1, files=nowhere)]) == []


def test_a_rank_that_has_said_what_it_lacks_is_not_told_again():
    reports = [report(0, files={"/w/a": (5, 1)}), report(1, errors=("no file",))]
    assert preflight.check_files(reports) == []


def test_ranks_with_other_settings_are_named():
    assert preflight.check_settings([report(0), report(1)]) == []
    (error,) = preflight.check_settings([report(0), report(1), report(2, settings="x")])
    assert error.facts["ranks"] == [2]


def test_an_error_of_all_ranks_is_told_once_and_of_some_with_their_numbers():
    common, single = CheckpointError("gone", path="/x"), CheckpointError("short", path="/y")
    found = [[common.to_json()], [common.to_json(), single.to_json()]]
    first, second = preflight.merge_errors(found)
    assert (str(first), first.facts) == (str(common), {"path": "/x"})
    assert str(second) == "CheckpointError: short (on rank 1 only)"


def run_all(checks: list[Preflight]) -> list[list[str]]:
    with ThreadPoolExecutor(len(checks)) as pool:
        found = list(pool.map(lambda check: check.run(), checks))
    return [[str(error) for error in errors] for errors in found]


def test_every_rank_gets_the_same_list(tmp_path: Path):
    store = HashStore()
    only_here = tmp_path / "weights"
    only_here.write_bytes(b"w")
    checks = [
        Preflight(
            facts=RankFacts(rank=rank, world_size=3, local_rank=rank, local_world_size=3),
            board=Board(store, rank, 3, 20),
            device="cpu",
            allow_shared_gpu=False,
            seq_p_size=3,
            cfg_p_size=2,
            heads=40,
            files=[only_here],
            found=[Problems([CheckpointError("a"), CheckpointError("b")])] if rank == 1 else [],
        )
        for rank in range(3)
    ]
    lists = run_all(checks)
    assert lists[0] == lists[1] == lists[2]
    assert [line.split(":")[0] for line in lists[0]] == [
        "ConfigError",
        "ConfigError",
        "CheckpointError",
        "CheckpointError",
    ]
    assert "is 6, and 3 ranks were started" in lists[0][0]
    assert "must divide the model's heads (40)" in lists[0][1]
    assert lists[0][3] == "CheckpointError: b (on rank 1 only)"


def test_settings_that_only_some_ranks_refuse(tmp_path: Path):
    store = HashStore()
    mine = [[], [Problems([ConfigError("a", key="x"), ConfigError("b", key="y")])]]
    with ThreadPoolExecutor(2) as pool:
        boards = [Board(store, rank, 2, 10) for rank in range(2)]
        lists = list(pool.map(preflight.agree, boards, mine))
    for errors in lists:
        assert [error.what for error in errors] == ["a (on rank 1 only)", "b (on rank 1 only)"]


def test_reports_survive_json():
    original = report(1, files={"/w": (1, 2), "/x": None}, errors=("e",))
    back = RankReport.of(json.loads(json.dumps(dataclasses.asdict(original))))
    assert back.gpu == original.gpu
    assert json.dumps(dataclasses.asdict(back)) == json.dumps(dataclasses.asdict(original))


def test_asking_for_cuda_where_there_is_none_is_an_error(monkeypatch):
    monkeypatch.setattr(preflight, "visible_gpu_count", lambda: 0)
    monkeypatch.setattr(preflight, "host_gpus", lambda: None)
    monkeypatch.setattr(preflight, "visible_devices_variable", lambda: None)

    def check(device):
        board = Board(HashStore(), 0, 1, 5)
        facts = RankFacts()
        return Preflight(
            facts=facts,
            board=board,
            device=device,
            allow_shared_gpu=False,
            seq_p_size=1,
            cfg_p_size=1,
        ).run()

    assert [type(error) for error in check("cuda")] == [PreflightError]
    assert check("auto") == check("cpu") == []
