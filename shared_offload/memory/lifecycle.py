"""Opening an arena: who creates, who fills, who attaches, in which order, and how it closes.

The steps, on every rank alike but where it says leader:

    1. claim     publish what this rank asks for, read what the others do
    2. agree     form the domains, refuse what cannot fit; the same verdict on every rank
    3. obtain    leader: create, place, fill, seal (leader.py), or take what a weight server holds
                 (lending.py); the others wait, with its progress
    4. attach    read-only, the leader too: its writable mapping ends with the filling
    5. pin       register with CUDA
    6. meet      leader: hold on until all of its domain have attached

A failure anywhere is published first and becomes the failure of all. What a failed rank holds is
released before its error leaves `open_arena`. Torch-free.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from contextlib import suppress

from shared_offload.errors import ArenaError, OffloadError, PinningError, raise_all
from shared_offload.memory.arena import Mapping, Ticket, attach, find_segment
from shared_offload.memory.board import Note
from shared_offload.memory.domain import (
    Claim,
    Domain,
    claim_from_json,
    find_problems,
    form_domains,
    lender_notes,
    separation_notes,
)
from shared_offload.memory.leader import Meter, lead, state_key
from shared_offload.memory.lending import Lender, take
from shared_offload.memory.limits import read_limits
from shared_offload.memory.pinning import Pins, Registrar, chunk_spans, pin
from shared_offload.memory.request import SILENT, ArenaRequest, Fill, Observer, Party
from shared_offload.memory.summary import ArenaReport, RankReport, combine
from shared_offload.memory.vigil import Vigil

OPEN = "open"


def open_arena(
    request: ArenaRequest,
    party: Party,
    fill: Fill,
    registrar: Registrar | None = None,
    observer: Observer = SILENT,
    lender: Lender | None = None,
) -> HostArena:
    """Collective. This rank's attachment to the one arena of its domain, sealed and registered.

    Only a leader calls `fill`, and not when `lender` has the arena (asked for shared scopes only).
    Without a registrar nothing is registered. Peak memory: the arena.
    Raises the first error of any rank, on every rank, within seconds.
    """
    opening = _Opening(request, party, fill, registrar, observer, lender)
    try:
        return opening.run()
    except BaseException as error:
        opening.meet()
        failure = opening.vigil.fail(error)
        opening.release()
        if isinstance(error, OffloadError) and failure.to_json() != error.to_json():
            raise failure from error
        raise


def _claim_key(rank: int) -> str:
    return f"claim/{rank}"


class _Opening:
    """One call of `open_arena`."""

    def __init__(
        self,
        request: ArenaRequest,
        party: Party,
        fill: Fill,
        registrar: Registrar | None,
        observer: Observer,
        lender: Lender | None,
    ) -> None:
        self._lender = None if request.scope.private else lender
        self._request = request
        self._party = party
        self._fill = fill
        self._registrar = registrar
        self._observer = observer
        self.vigil = Vigil(party.board, party.me, request.name)
        self._met = False
        self._obtained: Mapping | None = None
        self._mapping: Mapping | None = None
        self._pins: Pins | None = None

    def run(self) -> HostArena:
        domains = self._agree()
        me = self._party.me.rank
        domain = next(d for d in domains if me in d.ranks)
        if domain.leader.member.rank == me:
            ticket, self._obtained = self._obtain(domain)
            waits_for = domain.ranks
        else:
            ticket, waits_for = self._follow(domain), ()
        mapping = self._attach_and_pin(ticket, domain)
        self.vigil.publish(f"{OPEN}/{me}", self._rank_report().to_json())
        for rank in waits_for:
            self.vigil.wait(f"{OPEN}/{rank}")
        return HostArena(ticket, domains, domain, mapping, self._pins, self.vigil)

    def meet(self) -> None:
        """Know whoever has claimed by now, if not yet all: one of them speaks for this rank.

        For a rank that ends before it has read the claims of the others.
        """
        if self._met:
            return
        with suppress(OffloadError):  # the board may have gone
            found = map(self.vigil.read, map(_claim_key, range(self._party.world_size)))
            self.vigil.watch(claim_from_json(note).member for note in found if note)

    def release(self) -> None:
        """Give back all that a failed opening holds."""
        try:
            if self._pins is not None:
                self._pins.undo()
        finally:
            self._drop_obtained()
            if self._mapping is not None:
                self._mapping.release()

    def _drop_obtained(self) -> None:
        if self._obtained is not None:
            self._obtained.release()
            self._obtained = None

    def _agree(self) -> list[Domain]:
        request, party, vigil = self._request, self._party, self.vigil
        mine = Claim(
            member=party.me,
            node=party.node,
            scope=request.scope,
            strict=request.strict_numa,
            fingerprint=request.fingerprint,
            nbytes=request.nbytes,
            limits=read_limits(),
            offer=self._lender.offer(party.me) if self._lender else None,
        )
        vigil.publish(_claim_key(party.me.rank), mine.to_json())
        notes = (vigil.wait(_claim_key(rank)) for rank in range(party.world_size))
        claims = [claim_from_json(note) for note in notes]
        vigil.watch(claim.member for claim in claims)
        self._met = True
        domains = form_domains(claims)
        raise_all(find_problems(domains))
        if party.me.rank == 0:
            for line in (*separation_notes(domains), *lender_notes(domains)):
                self._observer.note(line)
        return domains

    # -- the leader --------------------------------------------------------------------------------

    def _obtain(self, domain: Domain) -> tuple[Ticket, Mapping]:
        """A sealed arena, and a mapping that holds it: the lender's, else one filled here."""
        if self._lender is not None and domain.lent:
            try:
                return take(self._lender, self._request, domain, self.vigil, self._observer)
            except OffloadError as error:
                self.vigil.check()  # it may be the run that failed
                if domain.leader.offer is not None and domain.leader.offer.required:
                    raise
                self._observer.note(f"weights are loaded by this run after all: {error.what}")
            domain = domain.without_offer()
            raise_all(find_problems([domain]))
        return lead(self._request, domain, self.vigil, self._fill, self._observer)

    # -- the followers -----------------------------------------------------------------------------

    def _follow(self, domain: Domain) -> Ticket:
        """Wait until the leader has sealed, showing its progress."""

        def ready(note: Note) -> bool:
            if note["state"] == "sealed":
                return True
            self._observer.progress("wait", note.get("done", 0), self._request.nbytes)
            if "ticket" in note:
                self._expect_held(note["ticket"]["segment_id"], domain)
            return False

        return Ticket(**self.vigil.wait(state_key(domain), ready)["ticket"])

    def _expect_held(self, segment_id: int, domain: Domain) -> None:
        """A segment that is gone was held by its leader alone, and the leader is no more."""
        if find_segment(segment_id) is None:
            self.vigil.check()  # the leader may have said why
            self.vigil.give_up(domain.leader.member)

    # -- all ---------------------------------------------------------------------------------------

    def _attach_and_pin(self, ticket: Ticket, domain: Domain) -> Mapping:
        """Attach read-only and register as such; where CUDA cannot, register, then protect."""
        registrar = self._registrar
        read_only = registrar is None or registrar.read_only_supported
        mapping = self._attach(ticket, domain, read_only=read_only)
        self._drop_obtained()  # before registration maps every page a second time
        if registrar is None:
            return mapping
        if read_only:
            try:
                self._pins = self._pin(mapping, registrar, read_only=True)
                return mapping
            except PinningError as error:
                self._observer.note(f"{error.what}; trying a writable mapping, protected later")
            refused, mapping = mapping, self._attach(ticket, domain, read_only=False)
            refused.release()  # only now: it may be what holds the segment
        self._pins = self._pin(mapping, registrar, read_only=False)
        mapping.protect()
        return mapping

    def _attach(self, ticket: Ticket, domain: Domain, *, read_only: bool) -> Mapping:
        try:
            self._mapping = attach(ticket, read_only=read_only)
        except ArenaError:
            self._expect_held(ticket.segment_id, domain)
            raise
        self._mapping.prefer_huge_pages()
        return self._mapping

    def _pin(self, mapping: Mapping, registrar: Registrar, *, read_only: bool) -> Pins:
        request = self._request
        spans = list(chunk_spans(request.nbytes, request.boundaries, request.register_chunk_nbytes))
        total = sum(nbytes for _, nbytes in spans)
        meter = Meter(lambda done: self._observer.progress("register", done, total))

        def registered(chunk_nbytes: int) -> None:
            meter.add(chunk_nbytes)
            self.vigil.check()

        return pin(mapping.address, spans, registrar, read_only=read_only, on_bytes=registered)

    def _rank_report(self) -> RankReport:
        if self._pins is None:
            return RankReport(self._party.me.rank, "not registered", 0.0)
        way = "read-only flag" if self._pins.read_only_flag else "registered, then protected"
        return RankReport(self._party.me.rank, way, self._pins.seconds)


class HostArena:
    """An open arena: sealed, attached read-only, registered. Made by `open_arena`.

    `buffer` may be wrapped in tensors; they keep the memory mapped, but not registered: copies to a
    device must have ended before `close`. Closes itself at exit.
    """

    def __init__(
        self,
        ticket: Ticket,
        domains: Sequence[Domain],
        domain: Domain,
        mapping: Mapping,
        pins: Pins | None,
        vigil: Vigil,
    ) -> None:
        self.ticket = ticket
        self.domain = domain
        self._domains = domains
        self._mapping = mapping
        self._pins = pins
        self._vigil = vigil
        atexit.register(self.close)

    @property
    def buffer(self) -> memoryview:
        """The content, page-aligned. A write is a SIGSEGV, whatever the view's flags say."""
        return self._mapping.view()

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self._mapping.address

    @property
    def registered(self) -> bool:
        """CUDA copies from it at full speed and asynchronously."""
        return self._pins is not None and self._pins.nbytes > 0

    def check(self) -> None:
        """Raise the error of any rank that failed, or is gone, since the arena was opened.

        For programs without a watch of their own; costs a look at the board and at /proc.
        """
        self._vigil.check()

    def reports(self) -> list[ArenaReport]:
        """What became of every arena of the run. Waits for the slowest rank to open its own."""
        reports = []
        for domain in self._domains:
            state = self._vigil.wait(state_key(domain), lambda n: bool(n["state"] == "sealed"))
            ranks = [self._vigil.wait(f"{OPEN}/{rank}") for rank in domain.ranks]
            reports.append(combine(domain, state, ranks))
        return reports

    def close(self) -> None:
        """Unregister, drop the view, detach: once, in this order, whatever of it fails."""
        atexit.unregister(self.close)
        pins, self._pins = self._pins, None
        try:
            if pins is not None:
                pins.undo()
        finally:
            self._mapping.release()
            self._vigil.leave()

    def __enter__(self) -> HostArena:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._vigil.fail(error)  # before close() says that this rank may go
        self.close()
