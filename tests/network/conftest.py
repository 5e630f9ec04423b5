"""``network(n)``: machines on a switch, and the check that nothing of them is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.network.machines import NAMES, TOOLS, Network


def network_state() -> tuple[set[str], set[str]]:
    """Namespaces and links of the real machine, by what their tools print; links of others may come and go."""
    listed = [subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
              for command in (("ip", "netns", "list"), ("ip", "-o", "link"))]  # fmt: skip
    namespaces, links = listed
    return {line.split()[0] for line in namespaces}, {line.split(":")[1] for line in links}


@pytest.fixture
def network(tmp_path: Path, private_tmpdir: Path) -> Iterator[Callable[[int], Network]]:
    """``network(n)``: n nodes on a switch; removed after the test, which fails if anything of them is left."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: iproute2 and util-linux are needed")
    before = network_state()
    made: list[Network] = []

    def make(nodes: int) -> Network:
        made.append(Network(nodes, tmp_path / f"network_{len(made)}"))
        try:
            made[-1].build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no namespaces here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        except OSError as error:
            pytest.skip(f"no TUN devices in namespaces here: {error}")
        return made[-1]

    yield make
    for one in made:
        one.remove()
        print(one.said())
    for folder in private_tmpdir.glob("rallypoint_*"):  # whoever is killed cannot clear up after itself
        if any(agent.process.returncode == -signal.SIGKILL for one in made for agent in one.agents()):
            shutil.rmtree(folder)
    prefix = f"rally{os.getpid()}x"
    after = network_state()
    left = [name for now, then in zip(after, before, strict=True) for name in now - then if prefix in name]
    left += [str(path) for path in NAMES.glob(f"{prefix}*")]
    assert not left, f"left behind: {left}"
