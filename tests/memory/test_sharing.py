"""Ranks that share: one copy, equal content, nobody can write. Real processes, real segments."""

from __future__ import annotations

import hashlib
import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

MIB = 1 << 20
spec = importlib.util.spec_from_file_location("driver", Path(__file__).parent / "driver.py")
driver = importlib.util.module_from_spec(spec)
sys.modules["driver"] = driver
spec.loader.exec_module(driver)


def expected_digest(mib: int) -> str:
    digest = hashlib.blake2b()
    for piece in driver.content(mib):
        digest.update(piece)
    return digest.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize(("scope", "least", "most"), [("host", 0.99, 1.1), ("rank", 3.95, 4.2)])
def test_copies_in_memory(crew: Callable, scope: str, least: float, most: float) -> None:
    mib, world = 512, 4
    ranks = crew(world, scope=scope, mib=mib, hold="created")
    for rank in ranks if scope == "rank" else ranks[:1]:
        rank.wait_for("created")
    before = sum(rank.pss for rank in ranks)
    (ranks.folder / "go").touch()
    digests = {event["digest"] for event in ranks.wait_for("content")}
    copies = (sum(rank.pss for rank in ranks) - before) / (mib * MIB)
    ranks.finish()
    assert digests == {expected_digest(mib)}
    assert least < copies < most
    assert [rank.end()[0] for rank in ranks] == [0] * world


def test_everyone_closes_and_nobody_needed_torch(crew: Callable) -> None:
    ranks = crew(3)
    ranks.wait_for("open")
    ranks.finish()
    assert [rank.end() for rank in ranks] == [(0, "")] * 3
    assert [rank.find("closed")["torch"] for rank in ranks] == [False] * 3


@pytest.mark.parametrize("registrar", ["", "read-only", "writable"])
def test_a_follower_that_writes_dies_and_changes_nothing(crew: Callable, registrar: str) -> None:
    ranks = crew(2, per_rank={1: {"fault": "write"}}, registrar=registrar)
    assert ranks[1].end()[0] == -signal.SIGSEGV
    status, stderr = ranks[0].end()
    assert status == 1 and "rank 1" in stderr
    assert ranks[0].find("unchanged")["same"]


def test_the_leader_cannot_write_either_once_sealed(crew: Callable) -> None:
    ranks = crew(1, fault="write")
    assert ranks[0].end()[0] == -signal.SIGSEGV


@pytest.mark.parametrize("way", ["read-only", "writable"])
def test_the_report_says_how_it_was_registered(crew: Callable, way: str) -> None:
    ranks = crew(2, registrar=way)
    (row,) = ranks[0].wait_for("content")["reports"]
    ranks.finish()
    wanted = {"read-only": "read-only flag", "writable": "registered, then protected"}[way]
    assert (row["registered"], row["ranks"], row["saved_nbytes"]) == (wanted, [0, 1], 4 * MIB)
    assert sum(row["node_nbytes"].values()) == 4 * MIB + 4096  # content and stamp
    assert [rank.end()[0] for rank in ranks] == [0, 0]


def test_a_slow_leader_is_waited_for(crew: Callable) -> None:
    ranks = crew(2, hold="filling")
    ranks[0].wait_for("filling")
    ranks[0].kill(signal.SIGSTOP)
    time.sleep(3)  # thirty looks of the follower
    assert ranks[1].process.poll() is None
    (ranks.folder / "go").touch()
    ranks[0].kill(signal.SIGCONT)
    assert {event["digest"] for event in ranks.wait_for("content")} == {expected_digest(4)}
    ranks.finish()
    assert [rank.end() for rank in ranks] == [(0, "")] * 2


def test_peak_memory_is_the_arena_and_a_constant(crew: Callable) -> None:
    small, large = (crew(1, mib=mib, registrar="writable") for mib in (4, 132))
    peaks = [run[0].wait_for("open") and run[0].peak for run in (small, large)]
    for run in (small, large):
        run.finish()
    assert 124 * MIB <= peaks[1] - peaks[0] < 132 * MIB


def unshare(*options: str) -> tuple[str, ...]:
    command = ("unshare", *options)
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip(f"{' '.join(command)} is not permitted here")
    return command


def test_two_ipc_namespaces_get_a_copy_each(crew: Callable) -> None:
    ranks = crew(4, prefix=dict.fromkeys((2, 3), unshare("--ipc")))
    events = ranks.wait_for("content")
    ranks.finish()
    # Each of ranks 2 and 3 has an IPC namespace of its own here.
    assert [row["ranks"] for row in events[0]["reports"]] == [[0, 1], [2], [3]]
    assert {event["digest"] for event in events} == {expected_digest(4)}
    (note,) = events[0]["notes"]
    assert "0,1 | 2 | 3" in note and "different IPC namespaces" in note
    assert [rank.end() for rank in ranks] == [(0, "")] * 4


def test_ranks_in_other_pid_namespaces_share_and_notice_a_dead_leader(crew: Callable) -> None:
    apart = unshare("--pid", "--fork", "--kill-child", "--mount-proc")
    ranks = crew(2, prefix={0: apart}, hold="filling")
    ranks[0].wait_for("filling")
    ranks[0].kill(signal.SIGKILL)
    ranks[0].end()
    status, stderr = ranks[1].end()
    assert status == 1 and "rank 0" in stderr and "ended while others" in stderr


def test_through_the_store_of_a_run(crew: Callable) -> None:
    from torch import distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = crew(2, store_port=store.port)
    assert {e["digest"] for e in ranks.wait_for("content")} == {expected_digest(4)}
    ranks[0].wait_for("open")
    ranks[0].kill(signal.SIGKILL)
    status, stderr = ranks[1].end()
    assert status == 1 and "rank 0" in stderr
