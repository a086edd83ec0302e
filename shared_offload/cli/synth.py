"""`shared-offload synth`: a checkpoint folder of random weights."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from shared_offload.report.progress import Progress
from shared_offload.synth.folder import make_checkpoint
from shared_offload.synth.parts import PARTS
from shared_offload.synth.sizes import IN_DIM, SIZES


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command."""
    parser = subparsers.add_parser(
        "synth",
        help="make a checkpoint of random weights",
        description="Write a complete Wan 2.1 checkpoint folder of random weights: for tests, "
        "benchmarks and a first run. Its videos show coloured noise.",
    )
    parser.add_argument("--size", choices=tuple(SIZES), required=True)
    parser.add_argument("--task", choices=tuple(IN_DIM), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to make or to complete")
    parser.add_argument(
        "--only",
        type=lambda text: tuple(filter(None, text.split(","))),
        default=(),
        metavar="PART[,PART...]",
        help=f"some parts instead of all: {', '.join(PARTS)}",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="that make weights; the result is the same for any number (default: all CPUs)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make what is missing, with progress on stderr."""
    make_checkpoint(
        args.out,
        args.size,
        args.task,
        parts=args.only,
        seed=args.seed,
        threads=max(1, args.threads),
        progress=Progress(),
    )
    return 0
