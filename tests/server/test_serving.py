"""A server and runs around it: what is shared, who waits, and what one says to the other."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from shared_offload.errors import ArenaError, CheckpointError, from_json
from shared_offload.memory.arena import find_segment

MIB = 1 << 20


def unshare_or_skip() -> tuple[str, ...]:
    if subprocess.run(["unshare", "--ipc", "true"], capture_output=True).returncode:
        pytest.skip("unshare --ipc is not permitted here")
    return ("unshare", "--ipc")


def test_runs_share_the_servers_arena(stage) -> None:
    server = stage.serve()
    (row,) = server.find("told")["rows"]
    assert row["nbytes"] == 4 * MIB and row["fill_seconds"] > 0
    segment = stage.held()["model"]
    assert find_segment(segment)["nattch"] == 1
    runs = [stage.run(fault="checkpoint") for _ in range(2)]  # that would fail if they loaded
    for run in runs:
        opened = run.wait_for("open")
        assert opened["right"] and opened["segment"] == segment and opened["notes"] == []
        assert opened["lender"] == f"weight server, pid {server.pid}"
    assert find_segment(segment)["nattch"] == 3
    for run in runs:
        assert run.end() == 0
        assert run.find("unchanged")["same"] and not run.find("closed")["torch"]
    assert find_segment(segment)["nattch"] == 1


def test_runs_wait_while_it_is_filled(stage) -> None:
    server = stage.serve(wait=False, pace=0.2, mib=8)
    stage.until_filling()
    run = stage.run(mib=8)
    opened = run.wait_for("open")
    assert opened["lender"] and opened["right"]
    assert opened["waits"] == sorted(opened["waits"]) and len(set(opened["waits"])) > 2
    assert server.find("told")
    assert any(line.startswith("read model: 4") for line in server.lines()), server.lines()


def test_ranks_of_a_run_share_with_one_question(stage) -> None:
    stage.serve(wait=False, pace=0.3, mib=8)
    board = stage.root / "board"
    board.mkdir()
    stage.until_filling()
    ranks = [stage.run(board=str(board), rank=rank, world=3, mib=8) for rank in range(3)]
    opened = [rank.wait_for("open") for rank in ranks]
    assert {o["segment"] for o in opened} == {stage.held()["model"]}
    assert all(o["right"] and o["lender"] and o["waits"] for o in opened)
    assert [rank.end() for rank in ranks] == [0, 0, 0]


def test_without_a_server_nothing_is_said(stage) -> None:
    opened = stage.run().wait_for("open")
    assert opened["right"] and opened["lender"] == "" and opened["notes"] == []


@pytest.mark.parametrize("world", [1, 2])
def test_required_and_not_there(stage, world) -> None:
    stage.serve()
    board = stage.root / "board"
    board.mkdir()
    specs = [{"rank": rank, "world": world, "board": str(board)} for rank in range(world)]
    runs = [stage.run(required=True, name="other", **spec) for spec in specs]
    for run in runs:
        error = from_json(run.wait_for("error")["error"])
        assert isinstance(error, ArenaError)
        assert "does not hold other, but model" in error.what
        assert run.end() == 1


def test_required_and_no_server(stage) -> None:
    error = from_json(stage.run(required=True).wait_for("error")["error"])
    assert f"no weight server listens in {stage.folder}" in error.what


def test_what_is_not_exactly_it_is_loaded_and_said(stage) -> None:
    stage.serve()
    other = stage.run(name="other").wait_for("open")
    size = stage.run(mib=5).wait_for("open")
    (stage.root / "model.state").write_text("edited")
    changed = stage.run().wait_for("open")
    found = [opened["notes"] for opened in (other, size, changed)]
    assert [len(notes) for notes in found] == [1, 1, 1]
    assert "does not hold other, but model" in found[0][0]
    assert "with another dtype, layout or LoRA set" in found[1][0]
    assert "as it was before it changed on disk" in found[2][0]
    assert all(o["right"] and not o["lender"] for o in (other, size, changed))


def test_another_ipc_namespace_gets_its_own_copy(stage) -> None:
    prefix = unshare_or_skip()
    server = stage.serve()
    opened = stage.run(prefix=prefix).wait_for("open")
    assert opened["right"] and opened["lender"] == ""
    assert len(opened["notes"]) == 1 and "another IPC namespace" in opened["notes"][0]
    assert str(server.pid) in opened["notes"][0]


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, "stop"])
@pytest.mark.parametrize("state", ["filling", "serving", "in use"])
def test_a_clean_end(stage, state, signum) -> None:
    server = stage.serve(wait=state != "filling", pace=0.2 if state == "filling" else 0)
    run = stage.run() if state == "in use" else None
    if run:
        run.wait_for("open")
    stage.until_listening()
    if signum == "stop":
        with stage.ask(op="stop") as connection:
            assert connection.receive()["server"]["pid"] == server.pid
            connection.wait_for_end()
            assert stage.sockets() == []
    else:
        server.kill(signum)
    assert server.end(5) == 0
    assert stage.sockets() == []
    if run:
        assert run.end() == 0 and run.find("unchanged")["same"]


def test_a_killed_server_is_replaced_and_its_runs_go_on(stage) -> None:
    first = stage.serve()
    run = stage.run()
    segment = run.wait_for("open")["segment"]
    first.kill()
    first.end()
    assert stage.sockets() == ["weights.sock"]  # left behind
    assert find_segment(segment)["nattch"] == 1
    lonely = stage.run().wait_for("open")
    assert lonely["right"] and not lonely["lender"]
    assert len(lonely["notes"]) == 1 and "nobody answers" in lonely["notes"][0]
    error = from_json(stage.run(required=True).wait_for("error")["error"])
    assert "nobody answers" in error.what
    second = stage.serve()
    borrowed = stage.run().wait_for("open")
    assert borrowed["lender"].endswith(f"pid {second.pid}") and borrowed["right"]
    assert run.end() == 0 and run.find("unchanged")["same"]
    assert find_segment(segment) is None


def test_a_server_that_dies_while_filling(stage) -> None:
    server = stage.serve(wait=False, pace=0.5)
    stage.until_filling()
    runs = [stage.run(), stage.run(required=True)]
    for run in runs:
        run.wait_for("waits")
    server.kill()
    opened = runs[0].wait_for("open")
    assert opened["right"] and not opened["lender"] and len(opened["notes"]) == 1
    assert "it hung up" in opened["notes"][0]
    assert "it hung up" in from_json(runs[1].wait_for("error")["error"]).what


def test_a_server_that_hangs_is_not_waited_for(stage) -> None:
    server = stage.serve(wait=False, pace=0.5)
    stage.until_filling()
    patience = {"ANSWER": 0.5, "SILENCE": 1}
    waiting = stage.run(seconds=patience)
    waiting.wait_for("waits")
    server.kill(signal.SIGSTOP)
    for run in (waiting, stage.run(seconds=patience)):
        opened = run.wait_for("open")
        assert opened["right"] and not opened["lender"]
        assert "no answer within" in opened["notes"][0]


def test_a_killed_run_leaves_the_server_its_copy(stage) -> None:
    stage.serve()
    run = stage.run()
    segment = run.wait_for("open")["segment"]
    run.kill()
    run.end()
    again = stage.run().wait_for("open")
    assert again["segment"] == segment and again["right"]
    assert find_segment(segment)["nattch"] == 2


# -- several models --------------------------------------------------------------------------------


def test_two_servers_for_one_model(stage) -> None:
    two = [stage.serve(wait=False, pace=0.02) for _ in range(2)]
    for server in two:
        server.wait_for("told")
    while all(server.process.poll() is None for server in two):
        time.sleep(0.01)
    (loser,) = [s for s in two if s.process.poll() is not None]
    (winner,) = [s for s in two if s is not loser]
    assert loser.end() == 0
    assert f"the weight server with pid {winner.pid} holds it" in loser.lines()[-1]
    assert list(stage.held()) == ["model"]


def test_a_second_model_moves_in(stage) -> None:
    server = stage.serve()
    other = stage.serve(name="other", mib=2)
    assert other.end() == 0 and f"pid {server.pid} holds it" in other.lines()[-1]
    assert set(stage.held()) == {"model", "other"}
    opened = stage.run(name="other", mib=2).wait_for("open")
    assert opened["right"] and opened["lender"]


def test_the_least_recently_used_makes_room(stage) -> None:
    stage.serve(name="a", budget=9 * MIB)  # for two of 4 MiB and their stamps
    stage.hold(name="b")
    stage.run(name="a").end()  # b is now the one used longest ago
    stage.hold(name="c")
    assert set(stage.held()) == {"a", "c"}
    users = [stage.run(name="a"), stage.run(name="c")]
    for user in users:
        assert user.wait_for("open")["lender"]
    with pytest.raises(ArenaError) as caught:
        stage.hold(name="b")
    assert caught.value.facts["budget"] == 9 * MIB
    assert caught.value.facts["needed"] == 4 * MIB + 4096
    assert users[1].end() == 0
    stage.hold(name="b")
    assert set(stage.held()) == {"a", "b"}  # a is older, but held
    with pytest.raises(ArenaError):
        stage.hold(name="huge", mib=10)
    assert set(stage.held()) == {"a", "b"}  # nothing left for what cannot fit


def test_what_changed_on_disk_is_replaced(stage) -> None:
    stage.serve()
    before = stage.held()["model"]
    (stage.root / "model.state").write_text("edited")
    stage.hold(name="model")
    after = stage.held()["model"]
    assert after != before and find_segment(before) is None
    assert stage.run().wait_for("open")["segment"] == after


@pytest.mark.parametrize("fault", ["open", "checkpoint"])
def test_an_order_that_cannot_be_met(stage, fault) -> None:
    alone = stage.serve(wait=False, fault=fault)
    assert isinstance(from_json(alone.wait_for("error")["error"]), CheckpointError)
    assert alone.end() == 1 and stage.sockets() == []
    stage.serve()
    with pytest.raises(CheckpointError):
        stage.hold(name="other", fault=fault)
    assert list(stage.held()) == ["model"]
    stage.hold(name="other")
    assert set(stage.held()) == {"model", "other"}


@pytest.mark.slow
def test_two_hundred_runs_cost_it_nothing(stage) -> None:
    server = stage.serve()
    proc = Path(f"/proc/{server.pid}")

    def costs() -> tuple[int, int]:
        status = (proc / "status").read_text()
        rss = next(int(li.split()[1]) for li in status.splitlines() if li.startswith("RssAnon:"))
        return len(list((proc / "fd").iterdir())), rss

    stage.run(again=50).end(60)
    descriptors, kib = costs()
    assert stage.run(again=200).end(60) == 0
    later = costs()
    assert later[0] == descriptors and later[1] - kib < 1024, (descriptors, kib, later)
    assert find_segment(stage.held()["model"])["nattch"] == 1
