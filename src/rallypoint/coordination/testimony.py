"""What a warden tells the store when the agent is dead, and everything below the warden is too: nobody has to wait for this node.

The agent wrote down beforehand how to say it (`processes.licence`): to the agent that hosts the store, with a key for one lease,
from which the job's secret cannot be found (`coordination.embedded.handshake` has the other side); to etcd, as the very
requests that its gateway takes.

When it is said, nothing is left to be hurt but the others' time. So it is tried for a while, and given up without a word: then
the lease ends by itself. Whoever answers is not trusted: a few of its bytes are read. A host gets a proof good for its own
challenge; a member of etcd gets what it would get from the agent, after the same look at its certificate.
"""

from __future__ import annotations

import _socket  # see frames
import errno
import os
import time

TYPE_CHECKING = False  # the warden imports this, and is to start without the cost of importing typing
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

__all__ = ["AGENT", "ETCD", "testify"]

AGENT, ETCD = "agent", "etcd"  # whom to tell

TRY_FOR_S = 10.0
ONE_TRY_S = 3.0
PAUSE_S = 0.2
LENGTH_BYTES = 4
LONGEST_FRAME = 1024
LONGEST_ANSWER = 16 * 1024
HTTP_SERVER_ERRORS = b"5"


def testify(kind: str, addresses: tuple[Any, ...], *details: Any) -> None:
    """Tell the store, at the first of these addresses where somebody listens, that the agent is dead, and all that it started.

    It is said again if the connection breaks.
    """
    say: Callable[..., None] = _say_to_etcd if kind == ETCD else _say_to_agent
    give_up_at = time.monotonic() + TRY_FOR_S
    while True:
        refusals = 0
        for address in addresses:
            try:
                say(address, *details, min(give_up_at, time.monotonic() + ONE_TRY_S))
                return  # heard, or not wanted: asking again would not change that
            except OSError as error:
                refusals += error.errno == errno.ECONNREFUSED
        if refusals == len(addresses) or time.monotonic() + PAUSE_S >= give_up_at:
            return  # the store has ended; or there is no way to it
        time.sleep(PAUSE_S)


# To the agent that hosts the store.


def _say_to_agent(address: tuple[int, Any], hello: bytes, key: bytes, context: bytes, deadline: float) -> None:
    family, where = address
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
        return bytes.fromhex(json.loads(challenge)["nonce"])
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


# To a member of etcd.


def _say_to_etcd(
    address: tuple[str, int],
    tls: tuple[str | None, str | None, str | None] | None,
    login: tuple[str, bytes] | None,
    requests: tuple[tuple[str, bytes], ...],
    deadline: float,
) -> None:
    """`tls` names the files of the authorities, of our certificate and of its key; `login` asks for a token."""
    token = b"" if login is None else _token_of(_post(address, tls, *login, b"", deadline))
    for path, body in requests:
        _post(address, tls, path, body, token, deadline)


def _post(
    address: tuple[str, int],
    tls: tuple[str | None, str | None, str | None] | None,
    path: str,
    body: bytes,
    token: bytes,
    deadline: float,
) -> bytes:
    """The answer; OSError if there is none, or if the member says that it cannot just now."""
    with _connection(address, tls, deadline) as sock:
        lines = [b"POST %s HTTP/1.0" % path.encode(), b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
        lines += [b"Grpc-Metadata-hasleader: true", *([b"Authorization: " + token] if token else [])]
        sock.sendall(b"\r\n".join([*lines, b"", body]))
        answer = b""
        while len(answer) < LONGEST_ANSWER:
            _limit(sock, deadline)
            part = sock.recv(LONGEST_ANSWER)
            if not part:
                break
            answer += part
    status = answer.partition(b" ")[2][:3]
    if not status or status.startswith(HTTP_SERVER_ERRORS):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return answer


def _connection(
    address: tuple[str, int], tls: tuple[str | None, str | None, str | None] | None, deadline: float
) -> socket.socket:
    import socket

    sock = socket.create_connection(address, max(0.001, deadline - time.monotonic()))
    if tls is None:
        return sock
    import ssl

    authorities, certificate, key = tls
    try:
        context = ssl.create_default_context(cafile=authorities)
        if certificate is not None:
            context.load_cert_chain(certificate, key, password=lambda: "")  # a key with a passphrase fails, and nobody is asked
        return context.wrap_socket(sock, server_hostname=address[0])
    except BaseException:  # whatever it was, nothing half done may stay; it is raised again
        sock.close()
        raise


def _token_of(answer: bytes) -> bytes:
    """What stands for user and password; nothing where the cluster asks for none."""
    import json

    try:
        return str(json.loads(answer.partition(b"\r\n\r\n")[2])["token"]).encode("ascii")
    except (ValueError, TypeError, KeyError, RecursionError):
        return b""
