"""How many workers fit on this machine, without asking torch: ``--nproc-per-node auto|cpu|gpu|xpu``.

CPUs are those that this process may use, not those that the machine has: in a container or under a batch scheduler the two
differ. GPUs are counted by their device nodes, as the driver shows them, and cut down by ``CUDA_VISIBLE_DEVICES`` as CUDA does
it. Where the program that calls us has imported torch already, torch is asked instead: it knows more, and its answer is the one
that the workers will see.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from rallypoint import defaults
from rallypoint.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["allowed_cpus", "determine_local_world_size", "visible_gpus", "visible_xpus"]

_INTEL = "0x8086"


def determine_local_world_size(nproc_per_node: str) -> int:
    """The number of workers that ``--nproc-per-node`` asks for on this node."""
    asked = str(nproc_per_node).strip()
    if asked == "cpu":
        return allowed_cpus()
    if asked == "auto":
        return _accelerators() or allowed_cpus()
    if asked in ("gpu", "xpu"):
        found = _count(asked)
        if not found:
            raise _none_visible(asked)
        return found
    return _number(asked)


def allowed_cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus(root: str = "/", environ: Mapping[str, str] = os.environ) -> int:
    """NVIDIA GPUs that a CUDA program started here would see."""
    nodes = [name for name in _names(root, "dev") if name.startswith("nvidia") and name.removeprefix("nvidia").isdigit()]
    # A driver that nobody has used since boot has made no device nodes yet, but lists its devices.
    present = len(nodes) or len(_names(root, "proc/driver/nvidia/gpus"))
    return _chosen(environ.get(defaults.ENV_CUDA_VISIBLE_DEVICES), present)


def visible_xpus(root: str = "/", environ: Mapping[str, str] = os.environ) -> int:
    """Intel GPUs that a Level Zero program started here would see."""
    folder = "sys/class/drm"
    cards = [name for name in _names(root, folder) if name.startswith("renderD")]
    present = sum(_vendor(os.path.join(root, folder, card)) == _INTEL for card in cards)
    return _chosen(environ.get(defaults.ENV_ZE_AFFINITY_MASK) or None, present)


def _chosen(mask: str | None, present: int) -> int:
    """How many of the present devices a mask leaves: CUDA stops at the first entry that names none, and refuses doubles."""
    if mask is None:
        return present
    chosen: list[str] = []
    for entry in (piece.strip() for piece in mask.split(",")):
        by_name = entry.startswith(("GPU-", "MIG-"))
        index = entry.partition(".")[0]
        if not by_name and not (index.isdigit() and int(index) < present):
            break
        chosen.append(entry)
    return len(chosen) if present and len(set(chosen)) == len(chosen) else 0


def _names(root: str, folder: str) -> list[str]:
    try:
        return os.listdir(os.path.join(root, folder))
    except OSError:
        return []


def _vendor(card: str) -> str:
    try:
        with open(os.path.join(card, "device", "vendor")) as file:
            return file.read().strip()
    except OSError:
        return ""


def _imported_torch() -> Any:
    return sys.modules.get("torch")


def _count(kind: str) -> int:
    torch = _imported_torch()
    if torch is None:
        return visible_gpus() if kind == "gpu" else visible_xpus()
    devices = torch.cuda if kind == "gpu" else torch.xpu
    return int(devices.device_count()) if devices.is_available() else 0


def _accelerators() -> int:
    """Devices for `auto`: without torch only GPUs, as an integrated Intel one would else stand in for all of the CPUs."""
    torch = _imported_torch()
    if torch is None or not hasattr(torch, "accelerator"):
        return _count("gpu")
    return int(torch.accelerator.device_count()) if torch.accelerator.is_available() else 0


def _none_visible(kind: str) -> UsageError:
    variable = defaults.ENV_CUDA_VISIBLE_DEVICES if kind == "gpu" else defaults.ENV_ZE_AFFINITY_MASK
    setting = os.environ.get(variable)
    seen = f"{variable} is {setting!r}" if setting is not None else "the driver shows none"
    return UsageError(f"no {kind} is visible here ({seen}); give a number, or use cpu or auto")


def _number(asked: str) -> int:
    try:
        workers = int(asked)
    except ValueError:
        raise UsageError(f"{asked!r} is neither a number nor one of auto, cpu, gpu, xpu") from None
    if workers < 1:
        raise UsageError(f"{workers} is too few: each node needs at least one worker")
    return workers
