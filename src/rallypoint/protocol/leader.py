"""What the leader of a job does: it keeps the roster, decides by `protocol.generation`, and writes down what was decided.

Every node runs this code, but only for as long as the key ``down/leader`` is its own. Each of its writes is compared with the
revision at which that key was created (its *term*), so that a leader which has been replaced, and does not know it yet, changes
nothing. A generation is formed in two steps: first the seats, at most 100 in a transaction, under an attempt named by the term;
then the generation itself, which names the attempt. A seat of any other attempt counts for nothing.

In a store that was started anew, what nodes remember counts besides (`protocol.resumption`); a leader that has missed a memory
forms nothing.

A new leader knows nothing but what it reads: it counts anew who is here, who is done and what failed. A member that it does
not find may have been lost this very moment, so it waits as long as if that were so.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

from rallypoint.base.records import Value
from rallypoint.base.text import listed, plural
from rallypoint.coordination import model as kv
from rallypoint.protocol import inquiry as inquiries
from rallypoint.protocol import job_records as job
from rallypoint.protocol.generation import (
    Conclude,
    Current,
    Expel,
    Form,
    GiveUp,
    Gone,
    Interrupt,
    Node,
    Past,
    Policy,
    Seated,
    Wait,
    decide,
    seats,
    usable,
)
from rallypoint.protocol.inquiry import INQUIRY_S, Inquiry, Statement, decode_inquiry, decode_statement, encode_inquiry
from rallypoint.protocol.job_records import Board
from rallypoint.protocol.restarts import EXCLUDE_NODE, NO_RETRY, Ended, Failure, Purse, RestartPolicy, judge
from rallypoint.protocol.restarts import GiveUp as NoRestartLeft
from rallypoint.protocol.resumption import HOST, newest, past_of, spent
from rallypoint.protocol.verdict import NodeReport, Verdict, WorkerFailure, decode_report, describe, judge_failures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.protocol.pace import Comparison, NodePace

__all__ = ["SEATS_PER_TRANSACTION", "STATUS_INTERVAL_S", "Forming", "Leader", "Roster", "SecondHolder"]


# --- forming ---------------------------------------------------------------------------------------------------------------


SEATS_PER_TRANSACTION = 100
OLD = (
    "up/failures/", "up/hangs/", job.PACES, "up/done/", "up/left/", job.MEMORIES, "up/drain/", "down/signal/", "down/inquiry/",
    "down/pace/", "down/expelled/", "down/drain/", job.DATA, job.SHOWN,
)  # fmt: skip


class Forming:
    """A generation under construction: which operations come next; `advance` after each step that succeeded.

        clear what an earlier attempt may have left  →  seats, 100 at a time  →  the generation itself

    Only the last step can be seen by the other nodes. It also clears away what belonged to earlier generations.
    """

    def __init__(
        self,
        number: int,
        attempt: int,
        form: Form,
        purse: Purse,
        why: str,
        strikes: tuple[str, ...] = (),
        after: str = "",
        *,
        follows: int,
    ) -> None:
        """`follows` is the generation that was before it in this store."""
        self.number = number
        self._follows = follows
        self._seats = seats(number, attempt, form.order)
        self._step = 0
        first = form.order[0].record
        world_size = sum(one.record.workers for one in form.order)
        self._generation = job.Generation(
            number, attempt, len(form.order), world_size, first.address, first.port, why, purse, strikes, after
        )  # fmt: skip

    def operations(self) -> list[kv.Operation]:
        """What the next transaction has to do."""
        number, attempt = self.number, self._generation.attempt
        if self._step == 0:
            return [kv.Delete(job.seats_of_generation(number), is_prefix=True)]
        begin = (self._step - 1) * SEATS_PER_TRANSACTION
        part = list(self._seats.items())[begin : begin + SEATS_PER_TRANSACTION]
        if part:
            return [kv.Put(job.seat_key(number, attempt, node_id), job.encode(seat)) for node_id, seat in part]
        clear = [kv.Delete(prefix, is_prefix=True) for prefix in (*OLD, job.seats_of_generation(self._follows))]
        return [kv.Put(job.GENERATION, job.encode(self._generation)), *clear]

    def advance(self) -> bool:
        """A step succeeded; whether it was the last."""
        is_last = (self._step - 1) * SEATS_PER_TRANSACTION >= len(self._seats)
        self._step += 1
        return is_last

    def members(self) -> tuple[list[job.Seat], list[str]]:
        return list(self._seats.values()), list(self._seats)


# --- roster ----------------------------------------------------------------------------------------------------------------


SOON_S = 10.0  # a node that dies this soon after a generation was formed with it is one that keeps dying
LONGEST_HOLD_S = 60.0
_UNFIT_TOLD = 4  # of so many nodes everybody is told why they are left out
STRIKES = 2  # so many failures of its workers in a row, and a node is left out for a while
STRIKES_OF_EXCLUDED = 8  # for as long as can be, when its own worker has asked for it
FIRST_SHUN_S, LONGEST_SHUN_S = 60.0, 3600.0


class SecondHolder(Value):
    """A node that insists on the rank of another that lives."""

    id: str
    why: str


class Roster:
    """What the leader knows about the nodes: who is here, who sits in the current generation, who is gone, done or has failed.

    It is kept up by the changes under ``up/``, one at a time and at the same cost however many nodes there are.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.generation = 0
        self.members: dict[str, Seated] = {}
        self.gone: dict[str, Gone] = {}
        self._admitted_at: dict[str, float] = {}
        self._world_size = 0
        self._done: dict[int, set[str]] = {}
        self._failures: dict[int, dict[str, NodeReport]] = {}
        self._drains: dict[int, dict[str, job.NodeDrain]] = {}
        self._hangs: dict[int, dict[str, Statement]] = {}
        self._paces: dict[int, dict[str, NodePace]] = {}
        self.paces_heard = 0  # how many times a node has told of that
        self.memories: dict[str, job.Memory] = {}
        self._left: dict[str, str] = {}  # who has no worker any more, and why it went; an id is never used again
        self.returned_at = 0  # the revision at which a member was back last
        self._quick_deaths: dict[str, int] = {}
        self._held_until: dict[str, float] = {}
        self._explicit = 0

    # What nodes tell.

    def load(self, items: Iterable[kv.Item], now: float) -> None:
        for item in items:
            self._put(item, now)

    def apply(self, event: kv.Event, now: float) -> None:
        if event.item is not None:
            self._put(event.item, now)
        elif event.key.startswith("up/nodes/"):
            self._remove(event.key.rpartition("/")[2], event.cause, now)

    def _put(self, item: kv.Item, now: float) -> None:
        """Take in what a node wrote; what nobody can read is not there, and cannot harm the others."""
        with suppress(ValueError, IndexError):
            self._read(item, now)

    def _read(self, item: kv.Item, now: float) -> None:
        _, kind, *middle, node_id = item.key.split("/")
        if kind == "nodes":
            self._put_node(node_id, item, now)
        elif kind == "done":
            self._done.setdefault(int(middle[0]), set()).add(node_id)
        elif kind == "drain":
            self._drains.setdefault(int(middle[0]), {})[node_id] = job.decode(job.NodeDrain, item.value)
        elif kind == "left":
            self._note_left(node_id, "vouched" if item.value == job.LOST else "deleted", now)
        elif kind == "memories":
            self.memories[node_id] = job.decode(job.Memory, item.value)
        elif kind == "returned":
            self.returned_at = max(self.returned_at, item.mod_revision)
        elif kind == "hangs":
            self._hangs.setdefault(int(middle[0]), {})[node_id] = decode_statement(item.value)
        elif kind == "pace":
            self._put_pace(int(middle[0]), node_id, item)
        elif kind == "failures":
            reports = self._failures.setdefault(int(middle[0]), {})
            reports[node_id] = decode_report(
                item.value, item.create_revision
            )  # the last one knows most, the first gave its place

    def _put_node(self, node_id: str, item: kv.Item, now: float) -> None:
        record = job.decode(job.NodeRecord, item.value)
        if record.workers < 0:
            raise ValueError(f"{record.workers} workers")
        if node_id in self._left:
            return  # it lives under another id; only its lease has not run out yet
        known = self.nodes.get(node_id)
        self.gone.pop(node_id, None)  # it is back within its fence
        since = known.since if known else now
        self._explicit += record.hint_is_explicit and known is None
        # Another process of the same name, which has lived all the while, is not held back.
        held_until = known.held_until if known else self._held_until.get(record.name, 0.0)
        self.nodes[node_id] = Node(node_id, record, item.create_revision, since, held_until, lease=item.lease)

    def _put_pace(self, generation: int, node_id: str, item: kv.Item) -> None:
        from rallypoint.protocol.pace import decode_node

        self._paces.setdefault(generation, {})[node_id] = decode_node(item.value)
        self.paces_heard += 1

    def _note_left(self, node_id: str, cause: str, now: float) -> None:
        """Its workers are gone for sure, however long its lease or its fence may run."""
        self._left[node_id] = cause
        self._remove(node_id, cause, now)
        gone = self.gone.get(node_id)
        if gone is not None and not gone.is_departure:
            self.gone[node_id] = gone.replace(cause=cause)

    def _remove(self, node_id: str, cause: str, now: float) -> None:
        node = self.nodes.pop(node_id, None)
        if node is None:
            return
        self._explicit -= node.record.hint_is_explicit
        if node_id in self.members:
            self.gone[node_id] = Gone(self.members[node_id].label, now, cause)
            self._count_death(node_id, node.record.name, cause, now)

    def _count_death(self, node_id: str, name: str, cause: str, now: float) -> None:
        """A name that died soon after admission is held back, longer each time; the first time is not counted."""
        if cause == "deleted" or now > self._admitted_at.get(node_id, now) + SOON_S:
            self._quick_deaths.pop(name, None)
            return
        times = self._quick_deaths[name] = self._quick_deaths.get(name, 0) + 1
        if times > 1:
            self._held_until[name] = now + min(LONGEST_HOLD_S, 2.0 ** (times - 2))

    # The current generation.

    def begin(self, generation: int, seats: Sequence[job.Seat], ids: Sequence[str], now: float) -> None:
        """The generation that counts has these members. Whoever of them is not here may have been lost this very moment."""
        self.generation = generation
        self.members = _members(seats, ids)
        self.gone = {
            node_id: Gone(seat.label, now, self._left.get(node_id, "expired"))
            for node_id, seat in self.members.items()
            if node_id not in self.nodes
        }
        self._admitted_at = {node_id: self._admitted_at.get(node_id, now) for node_id in self.members}
        self._world_size = seats[0].world_size if seats else 0
        self.memories = {node_id: memory for node_id, memory in self.memories.items() if memory.number > generation}
        self._done = {number: ids for number, ids in self._done.items() if number >= generation}
        self._failures = {number: reports for number, reports in self._failures.items() if number >= generation}
        self._drains = {number: told for number, told in self._drains.items() if number >= generation}
        self._hangs = {number: told for number, told in self._hangs.items() if number >= generation}
        self._paces = {number: told for number, told in self._paces.items() if number >= generation}

    def statements(self) -> dict[str, Statement]:
        """Where the workers of the current generation stand, as far as their nodes were asked because one of them hangs."""
        return self._hangs.get(self.generation, {})

    def paces(self) -> dict[str, NodePace]:
        """How long the workers of the current generation take for a step, as far as they tell."""
        return self._paces.get(self.generation, {})

    def done_members(self) -> frozenset[str]:
        return frozenset(self._done.get(self.generation, ())) & self.members.keys()

    def drains(self) -> Mapping[str, job.NodeDrain]:
        """What nodes have told since one of them has to leave, by their ids."""
        return self._drains.get(self.generation, {})

    def lost_members(self) -> list[str]:
        """Those that are gone without being done, as far as is known."""
        done = self.done_members()
        return [node_id for node_id in self.members if node_id not in self.nodes and node_id not in done]

    def verdict(self) -> Verdict:
        lost = [gone.name for gone in self.gone.values() if not gone.is_departure]
        departed = [gone.name for gone in self.gone.values() if gone.is_departure]
        reports = list(self._failures.get(self.generation, {}).values())
        verdict = judge_failures(reports, lost, departed, self._world_size)
        if lost or departed:
            return verdict
        failed = verdict.alike_count + verdict.victim_count
        return verdict.replace(stopped=max(0, self._world_size - failed))  # nodes where nothing failed have stopped theirs too

    def ended(self, current: Current, joiners: Sequence[Node], ran_s: float, after_s: float = 0.0) -> Ended:
        """How the current generation ended, for the budget; losing a node that was done is no loss.

        It was formed so long ago, and its workers had run for `after_s` when it was told to stop.
        """
        verdict = self.verdict()
        reports = self._failures.get(self.generation, {}).values()
        failures = [one for report in reports for one in report.failures if not one.stopped]
        cause = verdict.cause
        codes = [one.exitcode for one in failures if one != cause]
        if cause is not None:
            codes.insert(0, cause.exitcode)
        was_asked_for = current.signal is not None and current.signal.kind == "asked"
        told = {node_id for node_id, one in self.drains().items() if one.is_leaving}
        gone = {node_id: one for node_id, one in self.gone.items() if node_id not in current.done}
        on_their_own = [one for node_id, one in gone.items() if node_id not in told]
        return Ended(
            failed_exit_codes=tuple(codes),
            failure=describe(verdict) if codes else _unnamed_failure(current.signal),
            lost=tuple(one.name for one in on_their_own if not one.is_departure),
            departed=tuple(one.name for one in on_their_own if one.is_departure),
            preempted=tuple(one.name for node_id, one in gone.items() if node_id in told),
            joined=() if was_asked_for else tuple(one.record.name for one in joiners),  # who waited comes in with a restart
            ran_s=ran_s,
            cause=None if cause is None else _cause_of(verdict, cause),
            after_s=after_s,
            step=max((report.step for report in reports), default=-1),
            no_retry=next((f"rank {one.rank}: {one.what}" for one in failures if one.wish == NO_RETRY), ""),
        )

    # Who is here.

    def second_holder(self, now: float, lease_s: float, refused: Container[str]) -> SecondHolder | None:
        """A node that has waited one lease, in case the other is dying, for an explicit rank which another live node holds."""
        for first, node in self._second_holders(refused):
            if now >= node.since + lease_s:
                why = f"rank {node.record.rank_hint} is held by {first.record.name} at {first.record.address}, which lives"
                return SecondHolder(node.id, why)
        return None

    def refusal_due_at(self, lease_s: float, refused: Container[str]) -> float | None:
        return min((node.since + lease_s for _, node in self._second_holders(refused)), default=None)

    def _second_holders(self, refused: Container[str]) -> Iterator[tuple[Node, Node]]:
        """Each that is ready and has not been told yet, after the one that holds its rank."""
        holders: dict[int, Node] = {}
        nodes = sorted(self.nodes.values(), key=lambda node: node.arrival) if self._explicit else []
        for node in nodes:
            if node.record.hint_is_explicit:
                first = holders.setdefault(node.record.rank_hint, node)
                if first is not node and node.is_ready and node.id not in refused:
                    yield first, node

    def shunning(self, strikes: Sequence[str], since: float, culprit: str) -> dict[str, Node]:
        """The nodes, of which those are marked whose workers have failed several times in a row, for longer each time.

        A member is shunned only if the failure that has just ended its generation is its own. Where several nodes share a name,
        nobody can tell whose it was.
        """
        if len(strikes) < STRIKES:
            return self.nodes
        marked, names = {}, [node.record.name for node in self.nodes.values()]
        for node_id, node in self.nodes.items():
            name = node.record.name
            times = _in_a_row(strikes, name)
            if times >= STRIKES and names.count(name) == 1 and (node_id not in self.members or name == culprit):
                shun_s = min(LONGEST_SHUN_S, FIRST_SHUN_S * 2.0 ** (times - STRIKES))
                marked[node_id] = node.replace(shunned_until=since + shun_s)
        return {**self.nodes, **marked} if marked else self.nodes

    def who_is_here(self, wanted: int) -> str:
        names = sorted(node.record.name for node in self.nodes.values() if not node.record.unfit)
        here = f"here: {listed(names) or 'nobody'}"
        unfit = [f"{one.record.name} ({one.record.unfit})" for one in self.nodes.values() if one.record.unfit]
        here += f"; not fit: {listed(unfit, _UNFIT_TOLD)}" if unfit else ""
        missing = self._missing_names(wanted)
        return f"{here}; missing: {listed(missing)}" if missing else here

    def _missing_names(self, wanted: int) -> list[str]:
        """Those that sat in the last generation, or the ranks that nobody holds where nodes name their own."""
        if self.members:
            return sorted(seat.name for node_id, seat in self.members.items() if node_id not in self.nodes)
        held = {node.record.rank_hint for node in self.nodes.values()}
        if held == {-1}:
            return []
        return [f"rank {rank}" for rank in range(wanted) if rank not in held]


def _in_a_row(strikes: Sequence[str], name: str) -> int:
    """How often it was this one and no other, the last time that it was."""
    times = 0
    for struck in reversed(strikes):
        if struck == name:
            times += 1
        elif times:
            break
    return times


def _cause_of(verdict: Verdict, cause: WorkerFailure) -> Failure:
    is_everywhere = 0 < verdict.world_size <= verdict.alike_count
    return Failure(cause.rank, cause.exitcode, cause.message, cause.place, is_everywhere, cause.hung)


def _unnamed_failure(signal: job.Signal | None) -> str:
    """A node may have stopped everybody without naming a worker that failed: an agent that is not ours, or it was asked for."""
    return signal.why if signal is not None and signal.kind in ("failure", "asked") else ""


# --- leader ----------------------------------------------------------------------------------------------------------------


STATUS_INTERVAL_S = 10.0  # between two looks of those who wait
FRESH_STATUS_S = 1.0  # some of them look more often
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
        self._judge_at: float | None = None  # an inquiry, by whoever has answered
        self._comparison: Comparison | None = None  # of how quick all workers are, once any tells of that
        self._status_at = 0.0
        self._status = self._told_status = b""

    # What it sees.

    def see(self, event: kv.Event, now: float) -> None:
        """What is older than what we have read, or shall read, says nothing new; it may come from an earlier watch."""
        if not self._is_watching or event.revision <= self._revision:
            return
        self.roster.apply(event, now)
        if not event.key.startswith(job.PACES):  # on which nothing else depends
            self.touch(now)

    def touch(self, now: float) -> None:
        """Something changed: decide again, soon."""
        batch_s = len(self.roster.nodes) * BATCH_PER_NODE_S
        soon = now + batch_s if batch_s > LEAST_BATCH_S else now
        self._decide_at = soon if self._decide_at is None else min(self._decide_at, soon)

    def wake_at(self) -> float | None:
        compare_at = self._comparison.look_at if self._comparison is not None else None
        return min((at for at in (self._decide_at, self._judge_at, compare_at) if at is not None), default=None)

    # What it asks for; one question at a time.

    def next_request(self, board: Board, now: float) -> kv.Request | None:
        if not self._revision:
            return kv.Read(job.UP)
        if not self._is_watching:
            return kv.Watch(job.UP, self._revision + 1)
        if board.closed is not None:
            return None
        if board.generation is not None and self.roster.generation != board.number:
            return kv.Read(job.seats_of_attempt(board.number, board.generation.attempt))
        if self.forming is not None and self.forming.number <= board.number:
            self.forming = None  # it counts already, and only the answer that said so was lost
        if self.forming is not None:
            return self._next_of_form(self.forming, board)
        if self.roster.statements() and (request := self._next_of_inquiry(board, now)) is not None:
            return request
        if self._decide_at is not None and now >= self._decide_at and (request := self._decide(board, now)) is not None:
            return request
        return self._next_of_pace(board, now) if self.roster.paces() else None

    def _next_of_inquiry(self, board: Board, now: float) -> kv.Transaction | None:
        """Workers hang: ask all nodes, then name who they are, once all have answered or the time is over."""
        self._judge_at = None
        if board.signal() is not None:
            return None
        told, number = self.roster.statements(), board.number
        posted = board.inquiries.get(number)
        if posted is None:
            by = next(iter(told.values())).node
            return self._fenced((), kv.Put(job.inquiry_key(number), encode_inquiry(Inquiry(by))))
        inquiry = _open_inquiry(posted)
        if inquiry is None:
            return None
        judge_at = board.inquired_at[number] + INQUIRY_S
        if now < judge_at and not self.roster.members.keys() - self.roster.gone.keys() <= told.keys():
            self._judge_at = judge_at
            return None
        found = inquiry.replace(finding=inquiries.accuse(told.values()))
        return self._fenced((), kv.Put(job.inquiry_key(number), encode_inquiry(found)))

    def _next_of_pace(self, board: Board, now: float) -> kv.Transaction | None:
        """Who is slower than the others."""
        if board.signal() is not None:
            self._comparison = None
            return None
        if self._comparison is None:
            from rallypoint.protocol.pace import Comparison

            self._comparison = Comparison()
        posted = board.paces.get(board.number, b"")
        found = self._comparison.next(board.number, self.roster.paces(), self.roster.paces_heard, posted, now)
        return None if found is None else self._fenced((), kv.Put(job.job_pace_key(board.number), found))

    def replied(self, request: kv.Request, answer: kv.Outcome | kv.Snapshot | None, board: Board, now: float) -> None:
        match request, answer:
            case kv.Read(job.UP), kv.Snapshot(revision, items):
                self._revision = revision
                self.roster.load(items, now)
            case kv.Read(), kv.Snapshot(_, items):
                self.roster.begin(board.number, [job.decode(job.Seat, item.value) for item in items], _ids(items), now)
            case kv.Watch(), _:
                self._is_watching = True
            case kv.Transaction(), kv.Outcome():
                self._note_outcome(request, answer, board, now)
        self.touch(now)

    def _note_outcome(self, request: kv.Transaction, outcome: kv.Outcome, board: Board, now: float) -> None:
        if not outcome.succeeded:
            self.forming, self.must_reload = None, True
            return
        for operation in request.then:
            if isinstance(operation, kv.Put) and operation.key == job.STATUS:
                self._told_status = operation.value
            elif isinstance(operation, kv.Put) and operation.key.startswith(job.DOWN):
                item = kv.Item(operation.key, operation.value, outcome.revision, outcome.revision, operation.lease)
                board.post(item, now)
        if self.forming is not None and self.forming.advance():
            self.roster.begin(self.forming.number, *self.forming.members(), now)
            self.forming = None

    # What it decides.

    def _decide(self, board: Board, now: float) -> kv.Transaction | None:
        """What is to be written stays due until it is answered: asked again, it is decided again."""
        second = self.roster.second_holder(now, self.policy.lease_s, board.refusals)
        if second is not None:
            return self._fenced((), kv.Put(job.refusal_key(second.id), second.why.encode(errors="replace")))
        current = self._current(board)
        if (told := self._rule_on_drain(board, current)) is not None:
            return told
        nodes = self._nodes(board, current)
        past = past_of(self.roster.memories, board.number, board.first_read_at, self.policy)
        decision = decide(nodes, current, self.policy, now, past)
        if isinstance(decision, Interrupt) and decision.kind == "join" and (refusal := self._why_nobody_may_join(board, now)):
            decision = Wait(refusal, self._given_back_at(board, now))
        match decision:
            case Interrupt(kind, why):
                return self._interrupt(board.number, job.Signal(kind, why[: job.MAX_WHY], self.name))
            case Conclude():
                finished = job.Signal("finished", "all nodes are done", self.name)
                return self._signal(board.number, finished, self._closed("finished", "the job has finished"))
            case Form() as form:
                return self._form(form, nodes, current, board, past, now)
            case Expel(late, why):
                return self._expel(late, why)
            case GiveUp(why):
                return self._fenced((), self._closed("failed", why))
            case Wait() as wait:
                due_at = self.roster.refusal_due_at(self.policy.lease_s, board.refusals)
                times = [at for at in (wait.wake_at, due_at) if at is not None]
                return self._rest(wait.replace(wake_at=min(times, default=None)), now)

    def _rule_on_drain(self, board: Board, current: Current | None) -> kv.Transaction | None:
        """A node has to leave: when all save for it, and whether the job ends with it."""
        if current is None or current.signal is not None or board.notice() is None:
            return None
        from rallypoint.protocol import draining

        told, members = self.roster.drains(), current.members
        ruling = draining.rule(members.keys() - current.done, told, board.ruling())
        leaving = {node_id: one for node_id, one in told.items() if one.is_leaving}
        if ruling.is_complete:
            staying = usable(len(self.roster.nodes.keys() - leaving.keys()), self.policy)
            names = {node_id: seated.name for node_id, seated in members.items()}
            if why := draining.why_over(leaving, names, staying, self.policy.min_nodes):
                return self._fenced((), self._closed("preempted" if board.stop is None else "stopped", why))
        if ruling == (board.ruling() or job.Ruling(job.NO_STEP, False)):
            return None
        return self._fenced((), kv.Put(job.ruling_key(board.number), job.encode(ruling)))

    def _why_nobody_may_join(self, board: Board, now: float) -> str:
        """A joiner whom no budget would pay for is kept waiting; let in, it would end the job. So is one while workers save."""
        if board.notice() is not None:
            return "a node has notice to leave, and all workers save before it does"
        ruling = judge(self.restarts, self._spent(board), Ended(joined=("a node",), after_s=max(0.0, now - board.generation_at)))
        return ruling.why if isinstance(ruling, NoRestartLeft) else ""

    def _given_back_at(self, board: Board, now: float) -> float | None:
        """When this generation has run for so long that what was spent before it counts no more, if it has not yet."""
        at = board.generation_at + self.restarts.healthy_after_s
        return at if self.restarts.healthy_after_s > 0 and at > now else None

    def _spent(self, board: Board) -> Purse:
        return spent(self.roster.memories, board.number, board.generation.purse if board.generation is not None else Purse())

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
        verdict = self.roster.verdict() if is_failure else Verdict()
        culprit = verdict.cause_node
        is_excluded = verdict.cause is not None and verdict.cause.wish == EXCLUDE_NODE
        struck = (culprit,) * (STRIKES_OF_EXCLUDED if is_excluded else 1)
        return ((*strikes, *struck) if culprit else strikes)[-MOST_STRIKES:], culprit

    def _rest(self, wait: Wait, now: float) -> kv.Transaction | None:
        """Nothing to do; those who wait with us are told how things stand, now and then."""
        self.wait = wait
        if wait.is_gathering and now >= self._status_at:
            self._status_at = now + FRESH_STATUS_S
            self._status = job.encode(job.Status(self.status_text()))
        if wait.is_gathering and self._status != self._told_status:
            return self._fenced((), kv.Put(job.STATUS, self._status))
        times = [wait.wake_at, self._status_at if wait.is_gathering else None]
        self._decide_at = min((at for at in times if at is not None), default=None)
        return None

    def status_text(self) -> str:
        return f"{self.wait.why}; {self.roster.who_is_here(self.policy.min_nodes)}"

    def _form(
        self, form: Form, nodes: Mapping[str, Node], current: Current | None, board: Board, past: Past | None, now: float
    ) -> kv.Transaction | None:
        purse, why, strikes, after = Purse(), form.why, tuple[str, ...](), ""
        if (ended := self._what_ended(form, current, board, past, now)) is not None:
            again = judge(self.restarts, self._spent(board), ended)
            if isinstance(again, NoRestartLeft):
                return self._fenced((), self._closed("failed", again.why, self.roster.verdict(), again.is_hopeless))
            since = current.signal_at if current is not None else now
            if now < since + again.delay_s:
                return self._rest(Wait(again.why, since + again.delay_s, is_gathering=True), now)
            others = {node_id: one for node_id, one in nodes.items() if one.record.name not in ended.excluded}
            purse, why = again.purse, again.why + self._who_is_left_out(form, others, board, now)
            strikes = self._strikes(board, current)[0] if current is not None else self._remembered_strikes()
            cause = self.roster.verdict().cause
            after = "hang" if again.kind == "failure" and cause is not None and cause.hung else again.kind
        number = 1 + max(board.number, past.number if past is not None else 0)
        self.forming = Forming(number, self.term, form, purse, why[: job.MAX_WHY], strikes, after, follows=board.number)
        return self._next_of_form(self.forming, board)

    def _what_ended(self, form: Form, current: Current | None, board: Board, past: Past | None, now: float) -> Ended | None:
        """How the generation before this one ended; None if there was none."""
        if current is not None:
            joiners = [one for one in form.order if one.id not in current.members]
            return self._ended(form, current, joiners, board, now)
        return Ended(lost=(HOST,)) if past is not None else None

    def _remembered_strikes(self) -> tuple[str, ...]:
        ids = newest(self.roster.memories, 0)
        return self.roster.memories[ids[0]].strikes if ids else ()

    def _ended(self, form: Form, current: Current, joiners: Sequence[Node], board: Board, now: float) -> Ended:
        """For the budget: a node that is left out because its own worker has asked for it is paid for as one that goes."""
        at = board.generation_at
        ended = self.roster.ended(current, joiners, now - at, max(0.0, current.signal_at - at))
        verdict, seated = self.roster.verdict(), {one.record.name for one in form.order}
        is_excluded = verdict.cause is not None and verdict.cause.wish == EXCLUDE_NODE and verdict.cause_node not in seated
        return ended.replace(excluded=(verdict.cause_node,)) if is_excluded else ended

    def _who_is_left_out(self, form: Form, nodes: Mapping[str, Node], board: Board, now: float) -> str:
        """For all to see: who was expelled, and whose workers have failed too often."""
        seated = {one.id for one in form.order}
        shunned = [node for node_id, node in nodes.items() if node.shunned_until > now and node_id not in seated]
        expelled = [gone.name for node_id, gone in self.roster.gone.items() if node_id in board.expelled]
        told = f"; without {plural(len(expelled), 'node')} {listed(expelled)}, which did not stop in time" if expelled else ""
        if shunned:
            names = ", ".join(f"{node.record.name} for {node.shunned_until - now:.0f} s" for node in shunned[:4])
            told += f"; left out, because their workers keep failing: {names}"
        return told

    def _next_of_form(self, forming: Forming, board: Board) -> kv.Transaction:
        """A member that has come back at the last moment makes it fail: its workers run."""
        compares = (
            kv.Compare(job.GENERATION, "mod", board.generation_revision),
            kv.Compare(job.RETURNED, "mod", self.roster.returned_at),
        )
        return self._fenced(compares, *forming.operations())

    def _expel(self, late: tuple[Node, ...], why: str) -> kv.Transaction:
        """From now on no keepalive of theirs is taken; when their fence is over, nothing of them runs."""
        told = why.encode(errors="replace")
        operations = [one for node in late for one in (kv.Put(job.expelled_key(node.id), told), kv.EndLease(node.lease))]
        return self._fenced((), *operations)

    # What it writes, always fenced.

    def _fenced(self, compares: tuple[kv.Compare, ...], *operations: kv.Operation) -> kv.Transaction:
        mine = (kv.Compare(job.LEADER, "create", self.term), kv.Compare(job.CLOSED, "create", 0))
        return kv.Transaction((*mine, *compares), operations)

    def _signal(
        self, generation: int, signal: job.Signal, *more: kv.Operation, compares: tuple[kv.Compare, ...] = ()
    ) -> kv.Transaction:
        key = job.signal_key(generation)
        return self._fenced((kv.Compare(key, "create", 0), *compares), kv.Put(key, job.encode(signal)), *more)

    def _interrupt(self, generation: int, signal: job.Signal) -> kv.Transaction:
        """Losing a node that is done is no loss, even if its word that it is done reaches the store after its lease has ended."""
        lost = [] if signal.kind == "join" else self.roster.lost_members()
        not_done = tuple(kv.Compare(job.done_key(generation, node_id), "create", 0) for node_id in lost[:MAX_COMPARED])
        return self._signal(generation, signal, compares=not_done)

    def _closed(self, kind: job.ClosedKind, why: str, verdict: Verdict | None = None, is_hopeless: bool = False) -> kv.Put:
        closed = job.Closed(kind, why[: job.MAX_WHY], self.name, verdict, is_hopeless=is_hopeless)
        return kv.Put(job.CLOSED, job.encode(closed))


def _members(seats: Sequence[job.Seat], ids: Sequence[str]) -> dict[str, Seated]:
    """Who sits where; the workers of a seat are those up to the next one's first."""
    ends = sorted({*(seat.first_rank for seat in seats), *(seat.world_size for seat in seats[:1])})
    following = dict(pairwise(ends))
    return {
        node_id: Seated(
            seat.name, seat.group_rank, seat.first_rank, following.get(seat.first_rank, seat.first_rank) - seat.first_rank
        )
        for node_id, seat in zip(ids, seats, strict=True)
    }


def _open_inquiry(posted: bytes) -> Inquiry | None:
    """None for one that has come to its end, or that nobody can read."""
    with suppress(ValueError):
        inquiry = decode_inquiry(posted)
        return inquiry if inquiry.finding is None else None
    return None


def _ids(items: tuple[kv.Item, ...]) -> list[str]:
    return [item.key.rpartition("/")[2] for item in items]
