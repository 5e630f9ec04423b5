"""The commands ``rallyrun`` and ``rallypoint``, and ``python -m rallypoint``.

Two things happen before anything else is imported. Ctrl-C gets an end without a traceback: from here on there is no moment at
which it would show one. And the warden is started, so that it is ready when the first worker is wanted.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal  # a part of every interpreter; signal itself takes milliseconds to import, in which Ctrl-C shows a traceback

__all__ = ["main", "rallyrun"]

_OWN_FILES = "/proc/self/fd"
_ANSWERED_AT_ONCE = ("--help", "-h", "--version")


def rallyrun() -> int:
    """``rallyrun FLAGS script.py ARGUMENTS``."""
    _prepare(sys.argv[1:])
    from rallypoint.cli import main as cli

    return _leave(cli.main(sys.argv[1:]))


def main() -> int:
    """``rallypoint COMMAND``; ``rallypoint run`` is ``rallyrun``."""
    _prepare(sys.argv[2:] if sys.argv[1:2] == ["run"] else [])
    from rallypoint.cli import main as cli

    return _leave(cli.rallypoint_main(sys.argv[1:]))


def _leave(code: int) -> int:
    """The exit code; but where a thread of ours hangs in a write, as the interpreter's own end would, the end itself.

    At its end the interpreter looks for cycles among all objects, twice, which takes longer than all else that it does then.
    There is nothing to be found that the kernel would not free, so it is told not to look at what is there by now.
    """
    import gc

    from rallypoint.base import outbox

    if outbox.is_busy() and not outbox.flush(0.2):
        os._exit(code)
    gc.freeze()
    return code


def _prepare(run_arguments: list[str]) -> None:
    if sys.platform != "linux":
        sys.exit(f"rallypoint needs Linux 5.4 or newer: it relies on pidfds and subreapers, which {sys.platform} does not have")
    _die_quietly_of_interrupts()
    _open_standard_streams()
    if run_arguments and run_arguments[0] not in _ANSWERED_AT_ONCE:
        if not os.path.exists(_OWN_FILES):
            os.write(2, b"rallyrun: error: /proc is not mounted here, and no worker can be watched without it\n")
            sys.exit(2)
        from rallypoint.processes.warden_start import start_warden

        try:
            started = start_warden()
        except OSError:  # it is tried again when a worker is wanted, where it can be told why
            return
        from rallypoint.processes import warden_client

        warden_client.prepare(*started)


def _open_standard_streams() -> None:
    """A stream that was closed on us becomes /dev/null, so that no other file of ours gets its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _die_quietly_of_interrupts() -> None:
    if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
        _signal.signal(_signal.SIGINT, lambda *_: os._exit(128 + _signal.SIGINT))


if __name__ == "__main__":
    sys.exit(main())
