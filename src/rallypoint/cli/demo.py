"""The command ``rallypoint demo``: a job that is hurt on purpose, three times, and goes on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

from rallypoint.cli.main import print_text
from rallypoint.errors import ExitCode

__all__ = ["USAGE", "demo_main"]

USAGE = """\
usage: rallypoint demo

Run a small job three times on this machine, hurt it each time, and watch it go on: a worker is killed, a worker hangs, a node is
lost. It takes under 20 seconds and leaves nothing behind.

  --help      show this help and exit"""

NEXT = """
next: rallyrun --standalone --nproc-per-node 2 YOUR_SCRIPT.py
      rallyrun --help
      rallypoint --help
"""


def demo_main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    if any(word in ("-h", "--help") for word in argv):
        return print_text(USAGE)
    if argv:
        print(f"rallypoint demo: error: it takes no arguments, not {argv[0]!r}", file=sys.stderr)
        return ExitCode.USAGE
    from rallypoint.demo import scenes

    try:
        for number, title in enumerate(scenes.TITLES):
            _say(f"{chr(10) * bool(number)}{number + 1}. {title}\n")
            scenes.play(number, _Clock().say)
    except scenes.DemoFailed as error:
        print(f"rallypoint demo: error: {error}", file=sys.stderr)
        return ExitCode.WORKER_FAILED
    except KeyboardInterrupt:
        return 128 + 2
    _say(NEXT)
    return ExitCode.SUCCESS


class _Clock:
    """Lines with the time since the first; they come from several threads."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        with self._lock:
            _say(f"  {time.monotonic() - self._began_at:5.2f} s  {text}\n")


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
