"""A keyspace as a document: what is written is read again, what is not ours is refused, and who is silent is found out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.coordination.cell.document import (
    DOCUMENT_BYTES,
    HISTORY_EVENTS,
    LONGEST_GAP_S,
    CellDocument,
    DocumentTooLarge,
    NotOurDocument,
    Pulse,
    Sightings,
    decode,
    encode,
)
from rallypoint.coordination.keyspace import Compacted, Keyspace, UnknownLease
from rallypoint.coordination.model import Compare, Delete, Event, Get, Operation, Put, Transaction

KEYS = st.sampled_from(["a", "a/b", "b", "é/🚀"])
VALUES = st.one_of(st.binary(max_size=8), st.sampled_from([b"text", b"\xff\0", "日本".encode()]))
COMPARES = st.builds(Compare, KEYS, st.sampled_from(["create", "mod"]), st.integers(0, 6))
JUNK = st.one_of(st.none(), st.booleans(), st.integers(-2, 3), st.floats(), st.text(max_size=2), st.lists(st.integers()))
TTL_S = 3.0


def operations(leases: list[int]) -> st.SearchStrategy[list[Operation]]:
    put = st.builds(Put, KEYS, VALUES, st.sampled_from([0, *leases]))
    return st.lists(st.one_of(put, st.builds(Delete, KEYS, st.booleans()), st.builds(Get, KEYS)), max_size=4)


def again(document: CellDocument) -> CellDocument:
    """The document as the next one finds it."""
    return decode(encode(document, "somebody"))


def done(keyspace: Keyspace, transaction: Transaction) -> object:
    try:
        return keyspace.transact(transaction)
    except ValueError as error:  # a key that is changed twice, or a lease that has ended
        return type(error), str(error)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_document_means_what_a_keyspace_means(data: st.DataObject) -> None:
    """Whatever is done, with the document written and read between any two steps."""
    keyspace, document = Keyspace(), CellDocument("id")
    leases: list[int] = []
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(["grant", "revoke", "transact", "transact", "transact"])):
            case "grant":
                leases.append(keyspace.grant(TTL_S, 0.0))
                assert document.grant(TTL_S) == leases[-1]
            case "revoke" if leases:
                lease = data.draw(st.sampled_from(leases))
                keyspace.revoke(lease)
                document.revoke(lease)
            case _:
                compares = data.draw(st.lists(COMPARES, max_size=1))
                then, otherwise = data.draw(operations(leases)), data.draw(operations(leases))
                transaction = Transaction(tuple(compares), tuple(then), tuple(otherwise))
                assert done(document, transaction) == done(keyspace, transaction)
        document = again(document)
        assert document.read("") == keyspace.read("")
        assert document.changes("", 0) == keyspace.changes("", 0)
        assert set(document.pulses) == {lease for lease in leases if keyspace.has_lease(lease)}


def test_a_lease_beats_until_it_has_ended() -> None:
    document = CellDocument("id")
    one, two = document.grant(TTL_S), document.grant(2 * TTL_S)
    assert document.beat(one)
    assert document.beat(one)
    assert again(document).pulses == {one: Pulse(TTL_S, 2), two: Pulse(2 * TTL_S, 0)}
    document.transact(Transaction((), (Put("n", b"", one),)))
    assert not document.expire(one, 1)
    assert document.read("n").items
    assert document.expire(one, 2)
    assert document.changes("n", 3) == [Event(3, "n", None, "expired")]
    assert not document.beat(one)
    assert not document.expire(one, 2)
    assert again(document).grant(TTL_S) == two + 1, "no number is used twice"
    with pytest.raises(UnknownLease):
        document.transact(Transaction((), (Put("n", b"", one),)))
    with pytest.raises(ValueError, match="must live for a time"):
        document.grant(0)


def test_only_the_latest_changes_are_remembered() -> None:
    document = CellDocument("id")
    for number in range(3 * HISTORY_EVENTS):
        document.transact(Transaction((), (Put("k", b"%d" % number),)))
    document = again(document)
    assert 1 < document.oldest_change < document.revision
    with pytest.raises(Compacted):
        document.changes("", 1)
    assert len(document.changes("", document.oldest_change)) <= HISTORY_EVENTS


def test_a_document_has_a_largest_size() -> None:
    document = CellDocument("id")
    document.transact(Transaction((), (Put("k", bytes(DOCUMENT_BYTES)),)))
    with pytest.raises(DocumentTooLarge, match="may hold"):
        encode(document, "writer")
    with pytest.raises(NotOurDocument, match="bytes"):
        decode(bytes(DOCUMENT_BYTES + 1))


def written() -> dict[str, Any]:
    document = CellDocument("id")
    document.transact(Transaction((), (Put("k", b"\xff", document.grant(TTL_S)), Put("l", b""))))
    document.transact(Transaction((), (Delete("l"),)))
    fields: dict[str, Any] = json.loads(encode(document, "writer"))
    return fields


def test_what_was_written_is_read() -> None:
    assert decode(json.dumps(written()).encode()).fields() == written()


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04pickle", b"[]", b"{}", b"null", b'{"format": "rallypoint-cell-2"}', b"[" * 100_000]
)  # fmt: skip
def test_what_is_not_ours_is_refused(data: bytes) -> None:
    with pytest.raises(NotOurDocument):
        decode(data)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(written())), JUNK)
def test_a_field_that_is_something_else_is_refused_or_harmless(name: str, junk: object) -> None:
    data = json.dumps({**written(), name: junk}).encode()
    try:
        decode(data).check()
    except NotOurDocument:
        """As it should be."""


def test_a_lease_that_was_never_granted_is_refused() -> None:
    with pytest.raises(NotOurDocument, match="never granted"):
        decode(json.dumps({**written(), "granted": 0}).encode())


# --- who is silent ---------------------------------------------------------------------------------------------------------


def test_who_does_not_move_for_its_time_is_silent() -> None:
    sightings = Sightings()
    assert sightings.look_at() is None
    assert sightings.look({1: Pulse(TTL_S, 5), 2: Pulse(TTL_S, 0)}, 100.0) == []
    assert sightings.look_at() == 103.0
    assert sightings.look({1: Pulse(TTL_S, 5), 2: Pulse(TTL_S, 1)}, 101.5) == []
    assert sightings.look({1: Pulse(TTL_S, 5), 2: Pulse(TTL_S, 1)}, 103.0) == [(1, 5)]
    assert sightings.look({2: Pulse(TTL_S, 1)}, 104.5) == [(2, 1)]
    assert sightings.look({}, 105.0) == []


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """Whoever was stopped, or could not read, cannot tell who was silent meanwhile."""
    sightings = Sightings()
    sightings.look({1: Pulse(TTL_S, 0)}, 0.0)
    assert sightings.look({1: Pulse(TTL_S, 0)}, 1000.0) == []
    assert sightings.look_at() == 1000.0 + TTL_S - LONGEST_GAP_S
    assert sightings.look({1: Pulse(TTL_S, 0)}, 1001.0) == [(1, 0)]


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=30), st.floats(0, 2))
def test_an_owner_gives_up_before_it_is_given_up(steps: list[tuple[float, bool]], delay_s: float) -> None:
    """The owner counts from when it sent its pulse, the observer from when it saw it, which is never before."""
    sightings, now, count, sent_at = Sightings(), 0.0, 0, 0.0
    for passed_s, moves in steps:
        now += passed_s
        if moves:
            count, sent_at = count + 1, now
        if sightings.look({1: Pulse(TTL_S, count)}, now + delay_s):
            assert now + delay_s >= sent_at + TTL_S
