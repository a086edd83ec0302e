"""Device memory for units: where each may lie, and the views on it.

Invariant: a place has one address from allocation on, and the views on it are made once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shared_offload.errors import StreamError
from shared_offload.weights.layout import TENSOR_ALIGNMENT, Unit, align
from shared_offload.weights.views import views

Views = Mapping[str, torch.Tensor]


def largest(units: Sequence[Unit]) -> int:
    """Bytes of the largest unit."""
    return max(unit.nbytes for unit in units)


def resident_nbytes(units: Sequence[Unit]) -> int:
    """Bytes that hold all of the units at once."""
    return sum(_padded(unit.nbytes) for unit in units)


def allocate(nbytes: int, device: torch.device, purpose: str) -> torch.Tensor:
    """Device memory as 1-D uint8, not initialised."""
    try:
        # Under torch.inference_mode it would be an inference tensor, which no copy could write
        # outside of that mode.
        with torch.inference_mode(mode=False):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise StreamError(
            f"{device} has no room for {nbytes / 2**30:.2f} GiB of {purpose}",
            hint='stream by phase (offload_granularity "phase") or keep fewer blocks resident',
            needed=nbytes,
        ) from error


class Packed:
    """Units side by side in one buffer, each with a place of its own."""

    def __init__(self, units: Sequence[Unit], buffer: torch.Tensor) -> None:
        needed = resident_nbytes(units)
        if buffer.dtype != torch.uint8 or buffer.ndim != 1 or buffer.numel() < needed:
            raise StreamError(
                f"the buffer for {len(units)} units is {tuple(buffer.shape)} {buffer.dtype}",
                expected=f"{needed} bytes of uint8",
            )
        self.buffer = buffer
        self.places: dict[int, torch.Tensor] = {}  # by the unit's index
        self.views: dict[int, Views] = {}
        start = 0
        for unit in units:
            self.places[unit.index] = buffer[start : start + unit.nbytes]
            self.views[unit.index] = views(unit, self.places[unit.index])
            start += _padded(unit.nbytes)

    @classmethod
    def allocate(cls, units: Sequence[Unit], device: torch.device) -> Packed:
        """With a buffer of exactly the size needed."""
        return cls(units, allocate(resident_nbytes(units), device, f"{len(units)} resident units"))

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()


class Slots:
    """`count` places, each for any one unit.

    Units with the same tensors at the same offsets (all blocks; all phases of a kind) share the
    views of a slot, so what the model receives repeats from block to block, addresses included.
    """

    def __init__(self, units: Sequence[Unit], count: int, device: torch.device) -> None:
        size = _padded(largest(units))
        self.buffer = allocate(count * size, device, f"{count} slots")
        self.count = count
        shapes = {unit.tensors: unit for unit in units}
        kinds = {tensors: kind for kind, tensors in enumerate(shapes)}
        self._kind = [kinds[unit.tensors] for unit in units]
        starts = range(0, count * size, size)
        self._places = [
            [self.buffer[s : s + unit.nbytes] for unit in shapes.values()] for s in starts
        ]
        self._views = [
            [views(unit, place) for unit, place in zip(shapes.values(), places, strict=True)]
            for places in self._places
        ]

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()

    def place(self, slot: int, index: int) -> torch.Tensor:
        """Where the bytes of unit `index` go in this slot."""
        return self._places[slot][self._kind[index]]

    def views(self, slot: int, index: int) -> Views:
        """The tensors of unit `index` in this slot; the same objects each time."""
        return self._views[slot][self._kind[index]]


def _padded(nbytes: int) -> int:
    return align(nbytes, TENSOR_ALIGNMENT)
