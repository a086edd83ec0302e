"""The DiT on a GPU against the formulas in float64, and that a step never makes the host wait."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shared_offload.model.attention import sdpa, select_attention
from shared_offload.model.dit import Dit
from shared_offload.model.operations import select_operations
from tests.reference import tiny_model, wan_dit

pytestmark = pytest.mark.gpu

ARCH = tiny_model.make_architecture("i2v")
BLOCKS = [tiny_model.block_weights(ARCH, i) for i in range(ARCH.num_layers)]
CUDA = torch.device("cuda", 0)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LATENT, CONDITION = random(16, 3, 6, 10), random(20, 3, 6, 10, seed=1)
TEXT, CLIP = random(19, ARCH.text_dim), random(11, ARCH.image_dim)


def sqnr_db(found: Tensor, exact: Tensor) -> float:
    return 20 * math.log10(exact.norm() / (found.double().cpu() - exact.double().cpu()).norm())


def exact(blocks: list[dict[str, Tensor]]) -> Tensor:
    weights = tiny_model.non_block_weights(ARCH)
    for i, block in enumerate(blocks):
        weights |= {f"blocks.{i}.{name}": tensor for name, tensor in block.items()}
    latent = torch.cat((LATENT, CONDITION))
    numbers = {"heads": ARCH.num_heads, "freq_dim": ARCH.freq_dim, "text_rows": ARCH.text_len}
    return wan_dit.velocity(weights, latent, 937.0, TEXT, CLIP, **numbers)


class Step:
    """A model on `device` and everything that one step of it needs."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, fp8: bool = False, fused: bool = False
    ) -> None:
        blocks = [tiny_model.quantise_block(b) for b in BLOCKS] if fp8 else BLOCKS
        read = [tiny_model.as_read(block, dtype) for block in blocks]
        self.on_device = [{n: t.to(device) for n, t in block.items()} for block in read]
        kernel = select_attention("auto", device, dtype)[0].run
        self.dit = Dit(
            ARCH,
            tiny_model.non_block_weights(ARCH),
            dtype=dtype,
            device=device,
            self_attention=kernel,
            cross_attention=sdpa,
            operations=select_operations(fused, device, dtype)[0],
        )
        image = self.dit.embed_image(CLIP)
        self.branches = [self.dit.make_branch(text, image, keep=fused) for text in (TEXT, TEXT[:2])]
        self.latent, self.condition = LATENT.to(device), CONDITION.to(device)

    def __call__(self) -> Tensor:
        source = tiny_model.DictSource(self.on_device, "phase")
        args = (self.latent, 937.0, self.branches, source, self.condition)
        return self.dit.velocities(*args)[0]


@pytest.mark.parametrize(
    "dtype, floor", [(torch.float32, 110), (torch.bfloat16, 40), (torch.float16, 58)]
)
def test_equals_the_formulas(dtype: torch.dtype, floor: float) -> None:
    assert sqnr_db(Step(CUDA, dtype)(), exact(BLOCKS)) > floor


@pytest.mark.parametrize("fp8", [False, True])
def test_fused_kernels_are_no_less_exact(fp8: bool) -> None:
    real = BLOCKS
    if fp8:
        real = [tiny_model.dequantise_block(tiny_model.quantise_block(b)) for b in BLOCKS]
    wanted = exact(real)
    plain, fused = (
        sqnr_db(Step(CUDA, torch.bfloat16, fp8, fused=fused)(), wanted) for fused in (False, True)
    )
    assert plain > (28 if fp8 else 40) and fused > plain - 0.2


@pytest.mark.parametrize("fused", [False, True])
def test_the_host_never_waits_in_a_step(host_must_not_wait, fused: bool) -> None:
    step = Step(CUDA, torch.bfloat16, fp8=True, fused=fused)
    expected = step()  # kernels are compiled in the first
    with host_must_not_wait():
        first = step()
        second = step()
    assert torch.equal(first, second) and torch.equal(first, expected)
