"""Several ranks with one shared arena score as one rank does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.reference.demo import CASES, FEW, LEAST, counts, options
from tests.reference.options import SHARED
from tests.reference.processes import Run

DRIVER = Path(__file__).parents[1] / "multirank" / "driver.py"


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_ranks_that_share_an_arena(pictures, tmp_path, task: str, world: int) -> None:
    jobs = {
        str(number): options(
            task,
            **FEW,
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
    assert min(found.values()) >= LEAST[task], found
