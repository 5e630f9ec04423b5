"""The keys and records of a job: what is written can be read, and whatever else is found there is a ValueError."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.base.records import Value
from rallypoint.protocol import job_records as job
from rallypoint.protocol.restarts import Purse
from rallypoint.protocol.verdict import Verdict

RECORDS: list[Value] = [
    job.NodeRecord("host:0", "10.0.0.1", 29500, "default", 8, 0),
    job.NodeRecord("gpu-7", "fe80::1", 0, "ps", 1, job.NOT_READY, 3, True),
    job.Seat(2, 17, "host:0", 1, 3, 8, 24, 0, 8),
    job.Generation(2, 17, 3, 24, "10.0.0.1", 29500, "a worker failed", Purse(1, 2, 3, 4, (0.5, 60.0))),
    job.Generation(1, 5, 1, 1, "localhost", 1, "1 nodes are here", Purse()),
    job.Signal("failure", "rank 3 on gpu-7 failed", "gpu-7"),
    job.Signal("finished", "", ""),
    job.Closed("finished", "the job has finished", "host:0"),
    job.Closed("failed", "ürgh \ud800 \0", "host:0", Verdict(stopped=2, lost=("host:1",), world_size=3)),
    job.Status("1 of 2 nodes are here; here: host:0"),
    Purse(recent_ages_s=()),
]
KINDS: list[type[Value]] = list(dict.fromkeys(map(type, RECORDS)))
NODE, SIGNAL, GENERATION = RECORDS[0], RECORDS[5], RECORDS[3]


def changed(record: Value, **changes: object) -> bytes:
    """A record as bytes, with fields that were not made by `encode`."""
    return json.dumps({**json.loads(job.encode(record)), **changes}).encode()


def without(record: Value, field: str) -> bytes:
    fields = json.loads(job.encode(record))
    del fields[field]
    return json.dumps(fields).encode()


# --- keys ------------------------------------------------------------------------------------------------------------------


def test_every_node_watches_what_is_posted_and_only_the_leader_what_nodes_tell() -> None:
    posted = [job.LEADER, job.GENERATION, job.CLOSED, job.signal_key(3), job.refusal_key("n")]
    told = [job.node_key("n"), job.failure_key(3, "n"), job.done_key(3, "n")]
    unwatched = [job.SETTINGS, job.STATUS, job.DATA, job.seat_key(3, 17, "n")]
    assert all(key.startswith(job.DOWN) for key in posted)
    assert all(key.startswith(job.UP) for key in told)
    assert not any(key.startswith((job.DOWN, job.UP)) for key in unwatched)


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 200))
def test_the_keys_of_one_generation_are_none_of_another(one: int, other: int, attempt: int) -> None:
    """P16: a prefix that ended in a number would name ten more generations."""
    assert job.seat_key(one, attempt, "n").startswith(job.seats_of_generation(other)) == (one == other)
    assert job.seat_key(3, one, "n").startswith(job.seats_of_attempt(3, other)) == (one == other)
    assert job.failure_key(one, "n").startswith(job.failure_key(other, "")) == (one == other)
    assert job.done_key(one, "n").startswith(job.done_key(other, "")) == (one == other)


# --- what is written can be read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: repr(record)[:80])
def test_a_record_is_read_as_it_was_written(record: Value) -> None:
    data = job.encode(record)
    assert data.isascii()
    assert job.decode(type(record), data) == record


TEXTS = st.text(max_size=20)
NUMBERS = st.integers(-1, 2**31)
AGES = st.lists(st.floats(0.0, 1e9), max_size=4).map(tuple)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
COUNTS = st.integers(0, 10**9)
NAMES = st.text("abc-09", max_size=20)
PURSES = st.builds(Purse, NUMBERS, NUMBERS, NUMBERS, NUMBERS, AGES)
CLOSED_KINDS = ["finished", "failed", "closed", "host_left", "preempted", "unsaved", "stopped"]
ANY_RECORD = st.one_of(
    st.builds(job.NodeRecord, TEXTS, TEXTS, NUMBERS, TEXTS, NUMBERS, NUMBERS, NUMBERS, st.booleans()),
    st.builds(job.Seat, NUMBERS, NUMBERS, TEXTS, *[NUMBERS] * 6),
    st.builds(job.Generation, NUMBERS, NUMBERS, NUMBERS, NUMBERS, TEXTS, NUMBERS, TEXTS, PURSES),
    st.builds(job.Signal, st.sampled_from(["failure", "loss", "departure", "join", "finished"]), TEXTS, TEXTS),
    st.builds(job.Notice, TEXTS, TEXTS, st.floats(0, 1e6)),
    st.builds(job.NodeDrain, st.booleans(), st.booleans(), NUMBERS, st.booleans()),
    st.builds(job.Ruling, NUMBERS, st.booleans()),
    st.builds(job.Stop, TEXTS),
    st.builds(job.Closed, st.sampled_from(CLOSED_KINDS), TEXTS, TEXTS,
              st.none() | st.builds(Verdict, stopped=COUNTS, lost=st.lists(NAMES, max_size=3).map(tuple), world_size=COUNTS)),
)  # fmt: skip


@settings(max_examples=200)
@given(ANY_RECORD)
def test_any_record_is_read_as_it_was_written(record: Value) -> None:
    assert job.decode(type(record), job.encode(record)) == record


@pytest.mark.parametrize("verdict", [{}, {"cause": None, "victims": [1, 2], "deep": {"a": [{}]}}, {"of": "a later version"}])
def test_the_end_of_a_job_counts_even_if_its_verdict_cannot_be_read(verdict: dict[str, Any]) -> None:
    closed = job.Closed("failed", "no restart is left", "host:0")
    assert job.decode(job.Closed, changed(closed, verdict=verdict)) == closed


def test_a_field_that_an_older_node_did_not_write_has_its_default() -> None:
    assert job.decode(job.NodeRecord, without(NODE, "hint_is_explicit")) == NODE


@pytest.mark.parametrize(
    ("kind", "is_stop"), [("failure", True), ("loss", True), ("departure", True), ("join", True), ("finished", False)]
)  # fmt: skip
def test_every_signal_but_the_last_is_a_stop(kind: Any, is_stop: bool) -> None:
    assert job.Signal(kind, "", "").is_stop == is_stop


# --- what is no record is a ValueError -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"", b"null", b"1", b'"text"', b"[]", b"[[]]", b"{", b'{"self": 1}', b'{"": 1}', b"\xff\xfe", b"\0\0\0",
        b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5_000, b'{"__class__": "x"}', b'{"name": "x"} {}',
    ],
    ids=lambda data: repr(data[:12]),
)  # fmt: skip
def test_what_is_no_record_is_refused(data: bytes) -> None:
    for kind in KINDS:
        with pytest.raises(ValueError, match=f"is no {kind.__name__}: "):
            job.decode(kind, data)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (job.NodeRecord, without(NODE, "workers")),
        (job.NodeRecord, changed(NODE, surprise=1)),
        (job.Signal, b'{"kind": "loss", "why": "", "of": ""}'),
        (job.NodeRecord, changed(NODE, name=7)),
        (job.NodeRecord, changed(NODE, address=None)),
        (job.NodeRecord, changed(NODE, workers="8")),
        (job.NodeRecord, changed(NODE, workers=8.0)),
        (job.NodeRecord, changed(NODE, workers=True)),
        (job.NodeRecord, changed(NODE, hint_is_explicit=1)),
        (job.Signal, changed(SIGNAL, why=["a", "list"])),
        (job.Generation, changed(GENERATION, purse=None)),
        (job.Generation, changed(GENERATION, purse=[1, 2, 3, 4])),
        (job.Generation, changed(GENERATION, purse={"failures": "many"})),
        (job.Generation, changed(GENERATION, purse={"coins": 1})),
        (job.Seat, job.encode(NODE)),
        (job.NodeRecord, job.encode(GENERATION)),
    ],
)
def test_a_record_with_wrong_fields_is_refused(kind: type[Value], data: bytes) -> None:
    with pytest.raises(ValueError, match=f"is no {kind.__name__}: "):
        job.decode(kind, data)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (job.Signal, changed(SIGNAL, kind="a whim")),
        (job.Signal, changed(SIGNAL, kind=None)),
        (job.Closed, changed(RECORDS[7], kind=["finished"])),
        (job.Closed, changed(RECORDS[7], verdict="guilty")),
        (job.Generation, changed(GENERATION, purse={"recent_ages_s": 5})),
        (job.Generation, changed(GENERATION, purse={"recent_ages_s": ["long", "ago"]})),
    ],
)
def test_a_record_with_wrong_words_or_parts_is_refused(kind: type[Value], data: bytes) -> None:
    with pytest.raises(ValueError, match=f"is no {kind.__name__}: "):
        job.decode(kind, data)


def test_a_refusal_does_not_repeat_all_that_it_was_given() -> None:
    with pytest.raises(ValueError, match="is no Signal") as caught:
        job.decode(job.Signal, b"x" * 1_000_000)
    assert len(str(caught.value)) < 300


@settings(max_examples=200)
@given(st.sampled_from(KINDS), st.binary(max_size=60) | JSON.map(lambda found: json.dumps(found).encode()))
def test_any_bytes_are_a_record_or_a_value_error(kind: type[Value], data: bytes) -> None:
    try:
        found = job.decode(kind, data)
    except ValueError:
        return
    assert isinstance(found, kind)


@settings(max_examples=300)
@given(ANY_RECORD, st.data())
def test_a_record_with_one_field_of_any_kind_is_a_record_or_a_value_error(record: Value, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(record.__dict__)))
    damaged = changed(record, **{name: data.draw(JSON)})
    try:
        found = job.decode(type(record), damaged)
    except ValueError:
        return
    assert {**found.__dict__, name: None} == {**record.__dict__, name: None}


@settings(max_examples=200)
@given(ANY_RECORD, st.integers(0, 400), st.integers(0, 255))
def test_a_record_with_one_wrong_byte_is_a_record_or_a_value_error(record: Value, place: int, byte: int) -> None:
    data = bytearray(job.encode(record))
    data[place % len(data)] = byte
    try:
        assert isinstance(job.decode(type(record), bytes(data)), type(record))
    except ValueError:
        return
