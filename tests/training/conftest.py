"""Real programs under real launchers: each is a command beside the test, whose workers tell what they found, one line each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"
STARTS_S = 150.0  # two cores load torch for four processes in 4 s when nobody else needs them
ENDS_S = 5.0
TORCHRUN = "import sys; from torch.distributed.run import main; sys.tracebacklimit = 0; main()"
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(PROGRAMS), "TOKENIZERS_PARALLELISM": "false"}


def descendants(pid: int) -> list[int]:
    """The children of a process, and theirs."""
    children = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return [*children, *(one for child in children for one in descendants(child))]


class Launched:
    """A launcher beside the test; what it and its workers print is in one file."""

    def __init__(self, command: Sequence[str | Path], folder: Path, env: dict[str, str]) -> None:
        folder.mkdir()
        self._printed = folder / "printed.txt"
        with self._printed.open("wb") as printed:
            self.process = subprocess.Popen(
                [os.fspath(part) for part in command], cwd=folder, env={**os.environ, **ENVIRONMENT, **env},
                stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
            )  # fmt: skip

    @property
    def printed(self) -> str:
        return self._printed.read_text(errors="replace")

    def told(self) -> list[dict[str, Any]]:
        """What the workers said, in the order in which they did."""
        return [json.loads(line) for line in re.findall(r"TOLD (\{.*\})\n", self.printed)]

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = STARTS_S) -> Any:
        """The first true value of `condition`; fails when the launcher ends before, or after `timeout_s`."""
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            is_over = self.process.poll() is not None and not condition()
            if is_over or time.monotonic() > deadline:
                how = f"ended with {self.process.returncode}" if is_over else "still runs"
                pytest.fail(f"waited {timeout_s:g} s for a condition in vain; the launcher {how}:\n{self.printed}")
            time.sleep(0.01)
        return value

    def wait_for_told(self, timeout_s: float = STARTS_S, **wanted: Any) -> dict[str, Any]:
        """The latest that a worker said with these values in it."""
        __tracebackhide__ = True

        def last() -> dict[str, Any] | None:
            return next((told for told in reversed(self.told()) if wanted.items() <= told.items()), None)

        found: dict[str, Any] = self.wait_for(last, timeout_s)
        return found

    def wait(self, timeout_s: float = STARTS_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still ran after {timeout_s:g} s:\n{self.printed}")

    def kill_node(self) -> None:
        """The whole machine is gone: the launcher and all that it has started, at once."""
        self.process.send_signal(signal.SIGSTOP)  # so that it cannot see them die first
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Asked to stop, then killed with all that it has started."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDS_S)
        if self.process.poll() is None:
            self.kill_node()


class Launch:
    """``launch(command)`` starts anything; the others say which launcher. All end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.finish_file = folder / "finish"
        self.all: list[Launched] = []

    def __call__(self, *command: str | Path, **env: str) -> Launched:
        self.all.append(Launched(command, self.folder / f"launched_{len(self.all)}", env))
        return self.all[-1]

    def python(self, *arguments: str | Path, **env: str) -> Launched:
        return self(sys.executable, *arguments, **env)

    def torchrun(self, *arguments: str | Path, **env: str) -> Launched:
        return self.python("-c", TORCHRUN, *arguments, **env)

    def rallyrun(self, *arguments: str | Path, **env: str) -> Launched:
        return self.python("-m", "rallypoint", "run", *arguments, **env)

    def finish(self) -> None:
        """Programs that were given `finish_file` may end."""
        self.finish_file.touch()


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of the programs that these tests run."""
    return PROGRAMS


@pytest.fixture
def launch(tmp_path: Path, private_tmpdir: Path) -> Iterator[Launch]:
    """``launch.torchrun(…)``, ``launch.rallyrun(…)``, ``launch.python(…)``: see `Launch`."""
    launch = Launch(tmp_path)
    yield launch
    for one in launch.all:
        one.end()
        print(f"--- {one.process.args}, which ended with {one.process.returncode}:\n{one.printed}")
    if any(one.process.returncode == -signal.SIGKILL for one in launch.all):
        for folder in private_tmpdir.iterdir():  # whoever is killed cannot clear up
            shutil.rmtree(folder, ignore_errors=True)
