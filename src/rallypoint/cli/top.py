"""The command ``rallypoint top``: a live screen of a job. Textual draws it, and is imported here only."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rallypoint.base import defaults, environment
from rallypoint.base.json_text import clip
from rallypoint.cli.main import print_text
from rallypoint.errors import ExitCode, RallypointError, UsageError

__all__ = ["USAGE", "top_main"]

DUMB = ("", "dumb", "unknown")
USAGE = """\
usage: rallypoint top [JOB]

Watch a job on all of its nodes, live: ranks, steps, rates, memory, logs, restarts; and stop, drain or restart it by a key.
JOB is the job's ID, the beginning of it, or the process ID of its launcher; it can be left out where one job runs.
It needs Textual: pip install 'rallypoint[tui]'

  --help      show this help and exit"""


def top_main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    if any(word in ("-h", "--help") for word in argv):
        return print_text(USAGE)
    try:
        if said := _watch(argv):
            print_text(said)
        return ExitCode.SUCCESS
    except RallypointError as error:
        print(f"rallypoint top: error: {clip(str(error), 10_000)}", file=sys.stderr)
        return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.WORKER_FAILED


def _watch(argv: Sequence[str]) -> str:
    """Show it until the user has seen enough, or it has ended: then the last words about it."""
    if len(argv) > 1 or any(word.startswith("-") for word in argv):
        raise UsageError(USAGE.partition("\n")[0])
    kind, is_terminal = environment.text(defaults.ENV_TERM), all(map(os.isatty, (0, 1, 2)))
    if kind in DUMB or not is_terminal:
        where = f"a terminal of the kind {kind or 'unknown'!r}" if is_terminal else "what is no terminal"
        raise UsageError(f"it cannot draw on {where}; `rallypoint status` prints how a job stands")
    try:
        from rallypoint.tui.app import TopApp
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("textual", "rich"):
            raise
        raise UsageError("it needs Textual, which is not installed: pip install 'rallypoint[tui]'") from None
    from rallypoint.tui.model import Watch
    from rallypoint.tui.source import JobSource

    source = JobSource(argv[0] if argv else "")
    first = source.look(Watch(""))
    if first.trouble:
        raise UsageError(first.trouble)
    return TopApp(source, first).run(mouse=True) or ""
