"""What a user is told when a worker fails, and what a scheduler is."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint.cli.explain import explain_main

RAISES = """
import os, sys, time

def check(rate):
    if rate < 0:
        raise ValueError(f"the learning rate is {rate}")

def train():
    print(f"epoch 3 begins in process {os.getpid()}", file=sys.stderr)
    check(-1)

if os.environ["RANK"] == "1":
    train()
time.sleep(60)
"""
SLEEPS = """
import os, time
os.write(1, f"worker {os.getpid()}\\n".encode())
time.sleep(60)
"""


def summary_of(stderr: str) -> str:
    """What stands between the last two borders."""
    return stderr.rsplit("=" * 80, 2)[1]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--log-dir", "logs"],
        ["--log-dir", "logs", "--redirects", "3"],
        ["--log-dir", "logs", "--tee", "3"],
        ["--log-dir", "logs", "--redirects", "3", "--log-max-size", "1M"],
        ["--local-ranks-filter", "0"],
        ["--log-dir", "logs", "--tee", "3", "--local-ranks-filter", "0"],
        ["--log-dir", "/dev/null"],
    ],
    ids=" ".join,
)
def test_a_plain_script_that_raises(rallyrun: Any, script: Any, flags: list[str]):
    """P01: no decorator; the summary has type, message, last frames, stderr tail, host, rank, pid and the log's path."""
    worker = script(RAISES)
    ended = rallyrun(["--standalone", "--nproc-per-node", "2", *flags, worker])
    summary = summary_of(ended.stderr)
    assert ended.returncode == 1
    assert summary.splitlines()[1] == f"{worker} FAILED: rank 1 raised ValueError: the learning rate is -1"
    assert re.search(rf"{re.escape(str(worker))}:6 in check\s+raise ValueError", summary)
    assert re.search(rf"{re.escape(str(worker))}:10 in train\s+check\(-1\)", summary)
    told = re.search(r"epoch 3 begins in process (\d+)$", summary, re.MULTILINE)
    assert told is not None
    where = re.search(r"host: (\S+) +rank: 1 \(local_rank: 1\) +pid: (\d+) +exit code: 1$", summary, re.MULTILINE)
    assert where is not None
    assert where.groups() == (os.uname().nodename, told[1])
    assert "/rallypoint/" not in ended.stderr, "a frame of the launcher explains nothing to a user"


@pytest.mark.parametrize("flags", [[], ["--redirects", "3"], ["--tee", "3"]], ids=" ".join)
def test_the_log_that_the_summary_names_is_there(rallyrun: Any, script: Any, flags: list[str]):
    """P01, P35: the path in the summary leads to what the failed worker wrote."""
    ended = rallyrun(["--standalone", "--nproc-per-node", "2", "--log-dir", "logs", *flags, script(RAISES)])
    log = re.search(r"^  log: (.+)$", summary_of(ended.stderr), re.MULTILINE)
    assert log is not None
    assert "epoch 3 begins" in Path(log[1]).read_text()
    assert "ValueError: the learning rate is -1" in Path(log[1]).read_text()


def test_a_recorded_error_comes_from_its_file(rallyrun: Any, script: Any):
    """P01: with `record` the error file says it, whatever became of stderr."""
    worker = script("""
        import os, sys
        from rallypoint import record

        @record
        def main():
            os.close(2)
            raise KeyError("weights")

        main()
        """)
    ended = rallyrun(["--standalone", "--log-dir", "logs", worker])
    summary = summary_of(ended.stderr)
    assert ended.returncode == 1
    assert "raised KeyError: 'weights'" in summary
    assert f"{worker}:8 in main" in summary
    error_file = re.search(r"error file: (.+)$", summary, re.MULTILINE)
    assert error_file is not None
    assert Path(error_file[1]).name == "error.json"


def test_the_first_failure_comes_first(rallyrun: Any, script: Any):
    """P01: of two failures a few milliseconds apart, the first is the cause."""
    worker = script("""
        import os, signal, sys, time
        rank = int(os.environ["RANK"])
        if rank == 2:
            sys.exit("the disk is full")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("a victim"))
        time.sleep(60)
        """)
    ended = rallyrun(["--standalone", "--nproc-per-node", "3", worker])
    summary = summary_of(ended.stderr)
    assert "FAILED: rank 2 exited with code 1" in summary
    assert "the disk is full" in summary
    assert "a victim" not in summary


CRASHES = """
import ctypes, os, time

def dive():
    ctypes.string_at(0)

if os.environ["RANK"] == "1":
    dive()
time.sleep(60)
"""


@pytest.mark.parametrize(("setting", "is_told"), [({}, True), ({"PYTHONFAULTHANDLER": ""}, False)], ids=["ours", "the user's"])
def test_a_crash_shows_its_line(rallyrun: Any, script: Any, setting: dict[str, str], is_told: bool):
    """P01: native code ends the worker by a signal, and Python tells where; unless the user does not want it to."""
    worker = script(CRASHES)
    ended = rallyrun(["--standalone", "--nproc-per-node", "2", worker], env=setting)
    assert ended.returncode == 1
    assert (f'File "{worker}", line 5 in dive' in ended.stderr) == is_told
    assert (f"{worker}:5 in dive\n" in summary_of(ended.stderr)) == is_told
    assert "rank 1 was killed by SIGSEGV" in summary_of(ended.stderr)


def test_a_stranger_kills_a_worker(start_rallyrun: Any, script: Any, numbers: Any):
    """P21: exit code -9 is told as SIGKILL, sender unknown, and how to find out."""
    job = start_rallyrun(["--standalone", "--nproc-per-node", "2", script(SLEEPS)])
    first, _ = job.wait_for(lambda: len(pids := numbers("worker", job.stdout)) == 2 and pids)
    os.kill(first, signal.SIGKILL)
    assert job.wait() == 1
    summary = summary_of(job.stderr)
    assert re.search(r"FAILED: rank [01] was killed by SIGKILL$", summary, re.MULTILINE)
    assert f"pid: {first} " in summary
    assert "sender unknown" in summary
    assert "dmesg" in summary
    assert "out of memory" not in summary


@pytest.mark.root
def test_a_real_out_of_memory_kill(start_command: Any, rallyrun_command: Any, script: Any, numbers: Any, cgroup: Any):
    """P21: where the kernel says that memory ran out, so do we."""
    folder = cgroup("memory")
    (folder / "memory.limit_in_bytes").write_text(str(100 << 20))
    worker = script("""
        import os
        print("worker", os.getpid(), flush=True)
        eaten = []
        while True:
            eaten.append(b"x" * (1 << 20))
        """)
    join = f'echo $$ > "{folder}/cgroup.procs" && exec "$@"'
    job = start_command(["sh", "-c", join, "sh", *rallyrun_command("--standalone", worker)])
    assert job.wait() == 1
    summary = summary_of(job.stderr)
    [pid] = numbers("worker", job.stdout)
    assert "FAILED: rank 0 was killed by SIGKILL: out of memory" in summary
    assert f"pid: {pid} " in summary
    assert "100 MiB" in summary
    assert "sender unknown" not in summary
    assert "give the job more memory" in summary


@pytest.mark.parametrize(
    ("flags", "program", "code"),
    [
        ([], "exit 0", 0),
        ([], "exit 3", 1),
        ([], "kill -SEGV $$", 1),
        (["--max-restarts", "1"], 'exit "$TORCHELASTIC_RESTART_COUNT"', 0),
        (["--max-restarts", "1"], 'test "$TORCHELASTIC_RESTART_COUNT" = 1', 0),
        (["--pass-exit-code"], "exit 0", 0),
        (["--pass-exit-code"], "exit 3", 3),
        (["--pass-exit-code"], "exit 255", 255),
        (["--pass-exit-code"], "kill -KILL $$", 128 + signal.SIGKILL),
        (["--pass-exit-code"], "kill -SEGV $$", 128 + signal.SIGSEGV),
        (["--pass-exit-code", "--max-restarts", "1"], "exit $((3 + TORCHELASTIC_RESTART_COUNT))", 4),
        (["--pass-exit-code", "--nproc-per-node", "none"], "exit 3", 2),
        (["--no-such-flag"], "exit 3", 2),
    ],
)
def test_exit_codes(rallyrun: Any, flags: list[str], program: str, code: int):
    """P37: documented codes tell a scheduler what to do; the first cause's own is passed on if asked for."""
    ended = rallyrun(["--standalone", *flags, "--no-python", "sh", "-c", program])
    assert ended.returncode == code, ended.stderr


def test_the_exit_code_is_that_of_the_first_cause(rallyrun: Any, script: Any):
    """P37: not that of a worker which was stopped because of it."""
    worker = script("""
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
        if os.environ["RANK"] == "1":
            os._exit(5)
        time.sleep(60)
        """)
    assert rallyrun(["--standalone", "--nproc-per-node", "3", "--pass-exit-code", worker]).returncode == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("flags", [[], ["--pass-exit-code"], ["--max-restarts", "3"]], ids=" ".join)
def test_the_exit_code_after_a_signal(start_rallyrun: Any, script: Any, number: signal.Signals, flags: list[str]):
    """P37: 130 after Ctrl-C and 143 after SIGTERM, whatever the workers made of it."""
    job = start_rallyrun(["--standalone", *flags, script(SLEEPS)])
    job.wait_for_line("worker")
    job.send_signal(number)
    assert job.wait() == 128 + number


def test_a_program_that_cannot_be_started(rallyrun: Any, tmp_path: Path, script: Callable[..., Path]):
    """P37: a file that the kernel refuses fails like a worker, with its name and the reason, and no traceback of ours."""
    program = script("#!/no/such/interpreter\n", "program")
    program.chmod(0o755)
    ended = rallyrun(["--standalone", "--no-python", program])
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "program" in ended.stderr
    assert "No such file" in ended.stderr


def test_m4_a_message_cannot_act_on_the_terminal(rallyrun: Any, script: Any, tmp_path: Any):
    """m4: what a worker leaves in its error file is shown in lines of ours, escaped once, and forges none."""
    worker = script("""
        from rallypoint import record

        @record
        def main():
            raise ValueError("\\x1b]0;owned\\x07\\x1b[2J\\nrallyrun: all is well")

        main()
        """)
    ended = rallyrun(["--standalone", "--max-restarts", "1", "-r", "3", "--log-dir", tmp_path / "logs", worker])
    assert ended.returncode == 1
    assert not {one for one in ended.stderr if not one.isprintable()} - {"\n"}
    assert "rallyrun: all is well" not in ended.stderr.splitlines()
    assert "\\x1b]0;owned" in ended.stderr


ALL_RAISE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # however slow the machine, each comes to its error
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").close()
while len(os.listdir(sys.argv[1])) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
raise ModuleNotFoundError(f"No module named 'nope' in process {os.getpid()}")
"""


def test_f02_the_same_error_of_all_workers_is_told_once(
    rallyrun: Any, script: Any, orders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """F02: on the screen, and in the story of the run, to which the last line leads."""
    ended = rallyrun(["--standalone", "--nproc-per-node", "3", "--log-dir", "logs", script(ALL_RAISE), orders])
    summary = summary_of(ended.stderr)
    assert ended.returncode == 1
    assert " FAILED: all 3 workers raised ModuleNotFoundError: No module named 'nope' in process " in summary
    assert re.search(r"^  and ranks (0-1|0, 2|1-2): the same$", summary, re.MULTILINE)
    assert "Other failures" not in summary
    last = re.fullmatch(r"rallyrun: for what happened, and when: rallypoint explain (\S+)", ended.stderr.splitlines()[-1])
    assert last is not None
    assert explain_main([str(tmp_path / last[1]), "--json"]) == 0
    [failed] = [entry for entry in json.loads(capsys.readouterr().out)["timeline"] if entry["kind"] == "failed"]
    assert failed["facts"]["ranks"] == [0, 1, 2]
    assert failed["text"].startswith("all 3 workers, first rank ")
