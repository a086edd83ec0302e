"""What one rank knows of the others, through the store and /proc.

Keys, each written by one rank only but `failure` and `printer`, which the first to come sets:

    beat/<rank>   a counter and the stage, renewed by the watch thread of that rank
    left/<rank>   set when the rank finished its program
    failure       the first failure of the run
    printer       the rank that prints it
    acks          how many ranks have seen it
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from torch.distributed.distributed_c10d import Store

from shared_offload.ranks.facts import Member, RankFacts, alive
from shared_offload.ranks.failure import Failure, failure_from_json, of_lost

SILENCE_SECONDS = 12.0
"""Without a heartbeat for this long, a rank on another host counts as lost. Its watch thread beats
every half second whatever its main thread does."""


class Peers:
    """The other ranks of a run. Methods may raise RuntimeError: the store is gone then."""

    def __init__(self, store: Store, facts: RankFacts, me: Member) -> None:
        self._store = store
        self._facts = facts
        self._me = me
        self._members: dict[int, Member] = {me.rank: me}
        self._stages: dict[int, str] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        self._below: set[int] = set()
        self._count = 0
        store.set(f"member/{me.rank}", json.dumps(me.to_json()))

    def beat(self, stage: str) -> None:
        """Tell the others that this rank lives, and what it does."""
        self._count += 1
        self._store.set(f"beat/{self._me.rank}", json.dumps([self._count, stage]))

    def leave(self) -> None:
        """Tell the others that this rank has finished; its end is no loss."""
        self._store.set(f"left/{self._me.rank}", "1")

    def all_left(self) -> bool:
        """Every rank has finished."""
        return bool(self._store.check([f"left/{rank}" for rank in range(self._facts.world_size)]))

    def refresh(self) -> None:
        """Read who the others are and what they do."""
        world = range(self._facts.world_size)
        unknown = [rank for rank in world if rank not in self._members]
        for rank in unknown:
            if self._store.check([f"member/{rank}"]):
                self._members[rank] = Member(**json.loads(self._store.get(f"member/{rank}")))
        for rank in world:
            if rank != self._me.rank and self._store.check([f"beat/{rank}"]):
                count, stage = json.loads(self._store.get(f"beat/{rank}"))
                self._stages[rank] = stage
                if self._beats.get(rank, (0, 0.0))[0] != count:
                    self._beats[rank] = (count, time.monotonic())
        self._look_below()

    def meet(self, members: Iterable[Member]) -> None:
        """Take in who the others are, which they have told each other."""
        self._members |= {member.rank: member for member in members}
        self._look_below()

    def complete(self) -> bool:
        """All members are known."""
        return len(self._members) == self._facts.world_size

    def _look_below(self) -> None:
        below = [m for rank, m in self._members.items() if rank < self._me.rank]
        self._below = {m.rank for m in below if self._me.sees(m) and alive(m)}

    def published(self) -> Failure | None:
        """The run's failure, if there is one."""
        if not self._store.check(["failure"]):
            return None
        return failure_from_json(self._store.get("failure").decode())

    def publish(self, failure: Failure) -> Failure:
        """Make `failure` the run's failure, unless another came first; the one that stands."""
        return failure_from_json(self._store.compare_set("failure", "", failure.to_json()).decode())

    def lost(self) -> Failure | None:
        """A rank that is gone although it had not finished."""
        for rank, member in sorted(self._members.items()):
            if self._gone(member) and not self._store.check([f"left/{rank}"]):
                return self.loss_of(rank)
        return None

    def loss_of(self, rank: int) -> Failure:
        """The failure that the loss of `rank` is."""
        return of_lost(self._members[rank], self._facts.world_size, self._stages.get(rank, ""))

    def gone(self, rank: int) -> bool:
        """`rank` was known, and is gone."""
        return rank in self._members and self._gone(self._members[rank])

    def _gone(self, member: Member) -> bool:
        if self._me.sees(member):
            return not alive(member)
        _, last = self._beats.get(member.rank, (0, time.monotonic()))
        return time.monotonic() - last > SILENCE_SECONDS

    def first_alive(self) -> bool:
        """No rank below this one is alive, as far as this rank can tell."""
        return all(self.gone(rank) for rank in range(self._me.rank))

    def lowest_here(self, without: int) -> bool:
        """When last looked at, no rank below this one was alive here but `without`. Needs no store.

        By now a rank below may have ended for the same reason, after printing it.
        """
        return not self._below - {without}

    def others_gone(self) -> bool:
        """No other rank that is seen here is alive."""
        others = [m for rank, m in self._members.items() if rank != self._me.rank]
        return not any(self._me.sees(member) and alive(member) for member in others)

    def printed(self) -> bool:
        """Some rank has taken on printing the failure."""
        return bool(self._store.check(["printer"]))

    def claim_printing(self) -> bool:
        """This rank is the one that prints the failure; true for one rank only."""
        mine = str(self._me.rank)
        return bool(self._store.compare_set("printer", "", mine) == mine.encode())

    def acknowledge(self) -> None:
        """Tell the others that this rank has seen the failure."""
        self._store.add("acks", 1)

    def all_acknowledged(self) -> bool:
        """Every rank that is not gone has seen the failure."""
        gone = sum(self.gone(rank) for rank in range(self._facts.world_size))
        return bool(self._store.add("acks", 0) >= self._facts.world_size - gone)
