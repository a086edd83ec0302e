"""Waiting for other processes without ever waiting for a dead one.

While an arena is being opened, every wait polls: has someone failed, is everyone we wait for alive?
The first failure that is published is the failure of all. Death is a fact read from the kernel (a
pid with its start time; a segment that went with its only holder), never a silence that lasted too
long: a slow leader is waited for. Once the arena is open, losses are the business of ranks/watch.py
(or of whoever calls `check`). Torch-free.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from shared_offload.errors import OffloadError, RankError, from_json
from shared_offload.memory.board import Board, Note
from shared_offload.ranks.facts import Member, alive

POLL_SECONDS = 0.1
FIRST_POLL_SECONDS = 0.001
FAILURE = "failure"


class Vigil:
    """One process's eye on the others that open the same arena. Notes live under `name`."""

    def __init__(self, board: Board, me: Member, name: str) -> None:
        self._board = board
        self._me = me
        self._name = name
        self._others: tuple[Member, ...] = ()

    def watch(self, members: Iterable[Member]) -> None:
        """From now on, the end of any of these is a failure."""
        self._others = tuple(m for m in members if m.rank != self._me.rank)

    def publish(self, key: str, note: Note) -> None:
        """A note for the others."""
        self._board.publish(f"{self._name}/{key}", note)

    def read(self, key: str) -> Note | None:
        """A note of the others, if it is there."""
        return self._board.read(f"{self._name}/{key}")

    def wait(self, key: str, ready: Callable[[Note], bool] = lambda _: True) -> Note:
        """Poll until the note is there and ready; raises what `check` raises."""
        pause = FIRST_POLL_SECONDS
        while (note := self.read(key)) is None or not ready(note):
            self.check()
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
        return note

    def check(self) -> None:
        """Raise the failure of the arena, if someone failed or is gone."""
        failure = self.read(FAILURE)
        if failure is not None:
            raise from_json(failure["error"])
        if (lost := self._lost()) is not None:
            self.give_up(lost)

    def fail(self, error: BaseException) -> OffloadError:
        """Publish this process's failure; returns the one that came first, perhaps another's.

        Where the board itself is gone, the error stands for itself.
        """
        known = error if isinstance(error, OffloadError) else self._unforeseen(error)
        speaks = isinstance(error, Exception)  # whoever is interrupted ends without a word
        try:
            return from_json(self._publish_failure(known, speaks=speaks)["error"])
        except OffloadError:
            return known

    def leave(self) -> None:
        """Say that this process's end is no loss from now on."""
        with contextlib.suppress(OffloadError):  # the board may have gone first
            self.publish(f"left/{self._me.rank}", {})

    @contextlib.contextmanager
    def guard(self, tick: Callable[[], None]) -> Iterator[threading.Event]:
        """Keep watch in a thread while the caller is busy; the event is set when all is lost.

        `tick` runs at each look. Leaving the block raises the failure that set the event, in place
        of whatever the caller made of it.
        """
        stop, done = threading.Event(), threading.Event()
        failures: list[Exception] = []

        def look() -> None:
            while not done.wait(POLL_SECONDS):
                try:
                    tick()
                    self.check()
                except Exception as error:
                    failures.append(error)
                    stop.set()
                    return

        thread = threading.Thread(target=look, name="arena-vigil", daemon=True)
        thread.start()
        try:
            yield stop
        except Exception:
            if not stop.is_set():
                raise
        finally:
            done.set()
            thread.join()
        if failures:
            raise failures[0]

    def give_up(self, member: Member) -> NoReturn:
        """Raise the failure that the end of `member` is, unless it has left one itself.

        For evidence that precedes its pid's end: the kernel drops memory before the process.
        """
        self._others = tuple(m for m in self._others if m.rank != member.rank)
        raise from_json(self._publish_failure(_loss(member))["error"])

    def _lost(self) -> Member | None:
        gone = (m for m in self._others if self._me.sees(m) and not alive(m))
        return next((m for m in gone if self.read(f"left/{m.rank}") is None), None)

    def _publish_failure(self, error: OffloadError, *, speaks: bool = True) -> Note:
        living = [m.rank for m in self._others if not self._me.sees(m) or alive(m)]
        mine = [self._me.rank] if speaks or not living else []
        note = {"error": error.to_json(), "speaker": min([*mine, *living])}
        return self._board.publish_first(f"{self._name}/{FAILURE}", note)

    def _unforeseen(self, error: BaseException) -> RankError:
        text = next(iter(str(error).splitlines()), "")
        return RankError(
            f"rank {self._me.rank} ended with {type(error).__name__}{': ' * bool(text)}{text}",
            rank=self._me.rank,
        )


def _loss(member: Member) -> RankError:
    return RankError(
        f"rank {member.rank} (pid {member.pid} on {member.hostname}) ended while others shared "
        "its memory",
        expected="every rank to live until the run is over",
        hint="look for its own message above, or for the kernel's in dmesg (oom)",
        rank=member.rank,
        pid=member.pid,
    )


def speaker(board: Board, name: str) -> int | None:
    """The rank that should print the failure of an arena: the lowest alive when it happened."""
    failure = board.read(f"{name}/{FAILURE}")
    return None if failure is None else int(failure["speaker"])
