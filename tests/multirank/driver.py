"""Whole pipelines on several ranks for the tests: driver.py JOB.json, as torchrun starts it.

A job names its `folder` and its `kind`, one of the functions below.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from shared_offload import infer
from shared_offload.config import Settings
from shared_offload.pipeline import arena_blocks, decoding, generate, runner
from shared_offload.pipeline.generate import Pipeline
from shared_offload.pipeline.on_demand import OnDemand
from shared_offload.pipeline.vae import Vae
from shared_offload.ranks.devices import choose_device
from shared_offload.ranks.facts import read_facts
from shared_offload.ranks.group import Ranks
from shared_offload.ranks.run import run_ranks
from shared_offload.ranks.watch import Watch
from shared_offload.report.progress import Progress
from tests.reference.garbage import freeze_imports
from tests.reference.processes import become

torch.set_num_threads(1)
Job = dict[str, Any]


def start(watch: Watch, job: Job) -> Ranks:
    cfg = job.get("cfg", 1)
    seq = watch.facts.world_size // cfg
    device = choose_device(watch.facts, job.get("device", "cpu"), allow_shared_gpu=True)
    mesh = {"seq_p_size": seq, "cfg_p_size": cfg}
    return Ranks.start(watch.facts, device, **mesh, timeout=120, watch=watch)


def videos(watch: Watch, job: Job) -> int:
    """A pipeline for each of the job's settings; what each rank made goes to a file."""
    made = {}
    with start(watch, job) as ranks:
        parallel = {"seq_p_size": ranks.seq_p_size, "cfg_p_size": ranks.cfg_p_size}
        for name, options in job["settings"].items():
            merged = {**options, "parallel": {**parallel, **options.get("parallel", {})}}
            settings = Settings.from_json_and_flags(merged, {})
            with counted_collectives() as counts, Pipeline(settings, ranks=ranks) as pipeline:
                video = pipeline.generate()
                arenas = pipeline.runner.describe().get("arenas", [])
            made[name] = (
                video.latents.cpu(),
                video.frames,
                counts,
                arenas,
            )
            ranks.barrier()
    torch.save(made, Path(job["folder"]) / f"made{watch.facts.rank}.pt")
    return 0


def requests(watch: Watch, job: Job) -> int:
    """One pipeline that makes a video for each of the job's requests; frames go to a file."""
    with start(watch, job) as ranks:
        parallel = {"parallel": {"seq_p_size": ranks.seq_p_size}}
        settings = Settings.from_json_and_flags({**job["settings"], **parallel}, {})
        with Pipeline(settings, ranks=ranks) as pipeline:
            frames = [pipeline.generate(**request).frames for request in job["requests"]]
        ranks.barrier()
    torch.save(frames, Path(job["folder"]) / f"frames{watch.facts.rank}.pt")
    return 0


class counted_collectives:  # noqa: N801
    """Counts calls of all_to_all_single of equal parts, which are the model's."""

    def __enter__(self) -> dict[str, int]:
        self.plain, counts = dist.all_to_all_single, {"all_to_all": 0}

        def counting(received, send, *sizes, **more):
            counts["all_to_all"] += not sizes
            return self.plain(received, send, *sizes, **more)

        dist.all_to_all_single = counting
        return counts

    def __exit__(self, *exc: object) -> None:
        dist.all_to_all_single = self.plain


def decodes(watch: Watch, job: Job) -> int:
    """Decodes of the same noise by all ranks; the first one keeps the frames.

    `to_uint8` is left out, so that strips can be compared in fp32; `seconds` is how long it takes.
    """

    def to_uint8(video: torch.Tensor) -> torch.Tensor:
        time.sleep(job.get("seconds", 0.0))
        return video

    decoding.to_uint8 = to_uint8
    made: dict[Any, Any] = {}
    with start(watch, job) as ranks:
        begun = time.monotonic(), time.process_time()
        for name, (tiling, sizes) in job["vaes"].items():

            def load(device: torch.device, tiling: bool = tiling) -> Vae:
                return Vae.load(Path(job["vae"]), device=device, dtype=torch.float32, tiling=tiling)

            vaes = OnDemand(load, ranks.device)
            for size in sizes:
                noise = torch.randn(16, 2, *size, generator=torch.Generator().manual_seed(3))
                latents = noise.to(ranks.device)
                silent = Progress(enabled=False)
                frames = decoding.decode(
                    vaes,
                    latents,
                    ranks,
                    silent,
                    together=job["together"],
                    limit=job.get("limit"),
                )
                made[name, *size] = frames
        made["seconds"] = time.monotonic() - begun[0]
        made["cpu seconds"] = time.process_time() - begun[1]
    torch.save(made, Path(job["folder"]) / f"made{watch.facts.rank}.pt")
    return 0


def memory(watch: Watch, job: Job) -> int:
    """A video, and what host memory each rank has gained when it is done: PSS, by kind."""
    with start(watch, job) as ranks:
        ranks.barrier()
        before = pss()
        settings = Settings.from_json_and_flags(job["settings"], {})
        with Pipeline(settings, ranks=ranks) as pipeline:
            pipeline.generate()
            ranks.barrier()
            gained = {kind: nbytes - before[kind] for kind, nbytes in pss().items()}
            made = ranks.gather_json(gained)
            ranks.barrier()
    (Path(job["folder"]) / "memory.json").write_text(json.dumps(made))
    return 0


def pss() -> dict[str, int]:
    """This process's share of its memory in bytes: of shared memory, and of what it made itself.

    Pages of files are left out: its share of a library's changes with every process on the host.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed and kept is chance
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kib = {row.split(":")[0]: int(row.split()[1]) for row in rows}
    return {"arena": 1024 * kib["Pss_Shmem"], "rest": 1024 * kib["Pss_Anon"]}


def kill() -> None:
    time.sleep(0.7)  # others read its stage every half second
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("injected")


def run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def nap() -> None:
    time.sleep(16)


def stick() -> None:
    """In native code for good."""
    dist.HashStore().wait(["never"])


FAULTS: dict[str, Callable[[], None]] = {f.__name__: f for f in (kill, fail, run_out, nap, stick)}


def misbehave(job: Job) -> None:
    """Let this rank do what the job says when it comes to the job's stage."""
    fault = FAULTS[job["fault"]]

    def before(holder: Any, name: str, call: int = 1) -> None:
        plain = getattr(holder, name)
        calls = []

        def wrapped(*args: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) == call:
                (Path(job["folder"]) / "there").touch()
                fault()
            return plain(*args, **more)

        setattr(holder, name, wrapped)

    if job["stage"] == "encode text":
        before(runner.Runner, "encode_texts")
    elif job["stage"] == "load DiT":  # the leader while it fills, a follower while it waits
        leads = read_facts().rank == 0
        before(arena_blocks, "fill_tensors" if leads else "open_arena")
    elif job["stage"] == "denoise":
        before(runner.Runner, "velocities", call=2)
    elif job["stage"] == "decode":  # in the middle of it
        before(Ranks, "swap_edges", call=5)
    else:
        before(generate, "write_video")


def mount(source: str, target: str) -> None:
    """Let this process, and no other, see `source` under the name `target`. Needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, bind, private = 0x20000, 4096, 1 << 18 | 1 << 14
    ways = ((None, b"/", private), (source.encode(), target.encode(), bind))
    assert libc.unshare(new_mounts) == 0
    for from_, to, flags in ways:
        assert libc.mount(from_, to, None, flags, None) == 0, os.strerror(ctypes.get_errno())


def main(job: Job) -> int:
    folder, rank = Path(job["folder"]), read_facts().rank
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    freeze_imports()
    os.environ.update(job.get("environment", {}))
    if "mount" in job and rank == 1:
        mount(*job["mount"])
    if job["kind"] == "command":
        if rank == job["who"]:
            misbehave(job)
        return infer.main(job["argv"])
    kinds = {"videos": videos, "requests": requests, "decodes": decodes, "memory": memory}
    return run_ranks(lambda watch: kinds[job["kind"]](watch, job))


if __name__ == "forked":
    become(globals()["GIVEN"])
if __name__ in ("__main__", "forked"):
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text())))
