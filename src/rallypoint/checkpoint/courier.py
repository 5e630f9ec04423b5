"""Snapshots between nodes, during one generation: what this node lacks is fetched, and what its workers save is copied."""

from __future__ import annotations

import os
import select
import socket
import threading
import time

from rallypoint.base import report
from rallypoint.base.text import many
from rallypoint.checkpoint.layout import MARK_BYTES, Begun, Mark, Moment, read_mark, write_mark
from rallypoint.checkpoint.line import COPIED, OVER, READY, say
from rallypoint.checkpoint.moves import (
    Inventory,
    Plan,
    decode_inventory,
    decode_plan,
    encode,
    partner_of,
    plan_moves,
)
from rallypoint.checkpoint.transfer import Channel, TransferError, mark_in, mark_text
from rallypoint.net.wake_fd import WakeFd
from rallypoint.store.interface import StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.checkpoint.depot import Depot
    from rallypoint.checkpoint.vault import Group, Vault

__all__ = ["Courier"]

OTHERS_S = 60.0  # for the other nodes to tell what they hold
AGAIN_S = 10.0  # before a partner who could not be reached is called again
END_S = 2.0
PLAN_KEY = "rallypoint/snapshots/plan"


class Courier:
    """A thread of its own, from `start` to `stop`: after that nothing is written any more to what workers have.

    Without a `depot` other nodes can have nothing from this one, and are told so.
    """

    def __init__(self, vault: Vault, depot: Depot | None, group: Group, bytes_per_s: int | None) -> None:
        assert group.store is not None
        self._vault, self._depot, self._store, self._group, self._bytes_per_s = vault, depot, group.store, group, bytes_per_s
        pairs = {local_rank: socket.socketpair() for local_rank in group.ranks}
        self._lines = {local_rank: ours for local_rank, (ours, _) in pairs.items()}
        self._theirs = {local_rank: theirs for local_rank, (_, theirs) in pairs.items()}
        self._wake = WakeFd()
        self._lock = threading.Lock()
        self._is_over = False
        self._channel: Channel | None = None  # in use
        self._moved = threading.Event()  # nothing is written to slots any more
        self._partner: Channel | None = None
        self._call_again_at = 0.0
        self._has_warned = self._has_failed = False
        self._begun: Moment | None = None
        self._copied: dict[int, Mark] = {}  # by rank, the last that the partner has
        self._thread = threading.Thread(target=self._run, name="rallypoint-courier", daemon=True)

    def worker_fd(self, local_rank: int) -> int:
        """The worker's end of its line, until `start`."""
        return self._theirs[local_rank].fileno()

    def start(self) -> None:
        """The workers run."""
        self._close_theirs()
        self._thread.start()

    def stop(self) -> None:
        """They are gone."""
        self._close_theirs()
        with self._lock:
            self._is_over = True
            self._wake.set()
            is_moving = self._channel is not None and not self._moved.is_set()
            if self._channel is not None:
                self._channel.abort()
        if self._thread.ident is None:
            self._let_go()
        elif is_moving:  # else it may wait for other nodes, and finds that it is over before it writes anything
            self._moved.wait(END_S)

    def join(self) -> bool:
        """Whether it uses nothing any more that is kept; it has been stopped."""
        if self._thread.ident is not None:
            self._thread.join(END_S)
        return not self._thread.is_alive()

    def _close_theirs(self) -> None:
        for line in self._theirs.values():
            line.close()

    def _let_go(self) -> None:
        for line in self._lines.values():
            say(line, OVER)
            line.close()
        with self._lock:
            self._is_over = True
            self._wake.close()

    # --- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            try:
                self._fetch_all()
            except (TransferError, StoreError, OSError, ValueError) as error:
                self._warn(f"snapshots of other nodes cannot be had: {error}")
            self._moved.set()
            for line in self._lines.values():
                say(line, READY)
            self._copy_until_over()
        except _Over:
            report.debug("snapshots: the generation is over")
        except Exception as bug:  # workers go on without copies
            report.warn(f"--checkpoint-copies: what is saved is not copied any more: {bug!r}")
        finally:  # whatever it was, nobody waits for us any more
            self._moved.set()
            if self._partner is not None:
                self._partner.close()
            self._let_go()

    def _warn(self, text: str) -> None:
        with self._lock:
            if self._is_over:
                raise _Over
        if not self._has_warned:
            self._has_warned = True
            report.warn(f"--checkpoint-copies: {text}")

    def _use(self, channel: Channel) -> Channel:
        """From now on, `stop` aborts this one."""
        with self._lock:
            if self._is_over:
                channel.close()
                raise _Over
            self._channel = channel
        return channel

    # --- what we lack ------------------------------------------------------------------------------------------------------

    def _fetch_all(self) -> None:
        group, depot = self._group, self._depot
        ranks = tuple(sorted(group.ranks.values()))
        where = ("", 0, "") if depot is None else (depot.host, depot.port, depot.key.hex())
        ours = Inventory(*where, ranks, tuple(self._vault.holdings(group.world)))
        self._store.set(_key_of(group.node), encode(ours))
        if group.node == 0:
            keys = [_key_of(node) for node in range(group.nodes)]
            self._store.wait(keys, OTHERS_S)
            self._store.set(PLAN_KEY, encode(plan_moves([*map(decode_inventory, self._store.multi_get(keys))])))
        self._store.wait([PLAN_KEY], OTHERS_S)
        plan = decode_plan(self._store.get(PLAN_KEY))
        self._begun = plan.moment
        missing = [rank for rank in ranks if rank in plan.moves]
        fetched = sum(self._fetch(rank, plan) for rank in missing)
        if fetched:
            report.info(f"{many(fetched, 'snapshot')} of step {plan.moment and plan.moment[1]} fetched from other nodes")

    def _fetch(self, rank: int, plan: Plan) -> bool:
        trouble = ""
        for node in plan.moves[rank]:
            there = decode_inventory(self._store.get(_key_of(node)))
            try:
                if self._fetch_from(there, rank, plan):
                    return True
            except TransferError as error:
                trouble = str(error)
        self._warn(f"the snapshot of rank {rank} cannot be had: {trouble or 'it is not there any more'}")
        return False

    def _fetch_from(self, there: Inventory, rank: int, plan: Plan) -> bool:
        assert plan.moment is not None
        channel = _call(there)
        try:
            self._use(channel).say("get", rank, self._group.world, *plan.moment)
            answer = channel.hear()
            if answer[0] != "mark" or len(answer) != 2:
                return False
            mark = mark_in(answer[1])
            if (mark.rank, mark.world, mark.moment) != (rank, self._group.world, plan.moment):
                raise TransferError("it sends another snapshot than was asked for")
            fd = self._vault.own_room_for(mark, Begun(self._group.generation, plan.moment))
            if isinstance(fd, str):
                raise TransferError(fd)
            channel.receive_snapshot(fd, mark)
            channel.say("got")
            is_whole = channel.hear() == ["whole"]
            if is_whole:
                os.pwrite(fd, write_mark(mark), 0)
            return is_whole
        finally:
            with self._lock:
                self._channel = None
            channel.close()

    # --- what is saved -----------------------------------------------------------------------------------------------------

    def _copy_until_over(self) -> None:
        for rank in self._group.ranks.values():
            self._copy(rank)  # what all begin from
        poll = select.poll()
        poll.register(self._wake.fileno(), select.POLLIN)
        by_fd = {line.fileno(): local_rank for local_rank, line in self._lines.items()}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if self._is_over:
                    raise _Over
                local_rank = by_fd[fd]
                if saves := _heard(self._lines[local_rank]):
                    self._copy(self._group.ranks[local_rank])
                    say(self._lines[local_rank], COPIED * len(saves))
                else:
                    poll.unregister(fd)

    def _copy(self, rank: int) -> None:
        if self._is_over:
            raise _Over
        found = self._vault.newest_own(rank, self._group.world)
        if found is None or self._copied.get(rank) == found[1]:
            return
        was_connected = self._partner is not None
        try:
            is_copied = self._try_to_copy(*found)
        except (TransferError, StoreError, OSError, ValueError) as error:
            self._hang_up()
            if was_connected:  # a connection that had broken while nothing was sent
                self._copy(rank)
                return
            self._call_again_at = time.monotonic() + AGAIN_S
            if self._has_failed:  # when it fails for the first time, the partner may have been lost, which is told by others
                self._warn(f"what rank {rank} saves is not copied now: {error}")
            self._has_failed = True
        else:
            if is_copied:
                self._copied[rank] = found[1]

    def _try_to_copy(self, fd: int, mark: Mark) -> bool:
        if self._partner is None:
            if time.monotonic() < self._call_again_at:
                return False
            node = partner_of(self._group.node, self._group.nodes)
            assert node is not None
            there = decode_inventory(self._store.get(_key_of(node)))
            self._partner = self._use(_call(there))
        return self._put(self._partner, fd, mark)

    def _hang_up(self) -> None:
        with self._lock:
            self._channel = None
        if self._partner is not None:
            self._partner.close()
            self._partner = None

    def _put(self, partner: Channel, fd: int, mark: Mark) -> bool:
        partner.say("put", mark_text(mark), self._group.generation, self._begun)
        match partner.hear():
            case ["have"]:
                return True
            case ["no", str(why)]:
                self._warn(f"what rank {mark.rank} saves is not copied: {why}")
                return False
            case ["go"]:
                partner.send_snapshot(fd, mark, _Pace(self._bytes_per_s, self._wake).wait)
        if partner.hear() != ["got"]:
            raise TransferError("it did not get it")
        is_whole = read_mark(os.pread(fd, MARK_BYTES, 0)) == mark
        partner.say("keep" if is_whole else "drop")
        return partner.hear() == ["kept"] and is_whole


class _Over(Exception):
    """The generation has ended."""


class _Pace:
    """As many bytes a second as are allowed, and no more; whoever is woken goes on at once."""

    def __init__(self, bytes_per_s: int | None, wake: WakeFd) -> None:
        self._bytes_per_s, self._wake = bytes_per_s, wake
        self._began_at, self._sent = time.monotonic(), 0

    def wait(self, count: int) -> None:
        if self._bytes_per_s is not None:
            wait_s = self._began_at + self._sent / self._bytes_per_s - time.monotonic()
            if wait_s > 0:
                poll = select.poll()
                poll.register(self._wake.fileno(), select.POLLIN)
                poll.poll(1000 * wait_s)
            self._sent += count


def _call(there: Inventory) -> Channel:
    if not there.host:
        raise TransferError("other nodes cannot reach the one that has it")
    return Channel.call(there.host, there.port, bytes.fromhex(there.key))


def _heard(line: socket.socket) -> bytes:
    """What a worker says; nothing, if it has ended."""
    try:
        return line.recv(64)
    except ConnectionError:
        return b""


def _key_of(node: int) -> str:
    return f"rallypoint/snapshots/{node}"
