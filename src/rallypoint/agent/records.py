"""What an agent leaves on record about its run: events and metrics, under the names that dashboards for torchrun know.

Beyond those it knows how its run stands now, for other threads to read, and its story so far, for its event file. Every change of
phase is put down with its reason and with how long the last one took, on this node's own clock, so that the seconds add up to the
time of the whole run. `docs/events.md` describes the events and their fields. They go to the run's folder, which is told to the
user when it has something for them, and removed when it is empty.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

from rallypoint import events
from rallypoint.agent.workers import RunResult, WorkerGroup, WorkerSpec, _get_entrypoint_name
from rallypoint.base import defaults, report
from rallypoint.base.json_text import to_json
from rallypoint.base.text import runs, who_of
from rallypoint.events import FILE, Event, EventSource, is_recorded, record
from rallypoint.health.status import AgentStatus, StatusBoard
from rallypoint.metrics import put_metric
from rallypoint.output.log_specs import file_clerk
from rallypoint.processes import warden_client
from rallypoint.protocol import agent_machine
from rallypoint.story import event_file, phases
from rallypoint.story.phases import DONE, RUNNING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    from rallypoint.agent.capabilities import NoFolders
    from rallypoint.failures.process_failure import ProcessFailure
    from rallypoint.notices.notifier import Notifier
    from rallypoint.output.log_specs import DefaultLogsSpecs
    from rallypoint.protocol.session import LastWord
    from rallypoint.protocol.verdict import Verdict
    from rallypoint.timers.file_timer import FileTimerRequest

    Folders: TypeAlias = DefaultLogsSpecs | NoFolders
    Outcome: TypeAlias = Literal["succeeded", "failed", "stopped"]

__all__ = ["RunRecord", "describe", "timer_event"]

REMEMBERED = 32  # restarts, for whoever asks how the run went
REMEMBERED_PHASES = 200
CLEARING_TIMEOUT_S = 2.0  # for a folder that may be on a disk which does not answer


def _get_fq_hostname() -> str:
    """The host's name as it knows it itself: a look-up in the network could block for many seconds."""
    return os.uname().nodename


def timer_event(described: Event, hostname: str, name: str, request: FileTimerRequest | None) -> Event:
    """What the file timers did, added to an event that describes the agent."""
    facts: dict[str, str] = {"watchdog_event": name}
    if request is not None:
        facts["worker_pid"] = str(request.worker_pid)
        facts["scope_id"] = str(request.scope_id)
        facts["expiration_time"] = str(request.expiration_time)
        facts["signal"] = str(int(request.signal))
    metadata = {**described.metadata, "hostname": hostname, "metadata": to_json(facts)}
    del metadata["duration_ms"]
    return Event(name, EventSource.AGENT, metadata=metadata)


def describe(result: RunResult, has_other_nodes: bool = False) -> str:
    """One line on the first failure, for the line that says what is done about it.

    Among several nodes that is the first that does not look like a victim's, and one that does is told as that.
    """
    if not result.failures:
        return f"the workers are {result.state.name}"
    from rallypoint.failures.process_failure import ChildFailedError

    likely, doubt = _likely_causes(result.failures) if has_other_nodes else (result.failures, "")
    rank, failure = ChildFailedError("", likely).get_first_failure()
    alike = [one for one in result.failures if result.failures[one].kind == failure.kind]
    others = len(result.failures) - len(alike)
    who = f"rank {rank} (pid {failure.pid})" if len(alike) == 1 else who_of(runs(alike))
    more = f" and {others} more" if others else ""
    how = " the same way" if len(alike) > 1 and not others else ""
    return f"{who}{more} failed{how}{doubt}: {failure.message}"


def _likely_causes(failures: dict[int, ProcessFailure]) -> tuple[dict[int, ProcessFailure], str]:
    """Those that do not look like victims; if all do, all, and what is to be said of it."""
    from rallypoint.protocol.verdict import PROBABLE_VICTIM, is_echo

    own = {rank: one for rank, one in failures.items() if not is_echo(one.message)}
    return (own, "") if own else (failures, PROBABLE_VICTIM)


class RunRecord:
    """Where what an agent puts on record goes: the run's own file and board, the sink that the user has chosen, the metrics.

    It is kept by the agent's own thread; only the board is read by others.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self.attempt_folder = ""  # where the logs of the present workers are; empty where there are none
        self._told_dir = ""
        self.run_folder = ""
        self.history: deque[tuple[float, str, str]] = deque(maxlen=REMEMBERED)  # when, what and why, for whoever asks
        self.past_phases: deque[tuple[str, float, float, int, float | None]] = deque(maxlen=REMEMBERED_PHASES)
        # Each with its beginning and its end, its generation, and if work was lost, how much was kept.
        self.checkpoint_at: Callable[[], float | None] = lambda: None  # when the workers last had a complete checkpoint
        self.notifier: Notifier | None = None  # tells others, where that is asked for
        self._trouble = ("", "")  # what has ended the last generation, as far as we know by ourselves
        self._began_at = warden_client.launched_at() or time.monotonic()
        self.file = event_file.current = event_file.EventFile()
        self.board = StatusBoard(
            AgentStatus(
                run_id=spec.rdzv_handler.get_run_id(),
                role=spec.role,
                hostname=os.uname().nodename,
                began_at=self._began_at,
                ledger=phases.open_ledger(self._began_at),
                max_restarts=spec.max_restarts,
            )
        )

    def note(self, name: str, **facts: object) -> None:
        """Put down something that happened just now."""
        self._note_at(time.monotonic(), name, facts)

    def _note_at(self, at: float, name: str, facts: dict[str, object]) -> None:
        """With the seconds since the run began."""
        metadata = {"t": self._since_beginning(at), **facts}
        event = Event(f"rallypoint.{name}", EventSource.AGENT, metadata=metadata)  # type: ignore[arg-type]
        if self.notifier is not None and name != "notice":
            event.timestamp = int(time.time() * 1000)
            for notice in self.notifier.hear(event):  # before what it tells of: the end of the run is the last event
                self._note_at(at, "notice", notice)
        if self.has_sink and self._spec.event_log_handler != FILE:
            events.record(event, self._spec.event_log_handler)  # not by the name that is put in the place of torch's
        self.file.add(event)

    @property
    def has_sink(self) -> bool:
        """Whether events go anywhere but to the run's file."""
        return is_recorded(self._spec.event_log_handler)

    def send(self, *events: Event) -> None:
        """To the run's own file, and to the sink."""
        if self._spec.event_log_handler != FILE:
            self.send_to_sink(*events)
        self.file.add(*events)

    def send_to_sink(self, *events: Event) -> None:
        for event in events if self.has_sink else ():
            record(event, self._spec.event_log_handler)

    def put(self, name: str, value: int) -> None:
        """A metric of this role."""
        put_metric(f"workers.{self._spec.role}.{name}", value)

    def began(self, settings: dict[str, object]) -> None:
        from rallypoint import __version__

        spec, status = self._spec, self.board.status
        self.note(
            "run.started",
            schema=defaults.EVENT_SCHEMA,
            run_id=status.run_id,
            hostname=status.hostname,
            pid=os.getpid(),
            version=__version__,
            role=spec.role,
            entry_point=_get_entrypoint_name(spec.entrypoint, spec.args),
            local_world_size=spec.local_world_size,
            max_restarts=spec.max_restarts,
            rdzv_backend=spec.rdzv_handler.get_backend(),
            settings=settings,
        )

    def entered(self, state: agent_machine.State, action: agent_machine.Action, restarts: int) -> None:
        """The agent is in this state now, having spent so many restarts, and is about to act."""
        report.debug(f"{type(state).__name__}: {action.why}")
        self._change_phase(state, action.why)
        if isinstance(action, agent_machine.Restart):
            self.history.append((time.monotonic(), "restart", action.why))
            self._trouble = (self._trouble[0], action.why)
            self.note("restart", why=action.why, restarts=restarts + action.restarts_spent, delay_s=action.delay_s)

    def _change_phase(self, state: agent_machine.State, why: str) -> None:
        before, phase, now = self.board.status.ledger, phases.phase_of(state), time.monotonic()
        if phase == before.phase:
            return
        kept_until = None if phases.keeps_work(state) else self.checkpoint_at() or before.since
        ledger = phases.enter(before, phase, now, kept_until)
        lasted_s = _rounded(now - before.since)
        facts: dict[str, object] = {"phase": phase, "previous": before.phase, "lasted_s": lasted_s, "why": why}
        kept_s = None
        if before.phase == RUNNING and kept_until is not None:
            kept_s = facts["kept_s"] = _rounded(ledger.seconds[RUNNING] - before.seconds[RUNNING])
        self.past_phases.append((before.phase, before.since, now, self.board.status.generation, kept_s))
        self.board.change(ledger=ledger, why=why)
        self._note_at(now, "phase", facts)

    def next_generation(self, of_job: int) -> int:
        """The number of the generation that is about to start; where the job counts none (0), we do."""
        return of_job or self.board.status.generation + 1

    def formed(self, group: WorkerGroup, generation: int, restarts: int, formed_after: tuple[str, str] | None = None) -> None:
        """All workers of a generation have been started here; after what, if the job knows that better than we do."""
        after, why = self._trouble if formed_after is None else formed_after
        self._trouble = ("", "")
        ranks = tuple(worker.global_rank for worker in group.workers)
        pids = tuple(worker.id if isinstance(worker.id, int) else str(worker.id) for worker in group.workers)
        shared: dict[str, object] = {
            "generation": self.next_generation(generation),
            "group_rank": group.group_rank,
            "group_world_size": group.group_world_size,
            "world_size": group.workers[0].world_size if group.workers else 0,
            "restarts": restarts,
        }
        self.board.change(ranks=ranks, pids=pids, **shared)
        master = {"master_addr": group.master_addr, "master_port": group.master_port}
        ours = {"ranks": list(ranks), "pids": list(pids), "folder": self.attempt_folder}
        self.note("generation", **shared, after=after, why=why, **ours, **master)

    def failed(self, result: RunResult) -> None:
        status = self.board.status
        self.board.count("failed_workers", len(result.failures))
        has_hung = any(failure.hung for failure in result.failures.values())
        self._trouble = ("hang" if has_hung else "failure", "")
        for rank, failure in sorted(result.failures.items()):
            self.note(
                "worker.failed",
                generation=status.generation,
                rank=rank,
                local_rank=failure.local_rank,
                pid=failure.pid,
                exitcode=failure.exitcode,
                message=failure.message,
                place=failure.place,
                hung=failure.hung,
                log_file=failure.log_file,
                ago_s=_rounded(max(0.0, time.time() - _ended_at(failure))),
            )

    def ended(self, how: Outcome, why: str, last_word: LastWord | None = None, verdict: Verdict | None = None) -> None:
        """The run of this agent is over; with what the job knows of its end, and of who tells the world."""
        now, succeeded = time.monotonic(), how == "succeeded"
        ledger = phases.enter(self.board.status.ledger, DONE, now)
        self.board.change(ledger=ledger, why=why)
        seconds = {phase: _rounded(spent) for phase, spent in ledger.seconds.items()}
        wall_s = self._since_beginning(now)
        facts: dict[str, object] = {"succeeded": succeeded, "outcome": how, "why": why, "seconds": seconds, "wall_s": wall_s}
        if last_word is not None:
            facts["tells"] = last_word.tells
            facts["outcome"] = "left" if last_word.goes_on and not succeeded else how
        if verdict is not None:
            facts.update(_told(verdict))
        self._note_at(now, "run.ended", facts)

    def _since_beginning(self, now: float) -> float:
        return _rounded(now - self._began_at)

    # --- the run's folder --------------------------------------------------------------------------------------------------

    def use_folders(self, folders: Folders) -> None:
        """The run has a folder now, and a new group of workers."""
        self.run_folder = folders.run_log_dir
        self.attempt_folder = folders.attempt_dir
        if folders.keeps_output:
            self._tell(folders)
        if folders.run_log_dir:
            self.file.place(os.path.join(folders.run_log_dir, defaults.EVENT_FILE), folders.run_folder)
        folders.link()

    def keep_story(self, folders: Folders) -> None:
        """A run that failed before its first workers has no folder yet; where the user has named one for logs, it gets it."""
        if self.file.path or folders.is_temporary:
            return
        try:
            file_clerk.do(lambda: folders.make_run_folder(self.board.status.run_id), CLEARING_TIMEOUT_S)
        except OSError as error:
            report.debug(f"the events of this run could not be kept: {error}")  # what ended it says why
        else:
            self.use_folders(folders)

    def close(self, folders: Folders) -> None:
        """Leave no empty folder behind, and say where the rest is."""
        if not folders.run_log_dir or not self.file.settle(CLEARING_TIMEOUT_S):
            return
        try:
            is_gone = file_clerk.do(folders.discard_if_empty, CLEARING_TIMEOUT_S)
        except TimeoutError as error:
            report.warn(f"{folders.run_log_dir} is left as it is: {error.strerror}")
            return
        if is_gone:
            self.file.leave()
        else:
            self._tell(folders)

    def _tell(self, folders: Folders) -> None:
        if folders.run_log_dir != self._told_dir:
            self._told_dir = folders.run_log_dir
            report.info(f"logs are in {folders.run_log_dir}")


def _ended_at(failure: ProcessFailure) -> float:
    """When the failure ended the worker; of one that was ended for it that is later, and has a record of its own."""
    return failure.ended_at if failure.ended_on_purpose and failure.ended_at is not None else failure.failed_at


def _told(verdict: Verdict) -> dict[str, object]:
    """The verdict on the job, for whoever reads events."""
    from rallypoint.protocol.verdict import describe as in_a_line

    one = verdict.cause
    names = ("rank", "local_rank", "host", "pid", "exitcode", "message", "place", "log_file", "hung")
    cause = None if one is None else {name: getattr(one, name) for name in names}
    return {"verdict": in_a_line(verdict), "cause": cause, "lost": list(verdict.lost), "victims": verdict.victim_count}


def _rounded(seconds: float) -> float:
    """Microseconds are enough, and can be read."""
    return round(seconds, 6)
