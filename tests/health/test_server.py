"""The health endpoint with a real HTTP client: what it says in every phase, where it listens, and why it cannot."""

from __future__ import annotations

import contextlib
import http.client
import inspect
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from rallypoint.errors import UsageError
from rallypoint.health import server as health_server
from rallypoint.health.server import HealthCheckServer, create_healthcheck_server, open_listeners_or_explain, resolve_health_port
from rallypoint.health.status import AgentStatus, StatusBoard
from rallypoint.story.phases import DONE, PHASES, RUNNING, STARTING, STOPPING, WAITING, enter, open_ledger

NOT_OURS = "192.0.2.1"  # reserved for documentation
Serve = Callable[..., HealthCheckServer]


def current_time() -> int:
    return int(time.time())


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serve(alive_callback, **settings)`` starts a health server at any port; it is stopped after the test."""
    with contextlib.ExitStack() as servers:

        def start(alive_callback: Callable[[], int] = current_time, timeout: int = 60, **settings: Any) -> HealthCheckServer:
            server = HealthCheckServer(alive_callback, 0, timeout, **settings)
            server.start()
            servers.callback(server.stop)
            return server

        yield start


def make_board(**changes: Any) -> StatusBoard:
    now = time.monotonic()
    board = StatusBoard(AgentStatus("job-7", "trainer", "node-3", now - 100, open_ledger(now - 100)))
    board.change(**changes)
    return board


def be_in(board: StatusBoard, phase: str, age_s: float = 0.0) -> None:
    board.change(ledger=enter(board.status.ledger, phase, time.monotonic() - age_s))


class Told(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    text: str


def get(server: HealthCheckServer, path: str, address: str = "127.0.0.1", method: str = "GET") -> Told:
    client = http.client.HTTPConnection(address, server.port, timeout=10)
    with contextlib.closing(client):
        client.request(method, path)
        response = client.getresponse()
        return Told(response.status, response.headers, response.read().decode())


def document(server: HealthCheckServer, path: str) -> tuple[int, dict[str, Any]]:
    told = get(server, path)
    return told.status, json.loads(told.text)


# --- as other programs use it ----------------------------------------------------------------------------------------------


def test_the_last_progress_decides(serve: Serve) -> None:
    progress = [time.time()]
    server = serve(lambda: int(progress[0]), timeout=30)
    assert document(server, "/healthz")[0] == 200
    progress[0] -= 100
    status, told = document(server, "/healthz")
    assert status == 503
    assert told["status"] == "failing"
    assert 100 <= told["last_progress_s"] < 130
    assert "30 s are allowed" in told["why"]


def test_names_are_those_of_the_contract() -> None:
    server = create_healthcheck_server(alive_callback=current_time, port=0, timeout=5)
    assert isinstance(server, HealthCheckServer)
    assert server.alive_callback is current_time
    for made in (HealthCheckServer, create_healthcheck_server):
        parameters = inspect.signature(made).parameters.values()
        assert [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY] == ["alive_callback", "port", "timeout"]
        assert all(one.default is not one.empty for one in parameters if one.kind is one.KEYWORD_ONLY)
    server.stop()
    server.start()
    assert get(server, "/healthz").status == 200
    with pytest.raises(RuntimeError, match="started already"):
        server.start()
    server.stop()
    server.stop()
    with pytest.raises(ConnectionError):
        get(server, "/healthz")


def test_a_callback_that_fails_is_not_healthy(serve: Serve) -> None:
    server = serve(lambda: 1 // 0)
    assert [get(server, path).status for path in ("/healthz", "/readyz", "/")] == [500, 500, 200]


# --- as the agent uses it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "age_s", "healthz", "readyz"),
    [
        (STARTING, 1, 200, 503),
        (STARTING, 95, 503, 503),
        (WAITING, 95, 200, 503),
        (RUNNING, 95, 200, 200),
        (STOPPING, 1, 200, 503),
        (STOPPING, 95, 503, 503),
        (DONE, 95, 200, 503),
    ],
)
def test_p30_every_phase_in_its_way(serve: Serve, phase: str, age_s: float, healthz: int, readyz: int) -> None:
    board = make_board()
    be_in(board, phase, age_s)
    server = serve(timeout=30, board=board)
    assert [get(server, path).status for path in ("/healthz", "/readyz")] == [healthz, readyz]


def test_p30_workers_that_stop_making_progress(serve: Serve) -> None:
    board = make_board()
    be_in(board, RUNNING, 90)
    server = serve(timeout=30, board=board)
    assert document(server, "/healthz")[1]["last_progress_s"] is None
    progress_at = time.monotonic() - 29
    board.read_progress = lambda: progress_at
    assert document(server, "/healthz")[0] == 200
    progress_at -= 2
    status, told = document(server, "/healthz")
    assert (status, told["status"], told["phase"]) == (503, "failing", "running")
    be_in(board, STOPPING)
    assert document(server, "/healthz")[0] == 200


def test_the_document_says_how_the_agent_stands(serve: Serve) -> None:
    board = make_board(
        why="all 4 nodes are here", generation=3, group_rank=1, group_world_size=4, world_size=32, ranks=(8, 9), pids=(71, 72),
        restarts=2, max_restarts=5, failed_workers=1, hung_workers=1, expired_timers=4,
    )  # fmt: skip
    be_in(board, RUNNING, 40)
    status, told = document(serve(board=board), "/readyz")
    seconds = told.pop("seconds")
    times = {name: told.pop(name) for name in ("phase_s", "uptime_s", "last_progress_s")}
    assert status == 200
    assert told == {
        "status": "ok", "why": "running for 40 s: all 4 nodes are here", "phase": "running", "generation": 3, "group_rank": 1,
        "group_world_size": 4, "world_size": 32, "ranks": [8, 9], "pids": [71, 72], "restarts": 2, "max_restarts": 5,
        "failed_workers": 1, "hung_workers": 1, "expired_timers": 4, "run_id": "job-7", "role": "trainer", "hostname": "node-3",
    }  # fmt: skip
    assert times == {"phase_s": pytest.approx(40, abs=5), "uptime_s": pytest.approx(100, abs=5), "last_progress_s": None}
    assert set(seconds) == set(PHASES)
    assert sum(seconds.values()) == pytest.approx(times["uptime_s"], abs=0.01)


def test_other_paths_and_methods(serve: Serve) -> None:
    server = serve(board=make_board())
    listed = get(server, "/").text
    assert all(path in listed for path in ("/healthz", "/readyz", "/metrics"))
    assert get(server, "/healthz?verbose").status == 200
    assert {get(server, path).status for path in ("/healthz/", "/admin", "/../etc/passwd")} == {404}
    assert get(server, "/healthz", method="HEAD").status == 200
    assert get(server, "/healthz", method="POST").status == 405
    assert get(server, "/healthz").headers["Cache-Control"] == "no-store"


def test_p44_it_answers_while_the_group_restarts_again_and_again(serve: Serve) -> None:
    """Many clients, while the agent goes through all its phases: no answer is late, and none is torn."""
    board = make_board(generation=0)
    server = serve(board=board)
    stopping = threading.Event()
    wrong: list[object] = []
    counts = [0] * 8

    def ask(index: int) -> None:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        while not stopping.is_set():
            client.request("GET", "/readyz")
            response = client.getresponse()
            told = json.loads(response.read())
            if (response.status == 200) != (told["phase"] == "running") or told["ranks"] != [told["generation"]]:
                wrong.append(told)
            counts[index] += 1
        client.close()

    board.change(ranks=(0,))
    clients = [threading.Thread(target=ask, args=(index,)) for index in range(len(counts))]
    for one in clients:
        one.start()
    deadline = time.monotonic() + 20
    generation = 0
    while min(counts) < 100 and time.monotonic() < deadline:
        for phase in (STOPPING, WAITING, STARTING, RUNNING):
            be_in(board, phase)
            generation += 1
            board.change(generation=generation, ranks=(generation,))
            time.sleep(0.001)  # as long as an agent takes at the very least
    stopping.set()
    for one in clients:
        one.join()
    assert wrong == []
    assert min(counts) >= 100


# --- where it listens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "::1", "[::1]", "localhost", "0.0.0.0"])
def test_p43_any_address_of_this_machine(serve: Serve, address: str) -> None:
    server = serve(address=address)
    assert server.port > 0
    asked = {"0.0.0.0": "127.0.0.1"}.get(address, address.strip("[]"))
    assert get(server, "/healthz", asked).status == 200


def test_listeners_that_were_opened_before(serve: Serve) -> None:
    listeners = open_listeners_or_explain("127.0.0.1", 0)
    port = listeners[0].getsockname()[1]
    server = serve(listeners=listeners)
    assert server.port == port
    assert get(server, "/healthz").status == 200


def test_listeners_are_closed_by_a_server_that_never_started() -> None:
    [listener] = open_listeners_or_explain("127.0.0.1", 0)
    HealthCheckServer(current_time, 0, 60, listeners=[listener]).stop()
    assert listener.fileno() == -1


def test_a_busy_port_is_explained() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError) as error:
            open_listeners_or_explain("127.0.0.1", port)
        with pytest.raises(UsageError):
            HealthCheckServer(current_time, port, 60).start()
    said = str(error.value)
    assert f"127.0.0.1 port {port}: the port is taken by process " in said
    assert "--health-port" in said
    assert "TORCHELASTIC_HEALTH_CHECK_PORT" in said


@pytest.mark.parametrize(
    ("address", "port", "said"),
    [
        (NOT_OURS, 0, "no address of this machine"),
        ("", 0, "no address of this machine"),
        ("no-such-host.invalid", 0, "cannot listen at no-such-host.invalid port 0: "),
        ("127.0.0.1", -1, "-1 is no port"),
        ("127.0.0.1", 65_536, "65536 is no port"),
        ("a" * 300 + "é", 0, "--health-port"),
    ],
)
def test_places_where_nobody_can_listen(address: str, port: int, said: str) -> None:
    with pytest.raises(UsageError) as error:
        open_listeners_or_explain(address, port)
    assert said in str(error.value)


@pytest.mark.parametrize("port", ["x", "-1", "8080x", "1_0", "²", "9" * 5000])
def test_a_port_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", port)
    with pytest.raises(UsageError, match=r"TORCHELASTIC_HEALTH_CHECK_PORT: .{1,40} is no port"):
        resolve_health_port(None)


def test_a_port_that_is_given_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_health_port(None) == 0
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", " 8080 ")
    assert (resolve_health_port(None), resolve_health_port(0), resolve_health_port(81)) == (8080, 0, 81)


def test_a_privileged_port_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(host: str, ports: tuple[int, ...]) -> list[socket.socket]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(health_server, "hold_port", refuse)
    with pytest.raises(UsageError, match=r"port 80: it is below \d+, where only root may listen"):
        open_listeners_or_explain("127.0.0.1", 80)


def test_what_it_loads_is_what_it_needs() -> None:
    """P38: with the endpoint on, prometheus-client is not loaded until somebody asks for metrics."""
    program = "import sys, rallypoint.health.server; print('\\n'.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True, timeout=30,
                            env={"PYTHONPATH": ":".join(filter(None, sys.path))}).stdout.split()  # fmt: skip
    heavy = {"json", "logging", "typing", "dataclasses", "prometheus_client", "http.server", "email", "subprocess", "asyncio"}
    assert heavy.isdisjoint(loaded)


# --- who it is asked as ----------------------------------------------------------------------------------------------------


def status_as(server: HealthCheckServer, host: str | None) -> int:
    """The status of the answer to a request with this Host header, or with none."""
    version = "1.0" if host is None else "1.1"
    header = "" if host is None else f"Host: {host}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(f"GET /healthz HTTP/{version}\r\n{header}Connection: close\r\n\r\n".encode())
        return int(sock.makefile("rb").readline().split()[1])


def test_m11_small_a_foreign_host_header_is_refused(serve: Serve) -> None:
    """m11: a page from elsewhere cannot read our health through a browser, under a name that it has let point to us."""
    server = serve()
    own = socket.gethostname()
    foreign = ("evil.example", "evil.example:8080", f"{own}.evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "")
    for host in foreign:
        assert status_as(server, host) == 403, host
    for host in ("127.0.0.1", "127.0.0.1:8080", "[::1]:8080", "10.1.2.3", "localhost:80", "LOCALHOST.", own, own.upper(), None):
        assert status_as(server, host) == 200, host


def test_m11_small_the_name_that_was_given_is_answered(serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """m11: and so is this machine's name in the domains where names are looked up."""
    settings = tmp_path / "resolv.conf"
    settings.write_text("nameserver 127.0.0.53\n\nsearch cluster.example lab.example\n")
    monkeypatch.setattr(health_server, "RESOLVER_SETTINGS", str(settings))
    [listener] = open_listeners_or_explain("127.0.0.1", 0)
    server = serve(address="Health.Example", listeners=[listener])
    short = socket.gethostname().partition(".")[0]
    asked = ("health.example:1", f"{short}.lab.example", f"{short}.example")
    assert [status_as(server, host) for host in asked] == [200, 200, 403]
