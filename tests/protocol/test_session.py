"""A node's membership as a state machine: the whole table of words, what each state leaves with, and what holds for any story."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.protocol import job_records as job
from rallypoint.protocol.agent_machine import JobEnded
from rallypoint.protocol.generation import Policy
from rallypoint.protocol.participant import Joining, Participant
from rallypoint.protocol.restarts import Purse, RestartPolicy
from rallypoint.protocol.session import (
    Action,
    Announce,
    Apart,
    Ask,
    CutOff,
    Depart,
    Done,
    Ended,
    Expired,
    Failed,
    Fenced,
    Finished,
    GiveUp,
    Go,
    JobOver,
    LastWord,
    Leave,
    Lost,
    Me,
    Member,
    Observation,
    Over,
    Progress,
    Refused,
    Regroup,
    SayClosed,
    SayDeparting,
    SayDone,
    SayFailed,
    SayReady,
    Seated,
    State,
    Stay,
    Staying,
    StoreLost,
    TakeSeat,
    Tell,
    TimedOut,
    Waiting,
    Word,
    closes_the_job,
    has_to_regroup,
    hear,
    how,
    last_word,
    say,
    seat_of,
    step,
)
from rallypoint.protocol.verdict import NodeReport


def seated(number: int) -> Seated:
    seat = job.Seat(number, 7, "a", 0, 2, 0, 8, 0, 8)
    return Seated(seat, job.Generation(number, 7, 2, 8, "a.example", 29500, "2 nodes are here", Purse()))


SEATED, NEXT = seated(3), seated(4)
FINISHED, CLOSED = job.Closed("finished", "all are done", "b"), job.Closed("closed", "b closed it", "b")
LOST = Lost(OSError("nobody listens there"))
REPORT = NodeReport("a", 0, ())
MEMBER = Me("a", is_host=False, serves_workers=False)
SERVER = Me("a", is_host=False, serves_workers=True)
HOST = Me("a", is_host=True, serves_workers=False)

STATES: dict[str, State] = {
    "Apart": Apart(),
    "Waiting": Waiting(),
    "Member": Member(SEATED),
    "Departing": Member(SEATED, is_departing=True),
    "Finished": Finished(SEATED),
    "Staying": Staying(SEATED),
    "Over": Over(SEATED, is_done=False),
    "OverDone": Over(SEATED, is_done=True),
    "JobOver": JobOver(CLOSED, SEATED),
    "JobOverWaiting": JobOver(CLOSED, None),
    "StoreLost": StoreLost(LOST, SEATED, is_done=False),
}
WORDS: dict[str, Word] = {
    "Seated": NEXT,
    "Regroup": Regroup("rank 1 failed", 3),
    "Fenced": Fenced("no answer"),
    "CutOff": CutOff("no answer"),
    "Refused": Refused("another has its rank"),
    "TimedOut": TimedOut("waited 30 s"),
    "Progress": Progress("1 of 2 nodes are here"),
    "Lost": LOST,
    "Finished": Ended(FINISHED),
    "Closed": Ended(CLOSED),
}

GENERATION_OVER = ("Regroup", "Fenced", "CutOff", "Refused")

# To where each word leads; what is not named leaves the state as it is.
LEADS_TO: dict[tuple[str, str], State] = {
    ("Waiting", "Seated"): Member(NEXT),
    **{(name, word): Over(SEATED, False) for name in ("Member", "Departing") for word in GENERATION_OVER},
    **{("Staying", word): Over(SEATED, True) for word in GENERATION_OVER},
    **{("Finished", word): Over(SEATED, True) for word in ("Regroup", "Refused")},
    **{(name, "Lost"): StoreLost(LOST, None, False) for name in ("Apart", "Waiting")},
    **{(name, "Lost"): StoreLost(LOST, SEATED, False) for name in ("Member", "Departing", "Over", "StoreLost")},
    **{(name, "Lost"): StoreLost(LOST, SEATED, True) for name in ("Finished", "Staying", "OverDone")},
    **{(name, "Finished"): JobOver(FINISHED, seat_of(state)) for name, state in STATES.items()},
    **{(name, "Closed"): JobOver(CLOSED, seat_of(state)) for name, state in STATES.items()},
}
FOR_WHO_WAITS: dict[str, tuple[Action, ...]] = {
    "Seated": (TakeSeat(NEXT),),
    "Refused": (GiveUp(WORDS["Refused"]),),
    "TimedOut": (GiveUp(WORDS["TimedOut"]),),
    "Progress": (Announce("1 of 2 nodes are here"),),
    "Lost": (GiveUp(LOST),),
    "Finished": (GiveUp(Ended(FINISHED)),),
    "Closed": (GiveUp(Ended(CLOSED)),),
}
FOR_WHO_RUNS: dict[str, tuple[Action, ...]] = {
    "Regroup": (Tell(Regroup("rank 1 failed", 3)),),
    "Fenced": (Tell(Fenced("no answer")),),
    "CutOff": (Tell(CutOff("no answer")),),
    "Refused": (Tell(JobEnded("failed", "another has its rank")),),
    "Lost": (Tell(Fenced("nobody listens there")),),
    "Finished": (Tell(JobEnded("succeeded", "all are done")),),
    "Closed": (Tell(JobEnded("closed", "b closed it")),),
}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", STATES)
def test_what_a_word_leads_to(name: str, word: str) -> None:
    """Whose workers have all succeeded is not told that the store is lost: they need not be killed, and it may come back."""
    state, actions = hear(STATES[name], WORDS[word])
    assert state == LEADS_TO.get((name, word), STATES[name])
    is_spared = (name, word) == ("Finished", "CutOff")
    assert actions == (() if is_spared else (FOR_WHO_WAITS if name == "Waiting" else FOR_WHO_RUNS).get(word, ()))


@pytest.mark.parametrize(
    ("behind", "is_over"),
    [
        ((), False),
        ((Regroup("rank 1 failed", 4),), True),
        ((Fenced("no answer"),), True),
        ((CutOff("no answer"),), True),
        ((Progress("…"), Fenced("no answer")), True),
        ((Regroup("of the one before", 3),), False),
        ((LOST,), False),
    ],
)
def test_a_seat_of_a_generation_that_is_over_is_not_taken(behind: tuple[Word, ...], is_over: bool) -> None:
    expected = (Waiting(), (SayReady(),)) if is_over else (Member(NEXT), (TakeSeat(NEXT),))
    assert hear(Waiting(), NEXT, behind) == expected


@pytest.mark.parametrize("name", STATES)
def test_who_asks_for_a_seat_waits_or_is_told_why_not(name: str) -> None:
    """It hung there: the job's end had been heard while its workers ran, and nobody said it a second time."""
    expected: dict[str, tuple[State, tuple[Action, ...]]] = {
        "Waiting": (Waiting(), ()),
        "JobOver": (STATES["JobOver"], (GiveUp(Ended(CLOSED)),)),
        "JobOverWaiting": (STATES["JobOverWaiting"], (GiveUp(Ended(CLOSED)),)),
        "StoreLost": (STATES["StoreLost"], (GiveUp(LOST),)),
    }
    assert step(STATES[name], Ask()) == expected.get(name, (Waiting(), (SayReady(),)))


@pytest.mark.parametrize(
    ("name", "seen", "state", "actions"),
    [
        ("Member", Done(), Finished(SEATED), (SayDone(),)),
        ("Departing", Done(), Over(SEATED, True), (SayDone(),)),
        ("Over", Done(), Over(SEATED, True), (SayDone(),)),
        ("JobOver", Done(), JobOver(CLOSED, SEATED), (Tell(JobEnded("closed", "b closed it")),)),
        ("Member", Failed(REPORT), Member(SEATED), (SayFailed(REPORT),)),
        ("Member", Expired(), Over(SEATED, False), ()),
        ("Finished", Expired(), Over(SEATED, True), ()),
        ("Waiting", Expired(), Waiting(), ()),
        ("Member", Depart("SIGTERM", MEMBER), Member(SEATED, True), (SayDeparting("SIGTERM"),)),
        ("Finished", Depart("SIGTERM", SERVER), Over(SEATED, True), (SayDeparting("SIGTERM"),)),
        ("JobOver", Depart("SIGTERM", HOST), JobOver(CLOSED, SEATED), ()),
        ("Waiting", Depart("SIGTERM", MEMBER), Waiting(), (SayDeparting("SIGTERM"),)),
        (
            "Waiting", Depart("SIGTERM", HOST, 15), Waiting(),
            (SayClosed("host_left", "SIGTERM; a hosts the coordination store, so the job ends for all", 15),),
        ),
        (
            "Member", Depart("SIGTERM", HOST), Member(SEATED, True),
            (SayClosed("host_left", "SIGTERM; a hosts the coordination store, so the job ends for all"),),
        ),
        (
            "Member", Depart("no time", HOST, ends_as="unsaved"), Member(SEATED, True),
            (SayClosed("unsaved", "no time; a hosts the coordination store, so the job ends for all"),),
        ),
        ("Member", Depart("no time", MEMBER, ends_as="unsaved"), Member(SEATED, True), (SayDeparting("no time"),)),
        ("Member", Depart("me stopped", MEMBER, ends_as="stopped"), Member(SEATED, True), (SayClosed("stopped", "me stopped"),)),
        ("Waiting", Depart("me stopped", HOST, ends_as="stopped"), Waiting(), (SayClosed("stopped", "me stopped"),)),
        ("JobOver", Depart("me stopped", HOST, ends_as="stopped"), JobOver(CLOSED, SEATED), ()),
    ],
)  # fmt: skip
def test_what_the_agent_reports(name: str, seen: Observation, state: State, actions: tuple[Action, ...]) -> None:
    assert step(STATES[name], seen) == (state, actions)


SICK = "a cannot run workers: no such file"
HOST_HAS_ENDED = SayClosed("host_left", "a, which hosts the coordination store, has ended")


@pytest.mark.parametrize(
    ("name", "failure", "ends_job", "me", "actions"),
    [
        ("Member", "", False, MEMBER, (Go(False),)),
        ("Member", "no such file", False, MEMBER, (SayDeparting(SICK, is_sick=True), Go(False))),
        ("Member", "no such file", True, MEMBER, (SayClosed("failed", "a: no such file"), Go(False))),
        ("Member", "no such file", False, HOST, (SayClosed("failed", SICK), Go(False))),
        ("Member", "", False, HOST, (HOST_HAS_ENDED, Go(False))),
        ("Member", "", False, SERVER, (Go(False),)),
        ("Waiting", "no such file", True, MEMBER, (Go(False),)),
        ("Waiting", "no such file", False, HOST, (SayClosed("failed", SICK), Go(False))),
        ("Apart", "", False, HOST, (HOST_HAS_ENDED, Go(False))),
        ("Finished", "", False, MEMBER, (Go(True),)),
        ("Finished", "", False, HOST, (Go(True),)),
        ("Finished", "", False, SERVER, (Stay(),)),
        ("Finished", "no such file", False, SERVER, (SayDeparting(SICK, is_sick=True), Go(True))),
        ("Staying", "", False, SERVER, (Go(True),)),
        ("OverDone", "", False, SERVER, (Go(True),)),
        ("Over", "", False, HOST, (HOST_HAS_ENDED, Go(False))),
        ("StoreLost", "", False, SERVER, (Go(False),)),
        ("JobOver", "no such file", True, HOST, (Go(False),)),
        ("JobOver", "", False, SERVER, (Go(False),)),
    ],
)
def test_how_it_leaves(name: str, failure: str, ends_job: bool, me: Me, actions: tuple[Action, ...]) -> None:
    assert step(STATES[name], Leave(failure, ends_job, me))[1] == actions


def test_what_is_wrong_is_said_in_a_line_that_fits() -> None:
    _, (closing, _) = step(Member(SEATED), Leave("x" * 10_000, True, MEMBER))
    assert isinstance(closing, SayClosed)
    assert len(closing.why) == job.MAX_WHY


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("finished", "succeeded"), ("failed", "failed"), ("host_left", "failed"), ("preempted", "failed"), ("closed", "closed"),
     ("unsaved", "failed"), ("stopped", "failed")],
)  # fmt: skip
def test_how_the_end_of_the_job_ends_a_run(kind: job.ClosedKind, expected: str) -> None:
    assert how(job.Closed(kind, "", "b")) == expected


def test_only_who_sits_in_a_generation_that_runs_closes_the_job() -> None:
    assert [name for name, state in STATES.items() if closes_the_job(state)] == ["Member", "Departing"]


def test_who_only_asks_learns_that_it_has_to_meet_anew() -> None:
    assert [name for name, word in WORDS.items() if has_to_regroup((WORDS["Progress"], word))] == [
        "Regroup",
        "Fenced",
        "CutOff",
        "Lost",
    ]


def test_what_is_said_reaches_the_participant() -> None:
    record = job.NodeRecord("a", "a.example", 0, "default", 2, job.NOT_READY)
    participant = Participant(Joining("a#1", 1, record, {}, lambda _, __: None, Policy(1, 2), RestartPolicy(3)))
    participant.seat = SEATED.seat
    for saying in (SayDone(), SayFailed(REPORT), SayDeparting("SIGTERM", is_sick=True), SayClosed("closed", "a closed it")):
        say(saying, participant)
    assert participant._done_in == 3
    assert participant._report == (3, REPORT)
    assert participant._departure == job.Signal("sick", "SIGTERM", "a")
    assert participant._closing == job.Closed("closed", "a closed it", "a")


@pytest.mark.parametrize(
    ("name", "me", "speaks", "rank", "expected"),
    [
        ("JobOver", MEMBER, True, 3, LastWord(True)),
        ("JobOver", HOST, False, 0, LastWord(False)),
        ("Waiting", MEMBER, True, None, LastWord(True)),
        ("Waiting", MEMBER, False, 0, LastWord(False)),
        ("Waiting", HOST, False, None, LastWord(True)),
        ("StoreLost", MEMBER, True, 0, LastWord(True)),
        ("StoreLost", MEMBER, False, 1, LastWord(True)),
        ("StoreLost", MEMBER, True, 2, LastWord(False)),
        ("Departing", HOST, False, 1, LastWord(True)),
        ("Departing", MEMBER, True, 1, LastWord(False, goes_on=True)),
        ("Departing", MEMBER, False, 0, LastWord(True, goes_on=True)),
    ],
)
def test_who_has_the_last_word_on_the_job(name: str, me: Me, speaks: bool, rank: int | None, expected: LastWord) -> None:
    assert last_word(STATES[name], me, speaks, rank) == expected


# Any story that a shell can tell.

SEEN = st.one_of(
    st.sampled_from([Ask(), Failed(REPORT), Done(), Expired()]),
    st.builds(Depart, st.just("SIGTERM"), st.sampled_from([MEMBER, SERVER, HOST])),
    st.builds(Leave, st.sampled_from(["", "no such file"]), st.booleans(), st.sampled_from([MEMBER, SERVER, HOST])),
)
STORY = st.lists(st.one_of(SEEN, st.sampled_from(list(WORDS.values()))), max_size=30)


def told(story: list[Observation | Word]) -> list[tuple[State, Observation | Word, State, tuple[Action, ...]]]:
    state: State = Apart()
    steps = []
    for one in story:
        after, actions = step(state, one) if isinstance(one, Observation) else hear(state, one)
        steps.append((state, one, after, actions))
        state = after
    return steps


@given(STORY)
def test_a_seat_is_taken_only_by_who_waits(story: list[Observation | Word]) -> None:
    for before, _, after, actions in told(story):
        if any(isinstance(one, TakeSeat) for one in actions):
            assert before == Waiting()
        if isinstance(after, Member) and not isinstance(before, Member):
            assert before == Waiting()


@given(STORY)
def test_the_end_of_the_job_is_final_and_nobody_says_it_again(story: list[Observation | Word]) -> None:
    has_ended = False
    for before, _, after, actions in told(story):
        assert not has_ended or isinstance(after, JobOver)
        has_ended = isinstance(after, JobOver)
        if isinstance(before, JobOver):
            assert not any(isinstance(one, SayClosed) for one in actions)


@given(STORY)
def test_who_is_ready_has_asked_for_a_seat(story: list[Observation | Word]) -> None:
    for _, seen, after, actions in told(story):
        if SayReady() in actions:
            assert after == Waiting()
            assert seen in (Ask(), NEXT)


@given(STORY)
def test_who_leaves_goes_or_stays_once(story: list[Observation | Word]) -> None:
    """The second time it goes, whatever has come between."""
    for before, seen, after, actions in told(story):
        if isinstance(seen, Leave):
            assert isinstance(actions[-1], Stay | Go)
            assert isinstance(actions[-1], Go) or (isinstance(before, Finished) and isinstance(after, Staying))
            assert isinstance(step(after, seen)[1][-1], Go)
