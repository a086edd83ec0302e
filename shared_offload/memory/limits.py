"""What the host lets us have: SysV limits, memory of the host, of each node and of the cgroup.

`read_limits` only reads, `shortages` only computes: nothing is created to find out whether it fits.
`free` shows the host; what counts is the least of host, node and cgroup. The cgroup of the process
that touches a page first pays for it. Torch-free; reads any tree that looks like /proc and /sys.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared_offload.errors import OffloadError, PreflightError
from shared_offload.memory import numa

NO_LIMIT = 1 << 60
"""cgroup v1 says "none" as a number near 2**63; nothing real is this large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """A snapshot, in bytes unless the name says otherwise."""

    page_nbytes: int
    shmmax: int
    shmall_pages: int
    shmmni: int
    segments: int
    """SysV segments that exist in this IPC namespace."""
    segment_pages: int
    total: int
    available: int
    nodes: dict[int, int]
    """Available on each NUMA node."""
    cgroup: str
    """The one with the least left on the way to the root; "" where none has a limit."""
    cgroup_limit: int | None
    cgroup_available: int | None


@dataclass(frozen=True, slots=True)
class Demand:
    """One arena to be: its bytes, and the node that must hold them (None: any)."""

    nbytes: int
    node: int | None = None


def gib(nbytes: int) -> str:
    """Bytes for a person."""
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"


def read_limits(root: Path = numa.ROOT) -> HostLimits:
    """All limits as they are now. PreflightError on a kernel without SysV shared memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    kernel, table = root / "proc/sys/kernel", root / "proc/sysvipc/shm"
    if not table.exists():
        raise PreflightError(
            "this kernel has no SysV shared memory: /proc/sysvipc/shm is missing",
            expected="Linux with CONFIG_SYSVIPC, not an emulation of it",
            hint="run outside the sandbox, on the host's own kernel",
            limit="sysvipc",
        )
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    memory = _fields((root / "proc/meminfo").read_text(), scale=1 << 10)
    cgroup, limit, available = _tightest(root)
    return HostLimits(
        page_nbytes=page,
        shmmax=int((kernel / "shmmax").read_text()),
        shmall_pages=int((kernel / "shmall").read_text()),
        shmmni=int((kernel / "shmmni").read_text()),
        segments=len(rows),
        segment_pages=sum(-(-int(row[3]) // page) for row in rows),
        total=memory["MemTotal"],
        available=memory["MemAvailable"],
        nodes={node: _node_available(node, root) for node in sorted(numa.memory_nodes(root))},
        cgroup=cgroup,
        cgroup_limit=limit,
        cgroup_available=available,
    )


def shortages(
    limits: HostLimits, demands: Sequence[Demand], *, where: str = "this host"
) -> list[OffloadError]:
    """What stands in the way of all `demands` together on one host; empty when they fit."""
    return [
        *ipc_shortages(limits, demands, where),
        *memory_shortages(limits, demands, where),
        *cgroup_shortages(limits, demands, where),
    ]


def ipc_shortages(
    limits: HostLimits, demands: Sequence[Demand], where: str
) -> Iterable[OffloadError]:
    """What the SysV limits of one IPC namespace refuse."""
    largest = max((demand.nbytes for demand in demands), default=0)
    if largest > limits.shmmax:
        yield _short(
            "kernel.shmmax", where, largest, limits.shmmax, f"sysctl -w kernel.shmmax={largest}"
        )
    pages = sum(-(-demand.nbytes // limits.page_nbytes) for demand in demands)
    left = limits.shmall_pages - limits.segment_pages
    if pages > left:
        yield _short(
            "kernel.shmall",
            where,
            pages * limits.page_nbytes,
            max(left, 0) * limits.page_nbytes,
            f"sysctl -w kernel.shmall={limits.segment_pages + pages} (pages)",
        )
    if limits.segments + len(demands) > limits.shmmni:
        yield PreflightError(
            f"kernel.shmmni on {where} allows {limits.shmmni} segments, {limits.segments} exist "
            f"and {len(demands)} are needed",
            hint=f"sysctl -w kernel.shmmni={2 * limits.shmmni}, or remove stale ones (ipcs -m)",
            limit="kernel.shmmni",
            needed=limits.segments + len(demands),
            found=limits.shmmni,
        )


def memory_shortages(
    limits: HostLimits, demands: Sequence[Demand], where: str
) -> Iterable[OffloadError]:
    """What one host, and each of its nodes, lacks."""
    needed = sum(demand.nbytes for demand in demands)
    if needed > limits.available:
        yield _short(
            "available memory",
            where,
            needed,
            limits.available,
            "stop other programs, share one copy (scope host), or use a smaller checkpoint",
        )
    # One node is the whole host; its own meminfo lags where a hypervisor adds memory on demand.
    for node, available in limits.nodes.items() if len(limits.nodes) > 1 else ():
        bound = sum(demand.nbytes for demand in demands if demand.node == node)
        if bound > available:
            yield _short(
                f"NUMA node {node}",
                where,
                bound,
                available,
                f"stop what uses node {node}, or take scope host, which may use every node",
            )


def cgroup_shortages(
    limits: HostLimits, demands: Sequence[Demand], where: str
) -> Iterable[OffloadError]:
    """What the cgroup behind `limits` lacks for the demands that it pays for."""
    needed = sum(demand.nbytes for demand in demands)
    if limits.cgroup_available is not None and needed > limits.cgroup_available:
        yield _short(
            f"memory cgroup {limits.cgroup}",
            where,
            needed,
            limits.cgroup_available,
            f"raise its limit of {gib(limits.cgroup_limit or 0)} (docker run --memory, "
            "systemd MemoryMax, the pod's memory limit)",
        )


def _short(limit: str, where: str, needed: int, found: int, hint: str) -> PreflightError:
    return PreflightError(
        f"{limit} on {where} has {gib(found)} left, the arenas need {gib(needed)}",
        hint=hint,
        limit=limit,
        needed=needed,
        found=found,
    )


def _fields(text: str, scale: int = 1) -> dict[str, int]:
    """`name value` lines, as /proc/meminfo and memory.stat have them."""
    rows = (line.replace(":", " ").split() for line in text.splitlines())
    return {row[0]: int(row[1]) * scale for row in rows if len(row) >= 2 and row[1].isdigit()}


def _node_available(node: int, root: Path) -> int:
    """Free, and page cache that the kernel gives up on demand."""
    memory = numa.node_memory(node, root)
    if not memory:  # no NUMA in this kernel: the node is the host
        return _fields((root / "proc/meminfo").read_text(), scale=1 << 10)["MemAvailable"]
    return memory["MemFree"] + memory.get("Active(file)", 0) + memory.get("Inactive(file)", 0)


def _tightest(root: Path) -> tuple[str, int | None, int | None]:
    """(path, limit, available) of the memory cgroup with the least left, of ours and its parents.

    Inside a container only its own cgroup is visible, mounted as if it were the root.
    """
    least: tuple[str, int | None, int | None] = ("", None, None)
    for folder, files in _own_cgroups(root):
        limit = _number(folder / files["limit"])
        used = _number(folder / files["used"])
        if limit is None or used is None or limit >= NO_LIMIT:
            continue
        available = max(0, limit - used + _reclaimable(folder))
        if least[2] is None or available < least[2]:
            least = (f"/{folder.relative_to(root)}", limit, available)
    return least


V1 = {"limit": "memory.limit_in_bytes", "used": "memory.usage_in_bytes"}
V2 = {"limit": "memory.max", "used": "memory.current"}


def _own_cgroups(root: Path) -> Iterable[tuple[Path, Mapping[str, str]]]:
    """Folders of the memory cgroup of this process and of its parents, with their file names."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        kind = "cgroup2" if not controllers else "cgroup"
        if kind == "cgroup" and "memory" not in controllers.split(","):
            continue
        for mounted_root, point in _mount_points(mounts, kind):
            top = root / point.lstrip("/")
            inner = path.removeprefix(mounted_root) if mounted_root != "/" else path
            folder = top / inner.strip("/")
            if not folder.is_dir():  # a cgroup namespace hides where we are: its root is ours
                folder = top
            while True:
                yield folder, V2 if kind == "cgroup2" else V1
                if folder == top:
                    break
                folder = folder.parent


def _mount_points(mounts: Sequence[str], kind: str) -> Iterable[tuple[str, str]]:
    """(root within the hierarchy, mount point) of each mounted cgroup hierarchy with memory."""
    for line in mounts:
        left, _, right = line.partition(" - ")
        fields, (fstype, _, options) = left.split(), right.split(" ", 2)
        if fstype == kind and (kind == "cgroup2" or "memory" in options.split(",")):
            yield fields[3], fields[4]


def _number(path: Path) -> int | None:
    """The number in a file; None for "max" or where there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(folder: Path) -> int:
    """Page cache charged to a cgroup: given up on demand. Shared memory is not among it."""
    try:
        stat = _fields((folder / "memory.stat").read_text())
    except OSError:
        return 0
    prefix = "total_" if "total_active_file" in stat else ""  # v1: with the children's
    kept = stat.get("file_dirty", 0) + stat.get("file_writeback", 0)
    cache = stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0)
    return max(0, cache - kept)
