"""Workers as ``ps`` shows them: by rank and job, in every generation, however they were started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import RunRallyrun, StartRallyrun

WAIT_S = 120

# Each worker waits for its title, and says it; those of the first attempt fail then, together.
WORKER = f"""
    import os, sys, time
    deadline = time.monotonic() + {WAIT_S}
    while not (shown := open("/proc/self/cmdline").read()).startswith("rank") and time.monotonic() < deadline:
        time.sleep(0.01)
    print(f"<{{shown.rstrip(chr(0))}}>", sys.argv[1:], flush=True)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    open(f"{{sys.argv[1]}}/{{attempt}}.{{os.environ['RANK']}}", "w").close()
    while not all(os.path.exists(f"{{sys.argv[1]}}/{{attempt}}.{{rank}}") for rank in range(2)):
        time.sleep(0.01)
    sys.exit(attempt == "0")
"""


@pytest.mark.parametrize("more", [(), ("--preload", "decimal")], ids=["fresh", "warm"])
def test_each_generation_is_named(more: tuple[str, ...], rallyrun: RunRallyrun, script: Any, orders: Path) -> None:
    meeting = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "my\x1bjob"]
    worker = script(WORKER)
    ended = rallyrun(
        [*meeting, "--nproc-per-node", "2", "--max-restarts", "1", *more, worker, orders, "${local_rank}"], timeout=WAIT_S
    )
    assert ended.returncode == 0, ended.stderr
    python = os.path.basename(sys.executable)
    expected = [f"<rank {rank}/2 my job: {python} {worker} {orders} {rank}> ['{orders}', '{rank}']" for rank in range(2)]
    assert sorted(ended.stdout.splitlines()) == sorted(expected * 2)


@pytest.mark.parametrize("way", ["flag", "variable", "no-python"])
def test_it_can_be_turned_off_and_is_not_for_other_programs(
    way: str, start_rallyrun: StartRallyrun, script: Any, wait_until: Callable[..., Any]
) -> None:
    """The worker of another job, which has its title by now, shows that there was time for it."""
    sleeper = script("import time; print('up', flush=True); time.sleep(600)")
    flags = {"flag": ["--no-proctitle", sleeper], "no-python": ["--no-python", "sh", "-c", "echo up; sleep 600; :"]}
    plain = start_rallyrun(["--standalone", *flags.get(way, [sleeper])], {"PET_NO_PROCTITLE": "1"} if way == "variable" else {})
    plain.wait_for_line("up")
    named = start_rallyrun(["--standalone", sleeper])
    wait_until(lambda: "rank 0/1" in _all_below(named.pid), WAIT_S)
    assert "rank 0/1" not in _all_below(plain.pid)
    for job in (plain, named):
        job.send_signal(signal.SIGTERM)
        job.wait()


def _all_below(pid: int) -> str:
    """The commands of all that is below a process."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        own = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
    return own + "\n" + "".join(_all_below(int(child)) for child in children)


FUNCTIONS = f"""
    import sys, time
    from rallypoint import launch
    def train():
        deadline = time.monotonic() + {WAIT_S}
        while not (shown := open("/proc/self/cmdline").read()).startswith("rank") and time.monotonic() < deadline:
            time.sleep(0.01)
        return shown.rstrip(chr(0))
    if __name__ == "__main__":
        print(*launch(train, 2, start_method=sys.argv[1], run_id="my-job", rdzv_timeout=60), sep="\\n")
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_functions_are_named_too(method: str, script: Any, start_command: Any) -> None:
    command = start_command([sys.executable, str(script(FUNCTIONS, "functions_with_a_long_name.py")), method])
    assert command.wait(WAIT_S) == 0, command.stderr
    assert command.stdout.splitlines() == [f"rank {rank}/2 my-job: train" for rank in range(2)]
