"""NUMA: which node a device or a process belongs to, where pages go, and where they really are.

The order is bind, touch, verify: a policy acts only on pages that do not exist yet, and only the
kernel's own account (/proc/self/numa_maps) says what came of it. Every function that reads /proc or
/sys takes the root of the tree, so that a machine can be described by a folder. Torch-free.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import pynvml

from shared_offload.errors import NumaError

ROOT = Path("/")
# System call numbers (asm/unistd.h); glibc has no wrapper for mbind.
MBIND = {"x86_64": 237, "aarch64": 235}
HUGE_PAGE_NBYTES = 2 << 20


class Policy(IntEnum):
    """Values of linux/mempolicy.h."""

    PREFERRED = 1
    """Pages come from the node while it has any, then from others."""
    BIND = 2
    """Pages come from the node or not at all."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the pages of a mapping are. Untouched pages are nowhere."""

    node_nbytes: dict[int, int]
    huge_nbytes: int
    """Mapped by 2 MiB pages."""

    @property
    def nbytes(self) -> int:
        """Bytes that have a page."""
        return sum(self.node_nbytes.values())

    def outside(self, node: int) -> int:
        """Bytes on other nodes than `node`."""
        return self.nbytes - self.node_nbytes.get(node, 0)


def parse_list(text: str) -> frozenset[int]:
    """The kernel's list format: "0-3,8" is {0, 1, 2, 3, 8}; "" is empty."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def memory_nodes(root: Path = ROOT) -> frozenset[int]:
    """Nodes that have memory; {0} where the kernel knows nothing of NUMA."""
    try:
        found = parse_list((root / "sys/devices/system/node/has_memory").read_text())
    except OSError:
        found = frozenset()
    return found or frozenset({0})


def allowed_nodes(root: Path = ROOT) -> frozenset[int]:
    """Nodes with memory that this process's cpuset lets it allocate from."""
    with suppress(OSError):
        for line in (root / "proc/self/status").read_text().splitlines():
            if line.startswith("Mems_allowed_list:"):
                return parse_list(line.partition(":")[2]) & memory_nodes(root)
    return memory_nodes(root)


def node_cpus(node: int, root: Path = ROOT) -> frozenset[int]:
    """CPUs of `node`, allowed or not; none for a node of memory only."""
    try:
        return parse_list((root / f"sys/devices/system/node/node{node}/cpulist").read_text())
    except OSError:
        online = root / "sys/devices/system/cpu/online"
        return parse_list(online.read_text()) if node == 0 and online.exists() else frozenset()


def node_memory(node: int, root: Path = ROOT) -> dict[str, int]:
    """Bytes by name ("MemTotal", "MemFree", "Active(file)", ...) of one node; {} if unknown."""
    try:
        text = (root / f"sys/devices/system/node/node{node}/meminfo").read_text()
    except OSError:
        return {}
    return {name: int(kib) << 10 for name, kib in re.findall(r"(\S+): +(\d+) kB", text)}


def normalise_pci(text: str) -> str:
    """A PCI address as sysfs spells it: 00000000:1B:00.0 and 1b:00.0 become 0000:1b:00.0."""
    match = re.fullmatch(
        r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", text.strip().lower()
    )
    if match is None:
        raise NumaError(
            f"{text!r} is not a PCI address", expected="a form like 0000:1b:00.0", found=text
        )
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or '0'}"


def node_of_device(pci_id: str, root: Path = ROOT) -> int | None:
    """Node of a PCI device: sysfs, then NVML. None where neither knows (sysfs says -1).

    On a host whose memory is one node, every device belongs to it, whatever the firmware says.
    """
    nodes = memory_nodes(root)
    if len(nodes) == 1:
        return next(iter(nodes))
    address = normalise_pci(pci_id)
    with suppress(OSError, ValueError):
        node = int((root / f"sys/bus/pci/devices/{address}/numa_node").read_text())
        if node >= 0:
            return node
    return _node_from_nvml(address, max(nodes))


def _node_from_nvml(address: str, last_node: int) -> int | None:
    """The one node in the device's memory affinity; None without NVML, or with several nodes."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        device = pynvml.nvmlDeviceGetHandleByPciBusId(address)
        words = pynvml.nvmlDeviceGetMemoryAffinity(
            device, last_node // 64 + 1, pynvml.NVML_AFFINITY_SCOPE_NODE
        )
        mask = sum(int(word) << (64 * n) for n, word in enumerate(words))
        return mask.bit_length() - 1 if mask.bit_count() == 1 else None
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def node_of_cpus(cpus: frozenset[int], root: Path = ROOT) -> int | None:
    """The node that holds all of `cpus`; None when they span several."""
    nodes = memory_nodes(root)
    if len(nodes) == 1:
        return next(iter(nodes))
    homes = [node for node in nodes if cpus and cpus <= node_cpus(node, root)]
    return homes[0] if homes else None


def own_node(pci_id: str | None = None, root: Path = ROOT) -> int | None:
    """Node of this process: that of the device it holds, else that of the CPUs it may use."""
    if pci_id is not None:
        return node_of_device(pci_id, root)
    return node_of_cpus(frozenset(os.sched_getaffinity(0)), root)


def usable_cpus(node: int | None, root: Path = ROOT) -> frozenset[int] | None:
    """CPUs of `node` that this process may use; None when there are none, or no node."""
    if node is None:
        return None
    return (node_cpus(node, root) & frozenset(os.sched_getaffinity(0))) or None


def run_on_node(node: int | None) -> frozenset[int] | None:
    """Move every thread of this process to the CPUs of `node`; later threads inherit it.

    Returns those CPUs; None, with nothing changed, when this process may use none of them.
    """
    cpus = usable_cpus(node)
    if cpus is None:
        return None
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(int(task.name), cpus)
    return cpus


def set_policy(address: int, nbytes: int, node: int, policy: Policy) -> None:
    """Say where the pages of a mapping are to come from. Must precede the first touch.

    For shared memory the policy belongs to the segment, so it also acts in other processes.
    Raises NumaError, with what to allow, when the kernel refuses.
    """
    allowed = allowed_nodes()
    if node not in allowed:
        raise NumaError(
            f"pages cannot be placed on NUMA node {node}: this process may use "
            f"node {', '.join(map(str, sorted(allowed)))}",
            expected=f"node {node} in the cpuset",
            hint=f"allow it (docker run --cpuset-mems, numactl --membind, slurm): node {node}",
            node=node,
            allowed=sorted(allowed),
        )
    code = _mbind(address, nbytes, node, policy)
    if code:
        raise NumaError(
            f"mbind to NUMA node {node} was refused: {os.strerror(code)}",
            expected="the system call mbind to be allowed",
            hint="docker run --cap-add SYS_NICE (the default seccomp profile refuses mbind)",
            node=node,
            errno=errno.errorcode.get(code, str(code)),
        )


def _mbind(address: int, nbytes: int, node: int, policy: Policy) -> int:
    """errno of the system call, 0 when it worked."""
    number = MBIND.get(platform.machine())
    if number is None:
        return errno.ENOSYS
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(policy),
        mask,
        ctypes.c_ulong(words * 64 + 1),  # the kernel takes one bit less than it is told
        ctypes.c_uint(0),
    )
    return ctypes.get_errno() if result else 0


def placement(address: int, nbytes: int, root: Path = ROOT) -> Placement | None:
    """Where the pages that this process has touched in a mapping are; None if the kernel is mute.

    Walks the page tables of the process: about 0.1 s for 16 GiB of 4 KiB pages.
    """
    try:
        lines = (root / "proc/self/numa_maps").read_text().splitlines()
    except OSError:
        return None
    by_node: Counter[int] = Counter()
    for line in lines:
        start, _, rest = line.partition(" ")
        if address <= int(start, 16) < address + nbytes:
            kib = re.search(r"kernelpagesize_kB=(\d+)", rest)
            page_nbytes = int(kib.group(1)) << 10 if kib else os.sysconf("SC_PAGE_SIZE")
            for node, pages in re.findall(r"\bN(\d+)=(\d+)", rest):
                by_node[int(node)] += int(pages) * page_nbytes
    return Placement(dict(sorted(by_node.items())), _huge_nbytes(address, nbytes, root))


def _huge_nbytes(address: int, nbytes: int, root: Path) -> int:
    """Bytes of a mapping that 2 MiB pages map (numa_maps counts them as small ones)."""
    return sum(
        int(line.split()[1]) << 10
        for start, line in _smaps(root)
        if line.startswith("ShmemPmdMapped:") and address <= start < address + nbytes
    )


def _smaps(root: Path) -> Iterator[tuple[int, str]]:
    """Each line of /proc/self/smaps with the start of its mapping."""
    start = -1
    try:
        with (root / "proc/self/smaps").open() as lines:
            for line in lines:
                if header := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
                    start = int(header.group(1), 16)
                yield start, line
    except OSError:
        return
