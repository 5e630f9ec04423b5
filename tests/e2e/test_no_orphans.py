"""However the launcher ends, nothing that it started is left, nor anything that that has started."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pace import is_under

import rallypoint

NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"
GONE_WITHIN_S = 5.0

# A worker with a child, a grandchild in a session of its own, a daemon, and a daemon of that daemon. None of them listens to
# polite signals, and the daemons have let go of everything that they inherited.
FAMILY = """
import os, signal, time

def live(word):
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    os.write(1, f"{word} {os.getpid()}\\n".encode())
    if "daemon" in word:
        os.chdir("/")
        os.closerange(0, 256)
    while True:
        time.sleep(600)

def become_daemon():
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)

if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        live("grandchild")
    live("child")
if os.fork() == 0:
    become_daemon()
    if os.fork() == 0:
        become_daemon()
        live("daemon_again")
    live("daemon")
live("worker")
"""
MEMBERS = ("worker", "child", "grandchild", "daemon", "daemon_again")


def whole_family(numbers: Any, workers: int, text: str) -> list[int]:
    """Everybody's process id, once all are there."""
    pids = {word: numbers(word, text) for word in MEMBERS}
    complete = all(len(found) == workers for found in pids.values())
    return [pid for found in pids.values() for pid in found] if complete else []


def test_the_agent_is_killed(start_rallyrun: Any, script: Any, numbers: Any, marked: Any, wait_until: Any, alive: Any):
    """P09: children, grandchildren in new sessions and daemons of daemons are gone within 5 s of `kill -9`."""
    job = start_rallyrun(["--standalone", "--nproc-per-node", "2", script(FAMILY)])
    family = job.wait_for(lambda: whole_family(numbers, 2, job.stdout))
    assert set(family) < set(marked())
    job.send_signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    wait_until(lambda: not any(map(alive, family)), GONE_WITHIN_S)
    wait_until(lambda: not marked(), GONE_WITHIN_S)


def test_m7_the_agent_and_its_warden_are_killed_together(
    start_rallyrun: Any, script: Any, numbers: Any, wait_until: Any, alive: Any, processes: Any
):
    """m7: the kernel kills the workers; what those had started nobody is left to kill, as docs/signals.md says."""
    job = start_rallyrun(["--standalone", "--nproc-per-node", "2", script(FAMILY)])
    family = job.wait_for(lambda: whole_family(numbers, 2, job.stdout))
    warden = processes.warden(job.pid)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # so that neither sees the other's end
        for pid in (job.pid, warden):
            os.kill(pid, number)
    assert job.wait() == -signal.SIGKILL
    wait_until(lambda: not any(map(alive, numbers("worker", job.stdout))), GONE_WITHIN_S)
    for pid in set(family) - set(numbers("worker", job.stdout)):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_the_agent_of_functions_is_killed(
    start_command: Any, script: Any, numbers: Any, marked: Any, wait_until: Any, start_method: str
):
    """P09: the same for functions, whose agent is the user's own program."""
    program = script(f"""
        import runpy, sys
        from rallypoint import LaunchConfig, elastic_launch

        def work(path):
            runpy.run_path(path, run_name="family")

        if __name__ == "__main__":
            config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="{start_method}")
            elastic_launch(config, work)(sys.argv[1])
        """)
    job = start_command([sys.executable, str(program), str(script(FAMILY, "family.py"))])
    wait_until(lambda: whole_family(numbers, 2, job.stdout))
    job.process.kill()
    assert job.wait() == -signal.SIGKILL
    wait_until(lambda: not marked(), GONE_WITHIN_S)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may use; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o777)
        yield Path(name)


@pytest.fixture
def start_as_nobody(start_command: Any, open_folder: Path) -> Callable[..., Any]:
    """``start_as_nobody(*args, **env)``: rallyrun of an unprivileged user, in a folder open to that user."""
    package = Path(rallypoint.__file__).parents[1]

    def start(*args: Any, **env: str) -> Any:
        common = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(open_folder)}
        command = [interpreter_for_nobody(common), "-m", "rallypoint", "run", "--standalone", *map(str, args)]
        return start_command(command, env={**common, **env}, cwd=open_folder, user=NOBODY, group=NOBODY, extra_groups=[])

    return start


def interpreter_for_nobody(env: dict[str, str]) -> str:
    """An interpreter that an unprivileged user can run this very package with."""
    for python in (sys.executable, SYSTEM_PYTHON):
        probe = [python, "-c", "import sys; assert sys.version_info >= (3, 10); import rallypoint.cli.main"]
        try:
            ended = subprocess.run(probe, user=NOBODY, group=NOBODY, extra_groups=[], env=env, cwd="/", capture_output=True)
        except OSError:
            continue
        if ended.returncode == 0:
            return python
    pytest.skip("no interpreter with this package can be run by the user nobody")


@pytest.mark.root
def test_the_agent_of_an_unprivileged_user_is_killed(
    start_as_nobody: Any, open_folder: Path, numbers: Any, marked: Any, wait_until: Any
):
    """P09: neither root nor a writable cgroup is needed."""
    worker = open_folder / "family.py"
    worker.write_text(FAMILY)
    job = start_as_nobody("--nproc-per-node", "2", worker)
    family = wait_until(lambda: whole_family(numbers, 2, job.stdout))
    assert {os.stat(f"/proc/{pid}").st_uid for pid in family} == {NOBODY}
    assert set(family) < set(marked())
    job.process.kill()
    assert job.wait() == -signal.SIGKILL
    wait_until(lambda: not marked(), GONE_WITHIN_S)


# As `sudo` and `su` do: a child that becomes another user, whom the job's user may not signal.
BECOMES_ROOT = """
import os, subprocess
code = "import os, time; os.setresuid(0, 0, 0); os.write(1, f'root {os.getpid()}\\\\n'.encode()); time.sleep(600)"
if os.environ["RANK"] == "0":
    subprocess.Popen(["./python", "-c", code], env={**os.environ, "PYTHONHOME": "/usr"})
"""


@pytest.fixture
def privileged_python(open_folder: Path) -> None:
    """An interpreter named python in that folder, which runs as root whoever starts it."""
    if os.statvfs(open_folder).f_flag & os.ST_NOSUID or not os.path.exists(SYSTEM_PYTHON):
        pytest.skip("no program here can become another user")
    shutil.copy(os.path.realpath(SYSTEM_PYTHON), open_folder / "python")
    (open_folder / "python").chmod(0o4755)


@pytest.mark.root
@pytest.mark.usefixtures("privileged_python")
def test_a_child_that_became_another_user_protects_nobody_else(
    start_as_nobody: Any, open_folder: Path, numbers: Any, marked: Any, wait_until: Any
):
    """P09: what may not be killed is left, but it must not keep the warden from killing all the others."""
    worker = open_folder / "family.py"
    worker.write_text(BECOMES_ROOT + FAMILY)
    job = start_as_nobody("--nproc-per-node", "2", worker)
    family = wait_until(lambda: numbers("root", job.stdout) and whole_family(numbers, 2, job.stdout))
    [root] = numbers("root", job.stdout)
    assert {root, *family} < set(marked())
    job.process.kill()
    assert job.wait() == -signal.SIGKILL
    wait_until(lambda: not set(marked()) & set(family), GONE_WITHIN_S)
    assert root in marked()
    assert "Traceback" not in job.stderr
    os.kill(root, signal.SIGKILL)
    wait_until(lambda: not marked(), GONE_WITHIN_S)


@pytest.mark.root
@pytest.mark.usefixtures("privileged_python")
def test_a_child_that_became_another_user_is_named(
    start_as_nobody: Any, open_folder: Path, numbers: Any, marked: Any, wait_until: Any
):
    """P10: a process that the launcher may not kill is as good as one that cannot be killed: bounded, named, exit code 4."""
    worker = open_folder / "leaves.py"
    worker.write_text(BECOMES_ROOT + "\nwhile not os.path.exists('go_on'): pass\n")
    job = start_as_nobody("--shutdown-timeout", "1", worker, TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="1")
    [root] = wait_until(lambda: numbers("root", job.stdout))
    (open_folder / "go_on").touch()
    assert job.wait(10) == 4, job.stderr
    assert str(root) in job.stderr
    assert "Traceback" not in job.stderr
    os.kill(root, signal.SIGKILL)
    wait_until(lambda: not marked(), GONE_WITHIN_S)


def test_the_agent_is_killed_at_any_moment_of_the_start(
    start_rallyrun: Any, script: Any, processes: Any, marked: Any, wait_until: Any
):
    """P09: also while the warden comes up, and while workers are being forked."""
    worker = script(FAMILY)
    dice = random.Random(9)
    for _ in range(12):
        job = start_rallyrun(["--standalone", "--nproc-per-node", "4", worker])
        job.wait_for(lambda job=job: processes.children(job.pid))
        kill_at = time.monotonic() + dice.uniform(0, 0.15)
        wait_until(lambda at=kill_at: time.monotonic() >= at)
        job.send_signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        wait_until(lambda: not marked(), GONE_WITHIN_S)


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_warden_is_killed(
    start_rallyrun: Any, script: Any, numbers: Any, processes: Any, wait_until: Any, alive: Any, marked: Any, tmp_path: Path,
    restarts: int,
):  # fmt: skip
    """P09: the kernel kills the workers, and the launcher says so and goes on as after any failure."""
    worker = script("""
        import os, time
        os.write(1, f"worker {os.getpid()}\\n".encode())
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(60)
        """)
    job = start_rallyrun(["--standalone", "--nproc-per-node", "3", "--max-restarts", str(restarts), worker])
    workers = job.wait_for(lambda: len(pids := numbers("worker", job.stdout)) == 3 and pids)
    os.kill(processes.warden(job.pid), signal.SIGKILL)
    wait_until(lambda: not any(map(alive, workers)), GONE_WITHIN_S)
    assert job.wait() == (0 if restarts else 1)
    assert len(numbers("worker", job.stdout)) == 3 * (1 + restarts)
    assert "warden" in job.stderr.replace(str(tmp_path), ""), "nobody can know what SIGKILL to all workers at once was about"
    assert "Traceback" not in job.stderr
    wait_until(lambda: not marked(), GONE_WITHIN_S)


def test_the_warden_is_killed_while_workers_have_children(
    start_rallyrun: Any, script: Any, numbers: Any, processes: Any, wait_until: Any, alive: Any, marked: Any
):
    """P09: the workers go with the warden; all that they started comes to the launcher, which kills it and ends."""
    job = start_rallyrun(["--standalone", "--nproc-per-node", "2", script(FAMILY)])
    job.wait_for(lambda: whole_family(numbers, 2, job.stdout))
    workers = numbers("worker", job.stdout)
    os.kill(processes.warden(job.pid), signal.SIGKILL)
    wait_until(lambda: not any(map(alive, workers)), GONE_WITHIN_S)
    assert job.wait() == 1
    wait_until(lambda: not marked(), GONE_WITHIN_S)


def test_the_warden_is_killed_before_the_first_worker(
    start_rallyrun: Any, script: Any, processes: Any, marked: Any, wait_until: Any
):
    """P09: no orphan and no hang; the job fails in one way or runs in another."""
    worker = script("print('ran')")
    for _ in range(8):
        job = start_rallyrun(["--standalone", "--nproc-per-node", "2", worker])
        wait_until(lambda job=job: processes.children(job.pid) or job.process.poll() is not None)
        for warden in processes.children(job.pid):  # none if the job was over before we looked
            os.kill(warden, signal.SIGKILL)
        assert job.wait() in (0, 1)
        assert "Traceback" not in job.stderr
        wait_until(lambda: not marked(), GONE_WITHIN_S)


LEAVES_DAEMON = """
import os, signal, sys, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
{before}
read_end, write_end = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    {in_daemon}
    os.write(1, f"daemon {{os.getpid()}}\\n".encode())
    os.write(write_end, b"!")
    time.sleep(600)
os.read(read_end, 1)
{after}
"""


@pytest.mark.parametrize("in_daemon", ["pass", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"], ids=["polite", "stubborn"])
def test_a_worker_that_succeeds_leaves_a_daemon(
    rallyrun: Any, script: Any, numbers: Any, alive: Any, marked: Any, in_daemon: str
):
    """P09: a job that is over has no process any more, and what it left does not delay its end beyond the shutdown time."""
    worker = script(LEAVES_DAEMON.format(before="", in_daemon=in_daemon, after=""))
    started_at = time.monotonic()
    ended = rallyrun(["--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "1", worker])
    took_s = time.monotonic() - started_at
    daemons = numbers("daemon", ended.stdout)
    assert (ended.returncode, len(daemons)) == (0, 2), ended.stderr
    assert not any(map(alive, daemons))
    assert is_under(took_s, 3.0)
    assert not marked()


def test_daemons_are_gone_before_the_next_attempt(rallyrun: Any, script: Any, numbers: Any, marked: Any, tmp_path: Path):
    """P09: between restarts too, so that an attempt never meets the last one's processes."""
    before = f"""
folder = {str(tmp_path)!r}
if attempt != "0":
    for name in os.listdir(folder):
        if name.startswith("daemon."):
            alive = os.path.exists("/proc/" + name.partition(".")[2])
            os.write(1, b"still there\\n" if alive else b"gone 1\\n")
    sys.exit(0)
"""
    in_daemon = f"open({str(tmp_path)!r} + f'/daemon.{{os.getpid()}}', 'w').close()"
    worker = script(LEAVES_DAEMON.format(before=before, in_daemon=in_daemon, after="sys.exit(3)"))
    ended = rallyrun(["--standalone", "--max-restarts", "1", worker])
    assert ended.returncode == 0, ended.stderr
    assert numbers("gone", ended.stdout) == [1]
    assert "still there" not in ended.stdout
    assert not marked()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- <&-", ">&- <&- 2>&-"])
def test_started_with_closed_streams(
    start_command: Any, rallyrun_command: Any, script: Any, tmp_path: Path, marked: Any, wait_until: Any, closed: str
):
    """P09: as some schedulers and daemons start it; workers get none of the launcher's own descriptors in their place."""
    worker = script("""
        import os
        held = {}
        for fd in os.listdir("/proc/self/fd"):
            try:
                held[fd] = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                pass
        os.write(1, b"a line for stdout\\n")
        os.write(2, b"a line for stderr\\n")
        with open(f"held.{os.environ['RANK']}", "w") as file:
            file.write(" ".join(f"{fd}={what}" for fd, what in held.items()))
        """)
    command = " ".join(f"'{word}'" for word in rallyrun_command("--standalone", "--nproc-per-node", "2", worker))
    job = start_command(["sh", "-c", f"exec {command} {closed}"])
    assert job.wait(20) == 0, job.stderr
    for rank in range(2):
        held = (tmp_path / f"held.{rank}").read_text()
        assert "socket:" not in held, "a worker holds the line between the launcher and its warden"
    assert job.stdout.count("a line for stdout\n") == (0 if " >&-" in f" {closed}" else 2)
    assert job.stderr.count("a line for stderr\n") == (0 if "2>&-" in closed else 2)
    wait_until(lambda: not marked(), GONE_WITHIN_S)


def test_what_a_worker_inherits(rallyrun: Any, script: Any):
    """P09: three streams and nothing else, so that no process holds a pipe or a socket of the launcher's."""
    worker = script("""
        import os
        for fd in os.listdir("/proc/self/fd"):
            if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}"):
                print("inherited", os.readlink(f"/proc/self/fd/{fd}"))
        """)
    for flags in ([], ["--tee", "3", "--log-dir", "logs"], ["--redirects", "3", "--log-dir", "logs"]):
        ended = rallyrun(["--standalone", "--nproc-per-node", "3", *flags, worker])
        assert ended.returncode == 0, ended.stderr
        assert "inherited" not in ended.stdout
