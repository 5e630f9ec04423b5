"""The far side of ``--hosts``: a program that ssh starts on a host, whose life hangs on its standard input.

It says what is there, starts the agent that it is told to start, passes signals on, and ends with its exit code. When its input
ends, or nothing is heard for too long, whoever has started it is gone, or the way there: then it ends the agent, at first as a
signal does, soon after for good; the agent's warden ends whatever runs below it. If this process itself is killed, the kernel
kills the agent. It writes nothing once the agent runs: the way may be cut, and it must not wait for that.
"""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from rallypoint.base import defaults, environment
from rallypoint.base.json_text import from_json, to_json
from rallypoint.errors import SIGNAL_BASE
from rallypoint.processes.kernel import die_with_parent
from rallypoint.schedulers.found import FIRST_PORT, PORTS
from rallypoint.ssh.rules import MARK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["main"]

READ_BYTES = 1 << 16
GRACE_S = 1.0  # from SIGTERM to SIGKILL, once nobody is there any more
FIRST_WORD_S = 60.0
ATTEMPTS = 100
_INPUT = 0


class _Leash:
    """The lines that come from the other side, for as long as they come."""

    def __init__(self) -> None:
        self._held = b""
        self.silence_s = FIRST_WORD_S
        self.heard_at = time.monotonic()
        self.is_over = False

    def wait(self, *fds: int) -> None:
        """Until there is something to read, or one of these is ready, or the silence has been too long."""
        poll = select.poll()
        for fd in (_INPUT, *fds):
            poll.register(fd, select.POLLIN)
        left_s = self.heard_at + self.silence_s - time.monotonic()
        ready = {fd for fd, _ in poll.poll(max(0.0, left_s) * 1000)}
        if not ready and time.monotonic() - self.heard_at >= self.silence_s:
            self.is_over = True

    def orders(self) -> Iterator[dict[str, Any]]:
        """What has come; a line without anything is a sign of life."""
        poll = select.poll()
        poll.register(_INPUT, select.POLLIN)
        if not poll.poll(0):
            return
        block = os.read(_INPUT, READ_BYTES)
        self.heard_at = time.monotonic()
        self.is_over = not block
        *lines, self._held = (self._held + block).split(b"\n")
        for line in filter(None, lines):
            yield from_json(line)


def main() -> None:
    os.set_inheritable(_INPUT, False)
    leash = _Leash()
    agent: subprocess.Popen[bytes] | None = None
    while agent is None:
        leash.wait()
        for told in leash.orders():
            if "folder" in told:
                leash.silence_s = told["silence_s"]
                _say_hello(told["folder"])
            elif "arguments" in told:
                agent = _start(told["arguments"], told["variables"])
        if leash.is_over and agent is None:
            sys.exit(SIGNAL_BASE + signal.SIGHUP)
    sys.exit(_hold(agent, leash))


def _hold(agent: subprocess.Popen[bytes], leash: _Leash) -> int:
    """Until the agent has ended; its exit code."""
    pidfd = os.pidfd_open(agent.pid)
    while agent.poll() is None:
        leash.wait(pidfd)
        if leash.is_over:
            return _end(agent)
        for told in leash.orders():
            if "signal" in told:
                agent.send_signal(told["signal"])
        if leash.is_over:
            return _end(agent)
    return _code(agent.wait())


def _end(agent: subprocess.Popen[bytes]) -> int:
    agent.terminate()
    try:
        return _code(agent.wait(GRACE_S))
    except subprocess.TimeoutExpired:
        agent.kill()
        return _code(agent.wait())


def _code(code: int) -> int:
    return SIGNAL_BASE - code if code < 0 else code


def _say_hello(folder: str) -> None:
    problem = ""
    try:
        os.chdir(folder)
    except OSError as error:
        problem = f"there is no folder {folder} there: {error.strerror}"
    _, _, address = (*environment.text(defaults.ENV_SSH_CONNECTION).split(), "", "", "")[:3]
    from rallypoint import __version__

    said = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "version": __version__,
        "hostname": socket.gethostname(),
        "address": address,
        "port": _free_port(),
        "problem": problem,
    }
    os.write(1, f"\n{MARK}{to_json(said)}\n".encode())


def _free_port() -> int:
    """One that the kernel gives to nobody by itself, so that it is still free when the agent comes."""
    for _ in range(ATTEMPTS):
        port = FIRST_PORT + random.randrange(PORTS)
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
        return port
    return defaults.ELASTIC_PORT


def _start(arguments: list[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def hang_on() -> None:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)

    ours = os.path.join(os.path.dirname(sys.executable), "rallyrun")  # finds no modules of the user's in the folder, as -m would
    program = [ours] if os.path.exists(ours) else ["-m", "rallypoint", "run"]
    command = [sys.executable, *program, *arguments]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env={**environment.own, **variables},
        start_new_session=True,
        preexec_fn=hang_on,  # noqa: PLW1509  # this process has one thread
    )
