"""`shared-offload bench accuracy`: how far a step is from exact arithmetic on the same weights.

A step of one branch is computed in fp32 from the values that the FP8 weights stand for, and then as
a run computes it, with one thing changed at a time. A figure is the ratio of signal to error over
the velocity, 20 log10(|v| / |v' - v|) in dB: what rounds more than before lowers it, a mere other
order of sums does not. Invariant: weights and inputs are the same bits in every way.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor

from shared_offload.bench.arguments import (
    add_json,
    add_model,
    add_tokens,
    add_video,
    at_least,
    choose_attention,
    tokens_of,
)
from shared_offload.bench.clock import device_name, first_device, publish, wait
from shared_offload.bench.workload import Workload, filled_arena, lay_out
from shared_offload.model.attention import ATTENTION_NAMES, AUTO, TORCH, Attention, sdpa
from shared_offload.model.operations import PLAIN, Operations, select_operations
from shared_offload.report.progress import Progress
from shared_offload.streaming.streamer import StreamedSource
from shared_offload.synth.sizes import architecture
from shared_offload.weights.architecture import Architecture
from shared_offload.weights.fp8 import FP8_DTYPE
from shared_offload.weights.layout import SCALE, Unit, WeightSource

MOST_LOST_DB = 0.2
"""What a kernel that rounds as another does may differ from it."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute a step."""

    fp8: bool
    """Or weights are dequantised and rounded to `dtype`, and no product is quantised."""
    operations: Operations
    attention: Attention
    dtype: torch.dtype = torch.bfloat16

    @property
    def names(self) -> tuple[str, str, str]:
        """Of weights, operations and attention, as a table shows them."""
        operations = "plain" if self.operations is PLAIN else "fused"
        return "FP8" if self.fp8 else "bf16", operations, self.attention.name


EXACT = Way(False, PLAIN, Attention("sdpa", sdpa), torch.float32)


@dataclass(frozen=True, slots=True)
class Figure:
    """How exact a way is."""

    weights: str
    operations: str
    attention: str
    sqnr_db: float
    gained_db: float
    """Over the first way of the same weights: plain operations and torch's attention."""


class Dequantised:
    """A source's units with the values, in `dtype`, that their FP8 weights stand for."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self._source = source
        self._dtype = dtype

    @property
    def units(self) -> Sequence[Unit]:
        """Those of the source."""
        return self._source.units

    @contextmanager
    def borrow(self, unit: Unit) -> Iterator[Mapping[str, Tensor]]:
        """No scale is among them."""
        with self._source.borrow(unit) as w:
            yield {
                name: self._real(tensor, w[name + SCALE]) if tensor.dtype == FP8_DTYPE else tensor
                for name, tensor in w.items()
                if not name.endswith(SCALE)
            }

    def _real(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.float().mul_(scale).to(self._dtype)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this measurement."""
    parser = subparsers.add_parser(
        "accuracy",
        help="a DiT step against fp32 arithmetic on the same weights",
        description="Compute one step of one branch of the DiT (random FP8 weights) in fp32 and "
        "with each kind of kernels, and print how far each is from fp32.",
    )
    add_model(parser)
    add_video(parser)
    add_tokens(parser)
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=ATTENTION_NAMES,
        default=[AUTO],
        metavar="NAME",
        help=f"kernels to measure beside torch's: {', '.join(ATTENTION_NAMES)}",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON."""
    tokens, device = tokens_of(args), first_device()
    at_least("--tokens", tokens)
    ways = find_ways(args.attention, device)
    figures = measure(args.size, args.task, tokens, ways, device)
    document = {
        "size": args.size,
        "task": args.task,
        "tokens": tokens,
        "device": device_name(device),
        "torch": torch.__version__,
        "figures": [asdict(figure) for figure in figures],
    }
    title = f"{args.size} {args.task}, {tokens} tokens, one branch, {device_name(device)}"
    publish(_table(title, figures), document, args.json)
    return 0


def find_ways(names: Sequence[str], device: torch.device) -> list[Way]:
    """What runs here: both kinds of weights, then each kernel of attention, then fused kernels."""
    kernels: dict[str, Attention] = {}
    for name in (TORCH, *names):
        kernel = choose_attention(name, device)
        kernels.setdefault(kernel.name, kernel)
    first, *_ = kernels.values()
    ways = [Way(False, PLAIN, first)]
    ways += [Way(True, PLAIN, kernel) for kernel in kernels.values()]
    operations, _ = select_operations(AUTO, device, torch.bfloat16)
    if operations is not PLAIN:
        ways += [Way(True, operations, kernel) for kernel in kernels.values()]
    return ways


def measure(
    size: str, task: str, tokens: int, ways: Sequence[Way], device: torch.device
) -> list[Figure]:
    """A figure for each way, in their order. Peak memory: an arena on the host; on the device two
    slots, a block in fp32 and a step's activations in fp32.
    """
    arch = architecture(cast("Any", size), cast("Any", task))
    layout = lay_out(arch, fp8=True)
    found: list[float] = []
    with (
        Progress().task("steps", 1 + len(ways), "step") as task_shown,
        filled_arena(layout, device) as host,
    ):
        source = StreamedSource(layout.units("block"), host, device, slots=2)
        try:
            exact = _velocity(arch, tokens, EXACT, source, device)
            task_shown.advance()
            for way in ways:
                found.append(sqnr_db(_velocity(arch, tokens, way, source, device), exact))
                task_shown.advance()
        finally:
            wait(device)
            source.close()
    return _figures(ways, found)


def _velocity(
    arch: Architecture, tokens: int, way: Way, source: StreamedSource, device: torch.device
) -> Tensor:
    workload = Workload(
        arch,
        device,
        tokens=tokens,
        share=1,
        attention=way.attention.run,
        operations=way.operations,
        branches=1,
        dtype=way.dtype,
    )
    source.begin_run(1)
    (velocity,) = workload.step(source if way.fp8 else Dequantised(source, way.dtype))
    source.end_run()
    return velocity


def sqnr_db(found: Tensor, exact: Tensor) -> float:
    """Signal to error, in dB; sums are float64."""
    error = found.double() - exact.double()
    return float(20 * torch.log10(exact.double().norm() / error.norm()))


def _figures(ways: Sequence[Way], found: Sequence[float]) -> list[Figure]:
    first: dict[bool, float] = {}
    return [
        Figure(*way.names, decibels, decibels - first.setdefault(way.fp8, decibels))
        for way, decibels in zip(ways, found, strict=True)
    ]


def _table(title: str, figures: Sequence[Figure]) -> Table:
    table = Table(title=title)
    for name in ("weights", "operations", "attention"):
        table.add_column(name)
    for name in ("signal to error", "to the first of its weights"):
        table.add_column(name, justify="right")
    for figure in figures:
        lost = "" if figure.gained_db >= -MOST_LOST_DB else "  (more is rounded)"
        table.add_row(
            figure.weights,
            figure.operations,
            figure.attention,
            f"{figure.sqnr_db:.2f} dB",
            f"{figure.gained_db:+.2f} dB{lost}",
        )
    return table
