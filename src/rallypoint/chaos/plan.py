"""Which fault is next, and when: from a seed, or from a schedule.

Everything that is drawn for the fault number n is a function of the seed, n and what it is drawn for, and of the job as it
stands then, its ranks and nodes. So the same seed does the same to the same job, whatever processes it consists of; and no
draw depends on how many were made before.

From a seed, one fault at a time: the next waits until it is known what came of the last, and all nodes run. What would end
the job, or leave nobody here to be hurt, is not drawn, unless that is asked for. A schedule says itself what is to happen
when, also two at once: a fault of it waits only for whoever it hurts to be there.
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.records import Value
from rallypoint.base.text import span_text
from rallypoint.chaos import scene as scenes
from rallypoint.chaos.faults import CUT, FILL, KINDS, RANK, SLOW, STOP, Fault, text_of
from rallypoint.chaos.scene import Scene
from rallypoint.chaos.schedule import Entry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

__all__ = [
    "BY_DEFAULT", "Give", "Listed", "Over", "Plan", "Progress", "Seeded", "Skip", "Wait", "choose", "due_s", "foresee",
    "is_missed", "left_out", "open_plan", "step", "why_refused",
]  # fmt: skip

BY_DEFAULT = tuple(kind for kind in KINDS if kind != FILL)  # a full disk, or memory, is also that of others
SECONDS = {STOP: (1, 10), SLOW: (5, 20), CUT: (1, 10), FILL: (2, 10)}  # the least and the most, in whole seconds
PERCENT = (20, 80)
RANKS_WEIGH = 3  # as much as so many other things that can be hurt: ranks are what fails most
EARLIEST, LATEST = 0.5, 1.5  # of the time between two faults
ON_TIME_S = 1.0
MISSED_AFTER_S = 60.0  # whoever a schedule names may be away for so long, as ranks are while a job restarts
FORESEEN_MAX = 10_000
MASK = (1 << 64) - 1


class Seeded(Value):
    """Faults of these kinds for so long, one in so many seconds."""

    seed: int
    every_s: float
    for_s: float
    kinds: tuple[str, ...] = BY_DEFAULT
    is_forced: bool = False  # also what ends the job


class Listed(Value):
    """Those of a schedule."""

    entries: tuple[Entry, ...]
    is_forced: bool = False


class Progress(Value):
    """How far a plan has come: the number of the next fault, and when it is due; seconds count from the start."""

    number: int
    due_s: float


class Give(Value):
    """Do this now; a schedule asked for it so long ago."""

    fault: Fault
    late_s: float = 0.0


class Skip(Value):
    """The fault that was due is left out, for that reason; None where there was none to be drawn."""

    fault: Fault | None
    why: str


class Wait(Value):
    """It is due, and cannot be yet."""

    why: str


class Over(Value):
    """There is no further fault."""

    why: str


Plan = Seeded | Listed
Action = Give | Skip | Wait | Over


def open_plan(plan: Plan) -> Progress:
    return Progress(0, _due_s(plan, 0, 0.0))


def due_s(plan: Plan, progress: Progress) -> float:
    """When the plan has something to say next: `step` is asked from then on."""
    return min(progress.due_s, plan.for_s) if isinstance(plan, Seeded) else progress.due_s


def step(plan: Plan, progress: Progress, scene: Scene, now_s: float, is_settled: bool) -> tuple[Progress, Action]:
    """What is to be done now that the next fault is due; `is_settled`: it is known what came of all before."""
    if isinstance(plan, Seeded):
        return _step_by_seed(plan, progress, scene, now_s, is_settled)
    return _step_by_list(plan, progress, scene, now_s)


def is_missed(progress: Progress, now_s: float) -> bool:
    """Whether whoever is to be hurt has been away for so long that it is left at that."""
    return now_s - progress.due_s >= MISSED_AFTER_S


def _step_by_seed(plan: Seeded, progress: Progress, scene: Scene, now_s: float, is_settled: bool) -> tuple[Progress, Action]:
    if progress.due_s > plan.for_s or now_s > plan.for_s:
        return progress, Over(f"{span_text(plan.for_s)} are over")
    if not is_settled or not scene.is_running:
        return progress, Wait("the job does not run on all nodes yet")
    late_s = now_s - progress.due_s
    after_s = now_s if late_s > ON_TIME_S else progress.due_s  # faults that were held up do not come in a bunch
    further = Progress(progress.number + 1, _due_s(plan, progress.number + 1, after_s))
    found = choose(plan, progress.number, scene)
    return further, Give(found) if isinstance(found, Fault) else Skip(None, found)


def _step_by_list(plan: Listed, progress: Progress, scene: Scene, now_s: float) -> tuple[Progress, Action]:
    if progress.number >= len(plan.entries):
        return progress, Over("the schedule is over")
    fault, late_s = plan.entries[progress.number].fault, now_s - progress.due_s
    further = Progress(progress.number + 1, _due_s(plan, progress.number + 1, 0.0))
    if why := scenes.why_not(fault, scene):
        return (further, Skip(fault, why)) if is_missed(progress, now_s) else (progress, Wait(why))
    if not plan.is_forced and (why := scenes.what_ends(fault, scene)):
        return further, Skip(fault, f"{scene.job.job} would end: {why}")
    return further, Give(fault, late_s)


def _due_s(plan: Plan, number: int, after_s: float) -> float:
    if isinstance(plan, Listed):
        return plan.entries[number].at_s if number < len(plan.entries) else 0.0
    share = EARLIEST + (LATEST - EARLIEST) * _draw(plan.seed, number, "when")
    return after_s + round(plan.every_s * share, 1 if plan.every_s >= 1 else 3)


# --- drawing ---------------------------------------------------------------------------------------------------------------


def choose(plan: Seeded, number: int, scene: Scene) -> Fault | str:
    """The fault of this number for the job as it stands; a text says why there is none."""
    offers = {kind: found for kind in plan.kinds if (found := _offers(kind, plan, scene))}
    if not offers:
        return "; ".join(f"{kind}: {why}" for kind, why in left_out(plan, scene))
    kind = _pick(plan.seed, number, "kind", tuple(offers))
    whats = [fault.what for fault in offers[kind]]
    weighed = [one for one in dict.fromkeys(whats) for _ in range(RANKS_WEIGH if one == RANK else 1)]
    what = _pick(plan.seed, number, "what", weighed)
    fault = _pick(plan.seed, number, "whom", [one for one in offers[kind] if one.what == what])
    return _with_details(fault, plan.seed, number)


def _offers(kind: str, plan: Seeded, scene: Scene) -> list[Fault]:
    return [fault for fault in scenes.every_fault(kind, scene) if not _why_not_drawn(fault, plan, scene)]


def _why_not_drawn(fault: Fault, plan: Seeded, scene: Scene) -> str:
    why = scenes.why_not(fault, scene)
    if why or plan.is_forced:
        return why
    ending = scenes.what_ends(fault, scene)
    return f"{scene.job.job} would end: {ending}" if ending else scenes.what_ends_drill(fault, scene)


def left_out(plan: Seeded, scene: Scene) -> list[tuple[str, str]]:
    """The kinds of which nothing can be drawn now, and why."""
    found = []
    for kind in plan.kinds:
        reasons = [_why_not_drawn(fault, plan, scene) for fault in scenes.every_fault(kind, scene)]
        if all(reasons):
            found.append((kind, reasons[-1] if reasons else "nobody on this machine has a seat in the job"))
    return found


def _with_details(fault: Fault, seed: int, number: int) -> Fault:
    if fault.kind in SECONDS:
        fault = fault.replace(for_s=float(_between(seed, number, "seconds", *SECONDS[fault.kind])))
    if fault.kind == SLOW:
        fault = fault.replace(percent=10 * _between(seed, number, "percent", PERCENT[0] // 10, PERCENT[1] // 10))
    return fault


def _between(seed: int, number: int, purpose: str, least: int, most: int) -> int:
    return least + int(_draw(seed, number, purpose) * (most - least + 1))


def _pick(seed: int, number: int, purpose: str, among: Sequence[T]) -> T:
    return among[int(_draw(seed, number, purpose) * len(among))]


def _draw(seed: int, number: int, purpose: str) -> float:
    """From 0 to below 1, evenly; each in its own right."""
    state = seed & MASK
    for word in (number, int.from_bytes(purpose.encode(), "little")):
        state = _mixed(state ^ _mixed(word & MASK))
    return (state >> 11) * 2.0**-53


def _mixed(number: int) -> int:
    """Every bit of it depends on every bit of the number: SplitMix64's step."""
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & MASK
    return number ^ number >> 31


# --- what is to be expected, and refused -----------------------------------------------------------------------------------


def foresee(plan: Plan, scene: Scene) -> tuple[Entry, ...]:
    """The faults as they will come to a job that stands all of them at once, beginning as it is now."""
    if isinstance(plan, Listed):
        return plan.entries
    found: list[Entry] = []
    progress = open_plan(plan)
    while len(found) < FORESEEN_MAX:
        now_s = progress.due_s
        progress, action = step(plan, progress, scene, now_s, is_settled=True)
        match action:
            case Give(fault):
                found.append(Entry(now_s, fault))
                scene = scenes.after(fault, scene)
            case Over() | Wait():
                break
    return tuple(found)


def why_refused(plan: Plan, scene: Scene) -> dict[str, str]:
    """Why the plan makes no sense as the job stands: a reason for each line, or for each kind where nothing can be drawn."""
    if isinstance(plan, Seeded):
        out = dict(left_out(plan, scene))
        return out if len(out) == len(plan.kinds) else {}
    found = {}
    for entry in plan.entries:
        why = scenes.why_not(entry.fault, scene)
        if not why and not plan.is_forced and (ending := scenes.what_ends(entry.fault, scene)):
            why = f"{scene.job.job} would end: {ending}"
        if why:
            found[f"line {entry.line}"] = f"{text_of(entry.fault)}: {why}"
    return found
