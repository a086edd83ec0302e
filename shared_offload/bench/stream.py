"""`shared-offload bench stream`: a DiT step with all weights on the GPU against a streamed one.

Both run in one process, in turns, on the same inputs, after a warm-up of each; figures are medians
of steps. Invariant: a ratio is printed only beside whether both gave equal bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor

from shared_offload.bench.arguments import (
    COMPILE,
    add_dit,
    add_json,
    add_part,
    at_least,
    choose_attention,
)
from shared_offload.bench.clock import (
    GB,
    device_name,
    first_device,
    gigabytes,
    publish,
    stopwatch,
    wait,
)
from shared_offload.bench.workload import Workload, filled_arena, lay_out
from shared_offload.errors import ConfigError
from shared_offload.model.attention import AttentionFn
from shared_offload.model.operations import Compile, select_operations
from shared_offload.streaming.source import Source, resident_from_host
from shared_offload.streaming.streamer import StreamedSource
from shared_offload.synth.sizes import architecture
from shared_offload.weights.architecture import Architecture
from shared_offload.weights.layout import Unit

WARM_UPS = 2  # kernels are chosen and compiled in the first; the second is like all others
STEPS_IN_A_ROW = 2
COPIES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured."""

    size: str
    task: str
    tokens: int
    share: int
    granularity: str
    dtype: str
    steps: int
    slots: int
    attention: str
    compiled: Compile


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Seconds of each step and bytes; peaks are of the whole step, weights and activations."""

    operations: str
    resident_seconds: list[float]
    streamed_seconds: list[float]
    equal: bool
    plain_copy_gb_per_second: float | None  # None without CUDA
    streamed_peak_nbytes: int | None
    resident_peak_nbytes: int | None
    streamed_weights_nbytes: int
    resident_weights_nbytes: int
    stream: dict[str, float | int]

    @property
    def ratio(self) -> float:
        """Streamed over resident, medians of steps."""
        return median(self.streamed_seconds) / median(self.resident_seconds)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this benchmark to those of `shared-offload bench`."""
    parser = subparsers.add_parser(
        "stream",
        help="a streamed step against one with all weights on the GPU",
        description="Measure one denoising step of the DiT (two branches, random weights) with "
        "resident and with streamed weights, in one run.",
    )
    add_dit(parser)
    add_part(parser)
    parser.add_argument("--tokens", type=int, default=32760, help="default: 480x832, 81 frames")
    parser.add_argument("--steps", type=int, default=3, help="measured of each kind")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON."""
    options = options_of(args, args.tokens)
    device = first_device()
    kernel = choose_attention(options.attention, device)
    result = measure(options, device, kernel.run)
    document = {
        "options": asdict(options),
        "device": device_name(device),
        "torch": torch.__version__,
        "attention": kernel.name,
        "ratio": result.ratio,
        **asdict(result),
    }
    publish(_table(options, device, kernel.name, result), document, args.json)
    return 0


def options_of(args: argparse.Namespace, tokens: int) -> Options:
    """Of a command with the options of `add_dit` and `add_part`."""
    return Options(
        size=args.size,
        task=args.task,
        tokens=tokens,
        share=args.share,
        granularity=args.granularity,
        dtype=args.dtype,
        steps=max(1, args.steps),
        slots=args.slots,
        attention=args.attention,
        compiled=COMPILE[args.compile],
    )


def measure(options: Options, device: torch.device, attention: AttentionFn) -> Result:
    """Run the benchmark. Peak memory: one arena on the host, all blocks and slots on the device."""
    arch = architecture_of(options)
    layout = lay_out(arch, fp8=options.dtype == "fp8")
    units = layout.units("phase" if options.granularity == "phase" else "block")
    workload, kind = make_workload(options, arch, device, attention)
    with filled_arena(layout, device) as host:
        streamed = StreamedSource(units, host, device, slots=options.slots)
        streamed_peak = warm_up(workload, streamed, device)
        resident = resident_from_host(units, host, device)
        resident_peak = warm_up(workload, resident, device)
        plain = _plain_copy(layout.units("block")[0], host, device)
        streamed.begin_run()
        times, equal = in_turns(workload, (resident, streamed), options.steps, device)
        streamed.end_run()
        result = Result(
            operations=kind,
            resident_seconds=times[0],
            streamed_seconds=times[1],
            equal=equal,
            plain_copy_gb_per_second=plain,
            streamed_peak_nbytes=streamed_peak,
            resident_peak_nbytes=resident_peak and resident_peak - streamed.device_nbytes,
            streamed_weights_nbytes=streamed.device_nbytes,
            resident_weights_nbytes=resident.device_nbytes,
            stream=streamed.metrics.summary(),
        )
        for source in (streamed, resident):
            source.close()
        return result


def make_workload(
    options: Options,
    arch: Architecture,
    device: torch.device,
    attention: AttentionFn,
    branches: int = 2,
) -> tuple[Workload, str]:
    """What a step computes, and the name of the operations that run in it."""
    operations, kind = select_operations(options.compiled, device, torch.bfloat16)
    workload = Workload(
        arch,
        device,
        tokens=options.tokens,
        share=options.share,
        attention=attention,
        operations=operations,
        branches=branches,
    )
    return workload, kind


def architecture_of(options: Options) -> Architecture:
    """Raises ConfigError where it cannot be shared, or there is nothing to do."""
    arch = architecture(cast("Any", options.size), cast("Any", options.task))
    if options.share < 1 or arch.num_heads % options.share:
        raise ConfigError(
            f"--share 1/{options.share} cannot split {arch.num_heads} heads",
            expected=f"a divisor of {arch.num_heads}",
        )
    at_least("--tokens", options.tokens)
    return arch


def in_turns(
    workload: Workload, sources: Sequence[Source], steps: int, device: torch.device
) -> tuple[list[list[float]], bool]:
    """Seconds of each step by source, and whether all steps of all sources gave equal bits.

    A turn is STEPS_IN_A_ROW steps without a pause, so that it crosses the end of a step as a run
    does, timed from the start of the first to the end of the last on the compute stream: copies for
    the step after them, which a run hides behind it, are not waited for.
    """
    times: list[list[float]] = [[] for _ in sources]
    equal, first = True, None
    for _ in range(steps):
        for seconds, source in zip(times, sources, strict=True):
            wait(device)
            elapsed = stopwatch(device)
            for _ in range(STEPS_IN_A_ROW):
                velocities = workload.step(source)
            seconds.append(elapsed() / STEPS_IN_A_ROW)
            out = torch.stack(list(velocities))
            first = out if first is None else first
            equal = equal and bool(out.isfinite().all()) and torch.equal(out, first)
    return times, equal


def warm_up(workload: Workload, source: Source, device: torch.device) -> int | None:
    """Peak bytes of device memory in a step that is not the first."""
    for _ in range(WARM_UPS):
        wait(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        workload.step(source)
    wait(device)
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _plain_copy(unit: Unit, host: Tensor, device: torch.device) -> float | None:
    """GB/s of copying one block over and over, with nothing else to do."""
    if device.type != "cuda":
        return None
    source = host[unit.offset : unit.offset + unit.nbytes]
    place = torch.empty(unit.nbytes, dtype=torch.uint8, device=device)
    place.copy_(source, non_blocking=True)
    wait(device)
    begun = time.perf_counter()
    for _ in range(COPIES):
        place.copy_(source, non_blocking=True)
    wait(device)
    return COPIES * unit.nbytes / (time.perf_counter() - begun) / GB


def _table(options: Options, device: torch.device, kernel: str, result: Result) -> Table:
    share = "" if options.share == 1 else f", 1/{options.share} of the work"
    table = Table(
        title=f"{options.size} {options.task}, {options.dtype}, {options.tokens} tokens{share}, "
        f"by {options.granularity}, {kernel}, {result.operations}, "
        f"{device_name(device)}"
    )
    table.add_column("")
    table.add_column("resident", justify="right")
    table.add_column("streamed", justify="right")
    resident, streamed = median(result.resident_seconds), median(result.streamed_seconds)
    table.add_row("step, median", f"{resident:.3f} s", f"{streamed:.3f} s ({result.ratio:.3f}x)")
    table.add_row(
        "weights on the device",
        gigabytes(result.resident_weights_nbytes),
        gigabytes(result.streamed_weights_nbytes),
    )
    table.add_row(
        "peak of a step",
        gigabytes(result.resident_peak_nbytes),
        gigabytes(result.streamed_peak_nbytes),
    )
    plain = result.plain_copy_gb_per_second
    table.add_row("one block over and over", "", "-" if plain is None else f"{plain:.1f} GB/s")
    copied = float(result.stream["copy_gb_per_second"])
    against = "" if plain is None else f" ({copied / plain:.3f}x)"
    table.add_row("speed while copying", "", f"{copied:.1f} GB/s{against}")
    table.add_row(
        "compute waited per step", "", f"{1e3 * result.stream['wait_seconds_per_step']:.1f} ms"
    )
    table.add_row("copy time hidden", "", f"{result.stream['hidden_copy_share']:.1%}")
    table.add_row("results equal, bit for bit", "", "yes" if result.equal else "NO")
    return table
