"""FP8 linear layers: real = stored * scale, with one scale per row.

Stored values are float8 E4M3 ("e4m3fn": finite only, largest 448, smallest normal 2^-6, smallest
subnormal 2^-9, 3 mantissa bits). There are two scales, both fp32 and both multiplied:

    weight      (N, K), per output row   s = max(amax |w|, 1e-5) / 448             stored on disk
    activation  (M, K), per token        a = max(amax |x| / 448, 1 / (448 * 512))  made on the fly
    codes                                wq = fp8(clamp(w / s)),  xq = fp8(clamp(x * (1 / a)))
    product                              out = cast(a * (s * (xq @ wq.T)) + bias)

clamp is to +-448, everything up to the last cast is fp32, and there is one final rounding. The
floors keep rows of zeros at zero instead of 0 / 0. Rounding to FP8 is to nearest, ties to even;
LightX2V's converter rounds ties away from zero, which changes no code for fp32 sources in practice
and about 3 % of them for bf16 sources, by one step each.

`torch._scaled_mm` wants its first operand row-major and its second column-major: the weight stays
(out, in) as on disk and is passed as the view `weight.t()`; scales are (M, 1) and (1, N); K and N
are multiples of 16. Row-wise scales give bf16 output only. Whatever does not fit runs the same
formulas with an fp32 product instead.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

FP8_MAX = 448.0
FP8_DTYPE = torch.float8_e4m3fn
WEIGHT_AMAX_FLOOR = 1e-5
ACTIVATION_SCALE_FLOOR = 1.0 / (FP8_MAX * 512.0)

# Hopper's tensor cores add FP8 products with about 14 bits of mantissa. "Fast" leaves the sum in
# them for the whole of K; otherwise it is promoted to fp32 every few products. Fast is what the
# CUTLASS kernels of vLLM and LightX2V do. On an H200 (torch 2.11, 32,760 x 5120 x 5120): fast
# 1.14 ms and 53.6 dB against float64 over the same codes, otherwise 1.28 ms and 55.6 dB, where the
# rounding to FP8 itself leaves 30.2 dB.
USE_FAST_ACCUMULATION = True

NATIVE_CAPABILITY = (8, 9)  # Ada; the first GPUs with FP8 tensor cores
NATIVE_MULTIPLE = 16  # of K and N, in elements


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes (N, K) and fp32 scales (N, 1) of a weight (N, K) of any float dtype.

    Peak memory: two fp32 copies of the weight beside it.
    """
    amax = _row_amax(weight).clamp_(min=WEIGHT_AMAX_FLOOR)
    scale = amax / FP8_MAX
    return (weight / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE), scale


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes (M, K), row-major, and fp32 scales (M, 1) of activations (..., K)."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    scale = (_row_amax(rows) / FP8_MAX).clamp_(min=ACTIVATION_SCALE_FLOOR)
    # Type promotion makes the product fp32 without an fp32 copy of x.
    codes = (rows * scale.reciprocal()).clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
    return codes, scale


def linear_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Linear layer over x (..., K) in x's dtype, with FP8 weight (N, K) and scale (N, 1) fp32.

    bf16 runs on the FP8 tensor cores of a GPU that has them. fp16 and fp32 inputs ask for more
    mantissa than the bf16 output of the row-wise kernel has, so they are emulated, as is
    everything on other devices. The weight must be contiguous.
    """
    codes, scale = quantise_rows(x)
    out = multiply(codes, scale, weight, weight_scale, bias, x.dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def multiply(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The product (M, N) in `dtype` of quantised rows (M, K), (M, 1) and an FP8 weight."""
    product = _native if _fits_native(codes, weight, dtype) else _emulated
    return product(codes, scale, weight, weight_scale, bias, dtype)


def _row_amax(rows: Tensor) -> Tensor:
    """max |x| over the last axis, kept, in fp32: one pass over memory (abs().amax() makes two)."""
    amax: Tensor = torch.linalg.vector_norm(
        rows, ord=float("inf"), dim=-1, keepdim=True, dtype=torch.float32
    )
    return amax


def _fits_native(codes: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    if not codes.is_cuda or dtype != torch.bfloat16 or codes.numel() == 0:
        return False
    rows, columns = weight.shape
    if rows % NATIVE_MULTIPLE or columns % NATIVE_MULTIPLE:
        return False
    return multiplies_fp8(codes.device.index)


@functools.cache
def multiplies_fp8(index: int) -> bool:
    """The GPU has FP8 tensor cores."""
    return torch.cuda.get_device_capability(index) >= NATIVE_CAPABILITY


def _native(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return torch._scaled_mm(
        codes,
        weight.t(),
        scale_a=scale,
        scale_b=weight_scale.t(),
        bias=None if bias is None else bias.to(dtype),
        out_dtype=dtype,
        use_fast_accum=USE_FAST_ACCUMULATION,
    )


def _emulated(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    # E4M3 is exact in fp32 (and in TF32), so only the order of the sum differs from the kernel.
    out = F.linear(codes.float(), weight.float())
    out = out.mul_(weight_scale.t()).mul_(scale)
    if bias is not None:
        out = out.add_(bias.float())
    return out.to(dtype)
