"""The command: choose modes, start a process per family, print and write what comes back."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from shared_offload.synth.sizes import IN_DIM, SIZES
from tools.side_by_side.modes import MODES, Mode, Row, usual_modes
from tools.side_by_side.worker import Settings, run

_GB = 1e9
_FILE_WIDTH = 120  # where there is no terminal that has one
_EXIT_SECONDS = 30.0  # unpinning and freeing


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if something was measured."""
    args = _parser().parse_args(arguments)
    # What `timeout` sends must end the worker too: it would go on computing on the GPU.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    begun = time.monotonic()
    settings = Settings(
        size=args.size,
        task=args.task,
        tokens=args.tokens,
        steps=max(1, args.steps),
        attention=args.attention,
        deadline=None if args.budget_seconds is None else begun + args.budget_seconds,
    )
    modes = args.modes or usual_modes(compiled=args.compile)
    document = {**vars(args), **_versions(), "modes": [mode.name for mode in modes]}
    rows: list[Row] = []
    progress = Console(stderr=True)
    with closing(_rows(modes, settings)) as arriving:
        for row in arriving:
            rows.append(row)
            seconds = time.monotonic() - begun
            line = f"{seconds:6.1f} s  {row.mode}: {_said(row)}"
            progress.print(line, markup=False, highlight=False, soft_wrap=True)
            if args.json:  # after each row: a run that is stopped has given what it measured
                _write(args.json, document, rows, seconds)
    title = f"{args.size} {args.task}, {args.tokens} tokens, two branches, {document['device']}"
    _print(title, rows)
    return 0 if any(row.status == "measured" for row in rows) else 1


def _print(title: str, rows: Sequence[Row]) -> None:
    """The table, and the notes under it."""
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(_table(title, rows))
    for row in rows:
        if row.note:
            console.print(f"{row.mode}: {row.note}", markup=False, highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_diffusers.py",
        description="One denoising step (two branches) of diffusers' Wan DiT in each of its ways "
        "to place weights, beside shared_offload's, on the same device in one run.",
        epilog=f"modes: {', '.join(mode.name for mode in MODES)}",
    )
    parser.add_argument("--size", choices=tuple(SIZES), default="14b")
    parser.add_argument("--task", choices=tuple(IN_DIM), default="i2v")
    parser.add_argument("--tokens", type=int, default=32760, help="default: 480x832, 81 frames")
    parser.add_argument(
        "--steps", type=int, default=2, help="measured of each mode, after a forward"
    )
    parser.add_argument("--modes", type=_modes, metavar="A,B,C", help="in place of the usual ones")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="usual modes also with torch.compile: those of diffusers that are resident",
    )
    parser.add_argument(
        "--attention",
        default="auto",
        help="of diffusers, by its names (_flash_3, _native_cudnn, native); auto: the one of ours",
    )
    parser.add_argument(
        "--budget-seconds", type=float, metavar="S", help="start no mode after this time"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    return parser


def _modes(text: str) -> tuple[Mode, ...]:
    """In the order of MODES, which keeps families together."""
    known = {mode.name: mode for mode in MODES}
    wanted = [name.strip() for name in text.split(",")]
    if unknown := [name for name in wanted if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; see --help")
    return tuple(mode for mode in MODES if mode.name in wanted)


def _rows(modes: Sequence[Mode], settings: Settings) -> Generator[Row, None, None]:
    """Every mode's, from workers."""
    for _, family in groupby(modes, key=lambda mode: mode.family):
        left = []
        for mode in family:
            if mode.needs and importlib.util.find_spec(mode.needs) is None:
                yield Row(mode=mode.name, status="not run", note=f"{mode.needs} is not installed")
            else:
                left.append(mode)
        while left and not settings.time_is_up():
            for rows in _worker(tuple(left), settings):
                left.pop(0)
                yield from rows
        for mode in left:
            yield Row(mode=mode.name, status="not run", note="the time was up")


def _worker(modes: Sequence[Mode], settings: Settings) -> Iterator[list[Row]]:
    """What one process sends; where it sends nothing, the next mode failed by ending it."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(modes, settings, sender))
    process.start()
    sender.close()
    done = 0
    try:
        with suppress(EOFError):
            while done < len(modes):
                rows = receiver.recv()
                done += 1
                yield rows
        process.join(_EXIT_SECONDS)
        if process.exitcode and done < len(modes):
            note = f"the process ended with {process.exitcode}"
            yield [Row(mode=modes[done].name, status="failed", note=note)]
    finally:
        process.kill()
        process.join()


def _versions() -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "diffusers": importlib.metadata.version("diffusers"),
    }


def _said(row: Row) -> str:
    if row.status != "measured":
        return f"{row.status}: {row.note}"
    return f"{median(row.step_seconds):.3f} s per step"


def _write(path: Path, document: dict[str, object], rows: Iterable[Row], seconds: float) -> None:
    full = {**document, "json": str(path), "run_seconds": seconds}
    full["rows"] = [asdict(row) for row in rows]
    path.write_text(json.dumps(full, indent=2) + "\n", encoding="utf-8")


def _table(title: str, rows: Iterable[Row]) -> Table:
    table = Table(title=title)
    table.add_column("mode", no_wrap=True)
    for heading in ("s per step", "peak GPU", "pinned host", "prepare", "first forward"):
        table.add_column(heading, justify="right")
    table.add_column("attention")
    for row in rows:
        measured = row.status == "measured"
        table.add_row(
            row.mode,
            f"{median(row.step_seconds):.3f}" if measured else row.status,
            _gigabytes(row.peak_nbytes),
            _gigabytes(row.host_nbytes),
            _seconds(row.prepare_seconds),
            _seconds(row.first_forward_seconds),
            row.attention,
        )
    return table


def _gigabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / _GB:.2f} GB"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"
