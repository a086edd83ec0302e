"""Bytes from checkpoint files into memory that the caller owns.

Invariant: bytes go from the page cache straight to their place; nothing is allocated but a bounded
bounce buffer per thread, and that only where a dtype changes. So the peak of loading is the
destination plus `threads * BOUNCE_NBYTES`. Either every piece arrives or an error is raised.

Threads: W workers take requests, in order of file and offset, from one queue; each writes only
where its request says, so they share nothing else.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from shared_offload.errors import CheckpointError, NumaError
from shared_offload.weights.checkpoint import Checkpoint, Merge, block_name
from shared_offload.weights.files import FileStamp, OpenFiles
from shared_offload.weights.layout import (
    DTYPE_BYTES,
    MODULATION,
    MODULATION_HALVES,
    BlockLayout,
    PlacedTensor,
    Unit,
)

REQUEST_NBYTES = 8 << 20  # what a thread takes at a time
BOUNCE_NBYTES = 4 << 20  # of source bytes, where a dtype changes

# (source bytes, their dtype, destination bytes, their dtype)
Converter = Callable[[memoryview, str, memoryview, str], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a file and its place in the destination; `convert` is (from dtype, to dtype).

    `merge` (with `convert` set, be it to the same dtype) adds to the elements from `first` of its
    tensor on.
    """

    path: Path
    offset: int
    nbytes: int
    dest: int
    dest_nbytes: int
    convert: tuple[str, str] | None
    stamp: FileStamp | None = None  # of the file when its header was read
    merge: Merge | None = None
    first: int = 0


def block_pieces(checkpoint: Checkpoint, layout: BlockLayout) -> list[Piece]:
    """All blocks of a checkpoint; `dest` counts from the start of the arena."""
    pieces = [
        dataclasses.replace(piece, dest=unit.offset + piece.dest)
        for unit in layout.units("block")
        for piece in unit_pieces(checkpoint, unit)
    ]
    return sorted(pieces, key=_file_order)


def unit_pieces(checkpoint: Checkpoint, unit: Unit) -> list[Piece]:
    """One unit of a checkpoint; `dest` counts from the start of the unit."""
    pieces = [_piece(checkpoint, unit.block, tensor) for tensor in unit.tensors]
    return sorted(pieces, key=_file_order)


def whole_piece(checkpoint: Checkpoint, name: str, dtype: str, dest: int) -> Piece:
    """One tensor by its full name, as `dtype`, at `dest`."""
    entry, merge = checkpoint.entries[name], checkpoint.merges.get(name)
    return Piece(
        path=entry.path,
        offset=entry.offset,
        nbytes=entry.nbytes,
        dest=dest,
        dest_nbytes=entry.nbytes // DTYPE_BYTES[entry.dtype] * DTYPE_BYTES[dtype],
        convert=None if entry.dtype == dtype and merge is None else (entry.dtype, dtype),
        stamp=checkpoint.stamps[entry.path],
        merge=merge,
    )


def fill(
    pieces: Sequence[Piece],
    dest: memoryview,
    *,
    threads: int,
    cpus: Collection[int] | None = None,
    on_bytes: Callable[[int], None] = lambda _: None,
    stop: threading.Event | None = None,
    convert: Converter | None = None,
) -> None:
    """Read all pieces into `dest` (writable bytes) with `threads` threads, on `cpus` if given.

    `on_bytes` is told of file bytes as they arrive, from any of the threads. `convert` is needed
    when a piece changes its dtype (`cast.cast_bytes`). Setting `stop` ends the reading with a
    CheckpointError within one request per thread. The first error stops all threads and is raised:
    CheckpointError with path and offset for a file, NumaError for CPUs that cannot be used.
    """
    if not pieces:
        return
    halt = threading.Event()
    stamps = {piece.path: piece.stamp for piece in pieces}
    queue = deque(requests(pieces))
    view = dest.cast("B")
    with OpenFiles(stamps) as files, ThreadPoolExecutor(max(1, threads), "weights-reader") as pool:
        worker = _Worker(files, view, queue, (halt, stop or halt), on_bytes, convert)
        futures = [pool.submit(worker.run, cpus) for _ in range(max(1, threads))]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            halt.set()
    if stop is not None and stop.is_set() and queue:
        raise CheckpointError(
            f"reading of weights was stopped with {len(queue)} requests left",
            hint="look for the error that stopped it",
        )


@dataclass(frozen=True, slots=True)
class _Worker:
    """What one thread does until the queue is empty or somebody halts it."""

    files: OpenFiles
    dest: memoryview
    queue: deque[list[Piece]]  # popleft of a deque is atomic
    halts: tuple[threading.Event, ...]
    on_bytes: Callable[[int], None]
    convert: Converter | None

    def run(self, cpus: Collection[int] | None) -> None:
        if cpus is not None:
            pin_thread(cpus)
        reader = RequestReader(self.files, self.convert)
        while not any(halt.is_set() for halt in self.halts):
            try:
                request = self.queue.popleft()
            except IndexError:
                return
            reader.read(request, self.dest, self.on_bytes)


class RequestReader:
    """Reads requests; for one thread. Holds BOUNCE_NBYTES from the first change of a dtype on."""

    def __init__(self, files: OpenFiles, convert: Converter | None) -> None:
        self._files = files
        self._convert = convert
        self._bounce = bytearray()

    def read(
        self, request: Sequence[Piece], dest: memoryview, on_bytes: Callable[[int], None]
    ) -> None:
        """Bring the pieces of one request to their places in `dest` (bytes)."""
        for piece in request:
            if piece.convert is not None and not self._bounce:
                self._bounce = bytearray(BOUNCE_NBYTES)
            self._read(piece, dest)
            on_bytes(piece.nbytes)

    def _read(self, piece: Piece, dest: memoryview) -> None:
        place = dest[piece.dest : piece.dest + piece.dest_nbytes]
        if piece.convert is None:
            self._files.read_into(piece.path, piece.offset, place)
            return
        source, target = piece.convert
        raw = memoryview(self._bounce)[: piece.nbytes]
        self._files.read_into(piece.path, piece.offset, raw)
        if piece.merge is not None:
            piece.merge(piece.first, raw, source, place, target)
        elif self._convert is not None:
            self._convert(raw, source, place, target)
        else:
            raise ValueError(f"piece of {piece.path} changes its dtype, but no converter is given")


def _piece(checkpoint: Checkpoint, block: int, tensor: PlacedTensor) -> Piece:
    half = MODULATION_HALVES.get(tensor.name)
    name = block_name(block, tensor.name if half is None else MODULATION)
    entry = checkpoint.entries[name]
    nbytes = entry.nbytes if half is None else entry.nbytes // len(MODULATION_HALVES)
    start = (half or 0) * nbytes
    return dataclasses.replace(
        whole_piece(checkpoint, name, tensor.dtype, tensor.offset),
        offset=entry.offset + start,
        nbytes=nbytes,
        dest_nbytes=tensor.nbytes,
        first=start // DTYPE_BYTES[entry.dtype],
    )


def _file_order(piece: Piece) -> tuple[str, int]:
    return (str(piece.path), piece.offset)


def requests(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces cut and gathered so that a request is about REQUEST_NBYTES of one file."""
    request: list[Piece] = []
    size = 0
    for piece in itertools.chain.from_iterable(map(_parts, sorted(pieces, key=_file_order))):
        if request and (size + piece.nbytes > REQUEST_NBYTES or request[-1].path != piece.path):
            yield request
            request, size = [], 0
        request.append(piece)
        size += piece.nbytes
    if request:
        yield request


def _parts(piece: Piece) -> Iterator[Piece]:
    step = REQUEST_NBYTES if piece.convert is None else BOUNCE_NBYTES
    for start in range(0, piece.nbytes, step):
        nbytes = min(step, piece.nbytes - start)
        yield dataclasses.replace(
            piece,
            offset=piece.offset + start,
            nbytes=nbytes,
            dest=piece.dest + _converted(start, piece),
            dest_nbytes=_converted(nbytes, piece),
            first=piece.first + (start // DTYPE_BYTES[piece.convert[0]] if piece.convert else 0),
        )


def _converted(nbytes: int, piece: Piece) -> int:
    if piece.convert is None:
        return nbytes
    source, target = piece.convert
    return nbytes // DTYPE_BYTES[source] * DTYPE_BYTES[target]


def pin_thread(cpus: Collection[int]) -> None:
    """Keep the calling thread on these CPUs; NumaError where that cannot be."""
    try:
        os.sched_setaffinity(0, cpus)  # 0 is the calling thread
    except OSError as error:
        raise NumaError(
            f"reader threads cannot run on CPUs {sorted(cpus)}: {error.strerror}",
            expected="CPUs of this process's cpuset",
            hint="give the container the CPUs of this NUMA node (--cpuset-cpus)",
            cpus=sorted(cpus),
        ) from error
