"""The leader's decision: whether a generation is to be formed, ended or left alone, and why.

A generation, once formed, never changes. Whoever comes or goes, and whatever fails, ends it by a signal; then all of its members
stop their workers and say so; then the next one is formed of those who are ready. Which of these steps is due is a
function of who is here, of what is known about the current generation, and of the leader's own clock:

    none formed yet      Form once max nodes are here, or min nodes and the last call is over
    running              Interrupt for a node that is gone, or for joiners; Conclude when all are done
    signalled to stop    Wait until every live member is ready and every lost one has surely stopped; then Form

A member whose lease ran out in silence may still run its workers until its own fence; so the leader waits for the rest of the
fence and a margin. One whose connection was closed has been fenced by that, so only a small margin is left. One that left has
no workers any more.

Invariants: nothing is formed with fewer than min or more than max nodes, nor while a live member of the last generation is not
ready within its time; the number of nodes is a multiple of node_unit; nobody joins once a member is done; a Wait that names
no time ends by an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rallypoint.core.job_records import NOT_READY, NodeRecord, Signal
from rallypoint.core.seating import Candidate, Seated, arrange, preferred
from rallypoint.records import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Interruption = Literal["loss", "departure", "join"]

__all__ = ["Conclude", "Current", "Decision", "Form", "Gone", "Interrupt", "Node", "Policy", "Wait", "decide", "listed"]

MAX_NAMED = 16
MARGIN_S = 0.3  # what two clocks may differ by over one lease, and a kill may take
DRIFT = 1.01  # no clock gains more than that on another; over a long fence that is more than the margin
BREAK_MARGIN_S = 0.15  # a broken connection is not seen at the same moment by both ends, and a kill takes its time there too
LONGEST_WINDOW = 10  # a stream of joiners cannot put off the larger world for more than so many windows


class Policy(Value):
    """What all nodes agreed on. `after_expiry_s` is the part of the fence that is left when a lease has run out."""

    min_nodes: int
    max_nodes: int
    node_unit: int = 1
    join_timeout_s: float = 600.0
    last_call_s: float = 30.0
    scale_up_window_s: float = 0.3
    lease_s: float = 3.0
    after_expiry_s: float = 0.0
    ready_timeout_s: float = 35.0


class Node(Value):
    """A node that is here, since when by the leader's clock; `held_until` is set for one that has died too often of late."""

    id: str
    record: NodeRecord
    arrival: int
    since: float
    held_until: float = 0.0

    @property
    def is_ready(self) -> bool:
        return self.record.ready_after != NOT_READY


class Gone(Value):
    """A member that is no longer here: when the leader saw it, and whether it may still run workers."""

    name: str
    at: float
    cause: str  # of core.coordination.Event

    @property
    def is_departure(self) -> bool:
        return self.cause == "deleted"


class Current(Value):
    """What the leader knows of the generation that counts."""

    number: int
    members: Mapping[str, Seated]
    signal: Signal | None
    signal_at: float
    done: frozenset[str]
    gone: Mapping[str, Gone]


class Form(Value):
    """Form the next generation of these nodes, in the order of their group ranks. `left_out` are live but not ready."""

    order: tuple[Candidate, ...]
    left_out: tuple[str, ...]
    why: str


class Interrupt(Value):
    kind: Interruption
    why: str


class Conclude(Value):
    """All members are done."""


class Wait(Value):
    """Nothing is to be done before something happens, or `wake_at`. `is_gathering` if nodes wait for each other."""

    why: str
    wake_at: float | None = None
    is_gathering: bool = False


Decision = Form | Interrupt | Conclude | Wait


def decide(roster: Mapping[str, Node], current: Current | None, policy: Policy, now: float) -> Decision:
    if current is None:
        return _first(roster, policy, now)
    if current.signal is None:
        return _running(roster, current, policy, now)
    if not current.signal.is_stop:
        return Wait(f"generation {current.number} has finished")
    return _regroup(roster, current, policy, now)


def usable(nodes: int, policy: Policy) -> int:
    """How many of so many nodes a generation can have: at most max, a multiple of the unit; 0 if that is below min."""
    count = min(nodes, policy.max_nodes) // policy.node_unit * policy.node_unit
    return count if count >= policy.min_nodes else 0


# No generation yet.


def _first(roster: Mapping[str, Node], policy: Policy, now: float) -> Decision:
    ready = _admissible([node for node in roster.values() if node.is_ready], now)
    count = usable(len(ready), policy)
    if not count:
        return _too_few(ready, policy, "to begin", _next_release(roster.values(), now))
    if count < usable(policy.max_nodes, policy):
        call_ends = max(node.since for node in ready) + policy.last_call_s
        call_ends = min(call_ends, min(node.since for node in ready) + policy.join_timeout_s)
        if now < call_ends:
            why = f"{len(ready)} of at most {policy.max_nodes} nodes are here; the last call is for {policy.last_call_s:g} s"
            return Wait(why, call_ends, is_gathering=True)
    return _form(ready, {}, count, (), f"{count} nodes are here")


def _too_few(ready: list[Node], policy: Policy, purpose: str, wake_at: float | None) -> Wait:
    unit = f", in multiples of {policy.node_unit}" if policy.node_unit > 1 else ""
    why = f"{len(ready)} of {policy.min_nodes} nodes are here, which it takes {purpose}{unit}"
    return Wait(why, wake_at, is_gathering=True)


def _form(ready: list[Node], before: Mapping[str, Seated], count: int, left_out: tuple[str, ...], why: str) -> Form:
    candidates = [Candidate(node.id, node.record, node.arrival) for node in ready]
    chosen = preferred(candidates, before)[:count]
    return Form(tuple(arrange(chosen, before)), left_out, why)


def _admissible(nodes: list[Node], now: float) -> list[Node]:
    """Without those that are held back, and without second holders of an explicit rank."""
    holders: dict[int, Node] = {}
    for node in nodes:
        rank = node.record.rank_hint
        if node.record.hint_is_explicit and (rank not in holders or node.arrival < holders[rank].arrival):
            holders[rank] = node
    return [
        node
        for node in nodes
        if node.held_until <= now and (not node.record.hint_is_explicit or holders[node.record.rank_hint].id == node.id)
    ]


def _next_release(nodes: Iterable[Node], now: float) -> float | None:
    return min((node.held_until for node in nodes if node.held_until > now), default=None)


# A generation runs.


def _running(roster: Mapping[str, Node], current: Current, policy: Policy, now: float) -> Decision:
    lost = [node_id for node_id in current.members if node_id not in roster and node_id not in current.done]
    if lost:
        return _interrupt_for_lost(lost, current)
    if len(current.done) >= len(current.members):
        return Conclude()
    if current.done:
        return Wait(f"{len(current.done)} of {len(current.members)} nodes are done")
    return _consider_joiners(roster, current, policy, now)


def _interrupt_for_lost(lost: list[str], current: Current) -> Interrupt:
    gone = [current.gone[node_id] for node_id in lost if node_id in current.gone]
    names = listed([current.members[node_id].name for node_id in lost])
    if gone and all(one.is_departure for one in gone):
        return Interrupt("departure", f"{names} left")
    silent = any(one.cause == "expired" for one in gone)
    return Interrupt("loss", f"{names} was lost: {'not heard of in time' if silent else 'the connection was closed'}")


def _consider_joiners(roster: Mapping[str, Node], current: Current, policy: Policy, now: float) -> Decision:
    waiting = [node for node in roster.values() if node.is_ready and node.id not in current.members]
    if len(current.members) >= policy.max_nodes:
        return Wait(f"generation {current.number} runs with all {policy.max_nodes} nodes; {len(waiting)} are spare")
    admissible = _admissible(list(roster.values()), now)  # of all, because members hold ranks too
    joiners = [node for node in admissible if node.is_ready and node.id not in current.members]
    together = len(current.members) + len(joiners)
    if usable(together, policy) <= len(current.members):
        return Wait(f"generation {current.number} runs", _next_release(waiting, now))
    opens, latest = min(node.since for node in joiners), max(node.since for node in joiners)
    closes = min(latest + policy.scale_up_window_s, opens + LONGEST_WINDOW * policy.scale_up_window_s)
    if now < closes and together < policy.max_nodes:
        return Wait(f"{len(joiners)} nodes want to join; others may follow", closes)
    names = listed([node.record.name for node in joiners])
    return Interrupt("join", f"{names} joins; from {len(current.members)} to {usable(together, policy)} nodes")


# A generation was told to stop.


def _regroup(roster: Mapping[str, Node], current: Current, policy: Policy, now: float) -> Decision:
    busy = [node for node in roster.values() if node.id in current.members and node.record.ready_after < current.number]
    patience_ends = current.signal_at + policy.ready_timeout_s
    if busy and now < patience_ends:
        names = listed([node.record.name for node in busy])
        return Wait(f"{len(busy)} nodes are stopping their workers: {names}", patience_ends)
    safe_at = _when_the_lost_have_stopped(roster, current, policy)
    if now < safe_at:
        return Wait("a lost node may still run workers until its fence", safe_at)
    stopped = [
        node
        for node in roster.values()
        if node.is_ready and (node.id not in current.members or node.record.ready_after >= current.number)
    ]
    ready = _admissible(stopped, now)
    count = usable(len(ready), policy)
    if not count:
        return _too_few(ready, policy, "to go on", _next_release(stopped, now))
    left_out = tuple(node.record.name for node in busy)
    return _form(ready, current.members, count, left_out, f"{count} nodes are ready")


def _when_the_lost_have_stopped(roster: Mapping[str, Node], current: Current, policy: Policy) -> float:
    wait_s = {"expired": policy.after_expiry_s * DRIFT + MARGIN_S, "dropped": BREAK_MARGIN_S}
    stopped_at = [
        gone.at + wait_s[gone.cause]
        for node_id, gone in current.gone.items()
        if gone.cause in wait_s and node_id in current.members and node_id not in roster
    ]
    return max(stopped_at, default=float("-inf"))


def listed(names: list[str]) -> str:
    """Some of the names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
