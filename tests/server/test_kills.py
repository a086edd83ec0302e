"""SIGKILL of servers and runs at any moment: nothing leaks, survivors finish, the next start works.

The fixture `no_segment_left` compares the kernel's table of segments before and after each test.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter

import pytest


def finishes(run) -> bool:
    """A survivor opens and uses the right weights to its end; whether they were lent."""
    opened = run.wait_for("open")
    assert opened["right"] and run.end() == 0 and run.find("unchanged")["same"]
    return bool(opened["lender"])


@pytest.mark.slow
def test_sixty_kills_at_random_moments(stage) -> None:
    dice = random.Random(7)
    reached: Counter[str] = Counter()
    lent = 0
    server = None
    while sum(reached.values()) < 60:
        if server is None:
            server = stage.serve(wait=False, name="m0", pace=dice.uniform(0, 0.15))
        runs = [stage.run(name="m0", pace=0.05) for _ in range(3)]
        for process in (server, *runs):
            process.wait_for("ready")  # it is about to begin, after its imports
        time.sleep(dice.uniform(0, 0.6))  # undisturbed, all is open by then
        victims = [run for run in runs if dice.random() < 0.6]
        if dice.random() < 0.6:
            victims.append(server)
        dice.shuffle(victims)
        for victim in victims:
            victim.kill()
            time.sleep(dice.uniform(0, 0.05))
        for victim in victims:
            assert victim.end() == -signal.SIGKILL
            role = "server" if victim is server else "run"
            last = victim.events[-1]["event"] if victim.events else "start"
            reached[f"{role} {last}"] += 1
        lent += sum(finishes(run) for run in runs if run not in victims)
        if server in victims:
            server = None
        else:
            server.wait_for("told")
    assert len(reached) >= 4 and lent, (reached, lent)  # moments were various
    if server is not None:
        server.kill()
        server.end()
    last = stage.serve(name="m0")
    assert stage.run(name="m0").wait_for("open")["lender"]
    last.kill(signal.SIGTERM)
    assert last.end() == 0 and stage.sockets() == []


@pytest.mark.parametrize("victim", ["leader", "follower"])
def test_a_rank_killed_while_the_server_fills(stage, victim) -> None:
    server = stage.serve(wait=False, pace=0.3)
    stage.until_filling()
    board = stage.root / "board"
    board.mkdir()
    ranks = [stage.run(board=str(board), rank=rank, world=2) for rank in range(2)]
    for rank in ranks:
        rank.wait_for("waits")
    killed, survivor = ranks if victim == "leader" else reversed(ranks)
    killed.kill()
    assert "ended while others shared" in survivor.wait_for("error")["error"]
    assert survivor.end() == 1
    server.wait_for("told")
    assert stage.run().wait_for("open")["lender"]
