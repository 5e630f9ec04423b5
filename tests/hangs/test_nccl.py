"""NCCL is asked, with real pipes and sockets: its recorders for dumps, which are read with care, and its RAS service."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rallypoint.base import defaults
from rallypoint.hangs.nccl import DUMP_NAME, DUMPS_S, FlightRecorders, ask_ras, read_dump

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def recorders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlightRecorders]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = FlightRecorders()
    yield found
    found.close()
    assert not list(tmp_path.glob("rallypoint-nccl-*"))


def open_pipe(env: dict[str, str], rank: int) -> int:
    """As a worker's recorder does it."""
    path = f"{env[defaults.ENV_NCCL_PIPE]}{rank}.pipe"
    os.mkfifo(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def test_workers_that_have_a_recorder_are_asked_and_their_dumps_are_read(recorders: FlightRecorders, tmp_path: Path) -> None:
    """They go into the folder of their group, also of the next one."""
    env = recorders.env({})
    for number in range(2):
        folder = tmp_path / f"attempt_{number}"
        folder.mkdir()
        recorders.begin(str(folder))
        if number == 0:
            pipes = {rank: open_pipe(env, rank) for rank in (0, 3)}
        recorders.ask([0, 2, 3])  # rank 2 has none
        assert {rank: os.read(pipe, 100) for rank, pipe in pipes.items()} == {0: b"1\n", 3: b"1\n"}
        assert recorders.was_asked
        assert recorders.are_awaited(time.monotonic())
        whole = (RECORDED / f"{DUMP_NAME}0").read_bytes()
        dump = Path(f"{env[defaults.ENV_NCCL_DUMPS]}0")
        dump.write_bytes(whole[:-10])  # half written
        assert recorders.dumps() == {}
        dump.write_bytes(whole)
        shutil.copy(RECORDED / f"{DUMP_NAME}3", f"{env[defaults.ENV_NCCL_DUMPS]}3")
        assert not recorders.are_awaited(time.monotonic())
        assert sorted(recorders.dumps()) == [0, 3]
        assert sorted(one.name for one in folder.iterdir()) == [f"{DUMP_NAME}0", f"{DUMP_NAME}3"]
    for pipe in pipes.values():
        os.close(pipe)


def test_nobody_is_waited_for_without_end(recorders: FlightRecorders) -> None:
    pipe = open_pipe(recorders.env({}), 0)
    recorders.begin("")
    recorders.ask([0])
    assert recorders.are_awaited(time.monotonic())
    assert not recorders.are_awaited(time.monotonic() + DUMPS_S)
    os.close(pipe)


def test_a_dump_from_before_is_no_answer(recorders: FlightRecorders, tmp_path: Path) -> None:
    env = recorders.env({})
    pipe = open_pipe(env, 0)
    recorders.begin(str(tmp_path))
    shutil.copy(RECORDED / f"{DUMP_NAME}1", f"{env[defaults.ENV_NCCL_DUMPS]}0")
    recorders.ask([0])
    assert recorders.dumps() == {}
    shutil.copy(RECORDED / f"{DUMP_NAME}0", f"{env[defaults.ENV_NCCL_DUMPS]}0")
    assert list(recorders.dumps()) == [0]
    os.close(pipe)


def test_workers_without_nccl_are_not_waited_for(recorders: FlightRecorders) -> None:
    recorders.env({})
    recorders.begin("")
    recorders.ask([0, 1])
    assert not recorders.was_asked
    assert not recorders.are_awaited(time.monotonic())


def test_places_that_a_program_has_named_are_kept(recorders: FlightRecorders, tmp_path: Path) -> None:
    mine = {defaults.ENV_NCCL_PIPE: str(tmp_path / "ask"), defaults.ENV_NCCL_DUMPS_BEFORE: str(tmp_path / "dump")}
    env = recorders.env(mine)
    assert env == {**mine, defaults.ENV_NCCL_DUMPS: str(tmp_path / "dump")}
    pipe = open_pipe(env, 0)
    recorders.begin("")
    recorders.ask([0])
    shutil.copy(RECORDED / f"{DUMP_NAME}0", tmp_path / "dump0")
    assert list(recorders.dumps()) == [0]
    os.close(pipe)


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["harmful", "empty", "text", "missing", "folder", "pipe"])
def test_only_plain_values_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "dump"
    match kind:
        case "harmful":
            path.write_bytes(pickle.dumps({"entries": Harmful(tmp_path / "made")}))
        case "empty":
            path.touch()
        case "text":
            path.write_text("nothing of the kind")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
    assert read_dump(str(path)) is None
    assert not (tmp_path / "made").exists()


# --- RAS -------------------------------------------------------------------------------------------------------------------

Answer = dict[bytes, bytes]
JSON = (RECORDED / "ras.json").read_bytes()
TEXT = (RECORDED / "ras.txt").read_bytes()
NEW: Answer = {b"CLIENT": b"SERVER PROTOCOL 2\n", b"TIMEOUT": b"OK\n", b"SET": b"OK\n", b"STATUS": JSON}
OLD: Answer = {**NEW, b"SET": b"ERROR: Unknown command SET\n", b"STATUS": TEXT}
STRANGER: Answer = {b"CLIENT": b"HTTP/1.0 400 Bad Request\n"}
SILENT: Answer = {b"CLIENT": b""}


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """A RAS service that answers each command so; where it listens."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads = []

    def talk(answers: Answer) -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                word = line.split()[0]
                connection.sendall(answers[word])
                if word == b"STATUS":
                    return

    def start(answers: Answer) -> str:
        threads.append(threading.Thread(target=talk, args=(answers,)))
        threads[-1].start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for thread in threads:
        thread.join()
    listener.close()


def test_the_service_is_asked_for_a_document(serve: Callable[[Answer], str]) -> None:
    answer = ask_ras(serve(NEW), 30.0)
    assert answer.text == JSON.decode()
    assert answer.document == json.loads(JSON)


def test_an_older_one_answers_in_words(serve: Callable[[Answer], str]) -> None:
    answer = ask_ras(serve(OLD), 30.0)
    assert "Rank 3 has launched up to operation 5" in answer.text
    assert answer.document is None


@pytest.mark.parametrize(("answers", "timeout_s"), [(STRANGER, 30.0), (SILENT, 0.2)])
def test_anybody_else_at_that_port_is_left_alone(serve: Callable[[Answer], str], answers: Answer, timeout_s: float) -> None:
    assert ask_ras(serve(answers), timeout_s).text == ""


@pytest.mark.parametrize("place", ["127.0.0.1:1", "not a place", "[::1"])
def test_where_nobody_answers_there_is_nothing(place: str) -> None:
    assert ask_ras(place, 5.0).text == ""
