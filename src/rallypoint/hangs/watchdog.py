"""The watch over workers that hang: which of them gives no sign of life any more, what their stacks are, and who is to blame.

The agent's own thread drives it, with no other: it asks when to look next, looks, and is told of a hang once all stacks are
written down and before anybody is stopped. What counts as a hang is decided in `hangs.rules`.

Where other nodes have workers too, a hang here is at first only the reason to declare where all workers stand, which the other
nodes then do as well (`protocol.inquiry`). All hear the same finding. The node whose workers it names has a hang, the others only
something to tell. Where no finding comes in time, each node goes by what it has seen itself.

Programs that use NCCL are asked, besides, how far they have come in which collective (`hangs.nccl`). Its RAS service answers at
once, and so may decide who is to blame. Flight Recorder takes seconds; who hangs is told before that, and ended after it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from shutil import which

from rallypoint.base import defaults
from rallypoint.base.records import Value
from rallypoint.base.text import runs, who_of
from rallypoint.hangs import rules as hangs
from rallypoint.hangs.collectives import Absence, absence, groups_of_dumps, groups_of_ras, told
from rallypoint.hangs.nccl import DUMP_NAME, FlightRecorders, ask_ras
from rallypoint.hangs.pulse import PulseBoard
from rallypoint.hangs.pulse_page import RUNNING
from rallypoint.hangs.rules import HangLimits, Sample, Stillness, Suspect, parse_hang_timeout
from rallypoint.hangs.stacks import (
    PY_SPY,
    SUMMARY_NAME,
    StackDesk,
    brief_lines,
    frames_of,
    rank_ranges,
    spy_on,
    standing,
    write_stacks,
    write_text,
)
from rallypoint.output.log_specs import LogFolder, file_clerk
from rallypoint.processes.activity import ProcessSight, families_of, look_at, read_file, threads_of
from rallypoint.protocol import inquiry as inquiries
from rallypoint.protocol.inquiry import Finding, Inquiry, Statement, Witness, decode_inquiry
from rallypoint.protocol.verdict import MAY_WAIT_ELSEWHERE
from rallypoint.worker_site import in_front

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    Declare = Callable[[int, Statement], bool]  # of a generation; False where nobody hears it
    from rallypoint.hangs.collectives import Group
    from rallypoint.hangs.pulse_page import Pulse
    from rallypoint.hangs.stacks import WorkerStacks

__all__ = ["SILENT", "Hang", "HangLimits", "HangWatch", "Hung", "Watched", "parse_hang_timeout"]

SILENT = "silent"  # the phase of a worker that says nothing of itself
LOOKS_IN_A_LIMIT = 5  # thorough ones, at a worker that is still
STACKS_TIMEOUT_S = 5.0  # for writing them down
DUMPS_PAUSE_S = 0.1
OTHER_DUMPS_S = 0.5  # that those of other nodes may come after ours
RAS_NAME = "nccl_ras.json"
SPIED_MAX, SPY_S = 2, 5.0  # workers that py-spy looks at, and for how long it may look at each


class Family:
    """A worker's process and its descendants, looked at in passing or thoroughly."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._members = [pid]

    def glance(self, now: float) -> Sample:
        """The processes that are known, each by its main thread: two files each."""
        sights = {pid: sight for pid in self._members if (sight := look_at(pid)) is not None and not sight.is_gone}
        io_bytes = [_io_bytes(pid) for pid in sights]
        return Sample(
            at=now,
            members=frozenset((pid, sight.started_at) for pid, sight in sights.items()),
            cpu_s=sum(sight.cpu_s for sight in sights.values()),
            io_bytes=None if None in io_bytes else sum(filter(None, io_bytes)),
            states=frozenset(sight.state for sight in sights.values()),
        )

    def look(self, now: float) -> Sample:
        """All descendants that there are by now, and each thread of them."""
        self._members = families_of([self.pid])[self.pid]
        states, ready = set(), set()
        for pid in self._members:
            for tid in threads_of(pid):
                if (sight := look_at(pid, f"/task/{tid}")) is not None:
                    states.add(sight.state)
                    if sight.state == "R":
                        ready.add(int(tid))
        seen = self.glance(now)
        return seen.replace(states=seen.states | states, ready=frozenset(ready))


def _io_bytes(pid: int) -> int | None:
    """What a process has read and written, pipes and terminals included; None if it is not for us to see."""
    text = read_file(f"/proc/{pid}/io")
    if text is None:
        return None
    numbers = dict(line.split(b": ") for line in text.splitlines() if b": " in line)
    return sum(int(numbers.get(name, b"0")) for name in (b"rchar", b"wchar", b"read_bytes", b"write_bytes"))


class Watched:
    """One worker: what it says of itself, what the kernel shows of it, until when it has time. `look` sees, the rest tells."""

    def __init__(self, local_rank: int, global_rank: int, pid: int, limits: HangLimits, now: float) -> None:
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.pid = pid
        self.is_there = True
        self.is_stopped = False
        self.due_at: float | None = None  # None: it may be silent for as long as it likes
        self.sign_at = now
        self._limits = limits
        self._family = Family(pid)
        self._pulse: Pulse | None = None
        self._stillness: Stillness | None = None
        self._looked_at = now
        self._stopped_at: float | None = None
        self._not_before = now  # signs of life count from here: what was before is not held against it

    @property
    def phase(self) -> str:
        return self._pulse.phase if self._pulse is not None else SILENT

    @property
    def step(self) -> int | None:
        return self._pulse.step if self._pulse is not None else None

    def is_overdue(self, now: float) -> bool:
        return self.is_there and self.due_at is not None and now >= self.due_at

    def is_suspect(self, now: float) -> bool:
        """Whether others that are overdue may wait for it: it is overdue too, or stopped, or half of its time is over."""
        if not self.is_there or self.due_at is None:
            return False
        is_at_work = self.phase in (RUNNING, SILENT)
        return self.is_stopped or now >= self.due_at or (is_at_work and now - self.sign_at >= (self.due_at - self.sign_at) / 2)

    def look(self, pulse: Pulse | None, planned_at: float, now: float) -> None:
        """See how the worker is; `planned_at` is when this was to be done."""
        worker = look_at(self.pid)
        self.is_there = worker is not None and not worker.is_gone
        if worker is None or not self.is_there:
            return
        speaker = worker if pulse is None or pulse.owner == self.pid else look_at(pulse.owner)
        if speaker is None or speaker.is_gone:  # as a program does that a shell runs before another
            pulse, speaker = None, worker
        self._pulse = pulse
        self._make_up_for_lost_time(planned_at, now)
        self._note_stop(worker, speaker, now)
        limit_s = self._judge_signs(pulse, now) if pulse is not None else self._judge_stillness(now)
        ends = [self.sign_at + limit_s] if limit_s is not None else []
        if self._stopped_at is not None:
            ends.append(self._stopped_at + self._limits.running_s)
        self.due_at = min(ends, default=None)

    def excuse(self, now: float) -> None:
        """It may be still up to now; nothing of that is held against it later."""
        self._not_before, self.due_at = now, None
        self._stillness = self._stopped_at = None

    def _make_up_for_lost_time(self, planned_at: float, now: float) -> None:
        self._not_before = max(self._not_before, hangs.regain(self.sign_at, planned_at, now))
        if self._stopped_at is not None:
            self._stopped_at = hangs.regain(self._stopped_at, planned_at, now)

    def _note_stop(self, worker: ProcessSight, speaker: ProcessSight, now: float) -> None:
        states = worker.state + speaker.state
        if "t" in states:  # held by a debugger
            self._not_before = now
        self._stopped_at = (self._stopped_at or now) if "T" in states else None
        self.is_stopped = self._stopped_at is not None

    def _judge_signs(self, pulse: Pulse, now: float) -> float | None:
        self._stillness = None
        self.sign_at = max(pulse.sign_at or pulse.announced_at, self._not_before)
        return hangs.limit_of(pulse, self._limits)

    def _judge_stillness(self, now: float) -> float:
        """Only a worker that looks still is looked at thoroughly: at once, now and then, and before the verdict."""
        seen = self._family.look(now) if self._stillness is None else self._family.glance(now)
        still = hangs.follow(self._stillness, seen)
        limit_s = self._limits.running_s
        look_again_at = min(self._looked_at + limit_s / LOOKS_IN_A_LIMIT, still.since + limit_s)
        if still.since < now and (self._looked_at <= still.since or now >= look_again_at):
            self._looked_at, seen = now, self._family.look(now)
            still = hangs.follow(still, seen)
        self._stillness = still
        self.is_stopped = self.is_stopped or seen.is_stopped
        self.sign_at = max(still.since, self._not_before)
        return limit_s

    def why(self, now: float) -> str:
        """What is wrong with it, in a few words."""
        still_s = now - self.sign_at
        if self.is_stopped:
            return f"it was stopped by a signal (state T) at least {now - (self._stopped_at or self.sign_at):.1f} s ago"
        if self._pulse is None:
            return f"asleep for {still_s:.1f} s, without processor time, input or output (limit {self._limits.running_s:g} s)"
        limit_s = hangs.limit_of(self._pulse, self._limits)
        last = f", its last step was {self.step}" if self.step is not None else ""
        return f"no heartbeat for {still_s:.1f} s in phase {self.phase!r} (limit {limit_s or 0:g} s){last}"

    def suspect(self, stands_at: object, now: float) -> Suspect:
        return Suspect(self.local_rank, self.sign_at, self.is_stopped, self.step, stands_at, self.is_overdue(now))


class Hung(Value):
    """A worker that gives no sign of life."""

    local_rank: int
    global_rank: int
    pid: int
    phase: str
    still_s: float  # since its last sign of life
    step: int | None
    why: str


class Hang(Value):
    """What was found: who hangs, who only waits for them, and what to tell of it."""

    hung: tuple[Hung, ...]
    waiting: tuple[Hung, ...]
    lines: tuple[str, ...]
    summary_file: str = ""  # with all stacks; empty: there is none


class HangWatch:
    """The watch over the workers of one agent, group after group; without limits it only hears what they tell of themselves."""

    def __init__(self, limits: HangLimits | None, local_world_size: int) -> None:
        self._limits = limits
        self._pause_s = hangs.longest_pause(limits) if limits is not None else 0.0
        self._board = PulseBoard(local_world_size)
        self._desk = StackDesk(local_world_size)
        self._recorders = FlightRecorders()
        self._ras_place = ""
        self._counted: tuple[Group, ...] = ()  # by RAS
        self._told: Hang | None = None  # of which only the dumps are awaited, and then the end of those who hang
        self._dumps_until = 0.0
        self._spied: dict[int, str] = {}  # what py-spy has seen, by local rank
        self._spy: threading.Thread | None = None
        self._heading: list[str] = []  # of the file with all stacks
        self._world_size = 0
        self._watched: list[Watched] = []
        self._folder = ""
        self._run_folder: LogFolder | None = None
        self._look_at: float | None = None
        self._verdict_at: float | None = None
        self._has_other_nodes = False
        self._held: Hang | None = None  # until other nodes, which may know better, have had their time
        self._generation = 0
        self._declare: Declare | None = None
        self._heard: deque[tuple[int, bytes]] = deque()
        self._seen: dict[int, Hung] = {}  # how they were when they were asked for their stacks, by local rank
        self._stacks: dict[int, WorkerStacks] = {}
        self._last_progress_at: float | None = None  # of workers that were replaced since

    def page_fd(self) -> int:
        """Of the file in which all workers have their pages."""
        return self._board.fileno()

    def worker_env(self, local_rank: int, given: Mapping[str, str]) -> dict[str, str]:
        """What this worker's environment needs besides what is given; whoever had this rank before is forgotten."""
        self._last_progress_at = self.progress_at()
        self._board.clear(local_rank)
        if self._limits is None:
            return {defaults.ENV_PULSE: self._board.place(local_rank)}
        self._ras_place = given.get(defaults.ENV_NCCL_RAS, "")
        return {
            **self._recorders.env(given),
            defaults.ENV_PULSE: self._board.place(local_rank),
            defaults.ENV_STACKS: self._desk.place(local_rank),
            defaults.ENV_PYTHONPATH: in_front(given.get(defaults.ENV_PYTHONPATH, "")),
        }

    def begin(
        self,
        pids: dict[int, int],
        global_ranks: dict[int, int],
        folder: str,
        has_other_nodes: bool = False,
        run_folder: LogFolder | None = None,
        generation: int = 0,
        declare: Declare | None = None,
        world_size: int = 0,
    ) -> None:
        """Watch this group, which may be part of a larger one; the files with stacks go into `folder`, if there is one.

        Where other nodes have workers, `declare` lets all find out together who hangs, once for each generation.
        """
        if self._limits is None:
            return
        now = time.monotonic()
        ranks = sorted(pids)
        limits = self._limits
        self._watched = [Watched(rank, global_ranks.get(rank, rank), pids[rank], limits, now) for rank in ranks]
        self._folder = folder
        self._run_folder = run_folder
        self._has_other_nodes = has_other_nodes
        self._generation, self._declare = generation, declare if has_other_nodes else None
        self._seen, self._stacks, self._counted, self._told, self._spied = {}, {}, (), None, {}
        self._spy = None
        self._world_size = world_size
        self._recorders.begin(folder)
        self._look_at, self._verdict_at, self._held = now + self._pause_s, None, None

    def end(self) -> None:
        """Watch nobody. What they told of progress and checkpoints can be asked until the next are started."""
        self._watched = []
        self._look_at = self._held = self._told = None

    def hear(self, generation: int, inquiry: bytes) -> None:
        """What all nodes are asked, or have found together; for any thread. The next look takes it in."""
        self._heard.append((generation, inquiry))

    def next_look_at(self) -> float | None:
        return 0.0 if self._heard and self._watched else self._look_at

    def look(self, now: float, excused: Collection[int] = ()) -> Hang | None:
        """See how the workers are, but for local ranks that are excused: those may be still for as long as they are.

        A hang is told once, and ends the watch; its stacks are in their files by then. One of which only other nodes are to
        blame names nobody, and is told once as well.
        """
        inquiry = self._take_inquiry()
        if self._told is not None:
            return self._end_of_dumps(self._told, now)
        if inquiry is not None and inquiry.finding is not None:
            return self._conclude(inquiry.finding, now)
        planned_at = self._look_at
        if self._held is not None:
            return self._give_up_waiting(now)
        if planned_at is None:
            return None
        there = self._look_at_all(planned_at, now, excused)
        if inquiry is not None and not self._seen:
            self._answer(there, now)
            return None
        overdue = sum(one.is_overdue(now) for one in there)
        self._verdict_at = hangs.verdict_time(self._verdict_at, overdue, now)
        if hangs.is_verdict_due(self._verdict_at, overdue, len(there), now):
            return self._judge(there, now)
        ends = [end for one in there if (end := one.due_at) is not None and end > now]
        self._look_at = min([now + self._pause_s, *ends, *([self._verdict_at] if self._verdict_at is not None else [])])
        return None

    def _look_at_all(self, planned_at: float, now: float, excused: Collection[int]) -> list[Watched]:
        for one in self._watched:
            if one.local_rank in excused:
                one.excuse(now)
            else:
                one.look(self._board.read(one.local_rank, now), planned_at, now)
        return [one for one in self._watched if one.is_there and one.local_rank not in excused]

    def _take_inquiry(self) -> Inquiry | None:
        """The latest word of this generation."""
        found = None
        while self._heard:
            generation, data = self._heard.popleft()
            if generation == self._generation and self._declare is not None:
                with suppress(ValueError):
                    found = decode_inquiry(data)
        return found

    def _answer(self, there: list[Watched], now: float) -> None:
        """Other nodes want to know where our workers stand; soon they will have found out who hangs."""
        self._ask_for_stacks(there, now)
        statement = self._statement(there, now)
        self._tell(statement)
        self._write_down((), (), ["a worker hangs, here or on another node, and all were asked where they stand"], self._stacks)
        self._look_at = time.monotonic() + hangs.EXCHANGE_S

    def _ask_for_stacks(self, there: list[Watched], now: float) -> None:
        """Nobody is asked twice: to answer is a sign of life."""
        ranks = {one.local_rank: one.global_rank for one in there}
        self._recorders.ask(ranks.values())
        self._stacks = self._desk.ask({one.local_rank: one.pid for one in there}, ranks)
        self._seen = {one.local_rank: _describe(one, now) for one in there}

    def _statement(self, there: list[Watched], now: float) -> Statement:
        workers = [_witness(one, self._stacks[one.local_rank], self._seen[one.local_rank], now) for one in there]
        stacks = os.path.join(self._folder, SUMMARY_NAME) if self._folder else ""
        statement = Statement("", stacks, *inquiries.grouped(workers))
        never_came = absence(self._counted) or absence(groups_of_dumps(self._recorders.dumps()))
        if never_came is None:
            return statement
        return statement.replace(absent=tuple(runs(never_came.ranks)), absent_why=never_came.why)

    def _ask_ras(self) -> None:
        """How far the workers of all nodes have come; only the first node that notices asks, as all processes have to answer."""
        pids = {process.pid: stacks.rank for stacks in self._stacks.values() for process in stacks.processes}
        answer = ask_ras(self._ras_place)
        self._counted = groups_of_ras(answer.document, pids, self._world_size)
        if self._counted and self._folder:
            keep = partial(write_text, self._run_folder, os.path.join(self._folder, RAS_NAME), answer.text)
            with suppress(OSError):
                file_clerk.do(keep, STACKS_TIMEOUT_S)

    def _tell(self, statement: Statement) -> bool:
        """Whether the others hear it."""
        return self._declare is not None and self._declare(self._generation, statement)

    def _conclude(self, finding: Finding, now: float) -> Hang | None:
        """What all nodes have found, as far as it is for us to act on, or only to tell."""
        self._held = None
        there = [one for one in self._watched if one.is_there and one.local_rank in self._seen]
        mine = [one for one in there if finding.includes(one.global_rank)]
        hung = tuple(self._seen[one.local_rank].replace(why=self._why(one, finding)) for one in mine)
        own = {one.global_rank for one in mine}
        lines = [*_lines_of(hung), *_lines_elsewhere(finding, own)]
        if hung:
            self._look_at = None
            return self._tell_first(self._write_down(hung, (), lines, self._stacks), now)
        for one in self._watched:
            one.excuse(now)
        self._declare, self._verdict_at, self._look_at = None, None, now + self._pause_s
        return self._tell_first(Hang((), (), tuple(lines)), now)

    def _why(self, one: Watched, finding: Finding) -> str:
        where = hangs.shown(frames_of(self._stacks[one.local_rank]))
        place = f", in {where}" if where else ""
        elsewhere = "" if finding.is_certain else f"; it {MAY_WAIT_ELSEWHERE}"
        return f"{self._seen[one.local_rank].why}{place}; {finding.why}{elsewhere}"

    def _give_up_waiting(self, now: float) -> Hang | None:
        """For the word of others, if its time is over."""
        if self._look_at is not None and now < self._look_at:
            return None
        held, self._look_at, self._held = self._held, None, None
        return self._tell_first(held, now) if held is not None else None

    def _tell_first(self, hang: Hang, now: float, is_certain: bool = True) -> Hang | None:
        """What is to be told now: where dumps are still being written, nobody is ended before they are there.

        And nobody is named, if nothing tells the workers apart and they may.
        """
        if not self._recorders.was_asked and not (hang.hung and which(PY_SPY)):
            return hang
        self._told, self._look_at, self._dumps_until = hang, now + DUMPS_PAUSE_S, 0.0
        self._spy_on(hang.hung)
        if not is_certain and self._recorders.was_asked:
            return None
        self._told = hang.replace(lines=())
        return hang.replace(hung=(), waiting=())

    def _end_of_dumps(self, hang: Hang, now: float) -> Hang | None:
        """What they say, and whoever is to be ended; None: they are still awaited."""
        if self._recorders.are_awaited(now) or (self._spy is not None and self._spy.is_alive()):
            self._look_at = now + DUMPS_PAUSE_S
            return None
        if not self._dumps_until and hang.hung and self._has_other_nodes and self._recorders.was_asked:
            self._dumps_until = now + OTHER_DUMPS_S
        if now < self._dumps_until:
            self._look_at = self._dumps_until
            return None
        self._told = None
        self._look_at = None if hang.hung else now + self._pause_s
        dumps = self._recorders.dumps()
        never_came = absence(groups_of_dumps(dumps))
        lines = _lines_of_dumps(never_came, dumps, self._folder)
        if never_came is not None and not self._has_other_nodes:  # they know better than stacks
            named = [one for one in self._seen.values() if one.global_rank in never_came.ranks]
            if named:
                hung = tuple(one.replace(why=f"{one.why}; {never_came.why}") for one in named)
                hang = hang.replace(hung=hung, lines=tuple(_lines_of(hung)) if hang.lines else ())
                self._heading = _lines_of(hung)
        if self._folder and (lines or self._spied):
            self._write_down(hang.hung, hang.waiting, [*self._heading, *lines], self._stacks)
        return hang.replace(lines=(*hang.lines, *lines))

    def _spy_on(self, hung: Sequence[Hung]) -> None:
        """See where these are in native code, beside the agent's work, where py-spy is installed and allowed."""
        program, found = which(PY_SPY), self._spied

        def look(program: str) -> None:
            for one in hung[:SPIED_MAX]:
                if text := spy_on(program, one.pid, SPY_S)[0]:
                    found[one.local_rank] = text

        if program and self._folder and hung:
            self._spy = threading.Thread(target=look, args=(program,), name="rallypoint-py-spy", daemon=True)
            self._spy.start()

    def _judge(self, there: list[Watched], now: float) -> Hang | None:
        """Ask all workers for their stacks, say who is to blame, and write it down; None: not yet, others may know better."""
        self._ask_for_stacks(there, now)
        self._ask_ras()
        statement = self._statement(there, now)
        is_heard = self._tell(statement)
        silent = [one for one in there if one.is_suspect(now)]
        suspects = [one.suspect(standing(self._stacks[one.local_rank]), now) for one in silent]
        is_elsewhere = hangs.may_be_elsewhere(suspects, len(there), self._has_other_nodes)
        alone = inquiries.accuse([statement])
        blamed = {one.local_rank for one in hangs.blame(suspects)}
        if alone.is_certain:
            blamed = {one.local_rank for one in there if alone.includes(one.global_rank)}
        hung = tuple(self._seen[one.local_rank] for one in there if one.local_rank in blamed)
        waiting = tuple(self._seen[one.local_rank] for one in silent if one.local_rank not in blamed)
        lines = _lines_of(hung)
        if waiting:
            lines.append(f"also silent, probably waiting for it: {rank_ranges(one.global_rank for one in waiting)}")
        if is_elsewhere:
            lines.append("nothing tells the workers here apart: all may wait for one of another node")
            hung = tuple(one.replace(why=f"{one.why}, as all workers here, which {MAY_WAIT_ELSEWHERE}") for one in hung)
        lines += _phases_of([one for one in there if one not in silent and one.local_rank not in blamed])
        hang = self._write_down(hung, waiting, lines, self._stacks)
        if is_heard:
            self._look_at, self._held = time.monotonic() + hangs.EXCHANGE_S, hang
            return None
        if not is_elsewhere or self._verdict_at is None:
            self._look_at = None
            return self._tell_first(hang, now, is_certain=alone.is_certain or self._has_other_nodes)
        self._look_at, self._held = self._verdict_at + hangs.OTHER_NODES_S, hang
        return None

    def _write_down(
        self, hung: tuple[Hung, ...], waiting: tuple[Hung, ...], lines: list[str], stacks: dict[int, WorkerStacks]
    ) -> Hang:
        first, self._heading = [one.global_rank for one in hung], lines
        brief = brief_lines(list(stacks.values()), first)
        path, where = "", []
        if self._folder:
            try:
                heading = [*lines, *self._lines_of_collectives()]
                write = partial(write_stacks, self._folder, heading, stacks, first, self._run_folder, self._spied)
                path = file_clerk.do(write, STACKS_TIMEOUT_S)
                where = [f"the stacks of all workers are in {path}"]
            except OSError as error:
                where = [f"the stacks could not be written: {error.strerror}"]
        return Hang(hung, waiting, (*lines, *brief, *where), path)

    def _lines_of_collectives(self) -> list[str]:
        """Who is how far in which group, for the file."""
        counted, recorded = told(self._counted), told(groups_of_dumps(self._recorders.dumps()))
        return [
            *(["", "collectives, as NCCL's RAS service counts them:", *counted] if counted else []),
            *(["", "collectives, as Flight Recorder has those of this node:", *recorded] if recorded else []),
        ]

    def progress_at(self) -> float | None:
        """When any worker last made progress, of this group or an earlier one; None if none ever told of any. For any thread."""
        now = time.monotonic()
        signs = [hangs.progress_of(pulse, self._limits, now) for pulse in self._board.read_all(now)]
        return max([one for one in (*signs, self._last_progress_at) if one is not None], default=None)

    def pulse(self, local_rank: int, now: float) -> Pulse | None:
        """What a worker says of itself now; for any thread."""
        try:
            return self._board.read(local_rank, now)
        except ValueError:  # closed meanwhile
            return None

    def checkpoint_at(self) -> float | None:
        """Since when the work of all workers is safe, of those that ever told of a checkpoint in this group."""
        ends = [pulse.checkpoint_at for pulse in self._board.read_all(time.monotonic())]
        return min([one for one in ends if one is not None], default=None)

    def close(self) -> None:
        self.end()
        self._board.close()
        self._desk.close()
        self._recorders.close()


def _describe(one: Watched, now: float) -> Hung:
    at_work = "busy" if one.phase == SILENT else f"in phase {one.phase!r}, and within its time"
    why = one.why(now) if one.is_suspect(now) else at_work
    return Hung(one.local_rank, one.global_rank, one.pid, one.phase, now - one.sign_at, one.step, why)


def _witness(one: Watched, stacks: WorkerStacks, seen: Hung, now: float) -> Witness:
    speaker, frames = stacks.speaker, frames_of(stacks)
    waits_in = speaker.waits_in if speaker is not None else ""
    return Witness(
        ranks=((one.global_rank, one.global_rank),),
        place=hangs.place_of(frames),
        where=hangs.shown(frames) or waits_in,
        standing=hangs.standing_of(frames) or waits_in,
        step=-1 if one.step is None else one.step,
        phase=one.phase,
        is_stopped=one.is_stopped,
        is_silent=one.is_suspect(now),
        is_overdue=one.is_overdue(now),
        silent_s=round(seen.still_s, 3),
    )


def _lines_of(hung: Iterable[Hung]) -> list[str]:
    return [f"rank {one.global_rank} (local rank {one.local_rank}, process {one.pid}) hangs: {one.why}" for one in hung]


def _lines_elsewhere(finding: Finding, own: Collection[int]) -> list[str]:
    """Of those that other nodes have, and where their stacks are."""
    lines = []
    for one in finding.accused:
        if not any(first <= rank <= last for first, last in one.ranks for rank in own):
            where = f"; its stacks are there in {one.stacks}" if one.stacks else ""
            lines.append(f"{who_of(one.ranks)} (node {one.node}) hangs: {one.what}; {finding.why}{where}")
    return [*lines, *([f"and {finding.unnamed} more"] if finding.unnamed else [])]


def _lines_of_dumps(never_came: Absence | None, dumps: Mapping[int, object], folder: str) -> list[str]:
    if not dumps:
        return []
    where = f"; the dumps are {os.path.join(folder, DUMP_NAME)}*" if folder else ""
    what = f"{who_of(tuple(runs(never_came.ranks)))} {never_came.why}" if never_came else "all ranks here are equally far"
    return [f"Flight Recorder of {who_of(tuple(runs(dumps)))}: {what}{where}"]


def _phases_of(others: list[Watched]) -> list[str]:
    """What those are about that are not overdue: one that is still starting may be the one that all others wait for."""
    ranks: dict[str, list[int]] = {}
    for one in others:
        ranks.setdefault(one.phase, []).append(one.global_rank)
    return [f"in phase {phase!r}, and within their time: {rank_ranges(found)}" for phase, found in ranks.items()]
