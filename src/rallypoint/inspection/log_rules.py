"""Which log files there are, and whose: what the events of a run say of its attempts, and which ranks are asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rallypoint.base.records import Value
from rallypoint.base.text import Run, joined, ranges
from rallypoint.errors import UsageError
from rallypoint.story.event_records import ENDED, GENERATION, STARTED, Told, count, integers, words

__all__ = ["Attempt", "Teller", "attempts_of", "has_rank", "newest_told", "parse_ranks", "teller_of", "unknown_ranks"]

RANK_MAX = 10**7
_ATTEMPT = re.compile(r"attempt_(\d{1,9})")


class Attempt(Value):
    """One group of workers of one node: a folder of logs, and the global rank of each local one."""

    turn: int  # the same on all nodes, and rising
    number: int
    name: str
    ranks: Mapping[int, int]
    is_told: bool = True  # False: the run's events do not have it, and local ranks are shown


class Teller(Value):
    """Who has written a file of events."""

    hostname: str = ""
    pid: int | None = None
    began_ms: float = 0.0
    has_ended: bool = False


def teller_of(events: Sequence[Told]) -> Teller:
    """Of the last run in it, if there are several."""
    found = Teller()
    for told in events:
        if told.name == STARTED:
            found = Teller(words(told, "hostname", 200), count(told, "pid"), told.timestamp_ms)
        elif told.name == ENDED:
            found = found.replace(has_ended=True)
    return found


def attempts_of(
    events: Sequence[Told],
    names: Iterable[str],
    local_ranks: Mapping[str, Sequence[int]],
    present: Mapping[str, Mapping[int, int]],
) -> list[Attempt]:
    """The attempts of these folders, in order; `local_ranks` are the folders in each of them, and `present` are the ranks of
    those whose workers run, as their agent has them.

    The generation of an attempt is its turn; where generations are counted anew, or an attempt is not told, it is the next one.
    """
    told = {_base(words(one, "folder")): one for one in events if one.name == GENERATION}
    found: list[Attempt] = []
    last = 0
    for number, name in sorted((int(match[1]), name) for name in names if (match := _ATTEMPT.fullmatch(name))):
        event = told.get(name)
        generation = count(event, "generation") if event is not None else None
        last = max(generation or 0, last + 1) if found else generation or number + 1
        ranks = dict(enumerate(integers(event, "ranks") if event is not None else [])) or present.get(name)
        found.append(Attempt(last, number, name, ranks or {rank: rank for rank in local_ranks.get(name, ())}, bool(ranks)))
    return found


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def newest_told(attempts: Sequence[Attempt]) -> int:
    """How many attempts there are up to the last one that is told: what comes after it may be told in a moment."""
    return max((at + 1 for at, attempt in enumerate(attempts) if attempt.is_told), default=0)


def parse_ranks(text: str) -> list[Run]:
    """``3,8-11`` as runs of ranks; UsageError: it is no such list."""
    found: list[Run] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,8})(?:\s*-\s*(\d{1,8}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > RANK_MAX:
            raise UsageError(f"--rank {text!r} is not a list of ranks, such as 3,8-11")
        found.append((first, last))
    return joined(found)


def has_rank(chosen: Sequence[Run] | None, rank: int) -> bool:
    """Whether a rank is asked for; all are where none is named."""
    return chosen is None or any(first <= rank <= last for first, last in chosen)


def unknown_ranks(chosen: Sequence[Run] | None, known: Iterable[int]) -> str:
    """What is wrong with a choice of which there is not one; nothing if there is."""
    known = set(known)
    if chosen is None or any(has_rank(chosen, rank) for rank in known):
        return ""
    asked = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in chosen)
    return f"there are no logs of rank {asked}; there are those of {ranges(known, most=16)}"
