"""What became of each arena: the figures that ranks exchange and people read. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from shared_offload.memory.domain import Domain
from shared_offload.memory.numa import Placement


@dataclass(frozen=True, slots=True)
class Filling:
    """What the leader measured."""

    seconds: float
    placement: Placement | None
    """Of all pages, after filling; None where the kernel does not tell."""

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON types."""
        return asdict(self)


def filling_from_json(raw: dict[str, Any]) -> Filling:
    """The filling that `to_json` wrote, also when JSON has turned its integer keys into text."""
    found = raw["placement"]
    if found is None:
        return Filling(raw["seconds"], None)
    by_node = {int(node): nbytes for node, nbytes in found["node_nbytes"].items()}
    return Filling(raw["seconds"], Placement(by_node, found["huge_nbytes"]))


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank did to attach."""

    rank: int
    registered: str
    """How: "read-only flag", "registered, then protected", "not registered"."""
    register_seconds: float

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON types."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaReport:
    """One arena of a run."""

    hostname: str
    scope: str
    node: int | None
    nbytes: int
    node_nbytes: dict[int, int] | None
    """Where its pages are; None where the kernel does not tell."""
    huge_nbytes: int
    """Of them in 2 MiB pages."""
    ranks: tuple[int, ...]
    fill_seconds: float
    registered: str
    register_seconds: float
    """Of the slowest rank."""
    saved_nbytes: int
    """Host memory that copies of its own for each rank would have taken beyond this."""
    lender: str = ""
    """Who filled it, when it was not this run."""

    @property
    def fill_gb_per_second(self) -> float:
        """Content over the time it took to fill."""
        return self.nbytes / self.fill_seconds / 1e9 if self.fill_seconds else 0.0

    def row(self) -> dict[str, Any]:
        """Plain values by name, for whoever draws a table."""
        return {**asdict(self), "fill_gb_per_second": self.fill_gb_per_second}


def combine(domain: Domain, state: dict[str, Any], ranks: Iterable[dict[str, Any]]) -> ArenaReport:
    """The report of one arena from the sealed state and what its ranks published."""
    filled = filling_from_json(state["filling"])
    members = [RankReport(**raw) for raw in ranks]
    leader = domain.leader
    placement = filled.placement
    return ArenaReport(
        hostname=leader.member.hostname,
        scope=str(domain.scope),
        node=domain.node if domain.scope.bound else None,
        nbytes=leader.nbytes,
        node_nbytes=placement.node_nbytes if placement else None,
        huge_nbytes=placement.huge_nbytes if placement else 0,
        ranks=domain.ranks,
        fill_seconds=filled.seconds,
        registered=" / ".join(sorted({member.registered for member in members})),
        register_seconds=max(member.register_seconds for member in members),
        saved_nbytes=leader.nbytes * (len(domain.ranks) - 1),
        lender=state.get("lender", ""),
    )
