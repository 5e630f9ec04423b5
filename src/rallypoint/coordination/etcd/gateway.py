"""Questions to an etcd cluster: each goes to one endpoint after the other until one answers.

A question that must not be done twice is not asked again once it was sent; and before it is sent to an endpoint that has not
been heard of for a second, that one is asked how it is.
"""

from __future__ import annotations

from rallypoint.base.backoff import Backoff
from rallypoint.base.records import Value
from rallypoint.coordination.engine import CoordinationError, RefusedError, UnreachableError
from rallypoint.coordination.etcd.codec import encode
from rallypoint.coordination.etcd.errors import EtcdError, Failure, TokenRefused, refusal, summary
from rallypoint.coordination.etcd.http import Interrupted, is_set
from rallypoint.coordination.etcd.talk import PATIENCE_S, Answer, EtcdCluster, Talk
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from rallypoint.coordination.etcd.codec import Fields

    Result = TypeVar("Result")
    Attempt = Callable[[int, float], Result]  # with an endpoint, until a time

__all__ = ["Caller", "Stream"]

LEAST_TRY_S = 0.3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5
TOKENS_PER_CALL = 2


class Stream(Value):
    """An answer that does not end: its first line, and the talk in which the others come."""

    first: Fields
    talk: Talk


class Caller:
    """One thread's way to the cluster; it keeps its latest connection. `interrupt` ends whatever it is doing."""

    def __init__(self, cluster: EtcdCluster, interrupt: WakeFd | None = None) -> None:
        self._cluster = cluster
        self._clock = cluster.clock
        self._interrupt = interrupt
        self._talk: Talk | None = None

    def call(
        self, path: str, question: Fields, deadline: float, *, is_repeatable: bool = True, patience_s: float = PATIENCE_S
    ) -> Answer:
        """The answer; EtcdError where that is a refusal. With `is_repeatable` it may be done more than once.

        An endpoint that has not answered after `patience_s` is asked how it is.

        UnreachableError where nobody answers until `deadline`, RefusedError and StoreGoneError where nobody ever will.
        """
        body = encode(question)

        def attempt(index: int, limit: float) -> Answer:
            talk = self._talk_with(index, limit)
            if is_repeatable:
                return talk.ask(path, body, limit, patience_s)
            talk.check(limit)
            return talk.ask(path, body, self._cap(deadline), patience_s)

        return self._somewhere(attempt, deadline, is_repeatable)

    def open_stream(self, path: str, question: Fields, deadline: float) -> Stream:
        """An answer that does not end, over a connection of its own."""
        body = encode(question)

        def attempt(index: int, limit: float) -> Stream:
            talk = Talk(self._cluster, index, limit, self._interrupt)
            try:
                talk.authorise(limit)
                return Stream(talk.begin(path, body, limit), talk)
            except BaseException:  # whatever it was, nothing half done may stay; it is raised again
                talk.close()
                raise

        return self._somewhere(attempt, deadline, is_repeatable=True)

    def pause(self, pause_s: float) -> None:
        if is_set(self._interrupt, pause_s):
            raise Interrupted

    def hang_up(self) -> None:
        if self._talk is not None:
            self._talk.close()
            self._talk = None

    # --- one endpoint after the other --------------------------------------------------------------------------------------

    def _somewhere(self, attempt: Attempt[Result], deadline: float, is_repeatable: bool) -> Result:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            failures: list[tuple[str, Failure]] = []
            order = self._cluster.order()
            for place, index in enumerate(order):
                try:
                    result = self._with_token(attempt, index, self._share(deadline, len(order) - place))
                except Failure as failure:
                    self._cluster.suspect(index)
                    failures.append((self._cluster.names[index], failure))
                    if failure.may_be_done and not is_repeatable:
                        raise UnreachableError(f"{summary(failures[-1:])}; what it was asked for may have been done") from None
                else:
                    self._cluster.adopt(index)
                    return result
            self._give_up_or_pause(summary(failures), deadline, backoff.next_s())

    def _give_up_or_pause(self, verdict: CoordinationError, deadline: float, pause_s: float) -> None:
        left_s = deadline - self._clock()
        if not isinstance(verdict, UnreachableError) or left_s <= FIRST_PAUSE_S:
            raise verdict
        self.pause(min(pause_s, left_s / 2))

    def _share(self, deadline: float, tries: int) -> float:
        """Until when one of so many endpoints may take our time."""
        now = self._clock()
        return min(self._cap(deadline), now + max((deadline - now) / tries, LEAST_TRY_S))

    def _cap(self, deadline: float) -> float:
        return min(deadline, self._clock() + self._cluster.access.read_timeout_s)

    def _with_token(self, attempt: Attempt[Result], index: int, limit: float) -> Result:
        """Tokens run out, at each member by its own clock; so one that is refused is replaced."""
        trouble, user = "", self._cluster.access.user
        for _ in range(TOKENS_PER_CALL):
            token = self._cluster.token
            try:
                return attempt(index, limit)
            except TokenRefused as error:
                self._cluster.forget_token(token)
                trouble = str(error)
            except (EtcdError, RefusedError):
                raise
            except BaseException:  # half an answer is of no use for the next question; it is raised again
                self.hang_up()
                raise
        raise refusal(trouble, user) or RefusedError(f"etcd does not let the user {user!r} in: {trouble}")

    def _talk_with(self, index: int, limit: float) -> Talk:
        """The talk that there is, if it is with that endpoint, or a new one."""
        if self._talk is None or self._talk.index != index or not self._talk.can_ask:
            self.hang_up()
            self._talk = Talk(self._cluster, index, limit, self._interrupt)
            self._cluster.local_address = self._talk.local_address()
        self._talk.authorise(limit)
        return self._talk
