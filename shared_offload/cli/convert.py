"""`shared-offload convert`: an unquantised checkpoint to FP8 files."""

from __future__ import annotations

import argparse
from pathlib import Path

from shared_offload.report.progress import Progress
from shared_offload.weights.convert import LAYOUTS, NON_LINEAR_DTYPES, plan_conversion


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command."""
    parser = subparsers.add_parser(
        "convert",
        help="make FP8 files of an official or diffusers checkpoint",
        description="Quantise a Wan 2.1 DiT to FP8 with one scale per row, in the file layouts "
        "that LightX2V reads and writes. The source stays as it is.",
    )
    parser.add_argument("--model_path", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the FP8 files")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=LAYOUTS[0],
        help="one file per block, files of 100 tensors, or a single file (default: %(default)s)",
    )
    parser.add_argument(
        "--non_linear_dtype",
        choices=tuple(NON_LINEAR_DTYPES),
        default="BF16",
        help="of everything that is not quantised (default: %(default)s); scales are always FP32",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert, with progress on stderr."""
    conversion = plan_conversion(args.model_path, args.layout, args.non_linear_dtype)
    progress = Progress()
    with progress.task(f"writing {args.out}", conversion.nbytes, "B") as shown:
        conversion.write(args.out, shown.advance)
    return 0
