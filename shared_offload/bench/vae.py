"""`shared-offload bench vae`: encode and decode against their own convolutions alone.

Convolutions are timed in a pass of their own, each between two events, in the very call that the
VAE makes. What is beside them (norms, activations, padding, copies of frames kept for the next
ones) is what can be saved. Errors are against the first setting, of the same latents and videos.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count

from shared_offload.bench.arguments import add_json, at_least, video_size
from shared_offload.bench.clock import (
    Marks,
    device_name,
    first_device,
    gigabytes,
    of_peak,
    publish,
    seconds_of,
)
from shared_offload.bench.folder import add_folder_flag, model_folder
from shared_offload.config import Options as RunOptions
from shared_offload.config.paths import vae_file
from shared_offload.pipeline.conditioning import latent_shape
from shared_offload.pipeline.vae import Vae
from shared_offload.synth.sizes import SIZES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES_480P_720P = ((480, 832), (720, 1280))
WARM_UP_FRAMES = 9  # the first latent frame, and two of those that see earlier ones
LEVELS = 127.5  # of 8 bits, in a unit of the video

Size = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way of doing it."""

    height: int
    width: int
    frames: int
    dtype: str
    tiling: bool = False
    limit_gib: float | None = None
    """GPU memory that may be allocated while it works, weights included: strips, exact."""

    def __str__(self) -> str:
        limit = "" if self.limit_gib is None else f" <{self.limit_gib:g} GiB"
        return f"{self.dtype}{' tiled' if self.tiling else ''}{limit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """An encode or a decode."""

    seconds: float
    peak_nbytes: int | None
    """Beside the weights and what goes in; what comes out is in it."""
    convolution_seconds: float
    convolution_flops: int
    error_db: float | None
    """Signal over error, against the first setting of this size; None for that one, and for
    what equals it bit for bit."""
    worst: float | None
    """The largest error: of 255 levels for a video, of a latent's unit otherwise."""

    @property
    def ratio(self) -> float:
        """The whole over its convolutions."""
        return self.seconds / self.convolution_seconds

    @property
    def teraflops(self) -> float:
        """10^12 operations a second, while in convolutions."""
        return self.convolution_flops / self.convolution_seconds / 1e12


class Convolutions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside the block, convolutions are timed on the device and their operations are counted."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._marks = Marks(device)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  torch's own signature
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Every operation passes here."""
        if not _is_convolution(func):
            return func(*args, **(kwargs or {}))
        self._marks.mark()
        out = func(*args, **(kwargs or {}))
        self._marks.mark()
        self.flops += conv_flop_count(list(args[0].shape), list(args[1].shape), list(out.shape))
        return out

    @property
    def seconds(self) -> float:
        """Of all of them."""
        return sum(self._marks.spans()[::2])


def _is_convolution(func: Any) -> bool:  # noqa: ANN401
    return str(func.overloadpacket).split(".")[-1] in ("convolution", "conv2d", "conv3d")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this measurement."""
    parser = subparsers.add_parser(
        "vae",
        help="VAE encode and decode, by size, dtype and memory",
        description="Encode and decode a random video with each setting: time, GPU memory, error, "
        "and the time of the convolutions alone.",
    )
    parser.add_argument("--size", choices=tuple(SIZES), default="14b", help="of the VAE")
    parser.add_argument(
        "--video",
        type=_size,
        nargs="+",
        default=SIZES_480P_720P,
        metavar="HxW",
        help="default: 480x832 720x1280",
    )
    parser.add_argument("--frames", type=int, default=81, help="default: %(default)s")
    parser.add_argument("--dtype", choices=tuple(DTYPES), nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--tiling", action="store_true", help="also each setting in tiles")
    parser.add_argument(
        "--limit",
        type=float,
        nargs="+",
        default=[],
        metavar="GIB",
        help="also each dtype in strips that keep to this much GPU memory, weights included",
    )
    parser.add_argument("--rounds", type=int, default=2, help="median of; default: 2")
    add_folder_flag(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON."""
    at_least("--rounds", args.rounds)
    for height, width in args.video:
        video_size(args.frames, height, width)
    device = first_device()
    rows: list[dict[str, Any]] = []
    table = _new_table(device, args.frames)
    with model_folder(args.model_path, args.size, "t2v", ("vae",)) as folder:
        path = vae_file(RunOptions(model_path=folder))
        for height, width in args.video:
            table.add_section()
            table.add_row(f"{height}x{width}")
            settings = _settings(args, height, width)
            for setting, passes in measure(settings, path, device, args.rounds):
                _add_rows(table, setting, passes)
                rows.append(_document(setting, passes))
    facts = {"device": device_name(device), "torch": torch.__version__, "settings": rows}
    publish(table, facts, args.json)
    return 0


def _settings(args: argparse.Namespace, height: int, width: int) -> list[Setting]:
    """The first one is what the others are compared with."""
    ways: list[dict[str, Any]] = [{}, *({"limit_gib": limit} for limit in args.limit)]
    if args.tiling:
        ways.append({"tiling": True})
    return [
        Setting(height=height, width=width, frames=args.frames, dtype=dtype, **way)
        for way in ways
        for dtype in args.dtype
    ]


def measure(
    settings: Sequence[Setting], path: Path, device: torch.device, rounds: int
) -> Iterator[tuple[Setting, dict[str, Pass]]]:
    """Encode and decode with each setting of one size. Host memory: a few videos in fp32."""
    first = settings[0]
    generator = torch.Generator().manual_seed(3)
    shape = latent_shape(first.frames, first.height, first.width)
    latent = torch.randn(shape, generator=generator).to(device)
    video = _smooth_video(first, generator)  # in host memory, as in a run
    exact: dict[str, Tensor] = {}
    for setting in settings:
        vae = Vae.load(path, device=device, dtype=DTYPES[setting.dtype], tiling=setting.tiling)
        vae.limit = None if setting.limit_gib is None else round(setting.limit_gib * (1 << 30))
        try:
            encode = _measure(vae.encode, video, WARM_UP_FRAMES, device, rounds)
            decode = _measure(vae.decode, latent, (WARM_UP_FRAMES - 1) // 4 + 1, device, rounds)
        finally:
            vae.close()
        yield (
            setting,
            {
                "encode": _with_errors(*encode, exact.setdefault("encode", encode[1]), 1),
                "decode": _with_errors(*decode, exact.setdefault("decode", decode[1]), LEVELS),
            },
        )


def _measure(
    work: Callable[[Tensor], Tensor],
    given: Tensor,
    warm_up: int,
    device: torch.device,
    rounds: int,
) -> tuple[Pass, Tensor]:
    """Figures without errors, and what came out, on the host."""
    work(given[:, :warm_up])  # kernels are chosen, at all shapes that there are
    outs: list[Tensor] = []
    times: list[float] = []

    def once() -> None:
        outs[:] = []
        outs[:] = [work(given)]

    peak = of_peak(lambda: times.append(seconds_of(once, device, rounds)), device)
    out = outs.pop().cpu()
    with Convolutions(device) as convolutions:
        work(given)
    figures = Pass(
        seconds=times[0],
        peak_nbytes=peak,
        convolution_seconds=convolutions.seconds,
        convolution_flops=convolutions.flops,
        error_db=None,
        worst=None,
    )
    return figures, out


def _with_errors(figures: Pass, out: Tensor, exact: Tensor, unit: float) -> Pass:
    if out is exact:
        return figures
    error = out - exact
    decibels = 20 * math.log10(float(exact.norm() / error.norm())) if error.any() else None
    return replace(figures, error_db=decibels, worst=unit * float(error.abs().max()))


def _smooth_video(setting: Setting, generator: torch.Generator) -> Tensor:
    """(3, F, H, W) in (-1, 1): noise at an eighth of the size, enlarged."""
    sizes = (setting.frames, setting.height, setting.width)
    small = [max(1, size // 8) for size in sizes]
    noise = torch.randn(1, 3, *small, generator=generator)
    return F.interpolate(noise, sizes, mode="trilinear")[0].tanh_()


def _size(text: str) -> Size:
    """(H, W) of "HxW"."""
    try:
        height, width = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not HxW, as 480x832") from None
    return height, width


def _new_table(device: torch.device, frames: int) -> Table:
    table = Table(title=f"VAE, {frames} frames, {device_name(device)}")
    table.add_column("", no_wrap=True)
    columns = ("s", "conv s", "TFLOP/s", "ratio", "memory", "dB", "worst")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _add_rows(table: Table, setting: Setting, passes: Mapping[str, Pass]) -> None:
    for name, found in passes.items():
        table.add_row(
            f"{setting} {name}",
            f"{found.seconds:.2f}",
            f"{found.convolution_seconds:.2f}",
            f"{found.teraflops:.0f}",
            f"{found.ratio:.2f}",
            gigabytes(found.peak_nbytes),
            "-" if found.error_db is None else f"{found.error_db:.0f}",
            "-" if found.worst is None else f"{found.worst:.2f}",
        )


def _document(setting: Setting, passes: Mapping[str, Pass]) -> dict[str, Any]:
    figures = {
        name: {**asdict(p), "ratio": p.ratio, "teraflops": p.teraflops}
        for name, p in passes.items()
    }
    return {**asdict(setting), **figures}
