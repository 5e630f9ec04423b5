"""Who is slower than the others: by how long each rank takes for a step, as workers tell by `worker.progress`.

    up/pace/<g>/<id>     how long the workers of a node take for a step; written again when that changes
    down/pace/<g>        how long it takes at the median of the job, and who is slower; written again when that changes

A rank is slow if it has taken at least a quarter longer than the median for its last steps, and much longer than ranks differ
anyway. It is named once it was slow in two looks running.

Ranks that wait for each other in every step take equally long, whoever holds them up. There it is another time that tells: that
in which the main thread of a rank had a processor, or waited for one. Whoever is busy for nearly all of a step waits for nobody;
where the others are not, although they take equally long, they wait. That says nothing where waiting keeps a processor busy too,
nor of a rank that itself waits, for a device or a disk: nobody is named there.

What a node sends and receives does not depend on how many there are, and is nothing while nobody tells of steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial

from rallypoint.base.json_text import (
    clip,
    from_json,
    read_count,
    read_fields,
    read_flag,
    read_list,
    read_seconds,
    read_text,
    to_json,
)  # fmt: skip
from rallypoint.base.records import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "LEAST_STEPS", "LOOKS", "LOOK_S", "SLOW", "Comparison", "Effort", "JobPace", "NodePace", "Pace", "Scores", "Slow", "compare",
    "decode_job", "decode_node", "encode_job", "encode_node", "follow", "is_other", "measure", "pause_of", "scores", "slow_of",
    "slow_ones", "told_of",
]  # fmt: skip

SLOW = 1.25  # times the median
NOISE = 5.0  # times what ranks differ by from the median, at the median
LEAST_STEPS = 8  # before that, the first step and what it compiled still weighs too much
LEAST_STEP_S = 0.001  # whatever is quicker is no step of a training
BUSY = 0.8  # of its time, at least: who waits for the others is idle for longer
LOOKS = 2
LOOK_S = 5.0
GATHER_S = 1.0  # for what the other nodes tell when the first one does
NODES_PER_S = 200  # so many nodes tell of their workers in a second, at most
CHANGED = 1.1  # times what was told before
CHANGED_BUSY = 0.1
TOLD_MAX = 64  # workers of a node
NAMED_MAX = 16
_NODE_BYTES_MAX = 255


class Pace(Value):
    """How long one rank takes for a step, over its last ones; `steps` is how many were measured. `busy` is for how much of that
    time its main thread had a processor, or waited for one, as far as that is known.
    """

    rank: int
    step_s: float
    steps: int
    busy: float | None = None


class Slow(Value):
    """One that is slower than the others. With `holds_up` all take equally long for a step, and these are the seconds of it in
    which it is busy, and the median rank.
    """

    rank: int
    step_s: float
    median_s: float
    holds_up: bool = False
    node: str = ""

    @property
    def factor(self) -> float:
        return self.step_s / self.median_s

    @property
    def text(self) -> str:
        seconds = f"({self.step_s:.3g} s, not {self.median_s:.3g} s)"
        if self.holds_up:
            busy = f"is busy for {self.factor:.1f} times as long in each step as the median {seconds}"
            return f"{busy}, and the others seem to wait for it"
        return f"takes {self.factor:.1f} times as long for a step as the median {seconds}"


class NodePace(Value):
    """What a node tells of its workers; its name is that among the nodes."""

    node: str
    workers: tuple[Pace, ...]


class JobPace(Value):
    """What came of it: the median of a step, and who is slower; `more` are those that are not named."""

    median_s: float
    slow: tuple[Slow, ...] = ()
    more: int = 0


class Scores(Value):
    """How many times the median of the job each worker of a node takes for a step, and most of them do; None: not known."""

    workers: Mapping[int, float]
    node: float | None = None


# --- what one rank does ----------------------------------------------------------------------------------------------------


class Effort(Value):
    """How far a worker was at a time, and for how long its main thread had been busy by then, if that can be seen; and of the
    steps before, how long one took, and for what share of that it was busy.
    """

    at: float
    steps: int
    busy_s: float | None
    step_s: float | None = None
    share: float | None = None


def measure(before: Effort | None, at: float, steps: int, busy_s: float | None) -> Effort:
    """The effort after another look: it counts once there were so many steps that the parts of one at both ends do not."""
    if before is None or steps < before.steps or at <= before.at:
        return Effort(at, steps, busy_s)
    done, took_s = steps - before.steps, at - before.at
    if done < LEAST_STEPS:
        return before
    share = None if busy_s is None or before.busy_s is None else min(max((busy_s - before.busy_s) / took_s, 0.0), 1.0)
    return Effort(at, steps, busy_s, took_s / done, share)


# --- comparing -------------------------------------------------------------------------------------------------------------


def slow_ones(paces: Iterable[Pace]) -> tuple[Slow, ...]:
    """Those that are clearly slower than the others, the slowest first; else those for whom the others clearly wait."""
    measured = {one.rank: one for one in paces if one.steps >= LEAST_STEPS and one.step_s >= LEAST_STEP_S}
    if len(measured) < 2:
        return ()
    found = _outliers({rank: one.step_s for rank, one in measured.items()})
    return tuple(Slow(*one) for one in found) or _holding_up(measured)


def _holding_up(measured: Mapping[int, Pace]) -> tuple[Slow, ...]:
    steps_s = [one.step_s for one in measured.values()]
    busy_s = {rank: one.busy * one.step_s for rank, one in measured.items() if one.busy is not None}
    if len(busy_s) < len(measured) or max(steps_s) >= SLOW * min(steps_s):
        return ()
    found = _outliers({rank: max(seconds, LEAST_STEP_S) for rank, seconds in busy_s.items()})
    return tuple(Slow(*one, holds_up=True) for one in found if (measured[one[0]].busy or 0.0) >= BUSY)


def _outliers(seconds: Mapping[int, float]) -> list[tuple[int, float, float]]:
    """The ranks that take clearly longer than the median: each with its time and the median's, the slowest first."""
    median_s = _median(seconds.values())
    noise = _median(abs(one / median_s - 1.0) for one in seconds.values())
    found = [
        (rank, one, median_s) for rank, one in seconds.items() if one / median_s >= SLOW and one / median_s - 1.0 > NOISE * noise
    ]
    return sorted(found, key=lambda one: (-one[1], one[0]))


def _median(values: Iterable[float]) -> float:
    """The lower one of two: that of two ranks is the quicker one's."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def slow_of(nodes: Iterable[NodePace]) -> tuple[Slow, ...]:
    """The slow ones of a job, the slowest first, each with the node that it is on."""
    nodes = tuple(nodes)
    homes = {one.rank: node.node for node in nodes for one in node.workers}
    return tuple(one.replace(node=homes[one.rank]) for one in slow_ones(one for node in nodes for one in node.workers))


def compare(nodes: Iterable[NodePace]) -> JobPace | None:
    """All ranks of a job; None where there is nothing to compare yet."""
    nodes = tuple(nodes)
    measured = [one.step_s for node in nodes for one in node.workers if one.steps >= LEAST_STEPS]
    if len(measured) < 2:
        return None
    slow = slow_of(nodes)
    return JobPace(_median(measured), slow[:NAMED_MAX], len(slow[NAMED_MAX:]))


def follow(seen: Mapping[int, int], slow: Iterable[Slow]) -> tuple[dict[int, int], tuple[Slow, ...]]:
    """In how many looks running each rank was slow, after another look; and those for whom that is enough."""
    slow = tuple(slow)
    now = {one.rank: seen.get(one.rank, 0) + 1 for one in slow}
    return now, tuple(one for one in slow if now[one.rank] >= LOOKS)


def scores(paces: Collection[Pace], job: JobPace | None) -> Scores:
    """Of the workers of a node, by what the whole job has found, or by themselves where they are all there is."""
    measured = [one for one in paces if one.steps >= LEAST_STEPS and one.step_s >= LEAST_STEP_S]
    if not measured or (job is None and len(measured) < 2):
        return Scores({})
    median_s = job.median_s if job is not None else _median(one.step_s for one in measured)
    named = {one.rank: one.factor for one in (job.slow if job is not None else slow_ones(measured))}
    found = {one.rank: named.get(one.rank, one.step_s / median_s) for one in measured}
    return Scores(found, _median(found.values()) if job is not None else None)


def told_of(node: str, paces: Iterable[Pace]) -> NodePace:
    """What a node tells of its workers: of those that have done enough steps, at most `TOLD_MAX`, the slowest and some others."""
    workers = [_rounded(one) for one in paces if one.steps >= LEAST_STEPS]
    if len(workers) > TOLD_MAX:
        slowest = sorted(workers, key=lambda one: -one.step_s * (one.busy or 1.0))[: TOLD_MAX // 2]
        others = [one for one in workers if one not in slowest]
        spread = others[:: -(-len(others) // (TOLD_MAX - len(slowest)))]
        workers = sorted([*slowest, *spread], key=lambda one: one.rank)
    return NodePace(clip(node, _NODE_BYTES_MAX), tuple(workers))


def _rounded(one: Pace) -> Pace:
    return Pace(one.rank, max(round(one.step_s, 6), 1e-6), LEAST_STEPS, None if one.busy is None else round(one.busy, 3))


def pause_of(nodes: int) -> float:
    """How long a node waits between two looks at its workers, so that all together do not keep the leader busy."""
    return max(LOOK_S, nodes / NODES_PER_S)


class Comparison:
    """What comes of what all nodes tell, look after look, for as long as anything may change."""

    def __init__(self) -> None:
        self.look_at: float | None = None
        self._generation = 0
        self._seen: dict[int, int] = {}
        self._looked_at = float("-inf")
        self._known = 0  # how many times nodes had told something by the last look

    def next(self, generation: int, told: Mapping[str, NodePace], times: int, posted: bytes, now: float) -> bytes | None:
        """What is to be posted, if that is another thing than what is there; nodes have told something so many `times`."""
        if generation != self._generation:
            self._generation, self._seen, self._known, self.look_at = generation, {}, 0, None
        if self.look_at is None and times != self._known:
            self.look_at = max(now + GATHER_S, self._looked_at + LOOK_S)
        if self.look_at is None or now < self.look_at:
            return None
        self._known, self.look_at = times, None
        found = compare(told.values())
        if found is None:
            return None
        self._looked_at = now
        self._seen, named = follow(self._seen, found.slow)
        news = encode_job(found.replace(slow=named, more=found.more if named else 0))
        is_news = _says_otherwise(posted, news)
        if is_news or len(named) < len(found.slow):  # it has not arrived yet; or somebody may be slow for a moment only
            self.look_at = now + LOOK_S
        return news if is_news else None


def _says_otherwise(posted: bytes, news: bytes) -> bool:
    try:
        before, now = decode_job(posted), decode_job(news)
    except ValueError:
        return True
    if [one.rank for one in before.slow] != [one.rank for one in now.slow] or _differ(before.median_s, now.median_s):
        return True
    return any(_differ(one.factor, another.factor) for one, another in zip(before.slow, now.slow, strict=True))


def _differ(one: float, another: float) -> bool:
    return not another / CHANGED <= one <= another * CHANGED


def is_other(before: NodePace | None, now: NodePace) -> bool:
    """Whether the others need to hear what a node would tell now."""
    if before is None or [one.rank for one in before.workers] != [one.rank for one in now.workers]:
        return bool(now.workers)
    return any(
        _differ(was.step_s, one.step_s)
        or (was.busy is None) != (one.busy is None)
        or abs((was.busy or 0.0) - (one.busy or 0.0)) > CHANGED_BUSY
        for was, one in zip(before.workers, now.workers, strict=True)
    )


# --- as bytes --------------------------------------------------------------------------------------------------------------


def _read_step_s(value: object) -> float:
    seconds = read_seconds(value)
    if not seconds > 0:
        raise ValueError("must be a number of seconds above zero")
    return seconds


def _read_share(value: object) -> float | None:
    if value is not None and (type(value) not in (int, float) or not 0 <= value <= 1):  # type: ignore[operator]
        raise ValueError("must be a number from 0 to 1, or null")
    return None if value is None else float(value)  # type: ignore[arg-type]


_read_node = partial(read_text, _NODE_BYTES_MAX)
_PACE: Mapping[str, Callable[[object], object]] = {
    "rank": read_count,
    "step_s": _read_step_s,
    "steps": read_count,
    "busy": _read_share,
}
_SLOW: Mapping[str, Callable[[object], object]] = {
    "rank": read_count,
    "step_s": _read_step_s,
    "median_s": _read_step_s,
    "holds_up": read_flag,
    "node": _read_node,
}
_NODE: Mapping[str, Callable[[object], object]] = {
    "node": _read_node,
    "workers": partial(read_list, TOLD_MAX, lambda value: Pace(**read_fields(value, _PACE))),
}
_JOB: Mapping[str, Callable[[object], object]] = {
    "median_s": _read_step_s,
    "slow": partial(read_list, NAMED_MAX, lambda value: Slow(**read_fields(value, _SLOW))),
    "more": read_count,
}


def _plain(value: object) -> object:
    if isinstance(value, Value):
        return {name: _plain(one) for name, one in value.__dict__.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def encode_node(told: NodePace) -> bytes:
    return to_json(_plain(told)).encode()


def decode_node(data: bytes) -> NodePace:
    """ValueError, with the name of the field, for what is none."""
    return NodePace(**read_fields(from_json(data), _NODE))


def encode_job(found: JobPace) -> bytes:
    """As it stands in the store, under 8 KiB."""
    return to_json(_plain(found)).encode()


def decode_job(data: bytes) -> JobPace:
    """The same."""
    return JobPace(**read_fields(from_json(data), _JOB))
