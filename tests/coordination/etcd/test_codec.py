"""The words of a coordination store in etcd's JSON, under a prefix that nobody sees."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.coordination.etcd.codec import Change, Malformed, Words, counts, fields_of, number
from rallypoint.coordination.model import Compare, Delete, Get, Item, Operation, Outcome, Put, Transaction

PREFIX = "/rallypoint/job/"
WORDS = Words(PREFIX)
HEADER = {"cluster_id": "1", "revision": "9"}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def encoded(text: str) -> str:
    return b64encode(text.encode()).decode()


def lies_within(key: bytes, asked: dict[str, Any]) -> bool:
    return b64decode(asked["key"]) <= key < b64decode(asked["range_end"])


@given(TEXT, TEXT)
def test_a_prefix_is_asked_for_with_all_that_begins_with_it_and_nothing_else(prefix: str, key: str) -> None:
    asked = WORDS.reading(prefix)
    assert lies_within((PREFIX + key).encode(), asked) == key.startswith(prefix)
    assert lies_within((PREFIX + prefix + key).encode(), asked)
    assert not lies_within(b"/rallypoint/job2/" + key.encode(), asked)


@given(TEXT, st.integers(1, 2**63 - 1))
def test_the_engines_own_keys_are_out_of_every_readers_sight(prefix: str, lease: int) -> None:
    key = b64decode(WORDS.lease_key(lease))
    assert key.startswith(PREFIX.encode())
    assert not lies_within(key, WORDS.reading(prefix))
    assert not lies_within(key, WORDS.watching(prefix, 1)["create_request"])


def test_a_transaction() -> None:
    asked = WORDS.transaction(
        Transaction((Compare("a", "create", 0), Compare("b", "mod", 7)), (Put("p", b"\0\xff", 5), Delete("d")), (Get("g"),))
    )
    a, b, p, d, g = (encoded(PREFIX + name) for name in "abpdg")
    assert asked == {
        "compare": [
            {"key": a, "target": "CREATE", "result": "EQUAL", "create_revision": "0"},
            {"key": b, "target": "MOD", "result": "EQUAL", "mod_revision": "7"},
        ],
        "success": [
            {"request_put": {"key": p, "value": "AP8=", "lease": "5"}},
            {"request_delete_range": {"key": d}},
        ],
        "failure": [{"request_range": {"key": g}}],
    }


def test_as_much_as_etcd_takes_and_not_more() -> None:
    most: tuple[Operation, ...] = tuple(Put(str(index), b"") for index in range(128))
    assert len(WORDS.transaction(Transaction((), most))["success"]) == 128
    for transaction in (
        Transaction((), (*most, Get("g"))),
        Transaction((), (), (*most, Get("g"))),
        Transaction(tuple(Compare("a", "mod", 0) for _ in range(129)), ()),
    ):
        with pytest.raises(ValueError, match="more than 128"):
            WORDS.transaction(transaction)
    WORDS.transaction(Transaction((), (Put("a", bytes(1_500_000)),)))
    with pytest.raises(ValueError, match="etcd takes 1572864"):
        WORDS.transaction(Transaction((), (Put("a", bytes(800_000)), Put("b", bytes(800_000)))))


def test_a_job_needs_a_prefix() -> None:
    with pytest.raises(ValueError, match="prefix"):
        Words("")


def test_an_outcome_has_an_item_for_every_get() -> None:
    kv = {"key": encoded(PREFIX + "g"), "value": "AP8=", "create_revision": "3", "mod_revision": "4", "lease": "5"}
    responses = [{"response_put": {}}, {"response_range": {"kvs": [kv], "count": "1"}}, {"response_range": {}}]
    told = WORDS.outcome({"header": HEADER, "succeeded": True, "responses": responses})
    assert told == Outcome(True, 9, (Item("g", b"\0\xff", 3, 4, 5), None))
    assert WORDS.outcome({"header": HEADER}) == Outcome(False, 9)
    assert counts({"responses": [{"response_range": {"count": "2"}}, {"response_range": {}}]}) == [2, 0]


def test_changes() -> None:
    key = encoded(PREFIX + "k")
    events = [
        {"kv": {"key": key, "create_revision": "3", "mod_revision": "3"}},
        {"type": "DELETE", "kv": {"key": key, "mod_revision": "4"}, "prev_kv": {"key": key, "lease": "8"}},
        {"type": "DELETE", "kv": {"key": key, "mod_revision": "5"}, "prev_kv": {"key": key}},
        {"type": "DELETE", "kv": {"key": key, "mod_revision": "6"}},
    ]
    assert WORDS.changes({"events": events}) == [
        Change(3, "k", Item("k", b"", 3, 3)), Change(4, "k", None, 8), Change(5, "k", None, 0), Change(6, "k", None, None),
    ]  # fmt: skip


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'"x"', b"{", b"[" * 100_000, b'{"result": 1}', b"\xff"])
def test_what_is_no_answer(body: bytes) -> None:
    with pytest.raises(Malformed):
        fields_of(body)


@pytest.mark.parametrize("value", [1, None, "", "x", "1" * 21, "0x1", "-1", [], "1 ", "\u0661"])
def test_what_is_no_number(value: object) -> None:
    with pytest.raises(Malformed):
        number({"n": value}, "n")


PARTS = ["header", "kvs", "responses", "events", "succeeded"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("a0=", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*PARTS, "kv", "key"]), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(PARTS), JSON))
def test_nothing_but_malformed_comes_of_answers_that_are_not_etcds(answer: dict[str, Any]) -> None:
    for read in (WORDS.outcome, WORDS.snapshot, WORDS.changes, counts):
        try:
            read(answer)
        except Malformed:
            continue


@pytest.mark.parametrize(
    "kv",
    [
        {"key": "%%%"}, {"key": 3}, {"key": encoded("elsewhere")}, {"key": encoded(PREFIX), "value": {}},
        {"key": encoded(PREFIX), "mod_revision": 3}, {"key": encoded(PREFIX), "lease": "x"}, {},
    ],
)  # fmt: skip
def test_an_item_that_is_none(kv: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        WORDS.snapshot({"header": HEADER, "kvs": [kv]})
