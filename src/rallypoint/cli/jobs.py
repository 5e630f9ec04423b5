"""The commands that see and steer jobs: ``ps``, ``status``, ``stop``, ``drain`` and ``restart``.

Each asks agents of the same user over their control sockets, or where the nodes of a job meet (`inspection.client`). What they
print is made by pure functions of what was answered.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rallypoint.base import defaults
from rallypoint.base.json_text import clip
from rallypoint.base.text import many, plural, size_text
from rallypoint.cli.arguments import parse_settings
from rallypoint.cli.command_line import closest
from rallypoint.cli.main import print_text
from rallypoint.errors import ExitCode, RallypointError, UsageError
from rallypoint.inspection import client
from rallypoint.inspection.client import LocalJob, RemoteJob
from rallypoint.inspection.view import FORMAT, JobView, NodeView, WorkerView, job_document, jobs_of, straggling
from rallypoint.protocol.pace import SLOW
from rallypoint.story.phases import RUNNING
from rallypoint.story.story import duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["USAGES", "Flags", "jobs_main", "read_arguments", "render_jobs", "render_status"]

STOPPED_WITHIN_S = 60.0
LOOK_EVERY_S = 0.1
SHOWN_WORKERS = 32  # of each node, unless all are asked for
SHOWN_HISTORY = 5
COMMAND_CHARACTERS = 60
_JOB = """\
JOB is the job's ID, the beginning of it, or the process ID of its launcher; it can be left out where one job runs here. A job
that does not run here is asked where its nodes meet: give its whole ID, and --endpoint."""
_ELSEWHERE = """\
  --endpoint  where the job's nodes meet, as in its --rdzv-endpoint
  --backend   c10d or etcd, as in its --rdzv-backend [c10d]
  --conf      settings, as in its --rdzv-conf: secret=FILE, or etcd's"""
_VALUED = ("--endpoint", "--backend", "--conf")
USAGES = {
    "ps": f"""\
usage: rallypoint ps [--json] [--endpoint HOST:PORT]

List the jobs of this user that run on this machine, or with --endpoint those whose nodes meet there.

  --json      print one JSON document instead of a table
{_ELSEWHERE}
  --help      show this help and exit""",
    "status": f"""\
usage: rallypoint status [JOB] [--all] [--json] [--endpoint HOST:PORT]

Show how a job stands on all of its nodes: phase, generation, restarts and why, and each worker with its process, step and memory.
{_JOB}

  --all       show every worker, however many there are
  --json      print one JSON document instead of text
{_ELSEWHERE}
  --help      show this help and exit""",
    "stop": f"""\
usage: rallypoint stop [JOB] [--no-wait] [--json] [--endpoint HOST:PORT]

Stop a job on all of its nodes, as SIGTERM to each launcher would: workers get their time to end. The launchers exit with code
{ExitCode.STOPPED}, so that no scheduler starts the job again.
{_JOB}

  --no-wait   do not wait until it has ended on this machine
  --json      print one JSON document instead of text
{_ELSEWHERE}
  --help      show this help and exit""",
    "restart": f"""\
usage: rallypoint restart [JOB] [--json] [--endpoint HOST:PORT]

Stop the workers of a job on all nodes and start them again. It does not count against --max-restarts.
{_JOB}

  --json      print one JSON document instead of text
{_ELSEWHERE}
  --help      show this help and exit""",
    "drain": f"""\
usage: rallypoint drain NODE [JOB] [--now] [--force] [--json] [--endpoint HOST:PORT]

Have one node stop its workers and leave the job, as SIGTERM to its launcher would. The others go on if they are enough.
If the node was started with --drain-grace, all workers of the job save first.
NODE is its name, its host's name, or its rank among the nodes.
{_JOB}

  --now       do not let workers save first
  --force     also if the job ends with that node, because it hosts the coordination store
  --json      print one JSON document instead of text
{_ELSEWHERE}
  --help      show this help and exit""",
}

Flags = dict[str, str]  # those that were given, with their values; of one without a value it is empty


def jobs_main(command: str, argv: Sequence[str]) -> int:
    """One of the commands; returns its exit code."""
    try:
        flags, words = _read_arguments(command, argv)
        if "--help" in flags:
            return print_text(USAGES[command])
        return {"ps": _ps, "status": _status, "stop": _stop, "restart": _restart, "drain": _drain}[command](flags, words)
    except RallypointError as error:
        print(f"rallypoint {command}: error: {clip(str(error), 10_000)}", file=sys.stderr)
        return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.WORKER_FAILED


def _read_arguments(command: str, argv: Sequence[str]) -> tuple[Flags, list[str]]:
    flags, words = read_arguments(USAGES[command], argv, _VALUED)
    least, most = {"ps": (0, 0), "drain": (1, 2)}.get(command, (0, 1))
    if "--help" not in flags and not least <= len(words) <= most:
        raise UsageError(USAGES[command].partition("\n")[0])
    return flags, words


def read_arguments(usage: str, argv: Sequence[str], valued: Sequence[str]) -> tuple[Flags, list[str]]:
    """The flags, all of which the usage lists, and the other words; those that are `valued` have a value."""
    flags: Flags = {}
    words: list[str] = []
    known = [line.split()[0] for line in usage.splitlines() if line.startswith("  --")]
    rest = iter(argv)
    for word in rest:
        name, separator, value = word.partition("=")
        name = "--help" if name == "-h" else name
        if not word.startswith("-"):
            words.append(word)
            continue
        if name not in known or (separator and name not in valued):
            meant = closest(name, known)
            raise UsageError(f"unknown flag {name}; " + (f"did you mean {meant}?" if meant else f"there are {', '.join(known)}"))
        flags[name] = (value if separator else next(rest, "")) if name in valued else ""
        if name in valued and not flags[name]:
            raise UsageError(f"{name} needs a value")
    return flags, words


def _ps(flags: Flags, _: list[str]) -> int:
    troubles: list[str] = []
    if endpoint := flags.get("--endpoint"):
        jobs, where = client.jobs_at(endpoint, *_how(flags)), f"meets at {endpoint}"
    else:
        agents, troubles = client.list_agents()
        jobs, where = jobs_of(agent.node for agent in agents), "of this user runs on this machine"
    if "--json" in flags:
        return _print_json(jobs=list(map(job_document, jobs)), unanswered=troubles)
    for line in troubles:
        print(f"rallypoint ps: process {line}", file=sys.stderr)
    return print_text(render_jobs(jobs) if jobs else f"no job {where}") if jobs or not troubles else ExitCode.SUCCESS


def _print_json(**document: object) -> int:
    return print_text(json.dumps({"format": FORMAT, **document}, indent=2))


def _status(flags: Flags, words: list[str]) -> int:
    with _found(flags, words) as found:
        job = found.status()
    if "--json" in flags:
        return print_text(json.dumps(job_document(job), indent=2))
    return print_text(render_status(job, SHOWN_WORKERS if "--all" not in flags else None))


def _stop(flags: Flags, words: list[str]) -> int:
    with _found(flags, words) as job:
        done = job.stop()
    if "--json" not in flags:
        print_text(f"{job.name}: {done}")
    has_ended = "--no-wait" not in flags and bool(job.agents)
    if has_ended:
        _await_end(job)
    if "--json" in flags:
        return _print_json(job=job.name, done=done, has_ended=has_ended)
    return print_text(f"{job.name}: it has ended on this machine") if has_ended else ExitCode.SUCCESS


def _await_end(job: LocalJob | RemoteJob) -> None:
    ends_at = time.monotonic() + STOPPED_WITHIN_S
    while left := _left(job):
        if time.monotonic() >= ends_at:
            raise RallypointError(
                f"after {STOPPED_WITHIN_S:g} s there is still process {'; process '.join(left)}; it goes on stopping"
            )
        time.sleep(LOOK_EVERY_S)


def _left(job: LocalJob | RemoteJob) -> list[str]:
    """Those of its agents that are still here, and how they are."""
    agents, troubles = client.list_agents([agent.path for agent in job.agents])
    return [*(f"{agent.node.pid}, which is {agent.node.phase}" for agent in agents), *troubles]


def _restart(flags: Flags, words: list[str]) -> int:
    with _found(flags, words) as job:
        return _tell(flags, job.name, job.restart())


def _drain(flags: Flags, words: list[str]) -> int:
    with _found(flags, words[1:]) as job:
        return _tell(flags, job.name, job.drain(words[0], "--force" in flags, "--now" in flags))


def _tell(flags: Flags, job: str, done: str) -> int:
    return _print_json(job=job, done=done) if "--json" in flags else print_text(f"{job}: {done}")


def _how(flags: Flags) -> tuple[str, dict[str, Any]]:
    """The back end, and its settings."""
    return flags.get("--backend", defaults.BACKEND_ELASTIC), parse_settings(flags.get("--conf", ""))


@contextmanager
def _found(flags: Flags, words: list[str]) -> Iterator[LocalJob | RemoteJob]:
    if not (endpoint := flags.get("--endpoint")):
        agents, troubles = client.list_agents()
        yield client.find_job(agents, words[0] if words else "", troubles)
        return
    if not words:
        raise UsageError("--endpoint: name the job, by its whole ID; rallypoint ps --endpoint tells it")
    with client.connect(endpoint, words[0], *_how(flags)) as job:
        yield job


# --- as text ---------------------------------------------------------------------------------------------------------------


def render_jobs(jobs: Sequence[JobView]) -> str:
    titles = ("JOB", "PHASE", "NODES", "WORKERS", "GENERATION", "RESTARTS", "UP", "PIDS", "COMMAND")
    return _table([titles, *map(_job_row, jobs)])


def _job_row(job: JobView) -> tuple[str, ...]:
    first = next(iter(job.members or job.nodes), None)
    if first is None:
        return job.job, "no answer", f"0 of {len(job.silent)}", *"------"
    here = len(job.nodes)
    nodes = f"{here} of {first.nodes}" if first.nodes not in (None, here) else str(here)
    return (
        job.job,
        job.phase,
        nodes,
        str(first.world_size if first.world_size is not None else "-"),
        str(job.generation or "-"),
        f"{job.restarts} of {first.max_restarts}",
        duration(max(node.uptime_s for node in job.nodes)),
        ",".join(str(node.pid) for node in job.nodes[:4]),
        clip(first.command, 4096, COMMAND_CHARACTERS),
    )


def render_status(job: JobView, most_workers: int | None = None) -> str:
    """The job, its nodes and workers; of each node no more workers than that."""
    lines = [_headline(job)]
    if job.note:
        lines.append(f"  {job.note}")
    if job.silent:
        lines.append(f"  no answer from {plural(len(job.silent), 'node')} {', '.join(job.silent[:16])}")
    if who := straggling(job):
        lines.append(f"  behind the others: {who}")
    for node in job.nodes:
        lines += ["", *_node_lines(node, node in job.spares, most_workers)]
    if history := _history(job):
        lines += ["", "restarts, the latest last:", *history]
    return "\n".join(lines)


def _headline(job: JobView) -> str:
    first = next(iter(job.members or job.nodes), None)
    if first is None:
        return f"{job.job}: no answer"
    parts = [f"{job.job}: {job.phase}", f"{many(len(job.nodes), 'node')}"]
    if first.world_size is not None:
        parts.append(many(first.world_size, "worker"))
    if job.generation:
        parts.append(f"generation {job.generation}")
    parts.append(f"{job.restarts} of {many(first.max_restarts, 'restart')}")
    if job.step is not None:
        parts.append(f"step {job.step}")
    if job.goodput is not None:
        parts.append(f"goodput {job.goodput:.1%}")
    return ", ".join(parts)


def _node_lines(node: NodeView, is_spare: bool, most_workers: int | None) -> list[str]:
    rank = "spare" if is_spare else f"node {node.node_rank}" if node.node_rank is not None else "no rank yet"
    where = f" on {node.hostname}" if node.hostname != node.node else ""
    why = f": {node.why}" if node.why and node.phase != RUNNING else ""
    lines = [f"{node.node}{where} ({rank}, pid {node.pid}): {node.phase} for {duration(node.phase_s)}{why}"]
    if node.slowness is not None and node.slowness >= SLOW:
        lines.append(f"  slow: its workers take {node.slowness:.1f} times as long for a step as the median of the job")
    if node.log_dir:
        lines.append(f"  logs: {node.log_dir}")
    workers = node.workers if most_workers is None else node.workers[:most_workers]
    if workers:
        rows = [("RANK", "PID", "STATE", "STEP", "LAST SIGN", "CPU", "MEMORY"), *map(_worker_row, workers)]
        lines += [f"  {line}" for line in _table(rows).splitlines()]
    if len(workers) < len(node.workers):
        lines.append(f"  and {many(len(node.workers) - len(workers), 'worker')} more (--all)")
    return lines


def _worker_row(worker: WorkerView) -> tuple[str, ...]:
    state = f"{worker.state} ({worker.doing})" if worker.doing and worker.doing != RUNNING else worker.state
    return (
        str(worker.rank),
        str(worker.pid),
        state,
        "-" if worker.step is None else str(worker.step),
        "-" if worker.silent_s is None else f"{duration(worker.silent_s)} ago",
        "-" if worker.cpu_s is None else duration(worker.cpu_s),
        "-" if worker.memory_bytes is None else size_text(worker.memory_bytes),
    )


def _history(job: JobView) -> list[str]:
    """Of the node that remembers most; what one saw, all did."""
    longest = max((node.history for node in job.nodes), key=len, default=())
    return [f"  {duration(one.ago_s)} ago: {one.why}" for one in longest[-SHOWN_HISTORY:]]


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
