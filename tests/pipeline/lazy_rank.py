"""One rank with blocks that stay in their files: lazy_rank.py JOB.json, as torchrun starts it.

A job has a `folder`, `cases` (options by name), and perhaps a `fault` of one rank. What each rank
found is written to made<rank>.pt. With `slow`, every read takes that many seconds, and ready<rank>
appears when the second step of a case begins.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shared_offload.config import Settings
from shared_offload.pipeline import disk_blocks
from shared_offload.pipeline.generate import Pipeline
from shared_offload.ranks.group import Ranks
from shared_offload.ranks.run import run_ranks
from shared_offload.ranks.watch import Watch
from shared_offload.streaming.disk import DiskReader
from shared_offload.weights import files as files_module
from tests.reference.garbage import freeze_imports
from tests.reference.processes import become

CPU = torch.device("cpu")
PREADV = os.preadv


def characters_read() -> int:
    """Bytes that this process, with all its threads, has got from read calls so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Bytes that the kernel says were read from files of weights while the ring was open."""
    total = [0]

    def counting(descriptor: int, *rest: Any) -> int:
        count = PREADV(descriptor, *rest)
        total[0] += count
        return count

    files_module.os.preadv = counting
    try:
        yield total
    finally:
        files_module.os.preadv = PREADV


def run_case(options: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    settings = Settings.from_json_and_flags(options, {})
    with Pipeline(settings, ranks=ranks) as pipeline:
        first = pipeline.generate()
        before = characters_read()
        with counted_reads() as counted:
            again = pipeline.generate()
        return {
            "latents": first.latents,
            "same": torch.equal(first.latents, again.latents),
            "streaming": [first.metadata["streaming"], again.metadata["streaming"]],
            "arenas": again.metadata["arenas"],
            "rchar": characters_read() - before,
            "preadv": counted[0],
        }


def resident(options: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    with Pipeline(Settings.from_json_and_flags(options, {}), ranks=ranks) as pipeline:
        return {"latents": pipeline.generate().latents}


def slow_down(seconds: float, folder: Path, rank: int, fault: str) -> None:
    """Reads of the disk threads take their time; some of them fail."""
    calls = [0]
    begin = DiskReader.begin_run
    began = []

    def begin_run(self, *arguments: Any) -> None:
        began.append(True)
        begin(self, *arguments)

    def late(descriptor: int, *rest: Any) -> int:
        if began:
            calls[0] += 1
            time.sleep(seconds)
            if calls[0] == 60 and fault == "io":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return PREADV(descriptor, *rest)

    DiskReader.begin_run = begin_run
    files_module.os.preadv = late
    if fault == "thread":
        cast = disk_blocks.cast_bytes

        def dies(*arguments: Any) -> None:
            if calls[0] > 60:
                raise KeyError("nobody foresaw this")
            cast(*arguments)

        disk_blocks.cast_bytes = dies
    take = disk_blocks.RingUnits.take

    def watched(self, use: int, **how: Any) -> torch.Tensor | None:
        if use == 8:  # of the second step
            (folder / f"ready{rank}").touch()
        return take(self, use, **how)

    disk_blocks.RingUnits.take = watched


def program(watch: Watch) -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    folder, rank = Path(job["folder"]), watch.facts.rank
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    freeze_imports()
    if job.get("slow"):
        slow_down(job["slow"], folder, rank, job.get("fault", ""))
    made, cfg = {}, job.get("cfg", 1)
    seq = watch.facts.world_size // cfg
    parallel = {"parallel": {"seq_p_size": seq, "cfg_p_size": cfg}}
    sizes = {"seq_p_size": seq, "cfg_p_size": cfg}
    with Ranks.start(watch.facts, CPU, **sizes, timeout=120, watch=watch) as ranks:
        for name, options in job["cases"].items():
            run = run_case if options.get("lazy_load") else resident
            made[name] = run({**options, **parallel}, ranks)
        ranks.barrier()
    torch.save(made, folder / f"made{rank}.pt")
    return 0


if __name__ == "forked":
    become(globals()["GIVEN"])
if __name__ in ("__main__", "forked"):
    sys.exit(run_ranks(program))
