"""What the leader knows about the nodes: who is here, who sits in the current generation, who is gone, done or has failed.

It is kept up by the changes under ``up/``, one at a time and at the same cost however many nodes there are.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress

from rallypoint.core import job_records as job
from rallypoint.core.coordination import Event, Item
from rallypoint.core.failure_reports import NodeReport, decode_report
from rallypoint.core.generation import Current, Gone, Node, listed
from rallypoint.core.restarts import Ended
from rallypoint.core.seating import Candidate, Seated
from rallypoint.core.verdict import Verdict, describe, judge_failures
from rallypoint.records import Value

__all__ = ["Roster", "SecondHolder"]

SOON_S = 10.0  # a node that dies this soon after a generation was formed with it is one that keeps dying
LONGEST_HOLD_S = 60.0
STRIKES = 2  # so many failures of its workers in a row, and a node is left out for a while
FIRST_SHUN_S, LONGEST_SHUN_S = 60.0, 3600.0


class SecondHolder(Value):
    """A node that insists on the rank of another that lives."""

    id: str
    why: str


class Roster:
    """Everything that nodes tell the leader."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.generation = 0
        self.members: dict[str, Seated] = {}
        self.gone: dict[str, Gone] = {}
        self._admitted_at: dict[str, float] = {}
        self._world_size = 0
        self._done: dict[int, set[str]] = {}
        self._failures: dict[int, dict[str, NodeReport]] = {}
        self._left: dict[str, str] = {}  # who has no worker any more, and why it went; an id is never used again
        self.returned_at = 0  # the revision at which a member was back last
        self._quick_deaths: dict[str, int] = {}
        self._held_until: dict[str, float] = {}
        self._explicit = 0

    # What nodes tell.

    def load(self, items: Iterable[Item], now: float) -> None:
        for item in items:
            self._put(item, now)

    def apply(self, event: Event, now: float) -> None:
        if event.item is not None:
            self._put(event.item, now)
        elif event.key.startswith("up/nodes/"):
            self._remove(event.key.rpartition("/")[2], event.cause, now)

    def _put(self, item: Item, now: float) -> None:
        """Take in what a node wrote; what nobody can read is not there, and cannot harm the others."""
        with suppress(ValueError, IndexError, RecursionError):
            self._read(item, now)

    def _read(self, item: Item, now: float) -> None:
        _, kind, *middle, node_id = item.key.split("/")
        if kind == "nodes":
            self._put_node(node_id, item, now)
        elif kind == "done":
            self._done.setdefault(int(middle[0]), set()).add(node_id)
        elif kind == "left":
            self._note_left(node_id, "vouched" if item.value == job.LOST else "deleted", now)
        elif kind == "returned":
            self.returned_at = max(self.returned_at, item.mod_revision)
        elif kind == "failures":
            reports = self._failures.setdefault(int(middle[0]), {})
            reports.setdefault(node_id, decode_report(json.loads(item.value), item.create_revision))

    def _put_node(self, node_id: str, item: Item, now: float) -> None:
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
            self.gone[node_id] = Gone(node.record.name, now, cause)
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
        self.members = {node_id: Seated(seat.name, seat.group_rank) for node_id, seat in zip(ids, seats, strict=True)}
        self.gone = {
            node_id: Gone(seat.name, now, self._left.get(node_id, "expired"))
            for node_id, seat in self.members.items()
            if node_id not in self.nodes
        }
        self._admitted_at = {node_id: self._admitted_at.get(node_id, now) for node_id in self.members}
        self._world_size = seats[0].world_size if seats else 0
        self._done = {number: ids for number, ids in self._done.items() if number >= generation}
        self._failures = {number: reports for number, reports in self._failures.items() if number >= generation}

    def done_members(self) -> frozenset[str]:
        return frozenset(self._done.get(self.generation, ())) & self.members.keys()

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
        failed = sum(len(report.failures) + report.unnamed for report in reports)
        return verdict.replace(stopped=max(0, self._world_size - failed))  # nodes where nothing failed have stopped theirs too

    def ended(self, current: Current, joiners: Sequence[Candidate], ran_s: float) -> Ended:
        """How the current generation ended, for the budget; losing a node that was done is no loss."""
        verdict = self.verdict()
        reports = self._failures.get(self.generation, {}).values()
        failures = [one for report in reports for one in report.failures if not one.stopped]
        codes = [one.exitcode for one in failures if one != verdict.cause]
        if verdict.cause is not None:
            codes.insert(0, verdict.cause.exitcode)
        gone = [one for node_id, one in self.gone.items() if node_id not in current.done]
        return Ended(
            failed_exit_codes=tuple(codes),
            failure=describe(verdict) if codes else _unnamed_failure(current.signal),
            lost=tuple(one.name for one in gone if not one.is_departure),
            departed=tuple(one.name for one in gone if one.is_departure),
            joined=tuple(one.record.name for one in joiners),
            ran_s=ran_s,
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
        names = sorted(node.record.name for node in self.nodes.values())
        here = f"here: {listed(names)}"
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


def _unnamed_failure(signal: job.Signal | None) -> str:
    """A node may have stopped everybody without saying which worker failed: an agent that is not ours."""
    return signal.why if signal is not None and signal.kind == "failure" else ""
