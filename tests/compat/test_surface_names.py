"""The table has all of torch's public modules and names, and nothing in it is made up."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

from rallypoint.compat.differences import DIFFERENCES
from rallypoint.compat.facade import homes_behind, public_names
from rallypoint.compat.table import FACADE_OF, ROOTS, TABLE

SURFACE = json.loads(Path(__file__).with_name("surface.json").read_text())["modules"]
EVERY_NAME = [(place, name) for place in TABLE for name in homes_behind(place)]
LACKING = {(one.module, one.name) for one in DIFFERENCES if one.aspect == "lacking"}


STORES = ("FileStore", "PrefixStore", "Store", "TCPStore")  # torch's own, where it is imported


def is_behind(module: str) -> bool:
    return module in ROOTS or module.startswith(tuple(f"{root}." for root in ROOTS))


def surface_names() -> set[tuple[str, str]]:
    return {(module, name) for module, names in SURFACE.items() if is_behind(module) for name in names}


def resolves(home: tuple[str, str]) -> bool:
    module, attribute = home
    if module.startswith("torch."):
        return module in TABLE
    try:
        return not attribute or hasattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return False


def test_every_public_module_is_in_the_table() -> None:
    assert {module for module in SURFACE if is_behind(module)} == set(TABLE)


def test_every_public_name_is_in_the_table() -> None:
    ours = {(place, name) for place in TABLE for name in public_names(place)}
    assert surface_names() - ours - LACKING == set()


def test_what_is_lacking_is_really_lacking() -> None:
    assert {one for one in LACKING if one[1] in public_names(one[0])} == set()


def test_nothing_else_counts_as_public() -> None:
    """What torch has not in public, programs get only by asking for it by name."""
    ours = {(place, name) for place in TABLE for name in public_names(place)}
    assert ours - surface_names() == set()


def test_every_name_has_a_home() -> None:
    without = [(place, name) for place, name in EVERY_NAME for home in homes_behind(place)[name] if not resolves(home)]
    assert without == []


def test_a_name_with_several_homes_is_the_same_in_all() -> None:
    """They are set together, so they must begin together."""
    for place, name in EVERY_NAME:
        homes = homes_behind(place)[name]
        values = [getattr(importlib.import_module(module), attribute) for module, attribute in homes if attribute]
        assert all(value is values[0] for value in values), (place, name)


def test_modules_that_stand_for_ours() -> None:
    for ours, theirs in FACADE_OF.items():
        assert isinstance(importlib.import_module(ours), ModuleType)
        assert theirs in TABLE


def test_every_name_can_be_imported_behind_torch(installed: str) -> None:
    for place, name in EVERY_NAME:
        value = getattr(importlib.import_module(place), name)
        module = getattr(value, "__module__", None) or ""
        assert not str(module).startswith("torch") or name in STORES, (place, name)


def test_parents_of_the_table_are_in_the_table() -> None:
    parents = {place.rpartition(".")[0] for place in TABLE} - {"torch.distributed"}
    assert parents <= set(TABLE)
