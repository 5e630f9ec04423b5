"""The logs of a job: which folders it has, which files are in them, and their lines, as they are and as they come.

What is read together is a passage: the files of one attempt on all nodes. Those of the next attempt come after it, because no
worker starts before those of the last attempt have ended. While a job is followed, every look at its files is a passage, and
an empty one says that there was nothing new.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from rallypoint.base import defaults, limits, report
from rallypoint.base.records import Value
from rallypoint.base.text import ranges
from rallypoint.errors import RallypointError, UsageError
from rallypoint.inspection import client
from rallypoint.inspection.log_files import Tap
from rallypoint.inspection.log_lines import Group, Lane, LogLine, Mark, collapse, line_of_group, log_lines, matching, merge
from rallypoint.inspection.log_rules import Attempt, Teller, attempts_of, has_rank, newest_told, teller_of, unknown_ranks
from rallypoint.inspection.log_times import Clock, stamp_of
from rallypoint.inspection.view import JobKey, JobView, NodeView, keys_of
from rallypoint.processes.activity import runs_since
from rallypoint.story.event_logs import read_log, select

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re

    from rallypoint.base.text import Run

__all__ = ["STREAMS", "Found", "Logs", "NodeLogs", "Wish", "chosen", "collapsed", "find_logs", "here_s", "read_lines"]

STREAMS = ("stdout", "stderr")
LEAST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.25
GATHER_S = 0.3  # for which lines of several ranks are waited for, if those that are the same are to be put together
LOOK_AROUND_S = 0.25  # for new attempts
LOOK_FURTHER_S = 2.0  # for new nodes, while there is nothing to read
ASK_AGAIN_S = 15.0  # those that have not answered
FILES_WITHIN_S = 3.0  # after the workers are known to run: the launcher opens their files while they start
GONE_AFTER_S = 120.0  # a node elsewhere that says nothing, when all nodes here have ended
SPARE_FILES, FILES_PER_WORKER = 64, 4
HOW_TO_KEEP = "start the job with --redirects 3 (files only) or --tee 3 (files and the console), and --log-dir FOLDER"


class Wish(Value):
    """What is to be read: of which ranks, all if there is None, and so on."""

    ranks: tuple[Run, ...] | None = None
    streams: tuple[str, ...] = STREAMS
    since_us: int | None = None
    pattern: re.Pattern[bytes] | None = None
    tail: int | None = None


# --- where -----------------------------------------------------------------------------------------------------------------


class NodeLogs:
    """The run folder of one node."""

    def __init__(self, folder: str, name: str = "", view: NodeView | None = None) -> None:
        self._view = view  # as its agent describes it, where it was asked: its events may not be there yet, or be lost
        self.folder = folder
        self.name = name
        self.attempts: list[Attempt] = []
        self.teller = Teller()
        if view is not None:
            self.teller = Teller(view.hostname, view.pid, (time.time() - view.uptime_s) * 1000)
        self._events_at = (0, 0)
        self._names: list[str] = []

    def look(self) -> bool:
        """Read what is new; whether there is anything."""
        names, events_at = _names_in(self.folder), _size_and_time(os.path.join(self.folder, defaults.EVENT_FILE))
        if names == self._names and events_at == self._events_at:
            return False
        self._names, self._events_at = names, events_at
        events = read_log(os.path.join(self.folder, defaults.EVENT_FILE)).events if events_at[0] else ()
        told = teller_of(events)
        self.teller = told if told.pid is not None else self.teller
        self.name = self.name or self.teller.hostname
        local = {name: [int(one) for one in _names_in(os.path.join(self.folder, name)) if one.isdecimal()] for name in names}
        self.attempts = attempts_of(events, names, local, self._present())
        return True

    def _present(self) -> dict[str, dict[int, int]]:
        """The ranks of the workers that its agent has now."""
        if self._view is None or not self._view.workers:
            return {}
        return {os.path.basename(self._view.attempt_dir): {worker.local_rank: worker.rank for worker in self._view.workers}}

    def take_error(self) -> str:
        """Why not all of it could be had; once."""
        return ""

    def close(self) -> None:
        """Nothing of it is needed any more."""

    @property
    def is_here(self) -> bool:
        return self.teller.hostname in ("", os.uname().nodename)

    @property
    def has_ended(self) -> bool:
        """For sure: it says so, or its agent was on this machine and is gone. One without events says nothing of itself."""
        teller = self.teller
        if teller.has_ended or teller.pid is None:
            return True
        return self.is_here and not runs_since(teller.pid, teller.began_ms)


class Found(Value):
    """What there is: nodes with folders that can be read here, those whose cannot, and whether more may come."""

    nodes: tuple[NodeLogs, ...]
    notes: tuple[str, ...] = ()
    is_alive: bool = True
    elsewhere: tuple[NodeView, ...] = ()
    agents: tuple[client.Agent, ...] = ()  # of the job, on this machine
    is_complete: bool = True  # all nodes have answered


def find_logs(meant: str, tell: Callable[[str], None] = report.warn) -> Logs:
    """Of a folder, or of a job that runs: by its id, the beginning of it, the process id of its launcher, or none."""
    is_path, is_there = os.sep in meant, os.path.exists(meant)
    if is_path and is_there:
        return Logs(meant, lambda: _at(meant), tell)
    agents, troubles = client.list_agents()
    if is_there and not any(agent.node.job == meant for agent in agents):
        return Logs(meant, lambda: _at(meant), tell)
    if is_path and not any(agent.node.job.startswith(meant) for agent in agents):
        return Logs(meant, lambda: _at(meant), tell)
    try:
        found = client.find_job(agents, meant, troubles)
    except UsageError as error:
        raise UsageError(f"{error}; of a run that has ended, name the log folder") from None
    key = keys_of([agent.node for agent in found.agents])[0]
    return Logs(f"job {found.name}", lambda: _of_job(key), tell)


def _at(path: str) -> Found:
    """Of the newest run at a path; ranks are local ones where no events tell others."""
    try:
        chosen = select([path])
    except UsageError:
        if not any(name.startswith("attempt_") for name in _names_in(path)):
            raise
        return Found((NodeLogs(path),), (f"there are no events in {path}, so local ranks are shown",), False)
    nodes = tuple(NodeLogs(os.path.dirname(log.path)) for log in chosen.logs)
    return Found(nodes, (chosen.left_out,) if chosen.left_out else (), True)


def _of_job(job: JobKey) -> Found:
    """Of its nodes as far as their folders can be read here, and a word about each that is elsewhere."""
    present = client.list_agents()[0]
    agents = [agent for agent, key in zip(present, keys_of([one.node for one in present]), strict=True) if key == job]
    if not agents:
        return Found((), (), False)
    view = client.LocalJob(agents).status()
    nodes = [node for node in view.nodes if node.log_dir and _is_readable(node.log_dir)]
    elsewhere = [node for node in view.nodes if node.log_dir and node not in nodes]
    notes = [f"no answer from {', '.join(view.silent[:16])}: where their logs are is not known"] if view.silent else []
    found = [NodeLogs(node.log_dir, node.node, node) for node in nodes]
    return Found((*found, *_gone_before(view, nodes)), tuple(notes), True, tuple(elsewhere), tuple(agents), not view.silent)


def _gone_before(view: JobView, present: Sequence[NodeView]) -> list[NodeLogs]:
    """Nodes that have left the job, and have logged into the same folder as one of the others."""
    files = [node.event_file for node in present if os.path.exists(node.event_file)]
    if not files:
        return []
    parents = sorted({os.path.dirname(node.log_dir) for node in present})
    known = {os.path.realpath(node.log_dir) for node in view.nodes if node.log_dir}
    logs = select([*files, *parents]).logs
    return [NodeLogs(folder) for log in logs if os.path.realpath(folder := os.path.dirname(log.path)) not in known]


def _is_readable(folder: str) -> bool:
    return os.access(folder, os.R_OK | os.X_OK)


def _elsewhere(node: NodeView, why: str) -> str:
    ranks = f" (ranks {ranges(worker.rank for worker in node.workers)})" if node.workers else ""
    return f"the logs of {node.node}{ranks} are on {node.hostname}, in {node.log_dir}, which cannot be read here: {why}"


# --- what ------------------------------------------------------------------------------------------------------------------


class _Source(Value):
    """A file that is read."""

    turn: int
    node: NodeLogs
    tap: Tap

    @property
    def is_passed(self) -> bool:
        """Whether its node has a later attempt, so that nobody writes there any more."""
        return any(attempt.turn > self.turn and attempt.is_told for attempt in self.node.attempts)

    @property
    def place(self) -> tuple[int, int]:
        return self.tap.mark.rank, STREAMS.index(self.tap.mark.stream)


class Logs:
    """The logs of one job. What is to be said about those that cannot be had is told to `tell`."""

    def __init__(self, who: str, find: Callable[[], Found], tell: Callable[[str], None] = report.warn) -> None:
        self._who = who
        self._find = find
        self._tell = tell
        self._found = find()
        self._nodes = list(self._found.nodes)
        self._mirrors: dict[str, NodeLogs | None] = {}  # nodes elsewhere by their folders there; None: it does not send
        self._sources: dict[str, _Source] = {}  # by path, those that are still read
        self._done: set[str] = set()
        self.whole_bytes = 0  # that are to be read, if no more are waited for
        for node in self._nodes:
            node.look()

    def close(self) -> None:
        for source in self._sources.values():
            source.tap.close()
        self._sources.clear()
        for mirror in self._mirrors.values():
            if mirror is not None:
                mirror.close()

    def read_bytes(self) -> int:
        """How many have been read so far; from any thread."""
        return sum(source.tap.read_bytes for source in list(self._sources.values()))

    def path_of(self, mark: Mark) -> str:
        """The file that is read for it."""
        return next(path for path, source in self._sources.items() if source.tap.mark == mark)

    def _have_sent(self, wish: Wish, follow: bool) -> None:
        """By nodes whose folders cannot be read here."""
        for node in self._found.elsewhere:
            if node.log_dir in self._mirrors:
                continue
            from rallypoint.inspection.log_relay import Mirror  # most jobs need none

            self._mirrors[node.log_dir] = None
            try:
                mirror = Mirror(node, self._found.agents, wish, follow)
            except RallypointError as error:
                self._tell(_elsewhere(node, str(error)))
                continue
            self._mirrors[node.log_dir] = mirror
            self._nodes.append(mirror)
            mirror.look()
        self._tell_errors()

    def _tell_errors(self) -> None:
        for node in self._nodes:
            if why := node.take_error():
                self._tell(f"not all logs of {node.name} have come: {why}")

    def passages(self, wish: Wish, follow: bool = False, gather_s: float = LEAST_PAUSE_S) -> Iterator[list[Lane]]:
        """Lanes that are to be merged, one passage after the other; each must be read before the next is asked for.

        RallypointError: there are no such files.
        """
        try:
            for note in self._found.notes:
                self._tell(note)
            self._have_sent(wish, follow)
            self._open(wish)
            self._check(wish, is_sure=not follow)
            self._skip(wish)
            if follow:
                yield from self._follow(wish, gather_s)
            else:
                self.whole_bytes = sum(source.tap.size() for source in self._sources.values())
                for sources in self._by_turn():
                    yield [source.tap.lane(True, source.node.has_ended, len(sources)) for source in sources]
        finally:
            self.close()

    def _by_turn(self) -> list[list[_Source]]:
        turns: dict[int, list[_Source]] = {}
        for source in self._sources.values():
            turns.setdefault(source.turn, []).append(source)
        return [sorted(turns[turn], key=lambda source: source.place) for turn in sorted(turns)]

    def _open(self, wish: Wish) -> None:
        """All files that are there and not known yet; of an attempt that is not told yet the ranks are not known."""
        workers = sum(len(attempt.ranks) for node in self._nodes for attempt in node.attempts)
        limits.as_many_as_allowed(SPARE_FILES + FILES_PER_WORKER * workers)
        for node in self._nodes:
            known = len(node.attempts) if node.has_ended else newest_told(node.attempts)
            for attempt in node.attempts[:known]:
                for local_rank, rank in attempt.ranks.items():
                    self._open_worker(wish, node, attempt, local_rank, rank)

    def _open_worker(self, wish: Wish, node: NodeLogs, attempt: Attempt, local_rank: int, rank: int) -> None:
        for stream in wish.streams if has_rank(wish.ranks, rank) else ():
            path = os.path.join(node.folder, attempt.name, str(local_rank), f"{stream}.log")
            if path not in self._sources and path not in self._done and os.path.exists(path):
                mark = Mark(rank, stream, attempt.number, node.name)
                self._sources[path] = _Source(attempt.turn, node, Tap(path, mark))

    def _check(self, wish: Wish, is_sure: bool) -> None:
        if self._sources:
            return
        attempts = [(node, attempt) for node in self._nodes for attempt in node.attempts]
        if attempts and (is_sure or all(attempt.is_told for _, attempt in attempts)):
            known = (rank for _, attempt in attempts for rank in attempt.ranks.values())
            if trouble := unknown_ranks(wish.ranks, known):
                raise UsageError(trouble)
        if not is_sure:
            return
        if not attempts:
            raise RallypointError(f"{self._who} has no log files that can be read here: no worker was started yet, or none here")
        what = " or ".join(wish.streams)
        raise RallypointError(
            f"{self._who} keeps no log files of {what}: its workers write to the console of their launcher; {HOW_TO_KEEP}"
        )

    def _skip(self, wish: Wish) -> None:
        """What is too old, or not among the last lines."""
        sources = sorted(self._sources.values(), key=lambda source: -source.turn)
        recent = [one.tap for one in sources if wish.since_us is None or one.tap.written_us >= wish.since_us]
        for source in sources:
            if source.tap not in recent:
                source.tap.seek_tail(0)
        left: dict[tuple[int, str], int] = {}
        for tap in recent if wish.tail is not None else ():
            who = (tap.mark.rank, tap.mark.stream)
            wanted = left.get(who, wish.tail or 0)
            left[who] = wanted - tap.seek_tail(wanted, wish.pattern)

    # --- as they come ------------------------------------------------------------------------------------------------------

    def _follow(self, wish: Wish, gather_s: float) -> Iterator[list[Lane]]:
        began_at = looked_at = further_at = spoke_at = time.monotonic()
        pause_s = gather_s
        while True:
            is_over = self._is_over(time.monotonic() - spoke_at)  # asked before it is read: what was written by then is read
            has_news = False
            for sources in self._by_turn():
                ended = [is_over or source.is_passed for source in sources]
                yield [source.tap.lane(end, end, len(sources)) for source, end in zip(sources, ended, strict=True)]
                has_news = has_news or any(source.tap.has_news for source in sources)
                self._retire([source for source, end in zip(sources, ended, strict=True) if end and not source.tap.has_news])
            now = time.monotonic()
            spoke_at = now if has_news else spoke_at
            pause_s = gather_s if has_news else min(2 * pause_s, max(LONGEST_PAUSE_S, gather_s))
            if now - looked_at >= LOOK_AROUND_S or (is_over and not has_news):
                looked_at = now
                is_changed = self._look_around()
                if is_over and not has_news and not is_changed:
                    return
                if is_changed or now - further_at >= self._look_further_every_s():
                    further_at = now
                    self._look_further(wish)
                self._open(wish)
                self._check(wish, is_sure=self._is_late(now - began_at))
            yield []
            time.sleep(pause_s)

    def _look_further_every_s(self) -> float:
        if not self._sources:
            return LOOK_FURTHER_S
        return math.inf if self._found.is_complete else ASK_AGAIN_S

    def _is_late(self, waited_s: float) -> bool:
        """Whether files that are not there yet will not come."""
        is_running = any(attempt.is_told for node in self._nodes for attempt in node.attempts)
        return not self._sources and not self._done and is_running and waited_s >= FILES_WITHIN_S

    def _is_over(self, silent_s: float) -> bool:
        ended = [node.has_ended for node in self._nodes]
        if all(ended):
            return bool(ended) or not self._found.is_alive
        here = [has_ended for node, has_ended in zip(self._nodes, ended, strict=True) if node.is_here]
        return bool(here) and all(here) and silent_s >= GONE_AFTER_S

    def _retire(self, sources: list[_Source]) -> None:
        for path in [path for path, source in self._sources.items() if source in sources]:
            self._sources.pop(path).tap.close()
            self._done.add(path)

    def _look_around(self) -> bool:
        """Whether there is a new attempt, or more is known of one."""
        before = [(node.folder, attempt) for node in self._nodes for attempt in node.attempts]
        for node in self._nodes:
            node.look()
        self._tell_errors()
        return [(node.folder, attempt) for node in self._nodes for attempt in node.attempts] != before

    def _look_further(self, wish: Wish) -> None:
        """For nodes that have joined."""
        known = {os.path.realpath(node.folder) for node in self._nodes}
        self._found = self._find()
        new = [node for node in self._found.nodes if os.path.realpath(node.folder) not in known]
        for node in new:
            node.look()
        self._nodes += new
        self._have_sent(wish, follow=True)


# --- line by line ----------------------------------------------------------------------------------------------------------


def here_s() -> int:
    """How many seconds the clock of this machine is east of Greenwich, now."""
    return time.localtime().tm_gmtoff


def read_lines(logs: Logs, wish: Wish, follow: bool = False, is_collapsed: bool = False) -> Iterator[LogLine | None]:
    """Each line, in order; None when a look has found no more."""
    if is_collapsed:
        return (line_of_group(group) if group is not None else None for group in collapsed(logs, wish, follow))
    return _single_lines(logs, wish, follow)


def _single_lines(logs: Logs, wish: Wish, follow: bool) -> Iterator[LogLine | None]:
    def dress(mark: Mark, records: list[bytes], times: list[bytes]) -> list[list[LogLine]]:
        some = zip(chosen(records, wish), times, strict=True)
        return [log_lines(mark, record, time) if record is not None else [] for record, time in some]

    for lanes in logs.passages(wish, follow):
        for chunk in merge(lanes, dress, here_s(), wish.since_us):
            for lines in chunk:
                yield from lines
        yield None


def collapsed(logs: Logs, wish: Wish, follow: bool = False) -> Iterator[Group | None]:
    """The same, with lines that several ranks say next to each other said once; None when a look has found no more."""

    def dress(_: Mark, records: list[bytes], __: list[bytes]) -> list[list[bytes]]:
        return [record.split(b"\n") if record is not None else [] for record in chosen(records, wish)]

    def lines(lane: Lane) -> tuple[Mark, Iterator[bytes], bytes]:
        found = (line for chunk in merge([lane], dress, here_s(), wish.since_us) for some in chunk for line in some)
        first = list(islice(found, 1))  # by then it is known whether its lines have times
        at = b"" if lane.clock is not None else stamp_of(lane.written_us, Clock(point=b".", digits=6), here_s())
        return lane.mark, chain(first, found), at

    for lanes in logs.passages(wish, follow, GATHER_S):
        yield from collapse([lines(lane) for lane in lanes])
        yield None


def chosen(records: list[bytes], wish: Wish) -> Sequence[bytes | None]:
    """What of each record is asked for, if anything."""
    return records if wish.pattern is None else [matching(record, wish.pattern) for record in records]


def _names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns
