"""The command line of ``rallyrun``: every flag, once, and the parser.

One table is read by the parser, by `usage`, which makes ``--help`` and the documentation page, and by `completion`, so that none
of them can drift from the others. Names and defaults of the flags that torchrun has are torchrun's; the others stand in
groups of their own or say so. A flag's attribute in the parsed arguments is its name with underscores, and its environment
variable is ``PET_`` and that attribute in capitals.

The parser is small, fast, and has no surprises for the script's own arguments. Flags stand before the script, are never
abbreviated, and take `_` for `-`; a value follows its flag, after a space or `=` (`-t3` will do for a short flag). A value that
begins with a dash must be written with `=`, so that a forgotten value is noticed instead of swallowing the next flag. The first
word that is no flag is the script, and everything after it is the script's, untouched. A flag that is not given is taken from its
environment variable, else from the table. A list is separated by commas and may be given in several pieces.

argparse would cost half of the time that a cold start may take, and would read `--n` meant for the script as `--nnodes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

from rallypoint.base import defaults
from rallypoint.base.records import Value
from rallypoint.base.text import parse_size, parse_truth
from rallypoint.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal

    Kind = Literal["str", "int", "float", "flag", "choice", "list", "size"]

__all__ = [
    "BY_NAME", "GROUPS", "OPTIONS", "Option", "as_flags", "closest", "complete", "is_given", "misnamed", "parse", "source",
    "source_of_field", "split_list",
]  # fmt: skip


JOB, HOSTS, RENDEZVOUS, STATIC, WORKERS, WATCH, LOGS, ENDS, PROGRAM, ANSWERS = GROUPS = (
    "Job size",
    "Hosts reached by ssh",
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
    """One flag. It fills the field of LaunchConfig of its own name, if there is one, or others (`fields`), or stands for the
    `setting` of its name. `answers` marks a flag that is answered at once, without starting anything or reading what follows.
    """

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
    fields: tuple[str, ...] = ()
    setting: bool = False

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
    Option("--nnodes", "str", defaults.NNODES, JOB, "Number of nodes, or MIN:MAX.", "N|MIN:MAX",
           fields=("min_nodes", "max_nodes")),
    Option(
        "--nproc-per-node", "str", defaults.NPROC_PER_NODE, JOB,
        "Workers on this node: a number, `cpu` (one per CPU this process may use), `gpu` or `xpu` (one per visible device), or"
        " `auto` (one per GPU or other accelerator; `cpu` if there are none).",
        "N|auto|cpu|gpu|xpu",
    ),
    Option("--max-restarts", "int", defaults.MAX_RESTARTS_CLI, JOB, "Maximum number of group restarts after failures.", "N"),
    Option("--scheduler", "str", defaults.SCHEDULER_AUTO, JOB,
           "Which scheduler to ask for the number of nodes and workers, the endpoint and the job's ID where these are not given:"
           f" {', '.join(defaults.ENV_SCHEDULERS)}, or the name of a plug-in; auto: the one that started this process, of those"
           " named here; none: nobody.", "NAME"),
    Option("--hosts", "str", "", HOSTS,
           "Run the job on these hosts, with so many workers on each, and start it there by ssh.", "HOST[:N],HOST[:N]"),
    Option("--hostfile", "str", "", HOSTS,
           "The same from a file with a line for each host: `HOST`, `HOST:N`, `HOST N` or, as Open MPI has it, `HOST slots=N`.",
           "FILE"),
    Option("--ssh-command", "str", "", HOSTS,
           f"How ssh is started, with options, such as `ssh -p 2222`. Default: {defaults.SSH_COMMAND}.", "COMMAND"),
    Option("--ssh-python", "str", "", HOSTS, "The interpreter on the hosts. Default: the one that runs here.", "PATH"),
    Option("--ssh-env", "list", None, HOSTS,
           "More environment variables that the hosts get from here, by name. Comma-separated; may be repeated.", "NAMES"),
    Option("--ssh-timeout", "float", defaults.SSH_TIMEOUT_S, HOSTS,
           "A host that hears nothing from here for this long ends its part of the job.", "SECONDS"),
    Option("--standalone", "flag", False, RENDEZVOUS,
           "Run on this node alone, with its own store, a free port and a random ID. Overrides the backend, endpoint and ID."),
    Option("--rdzv-backend", "str", defaults.BACKEND_CLI, RENDEZVOUS,
           "How nodes find each other: static (you give the ranks), c10d, etcd, or the name of a plug-in.", "NAME"),
    Option("--rdzv-endpoint", "str", "", RENDEZVOUS,
           f"Where the nodes meet. Default port: {defaults.ELASTIC_PORT} for c10d, {defaults.ETCD_PORT} for etcd. Separate the"
           " members of an etcd cluster with commas.", "HOST[:PORT]"),
    Option("--rdzv-id", "str", defaults.RUN_ID_CLI, RENDEZVOUS, "Job name, the same on every node.", "ID", fields=("run_id",)),
    Option("--rdzv-conf", "str", "", RENDEZVOUS,
           "Backend settings, such as join_timeout=600,last_call_timeout=30.", "K=V,K=V", fields=("rdzv_configs",)),
    Option("--node-unit", "int", None, RENDEZVOUS,
           f"c10d, etcd: run only on a multiple of this many nodes. Default: {defaults.NODE_UNIT}.", "N", setting=True),
    Option("--secret", "str", None, RENDEZVOUS,
           "c10d, static: where the job's secret comes from, which keeps others out. auto: by munge, or from a file that is made"
           f" in the home, as far as the nodes can see these; none; or a file with it. Default: {defaults.SECRET_AUTO}.",
           "auto|none|FILE", setting=True),
    Option("--secret-file", "str", None, RENDEZVOUS, "The same as --secret FILE.", "FILE", setting=True),
    Option("--tls-cert", "str", None, RENDEZVOUS,
           "c10d, static: this node's certificate, to speak TLS where the agents meet. Each looks at the other's.", "FILE",
           setting=True),
    Option("--tls-key", "str", None, RENDEZVOUS, "The key of --tls-cert, not encrypted.", "FILE", setting=True),
    Option("--tls-ca", "str", None, RENDEZVOUS, "The authority that has signed the certificates of all nodes.", "FILE",
           setting=True),
    Option("--worker-store", "choice", None, RENDEZVOUS,
           "Who serves the workers' store at MASTER_ADDR:MASTER_PORT: the agent of group rank 0, or its first worker, as in"
           f" older versions of torchrun. Default: {defaults.WORKER_STORE}.", "WHO",
           choices=(defaults.WORKER_STORE, defaults.WORKER_STORE_RANK0), setting=True),
    Option("--worker-store-port", "str", None, RENDEZVOUS,
           "Port of the workers' store, or a range to choose from. Default: any free port; with static ranks, the master"
           " port.", "PORT|FIRST-LAST", setting=True),
    Option("--worker-store-memory", "size", None, RENDEZVOUS,
           f"Size limit of the workers' store, such as 500M or 2G. Default: {defaults.WORKER_STORE_BYTES >> 30}G.",
           "BYTES[K|M|G]", setting=True),
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
    Option("--preload", "str", "", WORKERS,
           "Import these modules once per node, such as torch,transformers, and start every worker, and every restarted one, as a"
           " fork that has them. Where that would not be safe, workers import them as usual. `auto`: those that the same script"
           " imported last and that took longest; the first run measures.", "MODULES|auto"),
    Option("--standby", "flag", False, WORKERS,
           "Once all workers have called rallypoint.worker.ready(), start each of them once more, to wait in that call and take"
           " over at the next restart. Takes as much memory again."),
    Option("--no-proctitle", "flag", False, WORKERS,
           "Leave the workers' command lines in ps as they are. Without it, a Python worker is shown by its rank and job, as in"
           " `rank 3/8 my-job: python train.py`."),
    Option("--checkpoint-memory", "size", None, WORKERS,
           "Memory on this node for what its workers save with rallypoint.worker.checkpoint, such as 40G: it outlives them, and"
           " restarted workers find it. Default: none.", "BYTES[K|M|G]"),
    Option("--checkpoint-dir", "str", None, WORKERS,
           "Folder to which that memory is written when the job ends by a failure or a signal; the next job with the same folder"
           " finds it.", "FOLDER"),
    Option("--checkpoint-copies", "int", 0, WORKERS,
           "On how many other nodes to keep a copy of what workers save, 0 or 1, for when a node is lost. Give it on every node.",
           "N"),
    Option("--checkpoint-bandwidth", "size", None, WORKERS,
           "How many bytes a second this node sends for --checkpoint-copies at most. Default: no limit.", "BYTES[K|M|G]"),
    Option("--virtual-local-rank", "flag", False, WORKERS, "Give each worker LOCAL_RANK=0 and one visible device."),
    Option("--numa-binding", "choice", None, WORKERS,
           "Bind each worker to CPUs near its device: its NUMA node, its socket, an exclusive share of the node's cores, or one"
           " last-level cache.", "HOW", choices=("node", "socket", "exclusive", "core-complex"),
           has_variable=False, fields=("numa_options",)),
    Option("--hang-timeout", "str", None, WATCH,
           "Treat a worker with no sign of life for this long as hung: save all stacks and kill it. Add limits by name, such as"
           " 60,starting=900,checkpoint=600. Default: no hang detection.", "SECONDS[,NAME=SECONDS]"),
    Option("--notify", "list", None, WATCH,
           "Tell somebody when workers fail and are restarted, when they hang, and how the job ends, as one JSON document: a web"
           " address (http or https) gets it by POST, a command on its stdin; @FILE reads them from a file, one a line."
           " Comma-separated (double a comma to include one); may be repeated.", "URL|COMMAND|@FILE"),
    Option("--preflight", "list", None, WATCH,
           "Checks of this machine before it gets a seat, and again after its workers have failed; while one fails, the node"
           " waits outside and a spare takes its seat: memory, disk, shm, files, clock or gpu, with a threshold if need be"
           " (memory=8G); a command with a path, as in ./check.sh; or the name of a plug-in.", "CHECK[,CHECK]"),
    Option("--health-port", "int", None, WATCH,
           "Serve /healthz, /readyz and /metrics over HTTP on this port. Default:"
           f" {defaults.ENV_HEALTH_CHECK_PORT}, else no port is opened.", "PORT"),
    Option("--health-addr", "str", defaults.HEALTH_ADDR, WATCH,
           "Address for --health-port and --web; 0.0.0.0 for all interfaces.", "ADDRESS"),
    Option("--web", "flag", False, WATCH,
           "Serve a web page of the running job at --health-port, or at a free port, and print its address with the token that it"
           " needs."),
    Option("--event-log-handler", "str", defaults.EVENT_LOG_HANDLER, WATCH,
           "Where to send events besides events.jsonl in the run's log folder: null, console, otel (OpenTelemetry), or a"
           " registered sink.", "NAME"),
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
    Option("--log-format", "choice", defaults.LOG_FORMAT, LOGS,
           "How lines look on the console: as they are, or as one JSON object each, with time, host, rank, role, stream,"
           " generation and text; the launcher's lines too.", "FORMAT", choices=defaults.LOG_FORMATS),
    Option("--log-max-size", "size", None, LOGS, "Size limit of each log file, such as 500M or 2G. Default: no limit.",
           "BYTES[K|M|G]", fields=("log_max_bytes",)),
    Option("--logs-specs", "str", None, LOGS,
           f"Log plug-in: an entry point in the group {defaults.ENTRY_POINTS_LOGS_SPECS}.", "NAME", has_variable=False),
    Option("--no-retry-exit-codes", "str", None, ENDS,
           "Worker exit codes that end the job without a restart, such as 2,64; -n for signal n.", "CODES", setting=True),
    Option("--restart-backoff", "float", None, ENDS,
           "Delay before the second restart; it doubles with each later one. The first restart is immediate. Default:"
           f" {defaults.RESTART_BACKOFF_S:g}.", "SECONDS", setting=True),
    Option("--restart-window", "float", None, ENDS,
           "Count only restarts within this time against --max-restarts. Default: count them all.", "SECONDS", setting=True),
    Option("--retry-hopeless", "flag", False, ENDS,
           "Also restart after failures that no restart can help, such as an ImportError in all workers.", setting=True),
    Option("--max-no-progress", "int", None, ENDS,
           "End the job after this many attempts in a row that came no further than one before, by the steps that workers tell"
           " with rallypoint.worker.progress. Default: no limit.", "N", setting=True),
    Option("--shutdown-timeout", "int", None, ENDS,
           f"Seconds from the first signal to SIGKILL. Default: {defaults.ENV_SHUTDOWN_TIMEOUT}, else"
           f" {defaults.SHUTDOWN_TIMEOUT_S}.", "SECONDS"),
    Option("--exit-barrier-timeout", "float", defaults.EXIT_BARRIER_TIMEOUT_S, ENDS,
           "How long a node that has finished waits for the others.", "SECONDS"),
    Option("--signals-to-handle", "str", defaults.SIGNALS_TO_HANDLE, ENDS, "Signals that end the job and are forwarded to the"
           " workers.", "NAMES"),
    Option("--signals-to-forward", "str", "", ENDS,
           "Signals that are passed on to the workers and do nothing else, such as USR2.", "NAMES"),
    Option("--drain-grace", "float", None, ENDS,
           "When this node has to leave, give all workers of the job this long to save at the same step"
           " (rallypoint.worker.save_point); then it leaves, and the others go on. SIGTERM gives notice; a second one ends it as"
           " without this flag.", "SECONDS"),
    Option("--drain-signals", "str", "", ENDS, "More signals that give notice, such as USR1.", "NAMES"),
    Option("--drain-file", "str", None, ENDS, "A file that gives notice when it appears.", "FILE"),
    Option("--drain-forward", "str", "", ENDS,
           "A signal for the workers when a node of the job has notice, such as USR1.", "NAME"),
    Option("--requeue", "flag", False, ENDS,
           "Slurm: once all workers have saved after a notice, and the job is over, have it queued again (`scontrol requeue`)."),
    Option("--pass-exit-code", "flag", False, ENDS,
           "If the job fails, exit with the code of the worker that failed first (128 + n if signal n killed it)."),
    Option("--module", "flag", False, PROGRAM, "Run the script as a module, like `python -m`.", short="-m"),
    Option("--no-python", "flag", False, PROGRAM, "Run the script directly, not through Python."),
    Option("--run-path", "flag", False, PROGRAM, "Run the script inside rallypoint's own Python worker (runpy.run_path)."),
    Option("--dry-run", "flag", False, PROGRAM, "Show what would be started on this node, and how; start nothing."),
    Option("--help", "flag", False, ANSWERS, "Show this help and exit.", short="-h", has_variable=False, answers=True),
    Option("--version", "flag", False, ANSWERS, "Show the version and exit.", has_variable=False, answers=True),
    Option("--print-completion", "choice", None, ANSWERS, "Print a completion script for this shell and exit.", "SHELL",
           choices=("bash", "zsh", "fish", "tcsh"), has_variable=False, answers=True),
)
# fmt: on

BY_NAME: dict[str, Option] = {name: option for option in OPTIONS for name in (option.name, option.short) if name}


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> SimpleNamespace:
    """The arguments by name, as torchrun's parser would give them; UsageError names the flag or the variable that is wrong.

    After a flag that is answered at once (``--help``) nothing is read; `training_script` is then empty.
    """
    given, rest = _read_flags(argv)
    answered = any(option.answers and option.dest in given for option in OPTIONS)
    if not (rest or answered):
        raise UsageError("no script was given; write rallyrun [flags] script [arguments of the script], or see rallyrun --help")
    variables = {} if answered else _read_variables(environ, given)
    values = {**_defaults(), **variables, **given}
    script, *arguments = rest or [""]
    return SimpleNamespace(
        **values,
        training_script=script,
        training_script_args=arguments,
        from_flags=frozenset(given),
        from_environment=frozenset(variables),
        from_scheduler={},
    )


def complete(args: Any, environ: Mapping[str, str]) -> SimpleNamespace:
    """A copy of arguments that somebody else put together, with the variable or the default of every flag that they lack."""
    known = vars(args)
    variables = {} if "from_environment" in known else _read_variables(environ, known)
    origins = {"from_flags": frozenset(), "from_environment": frozenset(variables), "from_scheduler": {}}
    return SimpleNamespace(**{**_defaults(), **origins, "training_script_args": [], **variables, **known})


def source(args: SimpleNamespace, dest: str) -> str:
    """Where this value came from, to be named in an error: the environment variable, the scheduler's too, or the flag."""
    flag = "--" + dest.replace("_", "-")
    if dest in args.from_scheduler:
        return str(args.from_scheduler[dest])
    return BY_NAME[flag].variable if dest in args.from_environment else flag


def source_of_field(args: SimpleNamespace, field: str) -> str | None:
    """Where the value of this field of the API came from, or None if no flag fills it."""
    return next((source(args, option.dest) for option in OPTIONS if field in (option.fields or (option.dest,))), None)


def as_flags(args: SimpleNamespace, leave_out: Sequence[str] = ()) -> list[str]:
    """The flags that were given, as words which say the same; not the script, nor variables."""
    given = [option for option in OPTIONS if option.dest in args.from_flags and option.dest not in leave_out]
    return [option.name if option.kind == "flag" else f"{option.name}={_text(getattr(args, option.dest))}" for option in given]


def _text(value: Any) -> str:
    return ",".join(piece.replace(",", ",,") for piece in value) if isinstance(value, list) else str(value)


def is_given(args: SimpleNamespace, dest: str) -> bool:
    """Whether a flag or its variable says this, and not the table."""
    return dest in args.from_flags or dest in args.from_environment


def misnamed(environ: Mapping[str, str]) -> list[tuple[str, Option]]:
    """Variables that look like those of flags, but under the prefix of settings; and which flags are meant."""
    prefix = defaults.ENV_SETTING_PREFIX
    by_name = {f"{prefix}{option.dest.upper()}": option for option in OPTIONS if option.variable}
    found = [(name, by_name[name]) for name in environ if name in by_name and name != defaults.ENV_STANDBY]
    if not found:
        return []
    from rallypoint.rendezvous.settings import BY_KEY

    return [(name, option) for name, option in found if option.dest not in BY_KEY]


def closest(word: str, known: Sequence[str]) -> str | None:
    """What the user may have meant by `word`: the only known one that it begins, else the most alike."""
    begun = [name for name in known if name.startswith(word)]
    if len(begun) == 1:
        return begun[0]
    import difflib

    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


def _defaults() -> dict[str, Any]:
    return {option.dest: [] if option.kind == "list" else option.default for option in OPTIONS}


def _read_flags(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What the flags before the script say, and all from the script on."""
    given: dict[str, Any] = {}
    at = 0
    while at < len(argv):
        token = argv[at]
        if token == "--":
            return given, list(argv[at + 1 :])
        if not token.startswith("-") or token == "-":
            return given, list(argv[at:])
        at += 1
        option, text = _recognise(token)
        if option.kind != "flag" and text is None:
            text = _next_value(option, argv, at)
            at += 1
        _keep(given, option, text)
        if option.answers:
            break
    return given, []


def _recognise(token: str) -> tuple[Option, str | None]:
    """The flag that a word names, and the value if the word holds that too."""
    name, equals, text = token.partition("=")
    option = BY_NAME.get(name.replace("_", "-"))
    if option:
        return option, text if equals else None
    option = BY_NAME.get(token[:2]) if token[1] != "-" else None
    if option:
        return option, token[2:]
    raise _unknown(name)


# What users of other launchers write, where the most alike of our flags is another one; without dashes.
_MEANT = {
    word: flag
    for flag, words in {
        "--nproc-per-node": (
            "n np nproc nprocs n-proc num-proc num-procs num-processes processes procs-per-node nprocs-per-node ntasks"
            " ntasks-per-node workers num-workers world-size gpu gpus ngpu ngpus n-gpu n-gpus num-gpu num-gpus gpus-per-node"
            " nproc-per-gpu devices num-devices cpus"
        ),
        "--nnodes": "N node nodes nnode n-nodes num-node num-nodes machines num-machines min-nodes max-nodes",
        "--node-rank": "rank machine-rank group-rank node-id",
        "--master-addr": "master master-address master-host main-process-ip",
        "--master-port": "port main-process-port",
        "--rdzv-backend": "backend",
        "--rdzv-endpoint": "endpoint rdzv-addr rdzv-address rdzv-host",
        "--rdzv-id": "id job-id run-id job-name",
        "--rdzv-conf": "rdzv-config rdzv-configs conf",
        "--max-restarts": "max restarts retries max-retries",
        "--log-dir": "logdir logs log-folder output-dir",
        "--no-python": "no-python-script raw",
        "--version": "v V",
    }.items()
    for word in words.split()
}


def _unknown(name: str) -> UsageError:
    word = name.replace("_", "-").lstrip("-")
    meant = _MEANT.get(word) or closest(f"--{word}", [option.name for option in OPTIONS])
    advice = f"did you mean {meant}?" if meant else "rallyrun --help lists the flags"
    return UsageError(f"unknown flag {name}: {advice} (Flags are not abbreviated; those of the script stand after it.)")


def _next_value(option: Option, argv: Sequence[str], at: int) -> str:
    text = argv[at] if at < len(argv) else None
    if text is None:
        raise UsageError(f"{option.name} needs a value: {option.name} {option.metavar}")
    if text.startswith("-") and not text[1:2].isdigit() and text != "-":
        raise UsageError(f"{option.name} needs a value, but {text} follows; a value with a dash is written {option.name}={text}")
    return text


def _keep(given: dict[str, Any], option: Option, text: str | None) -> None:
    if option.kind == "flag":
        if text is not None:
            raise UsageError(f"{option.short or option.name} takes no value, but was given {text!r}")
        given[option.dest] = True
    else:
        value = _convert(option, text or "", option.name)
        given[option.dest] = [*given.get(option.dest, []), *value] if option.kind == "list" else value


def _read_variables(environ: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """What the environment says about flags that were not given; an empty variable says nothing."""
    return {
        option.dest: _convert(option, environ[option.variable], option.variable)
        for option in OPTIONS
        if environ.get(option.variable) and option.dest not in given
    }


def _convert(option: Option, text: str, named: str) -> Any:
    convert, expected = _KINDS[option.kind]
    try:
        value = convert(text)
    except ValueError:
        raise UsageError(f"{named} must be {expected}, not {text!r}") from None
    if option.choices and value not in option.choices:
        raise UsageError(f"{named} must be one of {', '.join(option.choices)}, not {text!r}")
    return value


def split_list(text: str) -> list[str]:
    """The parts between commas; a doubled comma stands for a comma."""
    pieces = (piece.replace("\0", ",") for piece in text.replace(",,", "\0").split(","))
    return [piece for piece in pieces if piece]


_KINDS: dict[Kind, tuple[Callable[[str], Any], str]] = {
    "str": (str, "a text"),
    "choice": (str, "a text"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "flag": (parse_truth, "1 or 0"),
    "list": (split_list, "a list"),
    "size": (parse_size, "a number of bytes, as in 4096, 500M or 2G"),
}
