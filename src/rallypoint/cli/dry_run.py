"""What a launch would do on this node, in words: the text that ``rallyrun --dry-run`` prints instead of starting anything.

Nothing is made, reached or changed for it. What only the meeting of the nodes can tell, such as the master's address, is named
in angle brackets. Values that go by the name of a secret are hidden, as are passwords within addresses: such a text
ends up in logs and in messages to colleagues.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from rallypoint.agent.config import LaunchConfig, resolve_shutdown_timeout
from rallypoint.agent.local_agent import make_learner, plan_workers
from rallypoint.agent.workers import WorkerGroup, WorkerSpec, workers_of
from rallypoint.base import defaults, environment
from rallypoint.base.text import ranges, size_text
from rallypoint.checkpoint.layout import share_out
from rallypoint.cli.listeners import listeners
from rallypoint.errors import UsageError
from rallypoint.net.endpoint import parse_rendezvous_endpoint
from rallypoint.output.log_specs import DefaultLogsSpecs, LogsDest
from rallypoint.protocol.worker_plan import Member, WorkerPlan, assign_ranks
from rallypoint.rendezvous.settings import BY_KEY, read_settings
from rallypoint.rendezvous.settings import describe as describe_settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Entrypoint = Callable[..., Any] | str | None

__all__ = ["describe"]

_HIDDEN = "<hidden>"
_MEETING = "<known when the nodes have met>"
_START = "<chosen at the start>"
_SECRET_WORDS = {"secret", "token", "password", "passwd", "passphrase", "credential", "credentials", "apikey", "auth"}
_KEYS = {("api", "key"), ("access", "key"), ("private", "key"), ("account", "key"), ("auth", "key")}
_LOGIN = re.compile(r"://[^/@\s]+@")
_WIDTH = 14


def describe(config: LaunchConfig, entry: Entrypoint, arguments: Sequence[Any]) -> str:
    """The plan for this node; UsageError where there can be none, as for a binding that the machine does not allow."""
    plans = _plans(config, entry, arguments)
    logs = _logs(config, len(plans))
    cpus, notes = _cpus(config, plans)
    preload = _preload(config, entry, arguments)
    lines = ["Nothing is started; this is the plan for this node.", "", "job", *_job(config, preload, logs is None)]
    for plan in plans:
        lines += ["", f"worker {plan.local_rank}", *_worker(config, entry, plan, logs)]
        lines += _row("CPUs", cpus[plan.local_rank])
    return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"


def _job(config: LaunchConfig, preload: str, has_own_logs: bool) -> Iterator[str]:
    least, most = config.min_nodes, config.max_nodes
    yield from _row("run id", config.run_id or _START)
    yield from _row("nodes", f"{least}" if least == most else f"{least} to {most}")
    standby = f", and {config.nproc_per_node} more on standby" if config.standby else ""
    yield from _row("workers here", f"{config.nproc_per_node}, role {config.role}{standby}")
    yield from _row("memory", *_memory(config))
    yield from _row("preload", preload)
    yield from _row("rendezvous", " at ".join(filter(None, [config.rdzv_backend, _veil(config.rdzv_endpoint)])))
    yield from _row("settings", _settings(config))
    yield from _row("listens", *map(str, listeners(config)))
    yield from _row("restarts", f"{config.max_restarts} at most" + _pauses(config))
    yield from _row("time-outs", ", ".join(_time_outs(config)))
    yield from _row("signals", f"{config.signals_to_handle or 'none'}, passed on to the workers")
    if config.notify:
        from rallypoint.notices.notifier import read_targets

        yield from _row("told", ", ".join(target.name for target in read_targets(config.notify)))
    if has_own_logs:
        yield from _row("logs", f"as {type(config.logs_specs).__name__} decides")


def _memory(config: LaunchConfig) -> Iterator[str]:
    """As far as it is known before anything runs."""
    if config.standby:
        yield "standby: for each worker what its program holds when it calls ready(), on GPUs too; said when they wait"
    if config.checkpoint_memory is not None:
        shares = share_out(config.checkpoint_memory, config.nproc_per_node, bool(config.checkpoint_copies))
        whole, each = size_text(config.checkpoint_memory), size_text(shares.largest_bytes)
        guests = f"; {size_text(shares.guest_bytes)} for copies of another node's" if shares.guest_bytes else ""
        shared = ", which standby shares" if config.standby else ""
        yield f"snapshots: {whole} at most; {shares.slots} of up to {each} for each worker{shared}{guests}"


def _preload(config: LaunchConfig, entry: Entrypoint, arguments: Sequence[Any]) -> str:
    """What is known by now of the program's imports is looked up, and nothing is measured."""
    assert config.logs_specs is not None
    learner = make_learner(tuple(config.preload), entry, arguments, config.logs_specs)
    return ", ".join(config.preload) if learner is None else f"{defaults.PRELOAD_AUTO}: {learner.describe()}"


def _pauses(config: LaunchConfig) -> str:
    if not config.max_restarts:
        return ""
    codes = ", ".join(map(str, config.no_retry_exit_codes))
    window = f", counted over {config.restart_window:g} s" if config.restart_window else ""
    return f", the second after {config.restart_backoff:g} s{window}" + (f"; none after exit code {codes}" if codes else "")


def _time_outs(config: LaunchConfig) -> Iterator[str]:
    kill_wait = environment.text(defaults.ENV_UNINTERRUPTIBLE_TIMEOUT, f"{defaults.UNINTERRUPTIBLE_TIMEOUT_S:g}")
    yield f"SIGKILL {resolve_shutdown_timeout(config.shutdown_timeout)} s after the first signal"
    yield f"given up {kill_wait} s after SIGKILL"
    yield f"exit barrier {config.exit_barrier_timeout:g} s"
    if config.rdzv_backend == defaults.BACKEND_CLI:
        yield f"rendezvous {config.rdzv_configs['timeout']} s"


def _settings(config: LaunchConfig) -> str:
    """Those of the rendezvous: ours in words, and whatever else a back end is given, as it stands."""
    ours = {key: value for key, value in config.rdzv_configs.items() if key in BY_KEY or key == "conf_file"}
    others = {key: value for key, value in config.rdzv_configs.items() if key not in ours}
    known = describe_settings(read_settings(ours, environment.own)) if config.max_nodes > 1 else ""
    return ", ".join(filter(None, [known, *(f"{key} {_shown(key, str(value))}" for key, value in others.items())]))


def _plans(config: LaunchConfig, entry: Entrypoint, arguments: Sequence[Any]) -> list[WorkerPlan]:
    """As if this node were the only one; `_environment` takes back what the others will change."""
    spec = WorkerSpec(
        config.role,
        config.nproc_per_node,
        None,  # type: ignore[arg-type]  # nobody is met
        entrypoint=entry,
        args=tuple(arguments),
        max_restarts=config.max_restarts,
        virtual_local_rank=config.virtual_local_rank,
    )
    group = WorkerGroup(spec)
    group.workers = workers_of(assign_ranks([Member(config.role, config.nproc_per_node)], 0))
    if config.rdzv_backend == defaults.BACKEND_CLI:  # else the master is found at the rendezvous
        endpoint = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=defaults.MASTER_PORT)
        group.master_addr, group.master_port = endpoint
    return plan_workers(
        group,
        restart_count=0,
        generation=1,
        run_id=config.run_id or _START,
        use_agent_store=False,
        signals_to_handle=config.signals_to_handle,
        prefix_template=config.log_line_prefix_template,
        extra_env=config.worker_env,
    )


def _worker(config: LaunchConfig, entry: Entrypoint, plan: WorkerPlan, logs: LogsDest | None) -> Iterator[str]:
    yield from _command(config, entry, plan.args)
    environment = _environment(config, plan)
    if logs is not None:
        environment[defaults.ENV_ERROR_FILE] = logs.error_files[plan.local_rank]
    yield from _row("environment", *(f"{name}={_shown(name, value)}" for name, value in environment.items()))
    if logs is not None:
        for name, files, tees in (("stdout", logs.stdouts, logs.tee_stdouts), ("stderr", logs.stderrs, logs.tee_stderrs)):
            also = " and the console" if plan.local_rank in tees else ""
            yield from _row(name, (files[plan.local_rank] or "the console") + also)


def _command(config: LaunchConfig, entry: Entrypoint, args: Sequence[Any]) -> list[str]:
    if isinstance(entry, str):
        return _row("command", shlex.join(_veiled_arguments([entry, *map(str, args)])))
    name = f"{getattr(entry, '__module__', '')}.{getattr(entry, '__qualname__', type(entry).__name__)}"
    texts = iter(_veiled_arguments([arg for arg in args if isinstance(arg, str)]))
    shown = [repr(next(texts)) if isinstance(arg, str) else f"<{type(arg).__name__}>" for arg in args]
    return _row("function", f"{name}({', '.join(shown)}), started by {config.start_method}")


def _environment(config: LaunchConfig, plan: WorkerPlan) -> dict[str, str]:
    """What rallypoint adds to what the worker inherits; of several nodes only this one is known yet."""
    env = dict(plan.env)
    unknown = {defaults.ENV_USE_AGENT_STORE: _START}
    if config.rdzv_backend != defaults.BACKEND_CLI:
        unknown |= dict.fromkeys((defaults.ENV_MASTER_ADDR, defaults.ENV_MASTER_PORT), _MEETING)
    if config.max_nodes > 1:
        unknown |= dict.fromkeys((defaults.ENV_WORLD_SIZE, defaults.ENV_ROLE_WORLD_SIZE), _MEETING)
        unknown |= dict.fromkeys((defaults.ENV_RANK, defaults.ENV_ROLE_RANK), f"<first of this node> + {plan.local_rank}")
        unknown[defaults.ENV_GROUP_RANK] = str(config.rdzv_configs.get("rank", _MEETING))
        unknown[defaults.ENV_GROUP_WORLD_SIZE] = str(config.max_nodes) if config.min_nodes == config.max_nodes else _MEETING
    return env | {name: text for name, text in unknown.items() if name not in config.worker_env}


def _logs(config: LaunchConfig, workers: int) -> LogsDest | None:
    """Where the default layout would put each file; a plug-in keeps that to itself until it makes them."""
    specs = config.logs_specs
    if not isinstance(specs, DefaultLogsSpecs):
        return None
    root = os.path.abspath(specs.root_log_dir)
    if specs.is_temporary:
        root = os.path.join(os.path.dirname(root), "rallypoint_<random>")
    folder = os.path.join(root, f"{config.run_id or '<run id>'}_<random>", "attempt_<n>")
    return specs._destinations(list(range(workers)), "" if root == os.devnull else folder)


def _cpus(config: LaunchConfig, plans: Sequence[WorkerPlan]) -> tuple[dict[int, str], tuple[str, ...]]:
    """In words, for each local rank, and what else is to be told about them."""

    if config.numa_options is None:
        allowed = ranges(os.sched_getaffinity(0))
        return dict.fromkeys(range(len(plans)), f"{allowed}: all that may be used, as no binding was asked for"), ()
    from rallypoint.affinity import plan_binding, read_options

    options = read_options(config.numa_options)
    try:
        bound = plan_binding(options.affinity_mode, {plan.local_rank: plan.env for plan in plans})
    except UsageError as problem:
        if not options.should_fall_back_if_binding_fails:
            raise
        return dict.fromkeys(range(len(plans)), "not bound, see below"), (str(problem),)
    return {one.local_rank: f"{ranges(one.cpus)}: {one.why}" for one in bound.bindings}, bound.notes


def _row(name: str, *texts: str) -> list[str]:
    """One or more lines under a name; none where there is nothing to tell."""
    return [f"  {name if not index else '':{_WIDTH}}{text}" for index, text in enumerate(texts) if text]


def _shown(name: str, text: str) -> str:
    return _HIDDEN if _is_secret(name) else _veil(text)


def _veil(text: str) -> str:
    return _LOGIN.sub(f"://{_HIDDEN}@", text)


def _is_secret(name: str) -> bool:
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    return bool(_SECRET_WORDS & set(words)) or any(pair in _KEYS for pair in pairwise(words))


def _veiled_arguments(arguments: Sequence[str]) -> list[str]:
    """A program's arguments without what follows the name of a secret, after a space or an equals sign."""
    shown = []
    before = ""
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if equals and _is_secret(name):
            shown.append(f"{name}={_HIDDEN}")
        elif before.startswith("-") and "=" not in before and _is_secret(before) and not argument.startswith("-"):
            shown.append(_HIDDEN)
        else:
            shown.append(_veil(argument))
        before = argument
    return shown
