"""Picture to video: the video begins with the picture and moves it as the prompt says."""

from __future__ import annotations

import pytest

from tests.reference.demo import EVERY_KIND, LEAST, counts, kept


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_video_moves_the_picture(videos, pictures, kind: str) -> None:
    frames = videos("i2v", kind)
    found = counts(frames)
    assert min(found.values()) >= LEAST["i2v"], found
    assert kept(frames, pictures) >= LEAST["i2v"]
