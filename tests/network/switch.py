"""A switch in user space: it carries the packets of a few machines, and loses, delays, mixes up or rejects them as a test wants.

The end of each machine's cable is a TUN device in the machine's namespace, whose file the switch holds. Such a device has no
checksum or segment left for hardware to finish, so what is read there is what a cable would carry. The switch is a process of its
own: the test's interpreter does not delay a packet. It ends when the test closes its end of the socket between them.

The kernels that we meet have no netem, and no firewall; and neither of them could answer a packet with a reset that only one of
two machines gets to see.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import ipaddress
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from typing import Any, NamedTuple

__all__ = ["CLEAR", "CUT", "Line", "Switch", "open_cable"]

SET_DEVICE = 0x400454CA  # TUNSETIFF
BARE_PACKETS = 0x1001  # IFF_TUN | IFF_NO_PI
LARGEST = 65535
IPV4, TCP = 4, 6
FIN, SYN, RST, ACK = 1, 2, 4, 16
BATCH = 64
MESSAGE = 65536
ANSWER_S = 10.0


class Line(NamedTuple):
    """One direction of one machine's cable."""

    is_cut: bool = False
    delay_s: float = 0.0
    loss: float = 0.0  # the share of packets that vanish
    jitter_s: float = 0.0  # each waits up to so much longer, so that later ones overtake it
    rejects: bool = False  # whoever sends TCP over it gets a reset in the name of the receiver, who hears nothing


CLEAR, CUT = Line(), Line(is_cut=True)


def open_cable(name: str) -> int:
    """A new TUN device in the namespace of this thread; it is gone when its file is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd, SET_DEVICE, struct.pack("16sH22x", name.encode(), BARE_PACKETS))
    except OSError:
        os.close(fd)
        raise
    return fd


# --- the test's side -------------------------------------------------------------------------------------------------------


class Switch:
    """The switch, as the test steers it; whatever is asked for holds when the call returns."""

    def __init__(self, cables: list[int], addresses: list[list[str]]) -> None:
        """`cables` are files of TUN devices, which now belong to the switch; `addresses` are those behind each."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(ANSWER_S)
        setup = json.dumps({"control": theirs.fileno(), "cables": cables, "addresses": addresses})
        with theirs:
            command = [sys.executable, "-I", "-S", __file__, setup]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), *cables])
        for fd in cables:
            os.close(fd)
        self.counts()  # it is up

    def set(self, port: int, sent: Line | None = None, received: Line | None = None) -> None:
        """What happens from now on to all that the machine at this port sends, or receives; None leaves it as it is."""
        self._ask({"port": port, "sent": sent and sent._asdict(), "received": received and received._asdict()})

    def counts(self) -> dict[str, int]:
        """How many packets were carried, dropped and rejected so far."""
        return self._ask({})

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(ANSWER_S)
        finally:
            self._process.kill()
            self._process.wait()

    def _ask(self, what: dict[str, Any]) -> dict[str, int]:
        self._control.send(json.dumps(what).encode())
        answer: dict[str, int] = json.loads(self._control.recv(MESSAGE))
        return answer


# --- the switch's side -----------------------------------------------------------------------------------------------------


class Carrier:
    """The loop of the switch."""

    def __init__(self, control: int, cables: list[int], addresses: list[list[str]]) -> None:
        self._control = socket.socket(fileno=control)
        self._cables = cables
        self._sent, self._received = [CLEAR] * len(cables), [CLEAR] * len(cables)
        self._owners = {ipaddress.ip_address(one).packed: port for port, own in enumerate(addresses) for one in own}
        self._chance = random.Random(0)
        self._waiting: list[tuple[float, int, int, bytes]] = []  # when, which, to which port, what
        self._counts = {"carried": 0, "dropped": 0, "rejected": 0}
        self._serial = 0

    def run(self) -> None:
        poll = select.epoll()
        for fd in (self._control.fileno(), *self._cables):
            poll.register(fd, select.EPOLLIN)
        ports = {fd: port for port, fd in enumerate(self._cables)}
        while True:
            wait_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else -1
            for fd, _ in poll.poll(wait_s):
                if fd in ports:
                    self._read(fd, ports[fd])
                elif not self._obey():
                    return
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, port, packet = heapq.heappop(self._waiting)
                self._deliver(port, packet)

    def _obey(self) -> bool:
        message = self._control.recv(MESSAGE)
        if not message:
            return False
        order = json.loads(message)
        for lines, name in ((self._sent, "sent"), (self._received, "received")):
            if order.get(name) is not None:
                lines[order["port"]] = Line(**order[name])
        self._control.send(json.dumps(self._counts).encode())
        return True

    def _read(self, fd: int, sender: int) -> None:
        with contextlib.suppress(BlockingIOError):  # that was all
            for _ in range(BATCH):
                packet = os.read(fd, LARGEST)
                receiver = self._owners.get(packet[16:20] if packet[0] >> 4 == IPV4 else packet[24:40])
                if receiver is not None:  # machines also call out for routers and the like
                    self._carry(packet, sender, receiver)

    def _carry(self, packet: bytes, sender: int, receiver: int) -> None:
        delay_s = 0.0
        for line in (self._sent[sender], self._received[receiver]):
            if line.rejects and is_tcp(packet):
                self._counts["rejected"] += 1
                reset = reset_for(packet)
                if reset:
                    self._deliver(sender, reset)
                return
            if line.is_cut or (line.loss and self._chance.random() < line.loss):
                self._counts["dropped"] += 1
                return
            delay_s += line.delay_s + line.jitter_s * self._chance.random()
        self._counts["carried"] += 1
        if not delay_s:
            self._deliver(receiver, packet)
            return
        self._serial += 1
        heapq.heappush(self._waiting, (time.monotonic() + delay_s, self._serial, receiver, packet))

    def _deliver(self, port: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # its queue is full, or the machine has just gone: a cable loses that, too
            os.write(self._cables[port], packet)


# --- packets ---------------------------------------------------------------------------------------------------------------


def is_tcp(packet: bytes) -> bool:
    """Over IPv4; of IPv6, whose headers may be many, no test needs a reset."""
    return packet[0] >> 4 == IPV4 and packet[9] == TCP


def reset_for(packet: bytes) -> bytes | None:
    """What a firewall that rejects with a TCP reset answers; nothing to a reset."""
    start = (packet[0] & 15) * 4
    source, destination = packet[12:16], packet[16:20]
    from_port, to_port, number, acknowledged, size, flags = struct.unpack_from("!HHIIBB", packet, start)
    if flags & RST:
        return None
    if flags & ACK:
        header = struct.pack("!HHIIBBHHH", to_port, from_port, acknowledged, 0, 5 << 4, RST, 0, 0, 0)
    else:
        length = struct.unpack_from("!H", packet, 2)[0] - start - (size >> 4) * 4 + bool(flags & SYN) + bool(flags & FIN)
        next_number = (number + length) & 0xFFFFFFFF
        header = struct.pack("!HHIIBBHHH", to_port, from_port, 0, next_number, 5 << 4, RST | ACK, 0, 0, 0)
    pseudo = destination + source + struct.pack("!HH", TCP, len(header))
    segment = header[:16] + struct.pack("!H", checksum(pseudo + header)) + header[18:]
    outer = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(segment), 0, 0x4000, 64, TCP, 0, destination, source)
    return outer[:10] + struct.pack("!H", checksum(outer)) + outer[12:] + segment


def checksum(data: bytes) -> int:
    """The internet's, of an even number of bytes."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


if __name__ == "__main__":
    setup = json.loads(sys.argv[1])
    Carrier(setup["control"], setup["cables"], setup["addresses"]).run()
