"""An agent as whoever asks sees it: gathered from its records and from the kernel at that moment, on any thread."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable

from rallypoint import __version__
from rallypoint.agent.capabilities import NoFolders
from rallypoint.agent.records import RunRecord
from rallypoint.agent.worker_monitor import WorkerMonitor
from rallypoint.agent.workers import WorkerSpec
from rallypoint.errors import RallypointError
from rallypoint.inspection.view import Happening, JobView, NodeView, WorkerView, job_of
from rallypoint.output.log_specs import DefaultLogsSpecs
from rallypoint.processes.activity import look_at, read_file
from rallypoint.story.phases import STARTING, WAITING, totals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.agent.peers import NoJob
    from rallypoint.inspection.desk import Desk
    from rallypoint.inspection.log_ends import FindLog, LogEnd, LogFile
    from rallypoint.protocol.pace import Pace
    from rallypoint.rendezvous.coordinated import CoordinatedHandler
    from rallypoint.web.document import Span
    from rallypoint.web.site import Site

__all__ = ["describe_node", "log_finder", "open_site"]

COMMAND_CHARACTERS = 1000
GONE = "gone"

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "X": "ended",
    "I": "idle",
}


def describe_node(record: RunRecord, spec: WorkerSpec, monitor: WorkerMonitor, job: CoordinatedHandler | NoJob) -> NodeView:
    """The agent of this record, as it is now."""
    status, now = record.board.status, time.monotonic()
    paces, slowness = {one.rank: one for one in monitor.paces()}, monitor.slowness()
    workers = [
        _describe_worker(rank, local_rank, pid, monitor, paces.get(rank), slowness.workers.get(rank), now)
        for local_rank, (rank, pid) in enumerate(zip(status.ranks, status.pids, strict=True))
        if isinstance(pid, int)
    ]
    if status.ledger.phase in (STARTING, WAITING):  # these are of the last attempt
        workers = [worker for worker in workers if worker.state != GONE]
    return NodeView(
        job=status.run_id,
        node=getattr(spec.rdzv_handler, "name", "") or status.hostname,
        hostname=status.hostname,
        pid=os.getpid(),
        version=__version__,
        command=_command(spec),
        role=status.role,
        backend=spec.rdzv_handler.get_backend(),
        hosts_store=job.hosts_store(),
        address=job.own_address(),
        store=job.store(),
        phase=status.ledger.phase,
        phase_s=round(now - status.ledger.since, 3),
        why=status.why,
        uptime_s=round(now - status.began_at, 3),
        generation=status.generation,
        slowness=None if slowness.node is None else round(slowness.node, 3),
        node_rank=status.group_rank,
        nodes=status.group_world_size,
        min_nodes=job.min_nodes(),
        world_size=status.world_size,
        restarts=status.restarts,
        max_restarts=status.max_restarts,
        failed_workers=status.failed_workers,
        hung_workers=status.hung_workers,
        seconds={phase: round(seconds, 3) for phase, seconds in totals(status.ledger, now).items()},
        log_dir=record.run_folder,
        attempt_dir=record.attempt_folder,
        event_file=record.file.path,
        workers=tuple(workers),
        history=tuple(Happening(round(now - at, 3), what, why) for at, what, why in list(record.history)),
    )


def _command(spec: WorkerSpec) -> str:
    """What the workers run, as a user would type it; its arguments as far as they are text."""
    entry, args = spec.entrypoint, [arg for arg in spec.args if isinstance(arg, str)]
    if not isinstance(entry, str):
        return spec.get_entrypoint_name()
    name = os.path.basename(entry)
    if name.startswith("python"):
        args = [arg for arg in args if arg != "-u"]  # which we have added
    return " ".join([name, *args])[:COMMAND_CHARACTERS]


def _describe_worker(
    rank: int, local_rank: int, pid: int, monitor: WorkerMonitor, pace: Pace | None, slowness: float | None, now: float
) -> WorkerView:
    sight, pulse = look_at(pid), monitor.pulse(local_rank, now)
    sign_at = pulse.sign_at if pulse is not None else None
    return WorkerView(
        rank=rank,
        local_rank=local_rank,
        pid=pid,
        state=GONE if sight is None else STATES.get(sight.state, sight.state),
        doing=pulse.phase if pulse is not None else "",
        step=pulse.step if pulse is not None else None,
        silent_s=None if sign_at is None else round(now - sign_at, 3),
        step_s=None if pace is None else round(pace.step_s, 6),
        steps=pace.steps if pace is not None else 0,
        busy=None if pace is None or pace.busy is None else round(pace.busy, 3),
        slowness=None if slowness is None else round(slowness, 3),
        cpu_s=None if sight is None else sight.cpu_s,
        memory_bytes=_memory(pid),
    )


def _memory(pid: int) -> int | None:
    """What it has in memory, shared pages included."""
    pages = (read_file(f"/proc/{pid}/statm") or b"").split()
    return int(pages[1]) * resource.getpagesize() if len(pages) > 1 else None


def log_finder(record: RunRecord, folders: DefaultLogsSpecs | NoFolders) -> FindLog:
    """Where the workers of this node write now."""

    def find_log(rank: int, stream: str) -> LogFile | None:
        from rallypoint.inspection.log_ends import LogFile

        ranks, folder = record.board.status.ranks, record.attempt_folder
        if rank not in ranks:
            return None
        path = os.path.join(folder, str(ranks.index(rank)), f"{stream}.log") if folder else ""
        return LogFile(path, folders.run_folder)

    return find_log


def open_site(look: Callable[[], NodeView], read_desk: Callable[[], Desk | None], record: RunRecord, find_log: FindLog) -> Site:
    """The web page of this agent's job. Before the agent has a desk it is not among the others, and all there is to see."""
    from rallypoint.inspection.log_ends import LogWish, find_end
    from rallypoint.inspection.stack_relay import PATIENCE_S, Others
    from rallypoint.inspection.stack_view import StacksView, stacks_view
    from rallypoint.inspection.stacks import dump_workers
    from rallypoint.web.document import Span, spans
    from rallypoint.web.site import WHO, Job, Site

    def survey(by: str, patience_s: float) -> JobView:
        desk = read_desk()
        return job_of([look()]) if desk is None else desk.clerk().survey(by, patience_s)

    def timeline(now: float) -> list[Span]:
        status = record.board.status
        return spans([Span(*past) for past in list(record.past_phases)], status.ledger, status.generation, now)

    def stacks() -> StacksView:
        desk, own, others, trouble = read_desk(), look(), Others(), ""
        try:
            if desk is not None:
                others = desk.clerk().stacks_of_others(WHO, [(own.hostname, own.pid)], None, PATIENCE_S)
        except (RallypointError, OSError) as error:
            trouble = f"only this node could be asked: {error}"
        return stacks_view([*dump_workers([own], None), *others.workers], others.silent, trouble)

    def log_end(wish: LogWish, node_id: str) -> LogEnd | None:
        desk = read_desk()
        return find_end(wish, find_log) if desk is None else desk.clerk().log_end(node_id, wish, WHO)

    return Site(Job(look, survey, timeline, stacks, log_end))
