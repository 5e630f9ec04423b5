"""Helpers of torch's with an underscore, as those who import them know them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rallypoint.compat import private_names
from rallypoint.compat.private_names import PeriodicTimer


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("a=1,b=2", {"a": "1", "b": "2"}), ("", {}), ("  ", {}), (" a = 1 , b = 2 ", {"a": "1", "b": "2"}),
        ("a=1=2", {"a": "1=2"}), ("a", None), ("a=", None), ("=1", None), ("a=1,,b=2", None),
    ],
)  # fmt: skip
def test_configs_of_a_rendezvous(text: str, config: dict[str, str] | None) -> None:
    if config is not None:
        assert private_names.parse_rendezvous_config(text) == config
    else:
        with pytest.raises(ValueError, match="rendezvous configuration"):
            private_names.parse_rendezvous_config(text)


@pytest.mark.parametrize(("text", "port"), [("80", 80), ("0", 0), (" 80", None), ("x", None), ("", None), ("-1", None)])
def test_ports(text: str, port: int | None) -> None:
    assert private_names.try_parse_port(text) == port


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [("localhost", True), ("127.0.0.1", True), ("127.0.0.2", True), ("0.0.0.0", False), ("", False), ("192.0.2.1", False)],
)
def test_names_of_this_machine(host: str, is_ours: bool) -> None:
    assert private_names.matches_machine_hostname(host) == is_ours


def test_ranks_must_be_complete() -> None:
    private_names.validate_full_rank({0: "a", 1: "b"}, 2, "args")
    with pytest.raises(RuntimeError, match="args, local rank mapping mismatch"):
        private_names.validate_full_rank({0: "a"}, 2, "args")


@pytest.mark.parametrize("by", ["cancel", "the last reference"])
def test_a_periodic_timer_calls_until_it_ends(by: str, wait_until: Any) -> None:
    ticks: list[str] = []
    timer: PeriodicTimer | None = PeriodicTimer(timedelta(seconds=0.005), ticks.append, "tick")
    assert timer is not None
    timer.set_name("ticking")
    timer.start()
    with pytest.raises(RuntimeError, match="already started"):
        timer.start()
    wait_until(lambda: len(ticks) > 2)
    if by == "cancel":
        timer.cancel()
        timer.cancel()
    timer = None
    gc.collect()
    assert [thread.name for thread in threading.enumerate() if thread.name == "ticking"] == []


def test_a_function_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves when it is told that its result was read."""
    monkeypatch.setenv("SEEN", "")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    results, is_read = multiprocessing.SimpleQueue(), threading.Event()
    is_read.set()
    arguments = ({0: (2,)}, {0: {"SEEN": "yes"}}, {0: str(tmp_path / "out")}, {0: ""}, {0: results}, is_read, None)
    private_names.run_function(0, lambda number: os.write(1, b"said") + number, *arguments)
    assert (results.get(), os.environ["SEEN"], (tmp_path / "out").read_text()) == (6, "yes", "said")
    results.close()
