"""A weight server, or a rank that borrows from one, in a process of its own. Imports no torch.

Takes a JSON object (`Spec`), prints one JSON object per event on stdout. An order is
{"name", "mib", "pace", "fault"}; its content depends on name and mib.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from shared_offload.errors import CheckpointError, OffloadError
from shared_offload.memory.board import FolderBoard
from shared_offload.memory.domain import Scope
from shared_offload.memory.lifecycle import open_arena
from shared_offload.memory.request import ArenaRequest, Party
from shared_offload.ranks.facts import member_facts
from shared_offload.report.progress import Progress
from shared_offload.server import client, serve
from shared_offload.server.client import ServerLender
from shared_offload.server.launch import serve_or_join
from shared_offload.server.recipe import Order, Recipe

MIB = 1 << 20


@dataclass
class Spec:
    folder: str
    """Of the socket."""
    role: str = "run"
    name: str = "model"
    mib: int = 4
    pace: float = 0.0
    """Seconds for each MiB of a filling."""
    fault: str = ""
    """checkpoint: filling fails half-way; open: the order cannot be opened."""
    budget: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """REQUEST, LEASE of the server; ANSWER, SILENCE of a run."""
    # A run's
    board: str = ""
    """Folder of the run's notes, and of the file `finish` that ends it."""
    rank: int = 0
    world: int = 1
    required: bool = False
    again: int = 1
    """How often to open and close, before what stays open."""


def say(event: str, **facts: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def content(name: str, mib: int) -> Iterator[bytes]:
    block = random.Random(name).randbytes(MIB - 8)
    return (n.to_bytes(8, "little") + block for n in range(mib))


def state_file(folder: str, name: str) -> Path:
    """What stands for the checkpoint: its text is part of the fingerprint."""
    return Path(folder).parent / f"{name}.state"


def version(folder: str, name: str) -> str:
    path = state_file(folder, name)
    return path.read_text() if path.exists() else "first"


def make_request(folder: str, name: str, mib: int) -> ArenaRequest:
    return ArenaRequest(
        nbytes=mib * MIB,
        fingerprint=f"{name} {mib} {version(folder, name)}",
        scope=Scope.HOST,
        register_chunk_nbytes=MIB,
    )


def make_fill(name: str, mib: int, pace: float, fault: str):
    def fill(dest, on_bytes, cpus, stop) -> None:
        for n, piece in enumerate(content(name, mib)):
            if stop.wait(pace):
                raise CheckpointError("reading was stopped")
            if fault == "checkpoint" and n == mib // 2:
                raise CheckpointError("weights.safetensors ended early", path="weights", at=n)
            dest[n * MIB : (n + 1) * MIB] = piece
            on_bytes(MIB)

    return fill


class Lines(StringIO):
    """Each line that a person would see is an event."""

    def write(self, text: str) -> int:
        if text.strip():
            say("line", text=text.strip())
        return len(text)


def order_of(spec: Spec) -> Order:
    return {"name": spec.name, "mib": spec.mib, "pace": spec.pace, "fault": spec.fault}


def run_server(spec: Spec) -> None:
    serve.REQUEST_SECONDS = spec.seconds.get("REQUEST", serve.REQUEST_SECONDS)
    serve.LEASE_SECONDS = spec.seconds.get("LEASE", serve.LEASE_SECONDS)

    def opener(order: dict[str, Any]) -> Recipe:
        name, mib = order["name"], order["mib"]
        if order["fault"] == "open":
            raise CheckpointError(f"{name} has no config.json", path=name)
        read = version(spec.folder, name)
        return Recipe(
            path=name,
            request=make_request(spec.folder, name, mib),
            fill=make_fill(name, mib, order["pace"], order["fault"]),
            unchanged=lambda: version(spec.folder, name) == read,
        )

    serve_or_join(
        Path(spec.folder),
        opener,
        order_of(spec),
        Progress(stream=Lines(), interval=0.1),
        nodes=[0],
        budget=spec.budget,
        tell=lambda rows: say("told", rows=rows),
    )


class Teller:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.waits: list[int] = []

    def progress(self, stage: str, done: int, _: int) -> None:
        if stage == "wait":
            self.waits.append(done)
            if len(self.waits) == 1:
                say("waits")

    def note(self, line: str) -> None:
        self.notes.append(line)


def open_once(spec: Spec, attempt: int, teller: Teller):
    board = FolderBoard(Path(spec.board or spec.folder))
    request = make_request(spec.folder, spec.name, spec.mib)
    lender = ServerLender(
        request.fingerprint, spec.name, required=spec.required, folder=Path(spec.folder)
    )
    party = Party(member_facts(spec.rank), None, spec.world, board)
    fill = make_fill(spec.name, spec.mib, spec.pace, spec.fault)
    named = ArenaRequest(
        **{**{k: getattr(request, k) for k in request.__slots__}, "name": f"dit {attempt}"}
    )
    return open_arena(named, party, fill, None, teller, lender)


def run_rank(spec: Spec) -> None:
    client.ANSWER_SECONDS = spec.seconds.get("ANSWER", client.ANSWER_SECONDS)
    client.SILENCE_SECONDS = spec.seconds.get("SILENCE", client.SILENCE_SECONDS)
    finish = Path(spec.board, "finish")
    for attempt in range(1, spec.again):
        open_once(spec, attempt, Teller()).close()
    teller = Teller()
    with open_once(spec, spec.again, teller) as arena:
        digest = hashlib.blake2b(arena.buffer).hexdigest()
        (report,) = arena.reports()
        say(
            "open",
            lender=report.lender,
            segment=arena.ticket.segment_id,
            right=digest == hashlib.blake2b(b"".join(content(spec.name, spec.mib))).hexdigest(),
            notes=teller.notes,
            waits=teller.waits,
        )
        while not finish.exists():
            arena.check()
            time.sleep(0.02)
        say("unchanged", same=digest == hashlib.blake2b(arena.buffer).hexdigest())
    say("closed", torch="torch" in sys.modules)


def main(spec: Spec) -> int:
    say("ready")
    try:
        run_server(spec) if spec.role == "serve" else run_rank(spec)
    except OffloadError as error:
        say("error", error=error.to_json())
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Spec(**json.loads(sys.argv[1]))))
