"""Attention kernels against softmax in float64, and the choice between them."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared_offload.errors import ConfigError
from shared_offload.model import attention
from shared_offload.model.attention import SPARSE_NAMES, sdpa, select_attention
from tests.reference import wan_dit

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
PACKAGES = ("fa3_fwd", "fa3_fwd_interface", "flash_attn_3", "flash_attn_interface")
PACKAGES += ("flash_attn", "sageattention")
# Of the operator that the wheel fa3-fwd 0.0.3 registers, as its library says; what is left out here
# are optional tensors between v and softmax_scale.
FLASH_3 = """fwd(Tensor q, Tensor k, Tensor v, Tensor? q_v=None, float? softmax_scale=None,
    bool is_causal=False, int num_splits=0, bool? pack_gqa=None, int sm_margin=0
) -> (Tensor, Tensor, Tensor, Tensor)"""


def inputs(
    dtype: torch.dtype, device: torch.device, heads: int = 3, width: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch 2, token counts that no tile divides, and some channels far larger than others."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, heads, width, generator=random) for n in (203, 77, 77))
    q[..., :2] *= 4
    k[..., :2] *= 4
    return tuple(t.to(device, dtype) for t in (q, k, v))  # type: ignore[return-value]


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = q.shape[2]
    rows = zip(*(t.double().cpu().flatten(2) for t in (q, k, v)), strict=True)
    return torch.stack([wan_dit.by_head(*row, heads) for row in rows]).view_as(q)


def sqnr_db(found: Tensor, exact: Tensor) -> float:
    return 20 * math.log10(exact.norm() / (found.double().cpu() - exact).norm())


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("dtype, floor", [(torch.float32, 115), (torch.bfloat16, 45)])
def test_cpu_kernels(backend: SDPBackend, dtype: torch.dtype, floor: float) -> None:
    chosen, warning = select_attention("auto", CPU, dtype)
    assert (chosen.name, warning) == ("sdpa", "")
    for width in (128, 24, 10):
        q, k, v = inputs(dtype, CPU, width=width)
        with sdpa_kernel(backend):
            found = chosen.run(q, k, v)
        assert found.shape == q.shape
        assert found.dtype == dtype
        assert sqnr_db(found, exact(q, k, v)) > floor


@pytest.mark.parametrize("name", [*attention.EXACT[1:], *attention.QUANTISED])
def test_a_kernel_that_cannot_run_here_is_replaced_by_an_exact_one(name: str) -> None:
    chosen, warning = select_attention(name, CPU, torch.bfloat16)
    assert chosen.run is sdpa
    assert warning == f"attention kernel {name} needs a CUDA device, not cpu; sdpa runs instead"


@pytest.mark.parametrize("name", SPARSE_NAMES)
def test_sparse_kernels_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is sparse") as refused:
        select_attention(name, CPU, torch.float32)
    assert refused.value.facts["found"] == name
    assert refused.value.facts["valid"] == list(attention.ATTENTION_NAMES)


def test_an_unknown_kernel_is_told_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as unknown:
        select_attention("flash_atn3", CPU, torch.float32)
    assert unknown.value.hint == "did you mean flash_attn3?"


def no_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError("No available kernel.\nsecond line")


def averages(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.mean(dim=1, keepdim=True).expand_as(q)


def nans(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.full_like(q, math.nan)


class FakeGpu:
    """A GPU as `select_attention` sees it; kernels run on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        self._monkeypatch = monkeypatch
        self._agreement = attention._agreement_db
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(
            attention, "_agreement_db", lambda run, _, dtype: self._agreement(run, CPU, dtype)
        )
        broken = dict.fromkeys(("sdpa_cudnn", "sdpa_flash"), no_kernel)
        monkeypatch.setattr(attention, "_OF_TORCH", {**attention._OF_TORCH, **broken})
        for name in PACKAGES:
            monkeypatch.setitem(sys.modules, name, None)  # makes its import an ImportError

    def install(self, module: str, function: str, kernel: object) -> None:
        fake = types.ModuleType(module)
        setattr(fake, function, kernel)
        self._monkeypatch.setitem(sys.modules, module, fake)

    def offer(self, name: str) -> None:
        kernels = {**attention._OF_TORCH, name: sdpa}
        self._monkeypatch.setattr(attention, "_OF_TORCH", kernels)


def with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, str]:
    return sdpa(q, k, v), "log-sum-exp"


def choose(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[str, str]:
    chosen, warning = select_attention(name, CUDA, dtype)
    q, k, v = inputs(dtype, CPU)
    torch.testing.assert_close(chosen.run(q, k, v), sdpa(q, k, v))
    return chosen.name, warning


def test_auto_takes_the_fastest_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, (9, 0))
    assert choose("auto") == ("sdpa", "")
    gpu.offer("sdpa_flash")
    assert choose("auto") == ("sdpa_flash", "")
    gpu.offer("sdpa_cudnn")
    assert choose("auto") == ("sdpa_cudnn", "")
    gpu.install("flash_attn_interface", "flash_attn_func", sdpa)
    assert choose("auto") == ("flash_attn3", "")
    gpu.install("fa3_fwd_interface", "flash_attn_func", with_lse)
    assert choose("auto") == ("flash_attn3", "")
    assert choose("torch_sdpa") == ("sdpa_cudnn", "")
    assert choose("auto", torch.float32) == ("sdpa", "")


def test_flash_attention_3_is_called_by_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not through the package's function, whose first call imports what compiles models."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, _: None, softmax_scale: float, *more: object
    ) -> tuple[Tensor, ...]:
        given.append((softmax_scale, *more))
        return (sdpa(q, k, v), *(torch.empty(0) for _ in range(3)))

    given: list[tuple[object, ...]] = []
    gpu = FakeGpu(monkeypatch, (9, 0))
    gpu.install("fa3_fwd_interface", "flash_attn_func", averages)
    gpu.install("fa3_fwd", "__path__", [])
    gpu.install("fa3_fwd._C", "__file__", "")
    with torch.library._scoped_library("fa3_fwd", "DEF") as library:
        library.define(FLASH_3)
        library.impl("fwd", forward, "CPU")
        assert choose("auto") == ("flash_attn3", "")
    assert set(given) == {(128**-0.5, False, 1)}  # not causal, in one pass over the keys


@pytest.mark.parametrize("broken", [no_kernel, averages])
def test_a_package_that_fails_leaves_its_turn_to_the_next(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[..., object]
) -> None:
    gpu = FakeGpu(monkeypatch, (9, 0))
    gpu.install("fa3_fwd_interface", "flash_attn_func", broken)
    assert choose("auto") == ("sdpa", "")
    gpu.install("flash_attn_interface", "flash_attn_func", sdpa)
    assert choose("auto") == ("flash_attn3", "")


@pytest.mark.parametrize("capability, first", [((8, 0), "sdpa_flash"), ((12, 0), "sdpa_cudnn")])
def test_auto_on_other_generations(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], first: str
) -> None:
    gpu = FakeGpu(monkeypatch, capability)
    gpu.install("fa3_fwd_interface", "flash_attn_func", sdpa)
    gpu.offer("sdpa_flash")
    gpu.offer("sdpa_cudnn")
    assert choose("auto") == (first, "")


def test_why_a_named_kernel_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, (9, 0))
    instead = "sdpa runs instead"
    assert choose("flash_attn2")[1] == f"attention kernel flash_attn2 is not installed; {instead}"
    gpu.install("flash_attn", "flash_attn_func", averages)
    assert "gives wrong results on this GPU" in choose("flash_attn2")[1]
    gpu.install("flash_attn", "flash_attn_func", nans)
    assert "gives wrong results on this GPU" in choose("flash_attn2")[1]
    gpu.install("flash_attn", "flash_attn_func", no_kernel)
    name, warning = choose("flash_attn2")
    assert name == "sdpa"
    assert "does not run on this GPU (No available kernel.)" in warning
    assert "\n" not in warning
    assert "quantised before" in choose("sage_attn2_k_int8_v_fp8")[1]
    assert "needs bfloat16 or float16, not float32" in choose("flash_attn2", torch.float32)[1]


def test_sage_is_given_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def sage(q: Tensor, k: Tensor, v: Tensor, *, tensor_layout: str) -> Tensor:
        assert tensor_layout == "NHD"
        return sdpa(q, k, v)

    FakeGpu(monkeypatch, (8, 9)).install("sageattention", "sageattn", sage)
    assert choose("sage_attn2") == ("sage_attn2", "")


def test_the_global_random_stream_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch, (9, 0)).offer("sdpa_cudnn")
    before = torch.get_rng_state()
    select_attention("auto", CUDA, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["auto", *attention.EXACT, *attention.QUANTISED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gpu_kernels(name: str, dtype: torch.dtype) -> None:
    chosen, warning = select_attention(name, CUDA, dtype)
    if warning:
        assert chosen.name == select_attention("auto", CUDA, dtype)[0].name
    floor = 20 if chosen.name in attention.QUANTISED else 45
    for width in (128, 64, 24, 10):
        q, k, v = inputs(dtype, CUDA, width=width)
        found = chosen.run(q, k, v)
        assert found.shape == q.shape
        assert sqnr_db(found, exact(q, k, v)) > floor


@pytest.mark.gpu
def test_torch_kernels_all_run_on_hopper_and_newer() -> None:
    if torch.cuda.get_device_capability(CUDA) < (9, 0):
        pytest.skip("needs SM 9.0")
    for name in attention._OF_TORCH:
        kernel, reason = attention._load(name, CUDA, torch.bfloat16)
        assert kernel is not None, reason
