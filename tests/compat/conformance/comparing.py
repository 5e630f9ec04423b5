"""Compare the facts of two runs: each item of what a case returns is one fact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

MISSING = "nothing"
FAILED = "the case itself"  # the fact of a case that could not be run


class Disagreement(NamedTuple):
    """One fact on which the two differ."""

    case: str
    fact: str
    torch: Any
    ours: Any

    @property
    def aspect(self) -> str:
        return f"{self.case}: {self.fact}"

    def __str__(self) -> str:
        return f"{self.aspect}\n    torch: {self.torch!r}\n    ours:  {self.ours!r}"


def is_same(torch: Any, ours: Any) -> bool:
    """Equal; but an exception may be more than torch's, and a message may say more."""
    if isinstance(torch, dict) and isinstance(ours, dict):
        if "raised" in torch and "raised" in ours:
            return torch["raised"][0] in ours["raised"] and torch.get("code") == ours.get("code") and says_as_much(torch, ours)
        return torch.keys() == ours.keys() and all(is_same(torch[key], ours[key]) for key in torch)
    if isinstance(torch, list) and isinstance(ours, list):
        return len(torch) == len(ours) and all(map(is_same, torch, ours))
    return bool(torch == ours)


def says_as_much(torch: dict[str, Any], ours: dict[str, Any]) -> bool:
    said = ours.get("says", {})
    return all(said.get(word) for word, is_said in torch.get("says", {}).items() if is_said)


def facts_in(answers: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for case, facts in answers.items():
        for fact in facts:
            yield case, fact


def disagreements(torch: dict[str, Any], ours: dict[str, Any]) -> list[Disagreement]:
    """By case and fact, in the order of torch's; of a case that one of them could not run, only that."""
    found = []
    for case in dict.fromkeys([*torch, *ours]):
        theirs, mine = torch.get(case, {FAILED: MISSING}), ours.get(case, {FAILED: MISSING})
        facts = [FAILED] if FAILED in theirs or FAILED in mine else dict.fromkeys([*theirs, *mine])
        found += [Disagreement(case, fact, theirs.get(fact, MISSING), mine.get(fact, MISSING)) for fact in facts]
    return [one for one in found if not is_same(one.torch, one.ours)]
