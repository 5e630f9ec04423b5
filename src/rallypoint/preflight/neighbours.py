"""Measuring the ways between this node and a few others of its job, for the check `network`; `preflight.links` says what follows.

It takes a store, in which nodes find each other, and it takes place beside everything else: whoever asks gives up after
`EXAMINE_S`, and what could not be measured by then is not known. The store is asked over connections of their own, three times at
most; the agent's own session there is not touched.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from rallypoint.base import report
from rallypoint.checkpoint.transfer import TransferError
from rallypoint.coordination.engine import Coordination, CoordinationError
from rallypoint.coordination.model import Compare, Delete, Get, Item, Outcome, Put, Transaction
from rallypoint.preflight import links, rules
from rallypoint.preflight.links import SLOTS, Break, Card, Link
from rallypoint.preflight.partner import Partner, pass_on
from rallypoint.preflight.probe import ANSWER_S, Bulk, Probe
from rallypoint.preflight.rules import Finding
from rallypoint.protocol import job_records as job

__all__ = ["Neighbours"]

EXAMINE_S = 25.0  # as a whole
MEASURE_S = 10.0  # after that no other way is measured
STORE_S = 5.0
PLACE_S = 1.0  # between two looks whether this agent still wants to know
TRIPS = 3
_TRIES = 4  # at a slot that somebody else takes at the same moment
_BUSY_S = 0.05
_CHANCES = 1 << 16


class Neighbours:
    """Of one agent. `whereabouts` waits so many seconds for the id of our record, our name, and the address at which the others
    reach us; `connect` gives a connection to the job's store. `look_again` is called, from any thread, when there is somebody new
    and too few had been there to measure with.
    """

    def __init__(
        self,
        whereabouts: Callable[[float], tuple[str, str, str] | None],
        connect: Callable[[], Coordination | None],
        look_again: Callable[[], None] = lambda: None,
    ) -> None:
        self._whereabouts = whereabouts
        self._connect = connect
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._partner: Partner | None = None
        self._look_again = look_again
        self._calls: set[Probe] = set()
        self._is_decided = True
        self._known: set[str] = set()  # keys of those with whom it is measured, or was

    def examine(self, least: int) -> list[Finding]:
        """What there is to say of the network, once this node has a place; nothing when it is closed before."""
        place = None
        while place is None and not self._closing.is_set():
            place = self._whereabouts(PLACE_S)
        if place is None:
            return []
        found: list[Finding] = []
        thread = threading.Thread(target=self._work, args=(place, least, found), name="rallypoint-network", daemon=True)
        thread.start()
        thread.join(EXAMINE_S)
        return list(found) or [Finding(rules.NETWORK, "unknown", f"it could not be measured within {EXAMINE_S:g} s")]

    def close(self) -> None:
        """Whatever is being measured ends."""
        self._closing.set()
        with self._lock:
            partner, self._partner = self._partner, None
            for call in self._calls:
                call.abort()
        if partner is not None:
            partner.close()

    # --- one examination ---------------------------------------------------------------------------------------------------

    def _work(self, place: tuple[str, str, str], least: int, found: list[Finding]) -> None:
        try:
            found += self._examine(place, least)
        except (CoordinationError, TransferError, OSError, ValueError) as error:
            found.append(Finding(rules.NETWORK, "unknown", f"it could not be measured: {error}"))

    def _examine(self, place: tuple[str, str, str], least: int) -> list[Finding]:
        node_id, name, address = place
        partner = self._open_partner(address)
        own = Card(node_id, name, partner.host, partner.port, partner.key)
        since, others = self._announce(own)
        self._known, self._is_decided = {card.key for card, _ in others}, False
        seen = self._measure_some(partner, own, since, others, least)
        self._known, self._is_decided = {one.card.key for one in seen}, links.is_decided(seen)
        broken, ring = None, [one.card for one in seen if one not in links.bad_ones(seen, least)]
        if ring:
            broken = self._go_round(own, ring)
        names = [own.name, *(one.name for one in ring)]
        findings = [links.judge_ring(names, broken)] if ring else []
        if broken is not None and broken.place in (1, len(names)):  # it is a way of ours: that counts like any other
            card, findings = ring[0 if broken.place == 1 else -1], []
            seen = [one.replace(error=f"all-reduce: {broken.what}") if one.card == card else one for one in seen]
        self._tell([] if links.is_out(seen, least) else links.bad_ones(seen, least), own)
        clocks = links.judge_clocks(seen)
        return [links.judge_links(seen, least), *findings, *([clocks] if clocks else [])]

    def _open_partner(self, host: str) -> Partner:
        """Who is there for others, at the address that holds now."""
        with self._lock:
            partner = self._partner
            if self._closing.is_set():
                raise TransferError("this agent ends")
            if partner is None or partner.host != host:
                self._partner = Partner(host, self._hear_call)
                if partner is not None:
                    partner.close()
            assert self._partner is not None
            return self._partner

    def _hear_call(self, card: Card) -> None:
        if not self._is_decided and card.key not in self._known:
            self._known.add(card.key)
            self._look_again()

    # --- cards in the store ------------------------------------------------------------------------------------------------

    @contextmanager
    def _store(self) -> Iterator[Callable[[Transaction], Outcome]]:
        engine = self._connect()
        if engine is None:
            raise TransferError("there is no store")
        with closing(engine):
            yield lambda transaction: engine.transact(transaction, time.monotonic() + STORE_S)

    def _announce(self, own: Card) -> tuple[int, list[tuple[Card, Item]]]:
        """Leave our card; since which revision it is there, and those of others, in any order."""
        value = links.encode_card(own)
        with self._store() as transact:
            for tries in range(_TRIES):
                found = transact(Transaction((), tuple(Get(job.card_key(slot)) for slot in range(SLOTS)))).items
                slot = links.choose_slot(found, own.key, int.from_bytes(os.urandom(2), "big") / _CHANCES)
                there = found[slot]
                if there is not None and there.value == value:
                    return there.mod_revision, _others(found, own)
                same = Compare(job.card_key(slot), "mod", there.mod_revision if there is not None else 0)
                compares = (same,) if tries < _TRIES - 1 else ()
                put = transact(Transaction(compares, (Put(job.card_key(slot), value),)))
                if put.succeeded:
                    return put.revision, _others(found, own)
        raise AssertionError("a transaction that compares nothing succeeds")

    def _is_there(self, card: Card, item: Item) -> bool:
        """Whether a node that cannot be reached still is one; the card of one that has gone is taken away."""
        with self._store() as transact:
            (record,) = transact(Transaction((), (Get(job.node_key(card.id)),))).items
            if record is None:
                transact(Transaction((Compare(item.key, "mod", item.mod_revision),), (Delete(item.key),)))
            return record is not None

    def _tell(self, doubted: list[Link], own: Card) -> None:
        """Those at the other end of a bad way that they are to look at themselves."""
        if not doubted:
            return
        with self._store() as transact:
            for link in doubted:
                report.debug(f"preflight: {link.card.name} is asked to look at itself")
                transact(Transaction((), (Put(job.ASKED, job.encode(job.Asked("recheck", link.card.id, own.name))),)))

    # --- ways --------------------------------------------------------------------------------------------------------------

    def _measure_some(self, partner: Partner, own: Card, since: int, others: list[tuple[Card, Item]], least: int) -> list[Link]:
        seen: list[Link] = []
        ends_at = time.monotonic() + MEASURE_S
        for card, item in others:
            if not links.wants_more(seen, least) or time.monotonic() >= ends_at or self._closing.is_set():
                break
            link = self._measure(partner, own, card, ends_at)
            if link is not None and not (link.error and not self._is_there(card, item)):
                seen.append(link.replace(was_first=item.mod_revision < since))
        return seen

    def _measure(self, partner: Partner, own: Card, card: Card, ends_at: float) -> Link | None:
        """The way to that node and back; None: it was busy all the time."""
        link = Link(card)
        try:
            link = self._meet(own, link)
            for word in ("take", "give"):
                bulk = None
                while bulk is None:
                    if time.monotonic() >= ends_at or self._closing.is_set():
                        return None
                    bulk = self._move(partner, card, word)
                    if bulk is None:
                        self._closing.wait(_BUSY_S * (1 + os.urandom(1)[0] / 64))
                if bulk.trouble:
                    return link.replace(error=bulk.trouble)
                link = link.replace(there=bulk.rate) if word == "take" else link.replace(back=bulk.rate)
        except TransferError as error:
            return link.replace(error=str(error))
        return link

    @contextmanager
    def _call(self, card: Card) -> Iterator[Probe]:
        probe = Probe.to(card.host, card.port, card.key)
        with self._lock:
            self._calls.add(probe)
            if self._closing.is_set():
                probe.abort()
        try:
            yield probe
        finally:
            with self._lock:
                self._calls.discard(probe)
            probe.drop()

    def _meet(self, own: Card, link: Link) -> Link:
        """The round trip and the clocks, by the quickest of several questions: it was answered within that time."""
        with self._call(link.card) as probe:
            probe.wait_up_to(3 * ANSWER_S)  # it calls us meanwhile
            probe.say("meet", own.__dict__)
            match probe.hear():
                case ["met", str(why)]:
                    if why:
                        return link.replace(error=f"it cannot reach this node: {why[:200]}")
                case _:
                    raise TransferError("it says what cannot be understood")
            found = []
            for _ in range(TRIPS):
                asked_ns = time.time_ns()
                probe.say("time")
                match probe.hear():
                    case ["time", int(theirs_ns)]:
                        heard_ns = time.time_ns()
                    case _:
                        raise TransferError("it says what cannot be understood")
                found.append((heard_ns - asked_ns, (asked_ns + heard_ns) / 2 - theirs_ns))
        took_ns, off_ns = min(found)
        return link.replace(trip_s=took_ns / 1e9, off_s=off_ns / 1e9, within_s=took_ns / 2e9)

    def _move(self, partner: Partner, card: Card, word: str) -> Bulk | None:
        """Bulk to them, or from them; None: they, or we, are busy with another."""
        if not partner.floor.acquire(timeout=_BUSY_S):
            return None
        try:
            with self._call(card) as probe:
                probe.say(word)
                if probe.hear() != ["go"]:
                    return None
                if word == "give":
                    return probe.drain()
                probe.pour()
                match probe.hear():
                    case ["took", int() | float() as rate, int(moved), bool(is_right)]:
                        return Bulk(float(rate), moved, is_right)
                raise TransferError("it says what cannot be understood")
        finally:
            partner.floor.release()

    def _go_round(self, own: Card, ring: list[Card]) -> Break | None:
        seed = int.from_bytes(os.urandom(4), "big")
        result = pass_on(links.numbers_of(seed, 0), seed, 1, len(ring) + 1, [*ring, own])
        return result if isinstance(result, Break) else None


def _others(found: tuple[Item | None, ...], own: Card) -> list[tuple[Card, Item]]:
    """The cards that can be read, in any order."""
    cards = []
    for item in found:
        if item is None:
            continue
        try:
            card = links.decode_card(item.value)
        except ValueError:  # somebody's of another version
            continue
        if card.key != own.key:
            cards.append((card, item))
    return sorted(cards, key=lambda _: os.urandom(4))
