"""The trained demo model through the real path: videos show what was asked for.

A fault anywhere between the files and the frames shows as a wrong picture. What a video shows is
judged from its pixels (tests/reference/judge.py).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from torch import Tensor

from shared_offload.config import Settings
from shared_offload.pipeline.generate import Pipeline
from tests.reference.judge import Verdict, judge
from tests.reference.options import FP8, OFFLOAD, PHASES, SHARED
from tests.reference.pictures import SIZE, picture
from tests.reference.processes import Run

DEMO = Path(__file__).parents[1] / "assets" / "demo"
DRIVER = Path(__file__).parent / "multirank" / "driver.py"
MODES: Mapping[str, Mapping[str, Any]] = {
    "phase": {**OFFLOAD, **PHASES},
    "disk": {**OFFLOAD, "lazy_load": True},
}
GUIDED = {"enable_cfg": True, "sample_guide_scale": 4, "infer_steps": 10}
FEW = {"model_cls": "wan2.1_distill", "denoising_step_list": [1000, 750, 500, 250]}
NEGATIVE = {**GUIDED, "negative_prompt": "blurry, static, low quality"}
LEAST = {"t2v": 11, "i2v": 10}  # of 12
CHANCE = 5  # of 12, at most, where 1 in 4 is expected
PSNR = 25.0
AWAY = 10  # pixels from the middle at which a picture's object starts

pytestmark = [
    pytest.mark.skipif(
        not (DEMO / "i2v" / "config.json").is_file(),
        reason="assets/demo is not there: tools/train_demo_model.py makes it (docs/demo-model.md)",
    ),
    pytest.mark.timeout(1200),
]


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


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A first frame for each case, its object on the side from which it is to move."""
    folder = tmp_path_factory.mktemp("pictures")
    paths = []
    for number, (color, background, shape, direction) in enumerate(CASES):
        centre = tuple(SIZE / 2 - AWAY * step for step in STEPS[direction])
        frame = picture(color, background, shape, centre)
        paths.append(folder / f"{number}.png")
        Image.fromarray(frame.numpy()).save(paths[-1])
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


@pytest.fixture(scope="module")
def videos(pictures) -> Callable[..., list[Tensor]]:
    """The frames of all cases from one pipeline, made once for each kind of run."""

    @functools.cache
    def make(task: str, kind: str, shift: int = 0) -> list[Tensor]:
        """With `shift`, a video has the seed (and picture) of one case and a later one's prompt."""
        frames = []
        picture_path = str(pictures[0]) if task == "i2v" else None
        given = options(task, **KINDS[kind], image_path=picture_path)
        with Pipeline(Settings.from_json_and_flags(given, {})) as pipeline:
            for number in range(len(CASES)):
                image = pictures[number] if task == "i2v" else None
                prompt = CASES[(number + shift) % len(CASES)].prompt
                made = pipeline.generate(prompt=prompt, seed=number, image_path=image)
                frames.append(made.frames)
        return frames

    return make


KINDS: Mapping[str, Mapping[str, Any]] = {
    "four steps": FEW,  # the first: a second for each video, where others take three
    "guided": GUIDED,
    "unguided": {"infer_steps": 10},
    "negative prompt": NEGATIVE,
    **{mode: {**GUIDED, **places} for mode, places in MODES.items()},
}
QUICK, *REST = KINDS
EVERY_KIND = [QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in REST)]


def right(frames: Sequence[Tensor], what: str) -> int:
    """Of 12 videos, those that show what their case asks for in one respect."""
    verdicts = [judge(video) for video in frames]
    pairs = zip(verdicts, CASES, strict=True)
    return sum(getattr(verdict, what) == getattr(case, what) for verdict, case in pairs)


def counts(frames: Sequence[Tensor]) -> dict[str, int]:
    return {what: right(frames, what) for what in ("color", "background", "direction")}


def psnr(frame: Tensor, wanted: Tensor) -> float:
    error = (frame.float() - wanted.float()).square().mean().item()
    return 10 * math.log10(255**2 / max(error, 1e-6))


def kept(frames: Sequence[Tensor], firsts: Sequence[Path]) -> int:
    """Videos that begin with their picture and show its object to the end."""
    good = 0
    for video, path, case in zip(frames, firsts, CASES, strict=True):
        wanted = picture_of(path)
        verdict: Verdict = judge(video)
        same = (verdict.color, verdict.background) == (case.color, case.background)
        good += same and verdict.steady >= 0.9 and psnr(video[0], wanted) >= PSNR
    return good


def picture_of(path: Path) -> Tensor:
    with Image.open(path) as image:
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(SIZE, SIZE, 3)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_text_to_video_shows_what_the_prompt_says(videos, kind: str) -> None:
    found = counts(videos("t2v", kind))
    assert min(found.values()) >= LEAST["t2v"], found


@pytest.mark.slow
def test_another_ones_prompt_scores_as_chance_does(videos) -> None:
    """The seed stays and the prompt changes: it is the text that steers, not the noise."""
    found = counts(videos("t2v", "unguided", shift=1))
    assert max(found.values()) <= CHANCE, found


@pytest.mark.slow
def test_shapes_are_told_apart(videos) -> None:
    assert right(videos("t2v", "guided"), "shape") >= 7  # chance is 4 of 12; this model gets 8


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_image_to_video_moves_the_picture(videos, pictures, kind: str) -> None:
    made = videos("i2v", kind)
    found = counts(made) | {"kept": kept(made, pictures)}
    assert min(found.values()) >= LEAST["i2v"], found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_ranks_that_share_an_arena(pictures, tmp_path, task: str, world: int) -> None:
    jobs = {
        str(number): options(
            task,
            **GUIDED,
            **SHARED,
            prompt=case.prompt,
            seed=number,
            image_path=str(pictures[number]) if task == "i2v" else None,
        )
        for number, case in enumerate(CASES)
    }
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"kind": "videos", "settings": jobs, "folder": str(tmp_path)}))
    run = Run(DRIVER, [str(job)], tmp_path, world, torchrun=False)
    try:
        assert set(run.end(900)) == {0}, run.stderr()
    finally:
        run.stop()
    made = torch.load(tmp_path / "made0.pt")
    frames = [made[str(number)][1] for number in range(len(CASES))]
    found = counts(frames)
    if task == "i2v":
        found["kept"] = kept(frames, pictures)
    assert min(found.values()) >= LEAST[task], found
