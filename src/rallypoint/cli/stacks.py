"""The command ``rallypoint stacks``: what workers do at this moment, on all nodes of a job; `inspection.stacks` asks them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

from rallypoint.base import defaults, report
from rallypoint.base.text import Run, plural
from rallypoint.cli.arguments import parse_settings
from rallypoint.cli.command_line import closest
from rallypoint.cli.main import print_text
from rallypoint.errors import ExitCode, RallypointError, UsageError
from rallypoint.inspection.log_rules import parse_ranks
from rallypoint.inspection.stack_view import StacksView, WorkerDump, lines_of, stacks_view
from rallypoint.inspection.stacks import dump_place, is_place
from rallypoint.inspection.view import to_document

__all__ = ["USAGE", "stacks_main"]

USAGE = f"""\
usage: rallypoint stacks [JOB|PID|SOCKET ...] [--rank RANKS] [--json] [--endpoint HOST:PORT]

Print the Python stacks of all threads of workers, on all nodes of their job. A worker that runs inside worker_main(), or in a
job with --hang-timeout, answers by itself; for others, py-spy has to be installed on its machine.
JOB     all workers of the job, by its ID or the beginning of it; can be left out where one job runs here. A job that does not
        run here is asked where its nodes meet: give its whole ID, and --endpoint.
PID     a worker of this machine, or the launcher for all of its workers
SOCKET  path of a worker's control socket, as in {defaults.ENV_CONTROL_SOCKET}

  --rank      only these of the job's ranks, such as 3,8-11
  --json      print one JSON document instead of text
  --endpoint  where the job's nodes meet, as in its --rdzv-endpoint
  --backend   c10d or etcd, as in its --rdzv-backend [c10d]
  --conf      settings, as in its --rdzv-conf: secret=FILE, or etcd's
  --help      show this help and exit
"""

_VALUED = ("--rank", "--endpoint", "--backend", "--conf")
_KNOWN = (*_VALUED, "--json", "--help")


def stacks_main(argv: Sequence[str]) -> int:
    """Returns the exit code: that of a failure, if any one of those who were asked did not answer."""
    if any(word in ("-h", "--help") for word in argv):
        sys.stdout.write(USAGE)
        return ExitCode.SUCCESS
    try:
        words, flags = _read_arguments(argv)
        ranks = parse_ranks(flags["--rank"]) if "--rank" in flags else None
    except UsageError as error:
        return _complain(error)
    code, found = ExitCode.SUCCESS, stacks_view(())
    for word in words or [""]:
        try:
            seen = _look(word, ranks, flags)
        except RallypointError as error:
            code = _complain(error)
            continue
        if "--json" in flags:
            found = found.replace(workers=(*found.workers, *seen.workers), silent=(*found.silent, *seen.silent), note=seen.note)
        else:
            _print(seen)
        code = _tell_troubles(seen) or code
    if "--json" in flags and (found.workers or code == ExitCode.SUCCESS):
        print_text(json.dumps(to_document(found), indent=2))
    return code


def _read_arguments(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words, and the flags with their values."""
    words: list[str] = []
    flags: dict[str, str] = {}
    rest = iter(argv)
    for word in rest:
        name, separator, value = word.partition("=")
        if not word.startswith("-"):
            words.append(word)
        elif name not in _KNOWN or (separator and name not in _VALUED):
            meant = closest(name, list(_KNOWN))
            raise UsageError(f"unknown flag {name}; " + (f"did you mean {meant}?" if meant else f"there are {', '.join(_KNOWN)}"))
        else:
            flags[name] = (value if separator else next(rest, "")) if name in _VALUED else ""
            if name in _VALUED and not flags[name]:
                raise UsageError(f"{name} needs a value")
    if "--endpoint" in flags and len(words) != 1:
        raise UsageError("--endpoint: name the job, by its whole ID")
    return words, flags


def _look(word: str, ranks: Sequence[Run] | None, flags: Mapping[str, str]) -> StacksView:
    from rallypoint.inspection import client

    if endpoint := flags.get("--endpoint"):
        settings = parse_settings(flags.get("--conf", ""))
        with client.connect(endpoint, word, flags.get("--backend", defaults.BACKEND_ELASTIC), settings) as job:
            return job.stacks(ranks)
    if ranks is None and _is_place(word):
        return stacks_view([dump_place(word)])
    agents, troubles = client.list_agents()
    return client.find_job(agents, word, troubles).stacks(ranks)


def _is_place(word: str) -> bool:
    """Whether it is a process or the path of a socket, and not the name of a job, which may be a number too."""
    if not word:
        return False
    return is_place(word) or ((word.isdecimal() or "/" in word) and not _is_job(word))


def _is_job(word: str) -> bool:
    from rallypoint.inspection import client

    return any(agent.node.job.startswith(word) for agent in client.list_agents()[0])


def _print(seen: StacksView) -> None:
    many_nodes = len({worker.node for worker in seen.workers}) > 1
    for worker in seen.workers:
        where = f" on {worker.node}" if many_nodes else ""
        heading = [] if worker.rank is None else [f"--- rank {worker.rank}{where}"]
        lines = [*heading, *(line for process in worker.processes for line in lines_of(process))]
        if lines:
            print_text("\n".join(map(report.escaped, lines)))


def _tell_troubles(seen: StacksView) -> int:
    troubles = [*map(_trouble, seen.workers), seen.note]
    if seen.silent:
        troubles.append(f"no answer from {plural(len(seen.silent), 'node')} {', '.join(seen.silent[:16])}")
    told = [trouble for trouble in troubles if trouble]
    for trouble in told:
        _complain(RallypointError(trouble))
    return ExitCode.WORKER_FAILED if told else ExitCode.SUCCESS


def _trouble(worker: WorkerDump) -> str:
    return f"rank {worker.rank}: {worker.error}" if worker.error and worker.rank is not None else worker.error


def _complain(error: RallypointError) -> int:
    print(f"rallypoint stacks: error: {report.escaped(str(error))}", file=sys.stderr)
    return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.WORKER_FAILED
