"""One connection to one endpoint of an etcd cluster, and the patience that a question there deserves.

An endpoint that takes a question and is silent may be a paused process, a machine cut off, or a member whose leader has just
died. So whoever has waited a little asks the same endpoint how it is, over another connection. If it does not say, it is given
up. If it says that the leader has changed meanwhile, the answer will not come: etcd has lost the question.

What all connections of one client know about the cluster: which endpoint serves, who we are there, and which cluster it is.
"""

from __future__ import annotations

import math
import random
import threading
import time
from contextlib import closing

from rallypoint.base.records import Value
from rallypoint.coordination.engine import RefusedError
from rallypoint.coordination.etcd.access import EtcdAccess, tls_context
from rallypoint.coordination.etcd.codec import Malformed, encode, number
from rallypoint.coordination.etcd.errors import (
    NOT_ETCD,
    EtcdError,
    Failure,
    TokenRefused,
    check_answer,
    check_not_cancelled,
    explain_hang_up,
    explain_not_found,
    failure_of,
    is_hang_up,
)
from rallypoint.coordination.etcd.http import HttpConnection, NotHttp
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rallypoint.coordination.etcd.codec import Fields

    Clock = Callable[[], float]

__all__ = ["PATIENCE_S", "STATUS", "Answer", "EtcdCluster", "Talk"]


# --- etcd cluster ----------------------------------------------------------------------------------------------------------


class EtcdCluster:
    """Used by all threads of one client. `home` is the endpoint that serves it; the first is drawn, so that clients spread."""

    def __init__(self, access: EtcdAccess, clock: Clock = time.monotonic) -> None:
        if not access.endpoints:
            raise ValueError("an etcd cluster needs at least one endpoint")
        self.access = access
        self.clock = clock
        self.names = access.names()
        self.home = random.randrange(len(access.endpoints))
        self.id = 0  # of the cluster; 0 until it has answered
        self.local_address = ""
        self.token: str | None = None  # stands for user and password; "" where the cluster asks for none
        self.on_move: Callable[[], None] = lambda: None  # called, from any thread, when the home is another one
        self._lock = threading.Lock()
        self._suspects: set[int] = set()  # endpoints that were of no use when they were asked last
        self._tls = tls_context(access)

    def order(self) -> list[int]:
        """All endpoints, in the order in which to try them: the home first, and those that were of no use last."""
        count, suspects = len(self.names), frozenset(self._suspects)
        return sorted(range(count), key=lambda index: (index in suspects, (index - self.home) % count))

    def open(self, index: int, deadline: float, interrupt: WakeFd | None) -> HttpConnection:
        """A new connection to one endpoint."""
        return HttpConnection(self.access.endpoints[index], self._tls, deadline, interrupt, self.clock)

    def adopt(self, index: int) -> None:
        """This endpoint has served us, after those before it in the order did not."""
        with self._lock:
            self._suspects.discard(index)
            has_moved, self.home = self.home != index, index
        if has_moved:
            self.on_move()

    def suspect(self, index: int) -> None:
        """This endpoint was of no use."""
        with self._lock:
            self._suspects.add(index)

    def forget_token(self, token: str | None) -> None:
        """It was refused; whoever needs one asks for another."""
        with self._lock:
            if self.token == token:
                self.token = None

    def check_id(self, answer: Fields) -> None:
        """There is one cluster, the one that has answered first."""
        header = answer.get("header")
        found = number(header, "cluster_id") if type(header) is dict else 0
        with self._lock:
            self.id = self.id or found
        if found not in (0, self.id):
            raise Failure("another etcd cluster answers there", is_final=True, is_other_cluster=True)


# --- etcd talk -------------------------------------------------------------------------------------------------------------


STATUS, AUTHENTICATE = "/v3/maintenance/status", "/v3/auth/authenticate"
# etcd refuses at once what it could not do without a leader.
HEADERS = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
FRESH_S = 1.0  # whoever has answered so lately is there
CHECK_S = 1.0  # how long an endpoint may take to say how it is
PATIENCE_S = 0.5  # after which one that does not answer is asked
PROBE_PATIENCES = 3  # how much longer it may take to say so, with all that a new connection takes
HTTP_OK, HTTP_NOT_FOUND = 200, 404


class Answer(Value):
    """What an endpoint said, and when that was sent which it answers."""

    fields: Fields
    sent_at: float


class Talk:
    """A connection, opened when it is made. Whatever is wrong with the endpoint is a Failure."""

    def __init__(self, cluster: EtcdCluster, index: int, limit: float, interrupt: WakeFd | None) -> None:
        self.index = index
        self._cluster = cluster
        self._interrupt = interrupt
        self._clock = cluster.clock
        self._heard_at = 0.0
        self._term = 0  # of the cluster's leader, as we heard last
        try:
            self._connection = cluster.open(index, limit, interrupt)
        except OSError as error:
            raise self._failure_of(error) from None

    @property
    def can_ask(self) -> bool:
        return self._connection.can_ask

    def close(self) -> None:
        self._connection.close()

    def local_address(self) -> str:
        return self._connection.local_address()

    def interrupt_by(self, wake_fd: WakeFd | None) -> None:
        self._interrupt = wake_fd
        self._connection.interrupt_by(wake_fd)

    # --- questions ---------------------------------------------------------------------------------------------------------

    def ask(self, path: str, body: bytes, limit: float, patience_s: float = PATIENCE_S) -> Answer:
        """EtcdError if etcd will not, TokenRefused if it wants to know again who we are."""
        sent_at = self._clock()
        self._send(path, body, limit)
        try:
            self._wait(limit, math.inf if path == STATUS else patience_s)
            status, raw = self._connection.read_answer(limit)
        except (OSError, NotHttp) as error:
            failure = self._failure_of(error)
            failure.may_be_done = not failure.is_final
            raise failure from None
        return Answer(self._heard(status, raw, limit), sent_at)

    def authorise(self, limit: float) -> None:
        """Get the token that stands for user and password, if we are to have one and have none yet."""
        access = self._cluster.access
        if access.user is None or self._cluster.token is not None:
            return
        try:
            answer = self.ask(AUTHENTICATE, encode({"name": access.user, "password": access.password or ""}), limit)
            self._cluster.token = str(answer.fields.get("token", ""))
        except EtcdError as error:
            if "not enabled" not in str(error):
                raise RefusedError(f"etcd does not let the user {access.user!r} in: {error}") from None
            self._cluster.token = ""  # who we are is of no interest there
        except Failure as failure:
            failure.may_be_done = False  # what we really want was not asked for
            raise

    def check(self, limit: float) -> None:
        """Failure if nothing was heard of this endpoint of late, and it does not say now how it is."""
        now = self._clock()
        if now <= self._heard_at + FRESH_S:
            return
        try:
            self.ask(STATUS, b"{}", min(limit, now + CHECK_S))
        except Failure as failure:
            failure.may_be_done = False
            raise
        except (EtcdError, RefusedError):  # it may not tell us, but it is there
            return

    # --- streams -----------------------------------------------------------------------------------------------------------

    def begin(self, path: str, body: bytes, limit: float) -> Fields:
        """The first line of an answer that does not end."""
        self._send(path, body, limit)
        try:
            status = self._connection.read_head(limit)
            line = self._connection.read_line(limit)
        except (OSError, NotHttp) as error:
            raise self._failure_of(error) from None
        fields = self._heard(status, line, limit)
        check_not_cancelled(fields, self._cluster.access.user)
        return fields

    def go_on(self, deadline: float) -> Fields:
        """Its next line."""
        try:
            line = self._connection.read_line(deadline)
        except (OSError, NotHttp) as error:
            raise failure_of(error) from None
        if not line:
            raise Failure("it has ended its answer")
        return self._heard(HTTP_OK, line, deadline)

    # --- pieces ------------------------------------------------------------------------------------------------------------

    def _send(self, path: str, body: bytes, limit: float) -> None:
        """What fails here has not been done: a question of which a part is missing is none."""
        token = self._cluster.token
        try:
            self._connection.ask("POST", path, {**HEADERS, "Authorization": token} if token else HEADERS, body, limit)
        except OSError as error:
            raise failure_of(error) from None

    def _failure_of(self, error: OSError | NotHttp) -> Failure:
        if self._heard_at or not isinstance(error, OSError) or not is_hang_up(error):
            return failure_of(error)
        access, limit = self._cluster.access, self._clock() + CHECK_S
        return explain_hang_up(error, access.endpoints[self.index], access.protocol == "https", limit, self._interrupt)

    def _heard(self, status: int, raw: bytes, limit: float) -> Fields:
        if status == HTTP_NOT_FOUND and not raw.startswith(b"{"):
            raise explain_not_found(self._connection, limit)
        fields = check_answer(status, raw, self._cluster.access.user)
        try:
            self._cluster.check_id(fields)
            self._heard_at, self._term = self._clock(), number(fields["header"], "raft_term")
        except Malformed:
            raise Failure(NOT_ETCD, is_final=True) from None
        return fields

    def _wait(self, limit: float, patience_s: float) -> None:
        """Until the answer begins to come; Failure when there is reason to think that it will not."""
        term, changes = self._term, 0
        while not self._connection.has_answer(min(limit, self._clock() + patience_s)):
            if self._clock() >= limit:
                raise Failure("it does not answer in time", may_be_done=True)
            now_term = self._ask_term(self._clock() + PROBE_PATIENCES * patience_s)
            term = term or now_term
            changes += now_term > term
            if changes > 1:  # seen twice, so that the answer had the time to come after the change
                raise Failure("its leader has changed, and it does not answer", may_be_done=True)

    def _ask_term(self, limit: float) -> int:
        """What the endpoint says, over another connection, of how it is: the term of its leader, 0 if it may not tell us.

        What else it says is not said of the question that this is about: that one was sent, and must not be taken for refused.
        """
        try:
            with closing(Talk(self._cluster, self.index, limit, self._interrupt)) as other:
                other.ask(STATUS, b"{}", limit)
                return other._term
        except Failure as failure:
            failure.may_be_done = True
            raise
        except (EtcdError, RefusedError, TokenRefused):
            return 0
