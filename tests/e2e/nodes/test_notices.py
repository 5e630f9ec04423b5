"""Others are told of a job of two agents: each of them once, by one node, whatever they answer; and the job waits for nobody."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests import ports

from rallypoint.base import defaults

HANG = "import rallypoint.worker as w; w.heartbeat(); time.sleep(600)"
SLOW_S = 1.0


class Chat(ThreadingHTTPServer):
    """Web addresses of a chat: what each of them has been told, and how it answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.told: dict[str, list[dict[str, Any]]] = {"fails-first": [], "slow": [], "never": []}
        self.refused: set[str] = set()
        self.is_over = threading.Event()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"

    def texts(self, name: str) -> list[str]:
        return [document["text"] for document in self.told[name]]


class Handler(BaseHTTPRequestHandler):
    server: Chat

    def do_POST(self) -> None:
        name, body = self.path[1:], self.rfile.read(int(self.headers["Content-Length"]))
        document = json.loads(body)
        if name == "fails-first" and document["id"] not in self.server.refused:
            self.server.refused.add(document["id"])
            self.send_error(500)
            return
        self.server.told[name].append(document)
        if name == "never":
            self.server.is_over.wait()
        else:
            self.server.is_over.wait(SLOW_S if name == "slow" else 0.0)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"ok")

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def chat() -> Iterator[Chat]:
    with Chat() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.is_over.set()
        server.shutdown()
        thread.join()


def events_and_outcomes(documents: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(document["event"], document["outcome"]) for document in documents]


def events_of(lines: list[str]) -> list[dict[str, Any]]:
    """Ours, of those that a sink got or a file has."""
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [one for one in found if one["name"].startswith("rallypoint.")]


def events_in(path: Path) -> list[dict[str, Any]]:
    return events_of(path.read_text().splitlines())


ALWAYS = {"run.started", "phase", "generation", "restart", "run.ended"}
EVERYTHING = [("failure", None), ("hang", None), ("end", "succeeded")]


def test_p44_a_job_that_fails_hangs_and_ends_is_told_once_to_each(job: Any, chat: Chat, tmp_path: Path) -> None:
    """P44, F27: Also while one of them never answers: the restarts come as always, and the end waits a little, once."""
    file = tmp_path / "hook"
    file.write_text(f"# the chat\n{chat.url('fails-first')}\n")
    file.chmod(0o600)
    log = tmp_path / "told.jsonl"
    command = f"sh -c 'cat >> {log}; echo >> {log}'"
    flags = ["--max-restarts", "3", "--restart-backoff", "0", "--hang-timeout", "5", "--event-log-handler", "console"]
    flags += ["--log-dir", str(tmp_path / "logs"), "--notify", f"@{file}", "--notify", command]
    env = {"PET_NOTIFY": "no value of a flag that is given too"}
    more = ["--notify", f"{chat.url('slow')},{chat.url('never')}"]
    nodes = [start(*flags, *more, nnodes="2", workers=1, env=env) for start in (job.start_host, job.start)]
    first = [start for node in nodes for start in node.wait_for_world(2)]
    assert not [start for start in first if any("NOTIFY" in name for name in start.env)]
    failed_at = time.monotonic()
    job.order(1, "sys.exit(7)")
    for node in nodes:
        node.wait_for_world(2, failed_at)
    nodes[0].agent.wait_for(lambda: len(chat.told["never"]) == 1)  # who hangs from now on, with the rest of the job before us
    hung_at = time.monotonic()
    job.order(1, HANG)
    for node in nodes:
        node.wait_for_world(2, hung_at)
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]

    commands = [json.loads(line) for line in log.read_text().splitlines()]
    for documents in (chat.told["fails-first"], chat.told["slow"], commands):
        assert events_and_outcomes(documents) == EVERYTHING
        assert len({document["id"] for document in documents}) == 3
        failure, hang, end = documents
        assert "rank 1" in failure["text"]
        assert "exited with code 7" in failure["text"]
        assert "restart 1 of 3" in failure["why"]
        assert failure["cause"] == {"kind": "failure"}
        assert "it hung: " in hang["why"]
        assert (hang["cause"], hang["generation"], hang["nodes"], hang["workers"]) == ({"kind": "hang"}, 3, 2, 2)
        assert (end["restarts"], end["cause"], end["run_id"]) == (2, None, "a-job")
    on_record = {lines[0]["metadata"]["pid"]: lines for lines in map(events_in, (tmp_path / "logs").glob("*/events.jsonl"))}
    for node in nodes:  # F27
        assert events_of(node.stderr.splitlines()) == on_record[node.agent.pid]
        assert {line["name"].removeprefix("rallypoint.") for line in on_record[node.agent.pid]} >= ALWAYS
    assert "rallypoint.worker.hung" in {line["name"] for lines in on_record.values() for line in lines}
    notices = [line for lines in on_record.values() for line in lines if line["name"] == "rallypoint.notice"]
    assert [line["metadata"]["id"] for line in notices] == [document["id"] for document in commands]
    never = chat.texts("never")
    assert len(never) == len(set(never)) <= 3
    told = "".join(node.stderr for node in nodes)
    assert f"told to http://127.0.0.1:{chat.server_port}: " in told  # what was not, in a line, without the rest of the address
    assert "/never" not in told
    assert "/slow" not in told


def test_the_verdict_is_told_at_the_end_by_one_node_of_three(job: Any, chat: Chat) -> None:
    flags = ["--notify", chat.url("slow")]
    nodes = [job.start_host(*flags, nnodes="3", workers=1), *(job.start(*flags, nnodes="3", workers=1) for _ in range(2))]
    for node in nodes:
        node.wait_for_world(3)
    job.order(2, "raise ValueError('<!here> bad & batch')")
    assert [node.wait() for node in nodes] == [1, 1, 1]
    (document,) = chat.told["slow"]
    assert (document["event"], document["outcome"]) == ("end", "failed")
    assert "ValueError: &lt;!here&gt; bad &amp; batch" in document["text"]
    cause = document["cause"]
    assert (cause["kind"], cause["rank"], cause["exit_code"], cause["message"]) == (
        "failure", 2, 1, "ValueError: <!here> bad & batch"
    )  # fmt: skip


def test_a_lost_node_is_told_by_those_who_stay_and_a_signal_by_the_host(job: Any, chat: Chat) -> None:
    """The node of group rank 0 is killed: the one that has that rank next tells of it; the end is told by who ends the job."""
    flags = ["--notify", chat.url("slow"), "--max-restarts", "1"]
    host = job.start_host(*flags, "--node-rank", "1", nnodes="1:2", workers=1)
    first = job.start(*flags, "--node-rank", "0", nnodes="1:2", workers=1)
    for node in (host, first):
        node.wait_for_world(2)
    host.wait_for_world(1, since=first.kill())
    assert host.end() == 128 + 15
    assert events_and_outcomes(chat.told["slow"]) == [("failure", None), ("end", "stopped")]
    loss, end = chat.told["slow"]
    assert loss["cause"] == {"kind": "loss"}
    assert "a node was lost" in loss["text"]
    assert "SIGTERM" in end["text"]


def test_nobody_there_is_said_and_delays_nothing(rallyrun: Any, script: Any, tmp_path: Path) -> None:
    """One node; the address is taken from the environment, and refused by nobody who listens."""
    began = time.monotonic()
    url = f"http://127.0.0.1:{ports.free_port()}/s3cr3t"
    ended = rallyrun(["--standalone", script("pass")], env={"PET_NOTIFY": url})
    assert ended.returncode == 0
    assert time.monotonic() - began >= sum(defaults.NOTICE_PAUSES_S)  # it was tried again
    assert "a notice could not be told to http://127.0.0.1" in ended.stderr
    assert "it cannot be reached" in ended.stderr
    assert "s3cr3t" not in ended.stderr


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("https:///s3cr3t", "--notify: a web address needs a host"),
        ("no-such-command s3cr3t", "--notify: there is no command 'no-such-command'"),
        ("@nowhere", "--notify: nowhere cannot be read: No such file or directory"),
    ],
)
def test_who_cannot_be_told_is_refused_before_anything_is_started(rallyrun: Any, script: Any, value: str, problem: str) -> None:
    ended = rallyrun(["--standalone", "--notify", value, script("print('started')")])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert problem in ended.stderr
    assert "s3cr3t" not in ended.stderr
