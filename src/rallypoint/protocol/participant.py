"""One node's part in a job, from the moment it has a lease until it leaves: a machine without I/O.

The shell around it does three things, again and again: it hands over what came (`see`, `replied`, and what the agent does:
`ready`, `failed`, `done`, `leave`), it performs the one request that `next_request` names, and it passes on what `take_news`
gives.

    join      agree on the settings; read and watch what is posted for all; write our own record
    always    campaign when there is no leader; lead when it is us
    ready     a generation was posted: look for our seat in it
    seated    stop when its signal says so; be fenced when the others go on without us

Invariants: a node is not ready while its workers may run; it takes a seat only of the attempt that the generation names; what it
writes about a generation, it writes under the number of the one it has a seat in.

The next request follows from what the node wants and what it knows, not from what it did last. So an answer that was
lost is no special case: the question is asked again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

from rallypoint.base.json_text import from_json
from rallypoint.base.records import Value
from rallypoint.base.text import stopped_text
from rallypoint.coordination import model as kv
from rallypoint.protocol import job_records as job
from rallypoint.protocol.generation import Policy
from rallypoint.protocol.inquiry import Statement, encode_statement
from rallypoint.protocol.job_records import Board
from rallypoint.protocol.leader import STATUS_INTERVAL_S, Leader
from rallypoint.protocol.restarts import RestartPolicy, matters_if_shared
from rallypoint.protocol.session import (
    AskedFor,
    Ended,
    Inquired,
    News,
    Noticed,
    Paced,
    Progress,
    Refused,
    Regroup,
    Ruled,
    Seated,
    TimedOut,
)
from rallypoint.protocol.verdict import PROBABLE_VICTIM, NodeReport, WorkerFailure, bounded, encode_report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.protocol.pace import NodePace

__all__ = ["Former", "Joining", "Participant"]


class Former(Value):
    """Under which id this node ran workers before, and of which generation."""

    id: str
    generation: int


class Joining(Value):
    """What a node brings: its number, its lease, who it is, and what it takes the job's settings to be.

    With `former` it can vouch, once it is ready, that nothing runs any more of what it was before it was fenced. It asks how
    things stand every `status_interval_s`. What it knows of the job from another store than this is its `memory`.
    """

    node_id: str
    lease: int
    record: job.NodeRecord
    settings: dict[str, Any]
    mismatch: Callable[[dict[str, Any], dict[str, Any]], str | None]
    policy: Policy
    restarts: RestartPolicy
    former: Former | None = None
    memory: job.Memory | None = None
    status_interval_s: float = STATUS_INTERVAL_S


class Participant:
    """A node with a lease."""

    def __init__(self, joining: Joining) -> None:
        self.id = joining.node_id
        self.record = joining.record
        self.board = Board()
        self.leader: Leader | None = None
        self.seat: job.Seat | None = None
        self._joining = joining
        self._agreed = False
        self._is_watching = False
        self._read_at = 0
        self._written: job.NodeRecord | None = None
        self._looked_at = 0  # the revision of the generation in which we have looked for our seat
        self._stopped = 0  # the last generation that our agent was told to stop
        self._report: tuple[int, NodeReport] | None = None  # of which generation; kept until it is written, whatever comes next
        self._statement: tuple[int, bytes] | None = None  # of which generation; until it is written
        self._inquired = 0, b""  # what our agent was last told of that
        self._pace: tuple[int, NodePace] | None = None  # how quick our workers are, in which generation; until it is written
        self._told_pace = 0, b""  # what our agent was last told of that
        self._is_done = False  # and that has to be told
        self._done_in = 0  # the last generation in which we were done
        self._fallen_in = 0  # the last generation whose workers are gone here, without being done
        self._departure: job.Signal | None = None
        self._notice: tuple[int, job.Notice] | None = None  # that we were given, and in which generation
        self._drain: tuple[int, job.NodeDrain] | None = None
        self._written_drain: tuple[int, job.NodeDrain] | None = None
        self._told_notice = 0  # the last generation for which our agent was told of a notice
        self._told_ruling: tuple[int, job.Ruling | None] = 0, None
        self._told_stop = False
        self._former = joining.former
        self.is_returning = False  # we have a new lease, but nobody has taken note yet that we are still a member
        self._is_forgotten = False  # nothing is left of the generation that we wanted to return to
        self._closing: job.Closed | None = None
        self.is_leaving = False
        self.has_left = False
        self._ready_at = 0.0
        self._status_at = 0.0
        self._news: list[News] = []
        self._has_ended = False
        self._last_seat: job.Seat | None = None
        self._memory = joining.memory  # while it is not told
        if self._memory is not None:  # whose workers have all succeeded may wait for the others still
            self._news.append(Regroup("the coordination store was started anew, and the job goes on there", self._memory.number))
        self._asked_by: Leader | None = None  # the leader, if the request under way is its

    # What the agent says.

    def ready(self, now: float, port: int) -> None:
        """No worker runs here; the next generation may have us. If nobody has ended the one that we sit in, we have to."""
        if self.seat is not None and self._done_in != self.seat.generation:
            self._fallen_in = self.seat.generation
        self.record = self.record.replace(ready_after=self._last_generation, port=port)
        self.seat, self._is_done, self.is_returning = None, False, False
        self._ready_at, self._status_at = now, now + self._joining.status_interval_s

    def judged(self, unfit: str) -> None:
        """Why this machine must not run workers now; empty: it may."""
        self.record = self.record.replace(unfit=unfit)

    def failed(self, report: NodeReport) -> None:
        """Workers of our generation have failed: all others are to stop."""
        if self.seat is not None:
            self._report = self.seat.generation, bounded(report)

    def declare(self, generation: int, statement: Statement) -> None:
        """Where our workers stand, as one hangs here or somewhere; it is of no use to any generation but its own."""
        self._statement = generation, encode_statement(statement)

    def paced(self, generation: int, told: NodePace) -> None:
        """How long our workers take for a step; of use to that generation alone."""
        self._pace = generation, told

    def done(self) -> None:
        """All our workers have succeeded."""
        if self.seat is not None:
            self._is_done, self._done_in = True, self.seat.generation

    def departing(self, why: str, is_sick: bool = False) -> None:
        """We shall leave once our workers are gone; the others need not wait for that to stop theirs.

        With `is_sick` something is wrong with this node: where too few others are left, nobody need hope for its return.
        """
        self._departure = job.Signal("sick" if is_sick else "departure", why[: job.MAX_WHY], self.record.name)

    def noticed(self, generation: int, notice: job.Notice) -> None:
        """We have to leave that generation; all workers are to save before."""
        self._notice = generation, notice

    def drains(self, generation: int, told: job.NodeDrain) -> None:
        """What our workers have told since somebody has to leave."""
        self._drain = generation, told

    def come_back(self, lease: int) -> None:
        """Our lease had run out, but not our fence: go on under the same id with a new one, if nobody has gone on without us."""
        self._joining = self._joining.replace(lease=lease)
        self._written = None
        self.is_returning = self.seat is not None
        self._agreed = self.is_returning  # who has no seat may meet another job of this name
        self.look_again()

    def look_again(self) -> None:
        """Changes were missed: read what is posted for all, and take up leadership anew."""
        self.board.is_loaded = False
        self.leader = None

    @property
    def lease(self) -> int:
        return self._joining.lease

    @property
    def _last_generation(self) -> int:
        """The last in which we had a seat."""
        return self._last_seat.generation if self._last_seat is not None else 0

    def memory(self, now: float) -> job.Memory | None:
        """What we know of the job, for the case that its store is lost; None if it had no generation yet."""
        board, seat = self.board, self._last_seat
        known = board.generation
        if known is None:
            return None
        group_rank = seat.group_rank if seat is not None and seat.generation == known.number else job.NO_SEAT
        ages_s = tuple(age_s + now - board.generation_at for age_s in known.purse.recent_ages_s)
        purse = known.purse.replace(recent_ages_s=ages_s)
        return job.Memory(known.number, known.nodes, self.record.name, group_rank, purse, known.strikes)

    @property
    def former(self) -> Former | None:
        """What the next session of this node has to vouch for."""
        return Former(self.id, self.seat.generation) if self.seat is not None else self._former

    def last_will(self) -> kv.Transaction | None:
        """What is true once all of this node's processes are gone: its workers are, and nobody has to wait for them.

        It is written only while this node's record is there, so that nothing is left of a job that has been cleared away.
        """
        if self.seat is None:
            return None
        gone = kv.Put(job.left_key(self.seat.generation, self.id), job.LOST)
        return kv.Transaction((kv.Compare(job.node_key(self.id), "create", 0),), (), (gone,))

    def ask_again(self) -> None:
        """Whoever is told what is asked of us is another one now, and knows nothing of what was asked once and still holds."""
        self._told_stop = False
        self._tell_stop_of_job()

    def close(self, kind: job.ClosedKind, why: str, signal: int = 0) -> None:
        self._closing = job.Closed(kind, why, self.record.name, signal=signal)

    def leave(self) -> None:
        self.is_leaving = True

    # What to ask next.

    def wake_at(self) -> float | None:
        """When to ask for the next request even if nothing happens."""
        times: list[float | None] = []
        if self.leader is not None and self.board.closed is None:  # after the end a leader has nothing to do
            times.append(self.leader.wake_at())
        if self._is_waiting():
            times += [self._status_at, self._gives_up_at()]
        return min((time for time in times if time is not None), default=None)

    def next_request(self, now: float) -> kv.Request | None:
        request = self._next_of_leaving() if self.is_leaving else self._next_of_member(now)
        self._asked_by = self.leader if request is None and not self.is_leaving else None
        if self._asked_by is not None:
            request = self._asked_by.next_request(self.board, now)
        return request

    def _next_of_member(self, now: float) -> kv.Request | None:
        if self._has_ended:
            return None
        if not self._agreed:
            return self._create(job.SETTINGS, json.dumps(self._joining.settings).encode())
        if not self.board.is_loaded:
            return kv.Read(job.DOWN)
        if not self._is_watching:
            return kv.Watch(job.DOWN, self._read_at + 1)
        return self._next_write() or self._next_look(now)

    def _next_write(self) -> kv.Transaction | None:
        """What we have to tell, most urgent first."""
        board, seat = self.board, self.seat
        if board.closed is not None:
            return None
        if self.is_returning:
            return self._return()
        if self._closing is not None:
            return self._create(job.CLOSED, job.encode(self._closing))
        if self._report is not None:
            generation, report = self._report
            looks_hopeless = any(self._matters_if_shared(one) for one in report.failures if not one.stopped)
            signal = job.Signal("failure", _summary(report), self.record.name, looks_hopeless)
            failure = kv.Put(job.failure_key(generation, self.id), encode_report(report))
            return self._create(job.signal_key(generation), job.encode(signal), failure)
        if seat is not None and self._departure is not None and self._is_missed(seat):
            return self._create(job.signal_key(seat.generation), job.encode(self._departure))
        if self._statement is not None and self._statement[0] == board.number and board.signal() is None:
            generation, statement = self._statement
            return kv.Transaction((), (kv.Put(job.hang_key(generation, self.id), statement),))
        if self._fallen_in and self._fallen_in == board.number and board.signal() is None:
            why = f"the workers of {self.record.name} were killed: the store had not confirmed in time that they may run"
            return self._create(job.signal_key(board.number), job.encode(job.Signal("loss", why, self.record.name)))
        if seat is not None and board.signal() is None and (told := self._next_of_drain(seat.generation)) is not None:
            return told
        if seat is not None and self._is_done:
            return kv.Transaction((), (kv.Put(job.done_key(seat.generation, self.id), b"1"),))
        if self._written != self.record and self._must_tell_record():
            return kv.Transaction((), (self._own_record(), *self._vouching(), *self._remembering()))
        return self._next_of_pace()

    def _next_of_pace(self) -> kv.Transaction | None:
        """How quick our workers are, which may wait for whatever else there is to tell."""
        if self._pace is None or self._pace[0] != self.board.number or self.board.signal() is not None:
            return None
        from rallypoint.protocol.pace import encode_node

        generation, told = self._pace
        return kv.Transaction((), (kv.Put(job.node_pace_key(generation, self.id), encode_node(told)),))

    def _matters_if_shared(self, failure: WorkerFailure) -> bool:
        known = self.board.generation
        return matters_if_shared(failure.exitcode, failure.message, failure.place, known.purse.streak_of if known else "")

    def _next_of_drain(self, generation: int) -> kv.Transaction | None:
        """That somebody has to leave, and what our workers tell since then."""
        notice, told = self._notice, self._drain
        if notice is not None and notice[0] == generation and generation not in self.board.notices:
            return self._create(job.notice_key(generation), job.encode(notice[1]))
        if told is not None and told[0] == generation and told != self._written_drain:
            return kv.Transaction((), (kv.Put(job.drain_key(generation, self.id), job.encode(told[1])),))
        return None

    def _own_record(self) -> kv.Put:
        return kv.Put(job.node_key(self.id), job.encode(self.record), self._joining.lease)

    def _vouching(self) -> tuple[kv.Put, ...]:
        """Who is ready has no worker, of whatever generation."""
        former = self._former if self.record.ready_after != job.NOT_READY else None
        return () if former is None else (kv.Put(job.left_key(former.generation, former.id), job.LOST),)

    def _remembering(self) -> tuple[kv.Put, ...]:
        """What the store has lost, if it has: no leader that does not know of it can form a generation after this."""
        if self._memory is None or self._memory.number <= self.board.number:
            return ()
        return kv.Put(job.memory_key(self.id), job.encode(self._memory)), kv.Put(job.RETURNED, self.id.encode())

    def _return(self) -> kv.Transaction | None:
        """Be a member again, unless another generation was formed; no leader that does not know of it can form one after this."""
        if self.seat is None or self._is_forgotten or self.board.number != self.seat.generation:
            return None  # we are fenced, and nothing that we write can change it
        unchanged = (
            kv.Compare(job.GENERATION, "mod", self.board.generation_revision),
            kv.Compare(job.expelled_key(self.id), "create", 0),
        )
        return kv.Transaction(unchanged, (self._own_record(), kv.Put(job.RETURNED, self.id.encode())), (kv.Get(job.GENERATION),))

    def _is_missed(self, seat: job.Seat) -> bool:
        """Whether the others cannot go on without us; they can if we are done."""
        return self.board.number == seat.generation and self.board.signal() is None and self._done_in != seat.generation

    def _must_tell_record(self) -> bool:
        """A member need not say that it is not ready, as everybody knows it."""
        return self.record.ready_after != job.NOT_READY or self.seat is None

    def _create(self, key: str, value: bytes, *more: kv.Operation, lease: int = 0) -> kv.Transaction:
        """Write what only the first may write; `more` is done in any case, and we learn what stands there."""
        return kv.Transaction((kv.Compare(key, "create", 0),), (kv.Put(key, value, lease), *more), (kv.Get(key), *more))

    def _next_of_leaving(self) -> kv.Transaction | None:
        if self._closing is not None and self.board.closed is None:
            return self._create(job.CLOSED, job.encode(self._closing))
        if self.has_left:
            return None
        if self.seat is not None and self._departure is not None and self.board.closed is None and self._is_missed(self.seat):
            return self._create(job.signal_key(self.seat.generation), job.encode(self._departure))
        go: tuple[kv.Operation, ...] = (kv.Delete(job.node_key(self.id)),)
        if 0 < self.board.number <= self._last_generation and self.board.closed is None:
            go = (*go, kv.Put(job.left_key(self._last_generation, self.id), job.LEFT))
        term = self.leader.term if self.leader else 0  # who does not lead deletes the leader's key only if there is none
        return kv.Transaction((kv.Compare(job.LEADER, "create", term),), (*go, kv.Delete(job.LEADER)), go)

    def _next_look(self, now: float) -> kv.Request | None:
        board = self.board
        if board.leader is None:
            return self._create(job.LEADER, self.id.encode(), lease=self._joining.lease)
        if self._is_ready() and board.generation is not None and self._looked_at != board.generation_revision:
            return kv.Transaction((), (kv.Get(job.seat_key(board.number, board.generation.attempt, self.id)),))
        if self._is_waiting():
            return self._next_of_waiting(now)
        return None

    def _next_of_waiting(self, now: float) -> kv.Transaction | None:
        gives_up_at = self._gives_up_at()
        if gives_up_at is not None and now >= gives_up_at:
            self._end(TimedOut(f"waited {self._joining.policy.join_timeout_s:g} s for enough nodes in vain"))
        elif now >= self._status_at:
            self._status_at = now + self._joining.status_interval_s
            return kv.Transaction((), (kv.Get(job.STATUS),))
        return None

    def _is_ready(self) -> bool:
        return self.record.ready_after != job.NOT_READY and self._written == self.record

    def _is_waiting(self) -> bool:
        return self._is_ready() and not self._has_ended and not self.is_leaving

    def _gives_up_at(self) -> float | None:
        """When we have waited long enough; while a generation runs without us, as a spare, we wait for as long as it does."""
        if self.board.generation is not None and self.board.signal() is None:
            return None
        since = max(self._ready_at, self.board.signal_at.get(self.board.number, 0.0))
        return since + self._joining.policy.join_timeout_s

    def _end(self, news: News) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._news.append(news)

    # What the store says.

    def see(self, event: kv.Event, now: float) -> None:
        if event.key == job.ASKED:
            self._hear_wish(event)
        elif event.key.startswith(job.DOWN):
            self.board.apply(event, now)
            self._board_changed(now)
        elif self.leader is not None:
            self.leader.see(event, now)

    def _hear_wish(self, event: kv.Event) -> None:
        """What was asked before we came was not meant for us: only a change counts, not what is read."""
        if event.item is None or event.revision <= self._read_at:
            return
        with suppress(ValueError):
            asked = job.decode(job.Asked, event.item.value)
            if asked.node in ("", self.id):
                self._news.append(AskedFor(self.id, event.revision, asked))

    def replied(self, request: kv.Request, answer: kv.Outcome | kv.Snapshot | None, now: float) -> None:
        if self._asked_by is not None:
            self._pass_on(self._asked_by, request, answer, now)
            return
        match request, answer:
            case kv.Read(job.DOWN), kv.Snapshot(revision, _):
                self.board.load(answer, now)
                self._read_at, self._is_watching = revision, False
            case kv.Watch(), _:
                self._is_watching = True
            case kv.Transaction(), kv.Outcome():
                self._note_outcome(request, answer, now)
        self._board_changed(now)

    def _pass_on(self, leader: Leader, request: kv.Request, answer: kv.Outcome | kv.Snapshot | None, now: float) -> None:
        """The answer to a leader's question; its term may have ended meanwhile."""
        if leader is not self.leader:
            return
        leader.replied(request, answer, self.board, now)
        if leader.must_reload:  # what it knew was not so any more
            self.look_again()
        self._board_changed(now)

    @property
    def why_fenced(self) -> str:
        """Why our workers must not run any longer, if that is so: the others go on without us."""
        board, seat = self.board, self.seat
        if self.id in board.expelled:
            return f"the others go on without this node: {board.expelled[self.id]}"
        if seat is not None and board.number > seat.generation:
            return f"generation {board.number} was formed without this node"
        if seat is not None and self._is_forgotten:
            return f"generation {seat.generation} is not in the store any more: the job was cleared"
        return ""

    @property
    def speaks_for_job(self) -> bool:
        """Whether it is on this node to tell the world how the job has ended: it has ended it, or would as things stand."""
        could_end_it = self.leader is not None or self._closing is not None
        return could_end_it and (self.board.closed is None or self.board.closed.by == self.record.name)

    @property
    def is_stopping(self) -> bool:
        """Whether our agent was told to stop the workers of our generation, and has not said yet that they are gone."""
        return self.seat is not None and self._stopped == self.seat.generation

    def take_news(self) -> list[News]:
        news, self._news = self._news, []
        return news

    # What follows from what came.

    def _note_outcome(self, request: kv.Transaction, outcome: kv.Outcome, now: float) -> None:
        for operation in request.then if outcome.succeeded else request.otherwise:
            self._note_operation(operation, outcome, now)

    def _note_operation(self, operation: kv.Operation, outcome: kv.Outcome, now: float) -> None:
        seat = self.seat
        match operation:
            case kv.Put(job.SETTINGS, _, _):
                self._agreed = True
            case kv.Get(job.SETTINGS):
                self._compare_settings(outcome.items[0])
            case kv.Put(job.LEADER, _, _):
                self._lead(outcome.revision, now)
            case kv.Get(job.LEADER):
                self.board.leader = outcome.items[0]
                self._take_up_leadership(now)
            case kv.Get(job.STATUS):
                self._note_status(outcome.items[0])
            case kv.Get(key) if key.startswith(job.DOWN):
                if outcome.items[0] is not None:
                    self.board.post(outcome.items[0], now)
                elif key == job.GENERATION:
                    self._is_forgotten = self.is_returning
            case kv.Get(key):
                self._note_seat(key, outcome.items[0])
            case kv.Delete(key, _) if key == job.node_key(self.id):
                self.has_left = True
            case kv.Put(key, value, _) if key == job.node_key(self.id):
                self._written = job.decode(job.NodeRecord, value)
                self.is_returning = False
            case kv.Put(key, job.LOST, _):
                self._former = None
            case kv.Put(key, _, _) if key == job.memory_key(self.id):
                self._memory = None
            case kv.Put(key, _, _) if self._report is not None and key == job.failure_key(self._report[0], self.id):
                self._report = None
            case kv.Put(key, _, _) if self._statement is not None and key == job.hang_key(self._statement[0], self.id):
                self._statement = None
            case kv.Put(key, _, _) if self._pace is not None and key == job.node_pace_key(self._pace[0], self.id):
                self._pace = None
            case kv.Put(key, value, _) if seat is not None and key == job.done_key(seat.generation, self.id):
                self._is_done = False
            case kv.Put(key, value, _) if seat is not None and key == job.drain_key(seat.generation, self.id):
                self._written_drain = seat.generation, job.decode(job.NodeDrain, value)
            case kv.Put(key, value, _) if key.startswith(job.DOWN):
                self.board.post(kv.Item(key, value, outcome.revision, outcome.revision), now)

    def _compare_settings(self, item: kv.Item | None) -> None:
        if item is None:
            return
        difference = self._joining.mismatch(self._joining.settings, from_json(item.value))
        if difference:
            self._end(Refused(difference))
        self._agreed = True

    def _lead(self, term: int, now: float) -> None:
        self.board.leader = kv.Item(job.LEADER, self.id.encode(), term, term, self._joining.lease)
        self._take_up_leadership(now)

    def _take_up_leadership(self, now: float) -> None:
        """Begin or end our term, by what the board says."""
        item = self.board.leader
        is_mine = item is not None and item.value == self.id.encode()
        if item is not None and is_mine and (self.leader is None or self.leader.term != item.create_revision):
            self.leader = Leader(self.record.name, item.create_revision, self._joining.policy, self._joining.restarts)
        elif not is_mine:
            self.leader = None

    def _note_status(self, item: kv.Item | None) -> None:
        """What was said before the last generation began is not about the next."""
        if item is not None and self._is_waiting() and (self.leader or item.mod_revision > self.board.generation_revision):
            text = self.leader.status_text() if self.leader else job.decode(job.Status, item.value).text
            self._news.append(Progress(text, self._gives_up_at()))

    def _note_seat(self, key: str, item: kv.Item | None) -> None:
        generation = self.board.generation
        assert generation is not None
        if key != job.seat_key(generation.number, generation.attempt, self.id) or not self._is_ready():
            return  # while we asked, another generation was posted, or our lease was lost: we have not looked in this one yet
        self._looked_at = self.board.generation_revision
        seat = None if item is None else job.decode(job.Seat, item.value)
        if seat is None or (seat.generation, seat.attempt) != (generation.number, generation.attempt):
            return
        self.seat = self._last_seat = seat
        self.record = self.record.replace(ready_after=job.NOT_READY)
        self._news.append(Seated(seat, generation))

    def _board_changed(self, now: float) -> None:
        board, seat = self.board, self.seat
        self._take_up_leadership(now)
        if self.leader is not None:
            self.leader.touch(now)
        if self.id in board.refusals:
            self._end(Refused(board.refusals[self.id]))
        if seat is not None and self._stopped != seat.generation:
            self._tell_inquiry(seat)
            self._tell_pace(seat)
            self._tell_stop(seat)
        if seat is None and self._former is not None and self._stopped < self._former.generation:
            self._tell_end_of(self._former)
        if seat is not None and board.number == seat.generation:
            self._tell_drain(seat.generation)
        self._tell_stop_of_job()
        if board.closed is not None:
            self._end(Ended(self._closed_for_us(board.closed)))

    def _closed_for_us(self, closed: job.Closed) -> job.Closed:
        """Once somebody has stopped the job, whatever else became of it meanwhile came of that."""
        if self.board.stop is None or closed.kind in ("finished", "stopped"):
            return closed
        return job.Closed("stopped", stopped_text(self.board.stop.by), closed.by)

    def _tell_stop_of_job(self) -> None:
        stop = self.board.stop
        if stop is not None and not self._told_stop:
            self._told_stop = True
            self._news.append(AskedFor(self.id, 0, job.Asked("stop", "", stop.by)))

    def _tell_drain(self, generation: int) -> None:
        notice, ruling = self.board.notice(), self.board.ruling()
        if notice is not None and self._told_notice != generation:
            self._told_notice = generation
            self._news.append(Noticed(generation, notice))
        if ruling is not None and self._told_ruling != (generation, ruling):
            self._told_ruling = generation, ruling
            self._news.append(Ruled(generation, ruling))

    def _tell_stop(self, seat: job.Seat) -> None:
        signal = self.board.signals.get(seat.generation)
        if signal is not None and signal.is_stop:
            self._stopped = seat.generation
            self._news.append(Regroup(signal.why, seat.generation, signal.kind == "failure", signal.looks_hopeless))

    def _tell_inquiry(self, seat: job.Seat) -> None:
        inquiry = self.board.inquiries.get(seat.generation, b"")
        if inquiry and self._inquired != (seat.generation, inquiry):
            self._inquired = seat.generation, inquiry
            self._news.append(Inquired(seat.generation, inquiry))

    def _tell_pace(self, seat: job.Seat) -> None:
        found = self.board.paces.get(seat.generation, b"")
        if found and self._told_pace != (seat.generation, found):
            self._told_pace = seat.generation, found
            self._news.append(Paced(seat.generation, found))

    def _tell_end_of(self, former: Former) -> None:
        """What we had a seat in under another id is over: whoever stays for the sake of it need not any longer."""
        signal, number = self.board.signals.get(former.generation), self.board.number
        if number > former.generation or (signal is not None and signal.is_stop):
            self._stopped = former.generation
            why = signal.why if signal is not None else f"generation {number} was formed without this node"
            self._news.append(Regroup(why, former.generation))


def _summary(report: NodeReport) -> str:
    """What stopped everybody, in a line."""
    if not report.failures:
        return f"workers failed on {report.node}"
    first = next((one for one in report.failures if not one.stopped and not one.is_echo), report.failures[0])
    how = PROBABLE_VICTIM if first.is_echo else ""
    return f"rank {first.rank} on {report.node} failed{how}: {first.message}"[: job.MAX_WHY]
