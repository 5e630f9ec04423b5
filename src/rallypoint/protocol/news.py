"""What a node learns from the others that its agent has to act on, or should say."""

from __future__ import annotations

from rallypoint.base.records import Value
from rallypoint.protocol import job_records as job

__all__ = ["Ended", "News", "Progress", "Refused", "Seated", "Stop", "TimedOut"]


class Seated(Value):
    """This node has a seat in a generation, and may start its workers."""

    seat: job.Seat
    generation: job.Generation


class Stop(Value):
    """The generation in which this node has a seat is over; its workers have to go, and a new one will come."""

    generation: int
    signal: job.Signal


class Ended(Value):
    """The job is over."""

    closed: job.Closed


class Refused(Value):
    """This node may not take part, ever."""

    why: str


class TimedOut(Value):
    why: str


class Progress(Value):
    text: str


News = Seated | Stop | Ended | Refused | TimedOut | Progress
