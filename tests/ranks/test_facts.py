"""torchrun's variables, members and their life, against /proc and real processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared_offload.errors import OffloadError, Problems, RankError
from shared_offload.ranks.facts import RankFacts, alive, member_facts, read_facts, start_time

VARIABLES = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_no_variables_mean_a_lone_process():
    assert read_facts({}) == RankFacts()
    assert (RankFacts().world_size, RankFacts().launched) == (1, False)


def test_torchruns_variables():
    facts = read_facts(VARIABLES)
    assert (facts.rank, facts.world_size, facts.local_rank, facts.local_world_size) == (5, 8, 1, 4)
    assert (facts.host_rank, facts.master_addr, facts.master_port) == (1, "10.0.0.1", 29500)
    assert facts.launched
    assert facts.agent_store


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MASTER_PORT": ""}, ["MASTER_PORT"]),
        ({"RANK": "x"}, ["RANK", "'x'"]),
        ({"RANK": "-1"}, ["RANK", "'-1'"]),
        ({"RANK": "8"}, ["RANK (8)", "WORLD_SIZE (8)"]),
        ({"RANK": "9", "LOCAL_RANK": "4"}, ["RANK (9)", "LOCAL_RANK (4)"]),
    ],
)
def test_contradictions_are_errors(change, words):
    with pytest.raises(OffloadError) as caught:
        read_facts(VARIABLES | change)
    assert isinstance(caught.value, RankError | Problems)
    assert all(word in str(caught.value) for word in words)


def test_a_member_is_what_proc_says():
    member = member_facts(3, "0000:1b:00.0")
    assert member.pid == os.getpid()
    boot = subprocess.run(
        ["cat", "/proc/sys/kernel/random/boot_id"], capture_output=True, text=True
    )
    assert member.boot_id == boot.stdout.strip()
    assert member.ipc_namespace == os.readlink("/proc/self/ns/ipc")  # noqa: PTH115  # independent
    ticks = subprocess.run(
        ["awk", "{print $22}", f"/proc/{os.getppid()}/stat"], capture_output=True, text=True
    )
    assert str(start_time(os.getppid())) == ticks.stdout.strip()
    assert alive(member)
    assert not alive(dataclasses.replace(member, started=member.started - 1)), "a reused pid"


def test_a_killed_process_is_gone_even_before_it_is_reaped():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = start_time(process.pid)
    assert started is not None
    process.kill()
    while "Z" not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]:
        pass
    assert start_time(process.pid) is None
    process.wait()
    assert start_time(process.pid) is None


def test_who_shares_memory_and_who_sees_whom():
    here = member_facts(0)
    assert here.shares_memory(member_facts(1))
    container = dataclasses.replace(here, ipc_namespace="ipc:[1]")
    assert not here.shares_memory(container)
    assert here.sees(container)
    assert not here.sees(dataclasses.replace(here, pid_namespace="pid:[1]"))
    assert not here.shares_memory(dataclasses.replace(here, boot_id="other"))
