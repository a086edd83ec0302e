"""Arenas of this host and who is attached, read from /proc; nothing is attached to or changed.

Invariant: a segment counts as ours only with our stamp on its last page, read through a process
that has that page; or, while it is being filled or where that may not be read, when such a process
is one of our commands. Others are not listed, and not touched: no attachment, and no page comes
into being. Of this IPC namespace; what other users' processes have mapped shows to root only.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from shared_offload.memory.arena import REMOVED, STAMP, all_segments

OUR_COMMANDS = ("shared_offload", "shared-offload")
PROC = Path("/proc")
PAGEMAP_ENTRY = struct.Struct("Q")
EXISTS = 0b11 << 62
"""Present or swapped out, as /proc/PID/pagemap says."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has a segment mapped."""

    pid: int
    command: str
    end: int
    """Of the mapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A segment of ours."""

    segment_id: int
    nbytes: int
    """With the stamp's page."""
    begun: int
    """Seconds since the epoch."""
    sealed: bool
    holders: tuple[Holder, ...]
    attached: int
    """By the kernel's count: there may be more than `holders` shows."""


def arenas(known: Container[int] = ()) -> list[Seen]:
    """All that can be recognised, and the segments of which a server says that they are its."""
    holders = _holders()
    found = []
    for row in all_segments():
        if row["perms"] != REMOVED | 0o600 or row["size"] % mmap.PAGESIZE:
            continue
        mine = tuple(holders.get(row["shmid"], ()))
        sealed = any(_stamped(holder) for holder in mine)
        ours = row["shmid"] in known or sealed
        if ours or any(name in h.command for h in mine for name in OUR_COMMANDS):
            found.append(
                Seen(
                    segment_id=row["shmid"],
                    nbytes=row["size"],
                    begun=row["ctime"],
                    sealed=sealed,
                    holders=mine,
                    attached=row["nattch"],
                )
            )
    return found


def _stamped(holder: Holder) -> bool:
    folder, page = PROC / str(holder.pid), holder.end // mmap.PAGESIZE - 1
    try:
        with (folder / "pagemap").open("rb", buffering=0) as pagemap:
            pagemap.seek(page * PAGEMAP_ENTRY.size)
            (entry,) = PAGEMAP_ENTRY.unpack(pagemap.read(PAGEMAP_ENTRY.size))
        if not entry & EXISTS:  # to read it would make it
            return False
        with (folder / "mem").open("rb", buffering=0) as memory:
            memory.seek(page * mmap.PAGESIZE)
            return memory.read(len(STAMP)) == STAMP
    except (OSError, struct.error):  # not ours to read, or just gone
        return False


def _holders() -> dict[int, list[Holder]]:
    """Processes of this IPC namespace by the segments that they have mapped, each once."""
    here = str((PROC / "self/ns/ipc").readlink())
    found: dict[int, list[Holder]] = {}
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if str((folder / "ns/ipc").readlink()) != here:
                continue
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            ends = dict(_segments_of(folder))
        except OSError:  # gone, or another user's
            continue
        for segment_id, end in ends.items():
            holder = Holder(int(folder.name), command.strip(), end)
            found.setdefault(segment_id, []).append(holder)
    return found


def _segments_of(folder: Path) -> Iterator[tuple[int, int]]:
    """(segment id, end of its mapping): the kernel gives a segment's id as its inode."""
    with (folder / "maps").open() as lines:
        for line in lines:
            if "/SYSV" in line:
                addresses, _, _, _, inode, _ = line.split(maxsplit=5)
                yield int(inode), int(addresses.partition("-")[2], 16)
