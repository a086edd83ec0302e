"""Where the model gets its units from: what every source promises, and the resident one.

Invariant: units are borrowed one at a time, in order, pass after pass; anything else is refused
before a tensor is handed out, because prefetch relies on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from shared_offload.errors import StreamError
from shared_offload.report.metrics import StreamMetrics
from shared_offload.streaming.slots import Packed, largest
from shared_offload.weights.layout import Unit


class Source(ABC):
    """A `WeightSource` with a life cycle: `begin_run`, passes over all units, `end_run`, `close`.

    Begin a run before its first step, and also after one that failed: it starts a pass anew. All
    calls come from one thread.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        if [unit.index for unit in units] != list(range(len(units))) or not units:
            raise StreamError(
                "units are not numbered in order of use",
                expected=f"indexes 0 to {len(units) - 1}",
                found=[unit.index for unit in units],
            )
        self._units = tuple(units)
        self._position = 0  # units borrowed since the run began
        self._passes: int | None = None  # that the run has, where it said so
        self._lent = False
        self._closed = False

    @property
    def units(self) -> Sequence[Unit]:
        """In order of use; one pass over the model."""
        return self._units

    @property
    def metrics(self) -> StreamMetrics:
        """Of the latest run; complete after `end_run`. Empty where nothing is ever copied."""
        return StreamMetrics()

    @property
    @abstractmethod
    def device_nbytes(self) -> int:
        """Bytes of device memory held for units now."""

    @contextmanager
    def borrow(self, unit: Unit) -> Iterator[Mapping[str, torch.Tensor]]:
        """The unit's tensors by their names in the block; read-only, and only inside the `with`."""
        self._check(unit)
        tensors = self._lend(unit.index)
        self._lent = True
        try:
            yield tensors
        finally:
            self._lent = False
            self._position += 1
            self._take_back(unit.index)

    @property
    def broken(self) -> bool:
        """It failed for good: close it, and make another."""
        return False

    def begin_run(self, passes: int | None = None) -> None:
        """Start over at the first unit, whatever happened before.

        `passes` over all units follow; where it is given, nothing is fetched for more.
        """
        self._refuse_if_closed()
        self._position = 0
        self._passes = passes

    def end_run(self) -> None:
        """Give back what only this run needed. Waits for the device; may be called twice."""
        self._position = 0
        self._passes = None

    def close(self) -> None:
        """Give back all device memory. Views handed out are dead after it; may be called twice."""
        self._closed = True

    @abstractmethod
    def _lend(self, index: int) -> Mapping[str, torch.Tensor]:
        """The tensors of the unit, ready for work that is enqueued from now on."""

    @abstractmethod
    def _take_back(self, index: int) -> None:
        """All work on the unit is enqueued."""

    def _check(self, unit: Unit) -> None:
        self._refuse_if_closed()
        expected = self._units[self._position % len(self._units)]
        if self._lent:
            raise StreamError(
                f"unit {unit.index} was borrowed while another one is",
                expected="one unit at a time",
                unit=unit.index,
            )
        if self._passes is not None and self._position >= self._passes * len(self._units):
            raise StreamError(
                f"unit {unit.index} was borrowed after the last of {self._passes} passes",
                hint="tell begin_run() how many there are, or nothing",
                unit=unit.index,
            )
        if unit != expected:
            raise StreamError(
                f"unit {unit.index} was borrowed out of order",
                expected=f"unit {expected.index} of {len(self._units)}",
                hint="call begin_run() before a run, also after one that failed",
                unit=unit.index,
            )

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StreamError("the source of weights was used after it was closed")


class ResidentSource(Source):
    """All units in one device buffer of `resident_nbytes(units)` bytes (1-D uint8)."""

    def __init__(self, units: Sequence[Unit], buffer: torch.Tensor) -> None:
        super().__init__(units)
        self._packed: Packed | None = Packed(units, buffer)

    @property
    def device_nbytes(self) -> int:
        return self._packed.nbytes if self._packed else 0

    def close(self) -> None:
        super().close()
        self._packed = None

    def _lend(self, index: int) -> Mapping[str, torch.Tensor]:
        assert self._packed is not None  # dropped by close, after which nothing is lent
        return self._packed.views[index]

    def _take_back(self, index: int) -> None:
        pass


def load_resident(
    units: Sequence[Unit],
    device: torch.device,
    read_unit: Callable[[Unit, torch.Tensor], None],
    *,
    staging: torch.Tensor | None = None,
) -> ResidentSource:
    """Read every unit into device memory through one staging buffer.

    `read_unit(unit, buffer)` writes the bytes of the unit into a host buffer of its size. Peak host
    memory is the largest unit. `staging` (1-D uint8 on the host) spares an allocation and, where it
    is pinned, makes the copies fast. Waits for every copy.
    """
    nbytes = largest(units)
    if staging is None:
        staging = torch.empty(nbytes, dtype=torch.uint8)
    if staging.numel() < nbytes:
        raise StreamError(
            f"the staging buffer has {staging.numel()} bytes", expected=f"{nbytes} or more"
        )

    def fill(unit: Unit, place: torch.Tensor) -> None:
        part = staging[: unit.nbytes]
        read_unit(unit, part)
        place.copy_(part)

    return _resident(units, device, fill)


def resident_from_host(
    units: Sequence[Unit], host: torch.Tensor, device: torch.device
) -> ResidentSource:
    """Copy every unit from an arena (1-D uint8, at the units' offsets) into device memory."""

    def fill(unit: Unit, place: torch.Tensor) -> None:
        place.copy_(host[unit.offset : unit.offset + unit.nbytes])

    return _resident(units, device, fill)


def _resident(
    units: Sequence[Unit], device: torch.device, fill: Callable[[Unit, torch.Tensor], None]
) -> ResidentSource:
    packed = Packed.allocate(units, device)
    for unit in units:
        fill(unit, packed.places[unit.index])
    return ResidentSource(units, packed.buffer)
