"""From captions, and pictures, to clips: the training side's own sampler, in batches.

It shares no code with the pipeline's, so that a test can compare the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

from tools.train_demo import text
from tools.train_demo.dit import SHIFT, Models, image_rows
from tools.train_demo.models import velocity

GUIDANCE = 2.0  # at 4 the colours of text to video are too strong to be told apart
FIRST_SIGMA = 0.9990000128746033  # of Wan's grid, before the shift
FEW_STEPS = (1000, 750, 500, 250)


@dataclass(frozen=True, slots=True)
class Given:
    """What B clips are to show."""

    ids: Tensor
    """(B, E) token ids."""
    condition: Tensor | None = None
    """(B, 20, T, Y, X)."""
    pictures: Tensor | None = None
    """(B, 3, H, W)."""


@torch.no_grad()
def sample(
    models: Models, given: Given, noise: Tensor, *, steps: int = 10, guidance: float = GUIDANCE
) -> Tensor:
    """Latents by UniPC with guidance, on Wan's grid."""
    solver: Any = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=SHIFT,
    )
    solver.set_timesteps(sigmas=np.linspace(FIRST_SIGMA, 0, steps + 1)[:-1], device=noise.device)
    predict = _predictor(models, given, guidance)
    x = noise
    for timestep in solver.timesteps:
        sigma = (timestep.float() / 1000).expand(len(x))
        x = solver.step(predict(x, sigma), timestep, x, return_dict=False)[0]
    return x


@torch.no_grad()
def sample_few(models: Models, given: Given, noise: Tensor) -> Tensor:
    """Latents by the four Euler steps of distilled models, without guidance."""
    base = torch.tensor(FEW_STEPS) / 1000
    sigmas = [*(SHIFT * base / (1 + (SHIFT - 1) * base)).tolist(), 0.0]
    predict = _predictor(models, given, 1.0)
    x = noise
    for sigma, following in itertools.pairwise(sigmas):
        at = torch.full((len(x),), sigma, device=x.device)
        x = x + (following - sigma) * predict(x, at)
    return x


def _predictor(models: Models, given: Given, guidance: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Guided velocity of a latent at a noise level."""
    images = None if given.pictures is None else image_rows(models.clip, given.pictures)
    empty = text.no_caption(len(given.ids), given.ids.device)
    branches = [
        (text.encode(models.t5, ids), text.row_bias(ids, models.text_len))
        for ids in ((given.ids,) if guidance == 1.0 else (given.ids, empty))
    ]

    def predict(x: Tensor, sigma: Tensor) -> Tensor:
        full = x if given.condition is None else torch.cat((x, given.condition), 1)
        found = [velocity(models.dit, full, sigma, rows, bias, images) for rows, bias in branches]
        return found[0] if len(found) == 1 else found[1] + guidance * (found[0] - found[1])

    return predict
