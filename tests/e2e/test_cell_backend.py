"""A third party's back end, written against torch's interface alone, carries a real job of several agents."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# A cell in a file, as somebody who knows only the interface would write it, and an agent on it.
AGENT = """
    import fcntl
    import os
    import sys
    from datetime import timedelta

    from rallypoint import LocalElasticAgent, WorkerSpec
    from rallypoint.output.log_specs import DefaultLogsSpecs
    from rallypoint.rendezvous.dynamic_handler import DynamicRendezvousHandler, RendezvousBackend, RendezvousTimeout
    from rallypoint.store.hash_store import HashStore


    class FileBackend(RendezvousBackend):
        name = "file-cell"

        def __init__(self, path):
            self.path = path

        def _locked(self, change):
            with open(self.path, "a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                version, _, state = file.read().partition(b"\\n")
                found = (state, int(version)) if version else None
                written = change(found)
                if written is not None:
                    file.seek(0)
                    file.truncate()
                    file.write(b"%d\\n" % written[1] + written[0])
                return found if written is None else written

        def get_state(self):
            return self._locked(lambda found: None)

        def set_state(self, state, token=None):
            before = []

            def change(found):
                before.append(found)
                if token == (found[1] if found else None):
                    return state, (token or 0) + 1

            found = self._locked(change)
            return None if found is None else (*found, found[0] == state)


    folder, min_nodes, max_nodes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    handler = DynamicRendezvousHandler.from_backend(
        "job", HashStore(), FileBackend(f"{folder}/cell"), min_nodes, max_nodes, "127.0.0.1",
        timeout=RendezvousTimeout(last_call=timedelta(seconds=0.5)), keep_alive_interval=0.5, keep_alive_max_attempt=3,
    )
    worker = f'echo "$RANK of $WORLD_SIZE" > {folder}/$TORCHELASTIC_RESTART_COUNT.$WORLD_SIZE.$RANK.{os.getpid()};'
    worker += f" until test -e {folder}/finish; do rm {folder}/fail.$RANK 2>/dev/null && exit 3; sleep 0.05; done"
    spec = WorkerSpec("trainer", 1, handler, entrypoint="/bin/sh", args=("-c", worker), max_restarts=3)
    agent = LocalElasticAgent(spec, DefaultLogsSpecs())
    result = agent.run()
    handler.shutdown()
    print("failed" if result.is_failed() else "succeeded")
"""


class Agents:
    """Agents of one job, and what their workers have written."""

    def __init__(self, script: Path, folder: Path, size: tuple[int, int]) -> None:
        self.folder = folder
        self._command = [sys.executable, str(script), str(folder), *map(str, size)]
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        with self._log(len(self.running)).open("wb") as log:
            self.running.append(subprocess.Popen(self._command, stdout=log, stderr=log))
        return self.running[-1]

    def _log(self, index: int) -> Path:
        return self.folder / f"agent_{index}.log"

    def ranks(self, world_size: int, *agents: subprocess.Popen[bytes]) -> set[str]:
        """The ranks that workers of these agents had in a world of that size."""
        found = (path.name.split(".") for path in self.folder.glob(f"*.{world_size}.*"))
        return {rank for _, _, rank, pid in found if int(pid) in {agent.pid for agent in agents}}

    def forget(self) -> None:
        """What workers have written until now."""
        for file in self.folder.glob("*.*.*.*"):
            file.unlink()

    def finish(self) -> list[tuple[int, str]]:
        """The exit codes and last lines of the agents."""
        (self.folder / "finish").touch()
        ends = [agent.wait(15) for agent in self.running]
        return [(code, self._log(index).read_text().strip().rpartition("\n")[2]) for index, code in enumerate(ends)]


@pytest.fixture
def agents(script: Any, tmp_path: Path, private_tmpdir: Path) -> Iterator[Agents]:
    folder = tmp_path / "job"
    folder.mkdir()
    found = Agents(script(AGENT, "agent.py"), folder, (2, 3))
    yield found
    for agent in found.running:
        agent.terminate()
        agent.wait(15)
    for left in private_tmpdir.glob("rallypoint_*"):  # whoever is killed cannot clear up
        shutil.rmtree(left)


def test_a_job_of_three_agents_loses_one_and_takes_in_another(agents: Agents, wait_until: Any) -> None:
    one, two = agents.start(), agents.start()
    wait_until(lambda: agents.ranks(2, one, two) == {"0", "1"})
    three = agents.start()
    wait_until(lambda: agents.ranks(3, one, two, three) == {"0", "1", "2"})
    (agents.folder / "fail.1").touch()
    wait_until(lambda: len(list(agents.folder.glob("1.3.*"))) == 3)  # a worker's failure restarts all of them
    agents.forget()
    three.kill()
    wait_until(lambda: agents.ranks(2, one, two) == {"0", "1"})
    four = agents.start()
    wait_until(lambda: agents.ranks(3, one, two, four) == {"0", "1", "2"})
    ends = agents.finish()
    assert ends.pop(2)[0] == -signal.SIGKILL
    assert ends == [(0, "succeeded")] * 3


def test_an_agent_that_was_stopped_for_too_long_comes_back(agents: Agents, wait_until: Any) -> None:
    """The others go on without it; when it wakes, its workers must not run on in a generation that is over."""
    nodes = [agents.start() for _ in range(3)]
    wait_until(lambda: agents.ranks(3, *nodes) == {"0", "1", "2"})
    agents.forget()
    nodes[2].send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: agents.ranks(2, *nodes[:2]) == {"0", "1"})
    finally:
        nodes[2].send_signal(signal.SIGCONT)
    wait_until(lambda: agents.ranks(3, *nodes) == {"0", "1", "2"})
    assert agents.finish() == [(0, "succeeded")] * 3
