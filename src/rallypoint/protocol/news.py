"""What a node learns from the others that its agent has to act on, or should say.

`News` come from the participant. Whoever drives it adds what the silence of the store means: `Fenced` and `Lost`. What an agent
with workers has to know goes by the same name here and in `agent_machine`.
"""

from __future__ import annotations

from rallypoint.base.records import Value
from rallypoint.protocol import job_records as job
from rallypoint.protocol.agent_machine import Fenced, Regroup

__all__ = ["Ended", "Fenced", "Lost", "News", "Progress", "Refused", "Regroup", "Seated", "TimedOut", "Word"]


class Seated(Value):
    """This node has a seat in a generation, and may start its workers."""

    seat: job.Seat
    generation: job.Generation


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


class Lost(Value):
    """There is no store any more that we could take part in a job through."""

    error: Exception


News = Seated | Regroup | Ended | Refused | TimedOut | Progress
Word = News | Fenced | Lost
