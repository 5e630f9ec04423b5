"""The keeper of warm workers, under a warden of its own: what it forks, when it refuses, and what becomes of it."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from rallypoint.processes.context import wait_readable
from rallypoint.processes.kernel import stat_fields
from rallypoint.processes.licence import Licence
from rallypoint.processes.warden_client import Exited, Expired, FailedToStart, Kept, Launch, Report, Rest, Started, WardenClient
from rallypoint.worker_site import in_front

WARM = "import sys; raise SystemExit(10 if 'warm_module' in sys.modules else 20)"
IS_WARM, IS_FRESH = 10, 20


@pytest.fixture
def warden() -> Iterator[WardenClient]:
    client = WardenClient.start()
    yield client
    client.close()


class Group:
    """Workers that all run one program, and find `warm_module` imported."""

    def __init__(self, warden: WardenClient, folder: Path) -> None:
        self.warden, self.folder = warden, folder
        self.module = folder / "warm_module.py"
        self.module.write_text("")
        self.env = {**os.environ, "PYTHONPATH": str(folder)}
        self._heard: list[Report] = []

    def launch(self, code: str, rank: int = 0) -> Launch:
        return Launch(rank, (sys.executable, "-c", textwrap.dedent(code), str(rank)), {**self.env, "RANK": str(rank)}, {})

    def keep(self, code: str = WARM, modules: tuple[str, ...] = ("warm_module",), arguments: tuple[str, ...] = ()) -> None:
        launch = self.launch(code).replace(env={**self.env, "PYTHONPATH": in_front(str(self.folder))})
        self.warden.keep(launch.replace(argv=(*launch.argv, *arguments)), modules)

    def spawn(self, code: str = WARM, count: int = 1, **rest: Any) -> None:
        self.warden.spawn([self.launch(code, rank) for rank in range(count)], **rest)

    def hear(self, kind: type[Report], count: int = 1) -> list[Any]:
        """The next reports of this kind; others wait."""
        deadline = time.monotonic() + PATIENCE_S
        while len(found := [one for one in self._heard if isinstance(one, kind)]) < count:
            assert time.monotonic() < deadline, f"waited for {kind.__name__}, heard {self._heard}"
            self._heard += self.warden.receive(1.0)
        found = found[:count]
        self._heard = [one for one in self._heard if one not in found]
        return found

    def exit_codes(self, count: int = 1) -> list[int]:
        return [one.exitcode for one in sorted(self.hear(Exited, count), key=lambda one: one.local_rank)]


@pytest.fixture
def group(warden: WardenClient, tmp_path: Path) -> Group:
    return Group(warden, tmp_path)


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def named(pids: list[int], name: str) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == name]


def keeper_of(group: Group) -> int:
    (pid,) = named(children_of(group.warden.pid), "rally-keeper")
    return pid


def test_every_worker_finds_what_was_imported_and_goes_its_own_way(group: Group) -> None:
    group.keep("import os, sys; raise SystemExit(int(os.environ['RANK']) + ('warm_module' in sys.modules))")
    group.spawn("import os, sys; raise SystemExit(int(os.environ['RANK']) + ('warm_module' in sys.modules))", 4)
    assert group.exit_codes(4) == [1, 2, 3, 4]


def test_they_are_children_of_the_warden_and_lead_sessions(group: Group) -> None:
    sleep = "import time; time.sleep(60)"
    group.keep(sleep)
    group.spawn(sleep, 2)
    pids = [one.pid for one in group.hear(Started, 2)]
    assert set(pids) < set(children_of(group.warden.pid))
    assert [os.getsid(pid) for pid in pids] == pids
    group.warden.signal_worker(1, signal.SIGUSR1)
    assert group.exit_codes() == [-signal.SIGUSR1]


def test_more_than_one_message_has_room_for(group: Group) -> None:
    group.keep()
    streams = {0: 0, 1: 1, 2: 2, 50: 1}
    group.warden.spawn([group.launch(WARM, rank).replace(fds=streams) for rank in range(100)])
    assert group.exit_codes(100) == [IS_WARM] * 100


def test_one_keeper_serves_group_after_group(group: Group) -> None:
    group.keep()
    group.spawn()
    assert group.exit_codes() == [IS_WARM]
    keeper = keeper_of(group)
    for _ in range(3):
        group.keep(arguments=("others", "than before"))
        group.spawn(count=2)
        assert group.exit_codes(2) == [IS_WARM] * 2
    assert keeper_of(group) == keeper
    assert len(group.hear(Kept)) == 1


def test_what_was_heard_of_it_while_there_were_no_workers_is_for_the_next(
    group: Group, wait_until: Callable[..., object]
) -> None:
    group.keep(modules=("no_such_module",))
    wait_until(lambda: wait_readable([group.warden.fileno()], 1.0))
    assert group.warden.is_idle()
    assert group.warden.disown()
    assert group.warden.is_idle()
    assert [one.state for one in group.warden.receive()] == ["refused"]
    group.spawn()
    assert group.exit_codes() == [IS_FRESH]


def test_it_is_no_leftover_of_the_workers(group: Group) -> None:
    group.keep()
    group.spawn()
    assert group.exit_codes() == [IS_WARM]
    group.warden.watch_rest()
    assert group.hear(Rest)[0].pids == ()


def test_it_ends_with_the_warden(group: Group, alive: Callable[[int], bool], wait_until: Callable[..., object]) -> None:
    group.keep()
    group.spawn()
    group.exit_codes()
    keeper = keeper_of(group)
    os.kill(group.warden.pid, signal.SIGKILL)
    wait_until(lambda: not alive(keeper))


def test_one_that_is_killed_is_rebuilt_and_nobody_is_harmed(group: Group) -> None:
    waits = "import os, sys, time; os.environ['RANK'] == '9' and time.sleep(600); raise SystemExit(10)"
    group.keep(waits)
    group.warden.spawn([group.launch(waits, rank) for rank in (9, 1)])
    assert [one.local_rank for one in group.hear(Exited)] == [1]
    first = keeper_of(group)
    os.kill(first, signal.SIGKILL)
    states = [(one.state, one.why) for one in group.hear(Kept, 3)]
    assert [state for state, _ in states] == ["ready", "rebuilt", "ready"]
    assert states[1][1] == "it ended with signal 9"
    assert keeper_of(group) != first
    group.warden.signal_worker(9, signal.SIGTERM)
    assert group.exit_codes() == [-signal.SIGTERM], "who ran went on"


def test_one_that_is_lost_time_after_time_is_given_up(group: Group) -> None:
    group.module.write_text("import os; os._exit(3)")
    group.keep()
    group.spawn()
    assert group.exit_codes() == [IS_FRESH]
    kept = group.hear(Kept, 3)
    assert [one.state for one in kept] == ["rebuilt", "rebuilt", "refused"]
    assert "3 times, the last time with exit code 3" in kept[-1].why


def test_one_that_does_not_answer_is_given_up(
    group: Group, alive: Callable[[int], bool], wait_until: Callable[..., object]
) -> None:
    group.keep()
    group.spawn()
    assert group.exit_codes() == [IS_WARM]
    keeper = keeper_of(group)
    os.kill(keeper, signal.SIGSTOP)
    group.spawn(count=2)
    assert group.exit_codes(2) == [IS_FRESH] * 2
    assert "did not answer within" in group.hear(Kept, 2)[-1].why
    wait_until(lambda: not alive(keeper))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise ValueError('no luck')", "warm_module could not be imported: ValueError: no luck"),
        ("raise SystemExit(0)", "warm_module could not be imported: SystemExit: 0"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
            "1 thread of what was imported would be missing in a fork",
        ),
    ],
)
def test_it_fails_closed(group: Group, text: str, why: str) -> None:
    group.module.write_text(text)
    group.keep()
    group.spawn(count=2)
    assert group.exit_codes(2) == [IS_FRESH] * 2
    (kept,) = group.hear(Kept)
    assert (kept.state, kept.why) == ("refused", why)
    group.keep()
    group.spawn()
    assert group.exit_codes() == [IS_FRESH], "and it is not tried again"


def test_a_thread_that_ends_before_a_fork_is_no_obstacle(group: Group) -> None:
    """As those of OpenBLAS do."""
    group.module.write_text(
        textwrap.dedent("""
            import os, threading
            over = threading.Event()
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            def end():
                over.set()
                thread.join()
            os.register_at_fork(before=end)
        """)
    )
    group.keep()
    group.spawn()
    assert group.exit_codes() == [IS_WARM]


def test_commands_may_differ_in_the_programs_arguments_only(group: Group) -> None:
    group.keep()
    group.spawn("import sys; raise SystemExit(30 + ('warm_module' in sys.modules))")
    assert group.exit_codes() == [30]
    assert group.hear(Kept, 2)[-1].why == "their commands differ"


def test_a_changed_source_is_imported_anew(group: Group) -> None:
    group.module.write_text("value = 1")
    code = "import sys; raise SystemExit(sys.modules['warm_module'].value)"
    group.keep(code)
    group.spawn(code)
    assert group.exit_codes() == [1]
    group.module.write_text("value = 200")
    group.spawn(code, 2)
    assert group.exit_codes(2) == [200, 200]
    assert [one.state for one in group.hear(Kept, 3)] == ["ready", "rebuilt", "ready"]


def test_nobody_is_started_whose_licence_ends_during_the_import(group: Group, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    group.module.write_text(f"import time; open({str(begun)!r}, 'w').close(); time.sleep(600)")
    licence = Licence()
    try:
        licence.extend(time.monotonic() + 2.0)
        group.keep()
        group.spawn(licence_fd=licence.fileno())
        group.hear(Expired)
        licence.extend(math.inf)
        group.module.write_text("")
        group.spawn(licence_fd=licence.fileno())
        assert group.exit_codes() == [IS_WARM], "the next group has a keeper again"
        assert begun.exists()
    finally:
        licence.close()


def test_a_worker_that_cannot_be_placed_is_told(group: Group) -> None:
    group.keep()
    bad = group.launch(WARM, 1).replace(cpus=(100_000,))
    group.warden.spawn([group.launch(WARM, 0), bad])
    (failed,) = group.hear(FailedToStart)
    assert failed.local_rank == 1
    assert "cannot be bound to CPUs 100000" in failed.reason
    assert group.exit_codes() == [IS_WARM]


def test_a_warden_without_files_to_spare_starts_them_itself(group: Group) -> None:
    streams = {0: 0, 1: 1, 2: 2}
    group.keep()
    group.hear(Kept)
    resource.prlimit(group.warden.pid, resource.RLIMIT_NOFILE, (42, 42))
    group.warden.spawn([group.launch(WARM, rank).replace(fds=streams) for rank in range(6)])
    assert group.exit_codes(6) == [IS_FRESH] * 6
    assert "cannot pass their files on" in group.hear(Kept)[0].why


def test_a_stopped_job_does_not_cost_it_its_keeper(group: Group, wait_until: Callable[..., object]) -> None:
    """Ctrl-Z stops it too, for as long as somebody likes."""
    group.keep()
    group.spawn()
    assert group.exit_codes() == [IS_WARM]
    keeper = keeper_of(group)
    os.kill(group.warden.pid, signal.SIGTSTP)
    wait_until(lambda: stat_fields(keeper)[0] == b"T")
    group.spawn()
    os.kill(group.warden.pid, signal.SIGCONT)
    assert group.exit_codes() == [IS_WARM]
