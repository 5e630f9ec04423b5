"""What Prometheus fetches: the agent's status as metrics, made anew from the status board for each request.

Every metric has the labels run_id, role and hostname, which are the same for all metrics of an agent, so they add no time series.
The seconds by phase are a gauge, not a counter: when work turns out to be lost, seconds move from *running* to *lost*, and a
counter that goes down is taken for one that has begun anew. This is the only module that needs prometheus-client.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from rallypoint import __version__
from rallypoint.health import rules as health
from rallypoint.health.server import MOST_CHARACTERS, PrometheusMetricHandler
from rallypoint.health.status import AgentStatus, StatusBoard
from rallypoint.protocol.pace import Pace, Scores
from rallypoint.story.phases import DONE, LOST, PHASES, totals

__all__ = ["Exposition"]

LABELS = ("run_id", "role", "hostname")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]  # as each makes a metric
Reader = Callable[[AgentStatus], "float | None"]

# What is read from the status as it is: name, help, and where it is found; None gives no value.
GAUGES: tuple[tuple[str, str, Reader], ...] = (
    ("generation", "Number of the group of workers that runs, or ran last.", lambda status: status.generation),
    ("group_rank", "Number of this agent among those of the job.", lambda status: status.group_rank),
    ("group_world_size", "Agents in the job.", lambda status: status.group_world_size),
    ("world_size", "Workers in the whole job.", lambda status: status.world_size),
    ("workers", "Workers of this agent.", lambda status: len(status.ranks)),
    ("max_restarts", "Restarts that the job may spend.", lambda status: status.max_restarts),
)
COUNTERS: tuple[tuple[str, str, Reader], ...] = (
    ("restarts", "Restarts that were spent.", lambda status: status.restarts),
    ("worker_failures", "Workers of this agent that failed.", lambda status: status.failed_workers),
    ("hung_workers", "Workers of this agent that were found hung.", lambda status: status.hung_workers),
    ("expired_timers", "Timers of workers of this agent that expired.", lambda status: status.expired_timers),
)


class Exposition:
    """Answers a request for metrics; one thread at a time."""

    def __init__(self, board: StatusBoard | None, limits: health.Limits, handler: PrometheusMetricHandler | None) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(AgentCollector(board, limits, handler))

    def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics, in the format that suits the Accept header best, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class AgentCollector(Collector):
    """Makes the metrics when they are asked for, so nothing has to be kept up to date."""

    def __init__(self, board: StatusBoard | None, limits: health.Limits, handler: PrometheusMetricHandler | None) -> None:
        self._board = board
        self._limits = limits
        self._handler = handler

    def describe(self) -> list[Metric]:
        """Nothing: names need no check against those of others, there are none in this registry."""
        return []

    def collect(self) -> Iterator[Metric]:
        constant = ("", "", "")
        if self._board is not None:
            status, now = self._board.status, time.monotonic()
            constant = (_label(status.run_id), _label(status.role), _label(status.hostname))
            yield from _of_status(status, constant)
            yield from _of_time(status, constant, now)
            yield from _of_pace(self._board.read_paces(), self._board.read_slowness() or Scores({}), constant)
            yield from _of_health(status, constant, self._board.read_progress(), self._limits, now)
        yield from _of_process(constant)
        if self._handler is not None:
            yield from _of_handler(self._handler, constant)


Constant = tuple[str, str, str]


def _of_status(status: AgentStatus, constant: Constant) -> Iterator[Metric]:
    info = InfoMetricFamily("rallypoint_agent", "The agent.", labels=LABELS)
    info.add_metric(constant, {"version": __version__})
    yield info
    kinds: tuple[tuple[Family, tuple[tuple[str, str, Reader], ...]], ...]
    kinds = ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS))
    for family, metrics in kinds:
        for name, explanation, read in metrics:
            yield _one(family, name, explanation, constant, read(status))


def _of_time(status: AgentStatus, constant: Constant, now: float) -> Iterator[Metric]:
    yield _one(GaugeMetricFamily, "uptime_seconds", "Time since the agent began.", constant, now - status.began_at)
    labels = (*LABELS, "phase")
    present = GaugeMetricFamily("rallypoint_phase", "1 for the phase that the agent is in, 0 for the others.", labels=labels)
    for phase in (*PHASES, DONE):
        if phase != LOST:  # which is found out later about what was running
            present.add_metric((*constant, phase), float(phase == status.ledger.phase))
    yield present
    explanation = "Time spent in each phase; what turns out to be lost is moved there from running."
    spent = GaugeMetricFamily("rallypoint_phase_seconds", explanation, labels=labels)
    for phase, seconds in totals(status.ledger, now).items():
        spent.add_metric((*constant, phase), seconds)
    yield spent


def _of_health(
    status: AgentStatus, constant: Constant, progress_at: float | None, limits: health.Limits, now: float
) -> Iterator[Metric]:
    judged = health.judge(status.ledger, status.why, progress_at, limits, now)
    yield _one(GaugeMetricFamily, "alive", "Whether the agent is alive, as /healthz says.", constant, judged.alive)
    yield _one(GaugeMetricFamily, "ready", "Whether its workers run, as /readyz says.", constant, judged.ready)
    age_s = None if progress_at is None else now - progress_at
    explanation = "Time since the workers' last sign of progress, if they ever gave one."
    yield _one(GaugeMetricFamily, "last_progress_age_seconds", explanation, constant, age_s)


def _of_pace(paces: list[Pace], scores: Scores, constant: Constant) -> Iterator[Metric]:
    labels = (*LABELS, "rank")
    explanation = "Time that a worker of this agent takes for a step, over its last ones."
    steps = GaugeMetricFamily("rallypoint_worker_step_seconds", explanation, labels=labels)
    explanation = "Share of a step in which the main thread of a worker of this agent is busy."
    busy = GaugeMetricFamily("rallypoint_worker_busy_ratio", explanation, labels=labels)
    explanation = "Time of a worker of this agent by the median of all workers of the job."
    slow = GaugeMetricFamily("rallypoint_worker_slowness", explanation, labels=labels)
    for one in paces:
        labelled = (*constant, str(one.rank))
        steps.add_metric(labelled, one.step_s)
        if one.busy is not None:
            busy.add_metric(labelled, one.busy)
        if one.rank in scores.workers:
            slow.add_metric(labelled, scores.workers[one.rank])
    explanation = "The same of this agent's workers together: that of their median."
    node = _one(GaugeMetricFamily, "node_slowness", explanation, constant, scores.node)
    yield from (one for one in (steps, busy, slow, node) if one.samples)


def _of_process(constant: Constant) -> Iterator[Metric]:
    yield _one(CounterMetricFamily, "agent_cpu_seconds", "CPU time of the agent itself.", constant, time.process_time())
    explanation = "Memory that the agent itself occupies."
    yield _one(GaugeMetricFamily, "agent_resident_memory_bytes", explanation, constant, _resident_bytes())


def _of_handler(handler: PrometheusMetricHandler, constant: Constant) -> Iterator[Metric]:
    labels = (*LABELS, "group", "name")
    values = GaugeMetricFamily("rallypoint_metric", "The last value of a metric that was put.", labels=labels)
    counts = CounterMetricFamily("rallypoint_metric_values", "Values of a metric that were put.", labels=labels)
    for latest in handler.latest():
        labelled = (*constant, _label(latest.group), _label(latest.name))
        values.add_metric(labelled, latest.value)
        counts.add_metric(labelled, latest.count)
    yield from (values, counts)
    explanation = "Values that were put and not kept: of too many metrics, or no numbers."
    yield _one(CounterMetricFamily, "metric_values_dropped", explanation, constant, handler.dropped)


def _one(family: Family, name: str, explanation: str, constant: Constant, value: float | None) -> Metric:
    """A metric with one value, or with none."""
    metric = family(f"rallypoint_{name}", explanation, labels=LABELS)
    if value is not None:
        metric.add_metric(constant, value)
    return metric


def _label(text: str) -> str:
    """As UTF-8 can write it: a name from the command line may hold bytes that are none."""
    return text[:MOST_CHARACTERS].encode(errors="replace").decode()


def _resident_bytes() -> float | None:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):  # not mounted here
        return None
