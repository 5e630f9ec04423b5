"""Stopping processes: the decisions one by one, and simulated crowds of processes that end when they like, or never."""

from __future__ import annotations

import signal
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.protocol import shutdown
from rallypoint.protocol.shutdown import GaveUp, Gone, Send, Stop, Target, Waiting, hurry, step

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
GRACE_S, KILL_WAIT_S = 30.0, 10.0
ONE, TWO, ORPHAN = Target(True, 1), Target(True, 2), Target(False, 4711)


def check(stop: Stop) -> None:
    """What holds after every step."""
    for target, clock in stop.clocks.items():
        if clock.told_at is None:
            raise ValueError(f"{target} is present and was never told")
        if clock.killed_at is not None and clock.killed_at < clock.told_at:
            raise ValueError(f"{target} was killed before it was told")


def begun(number: int = TERM, grace_s: float = GRACE_S, kill_wait_s: float = KILL_WAIT_S) -> Stop:
    return shutdown.begin(number, grace_s, kill_wait_s)


def sent(sends: tuple[Send, ...]) -> list[tuple[Target, int]]:
    return [(send.target, send.signal) for send in sends]


# --- tables ----------------------------------------------------------------------------------------------------------------


def test_nobody_there_means_gone_at_once() -> None:
    assert list(step(begun(), [], 5.0))[1:] == [(), Gone()]


def test_one_worker_is_told_killed_and_given_up() -> None:
    """P10: a worker that survives SIGKILL is waited for a bounded time only, and then named."""
    stop = begun()
    story = []
    for now in (100.0, 129.9, 130.0, 130.1, 139.9, 140.0, 500.0):
        stop, sends, outcome = step(stop, [ONE], now)
        check(stop)
        story.append((now, sent(sends), outcome))
    assert story == [
        (100.0, [(ONE, TERM)], Waiting(130.0)),
        (129.9, [], Waiting(130.0)),
        (130.0, [(ONE, KILL)], Waiting(140.0)),
        (130.1, [], Waiting(140.0)),
        (139.9, [], Waiting(140.0)),
        (140.0, [], GaveUp((ONE,))),
        (500.0, [], GaveUp((ONE,))),
    ]


def test_every_target_has_its_own_clock_and_they_run_beside_each_other() -> None:
    """P08: one grace for each worker, in parallel, not one after the other."""
    stop, sends, outcome = step(begun(), [ONE], 0.0)
    stop, sends, outcome = step(stop, [ONE, TWO], 10.0)
    assert (sent(sends), outcome) == ([(TWO, TERM)], Waiting(30.0))
    stop, sends, outcome = step(stop, [ONE, TWO], 30.0)
    assert (sent(sends), outcome) == ([(ONE, KILL)], Waiting(40.0))
    stop, sends, outcome = step(stop, [TWO], 40.0)
    assert (sent(sends), outcome) == ([(TWO, KILL)], Waiting(50.0))
    stop, sends, outcome = step(stop, [], 41.0)
    assert (sends, outcome) == ((), Gone())


def test_only_those_that_are_left_are_given_up() -> None:
    """P10: whoever ended after SIGKILL is not called stuck."""
    stop, _, _ = step(begun(grace_s=0), [ONE, TWO, ORPHAN], 0.0)
    _, sends, outcome = step(stop, [TWO, ORPHAN], 10.0)
    assert (sends, outcome) == ((), GaveUp((ORPHAN, TWO)))


def test_a_stuck_one_is_not_given_up_before_the_others_had_their_time() -> None:
    stop, _, _ = step(begun(), [ONE], 0.0)
    stop, _, _ = step(stop, [ONE, TWO], 20.0)
    stop, _, _ = step(stop, [ONE, TWO], 30.0)
    stop, _, outcome = step(stop, [ONE, TWO], 45.0)
    assert outcome == Waiting(50.0)
    stop, _, outcome = step(stop, [ONE, TWO], 50.0)
    assert outcome == Waiting(60.0)
    assert step(stop, [ONE, TWO], 60.0).outcome == GaveUp((ONE, TWO))


def test_the_signal_that_was_asked_for_is_the_one_that_is_sent() -> None:
    _, sends, _ = step(begun(INT), [ONE, ORPHAN], 0.0)
    assert sent(sends) == [(ORPHAN, INT), (ONE, INT)]


def test_no_grace_means_sigkill_at_once() -> None:
    stop, sends, outcome = step(begun(grace_s=0), [ONE], 7.0)
    assert (sent(sends), outcome) == ([(ONE, KILL)], Waiting(17.0))
    assert step(stop, [ONE], 8.0).sends == ()


def test_sigkill_as_the_signal_leaves_nothing_to_wait_for_but_the_end() -> None:
    """P10: whoever was sent SIGKILL is killed, and need not be killed a second time after a grace that means nothing."""
    stop, sends, outcome = step(begun(KILL), [ONE], 0.0)
    assert (sent(sends), outcome) == ([(ONE, KILL)], Waiting(KILL_WAIT_S))
    assert list(step(stop, [ONE], KILL_WAIT_S))[1:] == [(), GaveUp((ONE,))]


def test_hurried_the_ones_that_were_told_are_killed_and_the_killed_ones_left_alone() -> None:
    stop, _, _ = step(begun(), [ONE], 0.0)
    stop, _, _ = step(stop, [ONE, TWO], 20.0)
    stop, _, _ = step(stop, [ONE, TWO], 30.0)
    stop, sends, outcome = step(hurry(stop), [ONE, TWO], 31.0)
    assert (sent(sends), outcome) == ([(TWO, KILL)], Waiting(40.0))
    assert step(hurry(hurry(stop)), [ONE, TWO], 32.0).sends == ()


def test_a_newcomer_in_a_hurry_is_killed_without_being_asked() -> None:
    stop, _, _ = step(begun(), [ONE], 0.0)
    _, sends, _ = step(hurry(stop), [ORPHAN], 1.0)
    assert sent(sends) == [(ORPHAN, KILL)]


def test_a_late_look_kills_at_that_time_and_waits_from_there() -> None:
    stop, _, _ = step(begun(), [ONE], 0.0)
    stop, sends, outcome = step(stop, [ONE], 1000.0)
    assert (sent(sends), outcome) == ([(ONE, KILL)], Waiting(1010.0))


@pytest.mark.parametrize(
    ("target", "grace_s", "now", "words"),
    [
        (ONE, 30, 0, "worker 1 is asked to stop, with 30 s to do so"),
        (ORPHAN, 0.5, 0, "process 4711 is asked to stop, with 0.5 s to do so"),
        (ONE, 30, 30, "worker 1 is killed: it did not end within 30 s"),
        (ORPHAN, 0, 0, "process 4711 is killed at once"),
        (ONE.replace(name="rank 9 (pid 7)"), 0, 0, "rank 9 (pid 7) is killed at once"),
    ],
)
def test_every_signal_says_to_whom_and_why(target: Target, grace_s: float, now: float, words: str) -> None:
    stop, sends, _ = step(begun(grace_s=grace_s), [target], 0.0)
    if now:
        _, sends, _ = step(stop, [target], now)
    assert [send.why for send in sends] == [words]


@pytest.mark.parametrize(
    ("clock", "complaint"),
    [(shutdown.Clock(), "worker 1 is present and was never told"), (shutdown.Clock(5.0, 4.0), "worker 1 was killed before")],
)
def test_the_check_finds_what_cannot_be(clock: shutdown.Clock, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check(begun().replace(clocks={ONE: clock}))


# --- simulated crowds ------------------------------------------------------------------------------------------------------

# Quarters of a second are exact in floating point, so that bounds can be compared without a tolerance.
quarters = st.integers(0, 80).map(lambda number: number / 4)
reactions = st.one_of(st.none(), quarters)  # after how long a signal ends it; None: not at all


class Actor(NamedTuple):
    """One process: when it is first seen, when it would end by itself, and how it takes each signal."""

    appears_at: float
    lives_s: float | None
    ends_after_term_s: float | None
    ends_after_kill_s: float | None


actors = st.builds(Actor, quarters, reactions, reactions, reactions)


class Crowd:
    """Runs the rules against simulated processes, and writes down who was sent what and when."""

    def __init__(self, people: list[Actor], stop: Stop, hurry_at: float | None = None) -> None:
        self.people = {Target(number % 2 == 0, number): actor for number, actor in enumerate(people)}
        self.ends_at = {target: self._natural_end(actor) for target, actor in self.people.items()}
        self.stop = stop
        self.hurry_at = hurry_at
        self.told: dict[Target, float] = {}
        self.killed: dict[Target, float] = {}
        self.now = 0.0
        self.outcome: Gone | Waiting | GaveUp | None = None

    @staticmethod
    def _natural_end(actor: Actor) -> float:
        return actor.appears_at + actor.lives_s if actor.lives_s is not None else float("inf")

    def present(self) -> list[Target]:
        return [target for target, one in self.people.items() if one.appears_at <= self.now < self.ends_at[target]]

    def expected(self) -> bool:
        """Whether somebody is still to come."""
        return any(one.appears_at > self.now for one in self.people.values())

    def run(self, late_s: list[float]) -> None:
        """Until everybody is gone or given up; `late_s` says by how much each look is late."""
        delays = iter(late_s)
        for _ in range(20 * len(self.people) + 20):
            self._look()
            if isinstance(self.outcome, GaveUp) or (isinstance(self.outcome, Gone) and not self.expected()):
                return
            self.now = max(self._next_event() + next(delays, 0.0), self.now)
        raise AssertionError(f"no end in sight at {self.now}: {self.outcome}")

    def _look(self) -> None:
        if self.hurry_at is not None and self.now >= self.hurry_at:
            self.stop = hurry(self.stop)
        self.stop, sends, self.outcome = step(self.stop, self.present(), self.now)
        check(self.stop)
        assert self.stop.clocks.keys() == set(self.present())
        for send in sends:
            self._receive(send)

    def _receive(self, send: Send) -> None:
        assert send.why
        record = self.killed if send.signal == KILL else self.told
        assert send.target not in record, "a second time"
        record[send.target] = self.now
        actor = self.people[send.target]
        reaction = actor.ends_after_kill_s if send.signal == KILL else actor.ends_after_term_s
        if reaction is not None:
            self.ends_at[send.target] = min(self.ends_at[send.target], self.now + reaction)

    def _next_event(self) -> float:
        times = [one.appears_at for one in self.people.values()] + list(self.ends_at.values())
        if self.hurry_at is not None:
            times.append(self.hurry_at)
        if isinstance(self.outcome, Waiting):
            assert self.outcome.wake_at > self.now
            times.append(self.outcome.wake_at)
        return min(time for time in times if time > self.now)

    def seen_first_at(self, target: Target) -> float:
        return self.people[target].appears_at


crowds = st.lists(actors, max_size=8)
graces = st.one_of(st.just(0.0), quarters)
kill_waits = st.integers(1, 40).map(lambda number: number / 4)


@settings(deadline=None)
@given(crowds, graces, kill_waits)
def test_told_at_once_killed_when_the_grace_is_over_and_done_in_time(
    people: list[Actor], grace_s: float, kill_wait_s: float
) -> None:
    crowd = Crowd(people, begun(grace_s=grace_s, kill_wait_s=kill_wait_s))
    crowd.run([])
    for target, told_at in crowd.told.items():
        assert told_at == crowd.seen_first_at(target)
    for target, killed_at in crowd.killed.items():
        assert killed_at == crowd.seen_first_at(target) + grace_s
        assert (target in crowd.told) == (grace_s > 0)
    last_arrival = max((one.appears_at for one in people), default=0.0)
    assert crowd.now <= last_arrival + grace_s + kill_wait_s


@settings(deadline=None)
@given(crowds, graces, kill_waits)
def test_the_stuck_and_nobody_else_are_given_up_and_named(people: list[Actor], grace_s: float, kill_wait_s: float) -> None:
    """P10: the bounded wait, and who is named at its end, for any mixture of processes."""
    crowd = Crowd(people, begun(grace_s=grace_s, kill_wait_s=kill_wait_s))
    crowd.run([])
    if isinstance(crowd.outcome, GaveUp):
        assert set(crowd.outcome.stuck) == set(crowd.present())
        assert all(crowd.now >= crowd.killed[target] + kill_wait_s for target in crowd.outcome.stuck)
    else:
        assert crowd.outcome == Gone()
        assert crowd.present() == []


@settings(deadline=None)
@given(crowds, graces, kill_waits, quarters)
def test_hurried_nobody_is_waited_for_longer_than_the_kill_wait(
    people: list[Actor], grace_s: float, kill_wait_s: float, hurry_at: float
) -> None:
    crowd = Crowd(people, begun(grace_s=grace_s, kill_wait_s=kill_wait_s), hurry_at)
    crowd.run([])
    for target, killed_at in crowd.killed.items():
        grace_over_at = crowd.seen_first_at(target) + grace_s
        assert killed_at == min(grace_over_at, max(hurry_at, crowd.seen_first_at(target)))
    last_arrival = max((one.appears_at for one in people), default=0.0)
    assert crowd.now <= max(hurry_at, last_arrival) + kill_wait_s


@settings(deadline=None)
@given(crowds, graces, kill_waits, st.lists(quarters, max_size=40))
def test_a_shell_that_looks_late_breaks_no_promise(
    people: list[Actor], grace_s: float, kill_wait_s: float, late_s: list[float]
) -> None:
    """Nobody is killed before the grace is over, told or killed twice, or given up too early; `Crowd` checks the rest."""
    crowd = Crowd(people, begun(grace_s=grace_s, kill_wait_s=kill_wait_s))
    crowd.run(late_s)
    for target, killed_at in crowd.killed.items():
        assert killed_at >= crowd.told.get(target, crowd.seen_first_at(target)) + grace_s
    if isinstance(crowd.outcome, GaveUp):
        assert all(crowd.now >= crowd.killed[target] + kill_wait_s for target in crowd.outcome.stuck)


@settings(deadline=None)
@given(crowds, graces, kill_waits, st.integers(1, 4))
def test_reports_that_come_twice_change_nothing(
    people: list[Actor], grace_s: float, kill_wait_s: float, repetitions: int
) -> None:
    crowd = Crowd(people, begun(grace_s=grace_s, kill_wait_s=kill_wait_s))
    while True:
        crowd._look()
        for _ in range(repetitions):
            again = step(crowd.stop, crowd.present() * 2, crowd.now)
            assert again.sends == ()
            assert again.stop.clocks.keys() == {target for target in crowd.stop.clocks if target in crowd.present()}
        if isinstance(crowd.outcome, GaveUp) or (isinstance(crowd.outcome, Gone) and not crowd.expected()):
            break
        crowd.now = crowd._next_event()
