"""LoRA files, merged into a checkpoint while its tensors are read.

A merged tensor is W + strength * (alpha / r) * B @ A, plus strength * diff, over all files:
computed in fp32 from what is on disk and rounded once, to the dtype of its destination. Invariant:
every key of a file is used, or told. Nothing of a LoRA is held between reads: memory is a few
pieces of the tensor that is read and one factor, per thread.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shared_offload.errors import CheckpointError, OffloadError, Problems, raise_all
from shared_offload.weights.checkpoint import Checkpoint, TensorEntry
from shared_offload.weights.files import FileStamp, OpenFiles, bounded_names
from shared_offload.weights.lora_keys import (
    ADAPTER_FILES,
    AdapterConfig,
    KeyTable,
    Role,
    read_adapter_config,
)
from shared_offload.weights.safetensors_header import Header, read_header
from shared_offload.weights.views import TORCH_DTYPES

_FLOATS = ("F32", "BF16", "F16")
# Trainers write alpha as whatever number they were given.
_NUMBERS = {
    **{code: TORCH_DTYPES[code] for code in _FLOATS},
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
}
_ALPHA_NBYTES = 8  # more cannot be one number


class LoraFile(NamedTuple):
    """A file (or the folder that peft or diffusers saved it in) and its strength."""

    path: Path
    strength: float = 1.0


class Loaded(NamedTuple):
    """A checkpoint with LoRAs, and a line for the reader about each of them."""

    checkpoint: Checkpoint
    notes: tuple[str, ...]


def with_loras(
    checkpoint: Checkpoint, loras: Sequence[LoraFile], *, allow_unmatched: bool = False
) -> Loaded:
    """The checkpoint whose tensors are read with all of the LoRAs added.

    Reads headers, and alphas. Raises CheckpointError, or Problems: a file that is broken, has
    shapes that do not fit, no key for this model, or keys left over (`allow_unmatched`: a note).
    """
    table = KeyTable(checkpoint.entries)
    terms: defaultdict[str, list[Term]] = defaultdict(list)
    problems: list[OffloadError] = []
    notes = []
    for lora in loras:
        try:
            header = read_header(_file(lora.path))
            problems += header.problems
            if not header.problems:
                config = read_adapter_config(header.path, header.notes)
                reading = _Reading(header, config, lora.strength, checkpoint)
                notes.append(reading.into(terms, table, allow_unmatched=allow_unmatched))
        except Problems as several:
            problems += several.errors
        except CheckpointError as error:
            problems.append(error)
    raise_all(problems)
    merges = {
        name: Additions(checkpoint.entries[name].shape, tuple(t)) for name, t in terms.items()
    }
    return Loaded(replace(checkpoint, merges=merges), tuple(notes))


class Term(Protocol):
    """One thing that is added to a tensor."""

    @property
    def scale(self) -> float:
        """What it is multiplied with."""

    @property
    def source(self) -> Source:
        """Its file."""

    def rows(self, first: int, end: int, columns: int) -> Tensor:
        """Rows of what is added, in fp32, not yet scaled."""

    def identity(self) -> object:
        """JSON values that say what it is."""


@dataclass(frozen=True, slots=True)
class Source:
    """A LoRA file whose header was read."""

    path: Path
    stamp: FileStamp

    def read(self, entry: TensorEntry, first: int = 0, end: int | None = None) -> Tensor:
        """Elements of a tensor, flat and in fp32. CheckpointError where the file has changed."""
        dtype = _NUMBERS[entry.dtype]
        size = dtype.itemsize
        end = entry.nbytes // size if end is None else end
        raw = torch.empty((end - first) * size, dtype=torch.uint8)
        with OpenFiles({self.path: self.stamp}) as files:
            files.read_into(self.path, entry.offset + first * size, raw.numpy().data)
        return raw.view(dtype).float()


@dataclass(frozen=True, slots=True)
class Product:
    """up @ down: (out, r) @ (r, in)."""

    source: Source
    scale: float
    up: TensorEntry
    down: TensorEntry

    def rows(self, first: int, end: int, columns: int) -> Tensor:
        rank = self.down.shape[0]
        up = self.source.read(self.up, first * rank, end * rank).view(end - first, rank)
        return up @ self.source.read(self.down).view(rank, columns)

    def identity(self) -> object:
        return self.scale, self.up.name, self.down.name


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor of the same size."""

    source: Source
    scale: float
    entry: TensorEntry

    def rows(self, first: int, end: int, columns: int) -> Tensor:
        return self.source.read(self.entry, first * columns, end * columns).view(-1, columns)

    def identity(self) -> object:
        return self.scale, self.entry.name


@dataclass(frozen=True, slots=True)
class Additions:
    """All that is added to one tensor; satisfies `checkpoint.Merge`."""

    shape: tuple[int, ...]
    terms: tuple[Term, ...]

    def __call__(
        self, first: int, src: memoryview, src_dtype: str, dst: memoryview, dst_dtype: str
    ) -> None:
        """Merge elements from `first` on; both views are writable and hold whole elements."""
        base = torch.frombuffer(src, dtype=TORCH_DTYPES[src_dtype]).float()
        columns = math.prod(self.shape[1:])
        top, bottom = first // columns, -(-(first + len(base)) // columns)
        begin = first - top * columns
        for term in self.terms:
            rows = term.rows(top, bottom, columns).flatten()
            base.add_(rows[begin : begin + len(base)], alpha=term.scale)
        torch.frombuffer(dst, dtype=TORCH_DTYPES[dst_dtype]).copy_(base)

    def identity(self) -> object:
        """Of each term: its file's state, its keys, its scale."""
        return [(astuple(term.source.stamp), term.identity()) for term in self.terms]

    def files(self) -> tuple[Path, ...]:
        return tuple(term.source.path for term in self.terms)


@dataclass(slots=True)
class _Reading:
    """One file, from keys to terms."""

    header: Header
    config: AdapterConfig
    strength: float
    checkpoint: Checkpoint
    problems: list[CheckpointError] = field(default_factory=list)

    def into(
        self, terms: defaultdict[str, list[Term]], table: KeyTable, *, allow_unmatched: bool
    ) -> str:
        """Add this file's terms; returns a line about it."""
        layers, left = self._sort(table)
        raise_all(self.problems)  # what has such problems cannot be looked into
        if not layers:
            self._tell(
                f"none of its {len(left)} keys belongs to this model",
                left,
                expected="LoRA of a Wan 2.1 DiT, in the style of peft, diffusers, kohya or ComfyUI",
                hint="is it for this model, and not for a text encoder?",
            )
        elif left and not allow_unmatched:
            self._tell(
                f"{len(left)} of its {len(self.header.entries)} keys do not fit this model",
                left,
                expected="a use for every key",
                hint="it may be for another task or size; lora_allow_unmatched goes on without "
                "these keys",
            )
        found = [(layer, term) for layer in layers for term in self._terms(layer)]
        raise_all(self.problems)
        for layer, term in found:
            terms[layer.target].append(term)
        unused = f"; {len(left)} keys without use: {bounded_names(left)}" if left else ""
        what = f"LoRA {self.header.path.name}, strength {self.strength:g}"
        return f"{what}: {len(layers)} tensors merged{unused}"

    def _sort(self, table: KeyTable) -> tuple[list[_Layer], list[str]]:
        """What belongs to each tensor of the model, and keys that belong to none."""
        layers: dict[str, _Layer] = {}
        left: list[str] = []
        for name, entry in self.header.entries.items():
            key = table.read(name)
            if key is None:
                left.append(name)
                continue
            roles = layers.setdefault(key.target, _Layer(key.target, key.module, {})).roles
            if key.role in roles:
                self._tell("two keys mean the same", [roles[key.role].name, name])
            known = tuple(_NUMBERS) if key.role == "alpha" else _FLOATS
            if entry.dtype not in known:
                self._tell(f"dtype {entry.dtype}", [name], expected=" or ".join(known))
            roles[key.role] = entry
        return list(layers.values()), left

    def _terms(self, layer: _Layer) -> Iterable[Term]:
        source = Source(self.header.path, self.header.stamp)
        shape = self.checkpoint.entries[layer.target].shape
        up, down, alpha, add = (layer.roles.get(r) for r in ("up", "down", "alpha", "add"))
        if add and self._has_shape(add, _squeezed(add.shape), _squeezed(shape), layer.target):
            yield Difference(source, self.strength, add)
        if up and down:
            rank = max(down.shape[0], 1) if down.shape else 1
            rows, columns = shape[0], math.prod(shape[1:])
            if self._has_shape(
                down, _matrix(down.shape), (rank, columns), layer.target
            ) and self._has_shape(up, _matrix(up.shape), (rows, rank), layer.target):
                factor = self._factor(source, alpha, layer.module, rank)
                yield Product(source, self.strength * factor, up, down)
        elif alone := up or down or (None if add else alpha):
            self._tell(
                "a key is alone",
                [alone.name],
                expected="a down and an up matrix for each layer",
                hint="the file is not complete; download it again",
            )

    def _factor(self, source: Source, alpha: TensorEntry | None, module: str, rank: int) -> float:
        """alpha / r; an alpha of 0 counts as none, as in LightX2V."""
        if alpha is None:
            return self.config.factor(module, rank)
        value = source.read(alpha).tolist() if alpha.nbytes <= _ALPHA_NBYTES else []
        if len(value) != 1 or not math.isfinite(value[0]):
            self._tell(f"alpha is {value}", [alpha.name], expected="one number")
            return 1.0
        return value[0] / rank if value[0] else 1.0

    def _has_shape(
        self, entry: TensorEntry, found: tuple[int, ...], wanted: tuple[int, ...], target: str
    ) -> bool:
        if found != wanted:
            self._tell(
                f"shape {list(entry.shape)} for {target}", [entry.name], expected=str(list(wanted))
            )
        return found == wanted

    def _tell(self, what: str, names: list[str], *, expected: str = "", hint: str = "") -> None:
        path = self.header.path
        self.problems.append(
            CheckpointError(
                f"LoRA {path}: {what}: {bounded_names(names)}",
                expected=expected,
                hint=hint,
                path=str(path),
                name=next(iter(names), ""),
                names=names,
            )
        )


class _Layer(NamedTuple):
    """A tensor of the model, its module as the file spells it, and the file's tensors for it."""

    target: str
    module: str
    roles: dict[Role, TensorEntry]


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A convolution's factor as a matrix: all axes but the first in one."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else shape


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _file(path: Path) -> Path:
    """The file itself, or that of a folder that peft or diffusers saved."""
    if not path.is_dir():
        return path
    inside = [path / name for name in ADAPTER_FILES if (path / name).is_file()]
    if len(inside) != 1:
        raise CheckpointError(
            f"LoRA folder {path} holds {len(inside)} of {' and '.join(ADAPTER_FILES)}",
            expected="one of them",
            hint="name the file itself",
            path=str(path),
        )
    return inside[0]
