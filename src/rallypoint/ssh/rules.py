"""What ``--hosts`` decides: which hosts, what each is told to run, what went wrong where, and how the whole ends.

Only the interpreter and a program of one line stand in the command that ssh is given. All else goes through its standard input,
where nobody sees it: the folder, the variables, the secret, then what to run, and after that a line now and then. The far side
ends its agent when these lines end. What it says before it has an agent is one line as well, behind `MARK`, because a login shell
may print things of its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from rallypoint.base import defaults
from rallypoint.base.json_text import to_json
from rallypoint.base.records import Value
from rallypoint.base.text import host_port, listed, many
from rallypoint.errors import SIGNAL_BASE, ExitCode, UsageError
from rallypoint.schedulers.slurm import expand

__all__ = [
    "BEAT", "BEAT_S", "FLAGS", "MARK", "SSH_FAILED", "Host", "Ready", "check_ready", "command", "endpoint", "far_flags",
    "far_variables", "job_code", "order", "read_hostfile", "read_hosts", "report_of", "trouble", "why_end",
]  # fmt: skip

MARK = "rallypoint-host "
BEAT = b"\n"
BEAT_S = 0.5
CONNECT_S = 10
OTHERS_S = 15.0  # in which the other hosts find out by themselves that the job is over
SSH_FAILED = 255  # ssh's own exit code, where it is not that of the command
_NOT_FOUND, _NOT_ALLOWED = 127, 126  # a shell's, of the interpreter
_PROGRAM = (
    'import sys; sys.version_info < (3, 10) and sys.exit("Python " + sys.version.split()[0] + " is too old"); '
    "sys.path[:] = filter(None, sys.path); from rallypoint.ssh.guard import main; main()"
)
_ADDRESS = re.compile(r"((?:[^@\[\]\s]+@)?)\[([0-9A-Fa-f]*:[0-9A-Fa-f:.]*)\](?::(\S*))?")
_SLOTS = re.compile(r"(?:slots|max[-_]slots)=(\d+)")
_LOOPBACK = ("127.", "::1", "localhost")

# Of this side's variables, those that a job is likely to be about; a list of all others would be one of surprises.
_PREFIXES = (
    "PET_", "RALLYPOINT_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "UCX_", "OMP_", "MKL_", "CUDA_", "HF_", "WANDB_", "PYTHON",
    "OTEL_",
)  # fmt: skip
_NAMES = {"PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LOGLEVEL", "LANG", "TZ", "NO_COLOR"}
FLAGS = ("hosts", "hostfile", "ssh_command", "ssh_python", "ssh_env", "ssh_timeout")  # which end at this side
_STAY = {f"PET_{dest.upper()}" for dest in (*FLAGS, "node_rank", "nnodes", "secret", "secret_file", "scheduler")}
_STAY |= {defaults.ENV_RUNTIME_DIR, defaults.ENV_SECRET, "RALLYPOINT_SECRET_FILE", *defaults.ENV_NO_SETTINGS}


class Host(Value):
    """Where ssh is to go, as it was written, and how many workers belong there, if that was said."""

    name: str
    workers: int | None = None

    @property
    def label(self) -> str:
        return self.name.rpartition("@")[2]


class Ready(Value):
    """What a far side has said of itself: it can start an agent, unless `problem` says why not."""

    python: str
    version: str
    hostname: str
    address: str  # at which ssh has reached it
    port: int  # which is free there
    problem: str = ""


# --- which hosts -----------------------------------------------------------------------------------------------------------


def read_hosts(text: str, named: str = "--hosts") -> list[Host]:
    """``a:8,user@b:8,gpu[01-16]:8``; each host once."""
    try:
        pieces = [name for piece in _pieces(text) for name in _names(piece)]
    except ValueError as problem:
        raise UsageError(f"{named}: {problem}") from None
    hosts = [_host(piece, named) for piece in pieces]
    names = [host.name for host in hosts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{named}: {twice} is named twice; {twice}:N starts N workers there")
    return hosts


def read_hostfile(text: str, path: str) -> list[Host]:
    """A line for each host, as ``a``, ``a:8``, ``a 8`` or, as Open MPI has it, ``a slots=8``; or one for each of its workers."""
    found: dict[str, list[int | None]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        named = f"--hostfile: line {number} of {path}"
        host = _host(words[0], named)
        if host.workers is None and len(words) > 1:
            host = host.replace(workers=_slots(words[1:], named))
        found.setdefault(host.name, []).append(host.workers)
    if not found:
        raise UsageError(f"--hostfile: {path} names no host")
    return [Host(name, _sum(counts)) for name, counts in found.items()]


def _sum(counts: Sequence[int | None]) -> int | None:
    """A host that stands there once, without a number, says nothing; each further line is a worker, or as many as it says."""
    return None if list(counts) == [None] else sum(1 if count is None else count for count in counts)


def _slots(words: Sequence[str], named: str) -> int | None:
    if len(words) == 1 and words[0].isdecimal():
        return _workers(words[0], named)
    counts = [(word, _SLOTS.fullmatch(word)) for word in words]
    if wrong := next((word for word, match in counts if match is None), None):
        raise UsageError(f"{named}: {wrong!r} is neither a number of workers nor slots=N")
    return next((_workers(match[1], named) for word, match in counts if match and word.startswith("slots")), None)


def _pieces(text: str) -> list[str]:
    """What stands between commas outside of brackets."""
    return [piece.strip() for piece in re.split(r",(?![^\[]*\])", text)]


def _names(piece: str) -> list[str]:
    return [piece] if "[" not in piece or _ADDRESS.fullmatch(piece) else expand(piece)


def _host(text: str, named: str) -> Host:
    if match := _ADDRESS.fullmatch(text):
        name, workers = match[1] + match[2], match[3]
    else:
        name, colon, rest = text.partition(":")
        workers = rest if colon else None
    if not re.fullmatch(r"[^-@\s\[\]][^\s\[\]]*", name) or name.endswith("@"):
        raise UsageError(f"{named}: {text!r} is not a host; write HOST or HOST:WORKERS, as in a:8,b:8")
    return Host(name, None if workers is None else _workers(workers, named))


def _workers(text: str, named: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 6 and int(text) > 0):
        raise UsageError(f"{named}: {text!r} is not a number of workers, from 1")
    return int(text)


# --- what each is told -----------------------------------------------------------------------------------------------------


def command(ssh: Sequence[str], host: Host, python: str, timeout_s: float) -> list[str]:
    """What is started here. Options that the user gave come first, and of each option ssh takes the first."""
    interval_s = max(1, round(timeout_s / 3))
    options = {
        "BatchMode": "yes",  # nobody is asked for a password
        "ConnectTimeout": CONNECT_S,
        "ServerAliveInterval": interval_s,
        "ServerAliveCountMax": 3,
        "ControlMaster": "no",  # or it would stay behind, for others to use
        "LogLevel": "ERROR",
    }
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    far = f"exec {shlex.quote(python)} -c {shlex.quote(_PROGRAM)}"
    return [*ssh, *flags, "-T", host.name, far]


def endpoint(first: Ready, host: Host, others: Sequence[Ready]) -> str:
    """Where the nodes meet: the address at which ssh has reached the first host, if that can be one for the others as well."""
    address = first.address
    elsewhere = [one for one in others if not one.address.startswith(_LOOPBACK)]
    if not address or (address.startswith(_LOOPBACK) and elsewhere):
        address = first.hostname
    elif address.startswith("fe80:"):  # of no use without the name of an interface
        address = host.label
    return host_port(address, first.port)


def far_flags(nnodes: str, backend: str, meeting: str, run_id: str | None, host: Host) -> list[str]:
    """What an agent is told besides the user's own flags, and after them: of a flag, the last one counts."""
    flags = ["--scheduler=none", f"--nnodes={nnodes}", f"--rdzv-backend={backend}"]
    flags += [f"--rdzv-endpoint={meeting}"] if meeting else []
    flags += [f"--rdzv-id={run_id}"] if run_id else []
    return flags + ([f"--nproc-per-node={host.workers}"] if host.workers is not None else [])


def far_variables(environ: Mapping[str, str], more: Iterable[str], index: int, is_host: bool | None) -> dict[str, str]:
    """Of this side's variables those that an agent gets, `more` by name, and its place among the hosts."""
    wanted = {*more}
    kept = {
        name: value
        for name, value in environ.items()
        if name in wanted or (name not in _STAY and (name in _NAMES or name.startswith(_PREFIXES)))
    }
    kept |= dict.fromkeys(("PET_HOSTS", "PET_HOSTFILE"), "")  # a login may set them, and an agent is not to do all this again
    kept[defaults.ENV_HOST_INDEX] = str(index)
    if is_host is not None:
        kept[f"{defaults.ENV_SETTING_PREFIX}IS_HOST"] = "true" if is_host else "false"
    return kept


def order(**what: object) -> bytes:
    """One line to a far side."""
    return f"{to_json(what)}\n".encode()


# --- what went wrong -------------------------------------------------------------------------------------------------------


def check_ready(ready: Ready, python: str, version: str) -> str:
    """Why this host cannot take part, or nothing."""
    if ready.problem:
        return ready.problem
    if ready.version != version:
        return f"rallypoint {ready.version} there, {version} here; they must be the same"
    if ready.python.split(".")[:2] != python.split(".")[:2]:
        return f"Python {ready.python} there, {python} here; --ssh-python names an interpreter for all hosts"
    return ""


def trouble(code: int | None, errors: str, python: str, waited_s: float) -> str:
    """Why a host has not become ready, from ssh's exit code (None: it still runs) and what was said on stderr."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if code is None:
        return f"no answer within {waited_s:g} s{f'; it said: {last}' if last else ''}"
    if code == SSH_FAILED:
        return _ssh_trouble(errors, last)
    if code in (_NOT_FOUND, _NOT_ALLOWED) and "Error" not in last:
        return f"there is no Python at {python} there; --ssh-python names another"
    if "No module named 'rallypoint" in errors:
        whose = "this version of rallypoint" if "'rallypoint." in errors else "rallypoint"
        return f"{whose} is not installed there for {python}"
    if last.endswith("is too old"):
        return f"{last}: rallypoint needs 3.10 or later; --ssh-python names another interpreter"
    return f"ended with code {code}{f': {last}' if last else ', and said nothing'}"


_SSH_SAYS = (
    ("Permission denied", "ssh was refused: no key of yours is accepted there"),
    ("Host key verification failed", "its host key is not known, or has changed; log in once by hand"),
    ("Could not resolve hostname", "this name cannot be resolved"),
    ("Connection refused", "nothing answers at ssh's port"),
    ("No route to host", "it cannot be reached"),
    ("timed out", "it cannot be reached"),
)


def _ssh_trouble(errors: str, last: str) -> str:
    words = next((words for sign, words in _SSH_SAYS if sign in errors), "ssh failed")
    return f"{words} ({last})" if last else words


def report_of(problems: Mapping[str, str], hosts: int) -> str:
    """All that is wrong, at once."""
    width = min(max(map(len, problems)), 40)
    rows = "\n".join(f"  {name:<{width}}  {why}" for name, why in problems.items())
    return f"{len(problems)} of {many(hosts, 'host')} cannot run the job:\n{rows}"


# --- how it ends -----------------------------------------------------------------------------------------------------------


def why_end(codes: Mapping[str, int], hosts: int, least: int, quiet_s: float) -> str:
    """Why the agents that still run are to be ended, or nothing. `quiet_s` ago the last of the others has ended.

    They mostly find out by themselves, and know better what to say. But a node that never joined is not missed.
    """
    if refused := [name for name, code in codes.items() if code == ExitCode.USAGE]:
        return f"{listed(refused)} has refused to start"
    may_go_on = hosts - len([code for code in codes.values() if code != ExitCode.SUCCESS])
    if may_go_on >= least or len(codes) == hosts or quiet_s < OTHERS_S:
        return ""
    return f"only {many(may_go_on, 'host')} of at least {least} {'is' if may_go_on == 1 else 'are'} left"


def job_code(codes: Sequence[int], least: int) -> int:
    """The exit code of the whole, from those of the hosts in the order in which they ended.

    One that was lost, killed or told to leave says nothing of the job where enough others have ended well.
    """
    leaving = (ExitCode.PREEMPTED, ExitCode.UNSAVED)
    told = [code for code in codes if code != SSH_FAILED]
    if failed := [code for code in told if 0 < code < SIGNAL_BASE and code not in leaving]:
        return failed[0]
    if told.count(ExitCode.SUCCESS) >= least or (told and not any(codes)):
        return ExitCode.SUCCESS
    left = [code for code in told if code != ExitCode.SUCCESS]
    signalled = [code for code in left if code not in leaving]
    return (signalled or sorted(left, reverse=True) or [ExitCode.HOST_UNUSABLE])[0]
