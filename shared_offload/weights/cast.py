"""Weights as tensors: dtype changes of raw bytes, and reads of named tensors and of units."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext

import torch

from shared_offload.weights.checkpoint import Checkpoint
from shared_offload.weights.layout import TENSOR_ALIGNMENT, Unit, align
from shared_offload.weights.reader import Piece, fill, unit_pieces, whole_piece
from shared_offload.weights.threads import torch_threads
from shared_offload.weights.views import TORCH_DTYPES

# Below 32,768 elements torch converts in the calling thread. Above, each reader thread would start
# an OpenMP team of its own: 0.6 instead of 15 to 23 GB/s measured on two busy cores.
_SERIAL_ELEMENTS = 32768 - 256


def cast_bytes(src: memoryview, src_dtype: str, dst: memoryview, dst_dtype: str) -> None:
    """Convert tensor bytes from one dtype to another, rounding to nearest even; `fill`'s convert.

    Both must be writable (torch cannot wrap read-only memory) and aligned to their elements.
    """
    source = torch.frombuffer(src, dtype=TORCH_DTYPES[src_dtype])
    target = torch.frombuffer(dst, dtype=TORCH_DTYPES[dst_dtype])
    for start in range(0, len(source), _SERIAL_ELEMENTS):
        part = slice(start, start + _SERIAL_ELEMENTS)
        target[part].copy_(source[part])


def fill_tensors(
    pieces: Sequence[Piece],
    dest: memoryview,
    *,
    threads: int,
    cpus: Collection[int] | None = None,
    on_bytes: Callable[[int], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> None:
    """`fill` with all that pieces may need: dtype changes, and merges on one torch thread each."""
    merges = any(piece.merge for piece in pieces)
    with torch_threads(1) if merges else nullcontext():
        fill(
            pieces,
            dest,
            threads=threads,
            cpus=cpus,
            on_bytes=on_bytes,
            stop=stop,
            convert=cast_bytes,
        )


def read_tensors(
    checkpoint: Checkpoint,
    names: Iterable[str],
    dtype_of: Callable[[str], str] | None = None,
    *,
    threads: int = 4,
) -> dict[str, torch.Tensor]:
    """Named tensors of a checkpoint, by Wan's full names, in the dtypes that `dtype_of` says.

    Without `dtype_of` they have the dtypes on disk. The tensors share one buffer on the CPU; peak
    memory is that buffer and a constant. Raises what `fill` raises.
    """
    pieces: list[Piece] = []
    end = 0
    wanted = dict.fromkeys(names)
    for name in wanted:
        dtype = checkpoint.entries[name].dtype if dtype_of is None else dtype_of(name)
        pieces.append(whole_piece(checkpoint, name, dtype, align(end, TENSOR_ALIGNMENT)))
        end = pieces[-1].dest + pieces[-1].dest_nbytes
    buffer = torch.empty(end, dtype=torch.uint8)
    fill_tensors(pieces, buffer_view(buffer), threads=threads)
    tensors: dict[str, torch.Tensor] = {}
    for name, piece in zip(wanted, pieces, strict=True):
        entry = checkpoint.entries[name]
        dtype = entry.dtype if piece.convert is None else piece.convert[1]
        raw = buffer[piece.dest : piece.dest + piece.dest_nbytes]
        tensors[name] = raw.view(TORCH_DTYPES[dtype]).view(entry.shape)
    return tensors


def read_unit(
    checkpoint: Checkpoint, unit: Unit, dest: torch.Tensor | memoryview, *, threads: int = 1
) -> None:
    """Read one unit into `dest`: a 1-D uint8 CPU tensor or writable bytes, `unit.nbytes` or more.

    Gaps between tensors are left as they are. Raises what `fill` raises.
    """
    view = buffer_view(dest) if isinstance(dest, torch.Tensor) else dest
    fill_tensors(unit_pieces(checkpoint, unit), view, threads=threads)


def buffer_view(buffer: torch.Tensor) -> memoryview:
    """The bytes of a 1-D uint8 CPU tensor; valid as long as the tensor's storage."""
    return buffer.numpy().data
