"""What a person is told while something is awaited: who, how many, how long, what is next.

A wait is a value, and `line` makes a line of it for a certain moment and a certain width. Each kind of wait has several wordings,
from the fullest to the shortest; the first that fits is shown. Times are those of one clock, the caller's.

While workers are being stopped they still run, and may write to the terminal themselves; `rows_apart` says how far away the line
then stays from where they write (see `output.live_line`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rallypoint.base.records import Value
from rallypoint.base.text import fitted, many, time_text
from rallypoint.protocol import shutdown

__all__ = ["BackOff", "Counted", "ForNodes", "ForOthers", "Running", "Starting", "Stopping", "Wait", "line", "rows_apart"]

MOST_ROWS_APART = 12
MOST_NAMED = 3
RATE_IS_KNOWN_AT = 0.02  # of the whole; before that, what is left is a guess


class ForNodes(Value):
    """The nodes of the next generation. `text` is what the leader says of them, once it does."""

    since: float
    text: str = ""
    gives_up_at: float | None = None


class ForOthers(Value):
    """Nothing is left to do here, but others are not done."""

    what: str
    since: float
    gives_up_at: float | None = None


class BackOff(Value):
    number: int
    most: int
    until: float


class Starting(Value):
    """No worker is there yet; `modules` are imported for them first."""

    workers: int
    modules: tuple[str, ...]
    since: float


class Running(Value):
    workers: int
    since: float


class Stopping(Value):
    """With `may_hurry`, another Ctrl-C ends it at once."""

    stop: shutdown.Stop
    workers: int
    since: float
    may_hurry: bool = False


class Counted(Value):
    """Some work of which it is known how much there is; it was counted last at `counted_at`."""

    what: str
    done: float
    whole: float
    since: float
    counted_at: float
    unit: str = ""  # without one, the share is told


Wait = ForNodes | ForOthers | BackOff | Starting | Running | Stopping | Counted


def line(wait: Wait, now: float, width: int) -> str:
    """The fullest wording that fits; a cut one where none does."""
    text = ""
    for text in _wordings(wait, now):
        if len(text) <= width:
            return text
    return fitted(text, width)


def rows_apart(wait: Wait) -> int:
    """How many rows stay free between where the cursor is and the line: for a last word of each worker, and a few more."""
    return min(2 + len(wait.stop.clocks), MOST_ROWS_APART) if isinstance(wait, Stopping) else 0


def _wordings(wait: Wait, now: float) -> Iterator[str]:
    match wait:
        case ForNodes(since, text, gives_up_at):
            return _waiting(_shorter_and_shorter(text), now - since, gives_up_at, now)
        case ForOthers(what, since, gives_up_at):
            return _waiting([what], now - since, gives_up_at, now)
        case BackOff(number, most, until):
            return iter([f"restart {number} of {most} in {_left(until, now)}"])
        case Starting(workers, modules, since):
            return _starting(many(workers, "worker"), modules, time_text(now - since))
        case Running(workers, since):
            return iter([f"{many(workers, 'worker')} running · {time_text(now - since)}"])
        case Stopping():
            return _stopping(wait, now)
        case Counted():
            return _counted(wait, now)


def _left(until: float, now: float) -> str:
    return time_text(math.ceil(max(0.0, until - now)))


def _shorter_and_shorter(told: str) -> list[str]:
    """What the leader says, in pieces, of which the most important come first: who is missing matters more than who is here."""
    if not told:
        return ["waiting for the other nodes"]
    pieces = sorted(_plain(told).split("; "), key=lambda piece: piece.startswith("here: "))
    return [f"waiting: {'; '.join(pieces[:most])}" for most in range(len(pieces), 0, -1)]


def _plain(text: str) -> str:
    """Names come from other hosts. Each character is one that takes one column, and does nothing else."""
    return "".join(one if " " <= one <= "~" else one.encode("unicode_escape").decode() for one in text)


def _waiting(heads: list[str], waited_s: float, gives_up_at: float | None, now: float) -> Iterator[str]:
    waited = f" · {time_text(waited_s)}"
    then = "" if gives_up_at is None else f" · gives up in {_left(gives_up_at, now)}"
    for head in heads:
        yield f"{head}{waited}{then}"
    yield f"{heads[-1]}{waited}"
    yield heads[-1]


def _starting(workers: str, modules: tuple[str, ...], waited: str) -> Iterator[str]:
    if modules:
        yield f"importing {', '.join(modules)} for {workers} · {waited}"
        yield f"importing modules for {workers} · {waited}"
    yield f"starting {workers} · {waited}"


def _stopping(wait: Stopping, now: float) -> Iterator[str]:
    stop, targets = wait.stop, sorted(wait.stop.clocks, key=lambda target: (not target.is_worker, target.number))
    waited, head = time_text(now - wait.since), f"stopping {many(wait.workers, 'worker')}"
    if not targets:
        yield f"{head} · {waited}"
        return
    killed = [clock.killed_at for clock in stop.clocks.values() if clock.killed_at is not None]
    if len(killed) == len(targets):
        left = f"{len(targets)} left after SIGKILL"
        then, hint = f" · gives up in {_left(max(killed) + stop.kill_wait_s, now)}", ""
    else:
        told_at = min(clock.told_at or now for clock in stop.clocks.values() if clock.killed_at is None)
        left, then = f"{len(targets)} left", f" · SIGKILL in {_left(told_at + stop.grace_s, now)}"
        hint = " · Ctrl-C again kills at once" if wait.may_hurry else ""
    if len(targets) <= MOST_NAMED:
        named = f"{head}: {left}, {', '.join(map(str, targets))}"
        yield f"{named} · {waited}{then}{hint}"
        yield f"{named}{then}{hint}"
        yield f"{named}{then}"
    yield f"{head}: {left} · {waited}{then}{hint}"
    yield f"{head}: {left}{then}"
    yield f"stopping: {left}{then}"
    yield f"stopping: {left}"


def _counted(wait: Counted, now: float) -> Iterator[str]:
    whole = max(wait.whole, wait.done)
    share = wait.done / whole if whole else 0.0
    told = f"{wait.done:.0f} of {whole:.0f} {wait.unit}" if wait.unit else f"{share:.0%}"
    waited, left = f" · {time_text(now - wait.since)}", ""
    if share >= RATE_IS_KNOWN_AT:
        left = f" · about {_left(wait.since + (wait.counted_at - wait.since) / share, now)} left"
    yield f"{wait.what}: {told}{waited}{left}"
    yield f"{wait.what}: {told}{left}"
    yield f"{told}{left}"
    yield told
