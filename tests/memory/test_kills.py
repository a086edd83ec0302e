"""No kill at any moment leaves memory behind, or a rank that waits for the dead.

Survivors must be gone within GONE_SECONDS with one error among them; the fixture `no_segment_left`
compares `ipcs -m` before and after each test.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest

HOLDS = {  # where each state is held, and how to see that it is reached
    "created": {"hold": "created"},
    "filling": {"hold": "filling"},
    "sealed": {"hold": "sealed", "registrar": "read-only"},
    "open": {},
}


SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
QUICK = {("filling", 0, signal.SIGKILL), ("filling", 0, signal.SIGINT), ("open", 1, signal.SIGKILL)}


@pytest.mark.parametrize(
    ("state", "victim", "signum"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(HOLDS, (0, 1), SIGNALS)
    ],
)
def test_a_kill_in_each_state(crew: Callable, state: str, victim: int, signum: int) -> None:
    ranks = crew(3, **HOLDS[state])
    ranks[0].wait_for(state)
    if state in ("sealed", "open"):
        ranks[victim].wait_for(state)
    else:
        ranks.claimed()
    bystanders = crew(2)  # another run on this host: not concerned
    ranks[victim].kill(signum)
    begun = time.monotonic()
    ends = [rank.end() for rank in ranks]
    assert time.monotonic() - begun < 10
    assert ends[victim][0] == (130 if signum == signal.SIGINT else -signum)
    survivors = [end for n, end in enumerate(ends) if n != victim]
    assert [status for status, _ in survivors] == [1, 1]
    first, second = (stderr for _, stderr in survivors)
    assert f"rank {victim}" in first and first.startswith("RankError: ")
    assert second == ""  # the lowest surviving rank speaks, alone
    bystanders.wait_for("open")
    bystanders.finish()
    assert [rank.end() for rank in bystanders] == [(0, ""), (0, "")]


@pytest.mark.slow
def test_sixty_kills_at_random_moments(crew: Callable) -> None:
    dice = random.Random(20)
    reached = Counter()
    for _ in range(30):
        runs = [crew(3, mib=8, registrar="read-only"), crew(3, mib=8, registrar="writable")]
        for ranks in runs:
            ranks.claimed()
        time.sleep(dice.uniform(0, 0.25))  # an undisturbed run is open within 0.15 s
        for ranks in runs:
            victim = dice.randrange(3)
            ranks[victim].kill(signal.SIGKILL)
            statuses = [rank.end() for rank in ranks]
            reached[ranks[victim].events[-1]["event"]] += 1
            assert [s for s, _ in statuses].count(1) == 2, statuses
            spoken = [stderr for _, stderr in statuses if stderr]
            assert len(spoken) == 1 and spoken[0].count("Error: ") == 1, statuses
    assert sum(reached.values()) == 60 and len(reached) >= 3, reached  # moments were various


@pytest.mark.parametrize(
    ("fault", "rank", "kind"),
    [
        ("checkpoint", 0, "CheckpointError: weights.safetensors ended early"),
        ("memory", 0, "ArenaError: filling 4.0 MiB failed after 2.0 MiB"),
        ("register", 1, "PinningError: CUDA refused to register 2.0 MiB"),
    ],
)
def test_a_failure_of_one_is_the_error_of_all(
    crew: Callable, fault: str, rank: int, kind: str
) -> None:
    ranks = crew(3, per_rank={rank: {"fault": fault}}, registrar="read-only")
    ends = [member.end() for member in ranks]
    assert [status for status, _ in ends] == [1, 1, 1]
    assert ends[0][1].startswith(kind) and ends[1][1] == ends[2][1] == ""
    assert len({member.find("error")["error"] for member in ranks}) == 1
