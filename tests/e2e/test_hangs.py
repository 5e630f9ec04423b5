"""Workers that hang, through the real command: found in time, named, with all stacks on disk; nobody else is (P30, P31)."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.pace import is_under

from rallypoint.cli.explain import explain_main

LIMIT_S = 1.0
ON_TOP_S = 5.0  # to find a hang takes less than a second longer than its limit; a busy machine has leave to need more
HANGS = 2  # the rank of whoever hangs
WORKERS = 4

# Whoever is started again has nothing to do. The clock is the same for all processes of a machine.
PREAMBLE = f"""
import os, sys, threading, time
rank = int(os.environ["RANK"])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    print(f"again {{rank}}", flush=True)
    sys.exit(0)
def tell_last_sign():
    os.write(1, f"last {{time.monotonic_ns()}}\\n".encode())
def stay_alive():
    while True:
        open("/proc/self/stat").read()
        time.sleep(0.02)
HANGS = {HANGS}
"""

# The others wait for the one that hangs, and are as silent as it is.
IN_A_LOCK = """
import fcntl
def forget(lock):
    tell_last_sign()
    lock.acquire()
def wait_for_the_other(file):
    fcntl.flock(file, fcntl.LOCK_EX)
file = open(sys.argv[1], "a")
if rank == HANGS:
    fcntl.flock(file, fcntl.LOCK_EX)
    open(sys.argv[1] + ".held", "w").close()
    lock = threading.Lock()
    lock.acquire()
    forget(lock)
while not os.path.exists(sys.argv[1] + ".held"):
    time.sleep(0.01)
wait_for_the_other(file)
"""

# One call of a C function that takes for ever and never lets Python code run; the others go on.
SPINS_IN_C = """
import re
from rallypoint import worker
def spin():
    re.match(r"(a+)+$", "a" * 64 + "b")
for step in range(10 ** 6):
    worker.progress(step)
    if rank == HANGS and step == 7:
        tell_last_sign()
        spin()
    time.sleep(0.02)
"""

STOPPED = """
os.write(1, f"pid{rank} {os.getpid()}\\n".encode())
stay_alive()
"""


class Run:
    """What one agent has told in its log folder so far."""

    def __init__(self, logs: Path) -> None:
        [self.folder] = logs.glob("*_*")

    def events(self, name: str) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        return [event["metadata"] for event in events if event["name"] == f"rallypoint.{name}"]

    def stacks(self, rank: int | None = None) -> str:
        attempt = self.folder / "attempt_0"
        return (attempt / "stacks.txt" if rank is None else attempt / str(rank) / "stacks.txt").read_text()


def line_of(program: Path, text: str) -> int:
    """The number of the first line that is this one."""
    return [line.strip() for line in program.read_text().splitlines()].index(text) + 1


def start(start_rallyrun: Any, tmp_path: Path, program: Path, *flags: str, workers: int = WORKERS) -> Any:
    watch = ["--hang-timeout", f"{LIMIT_S:g}", "--log-dir", str(tmp_path / "logs"), "--restart-backoff", "0"]
    return start_rallyrun(["--standalone", "--nproc-per-node", str(workers), *watch, *flags, program, tmp_path / "file"])


def wait_for_hang(job: Any) -> float:
    """When it was told, and then all stacks are in their files."""
    job.wait_for_line(") hangs: ")
    return time.monotonic()


def last_sign_at(job: Any, numbers: Any) -> float:
    [last_ns] = numbers("last", job.stdout)
    return float(last_ns / 1e9)


def check_blamed(job: Any, run: Run, exit_code: int) -> None:
    """One rank is to blame, everywhere."""
    [hung], [failed] = run.events("worker.hung"), run.events("worker.failed")
    assert (hung["rank"], hung["local_rank"], hung["pid"]) == (HANGS, HANGS, failed["pid"])
    assert (failed["rank"], failed["exitcode"]) == (HANGS, -signal.SIGKILL)
    assert failed["message"].startswith(f"it hung: {hung['message']}")
    assert hung["stacks"] == str(run.folder / "attempt_0" / "stacks.txt")
    assert run.stacks().startswith(f"rank {HANGS} (local rank {HANGS}, process {hung['pid']}) hangs: ")
    assert job.stderr.count(") hangs: ") == 1
    assert run.events("run.ended")[0]["succeeded"] == (exit_code == 0)


@pytest.mark.parametrize("restarts", [0, 1])
def test_asleep_in_a_lock_without_a_change_to_the_program(
    start_rallyrun: Any, script: Any, numbers: Any, tmp_path: Path, restarts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """P30, P31; F10: the hang is told before the kill, F11: the box names the stacks, and only the flag that is missing."""
    program = script(PREAMBLE + IN_A_LOCK)
    job = start(start_rallyrun, tmp_path, program, "--max-restarts", str(restarts))
    found_at = wait_for_hang(job)
    assert LIMIT_S / 2 < found_at - last_sign_at(job, numbers) < LIMIT_S + ON_TOP_S  # those who wait may be overdue before it
    assert job.wait() == (0 if restarts else 1)
    run = Run(tmp_path / "logs")
    check_blamed(job, run, exit_code=1 - restarts)
    assert sorted(numbers("again", job.stdout)) == (list(range(WORKERS)) if restarts else [])
    place = line_of(program, "lock.acquire()")
    assert f'File "{program}", line {place} in forget' in run.stacks(HANGS)
    assert "asleep in futex" in run.stacks(HANGS)
    assert f"rank {HANGS}, main thread:\n  forget ({program}:{place})\n" in run.stacks()
    assert f"ranks 0-1,3, main thread:\n  wait_for_the_other ({program}:" in run.stacks()
    assert "in wait_for_the_other" in run.stacks(0)
    if not restarts:
        report = job.stderr.partition("First cause")[2]
        assert f"rank: {HANGS} (local_rank: {HANGS})" in report
        assert "error: it hung: asleep" in report
        assert f"  stacks: {run.folder / 'attempt_0' / 'stacks.txt'}\n" in report
        assert "  log: it wrote nothing to stderr; add --tee 3 to keep stdout too\n" in report
    [hung], [failed] = run.events("worker.hung"), run.events("worker.failed")
    assert failed["ago_s"] < failed["t"] - hung["t"] < found_at
    assert explain_main([str(tmp_path / "logs"), "--json"]) == 0
    told = [entry["kind"] for entry in json.loads(capsys.readouterr().out)["timeline"]]
    assert told.index("hung") < told.index("failed")


def test_heartbeats_and_then_a_spin_in_c(start_rallyrun: Any, script: Any, numbers: Any, tmp_path: Path) -> None:
    """P30, P31"""
    program = script(PREAMBLE + SPINS_IN_C)
    job = start(start_rallyrun, tmp_path, program, "--max-restarts", "1")
    found_at = wait_for_hang(job)
    assert LIMIT_S <= found_at - last_sign_at(job, numbers) < LIMIT_S + ON_TOP_S
    assert job.wait() == 0
    run = Run(tmp_path / "logs")
    check_blamed(job, run, exit_code=0)
    [hung] = run.events("worker.hung")
    assert (hung["phase"], hung["step"]) == ("running", 7)
    place = line_of(program, 're.match(r"(a+)+$", "a" * 64 + "b")')
    assert f'File "{program}", line {place} in spin' in run.stacks(HANGS)
    assert f"  spin ({program}:{place})\n" in run.stacks()
    assert "in phase 'running', and within their time: ranks 0-1,3" in run.stacks()
    assert sorted(numbers("again", job.stdout)) == list(range(WORKERS))


def test_stopped_by_a_signal(start_rallyrun: Any, script: Any, numbers: Any, tmp_path: Path) -> None:
    """P30"""
    job = start(start_rallyrun, tmp_path, script(PREAMBLE + STOPPED), "--max-restarts", "1")
    job.wait_for(lambda: all(numbers(f"pid{rank}", job.stdout) for rank in range(WORKERS)))
    [pid] = numbers(f"pid{HANGS}", job.stdout)
    stopped_at = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    assert LIMIT_S <= wait_for_hang(job) - stopped_at < LIMIT_S + ON_TOP_S
    assert job.wait() == 0
    run = Run(tmp_path / "logs")
    check_blamed(job, run, exit_code=0)
    assert "it was stopped by a signal" in run.events("worker.hung")[0]["message"]
    assert "no Python stack: it is stopped" in run.stacks(HANGS)
    assert "in stay_alive" in run.stacks(0)
    assert sorted(numbers("again", job.stdout)) == list(range(WORKERS))


# Each of them is silent for longer than the limit of a worker at work.
PATIENCE = """
import atexit
from rallypoint import worker
def tell_end():
    os.write(1, f"done {rank}\\n".encode())
seconds = float(sys.argv[2])
if rank == 0:
    worker.progress(1)
    with worker.section("checkpoint", limit_s=seconds + 30):
        time.sleep(seconds)
    worker.progress(2)
    tell_end()
if rank == 1:  # a slow start
    time.sleep(seconds)
    worker.heartbeat()
    tell_end()
if rank == 2:  # a slow exit
    worker.heartbeat()
    atexit.register(tell_end)
    atexit.register(time.sleep, seconds)
if rank == 3:  # one that waits for its threads
    worker.heartbeat()
    threading.Thread(target=lambda: (time.sleep(seconds), tell_end())).start()
"""


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.soak)])
def test_a_checkpoint_a_slow_start_and_a_slow_exit_are_left_alone(
    start_rallyrun: Any, script: Any, numbers: Any, tmp_path: Path, seconds: int
) -> None:
    """P30: no false alarm outside of the phase *running*."""
    watch = ["--hang-timeout", f"{LIMIT_S:g}", "--log-dir", str(tmp_path / "logs"), "--max-restarts", "1"]
    program = script(PREAMBLE + PATIENCE)
    began_at = time.monotonic()
    job = start_rallyrun(["--standalone", "--nproc-per-node", str(WORKERS), *watch, program, "-", str(seconds)])
    assert job.wait(seconds + 30) == 0
    assert time.monotonic() - began_at >= seconds
    assert sorted(numbers("done", job.stdout)) == list(range(WORKERS))
    assert numbers("again", job.stdout) == []
    assert "hangs" not in job.stderr
    run = Run(tmp_path / "logs")
    assert run.events("worker.hung") == []
    assert not list(run.folder.rglob("stacks.txt"))


LAUNCHER = """
    import os, sys, threading, time
    from rallypoint import LaunchConfig, elastic_launch
    from rallypoint.failures.process_failure import ChildFailedError
    from rallypoint.output.log_specs import DefaultLogsSpecs

    def forget(lock):
        os.write(1, f"last {time.monotonic_ns()}\\n".encode())
        lock.acquire()

    def work():
        from rallypoint import worker
        rank = int(os.environ["RANK"])
        worker.progress(3)
        if rank == 1:
            lock = threading.Lock()
            lock.acquire()
            forget(lock)
        while True:
            worker.heartbeat()
            time.sleep(0.02)

    if __name__ == "__main__":
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=3, max_restarts=0, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
            run_id="functions", start_method=sys.argv[1], hang_timeout=1, logs_specs=DefaultLogsSpecs(log_dir=sys.argv[2]),
        )
        try:
            elastic_launch(config, work)()
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            print("failed", rank, flush=True)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_functions_leave_their_stacks_too(start_command: Any, script: Any, numbers: Any, tmp_path: Path, method: str) -> None:
    """P30, P31"""
    program = script(LAUNCHER, "launcher.py")
    job = start_command([sys.executable, str(program), method, str(tmp_path / "logs")])
    assert job.wait() == 0, job.stderr
    ended_at = time.monotonic()
    assert numbers("failed", job.stdout) == [1], job.stderr
    run = Run(tmp_path / "logs")
    [hung] = run.events("worker.hung")
    assert (hung["rank"], hung["phase"], hung["step"]) == (1, "running", 3)
    assert hung["still_s"] >= LIMIT_S
    assert is_under(hung["still_s"], LIMIT_S + ON_TOP_S)
    assert ended_at - last_sign_at(job, numbers) < LIMIT_S + 2 * ON_TOP_S  # with the end of the job
    place = line_of(program, "lock.acquire()")
    assert f'File "{program}", line {place} in forget' in run.stacks(1)
    assert f"  forget ({program}:{place})\n" in run.stacks()
    assert "in work" in run.stacks(0)


# One sleeps, another is an interpreter that was not prepared, and the last catches what it is sent to stop.
NO_PYTHON = """\
#!/bin/sh
case $LOCAL_RANK in
0) exec sleep 60 ;;
1) exec "$1" -S -c 'import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"politely 1\\n"), os._exit(0)))
while not signal.sigtimedwait([], 0.02): open("/proc/self/stat").read()' ;;
2) trap 'echo politely 2; exit 0' TERM
   while :; do sleep 0.05; done ;;
esac
"""


def test_a_program_that_is_not_python_is_found_and_nobody_is_asked_who_does_not_listen(
    start_rallyrun: Any, script: Any, numbers: Any, tmp_path: Path
) -> None:
    """P30, P31: the question would end whoever does not catch its signal."""
    program = script(NO_PYTHON, "worker.sh")
    program.chmod(0o755)
    watch = ["--hang-timeout", f"{LIMIT_S:g}", "--log-dir", str(tmp_path / "logs")]
    began_at = time.monotonic()
    job = start_rallyrun(["--standalone", "--nproc-per-node", "3", *watch, "--no-python", program, sys.executable])
    assert wait_for_hang(job) - began_at < LIMIT_S + 2 * ON_TOP_S  # with the start of the job
    assert job.wait() == 1
    run = Run(tmp_path / "logs")
    [hung], [failed] = run.events("worker.hung"), run.events("worker.failed")
    assert (hung["rank"], failed["rank"], failed["exitcode"]) == (0, 0, -signal.SIGKILL)
    assert sorted(numbers("politely", job.stdout)) == [1, 2]  # both lived until they were told to stop
    for rank in range(3):
        assert "no Python stack: it is no Python program, or one that was started without site" in run.stacks(rank)
        assert re.search(r"^thread \d+ \(\S+\): ", run.stacks(rank), re.MULTILINE)
    assert "(sleep): asleep in clock_nanosleep" in run.stacks(0)
