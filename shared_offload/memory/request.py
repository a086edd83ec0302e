"""What a caller says to open an arena, and what it hands in: plain values and two callables.

Torch-free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from shared_offload.memory.board import Board
from shared_offload.memory.domain import Scope
from shared_offload.ranks.facts import Member

Stage = Literal["wait", "fill", "register"]


class Fill(Protocol):
    """Writes the whole content; may use threads, on `cpus`; returns early once `stop` is set."""

    def __call__(
        self,
        dest: memoryview,
        on_bytes: Callable[[int], None],
        cpus: frozenset[int] | None,
        stop: threading.Event,
    ) -> None: ...


class Observer(Protocol):
    """Who is told how it goes. Called from the thread that does the work."""

    def progress(self, stage: Stage, done: int, total: int) -> None:
        """Bytes of a stage; `wait` counts what the leader has filled."""
        ...

    def note(self, line: str) -> None:
        """Something a person should know; the run goes on."""
        ...


class Silent:
    """An observer that tells nobody."""

    def progress(self, stage: Stage, done: int, total: int) -> None:
        """Ignored."""

    def note(self, line: str) -> None:
        """Ignored."""


SILENT: Observer = Silent()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaRequest:
    """What all ranks ask for alike."""

    name: str = "dit"
    """Tells the arenas of one board apart."""
    nbytes: int
    fingerprint: str
    """Of layout and content: ranks share only where it is equal."""
    boundaries: Sequence[int] = ()
    """Offsets at which registration may be cut: no copy spans one."""
    scope: Scope
    strict_numa: bool = True
    register_chunk_nbytes: int


@dataclass(frozen=True, slots=True)
class Party:
    """The ranks that open arenas together, and which of them this is."""

    me: Member
    node: int | None
    """NUMA node of this rank's device (`numa.own_node`); None when unknown."""
    world_size: int
    board: Board
