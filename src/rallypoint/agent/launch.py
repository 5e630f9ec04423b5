"""Launching: from a LaunchConfig and an entry point to the results of the workers on this node.

Names are looked up through their modules at the time of use, because callers replace them there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from rallypoint import events, metrics
from rallypoint.agent.capabilities import peers_of
from rallypoint.agent.config import LaunchConfig, count_workers, resolve_shutdown_timeout
from rallypoint.agent.leaving import DrainFlags
from rallypoint.agent.local_agent import LocalElasticAgent
from rallypoint.agent.peers import PlainPeers
from rallypoint.agent.workers import RunResult, WorkerGroup, WorkerSpec, _get_entrypoint_name
from rallypoint.base import defaults, environment, outbox, report
from rallypoint.errors import (
    JobFailedError,
    JobPreemptedError,
    JobStoppedError,
    RendezvousError,
    SignalException,
    UnkillableWorkersError,
    UsageError,
    bad_field,
    in_words,
    is_child_failure,
)
from rallypoint.net.endpoint import parse_rendezvous_endpoint
from rallypoint.protocol.restarts import RestartPolicy
from rallypoint.rendezvous import registry as rdzv_registry
from rallypoint.rendezvous.handler import RendezvousParameters

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any, NoReturn

    from rallypoint.notices.notifier import Notifier

    Entrypoint = Callable[..., Any] | str | None

__all__ = ["LaunchConfig", "elastic_launch", "launch", "launch_agent"]

SHOWN_RESULTS = 64
SHOWN_CHARACTERS = 500
# What the agent is told as the config has it: whatever goes by the same name in both.
_FIELDS_OF_AGENT = [name for name in LocalElasticAgent.__init__.__code__.co_varnames if name in LaunchConfig._fields]


class elastic_launch:  # the name is part of the contract
    """A function or program that, when called, runs on all workers: ``elastic_launch(config, fn)(*args)``.

    The call returns what each worker of this node returned, by global rank.

    >>> from rallypoint import LaunchConfig, elastic_launch
    >>> elastic_launch(LaunchConfig.standalone(2), abs)(-7)
    {0: 7, 1: 7}
    """

    def __init__(self, config: LaunchConfig, entrypoint: Entrypoint, health_check_server: Any = None) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, list(args), self._health_check_server)


def launch(fn: Entrypoint, nproc: int | str, args: Sequence[Any] = (), **fields: Any) -> list[Any]:
    """Run ``fn(*args)`` in `nproc` processes of this machine; the list has what each of them returned, by rank.

    `fn` may also be the name of a program. `nproc` is a number, or one of the words of ``--nproc-per-node`` such as "gpu". Every
    other field of `LaunchConfig` may be given by name. Raises `ChildFailedError` when a worker fails, and the others are stopped.

    >>> import rallypoint
    >>> rallypoint.launch(abs, nproc=2, args=(-7,))
    [7, 7]
    """
    config = LaunchConfig.standalone(count_workers("nproc", nproc), **fields)
    results = launch_agent(config, fn, list(args))
    return Results(results[rank] for rank in sorted(results))


class Results(list["Any"]):
    """What workers returned, by rank: a list, of which a notebook shows a table."""

    def _repr_html_(self) -> str:
        from html import escape

        shown = [repr(value) for value in self[:SHOWN_RESULTS]]
        clipped = [text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…" for text in shown]
        rows = "".join(f"<tr><td>{rank}</td><td><pre>{escape(text)}</pre></td></tr>" for rank, text in enumerate(clipped))
        more = f"<p>and {len(self) - SHOWN_RESULTS} more</p>" if len(self) > SHOWN_RESULTS else ""
        return f"<table><tr><th>rank</th><th>returned</th></tr>{rows}</table>{more}"


def launch_agent(
    config: LaunchConfig, entrypoint: Entrypoint, args: list[Any], health_check_server: Any = None
) -> dict[int, Any]:
    """Run one agent to its end. A signal leaves the rendezvous open, so that the job can go on elsewhere; all else closes it.

    >>> from rallypoint import LaunchConfig, launch_agent
    >>> launch_agent(LaunchConfig.standalone(1), abs, [-7])
    {0: 7}
    """
    with outbox.on_duty(), _seen_in_notebook(config.nproc_per_node):
        return _launch_agent(config, entrypoint, args, health_check_server)


def _seen_in_notebook(workers: int) -> AbstractContextManager[object]:
    """Whoever has called us from a cell of a notebook sees how it goes; there alone is anything loaded for that."""
    ipython = sys.modules.get("IPython")  # None has no get_ipython either
    shell = getattr(ipython, "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel") or report.is_live():
        return nullcontext()
    from rallypoint.output.notebook_line import shown_in_notebook

    return shown_in_notebook(workers)


def _launch_agent(config: LaunchConfig, entrypoint: Entrypoint, args: list[Any], health_check_server: Any) -> dict[int, Any]:
    if not config.run_id:
        config.run_id = str(int.from_bytes(os.urandom(16), "big"))
        report.debug(f"the config names no run_id; {config.run_id} was drawn")
    events.check_sink(config.event_log_handler)
    metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
    _check_watches(config)
    environment.write({defaults.ENV_SIGNALS_TO_HANDLE: config.signals_to_handle})
    notifier = _make_notifier(config)
    listeners = [] if health_check_server is not None else _open_health_port(config)
    try:
        spec = _worker_spec(config, entrypoint, args)
        agent = _make_agent(config, spec, health_check_server, listeners, notifier)
    except BaseException:  # raised again, but the port is freed
        for listener in listeners:
            listener.close()
        raise
    peers, shutdown_rdzv, patience_s = peers_of(spec), True, defaults.NOTICE_WAIT_S
    try:
        result = agent.run()
        events.record(agent.get_event_succeeded(), config.event_log_handler)
        if result.is_failed():
            _raise_failures(_get_entrypoint_name(entrypoint, args), result, peers, agent)
        return result.return_values
    except SignalException:
        shutdown_rdzv = False
        patience_s = defaults.NOTICE_WAIT_AFTER_SIGNAL_S
        _leave(peers)
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    except Exception as error:  # all that ends an agent is put on record; each is raised again
        if not isinstance(error, JobFailedError) and not is_child_failure(error):
            events.record(agent.get_event_failed(), config.event_log_handler)
            _leave(peers, error)
        raise
    finally:
        try:
            if shutdown_rdzv:
                spec.rdzv_handler.shutdown()
        finally:
            if notifier is not None:  # last of all: nobody else waits for this
                notifier.close(patience_s)


def _make_notifier(config: LaunchConfig) -> Notifier | None:
    """Who tells others of the run, where that is asked for; what cannot be told is refused."""
    if not config.notify:
        return None
    from rallypoint.notices.notifier import Notifier, read_targets

    return Notifier(read_targets(config.notify))


def _check_watches(config: LaunchConfig) -> None:
    """Refuse what could only fail later, before any node waits for this one."""
    if config.numa_options is not None:
        from rallypoint.affinity import check_binding

        check_binding(config.numa_options, config.nproc_per_node)
    timer_file = environment.text(defaults.ENV_TIMER_FILE)
    if timer_file and environment.is_on(defaults.ENV_ENABLE_FILE_TIMER):
        from rallypoint.timers.file_server import check_timer_file

        check_timer_file(timer_file)


def _open_health_port(config: LaunchConfig) -> list[socket.socket]:
    is_inherited = config.health_port is None and bool(environment.text(defaults.ENV_HEALTH_CHECK_PORT))
    if config.health_port is None and not is_inherited and not config.web:
        return []
    from rallypoint.health.server import open_listeners_or_explain, resolve_health_port

    port = resolve_health_port(config.health_port)
    if is_inherited:  # the agents of a host inherit the variable, and one can have the port: each tries it
        return []
    return open_listeners_or_explain(config.health_addr, port)


def _worker_spec(config: LaunchConfig, entrypoint: Entrypoint, args: Sequence[Any]) -> WorkerSpec:
    backend, endpoint = _meeting_place(config)
    parameters = RendezvousParameters(
        backend=backend,
        endpoint=endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    master_addr, master_port = _get_addr_and_port(parameters)
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        rdzv_handler=rdzv_registry.get_rendezvous_handler(parameters),
        entrypoint=entrypoint,
        args=tuple(args),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )


def _meeting_place(config: LaunchConfig) -> tuple[str, str]:
    """The back end and its endpoint; one node that names no place has nobody to meet, whatever the back end would need."""
    is_alone = config.max_nodes == 1 and not config.rdzv_endpoint.strip()
    if is_alone and rdzv_registry.is_ours(config.rdzv_backend):
        return defaults.BACKEND_ELASTIC, defaults.STANDALONE_ENDPOINT
    return config.rdzv_backend, config.rdzv_endpoint


def _make_agent(
    config: LaunchConfig,
    spec: WorkerSpec,
    health_check_server: Any,
    health_listeners: list[socket.socket],
    notifier: Notifier | None,
) -> LocalElasticAgent:
    if config.logs_specs is None:
        raise UsageError("logs_specs was set to None after the config was made; leave it out for the default")
    if config.log_max_bytes is not None:
        config.logs_specs.log_max_bytes = config.log_max_bytes
    if config.log_format != defaults.LOG_FORMAT:
        config.logs_specs.log_format = config.log_format
    given = {name: getattr(config, name) for name in _FIELDS_OF_AGENT}
    given["shutdown_timeout"] = resolve_shutdown_timeout(config.shutdown_timeout)
    if notifier is not None:
        given["notifier"] = notifier
    return LocalElasticAgent(
        spec=spec,
        health_check_server=health_check_server,
        health_listeners=health_listeners,
        restart_policy=_restart_policy(config),
        drain=DrainFlags(
            config.signals_to_forward, config.drain_grace, config.drain_signals, config.drain_file, config.drain_forward
        ),
        **given,
    )


def _restart_policy(config: LaunchConfig) -> RestartPolicy:
    """For an agent that rules for itself; where the job does, the settings of the rendezvous say the same."""
    policy = RestartPolicy(
        config.max_restarts,
        no_retry_exit_codes=config.no_retry_exit_codes,
        backoff_s=config.restart_backoff,
        window_s=config.restart_window,
        max_no_progress=config.max_no_progress,
        retry_hopeless=config.retry_hopeless,
    )
    given = {key: config.rdzv_configs[key] for key in defaults.OTHER_RESTART_SETTINGS if key in config.rdzv_configs}
    if not given:
        return policy
    from rallypoint.rendezvous.settings import parse_setting

    values = {key: parse_setting(key, value, f"rdzv_configs[{key!r}]") for key, value in given.items()}
    return policy.replace(**{defaults.OTHER_RESTART_SETTINGS[key]: value for key, value in values.items()})


def _raise_failures(name: str, result: RunResult, peers: PlainPeers, agent: LocalElasticAgent) -> NoReturn:
    """A failed run becomes an error; of a job of several nodes, after the verdict, which is the same on all of them."""
    verdict = peers.job.end_error()
    for line in verdict.lines if isinstance(verdict, JobFailedError) else ():
        report.warn(line)
    if isinstance(verdict, JobStoppedError | JobPreemptedError):
        raise verdict  # workers that fail when those of other nodes are stopped are no news
    if peers.act_as_one and not result.failures:
        raise verdict or JobFailedError("the lines before this one say why", [], None)
    if verdict is not None:
        report.warn(str(verdict))  # why there was no other attempt; what follows is about our own workers
    from rallypoint.failures.process_failure import ChildFailedError

    error = ChildFailedError(name=name, failures=result.failures)
    group = agent.get_worker_group()
    error.is_hopeless = verdict.is_hopeless if isinstance(verdict, JobFailedError) else getattr(agent, "is_hopeless", False)
    if isinstance(group, WorkerGroup) and group.workers:  # else the agent is one that somebody has put in its place
        error.world_size = group.workers[0].world_size
    if isinstance(verdict, JobFailedError):
        error.cause_text, error.cause_rank, error.cause_exitcode = verdict.cause_text, verdict.cause_rank, verdict.cause_exitcode
        alike = [rank for rank in result.failures for first, last in verdict.alike if first <= rank <= last]
        error.ranks_like_cause = tuple(alike)
    raise error


def _leave(peers: PlainPeers, error: Exception | None = None) -> None:
    """Leave a job of several nodes, with word of what is wrong with this one alone, if it is that."""
    is_ours = error is not None and not isinstance(error, RendezvousError | JobFailedError | UnkillableWorkersError)
    peers.job.leave(in_words(error) if error is not None and is_ours else "")


def _get_addr_and_port(rdzv_parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """The workers' master, where the user names it: with the static back end the endpoint is the master."""
    if rdzv_parameters.backend != defaults.BACKEND_CLI:
        return None, None
    endpoint = rdzv_parameters.endpoint.strip()
    if not endpoint:
        raise bad_field("rdzv_endpoint", " is empty: the static back end needs the master's address and port, as host:port")
    address, port = parse_rendezvous_endpoint(endpoint, default_port=-1)
    if port == -1:
        raise bad_field("rdzv_endpoint", f" {endpoint!r} has no port: the static back end needs one, as host:port")
    return address, port
