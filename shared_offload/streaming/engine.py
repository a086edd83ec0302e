"""The two queues that streaming orders against each other, and the marks it orders them by.

Invariant: within a queue everything happens in the order in which it was enqueued; between queues
only `wait` orders. No method but `drain` waits on the host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch

Queue = Literal["copy", "compute"]
Mark = TypeVar("Mark")  # what an engine records in a queue; opaque to everyone else

# So that work already enqueued on the compute stream does not delay a copy that may start.
_HIGH_PRIORITY = -1


class CopyEngine(Protocol[Mark]):
    """A queue of copies to one device beside its queue of compute."""

    def mark(self) -> Mark:
        """A new mark, recorded in no queue yet; waiting for it is waiting for nothing."""

    def record(self, mark: Mark, queue: Queue) -> None:
        """Move the mark to the current end of the queue."""

    def wait(self, mark: Mark, queue: Queue) -> None:
        """What is enqueued from now on comes after the mark where it is now."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue a copy of bytes from host memory to device memory."""

    def reached(self, mark: Mark) -> bool:
        """Whether its queue has come to the mark. Never waits."""

    def seconds(self, first: Mark, last: Mark) -> float:
        """Time between two marks that were reached; negative where `last` came first."""

    def drain(self) -> None:
        """Wait on the host until both queues are empty. Never called inside a step."""

    def free_nbytes(self) -> int:
        """Device memory that nobody has claimed."""


class CudaEngine:
    """Copies on a stream of their own; compute is whatever stream is current when asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """An event that records time; created at once, so that no step pays for it."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._copies)
        return event

    def record(self, mark: torch.cuda.Event, queue: Queue) -> None:
        """`cudaEventRecord`."""
        mark.record(self._stream(queue))

    def wait(self, mark: torch.cuda.Event, queue: Queue) -> None:
        """`cudaStreamWaitEvent`; it captures the latest record at the time of the call."""
        self._stream(queue).wait_event(mark)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """One `cudaMemcpyAsync`; asynchronous where `src` is pinned or registered."""
        with torch.cuda.stream(self._copies):
            dst.copy_(src, non_blocking=True)

    def reached(self, mark: torch.cuda.Event) -> bool:
        """`cudaEventQuery`."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """`cudaEventElapsedTime`, a resolution of about half a microsecond."""
        return float(first.elapsed_time(last)) / 1e3

    def drain(self) -> None:
        """Synchronise the copy stream and the current stream."""
        self._copies.synchronize()
        self._stream("compute").synchronize()

    def free_nbytes(self) -> int:
        """What the driver has left: memory that torch keeps in reserve counts as taken."""
        return torch.cuda.mem_get_info(self._device)[0]

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        return self._copies if queue == "copy" else torch.cuda.current_stream(self._device)


@dataclass(slots=True)
class HostMark:
    """A moment on the host's clock."""

    at: float = 0.0


class HostEngine:
    """Without CUDA: both queues are the calling thread, so whatever is enqueued has happened.

    Copies hide behind nothing here: they happen between uses, where no compute waits for them.
    """

    def mark(self) -> HostMark:
        return HostMark()

    def record(self, mark: HostMark, queue: Queue) -> None:  # noqa: ARG002 - one thread, one queue
        mark.at = time.perf_counter()

    def wait(self, mark: HostMark, queue: Queue) -> None:
        pass

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def reached(self, mark: HostMark) -> bool:  # noqa: ARG002 - all of the past was reached
        return True

    def seconds(self, first: HostMark, last: HostMark) -> float:
        return last.at - first.at

    def drain(self) -> None:
        pass

    def free_nbytes(self) -> int:
        """None: the arena is in the same memory, so a second copy gains nothing."""
        return 0
