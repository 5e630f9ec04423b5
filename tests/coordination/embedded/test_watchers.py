"""Each connection is told exactly the changes under its prefixes, once and in order, however the groups come and go."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.coordination.embedded.service import Watchers
from rallypoint.coordination.model import Event

TEXTS = st.text("ab", max_size=3)
ASSIGNMENTS = st.lists(st.tuples(st.integers(0, 4), st.frozensets(TEXTS, max_size=3)), max_size=12)


@given(ASSIGNMENTS, st.lists(TEXTS, max_size=6))
def test_everybody_is_told_what_it_watches(assignments: list[tuple[int, frozenset[str]]], keys: list[str]) -> None:
    watchers: Any = Watchers()
    watched: dict[int, frozenset[str]] = {}
    for connection, prefixes in assignments:
        watchers.assign(connection, prefixes)
        watched[connection] = prefixes
        assert watchers.of(connection) == prefixes
    events = [Event(number, key, None, "deleted") for number, key in enumerate(keys)]
    told: dict[int, list[Event]] = {}
    for its_events, members in watchers.route(events):
        for connection in members:
            assert connection not in told, "once for each group, and each is in one"
            told[connection] = its_events
    expected = {
        connection: [event for event in events if event.key.startswith(tuple(prefixes))]
        for connection, prefixes in watched.items()
    }
    assert told == {connection: its_events for connection, its_events in expected.items() if its_events}


def test_nothing_is_kept_of_who_has_gone() -> None:
    watchers: Any = Watchers()
    for connection in range(3):
        watchers.assign(connection, frozenset({"a", f"b/{connection}"}))
    for connection in range(3):
        watchers.assign(connection, frozenset())
    assert len(watchers) == 0
    assert not any(vars(watchers).values())
