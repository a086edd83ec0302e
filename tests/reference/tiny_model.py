"""Random weights of any Architecture, as a checkpoint has them and as a block is read.

Values are scaled so that activations stay near 1 through any number of blocks: linear weights by
1/sqrt(inputs), and everything that a trained model holds away from its neutral value (norm weights,
biases, modulation) is away from it here too, or an error in it would not show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shared_offload.weights.architecture import (
    PHASES,
    Architecture,
    block_shapes,
    is_quantised,
    non_block_shapes,
)
from shared_offload.weights.fp8 import quantise_weight
from shared_offload.weights.layout import Unit

Weights = dict[str, Tensor]


def make_architecture(model_type: str = "i2v", **changes: object) -> Architecture:
    """A small model whose sizes are all different; `changes` replace fields."""
    sizes = {
        "dim": 96,
        "ffn_dim": 176,
        "freq_dim": 64,
        "in_dim": 36 if model_type == "i2v" else 16,
        "out_dim": 16,
        "num_heads": 4,
        "num_layers": 3,
        "text_len": 512,
        "eps": 1e-6,
        "text_dim": 80,
        "image_dim": 48,
    }
    return Architecture(model_type=model_type, **(sizes | changes))  # type: ignore[arg-type]


def random_tensor(name: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    value = torch.randn(*shape, generator=generator)
    if name.endswith("modulation"):
        return value / shape[-1] ** 0.5
    if len(shape) == 1:
        norm_weight = "norm" in name or name.startswith(("img_emb.proj.0", "img_emb.proj.4"))
        return 0.1 * value + (1.0 if norm_weight and name.endswith("weight") else 0.0)
    return value / (value[0].numel()) ** 0.5


def non_block_weights(arch: Architecture, seed: int = 0) -> Weights:
    """The tensors outside the blocks, fp32, under full names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = non_block_shapes(arch)
    return {name: random_tensor(name, shape, generator) for name, shape in shapes.items()}


def block_weights(arch: Architecture, block: int, seed: int = 0) -> Weights:
    """The tensors of one block, fp32, under names relative to the block, as a checkpoint has them:
    `modulation` is one tensor (1, 6, D)."""
    generator = torch.Generator().manual_seed(1000 * (seed + 1) + block)
    shapes = block_shapes(arch)
    return {name: random_tensor(name, shape, generator) for name, shape in shapes.items()}


def full_weights(arch: Architecture, seed: int = 0) -> Weights:
    """A whole checkpoint under full names, fp32."""
    weights = non_block_weights(arch, seed)
    for block in range(arch.num_layers):
        for name, tensor in block_weights(arch, block, seed).items():
            weights[f"blocks.{block}.{name}"] = tensor
    return weights


def quantise_block(weights: Mapping[str, Tensor]) -> Weights:
    """A block as an FP8 checkpoint has it."""
    out: Weights = {}
    for name, tensor in weights.items():
        if is_quantised(name, tuple(tensor.shape)):
            out[name], out[f"{name}_scale"] = quantise_weight(tensor)
        else:
            out[name] = tensor
    return out


def dequantise_block(weights: Mapping[str, Tensor]) -> Weights:
    """The fp32 block that FP8 weights stand for: real = stored * scale."""
    return {
        name: tensor.float() * weights[f"{name}_scale"] if f"{name}_scale" in weights else tensor
        for name, tensor in weights.items()
        if not name.endswith("_scale")
    }


def as_read(weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Weights:
    """A block as the model reads it: modulation in halves, small tensors and scales fp32, biases
    and unquantised 2-D weights in the compute dtype."""
    out: Weights = {}
    for name, tensor in weights.items():
        if name == "modulation":
            out["self_attn.modulation"], out["ffn.modulation"] = tensor.float().chunk(2, dim=1)
        elif tensor.dtype == torch.float8_e4m3fn:
            out[name] = tensor
        elif name.endswith("_scale") or "norm" in name:
            out[name] = tensor.float()
        else:
            out[name] = tensor.to(dtype)
    return out


class DictSource:
    """A WeightSource over dicts, one per block; counts borrows and forbids nesting.

    `granularity` is "block" or "phase". A unit shows only the tensors of its phases, and shows them
    only inside the `with`.
    """

    def __init__(self, blocks: Sequence[Mapping[str, Tensor]], granularity: str = "block") -> None:
        self.blocks = blocks
        parts = [PHASES] if granularity == "block" else [(phase,) for phase in PHASES]
        numbered = [(block, part) for block in range(len(blocks)) for part in parts]
        self.units = tuple(Unit(i, b, part, 0, 0, ()) for i, (b, part) in enumerate(numbered))
        self.borrowed: list[int] = []
        self._open = False

    @contextlib.contextmanager
    def borrow(self, unit: Unit) -> Iterator[Weights]:
        assert not self._open, "a unit was borrowed while another one was"
        self._open = True
        self.borrowed.append(unit.index)
        weights = {n: t for n, t in self.blocks[unit.block].items() if _phase(n) in unit.phases}
        yield weights
        weights.clear()
        self._open = False


def _phase(name: str) -> str:
    part = name.split(".")[0]
    return "cross_attn" if part == "norm3" else part
