"""The sink ``otel`` on a real job: a collector gets, over the wire, what the run's own file tells, with the same times."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

has_otel = subprocess.run([sys.executable, "-c", "import opentelemetry.exporter.otlp.proto.http"], capture_output=True)
needs_otel = pytest.mark.skipif(has_otel.returncode != 0, reason="opentelemetry is not installed")
MS = 1_000_000  # nanoseconds


class Collector(ThreadingHTTPServer):
    """Takes what an OTLP exporter sends by HTTP."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[tuple[str, bytes]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def env(self) -> dict[str, str]:
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "OTEL_BSP_SCHEDULE_DELAY": "100"}

    def resources(self) -> list[dict[str, Any]]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        requests = [ExportTraceServiceRequest.FromString(data) for path, data in self.got if path == "/v1/traces"]
        return [values(one.resource.attributes) for request in requests for one in request.resource_spans]

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        requests = [ExportTraceServiceRequest.FromString(data) for path, data in self.got if path == "/v1/traces"]
        spans = [
            span for request in requests for one in request.resource_spans for scope in one.scope_spans for span in scope.spans
        ]
        return list({span.span_id: span for span in spans}.values())  # an exporter may send again what was not answered in time

    def metrics(self) -> dict[tuple[str, str], float]:
        """The last value of each, by name and phase."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        requests = [ExportMetricsServiceRequest.FromString(data) for path, data in self.got if path == "/v1/metrics"]
        scopes = [scope for request in requests for one in request.resource_metrics for scope in one.scope_metrics]
        found = {}
        for metric in (metric for scope in scopes for metric in scope.metrics):
            for point in metric.sum.data_points or metric.gauge.data_points:
                value = point.as_int or point.as_double
                found[metric.name, str(values(point.attributes).get("rallypoint.phase", ""))] = value
        return found


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, gzip.decompress(data) if self.headers["Content-Encoding"] == "gzip" else data))
        self.server.may_answer.wait()
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.may_answer.set()
        server.shutdown()
        thread.join()


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def told(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("*_*/events.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


WORKER = """
import os, sys, time
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(7)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""
TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@needs_otel
def test_p44_a_collector_gets_the_run_as_the_file_tells_it(
    collector: Collector, start_rallyrun: Any, script: Any, tmp_path: Path
) -> None:
    """P44: Spans of the run, its generations and phases, in the trace of whoever started it, and metrics."""
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", tmp_path / "logs"]
    env = {**collector.env(), "TRACEPARENT": f"00-{TRACE}-{ABOVE}-01"}
    job = start_rallyrun([*flags, "--event-log-handler", "otel", script(WORKER), tmp_path / "finish"], env=env)
    job.wait_for(lambda: any(span.name == "rallypoint.generation" for span in collector.spans()))
    (tmp_path / "finish").touch()
    assert job.wait() == 0, job.stderr

    events = told(tmp_path / "logs")
    times = {name: [one["timestamp"] * MS for one in events if one["name"] == f"rallypoint.{name}"] for name in (
        "run.started", "phase", "generation", "run.ended",
    )}  # fmt: skip
    spans = collector.spans()
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    by_name = {name: [span for span in spans if span.name == f"rallypoint.{name}"] for name in ("run", "generation", "running")}
    (run,) = by_name["run"]
    assert run.parent_span_id.hex() == ABOVE
    assert run.end_time_unix_nano == times["run.ended"][0]
    assert run.start_time_unix_nano == pytest.approx(times["run.started"][0] - events[0]["metadata"]["t"] * 1e9, abs=MS)
    assert [span.start_time_unix_nano for span in by_name["generation"]] == times["generation"]
    assert {span.parent_span_id for span in by_name["generation"]} == {run.span_id}
    assert [span.parent_span_id for span in by_name["running"]] == [span.span_id for span in by_name["generation"]]
    phases = [span for span in spans if span.name.removeprefix("rallypoint.") in ("starting", "waiting", "running", "stopping")]
    assert sorted(span.end_time_unix_nano for span in phases) == sorted([*times["phase"], *times["run.ended"]])

    first, second = by_name["generation"]
    assert (first.status.code, second.status.code, run.status.code) == (2, 1, 1)
    assert "rank 1" in first.status.message
    names = [event.name for event in first.events]
    assert names == ["rallypoint.worker.failed", "rallypoint.regroup"]
    failed = next(one for one in events if one["name"] == "rallypoint.worker.failed")
    expected_ns = failed["timestamp"] * MS - failed["metadata"]["ago_s"] * 1e9
    assert first.events[0].time_unix_nano == pytest.approx(expected_ns, abs=MS)
    assert values(first.events[0].attributes)["rallypoint.exitcode"] == 7
    about = collector.resources()[0]
    assert (about["service.name"], about["rallypoint.run_id"]) == ("rallypoint", events[0]["metadata"]["run_id"])

    metrics = collector.metrics()
    assert metrics["rallypoint.worker.failures", ""] == 1
    assert metrics["rallypoint.restarts", ""] == 1
    assert metrics["rallypoint.workers", ""] == 2
    spent = events[-1]["metadata"]["seconds"]
    for phase in ("running", "lost", "waiting"):  # what is spent in the last phase is not told by an event of its own
        assert metrics.get(("rallypoint.phase.duration", phase), 0.0) <= spent[phase] + 1e-3


@needs_otel
def test_a_collector_that_never_answers_holds_up_nobody(
    start_rallyrun: Any, collector: Collector, script: Any, tmp_path: Path
) -> None:
    collector.may_answer.clear()
    worker = ["--no-python", "sh", "-c", f"echo started >&2; until test -e {tmp_path}/finish; do sleep 0.05; done"]
    job = start_rallyrun(["--standalone", "--event-log-handler", "otel", *worker], env=collector.env())
    job.wait_for_line("started")
    job.wait_for(lambda: collector.got)
    (tmp_path / "finish").touch()
    assert job.wait() == 0  # while the collector still thinks about the first of it


def test_where_it_is_not_installed_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rallypoint import events
    from rallypoint.errors import UsageError
    from rallypoint.telemetry import sink

    monkeypatch.setattr(sink, "NEEDED", ("no_such_package.sdk",))
    with pytest.raises(UsageError, match=r"event_log_handler: 'otel' needs OpenTelemetry; pip install 'rallypoint\[otel\]'"):
        events.check_sink("otel")
