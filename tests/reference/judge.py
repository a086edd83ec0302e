"""What a video of one shape over a plain background shows, from its pixels alone.

Knows nothing of how such videos are made: colours have the values that their names suggest, and a
shape is told by how much of its bounding box it fills (triangle 1/2, circle pi/4, square 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

OBJECT_COLORS = {
    "red": (225, 25, 25),
    "green": (25, 175, 45),
    "blue": (35, 55, 235),
    "yellow": (245, 225, 35),
    "purple": (150, 35, 195),
    "orange": (255, 145, 15),
}
BACKGROUND_COLORS = {
    "black": (0, 0, 0),
    "white": (255, 255, 255),
    "gray": (128, 128, 128),
    "teal": (0, 128, 128),
    "blue": (35, 55, 235),
}
BORDER = 2  # pixels along the edges that are background in nearly all frames
CONTRAST = 60.0  # levels by which a pixel of the object differs from the background
SEEN = 20  # pixels that make an object
MOVED = 5.0  # pixels of the centroid; less is no direction
DIRECTIONS = {(True, False): "left", (True, True): "right", (False, False): "up"}
FILLS = {"triangle": 0.5, "circle": 0.785, "square": 1.0}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was seen; None where nothing was."""

    color: str | None
    background: str
    shape: str | None
    direction: str | None
    travel: float
    """Pixels from the first third of the clip to its last, scaled to the whole clip."""
    steady: float
    """Share of frames that show an object of `color`."""


def judge(frames_FHW3: Tensor) -> Verdict:
    """Look at uint8 frames (F, H, W, 3)."""
    frames = frames_FHW3.cpu().float()
    ground = _border(frames).flatten(0, 1).median(0).values
    background = _nearest(ground, BACKGROUND_COLORS)
    distance_FHW = (frames - ground).square().sum(-1).sqrt()
    mask_FHW = distance_FHW > CONTRAST
    seen_F = mask_FHW.flatten(1).sum(1) >= SEEN
    if int(seen_F.sum()) < 2:
        return Verdict(None, background, None, None, 0.0, 0.0)
    colors = [
        _nearest(_core(frame, far), OBJECT_COLORS) if seen else None
        for frame, far, seen in zip(frames, distance_FHW, seen_F.tolist(), strict=True)
    ]
    found = [color for color in colors if color]
    color = max(sorted(set(found)), key=found.count)
    x, y = _path(mask_FHW, seen_F)
    direction = None
    if max(abs(x), abs(y)) >= MOVED:
        sideways = abs(x) > abs(y)
        direction = DIRECTIONS.get((sideways, (x if sideways else y) > 0), "down")
    steady = found.count(color) / len(colors)
    shape = _shape(distance_FHW[seen_F])
    return Verdict(color, background, shape, direction, max(abs(x), abs(y)), steady)


def _border(frames: Tensor) -> Tensor:
    rows = torch.cat((frames[:, :BORDER], frames[:, -BORDER:]), 1).flatten(1, 2)
    columns = torch.cat((frames[:, :, :BORDER], frames[:, :, -BORDER:]), 2).flatten(1, 2)
    return torch.cat((rows, columns), 1)


def _core(frame: Tensor, distance: Tensor) -> Tensor:
    """The colour inside, away from soft edges: of the half of the object that differs most."""
    inside = distance[distance > CONTRAST].median()
    color: Tensor = frame[distance >= inside].median(0).values
    return color


def _nearest(color: Tensor, palette: dict[str, tuple[int, int, int]]) -> str:
    table = torch.tensor(list(palette.values()), dtype=torch.float32)
    return list(palette)[int((table - color).square().sum(1).argmin())]


def _path(mask_FHW: Tensor, seen_F: Tensor) -> tuple[float, float]:
    """How far the centroid moves to the right and down from the first frame to the last."""
    weights = mask_FHW[seen_F].float()
    mass = weights.flatten(1).sum(1)
    y = (weights.sum(2) @ torch.arange(weights.shape[1], dtype=torch.float32)) / mass
    x = (weights.sum(1) @ torch.arange(weights.shape[2], dtype=torch.float32)) / mass
    third = max(len(mass) // 3, 1)
    times = torch.nonzero(seen_F).flatten().float()
    span = times[-third:].mean() - times[:third].mean()
    scale = (len(seen_F) - 1) / float(span) if span > 0 else 0.0
    moved = [float(v[-third:].mean() - v[:third].mean()) * scale for v in (x, y)]
    return moved[0], moved[1]


def _shape(distance_FHW: Tensor) -> str:
    """By the share of the bounding box that is filled, the median over frames."""
    fills = []
    for distance in distance_FHW:
        full = distance.flatten().topk(SEEN).values.median()
        ink = (distance / full).clamp(max=1)
        ink = torch.where(distance < CONTRAST / 2, torch.zeros(()), ink)
        width, height = (int((ink.amax(axis) > 0.5).sum()) for axis in (0, 1))
        fills.append(float(ink.sum()) / max(width * height, 1))
    fill = float(torch.tensor(fills).median())
    return min(FILLS, key=lambda name: abs(FILLS[name] - fill))
