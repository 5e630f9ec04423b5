"""A node's membership in a job, and its sessions at the store: two state machines around its participant.

`Tenure` is one session at the coordination store. It begins with a lease and ends when the others may take this node for dead;
the next one is under another number. Whoever drives it (`rendezvous.driver`) asks here, before each turn, and does what the
answer says.

    judge          before each turn: go on, or the session is over (Fence), or all hope is (GiveUp)
    licence_until  after each turn: until when the workers may run
    returns_until  when the lease has ended: until when another one may be asked for, to go on as if nothing had been
    end            when it is over: who has to be vouched for by the next session, what is to be remembered should the store be
                   another one then, and whether workers have to go

The membership is what the node makes of it, over all its sessions: what it was told, in which state, leads to what it does next.

    Apart ──Ask──▶ Waiting ──Seated──▶ Member ──Done──▶ Finished ──Leave, if its store is needed──▶ Staying
                      ▲                   │                 │                                          │
                      └───────Ask────── Over ◀──────────────┴──────────────────────────────────────────┘
                                               Regroup, Refused; Fenced, unless it is Finished

    JobOver     from anywhere, by Ended: nobody gets a seat any more, but workers may go on
    StoreLost   from anywhere, by Lost: there is nobody left to ask

Two sides tell it something: the others of the job, in words (`hear`); and the agent of this node, which asks for a seat, reports,
departs and leaves (`step`). The shell performs the actions, in their order, and decides nothing.

A node leaves from whatever state it is in, which decides what it says: whether that ends the job for all, whether the others need
not wait for it, and whether it stays until they have gone.

Invariants: a seat is taken only by a node that waits for one, and never of a generation that is known to be over; who asks for a
seat is never left without one and without a reason; nobody who has heard of the job's end says it again. Workers are licensed
only for a seat of this session, and for no longer than before while it is not known whether the others have gone on without us;
time to return is counted once, from the loss of a lease until the return is confirmed.
"""

from __future__ import annotations

from rallypoint.base.records import Value
from rallypoint.coordination import fence
from rallypoint.protocol import job_records as job
from rallypoint.protocol.agent_machine import Fenced, JobEnded, Regroup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.protocol.agent_machine import How
    from rallypoint.protocol.participant import Former, Participant
    from rallypoint.protocol.verdict import NodeReport

__all__ = [
    "NO_LICENCE", "Action", "Announce", "Apart", "Aside", "Ask", "CutOff", "Depart", "Done", "Ended", "Ending", "Expired",
    "Failed", "Fenced", "Finished", "GiveUp", "Go", "Inquired", "JobOver", "LastWord", "Leave", "Lost", "Me", "Member", "News",
    "Noticed", "Observation", "Over", "Paced", "Patience", "Progress", "Refused", "Regroup", "Ruled", "SayClosed",
    "SayDeparting", "SayDone", "SayFailed", "SayReady", "Saying", "Seated", "State", "Stay", "Staying", "StoreLost", "TakeSeat",
    "Tell", "Tenure", "TimedOut", "Waiting", "Word", "closes_the_job", "has_to_regroup", "hear", "how", "last_word", "say",
    "seat_of", "step",
]  # fmt: skip


# Words: what the participant learns from the others (`News`), and what the silence of the store means, as its driver adds. What
# an agent with workers has to know goes by the same name here and in `agent_machine`.


class Seated(Value):
    """This node has a seat in a generation, and may start its workers."""

    seat: job.Seat
    generation: job.Generation


class Ended(Value):
    """The job is over."""

    closed: job.Closed


class Refused(Value):
    """This node may not take part, ever."""

    why: str


class TimedOut(Value):
    why: str


class Progress(Value):
    """How things stand for those who wait, and when this node gives up, if it will."""

    text: str
    gives_up_at: float | None = None


class AskedFor(Value):
    """Somebody from outside wants something of this node, which has this id, and waits for an answer to what has this number."""

    node_id: str
    number: int
    asked: job.Asked


class Noticed(Value):
    """A node of this generation, in which we have a seat, has to leave."""

    generation: int
    notice: job.Notice


class Ruled(Value):
    """When the workers of this generation save for that, and whether all have."""

    generation: int
    ruling: job.Ruling


class Inquired(Value):
    """Workers of this generation hang somewhere: our agent is asked about its own, or told what all have found."""

    generation: int
    inquiry: bytes  # as `protocol.inquiry` reads it


class Paced(Value):
    """Who is slower than the others in this generation, as all nodes have found."""

    generation: int
    found: bytes  # as `protocol.pace` reads it


class CutOff(Fenced):
    """The store is lost, or was started anew, and is waited for: no worker may run until it is there. Who has none left to run
    hears then whether the job goes on.
    """


class Lost(Value):
    """There is no store any more that we could take part in a job through."""

    error: Exception


Word = Seated | Regroup | Ended | Refused | TimedOut | Progress | Fenced | Lost
Aside = AskedFor | Noticed | Ruled | Inquired | Paced  # they pass by what is decided here: the agent's own thread may be busy
News = Seated | Regroup | Ended | Refused | TimedOut | Progress | Aside


# States, each with only its own data.


class Apart(Value):
    """Nobody has asked for a seat yet."""


class Waiting(Value):
    """No worker runs here, and the next generation may have us."""


class Member(Value):
    """We have a seat, and our workers may run. With `is_departing` we were asked to go."""

    seated: Seated
    is_departing: bool = False


class Finished(Value):
    """Our workers have all succeeded; those of others may need the store that is here."""

    seated: Seated


class Staying(Value):
    """We would leave, but for that store."""

    seated: Seated


class Over(Value):
    """The generation in which we sat is over for us; with `is_done` our workers had all succeeded."""

    seated: Seated
    is_done: bool


class JobOver(Value):
    """The job has ended, while we had a seat or none."""

    closed: job.Closed
    seated: Seated | None


class StoreLost(Value):
    """There is no store any more that we could take part through."""

    lost: Lost
    seated: Seated | None
    is_done: bool


State = Apart | Waiting | Member | Finished | Staying | Over | JobOver | StoreLost


# What the agent of this node asks and reports.


class Me(Value):
    """Who leaves: by its name, whether the job's store ends with it, and whether it has the store of the generation's workers."""

    name: str
    is_host: bool
    serves_workers: bool


class Ask(Value):
    """It wants to take part in the next generation; no worker runs here when it asks first."""


class Failed(Value):
    report: NodeReport


class Done(Value):
    """All our workers have succeeded."""


class Expired(Value):
    """Our workers were killed by their warden: their licence was over."""


class Depart(Value):
    """We are about to leave, because of a signal if that is given; our workers may still be there.

    If the job ends with us, it ends so; it does if we host its store, and for all nodes alike if somebody has ``stopped`` it.
    """

    why: str
    me: Me
    signal: int = 0
    ends_as: job.ClosedKind = "host_left"


class Leave(Value):
    """We leave, our workers being gone. `failure` is what is wrong with this node, and `ends_job` says that it is so for all."""

    failure: str
    ends_job: bool
    me: Me


Observation = Ask | Failed | Done | Expired | Depart | Leave


# Actions.


class SayReady(Value):
    """End the store of the last generation's workers, if it was here, or was to be. Then let the job know that no worker runs
    here, and hold the port that the next ones will need.
    """


class SayFailed(Value):
    report: NodeReport


class SayDone(Value):
    pass


class SayDeparting(Value):
    """The others need not wait for us; `is_sick`: nor hope for our return."""

    why: str
    is_sick: bool = False


class SayClosed(Value):
    """End the job, for all; `signal` says that it was stopped on purpose."""

    kind: job.ClosedKind
    why: str
    signal: int = 0


class TakeSeat(Value):
    """Let the agent start its workers."""

    seated: Seated


class Tell(Value):
    """Let the agent know what has become of its generation."""

    what: Regroup | Fenced | JobEnded


class Announce(Value):
    """Let the user know what we wait for, and until when."""

    text: str
    gives_up_at: float | None = None


class GiveUp(Value):
    """There will be no seat for us; `why` says so to the caller."""

    why: Ended | Refused | TimedOut | Lost


class Stay(Value):
    """Hear what comes, and then leave."""


class Go(Value):
    """Say goodbye. A host that `stays_for_others` serves them until the last has gone, whenever that is."""

    stays_for_others: bool


Saying = SayFailed | SayDone | SayDeparting | SayClosed
Action = SayReady | Saying | TakeSeat | Tell | Announce | GiveUp | Stay | Go
Step = tuple[State, tuple[Action, ...]]


# What the others say.


def hear(state: State, word: Word, behind: tuple[Word, ...] = ()) -> Step:
    """The next state and what to do, for a word from the job; `behind` are those that came after it."""
    if isinstance(state, Finished) and isinstance(word, CutOff):
        return state, ()
    if isinstance(state, Waiting):
        return _offered(word, behind) if isinstance(word, Seated) else (_after(state, word), _for_who_waits(word))
    return _after(state, word), _for_who_runs(word)


def _after(state: State, word: Word) -> State:
    match state, word:
        case _, Ended(closed):
            return JobOver(closed, seat_of(state))
        case JobOver(), _:
            return state
        case _, Lost():
            return StoreLost(word, seat_of(state), _is_done(state))
        case Finished(), Fenced():  # the loss of a node that is done is no loss: the workers of others go on
            return state
        case _, Regroup() | Fenced() | Refused():
            return _over(state)
    return state


def _offered(seated: Seated, behind: tuple[Word, ...]) -> Step:
    """Our place, unless that generation is over for us already: then no worker has to be started for it.

    Workers elsewhere may have been told of the port that we held for it, so the next one gets another.
    """
    number = seated.seat.generation
    if any(isinstance(one, Fenced) or (isinstance(one, Regroup) and one.generation == number) for one in behind):
        return Waiting(), (SayReady(),)
    return Member(seated), (TakeSeat(seated),)


def _for_who_waits(word: Word) -> tuple[Action, ...]:
    """What is said of a generation in which it has no seat yet is of no interest."""
    match word:
        case Ended() | Refused() | TimedOut() | Lost():
            return (GiveUp(word),)
        case Progress(text, gives_up_at):
            return (Announce(text, gives_up_at),)
    return ()


def _for_who_runs(word: Word) -> tuple[Action, ...]:
    """What becomes of its workers."""
    match word:
        case Regroup() | Fenced():
            return (Tell(word),)
        case Lost(error):
            return (Tell(Fenced(str(error))),)
        case Ended(closed):
            return (Tell(JobEnded(how(closed), closed.why)),)
        case Refused(why):
            return (Tell(JobEnded("failed", why)),)
    return ()


def how(closed: job.Closed) -> How:
    """What the end of the job means for a node that runs workers."""
    match closed.kind:
        case "finished":
            return "succeeded"
        case "failed" | "host_left" | "preempted" | "unsaved" | "stopped":
            return "failed"
    return "closed"


class LastWord(Value):
    """What a node that ends has to tell the world of its job: whether it is the one that tells, and whether others go on."""

    tells: bool
    goes_on: bool = False


def last_word(state: State, me: Me, speaks_for_job: bool, group_rank: int | None) -> LastWord:
    """Of a job that has ended one node tells: the one that ended it. A node that merely leaves tells if it is the first.

    Where the store is gone with its host, nobody can agree on who tells. The first two do, one of which may have been the host.
    """
    match state:
        case JobOver():
            return LastWord(speaks_for_job)
        case StoreLost():
            return LastWord(group_rank in (0, 1))
        case Apart() | Waiting():
            return LastWord(speaks_for_job or me.is_host)
    return LastWord(me.is_host or group_rank == 0, goes_on=not me.is_host)


def has_to_regroup(words: tuple[Word, ...]) -> bool:
    """For agents that only ask this: whether they are to meet anew."""
    return any(isinstance(one, Regroup | Fenced | Lost) for one in words)


# What the agent of this node says.


def step(state: State, seen: Observation) -> Step:
    """The next state and what to do, for what the agent asks or reports."""
    match seen:
        case Ask():
            return _asked(state)
        case Failed(report):
            return state, (SayFailed(report),)
        case Done() if isinstance(state, JobOver):  # it went on after the end of the job, for which it need not wait any more
            return state, _for_who_runs(Ended(state.closed))
        case Done():
            return _done(state), (SayDone(),)
        case Expired():
            return _over(state), ()
        case Depart() if isinstance(state, JobOver):
            return state, ()
        case Depart():
            return _departing(state), (_departure(seen),)
        case Leave():
            return _leave(state, seen)


def _asked(state: State) -> Step:
    match state:
        case Waiting():
            return state, ()
        case JobOver(closed, _):
            return state, (GiveUp(Ended(closed)),)
        case StoreLost(lost, _, _):
            return state, (GiveUp(lost),)
    return Waiting(), (SayReady(),)


def _done(state: State) -> State:
    match state:
        case Member(seated, is_departing):
            return Over(seated, True) if is_departing else Finished(seated)
        case Over(seated, _):
            return Over(seated, True)
    return state


def _over(state: State) -> State:
    match state:
        case Member(seated):
            return Over(seated, False)
        case Finished(seated) | Staying(seated):
            return Over(seated, True)
    return state


def _departing(state: State) -> State:
    """Whoever was asked to go stays for nobody."""
    match state:
        case Member(seated, _):
            return Member(seated, True)
        case Finished():
            return _over(state)
    return state


def _departure(seen: Depart) -> Action:
    if seen.ends_as == "stopped":
        return SayClosed("stopped", seen.why)
    if seen.me.is_host:
        why = f"{seen.why}; {seen.me.name} hosts the coordination store, so the job ends for all"
        return SayClosed(seen.ends_as, why, seen.signal)
    return SayDeparting(seen.why)


def _leave(state: State, seen: Leave) -> Step:
    match state:
        case Finished(seated) if seen.me.serves_workers and not seen.failure:
            return Staying(seated), (Stay(),)
        case JobOver():
            return state, (Go(stays_for_others=False),)
    left = Apart() if isinstance(state, Waiting) else state
    return left, (*_last_words(state, seen), Go(stays_for_others=_is_done(state)))


def _last_words(state: State, seen: Leave) -> tuple[Action, ...]:
    """What is wrong with this node alone need not end the job: the others go on if they are enough. The end of the host ends it,
    unless that is done and stays for the others.
    """
    me, failure, had_seat = seen.me, seen.failure, seat_of(state) is not None
    sick = f"{me.name} cannot run workers: {failure}"[: job.MAX_WHY]
    if failure and seen.ends_job and had_seat:
        return (SayClosed("failed", f"{me.name}: {failure}"[: job.MAX_WHY]),)
    if failure and me.is_host:
        return (SayClosed("failed", sick),)
    if failure and had_seat:  # who was refused must not stop a job of others
        return (SayDeparting(sick, is_sick=True),)
    if me.is_host and not _is_done(state):
        return (SayClosed("host_left", f"{me.name}, which hosts the coordination store, has ended"),)
    return ()


# What can be asked of a state.


def seat_of(state: State) -> Seated | None:
    """Our place in the generation that was last formed with us, until we ask for the next."""
    match state:
        case Apart() | Waiting():
            return None
    return state.seated


def _is_done(state: State) -> bool:
    match state:
        case Finished() | Staying():
            return True
        case Over(_, is_done) | StoreLost(_, _, is_done):
            return is_done
    return False


def closes_the_job(state: State) -> bool:
    """Whether the job is to end if this node shuts down: who has no seat in a generation that runs only leaves."""
    return isinstance(state, Member)


def say(saying: Saying, participant: Participant) -> None:
    """Let the participant know, which sees to it that the others do."""
    match saying:
        case SayFailed(report):
            participant.failed(report)
        case SayDone():
            participant.done()
        case SayDeparting(why, is_sick):
            participant.departing(why, is_sick)
        case SayClosed(kind, why, signal):
            participant.close(kind, why, signal)


# One session.


NO_LICENCE = 0.0


class Patience(Value):
    """How long a lease is, and how long a store may be silent, or refuse us, until we give up. With `takes_another`, a store that
    was started anew in the place of ours will do.
    """

    lease_s: float
    store_timeout_s: float
    refusal_timeout_s: float
    takes_another: bool = False


class Ending(Value):
    """What follows from the end of a session: what the next has to vouch for, or remember, and what becomes of the workers.

    With `had_seat` they may not run any longer; with `was_stopping` our agent is busy with stopping them, or stuck in it. With
    `was_replaced` the others are known to go on without us.
    """

    former: Former | None
    had_seat: bool
    was_stopping: bool
    was_replaced: bool = False
    memory: job.Memory | None = None


class Tenure:
    """The session of `participant`."""

    def __init__(self, participant: Participant, patience: Patience) -> None:
        self.participant = participant
        self._patience = patience
        self._returns_until = float("-inf")

    def judge(self, connection: fence.Connection, now: float) -> fence.Hold | fence.Fence | fence.GiveUp:
        """What the others have done counts first, then what their silence may mean."""
        participant, patience = self.participant, self._patience
        if participant.why_fenced:
            return fence.Fence(participant.why_fenced)
        if participant.is_returning and now >= self._returns_until:
            return fence.Fence("the coordination store did not confirm in time that this node is back")
        return fence.judge(connection, patience.store_timeout_s, patience.refusal_timeout_s, now)

    def licence_until(self, valid_until: float) -> float | None:
        """Until when our workers may run, if the store vouches for us until `valid_until`; None: as before."""
        if self.participant.seat is None:
            return NO_LICENCE
        return None if self.participant.is_returning else valid_until

    def returns_until(self, may_return_until: float) -> float:
        """Our lease has ended. Who loses the next one too, before the return was confirmed, has no more time than before."""
        if not self.participant.is_returning:
            self._returns_until = may_return_until
        return self._returns_until

    def end(self, now: float) -> Ending:
        one = self.participant
        return Ending(one.former, one.seat is not None, one.is_stopping, bool(one.why_fenced), one.memory(now))
