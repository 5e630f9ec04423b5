"""How the end of a job is told to the agent and to the user."""

from __future__ import annotations

from rallypoint.errors import (
    JobFailedError,
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
    UsageError,
)
from rallypoint.protocol import verdict
from rallypoint.protocol.job_records import Closed
from rallypoint.protocol.news import Ended, Refused, TimedOut

__all__ = ["error", "for_who_waits"]


def error(closed: Closed) -> Exception | None:
    """What to raise at the end of a run that the job has ended."""
    if closed.kind == "finished":
        return None
    if closed.kind != "failed":
        return RendezvousClosedError(f"the job has ended: {closed.why}")
    found = _verdict(closed)
    lines = verdict.explain(found) if found else []
    cause = found.cause if found else None
    return JobFailedError(closed.why, lines, cause.exitcode if cause else None, cause.rank if cause else None)


def for_who_waits(why: Ended | Refused | TimedOut, run_id: str) -> Exception:
    """What to raise for a node that waits for the next generation, which will not have it."""
    match why:
        case Ended(closed):
            return _ended(closed)
        case Refused(reason):
            return UsageError(f"this node may not join the job: {reason}")
        case TimedOut(reason):
            return RendezvousTimeoutError(f"run {run_id!r}: {reason}; see join_timeout in --rdzv-conf")


def _ended(closed: Closed) -> Exception:
    if closed.kind == "finished":
        return RendezvousGracefulExitError("the job has finished without it")
    return error(closed) or RendezvousClosedError(f"the job has ended: {closed.why}")


def _verdict(closed: Closed) -> verdict.Verdict | None:
    if closed.verdict is None:
        return None
    try:
        return verdict.decode(closed.verdict)
    except ValueError:
        return None
