"""How fast block weights get from files into an arena, beside what `cat` reads from the same files.

Rounds alternate, so that both see the machine in the same state; medians are told. A fresh segment
is created for every round, so first touch of its pages is in the figure, as in a run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from shared_offload.bench.arguments import add_json
from shared_offload.bench.clock import publish
from shared_offload.errors import PreflightError
from shared_offload.memory.board import LocalBoard
from shared_offload.memory.domain import Scope
from shared_offload.memory.lifecycle import open_arena
from shared_offload.memory.request import ArenaRequest, Party
from shared_offload.ranks.facts import member_facts
from shared_offload.weights.architecture import read_architecture
from shared_offload.weights.cast import fill_tensors
from shared_offload.weights.checkpoint import Checkpoint, open_checkpoint
from shared_offload.weights.reader import block_pieces

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Medians, in GB/s of file bytes."""

    cache: str
    threads: int
    cat: float
    fill: float
    huge_share: float
    """Of the arena in 2 MiB pages."""

    @property
    def ratio(self) -> float:
        """Of what `cat` reaches."""
        return self.fill / self.cat


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this measurement."""
    parser = subparsers.add_parser(
        "load",
        help="files to arena, beside cat",
        description="Read the block weights of a checkpoint into an arena, and with cat to "
        "/dev/null, in turns.",
    )
    parser.add_argument("--model_path", type=Path, required=True, help="FP8 or unquantised folder")
    parser.add_argument("--threads", type=int, nargs="+", default=[8], help="default: 8")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--cold", action="store_true", help="also from disk (drops caches; root)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print a table."""
    if args.cold and not os.access(DROP_CACHES, os.W_OK):
        raise PreflightError(
            "--cold must empty the page cache, which this user may not",
            hint="run as root, or leave --cold out",
        )
    arch = read_architecture(args.model_path)
    quantised = any(args.model_path.glob("block_*.safetensors"))
    checkpoint = open_checkpoint(args.model_path, arch, quantised=quantised, task=arch.model_type)
    results = [
        _measure(checkpoint, threads, args.rounds, cold=cold)
        for cold in ((False, True) if args.cold else (False,))
        for threads in args.threads
    ]
    rows = [{**asdict(result), "ratio": result.ratio} for result in results]
    publish(_table(results, checkpoint), rows, args.json)
    return 0


def _measure(checkpoint: Checkpoint, threads: int, rounds: int, *, cold: bool) -> Result:
    if not cold:
        _cat(checkpoint.files)  # into the page cache
    cats: list[float] = []
    fills: list[float] = []
    huge = 0.0
    for _ in range(rounds):
        _prepare(cold)
        cats.append(_cat_rate(checkpoint))
        _prepare(cold)
        rate, huge = _fill_rate(checkpoint, threads)
        fills.append(rate)
    return Result(
        cache="cold" if cold else "page cache",
        threads=threads,
        cat=statistics.median(cats),
        fill=statistics.median(fills),
        huge_share=huge,
    )


def _prepare(cold: bool) -> None:
    if cold:
        os.sync()
        DROP_CACHES.write_text("3")


def _cat(files: Sequence[Path]) -> float:
    started = time.perf_counter()
    with Path(os.devnull).open("wb") as nothing:
        subprocess.run(["cat", *map(str, files)], stdout=nothing, check=True)
    return time.perf_counter() - started


def _cat_rate(checkpoint: Checkpoint) -> float:
    nbytes = sum(path.stat().st_size for path in checkpoint.files)
    return nbytes / _cat(checkpoint.files) / 1e9


def _fill_rate(checkpoint: Checkpoint, threads: int) -> tuple[float, float]:
    """GB/s of file bytes, and the share of 2 MiB pages."""
    layout = checkpoint.layout("BF16")
    pieces = block_pieces(checkpoint, layout)

    def fill(
        dest: memoryview,
        on_bytes: Callable[[int], None],
        cpus: frozenset[int] | None,
        stop: threading.Event,
    ) -> None:
        fill_tensors(pieces, dest, threads=threads, cpus=cpus, on_bytes=on_bytes, stop=stop)

    request = ArenaRequest(
        nbytes=layout.arena_nbytes,
        fingerprint=layout.fingerprint(),
        scope=Scope.RANK,
        register_chunk_nbytes=layout.arena_nbytes,
    )
    party = Party(member_facts(0), None, 1, LocalBoard())
    with open_arena(request, party, fill) as arena:
        report = arena.reports()[0]
    nbytes = sum(piece.nbytes for piece in pieces)
    return nbytes / report.fill_seconds / 1e9, report.huge_nbytes / report.nbytes


def _table(results: Sequence[Result], checkpoint: Checkpoint) -> Table:
    nbytes = sum(path.stat().st_size for path in checkpoint.files)
    table = Table(title=f"{nbytes / 1e9:.2f} GB in {len(checkpoint.files)} files")
    for name in ("from", "threads", "cat to /dev/null", "into an arena", "ratio", "2 MiB pages"):
        table.add_column(name)
    for result in results:
        table.add_row(
            result.cache,
            str(result.threads),
            f"{result.cat:.2f} GB/s",
            f"{result.fill:.2f} GB/s",
            f"{result.ratio:.2f}",
            f"{result.huge_share:.0%}",
        )
    return table
