"""What a server plans and holds on a machine with two nodes, described here: the kernel has one."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from io import StringIO

import pytest

from shared_offload.errors import NumaError
from shared_offload.memory import numa
from shared_offload.memory.arena import Ticket, attach, find_segment
from shared_offload.memory.domain import Scope
from shared_offload.memory.limits import read_limits
from shared_offload.memory.request import ArenaRequest
from shared_offload.report.progress import Progress
from shared_offload.server import recipe as recipes
from shared_offload.server.recipe import Recipe, plan, serving_nodes
from shared_offload.server.shelf import Shelf

MIB = 1 << 20


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dataclasses.replace(read_limits(), nodes={0: 1 << 30, 1: 1 << 30})
    monkeypatch.setattr(recipes, "read_limits", lambda: limits)
    monkeypatch.setattr(numa, "memory_nodes", lambda *_: frozenset({0, 1}))
    monkeypatch.setattr(numa, "usable_cpus", lambda _: frozenset(os.sched_getaffinity(0)))


def request(scope: Scope, *, strict: bool = False) -> ArenaRequest:
    return ArenaRequest(
        nbytes=2 * MIB,
        fingerprint="print",
        scope=scope,
        strict_numa=strict,
        register_chunk_nbytes=MIB,
    )


@pytest.mark.parametrize(
    ("scope", "nodes", "bound"),
    [
        (Scope.HOST, (0, 1), [None]),
        (Scope.NUMA, (0, 1), [0, 1]),
        (Scope.AUTO, (0, 1), [0, 1]),
        (Scope.NUMA, (1,), [1]),
    ],
)
def test_one_arena_for_the_host_or_one_for_each_node(two_nodes, scope, nodes, bound) -> None:
    assert [domain.bound_node for domain in plan(request(scope), nodes)] == bound


def test_a_single_node_is_the_host() -> None:
    assert serving_nodes() == tuple(sorted(numa.memory_nodes()))
    if len(serving_nodes()) == 1:
        scopes = (Scope.HOST, Scope.NUMA, Scope.AUTO)
        assert [[d.bound_node for d in plan(request(s), (0,))] for s in scopes] == [[None]] * 3


def open_shelf(strict: bool) -> tuple[Shelf, StringIO]:
    def fill(dest, on_bytes, cpus, stop) -> None:
        dest[:] = bytes(range(256)) * (len(dest) // 256)
        on_bytes(len(dest))

    said = StringIO()
    recipe = Recipe(
        path="model",
        request=request(Scope.NUMA, strict=strict),
        fill=fill,
        unchanged=lambda: True,
    )
    return Shelf(lambda _: recipe, Progress(stream=said), nodes=(0, 1)), said


def test_a_copy_on_each_node(two_nodes) -> None:
    async def hold() -> tuple[list[int], str]:
        shelf, said = open_shelf(strict=False)
        model = await shelf.hold({})
        assert await shelf.hold({}) is model  # it is there already
        assert model.copy_on(None) is None
        tickets = [Ticket(**model.copy_on(node).state["ticket"]) for node in (0, 1)]
        assert not model.in_use
        mapping = attach(tickets[1], read_only=True)
        assert model.in_use and bytes(mapping.view()[:3]) == b"\0\1\2"
        mapping.release()
        rows = [copy.row() for copy in model.copies]
        assert [(row["scope"], row["node"], row["ranks"]) for row in rows] == [
            ("numa", 0, ()),
            ("numa", 1, ()),
        ]
        assert model.done == model.total == 4 * MIB
        shelf.close()
        assert all(find_segment(ticket.segment_id) is None for ticket in tickets)
        return [ticket.segment_id for ticket in tickets], said.getvalue()

    segments, said = asyncio.run(hold())
    assert len(set(segments)) == 2
    assert "pages should be on NUMA node 1" in said  # this kernel has node 0 alone


def test_a_strict_copy_that_cannot_be_placed_fails_the_model(two_nodes) -> None:
    async def hold() -> Shelf:
        shelf, _ = open_shelf(strict=True)
        with pytest.raises(NumaError) as caught:
            await shelf.hold({})
        assert caught.value.facts["node"] == 1
        return shelf

    assert asyncio.run(hold()).models == []
