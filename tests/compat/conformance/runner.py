"""Run cases of the conformance suite in this process, and print one line of JSON for each.

    python -m tests.compat.conformance.runner SIDE [FAMILY or CASE …]

SIDE is ``torch`` (torch's own code), ``beside`` (rallypoint behind torch's names, with torch in the process) or ``without``
(the same, where there is no torch). What the cases themselves print goes nowhere.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import warnings

from tests.compat.conformance import harness
from tests.compat.conformance.comparing import FAILED

CASE_S = 200.0


def main(side: str, chosen: list[str]) -> None:
    os.environ[harness.SIDE_VARIABLE] = side
    answers = os.fdopen(os.dup(1), "w")
    _silence()
    if side == "torch":
        from tests.compat.make_surface import ensure_etcd

        ensure_etcd()
    else:
        from rallypoint import compat

        if side == "beside":
            import torch  # noqa: F401
        compat.install()
    signal.signal(signal.SIGALRM, _too_long)
    for name, case in harness.load_cases().items():
        if not chosen or name in chosen or name.partition(".")[0] in chosen:
            print(json.dumps(_run(name, case)), file=answers, flush=True)
    answers.flush()
    os._exit(0)  # whatever threads the cases have left


def _silence() -> None:
    """Keep what cases print, and torch's tracebacks, out of the answers and off the console."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    errors = os.environ.get("CONFORMANCE_STDERR")
    os.dup2(nowhere, 1)
    if not errors:
        os.dup2(nowhere, 2)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _too_long(_number: int, _frame: object) -> None:
    raise TimeoutError(f"the case took more than {CASE_S:g} s")


def _run(name: str, case: object) -> dict[str, object]:
    started_at = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, CASE_S)
    try:
        facts = case()  # type: ignore[operator]
    except Exception as error:  # a case that fails on one side is a difference like any other
        facts = {FAILED: {**harness.raised(error), "message": str(error)[:300]}}
        if os.environ.get("CONFORMANCE_STDERR") and os.environ[harness.SIDE_VARIABLE] != "torch":
            import traceback

            traceback.print_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return {"case": name, "facts": facts, "seconds": round(time.monotonic() - started_at, 2)}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
