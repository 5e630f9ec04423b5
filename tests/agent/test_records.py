"""What an agent leaves on record: events and metrics under the names that dashboards for torchrun know."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint import events, metrics
from rallypoint.agent.local_agent import LocalElasticAgent
from rallypoint.agent.records import describe
from rallypoint.agent.workers import RunResult, Worker, WorkerSpec, WorkerState
from rallypoint.base import report
from rallypoint.events import Event, EventSource
from rallypoint.failures.process_failure import ProcessFailure
from rallypoint.output.log_specs import DefaultLogsSpecs
from rallypoint.rendezvous.one_node import LocalRendezvous

SINK = "test-sink"

METADATA = {
    "run_id", "global_rank", "group_rank", "worker_id", "role", "hostname", "state", "total_run_time", "rdzv_backend",
    "raw_error", "metadata", "agent_restarts", "duration_ms",
}  # fmt: skip


class Recorder(logging.Handler):
    """A sink that keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Event] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(Event.deserialize(record.getMessage()))

    @property
    def events(self) -> list[Event]:
        """Those that have torch's names."""
        return [event for event in self.all if event.name.startswith("torchelastic.")]


class Meter(metrics.MetricHandler):
    def __init__(self) -> None:
        self.values: list[tuple[str, float]] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        assert metric_data.group_name == "torchelastic"
        self.values.append((metric_data.name, metric_data.value))

    def of(self, role: str) -> dict[str, float]:
        """The last value of each metric of a role."""
        start = f"workers.{role}."
        return {name.removeprefix(start): value for name, value in self.values if name.startswith(start)}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    handler = Recorder()
    monkeypatch.setattr(events, "_sinks", {**events._sinks, SINK: lambda: handler})
    monkeypatch.setattr(events, "_handlers", {})
    monkeypatch.setattr(events, "_attached", {})
    yield handler
    logging.getLogger(f"torchelastic-events-{SINK}").removeHandler(handler)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    handler = Meter()
    monkeypatch.setattr(metrics, "_default_handler", handler)
    return handler


@pytest.fixture
def make_agent(tmp_path: Path, recorder: Recorder) -> Callable[..., LocalElasticAgent]:
    def make(script: str, workers: int = 1, **spec: Any) -> LocalElasticAgent:
        given = {"role": "trainer", "max_restarts": 0, "event_log_handler": SINK, **spec}
        one = WorkerSpec(
            local_world_size=workers, rdzv_handler=LocalRendezvous("job-7"), entrypoint="/bin/sh", args=("-c", script), **given
        )
        return LocalElasticAgent(one, DefaultLogsSpecs(str(tmp_path / "logs")))

    return make


MakeAgent = Callable[..., LocalElasticAgent]


# --- events ----------------------------------------------------------------------------------------------------------------


def test_the_events_of_a_run(make_agent: MakeAgent, recorder: Recorder) -> None:
    make_agent("exit 0", workers=2).run()
    assert [(event.name, event.source) for event in recorder.events] == [
        ("torchelastic.worker.status.RENDEZVOUS", EventSource.AGENT),
        ("torchelastic.worker.status.ASSIGN_WORKER_RANKS", EventSource.AGENT),
        *[("torchelastic.worker.status.START", EventSource.WORKER)] * 2,
        *[("torchelastic.worker.status.SUCCEEDED", EventSource.WORKER)] * 2,
    ]
    assert all(set(event.metadata) == METADATA for event in recorder.events)


def test_a_workers_event(make_agent: MakeAgent, recorder: Recorder) -> None:
    agent = make_agent("exit 0", workers=2, max_restarts=3)
    agent.run()
    event = recorder.events[-1]
    facts = dict(event.metadata)
    details = json.loads(str(facts.pop("metadata")))
    assert facts == {
        "run_id": "job-7",
        "global_rank": 1,
        "group_rank": 0,
        "worker_id": str(agent.get_worker_group().workers[1].id),
        "role": "trainer",
        "hostname": os.uname().nodename,
        "state": "SUCCEEDED",
        "total_run_time": 0,
        "rdzv_backend": "c10d",
        "raw_error": None,
        "agent_restarts": 0,
        "duration_ms": None,
    }
    assert details == {
        "group_world_size": 1,
        "entry_point": "sh",
        "local_rank": [1],
        "role_rank": [1],
        "role_world_size": [2],
        "exit_code": [None],
        "worker_pid": [None],
    }


def test_the_durations_of_rendezvous_and_rank_assignment(make_agent: MakeAgent, recorder: Recorder) -> None:
    make_agent("exit 0").run()
    meeting, ranks = recorder.events[:2]
    for event in (meeting, ranks):
        assert isinstance(event.metadata["duration_ms"], float)
        assert 0 <= event.metadata["duration_ms"] < 10_000
        assert event.metadata["worker_id"] is None
        assert event.metadata["global_rank"] is None


def test_who_failed_and_who_was_terminated(make_agent: MakeAgent, recorder: Recorder) -> None:
    make_agent('test "$RANK" = 1 && exit 3; exec sleep 60', workers=2).run()
    states = {event.metadata["global_rank"]: event for event in recorder.events if event.source == EventSource.WORKER}
    assert {rank: event.name for rank, event in states.items()} == {
        0: "torchelastic.worker.status.TERMINATED",
        1: "torchelastic.worker.status.FAILED",
    }
    assert states[0].metadata["raw_error"] is None
    assert "message" in json.loads(str(states[1].metadata["raw_error"]))


def test_the_error_file_goes_into_the_event(make_agent: MakeAgent, recorder: Recorder, tmp_path: Path) -> None:
    script = "from rallypoint import record\n@record\ndef main():\n    raise ValueError('no data')\nmain()"
    (tmp_path / "fail.py").write_text(script)
    make_agent(f"exec {sys.executable} {tmp_path}/fail.py").run()
    raw_error = json.loads(str(recorder.events[-1].metadata["raw_error"]))
    assert raw_error["message"]["message"] == "ValueError: no data"
    assert "py_callstack" in raw_error["message"]["extraInfo"]


def test_restarts_are_counted_in_the_events(make_agent: MakeAgent, recorder: Recorder) -> None:
    make_agent('test "$TORCHELASTIC_RESTART_COUNT" = 2', max_restarts=2).run()
    rounds = [event.metadata["agent_restarts"] for event in recorder.events if event.name.endswith("RENDEZVOUS")]
    assert rounds == [0, 1, 2]
    assert recorder.events[-1].metadata["agent_restarts"] == 2


def test_the_agents_own_two_events(make_agent: MakeAgent) -> None:
    agent = make_agent("exit 0")
    succeeded = agent.get_event_succeeded()
    assert (succeeded.name, succeeded.source) == ("torchelastic.worker.status.SUCCEEDED", EventSource.AGENT)
    assert (succeeded.metadata["state"], succeeded.metadata["raw_error"]) == ("SUCCEEDED", None)
    assert set(succeeded.metadata) == METADATA
    try:
        raise RuntimeError("the agent's own fault")
    except RuntimeError:
        failed = agent.get_event_failed()
    assert (failed.name, failed.source) == ("torchelastic.worker.status.FAILED", EventSource.AGENT)
    assert "RuntimeError: the agent's own fault" in str(failed.metadata["raw_error"])
    assert "Traceback" in str(failed.metadata["raw_error"])


def test_events_can_be_sent_as_json(make_agent: MakeAgent) -> None:
    event = make_agent("exit 0").get_event_succeeded()
    assert Event.deserialize(event.serialize()) == event


def test_a_duration_is_recorded_also_if_the_block_fails(make_agent: MakeAgent, recorder: Recorder) -> None:
    agent = make_agent("exit 0")
    with pytest.raises(ZeroDivisionError), agent.record_duration("MY_STATE"):
        _ = 1 // 0
    assert [event.name for event in recorder.events] == ["torchelastic.worker.status.MY_STATE"]


def lines_of(folder: Path) -> list[Event]:
    (file,) = folder.glob("*_*/events.jsonl")
    return [Event.deserialize(line) for line in file.read_text().splitlines()]


def test_the_event_file_tells_the_run_whatever_the_sink_is(make_agent: MakeAgent, tmp_path: Path) -> None:
    """P44"""
    make_agent("exit 0", event_log_handler="null").run()
    told = lines_of(tmp_path / "logs")
    assert [event.name for event in told if event.name.startswith("rallypoint.run")] == [
        "rallypoint.run.started",
        "rallypoint.run.ended",
    ]
    assert {"torchelastic.worker.status.RENDEZVOUS", "torchelastic.worker.status.SUCCEEDED"} <= {event.name for event in told}
    assert told == sorted(told, key=lambda event: event.timestamp)
    ended = told[-1].metadata
    assert ended["succeeded"]
    assert sum(ended["seconds"].values()) == pytest.approx(ended["wall_s"], abs=1e-4)  # type: ignore[union-attr]


def test_f27_a_sink_gets_all_that_the_file_gets(make_agent: MakeAgent, recorder: Recorder, tmp_path: Path) -> None:
    """F27: of a job that fails, each event once, with its time."""
    make_agent("exit 7", event_log_handler=SINK).run()
    told = lines_of(tmp_path / "logs")
    assert "rallypoint.worker.failed" in {event.name for event in told}
    sent = [event for event in recorder.all if not event.name.endswith(".START")]  # which the file has as a generation
    assert sent == told
    assert all(event.timestamp > 1_700_000_000_000 for event in sent)


def test_the_sink_named_file_gets_each_event_once(make_agent: MakeAgent, tmp_path: Path) -> None:
    """P44: and so does what others record there."""
    agent = make_agent("exit 0", event_log_handler="file")
    agent.run()
    events.record(Event("mine", EventSource.WORKER, metadata={"fact": 1}), "file")
    told = lines_of(tmp_path / "logs")
    assert [event.name for event in told].count("torchelastic.worker.status.SUCCEEDED") == 1
    assert told[-1].name == "mine"
    assert told[-1].metadata == {"fact": 1}


def test_a_file_that_cannot_be_written_is_told_once(make_agent: MakeAgent, tmp_path: Path, capsys: Any) -> None:
    told: list[str] = []
    report.set_sink(lambda level, text: told.append(text))
    agent = make_agent("exit 0", event_log_handler="null")
    agent._run_record.file.place(str(tmp_path / "nowhere" / "events.jsonl"))
    agent._run_record.file.place = lambda path, _: None  # type: ignore[method-assign]
    try:
        assert agent.run().state is WorkerState.SUCCEEDED
    finally:
        report.set_sink(None)
    assert len([text for text in told if "events are lost" in text and "No such file" in text]) == 1


def test_the_state_of_a_worker_that_is_not_in_the_result(make_agent: MakeAgent) -> None:
    agent = make_agent("exit 0")
    worker = Worker(local_rank=0, global_rank=5)
    assert agent._get_worker_state(worker, RunResult(WorkerState.FAILED)) == "TERMINATED"
    assert agent._get_worker_state(worker, RunResult(WorkerState.UNHEALTHY)) == "TERMINATED"
    with pytest.raises(ValueError, match="5"):
        agent._get_worker_state(worker, RunResult(WorkerState.SUCCEEDED, {0: None}))


# --- metrics ---------------------------------------------------------------------------------------------------------------

FLAGS = ("run_success_with_retries", "run_success_no_retries", "run_failed_with_retries", "run_failed_no_retries")


@pytest.mark.parametrize(
    ("script", "max_restarts", "flag", "flakiness", "left"),
    [
        ("exit 0", 3, "run_success_no_retries", 0, 3),
        ("exit 0", 0, "run_success_no_retries", 0, 0),
        ('test "$TORCHELASTIC_RESTART_COUNT" = 1', 3, "run_success_with_retries", 25, 2),
        ('test "$TORCHELASTIC_RESTART_COUNT" = 1', 1, "run_success_with_retries", 50, 0),
        ("exit 1", 0, "run_failed_no_retries", 100, 0),
        ("exit 1", 1, "run_failed_with_retries", 100, 0),
    ],
)
def test_the_metrics_of_a_run(
    script: str, max_restarts: int, flag: str, flakiness: int, left: int, make_agent: MakeAgent, meter: Meter
) -> None:
    make_agent(script, max_restarts=max_restarts).run()
    values = meter.of("trainer")
    assert values["run_total"] == 1
    assert {name: values[name] for name in FLAGS} == {name: int(name == flag) for name in FLAGS}
    assert values["flakiness"] == flakiness
    assert values["remaining_restarts"] == left
    assert values["failed" if flag.startswith("run_failed") else "succeeded"] == 1


def test_the_names_of_all_metrics_of_a_run(make_agent: MakeAgent, meter: Meter) -> None:
    make_agent("exit 0").run()
    names = set(meter.of("trainer")) - {"healthy"}
    assert names == {"run_total", *FLAGS, "flakiness", "remaining_restarts", "succeeded"}


def test_the_time_that_each_hook_takes_is_a_metric(make_agent: MakeAgent, meter: Meter) -> None:
    make_agent("exit 0").run()
    names = {name for name, _ in meter.values}
    hooks = [
        "SimpleElasticAgent._rendezvous", "SimpleElasticAgent._assign_worker_ranks", "SimpleElasticAgent._initialize_workers",
        "SimpleElasticAgent.run", "LocalElasticAgent._start_workers", "LocalElasticAgent._monitor_workers",
    ]  # fmt: skip
    assert {f"{hook}.duration.ms" for hook in hooks} <= names
    assert {f"{hook}.success" for hook in hooks} <= names


def test_metrics_carry_the_role_of_the_spec(make_agent: MakeAgent, meter: Meter) -> None:
    make_agent("exit 0", role="reader").run()
    assert meter.of("trainer") == {}
    assert meter.of("reader")["run_total"] == 1


ECHO = "RuntimeError: Connection closed by peer"


@pytest.mark.parametrize(
    ("messages", "has_other_nodes", "said"),
    [
        ({2: "ValueError: bad"}, True, "rank 2 (pid 102) failed: ValueError: bad"),
        ({2: ECHO, 3: "ValueError: bad"}, True, "rank 3 (pid 103) and 1 more failed: ValueError: bad"),
        ({2: ECHO, 3: ECHO}, True, f"ranks 2-3 failed the same way, probably because another did: {ECHO}"),
        ({2: ECHO}, True, f"rank 2 (pid 102) failed, probably because another did: {ECHO}"),
        ({2: ECHO, 3: "ValueError: bad"}, False, f"rank 2 (pid 102) and 1 more failed: {ECHO}"),
    ],
)
def test_no_victim_is_told_of_as_the_cause(messages: dict[int, str], has_other_nodes: bool, said: str) -> None:
    failures = {rank: ProcessFailure(rank, 100 + rank, 1, "none") for rank in messages}
    for rank, message in messages.items():
        failures[rank].message = message
    assert describe(RunResult(WorkerState.FAILED, failures=failures), has_other_nodes) == said
