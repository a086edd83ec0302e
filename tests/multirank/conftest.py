"""Whole pipelines on several ranks; a checkpoint of 8 heads and 8 blocks for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared_offload.report.progress import Progress
from shared_offload.synth.folder import make_checkpoint
from tests.reference.processes import Run

DRIVER = Path(__file__).with_name("driver.py")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "t2v"
    make_checkpoint(folder, "tiny", "t2v", progress=Progress(enabled=False))
    return folder


@pytest.fixture
def settings(checkpoint: Path) -> Callable[..., dict[str, Any]]:
    def make(**options: Any) -> dict[str, Any]:
        small = {
            "model_path": str(checkpoint),
            "size": [32, 48],
            "num_frames": 5,
            "infer_steps": 2,
            "enable_cfg": True,
            "device": "cpu",
            "prompt": "a train goes over a bridge in the snow",
            "negative_prompt": "blurry, static",
            "seed": 7,
        }
        return {**small, **options}

    return make


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start a job of driver.py; each has a folder of its own."""
    runs: list[Run] = []

    def start(world: int, *, torchrun: bool = False, **job: Any) -> Run:
        folder = tmp_path / f"run{len(runs)}"
        folder.mkdir()
        path = folder / "job.json"
        path.write_text(json.dumps({**job, "folder": str(folder)}))
        runs.append(Run(DRIVER, [str(path)], folder, world, torchrun))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()
