"""Where an agent can be asked: a socket in the user's runtime folder, which only the same user, and root, can open.

The desk costs a socket and a thread that sleeps. How to answer is loaded when the first one asks (`inspection.answers`), and what
is answered is looked up then: while nobody asks, nothing is kept up to date for it.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator

from rallypoint.base import defaults, environment, report
from rallypoint.errors import RallypointError
from rallypoint.net.private_socket import PrivateSocket, is_from_owner
from rallypoint.net.service_thread import ServiceThread, importing
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.coordination.engine import Coordination
    from rallypoint.inspection.answers import Clerk
    from rallypoint.inspection.log_ends import FindLog
    from rallypoint.inspection.view import NodeView
    from rallypoint.protocol.session import AskedFor

__all__ = ["SUFFIX", "Desk", "runtime_folders"]

SUFFIX = ".sock"
MOST_VISITORS = 64
CLOSING_S = 1.0


def runtime_folders() -> list[str]:
    """Where agents of this user put their sockets, the best first.

    The folder under /tmp comes before XDG_RUNTIME_DIR, because that one is emptied when the user logs out, and jobs go on.
    """
    if own := environment.text(defaults.ENV_RUNTIME_DIR):
        return [own]
    folders = [f"{defaults.TEMPORARY_DIR}/rallypoint-{os.geteuid()}"]
    if session := environment.text(defaults.ENV_XDG_RUNTIME_DIR):
        folders.append(os.path.join(session, "rallypoint"))
    return folders


def is_private(folder: str) -> bool:
    """Whether nobody else can put anything there, or find anything."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _usable_folders() -> Iterator[str]:
    for folder in runtime_folders():
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError:
            continue
        if is_private(folder):
            yield folder


class Desk:
    """One agent's. `look` describes it as it is now, from any thread; `connect` gives a connection to the job's store, if any;
    `find_log` says where a worker writes.

    What is asked of the agent itself is in `take_request`; `fileno` says when there is something.
    """

    def __init__(
        self,
        look: Callable[[], NodeView],
        connect: Callable[[], Coordination | None],
        find_log: FindLog = lambda _rank, _stream: None,
    ) -> None:
        self.look = look
        self.connect = connect
        self.find_log = find_log
        self.visitors = threading.BoundedSemaphore(MOST_VISITORS)
        self.stopped_by = ""  # who has stopped the whole job
        self._requests: deque[str] = deque()
        self._bell = WakeFd()
        self._place: PrivateSocket | None = None
        self._thread: ServiceThread | None = None
        self._clerk: Clerk | None = None
        self._is_closed = False
        self.is_placed = threading.Event()  # it is known where it can be asked, if anywhere

    @property
    def path(self) -> str:
        return self._place.path if self._place is not None else ""

    def open(self) -> None:
        """Listen, soon: whoever opens it does not wait for files. A host that has no place for it gets none. Twice is once."""
        if self._thread is not None or self._is_closed:
            return
        self._thread = ServiceThread("desk", WakeFd(), self._serve, self._let_go, self._let_go_in_child)
        self._thread.start()

    def _find_place(self) -> None:
        for folder in _usable_folders():
            try:
                self._place = PrivateSocket(
                    os.path.join(folder, f"{os.getpid()}-{os.urandom(4).hex()}{SUFFIX}"), "the control socket"
                )
                break
            except (RallypointError, OSError) as error:
                report.debug(str(error))
        if self._place is None:
            report.debug(f"this agent cannot be asked: none of {', '.join(runtime_folders())} is there for this user alone")
        self.is_placed.set()

    def close(self) -> None:
        """Answer no more. Whoever is being answered gets no more than that."""
        self._is_closed = True
        if self._place is not None:
            self._place.remove()
        if self._thread is not None:
            self._thread.stop(CLOSING_S)
        if self._clerk is not None:
            self._clerk.close()
        self._bell.close()

    # --- requests of the agent ---------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._bell.fileno()

    def take_request(self) -> str | None:
        """Why the workers of this node are to be restarted, if somebody asks for that."""
        if not self._requests:
            return None
        self._bell.clear()
        return self._requests.popleft()

    def request_restart(self, why: str) -> None:
        self._requests.append(why)
        self._bell.set()

    # --- for the thread of the rendezvous ----------------------------------------------------------------------------------

    def hear(self, asked: AskedFor) -> None:
        """Somebody asks the job; it is answered by a thread that may take its time."""
        threading.Thread(target=self._answer, args=(asked,), name="rallypoint-answer", daemon=True).start()

    def _answer(self, asked: AskedFor) -> None:
        try:
            self.clerk().fulfil(asked)
        except (RallypointError, OSError, ImportError) as error:
            report.debug(f"what {asked.asked.by} asked for could not be answered: {error}")

    # --- the thread --------------------------------------------------------------------------------------------------------

    def clerk(self) -> Clerk:
        """Who knows how to answer."""
        with importing:
            if self._clerk is None:
                from rallypoint.inspection.answers import Clerk

                self._clerk = Clerk(self)
        return self._clerk

    def _serve(self) -> None:
        thread = self._thread
        assert thread is not None
        self._find_place()
        place = self._place
        poll = select.poll()
        poll.register(thread.wake_fd.fileno(), select.POLLIN)
        if place is not None:
            place.listener.setblocking(False)
            poll.register(place.listener.fileno(), select.POLLIN)
        while not thread.is_ending:
            poll.poll()
            if place is not None and not thread.is_ending:
                self._welcome(place.listener)

    def _welcome(self, listener: socket.socket) -> None:
        try:
            visitor, _ = listener.accept()
        except OSError:
            return
        if not is_from_owner(visitor) or not self.visitors.acquire(blocking=False):
            visitor.close()
            return
        visitor.setblocking(True)
        threading.Thread(target=self._attend, args=(visitor,), name="rallypoint-visitor", daemon=True).start()

    def _attend(self, visitor: socket.socket) -> None:
        try:
            with visitor:
                self.clerk().converse(visitor)
        except (OSError, ImportError) as error:  # it has gone; or rallypoint was moved under the job
            report.debug(f"a question to this agent was not answered: {error}")
        finally:
            self.visitors.release()

    def _let_go(self) -> None:
        if self._place is not None:
            self._place.remove()
            self._place.listener.close()

    def _let_go_in_child(self) -> None:
        if self._place is not None:
            self._place.listener.close()
