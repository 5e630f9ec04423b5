"""Objects of torch that go in and come out, where the program has imported it. One interpreter serves all: torch is slow."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.torch

PROGRAM = """
import json
from unittest import mock

import torch
from torch.numa.binding import AffinityMode, NumaOptions

from rallypoint import DefaultLogsSpecs, start_processes
from rallypoint.affinity import read_options
from rallypoint.torch_run import determine_local_world_size


def tensor_of(rank):
    return {"ones": torch.ones(2) * rank, "rank": rank}


def asked(nproc, **devices):
    patches = [mock.patch(f"torch.{module}.{name}", return_value=value)
               for module, values in devices.items() for name, value in zip(("is_available", "device_count"), values)]
    for patch in patches:
        patch.start()
    try:
        return determine_local_world_size(nproc)
    except ValueError as error:
        return type(error).__mro__[2].__name__
    finally:
        mock.patch.stopall()


def main():
    context = start_processes("t", tensor_of, {0: (2,)}, {0: {}}, DefaultLogsSpecs())
    returned = context.wait(60).return_values[0]
    context.close()
    options = read_options(NumaOptions(AffinityMode.SOCKET, should_fall_back_if_binding_fails=True))
    print(json.dumps({
        "returned": [returned["ones"].tolist(), returned["rank"]],
        "gpu": asked("gpu", cuda=(True, 3)),
        "no gpu": asked("gpu", cuda=(False, 3)),
        "xpu": asked("xpu", xpu=(True, 5)),
        "no xpu": asked("xpu", xpu=(False, 5)),
        "auto": asked("auto", accelerator=(True, 7), cuda=(True, 3)),
        "auto without": asked("auto", accelerator=(False, 7), cuda=(True, 3)) == determine_local_world_size("cpu"),
        "numa": [options.affinity_mode.value, options.should_fall_back_if_binding_fails],
    }))


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program found."""
    program = tmp_path_factory.mktemp("with_torch") / "program.py"
    program.write_text(PROGRAM)
    answer = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def test_workers_may_return_tensors(facts: dict[str, Any]) -> None:
    assert facts["returned"] == [[2.0, 2.0], 2]


def test_devices_are_those_that_torch_counts(facts: dict[str, Any]) -> None:
    assert (facts["gpu"], facts["xpu"], facts["auto"], facts["auto without"]) == (3, 5, 7, True)
    assert (facts["no gpu"], facts["no xpu"]) == ("ValueError", "ValueError")


def test_torchs_own_numa_options_are_taken(facts: dict[str, Any]) -> None:
    assert facts["numa"] == ["socket", True]
