"""Requests as they go through the pipe, what a client does without a server, and what a hostile writer achieves: nothing."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rallypoint.errors import UsageError
from rallypoint.timers import FileTimerClient, FileTimerRequest, FileTimerServer, expires, file_timer
from rallypoint.timers.file_server import RequestLines, TimerPipe, check_timer_file, parse_request
from rallypoint.timers.file_timer import LINE_MAX, describe_expiry

# What torch 2.13 wrote for acquire("s\n\"x", 12.5) and release("s"), with signals 9 and 0.
TORCH_ACQUIRE = rb'{"version": 1, "pid": 11439, "scope_id": "s\n\"x", "expiration_time": 12.5, "signal": 9}'
TORCH_RELEASE = rb'{"version": 1, "pid": 11439, "scope_id": "s", "expiration_time": -1, "signal": 0}'


@pytest.fixture
def pipe(tmp_path: Path) -> str:
    return str(tmp_path / "timers")


@pytest.mark.parametrize(
    ("line", "request_"),
    [
        (TORCH_ACQUIRE, FileTimerRequest(11439, 's\n"x', 12.5, signal.SIGKILL)),
        (TORCH_RELEASE, FileTimerRequest(11439, "s", -1, 0)),
    ],
)
def test_lines_are_those_of_torch(line: bytes, request_: FileTimerRequest) -> None:
    assert request_.to_json().encode() == line
    assert parse_request(line) == request_


@given(
    st.builds(
        FileTimerRequest,
        st.integers(2, 2**22),
        st.text(max_size=50),
        st.floats(-1e12, 1e12) | st.just(float("inf")) | st.integers(0, 10**12),
        st.integers(0, 64),
    )
)
@example(FileTimerRequest(4000, "{", 1.0, 9))
@example(FileTimerRequest(4000, '{"version"', 1.0, 9))
def test_a_request_survives_the_pipe(request: FileTimerRequest) -> None:
    line = request.to_json().encode()
    assert parse_request(line) == request
    assert parse_request(b'{"version": 1, "pid": 7, "sco' + line) == request  # behind what was never completed


@pytest.mark.parametrize(
    "change",
    [
        {"pid": 1}, {"pid": 0}, {"pid": -1}, {"pid": "x"}, {"pid": 2**40}, {"pid": 7.0}, {"scope_id": 7},
        {"expiration_time": "x"}, {"expiration_time": float("nan")}, {"expiration_time": 10**400}, {"expiration_time": None},
        {"signal": 65}, {"signal": -9}, {"signal": None},
    ],
)  # fmt: skip
def test_what_no_worker_could_ask_for_is_passed_over(change: dict[str, Any]) -> None:
    asked = {"version": 1, "pid": 4000, "scope_id": "s", "expiration_time": 1.0, "signal": 9}
    assert parse_request(json.dumps(asked).encode()) is not None
    assert parse_request(json.dumps({**asked, **change}).encode()) is None


@given(st.binary(max_size=200) | st.just(b"[" * 4000) | st.just(b'{"a":' * 800) | st.just(b"9" * 4000))
def test_garbage_is_passed_over(line: bytes) -> None:
    assert parse_request(line) is None


@given(st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")) | st.just(b"x" * 9000)), st.integers(50, 5000))
@settings(deadline=None)
def test_lines_are_cut_however_they_come(lines: list[bytes], piece: int) -> None:
    cutter = RequestLines()
    stream = b"".join(line + b"\n" for line in lines)
    cut = [line for start in range(0, len(stream), piece) for line in cutter.feed(stream[start : start + piece])]
    assert cut == [line for line in lines if len(line) < LINE_MAX]
    assert len(cutter._rest) <= LINE_MAX


def test_hostile_writers_neither_stop_nor_fill_the_server(pipe: str) -> None:
    server = FileTimerServer(pipe, "run", 30)
    server.start()
    worker = subprocess.Popen(["sleep", "60"])
    try:
        fd = os.open(pipe, os.O_WRONLY)
        for garbage in (b"garbage\n", b"\xff\xfe\0\n", b"{}\n[1]\n\n", b"[" * 100_000, b"\n", b'{"pid": 1'):
            os.write(fd, garbage)
        request = FileTimerRequest(worker.pid, "s", time.time() + 0.1, 9)
        os.write(fd, request.to_json().encode() + b"\n")
        os.close(fd)
        assert worker.wait(10) == -signal.SIGKILL
    finally:
        server.stop()
        worker.kill()
        worker.wait()


def test_more_timers_than_there_is_room_for_are_refused(pipe: str, caplog: pytest.LogCaptureFixture) -> None:
    server = FileTimerServer(pipe, "run")
    server.register_timers([FileTimerRequest(4000, f"scope {number}", 1.0, 9) for number in range(10_100)])
    assert len(server.get_expired_timers(2.0)[4000]) == 10_000
    assert [record.message for record in caplog.records if "too many timers" in record.message]


# --- the client ------------------------------------------------------------------------------------------------------------


def test_a_client_without_a_server_says_so_at_once(pipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To whoever opens the block, and once; a server is there before its clients are."""
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waited"))
    client = FileTimerClient(pipe)
    with pytest.raises(BrokenPipeError, match="FileTimerServer is not available"), expires(60, client=client):
        pytest.fail("the block was entered")
    os.mkfifo(pipe)
    with pytest.raises(BrokenPipeError, match="FileTimerServer is not available"):
        client.release("s")


def test_a_client_waits_for_room_in_the_pipe_but_not_for_ever(pipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_timer, "ROOM_WAIT_S", 0.1)
    end = TimerPipe(pipe)
    client = FileTimerClient(pipe)

    def fill() -> None:
        while True:
            client.acquire("s" * 1000, 1.0)

    with pytest.raises(BrokenPipeError):  # nobody reads
        fill()
    end.read_requests()
    client.acquire("s", 1.0)
    end.close()


def test_a_request_has_to_fit_into_the_pipe_in_one_piece(pipe: str) -> None:
    end = TimerPipe(pipe)
    client = FileTimerClient(pipe)
    room = LINE_MAX - len(FileTimerRequest(os.getpid(), "", 1.0, 9).to_json()) - 1
    client.acquire("s" * room, 1.0)
    assert end.read_requests() == [FileTimerRequest(os.getpid(), "s" * room, 1.0, 9)]
    with pytest.raises(RuntimeError, match="larger than 4096 bytes"):
        client.acquire("s" * (room + 1), 1.0)
    end.close()


def test_the_reason_is_one_short_line() -> None:
    request = FileTimerRequest(4000, "load\n" + "x" * 5000, 3700.004, 9)
    assert describe_expiry(FileTimerRequest(4000, "step", 5.0)) == "timer step expired"
    request.acquired_at = 100.0
    why = describe_expiry(request)
    assert why.endswith("... expired after 3600 s")
    assert len(why) < 300
    assert "\n" not in why


# --- where the pipe may be -------------------------------------------------------------------------------------------------


def test_a_place_for_the_pipe_is_checked_before_anything_starts(tmp_path: Path) -> None:
    file, folder, fifo = tmp_path / "file", tmp_path / "folder", tmp_path / "fifo"
    file.write_text("precious")
    folder.mkdir()
    os.mkfifo(fifo)
    check_timer_file(str(tmp_path / "new"))
    check_timer_file(str(fifo))
    for bad in (file, folder, tmp_path / "nowhere" / "new", file / "new"):
        with pytest.raises(UsageError, match=f"TORCHELASTIC_TIMER_FILE={bad}: "):
            check_timer_file(str(bad))
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_two_servers_do_not_share_a_pipe(pipe: str) -> None:
    end = TimerPipe(pipe)
    with pytest.raises(UsageError, match="another process reads"):
        check_timer_file(pipe)
    end.close()
    check_timer_file(pipe)
