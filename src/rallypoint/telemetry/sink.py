"""The event sink ``otel``: sends a run as spans and metrics to a collector, by OpenTelemetry's own SDK and exporter.

It is configured as everything with OpenTelemetry is, by the variables ``OTEL_EXPORTER_OTLP_ENDPOINT`` and their like. The SDK is
an extra, takes a third of a second to import, and is imported in the sink's own thread when the first workers run; what happened
before is kept until then. Its threads, and a collector that does not answer, hold up nobody.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from rallypoint.base import defaults, environment
from rallypoint.errors import bad_field
from rallypoint.story.event_records import ENDED, GENERATION, STARTED
from rallypoint.telemetry.spans import COUNTERS, GAUGES, HEARD, Begin, Course, End, Happen, Measure, Step, hear, resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

__all__ = ["OtelHandler", "require"]

NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
CLOSE_S = 4.0  # for the last of it: the launcher waits about as long for any sink


def require() -> None:
    """Refuse the sink where the packages are not there, before anything is started."""
    from importlib.util import find_spec

    for name in NEEDED:
        try:
            is_there = find_spec(name) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            raise bad_field("event_log_handler", ": 'otel' needs OpenTelemetry; pip install 'rallypoint[otel]' brings it")


class OtelHandler(logging.Handler):
    """For a sink of one's own: `make_exporter` and `make_reader` give what spans and metrics go to, once for each run."""

    def __init__(
        self, make_exporter: Callable[[], SpanExporter] | None = None, make_reader: Callable[[], MetricReader] | None = None
    ) -> None:
        super().__init__()
        self._make_exporter, self._make_reader = make_exporter, make_reader
        self._kept: list[tuple[str, float, dict[str, Any]]] = []
        self._course = Course()
        self._run: _Run | None = None

    def emit(self, record: logging.LogRecord) -> None:
        event = json.loads(record.getMessage())
        if event["name"] not in HEARD:
            return
        self._kept.append((event["name"], event["timestamp"], event["metadata"]))
        if self._run is not None or event["name"] in (GENERATION, ENDED):
            kept, self._kept = self._kept, []
            for name, at_ms, facts in kept:
                self._take(name, at_ms, facts)

    def _take(self, name: str, at_ms: float, facts: dict[str, Any]) -> None:
        if name == STARTED:
            self._run = _Run(resource(facts), self._make_exporter, self._make_reader)
        self._course, steps = hear(self._course, name, at_ms, facts)
        if self._run is not None:
            for step in steps:
                self._run.do(step)
        if name == ENDED and self._run is not None:
            run, self._run = self._run, None
            run.close()


class _Run:
    """The providers of one run, and its open spans."""

    def __init__(
        self,
        attributes: dict[str, Any],
        make_exporter: Callable[[], SpanExporter] | None,
        make_reader: Callable[[], MetricReader] | None,
    ) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about = Resource.create({**attributes, **_service()})
        self._tracers = TracerProvider(resource=about, shutdown_on_exit=False)
        self._tracers.add_span_processor(BatchSpanProcessor((make_exporter or _otlp_exporter)()))
        self._meters = MeterProvider([(make_reader or _otlp_reader)()], about, shutdown_on_exit=False)
        self._tracer, meter = self._tracers.get_tracer("rallypoint"), self._meters.get_meter("rallypoint")
        self._add = {name: meter.create_counter(name, *about).add for name, about in COUNTERS.items()}
        self._set = {name: meter.create_gauge(name, *about).set for name, about in GAUGES.items()}
        self._spans: dict[str, Span] = {}
        carrier = {name.lower(): environment.text(name) for name in defaults.ENV_TRACE_CONTEXT}
        self._outside = TraceContextTextMapPropagator().extract(carrier)

    def do(self, step: Step) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        match step:
            case Begin(key, name, parent, at_ms, attributes):
                context = set_span_in_context(self._spans[parent]) if parent else self._outside
                self._spans[key] = self._tracer.start_span(name, context, attributes=attributes, start_time=_ns(at_ms))
            case End(key, at_ms, attributes, problem):
                span = self._spans.pop(key)
                span.set_attributes(attributes)
                span.set_status(Status(StatusCode.ERROR, problem) if problem else Status(StatusCode.OK))
                span.end(_ns(at_ms))
            case Happen(key, name, at_ms, attributes):
                self._spans[key].add_event(name, attributes, _ns(at_ms))
            case Measure(name, value, attributes):
                (self._add.get(name) or self._set[name])(value, attributes)

    def close(self) -> None:
        """Send the rest; what a collector does not take in time is lost."""
        self._tracers.force_flush(int(1000 * CLOSE_S))
        self._meters.shutdown(1000 * CLOSE_S)
        self._tracers.shutdown()


def _service() -> dict[str, Any]:
    """Our name, where the environment gives no other."""
    named = environment.text(defaults.ENV_OTEL_SERVICE), environment.text(defaults.ENV_OTEL_RESOURCE)
    return {} if named[0] or "service.name=" in named[1] else {"service.name": "rallypoint"}


def _otlp_exporter() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _otlp_reader() -> MetricReader:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return PeriodicExportingMetricReader(OTLPMetricExporter())


def _ns(at_ms: float) -> int:
    return round(at_ms * 1000) * 1000  # a float holds microseconds since 1970, but no nanoseconds
