"""Options that several measurements have: each is said once."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console

from shared_offload.errors import ConfigError
from shared_offload.model.attention import ATTENTION_NAMES, AUTO, Attention, select_attention
from shared_offload.model.operations import Compile
from shared_offload.preflight.plan import count_tokens
from shared_offload.synth.sizes import IN_DIM, SIZES

COMPILE: dict[str, Compile] = {AUTO: AUTO, "true": True, "false": False}
PIXELS = 16  # height and width of a video are multiples of it


def add_video(parser: argparse.ArgumentParser) -> None:
    """The size of a video."""
    parser.add_argument("--height", type=int, default=480, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=832, help="default: %(default)s")
    parser.add_argument("--frames", type=int, default=81, help="default: %(default)s")


def add_tokens(parser: argparse.ArgumentParser) -> None:
    """A number of tokens in place of the size of a video; `tokens_of` reads both."""
    parser.add_argument("--tokens", type=int, help="in place of height, width and frames")


def tokens_of(args: argparse.Namespace) -> int:
    """Tokens of the DiT. Raises ConfigError for a video that Wan cannot make."""
    if args.tokens is not None:
        return int(args.tokens)
    video_size(args.frames, args.height, args.width)
    return count_tokens(args.frames, args.height, args.width)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model."""
    parser.add_argument("--size", choices=tuple(SIZES), default="14b")
    parser.add_argument("--task", choices=tuple(IN_DIM), default="i2v")


def add_dit(parser: argparse.ArgumentParser) -> None:
    """Which DiT, and how it runs."""
    add_model(parser)
    parser.add_argument("--granularity", choices=("block", "phase"), default="block")
    parser.add_argument("--dtype", choices=("fp8", "bf16"), default="fp8", help="of DiT weights")
    parser.add_argument("--attention", choices=ATTENTION_NAMES, default=AUTO)
    parser.add_argument(
        "--compile",
        choices=tuple(COMPILE),
        default=AUTO,
        help="fused kernels between products and attention; auto: where they run",
    )


def add_part(parser: argparse.ArgumentParser) -> None:
    """One rank's part of a step, and the slots that weights stream through."""
    parser.add_argument(
        "--share",
        type=_share_of_ranks,
        default=1,
        metavar="1/P",
        help="the work of one of P ranks with sequence parallelism, without communication",
    )
    parser.add_argument("--slots", type=int, default=2)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Where figures go beside the table."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")


def choose_attention(name: str, device: torch.device) -> Attention:
    """The kernel for bf16; what runs in its place, and why, is said on stderr."""
    kernel, warning = select_attention(name, device, torch.bfloat16)
    if warning:
        Console(stderr=True).print(warning)
    return kernel


def at_least(flag: str, value: int, least: int = 1) -> None:
    """Raises ConfigError for a number that is too small."""
    if value < least:
        raise ConfigError(f"{flag} {value}", expected=f"{least} or more", key=flag, found=value)


def video_size(frames: int, height: int, width: int) -> None:
    """Raises ConfigError for a video that Wan cannot make."""
    if frames < 1 or frames % 4 != 1:
        raise ConfigError(
            f"--frames {frames}",
            expected="4n + 1, as in 81",
            hint=f"use {max(1, frames - 1) // 4 * 4 + 1}",
            key="--frames",
            found=frames,
        )
    for name, side in (("height", height), ("width", width)):
        if side < PIXELS or side % PIXELS:
            raise ConfigError(
                f"a video of {name} {side}",
                expected=f"a multiple of {PIXELS}",
                key=name,
                found=side,
            )


def _share_of_ranks(text: str) -> int:
    """P of "1/P", or of "1"."""
    numerator, _, denominator = text.partition("/")
    if numerator != "1":
        raise argparse.ArgumentTypeError(f"{text!r} is not 1/P")
    return int(denominator or 1)
