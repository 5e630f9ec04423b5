"""The stories of real runs: what the agents wrote is what ``rallypoint explain`` tells, and all their time is accounted for."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_ports

from rallypoint.cli.explain import explain_main

WORKER = """
    import os, sys, time
    rank, orders = os.environ["RANK"], sys.argv[1]
    while not os.path.exists(f"{orders}/finish"):
        if rank == "1":
            try:
                os.unlink(f"{orders}/fail")
            except FileNotFoundError:
                pass
            else:
                raise ValueError("bad batch")
        time.sleep(0.01)
"""


@pytest.fixture
def explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[], Any]:
    """``explained()`` is the story of the newest run in the log folder, whose times it has checked."""

    def explain() -> Any:
        assert explain_main([str(tmp_path / "logs"), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        for account in (*document["nodes"], document["total"]):
            assert sum(account["seconds"].values()) == pytest.approx(account["wall_s"], rel=0.01)
        times = [entry["since_s"] for entry in document["timeline"]]
        assert times == sorted(times)
        return document

    return explain


def newest_generation(logs: Path, pid: int) -> tuple[int, int]:
    """Its number and how many nodes it has, as the agent of this process tells it."""
    for file in logs.glob("*/events.jsonl"):
        events = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if any(event["name"] == "rallypoint.run.started" and event["metadata"]["pid"] == pid for event in events):
            formed = [event["metadata"] for event in events if event["name"] == "rallypoint.generation"]
            return (formed[-1]["generation"], formed[-1]["group_world_size"]) if formed else (0, 0)
    return (0, 0)


def is_running(logs: Path) -> bool:
    return any('"phase": "running"' in file.read_text() for file in logs.glob("*/events.jsonl"))


def kinds(document: Any) -> list[str]:
    return [entry["kind"] for entry in document["timeline"]]


def texts(document: Any, kind: str) -> list[str]:
    return [entry["text"] for entry in document["timeline"] if entry["kind"] == kind]


def test_two_failures_a_lost_node_and_a_scale_up(
    script: Any, start_rallyrun: Any, orders: Path, explained: Any, wait_until: Any, tmp_path: Path
) -> None:
    [port] = free_ports(1)
    conf = "last_call_timeout=1,join_timeout=20"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job", "--rdzv-conf"]
    flags = ["--nnodes", "2:3", "--nproc-per-node", "2", "--max-restarts", "5", "--log-dir", str(tmp_path / "logs")]
    worker = script(WORKER)

    def start(is_host: int = 0) -> Any:
        return start_rallyrun([*flags, *meeting, f"{conf},is_host={is_host}", worker, orders])

    def wait_for(agents: list[Any], beyond: int, size: int) -> int:
        """The number of the next generation of this size, once all of them are in it."""

        def met() -> int:
            formed = {newest_generation(tmp_path / "logs", one.pid) for one in agents}
            number, nodes = min(formed)
            return number if len(formed) == 1 and nodes == size and number > beyond else 0

        return int(wait_until(met, 30.0))

    agents = [start(is_host=1), start(), start()]
    number = wait_for(agents, 0, size=3)
    (orders / "fail").touch()
    number = wait_for(agents, number, size=3)
    agents.pop().send_signal(signal.SIGKILL)
    number = wait_for(agents, number, size=2)
    agents.append(start())
    number = wait_for(agents, number, size=3)
    (orders / "fail").touch()
    wait_for(agents, number, size=3)
    (orders / "finish").touch()
    assert [agent.wait() for agent in agents] == [0, 0, 0]

    document = explained()
    assert document["succeeded"] is True
    assert [node["has_ended"] for node in document["nodes"]].count(False) == 1
    told = [kind for kind in kinds(document) if kind != "stopped"]  # nodes may give their reasons together, or apart
    first = told.index("failed")
    assert set(told[:first]) <= {"generation", "started"}  # the third node may have come too late for the first generation
    assert told[first:] == [
        "failed",
        "generation",
        "silent",
        "generation",
        "started",
        "generation",
        "failed",
        "generation",
        "ended",
    ]
    assert all("failed with exit code 1: ValueError: bad batch" in text for text in texts(document, "failed"))
    assert any("was lost" in text for text in texts(document, "stopped"))
    sizes = [re.search(r"scaled \w+ from \d to \d nodes", text) for text in texts(document, "generation")[-4:]]
    assert [size and size[0] for size in sizes] == [None, "scaled down from 3 to 2 nodes", "scaled up from 2 to 3 nodes", None]
    assert "restarts spent: 2 of 5" in texts(document, "generation")[-1]


def test_a_signal_is_why_the_run_ended(script: Any, start_rallyrun: Any, orders: Path, explained: Any, tmp_path: Path) -> None:
    agent = start_rallyrun(["--standalone", "--log-dir", str(tmp_path / "logs"), script(WORKER), orders])
    agent.wait_for(lambda: is_running(tmp_path / "logs"))
    agent.send_signal(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    document = explained()
    assert document["succeeded"] is False
    assert kinds(document)[0] == "generation"
    assert kinds(document)[-1] == "ended"
    assert document["nodes"][0]["seconds"]["lost"] > 0


def test_a_run_that_is_still_going_on(script: Any, start_rallyrun: Any, orders: Path, explained: Any, tmp_path: Path) -> None:
    agent = start_rallyrun(["--standalone", "--log-dir", str(tmp_path / "logs"), script(WORKER), orders])
    agent.wait_for(lambda: is_running(tmp_path / "logs"))
    assert kinds(explained()) == ["generation", "silent"]
    (orders / "finish").touch()
    assert agent.wait() == 0
    assert kinds(explained()) == ["generation", "ended"]
    assert explained()["nodes"][0]["wall_s"] > 0


def test_f05_a_run_that_is_alive_is_told_as_such(
    script: Any,
    start_rallyrun: Any,
    orders: Path,
    explained: Any,
    wait_until: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """F05: still running, for how long, and the goodput so far. F13: all times have one zero."""
    logs = tmp_path / "logs"
    began_ms = time.time() * 1000
    agent = start_rallyrun(["--standalone", "--nproc-per-node", "2", "--log-dir", logs, script(WORKER), orders])
    wait_until(lambda: is_running(logs), 30.0)

    def document_of_goodput() -> Any:
        document = explained()
        return document if document["total"]["goodput"] > 0.5 else None

    document = wait_until(document_of_goodput, 60.0)
    assert (document["succeeded"], document["is_running"]) == (None, True)
    assert kinds(document) == ["generation", "silent"]
    assert texts(document, "silent") == [f"still running (pid {agent.pid})"]
    assert 0 < document["total"]["wall_s"] <= (time.time() * 1000 - began_ms) / 1000
    generation = document["timeline"][0]
    assert generation["since_s"] == pytest.approx(generation["facts"]["ready_s"], abs=0.01)
    assert explain_main([str(logs)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith(" is still running")
    assert re.search(r" for [0-9.]+ s so far; goodput [0-9.]+%$", second)
    (orders / "finish").touch()
    assert agent.wait() == 0
    assert (explained()["succeeded"], explained()["is_running"]) == (True, False)


def test_a_run_is_followed_to_its_end_without_a_path(
    script: Any, start_rallyrun: Any, orders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens is told while the run goes on, with one zero, and the end closes it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    logs = tmp_path / "logs"
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", logs]
    agent = start_rallyrun([*flags, script(WORKER), orders])
    agent.wait_for(lambda: is_running(logs) and list(tmp_path.glob("state/rallypoint/runs/*/*")))
    following = start_rallyrun([], launcher=(sys.executable, "-m", "rallypoint", "explain", "--follow"))
    following.wait_for_line("generation 1: 1 node, 2 workers, running after")
    assert " is still running" in following.stdout.splitlines()[0]
    (orders / "fail").touch()
    following.wait_for_line("failed with exit code 1: ValueError: bad batch")
    following.wait_for_line("restarts spent: 1 of 1")
    assert "goodput is running" not in following.stdout
    (orders / "finish").touch()
    assert agent.wait() == 0
    assert following.wait() == 0, following.stderr
    told, _, summary = following.stdout.partition(" succeeded: all workers succeeded\n\n")
    assert told.count("bad batch") == 1
    times = [float(time) for time in re.findall(r"^ *\+([0-9.]+)s", told, re.MULTILINE)]
    assert times == sorted(times)
    assert summary.startswith("run ")
    assert "each row adds up to its wall time; goodput is running / wall" in summary


def test_a_failed_run_says_last_how_to_read_its_story(
    script: Any, rallyrun: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = rallyrun(["--standalone", "--log-dir", "some logs", script("raise ValueError('bad batch')")])
    assert ended.returncode == 1
    command = ended.stderr.splitlines()[-1].partition("rallypoint ")[2]
    assert explain_main(shlex.split(command)[1:]) == 0
    assert "ValueError: bad batch" in capsys.readouterr().out
