"""How workers are stopped: with the signal that was received, in the time that was given, all at once, and never for ever."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import Any

import pytest
from tests.conftest import AT_ONCE_S
from tests.pace import is_under

GRACE = "3"
GRACE_S = float(GRACE)
MOST_S = 4 * GRACE_S  # four workers, one grace: one after the other would take as long

# Every worker but the one that is told to fail ignores polite signals. The clock is the same for all processes of a machine.
STUBBORN = """
import os, signal, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "1":
    os.write(1, f"again {time.monotonic_ns()}\\n".encode())
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.write(1, f"ready {os.getpid()}\\n".encode())
if rank == "0" and len(sys.argv) > 1:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.005)
    os.write(1, f"failing {time.monotonic_ns()}\\n".encode())
    sys.exit(1)
time.sleep(60)
"""


def start_four(start_rallyrun: Any, numbers: Any, args: list[Any], env: dict[str, str] | None = None) -> Any:
    job = start_rallyrun(["--standalone", "--nproc-per-node", "4", *args], env=env)
    job.wait_for(lambda: len(numbers("ready", job.stdout)) == 4)
    return job


@pytest.mark.parametrize(
    ("flags", "env"),
    [
        (["--shutdown-timeout", GRACE], {}),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": GRACE}),
        ([], {"PET_SHUTDOWN_TIMEOUT": GRACE}),
        (["--shutdown-timeout", GRACE], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "30"}),
    ],
    ids=["flag", "variable", "PET variable", "flag before variable"],
)
def test_the_grace_after_a_signal(start_rallyrun: Any, script: Any, numbers: Any, flags: list[str], env: dict[str, str]):
    """P08: workers that ignore the signal are killed after the grace, all at the same time. F24: they are told by rank."""
    job = start_four(start_rallyrun, numbers, [*flags, script(STUBBORN)], env)
    sent_at = time.monotonic()
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert time.monotonic() - sent_at >= GRACE_S
    assert is_under(time.monotonic() - sent_at, MOST_S)
    assert f"{GRACE} s" in job.stderr, "the time to stop is not told"
    killed = re.findall(r"^rallyrun: rank (\d) \(pid \d+\) is killed: it did not end within ", job.stderr, re.MULTILINE)
    assert sorted(killed) == ["0", "1", "2", "3"]


def test_the_grace_after_a_failure(start_rallyrun: Any, script: Any, numbers: Any, tmp_path: Any):
    """P08: when a worker fails, the others have the same grace."""
    now = tmp_path / "now"
    job = start_four(start_rallyrun, numbers, ["--shutdown-timeout", GRACE, script(STUBBORN), now])
    now.touch()
    assert job.wait() == 1
    [failed_ns] = numbers("failing", job.stdout)
    assert time.monotonic() - failed_ns / 1e9 >= GRACE_S
    assert is_under(time.monotonic() - failed_ns / 1e9, MOST_S)


def test_the_grace_before_a_restart(start_rallyrun: Any, script: Any, numbers: Any, tmp_path: Any):
    """P08: and when the group is restarted."""
    now = tmp_path / "now"
    job = start_four(start_rallyrun, numbers, ["--shutdown-timeout", GRACE, "--max-restarts", "1", script(STUBBORN), now])
    now.touch()
    assert job.wait() == 0
    [failed_ns] = numbers("failing", job.stdout)
    restarted_ns = numbers("again", job.stdout)
    assert len(restarted_ns) == 4
    assert GRACE_S <= (min(restarted_ns) - failed_ns) / 1e9 < MOST_S


def test_no_grace(start_rallyrun: Any, script: Any, numbers: Any):
    """P08: a shutdown timeout of 0 kills at once."""
    job = start_four(start_rallyrun, numbers, ["--shutdown-timeout", "0", script(STUBBORN)])
    sent_at = time.monotonic()
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert time.monotonic() - sent_at < AT_ONCE_S


@pytest.mark.parametrize("restarts", [0, 1])
def test_who_needs_a_moment_gets_it(start_rallyrun: Any, script: Any, numbers: Any, restarts: int):
    """P08: a worker that saves its state when it is asked to stop can finish that, also when another worker has failed."""
    worker = script("""
        import os, signal, sys, time
        def save(*_):
            time.sleep(0.3)
            os.write(1, b"saved 1\\n")
            sys.exit(0)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        os.write(1, f"ready {os.getpid()}\\n".encode())
        time.sleep(60)
        """)
    job = start_four(start_rallyrun, numbers, ["--shutdown-timeout", "10", "--max-restarts", str(restarts), worker])
    os.kill(numbers("ready", job.stdout)[0], signal.SIGKILL)
    assert job.wait() == (0 if restarts else 1)
    assert numbers("saved", job.stdout) == [1, 1, 1]


def test_the_end_is_not_delayed_by_the_grace(start_rallyrun: Any, script: Any, numbers: Any):
    """P08: who ends at once is not waited for."""
    worker = script("""
        import os, time
        os.write(1, f"ready {os.getpid()}\\n".encode())
        time.sleep(60)
        """)
    job = start_four(start_rallyrun, numbers, ["--shutdown-timeout", "30", worker])
    sent_at = time.monotonic()
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert time.monotonic() - sent_at < AT_ONCE_S


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills_at_once(start_rallyrun: Any, script: Any, numbers: Any, number: signal.Signals):
    """P20, P08: whoever presses Ctrl-C twice does not want to wait for the grace."""
    job = start_four(start_rallyrun, numbers, ["--shutdown-timeout", "30", script(STUBBORN)])
    job.send_signal(number)
    job.wait_for_line(f"{number.name} was received")
    sent_at = time.monotonic()
    job.send_signal(number)
    assert job.wait() == 128 + number
    assert time.monotonic() - sent_at < AT_ONCE_S
    assert "Traceback" not in job.stderr


TELLS_SIGNAL = """
import os, signal, sys, time
def tell(number, frame):
    os.write(1, f"received {number}\\n".encode())
    os._exit(0)
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    signal.signal(number, tell)
os.write(1, f"ready {os.getpid()}\\n".encode())
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "flags"),
    [
        (signal.SIGTERM, []),
        (signal.SIGINT, []),
        (signal.SIGHUP, []),
        (signal.SIGQUIT, []),
        (signal.SIGUSR1, ["--signals-to-handle", "SIGTERM,SIGUSR1"]),
        (signal.SIGUSR2, ["--signals-to-handle", "SIGUSR2"]),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_the_signal_received_is_the_one_forwarded(
    start_rallyrun: Any, script: Any, numbers: Any, number: signal.Signals, flags: list[str]
):
    """P08: every worker gets the signal that the launcher got, and the exit code names it."""
    job = start_four(start_rallyrun, numbers, [*flags, script(TELLS_SIGNAL)])
    job.send_signal(number)
    assert job.wait() == 128 + number
    assert numbers("received", job.stdout) == [number] * 4


def test_children_of_a_worker_are_told_too(start_rallyrun: Any, script: Any, numbers: Any):
    """P08: a worker leads a process group, and a shell script's program gets the signal as if it were alone."""
    inner = script(TELLS_SIGNAL, "inner.py")
    worker = script(f'#!/bin/sh\ntrap "" TERM\npython="$1"\n"$python" {inner}\n', "outer.sh")
    worker.chmod(0o755)
    job = start_rallyrun(["--standalone", "--shutdown-timeout", "30", "--no-python", worker, sys.executable])
    job.wait_for(lambda: numbers("ready", job.stdout))
    sent_at = time.monotonic()
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert numbers("received", job.stdout) == [signal.SIGTERM]
    assert time.monotonic() - sent_at < AT_ONCE_S


@pytest.mark.root
@pytest.mark.parametrize("cause", ["failure", "signal"])
def test_a_worker_that_cannot_be_killed(
    start_rallyrun: Any, script: Any, numbers: Any, cgroup: Any, wait_until: Any, alive: Any, cause: str
):
    """P10: a frozen worker survives SIGKILL; the wait is bounded, its pid is named, nothing is restarted, exit code 4."""
    folder = cgroup("freezer")
    job = start_rallyrun(
        ["--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "1", "--max-restarts", "3", script(STUBBORN)],
        env={"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "1"},
    )
    frozen, other = job.wait_for(lambda: len(pids := numbers("ready", job.stdout)) == 2 and pids)
    (folder / "cgroup.procs").write_text(str(frozen))
    (folder / "freezer.state").write_text("FROZEN")
    wait_until(lambda: (folder / "freezer.state").read_text().strip() == "FROZEN")
    stopped_at = time.monotonic()
    if cause == "failure":
        os.kill(other, signal.SIGKILL)
    else:
        job.send_signal(signal.SIGTERM)
    assert job.wait() == 4
    took_s = time.monotonic() - stopped_at
    assert 2.0 <= took_s < 2.0 + AT_ONCE_S, "one second to stop, one to die, and a bounded time for the rest"
    assert alive(frozen)
    assert re.search(rf"did not end .*\b{frozen}\b", job.stderr)
    assert str(other) not in job.stderr.rsplit("did not end", 1)[1]
    assert numbers("again", job.stdout) == []
    (folder / "freezer.state").write_text("THAWED")
    wait_until(lambda: not alive(frozen))
