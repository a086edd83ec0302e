"""Segments against the kernel's own table, and what cannot be done with them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import sysv_ipc
import torch

from shared_offload.errors import ArenaError
from shared_offload.memory.arena import Ticket, attach, create, find_segment, seal, segment_size

MIB = 1 << 20


def table() -> dict[int, dict[str, int]]:
    """Rows of `ipcs`' source, parsed here."""
    head, *rows = (line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines())
    return {int(r[1]): {k: int(v) for k, v in zip(head, r, strict=True)} for r in rows}


def sealed(nbytes: int = MIB):
    ticket, mapping = create(nbytes, "print")
    mapping.view()[:] = bytes(range(256)) * (nbytes // 256)
    seal(mapping, ticket)
    return ticket, mapping


def test_creation_touches_no_page_and_is_marked_for_removal() -> None:
    ticket, mapping = create(64 * MIB, "print")
    row = table()[ticket.segment_id]
    assert (row["key"], row["rss"], row["nattch"]) == (0, 0, 1)
    assert row["perms"] == 1600  # SHM_DEST and 0600, in octal
    assert row["size"] == segment_size(64 * MIB) == 64 * MIB + 4096
    mapping.release()
    assert ticket.segment_id not in table()


def test_an_attachment_sees_the_content_and_the_last_one_frees_it() -> None:
    ticket, mapping = sealed()
    other = attach(Ticket(**ticket.to_json()), read_only=True)
    mapping.release()
    assert table()[ticket.segment_id]["nattch"] == 1
    assert bytes(other.view()[:256]) == bytes(range(256))
    other.release()
    assert find_segment(ticket.segment_id) is None


def test_a_tensor_keeps_the_memory_mapped_after_release() -> None:
    ticket, mapping = sealed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part = torch.frombuffer(mapping.view(), dtype=torch.uint8)[512:1024]
    mapping.release()
    mapping.release()
    assert mapping.attached and part.tolist() == [*range(256), *range(256)]
    with pytest.raises(ArenaError, match="closed"):
        mapping.view()
    del part
    assert not mapping.attached and ticket.segment_id not in table()


def test_strangers_are_not_mapped() -> None:
    ticket, mapping = sealed()
    facts = ticket.to_json()
    # The id was given away again: another arena of ours, of the same size.
    other, other_mapping = sealed()
    with pytest.raises(ArenaError, match="stamp"):
        attach(Ticket(**{**facts, "segment_id": other.segment_id}), read_only=True)
    with pytest.raises(ArenaError, match="stamp"):
        attach(Ticket(**{**facts, "fingerprint": "another"}), read_only=True)
    with pytest.raises(ArenaError, match="bytes and mode"):
        attach(Ticket(**{**facts, "nbytes": 2 * MIB}), read_only=True)
    # Somebody else's segment, of the right size but not marked for removal.
    foreign = sysv_ipc.SharedMemory(
        sysv_ipc.IPC_PRIVATE, sysv_ipc.IPC_CREAT, mode=0o600, size=segment_size(MIB)
    )
    try:
        with pytest.raises(ArenaError, match="mode 600"):
            attach(Ticket(**{**facts, "segment_id": foreign.id}), read_only=True)
        assert table()[foreign.id]["nattch"] == 1
    finally:
        foreign.remove()
        foreign.detach()
    assert table()[other.segment_id]["nattch"] == 1
    mapping.release()
    with pytest.raises(ArenaError, match="is gone") as caught:
        attach(ticket, read_only=True)
    assert caught.value.facts == {"segment": ticket.segment_id}
    other_mapping.release()


def test_not_sealed_is_not_attached() -> None:
    ticket, mapping = create(MIB, "print")
    with pytest.raises(ArenaError, match="stamp"):
        attach(ticket, read_only=True)
    mapping.release()


def test_a_forked_child_does_not_hold_it() -> None:
    ticket, mapping = sealed()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)  # until the parent is done
        os._exit(0)
    assert table()[ticket.segment_id]["nattch"] == 1
    mapping.release()
    assert ticket.segment_id not in table()
    os.close(write_end)
    os.waitpid(child, 0)
    os.close(read_end)


@pytest.mark.parametrize("read_only", [True, False])
def test_read_only_is_enforced_by_the_page_tables(read_only: bool) -> None:
    ticket, mapping = sealed()
    other = attach(ticket, read_only=read_only)
    if not read_only:
        other.protect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    (line,) = [m for m in maps if m.startswith(f"{other.address:x}-")]
    assert line.split()[1] == "r--s"
    other.release()
    mapping.release()


def test_the_kernels_refusal_is_an_error_with_the_size() -> None:
    with pytest.raises(ArenaError) as caught:
        create(1 << 62, "print")
    assert caught.value.facts["nbytes"] == (1 << 62) + 4096


def test_limits_of_a_namespace_are_known_before_anything_is_created(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
Path("/proc/sys/kernel/shmmax").write_text("1000000")
from shared_offload.errors import OffloadError
from shared_offload.memory import arena, leader, numa
from shared_offload.memory.board import LocalBoard
from shared_offload.memory.domain import Scope
from shared_offload.memory.lifecycle import open_arena
from shared_offload.memory.request import ArenaRequest, Party
from shared_offload.ranks.facts import member_facts
leader.create = lambda *_: 1 / 0
request = ArenaRequest(
    nbytes={MIB}, fingerprint="", scope=Scope.HOST, register_chunk_nbytes={MIB}
)
try:
    open_arena(request, Party(member_facts(0), None, 1, LocalBoard()), None)
except OffloadError as error:
    print(error.to_json())
"""
    command = ["unshare", "--ipc", sys.executable, "-c", script]
    if subprocess.run([*command[:2], "true"], capture_output=True).returncode:
        pytest.skip("unshare --ipc is not permitted here")
    done = subprocess.run(command, capture_output=True, text=True)
    assert '"limit": "kernel.shmmax"' in done.stdout, done.stderr
    assert f'"needed": {MIB + 4096}, "found": 1000000' in done.stdout


def test_views_are_what_ctypes_says() -> None:
    ticket, mapping = sealed()
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping.view()))
    assert address == mapping.address and address % 4096 == 0
    del ticket
    mapping.release()
