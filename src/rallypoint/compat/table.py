"""The one table of torch's names and ours.

For each of torch's modules it says in which of our modules its names are: first those that are public there, then others that
programs import or replace all the same. A name that is another one here is written ``theirs=ours``.

A name of ours belongs to the first place in the table that maps to it, in public if there is one: what a program sets there is
set in our module, where our code looks it up. That is why a name is mapped to the module of ours that uses it, not to the one
that defines it, and to several where several use it. All other places only show it; what is set there stays there, as with any
``from module import name``.
"""

from __future__ import annotations

__all__ = ["FACADE_OF", "ROOTS", "TABLE", "Names"]

Names = dict[str, str]  # our module, below rallypoint -> names in it

ROOTS = tuple(f"torch.distributed.{name}" for name in ("elastic", "launcher", "run", "launch"))

_TIMER_VARIABLES = "TORCHELASTIC_ENABLE_FILE_TIMER=ENV_ENABLE_FILE_TIMER TORCHELASTIC_TIMER_FILE=ENV_TIMER_FILE"
_HEALTH_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT=ENV_HEALTH_CHECK_PORT"
_RENDEZVOUS_ERRORS = (
    "RendezvousClosedError RendezvousConnectionError RendezvousError RendezvousGracefulExitError RendezvousStateError "
    "RendezvousTimeoutError"
)
_HANDLER_NAMES = (
    "RendezvousHandler RendezvousHandlerCreator RendezvousHandlerRegistry RendezvousInfo RendezvousParameters "
    "RendezvousStoreInfo rendezvous_handler_registry"
)
_LOG_NAMES = "DefaultLogsSpecs LogsDest LogsSpecs Std to_map"
_METRIC_NAMES = (
    "ConsoleMetricHandler MetricData MetricHandler MetricsConfig NullMetricHandler configure getStream get_elapsed_time_ms "
    "prof profile publish_metric put_metric"
)
_TIMER_NAMES = "TimerClient TimerRequest TimerServer configure expires"

_LAUNCHER: dict[str, tuple[Names, Names]] = {
    "launcher.api": (
        {"agent.launch": "LaunchConfig elastic_launch launch_agent"},
        {
            "agent.launch": "LocalElasticAgent RendezvousParameters SignalException WorkerSpec _get_addr_and_port "
            "_get_entrypoint_name events metrics parse_rendezvous_endpoint rdzv_registry",
            "agent.config": "DefaultLogsSpecs LogsSpecs",
            "failures.process_failure": "ChildFailedError",
            "health.server": "HealthCheckServer create_healthcheck_server",
            "base.defaults": _HEALTH_VARIABLE,
            "compat.torch_names": "get_logger",
            "affinity": "NumaOptions",
            "": "os sys torch uuid",
        },
    ),
    "launcher": ({"agent.launch": "LaunchConfig elastic_launch launch_agent"}, {}),
    "run": (
        {
            "torch_run": "DefaultLogsSpecs LaunchConfig LogsSpecs REMAINDER Std check_env config_from_args "
            "determine_local_world_size elastic_launch env get_args_parser get_logger get_rdzv_endpoint get_use_env macros main "
            "parse_args parse_min_max_nnodes record run run_script_path",
        },
        {
            "compat.private_names": "_parse_rendezvous_config=parse_rendezvous_config",
            "affinity": "_AffinityMode=AffinityMode _NumaOptions=NumaOptions",
            "": "os sys torch uuid",
        },
    ),
    "launch": ({"compat.launch_module": "get_args_parser launch main parse_args run"}, {}),
}

_AGENT: dict[str, tuple[Names, Names]] = {
    "elastic": ({}, {}),
    "elastic.agent": ({}, {}),
    "elastic.agent.server.api": (
        {
            "agent.workers": "RunResult Worker WorkerGroup WorkerSpec WorkerState",
            "agent.agent": "ElasticAgent SimpleElasticAgent",
        },
        {
            "agent.agent": "DEFAULT_ROLE Event EventSource RendezvousGracefulExitError SignalException _RoleInstanceInfo "
            "_get_fq_hostname prof put_metric store_util=barriers",
            "agent.records": "Event EventSource _get_fq_hostname put_metric record",
            "failures.process_failure": "ProcessFailure",
            "compat.torch_names": "get_logger",
            "affinity": "NumaOptions",
            "@": "rdzv=elastic.rendezvous",
            "": "json os signal socket time traceback warnings",
        },
    ),
    "elastic.agent.server.local_elastic_agent": (
        {
            "agent.local_agent": "LocalElasticAgent",
            "base.defaults": f"{_TIMER_VARIABLES} {_HEALTH_VARIABLE} "
            "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT=ENV_UNINTERRUPTIBLE_TIMEOUT",
        },
        {
            "agent.local_agent": "LogsSpecs PContext RunResult WorkerGroup WorkerSpec WorkerState prof start_processes",
            "agent.agent": "SimpleElasticAgent",
            "health.server": "HealthCheckServer create_healthcheck_server",
            "compat.torch_names": "get_logger macros",
            "processes.activity": "is_uninterruptible_state read_proc_state",
            "@": "events=elastic.events timer=elastic.timer",
            "": "json os signal socket tempfile time uuid",
        },
    ),
    "elastic.agent.server.health_check_server": (
        {"health.server": "HealthCheckServer create_healthcheck_server"},
        {"compat.torch_names": "get_logger"},
    ),
    "elastic.agent.server": (
        {
            "agent.workers": "RunResult Worker WorkerGroup WorkerSpec WorkerState",
            "agent.agent": "ElasticAgent SimpleElasticAgent",
            "base.defaults": _TIMER_VARIABLES,
        },
        {},
    ),
    "elastic.control_plane": (
        {"control_plane": "worker_main"},
        {"control_plane": "TORCH_WORKER_SERVER_SOCKET", "failures.error_files": "record"},
    ),
}

_RENDEZVOUS: dict[str, tuple[Names, Names]] = {
    "elastic.rendezvous.api": (
        {"errors": _RENDEZVOUS_ERRORS, "rendezvous.handler": _HANDLER_NAMES},
        {"rendezvous.handler": "get_free_port", "compat.torch_names": "Store"},
    ),
    "elastic.rendezvous": (
        {"errors": _RENDEZVOUS_ERRORS, "rendezvous.handler": _HANDLER_NAMES},
        {},
    ),
    "elastic.rendezvous.registry": (
        {"rendezvous.registry": "get_rendezvous_handler"},
        {"rendezvous.registry": "RendezvousHandler RendezvousParameters handler_registry=rendezvous_handler_registry"},
    ),
    "elastic.rendezvous.static_tcp_rendezvous": (
        {"rendezvous.one_node": "StaticTCPRendezvous create_rdzv_handler"},
        {
            "rendezvous.one_node": "RendezvousHandler RendezvousInfo RendezvousParameters RendezvousStoreInfo "
            "parse_rendezvous_endpoint",
            "compat.torch_names": "PrefixStore Store TCPStore",
        },
    ),
    "elastic.rendezvous.dynamic_rendezvous": (
        {
            "rendezvous.dynamic_handler": "DynamicRendezvousHandler RendezvousBackend RendezvousSettings RendezvousTimeout "
            "create_handler"
        },
        {
            "errors": _RENDEZVOUS_ERRORS,
            "rendezvous.handler": "RendezvousHandler RendezvousInfo RendezvousParameters RendezvousStoreInfo",
            "events": "NodeState construct_and_record_rdzv_event",
            "compat.torch_names": "Store",
            "compat.private_names": "_PeriodicTimer=PeriodicTimer _delay=delay",
            "": "dist=torch.distributed os socket threading time",
        },
    ),
    "elastic.rendezvous.c10d_rendezvous_backend": (
        {
            "compat.c10d_backend": "C10dRendezvousBackend DEFAULT_PORT NodeState RendezvousBackend RendezvousConnectionError "
            "RendezvousError RendezvousParameters RendezvousStateError create_backend parse_rendezvous_endpoint",
            "events": "construct_and_record_rdzv_event",
            "compat.torch_names": "FileStore Store TCPStore",
        },
        {"compat.private_names": "_matches_machine_hostname=matches_machine_hostname", "": "os tempfile"},
    ),
    "elastic.rendezvous.etcd_rendezvous": (
        {
            "compat.etcd_backend": "EtcdRendezvous EtcdRendezvousHandler EtcdRendezvousRetryImmediately "
            "EtcdRendezvousRetryableFailure create_rdzv_handler"
        },
        {
            "compat.etcd_backend": "EtcdStore cas_delay",
            "errors": "RendezvousClosedError RendezvousError RendezvousTimeoutError",
            "rendezvous.handler": "RendezvousHandler RendezvousInfo RendezvousParameters RendezvousStoreInfo",
            "net.endpoint": "parse_rendezvous_endpoint",
        },
    ),
    "elastic.rendezvous.etcd_rendezvous_backend": (
        {
            "compat.etcd_backend": "EtcdRendezvousBackend EtcdStore RendezvousBackend RendezvousConnectionError "
            "RendezvousParameters RendezvousStateError create_backend",
            "net.endpoint": "parse_rendezvous_endpoint",
            "compat.torch_names": "Store",
        },
        {},
    ),
    "elastic.rendezvous.etcd_server": ({"coordination.etcd.server": "EtcdServer find_free_port stop_etcd"}, {}),
    "elastic.rendezvous.etcd_store": ({"compat.etcd_backend": "EtcdStore cas_delay", "compat.torch_names": "Store"}, {}),
    "elastic.rendezvous.utils": (
        {"net.endpoint": "parse_rendezvous_endpoint"},
        {
            "compat.private_names": "_PeriodicTimer=PeriodicTimer _delay=delay _try_parse_port=try_parse_port "
            "_matches_machine_hostname=matches_machine_hostname _parse_rendezvous_config=parse_rendezvous_config",
            "": "ipaddress random re socket time",
        },
    ),
}

_PROCESSES: dict[str, tuple[Names, Names]] = {
    "elastic.multiprocessing.api": (
        {
            "output.log_specs": _LOG_NAMES,
            "processes.context": "PContext RunProcsResult",
            "errors": "SignalException",
            "processes.functions": "MultiprocessContext",
            "processes.subprocesses": "SubprocessContext",
            "processes.redirects": "get_std_cm",
        },
        {
            "failures.process_failure": "ProcessFailure",
            "failures.error_files": "record",
            "processes.redirects": "IS_MACOS IS_WINDOWS redirect_stderr redirect_stdout",
            "processes.subprocess_handler": "SubprocessHandler get_subprocess_handler",
            "processes.tail_log": "TailLog",
            "affinity": "NumaOptions",
            "compat.private_names": "_get_default_signal=default_signal _get_kill_signal=kill_signal "
            "_validate_full_rank=validate_full_rank _wrap=run_function",
            "": "os re shutil signal subprocess sys tempfile threading time",
        },
    ),
    "elastic.multiprocessing": (
        {
            "processes.subprocesses": "SubprocessContext start_processes",
            "processes.functions": "MultiprocessContext",
            "processes.context": "PContext RunProcsResult",
            "failures.process_failure": "ProcessFailure",
            "output.log_specs": _LOG_NAMES,
            "errors": "SignalException",
        },
        {
            "compat.torch_names": "get_logger",
            "affinity": "NumaOptions",
            "compat.private_names": "_validate_full_rank=validate_full_rank",
        },
    ),
    "elastic.multiprocessing.errors": (
        {
            "failures.process_failure": "ChildFailedError ProcessFailure",
            "failures.error_files": "ErrorHandler get_error_handler record",
        },
        {
            "failures.process_failure": "_NOT_AVAILABLE=NOT_AVAILABLE",
            "compat.private_names": "GlobalRank JSON",
            "compat.torch_names": "get_logger",
            "": "json os signal socket time",
        },
    ),
    "elastic.multiprocessing.errors.error_handler": (
        {"failures.error_files": "ErrorHandler"},
        {"": "faulthandler json os time traceback warnings"},
    ),
    "elastic.multiprocessing.errors.handlers": (
        {"failures.error_files": "get_error_handler"},
        {"failures.error_files": "ErrorHandler"},
    ),
    "elastic.multiprocessing.redirects": (
        {"processes.redirects": "IS_MACOS IS_WINDOWS get_libc redirect"},
        {"processes.redirects": "redirect_stderr redirect_stdout", "": "ctypes os sys"},
    ),
    "elastic.multiprocessing.tail_log": ({"processes.tail_log": "TailLog tail_logfile"}, {"": "os time"}),
    "elastic.multiprocessing.subprocess_handler.handlers": (
        {"processes.subprocess_handler": "get_subprocess_handler"},
        {"processes.subprocess_handler": "SubprocessHandler", "affinity": "NumaOptions"},
    ),
    "elastic.multiprocessing.subprocess_handler.subprocess_handler": (
        {"processes.subprocess_handler": "SubprocessHandler"},
        {
            "processes.redirects": "IS_WINDOWS",
            "affinity": "NumaOptions",
            "compat.private_names": "_get_default_signal=default_signal",
        },
    ),
    "elastic.multiprocessing.subprocess_handler": (
        {"processes.subprocess_handler": "SubprocessHandler get_subprocess_handler"},
        {},
    ),
}

_TELLING: dict[str, tuple[Names, Names]] = {
    "elastic.events": (
        {
            "events": "Event EventSource NodeState RdzvEvent construct_and_record_rdzv_event get_logging_handler record "
            "record_rdzv_event"
        },
        {"events": "EventMetadataValue _get_or_create_logger", "": "inspect logging os socket traceback"},
    ),
    "elastic.events.api": ({"events": "Event EventSource NodeState RdzvEvent"}, {"events": "EventMetadataValue", "": "json"}),
    "elastic.events.handlers": ({"events": "get_logging_handler"}, {"": "logging"}),
    "elastic.metrics.api": ({"metrics": f"{_METRIC_NAMES} MetricStream"}, {"metrics": "_get_metric_name", "": "time"}),
    "elastic.metrics": ({"metrics": f"{_METRIC_NAMES} initialize_metrics"}, {}),
    "elastic.timer.api": ({"timers.interface": f"{_TIMER_NAMES} RequestQueue"}, {"": "threading time"}),
    "elastic.timer": (
        {
            "timers.interface": _TIMER_NAMES,
            "timers.file_timer": "FileTimerClient FileTimerRequest",
            "timers.file_server": "FileTimerServer",
            "timers.local_timer": "LocalTimerClient LocalTimerServer",
        },
        {},
    ),
    "elastic.timer.file_based_local_timer": (
        {"timers.file_timer": "FileTimerClient FileTimerRequest", "timers.file_server": "FileTimerServer"},
        {
            "timers.interface": "TimerClient TimerRequest log_debug_info_for_expired_timers",
            "compat.torch_names": "get_logger",
            "": "json os select signal sys threading time",
        },
    ),
    "elastic.timer.local_timer": (
        {"timers.local_timer": "LocalTimerClient LocalTimerServer MultiprocessingRequestQueue"},
        {"timers.interface": "RequestQueue TimerClient TimerRequest TimerServer", "": "os signal time"},
    ),
    "elastic.timer.debug_info_logging": (
        {"timers.interface": "log_debug_info_for_expired_timers"},
        {"compat.torch_names": "get_logger"},
    ),
}

_UTILITIES: dict[str, tuple[Names, Names]] = {
    "elastic.utils.api": (
        {"compat.torch_names": "get_env_variable_or_raise macros", "net.endpoint": "get_socket_with_port"},
        {"": "os socket"},
    ),
    "elastic.utils": ({"compat.torch_names": "get_env_variable_or_raise macros", "net.endpoint": "get_socket_with_port"}, {}),
    "elastic.utils.store": (
        {"store.barriers": "barrier get_all store_timeout synchronize"},
        {"": "torch"},
    ),
    "elastic.utils.distributed": (
        {"compat.torch_names": "create_c10d_store", "net.endpoint": "get_free_port get_socket_with_port"},
        {"store.barriers": "barrier", "compat.torch_names": "get_logger", "": "datetime dist=torch.distributed os socket"},
    ),
    "elastic.utils.logging": ({"compat.torch_names": "get_log_level get_logger"}, {"": "inspect logging os warnings"}),
    "elastic.utils.log_level": ({"compat.torch_names": "get_log_level"}, {}),
    "elastic.utils.process_state": ({"processes.activity": "is_uninterruptible_state read_proc_state"}, {}),
    "elastic.utils.data": ({"data": "CyclingIterator ElasticDistributedSampler"}, {}),
    "elastic.utils.data.cycling_iterator": ({"data": "CyclingIterator"}, {}),
    "elastic.utils.data.elastic_distributed_sampler": ({"data": "ElasticDistributedSampler"}, {"": "math torch"}),
}

TABLE: dict[str, tuple[Names, Names]] = {
    f"torch.distributed.{place}": names
    for part in (_LAUNCHER, _AGENT, _RENDEZVOUS, _PROCESSES, _TELLING, _UTILITIES)
    for place, names in part.items()
}

# Modules of ours that a program may come at through a name in another: there too, it gets what stands for them.
FACADE_OF = {
    "rallypoint.events": "torch.distributed.elastic.events",
    "rallypoint.metrics": "torch.distributed.elastic.metrics",
    "rallypoint.rendezvous.registry": "torch.distributed.elastic.rendezvous.registry",
    "rallypoint.store.barriers": "torch.distributed.elastic.utils.store",
}
