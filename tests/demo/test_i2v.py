"""Picture to video: the video begins with the picture and moves it as the prompt says."""

from __future__ import annotations

import pytest

from tests.reference.demo import EVERY_KIND, LEAST, counts, kept


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_video_moves_the_picture(videos, kind: str) -> None:
    found = counts(videos("i2v", kind))
    assert min(found.values()) >= LEAST["i2v"], found


@pytest.mark.slow
@pytest.mark.xfail(reason="6 of 12: trained on a CPU; the VAE alone gives 9", strict=True)
def test_a_video_begins_with_the_picture_and_keeps_its_object(videos, pictures) -> None:
    assert kept(videos("i2v", "guided"), pictures) >= LEAST["i2v"]
