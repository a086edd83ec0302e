"""What a random tensor looks like, and its values.

Invariant: values depend on the seed, the tensor's name and its shape alone. They are drawn in
chunks of whole rows, each from a generator of its own, so that parts of a checkpoint can be made
apart, in any order and by any number of threads, and are equal bit for bit.

Scales follow one rule: a layer keeps the size of what it is given. A weight is N(0, 1 / fan_in), a
norm's weight is near 1, a bias near 0. What a model needs beside that is in its `Recipe` table.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

NORM_STD = 0.05
BIAS_STD = 0.02
BELL_SHARE = 0.9  # of the variance of a blurring kernel


Kernel = Literal["noise", "blur", "twin"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Normal values of this shape, independent but for convolutions that make pictures.

    A "blur" kernel is a bell times one random number per pair of channels, plus some noise, so
    that decoded videos have soft shapes. "twin" makes the second half of the outputs equal to the
    first as well: where a layer makes two frames of one, they are alike and nothing flickers.
    """

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    kernel: Kernel = "noise"


def default_recipe(name: str, shape: tuple[int, ...], gain: float = 1.0) -> Recipe:
    """The rule above, from the name's ending and the shape. `gain` multiplies the deviation."""
    if name.endswith(".gamma") or (name.endswith(".weight") and len(shape) == 1):
        return Recipe(shape, NORM_STD, mean=1.0)
    if name.endswith(".bias"):
        return Recipe(shape, BIAS_STD)
    return Recipe(shape, gain / math.sqrt(math.prod(shape[1:])))


def values(recipe: Recipe, name: str, seed: int, first: int, end: int) -> Tensor:
    """Rows `first` to `end` (one chunk of `row_chunks`) in fp32."""
    digest = hashlib.blake2b(f"{seed}/{name}/{first}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    shape = (end - first, *recipe.shape[1:]) if recipe.shape else ()
    drawn = torch.empty(shape).normal_(generator=generator)
    if recipe.kernel != "noise":
        drawn = _blurred(drawn, generator)
    if recipe.kernel == "twin":  # small enough to be one chunk in every size
        drawn[len(drawn) // 2 :] = drawn[: len(drawn) // 2]
    return drawn.mul_(recipe.std).add_(recipe.mean)


def _blurred(noise: Tensor, generator: torch.Generator) -> Tensor:
    """Mix kernels of noise (out, in, ...) with a bell of the same mean square."""
    bell = torch.ones(())
    for width in noise.shape[2:]:
        offsets = torch.arange(width) - (width - 1) / 2
        bell = bell.unsqueeze(-1) * torch.exp(-0.5 * offsets.square())
    bell = bell / bell.square().mean().sqrt()
    height = torch.empty(noise.shape[:2]).normal_(generator=generator)
    height = height.reshape(*height.shape, *[1] * bell.dim())
    return math.sqrt(BELL_SHARE) * height * bell + math.sqrt(1 - BELL_SHARE) * noise
