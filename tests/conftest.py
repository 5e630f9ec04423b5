"""What every test gets: a clean environment, a private temporary folder, and a check that it left nothing behind.

The promise that nothing is left behind is checked after *every* test, not in a few written for it. The pytest process adopts
orphans (PR_SET_CHILD_SUBREAPER), so that a process which outlives its launcher turns up among our own children, however
often it changed its session, instead of vanishing under PID 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import settings
from tests.torch_process import torch_importable

from rallypoint.base import report

PR_SET_CHILD_SUBREAPER = 36
INHERITED_HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
LEFTOVER_DEADLINE_S = 30.0  # a warden that is to clear away may have to wait for its turn
END_S = 3.0  # for a launcher that was told to stop, until it is told again
PATIENCE_S = 60.0  # for what must come sooner or later; a test may last twice as long, and those of real jobs as follows
LONG_TEST_S = 300.0
AT_ONCE_S = 10.0  # for what takes milliseconds on a machine of its own; what it is told from takes longer still, mostly 30 s
LONG_PARAMETER, SHOWN_OF_IT = 64, 16
for_all_jobs: dict[str, str] = {}  # what every launcher that a test starts finds in its environment
LONGEST_NAME = 300
ALONE_OF_THEIR_KIND = Path(__file__).parent / "network"  # they look at all namespaces and interfaces of the machine
SHARED_BY_FOLDERS = ("shared_cluster", "modules")  # those of the fixtures with the scope of a session that take seconds to make
LONG_ONES = {"training", "e2e"}  # these folders' tests begin first, so that none of them is the only one at work in the end
FOREIGN_PREFIXES = (
    "PET_", "TORCHELASTIC_", "TORCH_ELASTIC_", "TORCH_NCCL_", "GROUP_", "ROLE_", "RALLYPOINT_", "SLURM_", "OMPI_",
    "PMI_", "PMIX_", "PBS_", "LSB_", "JSM_", "FLUX_",
)  # fmt: skip
FOREIGN_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "LOGLEVEL",
    "PYTHON_EXEC", "CUDA_VISIBLE_DEVICES", "JOB_COMPLETION_INDEX", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip

Argument = str | os.PathLike[str]
Condition = Callable[[], object]


settings.register_profile("at any speed", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("at any speed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--warm", action="store_true", help="have the workers of all jobs forked from a keeper (--preload)")


def pytest_configure(config: pytest.Config) -> None:
    """Adopt orphans, so that they can be seen; and let signals work, which a shell's background job is started without."""
    if config.getoption("--warm"):
        for_all_jobs["PET_PRELOAD"] = "decimal"  # it is quick to import, and nobody notices
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number, handler in INHERITED_HANDLERS.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_make_parametrize_id(val: object) -> str | None:
    """A long parameter is told by its beginning and its length: a name is copied for every report and every child."""
    if isinstance(val, str | bytes) and len(val) > LONG_PARAMETER:
        return f"{val[:SHOWN_OF_IT]!a} and {len(val) - SHOWN_OF_IT} more"
    if isinstance(val, int) and val.bit_length() > LONG_PARAMETER:
        return f"a number of {val.bit_length()} bits"
    return None


@pytest.hookimpl(tryfirst=True)  # before the names of groups become part of the tests' names
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that needs what this machine does not have is skipped, and says so; tests that share something stay together."""
    if too_long := [item.nodeid[:LONGEST_NAME] for item in items if len(item.nodeid) > LONGEST_NAME]:
        raise pytest.UsageError(f"more than {LONGEST_NAME} characters; give their parameters ids: {'; '.join(too_long)}")
    have_torch = importlib.util.find_spec("torch") is not None
    for item in items:
        if "torch" in item.keywords and not have_torch:
            item.add_marker(pytest.mark.skip(reason="torch is not installed"))
        if "root" in item.keywords and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))
        if isinstance(item, pytest.Function) and (group := shared_by(item)) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group))
        if not LONG_ONES.isdisjoint(item.path.parts) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_TEST_S))  # they wait for several things, one after the other
    items.sort(key=lambda item: LONG_ONES.isdisjoint(item.path.parts))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests that have to stay together do. And all that was made here stays, so no search for cycles looks through it again."""
    for item in session.items if session.config.getoption("loadgroup", False) else ():
        if (group := item.get_closest_marker("xdist_group")) and not item.nodeid.endswith(f"@{group.args[0]}"):
            raise RuntimeError(f"this pytest-xdist has no groups with pytest {pytest.__version__}: {item.nodeid} would run apart")
    gc.collect()
    gc.freeze()


def shared_by(item: pytest.Function) -> str:
    """What this test shares with others, and is made once for each test process; all who share it run in the same one."""
    if ALONE_OF_THEIR_KIND in item.path.parents:
        return ALONE_OF_THEIR_KIND.name
    given = item.callspec.params if hasattr(item, "callspec") else {}
    for name, definitions in item._fixtureinfo.name2fixturedefs.items():
        if definitions[-1].scope == "module":
            return f"{item.path.stem} {name} {given.get(name, '')}"
        if name in SHARED_BY_FOLDERS:
            return name
    return ""


@pytest.fixture(autouse=True)
def torch_where_it_is_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test without the mark finds a process that has not imported torch."""
    with torch_importable() if "torch" in request.keywords else contextlib.nullcontext():
        yield


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    """A folder in which a test puts files for its workers to find."""
    folder = tmp_path / "orders"
    folder.mkdir()
    return folder


# --- waiting ---------------------------------------------------------------------------------------------------------------


def poll_until(condition: Condition, timeout_s: float) -> object:
    """The first true value of `condition`, or its last false one when the time is over."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return value


class WaitUntil(Protocol):
    def __call__(self, condition: Condition, timeout_s: float = PATIENCE_S) -> object: ...


@pytest.fixture(scope="session")
def wait_until() -> WaitUntil:
    """``wait_until(condition, timeout_s)`` gives the condition's first true value and fails the test if there is none in time."""

    def wait(condition: Condition, timeout_s: float = PATIENCE_S) -> object:
        __tracebackhide__ = True
        value = poll_until(condition, timeout_s)
        if not value:
            pytest.fail(f"waited {timeout_s:g} s for a condition that did not come true (last value: {value!r})")
        return value

    return wait


@pytest.fixture
def soon() -> Callable[[], float]:
    """``soon()`` is a deadline that a call on loopback keeps easily."""
    return lambda: time.monotonic() + AT_ONCE_S


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The lines that rallypoint reports."""
    lines: list[str] = []
    report.set_sink(lambda _, text: lines.append(text))
    yield lines
    report.set_sink(None)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, as those of pytest cannot be."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


# --- what is left behind ---------------------------------------------------------------------------------------------------


def process_state(pid: int) -> tuple[str, int] | None:
    """State letter and parent of a process, or None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[1])


def children() -> set[int]:
    """Our children: those that tests started, and the orphans that we adopted."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):  # the kernel was built without CONFIG_PROC_CHILDREN
        return children_among_all()
    found = children_of_threads()
    while (again := children_of_threads()) != found:  # one that goes while the list is read hides another from it
        found = again
    return found


def children_of_threads() -> set[int]:
    """The kernel keeps a list for each thread, with zombies; an orphan comes to any one of them."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile; another one has its children then
            found.update(map(int, Path(f"/proc/self/task/{thread}/children").read_bytes().split()))
    return found


def children_among_all() -> set[int]:
    """The same from every process of the machine, which takes a hundred times as long."""
    me = os.getpid()
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return {pid for pid in pids if (state := process_state(pid)) is not None and state[1] == me}


def describe_process(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = "gone meanwhile"
    return f"process {pid} ({command})"


def reap(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # the test waited for it in the meantime
            os.waitpid(pid, os.WNOHANG)


def open_files() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd: target for fd, target in found.items() if fd > 2}


def holds_logs(folder: Path) -> bool:
    """Logs that were asked for without naming a folder, and error files, are kept for the user to read."""
    return any(path.suffix in (".log", ".json") and path.stat().st_size for path in folder.rglob("*"))


class Snapshot:
    """What there was before a test, to be compared with what there is after it."""

    def __init__(self, tmpdir: Path) -> None:
        self.tmpdir = tmpdir
        self.children = children()
        self.files = open_files()
        self.threads = set(threading.enumerate())

    def leftovers(self) -> list[str]:
        reap(children() - self.children)
        found = [describe_process(pid) for pid in sorted(children() - self.children)]
        found += [
            f"thread {thread.name}"
            for thread in set(threading.enumerate()) - self.threads
            if not thread.daemon or thread.name.startswith("rallypoint")
        ]
        found += [f"file descriptor {fd} ({what})" for fd, what in open_files().items() if self.files.get(fd) != what]
        found += [f"temporary file {path}" for path in self.tmpdir.glob("rallypoint_*") if not holds_logs(path)]
        return found

    def kill_leftovers(self) -> None:
        """Kill what is left, and the orphans that we adopt by killing their parents, so that the next test starts clean."""

        def all_gone() -> bool:
            left = children() - self.children
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            reap(left)
            return not left

        poll_until(all_gone, LEFTOVER_DEADLINE_S)


@pytest.fixture
def private_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this test and of every process that it starts."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def clear_after_kill(private_tmpdir: Path) -> Iterator[Callable[[], None]]:
    """``clear_after_kill()``: a launcher was killed and could not remove its folder. That is done once all others have ended."""
    asked: list[bool] = []
    yield lambda: asked.append(True)
    for folder in private_tmpdir.glob("rallypoint_*") if asked else ():
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def runtime_folder() -> Iterator[str]:
    """Where the agents that tests start can be asked; a path of a socket has to be short."""
    folder = tempfile.mkdtemp(prefix="rally-", dir="/tmp")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, runtime_folder: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No setting of the machine, nor of a launcher that runs these tests, reaches the code under test; nor does it the home."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))
    for name in list(os.environ):
        if name in FOREIGN_NAMES or name.startswith(FOREIGN_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RALLYPOINT_RUNTIME_DIR", runtime_folder)


@pytest.fixture(autouse=True)
def nothing_left_behind(private_tmpdir: Path) -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a file descriptor or one of our temporary files."""
    before = Snapshot(private_tmpdir)
    yield
    if before.leftovers():
        gc.collect()
        poll_until(lambda: not before.leftovers(), LEFTOVER_DEADLINE_S)
    left = before.leftovers()
    before.kill_leftovers()
    if left:
        pytest.fail(f"left behind {LEFTOVER_DEADLINE_S:g} s after the test: " + "; ".join(left))


# --- processes -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def alive() -> Callable[[int], bool]:
    """``alive(pid)``: whether the process runs; a zombie, which may well be our own to reap, does not."""

    def is_alive(pid: int) -> bool:
        state = process_state(pid)
        return state is not None and state[0] not in "ZX"

    return is_alive


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """``script(text, name="worker.py")`` writes a worker's program and gives its path."""

    def write(text: str, name: str = "worker.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


RALLYRUN = (sys.executable, "-m", "rallypoint", "run")


def command_line(args: Sequence[Argument], launcher: Sequence[Argument] = RALLYRUN) -> list[str]:
    return [os.fspath(arg) for arg in (*launcher, *args)]


def merged_environment(env: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, **for_all_jobs, **(env or {})}


class RunRallyrun(Protocol):
    def __call__(
        self, args: Sequence[Argument], env: Mapping[str, str] | None = None, timeout: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def rallyrun(tmp_path: Path) -> RunRallyrun:
    """``rallyrun(args, env=…, timeout=…)`` runs the real command to its end, with both streams in pipes."""

    def run(
        args: Sequence[Argument], env: Mapping[str, str] | None = None, timeout: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command_line(args), env=merged_environment(env), cwd=tmp_path, timeout=timeout,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip

    return run


class RunningRallyrun:
    """A launcher that runs beside the test; what it and its workers print is in two files."""

    def __init__(
        self, args: Sequence[Argument], env: Mapping[str, str] | None, folder: Path, launcher: Sequence[Argument] = RALLYRUN
    ) -> None:
        self._out, self._err = folder / "stdout.txt", folder / "stderr.txt"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command_line(args, launcher),
                env=merged_environment(env),
                cwd=folder.parent,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self.pid = self.process.pid

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"rallyrun still ran after {timeout_s:g} s\n{self._so_far()}")

    def wait_for(self, condition: Condition, timeout_s: float = PATIENCE_S) -> object:
        """The first true value of `condition`; fails when the launcher ends before, or after `timeout_s`."""
        __tracebackhide__ = True
        poll_until(lambda: condition() or self.process.poll() is not None, timeout_s)
        value = condition()
        if not value:
            how = "still runs" if self.process.poll() is None else f"ended with {self.process.returncode}"
            pytest.fail(f"waited {timeout_s:g} s for a condition in vain; rallyrun {how}\n{self._so_far()}")
        return value

    def wait_for_line(self, text: str, timeout_s: float = PATIENCE_S) -> str:
        """The first whole line, of either stream, that contains `text`."""
        __tracebackhide__ = True
        return str(self.wait_for(lambda: self._line_with(text), timeout_s))

    def _line_with(self, text: str) -> str | None:
        for stream in (self.stdout, self.stderr):
            whole_lines = stream[: stream.rfind("\n") + 1].splitlines()
            for line in whole_lines:
                if text in line:
                    return line
        return None

    def _so_far(self) -> str:
        return f"--- stdout ---\n{self.stdout}\n--- stderr ---\n{self.stderr}"

    def end(self) -> None:
        """Asked to stop, then told again, which kills at once; a launcher that does not even do that is killed itself."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(END_S)


class StartRallyrun(Protocol):
    def __call__(
        self, args: Sequence[Argument], env: Mapping[str, str] | None = None, launcher: Sequence[Argument] = RALLYRUN
    ) -> RunningRallyrun: ...


@pytest.fixture
def start_rallyrun(tmp_path: Path, clear_after_kill: Callable[[], None]) -> Iterator[StartRallyrun]:
    """``start_rallyrun(args, env=…)`` starts the real command and gives a handle: ``wait_for``, ``wait_for_line``, ``wait``.

    A `launcher` is what stands before the arguments, where that is not the plain command.
    """
    running: list[RunningRallyrun] = []

    def start(
        args: Sequence[Argument], env: Mapping[str, str] | None = None, launcher: Sequence[Argument] = RALLYRUN
    ) -> RunningRallyrun:
        folder = tmp_path / f"rallyrun_{len(running)}"
        folder.mkdir()
        running.append(RunningRallyrun(args, env, folder, launcher))
        return running[-1]

    yield start
    for one in running:
        one.end()
    if any(one.process.returncode == -signal.SIGKILL for one in running):
        clear_after_kill()
