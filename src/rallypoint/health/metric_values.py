"""The metrics that go through ``put_metric``, kept so that Prometheus can fetch them.

Only the last value of each metric is kept, and how many there were, since Prometheus itself keeps the past.
``prometheus_exposition`` writes them out; here nothing of prometheus-client is needed.
"""

from __future__ import annotations

import threading

from rallypoint.base.records import Value
from rallypoint.metrics import MetricData, MetricHandler, _pass_to

__all__ = ["LatestValue", "PrometheusMetricHandler"]

MOST_NAMES = 1_000  # each is a time series in Prometheus, for every agent
MOST_CHARACTERS = 200


class LatestValue(Value):
    group: str
    name: str
    value: float
    count: int  # of values so far


class PrometheusMetricHandler(MetricHandler):
    """Keeps the last value of each metric, of a bounded number of them; passes all of them on to `next_handler`."""

    _never_waits = True

    def __init__(self, next_handler: MetricHandler | None = None) -> None:
        self._next_handler = next_handler
        self._latest: dict[tuple[str, str], LatestValue] = {}
        self._lock = threading.Lock()
        self.dropped = 0  # values of metrics beyond the bound, and those that are no numbers

    def emit(self, metric_data: MetricData) -> None:
        if self._next_handler is not None:
            _pass_to(self._next_handler, metric_data)
        group, name = str(metric_data.group_name)[:MOST_CHARACTERS], str(metric_data.name)[:MOST_CHARACTERS]
        value = _number(metric_data.value)
        with self._lock:
            known = self._latest.get((group, name))
            if value is None or (known is None and len(self._latest) >= MOST_NAMES):
                self.dropped += 1
            else:
                self._latest[group, name] = LatestValue(group, name, value, known.count + 1 if known else 1)

    def latest(self) -> list[LatestValue]:
        with self._lock:
            return list(self._latest.values())


def _number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]  # whatever others have put in
    except (TypeError, ValueError, OverflowError):
        return None
