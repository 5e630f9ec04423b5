"""LaunchConfig: everything that one node needs to know to run its part of a job.

The fields, their order and their defaults are those of torch's class of the same name; rallypoint's own come last and are given
by name only. Making one has no effect on the world: it checks what it is given, so that a mistake is told by the name of its
field before anything is started.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from rallypoint.base import defaults, environment
from rallypoint.base.records import Record, field
from rallypoint.base.text import signal_names
from rallypoint.errors import UsageError, bad_field
from rallypoint.output.log_specs import DefaultLogsSpecs, LogsSpecs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["LaunchConfig", "count_workers", "resolve_shutdown_timeout"]

_UNCATCHABLE = ("SIGKILL", "SIGSTOP")
# Parameters of the rendezvous that have a field of their own.
_NOT_SETTINGS = ("backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr", "self")


def _whole(at_least: int) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if not hasattr(value, "__index__") or value < at_least:
            raise bad_field(name, f" must be a whole number of {at_least} or more, not {value!r}")

    return check


def _seconds(name: str, value: Any) -> None:
    # The comparison with infinity also refuses what is no number at all: nothing compares with nan.
    if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise bad_field(name, f" must be a number of seconds of 0 or more, not {value!r}")


def _more_than_0_seconds(name: str, value: Any) -> None:
    _seconds(name, value)
    if value == 0:
        raise bad_field(name, " must be more than 0 seconds")


def _line(name: str, value: Any, forbidden: str = "\n\r\0") -> None:
    """Names become file names, environment variables and parts of printed lines; none of them takes these characters."""
    if not isinstance(value, str):
        raise bad_field(name, f" must be a text, not {value!r}")
    if any(character in value for character in forbidden):
        raise bad_field(name, f" must be one line without NUL characters, but is {value!r}")


def _texts(name: str, value: Any) -> None:
    for variable, text in value.items():
        _line(f"{name}[{variable!r}]", text, forbidden="\0")


def _settings(name: str, value: Any) -> None:
    for one in _NOT_SETTINGS:
        if one in value:
            raise bad_field(name, f": {one!r} is not a setting of the rendezvous, but a field or flag of its own")


def _start_method(name: str, value: Any) -> None:
    if value not in defaults.START_METHODS:
        raise bad_field(name, f" must be one of {', '.join(defaults.START_METHODS)}, not {value!r}")


def _log_format(name: str, value: Any) -> None:
    if value not in defaults.LOG_FORMATS:
        raise bad_field(name, f" must be one of {', '.join(defaults.LOG_FORMATS)}, not {value!r}")


def _signals(name: str, value: str) -> None:
    for one in filter(None, map(str.strip, value.split(","))):
        if one not in signal.Signals.__members__:
            raise bad_field(name, f": {one!r} is not a signal of this system; write names such as SIGTERM,SIGUSR1")
        if one in _UNCATCHABLE:
            raise bad_field(name, f": {one} cannot be handled by any program")


def _few_signals(name: str, value: str) -> None:
    """As `_signals`, with names that may leave out SIG, as those of Slurm and kill do."""
    _line(name, value)
    _signals(name, signal_names(value))


def _limits(name: str, value: Any) -> None:
    from rallypoint.hangs.rules import parse_hang_timeout

    try:
        parse_hang_timeout(str(value))
    except UsageError as problem:
        raise bad_field(name, f": {problem}") from problem


def _notices(name: str, value: Any) -> None:
    if not isinstance(value, str | list | tuple) or not all(isinstance(one, str) for one in value):
        raise bad_field(name, f" must be a list of web addresses and commands, not {type(value).__name__}")


def _checks(name: str, value: Any) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise bad_field(name, f" must be a list of the names of checks, or of commands, not {value!r}")
    if not value:
        return
    from rallypoint.preflight.checks import read_specs

    try:
        read_specs(value)
    except ValueError as problem:
        raise bad_field(name, f": {problem}") from problem


def _none_or_one(name: str, value: Any) -> None:
    if value not in (0, 1):
        raise bad_field(name, f" must be 0 or 1, not {value!r}")


class LaunchConfig(Record):
    """How to launch a job on this node.

    min_nodes, max_nodes: how few nodes may run the job, and how many will.
    nproc_per_node: workers on this node.
    logs_specs: where the workers' output goes; made with its defaults if None.
    run_id: the job's name, the same on all of its nodes; drawn at random if empty.
    role: a name for this node's workers.
    rdzv_backend, rdzv_endpoint, rdzv_configs: how and where the nodes meet.
    rdzv_timeout: seconds; goes into ``rdzv_configs["timeout"]``, which is 900 if neither says anything.
    max_restarts: how often the group may be restarted after a failure.
    monitor_interval: seconds between looks at the workers where their end cannot wake the agent.
    start_method: how Python functions are started: spawn, fork or forkserver.
    log_line_prefix_template: what stands before tee'd lines; knows ${role_name}, ${rank}, ${local_rank} and ${hostname}.
    metrics_cfg: settings of the metrics sink.
    local_addr: the address of this node that its peers can reach.
    event_log_handler: the name of the sink for events.
    numa_options: a `NumaOptions`: to which CPUs each worker is bound.
    signals_to_handle: names of signals that end the job, separated by commas.
    duplicate_stdout_filters, duplicate_stderr_filters: tee'd lines with one of these texts go to one more file.
    virtual_local_rank: each worker gets LOCAL_RANK=0 and one visible device.
    shutdown_timeout: seconds from the first signal to SIGKILL; None asks the environment, see `resolve_shutdown_timeout`.

    exit_barrier_timeout: seconds that a node which is done waits for the others.
    log_max_bytes: the most that one log file may hold.
    log_format: how the workers' lines look on the console: as they are (text), or a JSON object each (json).
    worker_env: variables laid over each worker's environment.
    no_retry_exit_codes: exit codes of workers after which the job ends without a restart; -n for signal n.
    restart_backoff: seconds before the second restart, doubled with each one after that; the first comes at once.
    restart_window: only restarts within so many seconds count against max_restarts; 0: all of the job's.
    retry_hopeless: restart after failures too that no restart can help, such as an ImportError in all workers.
    max_no_progress: attempts in a row that may fail without coming further than one before; None: no limit.
    preflight: checks of this machine before it gets a seat, and after a failure of its workers, see `--preflight`.
    hang_timeout: seconds without a sign of life after which a worker hangs; other limits may follow, see `--hang-timeout`.
    preload: modules that workers find imported, as their names or as a text with commas, or "auto", see `--preload`.
    standby: whether another process waits for each worker to take its place, see `rallypoint.worker.ready`.
    proctitle: whether ``ps`` shows workers that are Python by rank and job, as in ``rank 3/8 my-job: python train.py``.
    checkpoint_memory: bytes on this node for what its workers save with `rallypoint.worker.checkpoint`.
    checkpoint_dir: a folder for that memory when a job ends before its work is done; the next one finds it there.
    checkpoint_copies: on how many other nodes there is a copy of what workers save, 0 or 1.
    checkpoint_bandwidth: how many bytes a second this node sends for that; None is no limit.
    notify: who is told of failures, hangs and the end of the job: web addresses, commands, or @FILE, see `--notify`.
    signals_to_forward: names of signals that are passed on to the workers and do nothing else; SIG may be left out.
    drain_grace: seconds that workers have to save when this node has to leave; with it, SIGTERM gives notice before it ends
        anything.
    drain_signals: names of more signals that give notice.
    drain_file: a file that gives notice when it appears.
    drain_forward: the name of a signal that workers get when a node of the job has notice.
    health_port, health_addr: where to answer health checks; None asks the environment.
    web: whether there is a web page of the job at that port, or at a free one; its address, with a token, is told at the start.

    Those on restarts may stand in rdzv_configs instead; either way they end up in both.

    >>> from rallypoint import LaunchConfig
    >>> config = LaunchConfig(min_nodes=2, max_nodes=4, nproc_per_node=8, rdzv_backend="c10d", rdzv_endpoint="node0:29400")
    >>> LaunchConfig.standalone(2, max_restarts=1).max_nodes
    1
    """

    min_nodes: int = field(check=_whole(1))
    max_nodes: int = field(check=_whole(1))
    nproc_per_node: int = field(check=_whole(1))
    logs_specs: LogsSpecs | None = None
    run_id: str = field(default="", check=_line)
    role: str = field(default=defaults.ROLE_API, check=_line)
    rdzv_endpoint: str = field(default="", check=_line)
    rdzv_backend: str = field(default=defaults.BACKEND_API, check=_line)
    rdzv_configs: dict[str, Any] = field(factory=dict, check=_settings)
    rdzv_timeout: int = defaults.RDZV_TIMEOUT_UNSET
    max_restarts: int = field(default=defaults.MAX_RESTARTS_API, check=_whole(0))
    monitor_interval: float = field(default=defaults.MONITOR_INTERVAL_S, check=_more_than_0_seconds)
    start_method: str = field(default=defaults.START_METHOD, check=_start_method)
    log_line_prefix_template: str | None = field(default=None, check=_line)
    metrics_cfg: dict[str, str] = field(factory=dict)
    local_addr: str | None = field(default=None, check=_line)
    event_log_handler: str = defaults.EVENT_LOG_HANDLER
    numa_options: Any = None
    signals_to_handle: str = field(default=defaults.SIGNALS_TO_HANDLE, check=_signals)
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = field(default=None, check=_seconds)

    exit_barrier_timeout: float = field(default=defaults.EXIT_BARRIER_TIMEOUT_S, kw_only=True, check=_seconds)
    log_max_bytes: int | None = field(default=None, kw_only=True, check=_whole(1))
    log_format: str = field(default=defaults.LOG_FORMAT, kw_only=True, check=_log_format)
    worker_env: dict[str, str] = field(factory=dict, kw_only=True, check=_texts)
    no_retry_exit_codes: tuple[int, ...] = field(default=(), kw_only=True)
    restart_backoff: float = field(default=defaults.RESTART_BACKOFF_S, kw_only=True)
    restart_window: float = field(default=defaults.RESTART_WINDOW_S, kw_only=True)
    retry_hopeless: bool = field(default=False, kw_only=True)
    max_no_progress: int | None = field(default=None, kw_only=True)
    preflight: tuple[str, ...] = field(default=(), kw_only=True, check=_checks)
    hang_timeout: str | float | None = field(default=None, kw_only=True, check=_limits)
    preload: str | tuple[str, ...] = field(default=(), kw_only=True)
    standby: bool = field(default=False, kw_only=True)
    proctitle: bool = field(default=True, kw_only=True)
    checkpoint_memory: int | None = field(default=None, kw_only=True, check=_whole(1))
    checkpoint_dir: str | None = field(default=None, kw_only=True)
    checkpoint_copies: int = field(default=0, kw_only=True, check=_none_or_one)
    checkpoint_bandwidth: int | None = field(default=None, kw_only=True, check=_whole(1))
    notify: str | Sequence[str] | None = field(default=None, kw_only=True, check=_notices)
    signals_to_forward: str = field(default="", kw_only=True, check=_few_signals)
    drain_grace: float | None = field(default=None, kw_only=True, check=_more_than_0_seconds)
    drain_signals: str = field(default="", kw_only=True, check=_few_signals)
    drain_file: str | None = field(default=None, kw_only=True, check=_line)
    drain_forward: str = field(default="", kw_only=True, check=_few_signals)
    health_port: int | None = field(default=None, kw_only=True)
    health_addr: str = field(default=defaults.HEALTH_ADDR, kw_only=True)
    web: bool = field(default=False, kw_only=True)

    @classmethod
    def standalone(cls, nproc_per_node: int | str = 1, **fields: Any) -> LaunchConfig:
        """So many workers on this machine alone, as ``rallyrun --standalone --nproc-per-node N`` starts them.

        `nproc_per_node` may also be "auto", "cpu", "gpu" or "xpu". Other fields are given by name; max_restarts is 0 if not.
        """
        workers = count_workers("nproc_per_node", nproc_per_node)
        fields.setdefault("max_restarts", defaults.MAX_RESTARTS_CLI)
        where = defaults.STANDALONE_ENDPOINT
        return cls(1, 1, workers, rdzv_backend=defaults.BACKEND_ELASTIC, rdzv_endpoint=where, **fields)

    def __post_init__(self) -> None:
        for name, one in self._fields.items():
            if one.check is not None and (value := getattr(self, name)) is not one.default:
                one.check(name, value)
        self._check_together()
        self.shutdown_timeout = resolve_shutdown_timeout(self.shutdown_timeout)
        if self.numa_options is not None:
            from rallypoint.affinity import read_options

            self.numa_options = read_options(self.numa_options)
        self.preflight = tuple(self.preflight)
        self.preload = _read_preload(self.preload) if self.preload else ()
        self.rdzv_configs = {**self.rdzv_configs, "timeout": self._timeout()}
        for name in defaults.RESTART_SETTINGS:
            if name in self.rdzv_configs or getattr(self, name) != self._constants[name]:
                self._unite(name)
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()

    def _check_together(self) -> None:
        if self.max_nodes < self.min_nodes:
            raise bad_field("max_nodes", f" is {self.max_nodes}, fewer than min_nodes, which is {self.min_nodes}")
        for name in ("checkpoint_dir", "checkpoint_copies"):
            if self.checkpoint_memory is None and getattr(self, name) != self._constants[name]:
                raise bad_field(name, " needs checkpoint_memory, which is not set")

        for name in ("drain_signals", "drain_file", "drain_forward"):
            if self.drain_grace is None and getattr(self, name) != self._constants[name]:
                raise bad_field(name, " needs drain_grace, which is not set")
        if "," in self.drain_forward:
            raise bad_field("drain_forward", f" is one signal, not {self.drain_forward!r}")
        twice = set(signal_names(self.signals_to_forward).split(",")) & set(signal_names(self.drain_signals).split(",")) - {""}
        if twice:
            raise bad_field("signals_to_forward", f": {', '.join(sorted(twice))} is in drain_signals too; leave one out")

    def _unite(self, name: str) -> None:
        """Let a field and the setting of the same name say the same, whichever of them was given."""
        from rallypoint.rendezvous.settings import parse_setting

        value, is_default = parse_setting(name, getattr(self, name), name), getattr(self, name) == self._constants[name]
        setting = parse_setting(name, self.rdzv_configs.get(name, value), f"rdzv_configs[{name!r}]")
        if not is_default and setting != value:
            raise UsageError(f"{name} is {value!r}, but {setting!r} in rdzv_configs; leave one out")
        setattr(self, name, setting)
        self.rdzv_configs[name] = setting

    def _timeout(self) -> Any:
        if self.rdzv_timeout != defaults.RDZV_TIMEOUT_UNSET:
            _seconds("rdzv_timeout", self.rdzv_timeout)
            return self.rdzv_timeout
        return self.rdzv_configs.get("timeout", defaults.RDZV_TIMEOUT_S)


def count_workers(field: str, asked: int | str) -> int:
    """The workers that a number, or a word such as "gpu", asks for on this machine."""
    from rallypoint.hardware.devices import determine_local_world_size

    try:
        workers = determine_local_world_size(str(asked))
    except ValueError as problem:
        raise bad_field(field, f": {problem}") from problem
    _whole(1)(field, workers)
    return workers


def resolve_shutdown_timeout(shutdown_timeout: int | None) -> int:
    """Seconds from the first signal to SIGKILL: as given, else as the environment says, else the default."""
    if shutdown_timeout is not None:
        return shutdown_timeout
    text = environment.text(defaults.ENV_SHUTDOWN_TIMEOUT, str(defaults.SHUTDOWN_TIMEOUT_S))
    try:
        seconds = int(text)
    except ValueError:
        raise UsageError(f"{defaults.ENV_SHUTDOWN_TIMEOUT} must be a whole number of seconds, not {text!r}") from None
    _seconds(defaults.ENV_SHUTDOWN_TIMEOUT, seconds)
    return seconds


def _read_preload(value: object) -> tuple[str, ...]:
    from rallypoint.processes.warm_rules import read_modules

    if not isinstance(value, str | list | tuple) or not all(isinstance(one, str) for one in value):
        raise bad_field("preload", f" must be the names of modules, not {value!r}")
    try:
        return read_modules(value)
    except ValueError as problem:
        raise bad_field("preload", f": {problem}") from problem
