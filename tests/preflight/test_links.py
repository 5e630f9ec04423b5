"""Whom a node measures the way to, what that says of it, and that in the end the right ones are left out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.coordination.model import Item
from rallypoint.preflight import links, rules
from rallypoint.preflight.links import Break, Card, Link

KEY = "ab" * 32
CARD = Card("id1", "n1", "10.0.0.1", 4000, KEY)
OTHER = Card("id2", "n2", "10.0.0.2", 4000, "cd" * 32)
LEAST = 1_000_000


def link(name: str, mbit: float = 900.0, *, first: bool = False, error: str = "", off_s: float = 0.0) -> Link:
    card = CARD.replace(id=name, name=name)
    return Link(card, first, error, mbit * 1e6, 2 * mbit * 1e6, 0.0002, off_s, 0.001)


# --- cards -----------------------------------------------------------------------------------------------------------------


def test_a_card_is_read_as_it_was_written() -> None:
    assert links.decode_card(links.encode_card(CARD)) == CARD
    assert links.decode_card(CARD.__dict__) == CARD


@pytest.mark.parametrize(
    "change",
    [
        {"port": 0},
        {"port": 1 << 16},
        {"port": "80"},
        {"key": "ab"},
        {"key": "xy" * 32},
        {"host": "h" * 999},
        {"name": 1},
        {"more": 1},
    ],
)
def test_what_is_no_card_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must|hexadecimal"):
        links.decode_card({**CARD.__dict__, **change})


def test_a_card_goes_where_it_stood_else_where_nobody_is_else_anywhere() -> None:
    own, other = (Item("x", links.encode_card(card), 1, 1) for card in (CARD.replace(id="earlier"), OTHER))
    assert links.choose_slot([other, None, own, None], KEY, 0.99) == 2
    assert [links.choose_slot([other, None, other, None], KEY, chance) for chance in (0.0, 0.49, 0.5, 0.99)] == [1, 1, 3, 3]
    assert [links.choose_slot([other] * 4, KEY, chance) for chance in (0.0, 0.99)] == [0, 3]


# --- one node's judgement --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "state", "what"),
    [
        ([], "unknown", "there is no other node yet to measure the way to"),
        ([link("a")], "ok", "a: 900 Mbit/s there, 1.8 Gbit/s back, 0.20 ms"),
        ([link("a", 0.5, first=True)], "bad", "a: 500 Kbit/s there, 1.0 Mbit/s back, less than 1.0 Mbit/s; with no third node to"
         " compare, a, which was there first, is believed"),
        ([link("a", error="no way")], "unknown", "a: no way; with no third node to compare, this node, which was there first, is"
         " believed"),
        ([link("a"), link("b", error="no way", first=True)], "unknown",
         "b: no way; a: 900 Mbit/s there, 1.8 Gbit/s back, 0.20 ms"),
        ([link("a", error="x"), link("b", error="y")], "bad", "a: x; b: y"),
        ([link("a", error="x"), link("b"), link("c", error="z")], "bad",
         "a: x; c: z; b: 900 Mbit/s there, 1.8 Gbit/s back, 0.20 ms"),
    ],
)  # fmt: skip
def test_the_one_that_the_bad_ways_have_in_common_is_to_blame(seen: list[Link], state: str, what: str) -> None:
    """P29"""
    found = links.judge_links(seen, LEAST)
    assert (found.check, found.state, found.what) == ("network", state, what)
    assert (found.state == "bad") == links.is_out(seen, LEAST)
    assert bool(found.advice) == bool(links.bad_ones(seen, LEAST))


def test_two_good_ways_are_enough_and_of_bad_ones_four() -> None:
    good, bad = link("a"), link("b", error="x")
    assert [links.wants_more(seen, LEAST) for seen in ([], [good], [good, good], [good, bad], [bad] * 3, [bad] * 4)] == [
        True, True, False, True, True, False,
    ]  # fmt: skip


def test_clocks_are_told_and_warned_about_and_make_nobody_unfit() -> None:
    """P48"""
    near, far = link("a", off_s=0.01), link("b", off_s=-3600.0)
    found = [links.judge_clocks(seen) for seen in ([near], [near, far], [link("c", error="x")], [])]
    assert [one and (one.state, one.what) for one in found] == [
        ("ok", "at most 0.010 s from a's"), ("unknown", "this node's is 3600.0 s behind b's"), None, None,
    ]  # fmt: skip
    assert found[1] is not None
    assert rules.warnings([found[1]])[0].startswith("clocks: this node's is 3600.0 s behind b's (rallypoint compares no clocks")
    assert rules.reason([found[1]]) == ""


@pytest.mark.parametrize(
    ("moved", "mbit"),
    [
        ([], 0.0),
        ([(5.0, 1000)], 0.0),
        ([(0.0, 100), (1.0, 1_000_100)], 8.0),
        ([(0.0, 0), (1.0, 1_000_000), (2.0, 4_000_000)], 24.0),  # it begins slowly
        ([(0.0, 10_000), (0.001, 20_000), (0.5, 20_000)], 0.16),  # a burst, then nothing
        ([(0.0, 10_000), (0.4, 20_000), (0.401, 30_000)], 0.399),  # bursts: one for each round trip
    ],
)
def test_a_rate_is_that_of_the_second_half_where_that_is_higher(moved: list[tuple[float, int]], mbit: float) -> None:
    assert links.rate_of(moved) / 1e6 == pytest.approx(mbit, rel=0.01)


# --- the ring --------------------------------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), places=st.integers(2, 8), wrong=st.integers(0, links.NUMBERS - 1))
def test_what_is_passed_on_round_the_ring_is_known_to_all(seed: int, places: int, wrong: int) -> None:
    passed = links.numbers_of(seed, 0)
    for place in range(1, places):
        got = links.numbers_from(links.pack(passed), seed, place)
        assert got == passed
        passed = [a + b for a, b in zip(passed, links.numbers_of(seed, place), strict=True)]
    assert links.numbers_from(links.pack(passed), seed, places) == passed
    passed[wrong] ^= 1
    assert links.numbers_from(links.pack(passed), seed, places) is None
    with pytest.raises(ValueError, match="a block of 3 bytes"):
        links.numbers_from(b"abc", seed, 1)


def test_the_ring_names_the_way_on_which_it_broke() -> None:
    assert links.judge_ring(["me", "a", "b"], None).what == "3 nodes got the same sum of 4096 numbers"
    found = links.judge_ring(["me", "a", "b"], Break(2, "timed out"))
    assert (found.state, found.what) == ("unknown", "between a and b: timed out")
    assert links.judge_ring(["me", "a", "b"], Break(3, "x")).what == "between b and me: x"


# --- a whole job -----------------------------------------------------------------------------------------------------------


class Cluster:
    """Nodes of which some are bad, as is every way from or to them; each is examined as often as the rules say."""

    def __init__(self, bad: list[bool], draw: st.DataObject) -> None:
        self._bad, self._draw = bad, draw
        self.cards: dict[int, int] = {}  # since when
        self.fit: dict[int, bool] = {}
        self._changes = 0
        self._doubts: set[tuple[int, int]] = set()
        self._known: dict[int, set[int]] = {}  # of those who have measured too few ways

    def examine(self, node: int) -> None:
        self._changes += 1
        since = self.cards.setdefault(node, self._changes)
        seen: list[Link] = []
        called: list[int] = []
        self._known.pop(node, None)
        for other in self._draw.draw(st.permutations([one for one in self.cards if one != node])):
            if not links.wants_more(seen, LEAST):
                break
            error = "bad" if self._bad[node] or self._bad[other] else ""
            seen.append(link(str(other), error=error, first=self.cards[other] < since))
            called.append(other)
        if not links.is_decided(seen):
            self._known[node] = set(called)
        is_out = links.is_out(seen, LEAST)
        self.fit[node] = not is_out
        for one in [] if is_out else links.bad_ones(seen, LEAST):
            other = int(one.card.name)
            if self.fit.get(other) and (node, other) not in self._doubts:  # each may doubt another once
                self._doubts.add((node, other))
                self.examine(other)
        for other in called:
            if node not in self._known.get(other, {node}):
                self.examine(other)


@given(bad=st.lists(st.booleans(), min_size=3, max_size=9), draw=st.data())
def test_p29_in_the_end_the_bad_nodes_wait_outside_and_the_good_ones_do_not(bad: list[bool], draw: st.DataObject) -> None:
    """P29: in whatever order they come and call on each other, as long as the good ones are enough to tell."""
    if sum(bad) > 2 or bad.count(False) < sum(bad) + 1:
        bad = [False] * len(bad)
    cluster = Cluster(bad, draw)
    for node in draw.draw(st.permutations(range(len(bad)))):
        cluster.examine(node)
    for _ in range(6):  # who waits outside is examined again and again
        for node in [node for node, is_fit in cluster.fit.items() if not is_fit]:
            cluster.examine(node)
    assert [not cluster.fit[node] for node in range(len(bad))] == bad
