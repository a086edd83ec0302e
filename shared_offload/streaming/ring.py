"""The ring: places in host memory that hold units for a while, and who knows what lies in them.

Files are read by the threads of one process (disk.py) into a segment that all ranks of a domain
have attached; each rank takes units from it (`RingUnits`). They agree through words in a second,
writable segment (`RingState`), without locks: each word has one writer.

    tags[place]       written by the reader: which use lies there, complete; 0: none
    released[rank]    by the rank: it needs nothing of the uses before this one any more
    done[rank][unit]  by the rank: the run in which it needs this unit no more
    closed            by the reader: nothing more will come

A use is numbered by its run and its place in the run (`number_use`), so numbers only grow and a
word that is late is never mistaken for one of another run. A place is overwritten when its tag is
below every rank's `released`: all copies out of it have ended. Words are aligned and of 64 bits, so
they are read and written whole. That bytes are seen before the tag that announces them follows from
the order of stores on x86; elsewhere from the interpreter's lock, which every reading thread takes
between its last read and the tag.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shared_offload.errors import ConfigError, StreamError
from shared_offload.report.disk import DiskMetrics
from shared_offload.weights.layout import PAGE, Unit, align

RING_UNITS = 4
"""Places for units that come and go. One is copied from and the others are read ahead."""
_FEWEST_PLACES = 2
_RUN_BITS = 40  # a use's number below it
_WORD = 8
_LINE = 8  # words of a cache line, so that ranks do not disturb each other
_LOOK_SECONDS = 0.2  # between looks whether the others are alive
_LONGEST_POLL = 0.001


def number_use(run: int, use: int) -> int:
    """One number for a use of a run; grows with both."""
    return run << _RUN_BITS | use


@dataclass(frozen=True, slots=True)
class RingPlan:
    """What the ring's places are for. Equal on all ranks that share it.

    The first places belong to one unit each (`homes`: unit -> place), which is read once and stays;
    the others hold whatever comes next.
    """

    units: tuple[Unit, ...]
    places: int
    place_nbytes: int
    homes: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        """Of all places."""
        return self.places * self.place_nbytes

    @property
    def free_places(self) -> range:
        """Those that hold whatever comes next."""
        return range(len(self.homes), self.places)


def plan_ring(
    units: Sequence[Unit], budget_nbytes: int | None, every_pass: Sequence[Unit]
) -> RingPlan:
    """As many places as the budget holds; None: RING_UNITS.

    With room for all units each has a place of its own. Between that and RING_UNITS, what is left
    over goes to some of `every_pass`, the units that each pass reads, evenly spread.
    """
    place_nbytes = align(max(unit.nbytes for unit in units), PAGE)
    most = len(units)
    places = RING_UNITS if budget_nbytes is None else budget_nbytes // place_nbytes
    if places < _FEWEST_PLACES:
        raise ConfigError(
            f"lazy_load_ring_gib is {(budget_nbytes or 0) / 2**30:g} and holds {places} units of "
            f"{place_nbytes / 2**30:.3f} GiB",
            expected=f"room for {_FEWEST_PLACES} units, or null for {RING_UNITS}",
            hint="raise it, or take offload_granularity phase",
            key="lazy_load_ring_gib",
            found=(budget_nbytes or 0) / 2**30,
        )
    if places >= most:
        return RingPlan(tuple(units), most, place_nbytes, {n: n for n in range(most)})
    total = len(every_pass)
    count = min(max(0, places - RING_UNITS), total)
    kept = [
        unit.index
        for position, unit in enumerate(every_pass)
        if (position + 1) * count // total > position * count // total
    ]
    homes = {index: place for place, index in enumerate(kept)}
    return RingPlan(tuple(units), places, place_nbytes, homes)


class RingState:
    """The words that the reader and the ranks share; `memory` is zero at first."""

    def __init__(self, plan: RingPlan, ranks: int, memory: memoryview) -> None:
        units = len(plan.units)
        words = memory[: self.nbytes(plan, ranks)].cast("B").cast("Q")
        self._closed, words = words[:1], words[_LINE:]
        self.tags, words = words[: plan.places], words[plan.places :]
        self._released, words = words[: ranks * _LINE], words[ranks * _LINE :]
        self._done = [words[rank * units : (rank + 1) * units] for rank in range(ranks)]

    @staticmethod
    def nbytes(plan: RingPlan, ranks: int) -> int:
        """Bytes of memory needed."""
        return (_LINE + plan.places + ranks * (_LINE + len(plan.units))) * _WORD

    def release(self, rank: int, number: int) -> None:
        """All uses below the number are done with on this rank."""
        self._released[rank * _LINE] = number

    def released(self) -> int:
        """All uses below this number are done with on every rank."""
        return min(self._released[::_LINE])

    def finish(self, rank: int, unit: int, run: int) -> None:
        """This rank needs the unit no more in this run."""
        self._done[rank][unit] = run

    def wanted(self, unit: int, run: int) -> bool:
        """Some rank may need the unit again in this run."""
        return any(words[unit] != run for words in self._done)

    def close(self) -> None:
        """Nothing more will come."""
        self._closed[0] = 1

    @property
    def closed(self) -> bool:
        return bool(self._closed[0])


class Reader(Protocol):
    """Who fills the ring; on the one rank that reads for all."""

    @property
    def error(self) -> BaseException | None:
        """What ended the reading."""

    def totals(self) -> tuple[int, float]:
        """Bytes read from files so far, and seconds during which reads were under way."""

    def begin_run(self, run: int, passes: int | None) -> None:
        """Read for this run from its first use on, and for no other one."""

    def end_run(self) -> None:
        """Read nothing more until the next run."""

    def close(self) -> None:
        """End the threads. Idempotent."""


class RingUnits:
    """One rank's units from the ring; a `HostUnits`.

    `check` raises when another rank failed or is gone; it is called now and then while a unit is
    awaited. `rank` counts within the `ranks` that share. `host` is the ring (1-D uint8).
    """

    def __init__(
        self,
        plan: RingPlan,
        host: torch.Tensor,
        state: RingState,
        *,
        rank: int,
        ranks: int,
        check: Callable[[], None],
        reader: Reader | None,
    ) -> None:
        starts = range(0, plan.nbytes, plan.place_nbytes)
        self._places = [host[start : start + plan.place_nbytes] for start in starts]
        self._plan = plan
        self._state: RingState | None = state
        self._rank = rank
        self._ranks = ranks
        self._check = check
        self._reader = reader
        self._run = 0
        self._next = 0
        self._pending: deque[tuple[int, Callable[[], bool]]] = deque()
        self._failed = False
        self._before = (0, 0.0)
        self.metrics = self._new_metrics()

    @property
    def pinned(self) -> bool:
        return self._places[0].is_pinned()

    @property
    def broken(self) -> bool:
        return self._failed or (self._reader is not None and self._reader.error is not None)

    def begin_run(self, passes: int | None) -> None:
        self._run += 1
        self._next = 0
        self._pending.clear()
        self.metrics = self._new_metrics()
        self._advance()
        if self._reader is not None:
            self._before = self._reader.totals()
            self._reader.begin_run(self._run, passes)

    def take(self, use: int, *, wait: bool, last: bool) -> torch.Tensor | None:
        self._next = use
        self._advance()
        index = use % len(self._plan.units)
        place = self._find(use, index)
        if place is None and wait:
            place = self._await(use, index)
        if place is None:
            return None
        if last:
            self._words.finish(self._rank, index, self._run)
        return self._places[place][: self._plan.units[index].nbytes]

    def taken(self, use: int, copied: Callable[[], bool]) -> None:
        self._pending.append((use, copied))
        self._next = use + 1
        self._advance()

    def pass_over(self, use: int, *, last: bool) -> None:
        if last:
            self._words.finish(self._rank, use % len(self._plan.units), self._run)
        self._next = use + 1
        self._advance()

    def end_run(self) -> None:
        if self._reader is not None:
            self._reader.end_run()
            self._count()

    def close(self) -> None:
        try:
            if self._reader is not None:
                self._reader.close()
                self._count()
        finally:
            self._state = None
            self._places = []
            self._pending.clear()

    def _find(self, use: int, index: int) -> int | None:
        home = self._plan.homes.get(index)
        tags = self._words.tags
        if home is not None:
            return home if tags[home] else None
        wanted = number_use(self._run, use)
        return next((place for place in self._plan.free_places if tags[place] == wanted), None)

    def _await(self, use: int, index: int) -> int:
        """Poll for the use's place, and let go of what has been copied meanwhile."""
        now = time.perf_counter()
        look, pause, waited = now + _LOOK_SECONDS, _LONGEST_POLL / 16, 0.0
        try:
            while (place := self._find(use, index)) is None:
                self._raise_failure(index)
                if now > look:
                    self._check()
                    look = now + _LOOK_SECONDS
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL)
                self._advance()
                before, now = now, time.perf_counter()
                # Else the device is behind, and the ring is full of what it has yet to copy.
                waited += 0.0 if self._pending else now - before
        except Exception:
            self._failed = True
            raise
        finally:
            self._waited(use // len(self._plan.units), waited)
        return place

    def _raise_failure(self, index: int) -> None:
        if self._reader is not None and self._reader.error is not None:
            raise self._reader.error
        if self._words.closed:
            self._check()  # the others may know why
            raise StreamError(
                f"the ring of weights was closed while unit {index} was awaited",
                hint="look for the error of the rank that reads for this one",
                unit=index,
            )

    def _advance(self) -> None:
        """Release what has been copied. Copies end in the order in which they were enqueued."""
        while self._pending and self._pending[0][1]():
            self._pending.popleft()
        oldest = self._pending[0][0] if self._pending else self._next
        self._words.release(self._rank, number_use(self._run, oldest))

    def _waited(self, step: int, seconds: float) -> None:
        waits = self.metrics.waits
        waits.extend([0.0] * (step + 1 - len(waits)))
        waits[step] += seconds

    def _count(self) -> None:
        assert self._reader is not None  # asked by its callers
        nbytes, seconds = self._reader.totals()
        self.metrics.read_nbytes = nbytes - self._before[0]
        self.metrics.read_seconds = seconds - self._before[1]

    def _new_metrics(self) -> DiskMetrics:
        return DiskMetrics(
            units=len(self._plan.units),
            places=self._plan.places,
            cached_units=len(self._plan.homes),
            ring_nbytes=self._plan.nbytes,
            ranks=self._ranks,
            reads=self._reader is not None,
        )

    @property
    def _words(self) -> RingState:
        if self._state is None:
            raise StreamError("the ring of weights was used after it was closed")
        return self._state
