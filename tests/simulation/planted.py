"""Bugs on purpose: each breaks one rule that makes the protocol safe, and the simulator has to find it.

They are small replacements of one method or constant, in the code under test or in the agent that the simulator puts around it.
"""

from __future__ import annotations

from tests.simulation import agent
from tests.simulation.agent import Agent
from tests.simulation.engine import Engine
from tests.simulation.network import vouch
from tests.simulation.planting import BUGS, Patches, bug, planted

from rallypoint.coordination import keyspace
from rallypoint.coordination.embedded.client import EmbeddedCoordination, Line, Watches
from rallypoint.coordination.embedded.service import Watchers
from rallypoint.coordination.engine import UnreachableError
from rallypoint.coordination.fence import HeldLease
from rallypoint.coordination.model import Compare, Outcome, Put, Transaction
from rallypoint.protocol import draining, generation, leader, session
from rallypoint.protocol import job_records as job
from rallypoint.protocol.generation import Current, Gone, Policy
from rallypoint.protocol.leader import Forming, Leader, Roster
from rallypoint.protocol.participant import Participant
from rallypoint.protocol.restarts import Again, Purse
from rallypoint.protocol.session import Tenure
from rallypoint.rendezvous.driver import Driver

__all__ = ["BUGS", "planted"]


# The leader's writes.


@bug
def leader_writes_without_its_term() -> Patches:
    def fenced(self, compares, *operations):
        return Transaction((Compare(job.CLOSED, "create", 0), *compares), operations)

    return [(Leader, "_fenced", fenced)]


@bug
def generation_before_seats() -> Patches:
    operations, advance = Forming.operations, Forming.advance

    def generation_first(self):
        real, self._step = self._step, {0: 0, 1: 1_000_000}.get(self._step, self._step - 1)
        found = operations(self)
        self._step = real
        return found

    def advance_later(self):
        self._step -= 1
        is_last = advance(self)
        self._step += 1
        return is_last and self._step > 1

    return [(Forming, "operations", generation_first), (Forming, "advance", advance_later)]


@bug
def seats_of_any_attempt() -> Patches:
    def without_attempt(number, attempt):
        return f"seats/{number}.0/"

    def nothing_to_clear(self):
        return [Put(job.STATUS, b'{"text":""}')] if self._step == 0 else operations(self)

    operations = Forming.operations
    return [(job, "seats_of_attempt", without_attempt), (Forming, "operations", nothing_to_clear)]


@bug
def signal_not_compared() -> Patches:
    def signal(self, number, record, *more):
        return self._fenced((), Put(job.signal_key(number), job.encode(record)), *more)

    return [(Leader, "_signal", signal), (Leader, "_interrupt", signal)]


@bug
def formed_twice_after_a_lost_answer() -> Patches:
    class Anything(int):
        __ne__ = lambda self, other: False  # noqa: E731

    make = Forming.__init__

    def init(self, number, *args):
        make(self, number, *args)
        self.number = Anything(number)

    return [(Forming, "__init__", init)]


# What the leader knows.


@bug
def no_recount_of_who_is_done() -> Patches:
    def load(self, items, now):
        for item in items:
            if not item.key.startswith("up/done/"):
                self._put(item, now)

    return [(Roster, "load", load)]


@bug
def no_recount_of_failures() -> Patches:
    """Whoever leads next pays for a failure as if nobody had failed; so the budget never ends."""

    def load(self, items, now):
        for item in items:
            if not item.key.startswith("up/failures/"):
                self._put(item, now)

    return [(Roster, "load", load)]


@bug
def purse_starts_anew_with_each_leader() -> Patches:
    def judge(policy, purse, ended):
        again = real(policy, Purse(), ended)
        return again if isinstance(again, Again) else Again(Purse(), 0.0, "none", "")

    real = leader.judge
    return [(leader, "judge", judge)]


@bug
def no_wait_for_the_fence() -> Patches:
    return [(generation, "_when_the_lost_have_stopped", lambda *_: float("-inf"))]


@bug
def no_wait_for_busy_members() -> Patches:
    def regroup(roster, current, policy, now):
        busy = {one for one in current.members if one in roster and roster[one].record.ready_after < current.number}
        return real({one: node for one, node in roster.items() if one not in busy}, current, policy, now)

    real = generation._regroup
    return [(generation, "_regroup", regroup)]


@bug
def joiner_after_a_done() -> Patches:
    def running(nodes, current: Current, policy: Policy, now):
        is_lost = any(one not in nodes and one not in current.done for one in current.members)
        if is_lost or len(current.done) == len(current.members):
            return real(nodes, current, policy, now)
        return generation._consider_joiners(nodes, current, policy, now)

    real = generation._running
    return [(generation, "_running", running)]


@bug
def ranks_not_kept() -> Patches:
    return [(generation, "_old_places", lambda chosen, before: {})]


@bug
def more_nodes_than_allowed() -> Patches:
    def usable(nodes, policy):
        return nodes if nodes >= policy.min_nodes else 0

    return [(generation, "usable", usable)]


@bug
def decision_not_repeated_when_it_was_lost() -> Patches:
    def decide_once(self, board, now):
        self._decide_at = None
        return real(self, board, now)

    real = Leader._decide
    return [(Leader, "_decide", decide_once)]


@bug
def preemption_is_charged_as_a_departure() -> Patches:
    def ended(self, *arguments):
        found = real(self, *arguments)
        return found.replace(departed=(*found.departed, *found.preempted), preempted=())

    real = Roster.ended
    return [(Roster, "ended", ended)]


@bug
def joiner_without_a_budget() -> Patches:
    return [(Leader, "_why_nobody_may_join", lambda self, board, now: "")]


# What a member does.


@bug
def done_is_bound_to_the_lease() -> Patches:
    def next_write(self):
        request = real(self)
        if request is not None and request.then[0].key.startswith("up/done/"):
            return Transaction((), (request.then[0].replace(lease=self._joining.lease),))
        return request

    real = Participant._next_write
    return [(Participant, "_next_write", next_write)]


@bug
def report_forgotten_when_ready() -> Patches:
    def ready(self, now, port):
        real(self, now, port)
        self._report = None

    real = Participant.ready
    return [(Participant, "ready", ready)]


@bug
def departs_although_it_is_done() -> Patches:
    return [(Participant, "_is_missed", lambda self, seat: self.board.number == seat.generation and self.board.signal() is None)]


# What a session makes of what it hears.


@bug
def seat_of_a_generation_that_is_over() -> Patches:
    return [(session, "_offered", lambda seated, behind: (session.Member(seated), (session.TakeSeat(seated),)))]


@bug
def waits_for_a_seat_after_the_end() -> Patches:
    """What was said already is not said again: it would wait for ever."""
    return [(session, "_asked", lambda state: (session.Waiting(), (session.SayReady(),)))]


@bug
def stays_after_the_end_of_the_job() -> Patches:
    def after(state, word):
        return state if isinstance(state, session.Staying) and isinstance(word, session.Ended) else real(state, word)

    real = session._after
    return [(session, "_after", after)]


@bug
def who_is_asked_to_go_closes_the_job() -> Patches:
    def departure(why, me):
        return session.SayClosed("finished", why)

    return [(session, "_departure", departure)]


# What the client and the driver do.


@bug
def never_fenced() -> Patches:
    return [(EmbeddedCoordination, "valid_until", lambda self: float("inf"))]


@bug
def fence_counted_from_the_answer() -> Patches:
    def on_kept(self, lease, sent_at):
        def handle(what, fields):
            real(self, lease, self._clock())(what, fields)

        return handle

    real = EmbeddedCoordination._on_kept
    return [(EmbeddedCoordination, "_on_kept", on_kept)]


@bug
def lease_counted_from_the_next_keepalive() -> Patches:
    """Whatever was answered, and whenever it was sent, it counts from when the next one is due."""

    def note_answer(self, sent_at, is_kept):
        real(self, self.keep_at, is_kept)

    real = HeldLease.note_answer
    return [(HeldLease, "note_answer", note_answer)]


@bug
def lease_lives_on_when_it_is_lost() -> Patches:
    def note_answer(self, sent_at, is_kept):
        real(self, sent_at, True)

    real = HeldLease.note_answer
    return [(HeldLease, "note_answer", note_answer)]


@bug
def resumed_under_the_new_token() -> Patches:
    """The store knows nothing of that session, so whose connection breaks takes its lease for ended."""

    def on_open(self, now):
        self._token = self._line.token
        real(self, now)

    real = EmbeddedCoordination.on_open
    return [(EmbeddedCoordination, "on_open", on_open)]


@bug
def lease_forgotten_by_a_break() -> Patches:
    """Who has no lease is not fenced, and it takes nothing up."""

    def on_break(self):
        real(self)
        self._lease = None

    real = EmbeddedCoordination.on_break
    return [(EmbeddedCoordination, "on_break", on_break)]


@bug
def watches_forgotten_by_a_break() -> Patches:
    return [(Watches, "renew", lambda self: [])]


@bug
def who_was_ready_is_not_in_its_next_session() -> Patches:
    def end_session(self, tenure, why):
        self._ready_port = None
        return real(self, tenure, why)

    real = Driver._end_session
    return [(Driver, "_end_session", end_session)]


@bug
def what_was_said_between_sessions_is_lost() -> Patches:
    def drive(self, engine, tenure):
        if self._agent.sessions > 1:
            self._sayings.clear()
        return real(self, engine, tenure)

    real = Driver._drive
    return [(Driver, "_drive", drive)]


@bug
def ready_before_the_workers_are_gone() -> Patches:
    def stop(self, why, at_once):
        real(self, why, at_once)
        participant = self.participant
        if participant is not None and not self.is_leaving and self.workers:
            participant.ready(self.time(), 1)

    real = Agent._stop
    return [(Agent, "_stop", stop)]


@bug
def leaves_before_the_workers_are_gone() -> Patches:
    def terminate(self):
        if self.participant is not None and not self.is_host and self.is_alive and not self.is_leaving:
            self.driver.tell(Participant.leave)
            self.driver.stop(0.0)
        real(self)

    real = Agent.terminate
    return [(Agent, "terminate", terminate)]


@bug
def lost_answer_taken_for_success() -> Patches:
    def transact(self, transaction, deadline):
        try:
            return real(self, transaction, deadline)
        except UnreachableError:
            return Outcome(True, self._agent.engine.keyspace.revision, (None,))

    real = EmbeddedCoordination.transact
    return [(EmbeddedCoordination, "transact", transact)]


@bug
def watch_resumed_one_too_late() -> Patches:
    def renew(self):
        return [(prefix, revision + 1) for prefix, revision in real(self)]

    real = Watches.renew
    return [(Watches, "renew", renew)]


# The store's service.


@bug
def watch_begins_with_the_next_change() -> Patches:
    """What has happened between a read and the watch that follows on it is told to nobody."""

    def changes(self, prefix, from_revision):
        real(self, prefix, from_revision)
        return []

    real = keyspace.Keyspace.changes
    return [(keyspace.Keyspace, "changes", changes)]


@bug
def news_for_one_group_only() -> Patches:
    """Who leads watches more than the others do: what concerns all is then told to some."""

    def route(self, events):
        yield from [*real(self, events)][:1]

    real = Watchers.route
    return [(Watchers, "route", route)]


# Proof: a member is replaced only when its workers are surely gone.


@bug
def v1_who_does_not_stop_in_time_is_replaced() -> Patches:
    """V1: after its time it is left out, although it lives and its workers run."""

    def regroup(roster, current, policy, now):
        is_late = now >= current.signal_at + policy.ready_timeout_s
        late = {one for one in current.members if one in roster and roster[one].record.ready_after < current.number}
        return real({one: node for one, node in roster.items() if not (is_late and one in late)}, current, policy, now)

    real = generation._regroup
    return [(generation, "_regroup", regroup)]


@bug
def v2_the_fence_waits_for_the_main_thread() -> Patches:
    """V2: the thread that notices only tells the one that kills, and nobody else does."""

    return [(Driver, "_end_licence", lambda self: None), (Agent, "_look_at_licence", lambda self, group: None)]


@bug
def v4_a_closed_connection_is_taken_for_death() -> Patches:
    """V4: after a grace of 0.3 s the store ends the lease of whoever has not come back, as if somebody had vouched."""

    def on_gone(self, connection, now):
        real(self, connection, now)
        session = connection.session
        if session is not None and session.connection is None and not self.is_replicated:
            self.world.after(0.3, drop, self, session)

    def drop(self, session):
        if session.connection is None and not self.is_dead:
            self.keyspace.vouch(session.lease)
            self._turn()

    real = Engine._on_gone
    return [(Engine, "_on_gone", on_gone)]


@bug
def v5_the_warden_holds_no_licence() -> Patches:
    """V5: an agent that is stopped cannot kill its workers, and nobody else does."""
    return [(Agent, "_look_at_licence", lambda self, group: None)]


@bug
def licence_renewed_without_a_seat() -> Patches:
    """A new session then lets the workers of the last one run, whose seat their agent had just taken."""
    return [(Tenure, "licence_until", lambda self, valid_until: valid_until), (agent, "SLOW_START_S", 1.0)]


@bug
def licence_renewed_without_a_word_of_the_store() -> Patches:
    """Each turn of the driver counts for one; whoever is stopped after it has not heard of the store for longer."""

    def renew_licence(self, engine, tenure):
        real(self, engine, tenure)
        if self._licence.until:
            self._licence.extend(self._clock() + self._patience.lease_s)

    real = Driver._renew_licence
    return [(Driver, "_renew_licence", renew_licence)]


@bug
def licence_outlives_its_session() -> Patches:
    """Whoever was expelled, or not heard of in time, is part of nothing any more, and its workers run on."""

    def end(self):
        return real(self).replace(had_seat=False)

    real = Tenure.end
    return [(Tenure, "end", end)]


@bug
def testimony_before_the_workers_are_gone() -> Patches:
    def die(self, with_machine=False, with_warden=False):
        testimony = self.licence.testimony
        real(self, with_machine, with_warden)
        if testimony is not None and not with_machine:
            vouch(self.world, self.link, self.engine, testimony)

    real = Agent.die
    return [(Agent, "die", die), (agent, "WARDEN_S", 3.0)]


@bug
def vouches_for_itself_too_early() -> Patches:
    def vouching(self):
        return () if self._former is None else (Put(job.left_key(self._former.generation, self._former.id), job.LOST),)

    return [(Participant, "_vouching", vouching)]


@bug
def expelled_and_not_waited_for() -> Patches:
    def stopped_at(self, policy):
        return float("-inf") if self.cause == "expelled" else real(self, policy)

    real = Gone.stopped_at
    return [(Gone, "stopped_at", stopped_at)]


@bug
def workers_killed_and_nobody_told() -> Patches:
    def ready(self, now, port):
        real(self, now, port)
        self._fallen_in = 0

    real = Participant.ready
    return [(Participant, "ready", ready)]


# A node that has to leave.


@bug
def step_that_a_worker_may_have_passed() -> Patches:
    def rule(busy, told, known):
        ruling = real(busy, told, known)
        is_new = ruling.step != job.NO_STEP and (known is None or known.step == job.NO_STEP)
        return ruling.replace(step=ruling.step - 1) if is_new else ruling

    real = draining.rule
    return [(draining, "rule", rule)]


@bug
def complete_when_some_have_saved() -> Patches:
    def rule(busy, told, known):
        return real([one for one in busy if one in told and told[one].has_saved] or busy, told, known)

    real = draining.rule
    return [(draining, "rule", rule)]


# A store that was started anew, in the place of one that was lost with its host.


@bug
def formed_while_workers_of_the_lost_store_may_run() -> Patches:
    """The members that have come back are all that counts; who has not may be cut off, and within its fence."""

    def past_of(*args):
        past = real(*args)
        return None if past is None else past.replace(over_at=float("-inf"))

    real = leader.past_of
    return [(leader, "past_of", past_of)]


@bug
def number_used_again_in_the_new_store() -> Patches:
    def past_of(memories, known_number, *args):
        past = real(memories, known_number, *args)
        return None if past is None else past.replace(number=known_number)

    real = leader.past_of
    return [(leader, "past_of", past_of)]


@bug
def purse_forgotten_with_the_store() -> Patches:
    return [(leader, "spent", lambda memories, known_number, known: known)]


@bug
def ranks_forgotten_with_the_store() -> Patches:
    def past_of(*args):
        past = real(*args)
        return None if past is None else past.replace(members={})

    real = leader.past_of
    return [(leader, "past_of", past_of)]


@bug
def loss_of_the_host_not_counted() -> Patches:
    def what_ended(self, form, current, *args):
        return None if current is None else real(self, form, current, *args)

    real = Leader._what_ended
    return [(Leader, "_what_ended", what_ended)]


@bug
def memory_heard_before_the_first_generation_only() -> Patches:
    def past_of(memories, known_number, *args):
        return None if known_number else real(memories, known_number, *args)

    real = leader.past_of
    return [(leader, "past_of", past_of)]


@bug
def memory_lost_by_a_session_without_a_generation() -> Patches:
    """The host is lost twice, before the job has gone on: nobody knows any more what was before the first time."""

    def note_background(self, ending):
        real(self, ending)
        self._memory = self._store, ending.memory

    real = Driver._note_background
    return [(Driver, "_note_background", note_background)]


@bug
def new_store_taken_for_the_old_one() -> Patches:
    """What was meant for the one that is lost is written into the one that knows nothing of it."""

    def dialled(self, now):
        self.incarnation = ""
        return real(self, now)

    real = Line._dialled
    return [(Line, "_dialled", dialled)]


# The store.


@bug
def absence_of_the_store_not_forgiven() -> Patches:
    return [(keyspace, "AWAY_S", float("inf"))]
