"""A program of its own, which runs a command so that nothing of it is left: ``python leash.py COMMAND...``.

It holds until the command has ended or standard input has: whoever wants the command gone closes that, or dies. Then everything
in the command's group is killed. It imports nothing of ours, and its exit code is the command's.
"""

from __future__ import annotations

import os
import select
import signal
import sys

__all__ = ["hold"]


def hold(command: list[str]) -> int:
    child = os.fork()
    if child == 0:
        _become(command)
    poll = select.poll()
    poll.register(os.pidfd_open(child), select.POLLIN)
    poll.register(0, select.POLLIN)
    poll.poll()
    for kill in (os.kill, os.killpg):  # it may not lead its group yet; as it is not reaped, its number is nobody else's
        try:
            kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _become(command: list[str]) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(hold(sys.argv[1:]))
