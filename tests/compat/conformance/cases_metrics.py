"""Metrics: streams, handlers and the decorator that measures."""

from __future__ import annotations

import contextlib
import io
import time
from typing import Any
from unittest import mock

from tests.compat.conformance.harness import case, outcome, plain, without_numbers


def collecting() -> Any:
    from torch.distributed.elastic.metrics.api import MetricHandler

    class Collecting(MetricHandler):  # type: ignore[misc]
        def __init__(self) -> None:
            self.found: list[Any] = []

        def emit(self, metric_data: Any) -> None:
            self.found.append(metric_data)

    return Collecting()


@case
def values_reach_the_handler_of_their_group() -> dict[str, Any]:
    from torch.distributed.elastic.metrics import MetricData, configure, getStream, put_metric
    from torch.distributed.elastic.metrics.api import MetricStream, publish_metric

    handler, other = collecting(), collecting()
    configure(handler, "group-a")
    configure(other, "torchelastic")
    put_metric("one", 1, "group-a")
    put_metric("two", 2)
    stream = getStream("group-a")
    stream.add_value("three", 3)
    publish = outcome(publish_metric, "group-a", "four", 4)
    first = handler.found[0]
    own = MetricStream("mine", handler)
    own.add_value("five", 5)
    return {
        "stream": [type(stream).__name__, stream.group_name, stream.handler is handler],
        "group a": [[one.group_name, one.name, one.value] for one in handler.found],
        "default": [[one.group_name, one.name, one.value] for one in other.found],
        "data": [isinstance(first, tuple), list(MetricData._fields), isinstance(first.timestamp, float)],
        "now": abs(first.timestamp - time.time()) < 60,
        "publish": publish,
        "made": outcome(lambda: list(MetricData(1, "g", "n", 2))),
    }


@case
def the_default_handler_is_for_groups_without_one() -> dict[str, Any]:
    from torch.distributed.elastic.metrics import NullMetricHandler, configure, getStream

    handler = collecting()
    configure(handler)
    try:
        getStream("group-without-one").add_value("x", 1)
        found = len(handler.found)
    finally:
        configure(NullMetricHandler())
    getStream("another-group-without-one").add_value("x", 1)
    return {"found": found, "then": len(handler.found), "same stream": getStream("s") is getStream("s")}


@case
def handlers_that_come_with_it() -> dict[str, Any]:
    from torch.distributed.elastic.metrics import ConsoleMetricHandler, MetricData, NullMetricHandler
    from torch.distributed.elastic.metrics.api import MetricHandler

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        answer = ConsoleMetricHandler().emit(MetricData(5, "group", "name", 7))
        NullMetricHandler().emit(MetricData(5, "group", "name", 7))
    return {
        "console": text.getvalue(),
        "answer": plain(answer),
        "abstract": outcome(MetricHandler),
        "bases": [issubclass(one, MetricHandler) for one in (ConsoleMetricHandler, NullMetricHandler)],
    }


@case
def prof_measures_a_function() -> dict[str, Any]:
    from torch.distributed.elastic.metrics import configure, prof, profile

    handler, other = collecting(), collecting()
    configure(handler, "torchelastic")
    configure(other, "measured")

    @prof
    def plain_function(value: int) -> int:
        """Its words."""
        return value + 1

    @prof(group="measured")
    def in_a_group() -> None:
        raise KeyError("no")

    class Something:
        @prof
        def method(self) -> str:
            return "done"

        @classmethod
        @prof
        def of_class(cls) -> str:
            return "class"

    @profile("measured")
    def old_name() -> str:
        return "old"

    facts = {
        "answer": plain_function(1),
        "raises": outcome(in_a_group),
        "method": Something().method(),
        "class method": Something.of_class(),
        "old": outcome(old_name),
        "name": [plain_function.__name__, plain_function.__doc__],
    }
    facts["names"] = [one.name.replace("<locals>", "L") for one in handler.found]
    facts["in group"] = [one.name.replace("<locals>", "L") for one in other.found]
    facts["values"] = all(isinstance(one.value, int | float) for one in handler.found)
    return facts


@case
def prof_looks_the_sink_up_when_called() -> dict[str, Any]:
    from torch.distributed.elastic.metrics import prof, put_metric

    @prof
    def measured() -> int:
        return 1

    with mock.patch("torch.distributed.elastic.metrics.api.getStream") as stream:
        put_metric("direct", 1)
        measured()
    values = [call.args[0].replace("<locals>", "L") for call in stream.return_value.add_value.call_args_list]
    return {"groups": [plain(call.args) for call in stream.call_args_list][:1], "names": values}


@case
def elapsed_time() -> dict[str, Any]:
    from torch.distributed.elastic.metrics import get_elapsed_time_ms

    elapsed = get_elapsed_time_ms(time.time() - 2)
    return {"type": type(elapsed).__name__, "about": 1900 < elapsed < 4000}


@case
def initialising_and_its_config() -> dict[str, Any]:
    from torch.distributed.elastic.metrics import MetricsConfig, initialize_metrics

    return {
        "params": plain(MetricsConfig({"a": "b"}).params),
        "none": plain(MetricsConfig().params),
        "initialize": outcome(initialize_metrics),
        "with config": outcome(initialize_metrics, MetricsConfig({"x": "y"})),
        "text": without_numbers(repr(MetricsConfig().params)),
    }
