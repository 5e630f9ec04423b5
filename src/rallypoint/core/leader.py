"""What the leader of a job does: it keeps the roster, decides by `core.generation`, and writes down what was decided.

Every node runs this code, but only for as long as the key ``down/leader`` is its own. Each of its writes is compared with the
revision at which that key was created (its *term*), so that a leader which has been replaced, and does not know it yet, changes
nothing. A generation is formed in two steps: first the seats, at most 100 in a transaction, under an attempt named by the term;
then the generation itself, which names the attempt. A seat of any other attempt counts for nothing.

A new leader knows nothing but what it reads: it counts anew who is here, who is done and what failed. A member that it does
not find may have been lost this very moment, so it waits as long as if that were so.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.core import job_records as job
from rallypoint.core.board import Board
from rallypoint.core.coordination import (
    Compare,
    EndLease,
    Event,
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
from rallypoint.core.forming import Forming
from rallypoint.core.generation import Conclude, Current, Expel, Form, GiveUp, Interrupt, Node, Policy, Wait, decide, listed
from rallypoint.core.restarts import Ended, Purse, RestartPolicy, judge
from rallypoint.core.restarts import GiveUp as NoRestartLeft
from rallypoint.core.roster import Roster
from rallypoint.core.verdict import encode as encode_verdict

__all__ = ["STATUS_INTERVAL_S", "Leader"]

STATUS_INTERVAL_S = 10.0
BATCH_PER_NODE_S = 1e-5  # a decision looks at every node, so with many of them it is made for many events at once
LEAST_BATCH_S = 1e-3
MAX_COMPARED = 50
MOST_STRIKES = 32
GOOD_RUN_S = 600.0  # after which earlier failures of a node are forgiven


class Leader:
    """One term of leadership."""

    def __init__(self, name: str, term: int, policy: Policy, restarts: RestartPolicy) -> None:
        self.name = name
        self.term = term
        self.policy = policy
        self.restarts = restarts
        self.roster = Roster()
        self.forming: Forming | None = None
        self.must_reload = False
        self.wait = Wait("nothing has been decided yet")
        self._revision = 0
        self._is_watching = False
        self._decide_at: float | None = 0.0
        self._status_at = 0.0
        self._status = self._told_status = b""

    # What it sees.

    def see(self, event: Event, now: float) -> None:
        """What is older than what we have read, or shall read, says nothing new; it may come from an earlier watch."""
        if not self._is_watching or event.revision <= self._revision:
            return
        self.roster.apply(event, now)
        self.touch(now)

    def touch(self, now: float) -> None:
        """Something changed: decide again, soon."""
        batch_s = len(self.roster.nodes) * BATCH_PER_NODE_S
        soon = now + batch_s if batch_s > LEAST_BATCH_S else now
        self._decide_at = soon if self._decide_at is None else min(self._decide_at, soon)

    def wake_at(self) -> float | None:
        return self._decide_at

    # What it asks for; one question at a time.

    def next_request(self, board: Board, now: float) -> Request | None:
        if not self._revision:
            return Read(job.UP)
        if not self._is_watching:
            return Watch(job.UP, self._revision + 1)
        if board.closed is not None:
            return None
        if board.generation is not None and self.roster.generation != board.number:
            return Read(job.seats_of_attempt(board.number, board.generation.attempt))
        if self.forming is not None and self.forming.number != board.number + 1:
            self.forming = None  # it counts already, and only the answer that said so was lost
        if self.forming is not None:
            return self._next_of_form(self.forming, board)
        if self._decide_at is None or now < self._decide_at:
            return None
        return self._decide(board, now)

    def replied(self, request: Request, answer: Outcome | Snapshot | None, board: Board, now: float) -> None:
        match request, answer:
            case Read(job.UP), Snapshot(revision, items):
                self._revision = revision
                self.roster.load(items, now)
            case Read(), Snapshot(_, items):
                self.roster.begin(board.number, [job.decode(job.Seat, item.value) for item in items], _ids(items), now)
            case Watch(), _:
                self._is_watching = True
            case Transaction(), Outcome():
                self._note_outcome(request, answer, board, now)
        self.touch(now)

    def _note_outcome(self, request: Transaction, outcome: Outcome, board: Board, now: float) -> None:
        if not outcome.succeeded:
            self.forming, self.must_reload = None, True
            return
        for operation in request.then:
            if isinstance(operation, Put) and operation.key == job.STATUS:
                self._told_status = operation.value
            elif isinstance(operation, Put) and operation.key.startswith(job.DOWN):
                item = Item(operation.key, operation.value, outcome.revision, outcome.revision, operation.lease)
                board.post(item, now)
        if self.forming is not None and self.forming.advance():
            self.roster.begin(self.forming.number, *self.forming.members(), now)
            self.forming = None

    # What it decides.

    def _decide(self, board: Board, now: float) -> Transaction | None:
        """What is to be written stays due until it is answered: asked again, it is decided again."""
        second = self.roster.second_holder(now, self.policy.lease_s, board.refusals)
        if second is not None:
            return self._fenced((), Put(job.refusal_key(second.id), second.why.encode(errors="replace")))
        current = self._current(board)
        nodes = self._nodes(board, current)
        decision = decide(nodes, current, self.policy, now)
        if isinstance(decision, Interrupt) and decision.kind == "join" and (refusal := self._why_nobody_may_join(board)):
            decision = Wait(refusal)
        match decision:
            case Interrupt(kind, why):
                return self._interrupt(board.number, job.Signal(kind, why[:job.MAX_WHY], self.name))
            case Conclude():
                finished = job.Signal("finished", "all nodes are done", self.name)
                return self._signal(board.number, finished, self._closed("finished", "the job has finished"))
            case Form() as form:
                return self._form(form, nodes, current, board, now)
            case Expel(late, why):
                return self._expel(late, why)
            case GiveUp(why):
                return self._fenced((), self._closed("failed", why))
            case Wait() as wait:
                due_at = self.roster.refusal_due_at(self.policy.lease_s, board.refusals)
                times = [at for at in (wait.wake_at, due_at) if at is not None]
                return self._rest(wait.replace(wake_at=min(times, default=None)), now)

    def _why_nobody_may_join(self, board: Board) -> str:
        """A joiner whom no budget would pay for is kept waiting; let in, it would end the job."""
        purse = board.generation.purse if board.generation else Purse()
        ruling = judge(self.restarts, purse, Ended(joined=("a node",)))
        return ruling.why if isinstance(ruling, NoRestartLeft) else ""

    def _current(self, board: Board) -> Current | None:
        if board.generation is None:
            return None
        roster, signal_at = self.roster, board.signal_at.get(board.number, 0.0)
        gone = {
            node_id: one.replace(cause="expelled") if one.cause == "expired" and node_id in board.expelled else one
            for node_id, one in roster.gone.items()
        }
        return Current(board.number, roster.members, board.signal(), signal_at, roster.done_members(), gone)

    def _nodes(self, board: Board, current: Current | None) -> Mapping[str, Node]:
        """Those that are here, with a mark on those whose workers have failed too often."""
        if current is None or board.generation is None:
            return self.roster.nodes
        strikes, culprit = self._strikes(board, current)
        return self.roster.shunning(strikes, current.signal_at if culprit else board.generation_at, culprit)

    def _strikes(self, board: Board, current: Current) -> tuple[tuple[str, ...], str]:
        """Whose workers have failed of late, once for each time, and whose it were this time.

        Who has sat in a generation that ran well is forgiven what was before.
        """
        strikes = board.generation.strikes if board.generation else ()
        if current.signal is not None and current.signal_at - board.generation_at >= GOOD_RUN_S:
            members = {seat.name for seat in current.members.values()}
            strikes = tuple(name for name in strikes if name not in members)
        is_failure = current.signal is not None and current.signal.kind == "failure"
        culprit = self.roster.verdict().cause_node if is_failure else ""
        return ((*strikes, culprit) if culprit else strikes)[-MOST_STRIKES:], culprit

    def _rest(self, wait: Wait, now: float) -> Transaction | None:
        """Nothing to do; those who wait with us are told how things stand, now and then."""
        self.wait = wait
        if wait.is_gathering and now >= self._status_at:
            self._status_at = now + STATUS_INTERVAL_S
            self._status = job.encode(job.Status(self.status_text()))
        if wait.is_gathering and self._status != self._told_status:
            return self._fenced((), Put(job.STATUS, self._status))
        times = [wait.wake_at, self._status_at if wait.is_gathering else None]
        self._decide_at = min((at for at in times if at is not None), default=None)
        return None

    def status_text(self) -> str:
        return f"{self.wait.why}; {self.roster.who_is_here(self.policy.min_nodes)}"

    def _form(
        self, form: Form, nodes: Mapping[str, Node], current: Current | None, board: Board, now: float
    ) -> Transaction | None:
        purse, why, strikes = Purse(), form.why, tuple[str, ...]()
        if current is not None and current.signal is not None and board.generation is not None:
            joiners = [one for one in form.order if one.id not in current.members]
            ended = self.roster.ended(current, joiners, now - board.generation_at)
            again = judge(self.restarts, board.generation.purse, ended)
            if isinstance(again, NoRestartLeft):
                verdict = encode_verdict(self.roster.verdict())
                return self._fenced((), self._closed("failed", again.why, verdict))
            if now < current.signal_at + again.delay_s:
                return self._rest(Wait(again.why, current.signal_at + again.delay_s, is_gathering=True), now)
            purse, why = again.purse, again.why + self._who_is_left_out(form, nodes, board, now)
            strikes, _ = self._strikes(board, current)
        self.forming = Forming(board.number + 1, self.term, form, purse, why[:job.MAX_WHY], strikes)
        return self._next_of_form(self.forming, board)

    def _who_is_left_out(self, form: Form, nodes: Mapping[str, Node], board: Board, now: float) -> str:
        """For all to see: who was expelled, and whose workers have failed too often."""
        seated = {one.id for one in form.order}
        shunned = [node for node_id, node in nodes.items() if node.shunned_until > now and node_id not in seated]
        expelled = [gone.name for node_id, gone in self.roster.gone.items() if node_id in board.expelled]
        told = f"; without {listed(expelled)}, which did not stop in time" if expelled else ""
        if shunned:
            names = ", ".join(f"{node.record.name} for {node.shunned_until - now:.0f} s" for node in shunned[:4])
            told += f"; left out, because their workers keep failing: {names}"
        return told

    def _next_of_form(self, forming: Forming, board: Board) -> Transaction:
        """A member that has come back at the last moment makes it fail: its workers run."""
        compares = (
            Compare(job.GENERATION, "mod", board.generation_revision),
            Compare(job.RETURNED, "mod", self.roster.returned_at),
        )
        return self._fenced(compares, *forming.operations())

    def _expel(self, late: tuple[Node, ...], why: str) -> Transaction:
        """From now on no keepalive of theirs is taken; when their fence is over, nothing of them runs."""
        told = why.encode(errors="replace")
        operations = [one for node in late for one in (Put(job.expelled_key(node.id), told), EndLease(node.lease))]
        return self._fenced((), *operations)

    # What it writes, always fenced.

    def _fenced(self, compares: tuple[Compare, ...], *operations: Operation) -> Transaction:
        mine = (Compare(job.LEADER, "create", self.term), Compare(job.CLOSED, "create", 0))
        return Transaction((*mine, *compares), operations)

    def _signal(
        self, generation: int, signal: job.Signal, *more: Operation, compares: tuple[Compare, ...] = ()
    ) -> Transaction:
        key = job.signal_key(generation)
        return self._fenced((Compare(key, "create", 0), *compares), Put(key, job.encode(signal)), *more)

    def _interrupt(self, generation: int, signal: job.Signal) -> Transaction:
        """Losing a node that is done is no loss, even if its word that it is done reaches the store after its lease has ended."""
        lost = [] if signal.kind == "join" else self.roster.lost_members()
        not_done = tuple(Compare(job.done_key(generation, node_id), "create", 0) for node_id in lost[:MAX_COMPARED])
        return self._signal(generation, signal, compares=not_done)

    def _closed(self, kind: job.ClosedKind, why: str, verdict: dict[str, object] | None = None) -> Put:
        return Put(job.CLOSED, job.encode(job.Closed(kind, why[:job.MAX_WHY], self.name, verdict)))


def _ids(items: tuple[Item, ...]) -> list[str]:
    return [item.key.rpartition("/")[2] for item in items]
