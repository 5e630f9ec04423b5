"""The command ``rallypoint init``: print what starts a job under a scheduler, to be kept and changed."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence

from rallypoint.base.json_text import clip
from rallypoint.cli.main import print_text
from rallypoint.errors import ExitCode, UsageError

__all__ = ["USAGE", "init_main"]

USAGE = """\
usage: rallypoint init slurm [--nodes N] [--gpus N] [SCRIPT [ARGUMENTS]]
       rallypoint init kubernetes --image IMAGE [--nodes N] [--gpus N] [--name NAME] [SCRIPT [ARGUMENTS]]

Print a batch script for Slurm, or a manifest for Kubernetes (an Indexed Job and its Service), that runs SCRIPT [train.py].

  --nodes     number of nodes [2]
  --gpus      GPUs of each node, and workers on it [8]; 0 for none
  --image     Kubernetes: the image of the container, with rallypoint and the script in it
  --name      Kubernetes: the name of the job [train]
  --help      show this help and exit"""

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")  # of a Service, with room for the index of a pod
_MOST = 10_000


def init_main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    if any(word in ("-h", "--help") for word in argv):
        return print_text(USAGE)
    try:
        return print_text(_text(argv))
    except UsageError as error:
        print(f"rallypoint init: error: {clip(str(error), 10_000)}", file=sys.stderr)
        return ExitCode.USAGE


def _text(argv: Sequence[str]) -> str:
    from rallypoint.schedulers import manifests

    kind, *rest = argv or [""]
    if kind not in ("slurm", "kubernetes"):
        raise UsageError(f"{kind!r} is not one of slurm, kubernetes" if kind else USAGE.partition("\n")[0])
    flags, command = _flags(rest)
    nodes, gpus = _count(flags, "--nodes", 2, 1), _count(flags, "--gpus", 8, 0)
    if kind == "slurm":
        if foreign := [flag for flag in ("--image", "--name") if flag in flags]:
            raise UsageError(f"{foreign[0]} is for kubernetes")
        return manifests.slurm(nodes, gpus, shlex.join(command))
    name, image = flags.get("--name", "train"), flags.get("--image", "")
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name must be of small letters, digits and dashes, and begin with a letter, not {name!r}")
    if not re.fullmatch(r"[\w.:/@-]+", image, re.ASCII):
        raise UsageError(f"--image must name an image, not {image!r}" if image else "--image is missing: --image IMAGE")
    return manifests.kubernetes(name, image, nodes, gpus, ", ".join(map(_yaml, command)))


def _flags(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The flags before the script, and the script with its arguments."""
    flags: dict[str, str] = {}
    left = list(words)
    while left and left[0].startswith("-"):
        flag, equals, value = left.pop(0).partition("=")
        if flag not in ("--nodes", "--gpus", "--image", "--name"):
            raise UsageError(f"unknown flag {flag}; see rallypoint init --help")
        if not equals and not left:
            raise UsageError(f"{flag} needs a value")
        flags[flag] = value if equals else left.pop(0)
    return flags, left or ["train.py"]


def _count(flags: dict[str, str], flag: str, default: int, least: int) -> int:
    text = flags.get(flag, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and least <= int(text) <= _MOST):
        raise UsageError(f"{flag} must be a number from {least} to {_MOST}, not {text!r}")
    return int(text)


def _yaml(word: str) -> str:
    """A word within brackets of YAML, in quotes: JSON's are YAML's too."""
    import json

    return json.dumps(word)
