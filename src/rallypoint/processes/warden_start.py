"""Starting a warden, as early and as cheaply as can be: this is the first thing that the command line does.

It needs a few milliseconds to be ready. They cost nothing if they pass while this process imports the rest of itself, so this
module imports nothing that is not there in a bare interpreter.
"""

from __future__ import annotations

import _socket  # all that is needed of socket, which takes 4 ms to import
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # what signal is made of, without its enums

__all__ = ["start_warden"]

_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from rallypoint.processes.warden import main; main()"
_SECRETS = ("RALLYPOINT_SECRET", "PET_NOTIFY")  # for agents only; defaults.ENV_SECRETS is not imported yet
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def start_warden() -> tuple[_socket.socket, int]:
    """Start a warden and give the line to it, and its process id; requests wait in the line until it is ready.

    It runs in our interpreter without site-packages, so it is told where the package is. The signals of Ctrl-Z wait for it too;
    but for the first moment it is in our process group, where the terminal stops it with us, and nobody would continue it.
    """
    ours, theirs = _socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    command = [sys.executable, "-S", "-I", "-c", _PROGRAM, _PACKAGE_ROOT, str(theirs.fileno()), str(os.getpid())]
    env = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    try:
        blocked = {*signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.SIGTSTP, signal.SIGCONT}
        pid = os.posix_spawn(sys.executable, command, env, setsid=True, setsigmask=blocked)
        os.kill(pid, signal.SIGCONT)  # takes back a stop that waits for it
        return ours, pid
    finally:
        theirs.close()
