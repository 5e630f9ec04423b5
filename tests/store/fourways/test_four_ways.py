"""The same script of store operations on all pairs of client and server, torch's and ours: the same results, exceptions, times.

The script says what is expected, so that our client on our server is tested without torch too. Clients and servers are in
processes of their own: torch's client keeps the interpreter's lock while it waits for some answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

FOLDER = Path(__file__).parent
SCRIPT_S = 100.0
END_S = 10.0
# Torch's stores look up the name of everybody whom they meet, and wait for seconds where no name server answers.
NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class Record(NamedTuple):
    """Of one step, in words."""

    outcome: str
    expected: str


def command(program: str, *arguments: str) -> list[str]:
    return [sys.executable, str(FOLDER / program), *arguments]


def run_way(client: str, server: str) -> dict[str, Record]:
    """What came of each step, by its name."""
    env = {**os.environ, **NO_NAME_SERVER}
    serve, script = command("server.py", server), command("script.py", client, server)
    with subprocess.Popen(serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as serving:
        try:
            told = subprocess.run(script, stdin=serving.stdout, stdout=subprocess.PIPE, env=env, timeout=SCRIPT_S, check=True)
            assert serving.poll() is None, "the server has ended"
            serving.communicate(timeout=END_S)  # which ends its stdin, and so the server
        finally:
            serving.kill()
    assert serving.returncode == 0
    return {name: Record(*record) for name, record in json.loads(told.stdout).items()}


def unexpected(records: dict[str, Record]) -> dict[str, Record]:
    return {name: record for name, record in records.items() if record.outcome != record.expected}


@pytest.fixture(scope="module")
def torch_on_torch() -> dict[str, Record]:
    return run_way("torch", "torch")


def test_our_client_on_our_server() -> None:
    assert unexpected(run_way("ours", "ours")) == {}


@pytest.mark.torch
def test_torchs_client_on_torchs_server(torch_on_torch: dict[str, Record]) -> None:
    assert unexpected(torch_on_torch) == {}


@pytest.mark.torch
@pytest.mark.parametrize(("client", "server"), [("torch", "ours"), ("ours", "torch")])
def test_one_of_each_does_what_torchs_do(client: str, server: str, torch_on_torch: dict[str, Record]) -> None:
    """But for the differences that the script names: there the expectations differ as well."""
    records = run_way(client, server)
    assert unexpected(records) == {}
    named = {name for name, record in records.items() if record.expected != torch_on_torch[name].expected}
    assert {name for name, record in records.items() if record.outcome != torch_on_torch[name].outcome} == named
    assert records.keys() == torch_on_torch.keys()
