"""`shared-offload bench modes`: one video in each place that weights can live, side by side.

All modes run in the same processes (one, or as many as torchrun started), one after another, from
the same files. Invariant: latents are compared bit for bit, and frames too, with those of the first
mode that ran; on a lone rank a mode that fails has a row that says so.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from shared_offload.bench.arguments import add_json, add_model, add_video, at_least, video_size
from shared_offload.bench.clock import GB, device_name, host_nbytes, publish
from shared_offload.bench.end_to_end import NEGATIVE, PROMPT, SCHEME, draw_picture
from shared_offload.bench.folder import add_folder_flag, model_folder, video_parts
from shared_offload.config import Settings
from shared_offload.errors import ConfigError, OffloadError
from shared_offload.pipeline.generate import Pipeline, Video
from shared_offload.ranks.devices import choose_device
from shared_offload.ranks.facts import read_facts
from shared_offload.ranks.group import Ranks
from shared_offload.ranks.run import run_ranks
from shared_offload.ranks.watch import Watch
from shared_offload.report.progress import Progress, Task, WorkUnit
from shared_offload.synth.sizes import SIZES

PRIVATE = {"cpu_offload": True}
OWN = {"shared_cpu_weights": True, "weight_server": "off"}
HOST = {**PRIVATE, **OWN, "shared_cpu_weight_scope": "host"}
DISK = {**PRIVATE, "lazy_load": True}
PHASE = {"offload_granularity": "phase"}
MODES: Mapping[str, Mapping[str, Any]] = {
    "resident": {},
    "host": HOST,
    "numa": {**HOST, "shared_cpu_weight_scope": "numa"},
    "private": PRIVATE,
    "half": HOST,  # and half of the blocks stay on the GPU
    "phase": {**HOST, **PHASE},
    "model": {**HOST, "offload_granularity": "model"},
    "disk": DISK,
    "disk-phase": {**DISK, **PHASE},
    "one-decodes": HOST,  # the first rank alone
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One mode's figures, on the first rank where ranks differ."""

    mode: str
    step_seconds: float
    """The median of the steps after the first, between their ends."""
    load_seconds: float
    decode_seconds: float
    peak_nbytes: int | None
    host_nbytes: int
    """Of all ranks, by their shares of what they share (PSS), gained since the first mode began."""
    latents_equal: bool
    frames_off: int
    """Levels of 255, at most."""
    streaming: Mapping[str, Any]


class Steps(Progress):
    """Shows progress, and keeps when each step of denoising ended."""

    def __init__(self, *, enabled: bool) -> None:
        super().__init__(enabled=enabled)
        self.ends: list[float] = []

    @contextmanager
    def task(self, title: str, total: float | None, unit: WorkUnit) -> Iterator[Task]:
        """As ever."""
        with super().task(title, total, unit) as task:
            if unit == "step":
                tell = task.advance

                def advance(n: float = 1) -> None:
                    self.ends.append(time.perf_counter())
                    tell(n)

                task.advance = advance  # type: ignore[method-assign]
            yield task

    def median(self) -> float:
        """Seconds of a step, the first one left out: it loads kernels, and fills what streams."""
        return median(after - before for before, after in pairwise(self.ends))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this measurement."""
    parser = subparsers.add_parser(
        "modes",
        help="a video in each of the places that weights can live",
        description="Make one short video in each mode and compare times, memory and results. For "
        "several GPUs: python -m torch.distributed.run --standalone --nproc_per_node=N "
        "-m shared_offload.cli bench modes ...",
    )
    parser.add_argument(
        "modes", nargs="*", metavar="MODE", help=f"some of: {' '.join(MODES)} (default: all)"
    )
    add_model(parser)
    add_video(parser)
    parser.add_argument("--steps", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--allow_shared_gpu", action="store_true", help="several ranks on one GPU")
    add_folder_flag(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the videos, print the table, write the JSON; 1 where results differ or modes failed."""
    at_least("--steps", args.steps, 2)
    video_size(args.frames, args.height, args.width)
    args.modes = args.modes or list(MODES)
    if odd := [mode for mode in args.modes if mode not in MODES]:
        raise ConfigError(f"no mode {odd[0]!r}", expected=f"one of {', '.join(MODES)}")

    def program(watch: Watch) -> int:
        facts = read_facts()
        if facts.world_size > 1 and args.model_path is None:
            raise ConfigError(
                "no --model_path",
                expected="a folder that all ranks read",
                hint=f"shared-offload synth --size {args.size} --task {args.task} --out FOLDER",
            )
        device = choose_device(facts, "auto", args.allow_shared_gpu)
        size = {"seq_p_size": facts.world_size}
        with Ranks.start(facts, device, **size, watch=watch) as ranks:
            failed = _measure(args, ranks)
            ranks.barrier()
        return int(failed)

    return run_ranks(program)


def _measure(args: argparse.Namespace, ranks: Ranks) -> bool:
    """Collective. All modes; whether anything is not as it should be."""
    parts = video_parts(args.task, "dit-fp8")
    results: list[Result] = []
    failures: dict[str, str] = {}
    first: Video | None = None
    empty = _host_nbytes(ranks)
    with (
        model_folder(args.model_path, args.size, args.task, parts) as folder,
        tempfile.TemporaryDirectory(prefix="shared_offload-bench-") as place,
    ):
        picture = Path(place) / "first_frame.png"
        draw_picture(picture, args.height, args.width)
        for mode in args.modes:
            try:
                settings = _settings(args, mode, folder, picture, ranks.world_size)
                video, result = _one(mode, settings, ranks, first, empty)
            except OffloadError as error:
                if ranks.world_size > 1:  # others may be amid a collective: the run ends
                    raise
                failures[mode] = str(error).splitlines()[0]
                continue
            first = video if first is None else first
            results.append(result)
    if ranks.is_first:
        figures = [asdict(result) for result in results]
        document = {"ranks": ranks.world_size, "results": figures, "failures": failures}
        publish(_table(results, failures, ranks), document, args.json)
    return bool(failures) or not all(result.latents_equal for result in results)


def _settings(
    args: argparse.Namespace, mode: str, folder: Path, picture: Path, ranks: int
) -> Settings:
    options: dict[str, Any] = {
        "task": args.task,
        "model_path": str(folder),
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE,
        "enable_cfg": True,
        "dit_quantized": True,
        "dit_quant_scheme": SCHEME,
        "size": [args.height, args.width],
        "num_frames": args.frames,
        "infer_steps": args.steps,
        "parallel": {"seq_p_size": ranks, "vae_parallel": mode != "one-decodes"},
        "allow_shared_gpu": args.allow_shared_gpu,
        **MODES[mode],
    }
    if args.task == "i2v":
        options["image_path"] = str(picture)
    if mode == "half":
        options["resident_blocks"] = SIZES[args.size].num_layers // 2
    return Settings.from_json_and_flags(options, {})


def _one(
    mode: str, settings: Settings, ranks: Ranks, first: Video | None, empty: int
) -> tuple[Video, Result]:
    """Collective. One mode, with nothing left of the one before."""
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(ranks.device)
    progress = Steps(enabled=ranks.is_first)
    progress.note(f"mode {mode}")
    with Pipeline(settings, ranks=ranks, progress=progress) as pipeline:
        video = pipeline.generate()
        host = _host_nbytes(ranks)
        ranks.barrier()
    facts = video.metadata
    equal = first is None or torch.equal(video.latents, first.latents)
    result = Result(
        mode=mode,
        step_seconds=progress.median(),
        load_seconds=facts["stage_seconds"]["load DiT"],
        decode_seconds=facts["stage_seconds"]["decode"],
        peak_nbytes=facts.get("peak_gpu_bytes"),
        host_nbytes=host - empty,
        latents_equal=all(ranks.gather_json(equal)),
        frames_off=0 if first is None else _difference(video.frames, first.frames),
        streaming=facts.get("streaming", {}),
    )
    return video, result


def _host_nbytes(ranks: Ranks) -> int:
    """Collective. PSS of all ranks: what several map counts once in all."""
    return sum(ranks.gather_json(host_nbytes()))


def _difference(frames: Tensor | None, wanted: Tensor | None) -> int:
    if frames is None or wanted is None:
        return 0
    return int((frames.short() - wanted.short()).abs().max())


def _table(results: Sequence[Result], failures: Mapping[str, str], ranks: Ranks) -> Table:
    where = f"{ranks.world_size} x {device_name(ranks.device)}"
    table = Table(title=f"one video in each mode, {where}")
    names = ("step s", "ratio", "load s", "decode s", "GPU GB", "host GB", "copied GB")
    table.add_column("mode", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("results", no_wrap=True)
    least = min((result.step_seconds for result in results), default=1.0)
    for result in results:
        copied = result.streaming.get("copied_bytes_per_step")
        table.add_row(
            result.mode,
            f"{result.step_seconds:.3f}",
            f"{result.step_seconds / least:.3f}",
            f"{result.load_seconds:.1f}",
            f"{result.decode_seconds:.1f}",
            *map(_gigabytes, (result.peak_nbytes, result.host_nbytes, copied)),
            _results(result),
        )
    for mode, problem in failures.items():
        table.add_row(mode, *[""] * len(names), "failed")
        table.caption = f"{table.caption or ''}{mode}: {problem}\n"
    return table


def _gigabytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / GB:.2f}"


def _results(result: Result) -> str:
    """Of latents; where frames differ, by how many levels of 255."""
    if not result.latents_equal:
        return "DIFFER"
    return f"equal, +-{result.frames_off}" if result.frames_off else "equal"
