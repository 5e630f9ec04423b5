"""Finding what Python said last: the traceback in the tail of a worker's stderr.

Most programs end by an exception that nobody recorded, and all that is left of it is text, among other text. The text is
messy: progress bars end without a newline, ``[rank0]: `` stands before every line, terminals get colours, the tail begins in
the middle of a line, and the interpreter complains about other things on its way out. So the text is read as a person would:
a *block* is a header, frames, and a line that names an exception; the last block that ended the program is the answer.

Invariants: nothing here raises, whatever the text; time is linear in its length; no I/O.
"""

from __future__ import annotations

from rallypoint.base.records import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re

__all__ = ["Frame", "Traceback", "find_fatal_error", "find_traceback", "headline", "outside_traceback", "plain_lines"]

_HEADER_TEXT = "Traceback (most recent call last):"
_GROUP_HEADER_TEXT = "  + Exception Group "
_GROUP_MARGIN = "  | "
_NOISE_LINES_MAX = 5  # foreign lines between the frames of one block: other threads and processes write there too
_LINE_CHARS_MAX = 4096  # nobody reads further, and no pattern is run over more


class _Pattern:
    """A regular expression that is compiled when it is used: re takes half a megabyte, and most jobs never fail."""

    def __init__(self, text: str) -> None:
        self._text = text

    @property
    def compiled(self) -> re.Pattern[str]:
        import re

        return re.compile(self._text)  # which remembers it

    def match(self, text: str) -> re.Match[str] | None:
        return self.compiled.match(text)

    def search(self, text: str) -> re.Match[str] | None:
        return self.compiled.search(text)

    def sub(self, by: str, text: str) -> str:
        return self.compiled.sub(by, text)


_ANSI = _Pattern(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_FRAME = _Pattern(r'  File "(.*)", line (\d+)(?:, in (.+))?$')
_FRAME_WITH_PREFIX = _Pattern(r'(|.{0,200}?\S )  File ".*", line \d+')
_EXCEPTION = _Pattern(r"([^\W\d]\w*(?:\.(?:[^\W\d]\w*|<locals>))*)(:(?: (.*))?)?$")
_MARKER = _Pattern(r"[\s^~]+$|\[Previous line repeated ")
_DIGIT = _Pattern(r"\d")
_SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")
# Python says these of exceptions that did not end the program: in a thread, in a finaliser, in a log call, in a task.
_NOT_FATAL = _Pattern(r"Exception ignored |Exception in thread |--- Logging error ---|Error in sys|Task exception was never")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")

_FATAL = "Fatal Python error: "
_FATAL_FRAME = _Pattern(r'  File "(.*)", line (\d+|\?\?\?) in (.+)$')


class Frame(Value):
    """One call; `function` is empty where a file could not be parsed, `source` where Python did not show it."""

    file: str
    line: int
    function: str
    source: str


class Traceback(Value):
    """What was raised, and where; the innermost frame comes last."""

    exception: str  # the type and the first line of the message, as Python printed them
    type_name: str
    message: str
    frames: tuple[Frame, ...]


class _Block(Value):
    """A traceback and the lines that it takes up: from `start` up to, not including, `end`."""

    start: int
    end: int
    fatal: bool
    found: Traceback | None  # None: the block was cut off before its exception


def plain_lines(text: str) -> list[str]:
    """The lines of `text` as a person sees them: no colours, and a carriage return ends a line too."""
    text = _ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return [line[:_LINE_CHARS_MAX].rstrip() for line in text.split("\n")]


def headline(text: str) -> tuple[str, bool]:
    """The one line that speaks for `text`, and whether it names an exception, as ``Type: message`` does."""
    lines = [line for line in plain_lines(text) if _speaks(line)] or [""]
    exception = _EXCEPTION.match(lines[0])
    return (_traceback(exception, lines[1:], "", []).exception, True) if exception else (lines[0], False)


def find_traceback(text: str) -> Traceback | None:
    """The last complete traceback in `text`; one that ended the program is preferred to one that did not."""
    block = _decisive_block(plain_lines(text))
    return block.found if block else None


def outside_traceback(text: str) -> list[str]:
    """The lines of `text` that `find_traceback` did not take, without blank lines at either end."""
    lines = plain_lines(text)
    block = _decisive_block(lines)
    if block:
        del lines[block.start : block.end]
    while lines and not lines[-1]:
        lines.pop()
    first = next((index for index, line in enumerate(lines) if line), 0)
    return lines[first:]


def find_fatal_error(text: str) -> Traceback | None:
    """What the interpreter's fault handler left when a signal such as SIGSEGV ended it; its stacks are innermost first."""
    lines = plain_lines(text)
    starts = [index for index, line in enumerate(lines) if _FATAL in line]
    if not starts:
        return None
    message = lines[starts[-1]].partition(_FATAL)[2]
    frames = _fatal_frames(lines[starts[-1] + 1 :])
    return Traceback(_FATAL + message, _FATAL.rstrip(": "), message, tuple(reversed(frames)))


def _fatal_frames(lines: list[str]) -> list[Frame]:
    """The frames of the thread that crashed; where no thread is marked as current, there are none."""
    current = next((index for index, line in enumerate(lines) if line.startswith("Current thread ")), len(lines))
    frames: list[Frame] = []
    for line in lines[current + 1 :]:
        match = _FATAL_FRAME.match(line)
        if not match:
            break
        file, number, function = match.groups()
        frames.append(Frame(file, int(number) if number.isdigit() else 0, function, ""))
    return frames


def _decisive_block(lines: list[str]) -> _Block | None:
    blocks = [block for block in _blocks(lines) if block.found]
    fatal = [block for block in blocks if block.fatal]
    candidates = fatal or blocks
    return candidates[-1] if candidates else None


def _blocks(lines: list[str]) -> list[_Block]:
    """Every block in order. A block without a header counts if it is a syntax error, or if the header was cut off."""
    blocks: list[_Block] = []
    header_seen = False
    index = 0
    while index < len(lines):
        line = lines[index]
        is_header = line.endswith(_HEADER_TEXT)
        if not is_header and not _FRAME_WITH_PREFIX.match(line):
            index += 1
            continue
        block = _parse_block(lines, index, _is_fatal(lines, index, blocks)) if is_header else _parse_headless(lines, index)
        may_lack_header = block.found is not None and (not header_seen or block.found.type_name in _SYNTAX_ERRORS)
        if is_header or may_lack_header:
            blocks.append(block)
        header_seen = header_seen or is_header
        index = max(block.end, index + 1)
    return blocks


def _is_fatal(lines: list[str], header: int, blocks: list[_Block]) -> bool:
    """Judged by the lines just before the header; a chain of exceptions shares the fate of its first."""
    before = lines[max(header - 3, blocks[-1].end if blocks else 0) : header]
    if any(sentence in line for line in before for sentence in _CHAINED):
        return blocks[-1].fatal if blocks else True
    return not any(_NOT_FATAL.search(line) for line in before)


def _parse_block(lines: list[str], header: int, fatal: bool) -> _Block:
    prefix = lines[header].removesuffix(_HEADER_TEXT)
    if prefix.endswith(_GROUP_HEADER_TEXT):
        prefix = prefix.removesuffix(_GROUP_HEADER_TEXT) + _GROUP_MARGIN
        block = _parse_body(lines, header, header + 1, prefix, fatal)
        return block.replace(end=_end_of_group(lines, block.end, prefix))
    following = lines[header + 1] if header + 1 < len(lines) else ""
    # What stands before the header is either the same on every line, or the rest of somebody's unfinished line.
    if not _FRAME.match(_without_prefix(following, prefix)):
        prefix = ""
    return _parse_body(lines, header, header + 1, prefix, fatal)


def _parse_headless(lines: list[str], first_frame: int) -> _Block:
    match = _FRAME_WITH_PREFIX.match(lines[first_frame])
    return _parse_body(lines, first_frame, first_frame, match[1] if match else "", True)


def _end_of_group(lines: list[str], index: int, prefix: str) -> int:
    """The line after an exception group's last: whatever is drawn inside its margin belongs to it."""
    outer = prefix.removesuffix(_GROUP_MARGIN)
    while index < len(lines) and _without_prefix(lines[index], outer).lstrip(" ").startswith(("|", "+-")):
        index += 1
    return index


def _parse_body(lines: list[str], start: int, index: int, prefix: str, fatal: bool) -> _Block:
    """Frames up to the line that names the exception, forgiving a few foreign lines between them."""
    frames: list[Frame] = []
    noise = 0
    while index < len(lines) and noise <= _NOISE_LINES_MAX and not lines[index].endswith(_HEADER_TEXT):
        line = _without_prefix(lines[index], prefix)
        following = _without_prefix(lines[index + 1], prefix) if index + 1 < len(lines) else ""
        index += 1
        if frame := _FRAME.match(line):
            frames.append(Frame(frame[1], int(frame[2]), frame[3] or "", _source(following)))
        elif not line.startswith(" "):
            exception = _EXCEPTION.match(line)
            goes_on = _FRAME.match(following)
            if exception and not (goes_on and goes_on[3]):  # a frame without a function begins a syntax error, a block by itself
                found = _traceback(exception, lines[index : index + 3], prefix, frames)
                return _Block(start, index, fatal, found)
            noise += 1
    return _Block(start, index, fatal, None)


def _traceback(exception: re.Match[str], following: list[str], prefix: str, frames: list[Frame]) -> Traceback:
    """A message may begin with an empty line, or with a ruler; then the first line that says something speaks for it."""
    type_name, colon, message = exception[1], exception[2], exception[3] or ""
    if colon and not _speaks(message):
        texts = [_without_prefix(line, prefix).strip() for line in following]
        message = next(filter(_speaks, texts), message)
    return Traceback(f"{type_name}: {message}" if message else type_name, type_name, message, tuple(frames))


def _speaks(line: str) -> bool:
    return any(map(str.isalnum, line))


def _source(line: str) -> str:
    """The source line below a frame, or nothing if that line is something else."""
    return line.strip() if line.startswith("    ") and not _MARKER.match(line.strip()) else ""


def _without_prefix(line: str, prefix: str) -> str:
    """`line` without what stands before every line; digits may differ, as the times of a log do."""
    if not prefix or line.startswith(prefix):
        return line[len(prefix) :]
    if line == prefix.rstrip():
        return ""
    if len(line) > len(prefix) and _DIGIT.sub("0", line[: len(prefix)]) == _DIGIT.sub("0", prefix):
        return line[len(prefix) :]
    return line
