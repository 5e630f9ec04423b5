"""Nodes that join over networks which are slow, drop connections, or know addresses of the store that lead nowhere."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.relay import Way, black_hole, relay

ONE_WORKER = {"nnodes": "2", "workers": 1}


def ends_well(job: Any, *nodes: Any) -> None:
    for node in nodes:
        node.wait_for_world(2)
    job.finish()
    assert [node.wait() for node in nodes] == [0] * len(nodes)


def start_through(job: Any, port: int, *flags: str) -> Any:
    """A node that reaches the store at another port than its host."""
    own, job.port = job.port, port
    try:
        return job.start(*flags, **ONE_WORKER, conf="last_call_timeout=0.2,is_host=false", host="127.0.0.1")
    finally:
        job.port = own


@pytest.mark.parametrize("has_secret", [False, True], ids=["open", "secret"])
def test_m6_a_node_joins_over_a_long_round_trip(job: Any, tmp_path: Path, has_secret: bool) -> None:
    """M6: an attempt lasts as long as the network needs."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    flags = ["--secret-file", str(secret)] if has_secret else []
    host = job.start_host(*flags, **ONE_WORKER, host="127.0.0.1")
    with relay(job.port, delay_s=0.3) as port:
        ends_well(job, host, start_through(job, port, *flags))


@pytest.mark.parametrize("resets", [1, 3])
def test_m8_a_reset_during_the_first_call_is_survived(job: Any, resets: int) -> None:
    """M8: right after the welcome, as often as it comes; the node tries again, as it does before the welcome."""
    left = [resets]
    lock = threading.Lock()

    def saw(way: Way, count: int) -> bool:
        """The first thing that a client says is its greeting, the second its first call."""
        with lock:
            is_reset = count == 2 and left[0] > 0
            left[0] -= is_reset
        if is_reset:
            way.reset()
        return not is_reset

    host = job.start_host(**ONE_WORKER, host="127.0.0.1")
    with relay(job.port, saw=saw) as port:
        ends_well(job, host, start_through(job, port))
    assert left == [0]


# --- names -----------------------------------------------------------------------------------------------------------------


class Elsewhere:
    """Agents in a mount namespace of their own, where /etc has files of the test's."""

    def __init__(self, folder: Path, job: Any) -> None:
        self._folder, self._job = folder, job
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, endpoint: str, files: dict[str, str], *flags: str, conf: str = "") -> tuple[subprocess.Popen[bytes], Path]:
        number = len(self.running)
        mounts = []
        for name, text in files.items():
            (self._folder / f"{name}{number}").write_text(text)
            mounts.append(f"mount --bind {self._folder}/{name}{number} /etc/{name}")
        job = self._job
        size = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "a-job"]
        meeting = ["--rdzv-endpoint", endpoint, "--rdzv-conf", f"last_call_timeout=0.2,{conf}", *flags]
        command = [sys.executable, "-m", "rallypoint", "run", *size, *meeting, str(job._member), str(job.folder)]
        told = self._folder / f"told{number}"
        with told.open("wb") as out:
            inner = " && ".join([*mounts, 'exec "$0" "$@"'])
            process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "sh", "-c", inner, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self._folder,
            )
        self.running.append(process)
        return process, told

    def end(self) -> None:
        for process in self.running:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    process.send_signal(number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(5)


@pytest.fixture
def elsewhere(tmp_path: Path, job: Any) -> Iterator[Elsewhere]:
    agents = Elsewhere(tmp_path, job)
    yield agents
    agents.end()


def hosts(*lines: Sequence[str]) -> dict[str, str]:
    return {"hosts": "".join(f"{' '.join(line)}\n" for line in (("127.0.0.1", "localhost"), *lines))}


@pytest.mark.root
def test_m7_a_name_with_a_black_hole_among_its_addresses(job: Any, elsewhere: Elsewhere, wait_until: Any) -> None:
    """M7: the store is at the second one."""
    host = job.start_host(**ONE_WORKER, host="127.0.0.3")
    with black_hole("127.0.0.2", job.port):
        names = hosts(["127.0.0.2", "store.example"], ["127.0.0.3", "store.example"])
        node, told = elsewhere.start(f"store.example:{job.port}", names, conf="is_host=false")
        wait_until(lambda: "START" in told.read_text() or node.poll() is not None, 15)
        job.finish()
        assert (host.wait(), node.wait(20)) == (0, 0)


@pytest.mark.root
def test_m7_f20_a_name_server_that_says_nothing_is_told_of_and_ctrl_c_is_heard(
    job: Any, elsewhere: Elsewhere, wait_until: Any, within: Any
) -> None:
    """M7, F20: after a second or two the user knows what is waited for."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.77", 53))
        files = {"resolv.conf": "nameserver 127.0.0.77\noptions timeout:30 attempts:5\n", "nsswitch.conf": "hosts: dns\n"}
        node, told = elsewhere.start(f"store.example:{job.port}", files)
        wait_until(lambda: "no name server has answered where store.example is" in told.read_text())
        assert "Check the spelling of store.example" in told.read_text()
        asked_at = time.monotonic()
        node.send_signal(signal.SIGINT)
        assert node.wait(10) == 130
        within("from Ctrl-C to the end", time.monotonic() - asked_at, 1.0)
        assert "Traceback" not in told.read_text()


# --- hints -----------------------------------------------------------------------------------------------------------------


def test_f20_a_name_that_does_not_resolve_is_told_of_soon(job: Any) -> None:
    """F20: not after ten seconds of silence."""
    node = job.start(**ONE_WORKER, host="no-such-host.invalid")
    line = node.wait_for_line("cannot be found", 8.0)
    assert "no-such-host.invalid" in line
    assert "Check the spelling of no-such-host.invalid" in line


def test_f20_a_stranger_who_says_nothing_is_told_of_soon(job: Any) -> None:
    """F20: its port may be the wrong one."""
    with socket.create_server(("127.0.0.1", job.port)):
        node = job.start(**ONE_WORKER, host="127.0.0.1", conf="is_host=false")
        line = node.wait_for_line("no answer yet, although it takes connections", 8.0)
        assert f"another program may have port {job.port}" in line


def test_f21_no_endpoint_for_several_nodes_is_told_of_at_once(start_rallyrun: Any, script: Any) -> None:
    """F21: nobody from elsewhere can come to localhost."""
    worker = script("")
    node = start_rallyrun(["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-conf", "is_host=false", worker])
    line = node.wait_for_line("no endpoint is given")
    assert "only agents on this machine can come" in line
    assert "--rdzv-endpoint HOST:29400" in line
