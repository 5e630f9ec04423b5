"""Control sockets under rallyrun: one variable for all workers, and a socket for each of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.control.workers import VARIABLE, ask, finish, running

from rallypoint.cli.stacks import stacks_main

WORKER = """
    import os, time
    from rallypoint.control_plane import worker_main

    with worker_main():
        print("ready", flush=True)
        while not os.path.exists("go on"):
            time.sleep(0.01)
"""


@pytest.mark.parametrize("arguments", [[], ["--virtual-local-rank"]])
def test_each_worker_has_a_socket_of_its_own(
    start_rallyrun: Callable[..., Any],
    script: Callable[..., Path],
    tmp_path: Path,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "control.sock"
    job = start_rallyrun(["--standalone", "--nproc-per-node", "3", *arguments, script(WORKER)], env={VARIABLE: str(path)})
    job.wait_for(lambda: job.stdout.count("ready") == 3)
    for rank in range(3):
        assert json.loads(ask(f"{path}.{rank}", "POST", "/handler/env")[1])["RANK"] == str(rank)
    assert stacks_main([str(job.pid)]) == 0
    assert capsys.readouterr().out.count("=== process") == 3
    (tmp_path / "go on").touch()
    assert job.wait() == 0
    assert not list(tmp_path.glob("control.sock*"))


def test_a_lone_worker_has_the_path_as_it_is(
    start_rallyrun: Callable[..., Any], script: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "control.sock"
    job = start_rallyrun([script(WORKER)], env={VARIABLE: str(path)})
    job.wait_for_line("ready")
    assert ask(path, "POST", "/handler/ping") == (200, "pong")
    (tmp_path / "go on").touch()
    assert job.wait() == 0


FUNCTIONS = """
    import os, time
    from rallypoint import LaunchConfig, elastic_launch
    from rallypoint.control_plane import worker_main

    def train_in_a_fork():
        with worker_main():
            print("ready", flush=True)
            while not os.path.exists("go on"):
                time.sleep(0.01)

    config = LaunchConfig(
        1, 1, 2, rdzv_backend="static", rdzv_endpoint="127.0.0.1:0", rdzv_configs={"rank": 0}, start_method="fork"
    )
    elastic_launch(config, train_in_a_fork)()
"""


def test_functions_are_found_below_their_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    """A fork shows the environment of its launcher in /proc, where the path is the one for all."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "control.sock"
    with running(FUNCTIONS, {VARIABLE: str(path)}) as launcher:
        wait_until(lambda: len(list(tmp_path.glob("control.sock.*"))) == 2)
        assert stacks_main([str(launcher.pid)]) == 0
        out = capsys.readouterr().out
        assert out.count("=== process") == 2
        assert out.count("in train_in_a_fork") == 2
        (tmp_path / "go on").touch()
        assert finish(launcher)[0] == 0
