"""Where an agent's snapshots can be had by the other agents of the job, and copies of theirs be left.

put, mark, generation, begun → have | no, why | go; then the snapshot → got; then keep → kept, or drop: it has changed meanwhile
get, rank, world, generation, step → none | mark; then the snapshot; then whole, or void: it has changed meanwhile
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from contextlib import closing

from rallypoint.base import report
from rallypoint.checkpoint.layout import MARK_BYTES, Begun, Mark, read_mark, write_mark
from rallypoint.checkpoint.transfer import Channel, TransferError, mark_in, mark_text
from rallypoint.net.endpoint import address_of, hold_port
from rallypoint.net.service_thread import ServiceThread
from rallypoint.net.wake_fd import WakeFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.checkpoint.vault import Vault

__all__ = ["Depot"]

KEY_BYTES = 32
MOST_GUESTS = 64  # at a time
END_S = 2.0


class Depot:
    """Serves from when it is made, with one thread for each connection: there are as few as partners, and each moves much.

    OSError: this machine cannot listen at `host`.
    """

    def __init__(self, vault: Vault, host: str) -> None:
        self.host, self.key = host, os.urandom(KEY_BYTES)
        self._vault = vault
        self._generation = 0
        self._guests: dict[Channel, bool] = {}  # and whether it leaves something here just now
        self._lock = threading.Condition()
        self._listeners = [socket.socket(fileno=sock.detach()) for sock in hold_port(host, (0,))]
        _, self.port = address_of(self._listeners[0])
        self._service = ServiceThread("depot", WakeFd(), self._serve, self._let_go)
        self._service.start()

    def begin(self, generation: int) -> None:
        """From now on nothing is taken that an earlier generation has saved, and nothing is being written."""
        deadline = time.monotonic() + END_S
        with self._lock:
            self._generation = generation
            for guest, is_leaving in self._guests.items():
                if is_leaving:
                    guest.abort()
            self._lock.wait_for(lambda: not any(self._guests.values()), deadline - time.monotonic())

    def close(self) -> bool:
        """Whether nobody uses anything any more that is kept."""
        self._service.stop(END_S)
        with self._lock:
            return self._lock.wait_for(lambda: not self._guests, END_S)

    # --- who comes ---------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poll = select.poll()
        for fd in (*(one.fileno() for one in self._listeners), self._service.wake_fd.fileno()):
            poll.register(fd, select.POLLIN)
        by_fd = {one.fileno(): one for one in self._listeners}
        while not self._service.is_ending:
            for fd, _ in poll.poll():
                if fd in by_fd:
                    self._accept(by_fd[fd])

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # it has gone again, or there is no descriptor left: whoever waits is still there in a moment
            time.sleep(0.05)
            return
        channel = Channel(sock)
        with self._lock:
            is_welcome = len(self._guests) < MOST_GUESTS
            if is_welcome:
                self._guests[channel] = False
        if is_welcome:
            threading.Thread(target=self._attend, args=(channel,), name="rallypoint-depot-guest", daemon=True).start()
        else:
            channel.close()

    def _let_go(self) -> None:
        for listener in self._listeners:
            listener.close()
        with self._lock:
            for guest in self._guests:
                guest.abort()

    def _attend(self, channel: Channel) -> None:
        with closing(channel):
            try:
                channel.welcome(self.key)
                while True:
                    channel.await_words()
                    self._do(channel, channel.hear())
            except (TransferError, OSError, ValueError) as error:  # ValueError: a frame with the wrong seal
                report.debug(f"snapshots: a connection has ended: {error}")
            finally:
                with self._lock:
                    del self._guests[channel]
                    self._lock.notify_all()

    def _do(self, channel: Channel, message: list[Any]) -> None:
        match message:
            case ["put", mark, int(generation), begun]:
                self._take(channel, mark_in(mark), generation, begun)
            case ["get", int(rank), int(world), int(generation), int(step)]:
                self._give(channel, self._vault.find(rank, world, (generation, step)))
            case _:
                raise TransferError("it asks for what there is not")

    # --- what they want ----------------------------------------------------------------------------------------------------

    def _take(self, channel: Channel, mark: Mark, generation: int, begun: object) -> None:
        with self._lock:
            if generation < self._generation:
                raise TransferError("it is of an earlier generation")
            self._guests[channel] = True  # from here on, whoever begins a new one waits for us
        try:
            if self._vault.find(mark.rank, mark.world, mark.moment, mark.count) is not None:
                channel.say("have")
                return
            fd = self._vault.room_for(mark, _begun(generation, begun))
            if isinstance(fd, str):
                channel.say("no", fd)
                return
            channel.say("go")
            channel.receive_snapshot(fd, mark)
            channel.say("got")
            if channel.hear() == ["keep"]:
                os.pwrite(fd, write_mark(mark), 0)
            channel.say("kept")
        finally:
            with self._lock:
                self._guests[channel] = False
                self._lock.notify_all()

    def _give(self, channel: Channel, found: tuple[int, Mark] | None) -> None:
        if found is None:
            channel.say("none")
            return
        fd, mark = found
        channel.say("mark", mark_text(mark))
        channel.send_snapshot(fd, mark)
        if channel.hear() != ["got"]:
            raise TransferError("it did not get it")
        channel.say("whole" if read_mark(os.pread(fd, MARK_BYTES, 0)) == mark else "void")


def _begun(generation: int, told: object) -> Begun:
    match told:
        case [int(earlier), int(step)]:
            return Begun(generation, (earlier, step))
    return Begun(generation, None)
