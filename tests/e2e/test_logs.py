"""The workers' output: whole lines, the last one always, in the files that were asked for."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

# Lines of many lengths, written in pieces of other lengths, to both streams in turn: only the line ends hold them together.
CHATTERS = """
import os, random, sys
rank = int(os.environ["RANK"])
dice = random.Random(rank)
texts = {1: b"", 2: b""}
for number in range(int(sys.argv[1])):
    for fd, name in ((1, "out"), (2, "err")):
        filler = "x" * dice.choice((0, 5, 80, 700))
        texts[fd] += f"<{name} {rank} {number} {filler} {len(filler)}>\\n".encode()
while any(texts.values()):
    for fd in (1, 2):
        size = dice.choice((1, 17, 4096, 70000))
        os.write(fd, texts[fd][:size])
        texts[fd] = texts[fd][size:]
"""
LINE = re.compile(r"\[default(\d+)\]:<(out|err) (\d+) (\d+) (x*) (\d+)>")


def files_of(log_dir: Path) -> dict[str, Path]:
    """The files of the workers of the only run in this folder, by their path in it."""
    [run] = log_dir.glob("*_*")
    return {str(path.relative_to(run)): path for path in sorted(run.rglob("attempt_*/**/*")) if path.is_file()}


def test_whole_lines_of_many_workers(start_command: Any, rallyrun_command: Any, script: Any, tmp_path: Path):
    """P33: eight workers write both streams to one console at the same time; every line is whole, in order, and there."""
    workers, lines = 8, 1500
    flags = ["--standalone", "--nproc-per-node", workers, "--tee", "3", "--log-dir", "logs"]
    job = start_command(rallyrun_command(*flags, script(CHATTERS), lines), together=True)
    assert job.wait(60) == 0
    shown: dict[tuple[str, int], list[int]] = {}
    for line in job.stdout.splitlines():
        if line.startswith("rallyrun: "):
            continue
        match = LINE.fullmatch(line)
        assert match, f"not a whole line: {line[:200]!r}"
        prefix_rank, stream, rank, number, filler, size = match.groups()
        assert (prefix_rank, len(filler)) == (rank, int(size))
        shown.setdefault((stream, int(rank)), []).append(int(number))
    assert shown == {(stream, rank): list(range(lines)) for stream in ("out", "err") for rank in range(workers)}
    files = files_of(tmp_path / "logs")
    for stream, rank in shown:
        text = files[f"attempt_0/{rank}/std{stream}.log"].read_text()
        assert text.count("\n") == lines
        assert f"<{stream} {rank} {lines - 1} " in text


def test_f28_whole_lines_without_tee(rallyrun: Any, script: Any):
    """F28: four workers print a hundred thousand lines each into one pipe; each line is whole, in its order, and there."""
    worker = script("""
        import os
        for number in range(100_000):
            print(f"rank {os.environ['RANK']} says line {number}")
        """)
    ended = rallyrun(["--standalone", "--nproc-per-node", "4", worker], timeout=120)
    assert ended.returncode == 0, ended.stderr
    shown: dict[str, list[str]] = {}
    for line in ended.stdout.split("\n")[:-1]:
        shown.setdefault(line[: len("rank 0")], []).append(line)
    for rank in range(4):
        assert shown.pop(f"rank {rank}") == [f"rank {rank} says line {number}" for number in range(100_000)]
    assert shown == {}


WHERE = """
import os
os.write(1, f"{os.environ['RANK']} {os.readlink('/proc/self/fd/1')}\\n".encode())
"""


@pytest.mark.parametrize(
    ("flags", "are_ours"),
    [
        ("--nproc-per-node 1", [True]),
        ("--nproc-per-node 2", [False, False]),
        ("--nproc-per-node 2 --redirects 1:1 --log-dir logs", [True]),
        ("--nproc-per-node 2 --local-ranks-filter 0", [True]),
    ],
)
def test_f28_who_writes_alone_writes_to_our_own_stdout(
    start_command: Any, rallyrun_command: Any, script: Any, flags: str, are_ours: list[bool]
):
    """F28: lines pass through the launcher only where those of several workers could come apart."""
    job = start_command(rallyrun_command("--standalone", *flags.split(), script(WHERE)))
    assert job.wait() == 0, job.stderr
    assert [line.endswith("/stdout.txt") for line in sorted(job.stdout.splitlines())] == are_ours


def test_f28_a_reader_that_is_gone(start_command: Any, rallyrun_command: Any, script: Any):
    """F28: as with one worker, those who print find their stdout closed: `rallyrun … | head` ends."""
    worker = script("""
        while True:
            print("line")
        """)
    reader, writer = os.pipe()
    job = start_command(rallyrun_command("--standalone", "--nproc-per-node", "2", worker), stdout=writer)
    os.close(writer)
    assert os.read(reader, 100).startswith(b"line\n")
    os.close(reader)
    assert job.wait() == 1
    assert "BrokenPipeError" in job.stderr


def test_f28_all_kinds_of_output(rallyrun_command: Any, script: Any, tmp_path: Path):
    """F28: bytes that are no text, long lines and a last line without an end come as they were written, and not a byte more."""
    worker = script("""
        import os, sys
        rank = os.environ["RANK"].encode()
        sys.stdout.buffer.write(b"<" + rank + bytes(range(128, 256)) + rank * 500_000 + b">\\n<last of " + rank + b">")
        """)
    with (tmp_path / "all").open("wb") as file:
        command = rallyrun_command("--standalone", "--nproc-per-node", "2", worker)
        assert subprocess.run(command, stdout=file, timeout=60, check=False).returncode == 0
    lines = [b"<" + rank + bytes(range(128, 256)) + rank * 500_000 + b">" for rank in (b"0", b"1")]
    assert sorted((tmp_path / "all").read_bytes().split(b"\n")) == sorted([*lines, b"<last of 0>", b"<last of 1>"])


def test_the_prefix_says_who_speaks(rallyrun: Any, script: Any):
    """P33: host, role and both ranks, as the template has it; a name that it does not know stays as it is."""
    worker = script("""
        import os, sys
        print("hello")
        print("there", file=sys.stderr)
        """)
    template = "${hostname}|${role_name}|${rank}|${local_rank}|${other}: "
    args = ["--standalone", "--nproc-per-node", "2", "--role", "trainer", "--tee", "3", "--log-dir", "logs"]
    host = os.uname().nodename
    expected = {f"{host}|trainer|{rank}|{rank}|${{other}}: " for rank in range(2)}
    for flags, env in ((["--log-line-prefix-template", template], {}), ([], {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template})):
        ended = rallyrun([*args, *flags, worker], env=env)
        assert ended.returncode == 0, ended.stderr
        assert set(ended.stdout.splitlines()) == {f"{prefix}hello" for prefix in expected}
        assert {f"{prefix}there" for prefix in expected} <= set(ended.stderr.splitlines())


SAYS = """
import os, sys
print(f"out {os.environ['RANK']}\\n", end="")
print(f"err {os.environ['RANK']}\\n", end="", file=sys.stderr)
"""


def spoken(word: str, text: str) -> list[int]:
    """Which ranks said this word on the console, tee'd or not."""
    return sorted(int(rank) for rank in re.findall(rf"^(?:\[default\d+\]:)?{word} (\d+)$", text, re.MULTILINE))


@pytest.mark.parametrize("tee", ["0", "3"])
def test_only_some_ranks_are_shown(rallyrun: Any, script: Any, tmp_path: Path, tee: str):
    """P33: --local-ranks-filter keeps the console readable; tee'd files are still complete."""
    flags = ["--nproc-per-node", "4", "--local-ranks-filter", "1,3", "--tee", tee, "--log-dir", "logs"]
    ended = rallyrun(["--standalone", *flags, script(SAYS)])
    assert ended.returncode == 0, ended.stderr
    assert spoken("out", ended.stdout) == [1, 3]
    assert spoken("err", ended.stderr) == [1, 3]
    if tee == "3":
        files = files_of(tmp_path / "logs")
        assert [files[f"attempt_0/{rank}/stdout.log"].read_text() for rank in range(4)] == [f"out {rank}\n" for rank in range(4)]


LAST_WORDS = """
import os, signal, sys
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"first out {attempt}\\nlast out {attempt}".encode())
os.write(2, f"first err {attempt}\\nlast err {attempt}".encode())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_last_words_of_fifty_killed_workers(rallyrun: Any, script: Any, tmp_path: Path):
    """P34: a line without an end, written right before SIGKILL, reaches console and file, fifty times out of fifty."""
    attempts = 50
    flags = ["--standalone", "--max-restarts", attempts - 1, "--restart-backoff", 0, "--tee", "3", "--log-dir", "logs"]
    ended = rallyrun([*map(str, flags), script(LAST_WORDS)])
    assert ended.returncode == 1
    for stream, text in (("out", ended.stdout), ("err", ended.stderr)):
        lines = [line for line in text.splitlines() if line.startswith("[default0]:")]
        assert lines == [f"[default0]:{which} {stream} {n}" for n in range(attempts) for which in ("first", "last")]
    files = files_of(tmp_path / "logs")
    assert [files[f"attempt_{n}/0/stdout.log"].read_text().splitlines()[-1] for n in range(attempts)] == [
        f"last out {n}" for n in range(attempts)
    ]


@pytest.mark.parametrize("flags", [[], ["--tee", "3", "--log-dir", "logs"]], ids=" ".join)
def test_the_last_words_before_the_launcher_ends(rallyrun: Any, script: Any, flags: list[str]):
    """P34: also when the launcher itself ends right after them."""
    worker = script(LAST_WORDS)
    for _ in range(10):
        ended = rallyrun(["--standalone", *flags, worker])
        assert ended.returncode == 1
        assert re.search(r"^(\[default0\]:)?last out 0$", ended.stdout, re.MULTILINE) or ended.stdout.endswith("last out 0")
        assert re.search(r"^(\[default0\]:)?last err 0$", ended.stderr, re.MULTILINE)


def test_much_output_right_before_the_end(rallyrun: Any, script: Any):
    """P34: nothing is lost of what fills the pipe to the brim just before the worker ends."""
    worker = script("""
        import os
        for number in range(20000):
            os.write(2, f"line {number:>80}\\n".encode())
        os._exit(3)
        """)
    ended = rallyrun(["--standalone", "--nproc-per-node", "2", "--tee", "2", "--log-dir", "logs", worker])
    assert ended.returncode == 1
    lines = re.findall(r"^\[default(\d)\]:line +(\d+)$", ended.stderr, re.MULTILINE)
    failed = re.search(r"FAILED: (?:rank (\d)|both workers)", ended.stderr)
    assert failed is not None
    for failed_rank in failed[1] or "01":
        assert [int(number) for rank, number in lines if rank == failed_rank] == list(range(20000))


def test_a_child_that_keeps_the_stream_open(rallyrun: Any, script: Any):
    """P34: a worker's lines do not wait for what it left behind, nor does the end of the job."""
    worker = script("""
        import os, time
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)
        os.write(1, b"from the worker")
        """)
    ended = rallyrun(["--standalone", "--tee", "1", "--log-dir", "logs", worker], timeout=10)
    assert ended.returncode == 0, ended.stderr
    assert "[default0]:from the worker\n" in ended.stdout


def test_the_path_is_printed_and_every_attempt_is_kept(rallyrun: Any, script: Any, tmp_path: Path):
    """P35: one folder per generation, and the earlier ones are still there with all that they held."""
    worker = script("""
        import os, sys
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print(f"attempt {attempt}")
        sys.exit(0 if attempt == "2" else 1)
        """)
    ended = rallyrun(["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "--log-dir", "logs", "-r", "3", worker])
    assert ended.returncode == 0, ended.stderr
    [run] = (tmp_path / "logs").glob("*_*")
    assert ended.stderr.count(str(run)) == 1, "the path is to be printed, once"
    assert sorted(path.name for path in run.iterdir()) == ["attempt_0", "attempt_1", "attempt_2", "events.jsonl", "latest"]
    for attempt in range(3):
        kept = [(run / f"attempt_{attempt}" / rank / "stdout.log").read_text() for rank in "01"]
        assert f"attempt {attempt}\n" in kept
    assert (tmp_path / "logs/latest/latest/ranks/rank_1/stdout.log").read_text() == "attempt 2\n"


def test_a_temporary_folder_is_named_and_kept(rallyrun: Any, script: Any, private_tmpdir: Path):
    """P35: without --log-dir the path is printed too, and leads to the logs."""
    ended = rallyrun(["--standalone", "--nproc-per-node", "2", "--redirects", "1", script(SAYS)])
    assert ended.returncode == 0, ended.stderr
    path = re.search(rf"{re.escape(str(private_tmpdir))}\S+", ended.stderr)
    assert path is not None
    assert (Path(path[0]) / "attempt_0" / "1" / "stdout.log").read_text() == "out 1\n"
    assert (Path(path[0]) / "latest" / "ranks" / "rank_1" / "stdout.log").read_text() == "out 1\n"


def test_no_folder_is_left_where_nothing_was_logged(rallyrun: Any, script: Any, private_tmpdir: Path):
    """P35: a job without logs and without failures leaves nothing behind."""
    ended = rallyrun(["--standalone", "--nproc-per-node", "2", script(SAYS)])
    assert ended.returncode == 0, ended.stderr
    assert list(private_tmpdir.iterdir()) == []


def test_two_runs_share_a_log_folder(rallyrun: Any, script: Any, tmp_path: Path):
    """P35: the second run touches nothing of the first, even under the same id."""
    for _ in range(2):
        args = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "job", "--log-dir", "logs", "-r", "1"]
        assert rallyrun([*args, script(SAYS)]).returncode == 0
        newest = (tmp_path / "logs" / "latest").readlink()
    runs = sorted((tmp_path / "logs").glob("*_*"))
    assert newest == Path(max(runs, key=lambda run: run.stat().st_ctime_ns).name)
    assert len(runs) == 2
    assert all(run.name.startswith("job_") for run in runs)
    assert [(run / "attempt_0/0/stdout.log").read_text() for run in runs] == ["out 0\n"] * 2


@pytest.mark.parametrize("flag", ["--redirects", "--tee"])
def test_log_files_are_capped(rallyrun: Any, script: Any, tmp_path: Path, flag: str):
    """P35: --log-max-size bounds what a chatty worker can fill; the newest lines are kept, whole."""
    worker = script("""
        for number in range(20000):
            print(f"line {number}")
        """)
    ended = rallyrun(["--standalone", "--log-dir", "logs", flag, "1", "--log-max-size", "16K", worker])
    assert ended.returncode == 0, ended.stderr
    files = files_of(tmp_path / "logs")
    sizes = {name: path.stat().st_size for name, path in files.items()}
    assert all(size <= 16 << 10 for size in sizes.values()), sizes
    assert sum(sizes.values()) <= 32 << 10
    newest = files["attempt_0/0/stdout.log"].read_text().splitlines()
    assert newest[-1] == "line 19999"
    assert all(re.fullmatch(r"line \d+", line) for line in newest)


def test_a_rank_of_two_digits(rallyrun: Any, script: Any, tmp_path: Path):
    """P47: `-r 10:3` means rank 10."""
    ended = rallyrun(["--standalone", "--nproc-per-node", "12", "-r", "10:3", "--log-dir", "logs", script(SAYS)])
    assert ended.returncode == 0, ended.stderr
    others = [rank for rank in range(12) if rank != 10]
    assert spoken("out", ended.stdout) == others
    assert spoken("err", ended.stderr) == others
    files = files_of(tmp_path / "logs")
    assert {name: path.read_text() for name, path in files.items() if path.stat().st_size} == {
        "attempt_0/10/stdout.log": "out 10\n",
        "attempt_0/10/stderr.log": "err 10\n",
    }


def test_streams_by_rank(rallyrun: Any, script: Any, tmp_path: Path):
    """P47: redirects and tee are chosen for each rank, and tee wins where both name a stream."""
    flags = ["--nproc-per-node", "4", "-r", "0:1,1:2", "-t", "2:3,1:1", "--log-dir", "logs"]
    ended = rallyrun(["--standalone", *flags, script(SAYS)])
    assert ended.returncode == 0, ended.stderr
    assert spoken("out", ended.stdout) == [1, 2, 3]
    assert spoken("err", ended.stderr) == [0, 2, 3]
    assert set(re.findall(r"^\[default\d\]:.*$", ended.stdout + ended.stderr, re.MULTILINE)) == {
        "[default1]:out 1", "[default2]:out 2", "[default2]:err 2",
    }  # fmt: skip
    filled = {name for name, path in files_of(tmp_path / "logs").items() if path.stat().st_size}
    assert filled == {f"attempt_0/{name}.log" for name in ("0/stdout", "1/stderr", "1/stdout", "2/stdout", "2/stderr")}


def test_filtered_lines_of_all_ranks_in_one_file(rallyrun: Any, script: Any, tmp_path: Path):
    """P33: what matters is in one place, with the rank that said it, and still where it was."""
    worker = script("""
        import os, sys
        for step in range(3):
            print(f"loss {step}\\n", end="")
            print(f"noise {step}\\n", end="")
            print(f"WARNING, {step}\\n", end="", file=sys.stderr)
        print("the accuracy", end="")
        """)
    filters = ["--duplicate-stdout-filters", "loss,accuracy", "--duplicate-stderr-filters", "WARNING,,"]
    ended = rallyrun(["--standalone", "--nproc-per-node", "3", "--tee", "3", "--log-dir", "logs", *filters, worker])
    assert ended.returncode == 0, ended.stderr
    files = files_of(tmp_path / "logs")
    stdout = files["attempt_0/filtered_stdout.log"].read_text().splitlines()
    stderr = files["attempt_0/filtered_stderr.log"].read_text().splitlines()
    texts = ["loss 0", "loss 1", "loss 2", "the accuracy"]
    assert sorted(stdout) == sorted(f"[default{rank}]:{text}" for rank in range(3) for text in texts)
    assert sorted(stderr) == sorted(f"[default{rank}]:WARNING, {step}" for rank in range(3) for step in range(3))
    assert files["attempt_0/0/stdout.log"].read_text().count("noise") == 3


def test_a_plug_in_for_logs(rallyrun: Any, script: Any, tmp_path: Path):
    """P35: --logs-specs takes a class from an installed package's entry points, and the launcher uses its layout."""
    site = tmp_path / "site"
    info = site / "flat_logs-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flat-logs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nflat = flat_logs:FlatLogs\n")
    (site / "flat_logs.py").write_text("""
import os
from rallypoint import LogsDest, LogsSpecs

class FlatLogs(LogsSpecs):
    def reify(self, envs):
        os.makedirs(self.root_log_dir, exist_ok=True)
        paths = {rank: os.path.join(self.root_log_dir, f"worker-{env['RANK']}") for rank, env in envs.items()}
        return LogsDest(
            stdouts={rank: path + ".out" for rank, path in paths.items()},
            stderrs={rank: path + ".err" for rank, path in paths.items()},
            error_files={rank: path + ".json" for rank, path in paths.items()},
        )
""")
    args = ["--standalone", "--nproc-per-node", "2", "--log-dir", "flat", "--logs-specs"]
    ended = rallyrun([*args, "flat", script(SAYS)], env={"PYTHONPATH": str(site)})
    assert ended.returncode == 0, ended.stderr
    kept = {path.name: path.read_text() for path in (tmp_path / "flat").iterdir()}
    assert kept == {"worker-0.out": "out 0\n", "worker-0.err": "err 0\n", "worker-1.out": "out 1\n", "worker-1.err": "err 1\n"}
    refused = rallyrun([*args, "round", script(SAYS)], env={"PYTHONPATH": str(site)})
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "'round'" in refused.stderr
    assert "flat" in refused.stderr


def test_a_console_that_nobody_reads(start_command: Any, rallyrun_command: Any, script: Any, tmp_path: Path, wait_until: Any):
    """P34, P33: a reader that went away does not stop the job, and the files are complete."""
    worker = script("""
        for number in range(50000):
            print(f"line {number}")
        """)
    read_end, write_end = os.pipe()
    flags = ["--standalone", "--tee", "1", "--log-dir", "logs"]
    job = start_command(rallyrun_command(*flags, worker), stdout=write_end)
    os.close(write_end)
    os.close(read_end)
    assert job.wait() == 0, job.stderr
    assert files_of(tmp_path / "logs")["attempt_0/0/stdout.log"].read_text().count("\n") == 50000
    assert "Traceback" not in job.stderr
