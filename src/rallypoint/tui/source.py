"""Where the live screen gets what it shows: from the agents of the job, from files of its logs, and from the GPUs' driver.

All of it may take its time, so none of it is called by the thread that draws.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from rallypoint.base.records import Value
from rallypoint.errors import RallypointError, UsageError
from rallypoint.hardware.gpu_use import GpuMeter
from rallypoint.inspection import client
from rallypoint.inspection.log_ends import END_BYTES, LogEnd, LogFile, LogWish, read_end
from rallypoint.tui import lines, model
from rallypoint.tui.lines import LogPlace, Question
from rallypoint.tui.model import Gpu, Watch

__all__ = ["JobSource", "Tail"]

PATIENCE_S = 1.5  # for a node that does not answer: the screen waits for it at each look
STACKS_S = 60.0


class Tail(Value):
    """The end of a log, or why there is none."""

    title: str
    texts: tuple[str, ...]
    is_note: bool = False  # it is to be read as a whole


class JobSource:
    """One job of this machine. It is looked at by one thread; everything else may be asked by any."""

    def __init__(self, name: str) -> None:
        self._name = name  # as the user has it, until the job has answered
        self._is_known = False
        self._path = ""  # of the agent that answered last
        self._meter: GpuMeter | None = None
        self.here = os.uname().nodename

    def look(self, before: Watch) -> Watch:
        """What is known now."""
        agents, troubles = self._agents()
        try:
            found = self._of_job(agents)
        except UsageError as error:
            if troubles:
                return model.unanswered(before, f"process {'; process '.join(troubles)}")
            return model.missed(before, str(error))
        self._name, self._is_known, self._path = found.name, True, found.agents[0].path
        return model.seen(before, found.status(PATIENCE_S), time.monotonic())

    def _agents(self) -> tuple[list[client.Agent], list[str]]:
        """One of the job's that answers is enough; the others are not asked, because one that is stopped takes long."""
        agents, troubles = client.list_agents([self._path]) if self._path else ([], [])
        return (agents, troubles) if agents else client.list_agents()

    def _of_job(self, agents: list[client.Agent]) -> client.LocalJob:
        """Once it is known which job is meant, none whose name only begins like its."""
        own = [agent for agent in agents if agent.node.job == self._name] if self._is_known else agents
        return client.find_job(own, self._name)

    def gpus(self) -> Mapping[int, Gpu]:
        if self._meter is None:
            self._meter = GpuMeter()
        return self._meter.read()

    def tail(self, place: LogPlace, choice: int, most: int) -> Tail:
        """Of the log that was written last, or of the next one if `choice` is odd."""
        try:
            end = read_end([LogFile(path) for path in place.files], choice, END_BYTES) or self._ask_for_end(place, choice)
        except RallypointError as error:
            return Tail(place.who, (f"{place.otherwise}, and its node was asked in vain: {error}",), is_note=True)
        if end is None or end.error:
            return Tail(place.who, (end.error if end is not None else place.otherwise,), is_note=True)
        title = lines.log_title(place, end.path, end.size, end.written_s)
        return Tail(title, tuple(lines.plain_lines(end.text, most)))

    def _ask_for_end(self, place: LogPlace, choice: int) -> LogEnd | None:
        """Of the node, where the files are on another host and not on a disk that is shared."""
        if not place.node_id:
            return None
        return self._of_job(self._agents()[0]).log_end(place.node_id, LogWish(place.rank, choice=choice))

    def ask(self, question: Question) -> str:
        """Have the job do something; RallypointError: why it does not."""
        job = self._of_job(self._agents()[0])
        match question.what:
            case "drain":
                return job.drain(question.node, question.is_forced)
            case "restart":
                return job.restart()
        return job.stop()

    def stacks(self, words: Sequence[str]) -> str:
        """What ``rallypoint stacks`` prints for these words, from a process of its own that can be left alone."""
        command = [sys.executable, "-m", "rallypoint", "stacks", *words]
        try:
            done = subprocess.run(
                command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=STACKS_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RallypointError(f"the stacks could not be had: {error}") from error
        return done.stdout + done.stderr
