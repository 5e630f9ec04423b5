"""The job's secret: what every node of a job knows and nobody else does, so that no stranger can join it or read it.

It comes from a file (``secret_file``) or from the variable ``RALLYPOINT_SECRET``, which workers do not inherit.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from rallypoint.base import defaults, report
from rallypoint.errors import UsageError
from rallypoint.rendezvous.settings import Settings

__all__ = ["load_secret"]

_LEAST_BYTES = 16  # fewer could be guessed
_MOST_BYTES = 4096
_ADVICE = "make one with: python3 -c 'import secrets; print(secrets.token_hex(32))'"


def load_secret(settings: Settings, environ: Mapping[str, str]) -> bytes | None:
    """The secret, or None where none was given; blanks and line ends after it do not belong to it."""
    path, variable = settings.secret_file, environ.get(defaults.ENV_SECRET)
    if path is None:
        return None if not variable else _checked(os.fsencode(variable), defaults.ENV_SECRET)
    source = f"secret_file ({settings.source('secret_file')})"
    if variable:
        raise UsageError(f"the job's secret is given twice, in {source} and in {defaults.ENV_SECRET}; leave one out")
    try:
        return _checked(_read(path, source), f"{source}: {path}")
    except OSError as error:
        raise UsageError(f"{source}: {path} cannot be read: {error.strerror}") from error


def _read(path: str, source: str) -> bytes:
    """The start of a file; what is none, such as a pipe that nobody writes to, is not waited for."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise UsageError(f"{source}: {path} is not a regular file")
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            report.warn(f"{source}: {path} can be read by other users of this machine; chmod 600 it")
        return file.read(_MOST_BYTES + 1)


def _checked(data: bytes, source: str) -> bytes:
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{source}: the job's secret has at most {_MOST_BYTES} bytes")
    secret = data.rstrip()
    if len(secret) < _LEAST_BYTES:
        raise UsageError(f"{source}: the job's secret has {len(secret)} bytes, and needs {_LEAST_BYTES} or more; {_ADVICE}")
    return secret
