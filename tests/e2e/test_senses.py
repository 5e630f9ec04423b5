"""What an agent tells of itself while it runs: over HTTP, in its event file, and in the story made of it (P10, P24, P40, P44)."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests import ports

ANSWER_S = 5.0  # no answer takes longer, whatever the agent is doing
WORKERS = 2


def ask(port: int, path: str) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)) as client:
        client.request("GET", path)
        answer = client.getresponse()
        return answer.status, answer.read().decode()


def ask_json(port: int, path: str) -> tuple[int, dict[str, Any]]:
    status, text = ask(port, path)
    return status, json.loads(text)


class Probe:
    """Asks /readyz and /healthz again and again until the agent ends, as a kubelet does."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answers: list[tuple[str, int, dict[str, Any]]] = []
        self._thread = threading.Thread(target=self._run)
        self._ended = threading.Event()

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(ConnectionError):  # the agent has ended
            while not self._ended.wait(0.005):
                for path in ("/readyz", "/healthz"):
                    self.answers.append((path, *ask_json(self.port, path)))

    def of(self, path: str) -> list[tuple[int, dict[str, Any]]]:
        return [(status, told) for asked, status, told in self.answers if asked == path]


def events(logs: Path, name: str) -> list[dict[str, Any]]:
    """Those of the only run in this folder, as far as their lines are whole."""
    files = list(logs.glob("*_*/events.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [event["metadata"] for event in map(json.loads, lines) if event["name"] == f"rallypoint.{name}"]


def explain(logs: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "rallypoint", "explain", "--json", str(logs)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return dict(json.loads(ended.stdout))


def parsed_metrics(port: int) -> dict[tuple[str, str], float]:
    """By name and phase, as Prometheus reads them."""
    parser = pytest.importorskip("prometheus_client.parser")
    status, text = ask(port, "/metrics")
    assert status == 200
    families = parser.text_string_to_metric_families(text)
    return {(one.name, one.labels.get("phase", "")): one.value for family in families for one in family.samples}


# The first worker takes its time to stop, the second fails when it is told to.
ORDERED = """
import os, signal, sys, time
rank, orders = os.environ["RANK"], sys.argv[1]
def stop(*_):
    while not os.path.exists(f"{orders}/stop"):
        time.sleep(0.01)
    os._exit(0)
if rank == "0":
    signal.signal(signal.SIGTERM, stop)
os.write(1, f"ready {os.getpid()}\\n".encode())
while not os.path.exists(f"{orders}/finish"):
    if rank == "1" and os.path.exists(f"{orders}/fail"):
        os.unlink(f"{orders}/fail")
        raise ValueError("bad batch")
    time.sleep(0.01)
"""


def test_p44_health_metrics_events_and_story_of_a_run_agree(
    start_rallyrun: Any, script: Any, numbers: Any, tmp_path: Path, orders: Path
) -> None:
    """Not ready while it waits for other nodes, and while it stops workers; alive all the time; and all tell the same numbers."""
    logs, health, meeting = tmp_path / "logs", *ports.free_ports(2)
    job = start_rallyrun([
        "--nnodes", "1:2", "--nproc-per-node", str(WORKERS), "--max-restarts", "3", "--restart-backoff", "0",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{meeting}", "--rdzv-conf", "last_call_timeout=0.5",
        "--health-port", str(health), "--log-dir", logs, script(ORDERED), orders,
    ])  # fmt: skip
    job.wait_for(lambda: ports.bound_at(health))
    with Probe(health) as probe:
        running: list[dict[str, Any]] = []
        for restarts in range(2):
            job.wait_for(lambda restarts=restarts: len(events(logs, "generation")) == restarts + 1)
            job.wait_for(lambda: ask(health, "/readyz")[0] == 200)
            running.append(ask_json(health, "/readyz")[1])
            if restarts == 0:
                job.wait_for(lambda: len(numbers("ready", job.stdout)) == WORKERS)
                (orders / "fail").touch()
                job.wait_for(lambda: ask_json(health, "/readyz")[1]["phase"] == "stopping")
                stopping = parsed_metrics(health)
                (orders / "stop").touch()
        last, story_so_far = parsed_metrics(health), explain(logs)
        (orders / "finish").touch()
        assert job.wait() == 0, job.stderr

    ready = [status for status, _ in itertools.groupby(status for status, _ in probe.of("/readyz"))]
    assert ready in ([503, 200, 503, 200], [503, 200, 503, 200, 503])  # the last while it ends
    assert {(told["phase"] == "running", status) for status, told in probe.of("/readyz")} == {(True, 200), (False, 503)}
    assert {told["phase"] for _, told in probe.of("/readyz")} >= {"waiting", "running", "stopping"}
    assert {status for status, _ in probe.of("/healthz")} == {200}

    assert len(events(logs, "generation")) == 2
    for told, formed in zip(running, events(logs, "generation"), strict=True):
        same = ["generation", "group_rank", "group_world_size", "world_size", "ranks", "pids", "restarts"]
        assert {key: told[key] for key in same} == {key: formed[key] for key in same}
    assert [told["restarts"] for told in running] == [0, 1]
    assert [told["failed_workers"] for told in running] == [0, 1]

    assert stopping["rallypoint_ready", ""] == 0
    assert stopping["rallypoint_alive", ""] == 1
    assert stopping["rallypoint_phase", "stopping"] == 1
    story = explain(logs)
    assert story["succeeded"] is True
    failed = [entry for entry in story["timeline"] if entry["kind"] == "failed"]
    assert last["rallypoint_worker_failures_total", ""] == len(failed) == len(events(logs, "worker.failed")) == 1
    assert last["rallypoint_restarts_total", ""] == len(events(logs, "restart")) == 1
    assert last["rallypoint_generation", ""] == len([one for one in story["timeline"] if one["kind"] == "generation"]) == 2
    assert last["rallypoint_workers", ""] == WORKERS
    [account], [so_far] = story["nodes"], story_so_far["nodes"]
    for phase in ("starting", "waiting", "stopping", "lost"):  # all but the one that it was in
        assert last["rallypoint_phase_seconds", phase] == pytest.approx(so_far["seconds"][phase], abs=0.001), phase
    assert account["seconds"]["lost"] > 0
    assert account["seconds"] == pytest.approx(events(logs, "run.ended")[0]["seconds"], abs=0.001)


@pytest.mark.root
def test_p10_health_is_told_while_a_worker_cannot_be_killed(
    start_rallyrun: Any, script: Any, numbers: Any, cgroup: Any, wait_until: Any, alive: Any, orders: Path, tmp_path: Path
) -> None:
    """The endpoint answers all the while, and says what the agent is doing and with which processes; it ends with code 4."""
    folder, port, logs = cgroup("freezer"), ports.free_port(), tmp_path / "logs"
    job = start_rallyrun(
        ["--standalone", "--nproc-per-node", str(WORKERS), "--shutdown-timeout", "1", "--max-restarts", "3",
         "--health-port", str(port), "--log-dir", logs, script(ORDERED), orders],
        env={"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "1"},
    )  # fmt: skip
    job.wait_for(lambda: len(numbers("ready", job.stdout)) == WORKERS)
    frozen = ask_json(port, "/readyz")[1]["pids"][0]
    (folder / "cgroup.procs").write_text(str(frozen))
    (folder / "freezer.state").write_text("FROZEN")
    wait_until(lambda: (folder / "freezer.state").read_text().strip() == "FROZEN")
    with Probe(port) as probe:
        (orders / "fail").touch()
        job.wait_for(lambda: ask_json(port, "/readyz")[1]["phase"] == "stopping")
        assert job.wait() == 4
    stopping = [(status, told) for status, told in probe.of("/healthz") if told["phase"] == "stopping"]
    assert {status for status, _ in stopping} == {200}
    assert max(told["phase_s"] for _, told in stopping) >= 1.5  # of the two seconds that it took
    assert all(frozen in told["pids"] and "rank 1" in told["why"] for _, told in stopping)
    assert {status for status, told in probe.of("/readyz") if told["phase"] == "stopping"} == {503}
    assert re.search(rf"did not end .*\b{frozen}\b", job.stderr)
    [ended] = events(logs, "run.ended")
    assert ended["succeeded"] is False
    assert str(frozen) in ended["why"]
    assert len(events(logs, "generation")) == 1
    (folder / "freezer.state").write_text("THAWED")
    wait_until(lambda: not alive(frozen))


def test_p24_the_time_outs_in_force_are_on_record(rallyrun: Any, script: Any, tmp_path: Path) -> None:
    """By flag, environment or file, each as it holds and with its source."""
    conf = tmp_path / "conf"
    conf.write_text("last_call_timeout = 0.1  # seconds\njoin_timeout = 77\n")
    ended = rallyrun(
        ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{ports.free_port()}",
         "--rdzv-conf", f"conf_file={conf},keep_alive_interval=2", "--shutdown-timeout", "7",
         "--hang-timeout", "55,checkpoint=600", "--log-dir", tmp_path / "logs", script("")],
        env={
            "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "9", "PET_EXIT_BARRIER_TIMEOUT": "66", "PET_MONITOR_INTERVAL": "0.25",
            "RALLYPOINT_CLOSE_TIMEOUT": "21", "RALLYPOINT_JOIN_TIMEOUT": "78",
        },
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    [started] = events(tmp_path / "logs", "run.started")
    settings = started["settings"]
    assert settings["shutdown_timeout"] == 7
    assert settings["uninterruptible_timeout"] == 9
    assert settings["exit_barrier_timeout"] == 66
    assert settings["monitor_interval"] == 0.25
    assert settings["hang_timeout"] == "55,checkpoint=600"
    in_force = {"keep_alive_interval": 2, "close_timeout": 21, "join_timeout": 78, "last_call_timeout": 0.1, "store_timeout": 30}
    for name, seconds in in_force.items():
        assert f"{name} {seconds:g} s" in settings["rendezvous"]
        assert (f"{name} {seconds:g} s" in ended.stderr) == (name != "store_timeout"), "told are those that were changed"
    assert str(conf) in settings["rendezvous"]
    assert "RALLYPOINT_CLOSE_TIMEOUT" in settings["rendezvous"]


AFFINITY = """
import os
os.write(1, f"{os.environ['RANK']}: {sorted(os.sched_getaffinity(0))}\\n".encode())
"""


def cpu_numbers(text: str) -> list[int]:
    """Those of a list as the kernel writes it, such as 0-2,5."""
    ends = [part.split("-") for part in text.split(",")]
    return [cpu for one in ends for cpu in range(int(one[0]), int(one[-1]) + 1)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("mode", ["node", "socket", "exclusive", "core-complex"])
def test_p40_workers_are_where_the_dry_run_says(rallyrun: Any, script: Any, mode: str) -> None:
    job = ["--standalone", "--nproc-per-node", "2", "--numa-binding", mode, script(AFFINITY)]
    planned, ended = rallyrun(["--dry-run", *job]), rallyrun(job)
    assert (planned.returncode, ended.returncode) == (0, 0), planned.stderr + ended.stderr
    plan = [cpu_numbers(cpus) for cpus in re.findall(r"^  CPUs +([0-9,-]+):", planned.stdout, re.MULTILINE)]
    found = {int(rank): json.loads(cpus) for rank, cpus in re.findall(r"(\d+): (\[.*\])", ended.stdout)}
    assert len(plan) == 2
    assert found == dict(enumerate(plan))


WITH_TIMERS = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
TELLTALE = "import os; open(f'started.{os.getpid()}', 'w').close()"


@pytest.mark.parametrize(
    ("flags", "env", "culprit"),
    [
        (["--health-port", "{busy}"], {}, "--health-port"),
        ([], {"PET_HEALTH_PORT": "{busy}"}, "--health-port"),
        ([], {"TORCHELASTIC_HEALTH_CHECK_PORT": "eighty"}, "TORCHELASTIC_HEALTH_CHECK_PORT"),
        (["--health-port", "80000"], {}, "--health-port"),
        (["--health-port", "0", "--health-addr", "192.0.2.1"], {}, "--health-addr"),
        ([], {**WITH_TIMERS, "TORCHELASTIC_TIMER_FILE": "{file}"}, "TORCHELASTIC_TIMER_FILE"),
        ([], {**WITH_TIMERS, "TORCHELASTIC_TIMER_FILE": "/no/such/folder/pipe"}, "TORCHELASTIC_TIMER_FILE"),
        (["--event-log-handler", "nowhere"], {}, "event_log_handler: there is no event sink 'nowhere'"),
        ([], {"PET_EVENT_LOG_HANDLER": "nowhere"}, "event_log_handler: there is no event sink 'nowhere'"),
        (["--hang-timeout", "soon"], {}, "--hang-timeout"),
        (["--hang-timeout", "-1"], {}, "--hang-timeout"),
        (["--hang-timeout", "60,checkpoint"], {}, "--hang-timeout"),
        ([], {"PET_HANG_TIMEOUT": "nan"}, "PET_HANG_TIMEOUT"),
    ],
    ids=str,
)
def test_p37_bad_input_is_told_in_one_line_before_anything_starts(
    rallyrun: Any, script: Any, tmp_path: Path, flags: list[str], env: dict[str, str], culprit: str
) -> None:
    worker, regular = script(TELLTALE), tmp_path / "regular"
    regular.write_text("precious")
    before = set(tmp_path.rglob("*"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = {"busy": other.getsockname()[1], "file": regular}
        filled = [flag.format(**words) for flag in flags]
        ended = rallyrun(
            ["--standalone", *filled, "--log-dir", "logs", worker],
            env={name: value.format(**words) for name, value in env.items()},
        )
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert ended.stderr.startswith("rallyrun: error: ")
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert culprit in ended.stderr
    assert set(tmp_path.rglob("*")) == before, "something was started, or a file was made"
    assert regular.read_text() == "precious"
