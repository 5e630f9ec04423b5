"""This side of ``--hosts``: it starts an ssh for each host, has agents started once all hosts can, and sees them to their end.

Each ssh is in a session of its own, so that Ctrl-C reaches this process alone, which passes it on. What the agents and workers
print goes through the pump, with the host's name before each line. That a host's agent ends when this process does, however that
happens, is the far side's affair (`guard`); all that it takes from here is a sign of life.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rallypoint import __version__
from rallypoint.base import report
from rallypoint.base.json_text import from_json
from rallypoint.base.records import Value
from rallypoint.base.signals import inbox, parse_signal_names
from rallypoint.errors import SIGNAL_BASE, HostsError, SignalException, signal_exception
from rallypoint.output.console import console_writer
from rallypoint.output.json_lines import fields_of_host
from rallypoint.output.log_specs import Std
from rallypoint.output.outlets import Route
from rallypoint.output.pump import StreamPump
from rallypoint.processes.warden_client import exit_status
from rallypoint.ssh import rules
from rallypoint.ssh.rules import Host, Ready

__all__ = ["Able", "Job", "launch"]

READY_S = 60.0  # for all hosts to say what is there
SHOWN_S = 5.0  # for the last lines
READ_BYTES = 1 << 16
MOST_ERRORS = 1 << 16
PATIENT_SIGNALS = 2  # the first asks, the second insists, as for any launcher; a third ends the connections


Able = Sequence[tuple[Host, Ready]]  # those that take part
Tell = Callable[[int, Able], tuple[list[str], dict[str, str]]]


class Job(Value):
    """What is to run, and how it is reached. `tell` gives arguments and variables of one agent among those that take part."""

    hosts: Sequence[Host]
    least: int  # so few hosts will do
    ssh: Sequence[str]
    python: str
    timeout_s: float
    ends: str  # names of signals that end it
    others: str  # that are passed on, too
    is_json: bool  # whether agents speak so, and so what is shown here
    tell: Tell


class _Far:
    """One ssh, and what is known of the other side."""

    def __init__(self, host: Host, command: Sequence[str]) -> None:
        self.host = host
        self.ready: Ready | None = None
        self.problem = ""
        self.code: int | None = None
        self._out = self._errors = b""
        self._to_send = bytearray()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, bufsize=0
            )
        except OSError as error:
            raise HostsError(f"{command[0]} cannot be started: {error.strerror}; --ssh-command names another") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdin, self.stdout, self.stderr = self._process.stdin, self._process.stdout, self._process.stderr
        self.pidfd = os.pidfd_open(self._process.pid)
        os.set_blocking(self.stdin.fileno(), False)

    def send(self, line: bytes) -> None:
        """As soon as ssh takes it; a sign of life only where nothing waits."""
        if line != rules.BEAT or not self._to_send:
            self._to_send += line
        try:
            while self._to_send:
                del self._to_send[: os.write(self.stdin.fileno(), self._to_send)]
        except BlockingIOError:
            return
        except (OSError, ValueError):  # it has ended, or was let go
            self._to_send.clear()

    def hear(self, fd: int) -> bool:
        """What is there to be read before the agent is started: a line behind the mark, and what ssh has to complain about.

        Whether there may be more.
        """
        block = os.read(fd, READ_BYTES)
        if fd == self.stderr.fileno():
            self._errors = (self._errors + block)[-MOST_ERRORS:]
            return bool(block)
        self._out = (self._out + block)[-MOST_ERRORS:]
        *lines, self._out = self._out.split(b"\n")
        for line in lines:
            if line.startswith(rules.MARK.encode()):
                self.ready = Ready(**from_json(line.removeprefix(rules.MARK.encode())))
        return bool(block)

    def hear_the_rest(self) -> None:
        for fd in (self.stderr.fileno(), self.stdout.fileno()):
            while _wait([fd], 0) and self.hear(fd):
                continue

    def errors(self) -> str:
        return self._errors.decode(errors="replace")

    def look(self) -> int | None:
        """The exit code, once there is one."""
        if self.code is None:
            try:
                pid, status = os.waitpid(self._process.pid, os.WNOHANG)
            except ChildProcessError:  # this is process 1, which has a thread that reaps
                pid, status = self._process.pid, exit_status(self._process.pid)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self.code = self._process.returncode = SIGNAL_BASE - code if code < 0 else code
        return self.code

    def let_go(self) -> None:
        """Its agent ends, if it has one."""
        self.stdin.close()

    def close(self) -> None:
        if self.look() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with what it has started to get through, as a ProxyJump does
            while self.look() is None:
                select.select([self.pidfd], [], [])
        for file in (self.stdin, self.stdout, self.stderr):
            file.close()
        os.close(self.pidfd)

    def hand_over(self) -> tuple[int, int]:
        """Stdout and stderr, which somebody else reads and closes from now on."""
        return os.dup(self.stdout.fileno()), os.dup(self.stderr.fileno())


def launch(job: Job) -> int:
    """Run it to its end; the exit code. HostsError where too few hosts can take part: then nothing was started."""
    with _watching(f"{job.ends},{job.others}"):
        fars = _connect(job)
        pump = StreamPump(tail_bytes=0)
        try:
            able = _gather(job, fars)
            for index, far in enumerate(able):
                _show(pump, index, far, job.is_json)
                arguments, variables = job.tell(index, [(one.host, one.ready) for one in able if one.ready])
                far.send(rules.order(arguments=arguments, variables=variables))
            pump.start()
            return _see_through(job, able)
        finally:
            for far in fars:
                far.close()
            pump.close(SHOWN_S)


@contextlib.contextmanager
def _watching(names: str) -> Iterator[None]:
    """Within the block, signals are taken here. Ctrl-Z would be silence, which ends the job, so it does nothing."""
    old = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        with inbox.watch(names):
            yield
    finally:
        signal.signal(signal.SIGTSTP, old)


def _connect(job: Job) -> list[_Far]:
    fars: list[_Far] = []
    try:
        for host in job.hosts:
            far = _Far(host, rules.command(job.ssh, host, job.python, job.timeout_s))
            fars.append(far)
            far.send(rules.order(folder=os.getcwd(), silence_s=job.timeout_s))
    except BaseException:  # whatever it was, no connection stays; it is raised again
        for far in fars:
            far.close()
        raise
    return fars


# --- until all are ready ---------------------------------------------------------------------------------------------------


def _gather(job: Job, fars: Sequence[_Far]) -> list[_Far]:
    """Those that can take part: all, unless fewer will do."""
    _await_hello(job, fars)
    problems = {far.host.name: far.problem for far in fars if far.problem}
    can = [far for far in fars if not far.problem]
    if problems and len(can) < job.least:
        raise HostsError(rules.report_of(problems, len(fars)))
    for far in fars:
        if far.problem:
            report.warn(f"the job does without {far.host.name}: {far.problem}")
            far.let_go()
    return can


def _await_hello(job: Job, fars: Sequence[_Far]) -> None:
    """Until each has said what is there, or has failed."""
    ends_at = time.monotonic() + READY_S
    waiting = list(fars)
    while waiting:
        by_fd = {fd: far for far in waiting for fd in (far.stdout.fileno(), far.stderr.fileno())}
        for fd in _wait([*by_fd, *(far.pidfd for far in waiting)], rules.BEAT_S):
            if fd in by_fd:
                by_fd[fd].hear(fd)
        if (number := inbox.take()) is not None:
            raise _ended_by(number)
        is_late = time.monotonic() >= ends_at
        for far in waiting:
            _judge(far, job.python, is_late)
        waiting = [far for far in waiting if far.ready is None and not far.problem]
        for far in fars:
            far.send(rules.BEAT)


def _judge(far: _Far, python: str, is_late: bool) -> None:
    """Whether this host can take part, if that is known by now."""
    if far.ready is None and (far.look() is not None or is_late):
        far.hear_the_rest()
        if far.ready is None:
            far.problem = rules.trouble(far.code, far.errors(), python, READY_S)
    if far.ready is not None:
        far.problem = rules.check_ready(far.ready, ".".join(map(str, sys.version_info[:3])), __version__)


# --- while they run --------------------------------------------------------------------------------------------------------


def _show(pump: StreamPump, index: int, far: _Far, is_json: bool) -> None:
    for stream, fd in zip((Std.OUT, Std.ERR), far.hand_over(), strict=True):
        route = Route(index, stream, console=console_writer(stream), prefix=f"[{far.host.label}] ")
        as_json = route.replace(json_fields=fields_of_host(far.host.label, stream), keeps_objects=True)
        pump.attach(as_json if is_json else route, fd)


def _see_through(job: Job, fars: Sequence[_Far]) -> int:
    """Until all have ended; the job's exit code."""
    codes: dict[str, int] = {}  # in the order in which they ended
    ended_at = time.monotonic()
    ends, stops = parse_signal_names(job.ends), 0
    while len(codes) < len(fars):
        fds = [far.pidfd for far in fars if far.code is None]
        _wait([*fds, *filter(None, [inbox.fileno()])], rules.BEAT_S)
        for far in fars:
            if far.code is None and far.look() is not None:
                codes[far.host.name], ended_at = far.look() or 0, time.monotonic()
                _tell_end(far)
        while (number := inbox.take()) is not None:
            stops += number in ends
            _pass_on(number, fars, is_insisting=stops > PATIENT_SIGNALS)
        why = "" if stops else rules.why_end(codes, len(fars), job.least, time.monotonic() - ended_at)
        if why:
            report.error(f"rallyrun: {why}; the others are ended")
            stops += 1
            _pass_on(signal.SIGTERM, fars)
        for far in fars:
            far.send(rules.BEAT)
    return rules.job_code([*codes.values()], job.least)


def _tell_end(far: _Far) -> None:
    if far.code == rules.SSH_FAILED:
        report.warn(f"the connection to {far.host.label} is lost; its agent ends, if it still runs")


def _pass_on(number: int, fars: Sequence[_Far], is_insisting: bool = False) -> None:
    """To all agents. Who insists does not wait for what they do about it."""
    for far in fars:
        if is_insisting:
            far.let_go()
        else:
            far.send(rules.order(signal=int(number)))


def _ended_by(number: signal.Signals) -> SignalException:
    return signal_exception(f"received {number.name}", number)


def _wait(fds: Sequence[int], timeout_s: float) -> set[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(timeout_s * 1000)}
