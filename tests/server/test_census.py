"""`shared-offload status` and `stop`, against what the kernel and the processes really have."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import sysv_ipc

from shared_offload import cli
from shared_offload.errors import ArenaError
from shared_offload.memory.arena import create, find_segment, seal
from shared_offload.server.census import arenas


@pytest.fixture
def status(stage, capsys):
    """What the command says, as JSON."""

    def ask() -> dict:
        assert cli.main(["status", "--json", "--socket_folder", str(stage.folder)]) == 0
        return json.loads(capsys.readouterr().out)

    return ask


def test_who_holds_what(stage, status) -> None:
    assert status()["servers"] == []
    server = stage.serve()
    run = stage.run()
    segment = run.wait_for("open")["segment"]
    plain = stage.run(name="other")  # loads by itself
    its_own = plain.wait_for("open")["segment"]
    said = status()
    (told,) = said["servers"]
    assert told["pid"] == server.pid and told["folder"] == str(stage.folder)
    rows = {row["segment_id"]: row for row in said["arenas"]}
    served, private = rows[segment], rows[its_own]
    assert (served["path"], served["server"], served["state"]) == ("model", server.pid, "sealed")
    assert served["attached"] == 2
    assert {holder["pid"] for holder in served["holders"]} == {server.pid, run.pid}
    assert all("driver.py" in holder["command"] for holder in served["holders"])
    assert (private["path"], private["server"], private["state"]) == (None, None, "sealed")
    assert [holder["pid"] for holder in private["holders"]] == [plain.pid]
    assert abs(time.time() - private["begun"]) < 60


def test_what_is_being_filled(stage, status) -> None:
    stage.serve(wait=False, pace=0.5)
    stage.until_filling()
    (row,) = status()["arenas"]
    assert (row["path"], row["state"]) == ("model", "created") or row["state"] == "filling"
    assert row["attached"] == 1


def test_as_a_table(stage, capsys) -> None:
    server = stage.serve()
    assert cli.main(["status", "--socket_folder", str(stage.folder)]) == 0
    text = capsys.readouterr().out
    assert f"weight server with pid {server.pid} in {stage.folder}" in text.replace("\n", "")
    assert "model" in text and "4.0 MiB" in text and f"server {server.pid}" in text
    server.kill()
    server.end()
    assert cli.main(["status", "--socket_folder", str(stage.folder)]) == 0
    assert "nobody answers" in capsys.readouterr().out.replace("\n", " ")


def test_other_programs_segments_are_not_looked_into() -> None:
    foreign = sysv_ipc.SharedMemory(sysv_ipc.IPC_PRIVATE, sysv_ipc.IPC_CREAT, mode=0o600, size=8192)
    foreign.remove()
    ticket, mapping = create(4096, "print")  # ours, but not yet sealed
    before = find_segment(foreign.id)
    try:
        assert {seen.segment_id for seen in arenas()}.isdisjoint({foreign.id, ticket.segment_id})
        seal(mapping, ticket)
        (seen,) = [seen for seen in arenas() if seen.segment_id == ticket.segment_id]
        assert seen.sealed and [h.pid for h in seen.holders] == [os.getpid()]
        assert find_segment(foreign.id) == before  # no attachment, not even for a moment
    finally:
        mapping.release()
        foreign.detach()


@pytest.mark.parametrize("wait", [False, True])
def test_stop(stage, capsys, wait) -> None:
    server = stage.serve()
    run = stage.run()
    run.wait_for("open")
    argv = ["stop", "--socket_folder", str(stage.folder), *(["--wait"] if wait else [])]
    assert cli.main(argv) == 0
    assert f"weight server with pid {server.pid}" in capsys.readouterr().err
    if wait:
        assert stage.sockets() == []
    assert server.end() == 0
    assert run.end() == 0 and run.find("unchanged")["same"]
    assert cli.main(argv) == ArenaError.exit_code
    assert "no weight server listens" in capsys.readouterr().err


def test_a_server_that_hangs_is_shown(stage, status, monkeypatch) -> None:
    server = stage.serve()
    monkeypatch.setattr("shared_offload.server.client.ANSWER_SECONDS", 0.3)
    server.kill(signal.SIGSTOP)
    assert "no answer" in status()["servers"][0]["problem"]
    server.kill(signal.SIGCONT)
