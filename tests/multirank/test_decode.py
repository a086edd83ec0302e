"""A decode on all ranks against a decode on one: strips and tiles of any size and number."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from shared_offload.pipeline.vae import Vae

START = 100.0
# Latent height and width: wide, tall, square; sides that do not divide among ranks; strips of one
# latent; with 8 ranks, ranks without a strip.
SIZES = [(4, 6), (9, 5), (7, 7), (10, 16), (3, 2), (6, 26)]
TILED = [(6, 40), (34, 26)]  # larger than a tile of 32: two tiles, and four
# A value is a sum of up to 3500 products in fp32, in the order that suits the size of a strip.
ROUNDING = 2e-6


@functools.cache
def one_rank(
    checkpoint: Path, size: tuple[int, int], tiling: bool, device: str = "cpu"
) -> torch.Tensor:
    path = checkpoint / "Wan2.1_VAE.pth"
    vae = Vae.load(path, device=device, dtype=torch.float32, tiling=tiling)
    latents = torch.randn(16, 2, *size, generator=torch.Generator().manual_seed(3))
    return vae.decode(latents).permute(1, 2, 3, 0).cpu()


@pytest.mark.parametrize("world", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_together_is_alone(checkpoint, ranks, world) -> None:
    run = ranks(
        world,
        kind="decodes",
        together=True,
        vae=str(checkpoint / "Wan2.1_VAE.pth"),
        vaes={"whole": [False, SIZES], "tiled": [True, TILED]},
    )
    assert run.end(START) == [0] * world, run.stderr()
    made = [torch.load(run.folder / f"made{rank}.pt") for rank in range(world)]
    for name, tiling in (("whole", False), ("tiled", True)):
        for size in TILED if tiling else SIZES:
            alone, together = one_rank(checkpoint, size, tiling), made[0][name, *size]
            assert together.shape == alone.shape == (5, 8 * size[0], 8 * size[1], 3)
            assert 0.05 < alone.std() < 0.9  # neither flat nor clamped away
            if tiling:
                assert torch.equal(together, alone), size  # the same tiles, the same blending
            assert (together - alone).abs().max() <= ROUNDING, (name, size)
            assert all(other[name, *size] is None for other in made[1:])


def test_within_a_limit_ranks_cut_their_strips_again(checkpoint, ranks) -> None:
    """The first size needs no more strips than there are ranks; of the others each has several."""
    sizes = [(9, 5), (6, 26), (31, 4)]
    run = ranks(
        2,
        kind="decodes",
        together=True,
        limit=0,
        vae=str(checkpoint / "Wan2.1_VAE.pth"),
        vaes={"whole": [False, sizes]},
    )
    assert run.end(START) == [0, 0], run.stderr()
    made = torch.load(run.folder / "made0.pt")
    for size in sizes:
        alone, together = one_rank(checkpoint, size, False), made["whole", *size]
        assert together.shape == alone.shape
        assert (together - alone).abs().max() <= ROUNDING, size


def test_alone_the_others_wait_without_burning_a_cpu(checkpoint, ranks) -> None:
    run = ranks(
        2,
        kind="decodes",
        together=False,
        seconds=3.0,
        vae=str(checkpoint / "Wan2.1_VAE.pth"),
        vaes={"whole": [False, SIZES[:1]]},
    )
    assert run.end(START) == [0, 0], run.stderr()
    first, other = (torch.load(run.folder / f"made{rank}.pt") for rank in range(2))
    assert torch.equal(first["whole", *SIZES[0]], one_rank(checkpoint, SIZES[0], False))
    assert other["whole", *SIZES[0]] is None
    assert other["seconds"] > 3
    assert other["cpu seconds"] < 0.3


@pytest.mark.gpu
def test_on_gpus(checkpoint, ranks) -> None:
    """Through NCCL with two GPUs, else gloo. Convolutions are TF32 there: 10 bits of a product."""
    vaes = {"whole": [False, SIZES], "tiled": [True, TILED]}
    vae = str(checkpoint / "Wan2.1_VAE.pth")
    run = ranks(2, kind="decodes", together=True, device="cuda", vae=vae, vaes=vaes)
    assert run.end(START) == [0, 0], run.stderr()
    made = torch.load(run.folder / "made0.pt")
    for name, (tiling, sizes) in vaes.items():
        for size in sizes:
            alone = one_rank(checkpoint, size, tiling, "cuda")
            assert (made[name, *size] - alone).abs().max() < 5e-3, (name, size)
