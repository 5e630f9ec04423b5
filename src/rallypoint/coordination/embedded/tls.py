"""TLS for the port of the agents' store: both sides show a certificate, and each looks at the other's.

A node's certificate has to be signed by the authority that was given; the store's also has to name the host of the endpoint. A
warden's testimony comes without TLS: it is proven by a key of its own, and tells nothing but the number of a lease.

This module, and ssl with it, is loaded only where certificates were given.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any

from rallypoint.coordination.embedded.wire import TlsError

__all__ = ["Tls"]

DRAINED_BYTES = 256 * 1024


class _TlsSocket(ssl.SSLSocket):
    """Behaves like a socket that does not block: what TLS has to do before is done by and by, by sending and receiving."""

    @property
    def is_held(self) -> bool:
        """Whether nothing can be sent before something has come."""
        return self.version() is None

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        return bytes(self._do(super().recv, buflen))

    def send(self, data: Any, flags: int = 0) -> int:
        return int(self._do(super().send, data))

    def _do(self, act: Any, argument: Any) -> Any:
        try:
            return act(argument)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLEOFError:
            raise ConnectionResetError(104, "the connection has ended during TLS") from None
        except ssl.SSLCertVerificationError as error:
            self._drain()
            raise TlsError(0, f"its certificate is not trusted: {error.verify_message}") from None
        except ssl.SSLError as error:
            self._drain()
            raise TlsError(0, f"TLS has failed: {(error.reason or str(error)).lower().replace('_', ' ')}") from None

    def _drain(self) -> None:
        """What is left unread at a close would make the kernel say so, before the other side has heard what is wrong."""
        try:
            socket.socket.recv(self, DRAINED_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return


class Tls:
    """Of one job, as one node has it. OSError, of which ssl's errors are, and ValueError: what is in the files will not do."""

    def __init__(self, cert: str, key: str, ca: str) -> None:
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, cert, key, ca)
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, cert, key, ca)
        self._server.num_tickets = 0

    def at_store(self, sock: socket.socket) -> socket.socket:
        """The same connection, at the store's side; nothing has come yet but its beginning."""
        return self._server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def at_node(self, sock: socket.socket, host: str) -> socket.socket:
        """The same connection, at a node's side; it is connected. The other side has to be `host`."""
        return self._client.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)


def _context(side: int, cert: str, key: str, ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.sslsocket_class = _TlsSocket
    context.load_cert_chain(cert, key, password=_refuse_password)
    context.load_verify_locations(ca)
    return context


def _refuse_password() -> str:
    """Nobody is asked at the terminal: the other nodes have none."""
    raise ValueError("the key is encrypted")
