"""Whether a node was told the same as the job that it wants to join, and the sentence for one that was not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["mismatch"]

STARTED_BY = "started_by"
_NOT_COMPARED = (STARTED_BY, "role", "min_nodes", "max_nodes")
_MOST_SHOWN = 120  # characters of one value: it was written by somebody else
_MOST_NAMED = 8


def mismatch(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """A sentence that names each setting in which we differ from the job, with both values; None where we agree.

    The entry point counts only among nodes of one role: each role may run a program of its own.
    """
    differences = list(_differences(ours, theirs))
    if not differences:
        return None
    more = len(differences) - _MOST_NAMED
    named = ", ".join(differences[:_MOST_NAMED]) + (f", and {more} more" if more > 0 else "")
    starter = _show(theirs.get(STARTED_BY) or "")
    whose = f", which node {starter} started" if starter else ""
    return f"{named}{whose}: all nodes of a job need the same settings"


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    if _nnodes(ours) != _nnodes(theirs):
        yield f"nnodes is {_nnodes(ours)} here and {_nnodes(theirs)} for the job"
    same_role = ours.get("role") == theirs.get("role")
    for key in {**ours, **theirs}:
        if key in _NOT_COMPARED or (key == "entry_point" and not same_role):
            continue
        here, there = _show(ours.get(key)), _show(theirs.get(key))
        if here != there or (key in ours) != (key in theirs):
            yield f"{_show(key).removesuffix('_s')} is {here} here and {there} for the job"


def _nnodes(agreement: Mapping[str, Any]) -> str:
    return f"{_show(agreement.get('min_nodes'))}:{_show(agreement.get('max_nodes'))}"


def _show(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool() | int():
            text = str(value)
        case float():
            text = f"{value:g}"
        case list() | tuple():
            text = "+".join(map(str, value)) or "none"
        case _:
            text = str(value)
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
