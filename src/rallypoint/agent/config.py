"""LaunchConfig: everything that one node needs to know to run its part of a job.

The fields, their order and their defaults are those of torch's class of the same name; rallypoint's own come last and are given
by name only. Making one has no effect on the world: it checks what it is given, so that a mistake is told by the name of its
field before anything is started.
"""

from __future__ import annotations

import signal

from rallypoint.base import defaults, environment
from rallypoint.base.records import Record, field
from rallypoint.errors import UsageError, bad_field
from rallypoint.output.log_specs import DefaultLogsSpecs, LogsSpecs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["LaunchConfig", "count_workers", "resolve_shutdown_timeout"]

_UNCATCHABLE = ("SIGKILL", "SIGSTOP")
# Parameters of the rendezvous that have a field of their own.
_NOT_SETTINGS = ("backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr", "self")


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
    worker_env: variables laid over each worker's environment.
    no_retry_exit_codes: exit codes of workers after which the job ends without a restart; -n for signal n.
    restart_backoff: seconds before the second restart, doubled with each one after that; the first comes at once.
    restart_window: only restarts within so many seconds count against max_restarts; 0: all of the job's.
    hang_timeout: seconds without a sign of life after which a worker hangs; other limits may follow, see `--hang-timeout`.
    preload: modules that workers find imported, as their names or as a text with commas, see `--preload`.
    standby: whether another process waits for each worker to take its place, see `rallypoint.worker.ready`.
    checkpoint_memory: bytes on this node for what its workers save with `rallypoint.worker.checkpoint`.
    checkpoint_dir: a folder for that memory when a job ends before its work is done; the next one finds it there.
    checkpoint_copies: on how many other nodes there is a copy of what workers save, 0 or 1.
    checkpoint_bandwidth: how many bytes a second this node sends for that; None is no limit.
    health_port, health_addr: where to answer health checks; None asks the environment.

    Those on restarts may stand in rdzv_configs instead; either way they end up in both.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = defaults.ROLE_API
    rdzv_endpoint: str = ""
    rdzv_backend: str = defaults.BACKEND_API
    rdzv_configs: dict[str, Any] = field(factory=dict)
    rdzv_timeout: int = defaults.RDZV_TIMEOUT_UNSET
    max_restarts: int = defaults.MAX_RESTARTS_API
    monitor_interval: float = defaults.MONITOR_INTERVAL_S
    start_method: str = defaults.START_METHOD
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(factory=dict)
    local_addr: str | None = None
    event_log_handler: str = defaults.EVENT_LOG_HANDLER
    numa_options: Any = None
    signals_to_handle: str = defaults.SIGNALS_TO_HANDLE
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None

    exit_barrier_timeout: float = field(default=defaults.EXIT_BARRIER_TIMEOUT_S, kw_only=True)
    log_max_bytes: int | None = field(default=None, kw_only=True)
    worker_env: dict[str, str] = field(factory=dict, kw_only=True)
    no_retry_exit_codes: tuple[int, ...] = field(default=(), kw_only=True)
    restart_backoff: float = field(default=defaults.RESTART_BACKOFF_S, kw_only=True)
    restart_window: float = field(default=defaults.RESTART_WINDOW_S, kw_only=True)
    hang_timeout: str | float | None = field(default=None, kw_only=True)
    preload: str | tuple[str, ...] = field(default=(), kw_only=True)
    standby: bool = field(default=False, kw_only=True)
    checkpoint_memory: int | None = field(default=None, kw_only=True)
    checkpoint_dir: str | None = field(default=None, kw_only=True)
    checkpoint_copies: int = field(default=0, kw_only=True)
    checkpoint_bandwidth: int | None = field(default=None, kw_only=True)
    health_port: int | None = field(default=None, kw_only=True)
    health_addr: str = field(default=defaults.HEALTH_ADDR, kw_only=True)

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
        self._check_counts()
        self._check_times()
        self._check_texts()
        _check_signals(self.signals_to_handle)
        self.shutdown_timeout = resolve_shutdown_timeout(self.shutdown_timeout)
        if self.numa_options is not None:
            from rallypoint.affinity import read_options

            self.numa_options = read_options(self.numa_options)
        if self.hang_timeout is not None:
            _check_hang_timeout(self.hang_timeout)
        if self.preload:
            self.preload = _read_preload(self.preload)
        self.rdzv_configs = {**self.rdzv_configs, "timeout": self._timeout()}
        for name in defaults.RESTART_SETTINGS:
            if name in self.rdzv_configs or getattr(self, name) != self._constants[name]:
                self._unite(name)
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()

    def _check_counts(self) -> None:
        _check_whole("min_nodes", self.min_nodes, at_least=1)
        _check_whole("max_nodes", self.max_nodes, at_least=1)
        if self.max_nodes < self.min_nodes:
            raise bad_field("max_nodes", f" is {self.max_nodes}, fewer than min_nodes, which is {self.min_nodes}")
        _check_whole("nproc_per_node", self.nproc_per_node, at_least=1)
        _check_whole("max_restarts", self.max_restarts, at_least=0)
        if self.log_max_bytes is not None:
            _check_whole("log_max_bytes", self.log_max_bytes, at_least=1)
        if self.checkpoint_memory is not None:
            _check_whole("checkpoint_memory", self.checkpoint_memory, at_least=1)
        elif self.checkpoint_dir is not None:
            raise bad_field("checkpoint_dir", " needs checkpoint_memory, which is not set")
        elif self.checkpoint_copies:
            raise bad_field("checkpoint_copies", " needs checkpoint_memory, which is not set")
        if self.checkpoint_copies not in (0, 1):
            raise bad_field("checkpoint_copies", f" must be 0 or 1, not {self.checkpoint_copies!r}")
        if self.checkpoint_bandwidth is not None:
            _check_whole("checkpoint_bandwidth", self.checkpoint_bandwidth, at_least=1)

    def _check_times(self) -> None:
        _check_seconds("monitor_interval", self.monitor_interval)
        if self.monitor_interval == 0:
            raise bad_field("monitor_interval", " must be more than 0 seconds")
        _check_seconds("exit_barrier_timeout", self.exit_barrier_timeout)
        if self.shutdown_timeout is not None:
            _check_seconds("shutdown_timeout", self.shutdown_timeout)
        if self.rdzv_timeout != defaults.RDZV_TIMEOUT_UNSET:
            _check_seconds("rdzv_timeout", self.rdzv_timeout)

    def _check_texts(self) -> None:
        for name in ("run_id", "role", "rdzv_endpoint", "rdzv_backend"):
            _check_line(name, getattr(self, name))
        for name in ("local_addr", "log_line_prefix_template"):
            _check_line(name, getattr(self, name) or "")
        for name in _NOT_SETTINGS:
            if name in self.rdzv_configs:
                raise bad_field("rdzv_configs", f": {name!r} is not a setting of the rendezvous, but a field or flag of its own")
        for variable, value in self.worker_env.items():
            _check_line(f"worker_env[{variable!r}]", value, forbidden="\0")
        if self.start_method not in defaults.START_METHODS:
            raise bad_field("start_method", f" must be one of {', '.join(defaults.START_METHODS)}, not {self.start_method!r}")

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
            return self.rdzv_timeout
        return self.rdzv_configs.get("timeout", defaults.RDZV_TIMEOUT_S)


def count_workers(field: str, asked: int | str) -> int:
    """The workers that a number, or a word such as "gpu", asks for on this machine."""
    from rallypoint.hardware.devices import determine_local_world_size

    try:
        workers = determine_local_world_size(str(asked))
    except ValueError as problem:
        raise bad_field(field, f": {problem}") from problem
    _check_whole(field, workers, at_least=1)
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
    _check_seconds(defaults.ENV_SHUTDOWN_TIMEOUT, seconds)
    return seconds


def _read_preload(value: object) -> tuple[str, ...]:
    from rallypoint.processes.warm_rules import read_modules

    if not isinstance(value, str | list | tuple) or not all(isinstance(one, str) for one in value):
        raise bad_field("preload", f" must be the names of modules, not {value!r}")
    try:
        return read_modules(value)
    except ValueError as problem:
        raise bad_field("preload", f": {problem}") from problem


def _check_hang_timeout(value: object) -> None:
    from rallypoint.hangs.rules import parse_hang_timeout

    try:
        parse_hang_timeout(str(value))
    except UsageError as problem:
        raise bad_field("hang_timeout", f": {problem}") from problem


def _check_whole(name: str, value: Any, at_least: int) -> None:
    if not hasattr(value, "__index__") or value < at_least:
        raise bad_field(name, f" must be a whole number of {at_least} or more, not {value!r}")


def _check_seconds(name: str, value: Any) -> None:
    # The comparison with infinity also refuses what is no number at all: nothing compares with nan.
    if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise bad_field(name, f" must be a number of seconds of 0 or more, not {value!r}")


def _check_line(name: str, value: Any, forbidden: str = "\n\r\0") -> None:
    """Names become file names, environment variables and parts of printed lines; none of them takes these characters."""
    if not isinstance(value, str):
        raise bad_field(name, f" must be a text, not {value!r}")
    if any(character in value for character in forbidden):
        raise bad_field(name, f" must be one line without NUL characters, but is {value!r}")


def _check_signals(names: str) -> None:
    for name in filter(None, map(str.strip, names.split(","))):
        if name not in signal.Signals.__members__:
            problem = f": {name!r} is not a signal of this system; write names such as SIGTERM,SIGUSR1"
            raise bad_field("signals_to_handle", problem)
        if name in _UNCATCHABLE:
            raise bad_field("signals_to_handle", f": {name} cannot be handled by any program")
