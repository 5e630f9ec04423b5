"""How a worker tells its agent that it lives: the layout of a page of memory that both of them see.

A page is an array of words of 8 bytes. The sign of life and the step are one word each, which a processor writes at once,
so that to give a sign costs no more than a store. What belongs together (the phase, its limit, its name) is changed
between two steps of a sequence number, which is odd in the meantime. A reader takes a page for whole if it finds the same
twice running, with an even number: a copy is made in no certain order, so that one copy alone proves nothing. Times are of
the monotonic clock, which all processes of a machine share; a time of zero is one that never was.

Nothing in a page is trusted: whatever it holds, reading it gives a `Pulse` of sane values, or none.
"""

from __future__ import annotations

from rallypoint.base.defaults import PULSE_MAGIC as MAGIC
from rallypoint.base.defaults import PULSE_PAGE_BYTES as PAGE_BYTES
from rallypoint.base.records import Value

__all__ = [
    "ANNOUNCED_AT", "ASKED", "BASE", "BASES", "BELL", "CHECKPOINT", "CHECKPOINT_AT", "DRAIN_ENDS_AT", "EXITING", "HOLD",
    "LIMIT_S", "MAGIC", "NAME_AT", "NAME_BYTES", "NAME_LENGTH", "OWNER", "PAGE_BYTES", "RUNNING", "SAVED", "SAVE_AT",
    "SEQUENCE", "SIGN_AT", "STARTING", "STEP", "STEPS", "STEP_S", "TOLD_TO_SAVE", "VERSION", "Pulse", "blank", "cut_name",
    "read",
]  # fmt: skip

# Words, by their place in the page.
VERSION = 0
OWNER = 1  # the process that speaks for the worker: the first that came
SEQUENCE = 2
ANNOUNCED_AT = 3
SIGN_AT = 4
STEP = 5  # one more than the step, so that zero is none
BASE = 6  # the phase outside of all sections, by its place in BASES
LIMIT_S = 7  # of the section; zero: none was given
CHECKPOINT_AT = 8
NAME_LENGTH = 9  # of the section; zero: in none
NAME_AT = 80  # in bytes
NAME_BYTES = 64
# Of a node that has to leave (`protocol.draining`): what the agent tells, and what the worker answers, one word each. They are
# outside of what a change of phase guards, and whoever claims the page finds them as they are.
DRAIN_ENDS_AT = 18  # until when there is time to save; zero: no node has to leave
SAVE_AT = 19  # one more than the step; zero: none, and HOLD while it is not known yet
ASKED = 20  # one more than the last step for which the worker has asked whether to save
TOLD_TO_SAVE = 21
SAVED = 22
HOLD = -1
STEP_S = 23  # how long a step takes, over the last ones
STEPS = 24  # how many were measured for that
BELL = 25  # the number of the agent's file in which a worker writes a byte with its first step; zero: nobody waits for that

STARTING, RUNNING, EXITING = BASES = ("starting", "running", "exiting")
CHECKPOINT = "checkpoint"  # the section that is known by its name: work is safe once it has ended
_HEAD_BYTES = 8 * (STEPS + 1)
TRIES = 16  # a change takes microseconds


class Pulse(Value):
    """What a worker's page says."""

    owner: int
    phase: str  # of BASES, or the name of a section
    limit_s: float | None  # that the worker itself gave for this phase
    announced_at: float
    sign_at: float | None  # None: it has given no sign since it was announced
    step: int | None
    checkpoint_at: float | None  # the end of its last complete one
    step_s: float | None = None  # that it takes for a step
    steps: int = 0  # that were measured for it


def blank() -> bytes:
    """A page in which nobody has written."""
    page = bytearray(PAGE_BYTES)
    memoryview(page).cast("q")[VERSION] = MAGIC
    return bytes(page)


def cut_name(name: str) -> bytes:
    """As much of a section's name as there is room for, of whole characters that a terminal can show."""
    shown = "".join(one if one.isprintable() else "?" for one in name) or "?"
    return shown.encode(errors="replace")[:NAME_BYTES].decode(errors="ignore").encode()


def read(page: memoryview, now: float, known: Pulse | None = None) -> Pulse | None:
    """What the page says; None where nobody has spoken; what was `known` where it stays torn, its writer being stopped."""
    before = page[:_HEAD_BYTES].tobytes()
    for _ in range(TRIES):
        copy = page[:_HEAD_BYTES].tobytes()
        if _guarded(copy) == _guarded(before) and not memoryview(copy).cast("q")[SEQUENCE] % 2:
            return _decode(copy, now)
        before = copy
    return known


def _guarded(copy: bytes) -> bytes:
    """All but the sign of life, the step, and what follows the name, which may change at any time."""
    return copy[: 8 * SIGN_AT] + copy[8 * BASE : NAME_AT + NAME_BYTES]


def _decode(copy: bytes, now: float) -> Pulse | None:
    numbers, times = memoryview(copy).cast("q"), memoryview(copy).cast("d")
    if numbers[VERSION] != MAGIC or numbers[OWNER] <= 0:
        return None
    return Pulse(
        owner=numbers[OWNER],
        phase=_phase(numbers, copy),
        limit_s=_limit(times[LIMIT_S]) if numbers[NAME_LENGTH] > 0 else None,
        announced_at=_time(times[ANNOUNCED_AT], now) or now,
        sign_at=_time(times[SIGN_AT], now),
        step=numbers[STEP] - 1 if numbers[STEP] > 0 else None,
        checkpoint_at=_time(times[CHECKPOINT_AT], now),
        step_s=_limit(times[STEP_S]),
        steps=max(numbers[STEPS], 0),
    )


def _phase(numbers: memoryview[int], copy: bytes) -> str:
    length = numbers[NAME_LENGTH]
    if length > 0:
        return cut_name(copy[NAME_AT : NAME_AT + min(length, NAME_BYTES)].decode(errors="replace")).decode()
    return BASES[numbers[BASE]] if 0 <= numbers[BASE] < len(BASES) else RUNNING


def _limit(given_s: float) -> float | None:
    return given_s if 0 < given_s < float("inf") else None


def _time(told: float, now: float) -> float | None:
    """A time that a worker told; none of them can lie ahead of us."""
    return min(told, now) if told > 0 else None
