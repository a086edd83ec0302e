"""Frames of videos as one PNG: a row for each video, evenly spaced frames, the first and the last.

python tools/contact_sheet.py build/demo/t2v.mp4 build/demo/i2v.mp4 --out build/demo/sheet.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from PIL import Image

GAP = 4  # pixels between frames
PAPER = 255


def frames(path: Path, count: int) -> list[np.ndarray]:
    """RGB frames (H, W, 3), uint8; all of them where there are fewer."""
    with av.open(str(path)) as container:
        every = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    if not every:
        raise SystemExit(f"{path} has no frames")
    at = np.linspace(0, len(every) - 1, min(count, len(every))).round().astype(int)
    return [every[index] for index in at]


def sheet(rows: Sequence[Sequence[np.ndarray]], height: int) -> Image.Image:
    """A picture of all rows, each frame scaled to the same height."""
    scaled = [[_scaled(frame, height) for frame in row] for row in rows]
    width = max(sum(frame.width + GAP for frame in row) for row in scaled) + GAP
    paper = Image.new("RGB", (width, len(rows) * (height + GAP) + GAP), (PAPER,) * 3)
    for number, row in enumerate(scaled):
        left = GAP
        for frame in row:
            paper.paste(frame, (left, number * (height + GAP) + GAP))
            left += frame.width + GAP
    return paper


def _scaled(frame: np.ndarray, height: int) -> Image.Image:
    image = Image.fromarray(frame)
    return image.resize(
        (round(image.width * height / image.height), height), Image.Resampling.LANCZOS
    )


def main() -> None:
    """Read the videos and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("videos", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--frames", type=int, default=9, help="of each video")
    parser.add_argument("--height", type=int, default=96, help="of a frame, in pixels")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    sheet([frames(video, args.frames) for video in args.videos], args.height).save(args.out)
    print(args.out)


if __name__ == "__main__":
    main()
