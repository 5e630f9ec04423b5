"""What can be learned from a scheduler, and the rules that all of them share.

What the user says wins. Each value comes with the variable that said it, so that the line at the start of the job, and every
error, can name it. One launcher belongs on each node, because it starts the workers itself: where a scheduler was told to start
several, the error has the line that starts one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

from rallypoint.base.records import Value
from rallypoint.base.text import host_port, many
from rallypoint.errors import UsageError

__all__ = ["Found", "ReadFile", "a_number", "endpoint_of", "hosts_in", "port_of", "too_many"]

# Below the ports that the kernel gives away, and those that are our defaults.
FIRST_PORT, PORTS = 20_000, 9_000

ReadFile = Callable[[str], str]  # OSError if it cannot be read


class Found(Value):
    """Values by the name of the flag that they stand for (`dest`), and the variables that said so."""

    scheduler: str  # its name, for people
    values: Mapping[str, str]
    sources: Mapping[str, str]
    advice: str = ""  # in one sentence, where it may not be what was meant
    refusal: str = ""  # the same, where it cannot be
    needs_endpoint: str = ""  # why it is not known where the nodes can meet, where that is so


def a_number(environ: Mapping[str, str], name: str, least: int = 0) -> int | None:
    """What this variable says; None if it says nothing, UsageError if it is no such number."""
    text = environ.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and int(text) >= least):
        raise UsageError(f"{name} is {text!r}, which is not a number from {least}; --scheduler none ignores it")
    return int(text)


def too_many(launchers: int, nodes: int, said_by: str, instead: str) -> str:
    """What is wrong if there are more launchers than nodes, else nothing."""
    if launchers <= nodes:
        return ""
    crowd = f"{many(launchers, 'launcher')} on {many(nodes, 'node')}"
    return f"{said_by}: {crowd}, but one on each node is enough, because it starts all workers there; use {instead}"


def port_of(key: str) -> int:
    """The same port on all nodes of a job, another one for each job; those of jobs with adjacent numbers never are the same."""
    number, _, rest = key.partition(".")
    start = int(number) if number.isdecimal() else zlib.crc32(number.encode())
    return FIRST_PORT + (start + 97 * zlib.crc32(rest.encode()) * bool(rest)) % PORTS


def endpoint_of(host: str, key: str) -> str:
    return host_port(host, port_of(key))


def hosts_in(text: str) -> Sequence[str]:
    """The hosts that a file names, one on each line, in their order, each once."""
    return list(dict.fromkeys(line.split()[0] for line in text.splitlines() if line.strip()))
