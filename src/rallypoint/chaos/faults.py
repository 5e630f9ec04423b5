"""What can be done to a job, in words that people write and read.

A fault has one form, in a schedule, in what is printed and in JSON: ``kill rank 3``, ``stop node 1 for 8s``. So what a drill
has printed can be fed to the next one. `read_fault` and `text_of` are each other's inverse.

    kill     a rank, a node, or its agent or warden alone      SIGKILL
    stop     a rank, a node, or its agent alone, for a time    SIGSTOP, then SIGCONT
    slow     a rank, to a share of its speed, for a time       both in turn, ten times a second
    cut      a node, for a time                                its agent hears nothing more on its connections
    fill     the memory or the disk of a node, for a time      as much as there is, or a size
    preempt  a node                                            the notice that `rallypoint drain` gives
"""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.base.records import Value
from rallypoint.base.text import parse_size, parse_span, span_text

__all__ = [
    "AGENT", "CUT", "DISK", "FILL", "KILL", "KINDS", "MEMORY", "NODE", "PREEMPT", "RANK", "SHAPES", "SLOW", "STOP", "WARDEN",
    "Fault", "kinds_of", "read_fault", "text_of",
]  # fmt: skip

KILL, STOP, SLOW, CUT, FILL, PREEMPT = KINDS = ("kill", "stop", "slow", "cut", "fill", "preempt")
RANK, NODE, AGENT, WARDEN, DISK, MEMORY = ("rank", "node", "agent", "warden", "disk", "memory")
SHAPES: dict[str, tuple[str, ...]] = {  # what each may be done to
    KILL: (RANK, WARDEN, AGENT, NODE),
    STOP: (RANK, AGENT, NODE),
    SLOW: (RANK,),
    CUT: (NODE,),
    FILL: (DISK, MEMORY),
    PREEMPT: (NODE,),
}
LASTING = (STOP, SLOW, CUT, FILL)
LONGEST_S = 24 * 3600.0
SIZE_MAX = 1 << 60
SIZE_UNITS = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K"))
_OF_NODE = ("of", NODE)
_FORMS = {
    KILL: "kill rank 3, kill node 1, kill agent of node 1, kill warden of node 1",
    STOP: "stop rank 3 for 8s, stop node 1 for 8s, stop agent of node 1 for 8s",
    SLOW: "slow rank 3 to 50% for 20s",
    CUT: "cut node 1 for 8s",
    FILL: "fill disk of node 1 for 10s, fill memory of node 1 with 2G for 10s",
    PREEMPT: "preempt node 1, preempt node 1 now",
}


class Fault(Value):
    """`whom` is the number of a rank, or a node: its rank among the nodes, its name, or its host's."""

    kind: str
    what: str
    whom: str
    for_s: float = 0.0
    percent: int = 0  # of its time in which a slow one runs
    size: int = 0  # in bytes; 0: as much as there is
    at_once: bool = False

    @property
    def is_lasting(self) -> bool:
        """Whether something has to be undone after it."""
        return self.kind in LASTING

    @property
    def takes_node(self) -> bool:
        """Whether the job goes on without the node."""
        return self.kind == PREEMPT or (self.kind == KILL and self.what in (AGENT, NODE))

    @property
    def takes_restart(self) -> bool:
        """Whether it is a failure of workers."""
        return self.kind == KILL and self.what in (RANK, WARDEN)


def text_of(fault: Fault) -> str:
    """As `read_fault` reads it."""
    target = [fault.what] if fault.what in (RANK, NODE) else [fault.what, *_OF_NODE]
    words = [fault.kind, *target, fault.whom]
    if fault.percent:
        words += ["to", f"{fault.percent}%"]
    if fault.size:
        words += ["with", _size_text(fault.size)]
    if fault.is_lasting:
        words += ["for", span_text(fault.for_s)]
    return " ".join([*words, *(["now"] if fault.at_once else [])])


def _size_text(size: int) -> str:
    return next((f"{size // unit}{letter}" for unit, letter in SIZE_UNITS if size % unit == 0), str(size))


def read_fault(text: str) -> Fault:
    """The fault that is meant; ValueError says what is wrong, and how it is written."""
    words = text.split()
    kind = words[0] if words else ""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no fault; there are {', '.join(KINDS)}")
    try:
        what, whom, rest = _read_target(words[1:])
        return _checked(_with_details(Fault(kind, what, whom), rest))
    except ValueError as error:
        raise ValueError(f"{error}; it is written so: {_FORMS[kind]}") from None


def _read_target(words: list[str]) -> tuple[str, str, list[str]]:
    """What is hurt, whose that is, and the words after it."""
    what, *rest = words or [""]
    if what not in (RANK, NODE):
        if tuple(rest[:2]) != _OF_NODE:
            raise ValueError(f"{' '.join(words[:3]) or 'nothing'!r} is nobody to do that to")
        rest = rest[2:]
    if not rest:
        raise ValueError(f"it does not say which {RANK if what == RANK else NODE}")
    return what, rest[0], rest[1:]


def _with_details(fault: Fault, words: list[str]) -> Fault:
    rest, known = iter(words), set[str]()
    for word in rest:
        if word in known:
            raise ValueError(f"{word!r} stands there twice")
        known.add(word)
        match word:
            case "for" if fault.is_lasting:
                fault = fault.replace(for_s=parse_span(next(rest, "")))
            case "to" if fault.kind == SLOW:
                fault = fault.replace(percent=_read_percent(next(rest, "")))
            case "with" if fault.kind == FILL:
                fault = fault.replace(size=_read_size(next(rest, "")))
            case "now" if fault.kind == PREEMPT:
                fault = fault.replace(at_once=True)
            case _:
                raise ValueError(f"{word!r} is not understood")
    return fault


def _read_percent(word: str) -> int:
    number = word.removesuffix("%")
    if not (number.isascii() and number.isdigit() and len(number) < 3 and int(number)):
        raise ValueError(f"{word!r} is no share of 1% to 99%")
    return int(number)


def _read_size(word: str) -> int:
    try:
        size = parse_size(word)
    except ValueError:
        size = 0
    if not 0 < size <= SIZE_MAX:
        raise ValueError(f"{word!r} is no size, as 500M and 2G are")
    return size


def _checked(fault: Fault) -> Fault:
    if fault.what not in SHAPES[fault.kind]:
        raise ValueError(f"a {fault.what} is nothing to {fault.kind}")
    if fault.what == RANK and not (fault.whom.isascii() and fault.whom.isdigit() and len(fault.whom) < 9):
        raise ValueError(f"{fault.whom!r} is no rank")
    if fault.is_lasting and not 0 < round(fault.for_s, 3) <= LONGEST_S:
        raise ValueError("it does not say for how long" if not fault.for_s else f"{span_text(fault.for_s)} is too long")
    if fault.kind == SLOW and not fault.percent:
        raise ValueError("it does not say how slow")
    return fault.replace(whom=str(int(fault.whom))) if fault.what == RANK else fault


def kinds_of(names: Iterable[str]) -> tuple[str, ...]:
    """Those that are named, in the order of `KINDS`; ValueError names one that there is not."""
    asked = list(names)
    if unknown := [name for name in asked if name not in KINDS]:
        raise ValueError(f"{unknown[0]!r} is no fault; there are {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in asked)
