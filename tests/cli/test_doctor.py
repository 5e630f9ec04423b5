"""``rallypoint doctor``: a table, or JSON, and an exit code that tells whether anything is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from tests import ports

from rallypoint.cli.doctor import doctor_main
from rallypoint.errors import ExitCode


def test_this_machine_is_examined(capfd: pytest.CaptureFixture[str]) -> None:
    """P29"""
    assert doctor_main(["--checks", "memory=1,files=1"]) == ExitCode.SUCCESS
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["ok", "memory"], ["ok", "files"]]


def test_what_is_wrong_is_in_the_json_with_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    """P29: and the exit code says that another machine may do better."""
    assert doctor_main(["--json", "--checks=files=9000000000", "--endpoint", "no-such-host.invalid"]) == ExitCode.HOST_UNUSABLE
    told = json.loads(capfd.readouterr().out)
    assert told["is_fit"] is False
    bad = {one["check"]: one for one in told["findings"] if one["state"] == "bad"}
    assert set(bad) == {"files", "resolve"}
    assert all(one["advice"] for one in bad.values())


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--endpont", "x"], "did you mean --endpoint?"),
        (["--endpoint"], "--endpoint needs a value"),
        (["--checks", "gpus"], "--checks: 'gpus' is no check"),
        (["--endpoint", "a:b"], "a:b"),
        (["--listen", "many"], "--listen: 'many' is not a port"),
        (["job"], "unknown argument job"),
    ],
)
def test_bad_input_is_told(argv: list[str], told: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert doctor_main(argv) == ExitCode.USAGE
    assert told in capfd.readouterr().err


def test_one_doctor_listens_and_another_comes(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.preflight.network.ANSWER_TIMEOUT_S", 30.0)
    port = ports.free_port()
    command = [sys.executable, "-m", "rallypoint", "doctor", "--listen", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as listening:
        assert listening.stdout is not None
        assert b"rallypoint doctor --endpoint " in listening.stdout.readline()
        assert doctor_main(["--checks", "files=1", "--endpoint", f"127.0.0.1:{port}"]) == ExitCode.SUCCESS
        listening.send_signal(signal.SIGINT)
        assert listening.wait() == 128 + signal.SIGINT
    out = capfd.readouterr().out
    assert "ok   answers     another `rallypoint doctor --listen`" in out
    assert "ok   way back" in out
