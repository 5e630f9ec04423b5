"""The page of real jobs: it shows them, costs nothing while nobody looks, and is not there unless it is asked for."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import ports
from tests.web.made_jobs import Viewer, ask

WORKER = """
    import os, sys, time
    from rallypoint import worker

    print("hello <b>from</b> rank", os.environ["RANK"], file=sys.stderr, flush=True)
    for step in range(3):
        worker.progress(step)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(3)
    print("waiting", file=sys.stderr, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def start(start_rallyrun: Any, script: Any) -> Callable[..., Any]:
    def start_job(*flags: str, worker: str = WORKER, **more: Any) -> Any:
        return start_rallyrun(["--standalone", *flags, script(worker)], **more)

    return start_job


def address_of(job: Any) -> tuple[int, str]:
    found = re.search(r"the job's page: http://127\.0\.0\.1:(\d+)/\?token=(\w+)$", job.wait_for_line("the job's page"))
    assert found is not None
    return int(found[1]), found[2]


def views(port: int, token: str) -> Iterator[dict[str, Any]]:
    viewer = Viewer(port, token)
    try:
        while True:
            name, view = viewer.next()
            assert name == "view"
            yield view
    finally:
        viewer.close()


def test_a_job_that_was_restarted(start: Any) -> None:
    """Its phases, its restart and why, its workers with their steps, where they are, and what they wrote."""
    flags = ["--web", "--nproc-per-node", "2", "--max-restarts", "1", "--hang-timeout", "600", "--redirects", "2"]
    job = start(*flags)
    port, token = address_of(job)
    assert ask(port, f"/?token={token}").status == 200
    view = next(view for view in views(port, token) if view["generation"] == 2 and view["step"] == 2)
    assert (view["phase"], view["restarts"], view["max_restarts"], view["world_size"]) == ("running", 1, 1, 2)
    assert "exited with code 3" in view["history"][0][2]
    lost = [span for span in view["timeline"] if span["kept_s"] is not None]
    assert [(span["phase"], span["generation"], span["kept_s"]) for span in lost] == [("running", 1, 0)]
    assert view["timeline"][-1]["phase"] == "running"
    [node] = view["nodes"]
    assert [(row[0], row[4]) for row in node["workers"]] == [(0, 2), (1, 2)]
    log = ask(port, "/web/log?rank=1&stream=stderr", token)
    job.wait_for(lambda: "waiting" in ask(port, "/web/log?rank=1&stream=stderr", token).document["text"])
    assert "hello <b>from</b> rank 1" in log.document["text"]
    assert "attempt_1" in log.document["path"]

    def are_found_asleep() -> bool:
        lines = ask(port, "/web/stacks", token, "POST").document["lines"]
        return "ranks 0-1, main thread:" in lines and any(line.endswith("worker.py:11)") for line in lines)

    job.wait_for(are_found_asleep)
    job.send_signal(15)
    assert job.wait() != 0


def test_a_page_shows_all_nodes(start: Any, start_rallyrun: Any, script: Any) -> None:
    """While the others are still missing, itself and what it waits for; then every node, with its log and where it stands; and at
    the end, why it ended.
    """
    worker = script("""
        import os, time
        print("at work:", os.environ["RANK"], flush=True)
        while not os.path.exists(os.environ["ENOUGH"]):
            time.sleep(0.05)
        """)
    enough = worker.parent / "enough"
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "pair", "--redirects", "1", "--hang-timeout", "600"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{ports.free_port()}"]
    env = {"ENOUGH": str(enough)}
    first = start_rallyrun(["--web", *flags, worker], env=env)
    port, token = address_of(first)
    viewer = Viewer(port, token)
    views = iter(lambda: viewer.next()[1], None)
    alone = next(view for view in views if view["note"])
    assert (alone["phase"], alone["node_count"], alone["step"]) == ("waiting", 1, None)
    second = start_rallyrun([*flags, worker], env=env)
    both = next(view for view in views if view["phase"] == "running" and view["node_count"] == 2)
    assert [[row[0] for row in node["workers"]] for node in both["nodes"]] == [[0], [1]]
    assert {node["pid"] for node in both["nodes"]} == {first.pid, second.pid}
    for rank in (0, 1):
        path = f"/web/log?rank={rank}&stream=stdout"
        first.wait_for(lambda path=path, rank=rank: ask(port, path, token).document.get("text") == f"at work: {rank}\n")
    assert "no file has the stderr of rank 1" in ask(port, "/web/log?rank=1&stream=stderr", token).document["error"]
    first.wait_for(lambda: "ranks 0-1, main thread:" in ask(port, "/web/stacks", token, "POST").document["lines"])
    enough.touch()
    end = next(told for name, told in iter(viewer.next, None) if name == "end")
    viewer.close()
    assert end["why"]
    assert (first.wait(), second.wait()) == (0, 0)


def test_nobody_else_learns_the_token(start: Any, tmp_path: Path) -> None:
    """It is in the launcher's output and in its memory, and nowhere that another user, or a worker, can look."""
    worker = "import time; print('up', flush=True); time.sleep(600)"
    job = start("--web", "--log-dir", str(tmp_path / "logs"), "--tee", "3", worker=worker)
    port, token = address_of(job)
    job.wait_for_line("up")
    [view, *_] = [next(views(port, token))]
    for pid in (job.pid, *(row[1] for row in view["nodes"][0]["workers"])):
        for name in ("cmdline", "environ"):
            assert token.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "stderr.txt"]
    assert any(path.name == "events.jsonl" for path in kept)
    assert [path for path in kept if token.encode() in path.read_bytes()] == []
    for path in ("/", "/web/view"):
        assert ask(port, path).status == 401
    assert "--hang-timeout" in " ".join(ask(port, "/web/stacks", token, "POST").document["lines"])
    job.send_signal(15)
    job.wait()


def wakings(pid: int) -> dict[str, int]:
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            counts = re.findall(r"ctxt_switches:\t(\d+)", (task / "status").read_text())
            found[task.name] = sum(map(int, counts))
    return found


def test_an_agent_whose_page_nobody_looks_at_sleeps(start: Any) -> None:
    job = start("--web", worker="import time; print('up', flush=True); time.sleep(600)")
    port, token = address_of(job)
    job.wait_for_line("up")
    next(views(port, token))

    def sleeps() -> bool:
        before = wakings(job.pid)
        time.sleep(1.5)  # in which it would look again
        return wakings(job.pid) == before

    job.wait_for(sleeps)
    job.send_signal(15)
    job.wait()


def test_without_the_flag_there_is_nothing(start: Any) -> None:
    """No page, no port, and not a line of it is loaded on the way to the first worker."""
    worker = "import sys, time; print('up', file=sys.stderr, flush=True); time.sleep(600)"
    port = ports.free_port()
    job = start(worker=worker, env={"PYTHONPROFILEIMPORTTIME": "1"})
    job.wait_for_line("up")
    imported = {line.rpartition("|")[2].strip() for line in job.stderr.splitlines() if line.startswith("import time:")}
    assert "rallypoint.agent.local_agent" in imported
    ours = ("rallypoint.web", "rallypoint.health.server", "rallypoint.net.http")
    assert [name for name in imported if name.startswith(ours)] == []
    assert "page" not in job.stderr
    job.send_signal(15)
    job.wait()
    with_health_alone = start("--health-port", str(port), worker=worker)
    with_health_alone.wait_for_line("up")
    assert ask(port, "/").text.startswith("/healthz")
    for path in ("/web/view", "/web/stacks", "/web/log?rank=0&stream=stderr"):
        assert ask(port, path, "token").status == 404
    with_health_alone.send_signal(15)
    with_health_alone.wait()


def test_the_page_is_at_the_health_port_if_there_is_one(start: Any) -> None:
    port = ports.free_port()
    job = start("--health-port", str(port), worker="import time; time.sleep(600)", env={"PET_WEB": "1"})
    assert address_of(job)[0] == port
    assert ask(port, "/healthz").status == 200
    assert ask(port, "/").status == 401
    job.send_signal(15)
    job.wait()
