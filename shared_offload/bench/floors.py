"""What cannot be saved: a model's matrix products and attention, each alone at its own shape.

The floor of a block runs its parts one after the other, pass after pass, with nothing between them:
no norms, no quantisation, no weights to copy. Invariant: shapes come from the table of the
checkpoint's tensors, operands are random, and every part has a weight of its own, so that a pass
takes weights from memory and not from the cache, as a step does.

Shape letters: L tokens on this rank, S all tokens, N heads, P ranks that share a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from shared_offload.bench.clock import Marks, wait
from shared_offload.bench.workload import IMAGE_TOKENS
from shared_offload.model.attention import AttentionFn
from shared_offload.weights.architecture import Architecture, block_shapes, is_quantised
from shared_offload.weights.fp8 import (
    USE_FAST_ACCUMULATION,
    multiplies_fp8,
    quantise_rows,
    quantise_weight,
)

Kind = Literal["product", "attention"]
Work = Callable[[], object]
TEXT_ROWS = ("cross_attn.k", "cross_attn.v")
IMAGE_ROWS = ("cross_attn.k_img", "cross_attn.v_img")


@dataclass(frozen=True, slots=True)
class Part:
    """A product (rows, outputs, inputs), or an attention (queries, keys, heads, head width)."""

    name: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        a, b, c, *rest = self.shape
        return 4 * a * b * c * rest[0] if self.kind == "attention" else 2 * a * b * c


def block_parts(arch: Architecture, tokens: int, share: int = 1) -> list[Part]:
    """The parts of one block and one branch on one of `share` ranks."""
    local = -(-tokens // share)
    rows = dict.fromkeys(TEXT_ROWS, arch.text_len) | dict.fromkeys(IMAGE_ROWS, IMAGE_TOKENS)
    parts = [
        Part(layer, "product", (rows.get(layer, local), *shape))
        for name, shape in block_shapes(arch).items()
        if is_quantised(name, shape)
        for layer in [name.removesuffix(".weight")]
    ]
    heads, width = arch.num_heads, arch.head_dim
    parts.append(Part("self-attention", "attention", (tokens, tokens, heads // share, width)))
    parts.append(Part("text attention", "attention", (local, arch.text_len, heads, width)))
    if arch.model_type == "i2v":
        parts.append(Part("image attention", "attention", (local, IMAGE_TOKENS, heads, width)))
    return parts


class Workbench:
    """Random operands of parts on one device; they are freed with it."""

    def __init__(
        self,
        device: torch.device,
        *,
        fp8: bool,
        dtype: torch.dtype = torch.bfloat16,
        attention: AttentionFn | None = None,
    ) -> None:
        self._device = device
        self._fp8 = fp8
        self._dtype = dtype
        self._attention = attention
        self._generator = torch.Generator(device).manual_seed(2)
        self._inputs: dict[tuple[int, ...], Tensor] = {}

    def work(self, part: Part) -> Work:
        """What runs the part once."""
        return self._attend(part) if part.kind == "attention" else self._multiply(part)

    def _multiply(self, part: Part) -> Work:
        rows, outputs, inputs = part.shape
        x = self._input(rows, inputs)
        weight = self._random(outputs, inputs) * inputs**-0.5
        if not self._fp8:
            return lambda: F.linear(x, weight)
        codes, scale = quantise_rows(x)
        weight, weight_scale = quantise_weight(weight)
        if not self._native:
            exact, exact_weight = codes.float(), weight.float()
            return lambda: F.linear(exact, exact_weight)
        return lambda: torch._scaled_mm(
            codes,
            weight.t(),
            scale_a=scale,
            scale_b=weight_scale.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=USE_FAST_ACCUMULATION,
        )

    def _attend(self, part: Part) -> Work:
        assert self._attention is not None  # given by whoever has such parts
        run = self._attention
        queries, keys, heads, width = part.shape
        q = self._input(1, queries, heads, width)
        k, v = (self._random(1, keys, heads, width) for _ in range(2))
        return lambda: run(q, k, v)

    @property
    def _native(self) -> bool:
        return self._device.type == "cuda" and multiplies_fp8(self._device.index or 0)

    def _input(self, *shape: int) -> Tensor:
        """Parts with inputs of one shape share them, as q, k and v do."""
        if shape not in self._inputs:
            self._inputs[shape] = self._random(*shape)
        return self._inputs[shape]

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(
            *shape, device=self._device, dtype=self._dtype, generator=self._generator
        )


@torch.inference_mode()
def time_parts(
    parts: Sequence[Part], bench: Workbench, device: torch.device, passes: int
) -> dict[str, float]:
    """Mean seconds of each part, over `passes` through all of them in order, after one more."""
    works: Mapping[str, Work] = {part.name: bench.work(part) for part in parts}
    for work in works.values():
        work()
    wait(device)
    marks = Marks(device)
    marks.mark()
    for _ in range(passes):
        for work in works.values():
            work()
            marks.mark()
    spans = marks.spans()
    count = len(works)
    return {name: sum(spans[at::count]) / passes for at, name in enumerate(works)}
