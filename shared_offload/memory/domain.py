"""Who shares an arena with whom.

A domain is the set of ranks with equal host (boot id), IPC namespace, scope key and layout
fingerprint; its leader is its lowest rank. A private arena is a domain of one. Every rank computes
the same domains from the same claims, so nothing is negotiated. Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from shared_offload.errors import ArenaError, NumaError, OffloadError
from shared_offload.memory.arena import segment_size
from shared_offload.memory.limits import (
    Demand,
    HostLimits,
    cgroup_shortages,
    ipc_shortages,
    memory_shortages,
)
from shared_offload.ranks.facts import Member

Shortage = Callable[[HostLimits, Sequence[Demand], str], Iterable[OffloadError]]


class Scope(StrEnum):
    """Which ranks share one copy."""

    RANK = "rank"
    """None: a copy per rank."""
    RANK_NUMA = "rank-numa"
    """None: a copy per rank, bound to the node of its device."""
    NUMA = "numa"
    """Those of one NUMA node; bound to it."""
    HOST = "host"
    """Those of one host; on the leader's node while it has room."""
    AUTO = "auto"
    """numa when the node of every rank is known, else host."""

    @property
    def bound(self) -> bool:
        """Pages must be on the node."""
        return self in (Scope.NUMA, Scope.RANK_NUMA)

    @property
    def private(self) -> bool:
        """Each rank has a copy of its own."""
        return self in (Scope.RANK, Scope.RANK_NUMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a weight server answered a rank that asked for its weights."""

    nodes: tuple[int | None, ...] = ()
    """`Domain.bound_node` of each arena that it holds, or is filling."""
    why_not: str = ""
    """Where it has none for this rank: the reason, a clause."""
    required: bool = False
    """To load without it is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one rank asks for, and all that the others must know to answer."""

    member: Member
    node: int | None
    """Of its GPU, or of its CPUs; None when unknown."""
    scope: Scope
    strict: bool
    """An arena whose pages cannot all be on its node is an error."""
    fingerprint: str
    """Of layout and content: ranks share only what is equal."""
    nbytes: int
    limits: HostLimits
    offer: Offer | None = None
    """None: nobody was asked."""

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON types."""
        return asdict(self)


def claim_from_json(raw: dict[str, Any]) -> Claim:
    """The claim that `to_json` wrote, also when JSON has turned its integer keys into text."""
    limits = {**raw["limits"], "nodes": {int(k): v for k, v in raw["limits"]["nodes"].items()}}
    offer = raw["offer"]
    changed = {
        "member": Member(**raw["member"]),
        "scope": Scope(raw["scope"]),
        "limits": HostLimits(**limits),
        "offer": offer and Offer(**{**offer, "nodes": tuple(offer["nodes"])}),
    }
    return Claim(**{**raw, **changed})


@dataclass(frozen=True, slots=True)
class Domain:
    """The ranks of one arena, leader first."""

    scope: Scope
    node: int | None
    claims: tuple[Claim, ...]

    @property
    def leader(self) -> Claim:
        """Who creates and fills the arena."""
        return self.claims[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All members."""
        return tuple(claim.member.rank for claim in self.claims)

    @property
    def bound(self) -> bool:
        """Its pages are to be on `node` and nowhere else."""
        return self.scope.bound and self.node is not None

    @property
    def bound_node(self) -> int | None:
        """The node that pages must be on; None where there is no choice, or no binding."""
        return self.node if self.bound and len(self.leader.limits.nodes) > 1 else None

    @property
    def lent(self) -> bool:
        """A weight server has an arena for it, so none is to be filled."""
        offer = self.leader.offer
        return offer is not None and self.bound_node in offer.nodes

    def without_offer(self) -> Domain:
        """The same ranks, on their own."""
        return replace(self, claims=(replace(self.leader, offer=None), *self.claims[1:]))


def resolve_scope(claims: Iterable[Claim]) -> Scope:
    """The scope of a run: what was asked, with `auto` decided over all ranks alike."""
    claims = list(claims)
    asked = claims[0].scope
    if asked is not Scope.AUTO:
        return asked
    known = all(claim.node is not None for claim in claims)
    return Scope.NUMA if known else Scope.HOST


def form_domains(claims: Sequence[Claim]) -> list[Domain]:
    """All domains of a run, by leader."""
    scope = resolve_scope(claims)
    groups: defaultdict[tuple[object, ...], list[Claim]] = defaultdict(list)
    for claim in sorted(claims, key=lambda c: c.member.rank):
        member = claim.member
        key = member.rank if scope.private else claim.node if scope is Scope.NUMA else None
        groups[member.boot_id, member.ipc_namespace, key, claim.fingerprint].append(claim)
    return [Domain(scope, group[0].node, tuple(group)) for group in groups.values()]


def find_problems(domains: Sequence[Domain]) -> list[OffloadError]:
    """All that is known to go wrong before anything is created."""
    return [*_unknown_nodes(domains), *_not_lent(domains), *_too_little(domains)]


# The settings that ask for a bound scope, and what to do where it cannot be had.
_ASKED = {
    Scope.RANK_NUMA: (
        "cpu_offload_numa",
        "set cpu_offload_numa to false: the copy then goes where its reader runs",
    ),
    Scope.NUMA: (
        "shared_cpu_weight_scope numa",
        "set shared_cpu_weight_strict_numa false, or take scope host",
    ),
}


def _unknown_nodes(domains: Sequence[Domain]) -> Iterable[OffloadError]:
    for domain in domains:
        if domain.scope.bound and domain.node is None and domain.leader.strict:
            member = domain.leader.member
            asked, way_out = _ASKED[domain.scope]
            yield NumaError(
                f"{asked} needs the NUMA node of rank "
                f"{', '.join(map(str, domain.ranks))}, which is unknown "
                f"(device {member.pci_id or 'CPU'} on {member.hostname})",
                expected="a node in /sys/bus/pci/devices/<address>/numa_node, or CPUs of one node",
                hint=way_out,
                node=None,
                ranks=domain.ranks,
            )


def _not_lent(domains: Sequence[Domain]) -> Iterable[OffloadError]:
    refused = [d for d in domains if d.leader.offer and d.leader.offer.required and not d.lent]
    for why in dict.fromkeys(map(_why_not, refused)):
        yield ArenaError(
            f"weight_server is require, but {why}",
            hint="start `shared-offload serve-weights` with the same JSON, or set weight_server "
            "auto",
            key="weight_server",
        )


def _why_not(domain: Domain) -> str:
    offer = domain.leader.offer
    if offer is None or not offer.nodes:
        return offer.why_not if offer else ""
    held = " and ".join(
        "on no node in particular" if n is None else f"on node {n}" for n in offer.nodes
    )
    wanted = "without a node" if domain.bound_node is None else f"on node {domain.bound_node}"
    return f"the weight server holds these weights {held}, and they are wanted {wanted}"


def _too_little(domains: Sequence[Domain]) -> Iterable[OffloadError]:
    """Each limit against all the arenas that count towards it."""
    groups: defaultdict[tuple[Shortage, tuple[str, ...]], list[Domain]] = defaultdict(list)
    for domain in domains:
        if domain.lent:
            continue
        member, limits = domain.leader.member, domain.leader.limits
        groups[memory_shortages, (member.boot_id,)].append(domain)
        groups[ipc_shortages, (member.boot_id, member.ipc_namespace)].append(domain)
        # Its leader touches the pages, so the leader's cgroup pays for them.
        groups[cgroup_shortages, (member.boot_id, member.ipc_namespace, limits.cgroup)].append(
            domain
        )
    for (shortage, _), group in groups.items():
        demands = [
            Demand(segment_size(d.leader.nbytes), d.node if d.bound else None) for d in group
        ]
        leader = group[0].leader
        yield from shortage(leader.limits, demands, leader.member.hostname)


def separation_notes(domains: Sequence[Domain]) -> list[str]:
    """A line for each host whose ranks could share memory but for their IPC namespaces."""
    notes = []
    hosts: defaultdict[str, dict[str, list[int]]] = defaultdict(dict)
    for domain in domains:
        if not domain.scope.private:
            member = domain.leader.member
            hosts[member.boot_id].setdefault(member.ipc_namespace, []).extend(domain.ranks)
    for namespaces in hosts.values():
        if len(namespaces) > 1:
            groups = " | ".join(",".join(map(str, sorted(r))) for r in namespaces.values())
            notes.append(
                f"ranks {groups} of one host are in different IPC namespaces: each group loads a "
                "copy of its own (containers share one with docker run --ipc=host)"
            )
    return notes


def lender_notes(domains: Sequence[Domain]) -> list[str]:
    """A line for each reason why ranks load what a weight server might have lent them."""
    alone = [d for d in domains if d.leader.offer and not d.lent and not d.scope.private]
    reasons = filter(None, dict.fromkeys(map(_why_not, alone)))
    return [f"weights are loaded by this run: {why}" for why in reasons]
