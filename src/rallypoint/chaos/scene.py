"""What can be done to a job as it stands now: who is there for it, what would end the job, what this machine does not allow.

A fault is *possible* if whoever it hurts is part of the job, runs on this machine, and is not held by another fault. It *ends
the job* if what is known says that nothing can go on after it: no restart is left, too few nodes would be, or the store's
host goes. Whatever may merely end it, as a stop that lasts for longer than a program's own timeouts, does not count.
"""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.base.records import Value
from rallypoint.base.text import many
from rallypoint.chaos.faults import CUT, DISK, FILL, NODE, RANK, SHAPES, SLOW, STOP, WARDEN, Fault, text_of
from rallypoint.inspection.view import JobView, NodeView, find_node
from rallypoint.story.phases import RUNNING

__all__ = ["Scene", "after", "every_fault", "find", "what_ends", "what_ends_drill", "why_not"]

Place = tuple[str, int]  # where an agent is: its host's name, and its process


class Scene(Value):
    """The job, which of its agents are on this machine, which faults this machine does not allow, and who is held by which."""

    job: JobView
    here: tuple[Place, ...]
    cannot: tuple[tuple[str, str], ...] = ()  # a kind, or what it hurts, and why
    held: tuple[Fault, ...] = ()

    @property
    def is_running(self) -> bool:
        """All that have a seat."""
        return self.job.phase == RUNNING and not self.job.silent

    @property
    def own(self) -> tuple[NodeView, ...]:
        """The nodes on this machine, by their ranks."""
        return tuple(node for node in self.job.nodes if (node.hostname, node.pid) in self.here)

    @property
    def restarts_left(self) -> int:
        return max((node.max_restarts for node in self.job.nodes), default=0) - self.job.restarts


def find(fault: Fault, scene: Scene) -> NodeView | str:
    """The node that is hurt, or on which the rank runs; a text says why there is none."""
    if fault.what == RANK:
        nodes = [node for node in scene.job.members if any(worker.rank == int(fault.whom) for worker in node.workers)]
    else:
        nodes = find_node(scene.job, fault.whom)
    who = f"rank {fault.whom}" if fault.what == RANK else f"node {fault.whom}"
    if not nodes:
        return f"there is no {who} now"
    if len(nodes) > 1:
        return f"{len(nodes)} nodes fit {fault.whom!r}; name one by its rank"
    if nodes[0] not in scene.own:
        return f"{who} is on {nodes[0].hostname}; chaos has to be started there"
    return nodes[0]


def why_not(fault: Fault, scene: Scene) -> str:
    """Why it cannot be done now; empty if it can."""
    for of, why in scene.cannot:
        if of in (fault.kind, fault.what):
            return why
    node = find(fault, scene)
    if isinstance(node, str):
        return node
    if fault.what == WARDEN and not node.workers:
        return f"node {fault.whom} has no workers now"
    if fault.kind == FILL and fault.what == DISK and not node.log_dir:
        return f"node {fault.whom} has no log folder, so there is no disk to fill"
    if fault.kind == CUT and node.hosts_store:
        return f"node {fault.whom} hosts the coordination store; cut the others instead"
    if fault.kind == CUT and len(scene.job.nodes) < 2:
        return "it is the only node of its job, and has nobody to be cut off from"
    return _who_holds(fault, node, scene)


def _who_holds(fault: Fault, node: NodeView, scene: Scene) -> str:
    """What lasts on the same processes: the first to be over would undo the other."""
    for held in scene.held:
        if find(held, scene) == node and _collide(fault, held):
            return f"{text_of(held)} is not over yet"
    return ""


def _collide(one: Fault, other: Fault) -> bool:
    if not {one.kind, other.kind} <= {STOP, SLOW}:
        return one.kind == other.kind == CUT
    return NODE in (one.what, other.what) or (one.what, one.whom) == (other.what, other.whom)


def what_ends(fault: Fault, scene: Scene) -> str:
    """Why the job would end by it, as far as can be known; empty if it need not."""
    node = find(fault, scene)
    if isinstance(node, str):
        return ""
    if fault.takes_restart and scene.restarts_left <= 0:
        asked = node.max_restarts
        return f"{scene.job.restarts} of {many(asked, 'restart')} are spent" if asked else "it has no restarts (--max-restarts)"
    if not fault.takes_node:
        return ""
    left = len(scene.job.nodes) - 1
    if not left:
        return "it is the only node of its job"
    if node.hosts_store:
        return "it hosts the coordination store"
    if left < node.min_nodes:
        return f"{many(left, 'node')} would be left, and the job needs {node.min_nodes}"
    return ""


def what_ends_drill(fault: Fault, scene: Scene) -> str:
    """Why nothing could be done after it from here."""
    return "no other node of the job is on this machine" if fault.takes_node and len(scene.own) < 2 else ""


def every_fault(kind: str, scene: Scene) -> Iterator[Fault]:
    """All of this kind that can be thought of here, without how long and how much."""
    for what in SHAPES[kind]:
        for node in scene.own:
            if what == RANK:
                yield from (Fault(kind, what, str(worker.rank)) for worker in node.workers)
            elif node.node_rank is not None:
                yield Fault(kind, what, str(node.node_rank))


def after(fault: Fault, scene: Scene) -> Scene:
    """How the job will stand, if it stands this as it should: who has gone is gone, and what was spent is spent."""
    nodes = list(scene.job.nodes)
    node = find(fault, scene)
    if fault.takes_node and not isinstance(node, str):
        nodes.remove(node)
        nodes = _renumbered(nodes)
    spent = int(fault.takes_restart)
    return scene.replace(job=scene.job.replace(nodes=tuple(one.replace(restarts=one.restarts + spent) for one in nodes)))


def _renumbered(nodes: list[NodeView]) -> list[NodeView]:
    """With ranks that have no gap."""
    found, rank = [], 0
    for place, node in enumerate(nodes):
        workers = [worker.replace(rank=rank + number) for number, worker in enumerate(node.workers)]
        rank += len(workers)
        found.append(node.replace(node_rank=None if node.node_rank is None else place, workers=tuple(workers)))
    return found
