"""When which address of a store's name is dialled."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.coordination.embedded.dialling_rules import MOST_UNDER_WAY, REPEAT_S, STAGGER_S, advice, interleave, next_dial_at

V4, V6 = 2, 10


@pytest.mark.parametrize(
    ("given_order", "expected"),
    [
        ([], []),
        ([(V4, "a")], [(V4, "a")]),
        ([(V6, "a"), (V6, "b"), (V4, "c")], [(V6, "a"), (V4, "c"), (V6, "b")]),
        ([(V4, "a"), (V4, "b"), (V4, "c"), (V6, "d")], [(V4, "a"), (V6, "d"), (V4, "b"), (V4, "c")]),
    ],
)
def test_m7_families_take_turns(given_order: list[Any], expected: list[Any]) -> None:
    """M7: where one family leads nowhere, the second call is of the other."""
    assert interleave(given_order) == expected


@given(st.lists(st.tuples(st.sampled_from([V4, V6]), st.integers()), unique=True))
def test_m7_nobody_is_forgotten_or_called_twice(addresses: list[tuple[int, int]]) -> None:
    assert sorted(interleave(addresses)) == sorted(addresses)


@pytest.mark.parametrize(
    ("state", "at"),
    [
        ({"untried": 0, "under_way": 0}, -math.inf),  # nothing has been done yet
        ({"untried": 1, "under_way": 1, "last_began_at": 5.0}, 5.0 + STAGGER_S),
        ({"untried": 1, "under_way": 1, "last_began_at": 5.0, "last_failed_at": 4.0}, 5.0 + STAGGER_S),
        ({"untried": 1, "under_way": 1, "last_began_at": 5.0, "last_failed_at": 5.1}, -math.inf),
        ({"untried": 1, "under_way": 0, "last_began_at": 5.0}, -math.inf),
        ({"untried": 1, "under_way": 1, "last_began_at": 5.0, "is_connected": True}, 5.0 + STAGGER_S),
        ({"untried": 0, "under_way": 2, "last_began_at": 5.0}, 5.0 + REPEAT_S),
        ({"untried": 0, "under_way": 2, "last_began_at": 5.0, "is_connected": True}, math.inf),
        ({"untried": 0, "under_way": 0, "last_began_at": 5.0, "last_failed_at": 7.0, "pause_s": 0.5}, 7.5),
        ({"untried": 3, "under_way": MOST_UNDER_WAY, "last_began_at": 5.0}, math.inf),
    ],
)
def test_m7_when_the_next_one_is_dialled(state: dict[str, Any], at: float) -> None:
    """M7: a moment after the last, at once when one fails; none is waited for."""
    nothing = {"is_connected": False, "last_began_at": -math.inf, "last_failed_at": -math.inf, "pause_s": 0.0}
    assert next_dial_at(**{**nothing, **state}) == at


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ({"is_known": False}, "check the spelling of store"),
        ({"is_connected": True}, "another program may have port 29400"),
        ({}, "a firewall may drop what is sent to port 29400"),
        ({"is_refused": True}, "its own /etc/hosts may say that store is 127.0.1.1; then use its address as the endpoint"),
        ({"is_refused": True, "is_name": False}, "is the agent on store started?"),
    ],
)
def test_m9_f20_what_is_advised(seen: dict[str, bool], told: str) -> None:
    everything_else = {"is_name": True, "is_known": True, "is_refused": False, "is_connected": False}
    assert told in advice("store", 29400, **{**everything_else, **seen})
