"""Units from host memory through slots on the device: what is copied when.

Invariant: a copy is enqueued as soon as its slot has been given back, for the next unit in order of
use, across the end of a step; never later, and never before the mark that frees the slot. A unit
whose bytes have yet to come from a file is waited for when it is borrowed, and not before.

Uses are numbered from the start of a run: use k is unit k modulo the number of units. `_position`
counts uses that were given back, `_fetched` those whose bytes are on the device or on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shared_offload.errors import StreamError
from shared_offload.report.metrics import StreamMetrics
from shared_offload.streaming.engine import CopyEngine, CudaEngine, HostEngine
from shared_offload.streaming.host import HostUnits, WholeArena
from shared_offload.streaming.log import UseLog
from shared_offload.streaming.residency import ResidentBlocks, fitting_blocks, spread
from shared_offload.streaming.slots import Packed, Slots, resident_nbytes
from shared_offload.streaming.source import Source
from shared_offload.weights.layout import Unit

SLOTS = 2  # one computes while the other is filled
_RESIDENT = -1  # where a unit lies, when not in a slot
_NOTHING = -1  # what lies in a slot, when no unit


def _ignore(_: str) -> None:
    pass


def engine_for(device: torch.device) -> CopyEngine[Any]:
    """The engine for a kind of device."""
    return CudaEngine(device) if device.type == "cuda" else HostEngine()


class StreamedSource(Source):
    """Units from host memory, each on the device when it is borrowed.

    `host` is an arena (1-D uint8) that stays mapped until `close`, or any `HostUnits`, which is
    closed with this; pinned if copies are to overlap with compute. `resident_blocks` stay on the
    device from their first use to the end of the run: "auto" takes what is free when the second
    step begins. All blocks resident is what `offload_granularity: model` means: in at the start,
    out at the end.

    Peak device memory: `slots` times the largest unit, plus the resident blocks.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        host: torch.Tensor | HostUnits,
        device: torch.device,
        *,
        slots: int = SLOTS,
        resident_blocks: ResidentBlocks = 0,
        engine: CopyEngine[Any] | None = None,
        note: Callable[[str], None] = _ignore,
    ) -> None:
        super().__init__(units)
        if slots < 1:
            raise StreamError(f"{slots} slots", expected="1 or more; 2 to overlap", found=slots)
        self._device = device
        self._engine = engine or engine_for(device)
        self._note = note
        self._host = WholeArena(units, host) if isinstance(host, torch.Tensor) else host
        self._asked = resident_blocks
        self._kept = spread(units, 0 if resident_blocks == "auto" else resident_blocks)
        self._resident: Packed | None = None
        self._loaded: set[int] = set()
        self._chosen = True  # which blocks stay; False: not yet
        # One slot would be correct too, but nothing would overlap. No slot where none is needed.
        count = slots if len(self._kept) < len(units) else 0
        self._slots: Slots | None = Slots(units, count, device) if count else None
        self._log = UseLog(self._units, self._engine)
        self._fence = self._engine.mark()
        self._running = False
        self._fetched = 0
        self._in_slots = 0  # uses that were fetched into a slot and not given back
        self._next_slot = 0
        self._where = [_RESIDENT] * len(units)  # the slot of each unit
        self._contents = [_NOTHING] * count  # the unit in each slot
        self._slot_free = [self._fence] * count  # the mark after which a slot may be overwritten
        if device.type == "cuda" and not self._host.pinned:
            note("the weights are in pageable memory: copies will be slow and will stall the host")

    @property
    def metrics(self) -> StreamMetrics:
        return self._log.metrics

    @property
    def device_nbytes(self) -> int:
        parts = (self._slots, self._resident)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def broken(self) -> bool:
        return self._host.broken

    def begin_run(self, passes: int | None = None) -> None:
        """Start over at the first unit and begin to copy. Waits for what an earlier run left."""
        super().begin_run(passes)
        self._running = False
        self._engine.drain()
        self._drop_residents()
        self._rewind()
        self._host.begin_run(passes)
        self._log.begin()
        self._log.metrics.disk = self._host.metrics
        self._chosen = self._asked != "auto"
        if self._kept:
            self._allocate_residents(self._kept)
        self._order_copies_after_allocation()
        self._running = True
        self._fetch_ahead()

    def end_run(self) -> None:
        """Complete the metrics and free the resident blocks. Waits for the device."""
        if self._running:
            self._running = False
            self._engine.drain()
            self._host.end_run()
            self._log.collect(self._position // len(self._units))
            self._drop_residents()
        super().end_run()

    def close(self) -> None:
        """Free slots and resident blocks once no copy is under way."""
        if self._closed:
            return
        super().close()
        self._running = False
        try:
            self._engine.drain()
        finally:
            self._drop_residents()
            self._slots = None
            self._host.close()

    def _lend(self, index: int) -> Mapping[str, torch.Tensor]:
        if not self._running:
            self.begin_run()
        elif index == 0 and self._position:
            self._begin_pass(self._position // len(self._units))
        marks = self._log.marks(self._position)
        self._engine.record(marks.wanted, "compute")
        if self._fetched == self._position:  # its bytes had not come from their file yet
            self._fetch(self._fetched, wait=True)
            self._fetched += 1
            self._fetch_ahead()
        if marks.copied:
            self._engine.wait(marks.copy_end, "compute")
        self._engine.record(marks.granted, "compute")
        slot = self._where[index]
        return self._residents.views[index] if slot == _RESIDENT else self._ring.views(slot, index)

    def _take_back(self, index: int) -> None:
        marks = self._log.marks(self._position - 1)
        self._engine.record(marks.released, "compute")
        if (slot := self._where[index]) != _RESIDENT:
            self._slot_free[slot] = marks.released
            self._in_slots -= 1
        self._fetch_ahead()

    def _begin_pass(self, number: int) -> None:
        self._log.collect(number)
        if number == 1 and self._asked == "auto":
            self._choose_residents()

    def _fetch_ahead(self) -> None:
        """Enqueue copies for the next uses until one must wait for a slot, or for a file."""
        end = self._position + len(self._units)
        if self._passes is not None:
            end = min(end, self._passes * len(self._units))
        while self._fetched < end and self._fetch(self._fetched, wait=False):
            self._fetched += 1

    def _fetch(self, use: int, *, wait: bool) -> bool:
        """See that the use's unit is on its way to the device; False where it cannot be yet."""
        index = use % len(self._units)
        self._log.marks(use).copied = False
        if self._resident and index in self._resident.places:
            return self._fetch_resident(use, self._resident.places[index], wait=wait)
        slots, slot = self._ring, self._next_slot
        if self._in_slots == slots.count:
            return False
        if self._contents[slot] == index:  # it still lies there: fewer units than slots stream
            self._host.pass_over(use, last=self._chosen)
        elif (source := self._host.take(use, wait=wait, last=False)) is None:
            return False
        else:
            self._contents[slot] = index
            self._engine.wait(self._slot_free[slot], "copy")
            self._copy(slots.place(slot, index), source, use)
        self._where[index] = slot
        self._next_slot = (slot + 1) % slots.count
        self._in_slots += 1
        return True

    def _fetch_resident(self, use: int, place: torch.Tensor, *, wait: bool) -> bool:
        index = use % len(self._units)
        if index in self._loaded:
            self._host.pass_over(use, last=True)
        elif (source := self._host.take(use, wait=wait, last=True)) is None:
            return False
        else:
            self._loaded.add(index)
            self._copy(place, source, use)
        self._where[index] = _RESIDENT
        return True

    def _copy(self, place: torch.Tensor, source: torch.Tensor, use: int) -> None:
        marks = self._log.marks(use)
        marks.copied = True
        self._engine.record(marks.copy_begin, "copy")
        self._engine.copy(place, source)
        self._engine.record(marks.copy_end, "copy")
        self._host.taken(use, partial(self._engine.reached, marks.copy_end))

    def _choose_residents(self) -> None:
        """Resolve "auto". Units that are in slots now are used from there once more."""
        self._chosen = True
        blocks = fitting_blocks(self._units, self._engine.free_nbytes())
        kept = spread(self._units, blocks)
        try:
            if kept:
                self._allocate_residents(kept)
        except StreamError as error:  # free memory is not always memory in one piece
            self._note(f"resident_blocks auto: none stay on {self._device}, {error.what}")
            return
        self._order_copies_after_allocation()
        total = self._units[-1].block + 1
        size = f"{resident_nbytes(kept) / 2**30:.2f} GiB"
        self._note(f"resident_blocks auto: {blocks} of {total} stay on {self._device} ({size})")

    def _allocate_residents(self, kept: Sequence[Unit]) -> None:
        self._resident = Packed.allocate(kept, self._device)

    def _order_copies_after_allocation(self) -> None:
        # The allocator may hand out memory that compute enqueued before still uses.
        self._engine.record(self._fence, "compute")
        self._engine.wait(self._fence, "copy")

    def _drop_residents(self) -> None:
        self._resident = None
        self._loaded.clear()

    def _rewind(self) -> None:
        self._fetched = 0
        self._in_slots = 0
        self._next_slot = 0
        self._where = [_RESIDENT] * len(self._units)
        self._contents = [_NOTHING] * len(self._contents)
        self._slot_free = [self._fence] * len(self._contents)

    @property
    def _ring(self) -> Slots:
        assert self._slots is not None  # dropped by close only, or never needed
        return self._slots

    @property
    def _residents(self) -> Packed:
        assert self._resident is not None  # a unit that lies there was fetched into it
        return self._resident
