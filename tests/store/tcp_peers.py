"""Peers that speak torch's TCPStore protocol byte by byte, and a server of it in a process of its own."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from rallypoint.store import tcp_protocol as wire

TIMEOUT_S = 20.0
TOKEN = 0x7E57_0001
RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: what is still to go out is thrown away, and the peer is told so


class TcpPeer:
    """A socket, and what a client does with it, step by step."""

    def __init__(self, port: int, receive_bytes: int = 0) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(TIMEOUT_S)
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def name(self) -> str:
        """What the server calls it."""
        host, port = self.socket.getsockname()
        return f"{host} port {port}"

    def greet(self) -> TcpPeer:
        """Be let in; it surely is when this returns."""
        self.socket.sendall(wire.GREETING)
        self.ping()
        return self

    def say(self, operation: int, *strings: bytes, number: int = wire.NO_NUMBER) -> None:
        self.socket.sendall(wire.request(operation, strings, number))

    def take(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = self.socket.recv(min(size - len(data), 1 << 20))
            assert more, f"cut off after {bytes(data[:40])!r}"
            data += more
        return bytes(data)

    def take_number(self) -> int:
        return int(wire.I64.unpack(self.take(8))[0])

    def take_text(self) -> bytes:
        return self.take(wire.U64.unpack(self.take(8))[0])

    def ping(self) -> None:
        """All that was said before has been done when this returns, and nothing was answered that was not taken."""
        self.say(wire.PING, number=TOKEN)
        assert self.take(4) == wire.U32.pack(TOKEN)

    def set(self, key: bytes, value: bytes) -> None:
        self.say(wire.SET, key, value)
        self.ping()

    def get(self, key: bytes) -> bytes:
        self.say(wire.GET, key)
        return self.take_text()

    def keys(self) -> list[bytes]:
        self.say(wire.LIST_KEYS)
        return [self.take_text() for _ in range(self.take_number())]

    def is_cut_off(self) -> bool:
        """Whether it is, now or within the timeout; what it is told until then is lost."""
        try:
            while self.socket.recv(1 << 20):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    def reset(self) -> None:
        """Go without a word: a process that was killed with unread data does so."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.socket.close()


SERVER = """
import sys
from rallypoint.store import tcp_protocol
from rallypoint.net.endpoint import open_listeners
from rallypoint.store.tcp_server import TcpStoreServer

judged = 0
real = tcp_protocol.RequestReader.requests

def counting(reader):
    global judged
    try:
        for request in real(reader):
            judged += 1
            yield request
    except tcp_protocol.ProtocolError:
        judged += 1
        raise

tcp_protocol.RequestReader.requests = counting
server = TcpStoreServer(open_listeners("127.0.0.1", 0, is_host=True, wildcard_allowed=False), int(sys.argv[1]))
server.start()
print(server.addresses[0][1], flush=True)
for line in sys.stdin:
    print(judged, flush=True)
server.close()
"""


class ServerApart:
    """A server in its own process, so that its memory can be told from that of its clients."""

    def __init__(self, limit_bytes: int) -> None:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would fill up
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(limit_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )
        self.pid = self._process.pid
        self.port = int(self._read())

    def judged(self) -> int:
        """How many requests the server has looked at: those it has done, and those that broke the format."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._read())

    def resident_kb(self) -> int:
        return int(Path(f"/proc/{self.pid}/status").read_text().split("VmRSS:")[1].split()[0])

    def close(self) -> str:
        """End it; what it has complained of."""
        try:
            self._process.communicate(timeout=TIMEOUT_S)
        finally:
            self._process.kill()
        with self._complaints as file:
            file.seek(0)
            complaints = file.read().decode()
        assert self._process.returncode == 0, complaints[-2000:]
        return complaints

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()
