"""A way between two sockets of this machine that is as slow, or as unreliable, as a test wants it."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

RESET = struct.pack("ii", 1, 0)
PIECE_BYTES = 65536


class Way:
    """One connection through the relay. `saw` is told of each piece that the client has sent, and says whether it may pass.

    While `is_cut`, nothing passes either way, not even that one side has ended.
    """

    def __init__(
        self, client: socket.socket, target: tuple[str, int], delay_s: float, saw: Callable[[Way, int], bool],
        is_cut: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.client, self.server = client, socket.create_connection(target, timeout=10)
        self.server.settimeout(None)
        self._saw, self._delay_s, self._is_cut = saw, delay_s, is_cut
        self._threads = [
            threading.Thread(target=self._carry, args=(self.client, self.server, True), daemon=True),
            threading.Thread(target=self._carry, args=(self.server, self.client, False), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def reset(self) -> None:
        """Both sides are told that the connection is no more."""
        for sock in (self.client, self.server):
            with contextlib.suppress(OSError):  # it has ended by itself
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.reset()
        for thread in self._threads:
            thread.join(10)
        self.client.close()
        self.server.close()

    def _carry(self, source: socket.socket, sink: socket.socket, is_clients: bool) -> None:
        """Whatever comes leaves `delay_s` later, in order; the end of the stream too."""
        pieces: queue.Queue[tuple[float, bytes | None]] = queue.Queue()
        deliverer = threading.Thread(target=self._deliver, args=(pieces, sink), daemon=True)
        deliverer.start()
        count = 0
        while True:
            try:
                piece = source.recv(PIECE_BYTES)
            except OSError:
                piece = b""
            if piece and is_clients:
                count += 1
                if not self._saw(self, count):
                    continue
            if not self._is_cut():
                pieces.put((time.monotonic() + self._delay_s, piece))
            elif not piece:
                pieces.put((0.0, None))
            if not piece:
                break
        deliverer.join(10)

    @staticmethod
    def _deliver(pieces: queue.Queue[tuple[float, bytes | None]], sink: socket.socket) -> None:
        while True:
            due_at, piece = pieces.get()
            if piece is None:
                return
            time.sleep(max(0.0, due_at - time.monotonic()))
            with contextlib.suppress(OSError):  # it has ended meanwhile
                sink.sendall(piece) if piece else sink.shutdown(socket.SHUT_WR)
            if not piece:
                return


@contextlib.contextmanager
def relay(
    target_port: int, delay_s: float = 0.0, saw: Callable[[Way, int], bool] = lambda way, count: True, host: str = "127.0.0.1",
    is_cut: Callable[[], bool] = lambda: False,
) -> Iterator[int]:  # fmt: skip
    """A port of loopback from which everything goes to `target_port`, `delay_s` later, and likewise back."""
    ways: list[Way] = []
    with socket.create_server((host, 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                try:
                    ways.append(Way(client, (host, target_port), delay_s, saw, is_cut))
                except OSError:  # nobody is there yet
                    client.close()

        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join(10)
            for way in ways:
                way.close()


@contextlib.contextmanager
def black_hole(host: str, port: int = 0) -> Iterator[int]:
    """A port at which every SYN is dropped: its queue is full, and nobody takes from it."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(0)
        where = listener.getsockname()
        while True:
            guest = sockets.enter_context(socket.socket())
            guest.settimeout(0.3)
            try:
                guest.connect(where)
            except TimeoutError:
                break
        yield where[1]
