"""A generation under construction: which operations come next, until the last one makes it count.

    clear what an earlier attempt may have left  →  seats, 100 at a time  →  the generation itself

Only the last step can be seen by the other nodes. It also clears away what belonged to earlier generations.
"""

from __future__ import annotations

from rallypoint.core import job_records as job
from rallypoint.core.coordination import Delete, Operation, Put
from rallypoint.core.generation import Form
from rallypoint.core.restarts import Purse
from rallypoint.core.seating import seats

__all__ = ["SEATS_PER_TRANSACTION", "Forming"]

SEATS_PER_TRANSACTION = 100
OLD = ("up/failures/", "up/done/", "up/left/", "down/signal/", "down/expelled/", job.DATA)


class Forming:
    """The steps of one attempt; `advance` after each that succeeded."""

    def __init__(
        self, number: int, attempt: int, form: Form, purse: Purse, why: str, strikes: tuple[str, ...] = ()
    ) -> None:
        self.number = number
        self._seats = seats(number, attempt, form.order)
        self._step = 0
        first = form.order[0].record
        world_size = sum(one.record.workers for one in form.order)
        self._generation = job.Generation(
            number, attempt, len(form.order), world_size, first.address, first.port, why, purse, strikes
        )  # fmt: skip

    def operations(self) -> list[Operation]:
        """What the next transaction has to do."""
        number, attempt = self.number, self._generation.attempt
        if self._step == 0:
            return [Delete(job.seats_of_generation(number), is_prefix=True)]
        begin = (self._step - 1) * SEATS_PER_TRANSACTION
        part = list(self._seats.items())[begin : begin + SEATS_PER_TRANSACTION]
        if part:
            return [Put(job.seat_key(number, attempt, node_id), job.encode(seat)) for node_id, seat in part]
        clear = [Delete(prefix, is_prefix=True) for prefix in (*OLD, job.seats_of_generation(number - 1))]
        return [Put(job.GENERATION, job.encode(self._generation)), *clear]

    def advance(self) -> bool:
        """A step succeeded; whether it was the last."""
        is_last = (self._step - 1) * SEATS_PER_TRANSACTION >= len(self._seats)
        self._step += 1
        return is_last

    def members(self) -> tuple[list[job.Seat], list[str]]:
        return list(self._seats.values()), list(self._seats)
