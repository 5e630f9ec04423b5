"""The warden's hold on the keeper of warm workers (`keeper`): started, asked for workers, rebuilt when it is lost.

Nobody depends on it. What it cannot give, because it refuses, is lost too often or does not answer, the warden starts itself, and
the agent is told why. And like the warden, this waits for nothing: workers that were asked for wait here during the imports.
"""

from __future__ import annotations

import _socket  # see frames
import os
import select
import time

from rallypoint.processes.frames import MAX_FDS, FrameQueue, FrameReader
from rallypoint.processes.kernel import kill_if_allowed

TYPE_CHECKING = False  # as in the warden
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["IMPORT_TIMEOUT_S", "Keeping"]

IMPORT_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 10.0  # forking takes milliseconds; a keeper that does not answer is stopped or stuck
MOST_LOSSES = 3  # in a row, without a worker in between
NEVER = float("inf")
_ENV_KEEPER = "RALLYPOINT_KEEPER"  # spelled out in worker_site too, which imports nothing of ours
_LINE_FD = 3
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_STOP = os.path.join(_PACKAGE_ROOT, "rallypoint", "worker_site", "sitecustomize.py")  # what stops it before the program
_SIGKILL = 9


class _Batch:
    """Workers that are asked for together: as many as one message has room for."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.fds: list[int] = []
        self.words: dict[int, _socket.socket] = {}  # by local rank: our ends, once they are asked for

    def close_words(self) -> None:
        for word in self.words.values():
            word.close()
        self.words.clear()

    def close(self) -> None:
        self.close_words()
        for fd in self.fds:
            os.close(fd)


def _batches(requests: list[dict[str, Any]], fds: list[int]) -> list[_Batch]:
    """With copies of the file descriptors, and room for one more of each worker. OSError: there are not enough of them."""
    found = [_Batch()]
    try:
        for request in requests:
            places = request["fds"]
            if found[-1].requests and len(found[-1].fds) + len(found[-1].requests) + len(places) + 1 > MAX_FDS:
                found.append(_Batch())
            batch = found[-1]
            own = [(len(batch.fds) + position, target) for position, (_, target) in enumerate(places)]
            for position, _ in places:
                batch.fds.append(os.dup(fds[position]))
            batch.requests.append({**request, "fds": own})
    except OSError:
        for batch in found:
            batch.close()
        raise
    return found


def _essence(order: dict[str, Any]) -> dict[str, Any]:
    """What a keeper depends on: not on the program's arguments, which it has only for want of others."""
    return {**order, "argv": order["argv"][: order["head"]]}


def _mark_of_stop() -> tuple[int, int] | None:
    """What tells whether the file is there as it was."""
    try:
        found = os.stat(_STOP)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


class Keeping:
    """One keeper at a time, and the workers that wait for it.

    `fork` starts a process of the warden's own; `adopt` takes a worker that came from the keeper, or hears why it did not come;
    `fall_back` starts fresh workers; `report` tells the agent.
    """

    def __init__(
        self,
        poll: select.poll,
        fork: Callable[[dict[str, Any], list[int]], int],
        adopt: Callable[[int, int, _socket.socket], None],
        fail: Callable[[int, int, str], None],
        fall_back: Callable[[list[dict[str, Any]], list[int]], None],
        report: Callable[..., None],
    ) -> None:
        self._poll, self._fork, self._adopt, self._fail = poll, fork, adopt, fail
        self._fall_back, self._report = fall_back, report
        self._order: dict[str, Any] | None = None
        self._stop_mark = _mark_of_stop()
        self.pid = 0
        self._line: _socket.socket | None = None
        self._is_ready = self._has_hung_up = False
        self._refused = False
        self._losses = 0
        self._waiting: list[_Batch] = []  # the first of them is asked for, if `_is_asked`
        self._is_asked = False
        self.give_up_at = NEVER

    @property
    def is_busy(self) -> bool:
        """Whether workers wait for it."""
        return bool(self._waiting)

    def fileno(self) -> int:
        return -1 if self._line is None else self._line.fileno()

    def keep(self, order: dict[str, Any]) -> None:
        """Have a keeper for this program, folder, environment and these modules. One that was refused is not tried again."""
        if self._order is None or _essence(order) != _essence(self._order):
            self._order, self._refused, self._losses = order, False, 0
            self._start()

    def take(self, requests: list[dict[str, Any]], fds: list[int]) -> bool:
        """Whether the keeper will fork these workers."""
        if self._order is None or self._refused:
            return False
        try:
            self._waiting += _batches(requests, fds)
        except OSError as error:
            self._refuse(f"this process cannot pass their files on: {error}")
            return False
        if not self.pid:
            self._start()
        self._ask_next()
        return True

    def end(self) -> None:
        """Nobody is to be started any more, not even those that it has forked by now; the next group has another keeper."""
        self._let_go()
        for batch in self._waiting:
            batch.close()
        self._waiting.clear()

    # --- the keeper --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._let_go()
        assert self._order is not None
        order = self._order
        if self._stop_mark is None or _mark_of_stop() != self._stop_mark:  # it would run the program
            self._refuse("rallypoint was upgraded, moved or removed since this job began")
            return
        ours, theirs = _socket.socketpair()
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        request = {
            **order,
            "env": {**order["env"], _ENV_KEEPER: f"{_LINE_FD}:{_PACKAGE_ROOT}"},
            "local_rank": -1,
            "fds": [(0, 0), (1, _LINE_FD)],
            "cpus": (),
        }
        try:
            self.pid = self._fork(request, [nothing, theirs.fileno()])
        except OSError as error:
            ours.close()
            self._refuse(f"it could not be started: {error}")
            return
        finally:
            theirs.close()
            os.close(nothing)
        ours.setblocking(False)
        self._line, self._frames, self._queue = ours, FrameReader(ours), FrameQueue(ours)
        self.be_patient()
        self._put((order["modules"],))

    def _put(self, message: tuple[Any, ...], fds: list[int] | None = None) -> None:
        self._queue.put(message, fds)
        self._poll_for_room()

    def _poll_for_room(self) -> None:
        if not self._has_hung_up:
            self._poll.register(self.fileno(), select.POLLIN | (select.POLLOUT if self._queue else 0))

    def _let_go(self) -> None:
        """Of the one that there was. Workers that it was asked for are asked for again."""
        if self._line is not None:
            if not self._has_hung_up:
                self._poll.unregister(self._line.fileno())
            self._queue.clear()
            self._line.close()
            kill_if_allowed(self.pid, _SIGKILL)
        self._line, self.pid, self._is_ready, self._has_hung_up, self.give_up_at = None, 0, False, False, NEVER
        if self._is_asked:
            self._waiting[0].close_words()
            self._is_asked = False

    def _ask_next(self) -> None:
        if not self._waiting or not self._is_ready or self._is_asked:
            return
        self._is_asked, batch = True, self._waiting[0]
        requests: list[dict[str, Any]] = []
        fds: list[int] = []
        try:
            for fd in batch.fds:
                fds.append(os.dup(fd))
            for request in batch.requests:
                ours, theirs = _socket.socketpair()
                batch.words[request["local_rank"]] = ours
                requests.append({**request, "word": len(fds)})
                fds.append(theirs.detach())
        except OSError as error:
            for fd in fds:
                os.close(fd)
            self._refuse(f"this process cannot pass their files on: {error}")
            return
        self.be_patient()
        self._put((requests, os.getpid()), fds)

    def be_patient(self) -> None:
        """Its time begins now, if it owes us something."""
        if self._line is not None and not self._is_ready:
            self.give_up_at = time.monotonic() + IMPORT_TIMEOUT_S
        elif self._is_asked:
            self.give_up_at = time.monotonic() + ANSWER_TIMEOUT_S

    # --- what comes of it --------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Take in what it says; that it is gone shows when it is reaped."""
        if self._line is None or self._has_hung_up:
            return
        self._queue.flush()
        self._poll_for_room()
        try:
            while self._line is not None and (frame := self._frames.read()) is not None:
                self._hear(*frame[0])
        except EOFError:
            self._poll.unregister(self.fileno())
            self._has_hung_up = True

    def _hear(self, kind: str, *said: Any) -> None:
        if kind == "ready":
            self._is_ready, self.give_up_at = True, NEVER
            self._report("kept", "ready", f"{said[0]:.2f} s")
            self._ask_next()
        elif kind == "forked":
            self._note_forked(*said)
        elif kind == "stale":
            self._report("kept", "rebuilt", f"{said[0]} has changed")
            self._start()
        else:
            self._refuse(*said)

    def _note_forked(self, started: list[tuple[int, int]], failed: list[tuple[int, int, str]]) -> None:
        """Give each worker its word to go on; it is told why one does not through the same line."""
        batch = self._waiting.pop(0)
        self._is_asked, self._losses, self.give_up_at = False, 0, NEVER
        words, batch.words = batch.words, {}
        batch.close()
        for local_rank, pid in started:
            self._adopt(local_rank, pid, words.pop(local_rank))
        for local_rank, errno, why in failed:
            words.pop(local_rank).close()
            self._fail(local_rank, errno, why)
        self._ask_next()

    def _refuse(self, why: str, module: str = "") -> None:
        self._let_go()
        self._refused = True
        self._report("kept", "refused", why, module)
        self._start_fresh()

    def _start_fresh(self) -> None:
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            self._fall_back(batch.requests, batch.fds)
            batch.close()

    def look(self) -> None:
        """It may have had time enough."""
        if time.monotonic() >= self.give_up_at:
            what = f"answer within {ANSWER_TIMEOUT_S:g} s" if self._is_ready else f"finish within {IMPORT_TIMEOUT_S:g} s"
            self._refuse(f"the process that imports them did not {what}")

    def note_end(self, exitcode: int) -> None:
        """It has ended. What it said before that counts."""
        pid = self.pid
        self.listen()
        if self.pid != pid:
            return
        self._losses += 1
        self._let_go()
        how = f"exit code {exitcode}" if exitcode >= 0 else f"signal {-exitcode}"
        if self._losses >= MOST_LOSSES:
            self._refuse(f"the process that imports them ended {self._losses} times, the last time with {how}")
        else:
            self._report("kept", "rebuilt", f"it ended with {how}")
            self._start()
