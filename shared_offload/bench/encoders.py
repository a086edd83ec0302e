"""`shared-offload bench encoders`: umT5 and CLIP against their products and their copies.

An encoder on the device cannot be faster than its matrix products alone, one that passes through it
no faster than its bytes are copied from pinned memory. Both floors are timed in the same run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from rich.table import Table

from shared_offload.bench.arguments import add_json, at_least
from shared_offload.bench.clock import (
    copy_rate,
    device_name,
    first_device,
    gigabytes,
    of_peak,
    publish,
    seconds_of,
)
from shared_offload.bench.floors import Part, Workbench, time_parts
from shared_offload.bench.folder import add_folder_flag, model_folder
from shared_offload.config import Options as RunOptions
from shared_offload.config.paths import FILE_NAMES, FileKey, find_file, tokenizer_folder
from shared_offload.pipeline.image_encoder import ImageEncoder
from shared_offload.pipeline.runner import IMAGE_DTYPE, TEXT_DTYPE
from shared_offload.pipeline.text_encoder import TextEncoder
from shared_offload.pipeline.tokenizer import load_tokenizer
from shared_offload.report.progress import Progress
from shared_offload.synth.sizes import SIZES, SizeSpec
from shared_offload.weights.convert import write_folder
from shared_offload.weights.convert_encoders import EncoderKind, plan_encoder

# Weights are on the device, pass through it block by block, or are moved there and back.
Way = Literal["resident", "passing", "moved"]
HOST = torch.device("cpu")
TEXT_LEN = 512
# A positive and a negative prompt, of common lengths.
PROMPTS = (
    "A woman in a white dress walks slowly through a field of yellow flowers while the camera "
    "moves forward over a quiet lake with mountains in the background, cinematic style.",
    "low quality, blurry, static, overexposed, worst quality, bad hands, still picture",
)
PICTURE = (480, 832)
FILES: dict[EncoderKind, tuple[FileKey, FileKey]] = {
    "t5": ("t5_original_ckpt", "t5_quantized_ckpt"),
    "clip": ("clip_original_ckpt", "clip_quantized_ckpt"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One encoder, from one file, in one way."""

    encoder: EncoderKind
    weights: str
    way: Way
    inputs: int
    """Prompts or pictures that `seconds` are for."""
    tokens: int
    """Of all inputs."""
    seconds: float
    peak_nbytes: int | None
    """Weights included."""
    weights_nbytes: int
    copied_nbytes: int
    products_seconds: float
    copy_seconds: float
    """Of `copied_nbytes` from pinned memory, nothing else running."""

    @property
    def floor(self) -> float:
        """The longer of the two: each can hide behind the other."""
        return max(self.products_seconds, self.copy_seconds)

    @property
    def ratio(self) -> float:
        """Of the floor."""
        return self.seconds / self.floor


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all measurements of a run share."""

    spec: SizeSpec
    device: torch.device
    rounds: int
    pinned_rate: float
    """Bytes a second."""


class Encoder(Protocol):
    """What both have."""

    nbytes: int

    def close(self) -> None:
        """Free the weights."""


E = TypeVar("E", bound=Encoder)


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one encoder, loaded for it."""

    seconds: float
    peak_nbytes: int | None
    weights_nbytes: int


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this measurement."""
    parser = subparsers.add_parser(
        "encoders",
        help="umT5 and CLIP, on the device and passing through it",
        description="Encode two prompts and a picture: with weights on the device, and in the ways "
        "that t5_cpu_offload and clip_cpu_offload have, each with the original and the FP8 file.",
    )
    parser.add_argument("--size", choices=tuple(SIZES), default="14b", help="of the encoders")
    parser.add_argument("--only", choices=tuple(FILES), nargs="+", default=tuple(FILES))
    parser.add_argument(
        "--weights", choices=("original", "fp8"), nargs="+", default=("original", "fp8")
    )
    parser.add_argument("--rounds", type=int, default=3, help="median of; default: 3")
    add_folder_flag(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON."""
    at_least("--rounds", args.rounds)
    device = first_device()
    pinned, pageable = (copy_rate(device, pinned=way) for way in (True, False))
    setup = Setup(spec=SIZES[args.size], device=device, rounds=args.rounds, pinned_rate=pinned)
    parts = [*args.only, *(["tokenizer"] if "t5" in args.only else [])]
    results: list[Result] = []
    with model_folder(args.model_path, args.size, "i2v", parts) as folder:
        for kind in args.only:
            for weights in args.weights:
                with _file(kind, weights, folder) as path:
                    results += _encoder(kind, weights, path, folder, setup)
    document = {
        "device": device_name(device),
        "torch": torch.__version__,
        "pinned_gb_per_second": pinned / 1e9,
        "pageable_gb_per_second": pageable / 1e9,
        "results": [{**asdict(r), "floor_seconds": r.floor, "ratio": r.ratio} for r in results],
    }
    publish(_table(results, setup, pageable), document, args.json)
    return 0


@contextmanager
def _file(kind: EncoderKind, weights: str, folder: Path) -> Iterator[Path]:
    """The encoder's file, converted for the time of the block where there is no FP8 one."""
    original, quantised = FILES[kind]
    options = RunOptions(model_path=folder)
    if weights == "original":
        yield find_file(options, original)
        return
    name = FILE_NAMES[quantised]
    if any(folder.rglob(name)):
        yield find_file(options, quantised)
        return
    with tempfile.TemporaryDirectory(prefix="shared_offload-bench-") as made:
        plan = plan_encoder(kind, find_file(options, original), name)
        with Progress().task(f"convert {kind.upper()}", plan.nbytes, "B") as shown:
            write_folder(Path(made) / "fp8", [plan], shown.advance)
        yield Path(made) / "fp8" / name


def _encoder(
    kind: EncoderKind, weights: str, path: Path, folder: Path, setup: Setup
) -> list[Result]:
    if kind == "clip":
        return [
            _clip(path, weights, "resident", setup),
            _clip(path, weights, "moved", setup),
        ]
    tokenizer = tokenizer_folder(RunOptions(model_path=folder))
    ways: tuple[Way, ...] = ("resident", "passing")
    return [_t5(path, tokenizer, weights, way, setup) for way in ways]


def _t5(path: Path, tokenizer: Path, weights: str, way: Way, setup: Setup) -> Result:
    dtype = TEXT_DTYPE[setup.device.type]
    rows: list[int] = []
    copied: list[int] = []

    def load() -> TextEncoder:
        return TextEncoder.load(
            path,
            load_tokenizer(tokenizer),
            device=setup.device,
            dtype=dtype,
            text_len=TEXT_LEN,
            block_by_block=way == "passing",
        )

    def encode(encoder: TextEncoder) -> None:
        copied.clear()
        rows[:] = map(len, encoder.encode(PROMPTS, copied.append))

    timing = _timed(load, encode, setup)
    size = setup.spec.t5
    width = size.heads * size.head_dim
    shapes = [(width, size.dim)] * 3 + [(size.dim, width)]
    shapes += [(size.ffn_dim, size.dim)] * 2 + [(size.dim, size.ffn_dim)]
    products = sum(_products(n, shapes, size.layers, weights, dtype, setup.device) for n in rows)
    facts = {"encoder": "t5", "weights": weights, "way": way, "inputs": len(PROMPTS)}
    return _result(facts, sum(rows), timing, sum(copied), products, setup)


def _clip(path: Path, weights: str, way: Way, setup: Setup) -> Result:
    device, dtype = setup.device, IMAGE_DTYPE[setup.device.type]
    picture = torch.rand(3, *PICTURE, generator=torch.Generator().manual_seed(4)) * 2 - 1
    moved = way == "moved"
    tokens = 0

    def load() -> ImageEncoder:
        place = HOST if moved else device
        return ImageEncoder.load(path, device=place, dtype=dtype, cast_later=moved)

    def encode(encoder: ImageEncoder) -> None:
        nonlocal tokens
        encoder.move(device)
        tokens = len(encoder.encode(picture))
        if moved:
            encoder.move(HOST)

    timing = _timed(load, encode, setup)
    size = setup.spec.clip
    shapes = [(size.dim, size.dim)] * 4 + [(size.mlp_dim, size.dim), (size.dim, size.mlp_dim)]
    blocks = size.layers - 1  # the last one is not run
    products = _products(tokens, shapes, blocks, weights, dtype, device)
    facts = {"encoder": "clip", "weights": weights, "way": way, "inputs": 1}
    copied = timing.weights_nbytes if moved else 0
    return _result(facts, tokens, timing, copied, products, setup)


def _timed(load: Callable[[], E], encode: Callable[[E], None], setup: Setup) -> Timing:
    loaded: list[E] = []

    def from_the_start() -> None:
        loaded.append(load())
        encode(loaded[0])

    peak = of_peak(from_the_start, setup.device)
    encoder = loaded.pop()
    try:
        seconds = seconds_of(lambda: encode(encoder), setup.device, setup.rounds)
        return Timing(seconds, peak, encoder.nbytes)
    finally:
        encoder.close()


def _products(
    rows: int,
    shapes: Sequence[tuple[int, int]],
    blocks: int,
    weights: str,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Seconds of all products for one input of so many rows, block after block."""
    parts = [Part(str(at), "product", (rows, *shape)) for at, shape in enumerate(shapes)]
    bench = Workbench(device, fp8=weights == "fp8", dtype=dtype)
    return blocks * sum(time_parts(parts, bench, device, blocks).values())


def _result(
    facts: dict[str, Any], tokens: int, timing: Timing, copied: int, products: float, setup: Setup
) -> Result:
    return Result(
        **facts,
        tokens=tokens,
        **asdict(timing),
        copied_nbytes=copied,
        products_seconds=products,
        copy_seconds=copied / setup.pinned_rate,
    )


def _table(results: Sequence[Result], setup: Setup, pageable: float) -> Table:
    table = Table(
        title=f"two prompts, one picture; {device_name(setup.device)}; plain copies: pinned "
        f"{setup.pinned_rate / 1e9:.1f} GB/s, pageable {pageable / 1e9:.1f} GB/s"
    )
    table.add_column("", no_wrap=True)
    for name in ("s", "s each", "products", "copies", "ratio", "peak", "weights"):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            f"{r.encoder} {r.weights} {r.way}",
            f"{r.seconds:.4f}",
            f"{r.seconds / r.inputs:.4f}",
            f"{r.products_seconds:.4f}",
            f"{r.copy_seconds:.4f}" if r.copied_nbytes else "-",
            f"{r.ratio:.2f}",
            gigabytes(r.peak_nbytes),
            gigabytes(r.weights_nbytes),
        )
    return table
