"""Every default and every environment variable of rallypoint, once.

The names that begin with TORCH are the ones that programs written for torchrun read and set, so they are kept. Nothing
here has an effect: the environment is read by `environment`, and written only into a worker.
"""

from __future__ import annotations

__all__: list[str] = []

# What every worker finds in its environment.
ENV_RANK = "RANK"
ENV_LOCAL_RANK = "LOCAL_RANK"
ENV_WORLD_SIZE = "WORLD_SIZE"
ENV_LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
ENV_GROUP_RANK = "GROUP_RANK"
ENV_GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
ENV_ROLE_RANK = "ROLE_RANK"
ENV_ROLE_WORLD_SIZE = "ROLE_WORLD_SIZE"
ENV_ROLE_NAME = "ROLE_NAME"
ENV_MASTER_ADDR = "MASTER_ADDR"
ENV_MASTER_PORT = "MASTER_PORT"
ENV_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
ENV_MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
ENV_RUN_ID = "TORCHELASTIC_RUN_ID"
ENV_USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
ENV_SIGNALS_TO_HANDLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
ENV_NCCL_ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ENV_OMP_NUM_THREADS = "OMP_NUM_THREADS"
ENV_CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
ENV_GENERATION = "RALLYPOINT_GENERATION"  # rises whenever workers are started anew, for whatever reason; the same on all nodes
ENV_PULSE = "RALLYPOINT_PULSE"  # where the worker tells of its progress: its page in a file, a colon, the path of the file
ENV_CHECKPOINT = "RALLYPOINT_CHECKPOINT"  # where it keeps snapshots: open files, how much they may hold, and its line, by colons
ENV_STANDBY = "RALLYPOINT_STANDBY"  # its line to the agent, for `rallypoint.worker.ready`; and whether it is on standby
ENV_STACKS = "RALLYPOINT_STACKS"  # where its stacks go when it hangs; spelled out in worker_site, which imports nothing of ours
ENV_PYTHONPATH = "PYTHONPATH"
ENV_FAULTHANDLER = "PYTHONFAULTHANDLER"  # anything but nothing: a Python that crashes shows where it was

# What the agent itself reads.
ENV_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
ENV_UNINTERRUPTIBLE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
ENV_CONTROL_SOCKET = "TORCH_WORKER_SERVER_SOCKET"  # workers find it too, each its own
ENV_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
ENV_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"  # workers find it too
ENV_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
ENV_LOG_LINE_PREFIX_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
ENV_PYTHON_EXEC = "PYTHON_EXEC"
ENV_LOG_LEVEL = "LOGLEVEL"
ENV_TMPDIR = "TMPDIR"
ENV_ZE_AFFINITY_MASK = "ZE_AFFINITY_MASK"
ENV_SETTING_PREFIX = "RALLYPOINT_"  # before the name of any setting of the elastic rendezvous, in capitals
ENV_CONF = "RALLYPOINT_CONF"  # a file of such settings
ENV_SECRET = "RALLYPOINT_SECRET"  # the job's secret itself; workers do not see it
ENV_SLURM_NODE = "SLURM_NODEID"
ENV_SLURM_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")  # the second is its older name
ENV_KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"
ENV_COMPAT = "RALLYPOINT_COMPAT"  # 1: rallypoint stands behind torch's names, in workers too
ENV_DISABLE_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
ENV_USE_LIBUV = "USE_LIBUV"  # for torch's own stores

# The size of a job.
NNODES = "1:1"
NPROC_PER_NODE = "1"

# Rendezvous.
BACKEND_CLI = "static"
BACKEND_ELASTIC = "c10d"
BACKEND_ETCD = "etcd"
BACKEND_ETCD_V2 = "etcd-v2"
BACKEND_PLUGIN = "rallypoint"  # as torchrun knows our back ends; here they are other names of the same
BACKEND_PLUGIN_ETCD = "rallypoint-etcd"
ETCD_BACKENDS = (BACKEND_ETCD, BACKEND_ETCD_V2, BACKEND_PLUGIN_ETCD)
BACKEND_API = BACKEND_ETCD
STANDALONE_ENDPOINT = "localhost:0"
RUN_ID_CLI = "none"
ELASTIC_PORT = 29400
ETCD_PORT = 2379
ETCD_PREFIX = "/rallypoint"
ETCD_FENCE_S = 30.0
MASTER_ADDR = "127.0.0.1"
MASTER_PORT = 29500
RDZV_TIMEOUT_S = 900
RDZV_TIMEOUT_UNSET = -1
PROTOCOL_VERSION = 1  # of what nodes write into the coordination store
JOIN_TIMEOUT_S = 600.0
LAST_CALL_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 30.0
KEEP_ALIVE_INTERVAL_S = 1.0
KEEP_ALIVE_MAX_ATTEMPT = 3
STORE_SILENCE_S = 30.0  # after which a silent coordination store counts as gone
SCALE_UP_WINDOW_S = 0.3
NODE_UNIT = 1

# Stores.
STORE_TIMEOUT_S = 300  # for a key that is not there yet
BARRIER_TIMEOUT_S = 300
TRACE_TIMEOUT_S = 10  # to find out who is missing at a barrier
WORKER_STORE = "agent"  # of group rank 0
WORKER_STORE_RANK0 = "rank0"  # the worker of rank 0
WORKER_STORE_PORTS = (0, 0)  # any that is free
WORKER_STORE_BYTES = 1 << 30  # that the workers' store may hold

# Workers.
ROLE_CLI = "default"
ROLE_API = "default_role"
MAX_RESTARTS_CLI = 0
MAX_RESTARTS_API = 3
MONITOR_INTERVAL_S = 0.1
START_METHOD = "spawn"
START_METHODS = ("spawn", "fork", "forkserver")
SIGNALS_TO_HANDLE = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
EVENT_LOG_HANDLER = "null"

# Restarts.
RESTART_BACKOFF_S = 1.0
RESTART_BACKOFF_MAX_S = 30.0
RESTART_WINDOW_S = 0.0  # none: the budget is for the whole job
RESTART_SETTINGS = ("no_retry_exit_codes", "restart_backoff", "restart_window")  # those that LaunchConfig has as fields

# Health.
HEALTH_ADDR = "127.0.0.1"
HEALTH_TIMEOUT_S = 60  # without a sign of progress

# Ends.
SHUTDOWN_TIMEOUT_S = 30  # from the first signal to SIGKILL
STANDBY_AFTER_S = 3.0  # from when all workers are ready to when others are started to wait for their places
SAME_FAILURE_WAIT_S = 0.5  # after the last failure, for the others to fail the same way, if they do
UNINTERRUPTIBLE_TIMEOUT_S = 10.0  # from SIGKILL until a process is called unkillable
EXIT_BARRIER_TIMEOUT_S = 300.0

# Logs.
TEMPORARY_DIR = "/tmp"  # where TMPDIR names no other
EVENT_SCHEMA = 1  # of what an agent writes there; a reader refuses a higher one
EVENT_FILE = "events.jsonl"  # in the folder of the run
STDERR_TAIL_BYTES = 16 * 1024  # how much of each worker's stderr is remembered for the summary
ENTRY_POINTS_LOGS_SPECS = "torchrun.logs_specs"
ENTRY_POINTS_EVENT_SINKS = "rallypoint.event_sinks"
ENTRY_POINTS_RENDEZVOUS = "torchrun.handlers"
