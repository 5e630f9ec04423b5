"""Lines of many log files as one: merged by the times that they begin with, and the same said by many ranks said once.

The rules, which the help tells too. Lines of one file are never reordered. A record, a line with a time and those below it that
have none, comes when its time comes. A file without times comes as a whole, at the time at which it was last written. All of it
is done to blocks of bytes: nothing is done to a single line that can be done to many.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from itertools import chain, islice

from rallypoint.base.json_text import to_json
from rallypoint.base.records import Value
from rallypoint.base.text import plural, ranges
from rallypoint.inspection.log_times import Clock, find_clock, split_records, stamp_of, translate, without_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, TypeVar

    T = TypeVar("T")
    Dress = Callable[["Mark", list[bytes], list[bytes]], Sequence[T]]

__all__ = [
    "LINE_MAX",
    "Cutter",
    "Group",
    "Lane",
    "LogLine",
    "Mark",
    "as_json",
    "collapse",
    "json_beginning",
    "label",
    "line_of_group",
    "log_lines",
    "matching",
    "merge",
    "prefixed",
]

LINE_MAX = 16 << 20  # a longer line comes in pieces
LOOKAHEAD = 200  # lines of each file, among which those are looked for that other ranks have said


class Mark(Value):
    """Whose lines they are."""

    rank: int
    stream: str
    attempt: int = 0
    node: str = ""


class Cutter:
    """Whole lines of what comes in blocks that end anywhere."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, block: bytes) -> bytes:
        """The lines that are whole by now."""
        end = block.rfind(b"\n") + 1
        if not end:
            self._pieces.append(block)
            self._size += len(block)
            return self.rest() if self._size > LINE_MAX else b""
        lines = b"".join([*self._pieces, block[:end]])
        self._pieces, self._size = ([block[end:]], len(block) - end) if end < len(block) else ([], 0)
        return lines

    def rest(self) -> bytes:
        """What is left is the last line, although it has no end."""
        rest, self._pieces, self._size = b"".join(self._pieces), [], 0
        return rest + b"\n" if rest else b""


class Lane:
    """The lines of one file, in blocks of whole ones; `written_us` is when it was last written, in microseconds since 1970."""

    def __init__(self, mark: Mark, blocks: Iterator[bytes], written_us: int, clock: Clock | None = None) -> None:
        self.mark = mark
        self.blocks = blocks
        self.written_us = written_us
        self.clock = clock  # as far as it is known
        self.prefix = b""  # which its lines get before anything else is done to them: whole blocks at once


# --- by time ---------------------------------------------------------------------------------------------------------------


class _Feed:
    """What has been read of a lane, and not given yet: dressed records and their times."""

    def __init__(self, lane: Lane, dress: Dress[Any], here_s: int) -> None:
        self.lane = lane
        self._dress = dress
        self._here_s = here_s
        self._last = b""
        self.is_over = False
        self.times: list[bytes] = []
        self.records: list[Any] = []
        self.first = next((block for block in lane.blocks if block), b"")
        if lane.clock is None:
            lane.clock = find_clock(self.first)

    def fill(self, to: Clock, since: bytes) -> None:
        """Read on until there is something."""
        clock = self.lane.clock
        assert clock is not None
        while not self.times and not self.is_over:
            block, self.first = self.first or next(self.lane.blocks, b""), b""
            if not block:
                self.is_over = True
                return
            records, times = split_records(self._labelled(block), clock, self._last, self.lane.prefix)
            self._last = times[-1]
            self.times = translate(times, clock, to, self._here_s)
            start = bisect_left(self.times, since)
            del self.times[:start]
            self.records = list(self._dress(self.lane.mark, records[start:], times[start:]))

    def take(self, count: int) -> tuple[list[bytes], list[Any]]:
        if count == len(self.times):
            taken = self.times, self.records
            self.times, self.records = [], []
            return taken
        taken = self.times[:count], self.records[:count]
        del self.times[:count]
        del self.records[:count]
        return taken

    def whole(self) -> Iterator[list[Any]]:
        """All of a lane without times."""
        block = self.first
        while block:
            yield list(self._dress(self.lane.mark, [self._labelled(block)], [b""]))
            block = next(self.lane.blocks, b"")

    def _labelled(self, lines: bytes) -> bytes:
        """Without the last newline, to which no line is to be added."""
        lines, prefix = lines.removesuffix(b"\n"), self.lane.prefix
        return prefix + lines.replace(b"\n", b"\n" + prefix) if prefix else lines


def merge(lanes: Sequence[Lane], dress: Dress[T], here_s: int, since_us: int | None = None) -> Iterator[list[T]]:
    """The records of all lanes in the order of their times, each as `dress` has made it; from some moment on, if one is given.

    `dress` gets records of one lane, without their last newline, and as many times, and returns as many of what is wanted.
    """
    feeds = [_Feed(lane, dress, here_s) for lane in lanes]
    feeds = [feed for feed in feeds if feed.first]
    timed = [feed for feed in feeds if feed.lane.clock is not None]
    untimed = [feed for feed in feeds if feed.lane.clock is None and (since_us is None or feed.lane.written_us >= since_us)]
    untimed.sort(key=lambda feed: feed.lane.written_us // 1_000_000)  # of one second: as they are given, by their ranks
    to = next((feed.lane.clock for feed in timed if feed.lane.clock is not None), Clock())
    since = b"" if since_us is None else stamp_of(since_us, to, here_s)
    while True:
        for feed in timed:
            feed.fill(to, since)
        timed = [feed for feed in timed if feed.times]
        if not timed:
            break
        horizon = min(feed.times[-1] for feed in timed)
        alone = stamp_of(untimed[0].lane.written_us, to, here_s) if untimed else b""
        if untimed and alone <= horizon:
            yield _in_order([feed.take(bisect_left(feed.times, alone)) for feed in timed])
            yield from untimed.pop(0).whole()
            continue
        counts = [bisect_left(feed.times, horizon) for feed in timed]
        if not any(counts):  # all that is left of somebody has the same time
            counts = [bisect_right(feed.times, horizon) for feed in timed]
        yield _in_order([feed.take(count) for feed, count in zip(timed, counts, strict=True) if count])
    for feed in untimed:
        yield from feed.whole()


def _in_order(taken: list[tuple[list[bytes], list[T]]]) -> list[T]:
    """Those of one time stay in the order of their lanes."""
    if len(taken) == 1:
        return taken[0][1]
    times = list(chain.from_iterable(some for some, _ in taken))
    records = list(chain.from_iterable(some for _, some in taken))
    return [records[at] for at in sorted(range(len(times)), key=times.__getitem__)]


# --- by what they say ------------------------------------------------------------------------------------------------------


class Group(Value):
    """A line, and all who have said it; its time is that of the first of them."""

    marks: tuple[Mark, ...]
    time: bytes
    line: bytes


class _Queue:
    """The next lines of one lane, and how often each is among them."""

    def __init__(self, mark: Mark, lines: Iterator[bytes], at: bytes, presence: dict[bytes, int]) -> None:
        self.mark = mark
        self.next: deque[tuple[bytes, bytes, bytes, bytes]] = deque()  # what is compared; when it was, nearly; its time; itself
        self._lines = lines
        self._at = at
        self._stream = mark.stream.encode()
        self._presence = presence  # in how many lanes each is
        self._counts: dict[bytes, int] = {}
        self._fill()

    def _fill(self) -> None:
        for line in islice(self._lines, LOOKAHEAD - len(self.next)):
            time, text = without_time(line)
            self._at = _comparable(time) if time else self._at
            key = self._stream + text
            self.next.append((key, self._at, time, line))
            count = self._counts[key] = self._counts.get(key, 0) + 1
            if count == 1:
                self._presence[key] = self._presence.get(key, 0) + 1

    def advance(self) -> None:
        key = self.next.popleft()[0]
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
            self._presence[key] -= 1
            if not self._presence[key]:
                del self._presence[key]
        self._fill()


def collapse(lanes: Sequence[tuple[Mark, Iterator[bytes], bytes]]) -> Iterator[Group]:
    """Each line once for all lanes that say it next, be it at other times; lines of one lane stay in order.

    A line waits for those who will say it soon: until they have said what comes before. Where they wait for each other, the
    earliest goes first. A lane is its mark, its lines, and the time at which those were said that have no time before them.
    """
    presence: dict[bytes, int] = {}
    queues = [_Queue(mark, lines, _comparable(at), presence) for mark, lines, at in lanes]
    while queues := [queue for queue in queues if queue.next]:
        saying: dict[bytes, list[_Queue]] = {}
        for queue in queues:
            saying.setdefault(queue.next[0][0], []).append(queue)
        ready = [key for key, holders in saying.items() if presence[key] == len(holders)]
        holders = saying[min(ready or saying, key=lambda key: saying[key][0].next[0][1])]
        _, _, time, line = holders[0].next[0]
        yield Group(tuple(queue.mark for queue in holders), time, line)
        for queue in holders:
            queue.advance()


def _comparable(time: bytes) -> bytes:
    """Near enough, where it only matters who is shown first."""
    return time.lstrip(b"[").replace(b"T", b" ").replace(b",", b".")


# --- as they are shown -----------------------------------------------------------------------------------------------------


class LogLine(Value):
    """A line of a log. `ranks` are those that wrote it, more than one where the same lines were put together; `time` is what the
    line, or one above it, began with.
    """

    ranks: tuple[int, ...]
    stream: str
    attempt: int
    node: str
    time: str | None
    text: str

    @property
    def rank(self) -> int:
        """The first of them."""
        return self.ranks[0]


def label(marks: Sequence[Mark], names_stderr: bool) -> str:
    """``rank 3`` or ``ranks 1-7``; with the stream where both are shown and it is stderr, and the attempt from the second on."""
    first = marks[0]
    words = [plural(len(marks), "rank"), ranges(mark.rank for mark in marks)]
    if names_stderr and first.stream == "stderr":
        words.append(first.stream)
    if first.attempt:
        words.append(f"attempt {first.attempt}")
    return " ".join(words)


def matching(record: bytes, pattern: re.Pattern[bytes]) -> bytes | None:
    """The lines of a record in which the pattern is found; None if there are none."""
    found = [line for line in record.split(b"\n") if pattern.search(line)]
    return b"\n".join(found) if found else None


def prefixed(records: list[bytes], prefix: bytes, pattern: re.Pattern[bytes]) -> list[bytes | None]:
    """Each line in which the pattern is found, with the prefix; None for a record without such a line."""
    between = b"\n" + prefix
    found = [matching(record, pattern) for record in records]
    return [prefix + some.replace(b"\n", between) if some is not None else None for some in found]


def as_json(beginning: str, record: bytes, time: bytes) -> str:
    """Each line of a record as a JSON object; `beginning` is what all of this lane have in common (`json_beginning`)."""
    start = f'{beginning}{to_json(_as_iso(time))}, "text": '
    return "".join([f"{start}{to_json(_text(line))}}}\n" for line in record.split(b"\n")])


def json_beginning(mark: Mark) -> str:
    common = {"rank": mark.rank, "stream": mark.stream, "attempt": mark.attempt, "node": mark.node}
    return f'{to_json(common)[:-1]}, "time": '


def log_lines(mark: Mark, record: bytes, time: bytes) -> list[LogLine]:
    """Line by line, for programs."""
    when = _as_iso(time)
    return [LogLine((mark.rank,), mark.stream, mark.attempt, mark.node, when, _text(line)) for line in record.split(b"\n")]


def line_of_group(group: Group) -> LogLine:
    first = group.marks[0]
    ranks = tuple(mark.rank for mark in group.marks)
    return LogLine(ranks, first.stream, first.attempt, first.node, _as_iso(group.time), _text(group.line))


def _as_iso(time: bytes) -> str | None:
    return _text(time).lstrip("[").replace(" ", "T").replace(",", ".") or None


def _text(line: bytes) -> str:
    return line.decode(errors="backslashreplace")
