"""Where units lie in host memory: whether their bytes are there yet, and until when they stay.

The seam between what is copied (streamer.py) and where it comes from. Two kinds: `WholeArena`, in
which everything lies for good, and the ring of ring.py, which is filled from files ahead of use and
overwritten after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from shared_offload.errors import StreamError
from shared_offload.report.disk import DiskMetrics
from shared_offload.weights.layout import Unit


class HostUnits(Protocol):
    """Bytes of units by use. Use k of a run is unit k modulo the number of units.

    Every use of a run is either taken, copied from and reported with `taken`, or passed over; in
    order. All calls come from the streamer's thread.
    """

    @property
    def pinned(self) -> bool:
        """A GPU copies from here asynchronously."""

    @property
    def broken(self) -> bool:
        """Nothing more will come from here."""

    @property
    def metrics(self) -> DiskMetrics | None:
        """What files cost in the latest run; None where there are none."""

    def begin_run(self, passes: int | None) -> None:
        """Start over at use 0; `passes` over all units follow, None: nobody knows how many."""

    def take(self, use: int, *, wait: bool, last: bool) -> torch.Tensor | None:
        """The bytes of the use's unit; None where they are not there and `wait` is false.

        They stay as they are until the use is reported with `taken` and its copy has ended. `wait`
        waits for files, never for a device. `last`: this rank needs the unit no more in this run.
        """

    def taken(self, use: int, copied: Callable[[], bool]) -> None:
        """A copy is enqueued; `copied` tells, without waiting, whether it has ended."""

    def pass_over(self, use: int, *, last: bool) -> None:
        """The unit is on the device already; `last`: and stays there to the end of the run."""

    def end_run(self) -> None:
        """No more uses. All copies have ended."""

    def close(self) -> None:
        """Let go of the memory. All copies have ended. Idempotent."""


class WholeArena:
    """All units at their offsets in an arena (1-D uint8), complete and for good."""

    broken = False
    metrics = None

    def __init__(self, units: Sequence[Unit], host: torch.Tensor) -> None:
        end = max(unit.offset + unit.nbytes for unit in units)
        if host.dtype != torch.uint8 or host.ndim != 1 or host.numel() < end:
            raise StreamError(
                f"the arena is {tuple(host.shape)} {host.dtype}", expected=f"{end} bytes of uint8"
            )
        self._places = [host[u.offset : u.offset + u.nbytes] for u in units]
        self._count = len(units)

    @property
    def pinned(self) -> bool:
        return self._places[0].is_pinned()

    def begin_run(self, passes: int | None) -> None:
        pass

    def take(self, use: int, *, wait: bool, last: bool) -> torch.Tensor | None:  # noqa: ARG002
        return self._places[use % self._count]

    def taken(self, use: int, copied: Callable[[], bool]) -> None:
        pass

    def pass_over(self, use: int, *, last: bool) -> None:
        pass

    def end_run(self) -> None:
        pass

    def close(self) -> None:
        self._places = []
