"""A program on several ranks for the tests: it works in three stages, and one rank misbehaves.

driver.py WHAT RANK FOLDER, under torchrun or with its variables set.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist

from shared_offload.errors import CheckpointError
from shared_offload.ranks.devices import choose_device
from shared_offload.ranks.group import Ranks
from shared_offload.ranks.run import run_ranks
from shared_offload.ranks.watch import Watch
from tests.reference.processes import become

torch.set_num_threads(1)
CPU = torch.device("cpu")


def program(watch: Watch) -> int:
    what, who, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    rank, world = watch.facts.rank, watch.facts.world_size
    mine = rank == who
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    watch.on_abort(lambda: (folder / f"cleaned{rank}").touch())
    if what == "mesh":
        return mesh(watch, folder)
    if what.startswith("gpu"):
        return on_gpus(watch, what, mine, folder)
    try:
        with watch.stage("load"):
            if mine:
                meet(folder, world)
            early(what, mine)
            watch.board.barrier()
        with Ranks.start(watch.facts, CPU, seq_p_size=world, timeout=60, watch=watch) as ranks:
            with ranks.stage("step"):
                steps(ranks, what, mine, folder)
            with ranks.stage("decode"):
                if mine and what == "raise late":
                    raise CheckpointError("late")
                ranks.barrier()
    finally:
        (folder / f"unwound{rank}").touch()
    return 0


def meet(folder: Path, world: int) -> None:
    """Until all have begun: one that has not would look for a store that has gone with rank 0."""
    while not all((folder / f"pid{rank}").exists() for rank in range(world)):
        time.sleep(0.02)


def early(what: str, mine: bool) -> None:
    if mine and what == "raise":
        raise CheckpointError("the file is short", hint="fetch it again", path="a.safetensors")
    if mine and what == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    if mine and what == "bug":
        raise KeyError("nobody foresaw this")
    if what == "nap":  # the others are asleep when one fails
        if mine:
            raise CheckpointError("woken")
        time.sleep(100)
    if mine and what == "kill early":
        os.kill(os.getpid(), signal.SIGKILL)


def steps(ranks: Ranks, what: str, mine: bool, folder: Path) -> None:
    value = torch.ones(8)
    endless = what in ("kill", "wait")
    for n in range(10**9 if endless else 5):
        if n == 3:
            (folder / f"ready{ranks.rank}").touch()
        if mine and n == 4:
            misbehave(what)
        dist.all_reduce(value)


def misbehave(what: str) -> None:
    if what == "kill":
        time.sleep(0.7)  # others read its stage every half second
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "slow":
        time.sleep(6)
    if what == "wait":  # the others are in native code now, and this one is as well
        store = torch.distributed.HashStore()
        store.wait(["never"])


def mesh(watch: Watch, folder: Path) -> int:
    rank = watch.facts.rank
    ranks = Ranks.start(watch.facts, CPU, seq_p_size=2, cfg_p_size=2, timeout=30, watch=watch)
    sums = []
    for group in (ranks.seq_group, ranks.cfg_group):
        value = torch.tensor([rank])
        dist.all_reduce(value, group=group)
        sums.append(int(value))
    given = torch.tensor([2.0, -1.5], dtype=torch.bfloat16) if rank == 2 else None
    tensor = ranks.broadcast_tensor(given, root=2)
    result = {
        "place": [ranks.cfg_rank, ranks.seq_rank],
        "seq_sum": sums[0],
        "cfg_sum": sums[1],
        "gathered": ranks.gather_json(10 * rank),
        "tensor": [tensor.tolist(), str(tensor.dtype)],
        "pids": [member.pid for member in ranks.members],
    }
    ranks.close()
    ranks.close()
    result["closed_twice"] = not dist.is_initialized()
    (folder / f"mesh{rank}").write_text(json.dumps(result))
    return 0


def on_gpus(watch: Watch, what: str, mine: bool, folder: Path) -> int:
    """`gpu`: a sum and a broadcast. `gpu kill`: one is killed while others wait on their GPU."""
    rank, world = watch.facts.rank, watch.facts.world_size
    device = choose_device(watch.facts, "cuda", allow_shared_gpu=True)
    with (
        watch.stage("step"),
        Ranks.start(watch.facts, device, seq_p_size=world, timeout=60, watch=watch) as ranks,
    ):
        value = torch.full((3,), float(rank), device=device)
        dist.all_reduce(value, group=ranks.seq_group)
        tensor = ranks.broadcast_tensor(torch.arange(4) if rank == 0 else None)
        result = [ranks.backend, value.tolist(), tensor.tolist(), str(tensor.device)]
        (folder / f"gpu{rank}").write_text(json.dumps(result))
        (folder / f"ready{rank}").touch()
        if what == "gpu kill":
            time.sleep(1)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(value)
            torch.cuda.synchronize()
    return 0


if __name__ == "forked":
    become(globals()["GIVEN"])
if __name__ in ("__main__", "forked"):
    sys.exit(run_ranks(program))
