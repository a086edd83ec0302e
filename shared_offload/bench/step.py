"""`shared-offload bench step`: a DiT step against its matrix products and attention alone.

The floor is timed before and after the steps, because a GPU's clock falls as it warms; the mean
counts. Invariant: floor and steps have the same shapes, kernels and device, in one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from shared_offload.bench import stream
from shared_offload.bench.arguments import (
    add_dit,
    add_json,
    add_part,
    add_tokens,
    add_video,
    at_least,
    choose_attention,
    tokens_of,
)
from shared_offload.bench.clock import device_name, first_device, gigabytes, publish, seconds_of
from shared_offload.bench.floors import Part, Workbench, block_parts, time_parts
from shared_offload.bench.workload import Workload, filled_arena, lay_out
from shared_offload.model.attention import Attention
from shared_offload.streaming.source import Source, resident_from_host
from shared_offload.streaming.streamer import StreamedSource
from shared_offload.weights.architecture import Architecture
from shared_offload.weights.layout import BlockLayout, Unit

STREAMED, RESIDENT = "streamed", "resident"
WEIGHTS = {STREAMED: (STREAMED,), RESIDENT: (RESIDENT,), "both": (STREAMED, RESIDENT)}
KERNELS_SHOWN = 60
NAME_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured: a step of `stream`'s options, of one or two branches."""

    step: stream.Options
    weights: str
    branches: int
    profile: Path | None


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of each part over one whole step, each the mean of before and after."""

    parts: Sequence[Part]
    calls: int
    """Of each part in a step: blocks times branches."""
    before: Mapping[str, float]
    after: Mapping[str, float]

    def seconds(self, part: Part) -> float:
        """Of one part, in all blocks and branches."""
        return (self.before[part.name] + self.after[part.name]) / 2

    def teraflops(self, part: Part) -> float:
        """10^12 operations a second."""
        return part.flops * self.calls / self.seconds(part) / 1e12

    @property
    def total(self) -> float:
        """The floor of a step."""
        return sum(self.seconds(part) for part in self.parts)

    def document(self) -> dict[str, Any]:
        """JSON values."""
        rows = [
            {**asdict(p), "seconds": self.seconds(p), "teraflops": self.teraflops(p)}
            for p in self.parts
        ]
        kinds = {
            f"{kind}_seconds": sum(self.seconds(p) for p in self.parts if p.kind == kind)
            for kind in ("product", "attention")
        }
        ends = {
            "before_seconds": sum(self.before.values()),
            "after_seconds": sum(self.after.values()),
        }
        return {"seconds": self.total, **kinds, **ends, "calls": self.calls, "parts": rows}


@dataclass(frozen=True, slots=True)
class Timing:
    """Steps with weights of one kind."""

    seconds: list[float]
    peak_nbytes: int | None
    weights_nbytes: int
    stream: dict[str, float | int]

    @property
    def step(self) -> float:
        """The median."""
        return median(self.seconds)


@dataclass(frozen=True, slots=True)
class Result:
    """All of a run, by kind of weights."""

    operations: str
    first_step_seconds: float
    timings: Mapping[str, Timing]
    equal: bool
    floor: Floor

    def ratio(self, kind: str) -> float:
        """Step over floor."""
        return self.timings[kind].step / self.floor.total


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this measurement."""
    parser = subparsers.add_parser(
        "step",
        help="a DiT step against its matrix products and attention alone",
        description="Measure one denoising step of the DiT (random weights), and in the same run "
        "its matrix products and its attention alone, at the same shapes.",
    )
    add_dit(parser)
    add_part(parser)
    add_video(parser)
    add_tokens(parser)
    parser.add_argument("--no-cfg", action="store_true", help="one branch instead of two")
    parser.add_argument("--weights", choices=tuple(WEIGHTS), default=STREAMED)
    parser.add_argument("--steps", type=int, default=3, help="measured of each kind; default: 3")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="also write the kernels of one step here"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON."""
    device = first_device()
    options = _options(args)
    kernel = choose_attention(args.attention, device)
    result = measure(options, device, kernel)
    document = {
        "options": {**asdict(options), "profile": args.profile and str(args.profile)},
        "device": device_name(device),
        "torch": torch.__version__,
        "attention": kernel.name,
        "operations": result.operations,
        "first_step_seconds": result.first_step_seconds,
        "floor": result.floor.document(),
        "equal": result.equal,
        "ratio": {kind: result.ratio(kind) for kind in result.timings},
        **{kind: {**asdict(t), "step": t.step} for kind, t in result.timings.items()},
    }
    publish(_table(options, device, kernel.name, result), document, args.json)
    return 0


def _options(args: argparse.Namespace) -> Options:
    at_least("--steps", args.steps)
    at_least("--slots", args.slots, 2)
    step = stream.options_of(args, tokens_of(args))
    return Options(step, args.weights, 1 if args.no_cfg else 2, args.profile)


def measure(options: Options, device: torch.device, kernel: Attention) -> Result:
    """Floor, steps, floor. Peak memory as `stream`: an arena; on the device blocks and slots."""
    step = options.step
    arch = stream.architecture_of(step)
    layout = lay_out(arch, fp8=step.dtype == "fp8")
    before = _floor(options, arch, device, kernel)
    workload, kind = stream.make_workload(step, arch, device, kernel.run, options.branches)
    with (
        filled_arena(layout, device) as host,
        _sources(options, layout, host, device) as make,
    ):
        first, timings, equal = _steps(options, workload, make, device)
        after = _floor(options, arch, device, kernel)
    floor = Floor(
        block_parts(arch, step.tokens, step.share),
        arch.num_layers * options.branches,
        before,
        after,
    )
    return Result(kind, first, timings, equal, floor)


def _floor(
    options: Options, arch: Architecture, device: torch.device, kernel: Attention
) -> dict[str, float]:
    """Seconds of each part in a step: a branch is run, block after block."""
    parts = block_parts(arch, options.step.tokens, options.step.share)
    bench = Workbench(device, fp8=options.step.dtype == "fp8", attention=kernel.run)
    blocks = arch.num_layers
    found = time_parts(parts, bench, device, blocks)
    return {name: seconds * blocks * options.branches for name, seconds in found.items()}


Make = Callable[[str], Source]


@contextmanager
def _sources(
    options: Options, layout: BlockLayout, host: Tensor, device: torch.device
) -> Iterator[Make]:
    """Makes sources by their kind; all are closed at the end."""
    units: tuple[Unit, ...]
    units = layout.units("phase" if options.step.granularity == "phase" else "block")
    made: list[Source] = []

    def make(kind: str) -> Source:
        source: Source
        if kind == STREAMED:
            source = StreamedSource(units, host, device, slots=options.step.slots)
        else:
            source = resident_from_host(units, host, device)
        made.append(source)
        return source

    try:
        yield make
    finally:
        for source in made:
            source.close()


def _steps(
    options: Options, workload: Workload, make: Make, device: torch.device
) -> tuple[float, dict[str, Timing], bool]:
    """Seconds of the very first step, steps by kind, and whether all gave equal bits."""
    first: float | None = None
    sources: dict[str, Source] = {}
    peaks: dict[str, int | None] = {}
    for kind in WEIGHTS[options.weights]:
        held = sum(source.device_nbytes for source in sources.values())
        source = sources[kind] = make(kind)
        if first is None:
            first = seconds_of(partial(workload.step, source), device)
        peak = stream.warm_up(workload, source, device)
        peaks[kind] = peak and peak - held
    for source in sources.values():
        source.begin_run()
    times, equal = stream.in_turns(workload, list(sources.values()), options.step.steps, device)
    for source in sources.values():
        source.end_run()
    timings = {
        kind: Timing(seconds, peaks[kind], source.device_nbytes, source.metrics.summary())
        for seconds, (kind, source) in zip(times, sources.items(), strict=True)
    }
    if options.profile is not None:
        _profile(workload, next(iter(sources.values())), device, options.profile)
    assert first is not None  # there is a kind
    return first, timings, equal


def _profile(workload: Workload, source: Source, device: torch.device, path: Path) -> None:
    """Write the table of kernels of one step, the costliest first."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, acc_events=True) as profiler:  # else it warns
        seconds_of(partial(workload.step, source), device)
    table = profiler.key_averages().table(
        sort_by="self_device_time_total" if cuda else "self_cpu_time_total",
        row_limit=KERNELS_SHOWN,
        max_name_column_width=NAME_WIDTH,
    )
    path.write_text(table, encoding="utf-8")


def _table(options: Options, device: torch.device, kernel: str, result: Result) -> Table:
    step, floor = options.step, result.floor
    share = "" if step.share == 1 else f", 1/{step.share} of the work"
    branches = "two branches" if options.branches == 2 else "one branch"
    table = Table(
        title=f"{step.size} {step.task}, {step.dtype}, {step.tokens} tokens{share}, {branches}, "
        f"{kernel}, {result.operations}, {device_name(device)}"
    )
    table.add_column("")
    for name in ("shape", "TFLOP/s", "a step", "floor"):
        table.add_column(name, justify="right")
    for part in floor.parts:
        seconds = floor.seconds(part)
        table.add_row(
            part.name,
            " x ".join(map(str, part.shape)),
            f"{floor.teraflops(part):.0f}",
            f"{seconds:.4f} s",
            f"{seconds / floor.total:.1%}",
        )
    table.add_section()
    ends = " / ".join(f"{sum(side.values()):.3f}" for side in (floor.before, floor.after))
    table.add_row("floor", "", "", f"{floor.total:.4f} s", ends)
    for kind, timing in result.timings.items():
        _add_timing(table, kind, timing, result.ratio(kind), step.granularity)
    if len(result.timings) > 1:
        streamed, resident = (result.timings[kind].step for kind in WEIGHTS["both"])
        table.add_row("over resident", "", "", "", f"{streamed / resident:.3f}x")
    table.add_row("first step", "", "", f"{result.first_step_seconds:.1f} s")
    table.add_row("bits equal", "", "", "yes" if result.equal else "NO")
    return table


def _add_timing(table: Table, kind: str, timing: Timing, ratio: float, granularity: str) -> None:
    way = f" by {granularity}" if kind == STREAMED else ""
    table.add_row(f"{kind}{way}", "", "", f"{timing.step:.4f} s", f"{ratio:.3f}x")
    table.add_row("  peak", "", "", gigabytes(timing.peak_nbytes), "")
    table.add_row("  weights", "", "", gigabytes(timing.weights_nbytes), "")
    if timing.stream:
        waited = 1e3 * timing.stream["wait_seconds_per_step"]
        speed = timing.stream["copy_gb_per_second"]
        table.add_row("  compute waited", "", "", f"{waited:.1f} ms", "")
        table.add_row("  copied at", "", "", f"{speed:.1f} GB/s", "")
