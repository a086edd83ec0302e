"""Training of the two DiTs: flow matching on latents, with the encoders they read.

Text to video trains T5 with it. Image to video starts from the text-to-video DiT, as Wan's did,
keeps its T5 and trains the image tower with it. Shape letters: B clips, C channels, T latent
frames, Y X latent height and width, E token places.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shared_offload.pipeline import image_encoder
from shared_offload.pipeline.conditioning import TIME_STRIDE
from tools.train_demo import text
from tools.train_demo.clips import Labels, Painter
from tools.train_demo.models import compile_blocks, velocity
from tools.train_demo.training import Average, History, Plan, Run, Trainer, fastest, half, train
from tools.train_demo.vae import encode

BATCH = 256
QUICK_BATCH = 4
SHIFT = 3.0
NO_CAPTION = 0.1  # share of clips without one, for guidance
JUNK_CAPTION = 0.05
T2V_SPREAD = 0.4  # a caption does not say where: paths near the middle leave less to chance

Module = Any  # of diffusers and transformers, which have no types


@dataclass(frozen=True, slots=True)
class Data:
    """Latents of clips and what they show; for image to video the condition and the picture."""

    latents: Tensor
    labels: Labels
    conditions: Tensor | None = None
    """(B, 20, T, Y, X): mask and latent."""
    pictures: Tensor | None = None
    """(B, 3, H, W): first frames."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How many clips to encode: no more than `clips`, `batch` at once, `least` in any case."""

    clips: int
    batch: int
    least: int


@dataclass(frozen=True, slots=True)
class Models:
    """What makes latents from captions, and from pictures."""

    dit: Module
    t5: Module
    clip: Module | None
    text_len: int


@torch.no_grad()
def make_data(vae: Module, painter: Painter, amount: Amount, *, seconds: float, i2v: bool) -> Data:
    """Draw and encode clips: as many as asked for, or as fit into the time."""
    started = time.monotonic()
    parts: list[Data] = []
    while len(parts) * amount.batch < amount.clips:
        parts.append(_encoded(vae, painter, amount.batch, i2v=i2v))
        parts[-1].latents.sum().item()  # else the clock runs ahead of the device
        if len(parts) * amount.batch >= amount.least and time.monotonic() - started > seconds:
            break
    labels = Labels(*(torch.cat(part) for part in zip(*(p.labels for p in parts), strict=True)))
    conditions = torch.cat([p.conditions for p in parts]) if i2v else None
    pictures = torch.cat([p.pictures for p in parts]) if i2v else None
    return Data(torch.cat([p.latents for p in parts]), labels, conditions, pictures)


def draw(painter: Painter, labels: Labels, *, i2v: bool) -> Tensor:
    """Clips as a task trains on them."""
    if i2v:
        return painter.clips(labels, spread=1.0, loose=True)
    return painter.clips(labels, spread=T2V_SPREAD)


def with_mask(latents: Tensor) -> Tensor:
    """The condition of image to video: 4 channels of mask before the latent."""
    mask = torch.zeros_like(latents[:, :TIME_STRIDE])
    mask[:, :, 0] = 1.0
    return torch.cat((mask, latents), 1)


def first_frames(clips: Tensor) -> Tensor:
    """Clips whose frames after the first are grey."""
    still = torch.zeros_like(clips)
    still[:, :, 0] = clips[:, :, 0]
    return still


def image_rows(clip: Module, pictures: Tensor) -> Tensor:
    """The image tower's rows (B, I, D) of pictures in [-1, 1]."""
    side = clip.config.image_size
    square = F.interpolate(pictures, (side, side), mode="bicubic", align_corners=False)
    scale = 2 * clip.deviation
    rows: Tensor = clip(pixel_values=(square + 1) / scale - clip.mean / clip.deviation)
    return rows.last_hidden_state


def add_pixel_statistics(clip: Module, device: torch.device) -> None:
    """Keep CLIP's mean and deviation on the device: a graph cannot copy them there."""
    for name, values in (("mean", image_encoder.MEAN), ("deviation", image_encoder.STD)):
        setattr(clip, name, torch.tensor(values, device=device).view(1, 3, 1, 1))


def extend(dit: Module, t2v_state: dict[str, Tensor]) -> None:
    """Give an image-to-video DiT what a text-to-video one knows; new inputs start at zero."""
    state = dit.state_dict()
    for name, tensor in t2v_state.items():
        if name == "patch_embedding.weight":
            state[name].zero_()[:, : tensor.shape[1]] = tensor
        else:
            state[name].copy_(tensor)


def train_dit(models: Models, data: Data, table: Tensor, plan: Plan, run: Run) -> History:
    """Flow matching; `models` hold the average of their weights afterwards, and in snapshots."""
    i2v = models.clip is not None
    trained = [models.dit, models.clip if i2v else models.t5]
    parameters = [p for module in trained for p in module.parameters()]
    device, batch = data.latents.device, run.batch
    vocabulary = models.t5.config.vocab_size

    def loss() -> Tensor:
        at = torch.randint(len(data.latents), (batch,), device=device)
        ids = _captions(table, data.labels.combination[at], vocabulary)
        z, noise = data.latents[at], torch.randn_like(data.latents[at])
        u = torch.rand(batch, device=device)
        sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
        x = torch.lerp(z, noise, sigma.view(-1, 1, 1, 1, 1))
        images = None
        if i2v:
            x = torch.cat((x, data.conditions[at]), 1)
            images = image_rows(models.clip, data.pictures[at])
        rows, bias = text.encode(models.t5, ids), text.row_bias(ids, models.text_len)
        found = velocity(models.dit, x, sigma, rows, bias, images)
        return (found - (noise - z)).square().mean()

    def form(*, compiled: bool) -> Callable[[], Trainer]:
        def trainer() -> Trainer:
            compile_blocks(models.dit, compiled=compiled)
            return Trainer(loss, parameters, plan)

        return trainer

    def snapshot() -> None:
        with average.applied():
            run.snapshot()

    name = "i2v" if i2v else "t2v"
    forms = {"eager": form(compiled=False)}
    if plan.compiled:
        forms["compiled"] = form(compiled=True)
    trainer, average = fastest(name, forms, tried=plan.tries_forms(device)), Average(parameters)
    history = train(name, trainer, plan, run.started, average.update, snapshot)
    average.apply()
    compile_blocks(models.dit, compiled=False)
    for module in trained:
        module.eval().requires_grad_(False)
    return history


def _captions(table: Tensor, combination: Tensor, vocabulary: int) -> Tensor:
    """Token ids (B, E): one of each clip's captions, or none, or junk."""
    count, device = len(combination), table.device
    ids = table[combination, torch.randint(table.shape[1], (count,), device=device)]
    chance = torch.rand(count, 1, device=device)
    junk = text.junk(count, vocabulary, device)
    ids = torch.where(chance < NO_CAPTION + JUNK_CAPTION, junk, ids)
    return torch.where(chance < NO_CAPTION, text.no_caption(count, device), ids)


def _encoded(vae: Module, painter: Painter, batch: int, *, i2v: bool) -> Data:
    labels = painter.labels(batch)
    clips = draw(painter, labels, i2v=i2v)
    with half(clips.device):
        latents = encode(vae, clips)
        if not i2v:
            return Data(latents, labels)
        conditions = with_mask(encode(vae, first_frames(clips)))
    return Data(latents, labels, conditions, clips[:, :, 0])
