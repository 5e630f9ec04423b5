"""An etcd of one member for tests and for jobs on one machine: at a free port of loopback, with its data gone afterwards.

etcd cannot take over a socket, and with port 0 its JSON gateway does not find its own server. So its ports are *held* for it,
each by a socket that is bound but does not listen. The kernel then gives the port to nobody who asks for any free one, and lets
etcd, which sets SO_REUSEADDR as we do, listen there all the same.
"""

from __future__ import annotations

import atexit
import http.client
import importlib
import os
import shutil
import socket
import tempfile
import time

from rallypoint.base import environment
from rallypoint.coordination.etcd import process as etcd_process
from rallypoint.coordination.etcd.process import EtcdProcess, EtcdServerError, etcd_version, find_etcd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from subprocess import Popen
    from typing import Any, TextIO

__all__ = ["EtcdServer", "find_free_port", "stop_etcd"]

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
        etcd_process.end(subprocess)
    if data_dir:
        shutil.rmtree(data_dir, ignore_errors=True)
