"""The other end of a weight server's socket: runs that borrow, commands that ask.

Invariant: nothing here waits for a server that says nothing: each answer has its deadline, and
during a filling the server speaks several times a second.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from shared_offload.errors import ArenaError, OffloadError, from_json
from shared_offload.memory.arena import Ticket
from shared_offload.memory.domain import Offer
from shared_offload.memory.lending import Loan
from shared_offload.memory.summary import filling_from_json
from shared_offload.ranks.facts import Member
from shared_offload.server import protocol
from shared_offload.server.folder import Folder, candidates
from shared_offload.server.protocol import Message

ANSWER_SECONDS = 5.0
SILENCE_SECONDS = 30.0
"""Of a server that is filling, and busy on a slow host."""
POLL_SECONDS = 0.1


class Connection:
    """One request to a server, and its answers. A context manager."""

    def __init__(self, peer: socket.socket, folder: Path, request: Message) -> None:
        self._peer = peer
        self._folder = folder
        self._buffer = b""
        try:
            peer.settimeout(ANSWER_SECONDS)
            peer.sendall(protocol.encode(request))
        except BaseException as error:
            peer.close()
            if isinstance(error, OSError):
                raise self.lost(str(error)) from error
            raise

    def receive(self, seconds: float | None = None) -> Message:
        """The next answer, within ANSWER_SECONDS unless told otherwise; ArenaError when there is
        none, or when it is the server's error.
        """
        seconds = ANSWER_SECONDS if seconds is None else seconds
        message = self.poll(seconds)
        if message is None:
            raise self.lost(f"no answer within {seconds:.0f} s")
        return message

    def poll(self, seconds: float) -> Message | None:
        """The next answer if it comes within `seconds`."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._peer.settimeout(left)
            try:
                received = self._peer.recv(protocol.MOST_NBYTES)
            except TimeoutError:
                return None
            except OSError as error:
                raise self.lost(str(error)) from error
            self._buffer += received
            if not received or len(self._buffer) > 2 * protocol.MOST_NBYTES:
                raise self.lost("it hung up")
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = protocol.decode(line)
        if "error" in message:
            raise from_json(protocol.text(message, "error"))
        return message

    def wait_for_end(self) -> None:
        """Until the server hangs up, or is gone."""
        self._peer.settimeout(None)
        with suppress(ConnectionError):
            while self._peer.recv(protocol.MOST_NBYTES):
                pass

    def lost(self, why: str) -> ArenaError:
        """The error for a server that is no help any more."""
        return ArenaError(
            f"the weight server in {self._folder} does not answer: {why}",
            hint="see `shared-offload status`; it may have been killed",
            path=str(self._folder),
        )

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._peer.close()


def places(folder: Path | None) -> list[Path]:
    """Where to look for a server: in `folder`, or where this user's servers listen."""
    return candidates() if folder is None else [folder]


def send(folder: Path | None, request: Message) -> Connection | None:
    """Hand a request to the first server that answers; None when there is no socket.

    Raises ArenaError when there is one, and nobody behind any.
    """
    dead: ArenaError | None = None
    for place in places(folder):
        try:
            opened = Folder.find(place)
            if opened is None:
                continue
            with opened:
                peer = opened.connect(ANSWER_SECONDS)
            if peer is not None:
                return Connection(peer, place, request)
        except ArenaError as error:
            dead = dead or error
    if dead is not None:
        raise dead
    return None


class ServerLender:
    """A weight server as a lender of one run's weights (`memory.lending.Lender`).

    `path` is what people call the checkpoint. `required`: a run must not load by itself.
    """

    def __init__(
        self, fingerprint: str, path: str, *, required: bool = False, folder: Path | None = None
    ) -> None:
        self._fingerprint = fingerprint
        self._path = path
        self._required = required
        self._folder = folder

    def offer(self, me: Member) -> Offer | None:
        """What the server holds for this process; None when none listens and none is required."""
        request = {"op": "ask", "fingerprint": self._fingerprint, "path": self._path}
        try:
            connection = send(self._folder, request)
            if connection is None:
                where = " or ".join(map(str, places(self._folder)))
                return (
                    self._nothing(f"no weight server listens in {where}")
                    if self._required
                    else None
                )
            with connection:
                answer = connection.receive()
        except OffloadError as error:
            return self._nothing(error.what)
        server = answer["server"]
        name = f"the weight server (pid {server['pid']})"
        if (server["boot_id"], server["ipc_namespace"]) != (me.boot_id, me.ipc_namespace):
            return self._nothing(
                f"{name} is in another IPC namespace (containers share the host's with docker run "
                "--ipc=host)"
            )
        if not answer["nodes"]:
            return self._nothing(f"{name} {answer['why']}")
        return Offer(nodes=tuple(answer["nodes"]), required=self._required)

    def _nothing(self, why: str) -> Offer:
        return Offer(why_not=why, required=self._required)

    @contextmanager
    def borrow(self, node: int | None, tick: Callable[[int], None]) -> Iterator[Loan]:
        """The server's arena bound to `node`; see `Lender`."""
        connection = send(
            self._folder, {"op": "borrow", "fingerprint": self._fingerprint, "node": node}
        )
        if connection is None:
            raise ArenaError("the weight server has ended")
        with connection:
            answer = _sealed(connection, lambda news: tick(news["done"]))
            yield Loan(
                Ticket(**answer["ticket"]),
                filling_from_json(answer["filling"]),
                f"weight server, pid {answer['server']['pid']}",
            )


def hold(folder: Path | None, order: Message, tell: Callable[[Message], None]) -> Message | None:
    """Have a running server hold what is ordered; its last answer, or None without a server.

    `tell` gets the messages about the filling (done, total). OffloadError when it cannot.
    """
    connection = send(folder, {"op": "hold", "order": order})
    if connection is None:
        return None
    with connection:
        return _sealed(connection, tell)


def _sealed(connection: Connection, tell: Callable[[Message], None]) -> Message:
    """The answer that ends a filling. `tell` hears the last news at every poll."""
    news: Message = {"state": "filling", "done": 0, "total": 0}
    heard = time.monotonic()
    while True:
        answer = connection.poll(POLL_SECONDS)
        if answer is not None:
            news, heard = answer, time.monotonic()
        elif time.monotonic() - heard > SILENCE_SECONDS:
            raise connection.lost(f"no answer within {SILENCE_SECONDS:.0f} s")
        if news["state"] == "sealed":
            return news
        tell(news)
