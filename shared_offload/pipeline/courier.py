"""Weights from pageable host memory (a file's map, usually) to a device.

The driver's own way is one thread that fills a small pinned buffer: 6 to 8 GB/s beside an H200,
where pinned memory gives 55. Here several threads fill two larger buffers in turn, and the device
empties the one while they fill the other. Pinning the weights instead would take longer than it
saves, and keep gigabytes from the host.

The threads are torch's, which need no lock of Python's: another thread may be importing libraries,
and would let each of ours wait for 5 ms at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from shared_offload.weights.threads import torch_threads, usable_threads

CHUNK_NBYTES = 64 << 20  # of a buffer: 1.2 ms of a PCIe 5 link
LEAST_NBYTES = 1 << 20  # less than this is sent as it is
THREADS = 8


@contextmanager
def courier_to(device: torch.device) -> Iterator[Courier]:
    """A courier to a device. The calling thread's operations on the CPU are split over THREADS."""
    threads = usable_threads(THREADS)
    with torch_threads(threads) if device.type == "cuda" else nullcontext():
        yield Courier(device)


class Courier:
    """Copies tensors to one device, in the order of its current stream; from `courier_to`.

    All use is from one thread. Host memory: two buffers, which torch keeps for the next courier.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._gpu = device.type == "cuda"
        self._buffers: list[Tensor] = []
        self._left = [torch.cuda.Event() for _ in range(2)] if self._gpu else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def deliver(self, tensor: Tensor) -> Tensor:
        """The tensor on the device: a copy, unless it is there."""
        if not self._needs_buffers(tensor):
            return tensor.to(self.device)
        target = torch.empty_like(tensor, device=self.device)
        self.copy(tensor, target)
        return target

    def copy(self, source: Tensor, target: Tensor) -> None:
        """`source` to `target`, of its shape, dtype and strides; the host may change `source`
        afterwards.
        """
        if self._needs_buffers(source):
            self._send(_bytes_of(source), _bytes_of(target))
        else:
            target.copy_(source)

    def _needs_buffers(self, source: Tensor) -> bool:
        large = source.nbytes >= LEAST_NBYTES and source.is_contiguous()
        return self._gpu and large and source.device.type == "cpu" and not source.is_pinned()

    def _send(self, source: Tensor, target: Tensor) -> None:
        for start in range(0, source.numel(), CHUNK_NBYTES):
            part, place = (t[start : start + CHUNK_NBYTES] for t in (source, target))
            buffer = self._emptied()[: part.numel()]
            place.copy_(buffer.copy_(part), non_blocking=True)
            if self._gpu:
                self._left[self._turn].record(torch.cuda.current_stream(self.device))
            self._turn = 1 - self._turn

    def _emptied(self) -> Tensor:
        """The buffer whose turn it is, when the device has what was in it."""
        if len(self._buffers) == self._turn:
            nbytes = CHUNK_NBYTES
            self._buffers.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._gpu))
        if self._gpu:
            self._left[self._turn].synchronize()
        return self._buffers[self._turn]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
