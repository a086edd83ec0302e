"""Videos of the trained demo model through the real path.

A fault anywhere between the files and the frames shows as a wrong picture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from shared_offload.config import Settings
from shared_offload.pipeline.generate import Pipeline
from tests.reference.demo import CASES, KINDS, STREAMED, draw_pictures, options
from tests.reference.garbage import freeze_imports


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage() -> None:
    freeze_imports()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return draw_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def videos(pictures) -> Callable[..., list[Tensor]]:
    """The frames of cases from one pipeline, made once for each kind of run."""

    @functools.cache
    def make(task: str, kind: str, shift: int = 0, cases: int = len(CASES)) -> list[Tensor]:
        """With `shift`, a video has the seed (and picture) of one case and a later one's prompt."""
        frames = []
        picture_path = str(pictures[0]) if task == "i2v" else None
        given = options(task, **(KINDS | STREAMED)[kind], image_path=picture_path)
        with Pipeline(Settings.from_json_and_flags(given, {})) as pipeline:
            for number in range(cases):
                image = pictures[number] if task == "i2v" else None
                prompt = CASES[(number + shift) % len(CASES)].prompt
                made = pipeline.generate(prompt=prompt, seed=number, image_path=image)
                frames.append(made.frames)
        return frames

    return make
