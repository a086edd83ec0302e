"""What the environment and /proc say about this process. The only reader of os.environ.

Torch-free, so that code which must start fast can use it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from shared_offload.errors import RankError, raise_all

REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """This process among those that were started together; the defaults are a lone process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    host_rank: int = 0
    """Index of this host in the run; torchrun calls it GROUP_RANK."""
    master_addr: str = ""
    master_port: int = 0
    run_id: str = ""
    restarts: int = 0
    launched: bool = False
    """Started by torchrun, or by something that sets the same variables."""
    agent_store: bool = False
    """The launcher hosts the store. Otherwise rank 0 does."""


def read_facts(environ: Mapping[str, str] | None = None) -> RankFacts:
    """Facts from torchrun's variables; without any of them, a lone process.

    Raises RankError when only some are set, or when they contradict each other.
    """
    env = os.environ if environ is None else environ
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return RankFacts()
    missing = [name for name in REQUIRED if not env.get(name)]
    if missing:
        raise RankError(
            f"RANK or WORLD_SIZE is set, but not {', '.join(missing)}",
            expected="all of torchrun's variables, or none",
            hint="start with python -m torch.distributed.run, or unset RANK and WORLD_SIZE",
            missing=missing,
        )
    facts = RankFacts(
        rank=_integer(env, "RANK"),
        world_size=_integer(env, "WORLD_SIZE"),
        local_rank=_integer(env, "LOCAL_RANK"),
        local_world_size=_integer(env, "LOCAL_WORLD_SIZE"),
        host_rank=_integer(env, "GROUP_RANK", "0"),
        master_addr=env["MASTER_ADDR"],
        master_port=_integer(env, "MASTER_PORT"),
        run_id=env.get("TORCHELASTIC_RUN_ID", ""),
        restarts=_integer(env, "TORCHELASTIC_RESTART_COUNT", "0"),
        launched=True,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    _check(facts)
    return facts


def _integer(env: Mapping[str, str], name: str, default: str = "") -> int:
    text = env.get(name, default)
    if not text.strip().isdecimal():
        raise RankError(
            f"{name} is {text!r}", expected="a whole number", hint="torchrun sets it", key=name
        )
    return int(text)


def _check(facts: RankFacts) -> None:
    pairs = (
        ("RANK", facts.rank, "WORLD_SIZE", facts.world_size),
        ("LOCAL_RANK", facts.local_rank, "LOCAL_WORLD_SIZE", facts.local_world_size),
    )
    raise_all(
        RankError(f"{low} ({index}) must be below {high} ({size})", key=low, found=index)
        for low, index, high, size in pairs
        if index >= size
    )


def visible_devices_variable(environ: Mapping[str, str] | None = None) -> str | None:
    """CUDA_VISIBLE_DEVICES as this process got it; None when unset."""
    env = os.environ if environ is None else environ
    return env.get("CUDA_VISIBLE_DEVICES")


def runtime_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """XDG_RUNTIME_DIR, if it is a folder of this user (after `su` it may be another's)."""
    env = os.environ if environ is None else environ
    path = Path(env.get("XDG_RUNTIME_DIR", ""))
    try:
        return path if path.is_absolute() and path.stat().st_uid == os.geteuid() else None
    except OSError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank's place: processes with equal `boot_id` and `ipc_namespace` can share memory."""

    rank: int
    hostname: str
    boot_id: str
    ipc_namespace: str
    pid_namespace: str
    pid: int
    started: int
    """Start time in clock ticks since boot: with the pid, a name that is never used twice."""
    pci_id: str | None = None
    """Of the device this rank holds, as sysfs writes it (0000:1b:00.0); None on a CPU."""

    def shares_memory(self, other: Member) -> bool:
        """Both can attach to the same SysV segment."""
        mine, theirs = (self.boot_id, self.ipc_namespace), (other.boot_id, other.ipc_namespace)
        return mine == theirs

    def sees(self, other: Member) -> bool:
        """`other`'s pid means the same process here."""
        mine, theirs = (self.boot_id, self.pid_namespace), (other.boot_id, other.pid_namespace)
        return mine == theirs

    def to_json(self) -> dict[str, object]:
        """The fields, as JSON types."""
        return asdict(self)


def member_facts(rank: int, pci_id: str | None = None) -> Member:
    """This process, from /proc."""
    pid = os.getpid()
    return Member(
        rank=rank,
        hostname=socket.gethostname(),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        ipc_namespace=str(Path("/proc/self/ns/ipc").readlink()),
        pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
        pid=pid,
        started=start_time(pid) or 0,
        pci_id=pci_id,
    )


def start_time(pid: int) -> int | None:
    """Start of process `pid` in clock ticks since boot; None when it is gone, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name may hold spaces and parentheses
    state, started = fields[0], fields[19]
    return None if state in "ZX" else int(started)


def alive(member: Member) -> bool:
    """The process of `member` runs. Only meaningful where its pid is seen (`Member.sees`)."""
    return start_time(member.pid) == member.started
