"""Who hangs, as all nodes find out together: what each declares of its workers, and which of them all others wait for.

The one rank of a thousand that is not in the collective is seldom on the node that notices. So the first node with a worker that
is overdue declares where all its workers stand, the leader asks the others to do the same, and of what they say one function
names the odd one out: every node is told the same.

    up/hangs/<g>/<id>    what a node declares, once for each generation
    down/inquiry/<g>     that all are asked, and later whom they name

To blame are

1. those that are stopped by a signal;
2. else those that never came to a collective which others have begun, where their library has a record of that (NCCL);
3. else those that are not in a collective, if at least half of all wait in one;
4. else, of those that are silent, the only one; or those with the fewest steps, of these those that stand elsewhere in the
   program than the most;
5. else the one that is overdue and has been silent for longest: nothing tells it from the others, and that is said.

What a node sends is bounded, whatever its workers do: those alike are one group, and those in no group are counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from rallypoint.base.json_text import (
    clip,
    from_json,
    read_count,
    read_fields,
    read_flag,
    read_integer,
    read_list,
    read_seconds,
    read_text,
)  # fmt: skip
from rallypoint.base.records import Value
from rallypoint.base.text import Run, count_of, joined, many, who_of

__all__ = [
    "ACCUSED_MAX", "COLLECTIVE", "ELSEWHERE", "INQUIRY_S", "UNKNOWN", "Accused", "Finding", "Inquiry", "Statement", "Witness",
    "accuse", "decode_inquiry", "decode_statement", "encode_inquiry", "encode_statement", "grouped",
]  # fmt: skip

INQUIRY_S = 4.0  # from when all are asked until those are judged who have answered: stacks may take 2 s, and more on a busy node
COLLECTIVE, ELSEWHERE, UNKNOWN = PLACES = ("collective", "elsewhere", "unknown")
GROUPS_MAX = 16
ACCUSED_MAX = 8
_RUNS_MAX = 16
_WHERE_BYTES_MAX = 240
_SHORT_BYTES_MAX = 64
_NAME_BYTES_MAX = 255
_PATH_BYTES_MAX = 600
_WHY_BYTES_MAX = 900


class Witness(Value):
    """Workers of one node that are alike: where they stand, and what is known of them."""

    ranks: tuple[Run, ...]
    place: str = UNKNOWN  # of PLACES
    where: str = ""  # the innermost frames of the main thread, in a line
    standing: str = ""  # equal for workers at the same place of the program; empty where that is not known
    step: int = -1  # -1: it tells of none
    phase: str = ""
    is_stopped: bool = False
    is_silent: bool = False  # it is overdue, or half of its time is over
    is_overdue: bool = False
    silent_s: float = 0.0  # of the one that has been silent for longest

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for those that can be told of as one."""
        return (
            self.place, self.where, self.standing, self.step, self.phase, self.is_stopped, self.is_silent, self.is_overdue,
        )  # fmt: skip


class Statement(Value):
    """What one node says of its workers, and where their stacks are."""

    node: str
    stacks: str = ""
    workers: tuple[Witness, ...] = ()
    unnamed: int = 0
    absent: tuple[Run, ...] = ()  # ranks, of whichever node, for which others wait as their library has recorded it
    absent_why: str = ""


class Accused(Value):
    """Workers of one node that the others wait for."""

    node: str
    stacks: str
    ranks: tuple[Run, ...]
    what: str  # where these are, and since when


class Finding(Value):
    """What the nodes have found together."""

    accused: tuple[Accused, ...] = ()
    unnamed: int = 0  # more that are to blame
    why: str = ""  # what tells them from the others
    is_certain: bool = False
    heard: int = 0  # nodes

    def includes(self, rank: int) -> bool:
        return any(first <= rank <= last for one in self.accused for first, last in one.ranks)


class Inquiry(Value):
    """All nodes are asked; with a finding, that is what came of it."""

    by: str
    finding: Finding | None = None


def grouped(workers: Iterable[Witness]) -> tuple[tuple[Witness, ...], int]:
    """Those that are alike as one, suspects first, at most `GROUPS_MAX`; and how many workers are in none of these."""
    groups: dict[tuple[object, ...], Witness] = {}
    for one in workers:
        bounded = one.replace(
            where=clip(one.where, _WHERE_BYTES_MAX), standing=clip(one.standing, _SHORT_BYTES_MAX),
            phase=clip(one.phase, _SHORT_BYTES_MAX),
        )  # fmt: skip
        known = groups.get(bounded.kind)
        if known is not None:
            ranks = tuple(joined([*known.ranks, *bounded.ranks]))
            bounded = bounded.replace(ranks=ranks, silent_s=max(known.silent_s, bounded.silent_s))
        groups[bounded.kind] = bounded
    ordered = sorted(groups.values(), key=_rarity)
    fitting = [one for one in ordered if len(one.ranks) <= _RUNS_MAX][:GROUPS_MAX]
    named = sum(count_of(one.ranks) for one in fitting)
    return tuple(fitting), sum(count_of(one.ranks) for one in ordered) - named


def _rarity(one: Witness) -> tuple[bool, bool, int, Run]:
    return not one.is_stopped, one.place == COLLECTIVE, count_of(one.ranks), one.ranks[0]


# --- who is to blame -------------------------------------------------------------------------------------------------------


class _Seen(Value):
    node: str
    stacks: str
    worker: Witness


def accuse(statements: Iterable[Statement]) -> Finding:
    """Who hangs; the same in any order of them."""
    heard = sorted(statements, key=lambda one: one.node)
    seen = [_Seen(one.node, one.stacks, worker) for one in heard for worker in one.workers]
    absent = tuple(joined(run for one in heard for run in one.absent))
    absent_why = next((one.absent_why for one in heard if one.absent), "")
    never_came = partial(_never_came, absent, absent_why)
    for rule in (_stopped, never_came, _outside_of_the_collective, _behind_or_apart):
        found, why = rule(seen)
        if found:
            return _finding(found, why, is_certain=True, heard=len(heard))
    silent = [one for one in seen if one.worker.is_silent] or seen
    longest = sorted(silent, key=lambda one: (not one.worker.is_overdue, -one.worker.silent_s, one.worker.ranks))[:1]
    ranks = [(one.worker.ranks[0][0], one.worker.ranks[0][0]) for one in longest]
    only = [one.replace(worker=one.worker.replace(ranks=(rank,))) for one, rank in zip(longest, ranks, strict=True)]
    return _finding(only, f"nothing tells the workers of {many(len(heard), 'node')} apart", is_certain=False, heard=len(heard))


def _stopped(seen: Sequence[_Seen]) -> tuple[list[_Seen], str]:
    return [one for one in seen if one.worker.is_stopped], "stopped by a signal (state T)"


def _never_came(absent: Sequence[Run], why: str, seen: Sequence[_Seen]) -> tuple[list[_Seen], str]:
    """As the records of their library have it, whatever their stacks look like."""
    found = []
    for one in seen:
        common = [(max(a, c), min(b, d)) for a, b in one.worker.ranks for c, d in absent if max(a, c) <= min(b, d)]
        if common:
            found.append(one.replace(worker=one.worker.replace(ranks=tuple(joined(common)[:_RUNS_MAX]))))
    return found, why


def _outside_of_the_collective(seen: Sequence[_Seen]) -> tuple[list[_Seen], str]:
    """Those that may run on are to blame only where none of those that are elsewhere is silent."""
    waiting = [one for one in seen if one.worker.place == COLLECTIVE and one.worker.is_silent]
    known = [one for one in seen if one.worker.place != UNKNOWN]
    others = [one for one in known if one.worker.place == ELSEWHERE]
    if not waiting or 2 * _count(waiting) < _count(known):
        return [], ""
    found = [one for one in others if one.worker.is_silent] or others
    return found, f"not in the collective in which {_who(waiting)} wait: {_commonest(waiting)}"


def _behind_or_apart(seen: Sequence[_Seen]) -> tuple[list[_Seen], str]:
    silent = [one for one in seen if one.worker.is_silent]
    steps = [one.worker.step for one in silent]
    behind, least = silent, min(steps, default=-1)
    if least >= 0 and least < max(steps):
        behind = [one for one in silent if one.worker.step == least]
    apart = _minority(silent)
    both = [one for one in behind if one in apart]
    if both:
        rest = [one for one in silent if one not in apart]
        return both, f"elsewhere than {_who(rest)}: {_commonest(rest)}"
    others = [one for one in seen if not one.worker.is_silent]
    if _count(silent) == 1 and others:
        return silent, f"{_who(others)} {'goes' if _count(others) == 1 else 'go'} on"
    if len(behind) < len(silent):
        return behind, f"at step {least}, behind {_who([one for one in silent if one not in behind])}"
    return [], ""


def _minority(silent: Sequence[_Seen]) -> list[_Seen]:
    """Those that stand elsewhere than at least three quarters of them, or the only one of three."""
    if not all(one.worker.standing for one in silent):
        return []
    sizes: dict[str, int] = {}
    for one in silent:
        sizes[one.worker.standing] = sizes.get(one.worker.standing, 0) + count_of(one.worker.ranks)
    total = sum(sizes.values())
    main = max(sizes, key=lambda standing: (sizes[standing], standing), default="")
    few = total - sizes.get(main, 0)
    return [one for one in silent if one.worker.standing != main] if few and (4 * few <= total or (few, total) == (1, 3)) else []


def _count(seen: Iterable[_Seen]) -> int:
    return sum(count_of(one.worker.ranks) for one in seen)


def _who(seen: Sequence[_Seen]) -> str:
    return who_of(joined(run for one in seen for run in one.worker.ranks))


def _commonest(seen: Sequence[_Seen]) -> str:
    """Where the most of them are."""
    sizes: dict[str, int] = {}
    for one in seen:
        sizes[one.worker.where] = sizes.get(one.worker.where, 0) + count_of(one.worker.ranks)
    return max(sizes, key=lambda where: (sizes[where], where), default="")


def _finding(found: Sequence[_Seen], why: str, is_certain: bool, heard: int) -> Finding:
    named = found[:ACCUSED_MAX]
    accused = tuple(Accused(one.node, one.stacks, one.worker.ranks, _what(one.worker)) for one in named)
    return Finding(accused, _count(found) - _count(named), clip(why, _WHY_BYTES_MAX), is_certain, heard)


def _what(worker: Witness) -> str:
    since = f"silent for {worker.silent_s:.1f} s" if worker.is_silent else "busy"
    step = f", its last step was {worker.step}" if worker.step >= 0 else ""
    return clip(f"{since}{step}, in {worker.where or 'a place that is not known'}", _WHY_BYTES_MAX)


# --- as bytes --------------------------------------------------------------------------------------------------------------


def _read_run(value: object) -> Run:
    first, last = read_list(2, read_integer, value) if isinstance(value, list) and len(value) == 2 else (1, 0)
    if not 0 <= first <= last:
        raise ValueError("must be lists of the first and the last of some ranks")
    return first, last


def _read_place(value: object) -> str:
    if value not in PLACES:
        raise ValueError(f"must be one of {', '.join(PLACES)}")
    return str(value)


def _read_runs(value: object) -> tuple[Run, ...]:
    found = read_list(_RUNS_MAX, _read_run, value)
    if not found:
        raise ValueError("must name a rank")
    return found


def _read_step(value: object) -> int:
    if type(value) is not int or not -1 <= value < 2**63:
        raise ValueError("must be a step, or -1")
    return value


_WITNESS: Mapping[str, Callable[[object], object]] = {
    "ranks": _read_runs,
    "place": _read_place,
    "where": partial(read_text, _WHERE_BYTES_MAX),
    "standing": partial(read_text, _SHORT_BYTES_MAX),
    "step": _read_step,
    "phase": partial(read_text, _SHORT_BYTES_MAX),
    "is_stopped": read_flag,
    "is_silent": read_flag,
    "is_overdue": read_flag,
    "silent_s": read_seconds,
}
_TESTIMONY: Mapping[str, Callable[[object], object]] = {
    "node": partial(read_text, _NAME_BYTES_MAX),
    "stacks": partial(read_text, _PATH_BYTES_MAX),
    "workers": partial(read_list, GROUPS_MAX, lambda value: Witness(**read_fields(value, _WITNESS))),
    "unnamed": read_count,
    "absent": partial(read_list, _RUNS_MAX, _read_run),
    "absent_why": partial(read_text, _WHY_BYTES_MAX),
}
_ACCUSED: Mapping[str, Callable[[object], object]] = {
    "node": partial(read_text, _NAME_BYTES_MAX),
    "stacks": partial(read_text, _PATH_BYTES_MAX),
    "ranks": _read_runs,
    "what": partial(read_text, _WHY_BYTES_MAX),
}
_FINDING: Mapping[str, Callable[[object], object]] = {
    "accused": partial(read_list, ACCUSED_MAX, lambda value: Accused(**read_fields(value, _ACCUSED))),
    "unnamed": read_count,
    "why": partial(read_text, _WHY_BYTES_MAX),
    "is_certain": read_flag,
    "heard": read_count,
}
_INQUIRY: Mapping[str, Callable[[object], object]] = {
    "by": partial(read_text, _NAME_BYTES_MAX),
    "finding": lambda value: None if value is None else Finding(**read_fields(value, _FINDING)),
}


def _plain(value: object) -> object:
    if isinstance(value, Value):
        return {name: _plain(one) for name, one in value.__dict__.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def encode_statement(statement: Statement) -> bytes:
    """As it stands in the store, under 16 KiB if its workers are `grouped`."""
    path = statement.stacks
    fitting = path if clip(path, _PATH_BYTES_MAX) == path else ""  # half a path is of no use
    fits = len(statement.absent) <= _RUNS_MAX
    bounded = statement.replace(
        node=clip(statement.node, _NAME_BYTES_MAX), stacks=fitting, absent=statement.absent if fits else (),
        absent_why=clip(statement.absent_why, _WHY_BYTES_MAX) if fits else "",
    )  # fmt: skip
    return json.dumps(_plain(bounded)).encode()


def decode_statement(data: bytes) -> Statement:
    """ValueError, with the name of the field, for what is none."""
    return Statement(**read_fields(from_json(data), _TESTIMONY))


def encode_inquiry(inquiry: Inquiry) -> bytes:
    return json.dumps(_plain(inquiry.replace(by=clip(inquiry.by, _NAME_BYTES_MAX)))).encode()


def decode_inquiry(data: bytes) -> Inquiry:
    """ValueError, with the name of the field, for what is none."""
    return Inquiry(**read_fields(from_json(data), _INQUIRY))
