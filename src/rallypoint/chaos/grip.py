"""The agents of one job on this machine, and their processes, each held by a file descriptor before anything is done to it.

Which processes belong to the job is what its agents say, over sockets that only the same user can have made, and what the
kernel says: a worker descends from its agent. A process id is looked at only while a descriptor of that very process is open
and it has not ended; so a number that has become a stranger's is never signalled.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from rallypoint.base.json_text import from_json
from rallypoint.base.records import Value
from rallypoint.base.text import many, plural, ranges
from rallypoint.chaos.faults import AGENT, CUT, KILL, RANK, WARDEN, Fault
from rallypoint.chaos.holds import signal_all, why_no_cut
from rallypoint.chaos.outcome import End
from rallypoint.chaos.scene import Scene
from rallypoint.errors import RallypointError, UsageError
from rallypoint.inspection import client
from rallypoint.inspection.client import Agent, LocalJob
from rallypoint.inspection.view import JobView, NodeView
from rallypoint.processes import activity, kernel
from rallypoint.story import event_records

__all__ = ["GoneError", "Grip", "Seized"]

LOOK_S = 1.0  # for agents that answer within milliseconds, unless they are stopped
FIRST_LOOK_S = 10.0
RELIST_S = 2.0
SURVEY_S = 2.0
GENERATIONS_MAX = 64  # of processes, between an agent and one that descends from it
CODE_WITHIN_S = 1.0
EVENTS_BYTES = 256 * 1024  # at the end of a file of them
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("=QQ12i")  # its first version: mask, cgroup, eleven ids, and the exit code
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


class GoneError(RallypointError):
    """Whoever was to be hurt is not there any more, and may be back."""


class Seized(Value):
    """Processes, by their descriptors, which are the holder's to close, and in words."""

    pidfds: tuple[int, ...]
    pids: tuple[int, ...]
    text: str

    def close(self) -> None:
        for fd in self.pidfds:
            os.close(fd)


class _Member:
    """An agent of the job."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.pid = agent, agent.pid
        self.pidfd = os.pidfd_open(agent.pid)
        self.has_answered = False  # when all were asked last
        self.is_quiet = False  # as long as it is stopped, it is not asked
        self.may_end = False  # because of what was done to it


class Grip:
    """The agents of the one job that is meant; UsageError: there is none, or more than one."""

    def __init__(self, name: str) -> None:
        agents, troubles = client.list_agents()
        job = client.find_job(agents, name, troubles)
        self.name = job.name
        self._members: dict[int, _Member] = {}
        self._ends: list[End] = []
        self._relist_at = 0.0
        self._store = ""
        if strangers := [agent.node.pid for agent in job.agents if agent.pid != agent.node.pid]:
            where = "start chaos where it runs, as in its container"
            raise UsageError(f"the agent {strangers[0]} is in another PID namespace; {where}")
        try:
            for agent in job.agents:
                self._members[agent.pid] = _Member(agent)
            seen = self.look(FIRST_LOOK_S)
        except ProcessLookupError:
            seen = []
        if not seen:
            self.close()
            raise UsageError(f"{self.name} has just ended, or does not answer any more")

    def close(self) -> None:
        for member in self._members.values():
            os.close(member.pidfd)
        self._members.clear()

    # --- how it stands ---------------------------------------------------------------------------------------------------------

    def filenos(self) -> list[int]:
        """Readable when an agent has ended."""
        return [member.pidfd for member in self._members.values()]

    def look(self, patience_s: float = LOOK_S) -> list[NodeView]:
        """What the agents here say of themselves; those that are stopped, or have ended, say nothing."""
        self._bury()
        now = time.monotonic()
        asked = [member.agent.path for member in self._members.values() if not member.is_quiet]
        agents, _ = client.list_agents(asked, patience_s)
        answers = {agent.pid: agent for agent in agents}
        for member in self._members.values():
            member.has_answered = member.pid in answers and not member.is_quiet
            member.agent = answers.get(member.pid, member.agent)
            self._store = member.agent.node.store or self._store
        if now >= self._relist_at:
            self._relist_at = now + RELIST_S
            self._adopt()
        return [agent.node for agent in self._agents()]

    def _agents(self) -> list[Agent]:
        return [member.agent for member in self._members.values() if member.has_answered]

    def _adopt(self) -> None:
        """Agents that have joined since; one is ours to ask only once it has answered while we held it."""
        if not self._store:
            return
        known = {member.agent.path for member in self._members.values()}
        for agent in client.list_agents(patience_s=LOOK_S)[0]:
            is_ours = agent.node.job == self.name and agent.node.store == self._store and agent.pid == agent.node.pid
            if is_ours and agent.path not in known and agent.pid not in self._members:
                with suppress(ProcessLookupError):
                    self._members[agent.pid] = _Member(agent)

    def _bury(self) -> None:
        for member in list(self._members.values()):
            if _has_ended(member.pidfd):
                if not member.may_end:
                    self._ends.append(_end_of(member))
                os.close(self._members.pop(member.pid).pidfd)

    def end(self) -> End | None:
        """How the job ended; None: it goes on, or so it seems from here."""
        if self._members:
            return None
        bad = [end for end in self._ends if not end.is_good]
        return (bad or self._ends or [End("no agent of the job is left on this machine", is_good=True)])[0]

    def first_scene(self) -> Scene:
        """With more patience: what is said of it is the last word on what was asked for."""
        return self.scene((), self.cannot(), FIRST_LOOK_S)

    def scene(self, held: Sequence[Fault], cannot: Sequence[tuple[str, str]], patience_s: float = SURVEY_S) -> Scene:
        """The whole job, its nodes elsewhere too."""
        self.look(patience_s)
        agents = self._agents()
        job = LocalJob(agents).status(patience_s) if agents else JobView(self.name, ())
        here = tuple((agent.node.hostname, agent.node.pid) for agent in agents)
        return Scene(job, here, tuple(cannot), tuple(held))

    def cannot(self) -> list[tuple[str, str]]:
        """The faults that this machine does not allow, and why."""
        member = next(iter(self._members.values()))
        why = why_no_cut((member.pidfd, member.pid))
        return [(CUT, why)] if why else []

    # --- doing something to it -------------------------------------------------------------------------------------------------

    def kill(self, fault: Fault, node: NodeView, is_end: bool) -> str:
        """SIGKILL to all that are meant; what was done. With `is_end` that is known to end the job."""
        seized = self.seize(fault, node)
        self._members[node.pid].may_end |= fault.takes_node and not is_end
        reached = signal_all(seized.pidfds, signal.SIGKILL)
        seized.close()
        if not reached:
            raise GoneError(f"{seized.text} had ended already")
        return f"SIGKILL to {seized.text}"

    def preempt(self, fault: Fault, node: NodeView, is_forced: bool, is_end: bool) -> str:
        """The notice of `rallypoint drain`; what the job says to it."""
        agents = [member.agent for member in self._members.values() if not member.is_quiet]
        done = LocalJob(agents).drain(node.id or node.node, is_forced, fault.at_once)
        self._members[node.pid].may_end |= not is_end
        return done

    def set_quiet(self, node: NodeView, is_quiet: bool) -> None:
        """Whether the agent of this node is stopped, and answers nobody."""
        if node.pid in self._members:
            self._members[node.pid].is_quiet = is_quiet

    def seize(self, fault: Fault, node: NodeView) -> Seized:
        """The processes that a fault is for. GoneError: they are not there any more, or not part of the job."""
        member = self._members.get(node.pid)
        if member is None:
            raise GoneError(f"the agent of node {node.node_rank} has ended")
        if fault.what == RANK:
            return _seize_rank(fault, node, member)
        wardens = _wardens(member.pid)
        if fault.what == AGENT:
            return _seized([member.pid], member, f"agent {member.pid}")
        if fault.what == WARDEN:
            worker = next((worker.pid for worker in node.workers), 0)
            pids = [pid for pid in wardens if _descends(worker, pid)]
            return _seized(pids, member, f"warden {', '.join(map(str, pids))}")
        labels = [f"agent {member.pid}"]
        labels += [f"{plural(len(wardens), 'warden')} {', '.join(map(str, wardens))}"] if wardens else []
        if fault.kind == CUT:
            return _seized([member.pid, *wardens], member, " and ".join(labels))
        below = [pid for family in activity.families_of(wardens).values() for pid in family]
        labels += (
            [f"{plural(len(node.workers), 'rank')} {ranges(worker.rank for worker in node.workers)}"] if node.workers else []
        )
        return _seized([member.pid, *below], member, f"{many(len(below) + 1, 'process', 'processes')}: {', '.join(labels)}")


def _seize_rank(fault: Fault, node: NodeView, member: _Member) -> Seized:
    pid = next(worker.pid for worker in node.workers if worker.rank == int(fault.whom))
    family = [pid] if fault.kind == KILL else activity.families_of([pid])[pid]
    more = f" and {many(len(family) - 1, 'process', 'processes')} below it" if len(family) > 1 else ""
    return _seized(family, member, f"process {pid}{more}")


# --- processes -------------------------------------------------------------------------------------------------------------


def _seized(pids: Sequence[int], member: _Member, text: str) -> Seized:
    """Those that are there and descend from the agent, or are it; the first has to be."""
    held: dict[int, int] = {}
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        if _descends(pid, member.pid) and not _has_ended(fd) and not _has_ended(member.pidfd):
            held[pid] = fd
        else:
            os.close(fd)
    found = Seized(tuple(held.values()), tuple(held), text)
    if not pids or pids[0] not in held:
        found.close()
        raise GoneError(f"{text} has ended, or is none of agent {member.pid}'s")
    return found


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _descends(pid: int, ancestor: int) -> bool:
    for _ in range(GENERATIONS_MAX):
        if pid == ancestor:
            return True
        sight = activity.look_at(pid)
        if sight is None or sight.parent <= 1:
            return False
        pid = sight.parent
    return False


def _wardens(agent: int) -> list[int]:
    """Those of an agent's children that are its wardens: an agent may be part of a larger program, with children of its own."""
    parents = kernel.parents()
    name = f"{kernel.WARDEN_NAME}\n".encode()
    return sorted(pid for pid, parent in parents.items() if parent == agent and activity.read_file(f"/proc/{pid}/comm") == name)


# --- how an agent ended ----------------------------------------------------------------------------------------------------


def _end_of(member: _Member) -> End:
    code, why = _exit_code(member.pidfd), _last_words(member.agent.node.event_file)
    succeeded = code == 0 if code is not None else why == ("", True)
    if succeeded:
        return End("the job has finished", is_good=True, exit_code=code)
    how = "" if code is None else f" with exit code {code}" if code >= 0 else f" by signal {-code}"
    return End(f"the job has ended{how}{f': {why[0]}' if why[0] else ''}", exit_code=code)


def _exit_code(pidfd: int) -> int | None:
    """Of a process that has ended, once its parent has taken notice; kernels before 6.15 do not tell it to others."""
    ends_at = time.monotonic() + CODE_WITHIN_S
    while time.monotonic() < ends_at:
        found = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0, *[0] * 12))
        try:
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, found)
        except OSError:
            return None
        mask, *_, status = _PIDFD_INFO.unpack(found)
        if mask & _PIDFD_INFO_EXIT:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def _last_words(event_file: str) -> tuple[str, bool]:
    """Why the run of an agent ended, as it has told it in its file, and whether it was a success."""
    for line in reversed(_last_lines(event_file)):
        with suppress(ValueError):
            told = event_records.read_told(from_json(line))
            if told.name == event_records.ENDED:
                is_good = event_records.truth(told, "succeeded")
                return "" if is_good else event_records.words(told, "why"), is_good
    return "", False


def _last_lines(path: str) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - EVENTS_BYTES))
            return file.read().splitlines()
    except OSError:
        return []
