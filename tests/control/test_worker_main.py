"""worker_main in real processes: what can be asked while it runs, what it leaves behind, and that it harms nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.control.workers import VARIABLE, UnixConnection, ask, finish, first_line, running

from rallypoint import control_plane
from rallypoint.control_plane import Response, register_handler, worker_main
from rallypoint.errors import UsageError

WORKER = """
    import sys
    from rallypoint.control_plane import worker_main
    with worker_main():
        print("ready", flush=True)
        sys.stdin.readline()
    print("done", flush=True)
"""


def is_refused(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == errno.ECONNREFUSED


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


def test_a_worker_answers_while_it_works(path: Path) -> None:
    with running(WORKER, {VARIABLE: str(path)}) as worker:
        assert first_line(worker) == "ready"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert ask(path, "POST", "/handler/ping") == (200, "pong")
        assert json.loads(ask(path, "GET", "/handler/")[1]) == ["dump_traceback", "env", "handlers", "ping"]
        assert ask(path, "GET", "/")[0] == 200
        assert finish(worker) == (0, "done\n", "")
    assert not path.exists()


def test_no_port_is_opened(path: Path) -> None:
    with running(WORKER, {VARIABLE: str(path)}) as worker:
        assert first_line(worker) == "ready"
        held = {os.readlink(entry) for entry in Path(f"/proc/{worker.pid}/fd").iterdir()}
        tables = [Path(f"/proc/{worker.pid}/net/{name}").read_text() for name in ("tcp", "tcp6", "udp", "udp6")]
        inodes = {f"socket:[{line.split()[9]}]" for table in tables for line in table.splitlines()[1:]}
        assert not held & inodes


def test_without_the_variable_nothing_is_served_nor_loaded() -> None:
    program = """
        import sys, os
        from rallypoint.control_plane import worker_main
        with worker_main():
            print(*(name for name in ("socket", "threading", "rallypoint.net.http_server", "typing") if name in sys.modules))
            print(len(os.listdir("/proc/self/task")))
    """
    for env in ({}, {VARIABLE: ""}):
        with running(program, env) as worker:
            assert finish(worker) == (0, "\n1\n", "")


def test_stacks_of_all_threads(path: Path) -> None:
    program = """
        import sys, threading
        from rallypoint.control_plane import worker_main

        def wait_for_batches(lock):
            lock.acquire()

        def train():
            print("ready", flush=True)
            sys.stdin.readline()

        with worker_main():
            lock = threading.Lock()
            lock.acquire()
            threading.Thread(target=wait_for_batches, args=[lock], name="loader", daemon=True).start()
            train()
    """
    with running(program, {VARIABLE: str(path)}) as worker:
        assert first_line(worker) == "ready"
        status, text = ask(path, "POST", "/handler/dump_traceback")
        assert status == 200
        blocks = {match[1]: match[2] for match in re.finditer(r"hread 0x[0-9a-f]{16} \[(.*)\] .*:\n((?:  .*\n)+)", text)}
        assert re.match(r'  File "<string>", line \d+ in train\n  File "<string>", line \d+ in <module>\n', blocks["MainThread"])
        assert blocks["loader"].startswith('  File "<string>", line 6 in wait_for_batches\n')
        assert "in _dump_traceback" in blocks["rallypoint-control"]
        assert finish(worker)[0] == 0


def test_a_worker_that_waits_for_a_lock_for_ever_can_be_asked(path: Path) -> None:
    program = """
        import threading
        from rallypoint.control_plane import worker_main

        def stuck():
            lock = threading.Lock()
            lock.acquire()
            print("ready", flush=True)
            lock.acquire()

        with worker_main():
            stuck()
    """
    with running(program, {VARIABLE: str(path)}) as worker:
        assert first_line(worker) == "ready"
        assert "in stuck" in ask(path, "POST", "/handler/dump_traceback")[1]


def test_the_environment_without_secrets(path: Path) -> None:
    env = {
        VARIABLE: str(path),
        "RANK": "3",
        "MASTER_ADDR": "node-1",
        "RALLYPOINT_SECRET": "hush",
        "AWS_SECRET_ACCESS_KEY": "hush",
    }
    with running(WORKER, env) as worker:
        assert first_line(worker) == "ready"
        assert json.loads(ask(path, "POST", "/handler/env")[1]) == {"RANK": "3", "MASTER_ADDR": "node-1"}
        assert finish(worker)[0] == 0


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/handler/ping", 405),
        ("POST", "/handler/", 405),
        ("POST", "/", 405),
        ("POST", "/handler/nope", 404),
        ("GET", "/elsewhere", 404),
        ("POST", "/handler/ping?loudly=1", 200),
        ("POST", "/handler/ping/", 404),
    ],
)
def test_other_paths_and_methods(path: Path, monkeypatch: pytest.MonkeyPatch, method: str, target: str, status: int) -> None:
    monkeypatch.setenv(VARIABLE, str(path))
    with worker_main():
        assert ask(path, method, target)[0] == status


def test_handlers_of_the_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setattr(control_plane, "_handlers", dict(control_plane._handlers))
    register_handler("echo", lambda request: Response(200, request.body), "Says it again.")
    register_handler("broken", lambda request: Response(200, str(1 / 0)))
    register_handler("wrong", lambda request: "text")  # type: ignore[arg-type,return-value]
    with worker_main():
        assert ask(path, "POST", "/handler/echo", b"hello") == (200, "hello")
        assert ask(path, "POST", "/handler/broken") == (
            500,
            "the handler 'broken' has failed: ZeroDivisionError: division by zero\n",
        )
        assert ask(path, "POST", "/handler/wrong") == (500, "the handler 'wrong' gave str instead of a Response\n")
        assert json.loads(ask(path, "POST", "/handler/handlers")[1])["echo"] == "Says it again."
        assert ask(path, "POST", "/handler/ping")[0] == 200


@pytest.mark.parametrize(
    ("name", "why"), [("ping", "already"), ("a/b", "cannot name"), ("", "cannot name"), ("x" * 65, "cannot name")]
)
def test_a_handler_needs_a_name_of_its_own(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        register_handler(name, lambda request: Response())


def test_an_error_is_recorded_and_raised_again(path: Path, tmp_path: Path) -> None:
    program = """
        from rallypoint.control_plane import worker_main
        with worker_main():
            raise KeyError("boom")
    """
    with running(program, {VARIABLE: str(path), "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}) as worker:
        code, _, err = finish(worker)
    assert code == 1
    assert err.endswith("KeyError: 'boom'\n")
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "KeyError: 'boom'"
    assert 'File "<string>", line 4, in <module>' in message["extraInfo"]["py_callstack"]
    assert not path.exists()


@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_goes_through(code: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(SystemExit) as end, worker_main():
        raise SystemExit(code)
    assert end.value.code == code
    assert not path.exists()


def test_a_path_that_cannot_be_had_is_told_before_the_work_begins(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("precious")
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(UsageError, match=f"{VARIABLE}: .* exists, and is no socket"), worker_main():
        pytest.fail("the work has begun")
    assert path.read_text() == "precious"
    assert "is no socket" in (tmp_path / "error.json").read_text()


def test_two_workers_with_one_path(path: Path) -> None:
    with running(WORKER, {VARIABLE: str(path)}) as first:
        assert first_line(first) == "ready"
        with running(WORKER, {VARIABLE: str(path)}) as second:
            code, _, err = finish(second)
        assert code == 1
        assert f"process {first.pid} listens at '{path}' already; each worker needs a path of its own" in err
        assert ask(path, "POST", "/handler/ping") == (200, "pong")


def test_what_a_killed_worker_leaves_is_replaced_by_the_next(path: Path) -> None:
    with running(WORKER, {VARIABLE: str(path)}) as first:
        assert first_line(first) == "ready"
        first.send_signal(signal.SIGKILL)
        first.wait(10)
        assert path.exists()
        with running(WORKER, {VARIABLE: str(path)}) as second:
            assert first_line(second) == "ready"
            assert ask(path, "POST", "/handler/ping") == (200, "pong")
            assert finish(second)[0] == 0
    assert not path.exists()


def test_a_fork_neither_serves_nor_removes_the_socket(path: Path, wait_until: Callable[..., object]) -> None:
    """As a data loader's: one that ends the block by an exception, and one that outlives its parent."""
    program = """
        import os, sys, time
        from rallypoint.control_plane import worker_main
        with worker_main():
            pid = os.fork()
            if pid == 0:
                sys.exit(0)
            os.waitpid(pid, 0)
            pid = os.fork()
            if pid == 0:
                sys.stdin.readline()
                time.sleep(60)
            print(pid, flush=True)
            sys.stdin.readline()
    """
    with running(program, {VARIABLE: str(path)}) as worker:
        child = int(first_line(worker))
        try:
            assert ask(path, "POST", "/handler/ping") == (200, "pong")
            worker.kill()
            worker.wait(10)
            wait_until(lambda: is_refused(path))  # soon: the fork may not have run yet
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_handler_that_never_returns_does_not_keep_the_worker(path: Path) -> None:
    program = """
        import sys, threading
        from rallypoint import control_plane
        control_plane.GOODBYE_S = 0.2
        control_plane.register_handler("forever", lambda request: print("called", flush=True) or threading.Event().wait())
        with control_plane.worker_main():
            print("ready", flush=True)
            sys.stdin.readline()
        print("done")
    """
    with running(program, {VARIABLE: str(path)}) as worker:
        assert first_line(worker) == "ready"
        connection = UnixConnection(path)
        connection.request("POST", "/handler/forever")
        assert first_line(worker) == "called"
        assert finish(worker)[:2] == (0, "done\n")
        connection.close()


def test_a_server_that_crashes_does_not_touch_the_training(path: Path) -> None:
    program = """
        import sys, rallypoint.net.http_server
        from rallypoint.control_plane import worker_main

        def crash(loop):
            raise MemoryError("planted")

        rallypoint.net.http_server.HttpServer._turn = crash
        with worker_main():
            print("ready", flush=True)
            sys.stdin.readline()
        print("done")
    """
    with running(program, {VARIABLE: str(path)}) as worker:
        assert first_line(worker) == "ready"
        assert finish(worker)[:2] == (0, "done\n")
    assert not path.exists()


def test_rubbish_and_those_who_stay_silent_harm_nobody(path: Path) -> None:
    with running(WORKER, {VARIABLE: str(path)}) as worker:
        assert first_line(worker) == "ready"
        silent = [socket.socket(socket.AF_UNIX) for _ in range(50)]
        for index, sock in enumerate(silent):
            sock.connect(str(path))
            sock.sendall([b"", b"\x16\x03\x01", b"POST /handler/ping HTTP/1.1\r\nHost:", b"\0" * 10_000][index % 4])
        assert ask(path, "POST", "/handler/ping") == (200, "pong")
        assert finish(worker)[:2] == (0, "done\n")
        for sock in silent:
            sock.close()


@pytest.mark.torch
def test_torchs_worker_server_is_asked_in_the_same_way(path: Path) -> None:
    with running(
        WORKER.replace("rallypoint.control_plane", "torch.distributed.elastic.control_plane"), {VARIABLE: str(path)}
    ) as worker:
        assert first_line(worker) == "ready"
        assert ask(path, "POST", "/handler/ping") == (200, "pong")
        assert {"ping", "dump_traceback"} <= set(json.loads(ask(path, "GET", "/handler/")[1]))
        assert ask(path, "POST", "/handler/nope")[0] == 404
        assert "Thread 0x" in ask(path, "POST", "/handler/dump_traceback")[1]
        assert finish(worker)[0] == 0


AS_NOBODY = """
    import os, socket, sys
    with socket.socket(socket.AF_UNIX) as sock:
        os.setuid(65534)
        sock.settimeout(10)
        sock.connect(sys.argv[1])
        try:
            sock.sendall(b"POST /handler/ping HTTP/1.0\\r\\n\\r\\n")
            print(sock.recv(100))
        except ConnectionError:
            print(b"")
"""


@pytest.mark.root
def test_another_user_is_not_answered_even_if_the_file_lets_him(open_folder: Path) -> None:
    path = open_folder / "s"
    with running(WORKER, {VARIABLE: str(path)}) as worker:
        assert first_line(worker) == "ready"
        path.chmod(0o777)
        command = [sys.executable, "-S", "-c", textwrap.dedent(AS_NOBODY), str(path)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert (answer.stdout, answer.stderr) == ("b''\n", "")
        assert ask(path, "POST", "/handler/ping") == (200, "pong")


def test_curl_can_ask(path: Path) -> None:
    with running(WORKER, {VARIABLE: str(path)}) as worker:
        assert first_line(worker) == "ready"
        command = ["curl", "--silent", "--unix-socket", str(path), "-X", "POST", "http://worker/handler/ping"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except FileNotFoundError:
            pytest.skip("curl is not installed")
        assert (answer.returncode, answer.stdout) == (0, "pong")
