"""Whole pipelines on tiny checkpoints of random weights, made once per session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from shared_offload.config import Settings
from shared_offload.pipeline.generate import Pipeline, Video
from shared_offload.report.progress import Progress
from shared_offload.synth.folder import make_checkpoint
from tests.reference.garbage import freeze_imports
from tests.reference.options import WEIGHTS

TASKS = ("t2v", "i2v")
PICTURE_SIZE = (44, 60)  # width, height: neither the size nor the aspect of any video here


@dataclass(frozen=True)
class Studio:
    """Makes settings, pipelines and videos; `options` are keys of the JSON over small defaults."""

    checkpoints: dict[str, Path]
    picture: Path

    def settings(self, task: str, **options: Any) -> Settings:
        small = {
            "model_path": str(self.checkpoints[task]),
            "size": [32, 48],
            "num_frames": 5,
            "infer_steps": 3,
            "enable_cfg": True,
            "sample_guide_scale": 4,
            "device": "cpu",
            "prompt": "a train goes over a bridge in the snow",
            "negative_prompt": "blurry, static",
            "seed": 7,
        }
        if task == "i2v":
            small["image_path"] = str(self.picture)
        return Settings.from_json_and_flags({**small, **options}, {"task": task})

    def pipeline(self, task: str, **options: Any) -> Pipeline:
        return Pipeline(self.settings(task, **options))

    def video(self, task: str, **options: Any) -> Video:
        """One video from a pipeline of its own."""
        with self.pipeline(task, **options) as pipeline:
            return pipeline.generate()


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage() -> None:
    freeze_imports()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Official shards, FP8 block files, encoders, VAE and tokenizer, by task."""
    folders = {task: tmp_path_factory.mktemp("tiny") / task for task in TASKS}
    for task, folder in folders.items():
        make_checkpoint(folder, "tiny", task, progress=Progress(enabled=False))
    return folders


@pytest.fixture(scope="session")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    coarse = torch.rand(1, 3, 6, 5, generator=torch.Generator().manual_seed(5))
    width, height = PICTURE_SIZE
    levels = F.interpolate(coarse, (height, width), mode="bilinear")[0].mul(255).to(torch.uint8)
    path = tmp_path_factory.mktemp("picture") / "first.png"
    Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy()).save(path)
    return path


@pytest.fixture(scope="session")
def studio(checkpoints: dict[str, Path], picture: Path) -> Studio:
    return Studio(checkpoints, picture)


@pytest.fixture(scope="session")
def resident(studio) -> Callable[[str, str], Tensor]:
    """The latents of a run with everything resident, by task and kind of weights."""

    @functools.cache
    def latents(task: str, weights: str) -> Tensor:
        return studio.video(task, **WEIGHTS[weights]).latents

    return latents
