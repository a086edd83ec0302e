from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from shared_offload.errors import OutputError
from shared_offload.pipeline.video import check_target, metadata_path, to_uint8, write_video


def flat(colour: tuple[int, int, int], frames: int = 3, size: tuple[int, int] = (64, 96)):
    return torch.tensor(colour, dtype=torch.uint8).expand(frames, *size, 3)


def listing(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def decode_rgb(path: Path) -> np.ndarray:
    """Frames by the inverse of BT.709 (ITU-R BT.709-6, items 3.2 to 3.5), in float64.

    Chroma is repeated: exact for flat colours and for means.
    """
    frames = []
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            assert frame.format.name == "yuv420p"
            rows = frame.to_ndarray().astype(np.float64)
            h, w = frame.height, frame.width
            y = (rows[:h] - 16) / 219
            cb, cr = ((p - 128) / 224 for p in rows[h:].reshape(2, h // 2, w // 2))
            cb, cr = (p.repeat(2, 0).repeat(2, 1) for p in (cb, cr))
            r = y + 1.5748 * cr
            b = y + 1.8556 * cb
            g = (y - 0.2126 * r - 0.0722 * b) / 0.7152
            frames.append(np.stack((r, g, b), -1) * 255)
    return np.stack(frames)


def smooth(frames: int, height: int, width: int) -> torch.Tensor:
    """Moving gradients in all three channels."""
    t, y, x = (torch.linspace(0, 1, n) for n in (frames, height, width))
    t, y, x = t[:, None, None], y[:, None], x
    red, green, blue = (x + 0 * y + 0 * t), (y * (1 - t) + 0 * x), (x * y + t) / 2
    return (torch.stack((red, green, blue), -1) * 255).round().to(torch.uint8)


@pytest.mark.parametrize("fps", [16, 23.976, Fraction(30000, 1001)])
def test_count_size_rate_and_tags(tmp_path: Path, fps: float | Fraction) -> None:
    path = tmp_path / "new" / "folder" / "out.mp4"
    write_video(path, smooth(9, 50, 70), fps, {"seed": 7})
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        tags = (
            context.color_primaries,
            context.color_trc,
            context.colorspace,
            context.color_range,
        )
        assert [int(tag) for tag in tags] == [1, 1, 1, 1]
        assert (context.width, context.height, context.name) == (70, 50, "h264")
        assert stream.average_rate == Fraction(str(fps))
        times = [frame.pts * frame.time_base for frame in container.decode(video=0)]
    assert times == [n / Fraction(str(fps)) for n in range(9)]
    assert listing(path.parent) == ["out.mp4", "out.mp4.json"]


def test_tags_are_in_the_stream_itself(tmp_path: Path) -> None:
    """The container's colr atom, beside the bitstream that the decoder reads its tags from."""
    path = tmp_path / "out.mp4"
    write_video(path, flat((255, 0, 0)), 16, {})
    content = path.read_bytes()
    at = content.index(b"colrnclx")
    assert content[at + 8 : at + 15] == bytes((0, 1, 0, 1, 0, 1, 0)), "1-1-1, limited range"


@pytest.mark.parametrize(
    "colour",
    [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (200, 30, 120), (128,) * 3],
)
def test_pure_colours_come_back(tmp_path: Path, colour: tuple[int, int, int]) -> None:
    path = tmp_path / "out.mp4"
    write_video(path, flat(colour), 16, {})
    assert np.abs(decode_rgb(path) - np.array(colour)).max() <= 2


def test_means_and_picture_come_back(tmp_path: Path) -> None:
    path = tmp_path / "out.mp4"
    frames = smooth(9, 96, 128)
    write_video(path, (frame for frame in frames), 16, {})
    decoded, sent = decode_rgb(path), frames.numpy().astype(np.float64)
    assert np.abs(decoded.mean((1, 2)) - sent.mean((1, 2))).max() <= 2
    assert np.abs(decoded - sent).mean() <= 2


def test_a_frame_is_one_slice(tmp_path: Path) -> None:
    """Threads of the encoder have a frame each. Slices of one may not refer to each other."""
    path = tmp_path / "out.mp4"
    write_video(path, smooth(9, 256, 64), 16, {})
    with av.open(str(path)) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    assert [sum(kind in (1, 5) for kind in nal_types(packet)) for packet in packets] == [1] * 9


def nal_types(packet: bytes) -> list[int]:
    """Of the NAL units in an MP4's packet: 4 bytes of length, then the unit (ISO/IEC 14496-15)."""
    kinds, at = [], 0
    while at < len(packet):
        kinds.append(packet[at + 4] & 0x1F)
        at += 4 + int.from_bytes(packet[at : at + 4], "big")
    return kinds


def test_colours_take_no_threads_beside_the_encoders(tmp_path: Path) -> None:
    team = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen = []

        def frames():
            for frame in smooth(3, 16, 16):
                seen.append(torch.get_num_threads())
                yield frame

        write_video(tmp_path / "out.mp4", frames(), 16, {})
        assert seen == [1, 1, 1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(team)


def test_metadata_lies_beside_and_old_files_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.mp4"
    other = tmp_path / "out.json"
    other.write_text("mine")
    for seed in (1, 2):
        write_video(path, flat((9, 9, 9)), 16, {"seed": seed, "prompt": "\u732b", "at": Path("x")})
    found = json.loads(metadata_path(path).read_text(encoding="utf-8"))
    assert found == {"seed": 2, "prompt": "\u732b", "at": "x"}
    assert other.read_text() == "mine"


def test_rounding() -> None:
    exact = torch.tensor([-1.2, -1, -1 + 0.9 / 127.5, 0.2 / 127.5, 1, 7])
    assert to_uint8(exact).tolist() == [0, 0, 1, 128, 255, 255]
    levels = torch.arange(256)
    assert torch.equal(to_uint8(levels / 127.5 - 1), levels.to(torch.uint8))


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (flat((1, 1, 1), size=(63, 64)), "63x64"),
        ([flat((1, 1, 1))[0], flat((1, 1, 1), size=(32, 32))[0]], "32x32"),
        (flat((1, 1, 1)).float(), "float32"),
        ([], "no frames"),
    ],
)
def test_frames_that_make_no_video(tmp_path: Path, frames, text: str) -> None:
    with pytest.raises(OutputError, match=text):
        write_video(tmp_path / "out.mp4", frames, 16, {})
    assert listing(tmp_path) == []


def test_an_error_of_the_source_passes_and_leaves_nothing(tmp_path: Path) -> None:
    def frames():
        yield flat((1, 1, 1))[0]
        raise MemoryError

    with pytest.raises(MemoryError):
        write_video(tmp_path / "out.mp4", frames(), 16, {})
    assert listing(tmp_path) == []


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    check_target(tmp_path / "a" / "b.mp4", bytes_needed=1000)
    assert listing(tmp_path / "a") == []
    (tmp_path / "file").write_text("")
    for path, text in (
        (tmp_path / "a.avi", "ends in"),
        (tmp_path / "a", "ends in"),
        (tmp_path / "file" / "b.mp4", "file is no folder"),
        (tmp_path / ("n" * 300 + ".mp4"), "too long"),
        (Path("/proc/out.mp4"), "cannot be written"),
    ):
        with pytest.raises(OutputError, match=text) as caught:
            check_target(path, bytes_needed=1000)
        assert caught.value.facts["path"] == str(path)
    (tmp_path / "d.mp4").mkdir()
    with pytest.raises(OutputError, match="is a folder"):
        check_target(tmp_path / "d.mp4", bytes_needed=0)
    with pytest.raises(OutputError) as caught:
        check_target(tmp_path / "b.mp4", bytes_needed=2**60)
    assert caught.value.facts["needed"] == 2**60
    assert 0 < caught.value.facts["found"] < 2**60


def test_a_full_disk(tmp_path: Path) -> None:
    """A real one where mounting is allowed, else a limit on the size of a file."""
    path = tmp_path / "out.mp4"
    frames = torch.randint(0, 256, (9, 256, 256, 3), dtype=torch.uint8)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0:
        try:
            with pytest.raises(OutputError, match="No space left") as caught:
                write_video(path, frames, 16, {})
            assert listing(tmp_path) == []
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
        try:
            with pytest.raises(OutputError, match="too large") as caught:
                write_video(path, frames, 16, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, old)
        assert listing(tmp_path) == []
    assert caught.value.facts["path"] == str(path)


ENDLESS = """
import sys, torch
from pathlib import Path
from shared_offload.pipeline import video
whole = video._write_through
def slow(path, content):
    whole(path, content[: len(content) // 2])
    print("half", flush=True)
    sys.stdin.read()
video._write_through = slow
def frames():
    for n in range(5):
        print("frame", flush=True)
        yield torch.zeros(64, 64, 3, dtype=torch.uint8)
video.write_video(Path(sys.argv[1]), frames(), 16, {})
"""


@pytest.mark.parametrize("moment", ["frame", "half"])
def test_kill_leaves_nothing_under_the_final_name(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "out.mp4"
    command = [sys.executable, "-c", ENDLESS, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        while child.stdout.readline().strip() != moment:
            pass
        time.sleep(0.05)
        child.kill()
    assert not path.exists()
    assert not metadata_path(path).exists()
