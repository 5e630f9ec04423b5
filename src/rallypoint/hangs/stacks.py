"""Asking workers for the stacks of all their threads, without stopping or entering them, and writing down what they answer.

A worker's interpreter, prepared by `worker_site`, answers a signal by writing its stacks into a file of ours. The signal would
end any process that does not expect it. So it is sent only to one that has a handler for it, and that holds the file of its
answer open: then the handler is the one that was meant. Of all others there is the kernel's view: where the threads of a process
are, as it is shown to anybody who may look.

What hangs is seldom the one worker whose stack is seen first: thirty wait in the same line, and one is elsewhere. So every stack
is told once, with the ranks that have it, and the one of the worker that hangs comes first. The stacks are left in files: one for
each worker, and one that tells those that are the same once.
"""

from __future__ import annotations

import _thread
import errno
import os
import signal
import time
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from rallypoint.base.records import Value
from rallypoint.base.text import plural, ranges
from rallypoint.output.log_specs import LogFolder, open_log
from rallypoint.processes.activity import families_of, look_at, read_file, threads_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = [
    "PY_SPY", "STACK_SIGNAL", "SUMMARY_NAME", "ProcessStacks", "StackDesk", "WorkerStacks", "brief_lines", "frames_of",
    "grouped_lines", "kernel_view", "parse_faulthandler", "prepared_at", "rank_ranges", "spy_on", "standing", "waits_in",
    "write_stacks", "write_text",
]  # fmt: skip

STACK_SIGNAL = signal.SIGRTMAX - 7  # one that neither the C library nor a debugger uses
MAX_BYTES = 1024 * 1024  # of one worker's answer
MAX_PROCESSES = 64  # of one worker
PY_SPY = "py-spy"  # a program of its own, which shows native frames too, of any process that it may trace
ALL_ANSWERS_S = 2.0
ONE_ANSWER_S = 1.0
POLL_S = 0.001
MAX_OPEN_FILES = 4096

SUMMARY_NAME = "stacks.txt"
_FILE = "rallypoint-stacks-"  # in memory; the agent and the local rank follow
FILE_BYTES_MAX = 1024 * 1024  # of one file

MAX_PYTHON_THREADS = 1000  # of one process; faulthandler itself stops at 100
BRIEF_FRAMES = 4
BRIEF_GROUPS = 8
_HEADING_END = " (most recent call first):"
_FRAME_BEGIN = '  File "'
MAIN, OTHER, CHILD = "main thread", "another thread", "child process"

MAX_THREADS = 256
# The calls in which programs wait; all others are told by their number.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 23: "select", 34: "pause", 35: "nanosleep", 42: "connect", 43: "accept", 45: "recvfrom",
        47: "recvmsg", 61: "wait4", 62: "kill", 74: "fsync", 128: "rt_sigtimedwait", 202: "futex", 230: "clock_nanosleep",
        232: "epoll_wait", 247: "waitid", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4",
    },
    "aarch64": {
        22: "epoll_pwait", 63: "read", 64: "write", 72: "pselect6", 73: "ppoll", 82: "fsync", 95: "waitid", 98: "futex",
        101: "nanosleep", 115: "clock_nanosleep", 137: "rt_sigtimedwait", 202: "accept", 203: "connect", 207: "recvfrom",
        212: "recvmsg", 242: "accept4", 260: "wait4",
    },
}  # fmt: skip
_STATES = {
    "R": "running", "S": "asleep", "I": "idle", "D": "waiting for a device", "T": "stopped", "t": "held by a debugger",
    "Z": "ended",
}  # fmt: skip


class ProcessStacks(Value):
    """One process of a worker: its Python stacks, or why there are none, and what the kernel shows."""

    pid: int
    command: str = ""
    threads: tuple[tuple[str, ...], ...] = ()  # the frames of each, the innermost first; the main thread is the last
    why_none: str = ""
    text: str = ""  # as faulthandler wrote it
    kernel: tuple[str, ...] = ()
    waits_in: str = ""  # of the main thread, as the kernel sees it


class WorkerStacks(Value):
    rank: int  # the global one
    processes: tuple[ProcessStacks, ...]  # the worker's own is the first

    @property
    def speaker(self) -> ProcessStacks | None:
        """The process that stands for the worker: its own, or where that is a shell or the like, the first that has stacks."""
        speaking = [one for one in self.processes if one.threads]
        return next(iter([*speaking, *self.processes]), None)


def parse_faulthandler(text: str) -> tuple[tuple[str, ...], ...]:
    """The frames of the threads in the order in which they stand; lines that are not understood are kept or left out."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.endswith(_HEADING_END) and not line.startswith(" "):
            if len(found) == MAX_PYTHON_THREADS:
                break
            found.append([])
        elif found and line.startswith("  "):
            found[-1].append(_frame(line))
    return tuple(map(tuple, found))


def _frame(line: str) -> str:
    path, found, rest = line.removeprefix(_FRAME_BEGIN).rpartition('", line ')
    number, _, function = rest.partition(" in ")
    return f"{function} ({path}:{number})" if found and line.startswith(_FRAME_BEGIN) else line.strip()


def standing(worker: WorkerStacks) -> Hashable:
    """Where the worker stands, to be compared with others: its main thread's stack, else where it waits in the kernel."""
    speaker = worker.speaker
    if speaker is None:
        return None
    return speaker.threads[-1] if speaker.threads else speaker.waits_in or None


def frames_of(worker: WorkerStacks) -> tuple[str, ...]:
    """Of its main thread, the innermost first; none where they are not known."""
    speaker = worker.speaker
    return speaker.threads[-1] if speaker is not None and speaker.threads else ()


def rank_ranges(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2,5``."""
    distinct = set(ranks)
    return f"{plural(len(distinct), 'rank')} {ranges(distinct)}"


# --- asking ----------------------------------------------------------------------------------------------------------------


def prepared_at(pid: int) -> tuple[str, str]:
    """The file that a process answers into, and its place as `StackDesk.of_another` wants it; empty if it was not prepared.

    It is told by what the process has open: a fork of a keeper was started with another environment than it has. The agent, whose
    file it is, is none of those that answer.
    """
    own = f"/memfd:{_FILE}{pid}-"
    try:
        paths = [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:  # it has ended, or is another user's
        return "", ""
    for path in paths:
        name = _link(path)
        if name.startswith(f"/memfd:{_FILE}") and not name.startswith(own):
            return name, f"{int(STACK_SIGNAL)}:{path}"
    return "", ""


class StackDesk:
    """A file for the answers of each worker, in memory, opened by the worker under /proc of this process."""

    def __init__(self, size: int) -> None:
        self._names = [f"{_FILE}{os.getpid()}-{rank}" for rank in range(size)]
        self._fds = [os.memfd_create(name) for name in self._names]
        self._asking = _thread.allocate_lock()  # one at a time: the answers of two would mix
        self._holding = _thread.allocate_lock()  # of the files, for an instant

    @classmethod
    def of_another(cls, place: str) -> StackDesk:
        """That of an agent which told a worker this place, to ask this one worker; OSError if it is gone, or not for us."""
        path = place.partition(":")[2]
        desk = cls(0)
        desk._fds = [os.open(path, os.O_RDWR | os.O_CLOEXEC)]
        desk._names = [_link(path).removeprefix("/memfd:").removesuffix(" (deleted)")]
        return desk

    def place(self, rank: int) -> str:
        """What the worker has to know: the signal, and where its answer goes."""
        return f"{int(STACK_SIGNAL)}:/proc/{os.getpid()}/fd/{self._fds[rank]}"

    def ask(self, pids: dict[int, int], global_ranks: dict[int, int]) -> dict[int, WorkerStacks]:
        """The stacks of all processes of these workers, by local rank; the workers answer beside each other. For any thread.

        OSError: the desk is closed.
        """
        with self._asking:
            files = self._own_files(pids)
            try:
                return self._ask_all(pids, files, global_ranks)
            finally:
                for fd in files.values():
                    os.close(fd)

    def _own_files(self, ranks: Iterable[int]) -> dict[int, int]:
        """The same files under numbers that nobody closes, and gives to others, while they are in use."""
        with self._holding:
            if not self._fds:
                raise OSError(errno.EBADF, "the workers are not watched any more")
            return {rank: os.dup(self._fds[rank]) for rank in ranks}

    def _ask_all(self, pids: dict[int, int], files: dict[int, int], global_ranks: dict[int, int]) -> dict[int, WorkerStacks]:
        give_up_at = time.monotonic() + ALL_ANSWERS_S
        families = families_of(pids.values())
        asked = {
            rank: self._ask_family(rank, files[rank], families[pid][:MAX_PROCESSES], give_up_at) for rank, pid in pids.items()
        }
        answers: dict[int, WorkerStacks] = {}
        while asked:
            for rank, interview in list(asked.items()):
                try:
                    next(interview)
                except StopIteration as end:
                    answers[rank] = WorkerStacks(global_ranks.get(rank, rank), end.value)
                    del asked[rank]
            time.sleep(POLL_S if asked else 0)
        return answers

    def _ask_family(
        self, rank: int, fd: int, family: list[int], give_up_at: float
    ) -> Generator[None, None, tuple[ProcessStacks, ...]]:
        """One process after the other, as they share a file; nothing comes of it until there is something to be waited for."""
        found = []
        for pid in family:
            kernel, main_waits_in = kernel_view(pid, give_up_at), waits_in(pid, str(pid))  # before the signal moves it
            text, why_none = yield from self._ask_one(rank, fd, pid, min(give_up_at, time.monotonic() + ONE_ANSWER_S))
            threads = parse_faulthandler(text)
            found.append(ProcessStacks(pid, _command(pid), threads, why_none, text, kernel, main_waits_in))
        return tuple(found)

    def _ask_one(self, rank: int, fd: int, pid: int, give_up_at: float) -> Generator[None, None, tuple[str, str]]:
        """What it answers, and if that is nothing, why."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return "", "it has ended"
        try:
            why_not = self._why_not_to_ask(rank, pid)
            if why_not:
                return "", why_not
            os.ftruncate(fd, 0)
            busy_before = _threads_that_block(pid)
            signal.pidfd_send_signal(pidfd, STACK_SIGNAL)
            while time.monotonic() < give_up_at:
                yield
                if os.fstat(fd).st_size and not _threads_that_block(pid) - busy_before:
                    break
        except OSError:
            return "", "it ended before it answered"
        finally:
            os.close(pidfd)
        text = os.pread(fd, MAX_BYTES, 0).decode(errors="replace")
        return text, "" if text else f"it did not answer within {ONE_ANSWER_S:g} s"

    def _why_not_to_ask(self, rank: int, pid: int) -> str:
        sight = look_at(pid)
        if sight is None or sight.is_gone:
            return "it has ended"
        if sight.state in "Tt":
            return "it is stopped, and a stopped process answers nothing"
        if not _signal_set(pid, "", b"SigCgt"):
            return "it is no Python program, or one that was started without site (-S, -I or -E)"
        return "" if self._holds_its_file(rank, pid) else "it does not hold open the file for its answer"

    def _holds_its_file(self, rank: int, pid: int) -> bool:
        """Only names are compared: to look at a file itself may take for ever where a network file system hangs."""
        wanted = f"/memfd:{self._names[rank]} (deleted)"
        try:
            return any(_link(f"/proc/{pid}/fd/{fd}") == wanted for fd in os.listdir(f"/proc/{pid}/fd")[:MAX_OPEN_FILES])
        except OSError:
            return False

    def close(self) -> None:
        with self._holding:
            fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def _signal_set(pid: int, thread: str, name: bytes) -> bool:
    """Whether our signal is in this set of signals of a process or thread."""
    text = read_file(f"/proc/{pid}{thread}/status") or b""
    _, found, rest = text.partition(b"\n" + name + b":")
    return bool(found) and bool(int(rest.split(None, 1)[0], 16) >> (STACK_SIGNAL - 1) & 1)


def _threads_that_block(pid: int) -> set[str]:
    """Those that do not take our signal; one that is in its handler does not either."""
    return {tid for tid in threads_of(pid) if _signal_set(pid, f"/task/{tid}", b"SigBlk")}


def _command(pid: int) -> str:
    words = (read_file(f"/proc/{pid}/cmdline") or b"")[:200].replace(b"\0", b" ").decode(errors="replace")
    return "".join(one if one.isprintable() else "?" for one in words).strip()


def spy_on(program: str, pid: int, timeout_s: float) -> tuple[str, str]:
    """The stacks of a process as py-spy sees them, with native frames where it can; else nothing, and why."""
    import subprocess

    give_up_at, why = time.monotonic() + timeout_s, ""
    for how in (("--native",), ()):
        try:
            left_s = max(give_up_at - time.monotonic(), 0.0)
            found = subprocess.run(
                [program, "dump", *how, "--pid", str(pid)],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=left_s, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return "", f"py-spy failed: {error}"
        if found.returncode == 0:
            return found.stdout.rstrip()[:MAX_BYTES], ""
        why = f"py-spy says: {' '.join(found.stderr.split())}"
    return "", why


# --- the kernel's view -----------------------------------------------------------------------------------------------------


def kernel_view(pid: int, give_up_at: float) -> tuple[str, ...]:
    """A line for each thread, with the kernel's own stack where it may be read; the main thread is the first."""
    lines: list[str] = []
    threads = sorted(threads_of(pid), key=int)
    for tid in threads[:MAX_THREADS]:
        if time.monotonic() > give_up_at:
            break
        name = (read_file(f"/proc/{pid}/task/{tid}/comm") or b"").decode(errors="replace").strip()
        lines.append(f"thread {tid} ({name}): {waits_in(pid, tid)}")
        stack = (read_file(f"/proc/{pid}/task/{tid}/stack") or b"").decode(errors="replace")
        lines += [f"  {line.partition('] ')[2] or line}" for line in stack.splitlines()]
    told = sum(1 for line in lines if line.startswith("thread "))
    return (*lines, f"and {len(threads) - told} more threads") if told < len(threads) else tuple(lines)


def waits_in(pid: int, tid: str) -> str:
    """In which state a thread is, and in which call to the kernel."""
    sight = look_at(pid, f"/task/{tid}")
    if sight is None:
        return "ended"
    shown = [_STATES.get(sight.state, sight.state)]
    call = (read_file(f"/proc/{pid}/task/{tid}/syscall") or b"").split()
    if call and call[0].isdigit():
        number = int(call[0])
        shown.append(f"in {_CALLS.get(os.uname().machine, {}).get(number, f'call {number}')}")
    place = (read_file(f"/proc/{pid}/task/{tid}/wchan") or b"").decode(errors="replace")
    return " ".join([*shown, f"at {place}"] if place not in ("", "0") else shown)


# --- telling ---------------------------------------------------------------------------------------------------------------


class _Group(Value):
    where: str
    frames: tuple[str, ...]
    ranks: tuple[int, ...]


def _groups(workers: Sequence[WorkerStacks], first: Collection[int]) -> list[_Group]:
    """Main threads before others, those of `first` before others, large groups before small ones."""
    members: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for worker in workers:
        for where, frames in _stacks_of(worker):
            members.setdefault((where, frames), []).append(worker.rank)
    groups = [_Group(where, frames, tuple(ranks)) for (where, frames), ranks in members.items()]

    def place(group: _Group) -> tuple[int, bool, int, int]:
        is_first = bool(set(group.ranks) & set(first))
        return (MAIN, OTHER, CHILD).index(group.where), not is_first, -len(group.ranks), min(group.ranks)

    return sorted(groups, key=place)


def _stacks_of(worker: WorkerStacks) -> list[tuple[str, tuple[str, ...]]]:
    found = []
    for process in worker.processes:
        is_speaker = process is worker.speaker
        if not process.threads and is_speaker:
            where_it_waits = (f"in the kernel: {process.waits_in}",) if process.waits_in else ()
            found.append((MAIN, (f"no Python stack: {process.why_none}", *where_it_waits)))
        for place, frames in enumerate(process.threads, 1):
            is_main = is_speaker and place == len(process.threads)
            found.append((MAIN if is_main else OTHER if is_speaker else CHILD, frames))
    return found


def grouped_lines(workers: Sequence[WorkerStacks], first: Collection[int]) -> list[str]:
    """Each different stack once, whole, below the ranks that have it."""
    lines: list[str] = []
    for group in _groups(workers, first):
        lines += ["", f"{rank_ranges(group.ranks)}, {group.where}:", *(f"  {frame}" for frame in group.frames or ("no frame",))]
    return lines


def brief_lines(workers: Sequence[WorkerStacks], first: Collection[int]) -> list[str]:
    """A line for each different stack of main threads: where it is, and who called."""
    groups = [group for group in _groups(workers, first) if group.where == MAIN]
    lines = [f"{rank_ranges(group.ranks)}: {_brief(group.frames)}" for group in groups[:BRIEF_GROUPS]]
    left = len(groups) - len(lines)
    return [*lines, f"and {left} more"] if left else lines


def _brief(frames: tuple[str, ...]) -> str:
    shown = " < ".join(frames[:BRIEF_FRAMES]) or "no frame"
    return f"{shown} < ..." if len(frames) > BRIEF_FRAMES else shown


def write_stacks(
    folder: str,
    heading: list[str],
    workers: dict[int, WorkerStacks],
    first: list[int],
    run_folder: LogFolder | None = None,
    spied: Mapping[int, str] | None = None,
) -> str:
    """Write the files of these workers, by local rank, into the folder of their group; the path of the summary.

    `spied` is what py-spy has seen of some.
    """
    for local_rank, worker in workers.items():
        if run_folder is None:
            os.makedirs(os.path.join(folder, str(local_rank)), exist_ok=True)
        lines = _worker_lines(worker, (spied or {}).get(local_rank, ""))
        _write(run_folder, os.path.join(folder, str(local_rank), SUMMARY_NAME), lines)
    path = os.path.join(folder, SUMMARY_NAME)
    _write(run_folder, path, [*heading, *grouped_lines(list(workers.values()), first)])
    return path


def _worker_lines(worker: WorkerStacks, spied: str) -> list[str]:
    lines = [f"rank {worker.rank}"]
    if spied:
        lines += ["", "the worker with its native frames, by py-spy:", *spied.splitlines()]
    for place, process in enumerate(worker.processes):
        none = f"no Python stack: {process.why_none or 'it told of no thread'}"
        lines += ["", f"{'the worker' if place == 0 else 'its descendant'}: process {process.pid} ({process.command})"]
        lines += process.text.splitlines() if process.threads else [none]
        lines += ["", f"process {process.pid} as the kernel sees it:", *(process.kernel or ("nothing can be seen",))]
    return lines


def _write(run_folder: LogFolder | None, path: str, lines: list[str]) -> None:
    write_text(run_folder, path, "\n".join([*lines, ""]))


def write_text(run_folder: LogFolder | None, path: str, told: str) -> None:
    """A file among the logs, of bounded size."""
    text = told.encode(errors="replace")
    with open(open_log(run_folder, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(text if len(text) <= FILE_BYTES_MAX else text[: FILE_BYTES_MAX - 16] + b"\n(cut short)\n")
