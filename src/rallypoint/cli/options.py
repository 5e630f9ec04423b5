"""Every flag of ``rallyrun``, once.

One table is read by the parser (`command_line`), by ``--help`` and the documentation page (`usage`), and by the shell
completions (`completion`), so that none of them can drift from the others. Names and defaults of the flags that torchrun has
are torchrun's; the others stand in groups of their own or say so. A flag's attribute in the parsed arguments is its name with
underscores, and its environment variable is ``PET_`` and that attribute in capitals.
"""

from __future__ import annotations

from rallypoint.base import defaults
from rallypoint.base.records import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Kind = Literal["str", "int", "float", "flag", "choice", "list", "size"]

__all__ = ["BY_NAME", "GROUPS", "OPTIONS", "Option"]

JOB, RENDEZVOUS, STATIC, WORKERS, WATCH, LOGS, ENDS, PROGRAM, ANSWERS = GROUPS = (
    "Job size",
    "Rendezvous",
    "Static rendezvous",
    "Workers",
    "Monitoring",
    "Logs",
    "Failures, signals and shutdown",
    "What to run",
    "Information",
)

_FILTERS = "comma-separated (double a comma to include one); may be repeated"


class Option(Value):
    """One flag. `answers` marks a flag that is answered at once, without starting anything or reading what follows."""

    name: str
    kind: Kind
    default: str | int | float | bool | None
    group: str
    help: str
    metavar: str = ""
    short: str = ""
    choices: tuple[str, ...] = ()
    has_variable: bool = True
    answers: bool = False

    @property
    def dest(self) -> str:
        return self.name[2:].replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable that gives the default, or nothing."""
        return f"PET_{self.dest.upper()}" if self.has_variable else ""


# A table is read by its rows.
# fmt: off
OPTIONS: tuple[Option, ...] = (
    Option("--nnodes", "str", defaults.NNODES, JOB, "Number of nodes, or MIN:MAX.", "N|MIN:MAX"),
    Option(
        "--nproc-per-node", "str", defaults.NPROC_PER_NODE, JOB,
        "Workers on this node: a number, `cpu` (one per CPU this process may use), `gpu` or `xpu` (one per visible device), or"
        " `auto` (one per GPU or other accelerator; `cpu` if there are none).",
        "N|auto|cpu|gpu|xpu",
    ),
    Option("--max-restarts", "int", defaults.MAX_RESTARTS_CLI, JOB, "Maximum number of group restarts after failures.", "N"),
    Option("--standalone", "flag", False, RENDEZVOUS,
           "Run on this node alone, with its own store, a free port and a random ID. Overrides the backend, endpoint and ID."),
    Option("--rdzv-backend", "str", defaults.BACKEND_CLI, RENDEZVOUS,
           "How nodes find each other: static (you give the ranks), c10d, etcd, or the name of a plug-in.", "NAME"),
    Option("--rdzv-endpoint", "str", "", RENDEZVOUS,
           f"Where the nodes meet. Default port: {defaults.ELASTIC_PORT} for c10d, {defaults.ETCD_PORT} for etcd. Separate the"
           " members of an etcd cluster with commas.", "HOST[:PORT]"),
    Option("--rdzv-id", "str", defaults.RUN_ID_CLI, RENDEZVOUS, "Job name, the same on every node.", "ID"),
    Option("--rdzv-conf", "str", "", RENDEZVOUS,
           "Backend settings, such as join_timeout=600,last_call_timeout=30.", "K=V,K=V"),
    Option("--node-unit", "int", None, RENDEZVOUS,
           f"c10d, etcd: run only on a multiple of this many nodes. Default: {defaults.NODE_UNIT}.", "N"),
    Option("--secret-file", "str", None, RENDEZVOUS,
           "c10d: file with the job's secret, the same on every node. Without one, anyone who can reach the endpoint can"
           " join.", "FILE"),
    Option("--worker-store", "choice", None, RENDEZVOUS,
           "Who serves the workers' store at MASTER_ADDR:MASTER_PORT: the agent of group rank 0, or its first worker, as in"
           f" older versions of torchrun. Default: {defaults.WORKER_STORE}.", "WHO",
           choices=(defaults.WORKER_STORE, defaults.WORKER_STORE_RANK0)),
    Option("--worker-store-port", "str", None, RENDEZVOUS,
           "Port of the workers' store, or a range to choose from. Default: any free port; with static ranks, the master"
           " port.", "PORT|FIRST-LAST"),
    Option("--worker-store-memory", "size", None, RENDEZVOUS,
           f"Size limit of the workers' store, such as 500M or 2G. Default: {defaults.WORKER_STORE_BYTES >> 30}G.",
           "BYTES[K|M|G]"),
    Option("--local-addr", "str", None, RENDEZVOUS, "Address at which other nodes can reach this one.", "ADDRESS"),
    Option("--node-rank", "int", 0, STATIC,
           "Rank of this node, from 0. With c10d and etcd, optional: the rank it must get.", "N"),
    Option("--master-addr", "str", defaults.MASTER_ADDR, STATIC, "Address of the node with rank 0.", "ADDRESS"),
    Option("--master-port", "int", None, STATIC,
           f"Port at the master address. Default: {defaults.MASTER_PORT}. A single node with neither this nor an endpoint runs"
           " as with --standalone.", "PORT"),
    Option("--role", "str", defaults.ROLE_CLI, WORKERS, "Role of the workers: a name used in logs, ranks and metrics.", "NAME"),
    Option("--monitor-interval", "float", defaults.MONITOR_INTERVAL_S, WORKERS,
           "How often to poll the workers where an exit cannot wake the agent.", "SECONDS"),
    Option("--start-method", "choice", defaults.START_METHOD, WORKERS, "How to start Python functions.", "METHOD",
           choices=defaults.START_METHODS),
    Option("--omp-num-threads", "str", None, WORKERS,
           "OMP_NUM_THREADS for each worker: a number, or `auto` to divide the allowed CPUs among the workers. Default: 1 if the"
           " variable is unset and there is more than one worker.", "N|auto"),
    Option("--virtual-local-rank", "flag", False, WORKERS, "Give each worker LOCAL_RANK=0 and one visible device."),
    Option("--numa-binding", "choice", None, WORKERS,
           "Bind each worker to CPUs near its device: its NUMA node, its socket, an exclusive share of the node's cores, or one"
           " last-level cache.", "HOW", choices=("node", "socket", "exclusive", "core-complex"),
           has_variable=False),
    Option("--hang-timeout", "str", None, WATCH,
           "Treat a worker with no sign of life for this long as hung: save all stacks and kill it. Add limits by name, such as"
           " 60,starting=900,checkpoint=600. Default: no hang detection.", "SECONDS[,NAME=SECONDS]"),
    Option("--health-port", "int", None, WATCH,
           "Serve /healthz, /readyz and /metrics over HTTP on this port. Default:"
           f" {defaults.ENV_HEALTH_CHECK_PORT}, else no port is opened.", "PORT"),
    Option("--health-addr", "str", defaults.HEALTH_ADDR, WATCH,
           "Address for --health-port; 0.0.0.0 for all interfaces.", "ADDRESS"),
    Option("--event-log-handler", "str", defaults.EVENT_LOG_HANDLER, WATCH,
           "Where to send events besides events.jsonl in the run's log folder: null, console, or a registered sink.", "NAME"),
    Option("--log-dir", "str", None, LOGS, "Folder in which each run creates its own. Default: a temporary one.", "FOLDER"),
    Option("--redirects", "str", "0", LOGS,
           "Streams to write to log files only: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, such as 0:1,10:3.",
           "STREAMS", short="-r"),
    Option("--tee", "str", "0", LOGS, "Streams to write to log files and the console; same values as --redirects.", "STREAMS",
           short="-t"),
    Option("--local-ranks-filter", "str", "", LOGS, "Show only these local ranks on the console, such as 0,1.", "RANKS"),
    Option("--duplicate-stdout-filters", "list", None, LOGS,
           f"Also copy tee'd stdout lines of any rank that contain one of these texts to one extra file: {_FILTERS}.", "TEXTS"),
    Option("--duplicate-stderr-filters", "list", None, LOGS,
           f"Also copy tee'd stderr lines of any rank that contain one of these texts to one extra file: {_FILTERS}.", "TEXTS"),
    Option("--log-line-prefix-template", "str", None, LOGS,
           "Prefix for tee'd lines; may contain ${role_name}, ${rank}, ${local_rank} and ${hostname}.", "TEXT"),
    Option("--log-max-size", "size", None, LOGS, "Size limit of each log file, such as 500M or 2G. Default: no limit.",
           "BYTES[K|M|G]"),
    Option("--logs-specs", "str", None, LOGS,
           f"Log plug-in: an entry point in the group {defaults.ENTRY_POINTS_LOGS_SPECS}.", "NAME", has_variable=False),
    Option("--no-retry-exit-codes", "str", None, ENDS,
           "Worker exit codes that end the job without a restart, such as 2,64; -n for signal n.", "CODES"),
    Option("--restart-backoff", "float", None, ENDS,
           "Delay before the second restart; it doubles with each later one. The first restart is immediate. Default:"
           f" {defaults.RESTART_BACKOFF_S:g}.", "SECONDS"),
    Option("--restart-window", "float", None, ENDS,
           "Count only restarts within this time against --max-restarts. Default: count them all.", "SECONDS"),
    Option("--shutdown-timeout", "int", None, ENDS,
           f"Seconds from the first signal to SIGKILL. Default: {defaults.ENV_SHUTDOWN_TIMEOUT}, else"
           f" {defaults.SHUTDOWN_TIMEOUT_S}.", "SECONDS"),
    Option("--exit-barrier-timeout", "float", defaults.EXIT_BARRIER_TIMEOUT_S, ENDS,
           "How long a node that has finished waits for the others.", "SECONDS"),
    Option("--signals-to-handle", "str", defaults.SIGNALS_TO_HANDLE, ENDS, "Signals that end the job and are forwarded to the"
           " workers.", "NAMES"),
    Option("--pass-exit-code", "flag", False, ENDS,
           "If the job fails, exit with the code of the worker that failed first (128 + n if signal n killed it)."),
    Option("--module", "flag", False, PROGRAM, "Run the script as a module, like `python -m`.", short="-m"),
    Option("--no-python", "flag", False, PROGRAM, "Run the script directly, not through Python."),
    Option("--run-path", "flag", False, PROGRAM, "Run the script inside rallypoint's own Python worker (runpy.run_path)."),
    Option("--dry-run", "flag", False, PROGRAM, "Show what would be started on this node, and how; start nothing."),
    Option("--help", "flag", False, ANSWERS, "Show this help and exit.", short="-h", has_variable=False, answers=True),
    Option("--version", "flag", False, ANSWERS, "Show the version and exit.", has_variable=False, answers=True),
    Option("--print-completion", "choice", None, ANSWERS, "Print a completion script for this shell and exit.", "SHELL",
           choices=("bash", "zsh", "tcsh"), has_variable=False, answers=True),
)
# fmt: on

BY_NAME: dict[str, Option] = {name: option for option in OPTIONS for name in (option.name, option.short) if name}
