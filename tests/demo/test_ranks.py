"""Several ranks with one shared arena score as one rank does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.reference.demo import CASES, FEW, LEAST, counts, kept, options
from tests.reference.options import SHARED
from tests.reference.processes import Run

DRIVER = Path(__file__).parents[1] / "multirank" / "driver.py"


@pytest.mark.slow
@pytest.mark.parametrize(("task", "world"), [("t2v", 2), ("i2v", 4)])
def test_ranks_that_share_an_arena(pictures, tmp_path, task: str, world: int) -> None:
    images = [str(path) if task == "i2v" else None for path in pictures]
    requests = [
        {"prompt": case.prompt, "seed": number, "image_path": images[number]}
        for number, case in enumerate(CASES)
    ]
    settings = options(task, **FEW, **SHARED, image_path=images[0])
    job = tmp_path / "job.json"
    given = {"kind": "requests", "settings": settings, "requests": requests}
    job.write_text(json.dumps({**given, "folder": str(tmp_path)}))
    run = Run(DRIVER, [str(job)], tmp_path, world, torchrun=False)
    try:
        assert set(run.end(900)) == {0}, run.stderr()
    finally:
        run.stop()
    frames = torch.load(tmp_path / "frames0.pt")
    found = counts(frames)
    assert min(found.values()) >= LEAST[task], found
    if task == "i2v":
        assert kept(frames, pictures) >= LEAST[task]
