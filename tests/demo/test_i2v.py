"""Picture to video: the video begins with the picture and moves it as the prompt says."""

from __future__ import annotations

import pytest
import torch

from tests.reference.demo import EVERY_KIND, LEAST, QUICK, STREAMED, counts, kept


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_video_moves_the_picture(videos, pictures, kind: str) -> None:
    frames = videos("i2v", kind)
    found = counts(frames)
    assert min(found.values()) >= LEAST["i2v"], found
    assert kept(frames, pictures) >= LEAST["i2v"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMED)
def test_streamed_videos_are_the_same(videos, kind: str) -> None:
    found = videos("i2v", kind, cases=3)
    assert all(map(torch.equal, found, videos("i2v", QUICK)))
