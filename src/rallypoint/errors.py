"""What can go wrong, by whose fault it is.

    Exception
    ├── RallypointError
    │   ├── UsageError (also a ValueError)    the user asked for something impossible; nothing was started
    │   │   ├── NotAFolderError (also a NotADirectoryError)  what was named as a folder is a file
    │   │   └── RankError (also a RuntimeError)  the local ranks of a group of workers have a gap
    │   ├── WorkerStartError (also an OSError)  a worker's program could not be started
    │   │   ├── LicenceOverError              workers of this node may not run any longer
    │   │   ├── WorkerNotFoundError           there is none
    │   │   ├── WorkerNotAllowedError         it may not be executed
    │   │   └── HostLimitError                this machine has no processes, files or memory left for it
    │   ├── CheckpointMemoryError (also a MemoryError)  a snapshot does not fit; those before it are kept
    │   ├── UnkillableWorkersError            workers outlived SIGKILL; this host must not be used again
    │   ├── UnfitHostError                    a check of this host has failed, and nobody could take its place
    │   ├── HostsError                        too few hosts could be reached, or could run an agent; nothing was started
    │   └── JobFailedError                    the job failed through workers of other nodes
    ├── SignalException                       a signal asked the launcher to stop
    │   ├── InterruptException (also a KeyboardInterrupt)  it was Ctrl-C
    │   ├── PreemptedError                    this node had notice to leave, and left when all workers had saved, or had to
    │   └── StoppedError                      somebody stopped the job with `rallypoint stop`
    └── RendezvousError
        ├── RendezvousClosedError             the job has ended; nobody may join any more
        │   ├── JobStoppedError               somebody stopped it, or sent a signal to the host that it cannot do without
        │   └── JobPreemptedError             nodes had notice to leave, and too few would be left
        ├── RendezvousTimeoutError            too few nodes came in time
        ├── RendezvousConnectionError         the coordination store cannot be reached
        ├── RendezvousStateError              the coordination store holds something impossible
        └── RendezvousGracefulExitError       this node is not needed and may go home

What else comes up is a bug of ours, unless the host is to blame (`is_hosts_fault`): it has run out of something, or something
was removed under us.

``ChildFailedError``, which says which workers failed and why, lives in ``failures.process_failure``.
"""

from __future__ import annotations

import errno
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.base.senders import Sender

__all__ = [
    "SIGNAL_BASE",
    "CheckpointMemoryError",
    "ExitCode",
    "HostLimitError",
    "HostsError",
    "InterruptException",
    "JobFailedError",
    "JobPreemptedError",
    "JobStoppedError",
    "LicenceOverError",
    "NotAFolderError",
    "PreemptedError",
    "RallypointError",
    "RankError",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "SignalException",
    "StoppedError",
    "UnfitHostError",
    "UnkillableWorkersError",
    "UsageError",
    "WorkerNotAllowedError",
    "WorkerNotFoundError",
    "WorkerStartError",
    "bad_field",
    "exit_code",
    "in_words",
    "is_child_failure",
    "is_hosts_fault",
    "plainly_told",
    "signal_exception",
    "worker_start_error",
]


class ExitCode:
    """What ``rallyrun`` tells the scheduler that started it; where a signal ended the job, 128 + its number."""

    SUCCESS = 0
    WORKER_FAILED = 1  # a worker failed and no restart was left; running the job again may help
    USAGE = 2  # bad input, nothing was started; running it again will not help
    RENDEZVOUS_FAILED = 3  # the nodes did not meet; running it again may help
    HOST_UNUSABLE = 4  # this host cannot run the workers; use another
    HOPELESS = 65  # a worker failed in a way that no restart can help; running the job again will not help
    INTERNAL = 70  # a bug of ours
    PREEMPTED = 75  # this node, or the job, had notice to leave, and all workers have saved: start it again
    UNSAVED = 76  # the same, but there was no time for all to save: started again, it goes on from an older checkpoint
    STOPPED = 79  # somebody stopped the job, on all nodes: do not start it again


SIGNAL_BASE = 128  # what shells add to the number of the signal that ended a process


def plainly_told(error: BaseException) -> list[str]:
    """What IPython asks an exception for that says it all by itself: not sixty lines of how we came to raise it."""
    name, text = type(error).__name__, str(error)
    return [f"{name}:", *text.splitlines()] if "\n" in text else [f"{name}: {text}"]


class RallypointError(Exception):
    """The base of rallypoint's own errors."""

    _render_traceback_ = plainly_told


class UsageError(RallypointError, ValueError, AssertionError):
    """Bad input, named by its flag or field, found before anything was started.

    It is also what code written for torch catches there: now a ValueError, now an AssertionError. Where the text begins with the
    name of a field, `field` is that name: whoever gave the value by another name, as a flag, can be told that one.

    >>> from rallypoint import LaunchConfig, UsageError
    >>> try:
    ...     LaunchConfig(min_nodes=2, max_nodes=1, nproc_per_node=1)
    ... except UsageError as error:
    ...     print("max_nodes" in str(error))
    True
    """

    field = ""


class NotAFolderError(UsageError, NotADirectoryError):
    """What was named as a folder is a file."""


class RankError(UsageError, RuntimeError):
    """Local ranks that are not 0, 1, 2, and so on, or that differ between arguments and environments."""


def bad_field(field: str, problem: str, kind: type[UsageError] = UsageError) -> UsageError:
    """The error for a value of this field; `problem` goes on right after its name."""
    error = kind(f"{field}{problem}")
    error.field = field
    return error


class WorkerStartError(RallypointError, OSError):
    """The kernel refused to start a worker's program: it is not there, or may not be executed."""


class LicenceOverError(WorkerStartError):
    """No worker of this node may run any longer: the others may take it for dead."""


class WorkerNotFoundError(WorkerStartError, FileNotFoundError):
    """There is no such program."""


class WorkerNotAllowedError(WorkerStartError, PermissionError):
    """The program may not be executed."""


class HostLimitError(WorkerStartError):
    """There are no processes, files or memory left for it on this machine."""


def worker_start_error(number: int, text: str) -> WorkerStartError:
    """The error for what the kernel answered."""
    kinds = {errno.ENOENT: WorkerNotFoundError, errno.EACCES: WorkerNotAllowedError}
    kinds |= dict.fromkeys((errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE), HostLimitError)
    return kinds.get(number, WorkerStartError)(number, text)


class CheckpointMemoryError(RallypointError, MemoryError):
    """A snapshot does not fit into what the job has for them; what was saved before is kept."""


class UnkillableWorkersError(RallypointError):
    """Processes that did not end after SIGKILL, as a worker stuck in a device driver does."""

    def __init__(self, pids: list[int], waited_s: float) -> None:
        self.pids = pids
        names = ", ".join(map(str, pids))
        super().__init__(
            f"{len(pids)} process(es) did not end within {waited_s:g} s of SIGKILL (pid {names}): they are stuck in the kernel, "
            "often on a device or a network file system. No worker is restarted on this host; "
            f"see /proc/{pids[0] if pids else 'PID'}/stack, and restart the host before using it again."
        )


class UnfitHostError(RallypointError):
    """A check of this host has failed before workers were started, in a job that has no other."""


class HostsError(RallypointError):
    """Too few of the hosts that were named can be reached, or can run an agent; nothing was started."""


class JobFailedError(RallypointError):
    """The job failed; none of the workers of this node was the cause. `lines` say who was, the same on every node.

    >>> from rallypoint import JobFailedError
    >>> str(JobFailedError("rank 3 failed", ["rank 3 raised ValueError"], cause_exitcode=1))
    'the job has failed: rank 3 failed'
    """

    def __init__(
        self,
        why: str,
        lines: list[str],
        cause_exitcode: int | None,
        cause_rank: int | None = None,
        cause_text: str = "",
        alike: tuple[tuple[int, int], ...] = (),
        is_hopeless: bool = False,
    ) -> None:
        self.why = why
        self.lines = lines
        self.cause_exitcode = cause_exitcode
        self.cause_rank = cause_rank
        self.cause_text = cause_text
        self.is_hopeless = is_hopeless  # no restart could have helped, however many were left
        self.alike = alike  # first and last of each run of ranks that failed as the cause did
        super().__init__(f"the job has failed: {why}")


class SignalException(Exception):
    """A signal asked the launcher to stop; raised from the agent's loop, never from a signal handler.

    >>> import signal
    >>> from rallypoint import SignalException
    >>> SignalException("asked to stop", signal.SIGTERM).sigval.name
    'SIGTERM'
    """

    _render_traceback_ = plainly_told

    sender: Sender | None = None  # where it is known who has sent it

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


class InterruptException(SignalException, KeyboardInterrupt):
    """Ctrl-C, which all programs and notebooks know as a KeyboardInterrupt."""

    def _render_traceback_(self) -> list[str]:
        return ["KeyboardInterrupt"]


class PreemptedError(SignalException):
    """This node had notice to leave, and all workers have saved, or there is no time left; to its workers it is as SIGTERM."""

    def __init__(self, msg: str, all_saved: bool = True) -> None:
        super().__init__(msg, signal.SIGTERM)
        self.all_saved = all_saved


class StoppedError(SignalException):
    """Somebody stopped the job with ``rallypoint stop``; to its workers it is as SIGTERM."""

    def __init__(self, msg: str) -> None:
        super().__init__(msg, signal.SIGTERM)


def signal_exception(text: str, number: signal.Signals) -> SignalException:
    """The exception for this signal."""
    return (InterruptException if number == signal.SIGINT else SignalException)(text, number)


class RendezvousError(Exception):
    """The base of everything that can go wrong when nodes meet."""

    _render_traceback_ = plainly_told


class RendezvousClosedError(RendezvousError):
    """The rendezvous is closed: the job has ended and nobody may join it."""


class JobStoppedError(RendezvousClosedError):
    """The job was stopped on purpose: with ``rallypoint stop``, or by a signal on a node without whose store it cannot go on."""

    def __init__(self, msg: str, sigval: int, for_all: bool = False) -> None:
        super().__init__(msg, sigval, for_all)
        self.sigval = sigval
        self.for_all = for_all  # somebody meant the job, and not a node

    def __str__(self) -> str:
        return str(self.args[0])


class JobPreemptedError(RendezvousClosedError):
    """Nodes had notice to leave, and the job cannot go on without them. It can be started anew, from where all workers have saved
    if they were given the time.
    """

    def __init__(self, msg: str, all_saved: bool = True) -> None:
        super().__init__(msg, all_saved)
        self.all_saved = all_saved

    def __str__(self) -> str:
        return str(self.args[0])


class RendezvousTimeoutError(RendezvousError):
    """The rendezvous was not complete in time."""


class RendezvousConnectionError(RendezvousError):
    """The store behind the rendezvous could not be reached."""


class RendezvousStateError(RendezvousError):
    """The store behind the rendezvous holds something that cannot be."""


class RendezvousGracefulExitError(RendezvousError):
    """This node was left out and may end successfully."""


_HOSTS_FAULTS = frozenset({
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG,  # used up
    errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO,  # removed, or broken
    errno.EACCES, errno.EPERM, errno.ENOSYS, errno.ENOEXEC, errno.ELIBBAD, errno.E2BIG, errno.ETXTBSY,  # not allowed, or not able
})  # fmt: skip
_NO_THREAD = "can't start new thread"  # the interpreter has no class for it
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (UsageError, ExitCode.USAGE),
    (RendezvousError, ExitCode.RENDEZVOUS_FAILED),
    (UnkillableWorkersError, ExitCode.HOST_UNUSABLE),
    (UnfitHostError, ExitCode.HOST_UNUSABLE),
    (HostLimitError, ExitCode.HOST_UNUSABLE),
    (HostsError, ExitCode.HOST_UNUSABLE),
    (RallypointError, ExitCode.WORKER_FAILED),
)


def exit_code(error: BaseException) -> int:
    """What a scheduler is told about it, where it is not the failure of a worker of ours."""
    if isinstance(error, JobFailedError) and error.is_hopeless:
        return ExitCode.HOPELESS
    match error:
        case StoppedError():
            return ExitCode.STOPPED
        case PreemptedError() | JobPreemptedError():
            return ExitCode.PREEMPTED if error.all_saved else ExitCode.UNSAVED
        case SignalException():
            return SIGNAL_BASE + int(error.sigval)
        case JobStoppedError():
            return ExitCode.STOPPED if error.for_all else SIGNAL_BASE + error.sigval
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return ExitCode.HOST_UNUSABLE if is_hosts_fault(error) else ExitCode.INTERNAL


def is_child_failure(error: BaseException) -> bool:
    """Whether it is a ChildFailedError: that class is imported only where one is raised, and may not be there to be imported."""
    failures = sys.modules.get("rallypoint.failures.process_failure")
    return failures is not None and isinstance(error, failures.ChildFailedError)


def is_hosts_fault(error: BaseException) -> bool:
    """Whether this machine is to blame for an error that nobody foresaw: another may do better."""
    if isinstance(error, OSError):
        return error.errno in _HOSTS_FAULTS
    return isinstance(error, MemoryError | ImportError) or (isinstance(error, RuntimeError) and str(error) == _NO_THREAD)


def in_words(error: BaseException) -> str:
    """One line, whatever the message holds."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return " ".join(f"{error.strerror}{where}".split())
    said = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return said or "out of memory"
    is_plain = isinstance(error, RallypointError | RendezvousError) or is_hosts_fault(error)
    return said if is_plain else f"{type(error).__name__}: {said}"
