"""What programs replace behind torch's names is replaced where rallypoint looks it up, and nowhere else."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

ELASTIC = "torch.distributed.elastic"
# What programs replace -> where rallypoint's code looks it up.
TARGETS = {
    "torch.distributed.launcher.api.LocalElasticAgent": ["rallypoint.agent.launch.LocalElasticAgent"],
    "torch.distributed.launcher.api.events.record": ["rallypoint.events.record", "rallypoint.agent.launch.events.record"],
    "torch.distributed.launcher.api.metrics.initialize_metrics": ["rallypoint.agent.launch.metrics.initialize_metrics"],
    "torch.distributed.launcher.api.rdzv_registry.get_rendezvous_handler": [
        "rallypoint.agent.launch.rdzv_registry.get_rendezvous_handler"
    ],
    f"{ELASTIC}.rendezvous.registry.get_rendezvous_handler": ["rallypoint.agent.launch.rdzv_registry.get_rendezvous_handler"],
    f"{ELASTIC}.agent.server.local_elastic_agent.LocalElasticAgent.run": ["rallypoint.agent.launch.LocalElasticAgent.run"],
    f"{ELASTIC}.agent.server.local_elastic_agent.start_processes": ["rallypoint.agent.local_agent.start_processes"],
    f"{ELASTIC}.agent.server.api.put_metric": ["rallypoint.agent.agent.put_metric", "rallypoint.agent.records.put_metric"],
    f"{ELASTIC}.agent.server.api.record": ["rallypoint.agent.records.record"],
    f"{ELASTIC}.agent.server.api._get_fq_hostname": ["rallypoint.agent.records._get_fq_hostname"],
    f"{ELASTIC}.agent.server.api.store_util.barrier": ["rallypoint.agent.agent.barriers.barrier"],
    f"{ELASTIC}.events.record": ["rallypoint.events.record"],
    f"{ELASTIC}.events.record_rdzv_event": ["rallypoint.events.record_rdzv_event"],
    f"{ELASTIC}.events.get_logging_handler": ["rallypoint.events.get_logging_handler"],
    f"{ELASTIC}.metrics.api.getStream": ["rallypoint.metrics.getStream"],
    f"{ELASTIC}.multiprocessing.api.PContext": ["rallypoint.processes.context.PContext"],
    f"{ELASTIC}.multiprocessing.api.PContext.wait": ["rallypoint.processes.context.PContext.wait"],
    f"{ELASTIC}.rendezvous.c10d_rendezvous_backend.DEFAULT_PORT": ["rallypoint.compat.c10d_backend.DEFAULT_PORT"],
    f"{ELASTIC}.utils.store.barrier": ["rallypoint.agent.agent.barriers.barrier"],
}
# What stays as it is, as with any `from module import name`.
APART = [
    ("torch.distributed.launcher.api.LocalElasticAgent", f"{ELASTIC}.agent.server.local_elastic_agent.LocalElasticAgent"),
    (f"{ELASTIC}.agent.server.local_elastic_agent.LocalElasticAgent", "torch.distributed.launcher.api.LocalElasticAgent"),
    (f"{ELASTIC}.events.record", f"{ELASTIC}.agent.server.api.record"),
    (f"{ELASTIC}.agent.server.api.record", f"{ELASTIC}.events.record"),
    (f"{ELASTIC}.events.handlers.get_logging_handler", f"{ELASTIC}.events.get_logging_handler"),
    (f"{ELASTIC}.multiprocessing.start_processes", f"{ELASTIC}.agent.server.local_elastic_agent.start_processes"),
    (f"{ELASTIC}.agent.server.local_elastic_agent.start_processes", f"{ELASTIC}.multiprocessing.start_processes"),
    ("torch.distributed.launcher.LaunchConfig", "torch.distributed.launcher.api.LaunchConfig"),
]


def look_up(path: str) -> Any:
    """What an expression gives that begins with a module."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AssertionError(path)


@pytest.mark.parametrize("target", TARGETS)
def test_a_patch_reaches_the_code_that_uses_the_name(target: str, installed: str) -> None:
    before = [look_up(path) for path in TARGETS[target]]
    with mock.patch(target) as patched:
        assert look_up(target) is patched
        assert [look_up(path) for path in TARGETS[target]] == [patched] * len(before)
    assert [look_up(path) for path in TARGETS[target]] == before
    assert look_up(target) is before[0]


@pytest.mark.parametrize(("patched", "apart"), APART)
def test_a_patch_reaches_no_other_place(patched: str, apart: str, installed: str) -> None:
    before = look_up(patched), look_up(apart)
    with mock.patch(patched) as value:
        assert look_up(patched) is value
        assert look_up(apart) is before[1]
    assert (look_up(patched), look_up(apart)) == before


def test_a_value_that_was_replaced_at_home_is_seen(installed: str) -> None:
    with mock.patch("rallypoint.agent.launch.LocalElasticAgent") as patched:
        assert look_up("torch.distributed.launcher.api.LocalElasticAgent") is patched


def test_patches_can_be_nested(installed: str) -> None:
    target = "torch.distributed.launcher.api.LocalElasticAgent"
    before = look_up(target)
    with mock.patch(target) as outer:
        with mock.patch(target) as inner:
            assert look_up("rallypoint.agent.launch.LocalElasticAgent") is inner
        assert look_up("rallypoint.agent.launch.LocalElasticAgent") is outer
    assert look_up(target) is before


def test_a_patch_that_is_over_hides_nothing(installed: str) -> None:
    """Also in a place to which the name does not belong."""
    with mock.patch("torch.distributed.launcher.LaunchConfig"):
        pass
    with mock.patch("rallypoint.agent.launch.LaunchConfig") as patched:
        assert look_up("torch.distributed.launcher.LaunchConfig") is patched


def test_names_can_be_reached_through_the_modules_dictionary(installed: str) -> None:
    names = vars(look_up("torch.distributed.launcher.api"))
    launch = look_up("rallypoint.agent.launch")
    assert names["LaunchConfig"] is names.get("LaunchConfig") is launch.LaunchConfig
    assert names["__name__"] == "torch.distributed.launcher.api"
    assert "LaunchConfig" in names
    assert "elastic_lunch" not in names
    assert names.get("elastic_lunch", 7) == 7
    before = names["LocalElasticAgent"]
    names["LocalElasticAgent"] = "mine"
    assert launch.LocalElasticAgent == "mine"
    names["LocalElasticAgent"] = before
    assert launch.LocalElasticAgent is before


def test_a_whole_module_can_be_replaced(installed: str) -> None:
    before = look_up("torch.distributed.launcher.api.events")
    with mock.patch("torch.distributed.launcher.api.events") as patched:
        assert look_up("rallypoint.agent.launch.events") is patched is look_up("torch.distributed.launcher.api.events")
        assert isinstance(look_up(f"{ELASTIC}.events"), ModuleType)
    assert look_up("rallypoint.agent.launch.events") is look_up("rallypoint.events")
    assert look_up("torch.distributed.launcher.api.events") is before


def test_assignment_and_deletion(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    api = look_up("torch.distributed.launcher.api")
    monkeypatch.setattr("torch.distributed.launcher.api.LocalElasticAgent", "mine")
    assert look_up("rallypoint.agent.launch.LocalElasticAgent") == "mine"
    monkeypatch.delattr(api, "LocalElasticAgent")
    assert not hasattr(api, "LocalElasticAgent")
    monkeypatch.undo()
    assert api.LocalElasticAgent is look_up("rallypoint.agent.local_agent.LocalElasticAgent")


def test_a_name_that_nobody_knows_stays_on_the_module(installed: str) -> None:
    api = look_up("torch.distributed.launcher.api")
    api.notes = "mine"
    assert api.notes == "mine"
    assert not hasattr(look_up("rallypoint.agent.launch"), "notes")
    del api.notes
    assert not hasattr(api, "notes")


def test_modules_of_the_standard_library_can_be_patched_through_a_module(installed: str) -> None:
    with mock.patch(f"{ELASTIC}.agent.server.api.time.monotonic", return_value=7.0):
        assert look_up("time.monotonic")() == 7.0


def test_a_patched_barrier_is_the_one_that_agents_use(installed: str) -> None:
    """Through our own code, not only through the table."""
    agent = mock.Mock(_exit_barrier_timeout=1, _store=mock.Mock())
    simple = look_up(f"{ELASTIC}.agent.server.api.SimpleElasticAgent")
    with mock.patch(f"{ELASTIC}.utils.store.barrier") as barrier:
        simple._exit_barrier(agent)
    barrier.assert_called_once()


def test_a_patched_stream_sees_metrics(installed: str) -> None:
    with mock.patch(f"{ELASTIC}.metrics.api.getStream") as get_stream:
        look_up(f"{ELASTIC}.metrics.put_metric")("latency", 3, "group")
    get_stream.assert_called_once_with("group")
    get_stream.return_value.add_value.assert_called_once_with("latency", 3)
