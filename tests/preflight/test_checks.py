"""Checks of this very machine, with commands and plug-ins that are really run."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any

import pytest

from rallypoint.preflight import checks, rules
from rallypoint.preflight.checks import read_specs, run_all

SMI = "#!/bin/sh\n{}\n"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``smi(script)`` puts an nvidia-smi in front of any other."""

    def write(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(SMI.format(script))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr("rallypoint.failures.memory_kills.read_kernel_log", list)  # of whatever machine this is

    return write


def test_every_check_of_ours_looks_at_this_machine() -> None:
    found = run_all(read_specs(["memory=1", "disk=1", "shm=1", "files=1", "clock"]))
    assert [one.check for one in found] == ["memory", "disk", "shm", "files", "clock"]
    assert [one.state for one in found if one.check != "clock"] == ["ok"] * 4
    assert all(one.what for one in found)
    too_much = run_all(read_specs(["memory=1000000G", "disk=1000000G", "files=9000000000"]))
    assert [one.state for one in too_much] == ["bad", "bad", "bad"]


def test_nvidia_smi_is_asked(smi: Any) -> None:
    """P29: with the fields that the parser reads."""
    smi(f'test "$1" = "--query-gpu={rules.SMI_FIELDS}" && echo "0, NVIDIA H200, 0, [N/A]"')
    (found,) = run_all(read_specs(["gpu=1"]))
    assert (found.state, found.what) == ("ok", "1 device: NVIDIA H200")
    smi("echo 'Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.'; exit 15")
    (found,) = run_all(read_specs(["gpu"]))
    assert (found.state, found.what.endswith("GPU is lost.")) == ("bad", True)


def test_an_nvidia_smi_that_knows_fewer_fields_is_asked_for_those(smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """P29: what cannot be read counts as fit; the rest is still read."""
    smi(
        'for field in remapped_rows.failure remapped_rows.pending; do case "$1" in *$field*)'
        ' echo "Field \\"$field\\" is not a valid field to query."; exit 2;; esac; done; echo "0, Tesla P100, $ERRORS, No"'
    )
    for errors, state in (("0", "ok"), ("2", "bad")):
        monkeypatch.setenv("ERRORS", errors)
        (found,) = run_all(read_specs(["gpu=1"]))
        assert (found.state, "Tesla P100" in found.what) == (state, True)


def test_the_folder_for_logs_is_looked_at_before_it_is_made(tmp_path: Path) -> None:
    (spec,) = read_specs(["disk=1"])
    folder = tmp_path / "logs" / "of a run"
    (found,) = run_all([spec.replace(folders=(str(folder),))])
    assert (found.state, f"{tmp_path}: " in found.what, folder.exists()) == ("ok", True, False)
    (tmp_path / "logs").touch()
    (found,) = run_all([spec.replace(folders=(str(tmp_path / "logs"),))])
    assert (found.state, found.what) == ("bad", f"{tmp_path / 'logs'}: Not a directory")


def test_a_command_tells_by_its_exit_code_and_its_last_line() -> None:
    good, bad, missing = run_all(read_specs(["/bin/true", "sh -c 'echo looking; echo link down >&2; exit 3'", "/nowhere/check"]))
    assert (good.check, good.state) == ("true", "ok")
    assert (bad.check, bad.state, bad.what) == ("sh", "bad", "link down (exit code 3)")
    assert (missing.state, missing.what) == ("bad", "/nowhere/check: No such file or directory (exit code 1)")


def test_a_command_that_hangs_is_ended_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """P29: a fixture sees that nothing of it is left."""
    monkeypatch.setattr(checks, "CHECK_TIMEOUT_S", 5.0)  # it has to have begun by then
    (found,) = run_all(read_specs(["sh -c 'echo waiting; sleep 600 & sleep 600'"]))
    assert (found.state, found.what.startswith("waiting (no answer within ")) == ("bad", True)


def test_nothing_of_a_command_outlives_whoever_asked_for_it(
    start_rallyrun: Any, tmp_path: Path, wait_until: Any, alive: Any
) -> None:
    """P29: not even what it started in the background, after kill -9."""
    note = tmp_path / "pids"
    check = f"sh -c 'sleep 600 & echo $! $$ > {note}; sleep 600'"
    agent = start_rallyrun(["--standalone", "--preflight", check, "--no-python", "true"])
    wait_until(lambda: note.exists() and len(note.read_text().split()) == 2)
    agent.process.kill()
    agent.process.wait()
    wait_until(lambda: not any(alive(int(pid)) for pid in note.read_text().split()))


def test_a_plug_in_says_why_a_machine_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    class PlugIn:
        def __init__(self, name: str, says: Any) -> None:
            self.name, self._says = name, says

        def load(self) -> Any:
            return self._says

    def raises() -> str:
        raise OSError("no fabric")

    plug_ins = [PlugIn("fit", lambda: None), PlugIn("unfit", lambda: "two links are down"), PlugIn("broken", raises)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plug_ins if group == "rallypoint.preflight" else [])
    found = run_all(read_specs(["fit", "unfit", "broken"]))
    assert [(one.check, one.state, one.what) for one in found] == [
        ("fit", "ok", "fit"), ("unfit", "bad", "two links are down"), ("broken", "bad", "OSError: no fabric"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"'fabric' is no check: there are .*, broken, fit, unfit"):
        read_specs(["fabric"])
