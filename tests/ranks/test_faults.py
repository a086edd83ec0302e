"""When one rank fails, all end soon, and one says why: real processes over gloo."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

START = 40.0  # seconds for torch to be imported by all ranks on a busy machine
LIMIT = 15.0


def test_without_a_fault_all_ranks_return(driver):
    run = driver("fine")
    assert run.end(START) == [0, 0, 0]
    assert run.stderr() == ""


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_rank_ends_all(driver, who):
    # Rank 0 hosts the store here, so killing it also takes the means of telling each other.
    run = driver("kill", who)
    run.wait_ready()
    started = time.monotonic()
    codes = run.end(LIMIT)
    assert time.monotonic() - started < LIMIT
    assert codes == [-signal.SIGKILL if rank == who else 1 for rank in range(3)]
    assert run.stderr().count("RankError") == 1, run.stderr()
    assert f"rank {who} of 3 (pid {run.pids()[who]}" in run.stderr()
    assert "disappeared in stage step" in run.stderr()
    assert "Traceback" not in run.stderr()
    lowest = min({0, 1, 2} - {who})
    assert "RankError" in (run.folder / f"stderr-{lowest}").read_text()


def test_a_rank_killed_before_the_groups_exist(driver):
    run = driver("kill early", 1)
    assert run.end(START) == [1, -signal.SIGKILL, 1]
    assert run.stderr().count("rank 1 of 3") == 1
    assert "disappeared in stage load" in run.stderr()


@pytest.mark.parametrize(
    ("what", "stage", "text"),
    [
        ("raise", "load", "CheckpointError: the file is short\nhint: fetch it again\n"),
        pytest.param("raise late", "decode", "CheckpointError: late\n", marks=pytest.mark.slow),
        ("oom", "load", "RankError: out of GPU memory: CUDA out of memory."),
        ("nap", "load", "CheckpointError: woken\n"),
        ("bug", "load", "Traceback (most recent call last)"),
    ],
)
def test_an_error_of_one_rank_ends_all(driver, what, stage, text):
    run = driver(what, 1)
    assert run.end(START) == [1, 1, 1]
    assert run.stderr().count(text) == 1, run.stderr()
    assert run.stderr().count(f"in rank 1 of 3, stage {stage}\n") == 1
    assert run.stderr().count("\nin rank") == 1
    for rank in range(3):
        assert (run.folder / f"unwound{rank}").exists(), "with and finally blocks did not run"


@pytest.mark.slow
def test_a_slow_rank_is_left_alone(driver):
    started = time.monotonic()
    assert driver("slow", 1).end(START) == [0, 0, 0]
    assert time.monotonic() - started > 6


def test_sigint_ends_ranks_that_are_stuck_in_native_code(driver):
    run = driver("wait", 1, world=2)
    run.wait_ready()
    started = time.monotonic()
    for pid in run.pids():
        os.kill(pid, signal.SIGINT)
    assert run.end(5.0) == [130, 130]
    assert time.monotonic() - started < 5.0
    assert run.stderr().count("ended by SIGINT") == 1
    assert "Traceback" not in run.stderr()
    assert (run.folder / "cleaned1").exists(), "the stuck rank must run its cleanups"


def test_sigterm_to_one_rank_ends_all_and_is_named(driver):
    run = driver("wait", 0, world=2)
    run.wait_ready()
    os.kill(run.pids()[1], signal.SIGTERM)
    assert run.end(LIMIT) == [143, 143]
    assert run.stderr() == "RankError: ended by SIGTERM\nin rank 1 of 2, stage step\n"


def test_under_torchrun_a_killed_rank_is_named_once(driver):
    run = driver("kill", 1, torchrun=True)
    run.wait_ready()
    assert run.end(LIMIT) != [0]
    assert run.stderr().count("RankError: rank 1 of 3") == 1, run.stderr()
    assert "ended by SIGTERM" not in run.stderr()


@pytest.mark.slow
def test_under_torchrun_an_error_is_printed_once(driver):
    run = driver("raise", 1, torchrun=True)
    assert run.end(START) != [0]
    assert run.stderr().count("CheckpointError") == 1, run.stderr()


def test_sigint_to_torchrun_ends_everything(driver):
    run = driver("wait", 1, world=2, torchrun=True)
    run.wait_ready()
    run.processes[0].send_signal(signal.SIGINT)
    assert run.end(5.0) != [0]
    assert run.stderr().count("RankError") == 1, run.stderr()


@pytest.mark.slow
def test_ranks_end_when_torchrun_is_killed(driver):
    run = driver("wait", 1, world=2, torchrun=True)
    run.wait_ready()
    run.processes[0].kill()
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and any(map(runs, run.pids())):
        time.sleep(0.1)
    assert not any(map(runs, run.pids()))
    assert run.stderr().count("RankError") == 1, run.stderr()


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
