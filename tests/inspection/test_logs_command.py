"""``rallypoint logs``, of folders that runs have left, and of jobs that run."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests import ports

from rallypoint import inspect
from rallypoint.cli.logs import logs_main
from rallypoint.errors import RallypointError, UsageError
from rallypoint.inspection import client, log_reading, log_relay
from rallypoint.inspection.view import JobView, NodeView, WorkerView

Files = dict[str, str]
LOGS = (sys.executable, "-m", "rallypoint", "logs")


def write_run(folder: Path, ranks: dict[str, list[int]], files: Files, host: str = "h", pid: int | None = None) -> Path:
    """A run folder as an agent leaves it: the ranks of each attempt, and files in it; with a process id it runs still."""
    events: list[tuple[str, dict[str, Any]]] = [("run.started", {"schema": 1, "run_id": "r", "hostname": host, "pid": pid or 1})]
    for number, (name, some) in enumerate(ranks.items(), 1):
        events.append(("generation", {"generation": number, "ranks": some, "folder": str(folder / name)}))
    if pid is None:
        events.append(("run.ended", {"succeeded": True}))
    folder.mkdir(parents=True)
    now_ms, lasted_ms = int(time.time() * 1000), 60_000 if pid is None else 0
    times = [now_ms - lasted_ms, *[now_ms] * (len(events) - 1)]
    told = [
        {"name": f"rallypoint.{name}", "timestamp": at, "metadata": facts}
        for at, (name, facts) in zip(times, events, strict=True)
    ]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in told))
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two attempts of two ranks, the second with the ranks the other way round."""
    files = {
        "attempt_0/0/stdout.log": "2026-11-16 19:08:01 step 1\n2026-11-16 19:08:03 step 2\n",
        "attempt_0/1/stdout.log": "2026-11-16 19:08:02 step 1\n2026-11-16 19:08:04 step 2\n",
        "attempt_0/1/stderr.log": "2026-11-16 19:08:05 oh\nTraceback\n",
        "attempt_1/0/stdout.log": "2026-11-16 19:08:06 step 3\nunfinished",
        "attempt_1/1/stdout.log": "2026-11-16 19:08:06 step 3\n",
    }
    return write_run(tmp_path / "logs" / "r_1", {"attempt_0": [0, 1], "attempt_1": [1, 0]}, files)


Logs = Callable[..., list[str]]


@pytest.fixture
def logs(capfd: pytest.CaptureFixture[str]) -> Logs:
    def show(*args: object) -> list[str]:
        assert logs_main([str(arg) for arg in args]) == 0
        shown = capfd.readouterr()
        assert shown.err == ""
        return shown.out.splitlines()

    return show


# --- of folders ------------------------------------------------------------------------------------------------------------


def test_attempts_one_after_the_other_and_lines_by_their_times(run: Path, logs: Logs) -> None:
    assert logs(run.parent) == logs(run) == [
        "[rank 0] 2026-11-16 19:08:01 step 1",
        "[rank 1] 2026-11-16 19:08:02 step 1",
        "[rank 0] 2026-11-16 19:08:03 step 2",
        "[rank 1] 2026-11-16 19:08:04 step 2",
        "[rank 1 stderr] 2026-11-16 19:08:05 oh",
        "[rank 1 stderr] Traceback",
        "[rank 0 attempt 1] 2026-11-16 19:08:06 step 3",
        "[rank 1 attempt 1] 2026-11-16 19:08:06 step 3",
        "[rank 1 attempt 1] unfinished",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--rank", "1", "--stderr"], ["[rank 1] 2026-11-16 19:08:05 oh", "[rank 1] Traceback"]),
        (["--rank=1-3", "--stdout", "--tail=1"], ["[rank 1 attempt 1] unfinished"]),
        (
            ["-n", "2", "--rank", "0"],
            ["[rank 0] 2026-11-16 19:08:03 step 2", "[rank 0 attempt 1] 2026-11-16 19:08:06 step 3"],
        ),
        (["--grep", "^T|unf"], ["[rank 1 stderr] Traceback", "[rank 1 attempt 1] unfinished"]),
        (["--grep", "step", "--tail", "1", "--rank", "1"], ["[rank 1 attempt 1] 2026-11-16 19:08:06 step 3"]),
        (
            ["--collapse", "--stdout"],
            [
                "ranks 0-1: 2026-11-16 19:08:01 step 1",
                "ranks 0-1: 2026-11-16 19:08:03 step 2",
                "ranks 0-1 attempt 1: 2026-11-16 19:08:06 step 3",
                "rank 1 attempt 1: unfinished",
            ],
        ),
        (["--follow", "--rank", "0", "--tail", "0"], []),
        (["--since", "2026-11-16T19:08:06", "--rank", "0"], ["[rank 0 attempt 1] 2026-11-16 19:08:06 step 3"]),
    ],
)
def test_flags(run: Path, logs: Logs, flags: list[str], expected: list[str]) -> None:
    later = time.mktime((2026, 11, 16, 19, 8, 10, 0, 0, -1))
    for path in run.rglob("*.log"):
        os.utime(path, (later, later))
    assert logs(run, *flags) == expected


def test_json(run: Path, logs: Logs) -> None:
    found = [json.loads(line) for line in logs(run, "--json", "--rank", "1", "--stderr")]
    common = {"rank": 1, "stream": "stderr", "attempt": 0, "node": "h", "time": "2026-11-16T19:08:05"}
    assert found == [{**common, "text": "2026-11-16 19:08:05 oh"}, {**common, "text": "Traceback"}]
    assert json.loads(logs(run, "--json", "--collapse", "--stdout")[0])["ranks"] == [0, 1]


def test_from_a_program(run: Path) -> None:
    found = list(inspect.logs(str(run), ranks=[1], streams=["stdout"], grep="step [23]"))
    assert [(line.rank, line.attempt, line.time, line.text[-6:]) for line in found] == [
        (1, 0, "2026-11-16T19:08:04", "step 2"),
        (1, 1, "2026-11-16T19:08:06", "step 3"),
    ]
    assert [line.ranks for line in inspect.logs(str(run), streams=["stdout"], collapse=True, tail=1)] == [(0,), (1,)]


def test_nodes_that_logged_into_one_folder_are_one_job(tmp_path: Path, logs: Logs) -> None:
    write_run(tmp_path / "r_1", {"attempt_0": [0]}, {"attempt_0/0/stdout.log": "x\n"})
    write_run(tmp_path / "r_2", {"attempt_0": [1]}, {"attempt_0/0/stdout.log": "x\n"}, host="other")
    assert logs(tmp_path, "--collapse") == ["ranks 0-1: x"]


def test_a_folder_without_events_has_local_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "r_1", {}, {"attempt_0/2/stdout.log": "x\n"})
    (run / "events.jsonl").unlink()
    assert logs_main([str(run), "-f"]) == 0
    shown = capfd.readouterr()
    assert shown.out == "[rank 2] x\n"
    assert "no events in" in shown.err
    assert "local ranks" in shown.err


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--rank", "7"], 2, "there are no logs of rank 7; there are those of 0-1"),
        (["--rank", "x"], 2, "not a list of ranks"),
        (["--grep", "("], 2, "--grep '(' is not a regular expression"),
        (["--tail", "-1"], 2, "--tail '-1' is not a number of lines"),
        (["--since", "soon"], 2, "neither an age"),
        (["--folow"], 2, "unknown flag --folow; did you mean --follow?"),
        (["--tail"], 2, "--tail needs a value"),
        (["another"], 2, "one job or folder is enough"),
    ],
)
def test_bad_input(run: Path, capfd: pytest.CaptureFixture[str], flags: list[str], code: int, message: str) -> None:
    assert logs_main([str(run), *flags]) == code
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_streams_that_there_are_not(run: Path) -> None:
    with pytest.raises(UsageError, match="streams are stdout and stderr, not 'out'"):
        inspect.logs(str(run), streams=["out"])


def test_an_agent_that_was_killed_is_not_waited_for(tmp_path: Path, logs: Logs) -> None:
    """It could not say that it has ended, and what it did not tell of the last attempt is shown as far as it is known."""
    with subprocess.Popen(["true"]) as gone:
        pass
    files = {"attempt_0/0/stdout.log": "a\n", "attempt_1/0/stdout.log": "b"}
    run = write_run(tmp_path / "r_1", {"attempt_0": [7]}, files, os.uname().nodename, gone.pid)
    assert logs(run, "-f") == ["[rank 7] a", "[rank 0 attempt 1] b"]


@pytest.mark.parametrize(("dull", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_are_for_terminals(run: Path, dull: dict[str, str], is_coloured: bool) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", **dull}
    subprocess.run([*LOGS, run, "--rank", "0", "--tail", "1"], stdout=theirs, env=env, check=True, timeout=60)
    os.close(theirs)
    shown = b""
    with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # EIO: there is no more
        while part := terminal.read(1000):
            shown += part
    label = b"[rank 0 attempt 1]"
    assert shown == (b"\x1b[36m%b\x1b[0m" % label if is_coloured else label) + b" 2026-11-16 19:08:06 step 3\r\n"


def test_a_folder_of_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert logs_main([str(tmp_path)]) == 2
    assert "there is no events.jsonl in" in capfd.readouterr().err
    assert logs_main(["no-such-job"]) == 2
    assert "name the log folder" in capfd.readouterr().err


def test_nodes_elsewhere_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A node whose folder cannot be read here is named, with its host, its folder and its ranks."""
    here = write_run(tmp_path / "r_1", {"attempt_0": [0]}, {"attempt_0/0/stdout.log": "x\n"})
    nodes = (
        NodeView("r", "n0", "h0", 1, log_dir=str(here), event_file=str(here / "events.jsonl")),
        NodeView("r", "n1", "h1", 2, log_dir="/gone/r_2", workers=(WorkerView(1, 0, 3), WorkerView(2, 1, 4))),
    )
    monkeypatch.setattr(client, "list_agents", lambda: ([client.Agent("", nodes[0])], []))
    monkeypatch.setattr(client.LocalJob, "status", lambda _: JobView("r", nodes, ("n2",)))
    assert logs_main([]) == 0
    shown = capfd.readouterr()
    assert shown.out == "[rank 0] x\n"
    said_of_others = [line.removeprefix("rallypoint logs: ") for line in shown.err.splitlines()]
    assert said_of_others == [
        "no answer from n2: where their logs are is not known",
        "the logs of n1 (ranks 1-2) are on h1, in /gone/r_2, which cannot be read here: it cannot be asked for them",
    ]


def test_what_is_new_comes_in_order_until_the_agent_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt is shown when its ranks are known, after all of the one before; the last line of one that is over is one too."""
    run = write_run(tmp_path / "r_1", {"attempt_0": [4]}, {"attempt_0/0/stdout.log": "a\nb"}, os.uname().nodename, os.getpid())
    monkeypatch.setattr(log_reading, "LOOK_AROUND_S", 0.0)
    found = log_reading.read_lines(log_reading.find_logs(str(run)), log_reading.Wish(), follow=True)
    texts: list[str] = []

    def look(times: int = 3) -> list[str]:
        """What has come by so many looks that have found nothing more."""
        texts.clear()
        while times:
            line = next(found)
            times -= line is None
            texts.extend([f"{line.rank}.{line.attempt} {line.text}"] if line is not None else [])
        return texts

    assert look() == ["4.0 a"]
    (run / "attempt_1" / "0").mkdir(parents=True)
    (run / "attempt_1" / "0" / "stdout.log").write_text("c\n")
    assert look() == []  # whose it is has not been told
    told = {"generation": 2, "ranks": [5], "folder": str(run / "attempt_1")}
    with (run / "events.jsonl").open("a") as events:
        events.write(json.dumps({"name": "rallypoint.generation", "timestamp": int(time.time() * 1000), "metadata": told}) + "\n")
    assert look(5) == ["4.0 b", "5.1 c"]
    with (run / "events.jsonl").open("a") as events:
        events.write(json.dumps({"name": "rallypoint.run.ended", "timestamp": int(time.time() * 1000), "metadata": {}}) + "\n")
    with (run / "attempt_1" / "0" / "stdout.log").open("a") as file:
        file.write("d")
    assert [line.text for line in found if line is not None] == ["d"]


# --- of jobs ---------------------------------------------------------------------------------------------------------------

# Each worker prints lines, and waits until the last of every four has come out at the other end; the one that fails, until the
# others have written so much that their first files are full too.
TALKER = """
import os, sys, time
rank, attempt, shown = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], sys.argv[1]
for number in range(40):
    line = f"<{attempt} {rank} {number}>"
    print(line, flush=True)
    while number % 4 == 3 and line not in open(shown).read():
        time.sleep(0.01)
    if (attempt, rank, number) == ("0", "1", 23):
        while not all(f"<0 {other} 19>" in open(shown).read() for other in (0, 2)):
            time.sleep(0.01)
        sys.exit(3)
"""
WAITER = """
import os, sys, time
print("hello from", os.environ["RANK"], flush=True)
while not os.path.exists(sys.argv[1] + "/finish"):
    time.sleep(0.01)
print("bye from", os.environ["RANK"], flush=True)
"""


@pytest.fixture
def the_job(wait_until: Any) -> Callable[[Any], str]:
    """``the_job(launcher)``: its id, once its workers run."""

    def find(launcher: Any) -> str:
        def look() -> str:
            agents = [agent.node for agent in client.list_agents()[0] if agent.node.pid == launcher.pid]
            return next((node.job for node in agents if node.workers), "")

        return str(wait_until(look))

    return find


def test_following_through_a_restart_and_full_files(start_rallyrun: Any, script: Any, tmp_path: Path, the_job: Any) -> None:
    """Three ranks, files of 120 bytes and a failure: all lines, each once, in order; and it ends with the job."""
    shown = tmp_path / "shown.txt"
    shown.touch()
    flags = ["--standalone", "--nproc-per-node", "3", "--max-restarts", "1", "--redirects", "3", "--log-max-size", "120"]
    job = start_rallyrun([*flags, "--log-dir", "logs", script(TALKER), shown])
    with shown.open("wb") as out:
        follower = subprocess.Popen([*LOGS, the_job(job), "-f"], stdout=out, stderr=subprocess.PIPE, cwd=tmp_path)
    try:
        assert job.wait() == 0
        assert follower.wait(60) == 0
        assert follower.stderr is not None
        assert follower.stderr.read() == b""
    finally:
        follower.kill()
        follower.communicate()
    assert len(list(tmp_path.glob("logs/*_*/attempt_*/*/stdout.log.1"))) == 6
    found: dict[tuple[str, str], list[int]] = {}
    for line in shown.read_text().splitlines():
        match = re.fullmatch(r"\[rank (\d)(?: attempt 1)?\] <(\d) (\d) (\d+)>", line)
        assert match, line
        assert match[1] == match[3]
        assert (match[2] == "1") == (" attempt 1" in line)
        found.setdefault((match[2], match[3]), []).append(int(match[4]))
    assert [found["1", rank] for rank in "012"] == [list(range(40))] * 3
    assert found["0", "1"] == list(range(24))
    for rank in "02":
        assert found["0", rank] == list(range(len(found["0", rank])))


def test_who_follows_a_silent_job_and_goes(start_rallyrun: Any, script: Any, orders: Path, tmp_path: Path, the_job: Any) -> None:
    """A reader that is gone ends it, though there is nothing to write; so does Ctrl-C. Neither says anything."""
    flags = ["--standalone", "--nproc-per-node", "2", "--redirects", "3", "--log-dir", "logs"]
    job = start_rallyrun([*flags, script(WAITER), orders])
    name = the_job(job)
    for ends, code in ((lambda one: one.stdout.close(), 0), (lambda one: one.send_signal(signal.SIGINT), 130)):
        follower = subprocess.Popen([*LOGS, name[:8], "-f"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
        assert follower.stdout is not None
        assert follower.stderr is not None
        with follower.stdout, follower.stderr:
            lines = {follower.stdout.readline() for _ in range(2)}
            ends(follower)
            assert follower.wait(60) == code
            assert follower.stderr.read() == b""
        assert lines == {b"[rank 0] hello from 0\n", b"[rank 1] hello from 1\n"}
    (orders / "finish").touch()
    assert job.wait() == 0


@pytest.mark.parametrize("follow", [False, True])
def test_a_job_that_writes_to_its_terminal(start_rallyrun: Any, script: Any, orders: Path, the_job: Any, follow: bool) -> None:
    """It has no log files; what to do about that is said."""
    job = start_rallyrun(["--standalone", "--nproc-per-node", "1", script(WAITER), orders])
    name = the_job(job)
    with pytest.raises(RallypointError, match=r"write to the console.*--redirects 3 .*--tee 3 .*--log-dir"):
        list(inspect.logs(name, follow=follow))
    with pytest.raises(UsageError, match="no logs of rank 5"):
        list(inspect.logs(name, ranks=[5], follow=follow))
    (orders / "finish").touch()
    assert job.wait() == 0


@pytest.fixture
def two_nodes(start_rallyrun: Any, script: Any, orders: Path, the_job: Any) -> tuple[str, list[Any]]:
    """A job of two nodes, with two workers each, and the launchers of these."""
    flags = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "two"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{ports.free_port()}", "--redirects", "1"]
    jobs = [start_rallyrun([*flags, "--log-dir", f"logs{number}", script(WAITER), orders]) for number in range(2)]
    name, _ = [the_job(job) for job in jobs]
    return name, jobs


def said(lines: Sequence[Any]) -> set[tuple[int, str]]:
    return {(line.rank, line.text) for line in lines}


def test_two_nodes_that_log_into_their_own_folders(two_nodes: tuple[str, list[Any]], orders: Path, wait_until: Any) -> None:
    name, jobs = two_nodes
    wait_until(lambda: said(list(inspect.logs(name))) == {(rank, f"hello from {rank}") for rank in range(4)})
    (orders / "finish").touch()
    assert [job.wait() for job in jobs] == [0, 0]


def test_a_node_elsewhere_sends_its_logs(
    two_nodes: tuple[str, list[Any]], orders: Path, wait_until: Any, monkeypatch: pytest.MonkeyPatch, private_tmpdir: Path
) -> None:
    """The folder of one node cannot be read here: what is in it comes all the same, to the last line; and nothing is kept."""
    name, jobs = two_nodes
    monkeypatch.setattr(log_reading, "_is_readable", lambda folder: "logs1" not in folder)
    monkeypatch.setattr(log_reading, "ASK_AGAIN_S", 0.0)  # on a busy machine a node may be too late with its answer
    monkeypatch.setattr(log_relay, "ANSWER_S", 60.0)
    wait_until(lambda: said(list(inspect.logs(name))) == {(rank, f"hello from {rank}") for rank in range(4)})
    wait_until(lambda: {line.rank for line in inspect.logs(name, ranks=range(1, 4), tail=1)} == {1, 2, 3})
    lines = []
    for line in inspect.logs(name, follow=True):
        lines.append(line)
        if len(lines) == 4:
            (orders / "finish").touch()
    assert len(lines) == 8
    assert said(lines) == {(rank, f"{word} from {rank}") for rank in range(4) for word in ("hello", "bye")}
    assert [job.wait() for job in jobs] == [0, 0]
    assert list(private_tmpdir.glob("rallypoint_logs_*")) == []
