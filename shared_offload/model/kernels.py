"""Triton's kernels under `model.fused`: sizes of rows are compiled in, the number of rows is not.

A program works on one row, all of it in registers, and reads and writes it once; `norm` on a few
rows, so that it reads scale and shift less often, and `add` on a piece of one. Rows and columns are
M and D (K where a layer's inputs are wider than the model); N heads of H channels. Sums, products
and roots are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared_offload.weights.fp8 import ACTIVATION_SCALE_FLOOR, FP8_MAX

_MAX = tl.constexpr(FP8_MAX)
_FLOOR = tl.constexpr(ACTIVATION_SCALE_FLOOR)
_GELU_LINEAR = tl.constexpr(2.302208198144325)  # 2 sqrt(2 / pi) log2(e)
_GELU_CUBIC = tl.constexpr(0.1029432396800235)  # the same times 0.044715


@triton.jit
def _store(out, scales, row, columns, mask, y, stride, QUANTISED: tl.constexpr):
    """y, rounded to bf16, as bf16 or as FP8 codes and their scale."""
    y = y.to(tl.bfloat16)
    if QUANTISED:
        y = y.to(tl.float32)
        largest = tl.max(tl.abs(y), axis=0)
        scale = tl.maximum(tl.div_rn(largest, _MAX), _FLOOR)
        codes = (y * tl.div_rn(1.0, scale)).to(tl.float8e4nv)  # which saturates by itself
        tl.store(out + row * stride + columns, codes, mask=mask)
        tl.store(scales + row, scale)
    else:
        tl.store(out + row * stride + columns, y, mask=mask)


@triton.jit
def norm(
    x,
    scale,
    shift,
    out,
    scales,
    x_stride,
    eps,
    M,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    gain = tl.load(scale + columns, mask=mask, other=0.0)
    offset = tl.load(shift + columns, mask=mask, other=0.0)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for index in range(ROWS):
        row = first + index
        if row < M:
            y = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
            mean = tl.sum(y, axis=0) / D
            y = tl.where(mask, y - mean, 0.0)
            y = y * tl.rsqrt(tl.sum(y * y, axis=0) / D + eps)
            _store(out, scales, row, columns, mask, y * gain + offset, D, QUANTISED)


@triton.jit
def gelu(x, out, scales, x_stride, K: tl.constexpr, BLOCK: tl.constexpr, QUANTISED: tl.constexpr):
    """x / 2 * (1 + tanh(u)) is x * sigmoid(2 u), and e^-2u a power of two."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < K
    y = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    y = y / (1.0 + tl.exp2(-y * (_GELU_LINEAR + _GELU_CUBIC * y * y)))
    _store(out, scales, row, columns, mask, y, K, QUANTISED)


@triton.jit
def total(
    a,
    b,
    out,
    scales,
    row_stride,
    part_stride,
    D: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """A row of the inputs is in parts of PART values that lie apart."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    place = row * row_stride + (columns // PART).to(tl.int64) * part_stride + columns % PART
    y = tl.load(a + place, mask=mask, other=0.0).to(tl.float32)
    if TWO:
        y += tl.load(b + place, mask=mask, other=0.0).to(tl.float32)
    _store(out, scales, row, columns, mask, y, D, QUANTISED)


@triton.jit
def heads(
    x,
    weight,
    cos,
    sin,
    out,
    x_stride,
    batch_stride,
    row_stride,
    part_stride,
    tokens,
    eps,
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    N_BLOCK: tl.constexpr,
    H_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    TURNED: tl.constexpr,
):
    """A row of the output is in parts of M heads that lie apart."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N_BLOCK)[:, None]
    h = tl.arange(0, H_BLOCK)[None, :]
    mask = (n < N) & (h < H)
    columns = n * H + h
    y = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        mean = tl.sum(tl.sum(y * y, axis=1), axis=0) / (N * H)
        y = y * tl.rsqrt(mean + eps) * tl.load(weight + columns, mask=mask, other=0.0)
    token = row % tokens
    if TURNED:
        pair = tl.arange(0, H_BLOCK // 2)[None, :]
        angle = token * (H // 2) + pair
        c = tl.load(cos + angle, mask=pair < H // 2, other=0.0)
        s = tl.load(sin + angle, mask=pair < H // 2, other=0.0)
        real, imaginary = tl.split(tl.reshape(y, (N_BLOCK, H_BLOCK // 2, 2)))
        turned = tl.join(real * c - imaginary * s, real * s + imaginary * c)
        y = tl.reshape(turned, (N_BLOCK, H_BLOCK))
    place = (row // tokens) * batch_stride + token * row_stride
    place += (n // M).to(tl.int64) * part_stride + (n % M) * H + h
    tl.store(out + place, y.to(tl.bfloat16), mask=mask)


@triton.jit
def add(x, y, gate, out, D: tl.constexpr, PIECE: tl.constexpr, GATED: tl.constexpr):
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    mask = columns < D
    place = tl.program_id(0).to(tl.int64) * D + columns
    added = tl.load(y + place, mask=mask).to(tl.float32)
    if GATED:
        added = added * tl.load(gate + columns, mask=mask)
    total = tl.load(x + place, mask=mask).to(tl.float32) + added
    tl.store(out + place, total.to(tl.bfloat16), mask=mask)
