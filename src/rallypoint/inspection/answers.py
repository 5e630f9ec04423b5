"""What an agent answers to whoever asks at its desk, or through the store of its job.

A visitor sends one line of JSON, and gets lines of JSON until the connection ends: ``{"ask": "node"}`` for this agent alone,
``"job"`` for all nodes of its job, ``"stacks"`` for where the workers of other nodes stand, ``"log_end"`` for what a worker
elsewhere has written last, ``"stop"``, ``"drain"`` and ``"restart"`` to steer it. Each answer has an ``error`` where it could not
be done.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from rallypoint.base import report
from rallypoint.base.json_text import clip, from_json, to_json
from rallypoint.base.signals import inbox
from rallypoint.coordination.engine import Coordination, CoordinationError
from rallypoint.errors import RallypointError
from rallypoint.inspection import asking, log_ends
from rallypoint.inspection.view import FORMAT, JobView, job_of, to_document
from rallypoint.net.service_thread import importing
from rallypoint.story.phases import RUNNING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.base.text import Run
    from rallypoint.inspection.desk import Desk
    from rallypoint.inspection.stack_relay import Answers, Others
    from rallypoint.protocol.session import AskedFor

__all__ = ["Clerk"]

QUESTION_S = 5.0
QUESTION_BYTES = 64 * 1024
PATIENCE_S, LONGEST_PATIENCE_S = 3.0, 60.0
MOST_SENDERS = 8
LAST_LINES_S = 10.0  # for those who follow the logs from elsewhere, when the agent ends
KEPT_S = 30.0  # a connection to the store, for whoever asks again and again
WHO_BYTES = 200
STOPS_ALREADY = "it was told so before, and stops; a second SIGTERM to its launcher would kill the workers at once"


class Clerk:
    """Answers for one agent; each question is asked on a thread of its own."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        # Who asks all nodes waits for its own answer too, and who asks for stacks for long.
        self._asking, self._answering, self._collecting, self._reading = (_Line(desk.connect) for _ in range(4))
        self._is_closing = self._is_leaving = self._leaves_at_once = False
        self._senders = threading.BoundedSemaphore(MOST_SENDERS)
        self._stacks: Answers | None = None
        self._log_ends = log_ends.Answers(desk.find_log)

    def close(self) -> None:
        """Whoever hosts the store waits for those who are connected to it; who follows the logs gets the last lines."""
        self._is_closing = True
        deadline = time.monotonic() + LAST_LINES_S
        for _ in range(MOST_SENDERS):
            self._senders.acquire(timeout=max(deadline - time.monotonic(), 0.0))
        for line in (self._asking, self._answering, self._collecting, self._reading):
            line.close()

    # --- whoever comes to the desk -----------------------------------------------------------------------------------------

    def converse(self, visitor: socket.socket) -> None:
        """Hear one question, and answer it."""
        visitor.settimeout(QUESTION_S)
        try:
            asked = _question(visitor)
            answer = self._answer(asked)
        except (ValueError, RallypointError) as error:
            answer = {"error": str(error)}
        visitor.sendall(to_json({"format": FORMAT, **answer}).encode() + b"\n")

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        by = clip(str(asked.get("by", "somebody")), WHO_BYTES)
        match asked.get("ask"):
            case "node":
                return {"node": to_document(self._desk.look())}
            case "job":
                return {"job": to_document(self.survey(by, _patience(asked)))}
            case "stop":
                return {"done": self._stop(by)}
            case "drain":
                return {"done": self._drain(str(asked.get("node", "")), by, asked.get("force") is True, asked.get("now") is True)}
            case "restart":
                return {"done": self._restart(by)}
            case "stacks":
                return self._collect_stacks(asked, by)
            case "log_end":
                return self._tell_log_end(str(asked.get("node", "")), asked.get("wish"), by)
            case "logs":
                return self._ask_for_logs(str(asked.get("node", "")), str(asked.get("detail", "")), by)
        raise ValueError(f"this agent, of another version of rallypoint, does not know the question {asked.get('ask')!r:.40}")

    def survey(self, by: str, patience_s: float) -> JobView:
        """All nodes of the job, as they describe themselves; RallypointError: its store does not answer."""
        with self._asking() as engine:
            found = asking.survey(engine, by, patience_s) if engine is not None else None
        if found is not None and (found.nodes or found.silent):
            return found
        return job_of([self._desk.look()])

    def _stop(self, by: str) -> str:
        with self._asking() as engine:
            if engine is not None:
                return asking.stop(engine, by)
        return "it was told to stop its workers and end" if self._leave(by, is_for_all=True) else STOPS_ALREADY

    def _drain(self, name: str, by: str, is_forced: bool, at_once: bool) -> str:
        with self._asking() as engine:
            if engine is not None:
                return asking.drain(engine, name, by, PATIENCE_S, is_forced=is_forced, at_once=at_once)
        asking.choose_node(job_of([self._desk.look()]), name)
        return "it has one node, which was told to stop its workers and end" if self._leave(by, at_once) else STOPS_ALREADY

    def _leave(self, by: str, at_once: bool = False, is_for_all: bool = False) -> bool:
        """As by SIGTERM, which ends whatever the agent waits for, or lets workers save first where that is asked for, and not
        `at_once`; False: it ends already. In a thread of a larger program nobody could take it.

        A second signal would kill the workers at once. Who presses Ctrl-C twice wants that; who drains a node and then stops the
        job does not.
        """
        if not inbox.is_watched:
            raise RallypointError(
                "it runs inside another program, outside of its main thread, and has to be stopped by that program"
            )
        if is_for_all:
            self._desk.stopped_by = by
        if (self._is_leaving or inbox.received) and not (at_once and not self._leaves_at_once):
            return False
        self._is_leaving, self._leaves_at_once = True, at_once
        if at_once:
            inbox.stop_sifting()
        report.warn(f"{by} asked {'the job to end' if is_for_all else 'this node to stop its workers and leave'}")
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    def _restart(self, by: str) -> str:
        with self._asking() as engine:
            if engine is not None:
                return asking.restart(engine, by)
        own = self._desk.look()
        if own.phase != RUNNING:
            raise RallypointError(f"its workers do not run: it is {own.phase}")
        self._desk.request_restart(asking.wish_to_restart(by))
        return "its workers are restarted"

    def _collect_stacks(self, asked: dict[str, Any], by: str) -> dict[str, Any]:
        from rallypoint.inspection.stack_relay import PATIENCE_S as LONG_S
        from rallypoint.inspection.stack_relay import read_runs

        try:
            ranks = None if asked.get("ranks") is None else read_runs(asked["ranks"])
            here = {(str(host), int(pid)) for host, pid in asked.get("here", ())}
        except TypeError:
            raise ValueError("ranks or agents are missing") from None
        return to_document(self.stacks_of_others(by, here, ranks, _patience(asked, LONG_S)))

    def stacks_of_others(
        self, by: str, here: Collection[tuple[str, int]], ranks: Sequence[Run] | None, patience_s: float
    ) -> Others:
        """Of all nodes but those whose agents, by host and process, are `here`; RallypointError: the store does not answer."""
        from rallypoint.inspection.stack_relay import Others, ask_others

        with self._collecting() as engine:
            return Others() if engine is None else ask_others(engine, by, here, ranks, PATIENCE_S, patience_s)

    def _tell_log_end(self, node_id: str, wish: object, by: str) -> dict[str, Any]:
        return {"log_end": to_document(self.log_end(node_id, log_ends.read_wish(wish), by))}

    def log_end(self, node_id: str, wish: log_ends.LogWish, by: str) -> log_ends.LogEnd:
        """Of a worker of this node, or of the node of this id; RallypointError: it could not be asked."""
        found = log_ends.find_end(wish, self._desk.find_log)
        if found is not None:
            return found
        with self._reading() as engine:
            if engine is None or not node_id:
                raise RallypointError(f"rank {wish.rank} is none of this job's workers, as far as is known here")
            return log_ends.ask_node(engine, node_id, wish, by, PATIENCE_S)

    def _ask_for_logs(self, node_id: str, detail: str, by: str) -> dict[str, Any]:
        with self._asking() as engine:
            if engine is None or not node_id:
                raise RallypointError("it has one node, whose logs are here")
            asking.ask_for_logs(engine, node_id, detail, by)
        return {"done": "the node was asked"}

    # --- whoever asks through the store ------------------------------------------------------------------------------------

    def fulfil(self, asked: AskedFor) -> None:
        """Do what was asked of this node."""
        if asked.asked.what == "leave":
            self._leave(asked.asked.by, asked.asked.detail == asking.AT_ONCE)
            return
        if asked.asked.what == "stop":
            self._leave(asked.asked.by, is_for_all=True)
            return
        if asked.asked.what == "logs":
            self._send_logs(asked.asked.detail)
            return
        if asked.asked.what == "stacks":
            self._give_stacks(asked)
            return
        if asked.asked.what == "log_end":
            self._give_log_end(asked)
            return
        with self._answering() as engine:
            if engine is not None:
                asking.answer(engine, self._desk.look().replace(id=asked.node_id), asked.number)

    def _give_stacks(self, asked: AskedFor) -> None:
        """What takes its time is done before the store is asked for anything."""
        with importing:
            if self._stacks is None:
                from rallypoint.inspection.stack_relay import Answers
                from rallypoint.inspection.stacks import dump_workers

                self._stacks = Answers(lambda ranks, deadline: dump_workers([self._desk.look()], ranks, deadline))
        try:
            answer = self._stacks.make(asked.node_id, asked.number, asked.asked.detail)
        except ValueError as error:
            raise RallypointError(str(error)) from None
        if answer is None:
            return
        with self._answering() as engine:
            if engine is not None:
                engine.transact(answer, time.monotonic() + asking.CALL_S)

    def _give_log_end(self, asked: AskedFor) -> None:
        try:
            answer = self._log_ends.make(asked.node_id, asked.number, asked.asked.detail)
        except ValueError as error:
            raise RallypointError(str(error)) from None
        with self._answering() as engine:
            if engine is not None:
                engine.transact(answer, time.monotonic() + asking.CALL_S)

    def _send_logs(self, detail: str) -> None:
        from rallypoint.inspection.log_relay import send_logs  # who is never asked for them need not load it

        if not self._senders.acquire(blocking=False):
            raise RallypointError(f"logs are being sent to {MOST_SENDERS} others already")
        try:
            send_logs(detail, self._desk.look(), lambda: self._is_closing)
        finally:
            self._senders.release()


class _Line:
    """A connection to the job's store, kept for the next question; one at a time uses it."""

    def __init__(self, connect: Callable[[], Coordination | None]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._engine: Coordination | None = None
        self._used_at = 0.0
        self._is_closed = False

    @contextmanager
    def __call__(self) -> Iterator[Coordination | None]:
        """None where the job has no store."""
        with self._lock:
            if self._engine is None:
                self._engine = self._connect()
                if self._engine is not None:
                    threading.Thread(target=self._hang_up_in_time, name="rallypoint-store", daemon=True).start()
            try:
                yield self._engine
            except CoordinationError:
                self._hang_up()
                raise
            finally:
                self._used_at = time.monotonic()
                if self._is_closed:
                    self._hang_up()

    def close(self) -> None:
        """Keep it no longer; whoever uses it now may end that first."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            self._hang_up()
            self._lock.release()

    def _hang_up_in_time(self) -> None:
        while True:
            time.sleep(KEPT_S)
            with self._lock:
                if self._engine is None:
                    return
                if time.monotonic() - self._used_at >= KEPT_S:
                    self._hang_up()
                    return

    def _hang_up(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def _question(visitor: socket.socket) -> dict[str, Any]:
    """ValueError: that is none."""
    data = b""
    while not data.endswith(b"\n"):
        more = visitor.recv(QUESTION_BYTES)
        data += more
        if not more or len(data) > QUESTION_BYTES:
            raise ValueError(f"a question is one line of JSON of at most {QUESTION_BYTES} bytes")
    try:
        found = from_json(data)
    except ValueError as error:
        raise ValueError(f"a question is an object of JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("a question is an object of JSON")
    return found


def _patience(asked: dict[str, Any], usual_s: float = PATIENCE_S) -> float:
    given = asked.get("patience_s", usual_s)
    return min(max(float(given), 0.0), LONGEST_PATIENCE_S) if type(given) in (int, float) else usual_s
