"""The driver of this folder on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.reference.processes import Run

DRIVER = Path(__file__).with_name("driver.py")


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(what: str, who: int = 0, world: int = 3, torchrun: bool = False) -> Run:
        runs.append(Run(DRIVER, [what, str(who), str(tmp_path)], tmp_path, world, torchrun))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()
