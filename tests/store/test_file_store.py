"""The store in a file: its operations, its bytes, who deletes it, and what becomes of it when writers die or disks are full."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.store import file_store
from rallypoint.store import file_store as journal
from rallypoint.store.file_store import MAX_KEY_BYTES, MAX_VALUE_BYTES, FileStore
from rallypoint.store.hash_store import HashStore
from rallypoint.store.interface import Store, StoreError, StoreTimeoutError
from rallypoint.store.prefix_store import PrefixStore

PROCESS_TIMEOUT_S = 60


def record(key: bytes, value: bytes) -> bytes:
    return struct.pack("<I", len(key)) + key + struct.pack("<I", len(value)) + value


FIRST = record(b"refcount/", b"1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> FileStore:
    store = FileStore(path)
    store.set_timeout(0.01)
    return store


def contents(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list_keys()}


def in_child(work: Callable[[], object]) -> None:
    """Do `work` in a process that is forked off, and fail where it fails."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def start_program(text: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", text, *map(str, args)], stdout=subprocess.PIPE, text=True)


def run_program(text: str, *args: object) -> str:
    process = start_program(text, *args)
    output, _ = process.communicate(timeout=PROCESS_TIMEOUT_S)
    assert process.returncode == 0
    return output


# --- one operation at a time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "expected", "answer", "after"),
    [
        (None, "", b"new", b"new"),
        (None, "old", b"old", None),
        ("old", "old", b"new", b"new"),
        ("other", "old", b"other", b"other"),
        ("", "", b"new", b"new"),
    ],
)
def test_compare_set(store: FileStore, before: str | None, expected: str, answer: bytes, after: bytes | None) -> None:
    if before is not None:
        store.set("k", before)
    assert store.compare_set("k", expected, "new") == answer
    assert contents(store).get("k") == after


@pytest.mark.parametrize(("before", "after"), [("", 1), ("40", 41), ("12x", 13), (str(2**63 - 1), -(2**63))])
def test_a_counter_goes_on_from_the_number_that_its_value_begins_with(store: FileStore, before: str, after: int) -> None:
    store.set("n", before)
    assert store.add("n", 1) == after
    assert store.get("n") == str(after).encode()


def test_what_is_no_number_cannot_be_added_to(store: FileStore) -> None:
    store.set("n", "many")
    with pytest.raises(StoreError, match=r"'/n'.*many"):
        store.add("n", 1)
    assert store.get("n") == b"many"


def test_append_delete_and_list(store: FileStore) -> None:
    store.append("a", "x")
    store.append("a", b"y")
    store.multi_set(["b", "größer"], ["1", "2"])
    assert store.multi_get(["größer", "a"]) == [b"2", b"xy"]
    assert [store.delete_key("b"), store.delete_key("b")] == [True, False]
    assert sorted(store.list_keys()) == ["a", "größer"]
    assert store.num_keys() == 3, "torch counts the key in which the users are counted too"


def test_multi_set_refuses_unequal_lists(store: FileStore) -> None:
    with pytest.raises(ValueError, match="2 keys and 1 values"):
        store.multi_set(["a", "b"], ["1"])
    assert store.list_keys() == []


@pytest.mark.parametrize("operation", ["wait", "check", "multi_get"])
def test_a_lone_key_is_not_taken_for_its_letters(store: FileStore, operation: str) -> None:
    with pytest.raises(TypeError, match=r"\['key'\]"):
        getattr(store, operation)("key")


def test_odd_keys_do_not_meet_those_of_the_store(store: FileStore, path: Path) -> None:
    odd = ["", "/", "-", "-/k", "refcount/", "cleanup/", "-refcount/", "\0"]
    store.multi_set(odd, odd)
    assert contents(FileStore(path)) == {key: key.encode() for key in odd}
    assert all(store.delete_key(key) for key in odd)
    assert contents(FileStore(path)) == {}


@pytest.mark.parametrize("operation", ["queue_push", "queue_pop", "queue_len"])
def test_there_are_no_queues_as_in_torchs(store: FileStore, operation: str) -> None:
    with pytest.raises(NotImplementedError, match=f"FileStore has no {operation}"):
        getattr(store, operation)("q", *["v"][: operation == "queue_push"])
    assert not store.has_extended_api()


def test_a_clone_has_the_same_keys_and_its_own_timeout(store: FileStore) -> None:
    twin = store.clone()
    twin.set("k", "v")
    twin.set_timeout(timedelta(seconds=7))
    assert store.get("k") == b"v"
    assert (store.timeout, twin.timeout, twin.path) == (timedelta(seconds=0.01), timedelta(seconds=7), store.path)


def test_the_path_stays_right_when_the_working_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = FileStore(file_name="store", world_size=2)
    monkeypatch.chdir("/")
    store.set("k", "v")
    assert (store.path, store.timeout) == (str(tmp_path / "store"), timedelta(seconds=300))


def test_a_world_size_that_is_no_number_is_refused(path: Path) -> None:
    with pytest.raises(TypeError):
        FileStore(path, None)  # type: ignore[arg-type]
    assert not path.exists()


def test_it_carries_a_prefix_store_and_a_barrier(path: Path) -> None:
    def arrive() -> None:
        PrefixStore("job", FileStore(path)).barrier("b", 2, 10)

    other = threading.Thread(target=arrive)
    other.start()
    arrive()
    other.join(10)
    assert sorted(FileStore(path).list_keys()) == ["job/b/last_member", "job/b/num_members"]


# --- against the store in memory -------------------------------------------------------------------------------------------

keys = st.sampled_from(["a", "b", ""])
values = st.one_of(st.binary(max_size=3), st.integers(-9, 9).map(lambda n: str(n).encode()))
operations = st.one_of(
    st.tuples(st.sampled_from(["set", "append"]), keys, values),
    st.tuples(st.just("add"), keys, st.integers(-99, 99)),
    st.tuples(st.just("compare_set"), keys, values, values),
    st.tuples(st.sampled_from(["delete_key", "get"]), keys),
    st.tuples(st.sampled_from(["check", "wait", "multi_get"]), st.lists(keys)),
    st.tuples(st.just("multi_set"), st.lists(keys, min_size=2, max_size=2), st.lists(values, min_size=1, max_size=2)),
)


def result_of(store: Store, operation: str, *args: object) -> object:
    try:
        return getattr(store, operation)(*args)
    except (StoreError, ValueError) as error:
        return type(error), str(error).replace("'/", "'")


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(st.tuples(st.integers(0, 1), operations), max_size=20))
def test_two_users_of_a_file_see_what_one_store_in_memory_would_hold(steps: list[tuple[int, tuple[str, object]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        users, model = [FileStore(f"{folder}/s"), FileStore(f"{folder}/s")], HashStore()
        for each in (*users, model):
            each.set_timeout(0)
        for number, (operation, *args) in steps:
            assert result_of(users[number], operation, *args) == result_of(model, operation, *args)
        late = FileStore(f"{folder}/s")
        assert contents(users[0]) == contents(users[1]) == contents(late) == contents(model)
        assert late.num_keys() == model.num_keys() + 1


# --- its bytes -------------------------------------------------------------------------------------------------------------


def test_it_writes_the_bytes_that_torch_writes(path: Path) -> None:
    store = FileStore(path, 2)
    store.set("k", "vv")
    store.add("n", 5)
    store.compare_set("k", "vv", "w")
    store.delete_key("k")
    records = [(b"/k", b"vv"), (b"/n", b"5"), (b"/k", b"w"), (b"-/k", b"")]
    assert path.read_bytes() == FIRST + b"".join(record(*pair) for pair in records)
    del store
    assert path.read_bytes().endswith(record(b"cleanup/", b"1") + record(b"refcount/", b"0"))


def test_it_reads_the_bytes_that_torch_wrote(path: Path) -> None:
    torchs = (
        "09000000 726566636f756e742f 01000000 31"  # refcount/
        "02000000 2f6b 02000000 7676  02000000 2f6e 01000000 35  02000000 2f65 00000000"  # set, add, set to nothing
        "03000000 2d2f6b 00000000"  # delete_key
    )
    path.write_bytes(bytes.fromhex(torchs))
    assert contents(FileStore(path)) == {"n": b"5", "e": b""}


def test_nothing_is_written_where_nothing_changes(store: FileStore, path: Path) -> None:
    store.set("k", "v")
    before = path.read_bytes()
    store.set("k", "v")
    store.append("k", "")
    store.compare_set("k", "x", "y")
    store.delete_key("gone")
    store.add("n", 0)
    assert path.read_bytes() == before + record(b"/n", b"0"), "a counter that was not there is something new"


def test_only_what_is_new_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = FileStore(path), FileStore(path)
    writer.set("large", bytes(1_000_000))
    assert len(reader.get("large")) == 1_000_000
    asked: list[int] = []
    read = journal._read
    monkeypatch.setattr(journal, "_read", lambda fd, place, count: asked.append(count) or read(fd, place, count))
    for number in range(100):
        writer.add("n", 1)
        assert reader.get("n") == str(number + 1).encode()
        assert reader.check(["large"])
    assert max(asked) < 200
    assert len(asked) == 200, "a look at a file that has not grown reads nothing"


@pytest.mark.parametrize(("key_bytes", "value_bytes"), [(MAX_KEY_BYTES, 1), (1, MAX_VALUE_BYTES + 1)], ids=["key", "value"])
def test_what_is_too_long_is_refused(store: FileStore, path: Path, key_bytes: int, value_bytes: int) -> None:
    store.set("here", "1")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="is the most"):
        store.set("k" * key_bytes, bytes(value_bytes))
    assert path.read_bytes() == before
    assert contents(store) == {"here": b"1"}


# --- waiting ---------------------------------------------------------------------------------------------------------------


def test_a_key_that_another_process_writes_is_seen_soon(path: Path) -> None:
    store = FileStore(path)
    store.set_timeout(30)
    seen_at: list[float] = []

    def read() -> None:
        assert store.multi_get(["a", "b"]) == [b"1", b"2"]
        seen_at.append(time.monotonic())

    reader = threading.Thread(target=read)
    reader.start()

    def write() -> None:
        other = FileStore(path)
        other.set("b", "2")
        other.set("a", "1")

    in_child(write)
    written_at = time.monotonic()
    reader.join(30)
    assert seen_at[0] - written_at < 1


def test_wait_names_the_keys_that_did_not_come(store: FileStore) -> None:
    store.set("here", "1")
    with pytest.raises(StoreTimeoutError, match=r"0\.02 s.*'gone', 'lost'.*1 of 3"):
        store.wait(["here", "gone", "lost"], timedelta(seconds=0.02))
    with pytest.raises(StoreTimeoutError, match=r"0\.01 s.*'k'"):
        store.get("k")


def test_a_wait_for_nothing_or_for_what_is_there_is_over_at_once(store: FileStore) -> None:
    store.set("k", "v")
    store.wait([], 0)
    store.wait(["k"], 0)
    assert store.check([])


def test_a_long_wait_looks_a_hundred_times_a_second_and_not_more_often(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 10:
            store.set("k", "v")

    monkeypatch.setattr(file_store.time, "sleep", sleep)
    store.wait(["k"], 60)
    assert pauses[0] == 0.001
    assert pauses[-1] == 0.01
    assert pauses == sorted(pauses)


# --- who deletes it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "users_at_once", "is_deleted"),
    [(1, 1, True), (2, 1, False), (2, 2, True), (3, 2, False), (1, 2, True), (0, 1, True), (-1, 1, False), (-1, 2, False)],
)
def test_the_last_of_all_users_deletes_the_file(path: Path, world_size: int, users_at_once: int, is_deleted: bool) -> None:
    """The table is what torch's store was seen to do."""
    users = [FileStore(path, world_size) for _ in range(users_at_once)]
    while users:
        assert path.exists()
        users.pop()
    assert path.exists() is not is_deleted


def test_users_that_come_one_after_the_other_are_counted_too(path: Path) -> None:
    for _ in range(3):
        store = FileStore(path, 3)
        assert store.add("n", 1) <= 3
        del store
    assert not path.exists()


def test_a_store_and_its_clones_are_one_user(path: Path) -> None:
    """A clone must not take the place of a user that is still to come."""
    store = FileStore(path, 2)
    twin = store.clone()
    del store
    twin.set("k", "v")
    del twin
    assert FileStore(path, 2).get("k") == b"v"
    assert not path.exists()


def test_a_store_in_a_cycle_leaves_when_it_is_collected(path: Path) -> None:
    store = FileStore(path, 1)
    store.itself = store  # type: ignore[attr-defined]
    del store
    gc.collect()
    assert not path.exists()


def test_a_process_leaves_when_it_ends(path: Path) -> None:
    program = "import sys; from rallypoint.store.file_store import FileStore; s = FileStore(sys.argv[1], 1); s.set('k', 'v')"
    run_program(program, path)
    assert not path.exists()


def test_a_process_that_was_forked_off_uses_the_store_and_is_not_counted(path: Path) -> None:
    users = [FileStore(path, 1)]
    users[0].set("k", "v")

    def use_and_drop() -> None:
        assert users[0].get("k") == b"v"
        users[0].add("n", 1)
        users.pop()

    in_child(use_and_drop)
    assert users[0].get("n") == b"1"
    users.pop()
    assert not path.exists()


def test_a_fork_in_the_middle_of_an_operation_leaves_the_child_a_store_that_works(path: Path, wait_until: Any) -> None:
    store = FileStore(path)
    reached, released = threading.Event(), threading.Event()

    def pause(found: Any) -> None:
        reached.set()
        released.wait(10)

    busy = threading.Thread(target=lambda: store._user.journal.look(pause))
    busy.start()
    wait_until(reached.is_set)
    in_child(lambda: store.set("k", "v"))
    released.set()
    busy.join(10)
    assert store.get("k") == b"v"


def test_a_fork_in_the_middle_of_a_write_does_not_hand_the_lock_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = FileStore(path), FileStore(path)
    reading_end, writing_end = os.pipe()
    pids: list[int] = []

    def fork(values: Any) -> None:
        pids.append(os.fork())
        if pids[-1] == 0:
            os.read(reading_end, 1)
            os._exit(0)

    store._user.journal.change([], fork)
    monkeypatch.setattr(journal, "LOCK_TIMEOUT_S", 1.0)
    try:
        other.set("k", "v")
    finally:
        os.write(writing_end, b"x")
        os.waitpid(pids[0], 0)
        os.close(reading_end)
        os.close(writing_end)


def test_a_file_that_the_last_user_deletes_just_then_is_not_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"")
    try_lock = journal._try_lock
    attempts: list[int] = []

    def delete_first(fd: int, how: int) -> bool:
        if not attempts:
            path.unlink()
        attempts.append(fd)
        return try_lock(fd, how)

    monkeypatch.setattr(journal, "_try_lock", delete_first)
    store = FileStore(path, 1)
    assert len(attempts) == 2
    assert path.read_bytes() == FIRST
    store.set("k", "v")


def test_a_store_whose_file_is_gone_leaves_in_silence(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = FileStore(path, 1)
    path.unlink()
    del store
    assert not path.exists()
    assert capfd.readouterr() == ("", "")


# --- files that are not as they should be ----------------------------------------------------------------------------------


def test_a_record_that_was_cut_off_is_passed_over_and_cut_away(path: Path) -> None:
    """A writer may die at any byte."""
    value = b"longer than the record that is written over what is left of it"
    complete = [FIRST, record(b"/k", value), record(b"/n", b"12"), record(b"-/k", b"")]
    data = b"".join(complete)
    ends = [len(b"".join(complete[:count])) for count in range(len(complete) + 1)]
    expected = [{}, {}, {"k": value}, {"k": value, "n": b"12"}, {"n": b"12"}]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = max(index for index, end in enumerate(ends) if end <= cut)
        store = FileStore(path)
        assert contents(store) == expected[whole]
        store.set("new", "1")
        assert contents(FileStore(path)) == {**expected[whole], "new": b"1"}
        assert path.read_bytes().startswith(data[: ends[whole]] + record(b"refcount/", b"2" if whole else b"1"))


def test_readers_pass_over_a_record_that_was_cut_off(path: Path) -> None:
    store = FileStore(path)
    store.set("k", "v")
    with path.open("ab") as file:
        file.write(record(b"/j", b"never")[:-1])
    assert contents(store) == {"k": b"v"}
    assert not store.check(["j"])
    store.set("l", "w")
    assert contents(store) == contents(FileStore(path)) == {"k": b"v", "l": b"w"}


NO_STORES = [
    b"a", b"hello", b"# a program\nimport os\n" * 99, bytes(100), b"\xff" * 100, b"\x7fELF\2\1\1\0", b"\t\0\0\0refcounts",
    record(b"k", b"v"), record(b"", b""), record(b"-", b""), record(b"/k" * MAX_KEY_BYTES, b""), FIRST + b"\xff" * 9,
    struct.pack("<I", 2) + b"/k" + struct.pack("<I", MAX_VALUE_BYTES + 1), FIRST + record(b"other/", b""),
]  # fmt: skip


@pytest.mark.parametrize("data", NO_STORES, ids=lambda data: repr(data[:24]))
def test_a_file_that_is_no_store_is_refused_and_not_touched(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"/store' is not a store, or is damaged at byte \d+"):
        FileStore(path, 0)
    assert path.read_bytes() == data


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.binary(max_size=60), st.binary(max_size=30).map(lambda data: FIRST + record(b"/k", b"v") + data)))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        path.write_bytes(data)
        try:
            store = FileStore(path)
        except StoreError:
            assert path.read_bytes() == data
        else:
            store.set("new", "1")
            assert contents(FileStore(path))["new"] == b"1"


def shorten(path: Path) -> None:
    os.truncate(path, 20)


def shorten_and_regrow(path: Path) -> None:
    """Also what a new file looks like that was given the number of the old one."""
    path.write_bytes(FIRST + record(b"/other", b"x" * 100))


def replace(path: Path) -> None:
    (path.parent / "new").write_bytes(path.read_bytes())
    (path.parent / "new").rename(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (os.unlink, "was deleted"),
        (shorten, "replaced or cut"),
        (shorten_and_regrow, "replaced or cut"),
        (replace, "replaced or cut"),
    ],
)
@pytest.mark.parametrize("use", [lambda store: store.get("k"), lambda store: store.set("j", "w")], ids=["get", "set"])
def test_a_file_that_is_taken_away_from_its_users_is_an_error(
    path: Path, damage: Callable[[Path], None], message: str, use: Callable[[Store], object]
) -> None:
    """What is in the file of another job must not be taken for our own."""
    store = FileStore(path, 1)
    store.set("k", "v" * 30)
    damage(path)
    after = path.read_bytes() if path.exists() else None
    with pytest.raises(StoreError, match=f"{path}.*{message} while the store was in use"):
        use(store)
    del store
    assert (path.read_bytes() if path.exists() else None) == after


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"the folder '{tmp_path}/none/deep'.*does not exist"):
        FileStore(tmp_path / "none" / "deep" / "store")


@pytest.mark.parametrize(("name", "message"), [(".", "Is a directory"), ("pipe", "not a regular file"), ("x" * 300, "too long")])
def test_what_cannot_be_a_file_is_refused(tmp_path: Path, name: str, message: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match=message):
        FileStore(tmp_path / name)


def test_a_file_that_may_not_be_opened_is_named(path: Path) -> None:
    path.touch(mode=0)
    with unprivileged(), pytest.raises(StoreError, match=f"cannot open the store's file '{path}': Permission denied"):
        FileStore(path)


@contextlib.contextmanager
def unprivileged() -> Any:
    """As somebody who is not root, who may do anything."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_full_disk_is_an_error_and_leaves_the_store_as_it_was(path: Path) -> None:
    """A limit on the size of files does the same to a writer: half of the record goes in, then there is no more room."""
    store = FileStore(path)
    store.set("k", "v")
    before = path.read_bytes()

    def write_too_much() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        for write in (lambda: store.set("big", bytes(5000)), lambda: store.append("k", bytes(5000))):
            with pytest.raises(StoreError, match=f"'{path}' of the store failed: {os.strerror(errno.EFBIG)}"):
                write()
        assert path.read_bytes() == before
        assert contents(store) == {"k": b"v"}
        store.set("small", "1")

    in_child(write_too_much)
    assert contents(store) == contents(FileStore(path)) == {"k": b"v", "small": b"1"}


def test_a_signal_in_the_middle_of_a_write_leaves_no_half_record(
    store: FileStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.set("k", "v")
    before = path.read_bytes()

    def interrupted(fd: int, data: bytes, place: int) -> None:
        os.pwrite(fd, data[:3], place)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(journal, "_write_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.set("j", "w")
    assert path.read_bytes() == before
    assert contents(store) == {"k": b"v"}


@pytest.mark.parametrize("use", [lambda store: store.get("k"), lambda store: store.set("j", "w")], ids=["get", "set"])
def test_a_lock_that_is_never_given_back_ends_in_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Store], object]
) -> None:
    """Its holder may have been stopped, and no timeout of a store may depend on that."""
    monkeypatch.setattr(journal, "LOCK_TIMEOUT_S", 0.02)
    reader, writer = FileStore(path), FileStore(path)
    writer.set("k", "v")
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreTimeoutError, match=r"waited 0\.02 s for the lock"):
            use(reader)
    use(reader)


def test_a_reader_that_knows_everything_needs_no_lock(store: FileStore, path: Path) -> None:
    store.set("k", "v")
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert store.get("k") == b"v"


# --- many at once ----------------------------------------------------------------------------------------------------------

COUNT = """
import sys
if sys.argv[1] == "torch":
    from torch.distributed import FileStore
else:
    from rallypoint.store.file_store import FileStore
store = FileStore(sys.argv[2], int(sys.argv[3]))
store.add("started", 1)
while store.add("started", 0) < int(sys.argv[3]):
    pass
for number in range(int(sys.argv[4])):
    store.add("n", 1)
    store.set(f"{sys.argv[5]}/{number}", str(number))
"""


def count_together(path: Path, kinds: list[str], rounds: int) -> None:
    """No increment and no key of the others may be lost; one user more sees to it that the file is there to be looked at."""
    store = FileStore(path, len(kinds) + 1)
    programs = [start_program(COUNT, kind, path, len(kinds), rounds, who) for who, kind in enumerate(kinds)]
    for program in programs:
        program.communicate(timeout=PROCESS_TIMEOUT_S)
    assert [program.returncode for program in programs] == [0] * len(kinds)
    expected = {f"{who}/{number}": str(number).encode() for who in range(len(kinds)) for number in range(rounds)}
    found = contents(store)
    assert found.pop("n") == str(len(kinds) * rounds).encode()
    assert found.pop("started") == str(len(kinds)).encode()
    assert found == expected


def test_processes_lose_nothing_of_each_other(path: Path) -> None:
    count_together(path, ["ours"] * 3, 200)


def test_threads_lose_nothing_of_each_other(path: Path) -> None:
    shared = FileStore(path)

    def work(store: FileStore) -> None:
        for _ in range(100):
            store.add("n", 1)
            store.append("a", "x")

    threads = [threading.Thread(target=work, args=[store]) for store in (shared, shared, shared.clone(), FileStore(path))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (shared.get("n"), len(shared.get("a"))) == (b"400", 400)


WRITE_UNTIL_KILLED = """
import sys
from rallypoint.store.file_store import FileStore
store = FileStore(sys.argv[1])
while True:
    count = store.add("n", 1)
    store.set("large", bytes([count % 256]) * 2_000_000)
    print(count, flush=True)
"""


def test_a_writer_that_is_killed_does_no_harm(path: Path) -> None:
    store = FileStore(path)
    for lines in (1, 2, 3):
        writer = start_program(WRITE_UNTIL_KILLED, path)
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(lines)]
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=PROCESS_TIMEOUT_S)
        count = store.add("n", 0)
        assert count >= told[-1]
        large = store.get("large")
        assert len(large) == 2_000_000
        assert large[0] in {count % 256, (count - 1) % 256}
        assert set(large) == {large[0]}


# --- with torch's store on the same file -----------------------------------------------------------------------------------


@pytest.fixture
def torch_store(path: Path) -> Callable[..., Any]:
    """``torch_store(world_size)`` is torch's store on the file of the test."""
    distributed = pytest.importorskip("torch.distributed")

    def make(world_size: int = -1) -> Any:
        store = distributed.FileStore(str(path), world_size)
        store.set_timeout(timedelta(seconds=10))
        return store

    return make


@pytest.mark.torch
def test_torch_reads_what_we_write_and_we_what_torch_writes(path: Path, torch_store: Callable[..., Any]) -> None:
    ours, torchs = FileStore(path, 2), torch_store(2)
    for one, other in ((ours, torchs), (torchs, ours)):
        one.set("k", "v")
        assert other.get("k") == b"v"
        assert one.add("n", 5) == other.add("n", -5) + 5
        assert other.compare_set("k", "v", "w") == one.get("k") == b"w"
        one.set("empty", "")
        assert (other.get("empty"), other.add("empty", 2), one.add("empty", 1)) == (b"", 2, 3)
        one.multi_set(["größer", ""], ["1", "2"])
        assert other.multi_get(["größer", ""]) == [b"1", b"2"]
        one.set("large", bytes(3_000_000))
        assert len(other.get("large")) == 3_000_000
        assert one.num_keys() == other.num_keys() == 7
        assert one.delete_key("k")
        assert not other.check(["k"])
        assert one.num_keys() == other.num_keys() == 6
    assert ours.list_keys() == ["n", "empty", "größer", "", "large"]


@pytest.mark.torch
def test_each_waits_for_the_keys_of_the_other(path: Path, torch_store: Callable[..., Any]) -> None:
    ours, torchs = FileStore(path), torch_store()
    for reader, writer, key in ((ours, torchs, "a"), (torchs, ours, "b")):
        waiting = threading.Thread(target=reader.wait, args=[[key], timedelta(seconds=10)])
        waiting.start()
        writer.set(key, "1")
        waiting.join(10)
        assert not waiting.is_alive()


@pytest.mark.torch
@pytest.mark.parametrize("torch_leaves_last", [False, True])
def test_whoever_of_both_is_last_deletes_the_file(path: Path, torch_store: Callable[..., Any], torch_leaves_last: bool) -> None:
    users = [FileStore(path, 2), torch_store(2)]
    users[0].set("k", "v")
    del users[not torch_leaves_last]
    assert path.exists()
    assert users[0].get("k") == b"v"
    users.clear()
    assert not path.exists()


@pytest.mark.torch
def test_torch_can_read_a_file_again_that_we_have_mended(path: Path, torch_store: Callable[..., Any]) -> None:
    """Left alone with half a record, torch's store waits for the rest of it forever."""
    path.write_bytes(FIRST + record(b"/k", b"v") + record(b"/j", b"never")[:-1])
    FileStore(path)
    assert torch_store().get("k") == b"v"


@pytest.mark.torch
def test_processes_of_both_lose_nothing_of_each_other(path: Path) -> None:
    count_together(path, ["ours", "torch", "ours", "torch"], 200)
