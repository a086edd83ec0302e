"""FP8 arithmetic against float64, and the native kernel against the emulated one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared_offload.weights import fp8


def sqnr_db(found: Tensor, wanted: Tensor) -> float:
    wanted, noise = wanted.double(), found.double() - wanted.double()
    return float(10 * torch.log10(wanted.square().sum() / noise.square().sum()))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(n: int = 96, k: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    weight = randn(n, k, seed=1) * torch.logspace(-3, 1, n)[:, None]  # rows of unlike size
    return weight, *fp8.quantise_weight(weight)


def test_weight_keeps_its_value_per_row() -> None:
    weight, codes, scale = layer()
    assert (codes.dtype, codes.shape, scale.dtype, scale.shape) == (
        torch.float8_e4m3fn,
        (96, 512),
        torch.float32,
        (96, 1),
    )
    assert scale.flatten().tolist() == pytest.approx((weight.abs().amax(1) / 448).tolist())
    assert bool((codes.float().abs().amax(1) == 448).all()), "the largest code is used"
    real = codes.double() * scale.double()
    assert min(sqnr_db(real[n], weight[n]) for n in range(96)) > 30
    # Half a step of a 3-bit mantissa for normal codes, half of 2^-9 for subnormal ones.
    bound = torch.maximum(weight.double().abs() / 16, scale.double() * 2**-10)
    assert bool(((real - weight.double()).abs() <= bound * (1 + 1e-6)).all())


def test_rows_of_zeros_stay_zero() -> None:
    codes, scale = fp8.quantise_weight(torch.zeros(2, 16))
    assert scale.flatten().tolist() == pytest.approx([1e-5 / 448] * 2)
    xq, a = fp8.quantise_rows(torch.zeros(3, 16, dtype=torch.bfloat16))
    assert a.flatten().tolist() == pytest.approx([1 / (448 * 512)] * 3)
    assert not codes.float().any() and not xq.float().any()
    bias = randn(2)
    out = fp8.linear_fp8(torch.zeros(3, 16), codes, scale, bias)
    assert torch.equal(out, bias.expand(3, 2))


def test_rounding_is_to_nearest_with_ties_to_even() -> None:
    # Between 16 and 32 the codes are 16, 18, 20, ...: 17 and 19 are ties, 17.01 and 18.99 are not.
    row = torch.tensor([[448.0, 17.0, 19.0, 17.01, 18.99, -17.0, -19.0, 500.0]])
    row[0, 7] = 448.0
    codes, scale = fp8.quantise_weight(row)
    assert float(scale) == 1.0
    assert codes.float().tolist() == [[448, 16, 20, 18, 18, -16, -20, 448]]


@pytest.mark.parametrize(
    ("dtype", "floor_db"), [(torch.float32, 110.0), (torch.float16, 65.0), (torch.bfloat16, 48.0)]
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_follows_the_formula(dtype: torch.dtype, floor_db: float, with_bias: bool) -> None:
    """Against float64 over the same codes: only the final rounding and the fp32 sum differ."""
    weight, codes, scale = layer()
    x = (randn(2, 5, 512, seed=2) * 3).to(dtype)
    bias = randn(96, seed=3).to(dtype) if with_bias else None
    out = fp8.linear_fp8(x, codes, scale, bias)
    assert out.dtype == dtype and out.shape == (2, 5, 96)

    rows = x.reshape(10, 512).double()
    a = (rows.abs().amax(1, keepdim=True) / 448).float()
    xq = (rows.float() * (1 / a)).to(torch.float8_e4m3fn).double()
    wanted = a.double() * (scale.double().t() * (xq @ codes.double().t()))
    wanted = wanted if bias is None else wanted + bias.double()
    assert sqnr_db(out.reshape(10, 96), wanted) > floor_db
    # Against the layer before quantisation: what FP8 costs.
    exact = rows @ weight.double().t() + (0 if bias is None else bias.double())
    assert 25 < sqnr_db(out.reshape(10, 96), exact) < 40


def test_memory_layout_of_the_input_does_not_matter() -> None:
    _, codes, scale = layer()
    x = randn(7, 512, 2, seed=4)
    strided = x[:, :, 1]
    transposed = randn(512, 6, seed=5).t()
    for view in (strided, transposed, strided.unsqueeze(1).expand(7, 3, 512)):
        assert not view.is_contiguous()
        wanted = fp8.linear_fp8(view.contiguous(), codes, scale, None)
        assert torch.equal(fp8.linear_fp8(view, codes, scale, None), wanted)
        assert fp8.quantise_rows(view)[0].is_contiguous()


def test_no_rows_and_odd_sizes() -> None:
    codes, scale = fp8.quantise_weight(randn(7, 33))
    assert fp8.linear_fp8(randn(0, 33), codes, scale, None).shape == (0, 7)
    assert fp8.linear_fp8(randn(33), codes, scale, None).shape == (7,)


def test_asks_a_gpu_once_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    fp8.multiplies_fp8.cache_clear()
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda index: asked.append(index) or (8, 9)
    )
    assert fp8.multiplies_fp8(0) and fp8.multiplies_fp8(0)
    assert asked == [0]
    fp8.multiplies_fp8.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 1000])
@pytest.mark.parametrize("with_bias", [True, False])
def test_native_agrees_with_emulated(rows: int, with_bias: bool) -> None:
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) < fp8.NATIVE_CAPABILITY:
        pytest.skip("this GPU has no FP8 tensor cores")
    weight = randn(1024, 5120, seed=7).to(device) * 0.02
    codes, scale = fp8.quantise_weight(weight)
    x = (randn(rows, 5120, seed=8) * 3).to(device, torch.bfloat16)
    x[0] = 0
    bias = randn(1024, seed=9).to(device, torch.bfloat16) if with_bias else None
    assert fp8._fits_native(x, codes, x.dtype)
    native = fp8.linear_fp8(x, codes, scale, bias)
    xq, a = fp8.quantise_rows(x)
    exact = a.double() * (scale.double().t() * (xq.double() @ codes.double().t()))
    exact = exact if bias is None else exact + bias.double()
    emulated = fp8._emulated(xq, a, codes, scale, bias, torch.bfloat16)
    if rows > 1 or with_bias:
        assert sqnr_db(emulated, exact) > 48
        assert sqnr_db(native, exact) > 45
        assert sqnr_db(native, emulated) > 45
    assert torch.equal(native[0], emulated[0])
