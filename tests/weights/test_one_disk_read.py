"""Two leaders that read the same files at the same time, as with an arena per NUMA node."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from shared_offload.weights.reader import Piece, fill

SIZE = 192 << 20


def disk_bytes() -> int:
    """What this process had fetched from disk, by the kernel's own count."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def forget(path: Path) -> None:
    """Drop the file from the page cache, as a first run after boot would find it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def lead(path: Path, start: Barrier, results: multiprocessing.SimpleQueue) -> None:
    dest = bytearray(SIZE)
    start.wait()
    before = disk_bytes()
    fill([Piece(path, 0, SIZE, 0, SIZE, None)], memoryview(dest), threads=2)
    results.put((disk_bytes() - before, hash(bytes(dest[::4096]))))


def read_by(path: Path, count: int) -> list[tuple[int, int]]:
    forget(path)
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(count), context.SimpleQueue()
    leaders = [context.Process(target=lead, args=(path, start, results)) for _ in range(count)]
    for process in leaders:
        process.start()
    found = [results.get() for _ in leaders]
    for process in leaders:
        process.join()
    return found


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # no thread of ours runs here
def test_the_disk_is_read_once_for_two_leaders(tmp_path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(1 << 20) * (SIZE >> 20))
    ((alone, content),) = read_by(path, 1)
    if alone < 0.9 * SIZE:
        pytest.skip(f"this file system counts {alone} bytes of {SIZE}: it is no disk")
    both = read_by(path, 2)
    assert [digest for _, digest in both] == [content] * 2
    assert sum(nbytes for nbytes, _ in both) < 1.1 * SIZE
