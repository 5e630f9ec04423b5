"""The page of a running job: who may see it, the page itself, and what its script asks for.

It is served by the health endpoint's server, whose thread waits for nothing: the job is looked at by a thread that is there while
somebody watches (`web.feed`), and what may take its time, stacks and files of logs, is fetched by one for each question, of which
there are few at a time. Nothing here changes the job; to ask workers for their stacks is all that they notice.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from rallypoint.base.json_text import to_json
from rallypoint.base.records import Value
from rallypoint.base.text import host_port
from rallypoint.errors import RallypointError
from rallypoint.inspection.log_ends import LogEnd, LogWish
from rallypoint.inspection.stack_view import StacksView, grouped
from rallypoint.inspection.view import JobView, NodeView, including, job_of
from rallypoint.net.http import Request, Response
from rallypoint.net.http_stream import Stream
from rallypoint.net.service_thread import importing
from rallypoint.web import document, rules
from rallypoint.web.feed import Feed

__all__ = ["WHO", "Job", "Site"]

TOKEN_BYTES = 16
PATIENCE_S = 1.0  # with nodes that do not answer
ERRANDS = 4  # at a time
WHO = "the job's web page"
EVERY_ADDRESS = ("0.0.0.0", "::")
FOLDER = os.path.dirname(__file__)
TOO_BUSY = "other questions are still being answered; try again in a moment"


class Job(Value):
    """This agent, as the page asks it, from any thread. RallypointError or OSError: what is asked for cannot be had."""

    look: Callable[[], NodeView]
    survey: Callable[[str, float], JobView]  # for whom, and for how long
    timeline: Callable[[float], Sequence[document.Span]]  # at this time
    stacks: Callable[[], StacksView]  # of the workers of all nodes
    log_end: Callable[[LogWish, str], LogEnd | None]  # of a worker of this node, or of the node of this id; None: of neither


class Site:
    """Answers at `rules.PATHS` for whoever has the token."""

    def __init__(self, job: Job) -> None:
        self.token = os.urandom(TOKEN_BYTES).hex()
        self._job = job
        self._feed = Feed(self._look)
        self._looks: document.Looks | None = None
        self._seen: JobView | None = None
        self._errands = threading.BoundedSemaphore(ERRANDS)
        self._stacks = threading.Lock()  # whoever asks twice gets them once
        self._pages: dict[str, Response] = {}

    def address(self, host: str, port: int) -> str:
        """Where it is, for a browser."""
        named = os.uname().nodename if host in EVERY_ADDRESS else host.strip("[]")
        return f"http://{host_port(named, port)}/?token={self.token}"

    def close(self) -> None:
        """Ask the agent no more, whose run is over; whoever looks is told why."""
        self._feed.close(_event("end", {"why": self._job.look().why}))

    # --- on the server's thread --------------------------------------------------------------------------------------------

    def answer(self, request: Request) -> Response | Stream:
        wanted = rules.resolve(request, self._is_ours(rules.given_token(request)))
        match wanted:
            case rules.Page():
                return self._page("page", 200)
            case rules.Gate():
                return self._page("gate", 401)
            case rules.View():
                return self._feed.add(Response(200, content_type="text/event-stream", headers=rules.PRIVATE))
            case rules.Stacks():
                return self._fetch(self._tell_stacks)
            case rules.Log(rank, stream):
                return self._fetch(lambda: self._read_log(rank, stream))
        return wanted

    def _is_ours(self, token: str) -> bool:
        with importing:
            from hmac import compare_digest

        return compare_digest(token.encode(), self.token.encode())

    def _page(self, name: str, status: int) -> Response:
        if name not in self._pages:
            self._pages[name] = _assemble(name, status)
        return self._pages[name]

    # --- on threads of their own -------------------------------------------------------------------------------------------

    def _look(self, is_first: bool) -> bytes:
        """The job as it is now, as an event of a stream."""
        try:
            told = self._describe(is_first)
        except Exception as error:  # whatever it is, whoever looks is to know, and the next look may do better
            told = {"error": f"{type(error).__name__}: {error}"}
        return _event("trouble" if "error" in told else "view", told)

    def _describe(self, is_first: bool) -> dict[str, object]:
        own = self._job.look()
        self._seen = job = self._survey(own)
        now = time.monotonic()
        self._looks = document.look(job, None if is_first else self._looks, now)
        return document.describe(job, own, self._looks, self._job.timeline(now), now)

    def _survey(self, own: NodeView) -> JobView:
        try:
            return including(self._job.survey(WHO, PATIENCE_S), own)
        except (RallypointError, OSError) as error:
            return job_of([own], (), f"only this node could be asked: {error}")

    def _fetch(self, find: Callable[[], dict[str, object]]) -> Response | Stream:
        """A document that another thread makes."""
        if not self._errands.acquire(blocking=False):
            return Response(503, TOO_BUSY + "\n", headers=rules.PRIVATE)
        stream = Stream(Response(200, content_type="application/json", headers=rules.PRIVATE))

        def run() -> None:
            try:
                found = find()
            except Exception as error:  # whatever it is, whoever asked is to know, and nobody else
                found = {"error": f"{type(error).__name__}: {error}"}
            finally:
                self._errands.release()
            stream.end(to_json(found).encode())

        threading.Thread(target=run, name="rallypoint-web-errand", daemon=True).start()
        return stream

    def _tell_stacks(self) -> dict[str, object]:
        if not self._stacks.acquire(blocking=False):
            return {"error": TOO_BUSY}
        try:
            return {"lines": grouped(self._job.stacks())}
        except OSError as error:
            return {"error": error.strerror or str(error)}
        finally:
            self._stacks.release()

    def _read_log(self, rank: int, stream: str) -> dict[str, object]:
        nodes = (self._seen or self._survey(self._job.look())).nodes
        node_id = next((node.id for node in nodes if any(worker.rank == rank for worker in node.workers)), "")
        try:
            found = self._job.log_end(LogWish(rank, (stream,)), node_id)
        except (RallypointError, OSError) as error:
            found = LogEnd(error=str(error))
        if found is None or found.error:
            return {"error": found.error if found is not None else f"rank {rank} is none of this node's"}
        return {"path": found.path, "size": found.size, "is_cut": found.is_cut, "text": document.tidy_log(found.text)}


def _event(name: str, told: dict[str, object]) -> bytes:
    """As a stream of events has it."""
    return f"event: {name}\ndata: {to_json(told)}\n\n".encode()


def _assemble(name: str, status: int) -> Response:
    """A page with its style and its script inside, and headers that allow these and nothing else."""
    with importing:
        import base64
        import hashlib

    def read(file_name: str) -> str:
        with open(os.path.join(FOLDER, file_name), encoding="utf-8") as file:
            return file.read()

    def fingerprint(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    style, script = read("page.css"), read(f"{name}.js")
    page = read(f"{name}.html").replace("/* style */", style).replace("/* script */", script)
    return Response(status, page, "text/html; charset=utf-8", rules.headers(fingerprint(script), fingerprint(style)))
