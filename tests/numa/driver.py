"""What the tests of placement do inside the virtual machine. Imports no torch.

Arguments: a case, then its options as JSON. Ranks are forked, each moved to the CPU of its node.
Prints one JSON object. Where pages are is read from numa_maps here, not taken from the report.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

from shared_offload.errors import OffloadError
from shared_offload.memory import numa
from shared_offload.memory.board import FolderBoard
from shared_offload.memory.domain import Scope
from shared_offload.memory.lifecycle import open_arena
from shared_offload.memory.request import ArenaRequest, Party
from shared_offload.ranks.facts import member_facts

MIB = 1 << 20
MBIND = numa._mbind


@dataclass
class Case:
    scope: str = "numa"
    strict: bool = True
    nodes: tuple[int | None, ...] = (0, 1)
    """What each rank takes for its node; None: unknown."""
    cpus: tuple[int, ...] = (0, 1)
    """Where each rank runs."""
    mems: str = ""
    """Nodes that a cpuset allows the ranks; "": no cpuset."""
    refuse_mbind: bool = False
    huge: bool = False
    mib: int = 16


class Notes(list):
    def progress(self, stage: str, done: int, total: int) -> None: ...

    def note(self, line: str) -> None:
        self.append(line)


def fill(dest, on_bytes, cpus, stop) -> None:
    if cpus:
        os.sched_setaffinity(0, cpus)
    piece = bytes(range(256)) * 4096
    for at in range(0, len(dest), MIB):
        dest[at : at + MIB] = piece
        on_bytes(MIB)


def pages(address: int) -> dict[str, int]:
    """KiB on each node of the mapping at `address`, from the kernel."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if int(line.split()[0], 16) == address:
            return {node: int(count) * 4 for node, count in re.findall(r"\bN(\d)=(\d+)", line)}
    return {}


def rank(case: Case, number: int, folder: Path) -> dict[str, object]:
    os.sched_setaffinity(0, {case.cpus[number]})
    request = ArenaRequest(
        nbytes=case.mib * MIB,
        fingerprint="vm",
        scope=Scope(case.scope),
        strict_numa=case.strict,
        register_chunk_nbytes=64 * MIB,
    )
    notes, size = Notes(), len(case.nodes)
    party = Party(member_facts(number), case.nodes[number], size, FolderBoard(folder))
    try:
        with open_arena(request, party, fill, None, notes) as arena:
            sum(arena.buffer[::4096])  # touch, so that numa_maps counts what this rank maps
            report = next(r for r in arena.reports() if number in r.ranks)
            return {"pages": pages(arena.address), "report": report.row(), "notes": list(notes)}
    except OffloadError as error:
        return {"error": json.loads(error.to_json()), "notes": list(notes)}


def enter_cpuset(mems: str) -> None:
    mount = Path("/dev/shm/cgroup")
    if not mount.exists():
        mount.mkdir()
        subprocess.run(["mount", "-t", "cgroup2", "none", mount], check=True)
        (mount / "cgroup.subtree_control").write_text("+cpuset")
    group = mount / "test"
    group.mkdir(exist_ok=True)
    (group / "cpuset.mems").write_text(mems)
    (group / "cgroup.procs").write_text(str(os.getpid()))


def run(case: Case) -> list[dict[str, object]]:
    folder = Path(tempfile.mkdtemp())
    if case.huge:
        Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").write_text("advise")
    if case.mems:
        enter_cpuset(case.mems)
    # What Docker's default seccomp profile does, one layer higher.
    numa._mbind = (lambda *_: errno.EPERM) if case.refuse_mbind else MBIND
    children = []
    for number in range(len(case.nodes)):
        pid = os.fork()
        if pid == 0:
            try:
                result = rank(case, number, folder)
            except BaseException:
                result = {"crash": traceback.format_exc()}
            (folder / f"result{number}").write_text(json.dumps(result))
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    return [json.loads((folder / f"result{n}").read_text()) for n in range(len(case.nodes))]


def facts() -> dict[str, object]:
    return {
        "nodes": sorted(numa.memory_nodes()),
        "cpus": {node: sorted(numa.node_cpus(node)) for node in numa.memory_nodes()},
        "device": numa.node_of_device("00000000:00:00.0"),
        "own": [_own(cpus) for cpus in ({0}, set(range(os.cpu_count() or 1)))],
        "segments": Path("/proc/sysvipc/shm").read_text().count("\n") - 1,
    }


def _own(cpus: set[int]) -> int | None:
    os.sched_setaffinity(0, cpus)
    return numa.own_node()


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    answer = {name: run(Case(**options)) for name, options in cases.items()}
    answer |= {"facts": facts(), "torch": "torch" in sys.modules}
    sys.stdout.write(json.dumps(answer) + "\n")
