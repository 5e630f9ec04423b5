"""Workers by their names in ``ps``, ``htop`` and ``nvidia-smi``: ``rank 3/8 my-job: python train.py``.

What these show of a process is the memory in which the kernel has put its command. The agent writes the title there, from
outside, a while after the workers have started. So a worker has nothing to do for it, nothing is in its environment, and its
start takes no longer; ``sys.argv`` and ``sys.executable`` stay as they are, because Python has copies of its own.

When it has them is the point. Until then the command must be left alone, so what can be seen of the process decides. Python has
read its command before it sets up its signals, among which it ignores SIGXFSZ, and the warden has seen to it that nobody is born
ignoring that one. A program that is not Python may look at its command at any time, so it keeps it. So does one that has changed
it itself. There is as much room as the command took; what does not fit is the end of the job's name, then that of the command.

It is done in a thread that may hang alone: to look at a process can mean to wait for it, if it hangs in the kernel. And nothing
is wrong where it cannot be done, because one process may not write to another here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rallypoint.base import defaults
from rallypoint.base.json_text import clip
from rallypoint.base.outbox import Outbox
from rallypoint.base.records import Value

__all__ = ["Title", "Titles", "fit", "is_python"]

FIRST_LOOK_S = 0.5
MOST_LOOKS = 8  # after twice as long each time, and then never again: a minute, all in all
JOB_MAX = 40
TITLE_MAX = 1000
SHORTEST_JOB = 3  # less says nothing
_SIGXFSZ = 25
_ARG_START, _ARG_END = 45, 46  # in proc(5)'s stat, from the state on
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Title(Value):
    """Who a worker is, and how it was started; without a command it is a fork, and has that of its parent."""

    rank: int
    world_size: int
    job: str
    command: tuple[str, ...]
    function: str = ""  # what it runs, where that is no program


def is_python(command: tuple[str, ...]) -> bool:
    """Whether the program is a Python, by its name."""
    return os.path.basename(command[0]).startswith(("python", "pypy"))


def fit(title: Title, room: int) -> bytes:
    """The text for so many bytes: one line that cannot act on a terminal."""
    program, *arguments = title.command or ("",)
    words = [os.path.basename(program), *arguments[arguments[:1] == ["-u"] :]]
    command = title.function or " ".join(words)
    head, tail = f"rank {title.rank}/{title.world_size}", clip(f": {command}", 12 * TITLE_MAX, TITLE_MAX).encode()
    job = "" if title.job == defaults.RUN_ID_CLI else clip(title.job, 12 * JOB_MAX, JOB_MAX)
    spare = room - len(head) - len(tail) - 1
    named = job.encode()[: max(0, spare)].decode(errors="ignore")
    if named != job and len(named) < SHORTEST_JOB:
        named = ""
    text = f"{head} {named}".rstrip().encode() + tail
    return text[:room].decode(errors="ignore").encode()


class Titles:
    """The workers of one agent that have no title yet, and when to look whether they can have theirs."""

    def __init__(self) -> None:
        self._left: dict[int, Title] = {}  # by process id; only the outbox's thread takes any out
        self._looks = 0
        self._look_at: float | None = None
        self._outbox = Outbox(_write_all)
        self._outbox.patience_s = 0.0  # nobody misses the title of a job that is over

    def name(self, titles: Mapping[int, Title], now: float) -> None:
        """These are the workers from now on; those before them are gone."""
        programs = {pid: title for pid, title in titles.items() if not title.command or is_python(title.command)}
        self._left, self._looks = programs, 0
        self._look_at = now + FIRST_LOOK_S if programs else None

    def next_look_at(self) -> float | None:
        return self._look_at

    def look(self, now: float) -> None:
        if self._look_at is None or now < self._look_at:
            return
        self._looks += 1
        is_over = not self._left or self._looks > MOST_LOOKS
        self._look_at = None if is_over else now + FIRST_LOOK_S * 2**self._looks
        if not is_over:
            self._outbox.put(self._left)


def _write_all(left: dict[int, Title]) -> None:
    for pid, title in list(left.items()):
        try:
            is_settled = _write(pid, title)
        except OSError:  # it has ended, or is not to be written to
            is_settled = True
        if is_settled:
            del left[pid]


def _write(pid: int, title: Title) -> bool:
    """Whether there is no more to be done; False: not yet. All that is read is of one process, and of one program in it."""
    folder = os.open(f"/proc/{pid}", _FOLDER)
    try:
        memory = os.open("mem", os.O_RDWR | os.O_CLOEXEC, dir_fd=folder)
        try:
            if title.command and not _has_read_its_command(_read(folder, "status")):
                return False
            fields = _read(folder, "stat").rpartition(b")")[2].split()
            start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
            present = os.pread(memory, end - start, start)
            if len(present) == end - start > 0 and _is_as_started(present, title, fields):
                os.pwrite(memory, fit(title, len(present) - 1).ljust(len(present), b"\0"), start)
            return True
        finally:
            os.close(memory)
    finally:
        os.close(folder)


def _has_read_its_command(status: bytes) -> bool:
    ignored = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(b"SigIgn:"))
    return bool(ignored >> (_SIGXFSZ - 1) & 1)


def _is_as_started(present: bytes, title: Title, fields: list[bytes]) -> bool:
    """Whether its command is what it was given; a script that stands for Python, as pyenv has one, may have called another."""
    if not title.command:
        with open(f"/proc/{int(fields[1])}/cmdline", "rb", buffering=0) as command:
            return command.read() == present
    program, _, arguments = present.partition(b"\0")
    is_same = arguments == b"".join(os.fsencode(one) + b"\0" for one in title.command[1:])
    return is_same and is_python((os.fsdecode(program),))


def _read(folder: int, name: str) -> bytes:
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb", buffering=0) as file:
        return file.read()
