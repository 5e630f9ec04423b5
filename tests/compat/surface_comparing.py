"""Where a description of ours does not do what torch's promises; ours may have more, by name only and with a default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Found = tuple[str, Any, Any]  # aspect, torch's, ours
# Pieces of torch itself, which exist only where torch does.
TORCHS_OWN = {"DistributedSampler", "Store", "pybind11_object", "Generic", "Sampler"}


def differences(torch: dict[str, Any], ours: dict[str, Any]) -> list[Found]:
    if torch["kind"] != ours["kind"]:
        return [("lacking" if ours["kind"] == "missing" else "kind", torch["kind"], ours["kind"])]
    found: list[Found] = []
    if not fits(torch.get("signature"), ours.get("signature")):
        found.append(("signature", torch["signature"], ours.get("signature")))
    if torch.get("value") != ours.get("value"):
        found.append(("value", torch.get("value"), ours.get("value")))
    return [*found, *_class_differences(torch, ours)] if torch["kind"] == "class" else found


def _class_differences(torch: dict[str, Any], ours: dict[str, Any]) -> Iterator[Found]:
    lacking = set(torch.get("bases", [])) - set(ours["ancestors"]) - TORCHS_OWN
    if lacking:
        yield "bases", torch["bases"], ours["ancestors"]
    for aspect in () if torch.get("native") else ("members", "abstract"):
        if torch.get(aspect) != ours.get(aspect):
            yield aspect, torch.get(aspect), ours.get(aspect)
    fields = ours.get("fields", {})
    if not torch.get("fields", {}).items() <= fields.items():
        yield "fields", torch["fields"], fields
    for name, theirs in torch.get("attributes", {}).items():
        mine = ours.get("attributes", {}).get(name, {"kind": "missing"})
        if not (torch.get("native") and theirs["kind"] == "property") and not _attribute_fits(theirs, mine):
            yield name, theirs, mine


def _attribute_fits(torch: dict[str, Any], ours: dict[str, Any]) -> bool:
    if torch["kind"] == "attribute":  # of a class that is not written in Python
        return bool(ours["kind"] != "missing")
    same = torch["kind"] == ours["kind"] and torch.get("value") == ours.get("value")
    return same and fits(torch.get("signature"), ours.get("signature"))


def fits(torch: list[list[str]] | None, ours: list[list[str]] | None) -> bool:
    """Whether every call that torch's signature takes means the same to ours."""
    if torch is None:
        return True
    if ours is None:
        return False
    extra = [one for one in ours if one not in torch]
    shared = [one for one in ours if one in torch]
    return shared == torch and all(one[1] == "KEYWORD_ONLY" and len(one) == 3 for one in extra)
