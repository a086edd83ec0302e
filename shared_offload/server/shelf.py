"""The models that a weight server holds.

Invariant: what is here fits the budget; room is made only by models that no process uses, the least
recently used first. A model is here from the moment its filling begins, and leaves when that fails.
Only the loop's thread changes the shelf; `Copy.fill` runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shared_offload.errors import ArenaError, OffloadError, raise_all
from shared_offload.memory import numa
from shared_offload.memory.arena import Mapping, attach, find_segment, segment_size
from shared_offload.memory.board import LocalBoard, Note
from shared_offload.memory.domain import Domain, find_problems
from shared_offload.memory.leader import lead, state_key
from shared_offload.memory.limits import gib
from shared_offload.memory.request import Stage
from shared_offload.memory.summary import RankReport, combine
from shared_offload.memory.vigil import Vigil
from shared_offload.report.progress import Progress
from shared_offload.server.recipe import Opener, Order, Recipe, plan

HELD = RankReport(0, "by each run", 0.0).to_json()


class Copy:
    """One arena of a model. It observes its own filling."""

    def __init__(
        self, domain: Domain, recipe: Recipe, board: LocalBoard, on_note: Callable[[str], None]
    ) -> None:
        self.domain = domain
        self.done = 0
        self._recipe = recipe
        self._vigil = Vigil(board, domain.leader.member, recipe.request.name)
        self._on_note = on_note
        self._on_bytes: Callable[[int], None] = lambda _: None
        self._mapping: Mapping | None = None

    @property
    def state(self) -> Note:
        """As the leader of a run publishes it: state, ticket, done, filling."""
        return self._vigil.read(state_key(self.domain)) or {"state": "created"}

    @property
    def sealed(self) -> bool:
        """Complete, and held read-only."""
        return self._mapping is not None

    @property
    def in_use(self) -> bool:
        """A process other than this one holds it."""
        if not self.sealed:
            return True
        row = find_segment(self.state["ticket"]["segment_id"])
        return row is not None and row["nattch"] > 1

    def fill(self, on_bytes: Callable[[int], None]) -> None:
        """Create, fill and seal, from the node's CPUs. For a thread of its own.

        What it raises stops the other copies of the model too.
        """
        self._on_bytes = on_bytes
        request, domain = self._recipe.request, self.domain
        with _on_cpus(numa.usable_cpus(domain.node)):
            ticket, writable = lead(request, domain, self._vigil, self._recipe.fill, self)
        try:
            self._mapping = attach(ticket, read_only=True)
            self._mapping.prefer_huge_pages()
        finally:
            writable.release()

    def progress(self, stage: Stage, done: int, total: int) -> None:  # noqa: ARG002 - an Observer
        """Bytes of the filling so far."""
        self._on_bytes(done - self.done)
        self.done = done

    def note(self, line: str) -> None:
        """A line for whoever runs the server."""
        self._on_note(line)

    def row(self) -> dict[str, Any]:
        """What became of it, for a table."""
        row = combine(self.domain, self.state, [HELD]).row()
        return {**row, "ranks": (), "saved_nbytes": 0}

    def release(self, reason: OffloadError) -> None:
        """Let go: its memory goes with the last run that is attached. Ends a filling."""
        self._vigil.fail(reason)
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.release()


@contextmanager
def _on_cpus(cpus: Collection[int] | None) -> Iterator[None]:
    """Run this thread there: what it touches itself, the stamp, then lands on their node too."""
    before = os.sched_getaffinity(0)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Model:
    """A recipe and its arenas."""

    def __init__(self, recipe: Recipe, domains: Sequence[Domain], progress: Progress) -> None:
        board = LocalBoard()  # one for all: a failure of one copy is that of all
        self.recipe = recipe
        self.copies = [Copy(domain, recipe, board, progress.note) for domain in domains]
        self.total = recipe.request.nbytes * len(domains)
        self.nbytes = segment_size(recipe.request.nbytes) * len(domains)
        self.begun = time.time()
        self.used = time.monotonic()
        self.leases = 0
        """Peers that know of it and may be about to attach."""
        self.failure: BaseException | None = None
        """Why it could not be filled."""

    @property
    def fingerprint(self) -> str:
        return self.recipe.request.fingerprint

    @property
    def in_use(self) -> bool:
        """It is being filled, or a process holds one of its arenas, or is about to."""
        return self.leases > 0 or any(copy.in_use for copy in self.copies)

    @property
    def done(self) -> int:
        """Bytes that are there, of `total`."""
        return sum(copy.done for copy in self.copies)

    def copy_on(self, node: int | None) -> Copy | None:
        """The arena bound to `node`."""
        return next((c for c in self.copies if c.domain.bound_node == node), None)

    async def fill(self, progress: Progress) -> None:
        """All arenas at once. With an error nothing is held."""
        with progress.task(f"read {self.recipe.path}", self.total, "B") as task:
            fills = [asyncio.to_thread(copy.fill, task.advance) for copy in self.copies]
            ends = await asyncio.gather(*fills, return_exceptions=True)
            failures = [end for end in ends if isinstance(end, BaseException)]
            if failures:
                self.release("it could not be filled")
                self.failure = failures[0]
                raise failures[0]

    def release(self, reason: str) -> None:
        """Let go of all arenas."""
        for copy in self.copies:
            copy.release(ArenaError(f"the weight server gave up {self.recipe.path}: {reason}"))


class Shelf:
    """All models. `budget` in bytes; None: as much as the host allows."""

    def __init__(
        self,
        opener: Opener,
        progress: Progress,
        *,
        nodes: Sequence[int],
        budget: int | None = None,
    ) -> None:
        self.models: list[Model] = []
        self._opener = opener
        self._progress = progress
        self._nodes = nodes
        self._budget = budget
        self._one_at_a_time = asyncio.Lock()
        self._closed = False

    @property
    def filling(self) -> Model | None:
        """The model that is being filled."""
        return next((m for m in self.models if not all(c.sealed for c in m.copies)), None)

    def find(self, fingerprint: str) -> list[Model]:
        """Models with this content, in one place or another."""
        return [model for model in self.models if model.fingerprint == fingerprint]

    def why_not(self, path: str) -> str:
        """Why `find` has nothing for a checkpoint that the peer calls `path`."""
        same = [model for model in self.models if model.recipe.path == path]
        if not same:
            held = ", ".join(dict.fromkeys(model.recipe.path for model in self.models))
            return f"does not hold {path}" + (f", but {held}" if held else "")
        if not any(model.recipe.unchanged() for model in same):
            return f"holds {path} as it was before it changed on disk"
        return f"holds {path} with another dtype, layout or LoRA set, or files it saw otherwise"

    async def hold(self, order: Order) -> Model:
        """The model that is ordered, filled. One after the other: two would share the disk."""
        async with self._one_at_a_time:
            recipe = await asyncio.to_thread(self._opener, order)
            domains = plan(recipe.request, self._nodes)
            wanted = {domain.bound_node for domain in domains}
            for known in self.find(recipe.request.fingerprint):
                if wanted <= {copy.domain.bound_node for copy in known.copies}:
                    known.used = time.monotonic()
                    return known
            model = Model(recipe, domains, self._progress)
            self._make_room(model)
            raise_all(find_problems(plan(recipe.request, self._nodes)))  # with the room made
            self.models.append(model)
            try:
                await model.fill(self._progress)
            finally:
                if model.failure is not None and model in self.models:
                    self.models.remove(model)
            return model

    def _make_room(self, new: Model) -> None:
        if self._closed:
            raise ArenaError("the weight server is stopping")
        for model in [m for m in self.models if not m.in_use and not m.recipe.unchanged()]:
            self._drop(model, "its files changed on disk")
        if self._budget is None:
            return
        left = self._budget - sum(model.nbytes for model in self.models)
        idle = sorted((m for m in self.models if not m.in_use), key=lambda m: m.used)
        if new.nbytes > left + sum(model.nbytes for model in idle):
            raise ArenaError(
                f"{new.recipe.path} needs {gib(new.nbytes)}; the budget is {gib(self._budget)}, of "
                f"which runs use {gib(self._budget - left - sum(m.nbytes for m in idle))}",
                hint="raise --budget, or wait until runs end",
                needed=new.nbytes,
                budget=self._budget,
            )
        for model in idle:
            if new.nbytes <= left:
                return
            left += model.nbytes
            self._drop(model, "room was needed for another model")

    def _drop(self, model: Model, reason: str) -> None:
        self.models.remove(model)
        model.release(reason)
        self._progress.note(f"let go of {model.recipe.path}: {reason}")

    def close(self) -> None:
        """Let go of everything, and end what is being filled."""
        self._closed = True
        while self.models:
            self.models.pop().release("it is stopping")
