"""Pages with signs of life: what is written is read, what is torn is not, and no content can confuse the reader."""

from __future__ import annotations

from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.hangs import pulse_page as layout
from rallypoint.hangs.pulse_page import Pulse, read

NOW = 1000.0


def a_page(**words: float) -> bytearray:
    page = bytearray(layout.blank())
    for name, value in words.items():
        memoryview(page).cast("d" if isinstance(value, float) else "q")[getattr(layout, name)] = value
    return page


def test_nobody_has_spoken_in_a_blank_page() -> None:
    assert read(memoryview(a_page()), NOW) is None


def test_a_page_of_another_layout_says_nothing() -> None:
    assert read(memoryview(a_page(OWNER=5, VERSION=layout.MAGIC + 1)), NOW) is None


def test_what_is_written_is_read() -> None:
    page = a_page(OWNER=5, ANNOUNCED_AT=10.0, SIGN_AT=20.0, STEP=8, BASE=1, CHECKPOINT_AT=15.0)
    assert read(memoryview(page), NOW) == Pulse(5, "running", None, 10.0, 20.0, 7, 15.0)


def test_a_section_goes_before_the_phase_outside() -> None:
    page = a_page(OWNER=5, ANNOUNCED_AT=10.0, BASE=1, LIMIT_S=60.0, NAME_LENGTH=4)
    page[layout.NAME_AT : layout.NAME_AT + 4] = b"load"
    pulse = read(memoryview(page), NOW)
    assert pulse is not None
    assert (pulse.phase, pulse.limit_s) == ("load", 60.0)


def test_a_limit_counts_only_in_its_section() -> None:
    pulse = read(memoryview(a_page(OWNER=5, BASE=1, LIMIT_S=60.0)), NOW)
    assert pulse is not None
    assert pulse.limit_s is None


@pytest.mark.parametrize("known", [None, Pulse(5, "running", None, 10.0, 20.0, 7, 15.0)])
def test_a_page_that_stays_torn_says_what_it_said_before(known: Pulse | None) -> None:
    assert read(memoryview(a_page(OWNER=5, SEQUENCE=3)), NOW, known) is known


class ChangingPage:
    """Memory that another changes while it is read: each reading of a part finds the next sequence number."""

    def __init__(self, sequences: list[int]) -> None:
        self._page = a_page(OWNER=5)
        self._sequences = sequences

    def __getitem__(self, part: slice) -> memoryview:
        memoryview(self._page).cast("q")[layout.SEQUENCE] = self._sequences.pop(0)
        return memoryview(self._page)[part]


def test_a_page_that_changes_while_it_is_read_is_read_again() -> None:
    page = ChangingPage([2, 4, 5, 5, 6, 6, 8])
    assert read(page, NOW) is not None  # type: ignore[arg-type]
    assert page._sequences == [8]


@given(st.binary(min_size=layout.PAGE_BYTES - 16, max_size=layout.PAGE_BYTES - 16), st.integers(1, 2**62))
def test_no_content_confuses_the_reader(content: bytes, owner: int) -> None:
    page = a_page(OWNER=owner)
    page[16:] = content
    memoryview(page).cast("q")[layout.SEQUENCE] = 0
    pulse = read(memoryview(page), NOW)
    assert pulse is not None
    assert pulse.phase.isprintable()
    assert 0 < len(pulse.phase.encode()) <= layout.NAME_BYTES
    assert pulse.limit_s is None or (isfinite(pulse.limit_s) and pulse.limit_s > 0)
    for told in (pulse.announced_at, pulse.sign_at, pulse.checkpoint_at):
        assert told is None or 0 < told <= NOW
    assert pulse.step is None or pulse.step >= 0


@given(st.text(max_size=100))
def test_any_name_fits(name: str) -> None:
    cut = layout.cut_name(name)
    assert 0 < len(cut) <= layout.NAME_BYTES
    assert cut.decode().isprintable()
