"""An etcd that ends when we end, however we end, and whose last lines can be read.

The kernel kills it when the *thread* that started it ends. That thread is therefore one of its own, which does nothing but wait
for the end of etcd. In between, where the process that is to become etcd asks the kernel for this, it is a Python.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from rallypoint.rendezvous.etcd_binary import clean_environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

    Output = int | TextIO | None

__all__ = ["EtcdProcess"]

_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Whoever starts so late that its parent has gone already would never be told.
_PROGRAM = """
import os, sys
root, parent, binary, *flags = sys.argv[1:]
sys.path.insert(0, root)
from rallypoint.processes.kernel import die_with_parent
die_with_parent()
if os.getppid() == int(parent):
    os.execv(binary, [binary, *flags])
"""
STOP_TIMEOUT_S = 5.0
TAIL_LINES = 10
TAIL_BYTES = 8192


class EtcdProcess:
    """A running etcd. What it writes goes to the file `log`, or to `output` where the caller has one for it."""

    def __init__(self, binary: str, flags: Sequence[str], environ: Mapping[str, str], log: str, output: Output = None) -> None:
        command = [sys.executable, "-S", "-I", "-c", _PROGRAM, _PACKAGE_ROOT, str(os.getpid()), binary, *flags]
        self._log = log
        self._answers: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()
        self._keeper = threading.Thread(
            target=self._keep, args=(command, clean_environment(environ), output), name="rallypoint-etcd", daemon=True
        )
        self._keeper.start()
        started = self._answers.get()
        if isinstance(started, OSError):
            raise started
        self.popen = started

    def _keep(self, command: list[str], env: dict[str, str], output: Output) -> None:
        try:
            process = self._spawn(command, env, output)
        except OSError as error:
            self._answers.put(error)
            return
        self._answers.put(process)
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # to reap it is left to whoever asks how it ended
        except ChildProcessError:  # which has happened
            pass

    def _spawn(self, command: list[str], env: dict[str, str], output: Output) -> subprocess.Popen[bytes]:
        with open(self._log, "ab") as log:
            kept: Any = log if output is None else output
            # In a session of its own, so that Ctrl-C is for us, and etcd is there until we have done with it.
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=kept, env=env, start_new_session=True
            )  # fmt: skip

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the number of the signal that ended it."""
        return self.popen.poll()

    def stop(self) -> None:
        """Ask it to end, make it, and come back when it is gone."""
        end(self.popen)
        self._keeper.join()

    def last_lines(self) -> str:
        """The end of what it has written to its log."""
        with open(self._log, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
            lines = log.read(TAIL_BYTES).decode(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL if that does not help in time."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
