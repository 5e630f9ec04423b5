"""From a name to a handler: built in, registered by the program, or installed as a plug-in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.errors import UsageError
from rallypoint.rendezvous import handler, registry
from rallypoint.rendezvous.coordinated import CoordinatedHandler
from rallypoint.rendezvous.handler import RendezvousHandlerRegistry, RendezvousParameters
from rallypoint.rendezvous.one_node import LocalRendezvous, StaticTCPRendezvous

PLUG_IN = """
from rallypoint.rendezvous.one_node import LocalRendezvous

class Mine(LocalRendezvous):
    def get_backend(self):
        return "mine"

def get_creator():
    return lambda params: Mine(params.run_id)
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> RendezvousHandlerRegistry:
    """A registry of the test's own, as of a process that has just begun."""
    fresh = handler.registry_of_the_process()
    monkeypatch.setattr(handler, "rendezvous_handler_registry", fresh)
    monkeypatch.setattr(registry, "rendezvous_handler_registry", fresh)
    return fresh


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that brings the back end ``mine``, and two that cannot be loaded."""
    (tmp_path / "my_backend.py").write_text(PLUG_IN)
    info = tmp_path / "my_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[torchrun.handlers]\nmine = my_backend:get_creator\ngone = not_there:f\nunnamed = my_backend:not_there\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_backend", None)


def params(backend: str) -> RendezvousParameters:
    return RendezvousParameters(backend, "host:1", "job", 1, 1, rank=0)


def of_several_nodes(endpoint: str = "host:1", **settings: object) -> RendezvousParameters:
    return RendezvousParameters("c10d", endpoint, "job", 1, 4, **settings)


def test_built_in_backends() -> None:
    assert isinstance(registry.get_rendezvous_handler(params("static")), StaticTCPRendezvous)
    assert isinstance(registry.get_rendezvous_handler(params("c10d")), LocalRendezvous)
    assert isinstance(registry.get_rendezvous_handler(params("c10d")), LocalRendezvous)


@pytest.mark.parametrize(("backend", "kind"), [("static", StaticTCPRendezvous), ("c10d", LocalRendezvous)])
def test_f07_the_registry_itself_knows_them_at_once(own_registry: RendezvousHandlerRegistry, backend: str, kind: type) -> None:
    assert isinstance(own_registry.create_handler(params(backend)), kind)


@pytest.mark.usefixtures("plug_in")
def test_f07_the_registry_itself_finds_plug_ins_and_says_what_there_is(own_registry: RendezvousHandlerRegistry) -> None:
    assert own_registry.create_handler(params("mine")).get_backend() == "mine"
    with pytest.raises(UsageError, match="no rendezvous backend 'raft'; available: c10d, etcd, etcd-v2, gone, mine, "):
        own_registry.create_handler(params("raft"))


def test_a_job_that_can_have_several_nodes_gets_a_handler_that_coordinates() -> None:
    """Nothing is opened before the first rendezvous; leaving without one is no error."""
    made = registry.get_rendezvous_handler(of_several_nodes())
    assert isinstance(made, CoordinatedHandler)
    assert (made.get_backend(), made.get_run_id(), made.use_agent_store) == ("c10d", "job", True)
    assert (made.is_closed(), made.num_nodes_waiting(), made.end_error(), made.fence_fd()) == (False, 0, None, None)
    assert made.shutdown()


@pytest.mark.parametrize(("made", "complaint"), [
    (of_several_nodes("host:0"), "port 0"),
    (of_several_nodes("host:x"), "'host:x'"),
    (of_several_nodes(node_unit=5), "no multiple of 5"),
    (of_several_nodes(join_timeout="soon"), "join_timeout"),
])  # fmt: skip
def test_what_several_nodes_cannot_use_is_refused_before_anything_is_opened(made: RendezvousParameters, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        registry.get_rendezvous_handler(made)


@pytest.mark.usefixtures("plug_in")
def test_a_plug_in_is_found_and_only_that_one_is_loaded() -> None:
    registry.check_backend("mine")
    made = registry.get_rendezvous_handler(params("mine"))
    assert (made.get_backend(), made.get_run_id()) == ("mine", "job")
    assert registry.get_rendezvous_handler(params("mine")).get_backend() == "mine"


@pytest.mark.usefixtures("plug_in")
@pytest.mark.parametrize(("name", "where"), [("gone", "not_there:f"), ("unnamed", "my_backend:not_there")])
def test_a_plug_in_that_cannot_be_loaded_is_named(name: str, where: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}'.*{where}"):
        registry.get_rendezvous_handler(params(name))


@pytest.mark.usefixtures("plug_in")
def test_an_unknown_backend_is_refused_with_all_that_there_are() -> None:
    for refuse in (registry.check_backend, lambda name: registry.get_rendezvous_handler(params(name))):
        known = "c10d, etcd, etcd-v2, gone, mine, rallypoint, rallypoint-etcd, static, unnamed"
        with pytest.raises(UsageError, match=f"no rendezvous backend 'raft'; available: {known}"):
            refuse("raft")


@pytest.mark.parametrize("name", ["etcd", "c10d", "mine"])
def test_what_the_program_registered_goes_first(own_registry: RendezvousHandlerRegistry, name: str) -> None:
    class Own(LocalRendezvous):
        def get_backend(self) -> str:
            return name

    if name in registry.BUILT_IN:
        assert registry.is_ours(name)
        own_registry.create_handler(RendezvousParameters(name, "host:1", "job", 1, 1)).shutdown()  # also after it was used
    own_registry.register(name, lambda params: Own(params.run_id))
    registry.check_backend(name)
    assert not registry.is_ours(name)
    assert isinstance(registry.get_rendezvous_handler(params(name)), Own)


def test_a_built_in_backend_imports_nothing_that_is_slow() -> None:
    """P38: no list of what is installed, and none of the modules that a first worker need not wait for."""
    program = """
import sys
from rallypoint import events, metrics
from rallypoint.rendezvous import registry
from rallypoint.rendezvous.handler import RendezvousParameters
from rallypoint.store.barriers import barrier, synchronize

for backend in ("static", "c10d"):
    registry.check_backend(backend)
    info = registry.get_rendezvous_handler(RendezvousParameters(backend, "127.0.0.1:0", "job", 1, 1, rank=0)).next_rendezvous()
    synchronize(info.store, b"x", 0, 1, "agents")
    barrier(info.store, 1, "exit", rank=0)
events.check_sink("null")
events.record(events.Event("e", events.EventSource.AGENT))
events.construct_and_record_rdzv_event("job", "m", events.NodeState.FAILED)
metrics.put_metric("m", 1)
slow = "argparse asyncio datetime importlib.metadata json logging pickle random shutil subprocess tempfile traceback uuid"
print([name for name in slow.split() if name in sys.modules and name not in before])
"""
    answer = subprocess.run(
        [sys.executable, "-c", "import sys; before = set(sys.modules)\n" + program],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert answer.stdout == "[]\n"
