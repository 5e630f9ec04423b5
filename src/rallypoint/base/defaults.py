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
ENV_NCCL_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # with the rank behind it, where Flight Recorder hears that it is to write
ENV_NCCL_DUMPS = "TORCH_FR_DUMP_TEMP_FILE"  # with the rank behind it, where it does
ENV_NCCL_DUMPS_BEFORE = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"  # the same, in older versions of torch
ENV_NCCL_RAS = "NCCL_RAS_ADDR"
ENV_OMP_NUM_THREADS = "OMP_NUM_THREADS"
ENV_CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
ENV_GENERATION = "RALLYPOINT_GENERATION"  # rises whenever workers are started anew, for whatever reason; the same on all nodes
ENV_PULSE = "RALLYPOINT_PULSE"  # where the worker tells of its progress: its page in a file, a colon, the path of the file
ENV_CHECKPOINT = "RALLYPOINT_CHECKPOINT"  # where it keeps snapshots: open files, how much they may hold, and its line, by colons
ENV_STANDBY = "RALLYPOINT_STANDBY"  # its line to the agent, for `rallypoint.worker.ready`; and whether it is on standby
ENV_DRAIN = "RALLYPOINT_DRAIN"  # a pipe of the agent's, in which there is something to read once a node has to leave
ENV_STACKS = "RALLYPOINT_STACKS"  # where its stacks go when it hangs; spelled out in worker_site, which imports nothing of ours
ENV_IMPORTS = "RALLYPOINT_IMPORTS"  # where it tells how long its imports take; spelled out in worker_site too
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
ENV_RUNTIME_DIR = "RALLYPOINT_RUNTIME_DIR"  # where agents put the sockets at which they can be asked
ENV_XDG_RUNTIME_DIR = "XDG_RUNTIME_DIR"
ENV_HOME = "HOME"
ENV_CACHE_HOME = "XDG_CACHE_HOME"
ENV_STATE_HOME = "XDG_STATE_HOME"  # where programs keep what is to last, if not in the home
ENV_TERM = "TERM"
ENV_NO_COLOR = "NO_COLOR"
ENV_CI = "CI"  # set where nobody looks on
ENV_ZE_AFFINITY_MASK = "ZE_AFFINITY_MASK"
ENV_HOST_INDEX = "RALLYPOINT_HOST_INDEX"  # of `--hosts`: the place of this host among them
ENV_SETTING_PREFIX = "RALLYPOINT_"  # before the name of any setting of the elastic rendezvous, in capitals
ENV_NO_SETTINGS = (ENV_RUNTIME_DIR, ENV_GENERATION, ENV_PULSE, ENV_HOST_INDEX)  # though their names begin like that
ENV_CONF = "RALLYPOINT_CONF"  # a file of such settings
ENV_SECRET = "RALLYPOINT_SECRET"  # the job's secret itself; workers do not see it
SECRET_AUTO, SECRET_NONE = "auto", "none"
SECRET_WORDS = (SECRET_AUTO, SECRET_NONE)  # instead of a file with one, or of the secret itself, which is longer
MOUNTED_SECRET = "/var/run/secrets/rallypoint/secret"  # where Kubernetes is to mount it; it is looked for by itself
ENV_NOTIFY = "PET_NOTIFY"  # a web address may be as good as a password, so workers do not see this either
ENV_SECRETS = (ENV_SECRET, ENV_NOTIFY)
ENV_TRACE_CONTEXT = ("TRACEPARENT", "TRACESTATE")  # by which whoever starts a job makes its spans part of a trace
ENV_OTEL_SERVICE, ENV_OTEL_RESOURCE = "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"  # the SDK reads them, and others
ENV_SSH_CONNECTION = "SSH_CONNECTION"  # sshd's: both ends of a connection, by address and port
ENV_SLURM_NODE = "SLURM_NODEID"
ENV_SLURM_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")  # the second is its older name
ENV_KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"
ENV_SCHEDULERS = {  # what each scheduler leaves in the environment of what it starts, and no other does
    "openmpi": "OMPI_COMM_WORLD_SIZE",
    "slurm": "SLURM_JOB_ID",
    "mpich": "PMI_SIZE",
    "pbs": "PBS_NODEFILE",
    "lsf": "LSB_JOBID",
    "flux": "FLUX_JOB_ID",
    "kubernetes": ENV_KUBERNETES_INDEX,
}
ENV_COMPAT = "RALLYPOINT_COMPAT"  # 1: rallypoint stands behind torch's names, in workers too
ENV_DISABLE_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
ENV_USE_LIBUV = "USE_LIBUV"  # for torch's own stores

# Who started us.
SCHEDULER_AUTO, SCHEDULER_NONE = "auto", "none"

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
HOST_TIMEOUT_S = 60.0  # for so long an embedded store whose host has ended may come back
STORE_SILENCE_S = 30.0  # after which a silent coordination store counts as gone
SCALE_UP_WINDOW_S = 0.3
NODE_UNIT = 1

# Hosts reached by ssh.
SSH_COMMAND = "ssh"
SSH_TIMEOUT_S = 3.5  # of silence; with a second from SIGTERM to SIGKILL, nothing is left within five

# Stores.
STORE_TIMEOUT_S = 300  # for a key that is not there yet
BARRIER_TIMEOUT_S = 300
TRACE_TIMEOUT_S = 10  # to find out who is missing at a barrier
WORKER_STORE_FROM_NODES, WORKER_STORE_FROM_ANY = "nodes", "any"
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
PRELOAD_AUTO = "auto"  # in the place of modules: those that the program imported last, and that took longest
START_METHODS = ("spawn", "fork", "forkserver")
SIGNALS_TO_HANDLE = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
EVENT_LOG_HANDLER = "null"

# Restarts.
RESTART_BACKOFF_S = 1.0
RESTART_BACKOFF_MAX_S = 30.0
RESTART_WINDOW_S = 0.0  # none: the budget is for the whole job
EARLY_FAILURE_S = 300.0  # imports from a slow disk take minutes; what fails later may come from the data
HEALTHY_AFTER_S = 0.0  # no attempt gives restarts back: max_restarts holds for the whole job, as it does for torchrun
# Those that LaunchConfig has as fields.
RESTART_SETTINGS = ("no_retry_exit_codes", "restart_backoff", "restart_window", "retry_hopeless", "max_no_progress")
# Those that it has not, by the names that they have in the policy: a job of one node keeps them too.
OTHER_RESTART_SETTINGS = {
    "restart_backoff_max": "max_backoff_s",
    "max_hangs": "max_hangs",
    "healthy_after": "healthy_after_s",
    "max_same_failures": "max_same_failures",
    "early_failure": "early_s",
}

# Health.
HEALTH_ADDR = "127.0.0.1"
HEALTH_TIMEOUT_S = 60  # without a sign of progress

# Notices.
NOTICE_SCHEMA = 1  # of the document that others are told with
NOTICE_TIMEOUT_S = 10.0  # for one attempt to tell somebody
NOTICE_PAUSES_S = (0.5, 2.0)  # before the second attempt, and before the third
NOTICE_WAIT_S = 10.0  # of the launcher, at the end, for the last notices
NOTICE_WAIT_AFTER_SIGNAL_S = 3.0  # the same where somebody waits for our end

# Drills.
DRILL_EVERY_S = 30.0  # between two faults
DRILL_FOR_S = 600.0
DRILL_PATIENCE_S = 120.0  # for a job to run again

# Ends.
SHUTDOWN_TIMEOUT_S = 30  # from the first signal to SIGKILL
STANDBY_AFTER_S = 3.0  # from when all workers are ready to when others are started to wait for their places
SAME_FAILURE_WAIT_S = 0.5  # after the last failure, for the others to fail the same way, if they do
UNINTERRUPTIBLE_TIMEOUT_S = 10.0  # from SIGKILL until a process is called unkillable
EXIT_BARRIER_TIMEOUT_S = 300.0

# Logs.
LOG_FORMAT = "text"  # of lines on the console: as they are
LOG_FORMAT_JSON = "json"
LOG_FORMATS = (LOG_FORMAT, LOG_FORMAT_JSON)
LONG_WAIT_S = 0.5  # of a start or a stop; whoever asks about one that takes longer gets an answer
PULSE_PAGE_BYTES = 4096  # in which a worker tells of its progress (`hangs.pulse_page`)
PULSE_MAGIC = 0x72616C6C79000001  # its first word: "rally", and the version of its layout
TEMPORARY_DIR = "/tmp"  # where TMPDIR names no other
STATE_DIR = ".local/state"  # in the home
EVENT_SCHEMA = 1  # of what an agent writes there; a reader refuses a higher one
IMPORTS_FILE = ".rallypoint-preload.json"  # beside the folders of runs: what programs imported when they ran last
IMPORTS_CACHE = "rallypoint/preload.json"  # the same among a user's caches, where there is no log folder
EVENT_FILE = "events.jsonl"  # in the folder of the run
LATEST = "latest"  # the link to the newest run, and to its newest attempt
STDERR_TAIL_BYTES = 16 * 1024  # how much of each worker's stderr is remembered for the summary
ENTRY_POINTS_LOGS_SPECS = "torchrun.logs_specs"
ENTRY_POINTS_EVENT_SINKS = "rallypoint.event_sinks"
ENTRY_POINTS_PREFLIGHT = "rallypoint.preflight"
ENTRY_POINTS_RENDEZVOUS = "torchrun.handlers"
ENTRY_POINTS_SCHEDULERS = "rallypoint.schedulers"
