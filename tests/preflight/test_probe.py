"""What a call between two nodes says when nobody answers."""

from __future__ import annotations

import socket

import pytest

from rallypoint.checkpoint.transfer import TransferError
from rallypoint.preflight.probe import Probe


def test_whoever_says_nothing_is_given_up_after_the_time_that_is_told() -> None:
    here, there = socket.socketpair()
    probe = Probe(here)
    probe.wait_up_to(1)
    with there, pytest.raises(TransferError, match=r"^it did nothing for 1 s$"):
        probe.hear()
    probe.close()
