"""A handful of jobs with an installed rallypoint and nothing else: no repository, no test runner.

It is run by the interpreter that has it: ``env/bin/python smoke.py``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

__all__: list[str] = []

COMMANDS = Path(sys.executable).parent
TIMEOUT_S = 120.0
PROGRAMS = {
    "hello.py": "import os\nprint('worker', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n",
    "fails.py": "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('the learning rate is negative')\n",
    "recovers.py": """
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), 9)
print("recovered")
""",
    "launches.py": """
import rallypoint

def square(number):
    return number * number

if __name__ == "__main__":
    print(list(rallypoint.launch(square, nproc=2, args=(7,))))
""",
    "loads_nothing.py": """
import sys
before = set(sys.modules)
import rallypoint
loaded = set(sys.modules) - before
assert loaded <= {"rallypoint", "__future__"}, loaded
import rallypoint.agent.launch
assert not {"torch", "numpy", "logging", "argparse", "asyncio", "dataclasses", "typing"} & (set(sys.modules) - before)
""",
    "compatible.py": """
import rallypoint.compat
rallypoint.compat.install()
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
import rallypoint
assert LaunchConfig is rallypoint.LaunchConfig
""",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in PROGRAMS.items():
            Path(folder, name).write_text(text)
        os.chdir(folder)
        launched, demo = "[49, 49]", "done: all 12 steps, exit code 0"
        expect(["rallyrun", "--standalone", "--nproc-per-node", "2", "hello.py"], 0, "worker 0 of 2", "worker 1 of 2")
        expect(
            ["rallyrun", "--standalone", "--nproc-per-node", "2", "fails.py"], 1, "rank 1 raised ValueError: the learning rate"
        )
        expect(["rallyrun", "--standalone", "--max-restarts", "1", "recovers.py"], 0, "recovered", "restart 1 of 1")
        expect(["rallyrun", "--standalone", "--nproc-per-nod", "2", "hello.py"], 2, "--nproc-per-node")
        expect(["python", "-m", "rallypoint", "run", "--standalone", "hello.py"], 0, "worker 0 of 1")
        expect(["python", "launches.py"], 0, launched)
        for program in ("loads_nothing.py", "compatible.py"):
            expect(["python", program], 0)
        expect(["rallyrun", "--standalone", "--log-dir", "logs", "hello.py"], 0)
        expect(["rallypoint", "explain", "logs"], 0, "generation 1")
        two_nodes()
        expect(["rallypoint", "demo"], 0, demo)
    print(f"smoke: all well on Python {'.'.join(map(str, sys.version_info[:3]))}")


def expect(command: list[str], code: int, *words: str) -> None:
    done = start(command)
    printed = done.communicate(timeout=TIMEOUT_S)[0]
    missing = [word for word in words if word not in printed]
    if done.returncode != code or missing:
        raise SystemExit(f"smoke: {' '.join(command)}: exit code {done.returncode}, not {code}, or without {missing}:\n{printed}")


def two_nodes() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    command = ["rallyrun", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "hello.py"]
    nodes = [start(command) for _ in range(2)]
    printed = "".join(node.communicate(timeout=TIMEOUT_S)[0] for node in nodes)
    if [node.returncode for node in nodes] != [0, 0] or not {"worker 0 of 2", "worker 1 of 2"} <= set(printed.splitlines()):
        raise SystemExit(f"smoke: two nodes: exit codes {[node.returncode for node in nodes]}:\n{printed}")


def start(command: list[str]) -> subprocess.Popen[str]:
    environment = {"PATH": f"{COMMANDS}:{os.defpath}", "HOME": os.getcwd(), "LANG": "C.UTF-8"}
    program = sys.executable if command[0] == "python" else str(COMMANDS / command[0])
    return subprocess.Popen(
        [program, *command[1:]],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


if __name__ == "__main__":
    main()
