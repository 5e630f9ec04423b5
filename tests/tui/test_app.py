"""The live screen itself, on a terminal that Textual plays, with views that were recorded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.conftest import PATIENCE_S
from tests.tui.recorded import Recording, job, node, worker

from rallypoint.inspection.view import JobView, job_of
from rallypoint.tui import model
from rallypoint.tui.app import Confirm, Page, TopApp
from rallypoint.tui.model import Watch

textual_pilot = pytest.importorskip("textual.pilot")

Check = Callable[["Screen"], Awaitable[None]]


class Screen:
    """What a test sees of it, and the keys that it presses."""

    def __init__(self, app: TopApp, pilot: textual_pilot.Pilot[str], source: Recording) -> None:
        self.app, self.pilot, self.source = app, pilot, source

    @property
    def text(self) -> list[str]:
        """The lines as they are on the terminal."""
        width, height = self.app.size
        strips = self.app.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip)[:width].rstrip() for strip in strips][:height]

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail("waited in vain; the screen:\n" + "\n".join(self.text))
            await self.pilot.pause(0.02)

    async def until_shown(self, *texts: str) -> None:
        await self.until(lambda: all(any(text in line for line in self.text) for text in texts))


def on_screen(source: Recording, check: Check, size: tuple[int, int] = (80, 24)) -> str | None:
    """Returns what the screen has to say after its end."""

    async def run() -> str | None:
        app = TopApp(source, Watch("tri"))
        async with app.run_test(size=size) as pilot:
            await check(Screen(app, pilot, source))
            return app.return_value

    return asyncio.run(run())


def views(count: int = 3, **more: int) -> list[JobView]:
    return [job(at_s=float(at_s), **more) for at_s in range(count)]  # type: ignore[arg-type]


def rank_rows(text: Sequence[str]) -> list[str]:
    start = next(index for index, line in enumerate(text) if "RANK" in line)
    return [line for line in text[start + 1 :] if " host-" in line and "MiB" in line]


def test_a_small_terminal_shows_ranks_restarts_and_the_log() -> None:
    async def check(screen: Screen) -> None:
        await screen.until_shown("tri: running", " steps/s", "rank 0 says line 49")
        assert len(screen.text) == 24
        assert screen.text[0].endswith("3 nodes, 6 ranks, 1 of 3 restarts, generation 2")
        assert len(rank_rows(screen.text)) == 6
        assert screen.text[-1].startswith("s Stop")
        assert screen.text[-1].endswith("q Quit")
        await screen.press("tab")
        await screen.until_shown("no more data", "●")
        await screen.press("tab")
        await screen.until_shown("FAILED", "/logs/run")

    on_screen(Recording(views(9)), check)


def test_a_large_terminal_has_log_and_restarts_side_by_side(tmp_path: Path) -> None:
    async def check(screen: Screen) -> None:
        await screen.until_shown("rank 0 says line 49", "●", "GPU MEM", "12.0 GiB")
        assert len(screen.text) == 40
        picture = screen.app.export_screenshot()
        (tmp_path / "top.svg").write_text(picture)
        assert "says&#160;line&#160;49" in picture

    on_screen(Recording(views(), gpus={4000: (87.0, 12 << 30)}), check, (120, 40))


def test_a_thousand_ranks_are_drawn_where_they_are_looked_at() -> None:
    """A refresh takes at most 100 ms of the drawing thread's own time, and only the cells that changed are drawn again."""

    async def check(screen: Screen) -> None:
        await screen.until_shown("125 nodes, 1000 ranks")
        await screen.press("end")
        await screen.until_shown("rank 999 says line 49")
        assert rank_rows(screen.text)[-1].startswith(" 999  124 host-124")
        screen.app._is_ending.set()  # nobody else looks from here on
        table, drawn = screen.app._table, []
        render_line = table.render_line
        table.render_line = lambda y: drawn.append(y) or render_line(y)  # type: ignore[assignment,func-returns-value,method-assign]
        spent: list[float] = []
        watch = screen.app._watch
        for at_s in (1.0, 2.0, 3.0, 4.0, 5.0):
            watch = model.seen(watch, job(125, 8, at_s), time.monotonic() + at_s)
            began = time.thread_time()
            screen.app._watch = watch
            screen.app._draw()
            await screen.pilot.pause()
            spent.append(time.thread_time() - began)
        await screen.until_shown(" 150 ")
        assert min(spent) <= 0.1  # 30 ms on a machine that is busy with other things
        assert 0 < len(drawn) <= 6 * table.size.height

    source = Recording([job(125, 8)])
    on_screen(source, check)


def test_only_cells_that_changed_are_drawn_again() -> None:
    async def check(screen: Screen) -> None:
        await screen.until_shown("rank 0 says line 49")
        table, asked = screen.app._table, []
        refresh = table.refresh
        table.refresh = lambda *regions, **more: asked.extend(regions or ["all"]) or refresh(*regions, **more)  # type: ignore[assignment,method-assign]
        screen.app._draw()
        assert asked == []
        (changed, *_), nodes = rank_of(screen, 3), screen.app._watch.job.nodes
        other = nodes[1].replace(workers=(nodes[1].workers[0], changed.replace(memory_bytes=999 << 20)))
        screen.app._watch = screen.app._watch.replace(job=job_of([nodes[0], other, nodes[2]]))
        screen.app._draw()
        assert [(region.y, region.height, region.width) for region in asked] == [(3, 1, 8)]
        await screen.until_shown("999 MiB")

    on_screen(Recording([job()]), check)


def rank_of(screen: Screen, rank: int) -> list:
    assert screen.app._watch.job is not None
    return [one for found in screen.app._watch.job.nodes for one in found.workers if one.rank == rank]


def test_keys_choose_a_rank_and_its_log() -> None:
    async def check(screen: Screen) -> None:
        await screen.until_shown("rank 0 says line 49")
        await screen.press("down", "down", "down")
        await screen.until_shown("rank 3, pid 4003 on host-1: stdout.log")
        await screen.press("l")
        await screen.until_shown("rank 3, pid 4003 on host-1: stderr.log")
        await screen.press("home", "up")
        await screen.until_shown("rank 0 says line 49")
        await screen.pilot.click("#table", offset=(3, 4))
        await screen.until_shown("rank 4 says line 49")

    on_screen(Recording(views()), check)


def test_the_chosen_rank_stays_so_wherever_the_order_puts_it() -> None:
    steps = {0: 10, 1: 40, 2: 30, 3: 20}

    async def check(screen: Screen) -> None:
        await screen.until_shown("rank 0 says line 49")
        await screen.press("down")
        await screen.press("o")
        await screen.until(lambda: [row.split()[0] for row in rank_rows(screen.text)] == ["0", "3", "2", "1"])
        assert screen.app._table.chosen is not None
        assert screen.app._table.chosen.rank == 1
        await screen.press("O")
        await screen.until(lambda: [row.split()[0] for row in rank_rows(screen.text)] == ["1", "2", "3", "0"])
        await screen.until_shown("rank 1 says line 49")

    on_screen(Recording([job_of([node(0, [worker(rank, rank, 0.0, step=step) for rank, step in steps.items()])])]), check)


def test_only_some_ranks_are_shown_while_there_is_something_to_find() -> None:
    async def check(screen: Screen) -> None:
        await screen.until_shown("6 ranks")
        await screen.press("slash", *"2-4", "enter")
        await screen.until(lambda: len(rank_rows(screen.text)) == 3)
        await screen.until_shown("only ranks that fit '2-4'; Esc shows all")
        await screen.press("escape")
        await screen.until(lambda: len(rank_rows(screen.text)) == 6)
        await screen.press("slash", *"sq", "escape")  # these are words there, no keys
        await screen.until(lambda: len(rank_rows(screen.text)) == 6)
        assert screen.source.asked == []

    on_screen(Recording(views()), check)


@pytest.mark.parametrize(
    ("key", "question", "what", "target"),
    [
        ("s", "Stop tri on all of its 3 nodes?", "stop", ""),
        ("r", "Restart all workers of tri?", "restart", ""),
        ("d", "Have node 1 host-1 stop its workers and leave", "drain", "id-1"),
    ],
)
def test_the_job_is_steered_by_a_key_and_a_yes(key: str, question: str, what: str, target: str) -> None:
    async def check(screen: Screen) -> None:
        await screen.until_shown("6 ranks")
        await screen.press("down", "down", key)
        await screen.until_shown(question)
        await screen.press("enter", "n")
        await screen.until(lambda: not isinstance(screen.app.screen, Confirm))
        assert screen.source.asked == []
        await screen.press(key)
        await screen.until(lambda: isinstance(screen.app.screen, Confirm))
        await screen.press("y")
        await screen.until_shown(f"told to {what}")
        assert [(one.what, one.node) for one in screen.source.asked] == [(what, target)]

    on_screen(Recording(views()), check)


def test_what_the_job_refuses_is_said() -> None:
    async def check(screen: Screen) -> None:
        await screen.until_shown("6 ranks")
        await screen.press("r")
        await screen.until(lambda: isinstance(screen.app.screen, Confirm))
        await screen.press("y")
        await screen.until_shown("it could not be done: its workers do not run")

    on_screen(Recording(views(), refuses="its workers do not run: it is starting"), check)


def test_stacks_and_help_are_pages_to_be_read() -> None:
    async def check(screen: Screen) -> None:
        await screen.until_shown("6 ranks")
        await screen.press("down", "t")
        await screen.until_shown("stacks of rank 1, pid 4001", "=== process of 4001")
        looks = screen.source.looks
        await screen.until(lambda: screen.source.looks > looks)  # the job is looked at meanwhile
        await screen.press("end")
        await screen.until_shown("line 39 in step")
        await screen.press("escape")
        await screen.until(lambda: not isinstance(screen.app.screen, Page))
        await screen.press("end", "t")
        await screen.until_shown("stacks of rank 5 on host-2", "=== process of tri --rank 5")
        assert screen.source.shown == [("4001",), ("tri", "--rank", "5")]
        await screen.press("escape")
        await screen.until(lambda: not isinstance(screen.app.screen, Page))
        await screen.press("question_mark")
        await screen.until_shown("stop the job on all of its nodes")
        await screen.press("q")
        await screen.until(lambda: not isinstance(screen.app.screen, Page))

    on_screen(Recording(views()), check)


def test_a_job_that_regroups_is_followed_and_one_that_ends_ends_the_screen() -> None:
    """What is left on the terminal says where to read on."""
    waiting = job(2, 0, phase="waiting", note="2 of 3 nodes are there")
    is_seen: list[bool] = []

    def course() -> Iterator[JobView | str]:
        yield job()
        while not is_seen:
            yield waiting
        yield job(at_s=9.0)
        while True:
            yield gone

    async def check(screen: Screen) -> None:
        await screen.until_shown("waiting for", "2 of 3 nodes are there")
        is_seen.append(True)
        await screen.until(lambda: not screen.app.is_running or screen.app._exit)

    gone = "no job of this user runs on this machine"
    said = on_screen(Recording(course()), check)
    assert said is not None
    assert said.startswith("tri: it has ended on this machine; last seen running at step 190")
    assert said.endswith("rallypoint explain /logs/run")


def test_a_look_that_fails_is_told_and_tried_again() -> None:
    class Torn(Recording):
        is_seen = False

        def look(self, before: Watch) -> Watch:
            if self.looks and not self.is_seen:
                raise OSError("the folder of the sockets is gone")
            return super().look(before)

    async def check(screen: Screen) -> None:
        await screen.until_shown("it does not answer: the folder of the sockets is gone")
        source.is_seen = True
        await screen.until(lambda: source.looks > 1)
        await screen.until(lambda: not screen.text[2])

    source = Torn(views())
    on_screen(source, check)


def test_q_quits_although_the_job_does_not_answer() -> None:
    class Stuck(Recording):
        def look(self, before: Watch) -> Watch:
            if self.looks:
                while not self.is_free:
                    time.sleep(0.01)
            return super().look(before)

    source = Stuck(views())
    source.is_free = False

    async def check(screen: Screen) -> None:
        await screen.until_shown("6 ranks")
        await screen.press("q")
        await screen.until(lambda: screen.app._exit)

    try:
        assert on_screen(source, check) is None
        assert source.looks == 1
    finally:
        source.is_free = True


def test_a_terminal_that_becomes_smaller_is_drawn_anew() -> None:
    async def check(screen: Screen) -> None:
        await screen.until_shown("●", "PID")
        await screen.pilot.resize_terminal(60, 12)
        await screen.until(lambda: "PID" not in screen.text[3] and "RANK" in screen.text[3])
        assert max(map(len, screen.text)) <= 60

    on_screen(Recording(views()), check, (120, 40))
