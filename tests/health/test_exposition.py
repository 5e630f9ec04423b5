"""Metrics as Prometheus fetches them: its own parser and its own tool accept them, and the dashboard asks for none but these."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint import metrics
from rallypoint.health.server import MOST_NAMES, HealthCheckServer, PrometheusMetricHandler
from rallypoint.health.status import AgentStatus, StatusBoard
from rallypoint.metrics import MetricData, MetricHandler
from rallypoint.protocol.pace import Pace, Scores
from rallypoint.story.phases import PHASES, RUNNING, STOPPING, enter, open_ledger

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "examples" / "grafana" / "rallypoint.json"
DEBIAN_PROMTOOL = ROOT / "build" / "prometheus" / "debian" / "usr" / "bin" / "promtool"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
STRANGE = 'a"b\\c\nd é'
Serve = Callable[..., HealthCheckServer]
needs_client = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import prometheus_client"], capture_output=True).returncode != 0,
    reason="prometheus-client is not installed",
)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serve(board, **settings)`` starts a health server at any port; it is stopped after the test."""
    with contextlib.ExitStack() as servers:

        def start(board: StatusBoard | None = None, **settings: Any) -> HealthCheckServer:
            server = HealthCheckServer(lambda: int(time.time()), 0, 60, board=board, **settings)
            server.start()
            servers.callback(server.stop)
            return server

        yield start


def running_board(run_id: str = "job-7") -> StatusBoard:
    """An agent that has been running for the last 30 of 100 seconds, with everything that a status can have."""
    now = time.monotonic()
    status = AgentStatus(
        run_id, "trainer", "node-3", now - 100, enter(open_ledger(now - 100), RUNNING, now - 30),
        generation=3, group_rank=1, group_world_size=4, world_size=32, ranks=(8, 9), pids=(71, 72),
        restarts=2, max_restarts=5, failed_workers=6, hung_workers=7, expired_timers=8,
    )  # fmt: skip
    board = StatusBoard(status)
    board.read_progress = lambda: now - 12
    return board


def filled_handler() -> PrometheusMetricHandler:
    handler = PrometheusMetricHandler()
    for value in (1, 2.5):
        handler.emit(MetricData(0.0, "torchelastic", STRANGE, value))
    return handler


def fetch(server: HealthCheckServer, accept: str = "") -> tuple[int, str, str]:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    with contextlib.closing(client):
        client.request("GET", "/metrics", headers={"Accept": accept})
        response = client.getresponse()
        return response.status, response.read().decode(), response.headers["Content-Type"]


def samples(text: str) -> dict[str, float]:
    """The values by name, or by name and what is told apart beside the labels that all have."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [value for key, value in sample.labels.items() if key not in ("run_id", "role", "hostname", "version")]
            found[" ".join([sample.name, *own])] = sample.value
    return found


@needs_client
def test_p44_the_status_as_metrics(serve: Serve) -> None:
    status, text, content_type = fetch(serve(running_board(), metric_handler=filled_handler()))
    assert status == 200
    assert content_type.startswith("text/plain; version=")
    values = samples(text)
    expected = {
        "agent_info": 1, "generation": 3, "group_rank": 1, "group_world_size": 4, "world_size": 32, "workers": 2,
        "restarts_total": 2, "max_restarts": 5, "worker_failures_total": 6, "hung_workers_total": 7, "expired_timers_total": 8,
        "alive": 1, "ready": 1, "phase running": 1, "phase waiting": 0, "phase done": 0, "metric_values_dropped_total": 0,
    }  # fmt: skip
    assert {name: values[f"rallypoint_{name}"] for name in expected} == expected
    assert values["rallypoint_uptime_seconds"] == pytest.approx(100, abs=5)
    assert values["rallypoint_last_progress_age_seconds"] == pytest.approx(12, abs=5)
    assert values["rallypoint_phase_seconds running"] == pytest.approx(30, abs=5)
    assert values["rallypoint_phase_seconds starting"] == pytest.approx(70, abs=0.1)
    assert sum(values[f"rallypoint_phase_seconds {phase}"] for phase in PHASES) == pytest.approx(100, abs=5)
    assert 1 << 20 < values["rallypoint_agent_resident_memory_bytes"] < 1 << 34
    assert values["rallypoint_agent_cpu_seconds_total"] > 0
    [value] = [value for name, value in values.items() if name.startswith("rallypoint_metric ")]
    [count] = [value for name, value in values.items() if name.startswith("rallypoint_metric_values_total ")]
    assert (value, count) == (2.5, 2)


@needs_client
def test_metrics_follow_the_status(serve: Serve) -> None:
    board = running_board()
    server = serve(board)
    fetch(server)
    board.read_progress = lambda: None
    board.change(ledger=enter(board.status.ledger, STOPPING, time.monotonic()), restarts=3, world_size=None, ranks=())
    values = samples(fetch(server)[1])
    assert (values["rallypoint_phase stopping"], values["rallypoint_ready"], values["rallypoint_restarts_total"]) == (1, 0, 3)
    assert values["rallypoint_workers"] == 0
    assert {"rallypoint_world_size", "rallypoint_last_progress_age_seconds"}.isdisjoint(values)


@needs_client
def test_how_quick_workers_are_beside_those_of_all_nodes(serve: Serve) -> None:
    board = running_board()
    server = serve(board)
    assert "slowness" not in fetch(server)[1]
    board.read_paces = lambda: [Pace(8, 0.2, 50, 0.75), Pace(9, 0.1, 50), Pace(10, 0.1, 3)]
    board.read_slowness = lambda: Scores({8: 2.0, 9: 1.0}, 1.0)
    values = samples(fetch(server)[1])
    told = {name.removeprefix("rallypoint_"): value for name, value in values.items() if "worker_" in name or "node_" in name}
    assert {name: value for name, value in told.items() if "failures" not in name and "hung" not in name} == {
        "worker_step_seconds 8": 0.2, "worker_step_seconds 9": 0.1, "worker_step_seconds 10": 0.1,
        "worker_busy_ratio 8": 0.75, "worker_slowness 8": 2.0, "worker_slowness 9": 1.0, "node_slowness": 1.0,
    }  # fmt: skip


@needs_client
def test_every_metric_has_the_same_labels_and_a_help(serve: Serve) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    text = fetch(serve(running_board(STRANGE), metric_handler=filled_handler()))[1]
    families = list(text_string_to_metric_families(text))
    assert {"rallypoint_phase", "rallypoint_workers", "rallypoint_metric"} <= {family.name for family in families}
    for family in families:
        assert family.samples
        assert family.name.startswith("rallypoint_")
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert sample.labels.items() >= {"run_id": STRANGE, "role": "trainer", "hostname": "node-3"}.items()


@needs_client
def test_a_name_that_is_no_text_is_written_as_far_as_it_goes(serve: Serve) -> None:
    status, text, _ = fetch(serve(running_board("job\udcff" + "x" * 5000)))
    assert status == 200
    assert 'run_id="job?xxx' in text
    assert len(text) < 50_000


@needs_client
def test_openmetrics_where_it_is_asked_for(serve: Serve) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    _, text, content_type = fetch(serve(running_board(STRANGE), metric_handler=filled_handler()), OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"rallypoint_agent", "rallypoint_restarts", "rallypoint_phase", "rallypoint_metric"} <= names


@needs_client
def test_without_a_board_there_are_still_the_metrics_that_were_put(serve: Serve) -> None:
    values = samples(fetch(serve(metric_handler=filled_handler()))[1])
    assert "rallypoint_agent_cpu_seconds_total" in values
    assert "rallypoint_generation" not in values
    assert any(name.startswith("rallypoint_metric ") for name in values)


@needs_client
def test_promtool_accepts_them(serve: Serve) -> None:
    promtool = shutil.which("promtool") or (str(DEBIAN_PROMTOOL) if DEBIAN_PROMTOOL.exists() else None)
    if promtool is None:
        pytest.skip("promtool is not installed")
    text = fetch(serve(running_board(STRANGE), metric_handler=filled_handler()))[1]
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_without_prometheus_client_it_says_how_to_get_it(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rallypoint.health.exposition", raising=False)
    for name in [name for name in sys.modules if name.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    status, text, _ = fetch(serve(running_board()))
    assert (status, text.count("\n")) == (501, 1)
    assert "pip install 'rallypoint[metrics]'" in text


# --- the handler -----------------------------------------------------------------------------------------------------------


def test_p44_the_handler_keeps_what_is_put_and_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder(MetricHandler):
        seen: list[MetricData] = []  # noqa: RUF012

        def emit(self, metric_data: MetricData) -> None:
            self.seen.append(metric_data)

    handler = PrometheusMetricHandler(Recorder())
    monkeypatch.setattr(metrics, "_default_handler", handler)
    for value in (1, 2, 7):
        metrics.put_metric("steps", value, "mine")
    [latest] = handler.latest()
    assert list(latest) == ["mine", "steps", 7.0, 3]
    assert [data.value for data in Recorder.seen] == [1, 2, 7]


def test_the_handler_is_bounded() -> None:
    handler = PrometheusMetricHandler()
    for number in range(MOST_NAMES + 10):
        handler.emit(MetricData(0.0, "g", f"n{number}", 1))
    handler.emit(MetricData(0.0, "g", "n0", "no number"))
    handler.emit(MetricData(0.0, "g", "n1", 2))
    handler.emit(MetricData(0.0, "g", "x" * 10_000, 2))
    assert len(handler.latest()) == MOST_NAMES
    assert handler.latest()[1].count == 2
    assert handler.dropped == 12


# --- the dashboard ---------------------------------------------------------------------------------------------------------


def dashboard_queries() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return queries + [variable["definition"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]


@needs_client
def test_the_dashboard_asks_only_for_metrics_that_there_are(serve: Serve) -> None:
    values = samples(fetch(serve(running_board(), metric_handler=filled_handler()))[1])
    given = {name.partition(" ")[0] for name in values}
    asked = {name for query in dashboard_queries() for name in re.findall(r"rallypoint_\w+", query)}
    assert asked <= given
    assert asked >= {f"rallypoint_{name}" for name in ("ready", "phase", "phase_seconds", "restarts_total", "hung_workers_total")}


def test_the_dashboard_is_one_that_grafana_can_load() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["schemaVersion"] >= 39
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "run_id"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all('run_id=~"$run_id"' in target["expr"] for target in panel["targets"])
