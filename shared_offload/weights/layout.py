"""Where every tensor of every block lies in the arena, and the units that copies move.

Invariants: all blocks have one layout; a block starts on a page, a phase of it too, a tensor at a
multiple of 256 bytes; the tensors of a phase are contiguous, and within it those that a fused
product could read together are adjacent (q, k, v; k_img, v_img; their scales; their biases). So a
block, or a phase, is one contiguous copy.

Names are relative to the block and are Wan's, but for `modulation` (1, 6, D): its rows 0-2 belong
to self-attention and rows 3-5 to the feed-forward, so it is kept as two tensors (1, 3, D),
`self_attn.modulation` and `ffn.modulation`. Dtypes are safetensors' codes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from shared_offload.weights.architecture import (
    MODULATIONS,
    PHASES,
    Architecture,
    Phase,
    block_shapes,
)

if TYPE_CHECKING:
    import torch

Granularity = Literal["block", "phase"]

DTYPE_BYTES: Mapping[str, int] = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}
FP8 = "F8_E4M3"
SCALE = "_scale"  # added to the name of an FP8 weight

MODULATION = "modulation"
MODULATION_HALVES: Mapping[str, int] = {"self_attn.modulation": 0, "ffn.modulation": 1}

TENSOR_ALIGNMENT = 256  # what CUDA kernels may expect of a pointer
PAGE = 4096
HUGE_PAGE = 2 << 20
_MAX_WASTE = 0.05  # of the arena, for blocks that start on huge pages

# Linear layers in the order of storage, then the small tensors of the phase.
_LINEARS: Mapping[Phase, tuple[str, ...]] = {
    "self_attn": ("q", "k", "v", "o"),
    "cross_attn": ("q", "k", "v", "k_img", "v_img", "o"),
    "ffn": ("0", "2"),
}
_SMALL: Mapping[Phase, tuple[str, ...]] = {
    "self_attn": ("self_attn.norm_q.weight", "self_attn.norm_k.weight", "self_attn.modulation"),
    "cross_attn": (
        "cross_attn.norm_q.weight",
        "cross_attn.norm_k.weight",
        "cross_attn.norm_k_img.weight",
        "norm3.weight",
        "norm3.bias",
    ),
    "ffn": ("ffn.modulation",),
}


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor and its place; `offset` counts from the start of its block or unit."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unit:
    """What one copy moves: a block or a phase of one. `offset` counts from the arena's start."""

    index: int
    block: int
    phases: tuple[Phase, ...]
    offset: int
    nbytes: int
    tensors: tuple[PlacedTensor, ...]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The one layout of all blocks. `phase_spans` are (offset, nbytes) within the block."""

    num_blocks: int
    tensors: tuple[PlacedTensor, ...]
    phase_spans: Mapping[Phase, tuple[int, int]]
    block_nbytes: int
    stride: int

    @property
    def arena_nbytes(self) -> int:
        return self.num_blocks * self.stride

    def units(self, granularity: Granularity) -> tuple[Unit, ...]:
        """All units in order of use."""
        parts = self._block_part() if granularity == "block" else self._phase_parts()
        units = (
            (block, phases, block * self.stride + start, nbytes, tensors)
            for block in range(self.num_blocks)
            for phases, start, nbytes, tensors in parts
        )
        return tuple(Unit(index, *unit) for index, unit in enumerate(units))

    def fingerprint(self) -> str:
        """Equal for two processes exactly when they place all tensors alike."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _block_part(self) -> list[_Part]:
        return [(PHASES, 0, self.block_nbytes, self.tensors)]

    def _phase_parts(self) -> list[_Part]:
        parts: list[_Part] = []
        for phase, (start, nbytes) in self.phase_spans.items():
            tensors = tuple(
                PlacedTensor(t.name, t.dtype, t.shape, t.offset - start, t.nbytes)
                for t in self.tensors
                if start <= t.offset < start + nbytes
            )
            parts.append(((phase,), start, nbytes, tensors))
        return parts


_Part = tuple[tuple[Phase, ...], int, int, tuple[PlacedTensor, ...]]


class WeightSource(Protocol):
    """What the model asks for weights, wherever they live."""

    @property
    def units(self) -> Sequence[Unit]:
        """In order of use; one pass over the model."""

    def borrow(self, unit: Unit) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """The unit's tensors by their names in the block, valid inside the `with`."""


def build_layout(
    arch: Architecture, source_dtypes: Mapping[str, str], compute_dtype: str
) -> BlockLayout:
    """Place the tensors of a block.

    `source_dtypes` are those on disk by Wan's names relative to the block. Only FP8 among them
    matters: such a weight stays FP8, with its scale in fp32. Other linear weights and all their
    biases get `compute_dtype`; norms and modulation are kept in fp32, which holds fp32, bf16 and
    fp16 exactly.
    """
    placed: list[PlacedTensor] = []
    spans: dict[Phase, tuple[int, int]] = {}
    end = 0
    for phase in PHASES:
        start = end = align(end, PAGE)
        for name, dtype, shape in _phase_tensors(arch, phase, source_dtypes, compute_dtype):
            offset = align(end, TENSOR_ALIGNMENT)
            nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
            placed.append(PlacedTensor(name, dtype, shape, offset, nbytes))
            end = offset + nbytes
        spans[phase] = (start, end - start)
    return BlockLayout(arch.num_layers, tuple(placed), spans, end, _stride(end))


def align(offset: int, alignment: int) -> int:
    """The first multiple of `alignment` that is not below `offset`."""
    return -(-offset // alignment) * alignment


def _stride(block_nbytes: int) -> int:
    huge = align(block_nbytes, HUGE_PAGE)
    return huge if huge <= block_nbytes * (1 + _MAX_WASTE) else align(block_nbytes, PAGE)


def _phase_tensors(
    arch: Architecture, phase: Phase, source_dtypes: Mapping[str, str], compute_dtype: str
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    shapes = block_shapes(arch)
    modulation = (1, MODULATIONS // len(MODULATION_HALVES), arch.dim)
    shapes |= dict.fromkeys(MODULATION_HALVES, modulation)
    layers = [f"{phase}.{part}" for part in _LINEARS[phase]]
    weights = [f"{layer}.weight" for layer in layers if f"{layer}.weight" in shapes]
    fp8 = {name for name in weights if source_dtypes.get(name) == FP8}
    for name in weights:
        yield name, FP8 if name in fp8 else compute_dtype, shapes[name]
    for name in weights:
        if name in fp8:
            yield name + SCALE, "F32", (shapes[name][0], 1)
    for name in weights:
        bias = name.removesuffix("weight") + "bias"
        yield bias, compute_dtype, shapes[bias]
    for name in _SMALL[phase]:
        if name in shapes:
            yield name, "F32", shapes[name]
