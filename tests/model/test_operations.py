"""Operations of a block: plain ones against float64, fused ones against both, on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from shared_offload.errors import ConfigError
from shared_offload.model.layers import Quantised, Rows
from shared_offload.model.operations import PLAIN, Operations, select_operations
from shared_offload.model.rope import RopeTable, angles
from shared_offload.weights.fp8 import FP8_DTYPE, FP8_MAX

CPU = torch.device("cpu")
EPS = 1e-6
SIZES = {"14b": (5120, 40), "1.3b": (1536, 12), "demo": (192, 8)}
GRID = (2, 3, 5)
RANKS = 4
ROWS = ("norm", "gelu", "one", "two", "apart")  # what a layer reads


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, y: Tensor, scale: Tensor, shift: Tensor, heads: int) -> dict[str, Tensor]:
    """All operations in float64."""
    x, y, scale, shift = (t.double() for t in (x, y, scale, shift))
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    rms = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * scale
    split = rms.unflatten(-1, (heads, -1))
    turns = angles(GRID, split.shape[-1], CPU)[None, :, None]
    as_complex = torch.view_as_complex(split.unflatten(-1, (-1, 2)).contiguous())
    turned = as_complex * torch.polar(torch.ones_like(turns), turns)
    return {
        "norm": normed * scale + shift,
        "gelu": 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        "one": x,
        "two": x + y,
        "heads": split,
        "turned": torch.view_as_real(turned).flatten(-2),
        "placed": torch.view_as_real(turned).flatten(-2).unflatten(2, (RANKS, -1)),
        "moved": x.unflatten(-1, (RANKS, heads // RANKS, -1)),
        "apart": x,
        "added": x + y,
        "gated": x + y * scale,
    }


def place(x: Tensor, heads: int) -> Tensor:
    """Where k of an exchange is written, (B, L, P, M, H)."""
    batch, tokens, width = x.shape
    shape = (RANKS, batch, tokens, 3, heads // RANKS, width // heads)
    return x.new_zeros(shape)[:, :, :, 1].permute(1, 2, 0, 3, 4)


def apart(x: Tensor, heads: int) -> Tensor:
    """x as an exchange brings it back: the heads of each peer together."""
    by_peer = x.unflatten(-1, (RANKS, heads // RANKS, -1)).permute(2, 0, 1, 3, 4).contiguous()
    return by_peer.permute(1, 2, 0, 3, 4)


def run(
    do: Operations, x: Tensor, y: Tensor, scale: Tensor, shift: Tensor, heads: int, weight: Tensor
) -> dict[str, Rows]:
    turns = angles(GRID, x.shape[-1] // heads, CPU)[None, :, None].to(x.device)
    rope = RopeTable(turns.cos().float(), turns.sin().float())
    return {
        "norm": do.norm(x, scale, shift, EPS, weight),
        "gelu": do.gelu(x, weight),
        "one": do.total([x], weight),
        "two": do.total([x, y], weight),
        "heads": do.heads(x, scale, EPS, heads, None),
        "turned": do.heads(x, scale, EPS, heads, rope),
        "placed": do.heads(x, scale, EPS, heads, rope, place(x, heads)),
        "moved": do.heads(x, None, EPS, heads, None, place(x, heads)),
        "apart": do.total([apart(x, heads)], weight),
        "added": do.add(x, y, None),
        "gated": do.add(x, y, scale),
    }


def values(found: Rows) -> Tensor:
    if isinstance(found, Quantised):
        return (found.codes.double() * found.scale.double()).view((*found.shape, -1))
    return found.double()


def check(do: Operations, size: str, fp8: bool, device: torch.device, dtype: torch.dtype) -> None:
    width, heads = SIZES[size]
    # x as a column block of a wider product, as q, k and v are.
    x = random(2, 30, 3 * width, scale=3).to(dtype).chunk(3, -1)[1]
    y, scale, shift = random(2, 30, width, seed=1).to(dtype), random(width), random(width, seed=2)
    weight = torch.empty(1, dtype=FP8_DTYPE if fp8 else dtype)
    wanted = exact(x, y, scale, shift, heads)
    found = run(do, *(t.to(device) for t in (x, y, scale, shift)), heads, weight.to(device))
    for name, result in found.items():
        got, want = values(result).cpu(), wanted[name]
        assert got.shape == want.shape, name
        # One rounding to dtype; to FP8 one more, half a step of 2^-4, or of the smallest code.
        near = want.abs() * 2.0 ** (-7 if dtype == torch.bfloat16 else -20) + 1e-5
        if isinstance(result, Quantised):
            near += want.abs() / 16 + want.abs().amax(-1, keepdim=True) / FP8_MAX * 2.0**-9
        assert ((got - want).abs() <= near).all(), name
        assert isinstance(result, Quantised) == (fp8 and name in ROWS)


@pytest.mark.parametrize("size", ["1.3b", "demo"])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_operations_are_their_formulas(size: str, fp8: bool, dtype: torch.dtype) -> None:
    check(PLAIN, size, fp8, CPU, dtype)


def test_what_runs_where_there_is_no_gpu() -> None:
    found, name = select_operations("auto", CPU, torch.bfloat16)
    assert found is PLAIN and "the device is cpu" in name
    assert select_operations(False, CPU, torch.bfloat16)[0] is PLAIN
    with pytest.raises(ConfigError, match=r"compile is true, but .* the device is cpu"):
        select_operations(True, CPU, torch.bfloat16)


CHOICE = """
import sys, torch
from shared_offload.model.attention import select_attention
from shared_offload.model.operations import prepare_operations, select_operations
prepare_operations("auto")
select_attention("auto", torch.device("cuda", 0), torch.bfloat16)
_, name = select_operations("auto", torch.device("cuda", 0), torch.bfloat16)
from triton.runtime import cache
print(name, cache.triton_key.cache_info().misses, "torch._dynamo" in sys.modules)
"""


@pytest.mark.gpu
def test_a_start_waits_for_no_compiler_of_models_and_hashes_triton_once() -> None:
    command = [sys.executable, "-c", CHOICE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split("\n")[-2] == "fused kernels 1 False"


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fp8", [False, True])
def test_fused_operations_are_their_formulas(size: str, fp8: bool) -> None:
    device = torch.device("cuda", 0)
    fused, _ = select_operations(True, device, torch.bfloat16)
    check(fused, size, fp8, device, torch.bfloat16)


@pytest.mark.gpu
def test_fused_codes_are_the_plain_ones() -> None:
    """But for the last bit of a scale or a sum, which turns a few codes by one step."""
    device = torch.device("cuda", 0)
    fused, _ = select_operations(True, device, torch.bfloat16)
    weight = torch.empty(1, dtype=FP8_DTYPE, device=device)
    x = random(1, 300, 13824, scale=2).to(device, torch.bfloat16)
    x[0, 0] = 0  # a row without a scale of its own
    for name in ("total", "gelu"):
        given = [x] if name == "total" else x
        ours, plain = (getattr(do, name)(given, weight) for do in (fused, PLAIN))
        torch.testing.assert_close(ours.scale, plain.scale, rtol=3e-7, atol=0)
        apart = ours.codes.view(torch.uint8).int() - plain.codes.view(torch.uint8).int()
        assert int(apart.abs().max()) <= 1 and float((apart == 0).float().mean()) > 0.999


@pytest.mark.gpu
def test_rows_beyond_2_gib_are_reached() -> None:
    device = torch.device("cuda", 0)
    fused, _ = select_operations(True, device, torch.bfloat16)
    x = torch.zeros(1, 170_000, 13824, dtype=torch.bfloat16, device=device)
    x[0, -1] = random(13824).to(device, torch.bfloat16)
    rows = fused.total([x], torch.empty(1, dtype=FP8_DTYPE, device=device))
    last = (rows.codes[-1].float() * rows.scale[-1]).double()
    assert (last - x[0, -1].double()).abs().max() < 0.3 and not rows.codes[-2].float().any()
