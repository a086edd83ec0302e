"""The judge of videos against clips whose contents are known: drawn here, and by the training."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.reference.judge import BACKGROUND_COLORS, OBJECT_COLORS, judge
from tests.reference.pictures import picture
from tools.train_demo.clips import DIRECTIONS, Painter, combinations
from tools.train_demo.scores import rates, verdicts

COUNT = 60


@pytest.fixture(scope="module")
def drawn() -> tuple[list, list]:
    torch.manual_seed(11)
    painter = Painter(torch.device("cpu"))
    labels = painter.labels(COUNT)
    clips = painter.clips(labels, spread=1.0)
    return verdicts(clips), [combinations()[at] for at in labels.combination.tolist()]


def test_it_reads_the_clips_of_the_training(drawn) -> None:
    found, asked = drawn
    assert set(rates(found, asked).values()) == {1.0}
    assert all(verdict.steady == 1.0 for verdict in found)
    for verdict, names in zip(found, asked, strict=True):
        assert (verdict.travel > 19) == (names.speed == "quickly")


def test_other_labels_score_as_chance_does(drawn) -> None:
    """Chance: 1 in 6 colours, 5 backgrounds, 3 shapes, 4 directions; 4 deviations above."""
    found, asked = drawn
    shuffled = rates(found, asked[COUNT // 2 :] + asked[: COUNT // 2])
    for what, one_in in (("color", 6), ("background", 5), ("shape", 3), ("direction", 4)):
        chance = 1 / one_in
        assert shuffled[what] < chance + 4 * (chance * (1 - chance) / COUNT) ** 0.5
    assert shuffled["all but shape"] < 0.1


def test_it_reads_pictures_of_another_hand() -> None:
    pairs = [p for p in itertools.product(OBJECT_COLORS, BACKGROUND_COLORS) if p[0] != p[1]]
    ways = itertools.cycle(itertools.product(("circle", "square", "triangle"), DIRECTIONS))
    for (color, ground), (shape, direction) in zip(pairs, ways, strict=False):
        dx, dy = DIRECTIONS[direction]
        frames = [
            picture(color, ground, shape, (32 + dx * (t - 8), 32 + dy * (t - 8))) for t in range(17)
        ]
        seen = judge(torch.stack(frames))
        assert (seen.color, seen.background) == (color, ground)
        assert (seen.shape, seen.direction) == (shape, direction)
        assert abs(seen.travel - 16) < 1


def test_nothing_is_no_object_and_what_stands_does_not_move() -> None:
    empty = torch.full((17, 64, 64, 3), 128, dtype=torch.uint8)
    seen = judge(empty)
    assert (seen.color, seen.shape, seen.direction) == (None, None, None)
    assert (seen.background, seen.steady) == ("gray", 0.0)
    still = picture("red", "black", "circle", (30, 30)).repeat(17, 1, 1, 1)
    assert (judge(still).color, judge(still).direction) == ("red", None)
    vanishing = torch.cat((still[:8], torch.zeros_like(still[:9])))
    assert judge(vanishing).steady == pytest.approx(8 / 17)
