"""What one node of a job wants, and which request to the store comes next.

The next request follows from what the node wants and what it knows, not from what it did last. So an answer that was lost is no
special case: the question is asked again. What follows from answers is in `core.participant`.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from rallypoint.core import job_records as job
from rallypoint.core.board import Board
from rallypoint.core.coordination import Compare, Delete, Get, Operation, Put, Read, Request, Transaction, Watch
from rallypoint.core.failure_reports import NodeReport, bounded, encode_report
from rallypoint.core.generation import Policy
from rallypoint.core.leader import STATUS_INTERVAL_S, Leader
from rallypoint.core.news import News, TimedOut
from rallypoint.core.restarts import RestartPolicy
from rallypoint.records import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Former", "Joining", "Membership"]


class Former(Value):
    """Under which id this node ran workers before, and of which generation."""

    id: str
    generation: int


class Joining(Value):
    """What a node brings: its number, its lease, who it is, and what it takes the job's settings to be.

    With `former` it can vouch, once it is ready, that nothing runs any more of what it was before it was fenced.
    """

    node_id: str
    lease: int
    record: job.NodeRecord
    settings: dict[str, Any]
    mismatch: Callable[[dict[str, Any], dict[str, Any]], str | None]
    policy: Policy
    restarts: RestartPolicy
    former: Former | None = None


class Membership:
    """A node with a lease, as far as it asks."""

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
        self._is_done = False  # and that has to be told
        self._done_in = 0  # the last generation in which we were done
        self._fallen_in = 0  # the last generation whose workers are gone here, without being done
        self._departure: job.Signal | None = None
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
        self._last_generation = 0  # the last in which we had a seat
        self._asked_by: Leader | None = None  # the leader, if the request under way is its

    # What the agent says.

    def ready(self, now: float, port: int) -> None:
        """No worker runs here; the next generation may have us. If nobody has ended the one that we sit in, we have to."""
        if self.seat is not None and self._done_in != self.seat.generation:
            self._fallen_in = self.seat.generation
        self.record = self.record.replace(ready_after=self._last_generation, port=port)
        self.seat, self._is_done, self.is_returning = None, False, False
        self._ready_at, self._status_at = now, now + STATUS_INTERVAL_S

    def failed(self, report: NodeReport) -> None:
        """Workers of our generation have failed: all others are to stop."""
        if self.seat is not None:
            self._report = self.seat.generation, bounded(report)

    def done(self) -> None:
        """All our workers have succeeded."""
        if self.seat is not None:
            self._is_done, self._done_in = True, self.seat.generation

    def departing(self, why: str, is_sick: bool = False) -> None:
        """We shall leave once our workers are gone; the others need not wait for that to stop theirs.

        With `is_sick` something is wrong with this node: where too few others are left, nobody need hope for its return.
        """
        self._departure = job.Signal("sick" if is_sick else "departure", why[:job.MAX_WHY], self.record.name)

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
    def former(self) -> Former | None:
        """What the next session of this node has to vouch for."""
        return Former(self.id, self.seat.generation) if self.seat is not None else self._former

    def close(self, kind: job.ClosedKind, why: str) -> None:
        self._closing = job.Closed(kind, why, self.record.name)

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

    def _next_of_member(self, now: float) -> Request | None:
        if self._has_ended:
            return None
        if not self._agreed:
            settings = json.dumps(self._joining.settings).encode()
            return Transaction((Compare(job.SETTINGS, "create", 0),), (Put(job.SETTINGS, settings),), (Get(job.SETTINGS),))
        if not self.board.is_loaded:
            return Read(job.DOWN)
        if not self._is_watching:
            return Watch(job.DOWN, self._read_at + 1)
        return self._next_write() or self._next_look(now)

    def _next_write(self) -> Transaction | None:
        """What we have to tell, most urgent first."""
        board, seat = self.board, self.seat
        if board.closed is not None:
            return None
        if self.is_returning:
            return self._return()
        if self._closing is not None:
            return self._create(job.CLOSED, self._closing)
        if self._report is not None:
            generation, report = self._report
            signal = job.Signal("failure", _summary(report), self.record.name)
            failure = Put(job.failure_key(generation, self.id), json.dumps(encode_report(report)).encode())
            return self._create(job.signal_key(generation), signal, failure)
        if seat is not None and self._departure is not None and self._is_missed(seat):
            return self._create(job.signal_key(seat.generation), self._departure)
        if self._fallen_in and self._fallen_in == board.number and board.signal() is None:
            why = f"the workers of {self.record.name} were killed: the store had not confirmed in time that they may run"
            return self._create(job.signal_key(board.number), job.Signal("loss", why, self.record.name))
        if seat is not None and self._is_done:
            return Transaction((), (Put(job.done_key(seat.generation, self.id), b"1"),))
        if self._written != self.record and self._must_tell_record():
            return Transaction((), (self._own_record(), *self._vouching()))
        return None

    def _own_record(self) -> Put:
        return Put(job.node_key(self.id), job.encode(self.record), self._joining.lease)

    def _vouching(self) -> tuple[Put, ...]:
        """Who is ready has no worker, of whatever generation."""
        former = self._former if self.record.ready_after != job.NOT_READY else None
        return () if former is None else (Put(job.left_key(former.generation, former.id), job.LOST),)

    def _return(self) -> Transaction | None:
        """Be a member again, unless another generation was formed; no leader that does not know of it can form one after this."""
        if self.seat is None or self._is_forgotten or self.board.number != self.seat.generation:
            return None  # we are fenced, and nothing that we write can change it
        unchanged = (
            Compare(job.GENERATION, "mod", self.board.generation_revision),
            Compare(job.expelled_key(self.id), "create", 0),
        )
        return Transaction(unchanged, (self._own_record(), Put(job.RETURNED, self.id.encode())), (Get(job.GENERATION),))

    def _is_missed(self, seat: job.Seat) -> bool:
        """Whether the others cannot go on without us; they can if we are done."""
        return self.board.number == seat.generation and self.board.signal() is None and self._done_in != seat.generation

    def _must_tell_record(self) -> bool:
        """A member need not say that it is not ready, as everybody knows it."""
        return self.record.ready_after != job.NOT_READY or self.seat is None

    def _create(self, key: str, record: Value, *more: Operation) -> Transaction:
        """Write a record that only the first may write; `more` is done in any case, and we learn what stands there."""
        return Transaction((Compare(key, "create", 0),), (Put(key, job.encode(record)), *more), (Get(key), *more))

    def _next_of_leaving(self) -> Transaction | None:
        if self._closing is not None and self.board.closed is None:
            return self._create(job.CLOSED, self._closing)
        if self.has_left:
            return None
        if self.seat is not None and self._departure is not None and self.board.closed is None and self._is_missed(self.seat):
            return self._create(job.signal_key(self.seat.generation), self._departure)
        go: tuple[Operation, ...] = (Delete(job.node_key(self.id)),)
        if 0 < self.board.number <= self._last_generation and self.board.closed is None:
            go = (*go, Put(job.left_key(self._last_generation, self.id), job.LEFT))
        term = self.leader.term if self.leader else 0  # who does not lead deletes the leader's key only if there is none
        return Transaction((Compare(job.LEADER, "create", term),), (*go, Delete(job.LEADER)), go)

    def _next_look(self, now: float) -> Request | None:
        board = self.board
        if board.leader is None:
            mine = Put(job.LEADER, self.id.encode(), self._joining.lease)
            return Transaction((Compare(job.LEADER, "create", 0),), (mine,), (Get(job.LEADER),))
        if self._is_ready() and board.generation is not None and self._looked_at != board.generation_revision:
            return Transaction((), (Get(job.seat_key(board.number, board.generation.attempt, self.id)),))
        if self._is_waiting():
            return self._next_of_waiting(now)
        return None

    def _next_of_waiting(self, now: float) -> Transaction | None:
        gives_up_at = self._gives_up_at()
        if gives_up_at is not None and now >= gives_up_at:
            self._end(TimedOut(f"waited {self._joining.policy.join_timeout_s:g} s for enough nodes in vain"))
        elif now >= self._status_at:
            self._status_at = now + STATUS_INTERVAL_S
            return Transaction((), (Get(job.STATUS),))
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


def _summary(report: NodeReport) -> str:
    """What stopped everybody, in a line."""
    if not report.failures:
        return f"workers failed on {report.node}"
    first = report.failures[0]
    return f"rank {first.rank} on {report.node} failed: {first.message}"[:job.MAX_WHY]
