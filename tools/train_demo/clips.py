"""Captioned clips of one shape that moves over a plain background, drawn on the training device.

Invariant: a clip depends on the device's random state and on `spread` alone, and drawing one makes
nothing that a CUDA graph cannot hold. Shape letters: B clips, F frames, H W pixels.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

SIZE = 64  # pixels, both ways
FRAMES = 17

OBJECTS = {
    "red": (220, 30, 30),
    "green": (30, 180, 40),
    "blue": (40, 60, 230),
    "yellow": (240, 220, 40),
    "purple": (150, 40, 200),
    "orange": (250, 140, 20),
}
BACKGROUNDS = {
    "black": (10, 10, 10),
    "white": (245, 245, 245),
    "gray": (128, 128, 128),
    "teal": (0, 128, 128),
    "blue": (40, 60, 230),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SPEEDS = {"slowly": (10, 14), "quickly": (24, 30)}  # pixels from the first frame to the last
RADIUS = (8, 12)
MARGIN = 2  # pixels between a shape and the edge
EDGE = 2.0  # steepness of an edge, per pixel

# Where clips stand for pictures of any origin:
JITTER = 12.0  # levels of 255 that a channel of a colour may be off
STRETCH = 0.15  # share by which a shape may be wider or narrower, taller or flatter
LOOSE_EDGE = (1.5, 6.0)

PAIRS = [(o, b) for o, b in itertools.product(OBJECTS, BACKGROUNDS) if o != b]

PHRASES = (
    "{a} {color} {shape} moves {where} on a {background} background",
    "{a} {color} {shape} moving {where} on a {background} background",
    "on a {background} background, {a} {color} {shape} moves {where}",
    "{a} {color} {shape} on {background}, moving {where}",
    "the {color} {shape} goes {where} over a {background} background",
    "a {background} background, {a} {color} {shape} travels {where}",
    "{color} {shape} moving {where}, {background} background",
    "{a} {color} {shape} is moving {where}. the background is {background}",
)
SPEED_PHRASES = (
    "{a} {color} {shape} moves {speed} {where} on a {background} background",
    "{a} {color} {shape} {speed} moves {where} on a {background} background",
    "{a} {adjective} {color} {shape} moves {where} on a {background} background",
    "on a {background} background, {a} {color} {shape} moves {where} {speed}",
)
WHERE = {
    "left": ("left", "to the left"),
    "right": ("right", "to the right"),
    "up": ("up", "upwards"),
    "down": ("down", "downwards"),
}
SPEED_WORDS = {
    "slowly": (("slowly", "slow"), ("gently", "slow")),
    "quickly": (("quickly", "fast"), ("fast", "quick")),
}


class Labels(NamedTuple):
    """What each of B clips shows; indices into PAIRS and the tables above, int64 (B)."""

    pair: Tensor
    shape: Tensor
    direction: Tensor
    speed: Tensor

    @property
    def combination(self) -> Tensor:
        """The index of all four together: the clip's place in `combinations`."""
        index = self.pair
        for part, size in ((self.shape, SHAPES), (self.direction, DIRECTIONS)):
            index = index * len(size) + part
        return index * len(SPEEDS) + self.speed


class Names(NamedTuple):
    """What one clip shows, in words."""

    color: str
    background: str
    shape: str
    direction: str
    speed: str


def combinations() -> list[Names]:
    """Everything that a clip may show, in the order of `Labels.combination`."""
    every = itertools.product(PAIRS, SHAPES, DIRECTIONS, SPEEDS)
    return [Names(*pair, shape, direction, speed) for pair, shape, direction, speed in every]


def captions(names: Names) -> list[str]:
    """All ways to say it; as many for every clip. Half of them do not tell the speed."""
    words = {**names._asdict(), "a": _article(names.color)}
    plain = [
        phrase.format(**words, where=where)
        for phrase in PHRASES
        for where in WHERE[names.direction]
    ]
    for phrase, where, (speed, adjective) in itertools.product(
        SPEED_PHRASES, WHERE[names.direction], SPEED_WORDS[names.speed]
    ):
        first = adjective if "{adjective}" in phrase else names.color
        given = {**words, "where": where, "speed": speed, "a": _article(first)}
        plain.append(phrase.format(**given, adjective=adjective))
    return plain


class Painter:
    """Draws clips on one device."""

    def __init__(self, device: torch.device) -> None:
        def table(rows: object) -> Tensor:
            return torch.tensor(rows, device=device, dtype=torch.float32)

        self._device = device
        self._colors = table([OBJECTS[o] for o, _ in PAIRS]) / 127.5 - 1
        self._backgrounds = table([BACKGROUNDS[b] for _, b in PAIRS]) / 127.5 - 1
        self._directions = table(list(DIRECTIONS.values()))
        self._speeds = table(list(SPEEDS.values()))
        self._times = torch.linspace(0, 1, FRAMES, device=device)
        self._pixels = torch.arange(SIZE, device=device) + 0.5

    def labels(self, count: int) -> Labels:
        """What `count` clips show, drawn evenly."""
        sizes = (len(PAIRS), len(SHAPES), len(DIRECTIONS), len(SPEEDS))
        return Labels(*(torch.randint(n, (count,), device=self._device) for n in sizes))

    def clips(self, labels: Labels, *, spread: float, loose: bool = False) -> Tensor:
        """(B, 3, F, H, W) in [-1, 1].

        `spread` is how far from the middle a path may lie: 1 anywhere in the picture, 0 centred.
        `loose`: colours, proportions and edges as pictures of any origin have them.
        """
        radius = self._between(*RADIUS, like=labels.pair)
        slowest, fastest = self._speeds[labels.speed].unbind(-1)
        travel = self._between(slowest, fastest, like=labels.pair)
        path = self._directions[labels.direction] * travel[:, None]
        edge = radius[:, None] + MARGIN
        low, high = edge + (-path).clamp(min=0), SIZE - edge - path.clamp(min=0)
        offset = (2 * torch.rand(len(radius), 2, device=self._device) - 1) * spread
        start = (low + high) / 2 + offset * (high - low) / 2
        centre_BF2 = start[:, None] + path[:, None] * self._times[None, :, None]
        colors, grounds = self._colors[labels.pair], self._backgrounds[labels.pair]
        stretch_B2, edge_B = torch.ones_like(path), torch.full_like(radius, EDGE)
        if loose:
            colors, grounds = self._jittered(colors), self._jittered(grounds)
            stretch_B2 = 1 + STRETCH * (2 * torch.rand_like(path) - 1)
            edge_B = self._between(*LOOSE_EDGE, like=labels.pair)
        distance = self._distance(centre_BF2, radius, labels.shape, stretch_B2)
        ink = torch.sigmoid(-edge_B[:, None, None, None] * distance)[:, None]
        colors, grounds = (color[:, :, None, None, None] for color in (colors, grounds))
        return colors * ink + grounds * (1 - ink)

    @staticmethod
    def _jittered(colors_B3: Tensor) -> Tensor:
        off = (2 * torch.rand_like(colors_B3) - 1) * JITTER / 127.5
        return (colors_B3 + off).clamp(-1, 1)

    def _between(self, low: Tensor | float, high: Tensor | float, *, like: Tensor) -> Tensor:
        return low + (high - low) * torch.rand(len(like), device=self._device)

    def _distance(
        self, centre_BF2: Tensor, radius: Tensor, shape: Tensor, stretch_B2: Tensor
    ) -> Tensor:
        """Signed distance (B, F, H, W) in about pixels to the outline, negative inside."""
        wider, taller = stretch_B2[:, :, None, None, None].unbind(1)
        x = (self._pixels[None, None, None, :] - centre_BF2[..., 0, None, None]) / wider
        y = (self._pixels[None, None, :, None] - centre_BF2[..., 1, None, None]) / taller
        r = radius[:, None, None, None]
        circle = (x.square() + y.square()).sqrt() - r
        square = torch.maximum(x.abs(), y.abs()) - 0.9 * r
        triangle = torch.maximum(y - 0.7 * r, 0.866 * x.abs() - 0.5 * y - 0.6 * r)
        kind = shape[:, None, None, None]
        return torch.where(kind == 0, circle, torch.where(kind == 1, square, triangle))


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
