"""Fixtures for every test: no test may leave a SysV segment behind."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

# Before torch is imported, and for child processes: teams of OpenMP threads that share two cores
# with other ranks spin for each other, which costs up to fifty times the work itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


def segments() -> set[str]:
    """Ids of all SysV shared-memory segments of this IPC namespace, from `ipcs`."""
    lines = subprocess.run(["ipcs", "-m"], capture_output=True, text=True, check=True).stdout
    return {f[1] for f in map(str.split, lines.splitlines()) if len(f) >= 6 and f[1].isdigit()}


@pytest.fixture(autouse=True)
def no_segment_left() -> Iterator[None]:
    before = segments()
    yield
    deadline = time.monotonic() + 5  # a killed child is reaped a moment later
    while (left := segments() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"SysV segments left behind: {sorted(left)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count()
    for item in items:
        needed = 2 if "multigpu" in item.keywords else 1 if "gpu" in item.keywords else 0
        if gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), has {gpus}"))
