"""`shared-offload convert`: an unquantised checkpoint, or its encoders, to FP8 files."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

from shared_offload.config import Options
from shared_offload.config.paths import FILE_NAMES, FileKey, find_file
from shared_offload.report.progress import Progress
from shared_offload.weights.convert import (
    LAYOUTS,
    NON_LINEAR_DTYPES,
    Part,
    plan_conversion,
    write_folder,
)
from shared_offload.weights.convert_encoders import EncoderConversion, EncoderKind, plan_encoder
from shared_offload.weights.lora import LoraFile

# Encoder -> the options that name its unquantised and its FP8 file.
ENCODERS: Mapping[EncoderKind, tuple[FileKey, FileKey]] = {
    "t5": ("t5_original_ckpt", "t5_quantized_ckpt"),
    "clip": ("clip_original_ckpt", "clip_quantized_ckpt"),
}
PARTS = ("dit", *ENCODERS)


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
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS[:1],
        help="what to convert (default: dit)",
    )
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
    parser.add_argument(
        "--lora",
        type=lora_file,
        action="append",
        default=[],
        metavar="PATH[:STRENGTH]",
        help="merge a LoRA before quantising; again for several (default strength: 1)",
    )
    parser.add_argument(
        "--lora_allow_unmatched",
        action="store_true",
        help="go on when keys of a LoRA do not belong to this model",
    )
    parser.set_defaults(run=run)


def lora_file(text: str) -> LoraFile:
    """PATH, or PATH:STRENGTH."""
    path, colon, strength = text.rpartition(":")
    try:
        value = float(strength) if colon else 1.0
    except ValueError:
        return LoraFile(Path(text))  # a colon of the path
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"strength is {strength}, not a number")
    return LoraFile(Path(path), value) if colon else LoraFile(Path(text))


def run(args: argparse.Namespace) -> int:
    """Convert, with progress on stderr."""
    progress = Progress()
    parts: list[Part] = []
    if "dit" in args.parts:
        dit = plan_conversion(
            args.model_path,
            args.layout,
            args.non_linear_dtype,
            loras=args.lora,
            allow_unmatched=args.lora_allow_unmatched,
        )
        for note in dit.notes:
            progress.note(note)
        parts.append(dit)
    parts += [_encoder(kind, args.model_path) for kind in ENCODERS if kind in args.parts]
    with progress.task(f"writing {args.out}", sum(part.nbytes for part in parts), "B") as shown:
        write_folder(args.out, parts, shown.advance)
    return 0


def _encoder(kind: EncoderKind, model_path: Path) -> EncoderConversion:
    """The encoder's file as a run would find it, to the name that an FP8 run looks for."""
    source = find_file(Options(model_path=model_path), ENCODERS[kind][0])
    return plan_encoder(kind, source, FILE_NAMES[ENCODERS[kind][1]])
