"""``--hosts`` and ``--hostfile``: from the command line to agents on other hosts, which are told what this one was told.

What the user gave goes on as it was given: flags as flags, variables as variables. Only what tells hosts apart, and where they
meet, is put in for each of them. Mistakes that can be seen from here are told before anything is started.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from rallypoint.base import defaults, environment, report
from rallypoint.base.text import many, signal_names
from rallypoint.cli import command_line
from rallypoint.cli.arguments import config_from_args, parse_settings, read_nodes
from rallypoint.errors import UsageError
from rallypoint.rendezvous.settings import is_secret_looked_for, load_secret, read_settings
from rallypoint.ssh import rules
from rallypoint.ssh.fleet import Able, Job, launch
from rallypoint.ssh.rules import Host

__all__ = ["describe", "plan", "run_on_hosts"]

_OWN = (*rules.FLAGS, "scheduler", "secret", "secret_file", "nnodes", "dry_run")
_OF_ONE_NODE = ("standalone", "requeue", "node_rank", "master_addr", "master_port", "local_addr")
_MOST_CHARS = 1 << 24


def run_on_hosts(args: SimpleNamespace) -> int:
    """Returns the exit code."""
    job = plan(args, environment.own)
    if args.dry_run:
        from rallypoint.cli.main import print_text

        return print_text(describe(job, args))
    return launch(job)


def plan(args: SimpleNamespace, environ: Mapping[str, str]) -> Job:
    """The job; UsageError where there can be none."""
    hosts = _hosts(args)
    least, most = _nodes(args, len(hosts))
    if not args.ssh_timeout >= 1:
        raise UsageError(f"{command_line.source(args, 'ssh_timeout')}: {args.ssh_timeout:g} is too short; from 1 second on")
    _refuse_what_is_ours(args, hosts)
    is_arranged = not args.rdzv_endpoint and args.rdzv_backend not in defaults.ETCD_BACKENDS
    backend = defaults.BACKEND_ELASTIC if args.rdzv_backend == defaults.BACKEND_CLI else args.rdzv_backend
    _check_rest(args, f"{least}:{most}", backend)
    secret = _secret(args, environ, is_needed=backend in (defaults.BACKEND_ELASTIC, defaults.BACKEND_PLUGIN))
    run_id = None if command_line.is_given(args, "rdzv_id") else f"hosts-{os.urandom(4).hex()}"
    flags = command_line.as_flags(args, leave_out=_OWN)
    what = [args.training_script, *args.training_script_args]

    def tell(index: int, able: Able) -> tuple[list[str], dict[str, str]]:
        host = able[index][0]
        meeting = rules.endpoint(able[0][1], able[0][0], [ready for _, ready in able]) if is_arranged else args.rdzv_endpoint
        if index == 0:
            report.info(f"{many(len(able), 'host')}, meeting at {meeting}" if meeting else many(len(able), "host"))
        nnodes = f"{least}:{max(least, most - len(hosts) + len(able))}"  # nobody waits for those that cannot come
        more = rules.far_flags(nnodes, backend, meeting, run_id, host)
        variables = rules.far_variables(environ, args.ssh_env, index, index == 0 if is_arranged else None)
        return [*flags, *more, "--", *what], variables | ({defaults.ENV_SECRET: secret} if secret else {})

    ssh, python = args.ssh_command or defaults.SSH_COMMAND, args.ssh_python or sys.executable
    others = signal_names(f"{args.signals_to_forward},{args.drain_signals}")
    is_json = args.log_format == defaults.LOG_FORMAT_JSON
    return Job(hosts, least, _split(ssh, args), python, args.ssh_timeout, args.signals_to_handle, others, is_json, tell)


def _split(ssh: str, args: SimpleNamespace) -> Sequence[str]:
    try:
        words = shlex.split(ssh)
    except ValueError as problem:
        raise UsageError(f"{command_line.source(args, 'ssh_command')}: {ssh!r} cannot be read: {problem}") from problem
    if not words:
        raise UsageError(f"{command_line.source(args, 'ssh_command')} is empty")
    return words


def describe(job: Job, args: SimpleNamespace) -> str:
    """What would be started; where the nodes meet, only the first host can tell."""
    workers = [f"{args.nproc_per_node if host.workers is None else host.workers} workers" for host in job.hosts]
    width = max(len(host.name) for host in job.hosts)
    lines = [f"  {host.name:<{width}}  {count}" for host, count in zip(job.hosts, workers, strict=True)]
    command = rules.command(job.ssh, Host("HOST"), job.python, job.timeout_s)[:-1]
    flags = command_line.as_flags(args, leave_out=_OWN)
    what = shlex.join([*flags, args.training_script, *args.training_script_args])
    return "\n".join([
        f"Nothing is started; this is the plan for {many(len(job.hosts), 'host')}.", "", *lines, "",
        f"reached by: {shlex.join(command)}", f"interpreter: {job.python}", f"folder: {os.getcwd()}",
        f"each runs: rallyrun {what}",
    ])  # fmt: skip


def _hosts(args: SimpleNamespace) -> list[Host]:
    if args.hosts and args.hostfile:
        raise UsageError(f"{command_line.source(args, 'hosts')} and {command_line.source(args, 'hostfile')} exclude each other")
    if args.hosts:
        return rules.read_hosts(args.hosts, command_line.source(args, "hosts"))
    try:
        with open(args.hostfile, encoding="utf-8", errors="replace") as file:
            return rules.read_hostfile(file.read(_MOST_CHARS), args.hostfile)
    except OSError as error:
        raise UsageError(f"{command_line.source(args, 'hostfile')}: {args.hostfile} cannot be read: {error.strerror}") from error


def _nodes(args: SimpleNamespace, hosts: int) -> tuple[int, int]:
    """With how few nodes the job may run, and with how many it will."""
    if not command_line.is_given(args, "nnodes"):
        return hosts, hosts
    try:
        least, most = read_nodes(args.nnodes)
    except ValueError as problem:
        raise UsageError(f"{command_line.source(args, 'nnodes')}: {problem}") from problem
    if least > hosts:
        raise UsageError(f"{command_line.source(args, 'nnodes')}: {args.nnodes} asks for {many(least, 'node')}, but there "
                         f"{'is' if hosts == 1 else 'are'} {many(hosts, 'host')}")  # fmt: skip
    return least, most


def _refuse_what_is_ours(args: SimpleNamespace, hosts: Sequence[Host]) -> None:
    for dest in _OF_ONE_NODE:
        if command_line.is_given(args, dest):
            raise UsageError(f"{command_line.source(args, dest)} is for one node; leave it out with --hosts and --hostfile")
    if command_line.is_given(args, "rdzv_backend") and args.rdzv_backend == defaults.BACKEND_CLI:
        raise UsageError(f"{command_line.source(args, 'rdzv_backend')}: with --hosts the nodes meet by c10d, etcd or a plug-in")
    numbered = next((host for host in hosts if host.workers is not None), None)
    if numbered is not None and command_line.is_given(args, "nproc_per_node"):
        raise UsageError(
            f"{command_line.source(args, 'nproc_per_node')} is {args.nproc_per_node}, and {numbered.label} has"
            f" {many(numbered.workers or 0, 'worker')} by itself; leave one out"
        )


def _check_rest(args: SimpleNamespace, nnodes: str, backend: str) -> None:
    """All else that an agent would refuse, as far as that can be seen from here."""
    there = {"nnodes": nnodes, "nproc_per_node": "1", "rdzv_backend": backend}
    none = dict.fromkeys(("secret", "secret_file", "numa_binding"))
    meeting = {"rdzv_endpoint": args.rdzv_endpoint or "localhost"}
    config_from_args(SimpleNamespace(**{**vars(args), **there, **none, **meeting}), as_given=True, is_check=True)


def _secret(args: SimpleNamespace, environ: Mapping[str, str], is_needed: bool) -> str:
    """The job's; where the user has none, one for this job alone, and where there is to be none, the word for that.

    What a file of settings says is read by the agents.
    """
    own = {name: value for name, value in environ.items() if name != defaults.ENV_CONF}
    given = {key: value for key, value in (("secret", args.secret), ("secret_file", args.secret_file)) if value}
    settings = read_settings(given, own)
    found = load_secret(settings, own)
    if found is not None:
        return os.fsdecode(found)
    if not is_secret_looked_for(settings, own):
        return defaults.SECRET_NONE
    is_elsewhere = {"secret", "secret_file"} & parse_settings(args.rdzv_conf).keys()
    return "" if is_elsewhere or environ.get(defaults.ENV_CONF) or not is_needed else os.urandom(32).hex()
