"""Taking an arena that someone else holds already (a weight server), instead of filling one.

`take` is the twin of `leader.lead`: both end with a sealed ticket and a mapping that holds its
segment. Who lends, and how one talks to it, is behind `Lender`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from shared_offload.errors import ArenaError
from shared_offload.memory.arena import Mapping, Ticket, attach
from shared_offload.memory.domain import Domain, Offer
from shared_offload.memory.leader import state_key, verify
from shared_offload.memory.request import ArenaRequest, Observer
from shared_offload.memory.summary import Filling
from shared_offload.memory.vigil import Vigil
from shared_offload.ranks.facts import Member


class Loan(NamedTuple):
    """A sealed arena of someone else."""

    ticket: Ticket
    filling: Filling
    lender: str
    """For people."""


class Lender(Protocol):
    """Someone who may hold the arena."""

    def offer(self, me: Member) -> Offer | None:
        """What it has for a process with these facts; None when nobody is there to ask."""
        ...

    def borrow(self, node: int | None, tick: Callable[[int], None]) -> AbstractContextManager[Loan]:
        """The arena bound to `node`, sealed, held by the lender inside the `with`.

        While it is being filled, `tick` is called several times a second with the bytes that are
        there; what it raises ends the waiting. OffloadError when nothing comes of it.
        """
        ...


def take(
    lender: Lender, request: ArenaRequest, domain: Domain, vigil: Vigil, observer: Observer
) -> tuple[Ticket, Mapping]:
    """A sealed arena of the lender and a read-only mapping, which holds it until released.

    Raises OffloadError, with nothing held, when it cannot be had, or is not what was asked for.
    """
    key, published = state_key(domain), -1

    def tick(done: int) -> None:
        nonlocal published
        observer.progress("wait", done, request.nbytes)
        if done != published:
            published = done
            vigil.publish(key, {"state": "waiting", "done": done})
        vigil.check()

    with lender.borrow(domain.bound_node, tick) as loan:
        found = (loan.ticket.nbytes, loan.ticket.fingerprint)
        if found != (request.nbytes, request.fingerprint):
            raise ArenaError(
                f"the weight server answered with an arena of {loan.ticket.nbytes} bytes",
                expected=f"the one that was asked for, of {request.nbytes}",
            )
        verify(loan.filling, domain, observer)
        mapping = attach(loan.ticket, read_only=True)
    sealed = {
        "state": "sealed",
        "ticket": loan.ticket.to_json(),
        "filling": loan.filling.to_json(),
        "lender": loan.lender,
    }
    try:
        vigil.publish(key, sealed)
    except BaseException:
        mapping.release()
        raise
    return loan.ticket, mapping
