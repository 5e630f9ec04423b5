"""Numbers about the job, sent to a handler: by default to one that forgets them.

A metric is a name and a value within a *group*; each group can have its own handler (`configure`). Other programs replace
`getStream` in this module to see every metric, so it is looked up anew for each one. A handler may hang, and the job does not
wait for it: while an agent is at work, each handler gets its values in a thread of its own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable
from functools import wraps

from rallypoint.base import report
from rallypoint.base.outbox import Outbox
from rallypoint.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ParamSpec, TypeVar, overload

    P = ParamSpec("P")
    R = TypeVar("R")
else:

    def overload(fn):
        return fn


__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "default_handler",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]

DEFAULT_GROUP = "torchelastic"


# One value of one metric; the timestamp is in seconds since 1970.
MetricData = namedtuple("MetricData", ["timestamp", "group_name", "name", "value"])


class MetricHandler(ABC):
    """Where metrics go."""

    _never_waits = False  # for handlers of ours that only remember

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Take one value."""


class ConsoleMetricHandler(MetricHandler):
    """Prints each value on a line."""

    def emit(self, metric_data: MetricData) -> None:
        print(f"[{metric_data.timestamp}][{metric_data.group_name}]: {metric_data.name}={metric_data.value}")


class NullMetricHandler(MetricHandler):
    """Forgets them."""

    _never_waits = True

    def emit(self, metric_data: MetricData) -> None:
        pass


HANDLERS: dict[str, type[MetricHandler]] = {"null": NullMetricHandler, "console": ConsoleMetricHandler}


class MetricsConfig:
    """Settings of the metrics: ``sink`` is the name of a handler, ``null`` or ``console``; others are left to who reads them."""

    __slots__ = ("params",)

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


class MetricStream:
    """The metrics of one group, on their way to a handler."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        _pass_to(self.handler, MetricData(time.time(), self.group_name, metric_name, metric_value))


_outboxes: dict[int, tuple[MetricHandler, Outbox]] = {}  # by the handler's identity, which is nobody else's as long as we hold it


def _pass_to(handler: MetricHandler, data: MetricData) -> None:
    if getattr(handler, "_never_waits", False):
        handler.emit(data)
        return
    if id(handler) not in _outboxes:
        complain = report.warning_once(f"metrics are lost, because {type(handler).__name__}")
        _outboxes[id(handler)] = handler, Outbox(handler.emit, is_foreign=True, on_error=complain)
    _outboxes[id(handler)][1].put(data)


_handlers: dict[str, MetricHandler] = {}
_default_handler: MetricHandler = NullMetricHandler()


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Send the metrics of `group`, or of every group without a handler of its own, to `handler`."""
    global _default_handler
    if group is None:
        _default_handler = handler
    else:
        _handlers[group] = handler


def default_handler() -> MetricHandler:
    """Where the metrics of groups without a handler of their own go now."""
    return _default_handler


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Send metrics where `cfg` says; where it says nothing, everything stays as it is."""
    sink = cfg.params.get("sink") if cfg else None
    if sink is None:
        return
    if sink not in HANDLERS:
        raise UsageError(f"metrics_cfg: there is no metric sink {sink!r}; available: {', '.join(sorted(HANDLERS))}")
    configure(HANDLERS[sink]())


def getStream(group: str) -> MetricStream:
    """The stream of `group`."""
    return MetricStream(group, _handlers.get(group, _default_handler))


def put_metric(metric_name: str, metric_value: float, metric_group: str = DEFAULT_GROUP) -> None:
    """Publish one value."""
    getStream(metric_group).add_value(metric_name, metric_value)


@overload
def prof(fn: Callable[P, R], group: str = ...) -> Callable[P, R]: ...
@overload
def prof(fn: None = None, group: str = ...) -> Callable[[Callable[P, R]], Callable[P, R]]: ...  # noqa: F811
def prof(  # noqa: F811
    fn: Callable[P, R] | None = None, group: str = DEFAULT_GROUP
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Publish how long each call of a function takes and how it ends.

    Used as ``@prof`` or ``@prof(group="mine")``; gives ``<name>.duration.ms`` and, as 1, ``<name>.success`` or
    ``<name>.failure``. The name is the qualified one, ``Class.method``, or ``module.function``.
    """
    if fn is not None:
        return _measured(fn, _get_metric_name(fn), group)
    return lambda function: _measured(function, _get_metric_name(function), group)


def _measured(fn: Callable[P, R], name: str, group: str) -> Callable[P, R]:
    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        start_s = time.monotonic()
        outcome = "failure"
        try:
            result = fn(*args, **kwargs)
            outcome = "success"
            return result
        finally:
            put_metric(f"{name}.{outcome}", 1, group)
            put_metric(f"{name}.duration.ms", int((time.monotonic() - start_s) * 1000), group)

    return call


def _get_metric_name(fn: Callable[..., object]) -> str:
    name = fn.__qualname__
    module = fn.__module__
    return f"{module.rpartition('.')[2]}.{name}" if "." not in name and module else name


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Milliseconds since `start_time_in_seconds`, a value of ``time.time()``."""
    return int((time.time() - start_time_in_seconds) * 1000)


def profile(group: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The former name of `prof`, which names metrics by the bare function; deprecated."""
    _warn_deprecated("profile", "prof")
    return lambda function: _measured(function, function.__name__, group or DEFAULT_GROUP)


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """The former form of `put_metric`; deprecated."""
    _warn_deprecated("publish_metric", "put_metric")
    put_metric(metric_name, metric_value, metric_group)


def _warn_deprecated(old: str, new: str) -> None:
    import warnings

    warnings.warn(f"metrics.{old} is deprecated, use metrics.{new}", FutureWarning, stacklevel=3)
