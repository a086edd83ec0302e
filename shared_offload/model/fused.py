"""The operations of a block as one GPU kernel each.

Each reads its inputs from memory once and writes its result once, which is all the time it takes: a
row of activations stays in registers between its norm, its modulation, its largest value and its
FP8 codes. Nothing is compiled again when a request changes the size of a video, and Triton keeps on
disk what it compiled.

docs/performance.md compares a step with these, with torch.compile and with neither.

Shape letters: B batch, L tokens on this rank, D width, K input width, N heads, H head width, M all
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import triton
from torch import Tensor

from shared_offload.model import kernels
from shared_offload.model.layers import Quantised, Rows
from shared_offload.model.operations import PLAIN, Operations
from shared_offload.model.rope import RopeTable
from shared_offload.weights.fp8 import FP8_DTYPE

_PER_THREAD = 32  # elements of a row that a thread holds: more would spill, fewer idle
_WARP = 32
_PIECE = 1024  # of a row, of one program of `add`

# H200, 32,760 x 5120 to FP8: 0.26 ms with 2 rows a program and 4 warps, 0.38 with 1 and 8; GELU of
# 13,824 columns 0.47 ms with exp2, 0.51 with exp.
_NORM_ROWS = 2

_PROBE_ERROR = 0.05  # turned codes stay below it; anything wrong is far above


class Fused:
    """One kernel for each operation; bf16 on CUDA, launched on the current device and stream."""

    def norm(
        self, x_BLD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float, weight: Tensor
    ) -> Rows:
        x_MD = _rows(x_BLD)
        out, rows = _result(x_BLD.shape[:-1], x_BLD.shape[-1], x_BLD, weight)
        width = x_MD.shape[1]
        block = triton.next_power_of_2(width)
        kernels.norm[(triton.cdiv(x_MD.shape[0], _NORM_ROWS),)](
            x_MD,
            scale_D,
            shift_D,
            *out,
            x_MD.stride(0),
            eps,
            x_MD.shape[0],
            D=width,
            BLOCK=block,
            ROWS=_NORM_ROWS,
            QUANTISED=isinstance(rows, Quantised),
            num_warps=_warps(block // 2),
        )
        return rows

    def gelu(self, x_BLK: Tensor, weight: Tensor) -> Rows:
        x_MK = _rows(x_BLK)
        out, rows = _result(x_BLK.shape[:-1], x_BLK.shape[-1], x_BLK, weight)
        width = x_MK.shape[1]
        block, warps = _block(width)
        kernels.gelu[(x_MK.shape[0],)](
            x_MK,
            *out,
            x_MK.stride(0),
            K=width,
            BLOCK=block,
            QUANTISED=isinstance(rows, Quantised),
            num_warps=warps,
        )
        return rows

    def total(self, parts: Sequence[Tensor], weight: Tensor) -> Rows:
        first, *others = (_in_parts(part) for part in parts)
        if others and first.stride() != others[0].stride():
            first, others = first.contiguous(), [others[0].contiguous()]
        batch, tokens, *inner = first.shape
        width = math.prod(inner)
        if not others and weight.dtype != FP8_DTYPE:
            return first.reshape(batch, tokens, width)
        out, rows = _result((batch, tokens), width, first, weight)
        block, warps = _block(width)
        kernels.total[(batch * tokens,)](
            first,
            others[0] if others else first,
            *out,
            first.stride(1),
            first.stride(2),
            D=width,
            PART=math.prod(inner[1:]),
            BLOCK=block,
            TWO=bool(others),
            QUANTISED=isinstance(rows, Quantised),
            num_warps=warps,
        )
        return rows

    def heads(
        self,
        x_BLD: Tensor,
        norm_D: Tensor | None,
        eps: float,
        heads: int,
        rope: RopeTable | None,
        place_BLPMH: Tensor | None = None,
    ) -> Tensor:
        x_MD = _rows(x_BLD)
        batch, tokens, width = x_BLD.shape
        out = place_BLPMH
        if out is None:
            shape = (batch, tokens, 1, heads, width // heads)
            out = torch.empty(shape, dtype=x_BLD.dtype, device=x_BLD.device)
        weight = x_MD if norm_D is None else norm_D  # a kernel takes no None
        cos, sin = (weight, weight) if rope is None else rope
        n_block, h_block = (triton.next_power_of_2(n) for n in (heads, width // heads))
        kernels.heads[(batch * tokens,)](
            x_MD,
            weight,
            cos,
            sin,
            out,
            x_MD.stride(0),
            *out.stride()[:3],
            tokens,
            eps,
            N=heads,
            M=out.shape[3],
            H=width // heads,
            N_BLOCK=n_block,
            H_BLOCK=h_block,
            NORMED=norm_D is not None,
            TURNED=rope is not None,
            num_warps=_warps(n_block * h_block),
        )
        return out.squeeze(2) if place_BLPMH is None else out

    def add(self, x_BLD: Tensor, y_BLD: Tensor, gate_D: Tensor | None) -> Tensor:
        x, y = x_BLD.contiguous(), y_BLD.contiguous()
        width, out = x.shape[-1], torch.empty_like(x)
        kernels.add[(x.numel() // width, triton.cdiv(width, _PIECE))](
            x,
            y,
            x if gate_D is None else gate_D,
            out,
            D=width,
            PIECE=_PIECE,
            GATED=gate_D is not None,
            num_warps=4,
        )
        return out


def probe(device: torch.device) -> str:
    """Compile and run every kernel on a small input: why they cannot be used, or ""."""
    try:
        with torch.cuda.device(device):
            wrong = [name for name, right in _agreements(device) if not right]
    except Exception as error:  # Triton needs a compiler, a driver that it knows, a writable folder
        first, *_ = (str(error) or repr(error)).splitlines()
        return f"Triton cannot run here ({first})"
    return f"Triton's kernels give wrong results here ({', '.join(wrong)})" if wrong else ""


def _agreements(device: torch.device) -> Iterator[tuple[str, bool]]:
    """Each operation, and whether it agrees with the plain one."""
    generator = torch.Generator(device).manual_seed(0)  # leaves the global stream alone

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, y = random(1, 5, 64).bfloat16(), random(1, 5, 64).bfloat16()
    scale, shift = random(64), random(64)
    rope = RopeTable(random(1, 5, 1, 8), random(1, 5, 1, 8))
    ours: Operations = Fused()
    for dtype in (FP8_DTYPE, torch.bfloat16):
        weight = torch.empty(1, dtype=dtype, device=device)
        runs: dict[str, Callable[[Operations], Rows]] = {
            "norm": lambda do: do.norm(x, scale, shift, 1e-6, weight),  # noqa: B023
            "gelu": lambda do: do.gelu(x, weight),  # noqa: B023
            "total": lambda do: do.total([x, y], weight),  # noqa: B023
            "heads": lambda do: do.heads(x, scale, 1e-6, 4, rope),
            "move": lambda do: do.heads(x, None, 1e-6, 4, None),
            "add": lambda do: do.add(x, y, scale),
        }
        for name, run in runs.items():
            found, wanted = _values(run(ours)), _values(run(PLAIN))
            yield name, bool((found - wanted).norm() < _PROBE_ERROR * wanted.norm())


def _values(rows: Rows) -> Tensor:
    if isinstance(rows, Quantised):
        return (rows.codes.float() * rows.scale).view(*rows.shape, -1)
    return rows.float()


def _rows(x: Tensor) -> Tensor:
    """x as (M, D), whose last dimension is contiguous; rows may lie apart, in a wider product."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _in_parts(x: Tensor) -> Tensor:
    """x (B, L, ...) as (B, L, P, ...), whose rows are P parts of values side by side."""
    parts = x if x.ndim == 5 else x.unsqueeze(2)
    whole = parts[0, 0, 0].is_contiguous() and (x.shape[0] == 1 or parts.is_contiguous())
    return parts if whole else parts.contiguous()


def _result(
    shape: Sequence[int], width: int, like: Tensor, weight: Tensor
) -> tuple[tuple[Tensor, Tensor], Rows]:
    """Where to write values and scales, and the result (*shape, width) that they are."""
    if weight.dtype != FP8_DTYPE:
        out = torch.empty(*shape, width, dtype=like.dtype, device=like.device)
        return (out, out), out
    rows = math.prod(shape)
    codes = torch.empty(rows, width, dtype=FP8_DTYPE, device=like.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=like.device)
    return (codes, scales), Quantised(codes, scales, torch.Size(shape), like.dtype)


def _block(width: int) -> tuple[int, int]:
    block = triton.next_power_of_2(width)
    return block, _warps(block)


def _warps(elements: int) -> int:
    return max(1, min(16, elements // (_PER_THREAD * _WARP)))
