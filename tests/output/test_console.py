"""Whatever the blocks in which a pipe gives its bytes, the same lines come out."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.output.console import InterruptFilter, LineCutter, LinePrefixer, matching_lines

PREFIX = b"[0]:"
# Few different bytes, so that line ends are frequent and meet the ends of blocks in every way.
BLOCKS = st.lists(st.lists(st.sampled_from([b"a", b"\xff", b"\n", b"\r", b"longer"]), min_size=1).map(b"".join))


def prefixed(data: bytes, prefix: bytes = PREFIX) -> bytes:
    """What a console must show, said in the simplest way."""
    text = b"".join(prefix + line for line in data.splitlines(keepends=True))
    return text if text.endswith(b"\n") or not text else text + b"\n"


def relay(blocks: list[bytes], prefix: bytes, max_line_bytes: int) -> list[bytes]:
    cutter, prefixer = LineCutter(max_line_bytes), LinePrefixer(prefix)
    shown = [prefixer.feed(cutter.feed(block)) for block in blocks]
    return [*shown, prefixer.feed(cutter.rest()), prefixer.end_line()]


@given(BLOCKS, st.sampled_from([b"", PREFIX, b"\xf0 odd: "]), st.sampled_from([1, 5, 1 << 20]))
def test_lines_do_not_depend_on_blocks(blocks: list[bytes], prefix: bytes, max_line_bytes: int) -> None:
    """P33, P34: all lines, each with its prefix, the last one included, and not a byte more."""
    assert b"".join(relay(blocks, prefix, max_line_bytes)) == prefixed(b"".join(blocks), prefix)


@given(BLOCKS)
def test_only_whole_lines_come_before_the_end(blocks: list[bytes]) -> None:
    """P33: nothing that another worker's line could be put into."""
    cutter = LineCutter()
    assert all(lines.endswith((b"\n", b"\r")) for block in blocks if (lines := cutter.feed(block)))


def test_a_line_too_long_comes_in_pieces() -> None:
    cutter, prefixer = LineCutter(max_line_bytes=4), LinePrefixer(PREFIX)
    shown = [prefixer.feed(cutter.feed(block)) for block in (b"abc", b"def", b"g", b"h\nnext\n")]
    assert shown == [b"", PREFIX + b"abcdef", b"", b"gh\n" + PREFIX + b"next\n"]


@pytest.mark.parametrize(
    ("texts", "is_bar"),
    [
        ([b"loss 1"], False),
        ([b"\r10%"], True),
        ([b"\r", b"10%", b"|"], True),
        ([b"a\r10%\nloss"], False),
        ([b"a\n\r10%"], True),
        ([b"\r10%", b"\n", b"loss"], False),
        ([b"\r10%\r"], False),
    ],
)
def test_a_bar_is_what_comes_after_a_carriage_return(texts: list[bytes], is_bar: bool) -> None:
    """F03"""
    prefixer = LinePrefixer(b"")
    for text in texts:
        prefixer.feed(text)
    assert prefixer.is_inside_bar == is_bar


def test_a_long_line_of_single_bytes_costs_no_quadratic_time() -> None:
    cutter = LineCutter()
    start = time.process_time()
    for _ in range(200_000):
        cutter.feed(b"x")
    assert len(cutter.feed(b"\n")) == 200_001
    assert time.process_time() - start < 5.0


def test_matching_lines() -> None:
    assert matching_lines(b"loss 1\nstep 2\nloss 3", (b"loss", b"nan"), PREFIX) == b"[0]:loss 1\n[0]:loss 3\n"
    assert matching_lines(b"step 2\n", (b"loss",), PREFIX) == b""
    assert matching_lines(b"", (b"loss",), PREFIX) == b""


FRAMES = b'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\n    ~^^\n'
INTERRUPT = FRAMES + b"KeyboardInterrupt\n"
FAILURE = FRAMES + b"ValueError: no\n"
HANDLING = b"\nDuring handling of the above exception, another exception occurred:\n\n"


def quiet(blocks: list[bytes], **limits: int) -> bytes:
    interrupts = InterruptFilter(**limits)
    return b"".join([*(interrupts.feed(block) for block in blocks), interrupts.rest()])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (INTERRUPT, b""),
        (FRAMES + b"KeyboardInterrupt: told to\n", b""),
        (FRAMES + b"KeyboardInterrupt", b""),
        (b"before\n" + INTERRUPT + b"after\n", b"before\nafter\n"),
        (INTERRUPT + INTERRUPT, b""),
        (FAILURE, FAILURE),
        (FAILURE + b"after\n", FAILURE + b"after\n"),
        (FAILURE + INTERRUPT, FAILURE),
        (FAILURE + b"told\n" + INTERRUPT, FAILURE + b"told\n"),
        (FAILURE + HANDLING + INTERRUPT, b""),
        (FAILURE + HANDLING + FAILURE, FAILURE + HANDLING + FAILURE),
        (INTERRUPT + HANDLING + FAILURE, HANDLING + FAILURE),
        (b"Exception ignored in: <module 'threading'>\n" + INTERRUPT, b""),
        (b"KeyboardInterrupt\n", b"KeyboardInterrupt\n"),
        (FRAMES, FRAMES),
    ],
)  # fmt: skip
def test_interrupts_are_left_out(text: bytes, shown: bytes) -> None:
    """P20: no traceback on Ctrl-C, and nothing else hidden."""
    assert quiet([text]) == shown
    assert quiet(text.splitlines(keepends=True)) == shown


@given(
    st.lists(st.sampled_from([*FAILURE.splitlines(keepends=True), *HANDLING.splitlines(keepends=True), b"x\n", b"\r", b" y\n"]))
)
def test_whatever_is_no_interrupt_is_shown(lines: list[bytes]) -> None:
    assert quiet(lines) == b"".join(lines)
    assert quiet([b"".join(lines)]) == b"".join(lines)


def test_what_is_too_long_to_hold_is_shown() -> None:
    text = FRAMES + 100 * b"  more\n" + b"KeyboardInterrupt\n"
    assert quiet([text], max_held_bytes=200) == text
