"""What it takes to start: time, memory, the forms of a program, and what a worker finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port

# What costs more to import than a cold start has to spare.
HEAVY = {
    "argparse", "json", "logging", "subprocess", "asyncio", "tempfile", "shutil", "random", "uuid", "traceback", "datetime",
    "multiprocessing", "pickle", "importlib.metadata", "torch", "numpy",
}  # fmt: skip
MOST_MB = 30


# The real command, which notes what is loaded when the first worker is asked for.
NOTES_MODULES = """
import sys
from rallypoint import __main__
from rallypoint.processes.warden_client import WardenClient

spawn = WardenClient.spawn

def note_and_spawn(self, launches, licence_fd=None):
    with open("modules", "w") as file:
        file.write(" ".join(sys.modules))
    spawn(self, launches, licence_fd)

WardenClient.spawn = note_and_spawn
sys.exit(__main__.rallyrun())
"""


@pytest.mark.parametrize("flags", [[], ["--tee", "3", "--log-dir", "logs"], ["--redirects", "3"]], ids=" ".join)
def test_nothing_heavy_is_imported_before_the_first_worker(tmp_path: Path, flags: list[str]):
    """P38: what is imported on the way to the first worker is what a cold start costs."""
    flags = ["--standalone", "--nproc-per-node", "2", *flags, "--no-python", "true"]
    command = [sys.executable, "-c", NOTES_MODULES, *flags]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    bare = subprocess.run([sys.executable, "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True, timeout=30)
    loaded = set((tmp_path / "modules").read_text().split()) - set(bare.stdout.split())
    assert "rallypoint.agent.local_agent" in loaded
    assert not loaded & HEAVY
    assert "rallypoint.inspection.desk" not in loaded, "it can be asked once it runs; only a start that takes long is seen before"


def test_what_the_launcher_takes_in_memory(start_rallyrun: Any, script: Any, numbers: Any, processes: Any, tmp_path: Path):
    """P38: launcher and warden together stay under 30 MB, also after a restart and with logs that pass through them."""
    worker = script("""
        import os, sys, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit("once")
        for number in range(2000):
            print(f"line {number} {'x' * 80}")
        os.write(1, f"\\nrunning {os.getpid()}\\n".encode())
        time.sleep(60)
        """)
    flags = ["--nproc-per-node", "4", "--max-restarts", "1", "--tee", "3", "--log-dir", "logs"]
    job = start_rallyrun(["--standalone", *flags, worker])
    job.wait_for(lambda: job.stdout.count("]:running ") == 4)
    used_kb = {pid: processes.rss_kb(pid) for pid in (job.pid, processes.warden(job.pid))}
    assert sum(used_kb.values()) < MOST_MB * 1024, used_kb


# Whatever the agent does every few seconds it does all the time here, so that a second shows it.
HURRIED = """
import sys
from rallypoint import __main__
from rallypoint.agent import worker_monitor
worker_monitor.PACE_PAUSE_S = 0.05
sys.exit(__main__.rallyrun())
"""


@pytest.mark.parametrize("steps", [0, 1], ids=["silent workers", "workers that tell of a step"])
def test_idle_is_idle(start_rallyrun: Any, script: Any, numbers: Any, processes: Any, wait_until: Any, steps: int):
    """P38: while the workers run and say nothing, launcher and warden do nothing; who tells of steps is compared."""
    worker = script(f"""
        import os, time
        from rallypoint import worker
        for step in range({steps}):
            worker.progress(step)
        os.write(1, f"worker {{os.getpid()}}\\n".encode())
        time.sleep(60)
        """)
    job = start_rallyrun(["--standalone", "--nproc-per-node", "4", worker], launcher=(sys.executable, "-c", HURRIED))
    job.wait_for(lambda: len(numbers("worker", job.stdout)) == 4)
    watched = (job.pid, processes.warden(job.pid))

    def switches() -> list[str]:
        """How often each thread has given up the processor; an idle one does not even wake."""
        tasks = [path for pid in watched for path in sorted(Path(f"/proc/{pid}/task").iterdir())]
        return [line for task in tasks for line in (task / "status").read_text().splitlines() if "ctxt_switches" in line]

    def is_still() -> bool:
        before = switches()
        until = time.monotonic() + 1.0
        wait_until(lambda: time.monotonic() >= until)
        return before == switches()

    if not steps:
        wait_until(is_still)
        return
    for _ in range(3):  # not only while it starts; a busy machine may let a second pass without it
        wait_until(lambda: not is_still())


# --- OMP_NUM_THREADS -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "env", "expected", "told"),
    [
        (["--nproc-per-node", "1"], {}, "unset", 0),
        (["--nproc-per-node", "2"], {}, "1", 1),
        (["--nproc-per-node", "2"], {"OMP_NUM_THREADS": "7"}, "7", 0),
        (["--nproc-per-node", "2", "--omp-num-threads", "3"], {"OMP_NUM_THREADS": "7"}, "3", 0),
        (["--nproc-per-node", "1", "--omp-num-threads", "auto"], {}, str(len(os.sched_getaffinity(0))), 1),
        (["--nproc-per-node", "2", "--omp-num-threads", "auto"], {}, str(max(1, len(os.sched_getaffinity(0)) // 2)), 1),
        (["--nproc-per-node", "2"], {"PET_OMP_NUM_THREADS": "5"}, "5", 0),
    ],
)
def test_omp_num_threads(rallyrun: Any, flags: list[str], env: dict[str, str], expected: str, told: int):
    """P39: torchrun's default, `auto` divides the CPUs that this process may use, and a choice of ours is told once."""
    program = ["--no-python", "sh", "-c", 'echo "${OMP_NUM_THREADS-unset}"; exit "$TORCHELASTIC_RESTART_COUNT"']
    restarting = ["--no-python", "sh", "-c", 'echo "${OMP_NUM_THREADS-unset}"; test "$TORCHELASTIC_RESTART_COUNT" = 1']
    for args, attempts in ((program, 1), (["--max-restarts", "1", *restarting], 2)):
        ended = rallyrun(["--standalone", *flags, *args], env=env)
        assert ended.returncode == 0, ended.stderr
        assert set(ended.stdout.split()) == {expected}
        assert ended.stderr.count("OMP_NUM_THREADS") == told, f"in {attempts} attempt(s)"


def test_omp_num_threads_of_a_bound_process(rallyrun: Any, start_command: Any, rallyrun_command: Any):
    """P39: only the CPUs that this process may use count."""
    cpu = min(os.sched_getaffinity(0))
    flags = ["--standalone", "--nproc-per-node", "1", "--omp-num-threads", "auto", "--no-python", "printenv", "OMP_NUM_THREADS"]
    job = start_command(["taskset", "--cpu-list", str(cpu), *rallyrun_command(*flags)])
    assert job.wait() == 0, job.stderr
    assert job.stdout == "1\n"


# --- the command line ------------------------------------------------------------------------------------------------------


def test_all_after_the_script_is_the_scripts(rallyrun: Any, script: Any):
    """P42: even what looks like a flag of ours, an abbreviation of one, or a request for help."""
    worker = script("""
        import json, sys
        print(json.dumps(sys.argv[1:]))
        """)
    own = ["--nproc-per-node", "7", "--n", "3", "-m", "--standalone", "--help", "--version", "--", "-t3", "--no-such-flag=1", ""]
    ended = rallyrun(["--standalone", "--nproc-per-node", "1", worker, *own])
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == own


@pytest.mark.parametrize(
    ("flag", "meant"),
    [("--nproc", "--nproc-per-node"), ("--max", "--max-restarts"), ("--nnode", "--nnodes"), ("--master-p", "--master-port")],
)
def test_abbreviations_are_refused(rallyrun: Any, script: Any, tmp_path: Path, flag: str, meant: str):
    """P42: before the script no flag is guessed; the line says which one may have been meant."""
    ended = rallyrun([flag, "1", script("open('started', 'w')")])
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert meant in ended.stderr
    assert not (tmp_path / "started").exists()


def test_underscores_and_variables(rallyrun: Any):
    """P42: flags in torchrun's older spelling and in the environment; the command line wins."""
    program = ["--no-python", "sh", "-c", 'echo "$WORLD_SIZE $ROLE_NAME"']
    env = {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "reader"}
    assert rallyrun(["--standalone", *program], env=env).stdout == "2 reader\n2 reader\n"
    assert rallyrun(["--standalone", "--nproc_per_node=1", *program], env=env).stdout == "1 reader\n"


SHOWS = """
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "name": __name__, "rank": os.environ["RANK"], "file": os.path.basename(__file__)}))
"""


def test_a_script_a_module_and_a_path(rallyrun: Any, script: Any, tmp_path: Path):
    """P42: every way to start Python code runs it as the main program, with its own arguments."""
    script(SHOWS, "job.py")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(SHOWS)
    (tmp_path / "package" / "__init__.py").write_text("")
    for form, file in (
        (["job.py"], "job.py"),
        ([tmp_path / "job.py"], "job.py"),
        (["-m", "job"], "job.py"),
        (["--module", "package"], "__main__.py"),
        (["package"], "__main__.py"),
        (["--run-path", "job.py"], "job.py"),
    ):
        ended = rallyrun(["--standalone", *form, "--lr", "0.1", "rank is ${local_rank}"])
        assert ended.returncode == 0, (form, ended.stderr)
        assert json.loads(ended.stdout) == {"argv": ["--lr", "0.1", "rank is 0"], "name": "__main__", "rank": "0", "file": file}


def test_programs_that_are_not_python(rallyrun: Any, script: Any, tmp_path: Path):
    """P42: a binary found on the PATH, and an executable shell script."""
    shell = script('#!/bin/sh\necho "rank $RANK of $WORLD_SIZE: $*"\n', "job.sh")
    shell.chmod(0o755)
    ended = rallyrun(["--standalone", "--nproc-per-node", "2", "--no-python", shell, "--x", "${local_rank}"])
    assert sorted(ended.stdout.splitlines()) == ["rank 0 of 2: --x 0", "rank 1 of 2: --x 1"]
    ended = rallyrun(["--standalone", "--no-python", "./job.sh", "a b"])
    assert ended.stdout == "rank 0 of 1: a b\n"
    ended = rallyrun(["--standalone", "--no-python", "printenv", "RANK", "LOCAL_RANK"])
    assert ended.stdout == "0\n0\n"


def test_another_interpreter(rallyrun: Any, script: Any, tmp_path: Path):
    """P42: PYTHON_EXEC names what runs the scripts, -m too."""
    chosen = script(f'#!/bin/sh\nCHOSEN=yes exec "{sys.executable}" "$@"\n', "mypython")
    chosen.chmod(0o755)
    script("import os; print(os.environ.get('CHOSEN'))", "job.py")
    for form in (["job.py"], ["-m", "job"]):
        ended = rallyrun(["--standalone", *form], env={"PYTHON_EXEC": str(chosen)})
        assert (ended.returncode, ended.stdout) == (0, "yes\n"), ended.stderr


def test_output_of_a_script_is_not_buffered(start_rallyrun: Any, script: Any):
    """P42: a line is there when it is printed, and not when the worker ends."""
    job = start_rallyrun(["--standalone", script("import time; print('a line'); time.sleep(60)")])
    job.wait_for_line("a line")


# --- what a worker finds ---------------------------------------------------------------------------------------------------


def test_the_environment_of_workers(rallyrun: Any, script: Any, tmp_path: Path):
    """P42: the names that programs written for torchrun read."""
    worker = script("""
        import json, os, sys
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        with open(f"env.{attempt}.{os.environ['RANK']}", "w") as file:
            json.dump(dict(os.environ), file)
        sys.exit(0 if attempt == "1" else 1)
        """)
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--role", "trainer", "--signals-to-handle", "SIGTERM,SIGINT"]
    ended = rallyrun(["--standalone", *flags, worker], env={"MINE": "kept", "RANK": "99"})
    assert ended.returncode == 0, ended.stderr
    run_ids, ports = set(), set()
    for rank in range(2):
        env = json.loads((tmp_path / f"env.1.{rank}").read_text())
        expected = {
            "RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2,
            "ROLE_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 1, "ROLE_NAME": "trainer", "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": 1, "TORCHELASTIC_MAX_RESTARTS": 1, "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT", "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1, "OMP_NUM_THREADS": 1,
            "MINE": "kept",
        }  # fmt: skip
        assert {name: env.get(name) for name in expected} == {name: str(value) for name, value in expected.items()}
        assert env["TORCHELASTIC_ERROR_FILE"].endswith(f"/attempt_1/{rank}/error.json")
        run_ids.add(env["TORCHELASTIC_RUN_ID"])
        ports.add(env["MASTER_PORT"])
    assert len(run_ids) == len(ports) == 1
    assert 0 < int(ports.pop()) < 65536


def test_virtual_local_ranks(rallyrun: Any):
    """P42: each worker believes that it is the first, and sees one device."""
    program = ["--no-python", "sh", "-c", 'echo "$RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES"']
    flags = ["--standalone", "--nproc-per-node", "2", "--virtual-local-rank"]
    assert sorted(rallyrun([*flags, *program]).stdout.splitlines()) == ["0 0 0", "1 0 1"]
    ended = rallyrun([*flags, *program], env={"CUDA_VISIBLE_DEVICES": "5,3"})
    assert sorted(ended.stdout.splitlines()) == ["0 0 5", "1 0 3"]


# Rank 0 opens the workers' store where it was told, the others come there; in each attempt anew.
MEETS = """
import os, socket, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(address) as server:
        for _ in range(world - 1):
            server.accept()[0].close()
else:
    give_up_at = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(address).close()
            break
        except ConnectionRefusedError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.005)
os.write(1, f"met {rank}\\n".encode())
if os.environ["TORCHELASTIC_RESTART_COUNT"] != os.environ["TORCHELASTIC_MAX_RESTARTS"]:
    sys.exit(1) if rank == 0 else time.sleep(60)
"""


def test_the_master_port_is_free_for_rank_0(rallyrun: Any, script: Any, numbers: Any):
    """P42: if it is asked for, the worker of rank 0 can listen at MASTER_ADDR and MASTER_PORT, in every attempt."""
    flags = ["--standalone", "--worker-store", "rank0", "--nproc-per-node", "3", "--max-restarts", "2"]
    ended = rallyrun([*flags, script(MEETS)])
    assert ended.returncode == 0, ended.stderr
    assert numbers("met", ended.stdout).count(0) == 3


def test_a_given_master_port(rallyrun: Any, script: Any, numbers: Any):
    """P42: static rendezvous of one node: the address and port of the command line are the workers'."""
    flags = ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--worker-store", "rank0", "--nproc-per-node", "2"]
    ended = rallyrun([*flags, script(MEETS)])
    assert ended.returncode == 0, ended.stderr
    assert sorted(numbers("met", ended.stdout)) == [0, 1]


def test_twenty_jobs_at_once(start_command: Any, rallyrun_command: Any, script: Any, numbers: Any):
    """P42, P13: they share a machine and nothing else."""
    worker = script(MEETS)
    flags = ["--standalone", "--worker-store", "rank0", "--nproc-per-node", "2"]
    jobs = [start_command(rallyrun_command(*flags, worker)) for _ in range(20)]
    ended = [(job.wait(60), sorted(numbers("met", job.stdout))) for job in jobs]
    assert ended == [(0, [0, 1])] * 20, "\n".join(job.stderr for job in jobs)


@pytest.mark.torch
def test_a_torch_job(rallyrun: Any, script: Any, numbers: Any):
    """P42: init_process_group and an all-reduce, unchanged from torchrun, before and after a restart."""
    worker = script("""
        import os, sys
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(total)
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        os.write(1, f"sum {10 * attempt + total.item()}\\n".encode())
        if attempt == 0 and dist.get_rank() == 1:
            os._exit(1)
        dist.barrier()
        dist.destroy_process_group()
        """)
    ended = rallyrun(["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", worker], timeout=90)
    assert ended.returncode == 0, ended.stderr
    sums = numbers("sum", ended.stdout)
    assert sums.count(13) == 2
    assert 3 in sums
