"""``--preload``: workers that are forks of an interpreter with all modules imported, beside fresh ones; how they differ."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.conftest import RunRallyrun, StartRallyrun
from tests.ports import free_port

Script = Callable[..., Path]

# What a program can know of the interpreter that runs it. What is drawn at random or counted is told apart by its name.
FACTS = """
    import sys
    loaded = set(sys.modules)
    import atexit, faulthandler, gc, json, locale, multiprocessing, os, random, resource, signal, threading, warnings

    def double(value):
        return 2 * value

    def in_pool(method):
        with multiprocessing.get_context(method).Pool(1) as pool:
            return pool.map(double, [21])

    def stream(one):
        kind = type(one.buffer).__name__
        return [one.encoding, one.errors, one.line_buffering, one.write_through, one.isatty(), one.mode, one.name, kind]

    def status(*names):
        with open("/proc/self/status") as file:
            fields = dict(line.split(":", 1) for line in file.read().splitlines())
        return {name: fields[name].strip() for name in names}

    def read(path):
        with open(path) as file:
            return file.read()

    def facts():
        main = sys.modules["__main__"]
        return {
            "arguments": [sys.argv, sys.orig_argv],
            "command": read("/proc/self/cmdline"),
            "name": read("/proc/self/comm"),
            "main": {name: repr(value) for name, value in vars(main).items() if name.startswith("__") and name != "__builtins__"},
            "path": [sys.path, sys.prefix, sys.executable],
            "flags": [repr(sys.flags), sys.warnoptions, sorted(sys._xoptions.items()), [str(one) for one in warnings.filters]],
            "environment": dict(os.environ),
            "streams": [stream(one) for one in (sys.stdin, sys.stdout, sys.stderr)],
            "files": sorted(os.listdir("/proc/self/fd")),
            "handlers": {number: repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())},
            "signals": status("SigBlk", "SigIgn", "SigCgt"),
            "threads": [threading.active_count(), threading.current_thread().name, *status("Threads").values()],
            "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")},
            "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), read(f"/proc/{os.getppid()}/comm")],
            "priority": [os.nice(0), read("/proc/self/oom_score_adj"), sorted(os.sched_getaffinity(0)), status("NoNewPrivs")],
            "folder": [os.getcwd(), oct(os.umask(0o22))],
            "locale": [locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding(), sys.flags.utf8_mode],
            "collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug()],
            "hooks": [repr(sys.excepthook), repr(sys.meta_path), sys.gettrace(), sys.getprofile(), faulthandler.is_enabled()],
            "recursion": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits()],
            "pools": [in_pool(method) for method in ("spawn", "fork", "forkserver")],
            "random": random.random(),
            "hash": hash("rallypoint"),
            "modules": sorted(loaded),
        }

    if __name__ == "__main__":
        atexit.register(lambda: print("at exit", flush=True))
        with open(sys.argv[1], "w") as file:
            json.dump(facts(), file)
        os.write(2, b"done\\n")
        sys.exit(int(sys.argv[2]))
"""
# What a fork has of its keeper, and what it is for.
RANDOM = ("random", "hash", "modules")


def compare(
    rallyrun: RunRallyrun,
    folder: Path,
    command: Sequence[str | Path],
    env: dict[str, str],
    code: int,
    preload: str = "decimal,email.message",
) -> list[Any]:
    """The facts of two workers of each kind, after the same start."""
    found = []
    for kind, flags in (("fresh", []), ("warm", ["--preload", preload])):
        (folder / kind).mkdir()
        common = ["--standalone", "--nproc-per-node", "2", "--no-proctitle", "--log-dir", folder / kind, *flags]
        ended = rallyrun([*common, *command, folder / "facts-${local_rank}", str(code)], env)
        assert ended.stdout.count("at exit") == 2, ended.stderr
        assert (ended.returncode, "import decimal" in ended.stderr) == (bool(code), False), ended.stderr
        assert f"exited with code {code}" in ended.stderr or not code
        found.append([json.loads((folder / f"facts-{rank}").read_text()) for rank in range(2)])
    return found


def without_unique(facts: dict[str, Any]) -> dict[str, Any]:
    """Names of folders and ports are drawn anew for every job."""
    drawn = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "MASTER_PORT", "RALLYPOINT_RUN_ID", "RALLYPOINT_PULSE")
    environment = {name: value for name, value in facts["environment"].items() if name not in drawn}
    same = {name: value for name, value in facts.items() if name not in RANDOM}
    return dict(json.loads(re.sub(r" at 0x[0-9a-f]+", "", json.dumps({**same, "environment": environment}))))


@pytest.mark.parametrize(
    ("form", "env", "code"),
    [
        ("script", {}, 0),
        ("module", {"PYTHONUTF8": "1", "PYTHONWARNINGS": "error", "PYTHONHASHSEED": "7"}, 0),
        ("script", {"PYTHONDEVMODE": "1", "LC_ALL": "C", "PYTHONSAFEPATH": "1"}, 3),
    ],
    ids=["script", "module", "script with an exit code"],
)
def test_a_warm_worker_differs_from_a_fresh_one_in_nothing_but_what_it_has_imported(
    form: str, env: dict[str, str], code: int, rallyrun: RunRallyrun, script: Script, tmp_path: Path
) -> None:
    path = script(FACTS, "facts.py")
    command: list[str | Path] = [path] if form == "script" else ["-m", "facts"]
    with TemporaryDirectory(dir="/tmp") as short:  # a fork server's socket is in it
        fresh, warm = compare(rallyrun, tmp_path, command, {**env, "TMPDIR": short, "PET_PRELOAD": ""}, code)
    for one, other in zip(fresh, warm, strict=True):
        expected, found = without_unique(one), without_unique(other)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == value, name
        assert {"decimal", "email.message"} <= set(other["modules"]) - set(one["modules"])
        assert not {name for name in other["modules"] if name.startswith(("rallypoint", "sitecustomize"))}
        assert set(one["modules"]) <= set(other["modules"])
    assert len({one["random"] for one in (*fresh, *warm)}) == 4, "each draws for itself"
    assert len({one["hash"] for one in warm}) == 1, "the seed of hashes is the keeper's"


def test_a_worker_that_is_measured_differs_in_nothing(rallyrun: RunRallyrun, script: Script, tmp_path: Path) -> None:
    """The first run with ``--preload auto``, of which nothing is known yet."""
    with TemporaryDirectory(dir="/tmp") as short:
        env = {"TMPDIR": short, "PET_PRELOAD": "", "PYTHONPATH": str(tmp_path / "somewhere")}
        fresh, measured = compare(rallyrun, tmp_path, [script(FACTS, "facts.py")], env, 0, "auto")
    assert (tmp_path / "warm" / ".rallypoint-preload.json").exists()
    for one, other in zip(fresh, measured, strict=True):
        expected, found = without_unique(one), without_unique(other)
        for name, value in expected.items():
            assert found[name] == value, name
        assert set(other["modules"]) - {"__future__"} == set(one["modules"]) - {"__future__"}


RESTARTS = """
    import os, sys, time
    rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(1, f"rank {rank} restart {restart} warm {'decimal' in sys.modules}\\n".encode())
    open(f"{sys.argv[1]}/{restart}.{rank}", "w").close()
    while rank == "1" and not all(os.path.exists(f"{sys.argv[1]}/{restart}.{one}") for one in range(3)):
        time.sleep(0.01)
    if rank == "1" and restart != "2":
        os.kill(os.getpid(), 9)
    if restart != "2":
        time.sleep(600)
"""


def test_restarted_workers_are_warm_too(rallyrun: RunRallyrun, script: Script, tmp_path: Path) -> None:
    common = ["--standalone", "--nproc-per-node", "3", "--max-restarts", "2"]
    ended = rallyrun([*common, script(RESTARTS), tmp_path], {"PET_PRELOAD": "decimal"})
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == sorted(
        f"rank {rank} restart {count} warm True" for rank in range(3) for count in range(3)
    )


def test_a_worker_that_is_killed_or_fails_is_told_of_as_ever(rallyrun: RunRallyrun, script: Script) -> None:
    raises = script("raise ValueError('bad luck')")
    ended = rallyrun(["--standalone", "--preload", "decimal", raises])
    assert ended.returncode == 1
    assert f'File "{raises}", line 1, in <module>' in ended.stderr
    assert "ValueError: bad luck" in ended.stderr
    assert "keeper" not in ended.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--preload", "no_such_module"], "workers import no_such_module themselves: no_such_module could not be imported:"),
        (["--preload", "decimal", "--no-python"], "workers import decimal themselves: they run "),
    ],
)
def test_where_it_cannot_be_one_line_says_why(flags: list[str], told: str, rallyrun: RunRallyrun, script: Script) -> None:
    program = script(f"#!{sys.executable}\nprint('ran')\n")
    program.chmod(0o700)
    ended = rallyrun(["--standalone", "--nproc-per-node", "2", *flags, program])
    assert (ended.returncode, ended.stdout) == (0, "ran\n" * 2)
    assert [line for line in ended.stderr.splitlines() if told in line] != []
    assert ended.stderr.count("themselves") == 1


def test_a_module_of_the_programs_own_is_not_hidden(rallyrun: RunRallyrun, script: Script, tmp_path: Path) -> None:
    (tmp_path / "decimal.py").write_text("OURS = True\n")
    ended = rallyrun(["--standalone", "--preload", "fractions", script("import decimal; print(decimal.OURS)")])
    assert (ended.returncode, ended.stdout) == (0, "True\n")
    assert f"the program would get decimal from its own folder, {tmp_path}" in ended.stderr


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        ("torch,my-module", "--preload: 'my-module' is not the name of a module"),
        ("auto,torch", "--preload: auto chooses the modules itself, and stands alone"),
    ],
)
def test_what_is_no_module_is_told_before_anything_starts(modules: str, told: str, rallyrun: RunRallyrun, script: Script) -> None:
    ended = rallyrun(["--standalone", "--preload", modules, script("print('ran')")])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert told in ended.stderr


def test_a_signal_during_the_imports_ends_it(start_rallyrun: StartRallyrun, tmp_path: Path, script: Script) -> None:
    (tmp_path / "slow_module.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(600)\n")
    job = start_rallyrun(["--standalone", "--preload", "slow_module", script("print('ran')")], {"PYTHONPATH": str(tmp_path)})
    job.wait_for_line("importing")
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM
    assert "ran" not in job.stdout


@pytest.mark.parametrize("form", [(), ("--run-path",)], ids=["script", "function"])
def test_a_node_that_waits_for_another_imports_meanwhile(
    form: tuple[str, ...], start_rallyrun: StartRallyrun, script: Script, tmp_path: Path
) -> None:
    """And its workers, whose arguments and environments are known later, are forks of the very process that did."""
    (tmp_path / "slow_module.py").write_text("import os\nPID = os.getpid()\nprint('imported by', PID, flush=True)\n")
    told = "import os\nfrom slow_module import PID\nos.write(1, f\"rank {os.environ['RANK']} has that of {PID}\\n\".encode())\n"
    env = {"PYTHONPATH": str(tmp_path), "PET_PRELOAD": "slow_module", "TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    endpoint = f"127.0.0.1:{free_port()}"
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
    flags = ["--nproc-per-node", "2", "--hang-timeout", "60", "--checkpoint-memory", "1M"]
    command = [*meeting, *flags, *form, script(told), "${local_rank}"]
    nodes = [start_rallyrun(command, env)]
    (keeper,) = re.findall(r"imported by (\d+)", nodes[0].wait_for_line("imported by"))
    assert "rank" not in nodes[0].stdout, "nobody can begin before the other has come"
    nodes.append(start_rallyrun(command, env))
    for node in nodes:
        assert node.wait() == 0, node.stderr
    assert sorted(re.findall(r"rank \d has that of (\d+)", nodes[0].stdout)) == [keeper] * 2
    assert [node.stdout.count("imported by") + node.stderr.count("imported by") for node in nodes] == [1, 1]


FUNCTION = """
    import os, sys
    from rallypoint import LaunchConfig, elastic_launch

    def work(value):
        return [value, os.environ["RANK"], "decimal" in sys.modules, sys.argv]

    if __name__ == "__main__":
        config = LaunchConfig.standalone(2, preload=sys.argv[1].split(","), start_method=sys.argv[2])
        print(elastic_launch(config, work)(5))
"""


def test_functions_are_warm_too(script: Script, rallyrun: RunRallyrun) -> None:
    import subprocess

    program = script(FUNCTION)
    command = [sys.executable, program, "decimal", "spawn"]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=True)
    argv = [str(program), "decimal", "spawn"]
    assert ended.stdout == f"{ {0: [5, '0', True, argv], 1: [5, '1', True, argv]} }\n"
    assert ended.stderr == ""


FAILS_AGAIN_AND_AGAIN = """
    import json, os, signal, sys

    def read(path):
        with open(path) as file:
            return file.read().strip()

    def look(pid):
        resident_pages = int(read(f"/proc/{pid}/statm").split()[1])
        return [len(os.listdir(f"/proc/{pid}/fd")), resident_pages * os.sysconf("SC_PAGE_SIZE")]

    if os.environ["RANK"] == "0":
        warden = os.getppid()
        agent = int(read(f"/proc/{warden}/stat").rpartition(")")[2].split()[1])
        children = [int(pid) for pid in read(f"/proc/{warden}/task/{warden}/children").split()]
        keeper = min(pid for pid in children if read(f"/proc/{pid}/comm") == "rally-keeper")  # others are not workers yet
        found = {"agent": look(agent), "warden": look(warden), "keeper": look(keeper)}
        with open(sys.argv[1], "a") as file:
            print(json.dumps([keeper, len(children), found]), file=file)
    is_last = os.environ["TORCHELASTIC_RESTART_COUNT"] == sys.argv[2]
    if os.environ["RANK"] != "0" and not is_last:
        signal.pause()
    sys.exit(not is_last)
"""
SETTLED = 10  # restarts, after which nothing more is loaded
GROWTH_BYTES = 4 << 20


@pytest.mark.parametrize("restarts", [25, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_one_keeper_lasts_for_all_restarts_and_nothing_grows(
    restarts: int, rallyrun: RunRallyrun, script: Script, tmp_path: Path
) -> None:
    program, seen = script(FAILS_AGAIN_AND_AGAIN), tmp_path / "seen"
    common = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), "--restart-backoff", "0"]
    ended = rallyrun([*common, "--preload", "decimal", program, seen, str(restarts)], timeout=1000.0)
    assert ended.returncode == 0, ended.stderr
    looks = [json.loads(line) for line in seen.read_text().splitlines()]
    assert len(looks) == restarts + 1
    assert len({keeper for keeper, _, _ in looks}) == 1
    assert {children for _, children, _ in looks} <= {2, 3}, "the keeper and the workers"
    settled, last = looks[SETTLED][2], looks[-1][2]
    for name, (files, resident) in last.items():
        assert files <= settled[name][0], name
        assert resident <= settled[name][1] + GROWTH_BYTES, name
