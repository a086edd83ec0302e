"""`shared-offload doctor`: what this host has, and what would stand in the way of a run.

Only looks: nothing is created or allocated but a CUDA context where there is a GPU.
"""

from __future__ import annotations

import argparse
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from shared_offload import __version__
from shared_offload.errors import OffloadError
from shared_offload.memory import numa
from shared_offload.memory.limits import (
    NO_LIMIT,
    Demand,
    HostLimits,
    gib,
    read_limits,
    shortages,
)
from shared_offload.model.attention import AUTO, select_attention
from shared_offload.ranks.devices import (
    host_gpus,
    pci_id,
    visible_devices_problem,
    visible_gpu_count,
)
from shared_offload.ranks.facts import visible_devices_variable
from shared_offload.report.tables import print_table

ARENA_GB = 16.19  # the blocks of I2V 14B in FP8
SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

Row = tuple[str, str]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this host has, and what would stand in the way",
        description="Show GPUs, NUMA nodes, memory and kernel limits, and whether an arena fits. "
        "Exit status 1 where something stands in the way.",
    )
    parser.add_argument(
        "--arena-gb",
        type=float,
        default=ARENA_GB,
        metavar="GB",
        help="size of the arena to fit, in 10^9 bytes (default %(default)s: I2V 14B in FP8)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table, then problems with their hints."""
    limits = read_limits()
    table = Table(title="This host", show_header=False)
    for name, value in (*_software(), *_gpus(), *_memory(limits), *_kernel(limits)):
        table.add_row(name, value)
    console = Console()
    print_table(table, console)
    problems = _problems(limits, round(args.arena_gb * 1e9))
    for problem in problems:
        console.print(str(problem), markup=False, soft_wrap=True)
    if not problems:
        console.print(f"An arena of {args.arena_gb:g} GB fits.")
    return 1 if problems else 0


def _problems(limits: HostLimits, nbytes: int) -> list[OffloadError]:
    problems = list(shortages(limits, [Demand(nbytes)]))
    visible = visible_devices_problem(visible_devices_variable(), host_gpus())
    return [*problems, visible] if visible else problems


def _software() -> Iterator[Row]:
    yield "shared_offload", __version__
    yield "Python", platform.python_version()
    yield "torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"


def _gpus() -> Iterator[Row]:
    known = host_gpus()
    count = visible_gpu_count()
    variable = visible_devices_variable()
    listed = "NVML is missing" if known is None else f"{len(known)} on this host"
    asked = "" if variable is None else f", CUDA_VISIBLE_DEVICES={variable}"
    yield "GPUs", f"{listed}, {count} visible{asked}"
    for index in range(count):
        device = torch.device("cuda", index)
        address = pci_id(device)
        node = None if address is None else numa.node_of_device(address)
        free, total = torch.cuda.mem_get_info(device)
        place = "NUMA node unknown" if node is None else f"NUMA node {node}"
        name = torch.cuda.get_device_name(device)
        yield f"  cuda:{index}", f"{name}, {gib(free)} of {gib(total)} free, {address}, {place}"
    device = torch.device("cuda", 0) if count else torch.device("cpu")
    kernel, _ = select_attention(AUTO, device, torch.bfloat16)
    yield "attention", f"{kernel.name}, in bf16 on {device}"


def _memory(limits: HostLimits) -> Iterator[Row]:
    yield "memory", f"{gib(limits.available)} of {gib(limits.total)} available"
    for node, available in limits.nodes.items():
        cpus = len(numa.usable_cpus(node) or ())
        yield f"  NUMA node {node}", f"{gib(available)} available, {cpus} CPUs for this process"
    if limits.cgroup_limit is not None:
        left = gib(limits.cgroup_available or 0)
        yield "  cgroup", f"{left} of {gib(limits.cgroup_limit)} left ({limits.cgroup})"


def _kernel(limits: HostLimits) -> Iterator[Row]:
    page = limits.page_nbytes
    yield "shared memory", f"{limits.segments} of {limits.shmmni} segments in use"
    yield "  shmmax", gib(limits.shmmax)
    yield (
        "  shmall",
        f"{gib(limits.shmall_pages * page)}, {gib(limits.segment_pages * page)} in use",
    )
    yield "  2 MiB pages", _huge_pages()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield "locked memory", "unlimited" if soft == resource.RLIM_INFINITY else gib(soft)


def _limit(nbytes: int) -> str:
    return "no limit" if nbytes >= NO_LIMIT else gib(nbytes)


def _huge_pages() -> str:
    """What the kernel says, and how to get more where it says no."""
    try:
        words = SHMEM_HUGE_PAGES.read_text().split()
    except OSError:
        return "unknown to this kernel"
    chosen = next((word.strip("[]") for word in words if word.startswith("[")), "unknown")
    if chosen in ("never", "deny"):
        return f"{chosen} (as root: echo advise > {SHMEM_HUGE_PAGES})"
    return chosen
