"""``rallypoint explain``: the stories that it tells of runs that went well, badly, or were never told to their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.story.agent_log import BEGIN_MS, AgentLog, clean_run, long_story

from rallypoint.cli.explain import explain_main
from rallypoint.story import event_logs, phases

WIDTH = 100


class Explain:
    """The command, in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def text(self, *args: object) -> str:
        assert explain_main([str(arg) for arg in args]) == 0
        return self.capsys.readouterr().out

    def lines(self, *args: object) -> list[str]:
        """Without the spaces of the layout."""
        return [" ".join(line.split()) for line in self.text(*args).splitlines()]

    def document(self, *args: object) -> Any:
        return json.loads(self.text(*args, "--json"))

    def refusal(self, *args: object) -> str:
        assert explain_main([str(arg) for arg in args]) == 2
        captured = self.capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("rallypoint explain: error: ")
        assert captured.err.count("\n") == 1
        return captured.err.split("error: ", 1)[1].strip()


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str]) -> Explain:
    return Explain(capsys)


def timeline(document: Any) -> list[tuple[str, list[str], str]]:
    return [(entry["kind"], entry["nodes"], entry["text"]) for entry in document["timeline"]]


def assert_adds_up(document: Any) -> None:
    for account in (*document["nodes"], document["total"]):
        assert sum(account["seconds"].values()) == pytest.approx(account["wall_s"], rel=0.01)
        assert account["untold_s"] == 0
        assert account["goodput"] == pytest.approx(account["seconds"]["running"] / account["wall_s"], abs=1e-5)


def test_a_run_without_trouble_is_told_in_two_lines(explain: Explain, tmp_path: Path) -> None:
    folder = clean_run().write(tmp_path / "job_1")
    assert explain.lines(folder) == [
        "run job succeeded: all workers succeeded",
        "from 2027-01-15 08:00:00 UTC for 10.2 s",
        "1 agent: alpha",
        "",
        "+0.210s alpha generation 1: 1 node, 2 workers, running after 0.21 s",
        "+10.210s alpha succeeded: all workers succeeded",
        "",
        "seconds starting waiting stopping running lost wall goodput",
        "alpha 0.11 0.10 0.00 10.00 0.00 10.21 97.9%",
        "all 0.11 0.10 0.00 10.00 0.00 10.21 97.9%",
        "each row adds up to its wall time; goodput is running / wall",
    ]


def test_failures_a_lost_node_and_a_scale_up(explain: Explain, tmp_path: Path) -> None:
    """The whole story in order, each thing once, however many nodes tell of it; and all the time is accounted for."""
    for number, log in enumerate(long_story()):
        log.write(tmp_path / f"job_{number}")
    document = explain.document(tmp_path)
    two, three = ["alpha", "beta"], ["alpha", "beta", "gamma[10]"]
    assert timeline(document) == [
        ("generation", ["alpha", "gamma[9]", "beta"], "generation 1: 3 nodes, 6 workers, running after 1.00 s (starting 0.70 s)"),
        ("failed", ["beta"], "rank 2 (local rank 0, pid 102) failed with exit code 1: ValueError: bad batch"),
        ("stopped", ["beta"], "the workers of all nodes are stopped; 5.10 s of work lost"),
        ("stopped", ["alpha", "gamma[9]"], "restart 1 of 3; 5.15 s of work lost"),
        ("generation", ["alpha", "gamma[9]", "beta"],
         "generation 2: 3 nodes, 6 workers, running again after 0.85 s (waiting 0.65 s), restarts spent: 1 of 3"),
        ("silent", ["gamma[9]"], "last event (agent killed, or still running)"),
        ("stopped", two, "node 2 (gamma, ranks 4-5) was lost: not heard of in time; 19.0 s of work lost"),
        ("generation", two,
         "generation 3: scaled down from 3 to 2 nodes, 4 workers, running again after 1.00 s (waiting 0.80 s), "
         "restarts spent: 1 of 3"),
        ("started", ["gamma[10]"], "an agent of 2 workers starts here, pid 10"),
        ("stopped", two, "1 node waiting to join; restarting all workers in the larger world; 1.00 s of work lost"),
        ("generation", three,
         "generation 4: scaled up from 2 to 3 nodes, 6 workers, running again after 1.00 s (waiting 0.80 s), "
         "restarts spent: 1 of 3"),
        ("failed", ["alpha"], "rank 0 (local rank 0, pid 100) was ended by SIGKILL"),
        ("stopped", three, "restart 2 of 3, after 1 s; 8.00 s of work lost"),
        ("generation", three,
         "generation 5: 3 nodes, 6 workers, running again after 2.00 s (waiting 1.80 s), restarts spent: 2 of 3"),
        ("ended", three, "succeeded: all workers succeeded"),
    ]  # fmt: skip
    times = [entry["since_s"] for entry in document["timeline"]]
    assert times == sorted(times)
    assert_adds_up(document)
    assert document["succeeded"] is True
    assert [node["has_ended"] for node in document["nodes"]] == [True, False, True, True]
    assert document["nodes"][0]["seconds"]["lost"] == pytest.approx(5.15 + 19.0 + 1.0 + 8.0)


def test_text_fits_a_terminal(explain: Explain, tmp_path: Path) -> None:
    for number, log in enumerate(long_story()):
        log.write(tmp_path / f"job_{number}")
    text = explain.text(tmp_path)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "log: /logs/job_b/attempt_0/0/stderr.log\n" in text
    assert "gamma[9] *" in text
    assert "\N{NO-BREAK SPACE}" not in text


def test_the_story_in_the_documentation(explain: Explain, tmp_path: Path) -> None:
    for number, log in enumerate(long_story()):
        log.write(tmp_path / f"job_{number}")
    page = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    assert f"```text\n{explain.text(tmp_path)}```\n" in page


def test_paths_of_several_nodes_make_one_story(explain: Explain, tmp_path: Path) -> None:
    """A folder, a file and a log folder may be mixed, and named twice."""
    alpha, beta, gamma, successor = (log.write(tmp_path / str(n) / f"job_{n}") for n, log in enumerate(long_story()))
    document = explain.document(alpha, beta / "events.jsonl", gamma.parent, successor, alpha)
    assert [node["node"] for node in document["nodes"]] == ["alpha", "gamma[9]", "beta", "gamma[10]"]
    assert document["notes"] == []


def test_a_hang_names_the_rank_and_the_stacks(explain: Explain, tmp_path: Path) -> None:
    log = AgentLog()
    log.run(1.0, 1)
    log.tell("worker.hung", 40.0, generation=1, rank=1, local_rank=1, pid=101, phase="running", still_s=30.5, step=12, message="",
             stacks="/logs/job/stacks")  # fmt: skip
    log.tell("timer.expired", 41.0, pid=101, scope="forward", message="10 s are over")
    log.stop(41.0, "rank 1 (pid 101) hung; restart 1 of 3", restarts=1, delay_s=2.0)
    log.run(45.0, 2, restarts=1)
    log.end(50.0)
    assert "stacks: /logs/job/stacks" in explain.lines(log.write(tmp_path))
    assert timeline(explain.document(tmp_path))[1:4] == [
        ("hung", ["alpha"], "rank 1 (local rank 1, pid 101) hung: no progress for 30.5 s while running, last step 12"),
        ("expired", ["alpha"], "a timer 'forward' of pid 101 expired: 10 s are over"),
        ("stopped", ["alpha"], "rank 1 (pid 101) hung; restart 1 of 3, after 2.00 s; 40.0 s of work lost"),
    ]


def test_a_rank_that_is_slow_is_told_once_however_many_nodes_tell_of_it(explain: Explain, tmp_path: Path) -> None:
    said = {"rank": 3, "message": "it takes 2.0 times as long for a step as the median (0.2 s, not 0.1 s)"}
    for number, name in enumerate(("alpha", "beta")):
        log = AgentLog(name)
        log.run(0.2, 1, nodes=2, group_rank=number)
        log.tell("worker.slow", 9.0 + number, generation=1, **said, node="beta")
        log.end(20.0)
        log.write(tmp_path / f"job_{number}")
    entries = [one for one in timeline(explain.document(tmp_path)) if one[0] == "slow"]
    assert entries == [("slow", ["alpha", "beta"], f"rank 3 (node beta) is slow: {said['message']}")]


def test_an_agent_that_was_killed(explain: Explain, tmp_path: Path) -> None:
    """What kill -9 leaves: no end, and half a line."""
    log = AgentLog()
    log.run(1.0, 1)
    log.tell("worker.failed", 5.0, rank=0, local_rank=0, pid=100, exitcode=3, message="")
    folder = log.write(tmp_path)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"name": "rallypoint.phase", "source": "AGE')
    lines = explain.lines(folder)
    assert lines[0] == "run job has no end: killed or still running"
    assert "+5.000s alpha last event (agent killed, or still running)" in lines
    assert "alpha * 0.90 0.10 0.00 4.00 0.00 5.00 80.0%" in lines
    assert "* killed or still running: counted up to the last event" in lines
    document = explain.document(folder)
    assert document["notes"] == [f"{folder}/events.jsonl: the last line was cut short, as an agent that is killed leaves it"]
    assert_adds_up(document)


def test_a_signal(explain: Explain, tmp_path: Path) -> None:
    log = AgentLog()
    log.run(1.0, 1)
    log.end(4.0, succeeded=False, why="SIGTERM was received")
    lines = explain.lines(log.write(tmp_path))
    assert lines[0] == "run job did not succeed: SIGTERM was received"
    assert "+4.000s alpha did not succeed: SIGTERM was received; 3.00 s of work lost" in lines
    assert len([line for line in lines if "SIGTERM" in line]) == 2


def test_a_stop_that_takes_long_is_told_before_the_end(explain: Explain, tmp_path: Path) -> None:
    log = AgentLog()
    log.run(1.0, 1)
    log.end(34.0, succeeded=False, why="SIGTERM was received", stopping_s=30.0)
    lines = explain.lines(log.write(tmp_path))
    assert "+4.000s alpha SIGTERM was received; 3.00 s of work lost" in lines
    assert "+34.000s alpha did not succeed: SIGTERM was received" in lines


def test_nodes_that_did_not_meet(explain: Explain, tmp_path: Path) -> None:
    log = AgentLog()
    log.phase(0.1, phases.WAITING, "the run begins")
    log.end(60.1, succeeded=False, why="1 of 2 nodes came within 60 s")
    document = explain.document(log.write(tmp_path))
    assert timeline(document) == [
        ("started", ["alpha"], "an agent of 2 workers starts here, pid 7"),
        ("ended", ["alpha"], "did not succeed: 1 of 2 nodes came within 60 s"),
    ]
    assert document["nodes"][0]["seconds"]["waiting"] == pytest.approx(60.0)
    assert document["nodes"][0]["goodput"] == 0


def test_a_node_that_waits_for_the_others_says_so(explain: Explain, tmp_path: Path) -> None:
    alpha, beta = AgentLog("alpha"), AgentLog("beta")
    for rank, log in enumerate((alpha, beta)):
        log.run(1.0, 1, nodes=2, group_rank=rank)
    alpha.phase(5.0, phases.WAITING, "all workers of this node succeeded")
    for log in (alpha, beta):
        log.end(9.0)
    document = explain.document(alpha.write(tmp_path / "a"), beta.write(tmp_path / "b"))
    assert timeline(document)[1:] == [
        ("finished", ["alpha"], "all workers of this node succeeded"),
        ("ended", ["alpha", "beta"], "succeeded: all workers succeeded"),
    ]


def test_events_of_other_kinds_are_shown_on_demand(explain: Explain, tmp_path: Path) -> None:
    log = clean_run()
    log.note("torchelastic.worker.status.SUCCEEDED", 10.3, global_rank=0)
    folder = log.write(tmp_path)
    assert "- 1 event of other kinds not shown; --all shows them" in explain.lines(folder)
    assert "+10.300s alpha torchelastic.worker.status.SUCCEEDED {'global_rank': 0}" in explain.lines(folder, "--all")


def test_timings_of_each_regroup_are_shown_on_demand(explain: Explain, tmp_path: Path) -> None:
    log = AgentLog()
    log.run(1.0, 1)
    log.phase(5.0, phases.STOPPING, "a node joined")
    log.phase(5.5, phases.WAITING, "the workers of the last attempt are gone")
    log.phase(5.75, phases.STARTING, "this is node 0 of 1")
    log.phase(6.0, phases.RUNNING, "all workers were started")
    log.end(9.0)
    folder = log.write(tmp_path)
    lines = explain.lines(folder, "--timings")
    assert "milliseconds at noticing stopping waiting starting total" in lines
    assert "alpha +5.000s 0.0 500.0 250.0 250.0 1000.0" in lines
    assert not any("noticing" in line for line in explain.lines(folder))
    (regroup,) = explain.document(folder)["nodes"][0]["regroups"]
    assert (regroup["why"], regroup["seconds"]["stopping"]) == ("a node joined", pytest.approx(0.5))


def test_without_a_regroup_timings_say_so(explain: Explain, tmp_path: Path) -> None:
    assert "no regroup: the workers were started once" in explain.lines(clean_run().write(tmp_path), "--timings")


def test_a_newer_schema_is_refused(explain: Explain, tmp_path: Path) -> None:
    folder = clean_run().write(tmp_path)
    file = folder / "events.jsonl"
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 2').replace('"version": "1.0"', '"version": "9.0"'))
    refusal = explain.refusal(folder)
    assert refusal == f"{file} was written by rallypoint 9.0, in schema 2; this version reads schemas up to 1"


def test_unreadable_lines_are_counted(explain: Explain, tmp_path: Path) -> None:
    folder = clean_run().write(tmp_path)
    file = folder / "events.jsonl"
    bad = [b"\xff\xfe", b"no json", b"[" * 100_000, b'{"name": 3}', b"9" * 10_000, b'{"name": "x", "timestamp": 1e400}']
    file.write_bytes(b"\n".join([*bad, b'"' + b"x" * (event_logs.LINE_MAX + 5) + b'"', b"", file.read_bytes()]))
    document = explain.document(folder)
    assert document["notes"] == [f"{file}: 7 lines could not be read"]
    assert document["succeeded"] is True


def test_what_a_worker_wrote_cannot_command_the_terminal(explain: Explain, tmp_path: Path) -> None:
    log = AgentLog(hostname="al\x1b[31mpha\n", run_id="job\x07")
    log.run(1.0, 1)
    log.tell("worker.failed", 2.0, rank=0, pid=5, exitcode=1, message="\x1b[2J\nboom", log_file="/a\x1b]0;x\x07")
    log.note("plugin\x1b[0m", 3.0, text="\x9b31m")
    text = explain.text(log.write(tmp_path), "--all")
    assert all(line.isprintable() for line in text.splitlines())
    assert "boom" in text


def test_only_so_many_events_are_read(explain: Explain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_logs, "EVENTS_MAX", 4)
    folder = clean_run().write(tmp_path)
    assert explain.document(folder)["notes"] == [f"{folder}/events.jsonl: only the first 4 events of the file are told"]


def test_the_newest_run_of_a_log_folder_is_told(explain: Explain, tmp_path: Path) -> None:
    """Run ids are used again: an earlier run of the same id is another run, and is said to be left out."""
    clean_run(run_id="none", begin_ms=BEGIN_MS - 60_000).write(tmp_path / "none_0")
    clean_run(run_id="other", begin_ms=BEGIN_MS - 10).write(tmp_path / "other_1")
    clean_run(run_id="none", hostname="beta").write(tmp_path / "none_2")
    clean_run(run_id="none", hostname="alpha", begin_ms=BEGIN_MS + 5000).write(tmp_path / "none_3")
    (tmp_path / "stray").mkdir()
    document = explain.document(tmp_path)
    assert [node["node"] for node in document["nodes"]] == ["beta", "alpha"]
    left_out = f"{tmp_path}/none_0/events.jsonl, {tmp_path}/other_1/events.jsonl"
    assert document["notes"][-1] == f"left out, as they are of other runs: {left_out}"


def test_clocks_that_disagree_are_told_of(explain: Explain, tmp_path: Path) -> None:
    logs = [clean_run(hostname="alpha"), clean_run(hostname="beta", begin_ms=BEGIN_MS + 4000)]
    folders = [log.write(tmp_path / log.lines[0]["metadata"]["hostname"]) for log in logs]
    [note] = explain.document(*folders)["notes"]
    assert note.startswith("the nodes tell of generation 1 up to 4.0 s apart: if their clocks disagree")


def test_f12_each_launch_of_one_process_is_a_run(explain: Explain, tmp_path: Path) -> None:
    """F12"""
    folder = clean_run().write(tmp_path)
    with (folder / "events.jsonl").open("a") as file:
        for number in (1, 2):
            file.write(clean_run(begin_ms=BEGIN_MS + number * 60_000).text())
    document = explain.document(folder)
    starts = [one["begin_ms"] - BEGIN_MS for one in (*document["earlier"], document)]
    assert starts == [0, 60_000, 120_000]
    assert [one["nodes"][0]["node"] for one in (*document["earlier"], document)] == ["alpha"] * 3
    assert explain.text(folder).count("run job succeeded") == 3


def test_totals_that_contradict_the_phases_are_noticed(explain: Explain, tmp_path: Path) -> None:
    log = clean_run()
    log.lines[-1]["metadata"]["seconds"] = {**log.ledger.seconds, phases.RUNNING: 2.0}
    lines = explain.lines(log.write(tmp_path))
    assert "alpha: 8.00 s missing from the wall time" in lines
    assert "- alpha: its totals and its changes of phase are up to 8.000 s apart; the totals are shown" in lines


@pytest.mark.parametrize(
    ("args", "refusal"),
    [
        (["--follow", "--json"], "--follow and --json exclude each other: a document is made when all is known"),
        (["--jsn", "x"], "unknown flag --jsn; did you mean --json?"),
        (["missing"], "missing cannot be read: No such file or directory"),
        (["empty"], "there is no events.jsonl in empty, nor in a folder in it; name the log folder of a run"),
        (["blank"], "there are no events of a run in blank/events.jsonl"),
        (["garbage.txt"], "there are no events of a run in garbage.txt, but 2 lines that could not be read"),
        (["pipe"], "pipe is not a regular file"),
        (["one", "two"], "these are different runs: one, two; name the folders of one"),
        (["one", "--", "--json"], "--json cannot be read: No such file or directory"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    explain: Explain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], refusal: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "events.jsonl").write_text("\n")
    (tmp_path / "garbage.txt").write_text("not\nevents")
    os.mkfifo(tmp_path / "pipe")
    clean_run(run_id="one").write(tmp_path / "one")
    clean_run(run_id="two").write(tmp_path / "two")
    assert explain.refusal(*args) == refusal


def test_help(explain: Explain) -> None:
    assert explain.text("--help").startswith("usage: rallypoint explain [PATH ...]")


def test_a_console_that_knows_ascii_only(tmp_path: Path) -> None:
    folder = clean_run(hostname="zürich").write(tmp_path)
    code = "import sys; from rallypoint.cli.explain import explain_main; sys.exit(explain_main(sys.argv[1:]))"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", code, folder], env=env, capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "z\\xfcrich" in ended.stdout
