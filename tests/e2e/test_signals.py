"""Signals at any moment, ignored signals, a real terminal, and the duties of a first process."""

from __future__ import annotations

import fcntl
import os
import platform
import pty
import random
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import AT_ONCE_S

SLEEPS = """
import os, time
os.write(1, f"worker {os.getpid()}\\n".encode())
time.sleep(60)
"""


def in_mask(kind: str, status: str) -> set[int]:
    """The signals in one of the masks of a process's status file; those that belong to the C library are left out."""
    mask = int(next(line.split()[1] for line in status.splitlines() if line.startswith(kind)), 16)
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


def ignored_by(pid: int) -> set[int]:
    return in_mask("SigIgn:", Path(f"/proc/{pid}/status").read_text())


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_an_ignored_signal_stays_ignored(
    start_command: Any, rallyrun_command: Any, script: Any, numbers: Any, wait_until: Any, processes: Any, number: signal.Signals
):
    """P18: in the launcher and in the workers; other signals end the job as ever."""
    trap = f"trap '' {number.name.removeprefix('SIG')}; exec \"$@\""
    job = start_command(["sh", "-c", trap, "sh", *rallyrun_command("--standalone", "--nproc-per-node", "2", script(SLEEPS))])
    workers = wait_until(lambda: len(pids := numbers("worker", job.stdout)) == 2 and pids)
    assert number in ignored_by(job.pid)
    assert all(number in ignored_by(pid) for pid in workers)
    job.process.send_signal(number)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert "SIGTERM was received" in job.stderr
    assert f"{number.name} was received" not in job.stderr


def test_nohup(start_command: Any, rallyrun_command: Any, script: Any, numbers: Any, wait_until: Any, tmp_path: Path):
    """P18: a job under `nohup` does not notice that its terminal is closed."""
    go_on = tmp_path / "go_on"
    worker = script("""
        import os, sys, time
        os.write(1, f"worker {os.getpid()}\\n".encode())
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.005)
        os.write(1, f"done {os.getpid()}\\n".encode())
        """)
    command = rallyrun_command("--standalone", "--nproc-per-node", "2", worker, go_on)
    job = start_command(["nohup", *command], start_new_session=True)
    workers = wait_until(lambda: len(pids := numbers("worker", job.stdout)) == 2 and pids)
    os.killpg(job.pid, signal.SIGHUP)
    for pid in workers:
        os.kill(pid, signal.SIGHUP)
    go_on.touch()
    assert job.wait() == 0, job.stderr
    assert sorted(numbers("done", job.stdout)) == sorted(workers)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="senders are known on x86-64 alone")
def test_who_has_sent_the_signal_is_told(start_rallyrun: Any, rallyrun: Any, script: Any, tmp_path: Path):
    """After the workers have been told; and the run's record has the number."""
    flags = ["--standalone", "--nproc-per-node", "2", "--log-dir", tmp_path / "logs"]
    job = start_rallyrun([*flags, script(SLEEPS)], {"LOGLEVEL": "DEBUG"})
    job.wait_for_line("all that the end of this job may need is loaded")
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    name = Path("/proc/self/comm").read_text().strip()
    assert f"rallyrun: SIGTERM came from process {os.getpid()} ({name})\n" in job.stderr
    told = subprocess.run(
        [sys.executable, "-m", "rallypoint", "explain", tmp_path / "logs"], capture_output=True, text=True, timeout=60, check=True
    )
    assert f"SIGTERM was received from process {os.getpid()}" in told.stdout


def test_workers_start_with_default_signals(rallyrun: Any, script: Any):
    """P18: nothing that Python or the launcher does to signals for its own use reaches a worker that is not Python."""
    ended = rallyrun(["--standalone", "--no-python", "cat", "/proc/self/status"])
    assert ended.returncode == 0, ended.stderr
    assert [in_mask(kind, ended.stdout) for kind in ("SigBlk:", "SigIgn:", "SigCgt:")] == [set(), set(), set()]


# --- two at once -----------------------------------------------------------------------------------------------------------

STUBBORN = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.write(1, f"worker {os.getpid()}\\n".encode())
time.sleep(60)
"""


@pytest.mark.parametrize("pair", [(signal.SIGHUP, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)], ids=["HUP", "INT"])
def test_M1_two_signals_back_to_back(start_rallyrun: Any, script: Any, numbers: Any, marked: Any, wait_until: Any, pair: Any):
    """M1, m9: whichever thread the kernel gives them to, the job ends; and the second means that there is no time for grace."""
    worker = script(STUBBORN)
    for _ in range(12):
        job = start_rallyrun(["--standalone", "--nproc-per-node", "2", "--tee", "3", "--shutdown-timeout", "60", worker])
        job.wait_for(lambda job=job: job.stdout.count("worker") == 2)
        for number in pair:
            os.kill(job.pid, number)
        assert job.wait(20) in {128 + number for number in pair}, job.stderr
        wait_until(lambda: not marked(), 2.0)


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------------


def interrupted(job: Any) -> float:
    """Interrupt a launcher and check that it ends as it should, without a word about it; how long that took."""
    sent_at = time.monotonic()
    job.send_signal(signal.SIGINT)
    code = job.wait(2 * AT_ONCE_S)
    took_s = time.monotonic() - sent_at
    assert code == 130, job.stderr
    assert "Traceback" not in job.stderr, job.stderr
    assert "KeyboardInterrupt" not in job.stderr, job.stderr
    return took_s


def test_ctrl_c_at_any_moment_of_the_start(start_rallyrun: Any, processes: Any, marked: Any, wait_until: Any):
    """P20: from our first lines on until the workers run: code 130, at once, no traceback."""
    dice = random.Random(20)
    for _ in range(30):
        job = start_rallyrun(["--standalone", "--nproc-per-node", "4", "--no-python", "sleep", "60"])
        job.wait_for(lambda job=job: processes.children(job.pid))
        send_at = time.monotonic() + dice.choice((0.0, dice.uniform(0, 0.02), dice.uniform(0, 0.15)))
        wait_until(lambda at=send_at: time.monotonic() >= at)
        assert interrupted(job) < AT_ONCE_S
        wait_until(lambda: not marked(), 2.0)


# The real command, interrupted by itself at the first moment at which a stranger could see that it runs: it has a child.
INTERRUPTS_ITSELF = """
import os, sys
from rallypoint.processes import warden_start

start_warden = warden_start.start_warden

def start_and_interrupt():
    started = start_warden()
    os.kill(os.getpid(), 2)
    return started

warden_start.start_warden = start_and_interrupt
from rallypoint import __main__
sys.exit(__main__.rallyrun())
"""


def test_ctrl_c_at_the_first_moment(start_command: Any, marked: Any, wait_until: Any):
    """P20: our first lines see to it that there is no moment at which Ctrl-C would show a traceback."""
    job = start_command([sys.executable, "-c", INTERRUPTS_ITSELF, "--standalone", "--no-python", "sleep", "60"])
    assert (job.wait(10), job.stderr) == (130, "")
    wait_until(lambda: not marked(), 2.0)


# What pip writes for a command, interrupted while it imports us.
CONSOLE_SCRIPT = """
import os, sys

class Interrupts:
    def find_spec(name, *_):
        if name == "rallypoint.__main__":
            os.kill(os.getpid(), 2)

sys.meta_path.insert(0, Interrupts)
from rallypoint.__main__ import rallyrun
sys.exit(rallyrun())
"""


def test_m10_ctrl_c_while_the_console_script_imports_us(start_command: Any, script: Any):
    """m10: what comes before our first line is Python's own; from there on there is no traceback."""
    job = start_command([sys.executable, str(script(CONSOLE_SCRIPT, "rallyrun")), "--standalone", "--no-python", "sleep", "60"])
    assert (job.wait(10), job.stderr) == (-signal.SIGINT, "")


def test_m10_a_program_that_uses_us_keeps_its_ctrl_c(start_command: Any, script: Any):
    job = start_command([sys.executable, str(script(CONSOLE_SCRIPT, "train.py")), "--standalone", "--no-python", "sleep", "60"])
    assert job.wait(10) == -signal.SIGINT
    assert job.stderr.endswith("KeyboardInterrupt\n")


# What a worker's Python says that trips over the signal in its own start, up to the next line of the launcher.
INTERPRETERS_OWN = re.compile(r"^Fatal Python error: init_.*?(?=^rallyrun: |\Z)", re.MULTILINE | re.DOTALL)


def test_ctrl_c_while_interpreters_start(start_rallyrun: Any, script: Any, processes: Any, marked: Any, wait_until: Any):
    """P20: a Python that is just starting may swallow the signal; then the job ends within the shutdown time, as quietly."""
    worker = script(SLEEPS)
    dice = random.Random(23)
    for _ in range(10):
        job = start_rallyrun(["--standalone", "--nproc-per-node", "4", "--shutdown-timeout", "1", worker])
        job.wait_for(lambda job=job: processes.children(job.pid))
        send_at = time.monotonic() + dice.uniform(0, 0.15)
        wait_until(lambda at=send_at: time.monotonic() >= at)
        sent_at = time.monotonic()
        job.send_signal(signal.SIGINT)
        assert job.wait(20) == 130, job.stderr
        assert time.monotonic() - sent_at < 1.0 + AT_ONCE_S
        assert "Traceback" not in INTERPRETERS_OWN.sub("", job.stderr), job.stderr
        wait_until(lambda: not marked(), AT_ONCE_S)


# Word for word what Python 3.11 says when it is interrupted before its first line of user code, at two different moments.
INTERRUPTED_START = """\
Fatal Python error: init_import_site: Failed to import the site module
Python runtime state: initialized
Traceback (most recent call last):
  File "<frozen site>", line 626, in <module>
KeyboardInterrupt
Fatal Python error: init_sys_streams: can't initialize sys standard streams
Python runtime state: core initialized
KeyboardInterrupt

"""


def test_an_interpreter_that_is_interrupted_in_its_start(start_rallyrun: Any, script: Any):
    """P20: what Python says then is as little worth reading as a traceback of KeyboardInterrupt."""
    worker = script(f"""
        import os, signal, time
        def end(*_):
            os.write(2, {INTERRUPTED_START.encode()!r})
            os._exit(1)
        signal.signal(signal.SIGINT, end)
        os.write(2, b"an honest line\\n")
        os.write(1, b"worker 1\\n")
        time.sleep(60)
        """)
    job = start_rallyrun(["--standalone", worker])
    job.wait_for_line("worker 1")
    assert interrupted(job) < AT_ONCE_S
    assert "an honest line\n" in job.stderr
    assert "Fatal Python error" not in job.stderr


@pytest.mark.parametrize("flags", [[], ["--tee", "3", "--log-dir", "logs"], ["-r", "3", "--log-dir", "logs"]], ids=" ".join)
def test_ctrl_c_while_running(start_rallyrun: Any, script: Any, numbers: Any, tmp_path: Path, flags: list[str]):
    """P20: the workers' own tracebacks of it are kept out of the console."""
    worker = script("""
        import os, time
        open(f"up.{os.environ['RANK']}", "w").close()
        time.sleep(60)
        """)
    job = start_rallyrun(["--standalone", "--nproc-per-node", "4", *flags, worker])
    job.wait_for(lambda: len(list(tmp_path.glob("up.*"))) == 4)
    assert interrupted(job) < AT_ONCE_S


def test_ctrl_c_during_restarts(start_rallyrun: Any, numbers: Any, marked: Any, wait_until: Any):
    """P20: a group that fails and is restarted over and over ends on Ctrl-C at any moment of it, and is not started again."""
    program = 'if [ $RANK = 0 ]; then echo "attempt $TORCHELASTIC_RESTART_COUNT"; exit 1; else exec sleep 60; fi'
    flags = ["--standalone", "--nproc-per-node", "3", "--max-restarts", "1000", "--restart-backoff", "0", "--no-python"]
    dice = random.Random(21)
    for _ in range(20):
        job = start_rallyrun([*flags, "sh", "-c", program])
        job.wait_for(lambda job=job: len(numbers("attempt", job.stdout)) > 1)
        send_at = time.monotonic() + dice.uniform(0, 0.1)
        wait_until(lambda at=send_at: time.monotonic() >= at)
        assert interrupted(job) < AT_ONCE_S
        wait_until(lambda: not marked(), 2.0)


@pytest.mark.parametrize("restarts", [0, 3])
def test_ctrl_c_while_stopping(start_rallyrun: Any, script: Any, numbers: Any, restarts: int):
    """P20: after a failure, while the others are being stopped: it ends the job, which is not started again."""
    worker = script("""
        import os, signal, sys, time
        os.write(1, f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n".encode())
        def stay(*_):
            os.write(1, f"stopping {os.getpid()}\\n".encode())
        signal.signal(signal.SIGTERM, stay)
        os.write(1, f"worker {os.getpid()}\\n".encode())
        while True:
            time.sleep(60)
        """)
    job = start_rallyrun(["--standalone", "--nproc-per-node", "3", "--max-restarts", str(restarts), worker])
    first, *_ = job.wait_for(lambda: len(pids := numbers("worker", job.stdout)) == 3 and pids)
    os.kill(first, signal.SIGKILL)
    job.wait_for(lambda: len(numbers("stopping", job.stdout)) == 2)
    assert interrupted(job) < AT_ONCE_S
    assert numbers("attempt", job.stdout) == [0, 0, 0]


def test_ctrl_c_and_a_worker_that_takes_its_time(start_rallyrun: Any, script: Any, numbers: Any):
    """P20: a worker that saves its state on Ctrl-C can finish that, within the shutdown time."""
    worker = script("""
        import os, time
        os.write(1, f"worker {os.getpid()}\\n".encode())
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            time.sleep(0.3)
            os.write(1, b"saved 1\\n")
        """)
    job = start_rallyrun(["--standalone", "--nproc-per-node", "2", worker])
    job.wait_for(lambda: len(numbers("worker", job.stdout)) == 2)
    assert interrupted(job) < AT_ONCE_S
    assert numbers("saved", job.stdout) == [1, 1]


class Terminal:
    """A real terminal with a command in its foreground."""

    def __init__(self, command: list[str], cwd: Path) -> None:
        self._ours, theirs = pty.openpty()
        self._seen = b""
        self.process = subprocess.Popen(
            command, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  # no thread runs here
        )  # fmt: skip
        os.close(theirs)

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def text(self) -> str:
        """All that it has shown so far."""
        while select.select([self._ours], [], [], 0)[0]:
            try:
                self._seen += os.read(self._ours, 65536)
            except OSError:  # nobody holds the other end any more
                break
        return self._seen.decode(errors="replace").replace("\r\n", "\n")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[[list[str]], Terminal]]:
    made: list[Terminal] = []

    def start(command: list[str]) -> Terminal:
        made.append(Terminal(command, tmp_path))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize(("key", "code"), [(b"\x03", 130), (b"\x1c", 131)], ids=["Ctrl-C", "Ctrl-backslash"])
def test_a_real_terminal(
    terminal: Any, rallyrun_command: Any, script: Any, numbers: Any, wait_until: Any, marked: Any, key: bytes, code: int
):
    """P20: the terminal's own character ends a job in its foreground, quietly."""
    job = terminal(rallyrun_command("--standalone", "--nproc-per-node", "4", script(SLEEPS)))
    wait_until(lambda: len(numbers("worker", job.text())) == 4)
    pressed_at = time.monotonic()
    job.press(key)
    assert job.process.wait(20) == code
    assert time.monotonic() - pressed_at < AT_ONCE_S
    assert "Traceback" not in job.text()
    assert "KeyboardInterrupt" not in job.text()
    wait_until(lambda: not marked(), 2.0)


def test_ctrl_c_at_any_moment_in_a_real_terminal(
    terminal: Any, rallyrun_command: Any, processes: Any, wait_until: Any, marked: Any
):
    """P20: also while the job starts; no process but the launcher hears the terminal."""
    dice = random.Random(22)
    for _ in range(10):
        job = terminal(rallyrun_command("--standalone", "--nproc-per-node", "2", "--no-python", "sleep", "60"))
        wait_until(lambda job=job: processes.children(job.process.pid))
        press_at = time.monotonic() + dice.choice((0.0, dice.uniform(0, 0.15)))
        wait_until(lambda at=press_at: time.monotonic() >= at)
        job.press(b"\x03")
        assert job.process.wait(10) == 130, job.text()
        assert "Traceback" not in job.text()
        wait_until(lambda: not marked(), 2.0)


def test_a_terminal_that_is_closed(terminal: Any, rallyrun_command: Any, script: Any, numbers: Any, wait_until: Any, marked: Any):
    """P18, P09: without `nohup` the job ends with its terminal."""
    job = terminal(rallyrun_command("--standalone", "--nproc-per-node", "2", script(SLEEPS)))
    wait_until(lambda: len(numbers("worker", job.text())) == 2)
    os.close(job._ours)
    job._ours = os.open(os.devnull, os.O_RDONLY)
    assert job.process.wait(10) == 128 + signal.SIGHUP
    wait_until(lambda: not marked(), 2.0)


# --- the first process of a container --------------------------------------------------------------------------------------


@pytest.fixture
def container(start_command: Any, rallyrun_command: Any, processes: Any, wait_until: Any) -> Callable[..., tuple[Any, int]]:
    """``container(*args)``: rallyrun as process 1 of a new process namespace, and its process id seen from here."""

    def start(*args: Any) -> tuple[Any, int]:
        job = start_command(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *rallyrun_command(*args)])
        found = wait_until(lambda: job.process.poll() is not None or processes.children(job.pid))
        if found is True:
            pytest.skip(f"no process namespace can be made here: {job.stderr}")
        return job, next(iter(found))

    return start


@pytest.mark.root
def test_orphans_of_workers_are_reaped(container: Any, script: Any, numbers: Any, wait_until: Any, processes: Any):
    """P20: a container's first process leaves no zombies of processes that workers abandoned."""
    worker = script("""
        import os, time
        for _ in range(5):
            if os.fork() == 0:
                if os.fork() == 0:
                    os._exit(0)
                os._exit(0)
            os.wait()
        os.write(1, f"worker {os.getpid()}\\n".encode())
        time.sleep(60)
        """)
    job, agent = container("--standalone", "--nproc-per-node", "2", worker)
    wait_until(lambda: len(numbers("worker", job.stdout)) == 2)

    def zombies() -> list[int]:
        parents = [agent, *processes.children(agent)]
        return [pid for parent in parents for pid, (_, state) in processes.children(parent).items() if state == "Z"]

    wait_until(lambda: not zombies(), 5.0)
    os.kill(agent, signal.SIGTERM)
    assert job.wait() == 143


@pytest.mark.root
def test_orphans_of_strangers_are_reaped(container: Any, script: Any, numbers: Any, wait_until: Any, processes: Any, alive: Any):
    """P20: what `docker exec` leaves behind comes to the first process, which is the launcher."""
    job, agent = container("--standalone", script(SLEEPS))
    wait_until(lambda: numbers("worker", job.stdout))
    enter = ["nsenter", "--target", str(agent), "--pid", "--mount", "sh", "-c", "sleep 0.2 & sleep 0.2 & sleep 0.2 &"]
    subprocess.run(enter, check=True, timeout=10)

    def orphans() -> list[str]:
        return [state for name, state in processes.children(agent).values() if name == "sleep"]

    wait_until(lambda: len(orphans()) == 3)
    wait_until(lambda: not orphans(), 5.0)
    os.kill(agent, signal.SIGTERM)
    assert job.wait() == 143


@pytest.mark.root
@pytest.mark.parametrize(("program", "code"), [("exit 0", 0), ("exit 3", 1)])
def test_a_job_as_the_first_process(container: Any, program: str, code: int):
    """P20, P37: it ends as everywhere else, also after a restart."""
    job, _ = container("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--no-python", "sh", "-c", program)
    assert job.wait() == code, job.stderr
    assert "Traceback" not in job.stderr


# --- not the main thread ---------------------------------------------------------------------------------------------------


def test_a_launch_from_another_thread(start_command: Any, script: Any):
    """P20: signals cannot be received there, and all else works: results, failures, restarts."""
    program = script("""
        import os, signal, sys, threading
        from rallypoint import ChildFailedError, LaunchConfig, elastic_launch

        def square(x):
            return x * int(os.environ["RANK"])

        def fail():
            raise ValueError("no")

        def config(restarts):
            return LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=restarts)

        def launch():
            print(elastic_launch(config(0), square)(7))
            try:
                elastic_launch(config(1), fail)()
            except ChildFailedError as error:
                print("failed", sorted(error.failures)[0] in (0, 1))

        if __name__ == "__main__":
            before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
            thread = threading.Thread(target=launch)
            thread.start()
            thread.join()
            print("same handlers", before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)])
            print("threads", [one.name for one in threading.enumerate()])
        """)
    job = start_command([sys.executable, str(program)])
    assert job.wait() == 0, job.stderr
    assert job.stdout.splitlines() == ["{0: 0, 1: 7}", "failed True", "same handlers True", "threads ['MainThread']"]


def test_two_launches_at_once_from_threads(start_command: Any, script: Any):
    """P20: they share neither workers nor the end of them."""
    program = script("""
        import os, threading
        from rallypoint import LaunchConfig, elastic_launch

        def work(x):
            return x + int(os.environ["RANK"])

        def launch(x):
            config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
            results[x] = elastic_launch(config, work)(x)

        if __name__ == "__main__":
            results = {}
            threads = [threading.Thread(target=launch, args=(10 * n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            print(sorted(results.items()))
        """)
    job = start_command([sys.executable, str(program)])
    assert job.wait() == 0, job.stderr
    assert job.stdout == f"{[(x, {0: x, 1: x + 1}) for x in (0, 10, 20, 30)]}\n"
