"""The kernel's letter for what a process does; D is the one that no signal ends."""

from __future__ import annotations

from rallypoint.processes.activity import look_at

__all__ = ["is_uninterruptible_state", "read_proc_state"]

_UNINTERRUPTIBLE = "D"


def read_proc_state(pid: int) -> str | None:
    """The letter, as in ``ps``; None where there is no such process."""
    sight = look_at(pid)
    return None if sight is None else sight.state


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether the letter, of which `ps` may show more, is that of a process that waits in the kernel for a device."""
    return state is not None and state.startswith(_UNINTERRUPTIBLE)
