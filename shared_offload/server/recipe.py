"""What a weight server is asked to hold: where it comes from, how it is filled, in which places.

A server knows nothing of checkpoints: an `Order` is what a peer sends, and whoever starts the
server says how an order becomes a `Recipe`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from shared_offload.memory import numa
from shared_offload.memory.domain import Claim, Domain, Scope, form_domains
from shared_offload.memory.limits import read_limits
from shared_offload.memory.request import ArenaRequest, Fill
from shared_offload.ranks.facts import member_facts

Order = dict[str, Any]
"""JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The content of arenas."""

    path: str
    """Of the checkpoint, for people."""
    request: ArenaRequest
    fill: Fill
    unchanged: Callable[[], bool]
    """The files are still those of the request's fingerprint."""


Opener = Callable[[Order], Recipe]
"""Called in a thread; raises OffloadError for an order that cannot be met."""


def serving_nodes() -> tuple[int, ...]:
    """Nodes that have memory and CPUs for this process."""
    return tuple(node for node in sorted(numa.allowed_nodes()) if numa.usable_cpus(node))


def plan(request: ArenaRequest, nodes: Collection[int]) -> list[Domain]:
    """A domain for each arena to be: one on each of `nodes`, or one for the host.

    Scope `auto`: for each node where there are several.
    """
    scope = request.scope
    if scope is Scope.AUTO:
        scope = Scope.NUMA if len(numa.memory_nodes()) > 1 else Scope.HOST
    homes = sorted(nodes) if scope is Scope.NUMA else [numa.own_node()]
    me, limits = member_facts(0), read_limits()
    return form_domains(
        [
            Claim(
                member=dataclasses.replace(me, rank=rank),
                node=node,
                scope=scope,
                strict=request.strict_numa,
                fingerprint=request.fingerprint,
                nbytes=request.nbytes,
                limits=limits,
            )
            for rank, node in enumerate(homes)
        ]
    )
