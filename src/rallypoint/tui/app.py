"""The live screen itself, drawn by Textual.

It draws what `tui.model` and `tui.lines` decide, and decides nothing. What takes time is done by threads of its own, which send
messages: one looks at the job, one reads the log of the chosen rank, and each question to the job has its own. They are no
workers of Textual, which would be waited for at the end: whoever quits is not to wait for a node that does not answer.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.geometry import Region, Size
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input, Static

from rallypoint.base.text import fitted
from rallypoint.errors import RallypointError
from rallypoint.tui import lines, model
from rallypoint.tui.lines import GAP, Line, LogPlace, Placed, Question
from rallypoint.tui.model import BAD, DIM, ORDERS, PLAIN, WARN, Gpu, Key, Row, Watch
from rallypoint.tui.source import Tail

__all__ = ["Source", "TopApp"]

LOOK_EVERY_S = 1.0
SAID_FOR_S = 10.0  # how long an answer of the job stays to be read
MOST_TAIL = 200
PANELS = ("log", "restarts", "nodes")
STYLES = {PLAIN: Style(), DIM: Style(dim=True), WARN: Style(color="yellow"), BAD: Style(color="red", bold=True)}


class Source(Protocol):
    """Where it all comes from; `tui.source.JobSource`, or a recording."""

    here: str

    def look(self, before: Watch) -> Watch: ...
    def gpus(self) -> Mapping[int, Gpu]: ...
    def tail(self, place: LogPlace, choice: int, most: int) -> Tail: ...
    def ask(self, question: Question) -> str: ...
    def stacks(self, words: Sequence[str]) -> str: ...


# --- widgets ---------------------------------------------------------------------------------------------------------------


class Lines(ScrollView):
    """Some lines of text, of which only those are drawn that are in sight, and only those again that have changed."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self._lines: Sequence[Line] = ()

    def show(self, shown: Sequence[Line]) -> None:
        before, self._lines = self._lines, shown
        if len(before) != len(shown):
            self.virtual_size = Size(self.size.width, len(shown))
        top = self.scroll_offset.y
        for y in range(top, top + self.size.height):
            if before[y : y + 1] != shown[y : y + 1]:
                self.refresh_line(y)

    def render_line(self, y: int) -> Strip:
        y += self.scroll_offset.y
        text, mood = self._lines[y] if y < len(self._lines) else ("", PLAIN)
        base = self.rich_style
        return Strip([Segment(text, base + STYLES[mood])]).adjust_cell_length(self.size.width, base)


class RankTable(ScrollView, can_focus=False):
    """The rows, of which one is chosen. Keys are the app's: what has the focus may lose it when the screen is laid out anew."""

    class Chosen(Message):
        """Another row is."""

    def __init__(self) -> None:
        super().__init__(id="table")
        self._rows: Sequence[Row] = ()
        self._columns: tuple[Placed, ...] = ()
        self._drawn: dict[int, tuple[str, ...]] = {}
        self._index = 0

    @property
    def chosen(self) -> Row | None:
        return self._rows[self._index] if self._index < len(self._rows) else None

    def show(self, rows: Sequence[Row], columns: tuple[Placed, ...]) -> None:
        """These from now on. Who is chosen stays so, wherever it is now."""
        key, is_laid_out_anew = self.chosen.key if self.chosen is not None else None, columns != self._columns
        before, self._rows, self._columns = self._rows, rows, columns
        index = model.index_of(rows, key)
        if index is None or index != self._index:
            self._index = min(self._index, max(len(rows) - 1, 0)) if index is None else index
            is_laid_out_anew = True
            self._keep_in_sight()
        if len(rows) != len(before):
            self.virtual_size = Size(self.size.width, len(rows))
        if is_laid_out_anew or len(rows) != len(before):
            self.refresh()
        else:
            self._refresh_cells()
        if index is None:
            self.post_message(self.Chosen())

    def _refresh_cells(self) -> None:
        top = self.scroll_offset.y
        for y in range(top, min(top + self.size.height, len(self._rows))):
            cells, drawn = self._cells(y), self._drawn.get(y, ())
            if len(cells) != len(drawn):
                self.refresh_line(y)
                continue
            for place, cell, was in zip((*self._columns, None), cells, drawn, strict=True):
                if cell != was and place is None:
                    self.refresh_line(y)
                elif cell != was and place is not None:
                    self.refresh(Region(place.start, y - top, place.width, 1))

    def _cells(self, y: int) -> tuple[str, ...]:
        """What is drawn of a row: its cells, and last of all its mood."""
        return (*lines.cells_of(self._rows[y], self._columns), self._rows[y].mood)

    def render_line(self, y: int) -> Strip:
        y += self.scroll_offset.y
        base = self.rich_style
        if y >= len(self._rows):
            return Strip.blank(self.size.width, base)
        *cells, mood = self._drawn[y] = self._cells(y)
        style = base + STYLES[mood] + (Style(reverse=True) if y == self._index else Style())
        return Strip([Segment((" " * GAP).join(cells), style)]).adjust_cell_length(self.size.width, style)

    def choose(self, by: int) -> None:
        index = min(max(self._index + by, 0), max(len(self._rows) - 1, 0))
        if index != self._index:
            self.refresh_line(self._index)
            self._index = index
            self.refresh_line(index)
            self._keep_in_sight()
            self.post_message(self.Chosen())

    def choose_page(self, by: int) -> None:
        self.choose(by * max(self.size.height - 1, 1))

    def on_click(self, event: events.Click) -> None:
        self.choose(event.y + self.scroll_offset.y - self._index)

    def _keep_in_sight(self) -> None:
        top, height = self.scroll_offset.y, max(self.size.height, 1)
        if not top <= self._index < top + height:
            self.scroll_to(y=self._index if self._index < top else self._index - height + 1, animate=False)


class Main(Screen[None]):
    """What is shown if no question and no text is. Nothing but the field to find ranks by ever has the focus."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("tab", "app.panel", show=False)]
    AUTO_FOCUS = ""


class Confirm(ModalScreen[bool]):
    """Yes or no."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "dismiss(True)"), Binding("n,escape,q", "dismiss(False)")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Static(Text(f"{self._text}\n\ny  yes    n  no"), id="dialog")


class Page(ModalScreen[None]):
    """A text to be read, as long as it may be."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark", "dismiss")]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        with Vertical(id="page"):
            yield Static(Text(f"{self._title} (Esc closes it)"), classes="title")
            yield Lines("page-lines")

    def on_mount(self) -> None:
        self.query_one(Lines).focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self._fold)

    def _fold(self) -> None:
        shown = self.query_one(Lines)
        shown.show([(text, PLAIN) for text in lines.folded(self._text, max(shown.size.width, 20))])


# --- messages of the threads -----------------------------------------------------------------------------------------------


class Looked(Message):
    def __init__(self, watch: Watch, gpus: Mapping[int, Gpu]) -> None:
        super().__init__()
        self.watch, self.gpus = watch, gpus


class TailRead(Message):
    def __init__(self, tail: Tail) -> None:
        super().__init__()
        self.tail = tail


class Said(Message):
    def __init__(self, line: Line) -> None:
        super().__init__()
        self.line = line


class StacksRead(Message):
    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self.title, self.text = title, text


# --- the screen ------------------------------------------------------------------------------------------------------------


class TopApp(App[str]):
    """Returns what is to be said after it has ended by itself."""

    CSS = """
    Screen { layout: vertical; }
    #head { height: 2; text-style: bold; }
    #notice { height: 1; }
    #titles, .title, #keys { height: 1; background: $panel; color: $text-muted; }
    #table { height: 5; scrollbar-size-vertical: 1; overflow-x: hidden; }
    #panels { height: 1fr; }
    #side { width: 2fr; display: none; margin-left: 1; }
    #main { width: 3fr; }
    Lines { scrollbar-size-vertical: 1; overflow-x: hidden; }
    #find { display: none; height: 1; border: none; }
    Confirm, Page { align: center middle; }
    #dialog { width: 60; max-width: 90%; height: auto; padding: 1 2; background: $panel; border: round $warning; }
    #page { background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", priority=False),
        Binding("ctrl+z", "suspend_process"),
        Binding("ctrl+l", "redraw"),
        Binding("s", "ask('stop')"),
        Binding("r", "ask('restart')"),
        Binding("d", "ask('drain')"),
        Binding("t", "stacks"),
        Binding("l", "log"),
        Binding("o", "order"),
        Binding("O", "turn"),
        Binding("slash", "find"),
        Binding("escape", "show_all"),
        Binding("question_mark", "help"),
        Binding("up,k", "choose(-1)"),
        Binding("down,j", "choose(1)"),
        Binding("pageup", "choose_page(-1)"),
        Binding("pagedown", "choose_page(1)"),
        Binding("home,g", "choose(-1000000)"),
        Binding("end,G", "choose(1000000)"),
        Binding("shift+up", "scroll_panel(-1)"),
        Binding("shift+down", "scroll_panel(1)"),
    ]
    ENABLE_COMMAND_PALETTE = False
    TITLE = "rallypoint top"

    def __init__(self, source: Source, watch: Watch) -> None:
        super().__init__()
        self.animation_level = "none"
        self.theme = "textual-dark"
        self._source, self._watch, self._first = source, watch, watch
        self._gpus: Mapping[int, Gpu] = {}
        self._rows: list[Row] = []
        self._tail = Tail("", ())
        self._said: tuple[Line, float] = (("", PLAIN), 0.0)
        self._panel, self._order, self._is_turned, self._wanted, self._log_choice = 0, 0, False, "", 0
        self._is_ending, self._log_is_wanted = threading.Event(), threading.Event()
        self._place = LogPlace("")
        # They are kept, because to look for one finds only those of the screen on top, which may be a question.
        self._head_lines, self._notice_lines = Lines("head"), Lines("notice")
        self._titles, self._table = Static(id="titles"), RankTable()
        self._panel_title, self._panel_lines = Static(id="panel-title", classes="title"), Lines("panel")
        self._side, self._side_lines = Vertical(id="side"), Lines("side-lines")
        for shown in (self._head_lines, self._notice_lines, self._panel_lines, self._side_lines):
            shown.can_focus = False
        self._find = Input(id="find", placeholder="ranks, part of a node's name or of a state; Esc shows all", compact=True)

    def get_default_screen(self) -> Main:
        return Main()

    def compose(self) -> ComposeResult:
        yield self._head_lines
        yield self._notice_lines
        yield self._titles
        yield self._table
        with Horizontal(id="panels"):
            with Vertical(id="main"):
                yield self._panel_title
                yield self._panel_lines
            with self._side:
                yield Static("restarts", classes="title")
                yield self._side_lines
        yield self._find
        yield Static(lines.KEYS, id="keys")

    def on_mount(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self.app_resume_signal.subscribe(self, lambda _: self.action_redraw())  # others have written there meanwhile
        self._start(self._look_on)
        self._start(self._read_on)
        self.set_interval(LOOK_EVERY_S, self._draw_words)  # ages grow, whether or not there is an answer
        self._draw()

    def on_unmount(self) -> None:
        self._is_ending.set()
        self._log_is_wanted.set()

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    # --- threads -----------------------------------------------------------------------------------------------------------

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="rallypoint-top", daemon=True).start()

    def _tell(self, message: Message) -> None:
        """From any thread."""
        if not self._is_ending.is_set():
            try:
                self.post_message(message)
            except RuntimeError:  # its loop has ended meanwhile
                return

    def _look_on(self) -> None:
        watch = self._first
        while not self._is_ending.is_set():
            began_at = time.monotonic()
            try:
                watch = self._source.look(watch)
            except (RallypointError, OSError) as error:
                watch = model.unanswered(watch, str(error))
            self._tell(Looked(watch, self._source.gpus()))
            if model.is_over(watch):
                return
            self._is_ending.wait(max(began_at + LOOK_EVERY_S - time.monotonic(), 0.1))

    def _read_on(self) -> None:
        while not self._is_ending.is_set():
            place, choice = self._place, self._log_choice
            tail = self._source.tail(place, choice, MOST_TAIL)
            if place is self._place:
                self._tell(TailRead(tail))
            self._log_is_wanted.wait(LOOK_EVERY_S)
            self._log_is_wanted.clear()

    # --- what they say -----------------------------------------------------------------------------------------------------

    def on_looked(self, message: Looked) -> None:
        self._watch, self._gpus = message.watch, message.gpus
        if model.is_over(self._watch):
            self.exit(lines.last_words(self._watch))
            return
        self._draw()

    def on_tail_read(self, message: TailRead) -> None:
        self._tail = message.tail
        self._draw_panel()

    def on_said(self, message: Said) -> None:
        self._said = message.line, time.monotonic()
        self._draw_words()

    def on_stacks_read(self, message: StacksRead) -> None:
        self.push_screen(Page(message.title, message.text))

    def on_rank_table_chosen(self) -> None:
        self._choose_log()

    # --- drawing -----------------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        if not self.is_running:
            return
        self._rows = model.rows_of(self._watch, self._gpus, self._source.here)
        arranged = model.arranged(self._rows, ORDERS[self._order], self._is_turned, self._wanted)
        room = lines.room_for(self.size.width, self.size.height, len(arranged))
        self._table.styles.height = room.table
        self._side.display = room.has_side
        columns = lines.columns_for(self.size.width - 1, self._rows)  # one is the scrollbar's
        self._table.show(arranged, columns)
        titles = Text((" " * GAP).join(lines.titles_of(columns)))
        titles.highlight_words([ORDERS[self._order].title], Style(bold=True, underline=True))
        self._titles.update(titles)
        self._choose_log()
        self._draw_words()
        self._draw_panel()

    def _draw_words(self) -> None:
        now, width = time.monotonic(), self.size.width
        line, at = self._said
        if not line[0] or now - at > SAID_FOR_S:
            line = lines.notice(self._watch, now)
        if not line[0] and self._wanted:
            line = (f"only ranks that fit {self._wanted!r}; Esc shows all", DIM)
        self._head_lines.show([(fitted(text, width), PLAIN) for text in lines.headlines(self._watch, self._rows)])
        self._notice_lines.show([(fitted(line[0], width), line[1])])

    def _draw_panel(self) -> None:
        now, side, panel = time.monotonic(), self._side_lines, self._panel_lines
        width = panel.size.width
        match PANELS[self._panel]:
            case "restarts":
                title, shown = "restarts", lines.timeline(self._watch, now, width)
            case "nodes":
                title, shown = "nodes", lines.node_lines(self._watch, width)
            case _:
                title = self._tail.title
                texts = self._tail.texts[-max(panel.size.height, 1) :]
                shown = [(text, PLAIN) for text in (lines.wrapped(texts[0], width) if self._tail.is_note else texts)]
        self._panel_title.update(Text(fitted(title, width)))
        panel.show(shown)
        side.show(lines.timeline(self._watch, now, side.size.width))

    def _choose_log(self) -> None:
        chosen = self._table.chosen
        key: Key | None = chosen.key if chosen is not None else None
        place = lines.log_place(self._watch, key, self._source.here)
        if place != self._place:
            self._place = place
            self._log_is_wanted.set()

    # --- keys --------------------------------------------------------------------------------------------------------------

    def action_redraw(self) -> None:
        self.screen.refresh()
        for widget in self.screen.query("*"):
            widget.refresh()

    def action_choose(self, by: int) -> None:
        self._table.choose(by)

    def action_choose_page(self, by: int) -> None:
        self._table.choose_page(by)

    def action_panel(self) -> None:
        self._panel = (self._panel + 1) % len(PANELS)
        self._draw_panel()

    def action_scroll_panel(self, by: int) -> None:
        self._panel_lines.scroll_relative(y=by, animate=False)

    def action_order(self) -> None:
        self._order = (self._order + 1) % len(ORDERS)
        self._draw()

    def action_turn(self) -> None:
        self._is_turned = not self._is_turned
        self._draw()

    def action_log(self) -> None:
        self._log_choice += 1
        self._log_is_wanted.set()

    def action_help(self) -> None:
        self.push_screen(Page("keys", lines.HELP))

    def action_find(self) -> None:
        self._find.display = True
        self._find.focus()

    def action_show_all(self) -> None:
        self._find.value = ""
        self._hide_find()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value
        self._draw()

    def on_input_submitted(self) -> None:
        self._hide_find()

    def _hide_find(self) -> None:
        self._find.display = False
        self.screen.set_focus(None)

    def action_ask(self, what: str) -> None:
        chosen = self._table.chosen
        question = lines.question(what, self._watch, chosen.key if chosen is not None else None)
        if isinstance(question, str):
            self.post_message(Said((question, WARN)))
            return

        def answered(is_yes: bool | None) -> None:
            if is_yes:
                self._start(lambda: self._ask(question))

        self.push_screen(Confirm(question.text), answered)

    def _ask(self, question: Question) -> None:
        try:
            self._tell(Said((self._source.ask(question), WARN)))
        except (RallypointError, OSError) as error:
            self._tell(Said((f"it could not be done: {error}", BAD)))

    def action_stacks(self) -> None:
        chosen = self._table.chosen
        asked = lines.stacks_of(self._watch, chosen.key if chosen is not None else None, self._source.here)
        if isinstance(asked, str):
            self.post_message(Said((asked, WARN)))
            return
        self.post_message(Said((f"asking for the {asked[0]}...", DIM)))
        self._start(lambda: self._read_stacks(*asked))

    def _read_stacks(self, title: str, words: Sequence[str]) -> None:
        try:
            self._tell(StacksRead(title, self._source.stacks(words)))
        except RallypointError as error:
            self._tell(Said((str(error), BAD)))
