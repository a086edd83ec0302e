"""Linear layers and norms over a mapping of named tensors.

Invariant: norms compute and return fp32 whatever comes in, and the caller rounds once, after all
the arithmetic that belongs together; linear layers return the dtype they were given.

Shape letters: D width, K input width, O output width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shared_offload.weights.fp8 import FP8_DTYPE, linear_fp8, multiply

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Quantised:
    """Rows in FP8, ready for any number of FP8 layers. Products are in `dtype`."""

    codes: Tensor
    """(M, K) FP8."""
    scale: Tensor
    """(M, 1) fp32."""
    shape: torch.Size
    """Of the rows; its product is M."""
    dtype: torch.dtype


Rows = Tensor | Quantised


def linear(x: Rows, w: Weights, name: str) -> Tensor:
    """x (..., K) through the layer `name`: (..., O) in x's dtype.

    An FP8 weight brings `name`.weight_scale and is multiplied as `weights.fp8` says; any other is
    multiplied in its own dtype, and x must be no `Quantised`.
    """
    weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
    scale = w[f"{name}.weight_scale"] if weight.dtype == FP8_DTYPE else None
    return _multiply(x, weight, scale, bias)


def linears(x: Rows, w: Weights, names: Sequence[str]) -> Sequence[Tensor]:
    """`linear` for each of several layers of equal size, in one product where that is possible.

    It is where the layers lie side by side in memory, as `weights.layout` places them if their
    sizes are multiples of its alignment. Results are then columns of one tensor.
    """
    kinds = ("weight", "bias", *(("weight_scale",) if f"{names[0]}.weight_scale" in w else ()))
    whole = {kind: _adjacent([w[f"{name}.{kind}"] for name in names]) for kind in kinds}
    weight, bias, scale = (whole.get(kind) for kind in ("weight", "bias", "weight_scale"))
    if weight is None or bias is None or any(tensor is None for tensor in whole.values()):
        return [linear(x, w, name) for name in names]
    return _multiply(x, weight, scale, bias).chunk(len(names), dim=-1)


def _multiply(x: Rows, weight: Tensor, scale: Tensor | None, bias: Tensor) -> Tensor:
    if isinstance(x, Quantised):
        assert scale is not None  # whoever quantised x looked at the weight
        out = multiply(x.codes, x.scale, weight, scale, bias, x.dtype)
        return out.reshape(*x.shape, -1)
    if scale is not None:
        return linear_fp8(x, weight, scale, bias)
    return F.linear(x.to(weight.dtype), weight, bias.to(weight.dtype)).to(x.dtype)


def _adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """One view over tensors of equal shape that follow each other in one buffer, else None."""
    first = parts[0]
    start, nbytes = first.data_ptr(), first.nbytes
    storage = first.untyped_storage().data_ptr()
    for index, part in enumerate(parts):
        beside = part.data_ptr() == start + index * nbytes and part.shape == first.shape
        if not beside or part.untyped_storage().data_ptr() != storage:
            return None
    return first.as_strided((len(parts) * first.shape[0], *first.shape[1:]), first.stride())


def linear_fp32(x: Tensor, w: Weights, name: str, pieces: int = 1) -> Tensor:
    """`linear` in fp32 whatever the weight's dtype; (..., O) fp32.

    Peak memory: an fp32 copy of 1/`pieces` of a weight that is not fp32.
    """
    weights, biases = w[f"{name}.weight"].chunk(pieces), w[f"{name}.bias"].chunk(pieces)
    outs = [F.linear(x, a.float(), b.float()) for a, b in zip(weights, biases, strict=True)]
    return outs[0] if pieces == 1 else torch.cat(outs, dim=-1)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis; fp32.

    A modulation LN(x) * (1 + scale) + shift is this with weight 1 + scale and bias shift, as Wan's
    scale and shift are the same for all tokens.
    """
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; fp32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
