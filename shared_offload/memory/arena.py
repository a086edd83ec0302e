"""SysV segments: created, stamped, attached, and never left behind.

A segment is private (IPC_PRIVATE, mode 0600) and marked for removal by the call that creates it,
before a byte is in it: the kernel frees it with its last attachment, however its processes end.
Others attach by id as long as anyone holds it. Ids are used again, so a page behind the content
carries a nonce, and nobody hands out a mapping whose nonce is not the one that was published.
Torch-free.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sysv_ipc

from shared_offload.errors import ArenaError
from shared_offload.memory.limits import gib

MADV_DONTFORK = 10
MADV_HUGEPAGE = 14
PROT_READ = 1
STAMP = b"shared_offload arena 1 "
NONCE_NBYTES = 16
REMOVED = 0o1000
"""SHM_DEST: the bit in a segment's mode that says it goes with its last attachment."""
TABLE = Path("/proc/sysvipc/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a process must know to attach to a segment."""

    segment_id: int
    nbytes: int
    """Of the content; the stamp page follows at the next page boundary."""
    nonce: str
    fingerprint: str

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON types."""
        return asdict(self)

    @property
    def stamp(self) -> bytes:
        """What the stamp page starts with."""
        return STAMP + bytes.fromhex(self.nonce) + self.fingerprint.encode()


def segment_size(nbytes: int, page_nbytes: int = mmap.PAGESIZE) -> int:
    """Size of a segment for `nbytes` of content: whole pages, and one for the stamp."""
    return -(-nbytes // page_nbytes) * page_nbytes + page_nbytes


class Mapping:
    """One attachment. The memory stays mapped while any view of `array` lives.

    Views (memoryviews, tensors) hold `array`; the last of them to go detaches. So a view can never
    point to nothing, and `release` may be called at any time. At exit the kernel detaches.
    """

    def __init__(self, segment: sysv_ipc.SharedMemory, nbytes: int) -> None:
        self.address: int = segment.address
        self.size: int = segment.size
        self.nbytes = nbytes
        self._array: ctypes.Array[ctypes.c_ubyte] | None
        self._array = (ctypes.c_ubyte * self.size).from_address(self.address)
        # A child forked by this process must not keep the segment alive after it.
        _libc("madvise", self.address, self.size, MADV_DONTFORK)
        self._detach = weakref.finalize(self._array, segment.detach)
        self._detach.atexit = False  # a view may outlive atexit

    @property
    def array(self) -> ctypes.Array[ctypes.c_ubyte]:
        """The whole segment, as an object with the buffer protocol."""
        if self._array is None:
            raise ArenaError("the arena is closed", hint="no view may be taken after close()")
        return self._array

    def view(self) -> memoryview:
        """The content. Writing through it needs a writable attachment, else SIGSEGV."""
        return memoryview(self.array).cast("B")[: self.nbytes]

    def prefer_huge_pages(self) -> bool:
        """Ask for 2 MiB pages; acts where shmem_enabled is `advise`. False if refused."""
        return _libc("madvise", self.address, self.size, MADV_HUGEPAGE) == 0

    def protect(self) -> None:
        """Make the mapping read-only, for good: a write is a SIGSEGV from now on."""
        code = _libc("mprotect", self.address, self.size, PROT_READ)
        if code:
            raise ArenaError(f"mprotect of {gib(self.size)} failed: {os.strerror(code)}")

    def release(self) -> None:
        """Drop this reference; detaches now, or with the last view. Idempotent."""
        self._array = None

    @property
    def attached(self) -> bool:
        """The memory is still mapped."""
        return self._detach.alive


def _libc(name: str, address: int, nbytes: int, value: int) -> int:
    """errno of a libc call on a range; 0 when it worked."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    result = function(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(value))
    return ctypes.get_errno() if result else 0


def create(nbytes: int, fingerprint: str) -> tuple[Ticket, Mapping]:
    """A segment for `nbytes`, attached writable and already marked for removal; no page touched."""
    segment = _uninterrupted(lambda: _create(segment_size(nbytes)))
    ticket = Ticket(
        segment_id=segment.id,
        nbytes=nbytes,
        nonce=secrets.token_hex(NONCE_NBYTES),
        fingerprint=fingerprint,
    )
    return ticket, Mapping(segment, nbytes)


def _create(size: int) -> sysv_ipc.SharedMemory:
    try:
        # IPC_CREX would write every byte, and so decide where all pages go.
        segment = sysv_ipc.SharedMemory(
            sysv_ipc.IPC_PRIVATE, sysv_ipc.IPC_CREAT, mode=0o600, size=size
        )
    except (OSError, ValueError, MemoryError, sysv_ipc.Error) as error:
        raise ArenaError(
            f"the kernel refused a shared segment of {gib(size)}: {error}",
            expected="kernel.shmmax, shmall, shmmni, vm.overcommit_memory and memory to allow it",
            hint="`shared-offload doctor` lists the limits",
            nbytes=size,
        ) from error
    segment.remove()
    return segment


def _uninterrupted(
    make: Callable[[], sysv_ipc.SharedMemory],
) -> sysv_ipc.SharedMemory:
    """Run `make` where no KeyboardInterrupt can fall between creating and marking for removal.

    Python runs signal handlers in the main thread only. A SIGKILL in these microseconds leaves an
    empty segment: not a page of it exists yet.
    """
    with ThreadPoolExecutor(1) as worker:
        return worker.submit(make).result()


def seal(mapping: Mapping, ticket: Ticket) -> None:
    """Write the stamp; the content is complete."""
    start = mapping.size - mmap.PAGESIZE
    memoryview(mapping.array).cast("B")[start : start + len(ticket.stamp)] = ticket.stamp


def attach(ticket: Ticket, *, read_only: bool) -> Mapping:
    """An attachment to a sealed segment; ArenaError if it is gone, or is not the one meant."""
    size = segment_size(ticket.nbytes)
    _expect_ours(ticket, size)
    flags = sysv_ipc.SHM_RDONLY if read_only else 0
    try:
        mapping = Mapping(sysv_ipc.attach(ticket.segment_id, None, flags), ticket.nbytes)
    except (OSError, ValueError, sysv_ipc.Error) as error:
        raise ArenaError(
            f"cannot attach to segment {ticket.segment_id} of {gib(size)}: {error}",
            expected="a segment of this user, whose creator is alive",
            segment=ticket.segment_id,
        ) from error
    if mapping.size == size:
        start = size - mmap.PAGESIZE
        found = bytes(memoryview(mapping.array)[start : start + len(ticket.stamp)])
        if found == ticket.stamp:
            return mapping
    mapping.release()
    raise _stranger(ticket, "its stamp is not the published one")


def _expect_ours(ticket: Ticket, size: int) -> None:
    """Look before mapping: the kernel's table tells size, owner and mark of every segment."""
    row = find_segment(ticket.segment_id)
    if row is None:
        raise ArenaError(
            f"segment {ticket.segment_id} is gone",
            expected="its creator to hold it until all have attached",
            segment=ticket.segment_id,
        )
    if row["size"] != size or not row["perms"] & REMOVED:
        raise _stranger(ticket, f"it has {row['size']} bytes and mode {row['perms']:o}")


def _stranger(ticket: Ticket, why: str) -> ArenaError:
    return ArenaError(
        f"segment {ticket.segment_id} is not the arena that was published: {why}",
        expected=f"{segment_size(ticket.nbytes)} bytes, stamped",
        hint="its creator ended and the kernel gave the id away again; start the run anew",
        segment=ticket.segment_id,
    )


def find_segment(segment_id: int, table: Path = TABLE) -> dict[str, int] | None:
    """The kernel's row for a segment of this IPC namespace; None when there is none."""
    return next((row for row in all_segments(table) if row["shmid"] == segment_id), None)


def all_segments(table: Path = TABLE) -> Iterator[dict[str, int]]:
    """The kernel's rows for all segments of this IPC namespace: shmid, size, perms, cpid, nattch,
    uid, ctime, ...
    """
    names, *rows = (line.split() for line in table.read_text().splitlines())
    for row in rows:
        fields = dict(zip(names, row, strict=True))
        yield {k: int(v, 8 if k == "perms" else 10) for k, v in fields.items() if k != "key"}
