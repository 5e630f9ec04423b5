"""The warden's word to the coordination store: the agent is dead, and so is everything that it had started here.

The store then ends that node's lease, and the others go on at once, instead of waiting until the node has surely stopped. What it
takes the agent left in the page of its licence: where the store is, how to greet it, and a key for this one lease, from which the
job's secret cannot be found. `coordination.embedded.handshake` has the other side.

By now nothing is left to be hurt but the others' time. So it is tried for a while, and given up without a word: then the lease
ends by itself. Whoever answers there is not trusted: a few of its bytes are read, and it gets a proof good for its own challenge.
"""

from __future__ import annotations

import _socket  # see frames
import errno
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["testify"]

TRY_FOR_S = 10.0
ONE_TRY_S = 3.0
PAUSE_S = 0.2
LENGTH_BYTES = 4
LONGEST_FRAME = 1024


def testify(addresses: tuple[tuple[int, Any], ...], hello: bytes, key: bytes, context: bytes) -> None:
    """Say it at the first of these addresses where somebody listens; again if the connection breaks."""
    give_up_at = time.monotonic() + TRY_FOR_S
    while True:
        refusals = 0
        for family, where in addresses:
            try:
                _testify_once(family, where, hello, key, context, min(give_up_at, time.monotonic() + ONE_TRY_S))
                return  # heard, or not wanted: asking again would not change that
            except OSError as error:
                refusals += error.errno == errno.ECONNREFUSED
        if refusals == len(addresses) or time.monotonic() + PAUSE_S >= give_up_at:
            return  # the store has ended; or there is no way to it
        time.sleep(PAUSE_S)


def _testify_once(family: int, where: Any, hello: bytes, key: bytes, context: bytes, deadline: float) -> None:
    sock = _socket.socket(family, _socket.SOCK_STREAM)
    try:
        _limit(sock, deadline)
        sock.connect(where)
        _send(sock, hello, deadline)
        challenge = _receive(sock, deadline)
        if (nonce := _nonce_of(challenge)) is not None:
            import hmac  # takes longer than all else here

            proof = hmac.digest(key, context + nonce, "sha256").hex()
            _send(sock, b'{"proof":"%s"}' % proof.encode(), deadline)
            _receive(sock, deadline)
    finally:
        sock.close()


def _nonce_of(challenge: bytes) -> bytes | None:
    """What the store wants us to prove; None if it refuses us, or is none."""
    import json

    try:
        message = json.loads(challenge)
        return bytes.fromhex(message["nonce"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _limit(sock: _socket.socket, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    sock.settimeout(left_s)


def _send(sock: _socket.socket, body: bytes, deadline: float) -> None:
    _limit(sock, deadline)
    sock.sendall(len(body).to_bytes(LENGTH_BYTES, "big") + body)


def _receive(sock: _socket.socket, deadline: float) -> bytes:
    length = int.from_bytes(_receive_exactly(sock, LENGTH_BYTES, deadline), "big")
    return _receive_exactly(sock, min(length, LONGEST_FRAME), deadline)


def _receive_exactly(sock: _socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        _limit(sock, deadline)
        part = sock.recv(count - len(received))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        received += part
    return received
