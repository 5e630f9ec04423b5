"""An agent's desk: who may ask, what becomes of strange questions, and what is left when it closes."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import PATIENCE_S

from rallypoint.errors import RallypointError, UsageError
from rallypoint.inspection.client import Agent, find_job, list_agents
from rallypoint.inspection.desk import Desk, runtime_folders
from rallypoint.inspection.view import NodeView, jobs_of

LOOK = NodeView("a-job", "a", "host", os.getpid(), phase="running")


@pytest.fixture
def desk(runtime_folder: str) -> Iterator[Desk]:
    before = {*os.listdir(runtime_folder)}  # of launchers that other tests have killed
    opened = Desk(lambda: LOOK, lambda: None)
    opened.open()
    assert opened.is_placed.wait(PATIENCE_S)
    yield opened
    opened.close()
    assert {*os.listdir(runtime_folder)} <= before


def ask(desk: Desk, question: bytes) -> dict[str, object]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60.0)
        sock.connect(desk.path)
        sock.sendall(question)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while data := sock.recv(65536):
            answer += data
    found = json.loads(answer)
    assert isinstance(found, dict)
    return found


def test_the_socket_is_for_one_user_alone(desk: Desk, runtime_folder: str) -> None:
    assert stat.S_IMODE(os.stat(desk.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(runtime_folder).st_mode) == 0o700


def test_agents_of_this_machine_are_found(desk: Desk) -> None:
    agents, troubles = list_agents()
    assert [(agent.path, agent.node) for agent in agents] == [(desk.path, LOOK)]
    assert troubles == []


def test_a_job_of_one_node_is_that_node(desk: Desk) -> None:
    assert find_job(list_agents()[0], "").status().nodes == (LOOK,)


def test_a_restart_is_handed_to_the_agent(desk: Desk) -> None:
    assert desk.take_request() is None
    find_job(list_agents()[0], "").restart()
    why = desk.take_request()
    assert why is not None
    assert why.startswith("a restart was asked for by ")
    assert desk.take_request() is None


def test_what_does_not_run_is_not_restarted(desk: Desk) -> None:
    desk.look = lambda: LOOK.replace(phase="waiting")
    with pytest.raises(RallypointError, match="its workers do not run: it is waiting"):
        find_job(list_agents()[0], "").restart()


def test_an_agent_in_a_thread_of_a_program_is_not_signalled(desk: Desk) -> None:
    """SIGTERM would end the whole program, which nobody has asked for."""
    with pytest.raises(RallypointError, match="runs inside another program"):
        find_job(list_agents()[0], "").stop()


@pytest.mark.parametrize(
    ("question", "error"),
    [
        (b"", "one line of JSON"),
        (b"\n", "Expecting value"),
        (b"[]\n", "an object"),
        (b"[" * 50_000 + b"\n", "an object"),
        (b"x" * 100_000 + b"\n", "at most"),
        (b'{"ask": "dance"}\n', "another version of rallypoint, does not know the question 'dance'"),
        (b'{"ask": "drain", "node": "z"}\n', "no node of a-job fits 'z'; there are: a "),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_strange_question_gets_an_answer(desk: Desk, question: bytes, error: str) -> None:
    assert error in str(ask(desk, question)["error"])
    assert ask(desk, b'{"ask": "node"}\n')["node"]


def test_a_socket_that_was_left_behind_is_removed(runtime_folder: str) -> None:
    path = os.path.join(runtime_folder, "1-dead.sock")
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(path)
    assert list_agents() == ([], [])
    assert not os.path.exists(path)


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("RALLYPOINT_RUNTIME_DIR", str(folder))
    desk = Desk(lambda: LOOK, lambda: None)
    desk.open()
    try:
        assert desk.is_placed.wait(PATIENCE_S)
        assert desk.path == ""
        assert list(folder.iterdir()) == []
        assert list_agents() == ([], [])
    finally:
        desk.close()


def test_one_that_is_closed_at_once_leaves_nothing(runtime_folder: str) -> None:
    """It finds its place on a thread of its own, whenever that comes to it."""
    before = {*os.listdir(runtime_folder)}
    for _ in range(20):
        desk = Desk(lambda: LOOK, lambda: None)
        desk.open()
        desk.close()
    assert {*os.listdir(runtime_folder)} <= before


def test_where_a_user_finds_the_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RALLYPOINT_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert runtime_folders() == [f"/tmp/rallypoint-{os.geteuid()}", "/run/user/7/rallypoint"]


ANOTHER_USER = """
import os, socket, sys
from rallypoint.inspection.client import list_agents
os.setgroups([]); os.setgid(65534); os.setuid(65534)
assert list_agents() == ([], [])
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except PermissionError:
    print("refused")
"""


@pytest.mark.root
def test_another_user_gets_nothing(desk: Desk) -> None:
    asked = subprocess.run([sys.executable, "-c", ANOTHER_USER, desk.path], capture_output=True, text=True, check=False)
    assert (asked.stdout, asked.stderr) == ("refused\n", "")


class TestWhichJobIsMeant:
    AGENTS = tuple(
        Agent("", NodeView(job, "a", "host", pid)) for job, pid in (("alpha", 1), ("alps", 2), ("beta", 3), ("beta", 4))
    )

    @pytest.mark.parametrize(("name", "pids"), [("alpha", [1]), ("b", [3, 4]), ("alps", [2]), ("4", [3, 4])])
    def test_by_its_id_the_beginning_of_it_or_a_process(self, name: str, pids: list[int]) -> None:
        assert [agent.node.pid for agent in find_job(self.AGENTS, name).agents] == pids

    @pytest.mark.parametrize(
        ("name", "error"),
        [
            ("", "3 jobs run on this machine; name one of them: alpha, alps, beta"),
            ("al", "2 jobs begin with 'al': alpha, alps"),
            ("x", "no job of this user on this machine begins with 'x'; there are: alpha, alps, beta"),
        ],
    )
    def test_what_is_not_clear_is_asked_for(self, name: str, error: str) -> None:
        with pytest.raises(UsageError) as raised:
            find_job(self.AGENTS, name)
        assert str(raised.value) == error

    def test_two_jobs_of_one_id_are_two(self) -> None:
        """They meet at different stores, or have a node each; who has reached no store yet belongs to the one that is known."""
        one = NodeView("twin", "a", "host", 1, nodes=2, store="x")
        agents = [Agent("", node) for node in (one, one.replace(pid=2), one.replace(pid=3, store="", nodes=None))]
        assert [agent.node.pid for agent in find_job(agents, "twin").agents] == [1, 2, 3]
        alone = NodeView("twin", "a", "host", 4, nodes=1)
        for other in (one.replace(pid=4, store="y"), alone):
            with pytest.raises(UsageError, match=r"2 jobs have the ID 'twin'; name one by the process ID of its launcher: 1, 4$"):
                find_job([*agents[:2], Agent("", other)], "twin")
            assert [agent.node.pid for agent in find_job([*agents[:2], Agent("", other)], "4").agents] == [4]
            assert [len(job.nodes) for job in jobs_of([one, other, one.replace(pid=2)])] == [2, 1]

    def test_who_could_not_be_asked_is_named(self) -> None:
        with pytest.raises(UsageError, match=r"^whoever is here could not be asked: process 7: it is odd; process 8: too$"):
            find_job([], "", ["7: it is odd", "8: too"])
        with pytest.raises(UsageError, match=r"no job .* begins with 'x'; there are: alpha \(and process 7: it is odd\)$"):
            find_job(self.AGENTS[:1], "x", ["7: it is odd"])

    def test_where_there_is_one_it_need_not_be_named(self) -> None:
        assert find_job(self.AGENTS[2:], "").agents == list(self.AGENTS[2:])
        with pytest.raises(UsageError, match="no job of this user runs on this machine"):
            find_job([], "")
