"""The release before this one, taken from the repository's own history, to be measured side by side with the present code.

It is unpacked into build/ and run by the same interpreter with the same packages: in the search path its source stands where ours
does. So all that differs is the code.
"""

from __future__ import annotations

import functools
import io
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.contestants import PREDECESSOR, RALLYRUN, Contestant, launcher, launchers

__all__ = ["launchers_and_predecessor", "predecessor", "why_not"]

COMMIT = "e625916"  # of 0.1.0
REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src"
PLACE = REPOSITORY / "build" / PREDECESSOR
SCRIPT = """#!{python}
import sys
sys.path = [{old!r} if path == {new!r} else path for path in sys.path]
from rallypoint.__main__ import rallyrun
sys.exit(rallyrun())
"""


def launchers_and_predecessor() -> list[Contestant]:
    """Ours, the one before it where it can be had, and torchrun where it is installed."""
    ours, *others = launchers()
    return [ours, *predecessor(), *others]


def predecessor() -> list[Contestant]:
    """One contestant, or none."""
    return [] if why_not() else [launcher(PREDECESSOR, PLACE / RALLYRUN)]


@functools.cache
def why_not() -> str:
    """Make it ready; why it cannot take part, or nothing."""
    if not (PLACE / "src").exists():
        try:
            command = ["git", "-C", str(REPOSITORY), "archive", COMMIT, "src"]
            archive = subprocess.run(command, check=True, capture_output=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return f"commit {COMMIT} is not in the history here"
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(PLACE)
    _write_script(PLACE / RALLYRUN)
    return "" if str(SOURCE) in sys.path else f"rallypoint is not installed from {SOURCE}"


def _write_script(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_text(SCRIPT.format(python=sys.executable, old=str(PLACE / "src"), new=str(SOURCE)))
    new.chmod(0o755)
    new.rename(path)
