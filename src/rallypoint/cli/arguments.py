"""From parsed arguments to a LaunchConfig and an entry point, with everything checked before anything starts.

torchrun's rules are kept: ``--standalone`` wins over backend, endpoint and id; one node with static rendezvous and nothing said
about where it is runs standalone too; a static endpoint is made of the master's address and port. What is wrong is told by the
name of its flag, or of the variable it came from.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

from rallypoint.agent.config import LaunchConfig
from rallypoint.base import defaults, environment, report
from rallypoint.base.text import many
from rallypoint.cli import command_line
from rallypoint.cli.command_line import OPTIONS
from rallypoint.cli.entry_point import EntryPoint, check_entry_point, entry_point
from rallypoint.errors import UsageError
from rallypoint.hardware.devices import allowed_cpus, determine_local_world_size
from rallypoint.output.log_specs import DefaultLogsSpecs, LogsSpecs, Std, check_log_dir
from rallypoint.rendezvous import registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    from rallypoint.schedulers.found import Found

    T = TypeVar("T")

__all__ = [
    "NodeCountError", "config_from_args", "get_rdzv_endpoint", "is_standalone", "parse_min_max_nnodes", "parse_settings",
    "read_nodes", "read_workers", "threads_per_worker", "with_scheduler",
]  # fmt: skip

# Fields of LaunchConfig that are as their flags say, unless more is known of them.
_FLAGS_OF_FIELDS = {
    name: one.dest for one in OPTIONS if not one.setting for name in one.fields or (one.dest,) if name in LaunchConfig._fields
}


_MOST_CHARS = 1 << 24  # of a file with a line for each slot of a job


class NodeCountError(UsageError, RuntimeError):
    """``--nnodes`` is not of its form; a RuntimeError too, as callers of `parse_min_max_nnodes` know it."""


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """The least and the most nodes that ``--nnodes`` asks for, whether there can be so many or not."""
    try:
        least, *more = map(int, nnodes.split(":"))
        (most,) = more or [least]
    except ValueError:
        raise NodeCountError(f"{nnodes!r} is neither a number of nodes nor MIN:MAX") from None
    return least, most


def read_nodes(nnodes: str) -> tuple[int, int]:
    """The least and the most nodes, if there can be so many."""
    least, most = parse_min_max_nnodes(nnodes)
    if not 0 < least <= most:
        raise UsageError(f"{nnodes!r} asks for at least {least} and at most {most} nodes; it takes 1 <= MIN <= MAX")
    return least, most


def read_workers(nproc_per_node: str) -> int:
    """The workers on this node, if there can be so many."""
    workers = determine_local_world_size(nproc_per_node)
    if workers < 1:
        raise UsageError(f"{workers} is too few: each node needs at least one worker")
    return workers


def config_from_args(args: Any, *, as_given: bool = False, is_check: bool = False) -> tuple[LaunchConfig, EntryPoint, list[str]]:
    """The job that `args` describe: its configuration, what each worker starts, and the arguments for that.

    `as_given` leaves the arguments alone: one node is not made to run standalone, and nobody looks whether the script is there.
    `is_check` says nothing of what follows from them.
    """
    is_ours = hasattr(args, "from_flags")  # and not of a program's own parser, which says nothing of what was given
    args = command_line.complete(args, environment.own)
    if is_ours and not as_given:
        args = with_scheduler(args)
    entry, arguments = entry_point(args)
    if not as_given:
        check_entry_point(args)
    workers = _read(args, "nproc_per_node", read_workers)
    fields = {
        **{name: getattr(args, dest) for name, dest in _FLAGS_OF_FIELDS.items()},
        **_meeting(args, as_given),
        "nproc_per_node": workers,
        "logs_specs": _logs_specs(args),
        "log_line_prefix_template": args.log_line_prefix_template or environment.own.get(defaults.ENV_LOG_LINE_PREFIX_TEMPLATE),
        "numa_options": _numa_options(args.numa_binding),
        "worker_env": _worker_env(args, workers),
        "hang_timeout": _read(args, "hang_timeout", _hang_timeout),
        "proctitle": not args.no_proctitle,
    }
    config = LaunchConfig(**fields)
    if not is_check:
        _tell_threads(config, args.omp_num_threads)
    return config, entry, arguments


def with_scheduler(args: SimpleNamespace) -> SimpleNamespace:
    """The same, with what a scheduler says of what is missing; a line tells of it, or gives the advice that there is."""
    is_asked = args.scheduler != defaults.SCHEDULER_NONE
    if not is_asked or not (command_line.is_given(args, "scheduler") or environment.first_of(defaults.ENV_SCHEDULERS.values())):
        return args
    from rallypoint.schedulers import choose

    found = choose.find(args.scheduler, environment.own, _read_text) if args.scheduler in choose.NAMES else _asked_plug_in(args)
    if found is None:
        return args
    given = {option.dest for option in OPTIONS if command_line.is_given(args, option.dest)}
    values = choose.missing(found, given, args.rdzv_backend, _read(args, "nnodes", read_nodes)[1])
    if line := choose.told(found, values):
        report.info(line)
    elif found.advice and not given & {"nnodes", "standalone"}:
        report.warn(f"{found.scheduler}: {found.advice}")
    sources = {dest: found.sources.get(dest, found.scheduler) for dest in values}
    return SimpleNamespace(**{**vars(args), **values, "from_scheduler": sources})


def _asked_plug_in(args: SimpleNamespace) -> Found:
    from rallypoint.schedulers import plug_ins

    return plug_ins.read(args.scheduler, environment.own)


def _read_text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(_MOST_CHARS)


def get_rdzv_endpoint(args: Any) -> str:
    """The endpoint; for static rendezvous without one it is the master's address and port."""
    if args.rdzv_backend != defaults.BACKEND_CLI or args.rdzv_endpoint:
        return str(args.rdzv_endpoint)
    host, port = args.master_addr, args.master_port
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{bracketed}:{defaults.MASTER_PORT if port is None else port}"


def threads_per_worker(asked: str | None, workers: int, already_set: bool, cpus: int) -> int | None:
    """OMP_NUM_THREADS for each worker, or None to leave the environment as it is.

    Many numerical libraries start one thread per CPU, so that N workers would start N times as many as there are CPUs; one each
    is torchrun's careful default.
    """
    if asked == "auto":
        return max(1, cpus // workers)
    if asked is not None:
        if not asked.strip().isdecimal() or int(asked) < 1:
            raise UsageError(f"{asked!r} is neither a number of threads, from 1, nor auto")
        return int(asked)
    return None if already_set or workers == 1 else 1


def _read(args: SimpleNamespace, dest: str, convert: Callable[[Any], T]) -> T:
    """The value of one flag, converted; what is wrong with it is told by the name of the flag or variable."""
    try:
        return convert(getattr(args, dest))
    except ValueError as problem:
        raise UsageError(f"{command_line.source(args, dest)}: {problem}") from problem


def _meeting(args: SimpleNamespace, as_given: bool) -> dict[str, Any]:
    """How many nodes meet, and where and how, by field of LaunchConfig."""
    least, most = _read(args, "nnodes", read_nodes)
    settings = _settings(args)
    if not as_given and is_standalone(args, least, most):
        least = most = 1
        is_named = args.rdzv_id != defaults.RUN_ID_CLI and not args.standalone
        run_id = args.rdzv_id if is_named else os.urandom(8).hex()
        backend, endpoint = defaults.BACKEND_ELASTIC, defaults.STANDALONE_ENDPOINT
        settings = _elastic_settings(settings, 1, 1)
    else:
        settings = _settings_of_backend(args, settings, least, most)
        if not as_given:
            _check_endpoint(args)
        backend, endpoint, run_id = args.rdzv_backend, get_rdzv_endpoint(args), args.rdzv_id
    return {
        "min_nodes": least,
        "max_nodes": most,
        "rdzv_backend": backend,
        "rdzv_endpoint": endpoint,
        "run_id": run_id,
        "rdzv_configs": settings,
    }


def _settings_of_backend(args: SimpleNamespace, settings: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    _read(args, "rdzv_backend", registry.check_backend)
    match args.rdzv_backend:
        case defaults.BACKEND_CLI:
            return {**settings, "rank": _static_rank(args, most)}
        case defaults.BACKEND_ELASTIC | defaults.BACKEND_PLUGIN:
            return _elastic_settings(_with_rank(args, settings), least, most)
        case backend if backend in defaults.ETCD_BACKENDS:
            return _with_rank(args, settings)
    return settings


def _check_endpoint(args: SimpleNamespace) -> None:
    """Who names a back end on the command line that needs an endpoint has forgotten it, even for one node."""
    if args.rdzv_backend in defaults.ETCD_BACKENDS and not args.rdzv_endpoint.strip():
        from rallypoint.rendezvous.etcd import parse_endpoints

        parse_endpoints(args.rdzv_endpoint)  # which says what is missing


def is_standalone(args: SimpleNamespace, least: int, most: int) -> bool:
    """Whether this node needs nobody: as ``--standalone`` says, or one node with static rendezvous and nothing said about where.

    A free port serves that better than a fixed one.
    """
    if args.standalone and least > 1:
        raise UsageError(f"--standalone is for one node, but {command_line.source(args, 'nnodes')} asks for {least}")
    is_static = args.rdzv_backend == defaults.BACKEND_CLI
    return bool(args.standalone) or (is_static and most == 1 and not args.rdzv_endpoint and args.master_port is None)


def _static_rank(args: SimpleNamespace, most: int) -> int:
    rank, port = int(args.node_rank), args.master_port
    if not 0 <= rank < most:
        flag = command_line.source(args, "node_rank")
        raise UsageError(f"{flag}: {rank} is not a rank of {many(most, 'node')}, 0 to {most - 1}")
    if port is not None and not 0 <= int(port) < 1 << 16:
        raise UsageError(f"{command_line.source(args, 'master_port')}: {port} is not a port, 0 to 65535")
    return rank


def _settings(args: SimpleNamespace) -> dict[str, Any]:
    """What ``--rdzv-conf`` and the flags that stand for one of its settings say; they must not contradict each other."""
    settings = _read(args, "rdzv_conf", parse_settings)
    for key in (option.dest for option in OPTIONS if option.setting):
        value = getattr(args, key)
        if value is not None and value is not False:  # a switch that is off says nothing
            _put(settings, key, value, command_line.source(args, key))
    return settings


def _put(settings: dict[str, Any], key: str, value: Any, source: str) -> None:
    if key in settings:
        from rallypoint.rendezvous.settings import parse_setting

        if parse_setting(key, settings[key], "--rdzv-conf") != parse_setting(key, value, source):
            raise UsageError(f"{key} is {settings[key]} in --rdzv-conf and {value} in {source}; leave one out")
    settings[key] = value


def _with_rank(args: SimpleNamespace, settings: dict[str, Any]) -> dict[str, Any]:
    """A rank that the user gave is the one that this node is to have; torchrun's default, 0, is nobody's wish."""
    if command_line.is_given(args, "node_rank"):
        _put(settings, "node_rank", args.node_rank, command_line.source(args, "node_rank"))
    return settings


def _elastic_settings(settings: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    """The settings of an elastic job, checked before anything is started, with what the environment says about restarts.

    A job of one node that has none does not load what knows about them.
    """
    if most == 1 and not settings and not environment.has_settings(environment.own):
        return settings
    from rallypoint.rendezvous.settings import check_node_unit, read_settings

    known = read_settings(settings, environment.own)
    check_node_unit(known, least, most)
    return {**known.restart_settings(), **settings}


def parse_settings(text: str) -> dict[str, Any]:
    """Without the quotes around it all that a shell may have left there."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    settings: dict[str, Any] = {}
    for piece in filter(None, map(str.strip, text.split(","))):
        key, _, value = (part.strip() for part in piece.partition("="))
        if not (key and value):
            raise UsageError(f"{piece!r} is not of the form key=value")
        settings[key] = value
    return settings


def _logs_specs(args: SimpleNamespace) -> LogsSpecs:
    check_log_dir(args.log_dir)
    make = DefaultLogsSpecs if args.logs_specs is None else _logs_plugin(args.logs_specs)
    return make(
        log_dir=args.log_dir,
        redirects=_read(args, "redirects", Std.from_str),
        tee=_read(args, "tee", Std.from_str),
        local_ranks_filter=_read(args, "local_ranks_filter", _parse_ranks),
    )


def _logs_plugin(name: str) -> Callable[..., LogsSpecs]:
    from importlib.metadata import entry_points

    group = entry_points(group=defaults.ENTRY_POINTS_LOGS_SPECS)
    plugin = next((plugin for plugin in group if plugin.name == name), None)
    if plugin is None:
        known = ", ".join(sorted(group.names)) or "none"
        raise UsageError(f"--logs-specs: no entry point {name!r} in {defaults.ENTRY_POINTS_LOGS_SPECS}; installed: {known}")
    try:
        make: Callable[..., LogsSpecs] = plugin.load()
    except Exception as error:  # a plug-in is somebody else's code, and may fail in any way
        raise UsageError(f"--logs-specs: {name!r} ({plugin.value}) cannot be loaded: {error!r}") from error
    return make


def _parse_ranks(text: str) -> set[int] | None:
    ranks = [piece.strip() for piece in text.split(",")] if text else []
    if not all(map(str.isdecimal, ranks)):
        raise UsageError(f"{text!r} is not a list of local ranks, as in 0,1,2")
    return set(map(int, ranks)) or None


def _numa_options(binding: str | None) -> Any:
    """A job whose workers are not bound does not load what knows about it."""
    if binding is None:
        return None
    from rallypoint.affinity import AffinityMode, NumaOptions

    return NumaOptions(AffinityMode(binding))


def _hang_timeout(text: str | None) -> str | None:
    if text is not None:
        from rallypoint.hangs.rules import parse_hang_timeout

        parse_hang_timeout(text)
    return text


def _worker_env(args: SimpleNamespace, workers: int) -> dict[str, str]:
    already_set = defaults.ENV_OMP_NUM_THREADS in environment.own
    threads = _read(args, "omp_num_threads", lambda asked: threads_per_worker(asked, workers, already_set, allowed_cpus()))
    return {} if threads is None else {defaults.ENV_OMP_NUM_THREADS: str(threads)}


def _tell_threads(config: LaunchConfig, asked: str | None) -> None:
    """Threads that the user did not count are told, once: they decide how fast a program on CPUs is."""
    threads = config.worker_env.get(defaults.ENV_OMP_NUM_THREADS)
    if threads is None or asked not in (None, "auto"):
        return
    cpus, workers = allowed_cpus(), config.nproc_per_node
    share = f"{many(cpus, 'CPU')} / {many(workers, 'worker')}"
    if asked is None:
        could_be_more = cpus >= 2 * workers
        more = f"; --omp-num-threads auto would use {cpus // workers}: {share}" if could_be_more else " (see --omp-num-threads)"
        report.info(f"{defaults.ENV_OMP_NUM_THREADS} was not set; using {threads} per worker{more}")
    else:
        report.info(f"{defaults.ENV_OMP_NUM_THREADS}={threads} per worker: {share}")
