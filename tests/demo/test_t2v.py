"""Text to video: what the prompt says is what the video shows, in every way to run."""

from __future__ import annotations

import pytest
import torch

from tests.reference.demo import EVERY_KIND, LEAST, QUICK, STREAMED, counts, right

CHANCE = 5  # of 12, at most, where 1 in 4 is expected


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_video_shows_what_the_prompt_says(videos, kind: str) -> None:
    found = counts(videos("t2v", kind))
    assert min(found.values()) >= LEAST["t2v"], found


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMED)
def test_streamed_videos_are_the_same(videos, kind: str) -> None:
    found = videos("t2v", kind, cases=3)
    assert all(map(torch.equal, found, videos("t2v", QUICK)))


@pytest.mark.slow
def test_another_ones_prompt_scores_as_chance_does(videos) -> None:
    """The seed stays and the prompt changes: it is the text that steers, not the noise."""
    found = counts(videos("t2v", "unguided", shift=1))
    assert max(found.values()) <= CHANCE, found


@pytest.mark.slow
def test_shapes_are_told_apart(videos) -> None:
    assert right(videos("t2v", "guided"), "shape") >= 9  # chance is 4 of 12; this model gets 11
