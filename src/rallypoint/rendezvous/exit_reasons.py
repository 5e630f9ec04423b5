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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.protocol.agent_machine import How

__all__ = ["error", "how", "refused", "timed_out", "while_waiting"]


def how(closed: Closed) -> How:
    """What it means for a node that runs workers."""
    return {"finished": "succeeded", "failed": "failed", "host_left": "failed"}.get(closed.kind, "closed")  # type: ignore[return-value]


def error(closed: Closed | None) -> Exception | None:
    """What to raise at the end of a run that the job has ended."""
    if closed is None or closed.kind == "finished":
        return None
    if closed.kind != "failed":
        return RendezvousClosedError(f"the job has ended: {closed.why}")
    found = _verdict(closed)
    lines = verdict.explain(found) if found else []
    cause = found.cause if found else None
    return JobFailedError(closed.why, lines, cause.exitcode if cause else None, cause.rank if cause else None)


def while_waiting(closed: Closed) -> Exception:
    """What to raise for a node that waits for the next generation."""
    if closed.kind == "finished":
        return RendezvousGracefulExitError("the job has finished without it")
    return error(closed) or RendezvousClosedError(f"the job has ended: {closed.why}")


def refused(why: str) -> Exception:
    return UsageError(f"this node may not join the job: {why}")


def timed_out(why: str, run_id: str) -> Exception:
    return RendezvousTimeoutError(f"run {run_id!r}: {why}; see join_timeout in --rdzv-conf")


def _verdict(closed: Closed) -> verdict.Verdict | None:
    if closed.verdict is None:
        return None
    try:
        return verdict.decode(closed.verdict)
    except ValueError:
        return None
