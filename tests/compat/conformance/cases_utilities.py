"""The helpers: environment, sockets, macros, logging, data, process states."""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import Any

from tests.compat.conformance.harness import case, environment, outcome, plain


@case
def variables_that_must_be_there() -> dict[str, Any]:
    from torch.distributed.elastic.utils import get_env_variable_or_raise

    with environment(CONFORMANCE_X="value", CONFORMANCE_EMPTY="", CONFORMANCE_MISSING=None):
        return {
            "there": outcome(get_env_variable_or_raise, "CONFORMANCE_X"),
            "empty": outcome(get_env_variable_or_raise, "CONFORMANCE_EMPTY"),
            "missing": outcome(get_env_variable_or_raise, "CONFORMANCE_MISSING", words=("CONFORMANCE_MISSING",)),
        }


@case
def sockets_with_ports() -> dict[str, Any]:
    from torch.distributed.elastic.utils import get_socket_with_port
    from torch.distributed.elastic.utils.api import get_socket_with_port as second
    from torch.distributed.elastic.utils.distributed import get_free_port
    from torch.distributed.elastic.utils.distributed import get_socket_with_port as third

    facts: dict[str, Any] = {}
    for name, function in (("utils", get_socket_with_port), ("api", second), ("distributed", third)):
        with function() as one:
            family, kind, port = (
                one.family in (socket.AF_INET, socket.AF_INET6),
                one.type == socket.SOCK_STREAM,
                one.getsockname()[1],
            )
            with socket.socket(one.family, one.type) as other:
                taken = outcome(other.bind, one.getsockname()[:2])
            facts[name] = [family, kind, 1024 <= port < 65536, "raised" in taken]
    port = get_free_port()
    with socket.socket() as one:
        facts["free"] = [type(port).__name__, outcome(one.bind, ("localhost", port))]
    return facts


@case
def macros_in_arguments() -> dict[str, Any]:
    from torch.distributed.elastic.utils.api import macros

    args = ["${local_rank}", "--rank=${local_rank}", "$local_rank", "${other}", "plain", "$$", 7, None]
    return {
        "substituted": outcome(macros.substitute, args, "3"),
        "untouched": args[0],
        "name": macros.local_rank,
        "empty": outcome(macros.substitute, [], "0"),
        "rank as number": outcome(macros.substitute, ["${local_rank}"], 2),
    }


@case
def loggers() -> dict[str, Any]:
    from torch.distributed.elastic.utils.log_level import get_log_level
    from torch.distributed.elastic.utils.logging import get_logger

    with environment(LOGLEVEL=None):
        facts = {
            "level": get_log_level(),
            "name": get_logger("conformance.a").name,
            "level of logger": get_logger("conformance.b").level,
        }
        facts["own name"] = get_logger().name.rpartition(".")[2]
    with environment(LOGLEVEL="DEBUG"):
        # 2.13 has one level for all; whichever way the variable counts, both must agree on it
        facts["told"] = [get_log_level(), get_logger("conformance.c").level]
    facts["kind"] = isinstance(get_logger("x"), logging.Logger)
    facts["handlers"] = len(get_logger("conformance.d").handlers)
    return facts


@case
def the_cycling_iterator() -> dict[str, Any]:
    from torch.distributed.elastic.utils.data import CyclingIterator

    made: list[int] = []

    def generate(epoch: int) -> Any:
        made.append(epoch)
        return iter(range(3 * epoch, 3 * epoch + 3))

    iterator = CyclingIterator(n=2, generator_fn=generate)
    values = list(iterator)
    later = list(CyclingIterator(4, generate, 2))
    return {
        "values": values,
        "epochs": made[:2],
        "from": later,
        "start after end": outcome(lambda: list(CyclingIterator(1, generate, start_epoch=5))),
        "none": outcome(lambda: list(CyclingIterator(0, generate))),
        "iterates": iter(iterator) is iterator,
        "over": outcome(next, iterator),
    }


class Numbers:
    """A data set, as far as a sampler looks at one."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@case
def the_elastic_sampler() -> dict[str, Any]:
    from torch.distributed.elastic.utils.data import ElasticDistributedSampler

    facts: dict[str, Any] = {}
    for length, replicas, start in ((10, 2, 0), (10, 3, 0), (10, 3, 4), (7, 2, 6), (5, 4, 1), (3, 4, 0)):
        samplers = [ElasticDistributedSampler(Numbers(length), replicas, rank, start) for rank in range(replicas)]
        shares = [list(one) for one in samplers]
        facts[f"{length}/{replicas} from {start}"] = {
            "lengths": [[len(one), len(share)] for one, share in zip(samplers, shares, strict=True)],
            "covers": sorted({index for share in shares for index in share}) == list(range(start, length))
            or len({i for s in shares for i in s}),
            "attributes": [samplers[0].start_index, samplers[0].num_samples, samplers[0].total_size, samplers[0].epoch],
        }
    sampler = ElasticDistributedSampler(dataset=Numbers(20), num_replicas=2, rank=0)
    first = list(sampler)
    sampler.set_epoch(1)
    facts["another epoch"] = [sampler.epoch, list(sampler) != first, sorted(first) != first]
    facts["start too far"] = outcome(ElasticDistributedSampler, Numbers(3), 1, 0, 3)
    facts["bad rank"] = outcome(ElasticDistributedSampler, Numbers(3), 2, 2)
    return facts


@case
def states_of_processes() -> dict[str, Any]:
    from torch.distributed.elastic.utils.process_state import is_uninterruptible_state, read_proc_state

    return {
        "me": outcome(read_proc_state, os.getpid()),
        "nobody": outcome(read_proc_state, 2**22 + 5),
        "waits": outcome(is_uninterruptible_state, "D"),
        "sleeps": outcome(is_uninterruptible_state, "S"),
        "me waits": outcome(is_uninterruptible_state, os.getpid()),
    }


@case
def the_control_plane_of_a_worker() -> dict[str, Any]:
    from torch.distributed.elastic.control_plane import worker_main

    with environment(TORCH_WORKER_SERVER_SOCKET=None):
        manager = worker_main()
        entered = outcome(manager.__enter__)
        left = outcome(manager.__exit__, None, None, None)
    return {"enter": entered, "exit": left, "manager": [hasattr(manager, "__enter__"), hasattr(manager, "__exit__")]}


@case
def every_module_can_be_imported_by_its_name() -> dict[str, Any]:
    import importlib
    import json
    from pathlib import Path

    surface = json.loads(Path(__file__).parents[1].joinpath("surface-2.13.json").read_text())["modules"]
    facts = {}
    for name in surface:
        parent, _, last = name.rpartition(".")
        module = importlib.import_module(name)
        facts[name] = [module.__name__, getattr(sys.modules[parent], last, None) is module]
    return facts


@case
def every_alias_is_its_original() -> dict[str, Any]:
    """A name that torch's modules import from each other is the same object in all of them."""
    import importlib
    import json
    from pathlib import Path

    surface = json.loads(Path(__file__).parents[1].joinpath("surface-2.13.json").read_text())["modules"]
    return {
        f"{module}.{name}": outcome(
            lambda m=module, n=name, h=facts["home"]: (
                getattr(importlib.import_module(m), n) is getattr(importlib.import_module(h), n)
            )
        )
        for module, names in surface.items()
        for name, facts in names.items()
        if facts["kind"] == "alias"
    }


@case
def constants_have_their_values() -> dict[str, Any]:
    import importlib
    import json
    from pathlib import Path

    surface = json.loads(Path(__file__).parents[1].joinpath("surface-2.13.json").read_text())["modules"]
    return {
        f"{module}.{name}": outcome(lambda m=module, n=name: getattr(importlib.import_module(m), n))
        for module, names in surface.items()
        for name, facts in names.items()
        if facts["kind"] == "constant"
    }


@case
def classes_of_fields() -> dict[str, Any]:
    """What the tools for dataclasses, copies and pickles make of them."""
    import copy
    import dataclasses
    import pickle

    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.events import Event, EventSource, NodeState, RdzvEvent
    from torch.distributed.elastic.multiprocessing import LogsDest, ProcessFailure, RunProcsResult
    from torch.distributed.elastic.rendezvous import RendezvousStoreInfo
    from torch.distributed.launcher.api import LaunchConfig

    made = {
        "RunResult": RunResult(WorkerState.SUCCEEDED, {0: 1}),
        "Event": Event("n", EventSource.AGENT, 5, {"a": 1}),
        "RdzvEvent": RdzvEvent("n", "r", "m", "h", 1, NodeState.INIT),
        "LogsDest": LogsDest({0: "a"}),
        "RunProcsResult": RunProcsResult({0: "v"}),
        "RendezvousStoreInfo": RendezvousStoreInfo("a", 1),
        "LaunchConfig": LaunchConfig(1, 1, 1, run_id="r"),
        "ProcessFailure": ProcessFailure(0, 1, -9, "none"),
    }
    facts: dict[str, Any] = {}
    for name, one in made.items():
        facts[name] = [
            dataclasses.is_dataclass(one),
            copy.copy(one) == one,
            outcome(lambda o=one: type(pickle.loads(pickle.dumps(o))).__name__),
            repr(one).startswith(f"{name}("),
        ]
        if name not in ("LaunchConfig", "ProcessFailure"):  # which have more of their own
            facts[f"{name}: as dict"] = plain(dataclasses.asdict(one))
            facts[f"{name}: text"] = repr(one)
            first = dataclasses.fields(one)[0].name
            facts[f"{name}: replaced"] = outcome(lambda o=one, f=first: dataclasses.replace(o, **{f: getattr(o, f)}) == o)
    facts["replaced config"] = dataclasses.replace(made["LaunchConfig"], run_id="x").run_id
    facts["config as dict"] = [dataclasses.asdict(made["LaunchConfig"])[name] for name in ("min_nodes", "run_id", "rdzv_configs")]
    return facts
