"""Placement on a machine that really has NUMA nodes: a virtual one, booted by tools/numa_vm.sh."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
DRIVER = Path(__file__).parent / "driver.py"
VM = ROOT / "tools" / "numa_vm.sh"
KIB = 16 * 1024 + 4  # 16 MiB and the stamp page

pytestmark = [pytest.mark.numa_vm, pytest.mark.slow, pytest.mark.timeout(900)]

TWO_NODES: dict[str, dict[str, Any]] = {
    "numa": {"scope": "numa"},
    "auto": {"scope": "auto"},
    "rank-numa": {"scope": "rank-numa", "nodes": [0, 1, 1], "cpus": [0, 1, 1]},
    "foreign": {"scope": "numa", "nodes": [1, 0], "cpus": [0, 1]},
    "host": {"scope": "host", "nodes": [1, 0], "cpus": [1, 0]},
    "refused": {"scope": "numa", "refuse_mbind": True},
    "refused-lenient": {"scope": "numa", "refuse_mbind": True, "strict": False},
    "unknown": {"scope": "numa", "nodes": [0, None]},
    "unknown-lenient": {"scope": "numa", "nodes": [None, None], "strict": False},
    "unknown-auto": {"scope": "auto", "nodes": [0, None]},
    "too-large": {"scope": "numa", "mib": 700},
    "huge": {"scope": "numa", "huge": True},
    # Last: the cpuset stays for what follows.
    "cpuset": {"scope": "numa", "mems": "0"},
    "cpuset-lenient": {"scope": "numa", "mems": "0", "strict": False},
}
ONE_NODE: dict[str, dict[str, Any]] = {
    "numa": {"scope": "numa", "nodes": [0, 0], "cpus": [0, 0], "refuse_mbind": True},
}


def boot(nodes: int, mib: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    prepared = subprocess.run([VM, "--prepare"], capture_output=True, text=True)
    if prepared.returncode == 3:
        pytest.skip(f"needs root and apt for a virtual machine: {prepared.stderr.strip()}")
    command = [VM, "-n", str(nodes), "-m", str(mib), "-t", "600", "--"]
    command += [sys.executable, str(DRIVER), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    return boot(2, 640, TWO_NODES)


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return boot(1, 640, ONE_NODE)


def where(case: list[dict[str, Any]]) -> list[dict[str, int]]:
    assert all("pages" in rank for rank in case), case
    return [rank["pages"] for rank in case]


def errors(case: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert all("error" in rank for rank in case), case
    return [rank["error"] for rank in case]


def test_the_machine_is_seen_as_it_is(two: dict[str, Any], one: dict[str, Any]) -> None:
    # qemu's host bridge tells no node: unknown among two, certain among one.
    assert two["facts"] == {
        "nodes": [0, 1],
        "cpus": {"0": [0], "1": [1]},
        "device": None,
        "own": [0, None],
        "segments": 0,
    }
    assert one["facts"]["device"] == 0 and one["facts"]["own"] == [0, 0]
    assert not two["torch"]


@pytest.mark.parametrize("scope", ["numa", "auto"])
def test_numa_puts_every_page_on_its_node(two: dict[str, Any], scope: str) -> None:
    assert where(two[scope]) == [{"0": KIB}, {"1": KIB}]
    assert [rank["report"]["node_nbytes"] for rank in two[scope]] == [
        {"0": KIB << 10},
        {"1": KIB << 10},
    ]


def test_binding_beats_the_cpu_that_touches(two: dict[str, Any]) -> None:
    assert where(two["foreign"]) == [{"1": KIB}, {"0": KIB}]


def test_rank_numa_binds_each_copy(two: dict[str, Any]) -> None:
    assert where(two["rank-numa"]) == [{"0": KIB}, {"1": KIB}, {"1": KIB}]
    assert [rank["report"]["ranks"] for rank in two["rank-numa"]] == [[0], [1], [2]]


def test_host_uses_the_leaders_node(two: dict[str, Any]) -> None:
    assert where(two["host"]) == [{"1": KIB}, {"1": KIB}]
    assert two["host"][0]["report"]["ranks"] == [0, 1]


def test_refused_binding(two: dict[str, Any]) -> None:
    for error in errors(two["refused"]):
        assert error["type"] == "NumaError" and error["facts"]["errno"] == "EPERM"
        assert "SYS_NICE" in error["hint"]
    # First touch by a CPU of the node does as well, and the note says on what it rests.
    assert where(two["refused-lenient"]) == [{"0": KIB}, {"1": KIB}]
    assert all("first touched" in rank["notes"][0] for rank in two["refused-lenient"])


def test_a_node_outside_the_cpuset(two: dict[str, Any]) -> None:
    for error in errors(two["cpuset"]):
        assert error["type"] == "NumaError"
        assert (error["facts"]["node"], error["facts"]["allowed"]) == (1, [0])
        assert "cpuset" in error["expected"]
    lenient = two["cpuset-lenient"]
    assert where(lenient) == [{"0": KIB}, {"0": KIB}]
    assert "should be on NUMA node 1" in lenient[1]["notes"][-1]
    assert lenient[1]["report"]["node_nbytes"] == {"0": KIB << 10}


def test_an_unknown_node(two: dict[str, Any]) -> None:
    assert {error["type"] for error in errors(two["unknown"])} == {"NumaError"}
    assert all("unknown" in error["what"] for error in errors(two["unknown"]))
    assert "not bound" in two["unknown-lenient"][0]["notes"][0]
    assert two["unknown-lenient"][0]["report"]["scope"] == "numa"
    assert [rank["report"]["scope"] for rank in two["unknown-auto"]] == ["host", "host"]


def test_an_arena_larger_than_its_node(two: dict[str, Any]) -> None:
    for error in errors(two["too-large"]):
        problems = [json.loads(e) for e in error.get("errors", [json.dumps(error)])]
        nodes = [p for p in problems if p["facts"]["limit"].startswith("NUMA node")]
        assert [p["facts"]["limit"] for p in nodes] == ["NUMA node 0", "NUMA node 1"]
        assert all(p["facts"]["needed"] > p["facts"]["found"] > 0 for p in nodes)


def test_huge_pages_where_the_kernel_allows_them(two: dict[str, Any]) -> None:
    # The stamp page becomes a huge one as well, and numa_maps counts all of it.
    assert [list(found) for found in where(two["huge"])] == [["0"], ["1"]]
    assert [rank["report"]["huge_nbytes"] for rank in two["huge"]] == [16 << 20] * 2
    assert [rank["report"]["huge_nbytes"] for rank in two["numa"]] == [0] * 2


def test_one_node_needs_no_binding(one: dict[str, Any]) -> None:
    assert where(one["numa"]) == [{"0": KIB}, {"0": KIB}]
    assert one["numa"][0]["notes"] == []
