"""Engines for the streamer whose two queues are real threads, late and jittering.

What a CUDA stream does in hardware happens here on threads: work is taken in order, and only a wait
orders one queue against the other. A slot is poisoned as soon as its copy may start, so a use that
is not ordered against a copy reads NaN or another unit's bytes. `ignores` names queues whose waits
do nothing: with one of them, results must be wrong, or the comparison proves nothing.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Collection

import torch

POISON = 0xFF  # NaN in fp8 e4m3fn, bf16, fp16 and fp32
PATIENCE = 20.0  # seconds; a wait that takes longer is a deadlock


class Moment:
    """One record of a mark."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.at = 0.0

    def reach(self) -> None:
        self.at = time.perf_counter()
        self.reached.set()

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE), "deadlock: a mark was never reached"


class ThreadMark:
    def __init__(self) -> None:
        self.latest = Moment()
        self.latest.reach()


class ThreadQueue:
    """A thread that takes closures in order; keeps the first error for `drain`."""

    def __init__(self, gate: threading.Event) -> None:
        self._items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._gate = gate
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, item: Callable[[], None]) -> None:
        self._items.put(item)

    def stop(self) -> None:
        self._items.put(None)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        torch.set_num_threads(1)
        while item := self._items.get():
            self._gate.wait(PATIENCE)
            try:
                item()
            except BaseException as error:
                self.error = self.error or error


class TwoThreads:
    """Copies on one thread, compute on another; the host runs ahead of both.

    Compute is enqueued with `compute(work)`. Closing `gate` stops both queues.
    """

    def __init__(
        self,
        *,
        copy_seconds: float = 0.0,
        jitter: float = 0.002,
        seed: int = 0,
        ignores: Collection[str] = (),
        free: int = 0,
    ) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._queues = {name: ThreadQueue(self.gate) for name in ("copy", "compute")}
        self._copy_seconds = copy_seconds
        self._jitter = jitter
        self._random = random.Random(seed)
        self._ignores = ignores
        self._free = free

    def compute(self, work: Callable[[], None]) -> None:
        self._queues["compute"].put(self._jittered(work))

    def mark(self) -> ThreadMark:
        return ThreadMark()

    def record(self, mark: ThreadMark, queue: str) -> None:
        mark.latest = Moment()
        self._queues[queue].put(mark.latest.reach)

    def wait(self, mark: ThreadMark, queue: str) -> None:
        if queue not in self._ignores:
            self._queues[queue].put(mark.latest.wait)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        def late() -> None:
            dst.fill_(POISON)
            time.sleep(self._copy_seconds)
            half = dst.numel() // 2
            dst[:half].copy_(src[:half])
            time.sleep(self._copy_seconds)
            dst[half:].copy_(src[half:])

        self._queues["copy"].put(self._jittered(late))

    def reached(self, mark: ThreadMark) -> bool:
        return mark.latest.reached.is_set()

    def seconds(self, first: ThreadMark, last: ThreadMark) -> float:
        return last.latest.at - first.latest.at

    def drain(self) -> None:
        for items in self._queues.values():
            done = Moment()
            items.put(done.reach)
            done.wait()
            if items.error:
                raise items.error

    def free_nbytes(self) -> int:
        return self._free

    def stop(self) -> None:
        self.gate.set()
        for items in self._queues.values():
            items.stop()

    def _jittered(self, work: Callable[[], None]) -> Callable[[], None]:
        pause = self._random.uniform(0, self._jitter)

        def later() -> None:
            time.sleep(pause)
            work()

        return later


class LateCopies(TwoThreads):
    """Copies on a thread; compute is the calling thread, as for real models on the CPU."""

    def compute(self, work: Callable[[], None]) -> None:
        work()

    def record(self, mark: ThreadMark, queue: str) -> None:
        if queue == "copy":
            super().record(mark, queue)
        else:
            mark.latest = Moment()
            mark.latest.reach()

    def wait(self, mark: ThreadMark, queue: str) -> None:
        if queue == "copy":
            super().wait(mark, queue)
        elif queue not in self._ignores:
            mark.latest.wait()
