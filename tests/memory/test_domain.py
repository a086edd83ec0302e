"""Who shares with whom, from claims made up here."""

from __future__ import annotations

import dataclasses
import json

import pytest

from shared_offload.memory.domain import (
    Claim,
    Offer,
    Scope,
    claim_from_json,
    find_problems,
    form_domains,
    lender_notes,
    separation_notes,
)
from shared_offload.memory.limits import HostLimits
from shared_offload.ranks.facts import Member

GIB = 1 << 30
LIMITS = HostLimits(
    page_nbytes=4096,
    shmmax=1 << 62,
    shmall_pages=1 << 50,
    shmmni=4096,
    segments=0,
    segment_pages=0,
    total=256 * GIB,
    available=20 * GIB,
    nodes={0: 10 * GIB, 1: 10 * GIB},
    cgroup="/pod",
    cgroup_limit=16 * GIB,
    cgroup_available=15 * GIB,
)


def claim(rank: int, scope: str = "host", **changes: object) -> Claim:
    member = Member(
        rank=rank,
        hostname=str(changes.pop("boot", "a")),
        boot_id=str(changes.get("boot", "a")),
        ipc_namespace=str(changes.pop("ipc", "ipc:[1]")),
        pid_namespace="pid:[1]",
        pid=100 + rank,
        started=1,
    )
    member = dataclasses.replace(member, boot_id=member.hostname)
    fields = {"node": rank // 2, "strict": True, "fingerprint": "f", "nbytes": GIB, **changes}
    return Claim(member=member, scope=Scope(scope), limits=LIMITS, **fields)


def groups(claims: list[Claim]) -> list[tuple[int, ...]]:
    return [domain.ranks for domain in form_domains(claims)]


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("rank", [(0,), (1,), (2,), (3,)]),
        ("rank-numa", [(0,), (1,), (2,), (3,)]),
        ("numa", [(0, 1), (2, 3)]),
        ("host", [(0, 1, 2, 3)]),
        ("auto", [(0, 1), (2, 3)]),
    ],
)
def test_scopes(scope: str, expected: list[tuple[int, ...]]) -> None:
    claims = [claim(rank, scope) for rank in (2, 0, 3, 1)]  # in whatever order they come
    assert groups(claims) == expected
    domains = form_domains(claims)
    assert [d.leader.member.rank for d in domains] == [ranks[0] for ranks in expected]
    assert all(d.bound == (scope in ("numa", "rank-numa", "auto")) for d in domains)


def test_auto_is_host_when_one_node_is_unknown() -> None:
    claims = [claim(0, "auto"), claim(1, "auto", node=None)]
    assert groups(claims) == [(0, 1)]
    assert form_domains(claims)[0].scope is Scope.HOST
    assert find_problems(form_domains(claims)) == []


def test_explicit_numa_never_becomes_host() -> None:
    claims = [claim(0, "numa"), claim(1, "numa", node=None)]
    (error,) = find_problems(form_domains(claims))
    assert (type(error).__name__, error.facts["ranks"]) == ("NumaError", (1,))
    lenient = [dataclasses.replace(c, strict=False) for c in claims]
    domains = form_domains(lenient)
    assert find_problems(domains) == []
    assert [(d.ranks, d.scope, d.bound) for d in domains] == [
        ((0,), Scope.NUMA, True),
        ((1,), Scope.NUMA, False),
    ]


def test_a_copy_on_its_own_node_needs_to_know_the_node() -> None:
    claims = [claim(0, "rank-numa"), claim(1, "rank-numa", node=None)]
    (error,) = find_problems(form_domains(claims))
    assert error.facts["ranks"] == (1,)
    assert error.what.startswith("cpu_offload_numa needs the NUMA node of rank 1, which is unknown")
    assert "cpu_offload_numa to false" in error.hint


@pytest.mark.parametrize("what", ["boot", "ipc", "fingerprint"])
def test_what_must_be_equal_to_share(what: str) -> None:
    claims = [claim(0), claim(1), claim(2, **{what: "other"}), claim(3, **{what: "other"})]
    assert groups(claims) == [(0, 1), (2, 3)]


def test_a_line_for_namespaces_that_keep_apart() -> None:
    claims = [claim(0), claim(1), claim(2, ipc="x"), claim(3, ipc="x")]
    (note,) = separation_notes(form_domains(claims))
    assert "ranks 0,1 | 2,3" in note
    assert separation_notes(form_domains([claim(0), claim(1, boot="b")])) == []
    private = [dataclasses.replace(c, scope=Scope.RANK) for c in claims]
    assert separation_notes(form_domains(private)) == []


def limits_hit(claims: list[Claim]) -> list[tuple[str, int]]:
    return [(e.facts["limit"], e.facts["needed"]) for e in find_problems(form_domains(claims))]


def test_limits_count_all_arenas_that_they_hold() -> None:
    stamp = 4096
    four = [claim(rank, "rank", nbytes=6 * GIB) for rank in range(4)]
    assert limits_hit(four) == [
        ("available memory", 4 * (6 * GIB + stamp)),
        ("memory cgroup /pod", 4 * (6 * GIB + stamp)),
    ]
    assert limits_hit([dataclasses.replace(c, scope=Scope.HOST) for c in four]) == []
    bound = [claim(rank, "rank-numa", nbytes=6 * GIB) for rank in (0, 1)]
    assert limits_hit(bound) == [("NUMA node 0", 2 * (6 * GIB + stamp))]
    # Two hosts: each has its own memory.
    apart = [claim(rank, "rank", nbytes=6 * GIB, boot="ab"[rank // 2]) for rank in range(4)]
    assert limits_hit(apart) == []


def test_claims_survive_json() -> None:
    for one in (claim(0), claim(3, "numa", node=None)):
        assert claim_from_json(json.loads(json.dumps(one.to_json()))) == one


def lent(*nodes: int | None, required: bool = False) -> Offer:
    return Offer(nodes=nodes, required=required)


def test_what_is_lent_takes_no_memory_here() -> None:
    large = [claim(rank, "numa", nbytes=12 * GIB) for rank in range(4)]  # 10 GiB a node
    assert {e.facts["limit"] for e in find_problems(form_domains(large))} >= {"NUMA node 0"}
    offered = [dataclasses.replace(c, offer=lent(0, 1)) for c in large]
    assert find_problems(form_domains(offered)) == []
    assert lender_notes(form_domains(offered)) == []
    half = form_domains([dataclasses.replace(c, offer=lent(1)) for c in large])
    assert [domain.lent for domain in half] == [False, True]
    limits = {e.facts["limit"] for e in find_problems(half)}
    assert "NUMA node 0" in limits and "NUMA node 1" not in limits
    (note,) = lender_notes(half)
    assert "on node 1, and they are wanted on node 0" in note
    assert not half[1].without_offer().lent


@pytest.mark.parametrize(("nodes", "fits"), [((None,), True), ((0, 1), False)])
def test_an_arena_of_the_host_is_on_no_node(nodes: tuple[int | None, ...], fits: bool) -> None:
    (domain,) = form_domains([dataclasses.replace(claim(r), offer=lent(*nodes)) for r in (0, 1)])
    assert domain.lent is fits
    assert bool(lender_notes([domain])) is not fits


def test_one_node_is_the_host() -> None:
    limits = dataclasses.replace(LIMITS, nodes={0: 10 * GIB})
    claims = [
        dataclasses.replace(claim(rank, "numa", node=0), limits=limits, offer=lent(None))
        for rank in (0, 1)
    ]
    assert form_domains(claims)[0].lent


def test_a_required_server_is_a_verdict_of_all() -> None:
    refused = Offer(why_not="it holds another", required=True)
    claims = [dataclasses.replace(claim(r), offer=refused) for r in range(4)]
    (error,) = find_problems(form_domains(claims))
    assert error.facts["key"] == "weight_server" and "it holds another" in error.what
    soft = [dataclasses.replace(c, offer=Offer(why_not="it holds another")) for c in claims]
    assert find_problems(form_domains(soft)) == []
    assert lender_notes(form_domains(soft)) == ["weights are loaded by this run: it holds another"]


def test_an_offer_crosses_as_json() -> None:
    for offer in (None, lent(0, None), Offer(why_not="no", required=True)):
        mine = dataclasses.replace(claim(1), offer=offer)
        assert claim_from_json(json.loads(json.dumps(mine.to_json()))) == mine
