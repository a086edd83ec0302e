"""Writing safetensors files: header first, then payloads in any order from any threads.

Invariant: a file has its own name only when it is complete. Until then it is `NAME.partial`, which
no loader looks at, and which is removed when anything fails.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from shared_offload.errors import OutputError, PreflightError
from shared_offload.weights.discovery import SINGLE_FILE
from shared_offload.weights.layout import DTYPE_BYTES
from shared_offload.weights.threads import torch_threads

PARTIAL = ".partial"
INDEX_NAME = SINGLE_FILE + ".index.json"
CHUNK_ELEMENTS = 1 << 22  # what one thread holds at a time: 16 MiB in fp32

TensorTable = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> (dtype code, shape)


def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of one tensor's payload."""
    return DTYPE_BYTES[dtype] * math.prod(shape)


def row_chunks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first row, end row) of the chunks a tensor is made in; a scalar is one row."""
    rows = shape[0] if shape else 1
    step = max(1, CHUNK_ELEMENTS // max(1, math.prod(shape[1:])))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def file_nbytes(tensors: TensorTable) -> int:
    """Bytes of the safetensors file that holds these tensors."""
    header, size = _header(tensors)[::2]
    return len(header) + size


class SafetensorsWriter:
    """One file of known tensors; use as a context manager, `put` each row of each tensor once.

    Raises OutputError when the file cannot be written.
    """

    def __init__(self, path: Path, tensors: TensorTable) -> None:
        self.path = path
        self.tensors = tensors
        self.nbytes = file_nbytes(tensors)
        header, self._offsets, _ = _header(tensors)
        self._partial = path.with_name(path.name + PARTIAL)
        try:
            self._fd = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise _cannot_write(path, error) from error
        try:
            _write_all(self._fd, memoryview(header), 0)
            os.truncate(self._fd, self.nbytes)
        except OSError as error:
            self.close(keep=False)
            raise _cannot_write(path, error) from error

    def put(self, name: str, tensor: Tensor, first_row: int = 0) -> int:
        """Write rows of one tensor from `first_row` on; returns their bytes. Thread-safe."""
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        row_nbytes = len(data) // max(len(tensor), 1) if tensor.dim() else 0
        try:
            _write_all(self._fd, data, self._offsets[name] + first_row * row_nbytes)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        return len(data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(keep=kind is None)

    def close(self, *, keep: bool) -> None:
        """Give the file its name, or remove it."""
        os.close(self._fd)
        if keep:
            self._partial.replace(self.path)
        else:
            self._partial.unlink(missing_ok=True)


def run_all(
    jobs: Iterable[Callable[[], int]], threads: int, on_bytes: Callable[[int], None]
) -> None:
    """Run jobs that write and return bytes, `threads` at once, each with one torch thread.

    The first failure stops the rest. Only jobs that run or are next exist at any time.
    """
    waiting = iter(jobs)
    pending: set[Future[int]] = set()
    with torch_threads(1):
        pool = ThreadPoolExecutor(threads, "writer")
        try:
            while pending := pending | {
                pool.submit(job) for job in islice(waiting, 2 * threads - len(pending))
            }:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    on_bytes(future.result())
        finally:
            pool.shutdown(cancel_futures=True)


def write_index(folder: Path, weight_map: Mapping[str, str], total_nbytes: int) -> None:
    """The index of a checkpoint of several files: which tensor is in which."""
    index = {"metadata": {"total_size": total_nbytes}, "weight_map": dict(weight_map)}
    partial = folder / (INDEX_NAME + PARTIAL)
    partial.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / INDEX_NAME)


def require_disk_space(folder: Path, needed_nbytes: int) -> None:
    """Raise PreflightError unless the disk of `folder` (which may not exist yet) has the space."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free_nbytes = shutil.disk_usage(existing).free
    if needed_nbytes > free_nbytes:
        raise PreflightError(
            f"{folder} needs {needed_nbytes / 1e9:.2f} GB of disk, {free_nbytes / 1e9:.2f} GB "
            "are free",
            hint="free some space or give a folder on another disk",
            needed=needed_nbytes,
            found=free_nbytes,
            path=str(folder),
        )


def _header(tensors: TensorTable) -> tuple[bytes, dict[str, int], int]:
    """Header with its length prefix, offset of each payload in the file, bytes of all payloads."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + tensor_nbytes(dtype, shape)
        offsets[name] = start
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # payloads start aligned
    header = len(text).to_bytes(8, "little") + text
    return header, {name: start + len(header) for name, start in offsets.items()}, end


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"cannot write {path}: {error.strerror}",
        hint="check the folder's permissions and the free space of its disk",
        path=str(path),
    )
