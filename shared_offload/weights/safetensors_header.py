"""The header of a safetensors file: which tensors it holds and where, without their payload.

Layout of such a file: 8 bytes little-endian length N, N bytes of JSON, then the payload, which the
tensors fill without holes. Invariant: a `Header` without problems describes bytes that exist, each
belonging to one tensor; whatever the bytes of the file are, only CheckpointError comes out.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from shared_offload.errors import CheckpointError
from shared_offload.weights.files import FileStamp, read_head, unreadable

# A Wan header takes 0.2 MB. Bounded, so that a damaged length does not make us read gigabytes.
MAX_HEADER_NBYTES = 16 << 20
_MAX_RANK = 8
_LENGTH_NBYTES = 8
_AGAIN = "download the file again and compare its checksum"

_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of one file, in the order of their payload, and what is wrong with their places.

    A truncated file still has a header that names all its tensors; the truncation is in `problems`.
    """

    path: Path
    stamp: FileStamp
    entries: Mapping[str, TensorEntry]
    problems: tuple[CheckpointError, ...]
    notes: Mapping[str, object]
    """Its `__metadata__`: whatever the writer of the file had to say."""


def read_header(path: Path) -> Header:
    """Parse a header. CheckpointError where there is none; see `Header.problems` for the rest."""
    read_head(path)  # raises
    try:
        with path.open("rb") as file:
            stamp = FileStamp.of(os.fstat(file.fileno()))
            length = int.from_bytes(file.read(_LENGTH_NBYTES), "little")
            _check_length(path, length, stamp.size)
            data = file.read(length)
    except OSError as error:
        raise unreadable(path, error) from error
    payload = _LENGTH_NBYTES + length
    raw, notes = _parse(path, data)
    entries = [_entry(path, payload, *item) for item in raw.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    problems = _place_problems(path, payload, stamp.size, entries)
    return Header(path, stamp, {entry.name: entry for entry in entries}, tuple(problems), notes)


def _check_length(path: Path, length: int, size: int) -> None:
    if length < 2 or length > MAX_HEADER_NBYTES:
        raise CheckpointError(
            f"{path} is no safetensors file: its header would be {length} bytes long",
            expected=f"2 to {MAX_HEADER_NBYTES} bytes",
            hint=_AGAIN,
            path=str(path),
            found=length,
        )
    if _LENGTH_NBYTES + length > size:
        raise _truncated(path, size, _LENGTH_NBYTES + length, "its header alone")


def _parse(path: Path, data: bytes) -> tuple[dict[str, object], dict[str, object]]:
    """The table of tensors and the notes beside it."""
    try:
        raw = json.loads(data.decode("utf-8"), object_pairs_hook=_without_doubles)
        if not isinstance(raw, dict):
            raise ValueError("it is no JSON object")
        notes = raw.pop("__metadata__", {})
        if not isinstance(notes, dict):
            raise ValueError("__metadata__ is no object")
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        name = {"name": error.name} if isinstance(error, _DoubleKeyError) else {}
        raise CheckpointError(
            f"{path} has a damaged header: {error}", hint=_AGAIN, path=str(path), **name
        ) from error
    return cast("dict[str, object]", raw), cast("dict[str, object]", notes)


class _DoubleKeyError(ValueError):
    def __init__(self, name: str) -> None:
        super().__init__(f"{name!a} is defined twice")
        self.name = name


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # json keeps the last of equal keys silently.
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise _DoubleKeyError(key)
        result[key] = value
    return result


def _entry(path: Path, payload: int, name: str, raw: object) -> TensorEntry:
    reason, fields = _fields(raw)
    if not name.isprintable():
        reason, fields = "its name is not printable", None
    if fields is None:
        raise CheckpointError(
            f"{path} has a damaged header: tensor {name!a}: {reason}",
            hint=_AGAIN,
            path=str(path),
            name=name,
        )
    dtype, shape, (start, end) = fields
    return TensorEntry(name, dtype, shape, path, payload + start, end - start)


_Fields = tuple[str, tuple[int, ...], tuple[int, int]]


def _fields(raw: object) -> tuple[str, _Fields | None]:
    if not isinstance(raw, dict) or not {"dtype", "shape", "data_offsets"} <= set(raw):
        return "expected an object with dtype, shape and data_offsets", None
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        return f"unknown dtype {dtype!r:.80}", None
    if not _whole_numbers(shape) or len(shape) > _MAX_RANK:
        return f"shape is {shape!r:.80}, expected at most {_MAX_RANK} whole numbers", None
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets are {offsets!r:.80}, expected [start, end]", None
    needed, found = math.prod(shape) * _BITS[dtype], 8 * (offsets[1] - offsets[0])
    if needed != found:
        return f"{dtype} {shape!r:.80} needs {needed / 8:g} bytes, its place has {found // 8}", None
    return "", (dtype, tuple(shape), (offsets[0], offsets[1]))


def _whole_numbers(value: object) -> bool:
    # The limit is safetensors' own (unsigned 64 bits); `type` because bool is an int.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 64 for n in value)


def _place_problems(
    path: Path, payload: int, size: int, entries: list[TensorEntry]
) -> list[CheckpointError]:
    problems: list[CheckpointError] = []
    end, last = payload, "the header"
    for entry in entries:
        if entry.offset != end:
            kind = "overlaps" if entry.offset < end else "leaves a hole after"
            problems.append(
                CheckpointError(
                    f"{path}: tensor {entry.name} at byte {entry.offset} {kind} {last}",
                    expected=f"it to start at byte {end}",
                    hint=_AGAIN,
                    path=str(path),
                    name=entry.name,
                    offset=entry.offset,
                )
            )
            return problems
        end, last = entry.offset + entry.nbytes, entry.name
    if end > size:
        cut = next(e.name for e in entries if e.offset + e.nbytes > size)
        problems.append(_truncated(path, size, end, f"tensor {cut}", cut))
    elif end < size:
        problems.append(
            CheckpointError(
                f"{path} has {size - end} bytes that belong to no tensor",
                expected=f"{end} bytes, it has {size}",
                hint=_AGAIN,
                path=str(path),
                found=size,
            )
        )
    return problems


def _truncated(path: Path, size: int, needed: int, what: str, name: str = "") -> CheckpointError:
    return CheckpointError(
        f"{path} is truncated: it has {size} bytes, {what} goes beyond that",
        expected=f"{needed} bytes",
        hint="the download is not finished; continue it or download the file again",
        path=str(path),
        found=size,
        needed=needed,
        **({"name": name} if name else {}),
    )
