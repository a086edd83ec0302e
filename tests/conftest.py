"""Fixtures for every test: no test may leave a SysV segment behind."""

from __future__ import annotations

import ctypes
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

# Before torch is imported, and for child processes: teams of OpenMP threads that share two cores
# with other ranks spin for each other, which costs up to fifty times the work itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import pytest
import torch

NEW_IPC_NAMESPACE = 0x08000000

# A shell that starts this in the background may have SIGINT ignored, which children would inherit;
# tests that interrupt programs need what a person at a terminal has.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def segments() -> set[str]:
    """Ids of this IPC namespace's SysV segments, but for those of processes that are not ours."""
    rows = [row.split() for row in Path("/proc/sysvipc/shm").read_text().splitlines()]
    creator, names = rows[0].index("cpid"), rows[0].index("shmid")
    return {row[names] for row in rows[1:] if not _elsewhere(int(row[creator]))}


def _elsewhere(pid: int) -> bool:
    """The process runs and does not descend from this one: another program on this machine."""
    try:
        process = psutil.Process(pid)
        return os.getpid() not in {pid, *(parent.pid for parent in process.parents())}
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True)
def no_segment_left() -> Iterator[None]:
    before = segments()
    yield
    deadline = time.monotonic() + 5  # a killed child is reaped a moment later
    while (left := segments() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"SysV segments left behind: {sorted(left)}"


@pytest.fixture
def host_must_not_wait() -> Callable[[], AbstractContextManager[None]]:
    """A context in which any call that makes the host wait for the GPU raises RuntimeError."""

    @contextmanager
    def watch() -> Iterator[None]:
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode says that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watch


def pytest_configure(config: pytest.Config) -> None:
    """GPUs are seen by tests that are asked for by a GPU marker; all others run on the CPU."""
    if "gpu" not in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "PYTEST_XDIST_WORKER" in os.environ:
        ctypes.CDLL(None).unshare(NEW_IPC_NAMESPACE)  # each worker sees its own segments alone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count()
    for item in items:
        needed = 2 if "multigpu" in item.keywords else 1 if "gpu" in item.keywords else 0
        if gpus < needed:
            reason = f"needs {needed} CUDA device(s), sees {gpus}; see `make gpu`"
            item.add_marker(pytest.mark.skip(reason=reason))
