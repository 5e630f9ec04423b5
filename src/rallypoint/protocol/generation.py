"""The leader's decision: whether a generation is to be formed, ended or left alone, and why.

A generation, once formed, never changes. Whoever comes or goes, and whatever fails, ends it by a signal; then all of its members
stop their workers and say so; then the next one is formed of those who are ready. Which of these steps is due is a
function of who is here, of what is known about the current generation, and of the leader's own clock:

    none formed yet      Form once max nodes are here, or min nodes and the last call is over
    running              Interrupt for a node that is gone, or for joiners; Conclude when all are done
    signalled to stop    Wait until every live member is ready and every lost one has surely stopped; then Form
                         Expel a live member that is not ready in time; GiveUp if a sick one has left too few

A member is replaced only on proof that its workers are gone: it was ready, or left, or its warden has vouched for it, or it can
have heard nothing of the store for as long as its fence, and a margin. Its lease runs out before its fence where that is longer;
until shortly before its fence it may come back, and nothing is lost. One that is expelled gets no more keepalives answered, so
its own fence ends its workers, whatever in it is stuck.

A node whose machine is *unfit*, by a check of its own, gets no seat, and says why. One whose workers fail again and again is
*shunned*: the others go on without it for a while, as long as they are enough.

Who sits where: a node keeps its group rank from one generation to the next as long as the world has such a rank. A node that was
started anew takes the rank that its name had. Rank hints are honoured: an explicit one before all else, one that was found in the
environment where nobody sits. Whoever has none of these fills the gaps, in the natural order of names: node2 before node10.

A store that was started anew knows nothing; what its nodes remember of the job is the `Past`. Then the first generation in it is
formed like the next one of those before: not while workers of the last may run, of as many nodes as that had, at their old ranks.

In a store that outlives the job, the same proof is needed for all of its nodes before what is left of it may be deleted, and a
job of that name can begin anew.

Invariants: nothing is formed with fewer than min or more than max nodes, nor while a member of the last generation, or of the
past, may run workers; the number of nodes is a multiple of node_unit; nobody joins once a member is done; a Wait that names no
time ends by an event. Group ranks are 0..n-1, each once; global ranks are 0..world-1, each once, and follow group ranks; ranks
within a role likewise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from rallypoint.base import defaults
from rallypoint.base.json_text import from_json
from rallypoint.base.records import Value
from rallypoint.base.text import listed, many, node_label, plural
from rallypoint.coordination.model import Compare, Delete, Snapshot, Transaction
from rallypoint.protocol import job_records as job
from rallypoint.protocol.job_records import NOT_READY, NodeRecord, Seat, Signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Interruption = Literal["loss", "departure", "join"]

__all__ = [
    "READY_MARGIN_S", "Conclude", "Current", "Decision", "Expel", "Form", "GiveUp", "Gone", "Interrupt", "MayReturn", "Node",
    "Past", "Policy", "Seated", "Wait", "arrange", "clearing", "decide", "natural", "preferred", "seats", "usable",
]  # fmt: skip

READY_MARGIN_S = 5.0  # beyond the time in which workers are stopped
MARGIN_S = 0.3  # what two clocks may differ by over one lease, and a kill may take
DRIFT = 1.01  # no clock gains more than that on another; over a long fence that is more than the margin
STOP_AHEAD_S = 2.0  # how long before its fence is over a silent node is given up, so that the others have stopped by then
EXPELLED_AT_ONCE = 50  # two operations each, and a transaction has at most 128
MOST_DELETED = 100  # in one transaction; a job keeps the seats and data of its latest generations only
LONGEST_WINDOW = 10  # a stream of joiners cannot put off the larger world for more than so many windows


class Policy(Value):
    """What all nodes agreed on. `after_expiry_s` is the part of the fence that is left when a lease has run out."""

    min_nodes: int
    max_nodes: int
    node_unit: int = defaults.NODE_UNIT
    join_timeout_s: float = defaults.JOIN_TIMEOUT_S
    last_call_s: float = defaults.LAST_CALL_TIMEOUT_S
    scale_up_window_s: float = defaults.SCALE_UP_WINDOW_S
    lease_s: float = defaults.KEEP_ALIVE_INTERVAL_S * defaults.KEEP_ALIVE_MAX_ATTEMPT
    after_expiry_s: float = 0.0
    ready_timeout_s: float = defaults.SHUTDOWN_TIMEOUT_S + READY_MARGIN_S  # after that a node is expelled

    @property
    def fence_s(self) -> float:
        """For how long a node that hears nothing of the store may run its workers."""
        return self.lease_s + self.after_expiry_s


class Seated(Value):
    """Where a node sat, under which name, and with which ranks of workers."""

    name: str
    group_rank: int
    first_rank: int = 0
    workers: int = 0

    @property
    def label(self) -> str:
        """As people are told of it, after the word node."""
        return node_label(self.group_rank, self.name, range(self.first_rank, self.first_rank + self.workers))


class Node(Value):
    """A node that is here, since when by the leader's clock; `arrival` orders nodes by when they came.

    `held_until` is set for one that has died too often of late, `shunned_until` for one whose workers have failed too often.
    """

    id: str
    record: NodeRecord
    arrival: int
    since: float
    held_until: float = 0.0
    shunned_until: float = 0.0
    lease: int = 0

    @property
    def is_ready(self) -> bool:
        return self.record.ready_after != NOT_READY


class Gone(Value):
    """A member that is no longer here: when the leader saw it, and why; the cause says whether it may still run workers."""

    name: str  # as people are told of it
    at: float
    cause: str  # of coordination.model.Event, or "expelled"

    @property
    def is_departure(self) -> bool:
        return self.cause == "deleted"

    def may_return_until(self, policy: Policy) -> float:
        """A little before its own fence ends its workers; one that was expelled, or whose workers are gone, cannot return."""
        can_return = self.cause == "expired"
        return self.at + max(0.0, policy.after_expiry_s - STOP_AHEAD_S) if can_return else float("-inf")

    def stopped_at(self, policy: Policy) -> float:
        """From when on it has surely no worker any more."""
        fence_left_s = {"expired": policy.after_expiry_s, "expelled": policy.fence_s}.get(self.cause)
        return float("-inf") if fence_left_s is None else self.at + fence_left_s * DRIFT + MARGIN_S


class Current(Value):
    """What the leader knows of the generation that counts."""

    number: int
    members: Mapping[str, Seated]
    signal: Signal | None
    signal_at: float
    done: frozenset[str]
    gone: Mapping[str, Gone]


class Past(Value):
    """The last generation of which nodes remember more than the store does: how many it had, and who of those that have come back
    sat where; its workers have surely ended at `over_at`, by the leader's clock.
    """

    number: int
    nodes: int
    members: Mapping[str, Seated]
    over_at: float


class Form(Value):
    """Form the next generation of these nodes, in the order of their group ranks."""

    order: tuple[Node, ...]
    why: str


class Interrupt(Value):
    kind: Interruption
    why: str


class Expel(Value):
    """Take no more keepalives of these nodes, which live but have not stopped in time; their fence then ends their workers."""

    nodes: tuple[Node, ...]
    why: str


class GiveUp(Value):
    """The job cannot go on."""

    why: str


class Conclude(Value):
    """All members are done."""


class Wait(Value):
    """Nothing is to be done before something happens, or `wake_at`. `is_gathering` if nodes wait for each other."""

    why: str
    wake_at: float | None = None
    is_gathering: bool = False


Decision = Form | Interrupt | Expel | GiveUp | Conclude | Wait


def decide(roster: Mapping[str, Node], current: Current | None, policy: Policy, now: float, past: Past | None = None) -> Decision:
    if current is None:
        return _first(roster, policy, now, past)
    if current.signal is None:
        return _running(roster, current, policy, now)
    if not current.signal.is_stop:
        return Wait(f"generation {current.number} has finished")
    return _regroup(roster, current, policy, now, past)


def usable(nodes: int, policy: Policy) -> int:
    """How many of so many nodes a generation can have: at most max, a multiple of the unit; 0 if that is below min."""
    count = min(nodes, policy.max_nodes) // policy.node_unit * policy.node_unit
    return count if count >= policy.min_nodes else 0


# No generation yet.


def _first(roster: Mapping[str, Node], policy: Policy, now: float, past: Past | None) -> Decision:
    """With a past, as many as there were then are all that is waited for."""
    ready = _admissible([node for node in roster.values() if node.is_ready], policy, now)
    count = usable(len(ready), policy)
    if not count:
        return _too_few(ready, policy, _next_release(roster.values(), now))
    if past is not None and now < past.over_at:
        return Wait(_may_still_run(past, now), past.over_at, is_gathering=True)
    if count < usable(policy.max_nodes if past is None else past.nodes, policy):
        call_ends = max(node.since for node in ready) + policy.last_call_s
        call_ends = min(call_ends, min(node.since for node in ready) + policy.join_timeout_s)
        if now < call_ends:
            why = f"{len(ready)} of up to {policy.max_nodes} nodes; more may join for {policy.last_call_s:g} s"
            return Wait(why, call_ends, is_gathering=True)
    return _form(ready, past.members if past is not None else {}, count, f"{many(count, 'node')} here")


def _may_still_run(past: Past, now: float) -> str:
    return f"workers of generation {past.number} may run on nodes that have not come back, for another {past.over_at - now:.1f} s"


def _too_few(ready: list[Node], policy: Policy, wake_at: float | None) -> Wait:
    unit = f", in multiples of {policy.node_unit}" if policy.node_unit > 1 else ""
    why = f"{len(ready)} of {many(policy.min_nodes, 'node')}{unit}"
    return Wait(why, wake_at, is_gathering=True)


def _form(ready: list[Node], before: Mapping[str, Seated], count: int, why: str) -> Form:
    chosen = preferred(ready, before)[:count]
    return Form(tuple(arrange(chosen, before)), why)


def _admissible(nodes: list[Node], policy: Policy, now: float) -> list[Node]:
    """Without those whose machine is unfit, without second holders of an explicit rank, without those held back, and without the
    shunned if others are enough.
    """
    nodes = [node for node in nodes if not node.record.unfit]
    holders: dict[int, Node] = {}
    for node in nodes:
        rank = node.record.rank_hint
        if node.record.hint_is_explicit and (rank not in holders or node.arrival < holders[rank].arrival):
            holders[rank] = node
    admitted = [
        node
        for node in nodes
        if node.held_until <= now and (not node.record.hint_is_explicit or holders[node.record.rank_hint].id == node.id)
    ]
    welcome = [node for node in admitted if node.shunned_until <= now]
    return welcome if usable(len(welcome), policy) else admitted


def _next_release(nodes: Iterable[Node], now: float) -> float | None:
    releases = (at for node in nodes for at in (node.held_until, node.shunned_until) if at > now)
    return min(releases, default=None)


# A generation runs.


def _running(roster: Mapping[str, Node], current: Current, policy: Policy, now: float) -> Decision:
    lost = [node_id for node_id in current.members if node_id not in roster and node_id not in current.done]
    if lost:
        return _after_loss(lost, current, policy, now)
    if len(current.done) >= len(current.members):
        return Conclude()
    if current.done:
        return Wait(f"{len(current.done)} of {len(current.members)} nodes are done")
    return _consider_joiners(roster, current, policy, now)


def _after_loss(lost: list[str], current: Current, policy: Policy, now: float) -> Decision:
    """Where a fence is longer than a lease, a silent node is given the time to come back: the others could not go on sooner."""
    gone = [current.gone[node_id] for node_id in lost if node_id in current.gone]
    names = f"{plural(len(lost), 'node')} {listed([current.members[node_id].label for node_id in lost])}"
    if gone and all(one.is_departure for one in gone):
        return Interrupt("departure", f"{names} left")
    returns_until = min((one.may_return_until(policy) for one in gone), default=now)
    if now < returns_until:
        return Wait(f"{names} {plural(len(lost), 'has', 'have')} not been heard of, but may come back", returns_until)
    silent = any(one.cause == "expired" for one in gone)
    how = "not heard of in time" if silent else plural(len(lost), "its agent was killed", "their agents were killed")
    return Interrupt("loss", f"{names} {plural(len(lost), 'was', 'were')} lost: {how}")


def _consider_joiners(roster: Mapping[str, Node], current: Current, policy: Policy, now: float) -> Decision:
    waiting = [node for node in roster.values() if node.is_ready and node.id not in current.members]
    if len(current.members) >= policy.max_nodes:
        spare = [node for node in waiting if not node.record.unfit]
        why = f"generation {current.number} runs with all {policy.max_nodes} nodes; {len(spare)} are spare"
        return Wait(why, is_gathering=len(spare) < len(waiting))
    admissible = _admissible(list(roster.values()), policy, now)  # of all, because members hold ranks too
    joiners = [node for node in admissible if node.is_ready and node.id not in current.members and node.shunned_until <= now]
    together = len(current.members) + len(joiners)
    if usable(together, policy) <= len(current.members):
        shunned = [node.record.name for node in waiting if node.shunned_until > now]
        left_out = f"; left out for now, because their workers keep failing: {listed(shunned)}" if shunned else ""
        why = f"generation {current.number} runs{left_out}"
        is_told = bool(shunned) or any(node.record.unfit for node in waiting)
        return Wait(why, _next_release(waiting, now), is_gathering=is_told)
    opens, latest = min(node.since for node in joiners), max(node.since for node in joiners)
    closes = min(latest + policy.scale_up_window_s, opens + LONGEST_WINDOW * policy.scale_up_window_s)
    if now < closes and together < policy.max_nodes:
        return Wait(f"{len(joiners)} nodes want to join; others may follow", closes)
    names = listed([node.record.name for node in joiners])
    return Interrupt("join", f"{names} joins; from {len(current.members)} to {usable(together, policy)} nodes")


# A generation was told to stop.


def _regroup(roster: Mapping[str, Node], current: Current, policy: Policy, now: float, past: Past | None = None) -> Decision:
    busy = [node for node in roster.values() if node.id in current.members and node.record.ready_after < current.number]
    if busy:
        return _await_busy(busy, current, policy, now)
    safe_at = _when_the_lost_have_stopped(roster, current, policy)
    if now < safe_at:
        return Wait("a lost node may still run workers until its fence", safe_at)
    if past is not None and now < past.over_at:
        return Wait(_may_still_run(past, now), past.over_at)
    stopped = [
        node
        for node in roster.values()
        if node.is_ready and (node.id not in current.members or node.record.ready_after >= current.number)
    ]
    ready = _admissible(stopped, policy, now)
    count = usable(len(ready), policy)
    if count:
        return _form(ready, current.members, count, f"{count} nodes are ready")
    assert current.signal is not None
    if current.signal.kind == "sick" and not usable(len(stopped), policy):
        return GiveUp(f"{current.signal.why}; {len(stopped)} of {policy.min_nodes} nodes are left, too few to go on")
    return _too_few(ready, policy, _next_release(stopped, now))


def _await_busy(busy: list[Node], current: Current, policy: Policy, now: float) -> Decision:
    patience_ends = current.signal_at + policy.ready_timeout_s
    names = listed([node.record.name for node in busy])
    if now < patience_ends:
        return Wait(f"{len(busy)} nodes are stopping their workers: {names}", patience_ends)
    why = f"its workers had not stopped {policy.ready_timeout_s:g} s after generation {current.number} was over"
    return Expel(tuple(busy[:EXPELLED_AT_ONCE]), why)


def _when_the_lost_have_stopped(roster: Mapping[str, Node], current: Current, policy: Policy) -> float:
    stopped_at = [
        gone.stopped_at(policy) for node_id, gone in current.gone.items() if node_id in current.members and node_id not in roster
    ]
    return max(stopped_at, default=float("-inf"))


# Who sits where.


_LAST = 1 << 31


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts numbers inside names as numbers."""
    parts = re.split(r"([0-9]+)", name)
    return tuple((0, len(number := part.lstrip("0")), number) if part.isdecimal() else (1, 0, part) for part in parts if part)


def preferred(candidates: Iterable[Node], before: Mapping[str, Seated]) -> list[Node]:
    """The candidates, those first who are to take part when there is no room for all: members, then by hint, then by arrival."""

    def key(one: Node) -> tuple[int, int, int]:
        seat = before.get(one.id)
        if seat is not None:
            return 0, seat.group_rank, one.arrival
        return (1, _hint(one), one.arrival) if one.record.hint_is_explicit else (2, 0, one.arrival)

    return sorted(candidates, key=key)


def arrange(chosen: Sequence[Node], before: Mapping[str, Seated]) -> list[Node]:
    """The chosen nodes in the order of their group ranks."""
    places: dict[int, Node] = {}
    placed: set[str] = set()
    explicit = {one.id: one.record.rank_hint for one in chosen if one.record.hint_is_explicit}
    found = {one.id: one.record.rank_hint for one in chosen if not one.record.hint_is_explicit}
    for wish in (explicit, _old_places(chosen, before), found):
        for one in chosen:
            rank = wish.get(one.id, -1)
            if one.id not in placed and 0 <= rank < len(chosen) and rank not in places:
                places[rank] = one
                placed.add(one.id)
    waiting = [one for one in chosen if one.id not in placed]
    waiting.sort(key=lambda one: (_hint(one), natural(one.record.name), one.arrival))
    rest = iter(waiting)
    return [places[rank] if rank in places else next(rest) for rank in range(len(chosen))]


def _hint(one: Node) -> int:
    return one.record.rank_hint if one.record.rank_hint >= 0 else _LAST


def _old_places(chosen: Sequence[Node], before: Mapping[str, Seated]) -> dict[str, int]:
    """Where each sat; a new process sits where its name did, if that process is gone."""
    wishes = {one.id: before[one.id].group_rank for one in chosen if one.id in before}
    left: dict[str, list[int]] = {}
    for node_id, seat in before.items():
        if node_id not in wishes:
            left.setdefault(seat.name, []).append(seat.group_rank)
    for one in sorted(chosen, key=lambda one: one.arrival):
        places = left.get(one.record.name)
        if one.id not in wishes and places:
            places.sort()
            wishes[one.id] = places.pop(0)
    return wishes


def seats(generation: int, attempt: int, order: Sequence[Node]) -> dict[str, Seat]:
    """The seat of each node, given all of them in the order of their group ranks."""
    world_size = sum(one.record.workers for one in order)
    role_sizes: dict[str, int] = {}
    for one in order:
        role_sizes[one.record.role] = role_sizes.get(one.record.role, 0) + one.record.workers
    found: dict[str, Seat] = {}
    first_rank, first_in_role = 0, dict.fromkeys(role_sizes, 0)
    for group_rank, one in enumerate(order):
        role, workers = one.record.role, one.record.workers
        found[one.id] = Seat(
            generation,
            attempt,
            one.record.name,
            group_rank,
            len(order),
            first_rank,
            world_size,
            first_in_role[role],
            role_sizes[role],
        )
        first_rank += workers
        first_in_role[role] += workers
    return found


# What is left of a job that is over.


class MayReturn(Value):
    """Nobody holds a lease, but so many members of the last generation may be back, or run workers, for so long at most."""

    nodes: int
    for_s: float


def clearing(left: Snapshot, silent_s: float = 0.0) -> Transaction | MayReturn | None:
    """What deletes the rest of a job of which no node is alive: it has ended, or was killed as a whole. None: it is not so.

    Every node that is alive has a lease, with its record bound to it; or its lease has run out, and its fence has not: then
    it goes on when the store is back. So a job that was not ended is over when it has been seen without leases, and without any
    change, for `silent_s`, longer than its fence. Who returns at the last moment makes the transaction fail.

    Whoever begins anew writes the settings first, so that of two who come at once the second deletes nothing. Settings alone may
    be those of a node that is about to write its record, and records are never deleted here: one that has been written since we
    looked is that of a node that lives.
    """
    keys = {item.key for item in left.items}
    if keys <= {job.SETTINGS} or any(item.lease for item in left.items):
        return None
    members = 0 if job.CLOSED in keys else _members_that_have_not_left(left)
    for_s = _fence_s(left) * DRIFT + MARGIN_S - silent_s
    if members and for_s > 0:
        return MayReturn(members, for_s)
    groups = sorted({"/".join(key.split("/")[:2]) for key in keys})
    same = (
        Compare(job.SETTINGS, "mod", _changed_at(left, job.SETTINGS)),
        Compare(job.LEADER, "create", 0),
        Compare(job.RETURNED, "mod", _changed_at(left, job.RETURNED)),
    )
    return Transaction(same, tuple(Delete(group, is_prefix=True) for group in groups[:MOST_DELETED]))


def _members_that_have_not_left(left: Snapshot) -> int:
    """How many there are of the generation that counts; none if nobody can read it."""
    with suppress(ValueError):
        generation = job.decode(job.Generation, _value(left, job.GENERATION))
        seats = job.seats_of_attempt(generation.number, generation.attempt)
        keys = {item.key for item in left.items}
        ids = [key.removeprefix(seats) for key in keys if key.startswith(seats)]
        return sum(job.left_key(generation.number, node_id) not in keys for node_id in ids)
    return 0


def _fence_s(left: Snapshot) -> float:
    with suppress(ValueError, TypeError, KeyError):
        return max(0.0, float(from_json(_value(left, job.SETTINGS))["fence_s"]))
    return 0.0


def _value(snapshot: Snapshot, key: str) -> bytes:
    return next((item.value for item in snapshot.items if item.key == key), b"")


def _changed_at(snapshot: Snapshot, key: str) -> int:
    return next((item.mod_revision for item in snapshot.items if item.key == key), 0)
