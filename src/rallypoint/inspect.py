"""See and steer jobs, from a program: all that ``rallypoint ps``, ``status``, ``stacks``, ``logs``, ``stop``, ``drain`` and
``restart`` do, and one fault of ``rallypoint chaos``.

    from rallypoint import inspect

    for job in inspect.jobs():
        print(job.job, job.phase, job.step)

Jobs are found on this machine, through an agent of the same user that takes part in them; or where their nodes meet, wherever
that is:

    with inspect.connect("node-a:29400", "my-job") as job:
        print(job.status().phase)

Errors are `UsageError` where no job, or more than one, is meant, and `RallypointError` where it cannot be done.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping

from rallypoint.base import defaults
from rallypoint.base.records import Value
from rallypoint.base.text import runs
from rallypoint.errors import UsageError
from rallypoint.inspection import client, log_reading, view
from rallypoint.inspection import stacks as worker_stacks
from rallypoint.inspection.client import LocalJob, RemoteJob
from rallypoint.inspection.log_lines import LogLine
from rallypoint.inspection.log_times import parse_since
from rallypoint.inspection.stack_relay import PATIENCE_S as STACKS_PATIENCE_S
from rallypoint.inspection.stack_view import ProcessDump, StacksView, WorkerDump
from rallypoint.inspection.view import Happening, JobView, NodeView, WorkerView, jobs_of, stragglers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.chaos.outcome import Outcome

__all__ = [
    "Happening", "JobView", "LocalJob", "LogLine", "NodeView", "ProcessDump", "RemoteJob", "StacksView", "WorkerDump",
    "WorkerView", "ask_worker", "connect", "drain", "find", "hurt", "jobs", "logs", "restart", "stacks", "status", "stop",
    "stragglers", "to_document",
]  # fmt: skip

NO_SETTINGS: Mapping[str, Any] = {}


def jobs(endpoint: str = "", backend: str = defaults.BACKEND_ELASTIC, settings: Mapping[str, Any] = NO_SETTINGS) -> list[JobView]:
    """The jobs that have an agent on this machine, each with those agents alone: no other machine is asked.

    With an endpoint, those whose nodes meet there, each with all of its nodes; `connect` describes the rest.
    """
    if endpoint:
        return client.jobs_at(endpoint, backend, settings)
    return jobs_of(agent.node for agent in client.list_agents()[0])


def find(job: str = "") -> LocalJob:
    """A job of this machine, to be asked with the methods ``status``, ``stacks``, ``stop``, ``restart`` and ``drain``.

    `job` is its ID, the beginning of it, or the process ID of its launcher; it can be left out where one job runs.
    """
    agents, troubles = client.list_agents()
    return client.find_job(agents, job, troubles)


def connect(
    endpoint: str, job: str, backend: str = defaults.BACKEND_ELASTIC, settings: Mapping[str, Any] = NO_SETTINGS
) -> RemoteJob:
    """The job of this ID whose nodes meet there, with the same methods; to be closed, as by ``with``.

    `backend` is that of the job, c10d or etcd, and `settings` are those of its ``--rdzv-conf``, such as ``secret_file``.
    """
    return client.connect(endpoint, job, backend, settings)


def status(job: str = "", patience_s: float = client.PATIENCE_S) -> JobView:
    """A job with all of its nodes; those that do not answer in that time are in `JobView.silent`."""
    return find(job).status(patience_s)


def stacks(job: str = "", ranks: Iterable[int] | None = None, patience_s: float = STACKS_PATIENCE_S) -> StacksView:
    """Where the workers of a job stand, or those of these ranks, on all of its nodes; some need py-spy for that."""
    return find(job).stacks(None if ranks is None else runs(ranks), patience_s)


def ask_worker(socket_path: str, handler: str) -> str:
    """What a worker of this machine answers at its control socket (`rallypoint.control_plane`)."""
    return worker_stacks.ask(socket_path, handler)[1]


def stop(job: str = "") -> str:
    """Have all nodes stop their workers and end, as by SIGTERM; returns what was done, and does not wait for it."""
    return find(job).stop()


def restart(job: str = "") -> str:
    """Have all workers stopped and started again; it does not count against ``max_restarts``."""
    return find(job).restart()


def drain(node: str, job: str = "", force: bool = False, now: bool = False) -> str:
    """Have one node, by its name, its host's name or its rank, leave its job. One without which the job would end is refused,
    unless with `force`. With ``--drain-grace`` all workers save first, unless `now`.
    """
    return find(job).drain(node, force, now)


def to_document(seen: Value) -> dict[str, Any]:
    """As JSON has it, and as ``--json`` prints it."""
    return view.job_document(seen) if isinstance(seen, JobView) else view.to_document(seen)


def hurt(fault: str, job: str = "", patience_s: float = defaults.DRILL_PATIENCE_S) -> Outcome:
    """Give a job one fault, such as ``kill rank 3`` or ``stop node 1 for 8s``, and wait until it runs again, at most so long.

    What would end the job is refused. Whatever lasts is undone when this returns, or this process ends.
    """
    from rallypoint.chaos import drill

    return drill.hurt(fault, job, patience_s)


def logs(
    job: str = "",
    ranks: Iterable[int] | None = None,
    streams: Iterable[str] = log_reading.STREAMS,
    since: str | float | None = None,
    grep: str | None = None,
    tail: int | None = None,
    follow: bool = False,
    collapse: bool = False,
) -> Iterator[LogLine]:
    """The lines that workers have written to their log files, in the order that ``rallypoint logs --help`` describes.

    `job` may also be the log folder of a run that has ended. `since` is an age or a time, as on the command line, or seconds.
    With `follow`, lines come as they are written, until the job ends. With `collapse`, what several ranks say is one line.
    """
    streams = set(streams)
    if not streams or not streams <= set(log_reading.STREAMS):
        raise UsageError(
            f"streams are {' and '.join(log_reading.STREAMS)}, not {', '.join(map(repr, sorted(streams))) or 'none'}"
        )
    now_s, here_s = time.time(), log_reading.here_s()
    age = f"{since}s" if isinstance(since, int | float) else since
    wish = log_reading.Wish(
        ranks=None if ranks is None else tuple(runs(ranks)),
        streams=tuple(one for one in log_reading.STREAMS if one in streams),
        since_us=None if age is None else parse_since(age, now_s, here_s),
        pattern=None if grep is None else re.compile(grep.encode()),
        tail=tail,
    )
    found = log_reading.read_lines(log_reading.find_logs(job), wish, follow, collapse)
    return (line for line in found if line is not None)
