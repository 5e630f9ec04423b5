"""What torch's modules import from Python itself.

Programs come at such names through torch's modules too: they patch ``dynamic_rendezvous.time``, or import ``timedelta`` with what
uses it. So each of torch's modules shows here what it shows there. A logger has the name of its module.
"""

from __future__ import annotations

__all__ = ["IMPORTS", "LOGGERS"]

IMPORTS: dict[str, dict[str, str]] = {  # module, below torch.distributed -> where from -> names; theirs=ours where they differ
    "elastic.agent.server.api": {
        "": "abc",
        "from collections": "defaultdict",
        "from collections.abc": "Callable",
        "from contextlib": "contextmanager",
        "from dataclasses": "dataclass field",
        "from enum": "Enum",
        "from typing": "Any",
    },
    "elastic.agent.server.health_check_server": {"from collections.abc": "Callable"},
    "elastic.agent.server.local_elastic_agent": {"from string": "Template", "from typing": "Any"},
    "elastic.control_plane": {"": "os", "from collections.abc": "Generator", "from contextlib": "ExitStack contextmanager"},
    "elastic.events": {"from typing": "Optional"},
    "elastic.events.api": {"from dataclasses": "asdict dataclass field", "from enum": "Enum", "from typing": "Union"},
    "elastic.metrics": {"from typing": "Optional"},
    "elastic.metrics.api": {"": "abc", "from collections": "namedtuple", "from functools": "wraps"},
    "elastic.multiprocessing": {"from collections.abc": "Callable", "from typing": "Optional Union"},
    "elastic.multiprocessing.api": {
        "": "abc logging synchronize=multiprocessing.synchronize mp=multiprocessing",
        "from abc": "ABC abstractmethod",
        "from collections.abc": "Callable",
        "from contextlib": "nullcontext",
        "from dataclasses": "dataclass field",
        "from enum": "IntFlag",
        "from types": "FrameType",
        "from typing": "Any TextIO Union",
    },
    "elastic.multiprocessing.errors": {
        "from collections.abc": "Callable",
        "from dataclasses": "dataclass field",
        "from datetime": "datetime",
        "from functools": "wraps",
        "from string": "Template",
        "from typing": "Any Optional ParamSpec TypeVar Union",
    },
    "elastic.multiprocessing.errors.error_handler": {"": "logging", "from typing": "Any"},
    "elastic.multiprocessing.redirects": {"": "logging", "from contextlib": "contextmanager", "from functools": "partial"},
    "elastic.multiprocessing.subprocess_handler.subprocess_handler": {
        "": "os signal sys",
        "from subprocess": "Popen",
        "from typing": "Any",
    },
    "elastic.multiprocessing.tail_log": {
        "": "logging",
        "from collections.abc": "Callable",
        "from concurrent.futures": "ThreadPoolExecutor",
        "from threading": "Event",
        "from typing": "TextIO",
    },
    "elastic.rendezvous.api": {
        "": "socket",
        "from abc": "ABC abstractmethod",
        "from collections.abc": "Callable",
        "from dataclasses": "dataclass",
        "from typing": "Any ClassVar",
    },
    "elastic.rendezvous.c10d_rendezvous_backend": {
        "": "binascii logging",
        "from base64": "b64decode b64encode",
        "from datetime": "timedelta",
        "from typing": "Any Token=Any cast",
    },
    "elastic.rendezvous.dynamic_rendezvous": {
        "": "inspect logging math pickle weakref",
        "from abc": "ABC abstractmethod",
        "from collections.abc": "Callable",
        "from dataclasses": "dataclass",
        "from datetime": "datetime timedelta timezone",
        "from enum": "Enum",
        "from typing": "Any Token=Any",
    },
    "elastic.rendezvous.etcd_rendezvous": {"": "json logging sys threading time"},
    "elastic.rendezvous.etcd_rendezvous_backend": {
        "": "binascii",
        "from base64": "b64decode b64encode",
        "from typing": "Token=Any cast",
    },
    "elastic.rendezvous.etcd_server": {
        "": "atexit logging os shlex shutil socket subprocess tempfile time",
        "from typing": "TextIO",
    },
    "elastic.rendezvous.etcd_store": {"": "datetime random time", "from base64": "b64decode b64encode"},
    "elastic.rendezvous.registry": {"": "logging", "from importlib.metadata": "entry_points"},
    "elastic.rendezvous.static_tcp_rendezvous": {"": "datetime logging", "from typing": "cast"},
    "elastic.rendezvous.utils": {
        "": "weakref",
        "from collections.abc": "Callable",
        "from datetime": "timedelta",
        "from threading": "Event Thread",
        "from typing": "Any",
    },
    "elastic.timer.api": {
        "": "abc logging",
        "from contextlib": "contextmanager",
        "from inspect": "getframeinfo stack",
        "from typing": "Any",
    },
    "elastic.timer.file_based_local_timer": {"": "io", "from collections.abc": "Callable", "from typing": "ParamSpec TypeVar"},
    "elastic.timer.local_timer": {"": "logging mp=multiprocessing", "from queue": "Empty", "from typing": "Any"},
    "elastic.utils.api": {"from string": "Template", "from typing": "Any"},
    "elastic.utils.data.cycling_iterator": {"from collections.abc": "Callable Iterator", "from typing": "TypeVar"},
    "elastic.utils.data.elastic_distributed_sampler": {"from collections.abc": "Iterator Sized", "from typing": "TypeVar cast"},
    "elastic.utils.distributed": {"from contextlib": "closing"},
    "elastic.utils.store": {
        "from collections.abc": "Callable Iterable",
        "from contextlib": "contextmanager",
        "from datetime": "timedelta",
    },
    "launcher.api": {"from collections.abc": "Callable", "from dataclasses": "dataclass field", "from typing": "Any"},
    "run": {
        "": "metadata=importlib.metadata",
        "from argparse": "ArgumentParser _Action=Action",
        "from collections.abc": "Callable",
    },
}

LOGGERS = {  # the name of the logger -> the modules that have one
    "logger": (
        "elastic.agent.server.api",
        "elastic.agent.server.local_elastic_agent",
        "elastic.multiprocessing.api",
        "elastic.multiprocessing.errors",
        "elastic.multiprocessing.errors.error_handler",
        "elastic.multiprocessing.redirects",
        "elastic.multiprocessing.tail_log",
        "elastic.rendezvous.c10d_rendezvous_backend",
        "elastic.rendezvous.dynamic_rendezvous",
        "elastic.rendezvous.etcd_rendezvous",
        "elastic.rendezvous.etcd_server",
        "elastic.rendezvous.static_tcp_rendezvous",
        "elastic.timer.api",
        "elastic.timer.debug_info_logging",
        "elastic.timer.file_based_local_timer",
        "elastic.timer.local_timer",
        "elastic.utils.distributed",
        "launcher.api",
        "run",
    ),
    "log": (
        "elastic.agent.server.health_check_server",
        "elastic.rendezvous.registry",
    ),
}
