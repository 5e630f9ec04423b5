"""A family of processes is still only if nothing at all shows that it does something."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.processes.inactivity import IDLE_CPU_S, IDLE_CPU_SHARE, Sample, Stillness, activity, follow

BASE = Sample(at=100.0, members=frozenset({(7, 1)}), cpu_s=5.0, io_bytes=1000, states=frozenset("S"), ready=frozenset())
STILL = Stillness(BASE)
LATER = BASE.replace(at=110.0)


def test_what_does_nothing_is_still() -> None:
    assert activity(STILL, LATER) == ""
    assert follow(STILL, LATER).since == 100.0


@pytest.mark.parametrize(
    "change",
    [
        {"cpu_s": 5.0 + IDLE_CPU_S + 10 * IDLE_CPU_SHARE + 0.01},
        {"cpu_s": 4.0},
        {"io_bytes": 1001},
        {"io_bytes": None},
        {"members": frozenset({(7, 1), (8, 1)})},
        {"members": frozenset({(7, 2)})},
        {"states": frozenset("SD")},
        {"states": frozenset("t")},
    ],
)
def test_whatever_it_does_shows(change: dict[str, object]) -> None:
    seen = LATER.replace(**change)
    assert activity(STILL, seen)
    assert follow(STILL, seen).since == 110.0


def test_background_threads_do_not_show() -> None:
    assert activity(STILL, LATER.replace(cpu_s=5.0 + 10 * IDLE_CPU_SHARE)) == ""


def test_a_thread_met_ready_once_is_a_background_thread_and_twice_one_that_gets_no_processor() -> None:
    once = follow(STILL, LATER.replace(at=105.0, ready=frozenset({7}), states=frozenset("SR")))
    assert once.since == 100.0
    assert follow(once, LATER.replace(at=106.0)).since == 100.0  # seen in passing, without its threads
    assert activity(once, LATER.replace(ready=frozenset({8}))) == ""
    assert activity(once, LATER.replace(ready=frozenset({7, 8})))


def test_what_a_debugger_holds_is_not_stopped() -> None:
    assert LATER.replace(states=frozenset("ST")).is_stopped
    assert not LATER.replace(states=frozenset("tT")).is_stopped


SAMPLES = st.builds(
    lambda gap, cpu, io, state: (gap, cpu, io, state),
    st.floats(0.05, 1),
    st.sampled_from([0.0, 0.0, 0.0001, 0.3]),
    st.sampled_from([0, 0, 0, 10]),
    st.sampled_from("SSSSTD"),
)


@given(st.lists(SAMPLES, min_size=1, max_size=40))
def test_it_is_still_since_its_last_activity_and_never_longer(steps: list[tuple[float, float, int, str]]) -> None:
    """The time since which it is called still never lies before something that plainly was done."""
    still, seen, last_plain = follow(None, BASE), BASE, BASE.at
    for gap, cpu, io, state in steps:
        seen = seen.replace(at=seen.at + gap, cpu_s=seen.cpu_s + cpu, io_bytes=(seen.io_bytes or 0) + io, states=frozenset(state))
        if cpu >= 0.3 or io or state == "D":
            last_plain = seen.at
        still = follow(still, seen)
        assert still.since >= last_plain
        assert still.since <= seen.at
    idle = seen
    for _ in range(5):
        idle = idle.replace(at=idle.at + 1, states=frozenset("S"))
        after = follow(still, idle)
        assert after.since == still.since  # and from then on it stays still
        still = after
