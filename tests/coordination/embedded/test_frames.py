"""Frames: cut anywhere on the way they come out whole, and with a seal only as they were sent, in their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.coordination.embedded.frames import LARGE_FRAME_BYTES, SMALL_FRAME_BYTES, FrameError, Inbox, Seal, make_frame

BODIES = st.lists(st.binary(max_size=60), max_size=8)
KEY = b"k" * 32


def inbox(seal: Seal | None = None) -> Inbox:
    box = Inbox()
    box.seal = seal
    return box


def take_all(box: Inbox) -> list[bytes]:
    return list(iter(box.take, None))


@given(BODIES, st.integers(1, 50), st.booleans())
def test_frames_come_out_as_they_were_put_in_however_they_are_cut(bodies: list[bytes], cut: int, sealed: bool) -> None:
    sender = Seal(KEY) if sealed else None
    stream = b"".join(make_frame(body, sender) for body in bodies)
    box = inbox(Seal(KEY) if sealed else None)
    found = []
    for start in range(0, len(stream), cut):
        box.feed(stream[start : start + cut])
        found += take_all(box)
    assert found == bodies
    assert len(box) == 0


def test_a_frame_may_be_small_before_the_welcome_and_large_after() -> None:
    box = inbox()
    box.feed((SMALL_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(FrameError, match="1025 bytes, where 1024 are allowed"):
        box.take()
    box.limit = LARGE_FRAME_BYTES
    assert box.take() is None


@given(st.binary(min_size=1, max_size=40), st.data())
def test_one_changed_bit_breaks_the_seal(body: bytes, data: st.DataObject) -> None:
    """P36: what was changed on the way is not taken."""
    frame = bytearray(make_frame(body, Seal(KEY)))
    bit = data.draw(st.integers(32, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    box = inbox(Seal(KEY))
    box.feed(bytes(frame))
    with pytest.raises(FrameError, match="seal"):
        box.take()


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (1,), (0, 2)], ids=["repeated", "exchanged", "first left out", "one left out"])
def test_frames_out_of_order_break_the_seal(order: tuple[int, ...]) -> None:
    """P36: replayed, reordered and suppressed frames are noticed."""
    sender = Seal(KEY)
    frames = [make_frame(body, sender) for body in (b"first", b"second", b"third")]
    box = inbox(Seal(KEY))
    box.feed(b"".join(frames[index] for index in order))
    with pytest.raises(FrameError, match="seal"):
        take_all(box)


def test_a_frame_too_short_for_a_seal_breaks_it() -> None:
    box = inbox(Seal(KEY))
    box.feed(make_frame(b"short", None))
    with pytest.raises(FrameError, match="seal"):
        box.take()
