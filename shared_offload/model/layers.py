"""Linear layers and norms over a mapping of named tensors.

Invariant: norms compute and return fp32 whatever comes in, and the caller rounds once, after all
the arithmetic that belongs together; linear layers return the dtype they were given.

Shape letters: D width, K input width, O output width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from shared_offload.weights.fp8 import FP8_DTYPE, linear_fp8

Weights = Mapping[str, Tensor]


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    """x (..., K) through the layer `name`: (..., O) in x's dtype.

    An FP8 weight brings `name`.weight_scale and is multiplied as `weights.fp8` says; any other is
    multiplied in its own dtype.
    """
    weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
    if weight.dtype == FP8_DTYPE:
        return linear_fp8(x, weight, w[f"{name}.weight_scale"], bias)
    return F.linear(x.to(weight.dtype), weight, bias.to(weight.dtype)).to(x.dtype)


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
