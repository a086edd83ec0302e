"""Peers that send nonsense, too much, too little or nothing; peers of another user."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared_offload.errors import ArenaError, from_json
from shared_offload.server import protocol
from shared_offload.server.folder import SOCKET

ASK = {"op": "ask", "fingerprint": "x", "path": "y"}


def connect(stage) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(10)
    peer.connect(str(stage.folder / SOCKET))
    return peer


def talk(stage, data: bytes) -> bytes:
    """All that the server answers to `data`."""
    with connect(stage) as peer:
        received = b""
        try:
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            while part := peer.recv(1 << 16):
                received += part
        except (BrokenPipeError, ConnectionResetError):
            pass  # it had enough
        return received


def error(answer: bytes) -> ArenaError:
    message = json.loads(answer)
    assert message["v"] == protocol.VERSION
    return from_json(message["error"])


BAD_REQUESTS = (
    (b"hello\n", "not JSON"),
    (b"\xff\xfe\n", "not JSON"),
    (b"[" * 60000 + b"\n", "not JSON"),
    (b"9" * 60000 + b"\n", "not JSON"),
    (b"[1]\n", "is a list"),
    (b"{}\n", "different versions"),
    (b'{"v": 2, "op": "ask"}\n', "different versions: 2 and 1"),
    (b'{"v": 1}\n', "op is None"),
    (b'{"v": 1, "op": ["ask"]}\n', "op is"),
    (b'{"v": 1, "op": "fly"}\n', "cannot 'fly'"),
    (b'{"v": 1, "op": "ask"}\n', "fingerprint is None"),
    (b'{"v": 1, "op": "borrow", "fingerprint": "x", "node": "0"}\n', "node is '0'"),
    (b'{"v": 1, "op": "borrow", "fingerprint": "x"}\n', "no longer holds"),
    (b'{"v": 1, "op": "hold", "order": 3}\n', "order is 3"),
    (b'{"v": 1', "not JSON"),
)


def test_a_bad_request_is_answered_with_an_error(stage) -> None:
    stage.serve()
    for data, word in BAD_REQUESTS:
        assert word in str(error(talk(stage, data))), data[:40]
        with stage.ask(**ASK) as connection:
            assert "does not hold y" in connection.receive()["why"]


def test_an_order_that_breaks_the_opener_ends_nothing(stage) -> None:
    stage.serve()
    answer = talk(stage, b'{"v": 1, "op": "hold", "order": {}}\n')
    assert "KeyError('name')" in str(error(answer.splitlines()[-1]))
    assert list(stage.held()) == ["model"]


def test_orders_do_not_pile_up(stage) -> None:
    server = stage.serve()
    for n in range(20):  # from peers that do not wait
        order = {"name": f"m{n}", "mib": 1, "pace": 0.05, "fault": ""}
        with stage.ask(op="hold", order=order) as connection:
            try:
                connection.receive()
            except ArenaError as refusal:
                assert n >= 16 and "16 orders wait" in refusal.what
    deadline = time.monotonic() + 20
    while len(stage.held()) < 17 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.3)
    assert 17 <= len(stage.held()) < 21
    assert server.process.poll() is None


def test_messages_have_a_limit() -> None:
    fits = {"x": "a" * (protocol.MOST_NBYTES - 30)}
    assert protocol.decode(protocol.encode(fits))["x"] == fits["x"]
    with pytest.raises(ArenaError):
        protocol.encode({"x": "a" * protocol.MOST_NBYTES})


def cost(pid: int) -> tuple[int, int]:
    """Descriptors and KiB of memory of its own."""
    proc = Path(f"/proc/{pid}")
    status = (proc / "status").read_text()
    rss = next(int(li.split()[1]) for li in status.splitlines() if li.startswith("RssAnon:"))
    return len(list((proc / "fd").iterdir())), rss


def abuse(stage, dice: random.Random, count: int) -> None:
    """Malformed, oversized, silent, half-closed and hung-up peers; some kept open at a time."""
    open_peers: list[socket.socket] = []
    asked = protocol.encode(ASK)
    for _ in range(count):
        peer = connect(stage)
        kind = dice.randrange(6)
        try:
            if kind == 0:
                peer.sendall(dice.randbytes(dice.randrange(1, 200)) + b"\n")
            elif kind == 1:
                peer.sendall(b"x" * (4 * protocol.MOST_NBYTES))
            elif kind == 2:
                peer.sendall(asked[: dice.randrange(len(asked))])  # and not a byte more
            elif kind == 3:
                peer.sendall(asked)
                peer.shutdown(socket.SHUT_WR)  # reads nothing either
            elif kind == 4:
                peer.sendall(asked[: dice.randrange(len(asked))])
                peer.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass
        open_peers.append(peer)
        if len(open_peers) > 60 or kind == 5:
            open_peers.pop(dice.randrange(len(open_peers))).close()
    for peer in open_peers:
        peer.close()


@pytest.mark.slow
def test_ten_thousand_bad_peers(stage) -> None:
    server = stage.serve(seconds={"REQUEST": 1})
    dice = random.Random(3)
    abuse(stage, dice, 1000)
    time.sleep(1.5)
    before = cost(server.pid)
    for _ in range(9):
        abuse(stage, dice, 1000)
        begun = time.monotonic()
        with stage.ask(**ASK) as connection:  # served at once, among them
            assert connection.receive()["nodes"] == []
        assert time.monotonic() - begun < 1
    time.sleep(1.5)
    after = cost(server.pid)
    assert after[0] == before[0] and after[1] - before[1] < 2048, (before, after)
    assert stage.run().wait_for("open")["lender"]


def test_silent_peers_are_cut_off_by_time_and_by_number(stage) -> None:
    server = stage.serve(seconds={"REQUEST": 1})
    idle = cost(server.pid)[0]
    crowd = [connect(stage) for _ in range(200)]
    with stage.ask(**ASK) as connection:  # more than it talks to at a time, and yet answered
        assert connection.receive()["nodes"] == []
    assert crowd[0].recv(1) == b""  # the longest silent went first
    time.sleep(1.5)
    assert all(peer.recv(1) == b"" for peer in crowd)
    for peer in crowd:
        peer.close()
    assert cost(server.pid)[0] == idle


def test_a_peer_that_never_hangs_up_loses_its_claim(stage) -> None:
    stage.serve(name="a", budget=5 << 20, seconds={"LEASE": 0.5})
    request = {"op": "borrow", "fingerprint": "a 4 first", "node": None}
    with stage.ask(**request) as connection:
        assert connection.receive()["state"] == "sealed"
        with pytest.raises(ArenaError):
            stage.hold(name="b")  # the peer may be about to attach to a
        time.sleep(0.8)
        stage.hold(name="b")
    assert list(stage.held()) == ["b"]


STRANGER = """
import json, os, socket, sys
os.setgid(65534); os.setuid(65534)
peer = socket.socket(socket.AF_UNIX)
try:
    peer.connect(sys.argv[1])
except PermissionError:
    print("kept out")
    raise SystemExit
try:
    peer.sendall(b'{"v": 1, "op": "stop"}\\n')
except BrokenPipeError:
    pass  # it was judged before it spoke
print(json.loads(peer.recv(65536))["error"])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a second user")
def test_another_user_is_refused(stage) -> None:
    server = stage.serve()
    path = stage.folder / SOCKET

    def stranger() -> str:
        command = [sys.executable, "-c", STRANGER, str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stderr == ""
        return done.stdout.strip()

    for parent in path.parents:  # pytest's folders are closed to others too
        if parent != stage.folder and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    assert stranger() == "kept out"
    stage.folder.chmod(0o711)
    path.chmod(0o666)
    assert f"is uid {os.geteuid()}'s and you are 65534" in str(from_json(stranger()))
    assert server.process.poll() is None
