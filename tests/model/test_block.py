"""Phases of a block: keys and values kept, branches in step, layers side by side as one product."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from shared_offload.model.attention import sdpa
from shared_offload.model.block import PHASE_FUNCTIONS, BlockInputs, Memo, in_step
from shared_offload.model.layers import Quantised, Weights, linear, linears
from shared_offload.model.rope import RopeTable, angles
from shared_offload.model.ulysses import SINGLE, Single, Tokens
from shared_offload.weights.fp8 import quantise_rows, quantise_weight
from tests.reference import tiny_model

ARCH = tiny_model.make_architecture("i2v")
GRID = (2, 3, 5)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(dtype: torch.dtype) -> BlockInputs:
    angle = angles(GRID, ARCH.head_dim, torch.device("cpu"))[None, :, None]
    return BlockInputs(
        e0_6D=random(6, ARCH.dim),
        rope=RopeTable(angle.cos().float(), angle.sin().float()),
        text_BED=random(1, 7, ARCH.dim).to(dtype),
        image_BID=random(1, 5, ARCH.dim).to(dtype),
        tokens=30,
        heads=ARCH.num_heads,
        eps=ARCH.eps,
        self_attention=sdpa,
        cross_attention=sdpa,
        exchange=SINGLE,
    )


def weights_of(block: int, *, fp8: bool) -> Weights:
    weights = tiny_model.block_weights(ARCH, block)
    return tiny_model.as_read(
        tiny_model.quantise_block(weights) if fp8 else weights, torch.bfloat16
    )


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_kept_keys_and_values_change_no_bit_and_are_used(fp8: bool) -> None:
    shared, w = inputs(torch.bfloat16), dict(weights_of(0, fp8=fp8))
    cross, memo = PHASE_FUNCTIONS["cross_attn"], Memo()
    x = random(1, 30, ARCH.dim).bfloat16()
    with torch.no_grad():
        [wanted] = in_step([cross(x, w, shared, None)])
        [first] = in_step([cross(x, w, shared, memo)])
        for name in [n for n in w if n.startswith(("cross_attn.k", "cross_attn.v"))]:
            del w[name]  # a second pass must not need them
        [second] = in_step([cross(x, w, shared, memo)])
    assert torch.equal(first, wanted) and torch.equal(second, wanted)
    rows = shared.text_BED.shape[1] + shared.image_BID.shape[1]
    kept = [tensor for pair in memo.values() for tensor in pair]
    assert sum(t.untyped_storage().nbytes() for t in kept) == 2 * rows * ARCH.dim * 2


class Journal(Single):
    """Says when exchanges begin and when their results are asked for."""

    size = 2

    def __init__(self) -> None:
        self.events: list[str] = []

    def outgoing(self, x_BLD: Tensor, heads: int):
        inner = super().outgoing(x_BLD, heads)
        send = lambda qkv, tokens: self._noted("heads", inner.send(qkv, tokens))  # noqa: E731
        return SimpleNamespace(place=inner.place, send=send)

    def to_tokens(self, out_BSMH: Tensor) -> Tokens:
        return self._noted("tokens", super().to_tokens(out_BSMH))

    def _noted(self, name, wait):
        self.events.append(f"begin {name}")

        def waited():
            self.events.append(f"await {name}")
            return wait()

        return waited


def test_branches_compute_while_others_wait() -> None:
    journal = Journal()
    plain = inputs(torch.bfloat16)

    def attention(*qkv: Tensor) -> Tensor:
        journal.events.append("attention")
        return plain.self_attention(*qkv)

    shared = replace(plain, exchange=journal, self_attention=attention)
    w = weights_of(0, fp8=False)
    function = PHASE_FUNCTIONS["self_attn"]
    xs = [random(1, 30, ARCH.dim, seed=seed).bfloat16() for seed in (1, 2)]
    with torch.no_grad():
        alone = [in_step([function(x, w, shared, None)])[0] for x in xs]
        journal.events.clear()
        together = in_step([function(x, w, shared, None) for x in xs])
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    # A branch's exchange runs during the other's products, and none during attention.
    events = "begin heads", "await heads", "attention", "begin tokens", "await tokens"
    assert journal.events == [event for event in events for _branch in xs]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("beside", [False, True], ids=["apart", "side by side"])
def test_layers_side_by_side_are_one_product(monkeypatch, fp8: bool, beside: bool) -> None:
    """Against each layer by itself, in fp64."""
    names, width, k = ("a", "b", "c"), 32, 48
    full = random(3 * width, k)
    stored, scale = quantise_weight(full) if fp8 else (full.bfloat16(), None)
    real = stored.double() * (scale.double() if scale is not None else 1)
    bias = random(3 * width, seed=2).bfloat16()

    def part(tensor: Tensor, index: int) -> Tensor:
        piece = tensor[index * width : (index + 1) * width]
        return piece if beside else piece.clone()

    w = {f"{n}.weight": part(stored, i) for i, n in enumerate(names)}
    w |= {f"{n}.bias": part(bias, i) for i, n in enumerate(names)}
    if scale is not None:
        w |= {f"{n}.weight_scale": part(scale, i) for i, n in enumerate(names)}
    x = random(2, 7, k, seed=3).bfloat16()
    read, rows = x.double(), x
    if fp8:
        codes, a = quantise_rows(x)
        read = (codes.double() * a.double()).view(x.shape)
        rows = Quantised(codes, a, x.shape[:-1], x.dtype)
    products = 0
    plain = torch.nn.functional.linear

    def counting(*arguments, **named):
        nonlocal products
        products += 1
        return plain(*arguments, **named)

    monkeypatch.setattr(torch.nn.functional, "linear", counting)
    found = linears(rows, w, names)
    assert products == (1 if beside else 3)
    for index, name in enumerate(names):
        exact = read @ real[index * width : (index + 1) * width].T
        exact = exact + w[f"{name}.bias"].double()
        assert found[index].shape == (2, 7, width) and found[index].dtype == torch.bfloat16
        assert (found[index].double() - exact).abs().max() <= 0.005 * exact.abs().max()
        single = linear(rows, w, name)
        assert (found[index] - single).abs().max() <= 0.01 * exact.abs().max()
