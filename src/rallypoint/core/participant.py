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
"""

from __future__ import annotations

import json

from rallypoint.core import job_records as job
from rallypoint.core.coordination import (
    Delete,
    Event,
    Get,
    Item,
    Operation,
    Outcome,
    Put,
    Read,
    Request,
    Snapshot,
    Transaction,
    Watch,
)
from rallypoint.core.leader import Leader
from rallypoint.core.membership import Former, Joining, Membership
from rallypoint.core.news import Ended, News, Progress, Refused, Seated, Stop

__all__ = ["Former", "Joining", "Participant"]


class Participant(Membership):
    """A node with a lease."""

    # What the store says.

    def see(self, event: Event, now: float) -> None:
        if event.key.startswith(job.DOWN):
            self.board.apply(event, now)
            self._board_changed(now)
        elif self.leader is not None:
            self.leader.see(event, now)

    def replied(self, request: Request, answer: Outcome | Snapshot | None, now: float) -> None:
        if self._asked_by is not None:
            self._pass_on(self._asked_by, request, answer, now)
            return
        match request, answer:
            case Read(job.DOWN), Snapshot(revision, _):
                self.board.load(answer, now)
                self._read_at, self._is_watching = revision, False
            case Watch(), _:
                self._is_watching = True
            case Transaction(), Outcome():
                self._note_outcome(request, answer, now)
        self._board_changed(now)

    def _pass_on(self, leader: Leader, request: Request, answer: Outcome | Snapshot | None, now: float) -> None:
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
    def is_stopping(self) -> bool:
        """Whether our agent was told to stop the workers of our generation, and has not said yet that they are gone."""
        return self.seat is not None and self._stopped == self.seat.generation

    def take_news(self) -> list[News]:
        news, self._news = self._news, []
        return news

    # What to ask next.

    def next_request(self, now: float) -> Request | None:
        request = self._next_of_leaving() if self.is_leaving else self._next_of_member(now)
        self._asked_by = self.leader if request is None and not self.is_leaving else None
        if self._asked_by is not None:
            request = self._asked_by.next_request(self.board, now)
        return request

    # What follows from what came.

    def _note_outcome(self, request: Transaction, outcome: Outcome, now: float) -> None:
        for operation in request.then if outcome.succeeded else request.otherwise:
            self._note_operation(operation, outcome, now)

    def _note_operation(self, operation: Operation, outcome: Outcome, now: float) -> None:
        seat = self.seat
        match operation:
            case Put(job.SETTINGS, _, _):
                self._agreed = True
            case Get(job.SETTINGS):
                self._compare_settings(outcome.items[0])
            case Put(job.LEADER, _, _):
                self._lead(outcome.revision, now)
            case Get(job.LEADER):
                self.board.leader = outcome.items[0]
                self._take_up_leadership(now)
            case Get(job.STATUS):
                self._note_status(outcome.items[0])
            case Get(key) if key.startswith(job.DOWN):
                if outcome.items[0] is not None:
                    self.board.post(outcome.items[0], now)
                elif key == job.GENERATION:
                    self._is_forgotten = self.is_returning
            case Get(key):
                self._note_seat(key, outcome.items[0])
            case Delete(key, _) if key == job.node_key(self.id):
                self.has_left = True
            case Put(key, value, _) if key == job.node_key(self.id):
                self._written = job.decode(job.NodeRecord, value)
                self.is_returning = False
            case Put(key, job.LOST, _):
                self._former = None
            case Put(key, _, _) if self._report is not None and key == job.failure_key(self._report[0], self.id):
                self._report = None
            case Put(key, value, _) if seat is not None and key == job.done_key(seat.generation, self.id):
                self._is_done = False
            case Put(key, value, _) if key.startswith(job.DOWN):
                self.board.post(Item(key, value, outcome.revision, outcome.revision), now)

    def _compare_settings(self, item: Item | None) -> None:
        if item is None:
            return
        difference = self._joining.mismatch(self._joining.settings, json.loads(item.value))
        if difference:
            self._end(Refused(difference))
        self._agreed = True

    def _lead(self, term: int, now: float) -> None:
        self.board.leader = Item(job.LEADER, self.id.encode(), term, term, self._joining.lease)
        self._take_up_leadership(now)

    def _take_up_leadership(self, now: float) -> None:
        """Begin or end our term, by what the board says."""
        item = self.board.leader
        is_mine = item is not None and item.value == self.id.encode()
        if item is not None and is_mine and (self.leader is None or self.leader.term != item.create_revision):
            self.leader = Leader(self.record.name, item.create_revision, self._joining.policy, self._joining.restarts)
        elif not is_mine:
            self.leader = None

    def _note_status(self, item: Item | None) -> None:
        if item is not None and self._is_waiting():
            text = self.leader.status_text() if self.leader else job.decode(job.Status, item.value).text
            self._news.append(Progress(text))

    def _note_seat(self, key: str, item: Item | None) -> None:
        generation = self.board.generation
        assert generation is not None
        if key != job.seat_key(generation.number, generation.attempt, self.id) or not self._is_ready():
            return  # while we asked, another generation was posted, or our lease was lost: we have not looked in this one yet
        self._looked_at = self.board.generation_revision
        seat = None if item is None else job.decode(job.Seat, item.value)
        if seat is None or (seat.generation, seat.attempt) != (generation.number, generation.attempt):
            return
        self.seat, self._last_generation = seat, seat.generation
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
            self._tell_stop(seat)
        if board.closed is not None:
            self._end(Ended(board.closed))

    def _tell_stop(self, seat: job.Seat) -> None:
        signal = self.board.signals.get(seat.generation)
        if signal is not None and signal.is_stop:
            self._stopped = seat.generation
            self._news.append(Stop(seat.generation, signal))
