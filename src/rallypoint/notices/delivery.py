"""One attempt to tell somebody: a POST, or a command that gets the document on its stdin.

Each is made in a thread that may hang alone. A command runs in a session of its own, dies with that thread and so with the
launcher, and does not find the job's secrets in its environment.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from subprocess import DEVNULL, Popen
from threading import Lock

from rallypoint.base import defaults, environment
from rallypoint.base.json_text import clip
from rallypoint.notices.rules import Attempt, Command, Target, Webhook, after_exit, after_status
from rallypoint.processes.kernel import kill_if_allowed

TYPE_CHECKING = False
if TYPE_CHECKING:
    import http.client
    from io import BufferedRandom

__all__ = ["Running", "attempt"]

_PROGRAM = """import os, sys
sys.path.insert(0, sys.argv[1])
from rallypoint.processes.kernel import die_with_parent
die_with_parent()
if os.getppid() == int(sys.argv[2]):
    try:
        os.execvp(sys.argv[3], sys.argv[3:])
    except OSError as error:
        sys.exit(f"{sys.argv[3]}: {error.strerror}")
"""
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LAST_LINE_BYTES = 2_000


def attempt(target: Target, body: str, timeout_s: float, begun: Callable[[Running | None], object]) -> Attempt:
    """What came of one attempt. `begun` is told of a command that runs, and of None once there is nothing left of it."""
    match target:
        case Webhook():
            return _post(target, body, timeout_s)
        case Command(argv):
            return _run(argv, body, timeout_s, begun)


def _post(target: Webhook, body: str, timeout_s: float) -> Attempt:
    """What is not answered in time may have been taken. Proxies are those of the environment; nobody is followed elsewhere."""
    from urllib.error import HTTPError, URLError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class Stay(HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    from rallypoint import __version__

    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": f"rallypoint/{__version__}", **_login(target)}
    request = Request(target.url, body.encode(), headers, method="POST")
    try:
        with build_opener(Stay).open(request, timeout=timeout_s) as answer:
            return _after(answer)
    except HTTPError as answer:
        with answer:
            return after_status(answer.code, clip(answer.reason, 100))
    except URLError as error:  # it was not sent, or not whole
        return Attempt(f"it cannot be reached: {clip(str(error.reason), 400, 200)}", may_retry=True)
    except TimeoutError:
        return Attempt(f"it took it, but gave no answer within {timeout_s:g} s")
    except Exception as error:  # whatever a server answers that is no HTTP; not with the address, which may be in its words
        return Attempt(f"it gave no proper answer: {type(error).__name__}", may_retry=isinstance(error, ConnectionError))


def _after(answer: http.client.HTTPResponse) -> Attempt:
    return after_status(answer.status, clip(answer.reason, 100))


def _login(target: Webhook) -> dict[str, str]:
    if not target.login:
        return {}
    from base64 import b64encode
    from urllib.parse import unquote

    return {"Authorization": f"Basic {b64encode(unquote(target.login).encode()).decode()}"}


def _run(argv: tuple[str, ...], body: str, timeout_s: float, begun: Callable[[Running | None], object]) -> Attempt:
    command = [sys.executable, "-S", "-I", "-c", _PROGRAM, _PACKAGE_ROOT, str(os.getpid()), *argv]
    env = {name: value for name, value in environment.own.items() if name not in defaults.ENV_SECRETS}
    with _memory("notice") as given, _memory("errors") as said:
        given.write(body.encode())
        given.seek(0)
        try:
            process = Popen(command, env=env, stdin=given, stdout=DEVNULL, stderr=said, start_new_session=True)
        except OSError as error:
            return Attempt(f"it cannot be started: {error.strerror}", may_retry=True)
        running = Running(process)
        begun(running)
        is_over = running.wait(timeout_s)
        code = running.end()
        begun(None)
        if not is_over:
            return Attempt(f"it ran for over {timeout_s:g} s and was killed")
        return after_exit(code, _last_line(said.fileno()))


def _memory(name: str) -> BufferedRandom:
    return os.fdopen(os.memfd_create(f"rallypoint-{name}"), "w+b")


class Running:
    """A command that leads a session. It is reaped only once the rest of its session is killed, so no stranger can be hit."""

    def __init__(self, process: Popen[bytes]) -> None:
        self._process = process
        self._lock = Lock()
        self._is_reaped = False

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended by then."""
        try:
            pidfd = os.pidfd_open(self._process.pid)
        except ProcessLookupError:  # as process 1 we have a thread that reaps whatever ends
            return True
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(timeout_s * 1000))
        finally:
            os.close(pidfd)

    def kill(self) -> None:
        """With all that it has started, except what has left its session."""
        with self._lock:
            if not self._is_reaped:
                kill_if_allowed(-self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Its exit code; nothing of it is left."""
        self.kill()
        code = self._process.wait()
        with self._lock:
            self._is_reaped = True
        return code


def _last_line(fd: int) -> str:
    start = max(0, os.fstat(fd).st_size - _LAST_LINE_BYTES)
    lines = os.pread(fd, _LAST_LINE_BYTES, start).decode(errors="replace").strip().splitlines()
    return clip(lines[-1], 400, 200) if lines else ""
