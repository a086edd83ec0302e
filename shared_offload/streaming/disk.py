"""The threads that read units from checkpoint files into the ring, ahead of use.

Threads, in one process for all that share the ring: `disk-feed` decides what is read next and
where, N `disk-read` threads take requests of some MiB from one queue, so all of them work on one
unit and go on to the next without waiting for each other. Requests of a unit are in the order of
the file. None of them ever touches a device.

Invariant: a place is written only while its tag is 0 and after every rank has let go of what was
there; its tag is set when its last byte has arrived and its files are those that were indexed.

Files are read through the page cache. Cold, from a virtual NVMe disk by 4 threads, that gave 2.5
GB/s against 2.2 for O_DIRECT, and 1.3 to 1.6 for O_DIRECT with the second copy that tensors at odd
offsets in their files need; this reader, with units of 400 MiB, 2.2 to 2.4. Pages that were read
are left to the kernel: 6 GB that fit into memory came at 3.9 and 5.9 GB/s in later passes instead
of 3.3 and 2.9 with POSIX_FADV_DONTNEED; with memory for 4 GB at 1.4 instead of 1.1, with 2 GB at
1.3 to 1.5 instead of 1.1 to 1.3.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shared_offload.streaming.ring import RingPlan, RingState, number_use
from shared_offload.weights.files import OpenFiles
from shared_offload.weights.reader import (
    Converter,
    Piece,
    RequestReader,
    pin_thread,
    requests,
)

_AT_HOME = 1  # the tag of a unit in its own place; below any number of a use
_POLL_SECONDS = 0.001  # between looks whether a place has been let go of


@dataclass(slots=True)
class _Job:
    """One unit on its way into a place."""

    run: int
    tag: int
    index: int
    place: int
    requests_left: int


class DiskReader:
    """Fills a ring from files; see `Reader` in ring.py for who calls what.

    `pieces` are those of each unit, by its index; `dest` is the ring, writable. Peak memory: a
    bounce buffer (`BOUNCE_NBYTES`) per thread where dtypes change. `on_error` is told, once, what
    ended the reading, from one of the threads.
    """

    def __init__(
        self,
        plan: RingPlan,
        pieces: Sequence[Sequence[Piece]],
        dest: memoryview,
        state: RingState,
        *,
        threads: int,
        convert: Converter,
        on_error: Callable[[BaseException], object],
        cpus: Collection[int] | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self._plan = plan
        self._requests = [list(requests(unit)) for unit in pieces]
        self._paths = [{piece.path for piece in unit} for unit in pieces]
        self._dest: memoryview | None = dest
        self._state: RingState | None = state
        self._convert = convert
        self._on_error = on_error
        self._cpus = cpus
        self._lock = threading.Condition()
        self._run = 0  # that is read for; 0: none
        self._last_run = 0
        self._uses: int | None = 0  # of this run; None: nobody knows
        self._next = 0
        self._skipped = 0  # uses in a row that nobody wanted
        self._busy: set[int] = set()  # places that are being written
        self._stopped = False
        self._nbytes = 0
        self._seconds = 0.0
        self._since = 0.0  # when the first of the current reads began
        self._queue: queue.SimpleQueue[tuple[_Job, list[Piece]] | None] = queue.SimpleQueue()
        stamps = {piece.path: piece.stamp for unit in pieces for piece in unit}
        self._files = OpenFiles(stamps).__enter__()
        targets = [("disk-feed", self._feed), *[("disk-read", self._read)] * threads]
        self._threads = [
            threading.Thread(target=self._guarded, args=(target,), name=name, daemon=True)
            for name, target in targets
        ]
        for thread in self._threads:
            thread.start()

    def totals(self) -> tuple[int, float]:
        """Bytes read from files so far, and seconds during which reads were under way."""
        with self._lock:
            running = time.perf_counter() - self._since if self._busy else 0.0
            return self._nbytes, self._seconds + running

    def begin_run(self, run: int, passes: int | None) -> None:
        """Read for this run from its first use on, and for no other one."""
        with self._lock:
            self._run, self._next, self._skipped = run, 0, 0
            self._uses = None if passes is None else passes * len(self._plan.units)
            self._lock.notify_all()

    def end_run(self) -> None:
        """Read nothing more until the next run."""
        with self._lock:
            self._run = 0

    def close(self) -> None:
        """End the threads; a request under way is waited for. Idempotent."""
        self._stop()
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self._state is not None:
            self._state.close()
        self._state = self._dest = None
        # Every unit's files were checked when it was complete, and nobody asks about them now.
        self._files.close()

    # -- the threads -------------------------------------------------------------------------------

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            if self._cpus is not None:
                pin_thread(self._cpus)
            target()
        except BaseException as error:
            with self._lock:
                first = self.error is None
                self.error = self.error or error
            self._stop()
            if first:
                self._on_error(error)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._lock.notify_all()
        for _ in self._threads:
            self._queue.put(None)

    def _feed(self) -> None:
        while True:
            with self._lock:
                job = self._next_job()
                while job is None:
                    if self._stopped:
                        return
                    # Idle until a run begins; within one, others free places without a sound.
                    self._lock.wait(_POLL_SECONDS if self._more() else None)
                    job = self._next_job()
            for request in self._requests[job.index]:
                self._queue.put((job, request))

    def _more(self) -> bool:
        return bool(self._run) and (self._uses is None or self._next < self._uses)

    def _next_job(self) -> _Job | None:
        """The next use that somebody wants and that does not lie there, if there is room for it."""
        count = len(self._plan.units)
        while self._more() and not self._stopped and self._decided():
            index, run, use = self._next % count, self._run, self._next
            home = self._plan.homes.get(index)
            if self._needed(index, home):
                place = self._free_place() if home is None else home
                if place is None:
                    return None
                self._next += 1
                self._skipped = 0
                tag = number_use(run, use) if home is None else _AT_HOME
                return self._begin(_Job(run, tag, index, place, len(self._requests[index])))
            self._next += 1
            self._skipped += 1
            if self._skipped == count:  # what nobody wants in a whole pass, nobody will in this run
                self._uses = self._next
        return None

    def _decided(self) -> bool:
        """Every rank has used the unit in the pass before, and so said whether it stays there."""
        before = self._next - len(self._plan.units)
        return before < 0 or number_use(self._run, before) < self._ring.released()

    def _needed(self, index: int, home: int | None) -> bool:
        there = home is not None and (bool(self._ring.tags[home]) or home in self._busy)
        return not there and self._ring.wanted(index, self._run)

    def _free_place(self) -> int | None:
        released, tags = self._ring.released(), self._ring.tags
        free = (place for place in self._plan.free_places if place not in self._busy)
        return next((place for place in free if tags[place] < released), None)

    def _begin(self, job: _Job) -> _Job:
        self._ring.tags[job.place] = 0
        if not self._busy:
            self._since = time.perf_counter()
        self._busy.add(job.place)
        return job

    def _read(self) -> None:
        reader = RequestReader(self._files, self._convert)
        while (item := self._queue.get()) is not None:
            job, request = item
            if self._stopped:
                return
            if job.run == self._run:
                start = job.place * self._plan.place_nbytes
                assert self._dest is not None  # dropped when the threads have ended
                reader.read(request, self._dest[start : start + self._plan.place_nbytes], _ignore)
            self._finish(job, request)

    def _finish(self, job: _Job, request: Sequence[Piece]) -> None:
        with self._lock:
            read = job.run == self._run
            self._nbytes += sum(piece.nbytes for piece in request) if read else 0
            job.requests_left -= 1
            if job.requests_left:
                return
            if read:
                self._files.check(self._paths[job.index])
                self._ring.tags[job.place] = job.tag
            self._busy.discard(job.place)
            if not self._busy:
                self._seconds += time.perf_counter() - self._since

    @property
    def _ring(self) -> RingState:
        assert self._state is not None  # dropped when the threads have ended
        return self._state


def _ignore(_: int) -> None:
    pass
