"""A node is about to be taken away and knows it: who has to save at which step, and when the node goes.

    notice    somebody tells a node that it has so many seconds left; all nodes of its generation hear of it
    hold      every worker waits where it next asks whether to save (`worker.save_point`), until the step is known
    report    a node says up to which step its workers have asked, once all of them have
    ruling    when all nodes have said so: the step after the highest of these, which no worker can have passed
    complete  when all workers of all nodes have saved; now those with a notice leave, and the others form anew

Because workers wait before they pass a step, and not after, the ruling needs no margin: whoever has asked about step 41 may be
in it, but cannot pass 42 before it is told whether 42 is the step. Nobody waits for another worker, only for agents, so that
workers which wait for each other within a step cannot be in the way. A node that is done has nothing to save.

Where those who stay would be too few, or the store leaves with its host, the job ends for all, to be started anew elsewhere.

Invariants: once a step is ruled it stays; no worker has passed it; nothing is complete before all have saved; time only hurries.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rallypoint.base.records import Value
from rallypoint.base.text import listed, plural
from rallypoint.protocol.job_records import NO_STEP, NodeDrain, Notice, Ruling

__all__ = [
    "SAME_NOTICE_S", "SETTLING_S", "Drain", "Go", "GoAtOnce", "Stay", "WorkerDrain", "decide", "hear_elsewhere", "hear_notice",
    "may_report", "next_look_at", "rule", "summarize", "why_over",
]  # fmt: skip

SAME_NOTICE_S = 0.5  # a signal often comes twice: to a process, and to the group that it is in
SETTLING_S = 0.01  # from when workers are held until what they have asked before that is surely seen
LOOK_EVERY_S = 0.02  # at what workers tell, while there is a notice; otherwise nobody looks


# --- of all nodes ----------------------------------------------------------------------------------------------------------


def rule(busy: Collection[str], told: Mapping[str, NodeDrain], known: Ruling | None) -> Ruling:
    """What holds for all, by what these nodes have told, which are the members that are not done."""
    known = known or Ruling(NO_STEP, False)
    reports = [told[one] for one in busy if one in told]
    is_all = len(reports) == len(busy)
    step = known.step
    if step == NO_STEP and is_all and reports and all(one.step != NO_STEP for one in reports):
        step = 1 + max(one.step for one in reports)
    return Ruling(step, known.is_complete or (is_all and all(one.has_saved for one in reports)))


def why_over(leaving: Mapping[str, NodeDrain], names: Mapping[str, str], usable: int, least: int) -> str:
    """Why the job cannot go on without these, if that is so; of those who stay, so many can be used."""
    who = f"{plural(len(leaving), 'node')} {listed(sorted(names.get(one, one) for one in leaving))}"
    if any(one.is_host for one in leaving.values()):
        store = f"the coordination store leaves with {plural(len(leaving), 'it', 'them')}"
        return f"{who} had notice to leave, and {store}; all workers have saved"
    if not usable:
        return f"{who} had notice to leave, and fewer than {least} would be left; all workers have saved"
    return ""


# --- of one node -----------------------------------------------------------------------------------------------------------


class WorkerDrain(Value):
    """What a worker tells: up to which step it has asked whether to save, whether it was told to, and whether it has."""

    step: int = NO_STEP
    was_told: bool = False
    has_saved: bool = False


class Drain(Value):
    """What a node knows. `ends_at` is on its own clock; without `is_leaving` the notice is another node's."""

    why: str
    is_leaving: bool
    told_at: float
    ends_at: float
    is_hurried: bool = False
    ruling: Ruling = Ruling(NO_STEP, False)


class Stay(Value):
    pass


class Go(Value):
    """All has been saved: leave."""

    why: str


class GoAtOnce(Value):
    """There is no time left: leave as if there had been none."""

    why: str


def hear_notice(drain: Drain | None, why: str, grace_s: float, now: float) -> Drain:
    """This node was given notice; to be told so twice is a matter of urgency."""
    if drain is None:
        return Drain(why, True, now, now + grace_s)
    if not drain.is_leaving:
        return drain.replace(why=why, is_leaving=True, told_at=now, ends_at=min(drain.ends_at, now + grace_s))
    if now < drain.told_at + SAME_NOTICE_S:
        return drain
    return drain.replace(why=why, is_hurried=True)


def hear_elsewhere(drain: Drain | None, notice: Notice, now: float) -> Drain:
    """Another node of the generation was given notice."""
    return drain or Drain(notice.why, False, now, now + notice.left_s)


def decide(drain: Drain, now: float) -> Stay | Go | GoAtOnce:
    if not drain.is_leaving:
        return Stay()
    if drain.ruling.is_complete:
        return Go(f"all workers have saved, {now - drain.told_at:.1f} s after the notice")
    if drain.is_hurried:
        return GoAtOnce(f"there was another notice, {drain.why}, before all workers had saved")
    if now >= drain.ends_at:
        return GoAtOnce(f"{drain.ends_at - drain.told_at:g} s after the notice not all workers have said that they have saved")
    return Stay()


def may_report(held_at: float, now: float) -> bool:
    """Whether it is surely seen what workers had asked before they were held."""
    return now >= held_at + SETTLING_S


def next_look_at(drain: Drain, now: float) -> float | None:
    """When to look at what workers tell; once all is complete, who stays has nothing to wait for but the others."""
    if drain.is_leaving or not drain.ruling.is_complete:
        return now + LOOK_EVERY_S
    return None


def summarize(workers: Sequence[WorkerDrain], is_leaving: bool, is_host: bool) -> NodeDrain:
    """What a node tells of its workers."""
    steps = [one.step for one in workers]
    step = NO_STEP if NO_STEP in steps else max(steps, default=NO_STEP)
    return NodeDrain(is_leaving, is_host, step, all(one.has_saved for one in workers))
