"""A program on several ranks for the tests: it works in three stages, and one rank misbehaves.

driver.py WHAT RANK FOLDER, under torchrun or with its variables set.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist

from shared_offload.errors import CheckpointError
from shared_offload.ranks.group import Ranks
from shared_offload.ranks.run import run_ranks
from shared_offload.ranks.watch import Watch

torch.set_num_threads(1)
CPU = torch.device("cpu")


def program(watch: Watch) -> int:
    what, who, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    rank, world = watch.facts.rank, watch.facts.world_size
    mine = rank == who
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    watch.on_abort(lambda: (folder / f"cleaned{rank}").touch())
    try:
        with watch.stage("load"):
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


def early(what: str, mine: bool) -> None:
    if mine and what == "raise":
        raise CheckpointError("the file is short", hint="fetch it again", path="a.safetensors")
    if mine and what == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    if mine and what == "bug":
        raise KeyError("nobody foresaw this")
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
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "slow":
        time.sleep(6)
    if what == "wait":  # the others are in native code now, and this one is as well
        store = torch.distributed.HashStore()
        store.wait(["never"])


if __name__ == "__main__":
    sys.exit(run_ranks(program))
