"""One rank of a test, in a process of its own. Imports no torch, so that it starts in 0.1 s.

Takes a JSON object (see `Spec`), prints one JSON object per event on stdout, and the error of the
arena on stderr if it is the rank that should. Holds at `hold` until killed or told to finish.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared_offload.errors import CheckpointError, OffloadError
from shared_offload.memory import numa
from shared_offload.memory.board import FolderBoard, StoreBoard
from shared_offload.memory.domain import Scope
from shared_offload.memory.lifecycle import HostArena, open_arena
from shared_offload.memory.request import ArenaRequest, Party
from shared_offload.memory.vigil import speaker
from shared_offload.ranks.facts import member_facts

MIB = 1 << 20


@dataclass
class Spec:
    folder: str
    rank: int
    world: int
    mib: int = 4
    scope: str = "host"
    hold: str = ""
    """created or filling (until the file `go` exists), sealed (a second, while registering)."""
    fault: str = ""
    """checkpoint, memory, register: what fails on this rank. write: writes into a weight."""
    registrar: str = ""
    """read-only, writable: a stand-in for CUDA that accepts everything."""
    store_port: int = 0
    """Talk through torch's TCPStore at this port of localhost; 0: through the folder."""
    strict: bool = True


def say(event: str, **facts: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def content(mib: int) -> Iterator[bytes]:
    """What an arena of `mib` MiB holds, MiB by MiB; each differs from the others."""
    block = random.Random(1).randbytes(MIB - 8)
    return (n.to_bytes(8, "little") + block for n in range(mib))


class AcceptingRegistrar:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.read_only_supported = spec.registrar == "read-only"

    def register(self, *_: int) -> int:
        if self.spec.hold == "sealed":
            say("sealed")
            self.spec.hold = ""
            time.sleep(1)
        return 2 if self.spec.fault == "register" else 0

    def unregister(self, _: int) -> int:
        return 0

    def explain(self, code: int) -> str:
        return f"code {code}"


class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def progress(self, stage: str, done: int, total: int) -> None: ...

    def note(self, line: str) -> None:
        self.lines.append(line)


def make_fill(spec: Spec):
    def hold(at: str, stop: threading.Event) -> None:
        say(at)
        go = Path(spec.folder, "go")
        while spec.hold == at and not stop.is_set() and not go.exists():
            time.sleep(0.02)

    def fill(dest, on_bytes, cpus, stop) -> None:
        hold("created", stop)
        for n, piece in enumerate(content(spec.mib)):
            if n == spec.mib // 2:
                if spec.fault == "checkpoint":
                    raise CheckpointError("weights.safetensors ended early", path="weights", at=n)
                if spec.fault == "memory":
                    raise MemoryError
                hold("filling", stop)
            dest[n * MIB : (n + 1) * MIB] = piece
            on_bytes(MIB)

    return fill


def use(spec: Spec, arena: HostArena) -> None:
    say("open")
    if spec.fault == "write":
        arena.buffer[MIB] = 1
    while not Path(spec.folder, "finish").exists():
        arena.check()
        time.sleep(0.05)


def make_board(spec: Spec):
    if not spec.store_port:
        return FolderBoard(Path(spec.folder))
    from datetime import timedelta

    from torch import distributed as dist

    store = dist.TCPStore(
        "127.0.0.1", spec.store_port, is_master=False, timeout=timedelta(seconds=5)
    )
    return StoreBoard(store)


def run(spec: Spec) -> int:
    board, notes = make_board(spec), Notes()
    request = ArenaRequest(
        nbytes=spec.mib * MIB,
        fingerprint="test",
        boundaries=range(0, spec.mib * MIB, MIB),
        scope=Scope(spec.scope),
        strict_numa=spec.strict,
        register_chunk_nbytes=2 * MIB,
    )
    party = Party(member_facts(spec.rank), numa.own_node(), spec.world, board)
    registrar = AcceptingRegistrar(spec) if spec.registrar else None
    arena = None
    say("ready")
    try:
        with open_arena(request, party, make_fill(spec), registrar, notes) as arena:
            digest = hashlib.blake2b(arena.buffer).hexdigest()
            rows = [report.row() for report in arena.reports()]
            say("content", digest=digest, reports=rows, notes=notes.lines)
            try:
                use(spec, arena)
            finally:
                say("unchanged", same=digest == hashlib.blake2b(arena.buffer).hexdigest())
    except OffloadError as error:
        say("error", error=error.to_json(), seconds=time.monotonic())
        if speaker(board, request.name) == spec.rank:
            sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    say("closed", torch="torch" in sys.modules)
    return 0


if __name__ == "__main__":
    sys.exit(run(Spec(**json.loads(sys.argv[1]))))
