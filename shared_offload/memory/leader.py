"""The leader's part: create, place, fill, verify, seal.

Bind, then touch, then verify. Each state is published as it is reached, so that others can show the
progress, and a look at the board never has to be an answer from a busy leader. Torch-free.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shared_offload.errors import ArenaError, NumaError
from shared_offload.memory import numa
from shared_offload.memory.arena import Mapping, Ticket, create, seal
from shared_offload.memory.domain import Domain
from shared_offload.memory.limits import gib
from shared_offload.memory.request import ArenaRequest, Fill, Observer
from shared_offload.memory.summary import Filling
from shared_offload.memory.vigil import Vigil


class Meter:
    """Counts bytes that several threads report."""

    def __init__(self, show: Callable[[int], None]) -> None:
        self.done = 0
        self._show = show
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count, and show the sum."""
        with self._lock:
            self.done += nbytes
            self._show(self.done)


def state_key(domain: Domain) -> str:
    """Where the state of a domain's arena is published."""
    return f"state/{domain.leader.member.rank}"


def lead(
    request: ArenaRequest, domain: Domain, vigil: Vigil, fill: Fill, observer: Observer
) -> tuple[Ticket, Mapping]:
    """A sealed arena and the leader's writable mapping of it, which holds it until released.

    On an error nothing is left.
    """
    ticket, mapping = create(request.nbytes, request.fingerprint)
    key = state_key(domain)
    try:
        vigil.publish(key, {"state": "created", "ticket": ticket.to_json()})
        _place(mapping, domain, observer)
        seconds = _fill(mapping, ticket, domain, vigil, fill, observer)
        seal(mapping, ticket)
        filling = Filling(seconds, numa.placement(mapping.address, mapping.size))
        verify(filling, domain, observer)
    except BaseException as error:
        vigil.fail(error)  # before the segment goes: followers look for a reason when it has gone
        mapping.release()
        raise
    sealed = {"state": "sealed", "ticket": ticket.to_json(), "filling": filling.to_json()}
    vigil.publish(key, sealed)
    return ticket, mapping


def _place(mapping: Mapping, domain: Domain, observer: Observer) -> None:
    """The policy, before the first touch; then huge pages, which the policy then covers."""
    if domain.scope.bound and domain.node is None:
        ranks = ", ".join(map(str, domain.ranks))
        observer.note(f"NUMA node of rank {ranks} unknown: the arena is not bound to a node")
    if domain.node is not None and len(numa.memory_nodes()) > 1:
        policy = numa.Policy.BIND if domain.bound else numa.Policy.PREFERRED
        try:
            numa.set_policy(mapping.address, mapping.size, domain.node, policy)
        except NumaError as error:
            if domain.bound and domain.leader.strict:
                raise
            if domain.bound:
                observer.note(f"{error.what}; pages go where they are first touched")
    mapping.prefer_huge_pages()


def _fill(
    mapping: Mapping,
    ticket: Ticket,
    domain: Domain,
    vigil: Vigil,
    fill: Fill,
    observer: Observer,
) -> float:
    """Seconds it took. Progress is published from the vigil's thread, not from the fillers."""
    total = ticket.nbytes
    meter = Meter(lambda done: observer.progress("fill", done, total))
    published = 0

    def tick() -> None:
        nonlocal published
        if meter.done != published:
            published = meter.done
            note = {"state": "filling", "ticket": ticket.to_json(), "done": published}
            vigil.publish(state_key(domain), note)

    begun = time.monotonic()
    with vigil.guard(tick) as stop:
        try:
            fill(mapping.view(), meter.add, numa.usable_cpus(domain.node), stop)
        except (OSError, MemoryError) as error:
            raise ArenaError(
                f"filling {gib(total)} failed after {gib(meter.done)}: "
                f"{error or type(error).__name__}",
                hint="memory: look at the cgroup's limit; files: look at dmesg",
                nbytes=total,
                done=meter.done,
            ) from error
    return time.monotonic() - begun


def verify(filling: Filling, domain: Domain, observer: Observer) -> None:
    """Pages are where the policy says; strict: or it is an error."""
    node, placement = domain.bound_node, filling.placement
    if node is None:
        return
    misplaced = placement.outside(node) if placement else 0
    if placement is None:
        problem = "the kernel does not tell where they are (no /proc/self/numa_maps)"
    elif misplaced:
        problem = f"{gib(misplaced)} of {gib(placement.nbytes)} are elsewhere"
    else:
        return
    if domain.leader.strict:
        raise NumaError(
            f"pages must be on NUMA node {node}, but {problem}",
            expected=f"every page on node {node}",
            hint="set shared_cpu_weight_strict_numa false to go on regardless",
            node=node,
            misplaced=misplaced,
        )
    observer.note(f"pages should be on NUMA node {node}; {problem}")
