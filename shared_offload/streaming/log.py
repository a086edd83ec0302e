"""The marks of each use of a unit, and the times that they stand for.

Invariant: times are read only from marks that were reached, so reading never stalls. Marks live in
a ring of passes; a pass whose turn to be recorded again comes before it was reached counts as
unread, and its times are lost, not its order: waits keep what they were given.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic

from shared_offload.report.metrics import StreamMetrics, UnitTimes
from shared_offload.streaming.engine import CopyEngine, Mark
from shared_offload.weights.architecture import PHASES
from shared_offload.weights.layout import Unit

# Passes whose marks are kept. The host may be this many steps less two ahead of the device (the
# copies of the next pass are marked during a pass) before a step goes unread.
_HISTORY = 4


class UseMarks(Generic[Mark]):
    """The marks of one use of one unit."""

    __slots__ = ("copied", "copy_begin", "copy_end", "granted", "released", "wanted")

    def __init__(self, engine: CopyEngine[Mark]) -> None:
        self.copied = False  # whether this use needed a copy; the copy's marks mean nothing else
        self.copy_begin = engine.mark()
        self.copy_end = engine.mark()
        self.wanted = engine.mark()
        self.granted = engine.mark()
        self.released = engine.mark()


class UseLog(Generic[Mark]):
    """Marks by use, numbered from the start of the run; `metrics` has what was read of them."""

    def __init__(self, units: Sequence[Unit], engine: CopyEngine[Mark]) -> None:
        self._units = units
        self._engine = engine
        self._labels = [_label(unit) for unit in units]
        self._ring = [[UseMarks(engine) for _ in units] for _ in range(_HISTORY)]
        self._origin = engine.mark()
        self._next = 0  # the first pass that was neither read nor given up
        self.metrics = StreamMetrics()

    def begin(self) -> None:
        """Start counting uses and time from here."""
        self._engine.record(self._origin, "compute")
        self._next = 0
        self.metrics = StreamMetrics(started=time.time())

    def marks(self, use: int) -> UseMarks[Mark]:
        """The marks of the given use, perhaps recorded before for one long past."""
        pass_, index = divmod(use, len(self._units))
        return self._ring[pass_ % _HISTORY][index]

    def collect(self, current: int) -> None:
        """Read the passes before `current` that the device has finished.

        To be called when pass `current` begins: marks of the pass after it are recorded next.
        """
        while self._next < current:
            marks = self._ring[self._next % _HISTORY]
            if self._engine.reached(marks[-1].released):
                self.metrics.add_step(self._next, self._times(marks))
            elif self._next + _HISTORY <= current + 1:
                self.metrics.unread_steps += 1
            else:
                return
            self._next += 1

    def _times(self, marks: Sequence[UseMarks[Mark]]) -> list[UnitTimes]:
        def at(mark: Mark) -> float:
            return self._engine.seconds(self._origin, mark)

        return [
            UnitTimes(
                unit=unit.index,
                label=label,
                nbytes=unit.nbytes,
                copied=(at(use.copy_begin), at(use.copy_end)) if use.copied else None,
                wanted=at(use.wanted),
                granted=at(use.granted),
                released=at(use.released),
            )
            for unit, label, use in zip(self._units, self._labels, marks, strict=True)
        ]


def _label(unit: Unit) -> str:
    if unit.phases == PHASES:
        return f"block {unit.block}"
    return f"block {unit.block} {' '.join(unit.phases)}"
