"""The page over HTTP, of a job that is made up: who gets in, what comes with it, and what many viewers cost."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S
from tests.web.made_jobs import MadeJob, Told, Viewer, ask, served

from rallypoint.errors import RallypointError
from rallypoint.inspection.log_ends import END_BYTES, LogEnd, LogFile, LogWish
from rallypoint.inspection.stack_view import StacksView
from rallypoint.net.http import Response
from rallypoint.output.log_specs import LogFolder
from rallypoint.web.feed import Feed
from rallypoint.web.rules import PATHS


@pytest.fixture
def job() -> MadeJob:
    return MadeJob()


@pytest.fixture
def port(job: MadeJob) -> Iterator[int]:
    with served(job) as server:
        yield server.port


@contextlib.contextmanager
def viewing(port: int, token: str) -> Iterator[Viewer]:
    viewer = Viewer(port, token)
    try:
        yield viewer
    finally:
        viewer.close()


# --- who gets in -----------------------------------------------------------------------------------------------------------


def wrong_tokens(right: str) -> list[str | None]:
    return [None, "", "x", right[:-1], right + "0", right.upper() + "x", "é"]


def test_nobody_gets_anything_without_the_token(job: MadeJob, port: int) -> None:
    for token in wrong_tokens(job.site.token):
        header = {"Authorization": f"Bearer {token}"} if token and token.isascii() else {}
        asked = [ask(port, path, method="POST" if path == "/web/stacks" else "GET", headers=header) for path in PATHS]
        asked.append(ask(port, f"/?token={(token or '').encode().hex() if token == 'é' else token or ''}"))
        for told in asked:
            assert told.status == 401
            assert "job-7" not in told.text
            assert "host-0" not in told.text
            assert "Set-Cookie" not in told.headers
    assert job.looks == 0


def test_a_token_stands_where_it_belongs(job: MadeJob, port: int) -> None:
    """In no address but that of the page, where logs and the history of a browser would have it; and in no cookie."""
    token = job.site.token
    assert ask(port, f"/web/view?token={token}").status == 401
    assert ask(port, "/", token).status == 401
    assert ask(port, "/web/view", headers={"Cookie": f"token={token}; rallypoint-token={token}"}).status == 401
    assert ask(port, f"/?token={token}").status == 200


def test_a_page_from_elsewhere_cannot_ask_under_a_name_of_its_own(job: MadeJob, port: int) -> None:
    told = ask(port, f"/?token={job.site.token}", headers={"Host": "evil.example"})
    assert told.status == 403
    assert ask(port, "/web/view", job.site.token, headers={"Host": "evil.example"}).status == 403


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {MadeJob().site.token for _ in range(20)}
    assert len(tokens) == 20
    assert {len(token) for token in tokens} == {32}


def test_the_address_to_open(job: MadeJob) -> None:
    end = f"/?token={job.site.token}"
    assert job.site.address("127.0.0.1", 80) == f"http://127.0.0.1:80{end}"
    assert job.site.address("::1", 80) == job.site.address("[::1]", 80) == f"http://[::1]:80{end}"
    assert job.site.address("0.0.0.0", 80) == job.site.address("::", 80) == f"http://{os.uname().nodename}:80{end}"


def test_health_is_for_everybody_and_nothing_else_is_there(job: MadeJob, port: int) -> None:
    assert ask(port, "/healthz").status == 200
    assert ask(port, "/web/", job.site.token).status == 404
    assert ask(port, "/web/page.js", job.site.token).status == 404


# --- the page --------------------------------------------------------------------------------------------------------------


def inside(page: str, tag: str) -> str:
    [found] = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return str(found)


def page_and_gate(job: MadeJob, port: int) -> list[Told]:
    return [ask(port, f"/?token={job.site.token}"), ask(port, "/")]


def test_the_page_has_all_that_it_needs_and_may_run_nothing_else(job: MadeJob, port: int) -> None:
    for told in page_and_gate(job, port):
        assert told.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = told.headers["Content-Security-Policy"]
        for tag, kind in (("script", "script-src"), ("style", "style-src")):
            known = base64.b64encode(hashlib.sha256(inside(told.text, tag).encode()).digest()).decode()
            assert f"{kind} 'sha256-{known}';" in policy
        assert policy.startswith("default-src 'none';")
        assert told.headers["Cache-Control"] == "no-store"
        assert told.headers["Referrer-Policy"] == "no-referrer"
        assert told.headers["X-Content-Type-Options"] == "nosniff"
        assert not re.search(r"(src|href)=\"(?!data:,|#)", told.text)
        assert not re.search(r"\son\w+=|javascript:|style=\"", told.text)
        assert job.site.token not in told.text


def test_text_is_never_put_in_as_markup(job: MadeJob, port: int) -> None:
    script = inside(ask(port, f"/?token={job.site.token}").text, "script")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser"):
        assert way not in script


# --- the view --------------------------------------------------------------------------------------------------------------


def test_the_job_is_told_again_and_again(job: MadeJob, port: int) -> None:
    with viewing(port, job.site.token) as viewer:
        assert viewer.response.headers["Content-Type"] == "text/event-stream"
        assert viewer.response.headers["Cache-Control"] == "no-store"
        seen = [viewer.next() for _ in range(3)]
    assert [name for name, _ in seen] == ["view"] * 3
    steps = [view["step"] for _, view in seen]
    assert steps == sorted(set(steps))
    assert seen[0][1]["job"] == "job-7"


def test_many_viewers_cost_one_look_a_second(job: MadeJob, port: int) -> None:
    began_at = time.monotonic()
    with contextlib.ExitStack() as all_viewers:
        viewers = [all_viewers.enter_context(viewing(port, job.site.token)) for _ in range(12)]
        for _ in range(2):
            for viewer in viewers:
                viewer.next()
    for _ in range(5):  # and one that comes again and again
        with viewing(port, job.site.token) as viewer:
            viewer.next()
    assert job.looks <= time.monotonic() - began_at + 1


def test_nobody_looks_when_nobody_is_there(job: MadeJob, port: int, wait_until: Any) -> None:
    with viewing(port, job.site.token) as viewer:
        viewer.next()
    wait_until(lambda: job.site._feed._thread is None)
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("rallypoint-web")])
    looks, began_at = job.looks, time.monotonic()
    with viewing(port, job.site.token) as viewer:
        viewer.next()
    assert job.looks <= looks + time.monotonic() - began_at + 1


def test_a_job_that_takes_long_to_look_at_is_looked_at_less_often(wait_until: Any) -> None:
    looked_at: list[float] = []

    def look(is_first: bool) -> bytes:
        looked_at.append(time.monotonic())
        time.sleep(0.2)  # as a large job takes, and one of which a node does not answer
        return b"seen"

    feed = Feed(look, every_s=0.01)
    stream = feed.add(Response())
    wait_until(lambda: len(looked_at) == 3)
    feed.close(b"")
    stream.give_up()
    assert min(after - before for before, after in itertools.pairwise(looked_at)) >= 0.6


def test_one_who_does_not_read_harms_nobody(job: MadeJob, port: int) -> None:
    job.size = 1, 4000  # 300 kB each time
    with viewing(port, job.site.token), viewing(port, job.site.token) as reader:
        for _ in range(3):
            assert reader.next()[1]["world_size"] == 4000
        assert ask(port, "/healthz").status == 200


def test_only_so_many_may_look(job: MadeJob, port: int) -> None:
    with contextlib.ExitStack() as all_viewers:
        for _ in range(16):
            assert all_viewers.enter_context(viewing(port, job.site.token)).response.status == 200
        told = ask(port, "/web/view", job.site.token)
        assert told.status == 503
        assert ask(port, "/healthz").status == 200


def test_a_store_that_does_not_answer(job: MadeJob, port: int) -> None:
    """What this node knows is shown all the same."""
    job.fails_with = RallypointError("the store is gone")
    with viewing(port, job.site.token) as viewer:
        name, view = viewer.next()
    assert name == "view"
    assert view["note"] == "only this node could be asked: the store is gone"
    assert [node["node"] for node in view["nodes"]] == ["node-0"]


def test_a_mistake_of_ours_is_told_and_the_next_look_may_do_better(job: MadeJob, port: int) -> None:
    job.fails_with = ZeroDivisionError("oh")
    with viewing(port, job.site.token) as viewer:
        assert viewer.next() == ("trouble", {"error": "ZeroDivisionError: oh"})
        job.fails_with = None
        assert next(name for name, _ in iter(viewer.next, None) if name == "view")


def test_when_the_job_ends_all_are_told_and_the_stream_ends(job: MadeJob) -> None:
    job.of_node = {"why": "all workers have succeeded"}
    with served(job) as server, viewing(server.port, job.site.token) as viewer:
        viewer.next()
        job.site.close()
        server.stop()
        seen = viewer.response.read().decode()
    assert seen.endswith('event: end\ndata: {"why": "all workers have succeeded"}\n\n')
    assert not [one for one in threading.enumerate() if one.name.startswith("rallypoint-web")]


# --- stacks and logs -------------------------------------------------------------------------------------------------------


TRAINING = ["", "ranks 0-3, main thread:", "  train (/job/train.py:7)"]


def test_stacks_on_request(job: MadeJob, port: int) -> None:
    assert ask(port, "/web/stacks", job.site.token).status == 405
    assert ask(port, "/web/stacks", job.site.token, "POST").document == {"lines": TRAINING}


def test_stacks_that_take_their_time_hold_up_nobody(job: MadeJob, port: int) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    def stacks() -> StacksView:
        asked.set()
        may_answer.wait(PATIENCE_S)
        return StacksView((), note="late")

    job.site._job = job.site._job.replace(stacks=stacks)
    told: list[Told] = []
    asker = threading.Thread(target=lambda: told.append(ask(port, "/web/stacks", job.site.token, "POST")))
    asker.start()
    assert asked.wait(PATIENCE_S)
    assert ask(port, "/healthz").status == 200
    assert "try again" in ask(port, "/web/stacks", job.site.token, "POST").document["error"]
    may_answer.set()
    asker.join(PATIENCE_S)
    assert told[0].document == {"lines": ["late"]}


def test_stacks_that_cannot_be_had(job: MadeJob, port: int) -> None:
    def stacks() -> StacksView:
        raise OSError(9, "the workers are not watched any more")

    job.site._job = job.site._job.replace(stacks=stacks)
    assert ask(port, "/web/stacks", job.site.token, "POST").document == {"error": "the workers are not watched any more"}


def test_the_end_of_a_log(job: MadeJob, port: int, tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    path.write_text("".join(f"line {number} <b>\n" for number in range(20_000)))
    job.logs[2, "stderr"] = LogFile(str(path), None)
    told = ask(port, "/web/log?rank=2&stream=stderr", job.site.token).document
    assert told["path"] == str(path)
    assert told["size"] == path.stat().st_size
    assert told["is_cut"]
    lines = told["text"].splitlines()
    assert (lines[0].startswith("line "), lines[-1]) == (True, "line 19999 <b>")
    assert len(told["text"]) <= END_BYTES


def test_the_log_of_a_worker_elsewhere_comes_from_its_node(job: MadeJob, port: int) -> None:
    job.size, job.of_node = (2, 4), {"id": "id-1"}
    asked: list[tuple[LogWish, str]] = []

    def log_end(wish: LogWish, node_id: str) -> LogEnd:
        asked.append((wish, node_id))
        if wish.rank == 6:
            raise RallypointError("its node has not sent it within 3 s")
        return LogEnd("/there/stdout.log", 9, 1.0, False, "\x1b[1m10%\r20%\n")

    job.site._job = job.site._job.replace(log_end=log_end)
    told = ask(port, "/web/log?rank=5&stream=stdout", job.site.token).document
    assert told == {"path": "/there/stdout.log", "size": 9, "is_cut": False, "text": "20%\n"}
    assert asked == [(LogWish(5, ("stdout",)), "id-1")]
    told = ask(port, "/web/log?rank=6&stream=stdout", job.site.token).document
    assert told == {"error": "its node has not sent it within 3 s"}
    assert ask(port, "/web/log?rank=99&stream=stdout", job.site.token).status == 200
    assert asked[2] == (LogWish(99, ("stdout",)), "")


def test_a_log_that_is_not_there(job: MadeJob, port: int, tmp_path: Path) -> None:
    job.logs[1, "stdout"] = LogFile(str(tmp_path / "none"), None)
    told = ask(port, "/web/log?rank=1&stream=stdout", job.site.token).document
    assert told == {"error": "no file has the stdout of rank 1; --tee 3 or --redirects 3 keeps what workers write"}
    assert "none of this node's" in ask(port, "/web/log?rank=77&stream=stdout", job.site.token).document["error"]


def test_no_link_leads_out_of_the_folder_of_the_run(job: MadeJob, port: int, tmp_path: Path) -> None:
    """Whoever can write there may not have others read what he cannot."""
    (tmp_path / "secret").write_text("secret")
    run = tmp_path / "run"
    run.mkdir()
    (run / "stderr.log").symlink_to(tmp_path / "secret")
    folder = LogFolder(str(run), run.stat().st_dev, run.stat().st_ino)
    job.logs[0, "stderr"] = LogFile(str(run / "stderr.log"), folder)
    assert "error" in ask(port, "/web/log?rank=0&stream=stderr", job.site.token).document


def test_a_pipe_in_place_of_a_log_blocks_nobody(job: MadeJob, port: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    job.logs[0, "stderr"] = LogFile(str(tmp_path / "pipe"), None)
    assert "error" in ask(port, "/web/log?rank=0&stream=stderr", job.site.token).document


def test_questions_are_answered_a_few_at_a_time(job: MadeJob, port: int) -> None:
    may_answer = threading.Event()

    def find(wish: LogWish, node_id: str) -> None:
        may_answer.wait(PATIENCE_S)

    job.site._job = job.site._job.replace(log_end=find)
    told: list[int] = []
    askers = [
        threading.Thread(target=lambda: told.append(ask(port, "/web/log?rank=0&stream=stderr", job.site.token).status))
        for _ in range(6)
    ]
    for asker in askers:
        asker.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(told) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert told == [503, 503]
    finally:
        may_answer.set()
        for asker in askers:
            asker.join(PATIENCE_S)
    assert told[2:] == [200] * 4
