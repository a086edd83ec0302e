"""How often the trained models do what a caption says, by the judge that the tests use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shared_offload.pipeline.video import to_uint8
from tests.reference.judge import Verdict, judge
from tools.train_demo import vae
from tools.train_demo.clips import Labels, Names, Painter, combinations
from tools.train_demo.dit import Models, draw, first_frames, with_mask
from tools.train_demo.sampling import GUIDANCE, Given, sample, sample_few

ASKED = ("color", "background", "shape", "direction")
PLAIN_CAPTION = 0  # the first way to say it: "a red circle moves left on a blue background"

Score = dict[str, float]


@torch.no_grad()
def score(
    models: Models, autoencoder: vae.Vae, painter: Painter, table: Tensor, *, count: int
) -> dict[str, Score]:
    """Shares of clips that are as asked, for several ways to sample.

    "real": the judge on drawn clips. "shuffled": each clip is judged by another one's caption,
    which shows what chance is.
    """
    i2v = models.clip is not None
    labels = painter.labels(count)
    clips = draw(painter, labels, i2v=i2v)
    names = [combinations()[at] for at in labels.combination.tolist()]
    given = Given(table[labels.combination, PLAIN_CAPTION])
    if i2v:
        condition = with_mask(vae.encode(autoencoder, first_frames(clips)))
        given = Given(given.ids, condition, clips[:, :, 0])
    noise = torch.randn_like(vae.encode(autoencoder, clips))
    ways = {
        f"guidance {GUIDANCE:g}, 10 steps": sample(models, given, noise),
        "guidance 1, 10 steps": sample(models, given, noise, guidance=1.0),
        "guidance 1, 4 Euler steps": sample_few(models, given, noise),
    }
    made = {way: vae.decode(autoencoder, latents) for way, latents in ways.items()}
    scores = {"real": rates(verdicts(clips), names)}
    for way, videos in made.items():
        scores[way] = rates(verdicts(videos), names)
        if i2v:
            error = ((videos[:, :, 0] - clips[:, :, 0]) / 2).square().mean((1, 2, 3))
            scores[way]["psnr_db_of_first_frame"] = -10 * math.log10(error.mean().item())
    guided = next(iter(made.values()))
    others = [names[(at + count // 2) % count] for at in range(count)]
    scores["shuffled"] = rates(verdicts(guided), others)
    return scores


def verdicts(clips: Tensor) -> list[Verdict]:
    """Of clips (B, 3, F, H, W) in [-1, 1]."""
    frames = to_uint8(clips).permute(0, 2, 3, 4, 1).cpu()
    return [judge(clip) for clip in frames]


def rates(found: Sequence[Verdict], asked: Sequence[Names]) -> Score:
    """Share of clips that are right, by what is asked, and in all of it but shape."""
    right = {
        what: [getattr(f, what) == getattr(a, what) for f, a in zip(found, asked, strict=True)]
        for what in ASKED
    }
    right["all but shape"] = [
        all(row) for row in zip(*(right[what] for what in ASKED if what != "shape"), strict=True)
    ]
    return {what: round(sum(row) / len(row), 4) for what, row in right.items()}


def picture(painter: Painter, labels: Labels) -> Tensor:
    """First frames (B, H, W, 3), uint8, of clips with these labels."""
    clips = painter.clips(labels, spread=0.0)
    return to_uint8(clips[:, :, 0]).permute(0, 2, 3, 1).cpu()
