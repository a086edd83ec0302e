"""The demo's VAE: training, and the statistics of its latents folded into it.

Wan subtracts a constant mean from latents and divides them by a constant deviation, 16 numbers
each, which belong to Wan's own VAE. `fold` changes the 1 x 1 x 1 convolutions on both sides of the
latent so that the constants are right for this VAE too. Shape letters: B clips, C channels,
T latent frames, Y X latent height and width, F frames, H W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared_offload.pipeline.conditioning import LATENT_CHANNELS
from tools.train_demo.clips import Painter
from tools.train_demo.training import History, Plan, Run, Trainer, fastest, train
from tools.train_demo.whole_clip import WholeClip, lay_out

BATCH = 16
QUICK_BATCH = 2
STILL = 8  # one clip in so many is a picture followed by grey, as image-to-video conditions on
NOISE = 0.05  # added to latents in training: the decoder shall forgive the DiT's errors
SIZE_PENALTY = 1e-4  # of latents, squared
SQUARE = 2.0  # of an error's square beside its size: few large errors are worse than many small
CONTRAST = 6.0  # how much more a pixel counts that differs from the clip's mean colour
FIRST = 3.0  # how much more the first frame counts: it has a latent of its own, and is the picture

Vae = Any  # diffusers has no types


def train_vae(vae: Vae, painter: Painter, plan: Plan, run: Run) -> History:
    """Train on clips at their full length: trained on 9 frames, it fails from the tenth on."""

    def loss(model: WholeClip) -> Tensor:
        clips = painter.clips(painter.labels(run.batch), spread=1.0, loose=True)
        clips[::STILL, :, 1:].zero_()
        latents = model.encode(clips)
        decoded = model.decode(latents + NOISE * torch.randn_like(latents))
        middle = clips.mean((2, 3, 4), keepdim=True)
        weight = 1 + CONTRAST * (clips - middle).abs().mean(1, keepdim=True).clamp(max=1)
        weight[:, :, 0] *= FIRST
        error = (decoded.float() - clips).abs()
        error = (error + SQUARE * error.square()) * weight
        return error.mean() + SIZE_PENALTY * latents.float().square().mean()

    def form(memory_format: torch.memory_format, *, compiled: bool) -> Callable[[], Trainer]:
        def trainer() -> Trainer:
            lay_out(vae, memory_format)
            model = WholeClip(vae, compiled=compiled)
            return Trainer(lambda: loss(model), list(vae.parameters()), plan)

        return trainer

    forms = {
        "channels last": form(torch.channels_last_3d, compiled=False),
        "contiguous": form(torch.contiguous_format, compiled=False),
    }
    if plan.compiled:
        forms["channels last, compiled"] = form(torch.channels_last_3d, compiled=True)
    trainer = fastest("vae", forms, tried=plan.tries_forms(vae.device))
    history = train("vae", trainer, plan, run.started, snapshot=run.snapshot)
    lay_out(vae, torch.contiguous_format)
    vae.eval().requires_grad_(False)
    return history


@torch.no_grad()
def fold(vae: Vae, painter: Painter, *, batches: int, batch: int) -> None:
    """Make Wan's constants the mean and deviation of this VAE's latents."""
    raw = torch.cat([_mode(vae, painter, batch) for _ in range(batches)])
    mean, std = raw.mean((0, 2, 3, 4)), raw.std((0, 2, 3, 4))
    wan_mean, wan_std = constants(vae)
    gain = wan_std / std
    into, out_of = vae.quant_conv, vae.post_quant_conv
    shape = (-1, 1, 1, 1, 1)
    into.weight[:LATENT_CHANNELS] *= gain.view(shape)
    into.bias[:LATENT_CHANNELS] = (into.bias[:LATENT_CHANNELS] - mean) * gain + wan_mean
    # The other half says the log of the latent's variance: that of the noise of training.
    into.weight[LATENT_CHANNELS:] = 0
    into.bias[LATENT_CHANNELS:] = 2 * (NOISE * gain).log()
    kernel = out_of.weight.flatten(1)
    out_of.bias += kernel @ (mean - wan_mean / gain)
    out_of.weight /= gain.view(1, *shape[:-1])


@torch.no_grad()
def encode(vae: Vae, clips: Tensor) -> Tensor:
    """Latents (B, C, T, Y, X) with Wan's mean and deviation taken out."""
    mean, std = (part.view(1, -1, 1, 1, 1) for part in constants(vae))
    return (WholeClip(vae).encode(clips).float() - mean) / std


@torch.no_grad()
def decode(vae: Vae, latents: Tensor) -> Tensor:
    """Clips (B, 3, F, H, W) in [-1, 1]."""
    mean, std = (part.view(1, -1, 1, 1, 1) for part in constants(vae))
    return WholeClip(vae).decode(latents * std + mean).clamp(-1, 1)


def constants(vae: Vae) -> tuple[Tensor, Tensor]:
    """Wan's mean and deviation of the 16 channels."""
    device = vae.quant_conv.weight.device
    mean, std = (torch.tensor(getattr(vae.config, f"latents_{n}")) for n in ("mean", "std"))
    return mean.to(device), std.to(device)


@torch.no_grad()
def quality(vae: Vae, painter: Painter, *, batch: int) -> dict[str, object]:
    """PSNR of decoded clips over all frames and in the worst frame, and statistics of latents."""
    clips = painter.clips(painter.labels(batch), spread=1.0, loose=True)
    latents = encode(vae, clips)
    error = ((decode(vae, latents) - clips) / 2).square().mean((0, 1, 3, 4))
    return {
        "psnr_db": _db(error.mean()),
        "psnr_db_of_worst_frame": _db(error.max()),
        "latent_mean": [round(x, 4) for x in latents.mean((0, 2, 3, 4)).tolist()],
        "latent_deviation": [round(x, 4) for x in latents.std((0, 2, 3, 4)).tolist()],
    }


def _mode(vae: Vae, painter: Painter, batch: int) -> Tensor:
    clips = painter.clips(painter.labels(batch), spread=1.0, loose=True)
    return WholeClip(vae).encode(clips)


def _db(error: Tensor) -> float:
    return round(-10 * math.log10(error.item()), 2)
