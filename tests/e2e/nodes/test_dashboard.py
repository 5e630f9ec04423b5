"""The Grafana dashboard against a job that really runs: what it asks for is there, with those labels, and says what happened."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from tests import ports

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "examples" / "grafana" / "rallypoint.json").read_text())
DEBIAN_PROMTOOL = ROOT / "build" / "prometheus" / "debian" / "usr" / "bin" / "promtool"
OF_PROMETHEUS = {"instance", "job"}  # labels that it adds to whatever it fetches
PROGRESS = "import rallypoint.worker as w; w.progress(3)"

Samples = dict[str, list[dict[str, str]]]  # the labels of each sample, by its name


def targets() -> list[tuple[str, str]]:
    """What the dashboard asks for, and how it names the answers."""
    return [(target["expr"], target.get("legendFormat", "")) for panel in DASHBOARD["panels"] for target in panel["targets"]]


def scrape(port: int) -> list[Any]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return [sample for family in parser.text_string_to_metric_families(answer.read().decode()) for sample in family.samples]


def total(samples: list[Any], name: str) -> float:
    return float(sum(sample.value for sample in samples if sample.name == name))


def missing(query: str, legend: str, samples: Samples) -> list[str]:
    """What the query names that no sample has."""
    wrong: list[str] = []
    names = set()
    for name, matchers in re.findall(r"(rallypoint_\w+)(?:\{([^}]*)\})?", query):
        names.add(name)
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
        if not any(wanted.items() <= labels.items() for labels in samples.get(name, ())):
            wrong.append(f"{name}{wanted or ''}")
        known = {label for labels in samples.get(name, ()) for label in labels}
        wrong += [f"{name} has no label {label}" for label in re.findall(r'(\w+)\s*=~?"', matchers) if label not in known]
    known = {label for name in names for labels in samples.get(name, ()) for label in labels} | OF_PROMETHEUS
    grouped = {label.strip() for group in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", query) for label in group.split(",")}
    shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))
    return wrong + [f"{query}: no label {label}" for label in sorted((grouped | shown) - known)]


def test_p44_the_dashboard_shows_a_job_that_was_restarted(job: Any) -> None:
    """P44: Two nodes, one of whose workers failed: every name, label and value that a query names is in what they tell."""
    health = [ports.free_port(), ports.free_port()]
    flags = ["--max-restarts", "2", "--restart-backoff", "0", "--hang-timeout", "600"]
    nodes = [
        start(*flags, "--health-port", str(port), nnodes="2", workers=1)
        for start, port in zip((job.start_host, job.start), health, strict=True)
    ]
    for node in nodes:
        node.wait_for_world(2)
    failed_at = time.monotonic()
    job.order(1, "sys.exit(7)")
    for node in nodes:
        node.wait_for_world(2, failed_at)
    for rank in (0, 1):
        job.order(rank, PROGRESS)
    scraped: list[list[Any]] = []

    def all_show() -> bool:
        scraped[:] = [scrape(port) for port in health]
        return all(total(one, "rallypoint_ready") == 1 and total(one, "rallypoint_last_progress_age_seconds") for one in scraped)

    nodes[0].agent.wait_for(all_show)
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]

    samples: Samples = {}
    for sample in (sample for one in scraped for sample in one):
        samples.setdefault(sample.name, []).append(sample.labels)
    assert [problem for query, legend in targets() for problem in missing(query, legend, samples)] == []
    (variable,) = (one for one in DASHBOARD["templating"]["list"] if one["type"] == "query")
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
    assert {labels[label] for labels in samples[name]} == {"a-job"}

    assert [total(one, "rallypoint_restarts_total") for one in scraped] == [1, 1]
    assert sum(total(one, "rallypoint_worker_failures_total") for one in scraped) == 1
    assert [total(one, "rallypoint_world_size") for one in scraped] == [2, 2]
    assert [total(one, "rallypoint_generation") for one in scraped] == [2, 2]


@pytest.mark.parametrize(
    ("query", "legend", "problem"),
    [
        ("rallypoint_redy", "", "rallypoint_redy"),
        ('rallypoint_phase{phase="runing"}', "", "rallypoint_phase{'phase': 'runing'}"),
        ('sum(rallypoint_phase{job_id=~"x"})', "", "rallypoint_phase has no label job_id"),
        ("sum by (hots) (rallypoint_phase)", "", "sum by (hots) (rallypoint_phase): no label hots"),
        ("rallypoint_phase", "{{hots}}", "rallypoint_phase: no label hots"),
    ],
)
def test_a_query_for_what_is_not_there_would_be_noticed(query: str, legend: str, problem: str) -> None:
    assert missing(query, legend, {"rallypoint_phase": [{"run_id": "x", "phase": "running"}]}) == [problem]


def test_prometheus_can_read_every_query(tmp_path: Path) -> None:
    promtool = shutil.which("promtool") or (str(DEBIAN_PROMTOOL) if DEBIAN_PROMTOOL.exists() else None)
    if promtool is None:
        pytest.skip("promtool is not installed")
    queries = [query.replace("$__rate_interval", "5m").replace("$run_id", ".*") for query, _ in targets()]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "rules.yml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(rules)} rules found" in checked.stdout
