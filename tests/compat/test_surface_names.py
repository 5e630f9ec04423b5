"""The table has all of torch's public modules and names, and nothing in it is made up."""

from __future__ import annotations

import importlib
import json
from types import ModuleType

from tests.compat.make_surface import SURFACE as SURFACE_FILE

from rallypoint.compat.differences import DIFFERENCES
from rallypoint.compat.facade import homes_behind, public_names
from rallypoint.compat.table import FACADE_OF, ROOTS, TABLE

SNAPSHOT = json.loads(SURFACE_FILE.read_text())
SURFACE = SNAPSHOT["modules"]
EVERY_NAME = [(place, name) for place in TABLE for name in homes_behind(place)]
LACKING = {(one.module, one.name) for one in DIFFERENCES if one.aspect == "lacking"}


STORES = ("FileStore", "PrefixStore", "Store", "TCPStore")  # torch's own, where it is imported
TORCH_ITSELF = ("dist", "torch")
# How torch does it, which is not how we do: names with an underscore, but for those that programs are known to use; what belongs
# to its protocols and types; and what is of other libraries.
INNARDS = {
    "CONST_ETCD_FROZEN_TTL", "CONST_ETCD_JOINABLE_EPHEMERAL_TTL", "CONST_ETCD_SETUP_TTL", "CONST_RUNID_SUBROOT_TTL",
    "CONST_WORKER_KEEPALIVE_TTL", "Dataset", "DistStoreError", "DistributedSampler", "Self", "T", "TYPE_CHECKING", "annotations",
    "create_handler", "deprecated", "etcd", "get_default_numa_options", "get_method_name", "justknobs_check", "libc", "urllib3",
}  # fmt: skip
KNOWN_PRIVATE = {
    "_Action", "_AffinityMode", "_NOT_AVAILABLE", "_NumaOptions", "_PeriodicTimer", "_RoleInstanceInfo", "_delay",
    "_get_addr_and_port", "_get_default_signal", "_get_entrypoint_name", "_get_fq_hostname", "_get_kill_signal",
    "_get_metric_name", "_get_or_create_logger", "_matches_machine_hostname", "_parse_rendezvous_config", "_try_parse_port",
    "_validate_full_rank", "_wrap",
}  # fmt: skip


def is_behind(module: str) -> bool:
    return module in ROOTS or module.startswith(tuple(f"{root}." for root in ROOTS))


def surface_names() -> set[tuple[str, str]]:
    return {(module, name) for module, names in SURFACE.items() if is_behind(module) for name in names}


def resolves(home: tuple[str, str]) -> bool:
    module, attribute = home
    if module == "@logger":
        return attribute in TABLE
    if module in ("torch", "torch.distributed"):  # itself, where it is installed
        return True
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
        ours = [home for home in homes if home[1] and home[0] != "@logger"]
        values = [getattr(importlib.import_module(module), attribute) for module, attribute in ours]
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


def is_promised(place: str, name: str) -> bool:
    """Of all that torch's module holds, what programs come at: its own names, and what it imports."""
    if (place, name) in LACKING or (name == "_Action" and not place.endswith(".run")):
        return False
    return name in KNOWN_PRIVATE or (not name.startswith("_") and name not in INNARDS)


def test_whatever_a_module_of_torchs_holds_can_be_imported_from_ours(installed: str) -> None:
    """Public names, aliases, constants, loggers, and what it imports: one that lacks ends a program at its first line."""
    held = [(place, name) for place, names in SNAPSHOT["names"].items() if is_behind(place) for name in names]
    promised = [one for one in held if is_promised(*one)]
    assert len(promised) > 700
    assert ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "Token") in promised
    lacking = [one for one in promised if not hasattr(importlib.import_module(one[0]), one[1])]
    assert [one for one in lacking if one[1] not in TORCH_ITSELF or installed == "with torch"] == []


def test_what_is_set_on_an_import_of_pythons_stays_in_the_facade(installed: str) -> None:
    """Who patches ``dynamic_rendezvous.timedelta`` does not patch Python."""
    import datetime

    module = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    before = datetime.timedelta
    module.timedelta = "patched"  # type: ignore[attr-defined]
    try:
        assert (module.timedelta, datetime.timedelta) == ("patched", before)  # type: ignore[attr-defined]
    finally:
        del module.timedelta
    assert module.timedelta is before


def test_parents_of_the_table_are_in_the_table() -> None:
    parents = {place.rpartition(".")[0] for place in TABLE} - {"torch.distributed"}
    assert parents <= set(TABLE)
