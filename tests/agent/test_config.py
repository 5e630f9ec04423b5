"""LaunchConfig: torch's fields in torch's order, our own by name, and every mistake told by the name of its field."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest

from rallypoint.agent.config import LaunchConfig, resolve_shutdown_timeout
from rallypoint.errors import UsageError
from rallypoint.output.log_specs import DefaultLogsSpecs

REQUIRED = object()
TORCH_FIELDS = [
    ("min_nodes", REQUIRED), ("max_nodes", REQUIRED), ("nproc_per_node", REQUIRED), ("logs_specs", None), ("run_id", ""),
    ("role", "default_role"), ("rdzv_endpoint", ""), ("rdzv_backend", "etcd"), ("rdzv_configs", {}), ("rdzv_timeout", -1),
    ("max_restarts", 3), ("monitor_interval", 0.1), ("start_method", "spawn"), ("log_line_prefix_template", None),
    ("metrics_cfg", {}), ("local_addr", None), ("event_log_handler", "null"), ("numa_options", None),
    ("signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"), ("duplicate_stdout_filters", None),
    ("duplicate_stderr_filters", None), ("virtual_local_rank", False), ("shutdown_timeout", None),
]  # fmt: skip
OWN_FIELDS = [
    ("exit_barrier_timeout", 300.0), ("log_max_bytes", None), ("log_format", "text"), ("worker_env", {}),
    ("no_retry_exit_codes", ()), ("restart_backoff", 1.0), ("restart_window", 0.0), ("retry_hopeless", False),
    ("max_no_progress", None), ("preflight", ()), ("hang_timeout", None),
    ("preload", ()), ("standby", False), ("proctitle", True), ("checkpoint_memory", None), ("checkpoint_dir", None),
    ("checkpoint_copies", 0), ("checkpoint_bandwidth", None), ("notify", None), ("signals_to_forward", ""),
    ("drain_grace", None), ("drain_signals", ""), ("drain_file", None), ("drain_forward", ""), ("health_port", None),
    ("health_addr", "127.0.0.1"), ("web", False),
]  # fmt: skip


def default_of(field: dataclasses.Field[Any]) -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else REQUIRED


def config(**changes: Any) -> LaunchConfig:
    return LaunchConfig(**{"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1, **changes})


def test_fields_order_and_defaults_are_torchs_then_ours():
    fields = dataclasses.fields(LaunchConfig)
    assert [(field.name, default_of(field)) for field in fields] == TORCH_FIELDS + OWN_FIELDS
    assert [field.name for field in fields if field.kw_only] == [name for name, _ in OWN_FIELDS]


def test_logs_specs_are_made_when_missing():
    assert isinstance(config().logs_specs, DefaultLogsSpecs)
    specs = DefaultLogsSpecs()
    assert config(logs_specs=specs).logs_specs is specs


@pytest.mark.parametrize(
    ("given", "configs", "timeout"),
    [(-1, {}, 900), (-1, {"timeout": "30"}, "30"), (60, {}, 60), (60, {"timeout": 30}, 60)],
)
def test_the_timeout_goes_into_the_rendezvous_settings(given: int, configs: dict[str, Any], timeout: object):
    asked = {"other": 1, **configs}
    made = config(rdzv_timeout=given, rdzv_configs=asked)
    assert made.rdzv_configs == {"other": 1, "timeout": timeout}
    assert asked == {"other": 1, **configs}, "what belongs to the caller is not changed"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_nodes", 0), ("min_nodes", "1"), ("max_nodes", 0), ("nproc_per_node", 0), ("nproc_per_node", 1.5),
        ("nproc_per_node", "many"), ("max_restarts", -1), ("monitor_interval", 0), ("monitor_interval", -1),
        ("monitor_interval", float("nan")), ("monitor_interval", "0.1"), ("start_method", "vfork"), ("role", "a\nb"),
        ("role", "a\0b"), ("role", None), ("run_id", "a\nb"), ("run_id", 7), ("rdzv_endpoint", "host\n"), ("local_addr", "a\r"),
        ("log_line_prefix_template", "${rank}\n"), ("shutdown_timeout", -1), ("shutdown_timeout", "30"), ("rdzv_timeout", -2),
        ("signals_to_handle", "SIGTERM,SIGNONE"), ("signals_to_handle", "15"), ("signals_to_handle", "SIGKILL"),
        ("numa_options", object()), ("exit_barrier_timeout", -1), ("exit_barrier_timeout", float("inf")), ("log_max_bytes", 0),
        ("log_format", "xml"),
        ("no_retry_exit_codes", (0,)), ("no_retry_exit_codes", (256,)), ("no_retry_exit_codes", 2), ("restart_backoff", -1),
        ("restart_backoff", float("nan")), ("restart_window", float("inf")), ("rdzv_configs", {"restart_window": "soon"}),
        ("rdzv_configs", {"backend": "x"}), ("worker_env", {"X": "a\0"}), ("worker_env", {"X": 1}), ("checkpoint_memory", 0),
        ("checkpoint_dir", "kept"), ("checkpoint_copies", 1), ("checkpoint_copies", 2), ("checkpoint_copies", -1),
        ("checkpoint_bandwidth", 0), ("drain_grace", 0), ("drain_signals", "USR1"), ("drain_file", "notice"),
        ("drain_forward", "USR1"), ("signals_to_forward", "KILL"), ("signals_to_forward", "NONE"),
    ],
)  # fmt: skip
def test_a_bad_value_is_told_by_its_field(field: str, value: object):
    with pytest.raises(UsageError, match=field) as caught:
        config(**{field: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("changes", "told"), [
    ({"drain_forward": "USR1,USR2"}, "drain_forward is one signal, not 'USR1,USR2'"),
    ({"drain_signals": "USR1,USR2", "signals_to_forward": "SIGUSR2"}, "signals_to_forward: SIGUSR2 is in drain_signals too"),
])  # fmt: skip
def test_a_signal_means_one_thing(changes: dict[str, Any], told: str):
    with pytest.raises(UsageError, match=told):
        config(drain_grace=5, **changes)


def test_fewer_nodes_at_most_than_at_least():
    with pytest.raises(UsageError, match="max_nodes is 1, fewer than min_nodes, which is 2"):
        config(min_nodes=2)


@pytest.mark.parametrize("changes", [
    {"shutdown_timeout": 0}, {"max_restarts": 0}, {"signals_to_handle": "SIGUSR1, SIGTERM"}, {"signals_to_handle": ""},
    {"start_method": "fork"}, {"monitor_interval": 5}, {"log_max_bytes": 1}, {"role": "träiner 1"}, {"worker_env": {"A": "b\nc"}},
    {"drain_grace": 1, "drain_signals": "usr1, SIGUSR2", "drain_file": "f", "drain_forward": "USR1", "signals_to_forward": "HUP"},
    {"checkpoint_memory": 1, "checkpoint_copies": 1, "checkpoint_bandwidth": 1, "checkpoint_dir": "kept"},
])  # fmt: skip
def test_good_values_pass(changes: dict[str, Any]):
    config(**changes)


@pytest.mark.parametrize(("name", "text", "value"), [
    ("no_retry_exit_codes", "64+2", (2, 64)), ("restart_backoff", "5", 5.0), ("restart_window", "60", 60.0),
])  # fmt: skip
def test_what_is_said_about_restarts_is_a_field_and_a_setting(name: str, text: str, value: Any):
    asked = {name: text}
    for made in (config(**{name: value}), config(rdzv_configs=asked), config(**{name: value}, rdzv_configs=asked)):
        assert getattr(made, name) == made.rdzv_configs[name] == value
        assert dataclasses.replace(made) == made
    assert asked == {name: text}, "what belongs to the caller is not changed"
    with pytest.raises(UsageError, match=name):
        config(**{name: value}, rdzv_configs={name: "7"})


def test_making_one_has_no_effect(monkeypatch: pytest.MonkeyPatch):
    before = dict(os.environ)
    monkeypatch.setattr(os, "mkdir", lambda *_args, **_options: pytest.fail("a folder was made"))
    config(worker_env={"A": "b"})
    assert dict(os.environ) == before


def test_the_shutdown_time_is_given_or_in_the_environment_or_thirty(monkeypatch: pytest.MonkeyPatch):
    assert resolve_shutdown_timeout(None) == 30
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert resolve_shutdown_timeout(None) == 7
    assert resolve_shutdown_timeout(0) == 0
    for bad in ("soon", "-1", "1.5"):
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", bad)
        with pytest.raises(UsageError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
            resolve_shutdown_timeout(None)
