"""The workers' store of a job of one node: real launchers, real workers, and a test that looks on from outside."""

from __future__ import annotations

import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ports import bound_at, free_ports, is_free

from rallypoint.store.interface import StoreNetworkError
from rallypoint.store.tcp_store import TCPStore

HERE = "127.0.0.1"
NOT_OURS = "192.0.2.7"
TIMEOUT_S = 10.0
LISTENS = "0A"

# What workers have in common: they tell where their store is, and wait until a file is there.
WORKER = """
import os, signal, sys, time
from rallypoint.store.interface import StoreError
from rallypoint.store.tcp_store import TCPStore

folder, rank, generation = sys.argv[1], int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def wait_for(name):
    while not os.path.exists(f"{folder}/{name}"):
        time.sleep(0.005)

def connect(**options):
    return TCPStore(host, port, timeout=10, **options)

say("store", generation, rank, os.environ["TORCHELASTIC_USE_AGENT_STORE"], host, port)
"""
EXCHANGE = """
store = connect()
store.set(f"from {rank}", f"{rank}")
say("heard", *(store.get(f"from {other}").decode() for other in range(2)))
"""
STAY = """
store = connect()
say("connected", store.add("workers", 1))
wait_for("finish")
"""
SAVE = """
store = connect()

def save(*_):
    store.add("saved", 1)
    while int(store.get("saved")) < 2:
        time.sleep(0.005)
    say("saved")
    sys.exit()

signal.signal(signal.SIGTERM, save)
say("ready")
wait_for("finish")
"""
LEAVE_A_KEY = """
store = connect()
say("keys", generation, store.num_keys())
store.set("stale", "1")
if generation == 0:
    store.barrier("both", 2)
    wait_for("fail")
    sys.exit(rank)
wait_for("finish")
"""
FAIL_NINE_TIMES = """
store = connect()
say("first", store.add("workers", 1))
store.barrier("both", 2)
sys.exit(0 if generation == 9 else 1)
"""
OPEN_IT = """
store = connect(is_master=rank == 0, world_size=2)
store.set(f"from {rank}", "")
store.wait(["from 0", "from 1"])
store.wait(["done"]) if rank == 0 else store.set("done", "")
"""
STORE_TOO_MUCH = """
store = connect()
store.set(f"from {rank}", "")
store.wait(["from 0", "from 1"])
if rank == 0:
    store.set("much", b"x" * 100_000)
    try:
        store.get("from 1")
    except StoreError as error:
        say("cut off", type(error).__name__)
    store = connect()
    store.set("done", "")
else:
    store.wait(["done"])
    say("kept", store.num_keys(), store.check(["much"]))
    store.set("more", b"x" * 50_000)
    say("has", len(store.get("more")))
"""
STAY_OR_FAIL = """
store = connect()
say("connected")
while not os.path.exists(f"{folder}/finish"):
    if os.path.exists(f"{folder}/fail"):
        sys.exit(7)
    time.sleep(0.005)
"""
NEVER_STARTED = "open(f'{folder}/started', 'w')"


class Told:
    """What a worker said about its store."""

    def __init__(self, words: str) -> None:
        generation, rank, self.is_agents, self.address, port = words.split()
        self.generation, self.rank, self.port = int(generation), int(rank), int(port)


def told(job: Any) -> list[Told]:
    return [Told(words) for words in re.findall(r"^store (.*)\n", job.stdout, re.MULTILINE)]


def wait_for_generation(job: Any, generation: int, workers: int = 1) -> Told:
    """Where the store of this generation is, once so many workers have said so, all of them the same."""

    def said() -> list[Told]:
        return [one for one in told(job) if one.generation == generation]

    job.wait_for(lambda: len(said()) == workers)
    assert len({(one.address, one.port) for one in said()}) == 1
    return said()[0]


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def program(script: Callable[..., Path], tmp_path: Path) -> Callable[[str], list[Any]]:
    """``program(text)``: the arguments for a worker that does this, after what all of them do."""

    def write(text: str) -> list[Any]:
        return [script(WORKER + text), tmp_path]

    return write


@pytest.fixture
def finish(tmp_path: Path) -> Callable[[], None]:
    """``finish()`` lets workers that stay go."""
    return (tmp_path / "finish").touch


@pytest.fixture
def connect() -> Iterator[Callable[[Told], TCPStore]]:
    """``connect(told)``: a connection of the test's own, as any other process could have."""
    stores: list[TCPStore] = []

    def connect(where: Told) -> TCPStore:
        stores.append(TCPStore(where.address, where.port, timeout=TIMEOUT_S))
        return stores[-1]

    yield connect
    for store in stores:
        store.close()


def static(port: int) -> list[str]:
    return ["--master-port", str(port)]


# --- there it is -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "address"),
    [(["--standalone"], HERE), (["--standalone", "--local-addr", "127.0.0.3"], "127.0.0.3"), (None, HERE)],
    ids=["standalone", "local-addr", "static"],
)
def test_workers_exchange_keys(rallyrun: Any, program: Any, port: int, flags: list[str] | None, address: str):
    """Nobody has to open it: it is there when they start, and they are told so."""
    ended = rallyrun([*(flags or static(port)), "--nproc-per-node", "2", *program(EXCHANGE)])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("heard 0 1\n") == 2
    said = told(ended)
    assert [(one.is_agents, one.address) for one in said] == [("True", address)] * 2
    assert {one.port == port for one in said} == {flags is None}


def test_the_first_attempt_to_connect_succeeds(rallyrun: Any, script: Any):
    """P13: the port is bound before there is a worker, so none needs to try again."""
    worker = script("""
        import _socket, os
        _socket.socket().connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        """)
    ended = rallyrun(["--standalone", "--nproc-per-node", "4", worker])
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("address", [HERE, "127.0.0.3"])
def test_the_port_is_held_and_open_at_one_address_only(
    start_rallyrun: Any, program: Any, finish: Any, connect: Any, address: str
):
    """P13, P36: nobody else can have it while the job runs, at no other address does anything listen, and then it is free."""
    job = start_rallyrun(["--standalone", "--local-addr", address, "--nproc-per-node", "2", *program(STAY)])
    where = wait_for_generation(job, 0, workers=2)
    assert bound_at(where.port) == [address]
    assert not is_free(where.port, address)
    assert connect(where).get("workers") in (b"1", b"2")
    for other in {HERE, "127.0.0.2", "127.0.0.3"} - {address}:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, where.port), timeout=TIMEOUT_S)
    finish()
    assert job.wait() == 0
    assert bound_at(where.port) == []


def test_workers_that_are_stopped_still_have_their_store(start_rallyrun: Any, program: Any):
    """It ends after them: what they do about a signal may need it."""
    job = start_rallyrun(["--standalone", "--nproc-per-node", "2", *program(SAVE)])
    job.wait_for(lambda: job.stdout.count("ready\n") == 2)
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM
    assert job.stdout.count("saved\n") == 2


# --- generations -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_static", [False, True], ids=["standalone", "static"])
def test_each_generation_has_an_empty_store(
    start_rallyrun: Any, program: Any, finish: Any, connect: Any, tmp_path: Path, port: int, is_static: bool
):
    """P16: keys of the old one are gone, and whoever has kept a connection to it is cut off. A port that was given stays."""
    flags = static(port) if is_static else ["--standalone"]
    job = start_rallyrun(
        [*flags, "--nproc-per-node", "2", "--max-restarts", "1", "--restart-backoff", "0", *program(LEAVE_A_KEY)]
    )
    before = wait_for_generation(job, 0, workers=2)
    outsider = connect(before)
    assert outsider.get("stale") == b"1"
    (tmp_path / "fail").touch()
    after = wait_for_generation(job, 1, workers=2)
    job.wait_for(lambda: job.stdout.count("keys 1 ") == 2)
    assert "keys 1 0\n" in job.stdout
    with pytest.raises(StoreNetworkError):
        outsider.get("stale")
    if is_static:
        assert after.port == before.port == port
        assert connect(after).get("stale") == b"1"
    else:
        assert after.port != before.port
        assert bound_at(before.port) == []
    assert bound_at(after.port) == [HERE]
    finish()
    assert job.wait() == 0


def test_ten_generations_at_one_port(rallyrun: Any, program: Any, port: int):
    """P13, P16: each binds it anew at once, whatever connections the one before has left."""
    ended = rallyrun(
        [*static(port), "--nproc-per-node", "2", "--max-restarts", "9", "--restart-backoff", "0", *program(FAIL_NINE_TIMES)]
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(re.findall(r"first (\d)", ended.stdout)) == ["1"] * 10 + ["2"] * 10
    assert {one.port for one in told(ended)} == {port}


# --- where it cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", [["--standalone", "--local-addr", NOT_OURS], ["--master-addr", NOT_OURS, "--master-port", "29500"]], ids=" ".join
)
def test_an_address_of_another_machine_is_refused(rallyrun: Any, program: Any, tmp_path: Path, flags: list[str]):
    """By name, before any worker is started."""
    ended = rallyrun([*flags, *program(NEVER_STARTED)])
    assert ended.returncode == 3
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("rallyrun: error")]
    assert f"{NOT_OURS} is no address of this machine" in line
    assert "--local-addr" in line
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("flag", ["--master-port", "--worker-store-port"])
def test_a_busy_port_is_refused_by_name(rallyrun: Any, program: Any, tmp_path: Path, port: int, flag: str):
    """P13: no worker is started, and who listens there is not disturbed."""
    with socket.create_server((HERE, port)) as other:
        ended = rallyrun([flag, str(port), *program(NEVER_STARTED)])
        other.settimeout(0)
        with pytest.raises(BlockingIOError):
            other.accept()
    assert ended.returncode == 3
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("rallyrun: error")]
    assert f"cannot listen at {HERE}:{port}: Address already in use" in line
    assert flag in line
    assert not (tmp_path / "started").exists()


# --- which port ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "env"),
    [
        (["--worker-store-port", "{port}"], {}),
        (["--rdzv-conf", "worker_store_port={port}"], {}),
        (["--worker-store-port", "{port}", "--rdzv-conf", "worker_store_port={port}-{port}"], {}),
        ([], {"RALLYPOINT_WORKER_STORE_PORT": "{port}"}),
        ([], {"PET_WORKER_STORE_PORT": "{port}"}),
        (["--worker-store-port", "{port}"], {"RALLYPOINT_WORKER_STORE_PORT": "29999"}),
    ],
    ids=["flag", "conf", "both", "variable", "torchrun's variable", "flag over variable"],
)
def test_a_port_can_be_chosen(rallyrun: Any, port: int, flags: list[str], env: dict[str, str]):
    """P24: by flag, setting or variable."""
    flags = [flag.format(port=port) for flag in flags]
    env = {name: value.format(port=port) for name, value in env.items()}
    ended = rallyrun(["--standalone", *flags, "--no-python", "sh", "-c", "echo $MASTER_ADDR $MASTER_PORT"], env=env)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{HERE} {port}\n"


def test_two_jobs_share_a_range_and_a_third_is_refused(start_rallyrun: Any, rallyrun: Any, program: Any, finish: Any):
    """P13: with the ports by name; what ends gives its own back at once."""
    ports = free_ports(2)
    args = ["--standalone", "--worker-store-port", f"{ports[0]}-{ports[1]}", *program(STAY)]
    jobs = [start_rallyrun(args) for _ in range(2)]
    assert sorted(wait_for_generation(job, 0).port for job in jobs) == list(ports)
    third = rallyrun(args)
    assert third.returncode == 3
    assert told(third) == []
    assert f"the workers' store cannot be opened at {HERE}, ports {ports[0]} to {ports[1]}" in third.stderr
    finish()
    assert [job.wait() for job in jobs] == [0, 0]
    assert all(map(is_free, ports))


def test_twenty_jobs_at_once(start_rallyrun: Any, program: Any, finish: Any):
    """P13: each has a port of its own, and a store in which nobody else is."""
    work = "store = connect()\nsay('alone', store.add('workers', 1))\nwait_for('finish')"
    args = ["--standalone", *program(work)]
    jobs = [start_rallyrun(args) for _ in range(20)]
    for job in jobs:
        job.wait_for_line("alone 1", 30.0)
    assert len({wait_for_generation(job, 0).port for job in jobs}) == 20
    finish()
    assert [job.wait() for job in jobs] == [0] * 20


@pytest.mark.parametrize(
    ("flags", "env", "named"),
    [
        (["--worker-store-port", "70000"], {}, "--worker-store-port"),
        (["--rdzv-conf", "worker_store_port=5-4"], {}, "--rdzv-conf"),
        ([], {"RALLYPOINT_WORKER_STORE_PORT": "some"}, "RALLYPOINT_WORKER_STORE_PORT"),
        (["--worker-store-port", "29600", "--rdzv-conf", "worker_store_port=29601"], {}, "worker_store_port is 29601 in"),
        (["--worker-store-memory", "lots"], {}, "--worker-store-memory"),
        (["--master-port", "29500"], {"RALLYPOINT_WORKER_STORE_MEMORY": "-1"}, "RALLYPOINT_WORKER_STORE_MEMORY"),
        (["--master-port", "29500", "--rdzv-conf", "worker_store=nobody"], {}, "worker_store must be agent or rank0"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(
    rallyrun: Any, program: Any, tmp_path: Path, flags: list[str], env: dict[str, str], named: str
):
    """P24: with exit code 2, before anything is started or opened."""
    ended = rallyrun([*flags, *program(NEVER_STARTED)], env=env)
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("rallyrun: error")]
    assert named in line
    assert not (tmp_path / "started").exists()


# --- who serves it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "env"),
    [
        (["--standalone", "--worker-store", "rank0"], {}),
        (["--standalone"], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
        (["--master-port", "{port}", "--rdzv-conf", "worker_store=rank0"], {}),
        (["--master-port", "{port}"], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    ],
    ids=["flag", "variable", "static, conf", "static, variable"],
)
def test_the_worker_of_rank_0_may_serve_it(rallyrun: Any, program: Any, port: int, flags: list[str], env: dict[str, str]):
    """As in older versions of torchrun: workers are told so, and the port is free for the one that opens it."""
    flags = [flag.format(port=port) for flag in flags]
    ended = rallyrun(["--nproc-per-node", "2", *flags, *program(OPEN_IT)], env=env)
    assert ended.returncode == 0, ended.stderr
    assert [one.is_agents for one in told(ended)] == ["False", "False"]
    assert {one.port == port for one in told(ended)} == {"--master-port" in flags}


def test_who_stores_too_much_is_cut_off_and_the_others_go_on(rallyrun: Any, program: Any):
    """One line says which connection, and why."""
    ended = rallyrun(["--standalone", "--nproc-per-node", "2", "--worker-store-memory", "64K", *program(STORE_TOO_MUCH)])
    assert ended.returncode == 0, ended.stderr
    assert "cut off StoreNetworkError\n" in ended.stdout
    assert "kept 3 False\n" in ended.stdout
    assert "has 50000\n" in ended.stdout
    (line,) = [line for line in ended.stderr.splitlines() if "turned away" in line]
    assert re.search(r"turned away 127\.0\.0\.1 port \d+: the store may hold 65536 bytes", line)


# --- the end ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "is_static"),
    [
        ("finish", False), ("fail", False), (signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGKILL, False),
        ("finish", True), (signal.SIGKILL, True),
    ],
)  # fmt: skip
def test_however_the_agent_ends_its_port_is_free(
    start_rallyrun: Any, program: Any, connect: Any, tmp_path: Path, port: int, how: str | signal.Signals, is_static: bool
):
    """P13: at once, and whoever was connected sees the end."""
    job = start_rallyrun([*(static(port) if is_static else ["--standalone"]), *program(STAY_OR_FAIL)])
    job.wait_for_line("connected")
    where = wait_for_generation(job, 0)
    outsider = connect(where)
    if isinstance(how, signal.Signals):
        job.send_signal(how)
    else:
        (tmp_path / how).touch()
    code = {"finish": 0, "fail": 1, signal.SIGKILL: -signal.SIGKILL}.get(how)
    assert job.wait() == (128 + how if code is None else code)
    assert bound_at(where.port) == []
    assert is_free(where.port) or not is_static  # what the kernel chose may be somebody's source port by now
    with pytest.raises(StoreNetworkError):
        outsider.num_keys()


PROGRAM = """
import os, signal, socket, sys, threading, time
from rallypoint.errors import SignalException
from rallypoint.agent.launch import LaunchConfig, elastic_launch
from rallypoint.failures.process_failure import ChildFailedError
from rallypoint.store.tcp_store import TCPStore

def inodes_listening_at(port):
    with open("/proc/net/tcp") as table:
        return {row.split()[9] for row in table if f":{port:04X} 00000000:0000 0A" in row}

def own_inodes():
    files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {os.readlink(file)[len("socket:["):-1] for file in files if os.path.islink(file)}

def work(how, agent):
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    assert not inodes_listening_at(port) & own_inodes(), "a worker has the listener too"
    store = TCPStore(host, port, timeout=10)
    assert store.add("workers", 1) == 1, "this store was used before"
    with open("port", "w") as file:
        file.write(str(port))
    if generation == 0:
        raise ValueError("once, so that there is a second generation")
    if how == "failure":
        raise ValueError("boom")
    if how == "signal":
        os.kill(agent, signal.SIGTERM)
        time.sleep(60)
    return port

def run(backend, endpoint, method, how):
    config = LaunchConfig(1, 1, 1, run_id="job", rdzv_backend=backend, rdzv_endpoint=endpoint, max_restarts=1,
                          rdzv_configs={"rank": 0} if backend == "static" else {}, start_method=method, restart_backoff=0)
    outcome = "success"
    try:
        elastic_launch(config, work)(how, os.getpid())
    except ChildFailedError:
        outcome = "failure"
    except SignalException:
        outcome = "signal"
    assert outcome == how, f"{outcome} instead of {how}"
    with open("port") as file:
        port = int(file.read())
    if backend == "static":
        socket.create_server(("127.0.0.1", port)).close()
    assert not inodes_listening_at(port), "somebody listens"
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    print(backend, method, how, left, flush=True)

if __name__ == "__main__":
    for how in sys.argv[3:]:
        for backend, endpoint in (("c10d", ""), ("static", f"127.0.0.1:{sys.argv[1]}")):
            run(backend, endpoint, sys.argv[2], how)
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_program_that_goes_on_living_has_nothing_left(start_command: Any, script: Any, port: int, method: str):
    """P13, P16, P36: socket and thread are gone after each job, however it ended; workers that are forked off have no copies."""
    hows = ("success", "failure", "signal")
    living = start_command([sys.executable, str(script(PROGRAM, "living.py")), str(port), method, *hows])
    assert living.wait(60.0) == 0, living.stderr
    expected = [f"{backend} {method} {how} []" for how in hows for backend in ("c10d", "static")]
    assert living.stdout.splitlines() == expected
