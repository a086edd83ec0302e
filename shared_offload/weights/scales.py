"""The values of FP8 scales, checked before anything is loaded: 13 MB of a 16 GB checkpoint.

A scale of zero, below zero or not finite turns a whole output row into zeros or NaN, which shows
as a black video long after the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from shared_offload.errors import CheckpointError
from shared_offload.weights.files import FileStamp, OpenFiles
from shared_offload.weights.layout import DTYPE_BYTES
from shared_offload.weights.safetensors_header import TensorEntry

# Bits of +infinity. Positive finite numbers are exactly the patterns between 0 and these.
_INFINITY: Mapping[str, int] = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}


def scale_problems(
    entries: Iterable[TensorEntry], stamps: Mapping[Path, FileStamp]
) -> list[CheckpointError]:
    """One problem for each scale tensor that has a value which is no positive finite number."""
    scales = [entry for entry in entries if entry.dtype in _INFINITY]
    with OpenFiles({entry.path: stamps[entry.path] for entry in scales}) as files:
        return [
            problem
            for entry in sorted(scales, key=lambda entry: (entry.path, entry.offset))
            for problem in _problems_of(entry, files)
        ]


def _problems_of(entry: TensorEntry, files: OpenFiles) -> list[CheckpointError]:
    data = bytearray(entry.nbytes)
    files.read_into(entry.path, entry.offset, memoryview(data))
    bits = np.frombuffer(data, f"<u{DTYPE_BYTES[entry.dtype]}")
    bad = np.flatnonzero((bits == 0) | (bits >= _INFINITY[entry.dtype]))
    if not bad.size:
        return []
    row = int(bad[0])
    value = _decode(int(bits[row]), entry.dtype)
    return [
        CheckpointError(
            f"{entry.path}: {entry.name} is {value} in row {row} ({bad.size} such rows of "
            f"{bits.size})",
            expected="scales that are finite and above zero",
            hint="the conversion went wrong or the file is damaged; convert or download it again",
            path=str(entry.path),
            name=entry.name,
            row=row,
            rows=int(bad.size),
            found=str(value),
        )
    ]


def _decode(bits: int, dtype: str) -> float:
    if dtype == "F16":
        return float(np.uint16(bits).view(np.float16))
    wide = bits << 16 if dtype == "BF16" else bits
    return float(np.uint32(wide).view(np.float32))
