"""The agent's side: the memory in which workers keep their snapshots, which stays when they end.

It is made of files without a name, so nothing of it is left when the agent has ended, however that ends. A snapshot belongs to a
rank of the whole job; which worker of this node has that rank may differ from one generation to the next.

With copies, a node also keeps snapshots of another node's ranks; where a rank comes to the node that has its copies, they become
its own, and nothing is moved for that.

When a job ends before its work is done, what is kept can be written to a folder, from which the next one takes it up.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from rallypoint.base import defaults, report
from rallypoint.base.outbox import Deputy
from rallypoint.base.records import Value
from rallypoint.base.signals import inbox
from rallypoint.base.text import many
from rallypoint.checkpoint.folder import Found, clear_out, copy_file, find_snapshots, write_out
from rallypoint.checkpoint.layout import (
    BODY_AT,
    MARK_BYTES,
    Begun,
    Mark,
    Moment,
    Place,
    read_mark,
    share_out,
    slot_to_write,
    write_mark,
    write_place,
)
from rallypoint.checkpoint.rooms import clear_room, make_room

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.checkpoint.courier import Courier
    from rallypoint.checkpoint.depot import Depot
    from rallypoint.checkpoint.moves import Holding
    from rallypoint.store.interface import Store

T = TypeVar("T")

__all__ = ["Group", "Snapshots", "Vault"]

FOLDER_TIMEOUT_S = 600.0  # for a disk that may be slow; one that hangs does not keep a job for ever


class Group(Value):
    """The workers that are about to start, and where they stand; `store` is what the agents of the generation share.

    `address` is where the other agents can reach this one; empty where they cannot.
    """

    generation: int
    node: int
    nodes: int
    world: int
    ranks: Mapping[int, int]  # by local rank
    store: Store | None = None
    address: str = ""


class Snapshots:
    """What an agent does for its workers' snapshots.

    With a `folder`, also from one job to the next; with `copies`, also for another node, at so many bytes a second.
    """

    def __init__(
        self, most_bytes: int, workers: int, folder: str | None = None, copies: int = 0, bytes_per_s: int | None = None
    ) -> None:
        self._vault = Vault(most_bytes, workers, bool(copies))
        self._folder = folder
        self._copies, self._bytes_per_s = copies, bytes_per_s
        self._group: Group | None = None
        self._clerk = Deputy()
        self._depot: Depot | None = None
        self._courier: Courier | None = None
        self._has_told = False

    def prepare(self, group: Group, envs: Mapping[int, dict[str, str]]) -> dict[int, tuple[int, ...]]:
        """The files of each worker of a group that is about to start, by local rank; they are told of them."""
        self._end_copying()
        if self._depot is not None:
            self._depot.begin(group.generation)
        files, is_first = self._vault.assign(group.ranks), self._group is None
        self._group = group
        if self._folder is not None and is_first:
            read = partial(self._vault.read_back, files=files, ranks=group.ranks, world=group.world)
            for fd, copy in self._try(read, "what an earlier job left is not used", _close_copies) or ():
                os.dup2(copy, fd, inheritable=False)
                os.close(copy)
        self._courier = self._make_courier(group) if self._copies else None
        for local_rank, fds in files.items():
            line = () if self._courier is None else (self._courier.worker_fd(local_rank),)
            envs[local_rank].update(self._vault.variables(fds, *line))
            files[local_rank] = (*fds, *line)
        return files

    def _make_courier(self, group: Group) -> Courier | None:
        if group.nodes == 1 or group.store is None or not group.address:
            if not self._has_told:
                self._has_told = True
                report.info("there is no other node to keep copies of what workers save")
            return None
        from rallypoint.checkpoint.courier import Courier
        from rallypoint.checkpoint.depot import Depot

        if self._depot is None:
            try:
                self._depot = Depot(self._vault, group.address)
            except OSError as error:
                report.warn(f"--checkpoint-copies: other nodes cannot reach this one: {error.strerror or error}")
            else:
                self._depot.begin(group.generation)
        return Courier(self._vault, self._depot, group, self._bytes_per_s)

    def started(self) -> None:
        """The workers run."""
        if self._courier is not None:
            self._courier.start()

    def _end_copying(self) -> None:
        if self._courier is not None:
            self._courier.stop()

    def end(self, succeeded: bool, has_lost_nodes: bool = False) -> None:
        """The job is over, and its workers are gone; maybe also nodes that cannot write what they kept themselves."""
        self._end_copying()
        if self._folder is None or self._group is None:
            return
        ranks, world = self._group.ranks.values(), self._group.world
        if succeeded:
            self._try(lambda folder: clear_out(folder, ranks, world), "what is there stays")
            return
        count = self._write(self._vault.own(), are_copies=False)
        if count:
            report.info(f"{many(count, 'snapshot')} of this node's workers written to {self._folder}")
        count = self._write(self._vault.copies(world) if has_lost_nodes else [], are_copies=True)
        if count:
            copies = f"{many(count, 'copy', 'copies')} of other nodes' snapshots"
            report.info(f"{copies} written to {self._folder}, as a node may be lost")

    def _write(self, snapshots: list[tuple[int, Mark]], are_copies: bool) -> int | None:
        otherwise = f"what was saved last{' on lost nodes' if are_copies else ''} is lost"
        return self._try(lambda folder: write_out(folder, snapshots, are_copies), otherwise) if snapshots else 0

    def _try(self, work: Callable[[str], T], otherwise: str, discard: Callable[[T], None] | None = None) -> T | None:
        """Whatever is wrong with the folder, the job goes on, or ends as it would; and whoever cannot wait sends a signal."""
        folder = self._folder or ""
        try:
            return self._clerk.do(lambda: work(folder), FOLDER_TIMEOUT_S, inbox.raise_pending, discard)
        except OSError as error:
            report.warn(f"--checkpoint-dir {folder}: {otherwise}: {error.strerror or error}")
            return None

    def close(self) -> None:
        self._end_copying()
        is_unused = self._courier is None or self._courier.join()
        if self._depot is not None:
            is_unused = self._depot.close() and is_unused
        if is_unused:  # a number that somebody still writes to must not come to mean another file
            self._vault.close()


Shelf = list[int]  # the files of one rank's snapshots


class Vault:
    """A shelf for each worker of this node, and, with copies, for others' ranks; `most_bytes` is for all of them.

    Any thread may use it. A shelf once made stays, for somebody may be reading it: what is not needed any more is emptied.
    """

    def __init__(self, most_bytes: int, workers: int, has_copies: bool = False) -> None:
        self._each_bytes, self._slots, self._guest_bytes = share_out(most_bytes, workers, has_copies)
        self._own: dict[int, Shelf] = {}  # by rank
        self._shelves: list[Shelf] = []
        self._lock = threading.Lock()

    def assign(self, ranks: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        """The files of each worker, given the rank of each in the job; by local rank."""
        with self._lock:
            free = list(self._shelves)
            own: dict[int, Shelf] = {}
            for rank in ranks.values():
                kept = max(free, key=lambda shelf: _newest_of(shelf, rank), default=None)
                if kept is not None and _newest_of(kept, rank) > NEVER:
                    own[rank] = kept
                    free.remove(kept)
            for rank in ranks.values():
                if rank not in own:
                    own[rank] = self._spare(free, is_any_free=not self._guest_bytes)
            self._own = own
            self._clear_old()
            return {local_rank: tuple(own[rank]) for local_rank, rank in ranks.items()}

    def _spare(self, free: list[Shelf], is_any_free: bool) -> Shelf:
        """An empty one; what is on the others may be wanted elsewhere."""
        for shelf in free:
            if is_any_free or not _marks(shelf):
                free.remove(shelf)
                return shelf
        shelf = [_new_file() for _ in range(self._slots)]
        self._shelves.append(shelf)
        return shelf

    def _clear_old(self) -> None:
        """Of what is nobody's here, what can be wanted least, where it is too much."""
        guests = sorted((one for one in self._shelves if one not in self._own.values()), key=_newest_generation)
        newest = max(map(_newest_generation, self._shelves), default=0)
        while guests and sum(map(_size, guests)) > self._guest_bytes and _newest_generation(guests[0]) < newest:
            _clear(guests.pop(0))

    def variables(self, fds: tuple[int, ...], line_fd: int | None = None) -> dict[str, str]:
        """What a worker with these files is told."""
        return {defaults.ENV_CHECKPOINT: write_place(Place(fds, self._each_bytes, line_fd))}

    # --- for other nodes ---------------------------------------------------------------------------------------------------

    def holdings(self, world: int) -> list[Holding]:
        """All that is here and was made in a world of this size."""
        marks = [mark for shelf in self._all() for _, mark in _marks(shelf) if mark.world == world]
        return list(dict.fromkeys((mark.rank, *mark.moment) for mark in marks))

    def find(self, rank: int, world: int, moment: Moment, count: int | None = None) -> tuple[int, Mark] | None:
        """A snapshot, if it is here; where that was saved more than once, the last, or the one that is asked for."""
        marks = [one for shelf in self._all() for one in _marks(shelf)]
        found = [(fd, mark) for fd, mark in marks if (mark.rank, mark.world, mark.moment) == (rank, world, moment)]
        wanted = [one for one in found if count is None or one[1].count == count]
        return max(wanted, key=lambda one: one[1].count, default=None)

    def newest_own(self, rank: int, world: int) -> tuple[int, Mark] | None:
        """What one of our workers has saved last."""
        found = [(fd, mark) for fd, mark in _marks(self._own[rank]) if (mark.rank, mark.world) == (rank, world)]
        return max(found, key=lambda one: (one[1].generation, one[1].count), default=None)

    def own_room_for(self, mark: Mark, begun: Begun) -> int | str:
        """The file for a snapshot that one of our workers is to have; or why there is none."""
        return self._place(self._own[mark.rank], mark, begun)

    def room_for(self, mark: Mark, begun: Begun) -> int | str:
        """The file for a copy of another node's snapshot; or why there is none."""
        with self._lock:
            guests = [shelf for shelf in self._shelves if shelf not in self._own.values()]
            shelf = max(guests, key=lambda one: _newest_of(one, mark.rank), default=None)
            if shelf is None or _newest_of(shelf, mark.rank) == NEVER:
                shelf = self._spare(guests, is_any_free=False)
            place = self._place(shelf, mark, begun)
            if isinstance(place, str):
                return place
            needed = _size(shelf) - os.fstat(place).st_size + BODY_AT + mark.body_bytes
            guests = [one for one in guests if one is not shelf]
            while needed + sum(map(_size, guests)) > self._guest_bytes:
                oldest = min(guests, key=_newest_generation, default=None)
                if oldest is None or _newest_generation(oldest) >= begun.generation:
                    return f"its partner has {self._guest_bytes:,} bytes for copies, and they are full"
                _clear(oldest)
                guests.remove(oldest)
            return place

    def _place(self, shelf: Shelf, mark: Mark, begun: Begun) -> int | str:
        if BODY_AT + mark.body_bytes > self._each_bytes // self._slots:
            return f"{mark.body_bytes:,} bytes are more than a snapshot may have on its partner"
        marks = [read_mark(os.pread(fd, MARK_BYTES, 0)) for fd in shelf]
        return shelf[slot_to_write(marks, mark.rank, mark.world, begun)]

    def _all(self) -> list[Shelf]:
        with self._lock:
            return list(self._shelves)

    # --- from one job to the next ------------------------------------------------------------------------------------------

    def own(self) -> list[tuple[int, Mark]]:
        """The files with what our workers have saved."""
        return [one for shelf in self._own.values() for one in _marks(shelf)]

    def copies(self, world: int) -> list[tuple[int, Mark]]:
        """Those with copies of what others' workers have saved, in a world of this size."""
        found = [one for shelf in self._all() if shelf not in self._own.values() for one in _marks(shelf)]
        return [(fd, mark) for fd, mark in found if mark.world == world and mark.rank not in self._own]

    def read_back(
        self, folder: str, files: Mapping[int, tuple[int, ...]], ranks: Mapping[int, int], world: int
    ) -> list[tuple[int, int]]:
        """What an earlier job has left for these ranks: files of theirs, and a copy for each, to be put in its place.

        OSError: something cannot be read or trusted, is not whole, or is more than they may have.
        """
        found = find_snapshots(folder, [*ranks.values()], world, self._slots, self._each_bytes)
        copies: list[tuple[int, int]] = []
        try:
            for local_rank, fds in files.items():
                for fd, kept in zip(fds, found.get(ranks[local_rank], ()), strict=False):
                    copies.append((fd, _new_file()))
                    _take_up(kept, copies[-1][1])
        except OSError:
            _close_copies(copies)
            raise
        finally:
            for kept in (one for of_rank in found.values() for one in of_rank):
                os.close(kept.fd)
        return copies

    def close(self) -> None:
        with self._lock:
            for shelf in self._shelves:
                for fd in shelf:
                    os.close(fd)
            self._shelves.clear()
            self._own.clear()


def _new_file() -> int:
    return os.memfd_create("rally-checkpoint", os.MFD_CLOEXEC)


def _close_copies(copies: list[tuple[int, int]]) -> None:
    for _, copy in copies:
        os.close(copy)


def _take_up(found: Found, target: int) -> None:
    make_room(target, found.size)
    copy_file(found.fd, target, BODY_AT, found.size)
    os.pwrite(target, write_mark(found.mark.of_earlier_job()), 0)


def _marks(shelf: Shelf) -> list[tuple[int, Mark]]:
    """The files that hold a snapshot, and which."""
    found = ((fd, read_mark(os.pread(fd, MARK_BYTES, 0))) for fd in shelf)
    return [(fd, mark) for fd, mark in found if mark is not None]


NEVER: Moment = (-(2**63), -1)


def _newest_of(shelf: Shelf, rank: int) -> Moment:
    """Of this rank, if the shelf is its."""
    marks = [mark for _, mark in _marks(shelf)]
    newest = max(marks, key=lambda mark: mark.count, default=None)
    return NEVER if newest is None or newest.rank != rank else max(mark.moment for mark in marks if mark.rank == rank)


def _newest_generation(shelf: Shelf) -> int:
    return max((mark.generation for _, mark in _marks(shelf)), default=NEVER[0])


def _size(shelf: Shelf) -> int:
    return sum(os.fstat(fd).st_size for fd in shelf)


def _clear(shelf: Shelf) -> None:
    for fd in shelf:
        clear_room(fd)
