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
    "Size of the job",
    "Rendezvous",
    "Static rendezvous",
    "Workers",
    "Watching over the job",
    "Logs",
    "Failures, signals and the end",
    "What is started",
    "Answered at once",
)

_FILTERS = "comma-separated texts (a doubled comma stands for a comma); may be repeated"


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
    Option("--nnodes", "str", defaults.NNODES, JOB, "How many nodes: a number, or the least and the most of them.", "N|MIN:MAX"),
    Option(
        "--nproc-per-node", "str", defaults.NPROC_PER_NODE, JOB,
        "Workers on this node: a number, or `cpu` (one for each CPU that this process may use), `gpu` or `xpu` (one for each"
        " that is visible), or `auto` (gpu where there is one, else cpu).",
        "N|auto|cpu|gpu|xpu",
    ),
    Option("--max-restarts", "int", defaults.MAX_RESTARTS_CLI, JOB, "How often the group may be restarted after a failure.", "N"),
    Option("--standalone", "flag", False, RENDEZVOUS,
           "One node that needs nobody else: own store, free port, random id. Wins over backend, endpoint and id."),
    Option("--rdzv-backend", "str", defaults.BACKEND_CLI, RENDEZVOUS,
           "How the nodes meet: static (you give the ranks), c10d, etcd, or the name of a plug-in.", "NAME"),
    Option("--rdzv-endpoint", "str", "", RENDEZVOUS,
           f"Where the nodes meet; without a port c10d uses {defaults.ELASTIC_PORT}, etcd {defaults.ETCD_PORT}. Members of an"
           " etcd cluster stand behind commas.", "HOST[:PORT]"),
    Option("--rdzv-id", "str", defaults.RUN_ID_CLI, RENDEZVOUS, "The job's name, the same on all of its nodes.", "ID"),
    Option("--rdzv-conf", "str", "", RENDEZVOUS,
           "Settings of the backend, such as join_timeout=600,last_call_timeout=30.", "K=V,K=V"),
    Option("--node-unit", "int", None, RENDEZVOUS,
           f"c10d, etcd: the number of nodes is always a multiple of this. Not given: {defaults.NODE_UNIT}.", "N"),
    Option("--secret-file", "str", None, RENDEZVOUS,
           "c10d: a file with the job's secret, the same on all of its nodes; without one anybody who reaches the endpoint can"
           " join.", "FILE"),
    Option("--worker-store", "choice", None, RENDEZVOUS,
           "Who serves the workers' store at MASTER_ADDR and MASTER_PORT: the agent of group rank 0, or its first worker, as in"
           f" older versions of torchrun. Not given: {defaults.WORKER_STORE}.", "WHO",
           choices=(defaults.WORKER_STORE, defaults.WORKER_STORE_RANK0)),
    Option("--worker-store-port", "str", None, RENDEZVOUS,
           "The workers' store: its port, or the first and the last of those that it may have. Not given: any that is free; with"
           " static ranks, the master port.", "PORT|FIRST-LAST"),
    Option("--worker-store-memory", "size", None, RENDEZVOUS,
           f"The workers' store: how much it may hold, as in 500M or 2G. Not given: {defaults.WORKER_STORE_BYTES >> 30}G.",
           "BYTES[K|M|G]"),
    Option("--local-addr", "str", None, RENDEZVOUS, "The address of this node that its peers can reach.", "ADDRESS"),
    Option("--node-rank", "int", 0, STATIC,
           "This node's rank, from 0. With c10d and etcd, if given: the rank that it is to have.", "N"),
    Option("--master-addr", "str", defaults.MASTER_ADDR, STATIC, "The address of the node of rank 0.", "ADDRESS"),
    Option("--master-port", "int", None, STATIC,
           f"The port at the master address; {defaults.MASTER_PORT} where it is not given. One node without it, and without an"
           " endpoint, runs as --standalone does.", "PORT"),
    Option("--role", "str", defaults.ROLE_CLI, WORKERS, "The workers' role, a name for logs, ranks and metrics.", "NAME"),
    Option("--monitor-interval", "float", defaults.MONITOR_INTERVAL_S, WORKERS,
           "Seconds between looks at the workers where an end cannot wake the agent by itself.", "SECONDS"),
    Option("--start-method", "choice", defaults.START_METHOD, WORKERS, "How Python functions are started.", "METHOD",
           choices=defaults.START_METHODS),
    Option("--omp-num-threads", "str", None, WORKERS,
           "OMP_NUM_THREADS of each worker: a number, or `auto` to divide the allowed CPUs by the workers. Not given: 1 where"
           " the variable is unset and there is more than one worker.", "N|auto"),
    Option("--virtual-local-rank", "flag", False, WORKERS, "Each worker gets LOCAL_RANK=0 and one visible device."),
    Option("--numa-binding", "choice", None, WORKERS,
           "Bind each worker to CPUs near its device: those of the NUMA node, of the socket, a share of the node's cores for"
           " itself alone, or those of one last-level cache.", "HOW", choices=("node", "socket", "exclusive", "core-complex"),
           has_variable=False),
    Option("--hang-timeout", "str", None, WATCH,
           "A worker that gives no sign of life for so long hangs: all stacks are written down, and it is ended. Other limits may"
           " follow by name, as in 60,starting=900,checkpoint=600. Not given: nobody is watched.", "SECONDS[,NAME=SECONDS]"),
    Option("--health-port", "int", None, WATCH,
           "Answer health checks over HTTP at this port: /healthz, /readyz, /metrics. Not given:"
           f" {defaults.ENV_HEALTH_CHECK_PORT}, else no port is opened.", "PORT"),
    Option("--health-addr", "str", defaults.HEALTH_ADDR, WATCH,
           "The address for --health-port; 0.0.0.0 for all that this machine has.", "ADDRESS"),
    Option("--event-log-handler", "str", defaults.EVENT_LOG_HANDLER, WATCH,
           "Where events go besides the file events.jsonl of the run's log folder: null, console, or a registered sink.", "NAME"),
    Option("--log-dir", "str", None, LOGS, "Each run makes its own folder in this one. Not given: a temporary one.", "FOLDER"),
    Option("--redirects", "str", "0", LOGS,
           "Streams that go to log files only: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, as in 0:1,10:3.",
           "STREAMS", short="-r"),
    Option("--tee", "str", "0", LOGS, "Streams that go to log files and to the console; written as for --redirects.", "STREAMS",
           short="-t"),
    Option("--local-ranks-filter", "str", "", LOGS, "Only these local ranks show on the console, as in 0,1.", "RANKS"),
    Option("--duplicate-stdout-filters", "list", None, LOGS,
           f"Tee'd stdout lines of any rank that hold one of these texts go to one more file: {_FILTERS}.", "TEXTS"),
    Option("--duplicate-stderr-filters", "list", None, LOGS,
           f"Tee'd stderr lines of any rank that hold one of these texts go to one more file: {_FILTERS}.", "TEXTS"),
    Option("--log-line-prefix-template", "str", None, LOGS,
           "What stands before each tee'd line; knows ${role_name}, ${rank}, ${local_rank} and ${hostname}.", "TEXT"),
    Option("--log-max-size", "size", None, LOGS, "The most that one log file may hold, as in 500M or 2G. Not given: no limit.",
           "BYTES[K|M|G]"),
    Option("--logs-specs", "str", None, LOGS,
           f"A plug-in for logs: an entry point of the group {defaults.ENTRY_POINTS_LOGS_SPECS}.", "NAME", has_variable=False),
    Option("--no-retry-exit-codes", "str", None, ENDS,
           "Exit codes of workers after which the job ends without a restart, as in 2,64; -n for signal n.", "CODES"),
    Option("--restart-backoff", "float", None, ENDS,
           "The pause before the second restart, which doubles with each one after that. The first comes at once. Not given:"
           f" {defaults.RESTART_BACKOFF_S:g}.", "SECONDS"),
    Option("--restart-window", "float", None, ENDS,
           "Only restarts within this time count against --max-restarts. Not given: all of the job's.", "SECONDS"),
    Option("--shutdown-timeout", "int", None, ENDS,
           f"Seconds from the first signal to SIGKILL. Not given: {defaults.ENV_SHUTDOWN_TIMEOUT}, else"
           f" {defaults.SHUTDOWN_TIMEOUT_S}.", "SECONDS"),
    Option("--exit-barrier-timeout", "float", defaults.EXIT_BARRIER_TIMEOUT_S, ENDS,
           "Seconds that a node which is done waits for the others.", "SECONDS"),
    Option("--signals-to-handle", "str", defaults.SIGNALS_TO_HANDLE, ENDS, "Signals that are passed on to the workers and end the"
           " job.", "NAMES"),
    Option("--pass-exit-code", "flag", False, ENDS,
           "When the job fails, exit with the exit code of the worker that failed first (128 + n if signal n ended it)."),
    Option("--module", "flag", False, PROGRAM, "The script is the name of a module, as for `python -m`.", short="-m"),
    Option("--no-python", "flag", False, PROGRAM, "The script is a program of its own and is not given to Python."),
    Option("--run-path", "flag", False, PROGRAM, "Run the script inside rallypoint's own Python worker (runpy.run_path)."),
    Option("--dry-run", "flag", False, PROGRAM, "Show what would be started on this node, and how, and start nothing."),
    Option("--help", "flag", False, ANSWERS, "Show this and exit.", short="-h", has_variable=False, answers=True),
    Option("--version", "flag", False, ANSWERS, "Show the version and exit.", has_variable=False, answers=True),
    Option("--print-completion", "choice", None, ANSWERS, "Print a completion script for this shell and exit.", "SHELL",
           choices=("bash", "zsh", "tcsh"), has_variable=False, answers=True),
)
# fmt: on

BY_NAME: dict[str, Option] = {name: option for option in OPTIONS for name in (option.name, option.short) if name}
