"""The MP4: H.264, yuv420p, BT.709 limited range, colours right and tagged, and a JSON beside it.

Under the final name there is a whole file or none. Encoding happens in memory (a finished file of
81 frames is a few MB), then file and JSON are written to temporary names in the same folder and
renamed, the JSON first. Colours are converted here and not by swscale, whose default matrix for
untagged input is BT.601.

Shape letters: F frames, H W height and width, 3 = R, G, B.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

import torch

from shared_offload.errors import OutputError
from shared_offload.pipeline import libraries
from shared_offload.weights.threads import torch_threads, usable_threads

SUFFIXES = (".mp4", ".mov")
# x264's scale: 0 lossless, 23 its default; at 18 a difference is hard to see.
CRF = 18
MOST_THREADS = 16  # of x264, each with a frame of its own
BT709 = 1  # the code of ITU-T H.273 for primaries, transfer and matrix alike
LIMITED = 1  # AVCOL_RANGE_MPEG
# Luma weights of BT.709 for R and B.
KR, KB = 0.2126, 0.0722


def to_uint8(x: torch.Tensor) -> torch.Tensor:
    """[-1, 1] to 0..255, rounded to nearest and clamped (truncation would darken by half a level).

    Works in fp32 whatever x is: bf16 has too few digits for 255 levels.
    """
    return x.float().add(1).mul(127.5).round_().clamp_(0, 255).to(torch.uint8)


def metadata_path(path: Path) -> Path:
    """`out.mp4` has its JSON in `out.mp4.json`, so that no other JSON is overwritten."""
    return path.with_name(path.name + ".json")


def check_target(
    path: Path,
    *,
    bytes_needed: int,
    suffixes: Sequence[str] = SUFFIXES,
    flag: str = "--save_result_path",
) -> None:
    """Before the first step: can this file, given by `flag`, be written? Creates its folder.

    Raises OutputError for a wrong suffix, a folder, an unwritable place, too little space.
    """
    path = path.absolute()
    _check_suffix(path, suffixes)
    with _os_errors(path, flag):
        if path.is_dir():
            _fail(
                path,
                f"{path} is a folder",
                expected="the name of a file",
                hint=f"use {path}/out{suffixes[0]}",
            )
        for folder in path.parents:
            if folder.exists() and not folder.is_dir():
                _fail(
                    path,
                    f"{folder} is no folder",
                    expected=f"a place for {path.name}",
                    hint=f"give {flag} another folder",
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = _partial(path)
        try:
            probe.touch()
        finally:
            probe.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
    if free < bytes_needed:
        _fail(
            path,
            f"{path.parent} has {free / 1e6:.1f} MB free",
            expected=f"{bytes_needed / 1e6:.1f} MB for {path.name}",
            hint="free some space or write elsewhere",
            needed=bytes_needed,
            found=free,
        )


def write_video(
    path: Path,
    frames_FHW3: torch.Tensor | Iterable[torch.Tensor],
    fps: float | Fraction,
    metadata: Mapping[str, object],
) -> None:
    """Write uint8 frames and their metadata; replaces files of these names.

    Frames may come one by one (H, W, 3), all of one even size. Raises OutputError and leaves no
    partial file. Memory: the encoded file, and the frames that x264 has in hand, some 60.
    """
    path = path.absolute()
    _check_suffix(path, SUFFIXES)
    video = _encode(path, frames_FHW3, Fraction(str(fps)))
    text = json.dumps(dict(metadata), indent=2, ensure_ascii=False, default=str) + "\n"
    contents = ((metadata_path(path), text.encode()), (path, video))
    partials = [(_partial(final), final) for final, _ in contents]
    with _os_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for (partial, _), (_, content) in zip(partials, contents, strict=True):
                _write_through(partial, content)
            for partial, final in partials:
                partial.replace(final)
        finally:
            for partial, _ in partials:
                partial.unlink(missing_ok=True)


def _check_suffix(path: Path, suffixes: Sequence[str]) -> None:
    if path.suffix.lower() not in suffixes:
        _fail(
            path,
            f"{path} ends in {path.suffix!r}",
            expected=" or ".join(suffixes),
            hint=f"use {path.stem}{suffixes[0]}",
        )


def _encode(path: Path, frames: Iterable[torch.Tensor], rate: Fraction) -> bytes:
    """The whole file as bytes."""
    buffer = io.BytesIO()
    try:
        with (
            torch_threads(1),  # the others are x264's
            libraries.av.open(buffer, "w", format=path.suffix.lower()[1:]) as container,
        ):
            stream = container.add_stream("libx264", rate=rate, options={"crf": str(CRF)})
            stream.pix_fmt = "yuv420p"
            context = stream.codec_context
            # PyAV's default cuts each frame into slices, at most 7 of them at 480 rows, whose
            # threads meet after every frame, and which cannot refer to each other.
            context.thread_type = "FRAME"
            context.thread_count = usable_threads(MOST_THREADS)
            context.time_base = 1 / rate
            context.color_primaries = BT709
            context.color_trc = BT709
            context.colorspace = BT709
            context.color_range = LIMITED
            for number, frame in enumerate(_checked(path, frames)):
                if number == 0:
                    stream.height, stream.width = frame.shape[:2]
                container.mux(stream.encode(_picture(frame, number, 1 / rate)))
            container.mux(stream.encode(None))
    except (libraries.av.FFmpegError, ValueError) as error:
        raise OutputError(
            f"{path} could not be encoded: {error}",
            hint="the av package must have libx264, as its wheels from PyPI do",
            path=str(path),
        ) from error
    return buffer.getvalue()


def _checked(path: Path, frames: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    size: torch.Size | None = None
    for frame in frames:
        if frame.dtype != torch.uint8 or frame.ndim != 3 or frame.shape[-1] != 3:
            found = f"{tuple(frame.shape)} {frame.dtype}"
            _fail(path, f"a frame is {found}", expected="(height, width, 3) torch.uint8")
        size = size or frame.shape
        height, width, _ = frame.shape
        if frame.shape != size or height % 2 or width % 2:
            _fail(
                path,
                f"a frame is {height}x{width}",
                expected=f"one even size for all ({size[0]}x{size[1]} came first)",
                hint="yuv420p has one colour sample for 2x2 pixels",
            )
        yield frame
    if size is None:
        _fail(path, f"{path} would have no frames", expected="at least one")


def _picture(frame_HW3: torch.Tensor, number: int, time_base: Fraction) -> libraries.av.VideoFrame:
    planes = to_yuv420(frame_HW3.cpu())
    picture = libraries.av.VideoFrame.from_ndarray(planes.numpy(), format="yuv420p")
    picture.colorspace = BT709
    picture.color_range = LIMITED
    picture.pts = number
    picture.time_base = time_base
    return picture


def to_yuv420(frame_HW3: torch.Tensor) -> torch.Tensor:
    """R'G'B' 0..255 to BT.709 limited range, as rows: H of Y, then H/4 of Cb and H/4 of Cr.

    Chroma sits at the left of each pixel pair and between two rows, where H.264 has it when a
    file says nothing else: weights 1 2 1 across, 1 1 down.
    """
    r, g, b = frame_HW3.float().div(255).unbind(-1)
    y = KR * r + (1 - KR - KB) * g + KB * b
    cb, cr = (b - y) / (2 - 2 * KB), (r - y) / (2 - 2 * KR)
    height, width = y.shape
    chroma = torch.stack((cb, cr))
    chroma = (chroma[:, 0::2] + chroma[:, 1::2]) / 2
    here, right = chroma[..., 0::2], chroma[..., 1::2]
    left = torch.cat((here[..., :1], right[..., :-1]), dim=-1)
    chroma = (left + 2 * here + right) / 4
    levels = torch.cat((16 + 219 * y.flatten(), 128 + 224 * chroma.flatten()))
    return levels.round_().to(torch.uint8).view(height * 3 // 2, width)


def _write_through(path: Path, content: bytes) -> None:
    """On disk before it gets its name: after a power cut a rename must not show an empty file."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


@contextmanager
def _os_errors(path: Path, flag: str = "--save_result_path") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror}",
            hint=f"give {flag} a place that is writable and has space",
            path=str(path),
            errno=error.errno,
        ) from error


def _fail(path: Path, what: str, **more: object) -> NoReturn:
    texts = {name: str(more.pop(name, "")) for name in ("expected", "hint")}
    raise OutputError(what, expected=texts["expected"], hint=texts["hint"], path=str(path), **more)
