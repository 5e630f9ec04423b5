"""Was it the out-of-memory killer? Told from fake trees of kernel files, and once from a real kernel."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import AT_ONCE_S

from rallypoint.failures.memory_kills import MemoryKills, read_kernel_log

GIB = 1 << 30
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


class Host:
    """A fake /proc and /sys, and a fake kernel log."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[tuple[float, str]] = []
        self.write("proc/vmstat", "nr_free_pages 100\n" * 400 + "oom_kill 7\nnr_other 3\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def process_in(self, cgroup: str, mounts: str) -> None:
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/self/mountinfo", mounts)

    def v1(self, folder: str, kills: int, limit: int = 0x7FFFFFFFFFFFF000) -> None:
        self.write(f"{folder}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")

    def v2(self, folder: str, kills: int, limit: str = "max") -> None:
        self.write(f"{folder}/memory.events", f"low 0\nhigh 0\nmax 9\noom 1\noom_kill {kills}\noom_group_kill 0\n")
        self.write(f"{folder}/memory.max", f"{limit}\n")

    def host_kills(self, kills: int) -> None:
        self.write("proc/vmstat", "nr_free_pages 100\n" * 400 + f"oom_kill {kills}\nnr_other 3\n")

    def says(self, line: str, at_s: float | None = None) -> None:
        self.log.append((time.monotonic() if at_s is None else at_s, line))

    def watch(self) -> MemoryKills:
        kills = MemoryKills(str(self.root), lambda: self.log)
        kills.snapshot()
        return kills


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "root")


def test_nothing_happened(host: Host) -> None:
    """P21: a SIGKILL that somebody else sent is not blamed on memory."""
    host.process_in("0::/job\n", V2_MOUNT)
    host.v2("sys/fs/cgroup/job", kills=3, limit=str(2 * GIB))
    kills = host.watch()
    host.says("Out of memory: Killed process 123 (python)")  # of an earlier life of this pid, as no counter rose
    assert kills.explain(123) == ""


def test_a_version_2_cgroup_that_passed_its_limit(host: Host) -> None:
    """P21: the limit is named, with its size."""
    host.process_in("0::/user.slice/job\n", V2_MOUNT)
    host.v2("sys/fs/cgroup/user.slice/job", kills=3, limit=str(2 * GIB))
    host.v2("sys/fs/cgroup/user.slice", kills=3)
    kills = host.watch()
    host.v2("sys/fs/cgroup/user.slice/job", kills=4, limit=str(2 * GIB))
    host.v2("sys/fs/cgroup/user.slice", kills=4)
    host.host_kills(8)
    assert kills.explain(123) == "the memory cgroup /user.slice/job killed 1 process for passing its limit of 2.0 GiB"


def test_the_limit_may_be_that_of_a_cgroup_further_up(host: Host) -> None:
    host.process_in("0::/pod/container\n", V2_MOUNT)
    host.v2("sys/fs/cgroup/pod/container", kills=0)
    host.v2("sys/fs/cgroup/pod", kills=0, limit=str(GIB // 2))
    kills = host.watch()
    host.v2("sys/fs/cgroup/pod/container", kills=2)
    assert kills.explain(123) == "the memory cgroup /pod killed 2 processes for passing its limit of 512 MiB"


def test_a_version_1_cgroup(host: Host) -> None:
    host.process_in("9:name=systemd:/\n4:memory:/slurm/job_7\n0::/\n", V1_MOUNTS)
    host.v1("sys/fs/cgroup/memory/slurm/job_7", kills=0, limit=4 * GIB)
    host.v1("sys/fs/cgroup/memory/slurm", kills=0)
    kills = host.watch()
    host.v1("sys/fs/cgroup/memory/slurm/job_7", kills=1, limit=4 * GIB)
    assert kills.explain(123) == "the memory cgroup /slurm/job_7 killed 1 process for passing its limit of 4.0 GiB"


def test_a_container_sees_only_its_part_of_the_tree(host: Host) -> None:
    host.process_in(
        "4:memory,hugetlb:/docker/abc/inner\n",
        V1_MOUNTS.replace("0:32 / ", "0:32 /docker/abc ").replace("rw,memory", "rw,memory,hugetlb"),
    )
    host.v1("sys/fs/cgroup/memory/inner", kills=0)
    host.v1("sys/fs/cgroup/memory", kills=0, limit=GIB)
    kills = host.watch()
    host.v1("sys/fs/cgroup/memory/inner", kills=1)
    assert kills.explain(123) == "the memory cgroup /docker/abc killed 1 process for passing its limit of 1.0 GiB"


def test_a_path_outside_the_mounted_part_means_the_mounted_part_itself(host: Host) -> None:
    host.process_in("0::/../../elsewhere\n", V2_MOUNT.replace("0:26 / ", "0:26 /pod "))
    host.v2("sys/fs/cgroup", kills=0, limit=str(GIB))
    kills = host.watch()
    host.v2("sys/fs/cgroup", kills=1, limit=str(GIB))
    assert "the memory cgroup /pod killed 1 process" in kills.explain(123)


def test_a_mount_with_a_space_in_its_name(host: Host) -> None:
    host.process_in("0::/\n", V2_MOUNT.replace("/sys/fs/cgroup", r"/mnt/my\040groups"))
    host.v2("mnt/my groups", kills=0, limit=str(GIB))
    kills = host.watch()
    host.v2("mnt/my groups", kills=1, limit=str(GIB))
    assert "the memory cgroup / killed 1 process" in kills.explain(123)


def test_members_of_a_cgroup_without_a_limit_die_when_the_host_is_full(host: Host) -> None:
    host.process_in("0::/job\n", V2_MOUNT)
    host.v2("sys/fs/cgroup/job", kills=0)
    kills = host.watch()
    host.v2("sys/fs/cgroup/job", kills=1)
    host.host_kills(8)
    assert kills.explain(123) == "the kernel killed 1 process of cgroup /job because the host ran out of memory"


def test_only_the_hosts_counter_rose(host: Host) -> None:
    kills = host.watch()
    host.host_kills(9)
    assert kills.explain(123).startswith("probably out of memory: meanwhile the kernel killed 2 processes on this host")


def test_another_tenants_death_explains_nothing(host: Host) -> None:
    """P21: on a shared host the kernel may kill others for memory while somebody kills our worker by hand."""
    host.process_in("0::/job\n", V2_MOUNT)
    host.v2("sys/fs/cgroup/job", kills=0, limit=str(GIB))
    kills = host.watch()
    host.host_kills(9)
    host.says("Out of memory: Killed process 99 (other)")
    assert kills.explain(123) == ""


def test_the_kernel_log_names_the_process(host: Host) -> None:
    host.process_in("0::/job\n", V2_MOUNT)
    host.v2("sys/fs/cgroup/job", kills=0, limit=str(GIB))
    kills = host.watch()
    host.host_kills(8)
    host.says(
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/job,task_memcg=/job/w,task=python3,pid=123,uid=0"
    )
    assert (
        kills.explain(123)
        == "the out-of-memory killer ended pid 123 (python3): the memory cgroup /job passed its limit of 1.0 GiB"
    )
    host.says("Memory cgroup out of memory: Killed process 123 (python3) total-vm:9999kB, anon-rss:786432kB, file-rss:1kB, UID:0")
    assert kills.explain(123) == (
        "the out-of-memory killer ended pid 123 (python3, 768 MiB resident): the memory cgroup /job passed its limit of 1.0 GiB"
    )
    assert kills.explain(12) == kills.explain(1234) == ""


def test_the_kernel_log_on_a_full_host(host: Host) -> None:
    kills = host.watch()
    host.host_kills(8)
    host.says(
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
        "task_memcg=/u,task=a (b),pid=5,uid=0"
    )
    assert kills.explain(5) == "the out-of-memory killer ended pid 5 (a (b)): the host ran out of memory"
    host.says("Memory cgroup out of memory: Killed process 6 (x)")
    assert kills.explain(6) == "the out-of-memory killer ended pid 6 (x): its memory cgroup passed its limit"
    host.says("Killed process 7 (x) total-vm:1kB")
    assert kills.explain(7) == "the out-of-memory killer ended pid 7 (x): memory ran out"


def test_a_kill_from_before_the_workers_started_is_an_earlier_life_of_the_pid(host: Host) -> None:
    kills = host.watch()
    host.host_kills(8)
    long_ago_s = time.monotonic() * 0.9 - 60
    host.says("Out of memory: Killed process 123 (python)", at_s=long_ago_s)
    assert kills.explain(123).startswith("probably")


def test_a_second_snapshot_starts_anew(host: Host) -> None:
    kills = host.watch()
    host.host_kills(8)
    kills.snapshot()
    assert kills.explain(123) == ""


@pytest.mark.parametrize(
    "damage",
    [
        {"proc/vmstat": ""},
        {"proc/vmstat": "oom_kill x\n"},
        {"proc/self/cgroup": "nonsense\n::::\n", "proc/self/mountinfo": "nonsense\n - \n - cgroup2\n1 2 3 - cgroup2 c rw\n"},
        {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT},
    ],
)
def test_missing_and_broken_files_mean_only_that_less_is_known(host: Host, damage: dict[str, str]) -> None:
    for path, text in damage.items():
        host.write(path, text)
    assert host.watch().explain(123) == ""


def test_no_files_and_no_snapshot(tmp_path: Path) -> None:
    assert MemoryKills(str(tmp_path)).explain(123) == ""
    kills = MemoryKills(str(tmp_path / "none"))
    kills.snapshot()
    assert kills.explain(123) == ""


def test_the_real_log_is_read_without_waiting() -> None:
    started_s = time.monotonic()
    log = read_kernel_log()
    assert time.monotonic() - started_s < AT_ONCE_S
    assert all(when_s >= 0 and isinstance(line, str) for when_s, line in log)


def test_a_worker_killed_by_somebody_else_on_this_host() -> None:
    """P21: with the real files of this host."""
    kills = MemoryKills()
    kills.snapshot()
    worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    worker.kill()
    worker.wait()
    assert kills.explain(worker.pid) == ""


def test_a_snapshot_is_cheap_enough_for_the_way_to_the_first_worker() -> None:
    kills = MemoryKills()
    times_s = []
    for _ in range(20):
        started_s = time.perf_counter()
        kills.snapshot()
        times_s.append(time.perf_counter() - started_s)
    assert min(times_s) < 0.002


# --- a real kernel ---------------------------------------------------------------------------------------------------------


def memory_mount() -> tuple[Path, int] | None:
    """Where memory cgroups can be made, and of which version they are."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        mount = Path(fields.split(" ")[4])
        if rest.startswith("cgroup ") and "memory" in rest.split(" ")[-1].split(","):
            return mount, 1
        if rest.startswith("cgroup2 ") and "memory" in (mount / "cgroup.subtree_control").read_text().split():
            return mount, 2
    return None


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup with room for 64 MiB."""
    found = memory_mount()
    if found is None:
        pytest.skip("no memory cgroup is mounted here")
    mount, version = found
    folder = mount / f"rallypoint-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as why:
        pytest.skip(f"no memory cgroup can be made here: {why}")
    try:
        (folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(str(64 << 20))
        with contextlib.suppress(OSError):  # only where swap is counted
            (folder / ("memory.memsw.limit_in_bytes" if version == 1 else "memory.swap.max")).write_text(
                str(64 << 20 if version == 1 else 0)
            )
        yield folder
    finally:
        remove_when_empty(folder)


def remove_when_empty(folder: Path) -> None:
    deadline_s = time.monotonic() + 10
    while True:
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


AGENT = """
import os, subprocess, sys
from rallypoint.failures.memory_kills import MemoryKills

with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
kills = MemoryKills(kernel_log=(lambda: []) if sys.argv[2] == "no log" else None)
kills.snapshot()
hog = '''
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")
blocks = []
while True:
    blocks.append(bytearray(b"x") * (4 << 20))
'''
worker = subprocess.Popen([sys.executable, "-c", hog])
print(worker.wait())
print(kills.explain(worker.pid).replace(str(worker.pid), "PID"))
"""


@pytest.mark.root
@pytest.mark.parametrize("log", ["with log", "no log"])
def test_a_real_worker_that_the_kernel_kills_for_memory(small_cgroup: Path, log: str) -> None:
    """P21: a real out-of-memory kill is told apart from any other SIGKILL."""
    command = [sys.executable, "-c", textwrap.dedent(AGENT), str(small_cgroup), log]
    agent = subprocess.run(command, capture_output=True, text=True, timeout=60)
    exitcode, explanation = agent.stdout.splitlines()
    assert int(exitcode) == -signal.SIGKILL
    by_counter = f"the memory cgroup /{small_cgroup.name} killed 1 process for passing its limit of 64 MiB"
    if log == "no log" or not read_kernel_log():
        assert explanation == by_counter
    else:
        assert explanation.startswith("the out-of-memory killer ended pid PID (python")
        assert explanation.endswith(f"the memory cgroup /{small_cgroup.name} passed its limit of 64 MiB")
