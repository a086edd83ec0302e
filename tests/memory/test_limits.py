"""Limits read from trees that look like /proc and /sys, and from this machine against psutil."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import psutil
import pytest

from shared_offload.errors import PreflightError
from shared_offload.memory.limits import Demand, HostLimits, read_limits, shortages

GIB = 1 << 30
PLENTY = HostLimits(
    page_nbytes=4096,
    shmmax=1 << 62,
    shmall_pages=1 << 50,
    shmmni=4096,
    segments=3,
    segment_pages=1000,
    total=256 * GIB,
    available=200 * GIB,
    nodes={0: 100 * GIB, 1: 100 * GIB},
    cgroup="",
    cgroup_limit=None,
    cgroup_available=None,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def host(root: Path) -> Path:
    head = "key shmid perms size cpid lpid nattch uid gid cuid cgid atime dtime ctime rss swap\n"
    return write(
        root,
        {
            "proc/sys/kernel/shmmax": "1000000\n",
            "proc/sys/kernel/shmall": "2000\n",
            "proc/sys/kernel/shmmni": "7\n",
            "proc/sysvipc/shm": head + "0 1 1600 4097 1 1 1 0 0 0 0 0 0 0 0 0\n" * 2,
            "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\n",
            "sys/devices/system/node/has_memory": "0,2\n",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemFree: 100 kB\n"
            "Node 0 Active(file): 20 kB\nNode 0 Inactive(file): 3 kB\nNode 0 FilePages: 999 kB\n",
            "sys/devices/system/node/node2/meminfo": "Node 2 MemFree: 7 kB\n",
        },
    )


def test_the_host_as_files_say(tmp_path: Path) -> None:
    found = read_limits(host(tmp_path))
    assert (found.shmmax, found.shmall_pages, found.shmmni) == (1_000_000, 2000, 7)
    assert (found.segments, found.segment_pages) == (2, 4)
    assert (found.total, found.available) == (1000 << 10, 600 << 10)
    assert found.nodes == {0: 123 << 10, 2: 7 << 10}
    assert found.cgroup == "" and found.cgroup_available is None


def test_a_kernel_without_sysv_shared_memory(tmp_path: Path) -> None:
    root = host(tmp_path)
    (root / "proc/sysvipc/shm").unlink()
    with pytest.raises(PreflightError, match="no SysV shared memory"):
        read_limits(root)


V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 31 0:38 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "cgroup", "limit", "available"),
    [
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/a/b\n0::/\n",
                "proc/self/mountinfo": V1_MOUNT.format(root="/"),
                f"{V1}/memory.limit_in_bytes": "9223372036854771712",
                f"{V1}/memory.usage_in_bytes": "999999",
                f"{V1}/a/memory.limit_in_bytes": "500000",
                f"{V1}/a/memory.usage_in_bytes": "400000",
                f"{V1}/a/memory.stat": "cache 9\nactive_file 1\ntotal_active_file 10000\n"
                "total_inactive_file 20000\n",
                f"{V1}/a/b/memory.limit_in_bytes": "450000",
                f"{V1}/a/b/memory.usage_in_bytes": "10",
            },
            f"/{V1}/a",
            500_000,
            130_000,
            id="v1: the parent is tighter, its page cache can go",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pod/job\n",
                "proc/self/mountinfo": V2_MOUNT.format(root="/"),
                f"{V2}/pod/memory.max": "max",
                f"{V2}/pod/memory.current": "5",
                f"{V2}/pod/job/memory.max": "800",
                f"{V2}/pod/job/memory.current": "700",
                f"{V2}/pod/job/memory.stat": "shmem 600\nactive_file 30\ninactive_file 20\n"
                "file_dirty 15\nfile_writeback 5\n",
            },
            f"/{V2}/pod/job",
            800,
            130,
            id="v2: shared memory is not page cache, dirty pages stay",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/\n",
                "proc/self/mountinfo": V2_MOUNT.format(root="/docker/123"),
                f"{V2}/memory.max": "800",
                f"{V2}/memory.current": "900",
            },
            f"/{V2}",
            800,
            0,
            id="v2 in a container: its own cgroup is the root; over its limit is nothing left",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "9:memory:/docker/123\n",
                "proc/self/mountinfo": V1_MOUNT.format(root="/docker/123"),
                f"{V1}/memory.limit_in_bytes": "800",
                f"{V1}/memory.usage_in_bytes": "100",
            },
            f"/{V1}",
            800,
            700,
            id="v1 in a container that knows its path outside",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/../elsewhere\n",
                "proc/self/mountinfo": V2_MOUNT.format(root="/"),
                f"{V2}/cgroup.procs": "",
            },
            "",
            None,
            None,
            id="no limit anywhere",
        ),
    ],
)
def test_the_tightest_cgroup(
    tmp_path: Path, files: dict[str, str], cgroup: str, limit: int | None, available: int | None
) -> None:
    found = read_limits(write(host(tmp_path), files))
    assert (found.cgroup, found.cgroup_limit, found.cgroup_available) == (cgroup, limit, available)


@pytest.mark.parametrize(
    ("change", "demands", "limit", "needed", "found", "way_out"),
    [
        ({"shmmax": GIB}, [Demand(2 * GIB)], "kernel.shmmax", 2 * GIB, GIB, f"shmmax={2 * GIB}"),
        (
            {"shmall_pages": 1256},
            [Demand(4096 * 200), Demand(4096 * 57)],
            "kernel.shmall",
            4096 * 257,
            4096 * 256,
            "shmall=1257",
        ),
        ({"shmmni": 4}, [Demand(1), Demand(1)], "kernel.shmmni", 5, 4, "ipcs -m"),
        ({}, [Demand(101 * GIB)] * 2, "available memory", 202 * GIB, 200 * GIB, "scope host"),
        ({}, [Demand(101 * GIB, 1)], "NUMA node 1", 101 * GIB, 100 * GIB, "scope host"),
        (
            {"cgroup": "/x", "cgroup_limit": 9 * GIB, "cgroup_available": 5 * GIB},
            [Demand(3 * GIB)] * 2,
            "memory cgroup /x",
            6 * GIB,
            5 * GIB,
            "9.0 GiB",
        ),
    ],
)
def test_too_little_is_said_with_both_numbers(
    change: dict, demands: list, limit: str, needed: int, found: int, way_out: str
) -> None:
    (error,) = shortages(dataclasses.replace(PLENTY, **change), demands)
    assert error.facts == {"limit": limit, "needed": needed, "found": found}
    assert way_out in error.hint


def test_what_just_fits_is_no_shortage() -> None:
    assert shortages(PLENTY, [Demand(100 * GIB, 0), Demand(100 * GIB, 1)]) == []
    # The one node of a host is the host: what its own meminfo says does not count.
    small = dataclasses.replace(PLENTY, nodes={0: GIB})
    assert shortages(small, [Demand(150 * GIB, 0)]) == []


def test_this_machine_against_psutil() -> None:
    found, memory = read_limits(), psutil.virtual_memory()
    assert abs(found.available - memory.available) < 0.1 * memory.total
    # MemTotal grows with use on some virtual machines.
    assert found.total == pytest.approx(memory.total, rel=0.1)
    assert shortages(found, [Demand(1 << 20)]) == []
    assert {e.facts["limit"] for e in shortages(found, [Demand(1 << 50)])} >= {"available memory"}
