"""Every command against a job in every state: an answer or one clear line, a code that is documented, and no endless wait.

The commands of one state run beside each other, which is also what several people who look at one job do.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S, WaitUntil
from tests.e2e.test_top import terminal
from tests.web.made_jobs import Viewer

from rallypoint import inspect
from rallypoint.inspection.view import NodeView

RALLYPOINT = (sys.executable, "-m", "rallypoint")
NO_JOB = "no job of this user runs on this machine"
ODD = "odd/é*'\" $(touch x)"
ANSWER, FAILED, USAGE = 0, 1, 2
CONF = "last_call_timeout=0.2,keep_alive_interval=5"  # a killed agent is not found to be silent first, however busy the machine
Expected = tuple[int, str]


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*RALLYPOINT, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def check(job: str, expected: Mapping[str, Expected]) -> None:
    """That each command, with the job for ``@``, says that and nothing more than a line if it cannot do it."""
    running = {line: start(*(job if word == "@" else word for word in line.split())) for line in expected}
    for line, (code, words) in expected.items():
        out, err = running[line].communicate(timeout=PATIENCE_S)
        said = f"rallypoint {line}: {running[line].returncode}\n{out}{err}"
        assert "Traceback" not in out + err, said
        assert running[line].returncode == code, said
        assert re.search(words, out + err), said
        if code:
            assert err.startswith(f"rallypoint {line.split()[0]}: error: "), said
            assert (err.count("\n"), out) == (1, ""), said
        if "--json" in line and not code:
            assert json.loads(out)["format"] == 1


@contextmanager
def followed(*commands: tuple[str, ...]) -> Iterator[None]:
    """While these go on; they end by themselves, well, when the job has ended."""
    with ExitStack() as stack:
        running = [stack.enter_context(start(*words)) for words in commands]
        for process in running:
            stack.callback(process.kill)
        yield
        for process in running:
            out, err = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, (process.args, process.returncode, out, err)
            assert "Traceback" not in err


def look(job: str, page: tuple[str, str], phase: str, *shown: str) -> None:
    """At the screen and at the page."""
    with terminal(job) as screen:
        screen.until_shown(f"{phase} for ", *shown)
        screen.press("q")
        assert screen.ended() == 0
    viewer = Viewer(int(page[0]), page[1])
    name, view = viewer.next()
    viewer.close()
    assert (name, view["phase"]) == ("view", phase)


ASKING = ("status @", "status @ --json", "stacks @", "stop @", "restart @", "drain 0 @", "status", "stop", "logs @", "logs -f @")
GONE = {**dict.fromkeys(ASKING, (USAGE, NO_JOB)), "ps": (ANSWER, NO_JOB), "ps --json": (ANSWER, r'"jobs": \[\]')}


def own_node() -> NodeView | None:
    """As the one agent of this machine describes itself."""
    return next((node for job in inspect.jobs() for node in job.nodes), None)


def is_waiting(words: str) -> bool:
    """Whether no worker runs, and those who wait are told that."""
    found = inspect.jobs() and inspect.status()
    return bool(found) and found.note.startswith(words) and bool(found.nodes) and not any(one.workers for one in found.nodes)


def pids_while_stopping(size: int) -> set[int]:
    """The workers of so many nodes, all of which stop; nothing as long as they do not."""
    nodes = inspect.status().nodes
    does_stop = len(nodes) == size and all(node.phase == "stopping" for node in nodes)
    return {worker.pid for node in nodes for worker in node.workers} if does_stop else set()


@pytest.mark.timeout(600)
def test_a_job_that_starts_regroups_ends_and_is_killed(job: Any, tmp_path: Path, wait_until: WaitUntil) -> None:
    logs, flags = str(tmp_path / "logs"), ["--redirects", "3", "--shutdown-timeout", "600", "--max-restarts", "3"]
    flags += ["--log-dir", logs]
    size = {"nnodes": "2", "workers": 1, "conf": CONF}
    host = job.start_host("--web", *flags, **size)
    found = re.search(r":(\d+)/\?token=(\w+)", host.wait_for_line("the job's page"))
    assert found is not None
    page = found[1], found[2]
    endpoint = f"localhost:{job.port}"
    awaited = "1 of 2 nodes; here: "
    host.agent.wait_for(lambda: is_waiting(awaited))
    check("a-job", {
        "ps": (ANSWER, r"a-job +waiting +1 "),
        "ps --json": (ANSWER, '"waiting"'),
        "status @": (ANSWER, awaited),
        f"status @ --endpoint {endpoint}": (ANSWER, awaited),
        "status @ --json": (ANSWER, awaited),
        "stacks @": (FAILED, "no worker of a-job runs: it is waiting"),
        "logs @": (FAILED, "no worker was started yet"),
        "restart @": (FAILED, "its nodes are still meeting"),
        "drain 0 @": (FAILED, "there are: .* \\(no rank yet, pid "),
    })  # fmt: skip
    look("a-j", page, "waiting", awaited)

    with followed(("logs", "-f", "a-job")):
        second = job.start(*flags, **size)
        host.agent.wait_for(lambda: is_running(2) and run("logs", "a-job").count("START {") == 2)
        second.kill()
        host.agent.wait_for(lambda: is_waiting(awaited))
        lost = "was lost: its agent was killed"
        with followed(("explain", "--follow", logs)):
            check("a-job", {
                "ps": (ANSWER, r"a-job +waiting +1 of 2 "),
                "status @": (ANSWER, f"waiting for .*: node . .* {lost}"),
                "status @ --json": (ANSWER, lost),
                f"status @ --endpoint {endpoint}": (ANSWER, awaited),
                "stacks @": (FAILED, f"no worker of a-job runs: it is waiting, node . .* {lost}"),
                "logs @": (ANSWER, "START"),
                "restart @": (FAILED, f"generation . is over already: node . .* {lost}"),
                "drain 7 @": (FAILED, "no node of a-job fits '7'"),
                f"explain {logs}": (ANSWER, lost),
            })  # fmt: skip
            look("a-job", page, "waiting", awaited)

            third = job.start(*flags, **size)
            host.agent.wait_for(lambda: is_running(2))
            for rank in (0, 1):
                job.order(rank, "import signal\nsignal.signal(15, signal.SIG_IGN)\nos.write(1, b'deaf\\n')")
                host.agent.wait_for(lambda rank=rank: not (job.folder / f"order.{rank}").exists())
            host.agent.wait_for(lambda: "deaf" in run("logs", "a-job", "--rank", "0") and "deaf" in run("logs", "--rank", "1"))
            assert "all nodes were told to stop" in run("stop", "--no-wait")
            pids = host.agent.wait_for(lambda: pids_while_stopping(2))
            stops = "stopping for .*: .* on .* stopped the job"
            check("a-job", {
                "ps": (ANSWER, r"a-job +stopping +2 "),
                "status @": (ANSWER, stops),
                "status @ --json": (ANSWER, '"stopping"'),
                "stacks @": (ANSWER, "--- rank 1"),
                "logs @": (ANSWER, "deaf"),
                "restart @": (FAILED, "is over already|the job is ending"),
                "drain 7 @": (FAILED, "no node of a-job fits '7'"),
                "stop @ --no-wait": (ANSWER, "all nodes were told"),
                f"explain {logs}": (ANSWER, "stopped the job"),
            })  # fmt: skip
            look("a-job", page, "stopping", "stopped the job")
            assert host.agent.wait_for(lambda: pids_while_stopping(2)) == pids
            assert all(os.path.exists(f"/proc/{pid}") for pid in pids)  # who is told twice gives them no less time

            for node in (host, third):
                node.kill()
            wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    check("a-job", {**GONE, f"explain {logs}": (ANSWER, "generation"), f"logs {logs}": (ANSWER, "deaf")})
    with terminal("a-job") as screen:
        assert screen.ended() == USAGE
        assert NO_JOB in " ".join(screen.text)
    elsewhere = f"the store at {endpoint} cannot be reached: .*; no job meets there now"
    check("a-job", {f"{command} @ --endpoint {endpoint}": (FAILED, elsewhere) for command in ("status", "stop", "restart")})


def is_running(size: int) -> bool:
    found = inspect.jobs() and inspect.status()
    return bool(found) and found.phase == "running" and len(found.members) == size and not found.silent


def run(*words: str) -> str:
    return subprocess.run([*RALLYPOINT, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False).stdout


def test_a_job_of_an_odd_name_that_backs_off_and_one_that_fails(
    start_rallyrun: Callable[..., Any], rallyrun: Any, script: Any, tmp_path: Path
) -> None:
    """What the last line of a failure says to run can be run as it stands, whatever the folder is called."""
    logs = tmp_path / "l q'$(touch x)\"é"
    worker = script("print('at work', flush=True)\nraise SystemExit(3)")
    flags = ["--rdzv-id", ODD, "--log-dir", logs, "--redirects", "3"]
    conf = "restart_backoff=600,restart_backoff_max=600"
    agent = start_rallyrun(["--max-restarts", "9", "--rdzv-conf", conf, *flags, worker])
    why = "failed: exited with code 3 .*restart 2 of 9, after 600 s"
    agent.wait_for(lambda: (node := own_node()) and re.search(why, node.why))
    with followed(("logs", "-f", "odd"), ("explain", "--follow", str(logs))):
        check(ODD, {
            "ps": (ANSWER, re.escape(ODD) + " +waiting"),
            "status @": (ANSWER, why),
            "status @ --json": (ANSWER, why),
            "stacks @": (FAILED, f"no worker of .* runs: it is waiting, .*{why}"),
            "logs @": (ANSWER, "at work"),
            "restart @": (FAILED, "its workers do not run: it is waiting"),
            "drain 7 @": (FAILED, "no node of .* fits '7'"),
        })  # fmt: skip
        with terminal("odd") as screen:
            screen.until_shown("waiting for ", "exited with code 3")
            screen.press("q")
            assert screen.ended() == 0
        assert "it has ended on this machine" in run("stop", ODD)
    assert agent.wait() == 79

    failed = rallyrun([*flags, worker])
    last = failed.stderr.splitlines()[-1]
    assert last.startswith("rallyrun: for what happened, and when: rallypoint explain ")
    command = f"{sys.executable} -m {last.partition('when: ')[2]}"
    told = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=tmp_path)
    assert (told.returncode, told.stderr) == (0, "")
    assert re.search(r"did not succeed: rank 0 .* exited with code 3", " ".join(told.stdout.split()))
    assert not (tmp_path / "x").exists()


def test_jobs_that_are_called_alike(start_rallyrun: Callable[..., Any], script: Any, wait_until: WaitUntil) -> None:
    """Two of one ID are two jobs, and what is done to one of them is not done to the other."""
    worker = script("import time\ntime.sleep(600)")
    agents = [start_rallyrun(["--rdzv-id", name, worker]) for name in ("twin", "twin", "twin-2")]
    wait_until(lambda: [len(job.nodes) for job in inspect.jobs()] == [1, 1, 1])
    pids = sorted(agent.pid for agent in agents[:2])
    named = f"2 jobs have the ID 'twin'; name one by the process ID of its launcher: {pids[0]}, {pids[1]}"
    check("twin", dict.fromkeys(("status @", "logs @", "stacks @", "stop @", "restart @", "drain 0 @"), (USAGE, named)))
    check("twi", dict.fromkeys(("status @", "logs @", "stop @"), (USAGE, "3 jobs begin with 'twi': twin, twin-2")))
    check(str(pids[1]), {"status @": (ANSWER, f"pid {pids[1]}"), "restart @": (ANSWER, "its workers are restarted")})
    assert "it has ended on this machine" in run("stop", str(pids[0]))
    assert sorted(job.nodes[0].pid for job in inspect.jobs()) == sorted([pids[1], agents[2].pid])
    check("twin", {"status @": (ANSWER, f"pid {pids[1]}"), "status": (USAGE, "2 jobs run on this machine; name one of them")})


ANOTHERS = [
    (
        b'{"node": {"format": 7, "version": "9.9"}}\n',
        "its answer cannot be understood: it runs rallypoint 9.9, which answers in the format 7",
    ),
    (b'{"error": "this is another version"}\n', "this is another version"),
    (b"hello\n", "its answer is none of an agent"),
    (b'{"node": {"job": 7}}\n', "its answer cannot be understood"),
    (b"", "it has ended: it closed the connection"),
]


@pytest.mark.parametrize(("answer", "told"), ANOTHERS, ids=lambda value: str(value)[:20])
def test_an_agent_of_another_version_and_none_at_all(answer: bytes, told: str, runtime_folder: str) -> None:
    """Nobody says that no job runs where one cannot be understood."""
    path = os.path.join(runtime_folder, f"{os.getpid()}-other.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(64)

        def serve() -> None:
            while True:
                visitor, _ = listener.accept()
                with visitor:
                    if not visitor.recv(65536):
                        return
                    visitor.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        why = f"whoever is here could not be asked: process {os.getpid()}: {told}"
        commands = ("status", "logs", "stacks", "stop", "restart", "drain 0")
        check("", dict.fromkeys(commands, (USAGE, why)))
        check("", {"ps": (ANSWER, f"^rallypoint ps: process {os.getpid()}: {told}"), "ps --json": (ANSWER, told)})
        with terminal() as screen:
            assert screen.ended() == USAGE
            assert f"process {os.getpid()}: " in " ".join(screen.text)
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(path)
            last.shutdown(socket.SHUT_WR)
            thread.join()
    assert os.path.exists(path)
    check("", {"ps": (ANSWER, NO_JOB)})  # which removes what nobody listens at
    assert not os.path.exists(path)


ANOTHER_USER = """
import encodings.idna, http.client, os, socket, sys
from rallypoint import inspect
path, port, logs, launcher = sys.argv[1:]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
assert inspect.jobs() == []
try:
    socket.socket(socket.AF_UNIX).connect(path)
except PermissionError:
    print("no socket")
for page in ("/", "/web/view", "/web/stacks", "/web/log?rank=0&stream=stdout"):
    client = http.client.HTTPConnection("127.0.0.1", int(port))
    client.request("GET", page)
    answer = client.getresponse()
    assert answer.status == 401 and b"a-secret" not in answer.read(), page
print("no page")
try:
    os.listdir(logs)
except PermissionError:
    print("no log")
told = open(f"/proc/{launcher}/cmdline", "rb").read()
print("no token" if b"token=" not in told else told)
"""


@pytest.mark.root
def test_another_user_of_the_machine_gets_nothing(start_rallyrun: Callable[..., Any], script: Any, runtime_folder: str) -> None:
    """Neither the socket nor the page, nor logs for which no folder was named, nor the token from the command line."""
    worker = script("import time\nprint('a-secret', flush=True)\ntime.sleep(600)")
    agent = start_rallyrun(["--rdzv-id", "a-secret", "--web", "--redirects", "3", worker])
    page = re.search(r":(\d+)/\?token=", agent.wait_for_line("the job's page"))
    assert page is not None
    log_dir = agent.wait_for(lambda: (node := own_node()) and node.log_dir)
    (name,) = os.listdir(runtime_folder)
    seen = [f"{runtime_folder}/{name}", page[1], log_dir, str(agent.pid)]
    command = [sys.executable, "-c", ANOTHER_USER, *seen]
    told = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (told.stdout.splitlines(), told.stderr) == (["no socket", "no page", "no log", "no token"], "")
