"""Metrics: who gets them, and what the decorator measures."""

from __future__ import annotations

import time

import pytest

from rallypoint import metrics
from rallypoint.errors import UsageError
from rallypoint.metrics import MetricData, MetricHandler, MetricsConfig, MetricStream, prof


class Recorder(MetricHandler):
    def __init__(self) -> None:
        self.seen: list[MetricData] = []

    def emit(self, metric_data: MetricData) -> None:
        self.seen.append(metric_data)

    @property
    def values(self) -> dict[str, float]:
        return {data.name: data.value for data in self.seen}


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers of the test's own, as of a process that has just begun."""
    monkeypatch.setattr(metrics, "_handlers", {})
    monkeypatch.setattr(metrics, "_default_handler", metrics.NullMetricHandler())


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Sees every metric of the default group, by replacing ``getStream`` as other programs do."""
    handler = Recorder()
    monkeypatch.setattr(metrics, "getStream", lambda group: MetricStream(group, handler))
    return handler


@prof
def plain() -> str:
    """Documented."""
    return "result"


class Work:
    @prof
    def good(self, a: int, *, b: int) -> int:
        return a + b

    @prof
    def bad(self) -> None:
        raise RuntimeError("no")

    @prof
    def interrupted(self) -> None:
        raise KeyboardInterrupt

    @prof(group="mine")
    def grouped(self) -> None: ...


def test_a_value_goes_to_the_handler_of_its_group_or_to_the_default_one() -> None:
    default, mine = Recorder(), Recorder()
    metrics.configure(default)
    metrics.configure(mine, "mine")
    before = time.time()
    metrics.put_metric("a", 1)
    metrics.put_metric("b", 2.5, "mine")
    metrics.put_metric("c", 3, "other")
    assert [data[1:] for data in default.seen] == [("torchelastic", "a", 1), ("other", "c", 3)]
    assert [data[1:] for data in mine.seen] == [("mine", "b", 2.5)]
    assert before <= default.seen[0].timestamp <= time.time()


def test_nobody_listens_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    metrics.put_metric("a", 1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("config", "output"),
    [
        (None, ""),
        (MetricsConfig(), ""),
        (MetricsConfig({"anything": "else"}), ""),
        (MetricsConfig({"sink": "null"}), ""),
        (MetricsConfig({"sink": "console"}), "[torchelastic]: a=1"),
    ],
)
def test_the_configuration_chooses_the_sink(
    config: MetricsConfig | None, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics.initialize_metrics(config)
    metrics.put_metric("a", 1)
    assert capsys.readouterr().out.rstrip().endswith(output)


def test_an_unknown_sink_is_refused() -> None:
    with pytest.raises(UsageError, match="'statsd'; available: console, null"):
        metrics.initialize_metrics(MetricsConfig({"sink": "statsd"}))


def test_prof_measures_a_success(recorder: Recorder) -> None:
    assert Work().good(1, b=2) == 3
    assert recorder.values.pop("Work.good.duration.ms") >= 0
    assert recorder.values["Work.good.success"] == 1
    assert "Work.good.failure" not in recorder.values


@pytest.mark.parametrize(("name", "error"), [("bad", RuntimeError), ("interrupted", KeyboardInterrupt)])
def test_prof_measures_a_failure(recorder: Recorder, name: str, error: type[BaseException]) -> None:
    with pytest.raises(error):
        getattr(Work(), name)()
    assert recorder.values[f"Work.{name}.failure"] == 1
    assert f"Work.{name}.duration.ms" in recorder.values
    assert f"Work.{name}.success" not in recorder.values


def test_prof_names_a_function_by_its_module_and_keeps_what_it_is(recorder: Recorder) -> None:
    assert plain() == "result"
    assert recorder.values["test_metrics.plain.success"] == 1
    assert (plain.__name__, plain.__doc__) == ("plain", "Documented.")


def test_prof_takes_a_group(recorder: Recorder) -> None:
    Work().grouped()
    assert {data.group_name for data in recorder.seen} == {"mine"}


@pytest.mark.parametrize(("group", "expected"), [(None, "torchelastic"), ("mine", "mine")])
def test_the_former_forms_still_work_and_say_what_replaces_them(recorder: Recorder, group: str | None, expected: str) -> None:
    with pytest.warns(FutureWarning, match=r"metrics\.prof$") as caught:
        decorated = metrics.profile(group)(lambda: "result")
    assert caught[0].filename == __file__
    assert decorated() == "result"
    with pytest.warns(FutureWarning, match=r"metrics\.put_metric$"):
        metrics.publish_metric(expected, "published", 5)
    assert {data.group_name for data in recorder.seen} == {expected}
    assert (recorder.values["<lambda>.success"], recorder.values["published"]) == (1, 5)


def test_elapsed_time() -> None:
    assert 2000 <= metrics.get_elapsed_time_ms(time.time() - 2) < 60_000
