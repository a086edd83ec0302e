"""The demo model's cases, the ways to run it, and how its videos are scored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.reference.judge import Verdict, judge
from tests.reference.options import FP8, OFFLOAD, PHASES
from tests.reference.pictures import SIZE, picture

DEMO = Path(__file__).parents[2] / "assets" / "demo"
GUIDED = {"enable_cfg": True, "sample_guide_scale": 2, "infer_steps": 6}
FEW = {"model_cls": "wan2.1_distill", "denoising_step_list": [1000, 750, 500, 250]}
NEGATIVE = {**GUIDED, "negative_prompt": "blurry, static, low quality"}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "four steps": FEW,  # a second for each video, where guided ones take two
    "guided": GUIDED,
    "unguided": {"infer_steps": 6},
    "negative prompt": NEGATIVE,
}
STREAMED: Mapping[str, Mapping[str, Any]] = {  # of the first kind, whose bits they keep
    "phase": {**FEW, **OFFLOAD, **PHASES},
    "disk": {**FEW, **OFFLOAD, "lazy_load": True},
}
QUICK, *REST = KINDS
EVERY_KIND = [QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in REST)]
LEAST = {"t2v": 11, "i2v": 10}  # of 12
PSNR = 25.0  # of the first frame to the picture, in dB
AWAY = 10  # pixels from the middle at which a picture's object starts


class Case(NamedTuple):
    color: str
    background: str
    shape: str
    direction: str

    @property
    def prompt(self) -> str:
        article = "an" if self.color == "orange" else "a"
        shown = f"{article} {self.color} {self.shape}"
        return f"{shown} moves {self.direction} on a {self.background} background"


CASES = [
    Case(*line.split())
    for line in """\
        red blue circle right
        green black square left
        blue white triangle up
        yellow gray circle down
        purple teal square right
        orange blue triangle left
        red white square up
        green white triangle down
        blue gray circle left
        yellow teal square down
        purple black triangle right
        orange gray circle up""".splitlines()
]
STEPS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


def draw_pictures(folder: Path) -> list[Path]:
    """A first frame for each case, its object on the side from which it is to move."""
    paths = []
    for number, (color, background, shape, direction) in enumerate(CASES):
        centre = tuple(SIZE / 2 - AWAY * step for step in STEPS[direction])
        paths.append(folder / f"{number}.png")
        Image.fromarray(picture(color, background, shape, centre).numpy()).save(paths[-1])
    return paths


def options(task: str, **more: Any) -> dict[str, Any]:
    small = {
        "task": task,
        "model_path": str(DEMO / task),
        "size": [SIZE, SIZE],
        "num_frames": 17,
        "sample_shift": 3,
        "device": "cpu",
        "seed": 0,
        **FP8,
    }
    return small | more


def right(frames: Sequence[Tensor], what: str) -> int:
    """Of 12 videos, those that show what their case asks for in one respect."""
    verdicts = [judge(video) for video in frames]
    pairs = zip(verdicts, CASES, strict=True)
    return sum(getattr(verdict, what) == getattr(case, what) for verdict, case in pairs)


def counts(frames: Sequence[Tensor]) -> dict[str, int]:
    return {what: right(frames, what) for what in ("color", "background", "direction")}


def kept(frames: Sequence[Tensor], firsts: Sequence[Path]) -> int:
    """Videos that begin with their picture and show its object to the end."""
    good = 0
    for video, path, case in zip(frames, firsts, CASES, strict=True):
        verdict: Verdict = judge(video)
        same = (verdict.color, verdict.background) == (case.color, case.background)
        good += same and verdict.steady >= 0.9 and psnr(video[0], _picture_of(path)) >= PSNR
    return good


def psnr(frame: Tensor, wanted: Tensor) -> float:
    error = (frame.float() - wanted.float()).square().mean().item()
    return 10 * math.log10(255**2 / max(error, 1e-6))


def _picture_of(path: Path) -> Tensor:
    with Image.open(path) as image:
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(SIZE, SIZE, 3)
