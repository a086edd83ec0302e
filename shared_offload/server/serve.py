"""The loop of a weight server: connections, answers, signals.

A peer has `REQUEST_SECONDS` for its one request, and as long for each answer it is to take. There
are at most `MOST_PEERS`; beyond, whoever has been silent for longest is cut off.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

from shared_offload.errors import ArenaError, OffloadError
from shared_offload.ranks.facts import member_facts
from shared_offload.report.progress import Progress
from shared_offload.server import protocol
from shared_offload.server.folder import BACKLOG, Folder, peer_uid
from shared_offload.server.protocol import Message
from shared_offload.server.recipe import Opener, Order
from shared_offload.server.shelf import Copy, Model, Shelf

REQUEST_SECONDS = 5.0
LEASE_SECONDS = 60.0
"""A peer has to attach to an arena that it was told of."""
NEWS_SECONDS = 0.25
"""Between two messages about a filling. A peer that hears nothing for long gives the server up."""
MOST_PEERS = 128
MOST_ORDERS = 16
"""Being met or waiting: they go on when their peer does not."""
MOST_ERROR_NBYTES = 8 << 10
EXIT_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    folder: Folder,
    opener: Opener,
    order: Order,
    progress: Progress,
    *,
    nodes: Sequence[int],
    budget: int | None,
    on_held: Callable[[Model], None],
) -> None:
    """Hold what is ordered, and serve until a signal or a peer ends it. `folder` is locked.

    Raises OffloadError when the first order cannot be met. Uses this thread's event loop, and
    answers SIGINT and SIGTERM: main thread only.
    """

    async def main() -> None:
        shelf = Shelf(opener, progress, nodes=nodes, budget=budget)
        await _Server(folder, shelf, progress).run(order, on_held)

    asyncio.run(main())


class _Server:
    """One run of the loop."""

    def __init__(self, folder: Folder, shelf: Shelf, progress: Progress) -> None:
        self._folder = folder
        self._shelf = shelf
        self._progress = progress
        self._stop = asyncio.Event()
        self._silent: dict[asyncio.StreamWriter, None] = {}  # in order of arrival
        self._peers = 0
        self._holds: set[asyncio.Task[Model]] = set()
        self._facts = {
            **member_facts(0).to_json(),
            "begun": time.time(),
            "folder": str(folder.path),
        }
        self._answers: dict[str, Callable[..., AsyncGenerator[Message, None]]] = {
            "ask": self._ask,
            "borrow": self._borrow,
            "hold": self._hold,
            "status": self._status,
            "stop": self._end,
        }

    async def run(self, order: Order, on_held: Callable[[Model], None]) -> None:
        """Until it is told to stop, or the first order fails."""
        loop = asyncio.get_running_loop()
        for signum in EXIT_SIGNALS:
            loop.add_signal_handler(signum, self._stop.set)
        server = await asyncio.start_unix_server(
            self._meet,
            sock=self._folder.listen(),
            limit=protocol.MOST_NBYTES,
            backlog=BACKLOG,
        )
        first = asyncio.create_task(self._shelf.hold(order))
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({first, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.is_set():
                on_held(await first)
                await stop
        finally:
            server.close()
            self._folder.clear()
            self._shelf.close()
            # Until no thread fills any more. Whose error matters has been told of it.
            await asyncio.gather(first, *self._holds, return_exceptions=True)

    # -- a peer ------------------------------------------------------------------------------------

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._peers += 1
        self._silent[writer] = None
        if self._peers > MOST_PEERS:
            oldest = next(iter(self._silent))
            self._silent.pop(oldest)
            oldest.transport.abort()
        writer.transport.set_write_buffer_limits(0)  # drained means gone: nothing piles up here
        try:
            await self._talk(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            writer.transport.abort()  # it hung up, or is too slow
        finally:
            self._silent.pop(writer, None)
            self._peers -= 1
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            uid = peer_uid(writer.get_extra_info("socket"))
            if uid != os.geteuid():
                raise ArenaError(f"this weight server is uid {os.geteuid()}'s and you are {uid}")
            request = await _read(reader)
            self._silent.pop(writer, None)
            if request is None:
                return
            answer = self._answers.get(protocol.text(request, "op"))
            if answer is None:
                raise ArenaError(f"a weight server cannot {request['op']!r}")
            async with aclosing(answer(request, reader)) as messages:
                async for message in messages:
                    await _send(writer, message)
        except OffloadError as error:
            await _send(writer, {"error": error.to_json()})

    # -- the answers -------------------------------------------------------------------------------

    async def _ask(
        self, request: Message, _: asyncio.StreamReader
    ) -> AsyncGenerator[Message, None]:
        models = self._shelf.find(protocol.text(request, "fingerprint"))
        for model in models:
            model.used = time.monotonic()
        path = protocol.text(request, "path")
        why = "" if models else await asyncio.to_thread(self._shelf.why_not, path)
        nodes = [copy.domain.bound_node for model in models for copy in model.copies]
        yield {"server": self._facts, "nodes": nodes, "why": why}

    async def _borrow(
        self, request: Message, reader: asyncio.StreamReader
    ) -> AsyncGenerator[Message, None]:
        fingerprint, node = protocol.text(request, "fingerprint"), protocol.node(request)
        model, copy = self._copy(fingerprint, node)
        model.leases += 1
        try:
            while not copy.sealed:
                if model.failure is not None or model not in self._shelf.models:
                    raise ArenaError(
                        f"the weight server could not fill its arena: {model.failure or 'stopped'}"
                    )
                yield {"state": "filling", "done": copy.done}
                await asyncio.sleep(NEWS_SECONDS)
            yield {**copy.state, "server": self._facts}
            with suppress(TimeoutError):
                async with asyncio.timeout(LEASE_SECONDS):
                    await reader.read(1)
        finally:
            model.leases -= 1
            model.used = time.monotonic()

    def _copy(self, fingerprint: str, node: int | None) -> tuple[Model, Copy]:
        for model in self._shelf.find(fingerprint):
            if (copy := model.copy_on(node)) is not None:
                return model, copy
        raise ArenaError("the weight server no longer holds these weights")

    async def _hold(
        self, request: Message, _: asyncio.StreamReader
    ) -> AsyncGenerator[Message, None]:
        order = request.get("order")
        if not isinstance(order, dict):
            raise ArenaError(f"order is {order!r} in a message", expected="an object")
        if len(self._holds) >= MOST_ORDERS:
            raise ArenaError(f"{MOST_ORDERS} orders wait already", hint="try again later")
        task = asyncio.create_task(self._shelf.hold(order))
        self._holds.add(task)
        task.add_done_callback(self._held)
        while not task.done():
            model = self._shelf.filling
            done, total = (model.done, model.total) if model else (0, 0)
            yield {"state": "filling", "done": done, "total": total}
            await asyncio.wait({task}, timeout=NEWS_SECONDS)
        try:
            rows = [copy.row() for copy in task.result().copies]
        except OffloadError:
            raise
        except Exception as error:  # nobody foresaw it; other models are to stay
            raise ArenaError(f"the weight server met {error!r} over this order") from error
        yield {"state": "sealed", "rows": rows, "server": self._facts}

    def _held(self, task: asyncio.Task[Model]) -> None:
        self._holds.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._progress.note(f"an order could not be met: {error or repr(error)}")

    async def _status(self, _: Message, __: asyncio.StreamReader) -> AsyncGenerator[Message, None]:
        yield {"server": self._facts}
        for model in list(self._shelf.models):
            for copy in model.copies:
                yield {"arena": _describe(model, copy)}
        yield {"end": True}

    async def _end(self, _: Message, reader: asyncio.StreamReader) -> AsyncGenerator[Message, None]:
        yield {"server": self._facts}
        self._stop.set()
        await reader.read(1)  # ends with the loop, when everything has been given back


def _describe(model: Model, copy: Copy) -> Message:
    state = copy.state
    return {
        "path": model.recipe.path,
        "scope": str(copy.domain.scope),
        "node": copy.domain.node if copy.domain.scope.bound else None,
        "nbytes": model.recipe.request.nbytes,
        "done": copy.done,
        "state": state["state"],
        "segment_id": state["ticket"]["segment_id"] if "ticket" in state else None,
        "begun": model.begun,
    }


async def _read(reader: asyncio.StreamReader) -> Message | None:
    """The peer's request; None when it hung up without one."""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            line = await reader.readline()
    except ValueError as error:  # asyncio's word for a line beyond the limit
        raise ArenaError(f"a request has more than {protocol.MOST_NBYTES} bytes") from error
    return protocol.decode(line) if line else None


async def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    try:
        line = protocol.encode(message)
    except ArenaError as error:  # a long list of problems
        told = str(message.get("error", error))[:MOST_ERROR_NBYTES]
        line = protocol.encode({"error": ArenaError(told).to_json()})
    writer.write(line)
    async with asyncio.timeout(REQUEST_SECONDS):
        await writer.drain()
