"""Rendezvous: parameters, registry, handlers, and the back ends that hold one state."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

from tests.compat.conformance.harness import case, folder, outcome, plain, store, tcp_store, together, until


def parameters(**more: Any) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    given = {"backend": "c10d", "endpoint": "localhost:0", "run_id": "run", "min_nodes": 1, "max_nodes": 1, **more}
    return RendezvousParameters(**given)


@contextlib.contextmanager
def free_endpoint() -> Iterator[str]:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    yield f"localhost:{port}"


@case
def parameters_of_a_rendezvous() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    one = RendezvousParameters("backend", "host:1", "id", 1, 2, "addr", key="value", other=None)
    facts: dict[str, Any] = {
        "fields": [one.backend, one.endpoint, one.run_id, one.min_nodes, one.max_nodes, one.local_addr],
        "config": plain(one.config),
    }
    facts["get"] = [one.get("key"), one.get("missing"), one.get("missing", 5), one.get("other", 7)]
    for name, changes in {
        "no backend": {"backend": ""},
        "no run id": {"run_id": ""},
        "none run id": {"run_id": None},
        "min 0": {"min_nodes": 0},
        "min -1": {"min_nodes": -1},
        "max below min": {"min_nodes": 3, "max_nodes": 2},
        "max 0": {"max_nodes": 0},
        "equal": {"min_nodes": 3, "max_nodes": 3},
        "empty endpoint": {"endpoint": ""},
        "space backend": {"backend": " "},
    }.items():
        facts[name] = outcome(lambda c=changes: parameters(**c).max_nodes)
    return facts


@case
def parameters_as_booleans() -> dict[str, Any]:
    facts = {}
    for value in (
        True,
        False,
        "1",
        "0",
        "t",
        "f",
        "T",
        "F",
        "true",
        "false",
        "True",
        "FALSE",
        "yes",
        "no",
        "y",
        "n",
        "on",
        "off",
        1,
        0,
        2,
        -1,
        1.0,
        0.5,
        "2",
        "",
        " ",
        "maybe",
        None,
        [],
        ["a"],
        b"1",
    ):
        facts[repr(value)] = outcome(lambda v=value: parameters(flag=v).get_as_bool("flag"), words=("flag",))
    facts["missing"] = outcome(lambda: parameters().get_as_bool("flag"))
    facts["default"] = outcome(lambda: parameters().get_as_bool("flag", True))
    facts["none and default"] = outcome(lambda: parameters(flag=None).get_as_bool("flag", True))
    return facts


@case
def parameters_as_numbers() -> dict[str, Any]:
    facts = {}
    for value in (0, 5, -3, "5", "-5", " 7 ", "5.0", 5.9, True, "abc", "", "0x10", "1_000", None, [], b"5"):
        facts[repr(value)] = outcome(lambda v=value: parameters(number=v).get_as_int("number"), words=("number",))
    facts["missing"] = outcome(lambda: parameters().get_as_int("number"))
    facts["default"] = outcome(lambda: parameters().get_as_int("number", 9))
    return facts


@case
def endpoints() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    texts = (
        None,
        "",
        "  ",
        "host",
        "host:",
        "host:1",
        "host:0",
        "host:65535",
        "host:65536",
        "host:-1",
        "host:abc",
        "a.b.c:29500",
        "127.0.0.1",
        "127.0.0.1:5",
        "[::1]",
        "[::1]:5",
        "[2001:db8:0:0::1]:90",
        "::1",
        ":5",
        " host:5 ",
        "ho st:5",
        "host:5:6",
        "http://host:5",
        "[::1]:",
        "host:05",
        "_a-b:1",
        "host:1 2",
    )
    return {repr(text): outcome(parse_rendezvous_endpoint, text, default_port=123) for text in texts}


@case
def exceptions_and_their_bases() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousGracefulExitError,
        RendezvousStateError,
        RendezvousTimeoutError,
    )

    kinds = (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousGracefulExitError,
        RendezvousStateError,
        RendezvousTimeoutError,
    )
    facts: dict[str, Any] = {kind.__name__: [base.__name__ for base in kind.__mro__] for kind in kinds}
    facts["text"] = [str(kind("words")) for kind in kinds]
    facts["pickled"] = [str(pickle.loads(pickle.dumps(kind("words")))) for kind in kinds]
    return facts


@case
def the_registry() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous import RendezvousHandlerRegistry, rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler

    class Handler(mock.MagicMock):
        def get_backend(self) -> str:
            return "mine"

    registry = RendezvousHandlerRegistry()
    made = Handler()
    creator, other = mock.MagicMock(return_value=made), mock.MagicMock()
    registry.register("mine", creator)
    facts = {
        "again": outcome(registry.register, "mine", creator),
        "other creator": outcome(registry.register, "mine", other, words=("mine",)),
        "no name": outcome(registry.register, "", creator),
        "made": registry.create_handler(parameters(backend="mine")) is made,
        "given": plain(creator.call_args.args[0].backend),
        "unknown": outcome(registry.create_handler, parameters(backend="nobody"), words=("nobody",)),
        "kinds": [type(rendezvous_handler_registry).__name__, outcome(RendezvousHandler)],
    }
    wrong = mock.MagicMock()
    wrong.get_backend.return_value = "somebody else"
    registry.register("wrong", lambda params: wrong)
    facts["wrong backend"] = outcome(registry.create_handler, parameters(backend="wrong"), words=("wrong",))
    return facts


@case
def the_registry_of_the_process() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry

    facts: dict[str, Any] = {"unknown": outcome(registry.create_handler, parameters(backend="nobody"), words=("nobody",))}
    for backend, more in {"c10d": {}, "static": {"rank": 0}}.items():
        with free_endpoint() as endpoint:
            handler = registry.create_handler(parameters(backend=backend, endpoint=endpoint, **more))
            facts[backend] = [handler.get_backend(), handler.get_run_id()]
            handler.shutdown()
    facts["a name of its own"] = outcome(registry.register, "c10d", mock.MagicMock())
    if "value" in facts["a name of its own"]:
        del registry._registry["c10d"]
    return facts


@case
def handlers_by_name() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    facts = {"unknown": outcome(get_rendezvous_handler, parameters(backend="no-such-back-end"))}
    with free_endpoint() as endpoint:
        handler = get_rendezvous_handler(parameters(endpoint=endpoint))
        facts["c10d"] = [
            handler.get_backend(),
            handler.get_run_id(),
            handler.is_closed(),
            handler.num_nodes_waiting(),
            type(handler.use_agent_store).__name__,
        ]
        facts["shut down"] = outcome(handler.shutdown)
        static = get_rendezvous_handler(parameters(backend="static", endpoint=endpoint, rank=0))
        facts["static"] = [
            static.get_backend(),
            static.get_run_id(),
            static.is_closed(),
            static.num_nodes_waiting(),
            static.use_agent_store,
        ]
        facts["static shut down"] = outcome(static.shutdown)
    return facts


@case
def the_static_handler() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous, create_rdzv_handler

    facts: dict[str, Any] = {
        "no rank": outcome(create_rdzv_handler, parameters(backend="static", endpoint="localhost:1")),
        "no port": outcome(create_rdzv_handler, parameters(backend="static", endpoint="localhost", rank=0)),
        "no endpoint": outcome(create_rdzv_handler, parameters(backend="static", endpoint="", rank=0)),
        "not static": outcome(lambda: create_rdzv_handler(parameters(endpoint="localhost:1", rank=0)).get_backend()),
    }
    with free_endpoint() as endpoint:
        host, port = endpoint.split(":")
        handler = StaticTCPRendezvous(host, int(port), 0, 1, "run", 10)
        info = handler.next_rendezvous()
        facts["info"] = [info.rank, info.world_size, type(info).__name__]
        facts["master"] = [info.bootstrap_store_info.master_addr == host, info.bootstrap_store_info.master_port == int(port)]
        info.store.set("k", "v")
        facts["store"] = plain(info.store.get("k"))
        facts["questions"] = [
            handler.get_backend(),
            handler.is_closed(),
            handler.num_nodes_waiting(),
            handler.get_run_id(),
            handler.use_agent_store,
        ]
        facts["closed"] = [outcome(handler.set_closed), handler.is_closed()]
        facts["shutdown"] = outcome(handler.shutdown)
    return facts


def seat(info: Any, with_master: bool = False) -> list[Any]:
    return [info.rank, info.world_size, *([info.bootstrap_store_info.master_addr] if with_master else [])]


@case
def two_static_nodes() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler

    with free_endpoint() as endpoint:
        handlers = [
            create_rdzv_handler(parameters(backend="static", endpoint=endpoint, rank=rank, min_nodes=2, max_nodes=2, timeout=60))
            for rank in (0, 1)
        ]
        answers = together(*[lambda one=one: seat(one.next_rendezvous(), with_master=True) for one in handlers])
        ended = [outcome(one.shutdown) for one in reversed(handlers)]  # ours keeps the store until the others have left
    return {"infos": answers, "shutdown": ended}


@case
def the_info_of_a_rendezvous() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

    shared = store()
    master = RendezvousStoreInfo("addr", 5)
    info = RendezvousInfo(shared, 1, 2, master)
    built = RendezvousStoreInfo.build(0, shared, "10.0.0.1", 1234)
    read = RendezvousStoreInfo.build(1, shared, None)
    keys = [RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY]
    free = RendezvousStoreInfo.build(0, store(), local_addr="127.0.0.1")
    named = RendezvousStoreInfo.build(0, store(), local_addr=None)
    return {
        "info": [info.store is shared, info.rank, info.world_size, info.bootstrap_store_info is master],
        "fixed": outcome(setattr, info, "rank", 5),
        "built": [built.master_addr, built.master_port],
        "read": [read.master_addr, read.master_port],
        "keys": keys,
        "stored": [plain(shared.get(key)) for key in keys],
        "free": [free.master_addr, free.master_port > 0],
        "host's own": named.master_addr in (socket.getfqdn(), socket.gethostname(), socket.gethostbyname(socket.gethostname())),
        "equal": master == RendezvousStoreInfo("addr", 5),
        "repr": repr(master),
    }


@case
def timeouts_of_a_dynamic_rendezvous() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

    def shown(one: Any) -> list[float]:
        return [one.join.total_seconds(), one.last_call.total_seconds(), one.close.total_seconds(), one.heartbeat.total_seconds()]

    facts = {
        "defaults": shown(RendezvousTimeout()),
        "given": shown(RendezvousTimeout(timedelta(seconds=1), timedelta(seconds=2), timedelta(seconds=3), timedelta(seconds=4))),
        "fixed": outcome(setattr, RendezvousTimeout(), "join", timedelta(seconds=1)),
    }
    for name in ("join", "last_call", "close", "heartbeat"):
        for seconds in (0, -1):
            facts[f"{name} {seconds}"] = outcome(RendezvousTimeout, words=(name,), **{name: timedelta(seconds=seconds)})
    return facts


class Cell:
    """A back end in memory, as a third party writes one."""

    def __init__(self) -> None:
        self.state: bytes | None = None
        self.token = 0

    @property
    def name(self) -> str:
        return "cell"

    def get_state(self) -> Any:
        return None if self.state is None else (self.state, self.token)

    def set_state(self, state: bytes, token: Any = None) -> Any:
        has_set = (self.state is None and token is None) or token == self.token
        if has_set:
            self.state, self.token = state, self.token + 1
        return self.state, self.token, has_set


def cell() -> Any:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

    class Backend(Cell, RendezvousBackend):  # type: ignore[misc]
        name = Cell.name
        get_state = Cell.get_state
        set_state = Cell.set_state

    return Backend()


@case
def a_handler_from_a_backend() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        DynamicRendezvousHandler,
        RendezvousBackend,
        RendezvousTimeout,
    )

    timeout = RendezvousTimeout(join=timedelta(seconds=10), last_call=timedelta(milliseconds=50))
    handler = DynamicRendezvousHandler.from_backend(
        "run", store(), cell(), 1, 1, timeout=timeout, keep_alive_interval=7, keep_alive_max_attempt=4
    )
    settings = handler.settings
    facts = {
        "settings": plain(
            [
                settings.run_id,
                settings.min_nodes,
                settings.max_nodes,
                settings.keep_alive_interval.total_seconds(),
                settings.keep_alive_max_attempt,
                settings.timeout is timeout,
            ]
        ),
        "questions": [handler.get_backend(), handler.get_run_id(), handler.is_closed(), handler.num_nodes_waiting()],
        "abstract": outcome(RendezvousBackend),
    }
    info = handler.next_rendezvous()
    facts["info"] = [info.rank, info.world_size, type(info.store).__name__ != ""]
    info.store.set("a", "b")
    facts["store"] = plain(info.store.get("a"))
    facts["waiting"] = handler.num_nodes_waiting()
    facts["shutdown"] = outcome(handler.shutdown)
    facts["closed"] = handler.is_closed()
    facts["after"] = outcome(handler.next_rendezvous)
    facts["again"] = outcome(handler.shutdown)
    for name, given in {"no run id": ("", 1, 1), "min 0": ("r", 0, 1), "max below": ("r", 2, 1)}.items():
        facts[name] = outcome(
            lambda g=given: DynamicRendezvousHandler.from_backend(g[0], store(), cell(), g[1], g[2]).settings.min_nodes
        )
    return facts


@case
def several_handlers_meet() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

    backend, shared = cell(), store()
    timeout = RendezvousTimeout(join=timedelta(seconds=10), last_call=timedelta(milliseconds=200))
    handlers = [
        DynamicRendezvousHandler.from_backend("run", shared, backend, 2, 3, timeout=timeout, keep_alive_interval=1)
        for _ in range(3)
    ]
    infos = together(*[lambda one=one: seat(one.next_rendezvous()) for one in handlers])
    ranks = sorted(one["value"] for one in infos if "value" in one)
    late = DynamicRendezvousHandler.from_backend("run", shared, backend, 2, 3, timeout=timeout, keep_alive_interval=1)
    facts = {"ranks": ranks, "closed": [one.is_closed() for one in handlers], "waiting": handlers[0].num_nodes_waiting()}
    facts["set closed"] = outcome(handlers[0].set_closed)
    facts["seen"] = [bool(until(one.is_closed)) for one in handlers]
    facts["too late"] = outcome(late.next_rendezvous)
    facts["shutdown"] = [outcome(one.shutdown) for one in handlers]
    return facts


@case
def a_handler_that_nobody_joins() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

    timeout = RendezvousTimeout(join=timedelta(seconds=1))
    handler = DynamicRendezvousHandler.from_backend("run", store(), cell(), 2, 2, timeout=timeout, keep_alive_interval=1)
    return {"join": outcome(handler.next_rendezvous), "shutdown": outcome(handler.shutdown)}


@case
def a_handler_from_parameters() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    def settings(**more: Any) -> Any:
        made = create_handler(store(), cell(), parameters(backend="cell", min_nodes=1, max_nodes=4, **more)).settings
        times = made.timeout
        return [
            made.run_id,
            made.min_nodes,
            made.max_nodes,
            *(
                one.total_seconds()
                for one in (times.join, times.last_call, times.close, times.heartbeat, made.keep_alive_interval)
            ),
            made.keep_alive_max_attempt,
        ]

    return {
        "defaults": outcome(settings),
        "join": outcome(settings, join_timeout=5),
        "texts": outcome(
            settings,
            join_timeout="6",
            last_call_timeout="7",
            close_timeout="8",
            heartbeat_timeout="9",
            keep_alive_interval="2",
            keep_alive_max_attempt="1",
        ),
        "bad": outcome(settings, join_timeout="soon"),
        "negative": outcome(settings, join_timeout=-1),
        "zero": outcome(settings, last_call_timeout=0),
        "attempts": outcome(settings, keep_alive_max_attempt="many"),
        "name": create_handler(store(), cell(), parameters(backend="cell")).get_backend(),
    }


def check_backend(backend: Any) -> dict[str, Any]:
    """The rules of a state that is changed only by who has read the last one."""
    facts: dict[str, Any] = {"name": backend.name, "empty": outcome(backend.get_state)}
    first = backend.set_state(b"x")
    facts["first"] = plain([first[0], first[2]])
    facts["read"] = plain(backend.get_state()[0])
    facts["token"] = backend.get_state()[1] == first[1]
    second = backend.set_state(b"y", first[1])
    facts["second"] = plain([second[0], second[2], second[1] != first[1]])
    stale = backend.set_state(b"z", first[1])
    facts["stale"] = plain([stale[0], stale[2], stale[1] == second[1]])
    none = backend.set_state(b"z")
    facts["no token"] = plain([none[0], none[2]])
    facts["odd token"] = outcome(lambda: plain(backend.set_state(b"w", "no such token")[2]))
    facts["binary"] = plain(backend.set_state(bytes(range(256)), second[1])[2])
    facts["binary back"] = backend.get_state()[0] == bytes(range(256))
    return facts


@case
def the_c10d_backend() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

    shared = tcp_store()
    facts = check_backend(C10dRendezvousBackend(shared, "my-run"))
    facts["key"] = shared.check(["torch.rendezvous.my-run"])
    shared.set("torch.rendezvous.broken", "not base64 !")
    facts["broken"] = outcome(C10dRendezvousBackend(shared, "broken").get_state)
    shared.set("torch.rendezvous.known", "a25vd24=")
    facts["known"] = plain(C10dRendezvousBackend(shared, "known").get_state()[0])
    failing = mock.MagicMock()
    lost = C10dRendezvousBackend(failing, "r")
    failing.get.side_effect = failing.compare_set.side_effect = RuntimeError("gone")
    facts["lost at once"] = outcome(lambda: C10dRendezvousBackend(failing, "r").name)
    facts["lost get"], facts["lost set"] = outcome(lost.get_state), outcome(lost.set_state, b"x")
    facts["no run id"] = outcome(lambda: C10dRendezvousBackend(shared, "").name)
    return facts


@case
def making_a_c10d_backend() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

    facts: dict[str, Any] = {}
    with free_endpoint() as endpoint:
        backend, made = create_backend(parameters(endpoint=endpoint, is_host="true", read_timeout="5"))
        facts["tcp"] = [
            backend.name,
            type(made).__name__,
            made.timeout.total_seconds(),
            made.host,
            made.port == int(endpoint.split(":")[1]),
        ]
        facts["works"] = plain(backend.set_state(b"s")[2])
        again, other = create_backend(parameters(endpoint=endpoint, is_host="false"))
        facts["client"] = [plain(again.get_state()[0]), other.timeout.total_seconds()]
        both, third = create_backend(parameters(endpoint=endpoint))
        facts["found out"] = [plain(both.get_state()[0]), type(third).__name__]
    with folder() as path:
        backend, made = create_backend(parameters(endpoint=str(path / "file"), store_type="file"))
        facts["file"] = [backend.name, type(made).__name__, plain(backend.set_state(b"s")[2]), (path / "file").exists()]
        typed = create_backend(parameters(endpoint=str(path / "file2"), store_type=" FiLe "))[1]
        facts["spelling"] = type(typed).__name__
    for name, given in {
        "bad type": {"store_type": "bad"},
        "bad timeout": {"read_timeout": "-1"},
        "zero timeout": {"read_timeout": "0"},
        "text timeout": {"read_timeout": "x"},
        "bad host": {"is_host": "maybe"},
        "nobody": {"endpoint": "localhost:1", "is_host": "false", "read_timeout": "1"},
    }.items():
        facts[name] = outcome(lambda g=given: type(create_backend(parameters(**g))[1]).__name__)
    return facts


@case
def the_default_port_of_a_c10d_backend() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

    with free_endpoint() as endpoint:
        port = int(endpoint.split(":")[1])
        with mock.patch("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend.DEFAULT_PORT", port):
            _, made = create_backend(parameters(endpoint="localhost", is_host="true"))
            return {
                "port": made.port == port,
                "no endpoint": outcome(lambda: create_backend(parameters(endpoint="", is_host="false"))[1].port == port),
            }


@case
def helpers_for_etcd() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.etcd_server import EtcdServer, find_free_port, stop_etcd
    from torch.distributed.elastic.rendezvous.etcd_store import cas_delay

    found = find_free_port()
    facts: dict[str, Any] = {
        "port": [type(found).__name__, found.getsockname()[1] > 0 if hasattr(found, "getsockname") else found > 0]
    }
    found.close()
    facts["delay"] = outcome(cas_delay)
    facts["stop nothing"] = outcome(stop_etcd, None)
    server = EtcdServer()
    facts["server"] = [outcome(server.get_host), outcome(server.stop)]
    return facts


@case
def exceptions_of_etcd() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.etcd_rendezvous import (
        EtcdRendezvousRetryableFailure,
        EtcdRendezvousRetryImmediately,
    )

    return {
        one.__name__: [base.__name__ for base in one.__mro__]
        for one in (EtcdRendezvousRetryableFailure, EtcdRendezvousRetryImmediately)
    }


@case
def names_for_those_who_annotate() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous import RendezvousHandlerCreator
    from torch.distributed.elastic.rendezvous.api import RendezvousHandlerCreator as home

    return {"same": RendezvousHandlerCreator is home, "is there": RendezvousHandlerCreator is not None}


def isinstance_of(kind: type[Exception], function: Any, *args: Any) -> bool:
    try:
        function(*args)
    except kind:
        return True
    return False


@case
def settings_of_a_dynamic_rendezvous() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings, RendezvousTimeout

    timeout = RendezvousTimeout()
    one = RendezvousSettings("run", 1, 2, timeout, timedelta(seconds=5), 3)
    named = RendezvousSettings(
        run_id="run",
        min_nodes=1,
        max_nodes=2,
        timeout=timeout,
        keep_alive_interval=timedelta(seconds=5),
        keep_alive_max_attempt=3,
    )
    return {
        "fields": plain(
            [
                one.run_id,
                one.min_nodes,
                one.max_nodes,
                one.timeout is timeout,
                one.keep_alive_interval.total_seconds(),
                one.keep_alive_max_attempt,
            ]
        ),
        "named": outcome(lambda: [getattr(named, name) == getattr(one, name) for name in ("run_id", "min_nodes", "max_nodes")]),
        "fixed": isinstance_of(AttributeError, setattr, one, "run_id", "other"),
        "lacks": outcome(RendezvousSettings, "run"),
    }


@case
def stores_that_the_c10d_module_shows() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import FileStore, Store, TCPStore
    from torch.distributed.elastic.rendezvous.etcd_rendezvous_backend import Store as second
    from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore
    from torch.distributed.elastic.rendezvous.etcd_store import Store as third

    with folder() as path:
        by_file = FileStore(str(path / "f"))
        by_file.set("k", "v")
        read = plain(by_file.get("k"))
    by_port = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    by_port.set("n", "1")
    return {
        "file": read,
        "tcp": [plain(by_port.get("n")), by_port.port > 0, by_port.host],
        "kinds": [issubclass(one, Store) for one in (FileStore, TCPStore)],
        "of etcd": [callable(getattr(EtcdStore, name, None)) for name in ("set", "get", "add", "wait", "check")],
        "same": [second is Store, third is Store],
    }


@case
def a_handler_of_etcd() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.etcd_rendezvous import EtcdRendezvous, EtcdRendezvousHandler, create_rdzv_handler

    made = EtcdRendezvous(mock.MagicMock(host="localhost", port=1), "/prefix", "run", 1, 2, 5, 1)
    handler = EtcdRendezvousHandler(made, None)
    unnamed = parameters(backend="etcd", endpoint="", run_id="run")
    return {
        "questions": [handler.get_backend(), handler.get_run_id()],
        "agent store": handler.use_agent_store,
        "bad protocol": outcome(create_rdzv_handler, parameters(backend="etcd", endpoint="localhost:1", protocol="gopher")),
        "nowhere": "raised" in outcome(create_rdzv_handler, unnamed),
    }


@case
def a_backend_of_etcd() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.etcd_rendezvous_backend import EtcdRendezvousBackend, create_backend

    client = mock.MagicMock(host="localhost", port=1)
    return {
        "name": outcome(lambda: EtcdRendezvousBackend(client, "run", key_prefix="/p", ttl=5).name),
        "no run id": outcome(lambda: EtcdRendezvousBackend(client, "").name),
        "bad protocol": outcome(create_backend, parameters(backend="etcd-v2", endpoint="localhost:1", protocol="gopher")),
        "bad timeout": outcome(create_backend, parameters(backend="etcd-v2", endpoint="localhost:1", read_timeout=-1)),
    }


@case
def two_nodes_meet_by_c10d() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    with free_endpoint() as endpoint:
        given = {"endpoint": endpoint, "min_nodes": 2, "max_nodes": 2, "join_timeout": 10, "last_call_timeout": 1}
        handlers = [get_rendezvous_handler(parameters(is_host=host, **given)) for host in ("true", "false")]
        infos: list[Any] = [None, None]

        def join(index: int) -> list[Any]:
            infos[index] = handlers[index].next_rendezvous()
            return seat(infos[index])

        answers = together(lambda: join(0), lambda: join(1))
        infos[0].store.set("shared", "word")
        facts = {
            "ranks": sorted(one.get("value", one) for one in answers),
            "store": plain(infos[1].store.get("shared")),
            "same master": infos[0].bootstrap_store_info == infos[1].bootstrap_store_info,
            "waiting": [one.num_nodes_waiting() for one in handlers],
            "closed": [one.is_closed() for one in handlers],
        }
        facts["shutdown"] = [outcome(one.shutdown) for one in reversed(handlers)]
    return facts


@case
def a_node_that_waits() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

    backend, shared = cell(), store()
    timeout = RendezvousTimeout(join=timedelta(seconds=60), last_call=timedelta(seconds=1))

    def make() -> Any:
        return DynamicRendezvousHandler.from_backend("run", shared, backend, 1, 2, timeout=timeout, keep_alive_interval=1)

    first, second = make(), make()
    alone = seat(first.next_rendezvous())
    joining = threading.Thread(target=lambda: outcome(second.next_rendezvous), daemon=True)
    joining.start()
    waiting = until(first.num_nodes_waiting)
    pair = [seat(first.next_rendezvous())]
    facts = {"alone": alone, "waiting": waiting, "together": pair[0][1], "then": first.num_nodes_waiting()}
    facts["shutdown"] = [outcome(second.shutdown), outcome(first.shutdown)]
    return facts


@case
def threads_of_a_handler_end() -> dict[str, Any]:
    """With a shutdown, or with the last reference to it."""
    import gc

    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    facts = {}
    for name in ("shutdown", "dropped"):
        before = set(threading.enumerate())
        one = DynamicRendezvousHandler.from_backend(f"threads-{name}", store(), cell(), 1, 1)
        one.next_rendezvous()
        if name == "shutdown":
            facts["shut down"] = outcome(one.shutdown)
        else:
            del one
            gc.collect()
        facts[name] = until(lambda known=before: not set(threading.enumerate()) - known, 20)
    return facts


@case
def the_token_of_a_back_end() -> dict[str, Any]:
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

    return {"same": [dynamic_rendezvous.Token is Any, c10d_rendezvous_backend.Token is Any]}
