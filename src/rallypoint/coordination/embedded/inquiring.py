"""Asking an embedded store whose it is, for those who know where it is and no more."""

from __future__ import annotations

import socket
import time

from rallypoint.base.text import host_port
from rallypoint.coordination.embedded.handshake import HandshakeRefused, NameQuestion
from rallypoint.coordination.embedded.wire import LARGE_FRAME_BYTES, FrameError, Inbox, TlsError, make_frame
from rallypoint.coordination.engine import RefusedError, UnreachableError
from rallypoint.net.endpoint import look_up

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.coordination.embedded.handshake import Secret
    from rallypoint.coordination.embedded.tls import Tls

__all__ = ["job_at"]

CONNECT_S = 3.0
READ_BYTES = 64 * 1024


def job_at(host: str, port: int, secret: Secret, deadline: float, tls: Tls | None = None) -> str:
    """The name of the job whose nodes meet there. UnreachableError: nobody answers; RefusedError: it is not told to us."""
    where, trouble = host_port(host, port), "its name has no address"
    try:
        addresses = look_up(host, port)
    except OSError as error:
        raise UnreachableError(f"{where} cannot be found: {error.strerror or error}") from None
    for family, address in addresses:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as line:
                line.settimeout(_left(deadline, CONNECT_S))
                line.connect(address)
                with line if tls is None else tls.at_node(line, host) as secured:
                    return _ask(secured, NameQuestion(secret), deadline)
        except HandshakeRefused as refused:
            raise RefusedError(f"the store at {where} refused: {refused}") from None
        except FrameError as error:
            raise RefusedError(f"what answers at {where} is no store of this version of rallypoint's: {error}") from None
        except TlsError as error:
            raise RefusedError(f"what answers at {where} will not do: {error.strerror}") from None
        except OSError as error:
            trouble = error.strerror or str(error) or "no answer"
    raise UnreachableError(f"no store answers at {where}: {trouble}")


def _left(deadline: float, most_s: float) -> float:
    return max(0.001, min(deadline - time.monotonic(), most_s))


def _ask(line: socket.socket, question: NameQuestion, deadline: float) -> str:
    inbox = Inbox()
    inbox.limit = LARGE_FRAME_BYTES
    said: bytes | None = question.hello()
    while said is not None:
        line.sendall(make_frame(said, None))
        while (body := inbox.take()) is None:
            line.settimeout(_left(deadline, CONNECT_S))
            data = line.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError(104, "it hung up")
            inbox.feed(data)
        said = question.answer(body)
    assert question.job is not None
    return question.job
