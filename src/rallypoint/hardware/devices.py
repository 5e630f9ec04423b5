"""How many workers fit on this machine, without asking torch: ``--nproc-per-node auto|cpu|gpu|xpu``.

CPUs are those that this process may use, not those that the machine has: in a container or under a batch scheduler the two
differ. Devices are counted as their drivers show them under a root folder, and cut down by the variable with which a user
chooses among them, as the driver's own library does it. Where the program that calls us has imported torch already, torch is
asked instead: it knows more, and its answer is the one that the workers will see.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rallypoint.base import defaults, environment
from rallypoint.base.environment import imported_torch
from rallypoint.errors import UsageError

__all__ = [
    "allowed_cpus", "amd_mask", "amd_nodes", "choose", "determine_local_world_size", "intel_cards", "mask_variables",
    "names_in", "nvidia_minors", "read_text", "visible_amd_gpus", "visible_gaudis", "visible_gpus", "visible_npus",
    "visible_tpus", "visible_xpus",
]  # fmt: skip

ENV_HIP_VISIBLE_DEVICES = "HIP_VISIBLE_DEVICES"
ENV_ROCR_VISIBLE_DEVICES = "ROCR_VISIBLE_DEVICES"
ENV_HABANA_VISIBLE_MODULES = "HABANA_VISIBLE_MODULES"
ENV_ASCEND_RT_VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
ENV_TPU_VISIBLE_CHIPS = "TPU_VISIBLE_CHIPS"
_GPU_MASKS = (defaults.ENV_CUDA_VISIBLE_DEVICES, ENV_HIP_VISIBLE_DEVICES, ENV_ROCR_VISIBLE_DEVICES)
NVIDIA_GPUS = "proc/driver/nvidia/gpus"
_INTEL = "0x8086"
_GOOGLE = "0x1ae0"
_GAUDI_DRIVER = "habanalabs"
_KFD_NODES = "sys/class/kfd/kfd/topology/nodes"
_FILE_BYTES = 64 * 1024


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


def visible_gpus(root: str = "/", environ: Mapping[str, str] = environment.own) -> int:
    """NVIDIA GPUs that a CUDA program started here would see."""
    return len(choose(environ.get(defaults.ENV_CUDA_VISIBLE_DEVICES), _count_nvidia(root)))


def visible_amd_gpus(root: str = "/", environ: Mapping[str, str] = environment.own) -> int:
    """AMD GPUs that a HIP program started here would see: its own mask counts among those that the driver's mask leaves."""
    present = len(choose(environ.get(ENV_ROCR_VISIBLE_DEVICES), len(amd_nodes(root))))
    return len(choose(amd_mask(environ), present))


def visible_xpus(root: str = "/", environ: Mapping[str, str] = environment.own) -> int:
    """Intel GPUs that a Level Zero program started here would see."""
    return len(choose(environ.get(defaults.ENV_ZE_AFFINITY_MASK) or None, len(intel_cards(root))))


def visible_gaudis(root: str = "/", environ: Mapping[str, str] = environment.own) -> int:
    """Habana Gaudi accelerators: in a container only those with a device node are ours."""
    nodes = _numbered(names_in(root, "dev/accel"), "accel")
    present = sum(_driver(os.path.join(root, "sys/class/accel", f"accel{node}")) == _GAUDI_DRIVER for node in nodes)
    return len(choose(environ.get(ENV_HABANA_VISIBLE_MODULES), present))


def visible_npus(root: str = "/", environ: Mapping[str, str] = environment.own) -> int:
    """Huawei Ascend NPUs."""
    return len(choose(environ.get(ENV_ASCEND_RT_VISIBLE_DEVICES), len(_numbered(names_in(root, "dev"), "davinci"))))


def visible_tpus(root: str = "/", environ: Mapping[str, str] = environment.own) -> int:
    """Google TPU chips, which have a device node of their own or are passed through as groups of the IOMMU."""
    chips = [node for node in _numbered(names_in(root, "dev"), "accel") if _is_tpu(root, f"sys/class/accel/accel{node}/device")]
    for group in _numbered(names_in(root, "dev/vfio"), "") if not chips else ():
        members = f"sys/kernel/iommu_groups/{group}/devices"
        chips += [group] if any(_is_tpu(root, f"{members}/{name}") for name in names_in(root, members)) else []
    return len(choose(environ.get(ENV_TPU_VISIBLE_CHIPS), len(chips)))


def nvidia_minors(root: str) -> list[int]:
    """The numbers of the NVIDIA device nodes."""
    return _numbered(names_in(root, "dev"), "nvidia")


def _count_nvidia(root: str) -> int:
    """A driver that nobody has used since boot has made no device nodes yet, but lists its devices."""
    return len(nvidia_minors(root)) or len(names_in(root, NVIDIA_GPUS))


def amd_nodes(root: str) -> list[dict[str, int]]:
    """What the driver tells of each AMD GPU, in its order. A node without SIMD units is a CPU; one not for us cannot be read."""
    nodes = []
    for number in _numbered(names_in(root, _KFD_NODES), ""):
        pairs = (line.split() for line in read_text(os.path.join(root, _KFD_NODES, str(number), "properties")).splitlines())
        properties = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
        if properties.get("simd_count", 0) > 0:
            nodes.append(properties)
    return nodes


def amd_mask(environ: Mapping[str, str]) -> str | None:
    """HIP's own variable, else CUDA's, which HIP takes for it; one that is empty is none."""
    return environ.get(ENV_HIP_VISIBLE_DEVICES) or environ.get(defaults.ENV_CUDA_VISIBLE_DEVICES) or None


def intel_cards(root: str) -> list[str]:
    """The folders of Intel GPUs, in the order of the device nodes."""
    folder = os.path.join(root, "sys/class/drm")
    cards = [os.path.join(folder, f"renderD{number}") for number in _numbered(names_in(root, "sys/class/drm"), "renderD")]
    return [card for card in cards if _vendor(os.path.join(card, "device")) == _INTEL]


def mask_variables(root: str = "/") -> tuple[str, ...]:
    """The variables that leave a worker one GPU; the first of them that is not empty says which there are."""
    has_amd_only = not _count_nvidia(root) and amd_nodes(root)
    return (ENV_HIP_VISIBLE_DEVICES, defaults.ENV_CUDA_VISIBLE_DEVICES) if has_amd_only else (defaults.ENV_CUDA_VISIBLE_DEVICES,)


def choose(mask: str | None, present: int) -> list[str]:
    """What a mask leaves of the present devices, as it names them: it ends at the first that is none, and refuses doubles."""
    if mask is None:
        return list(map(str, range(present)))
    chosen: list[str] = []
    for entry in (piece.strip() for piece in mask.split(",")):
        by_name = entry.startswith(("GPU-", "MIG-"))
        index = entry.partition(".")[0]
        if not by_name and not (index.isdecimal() and int(index) < present):
            break
        chosen.append(entry)
    return chosen if present and len(set(chosen)) == len(chosen) else []


def names_in(root: str, folder: str) -> list[str]:
    try:
        return os.listdir(os.path.join(root, folder))
    except OSError:
        return []


def read_text(path: str) -> str:
    """What a driver says in one of its files; nothing, where it is not there or not for us."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_FILE_BYTES).strip()
    except OSError:
        return ""


def _numbered(names: Sequence[str], prefix: str) -> list[int]:
    """The numbers of those that are called `prefix` and a number, ascending."""
    return sorted(int(name.removeprefix(prefix)) for name in names if name.startswith(prefix) and name[len(prefix) :].isdecimal())


def _vendor(device: str) -> str:
    return read_text(os.path.join(device, "vendor"))


def _is_tpu(root: str, device: str) -> bool:
    return _vendor(os.path.join(root, device)) == _GOOGLE


def _driver(device: str) -> str:
    try:
        return os.path.basename(os.readlink(os.path.join(device, "device", "driver")))
    except OSError:
        return ""


def _count(kind: str) -> int:
    torch = imported_torch()
    if torch is None:
        return visible_gpus() or visible_amd_gpus() if kind == "gpu" else visible_xpus()
    devices = torch.cuda if kind == "gpu" else torch.xpu
    return int(devices.device_count()) if devices.is_available() else 0


def _accelerators() -> int:
    """Devices for `auto`: without torch no Intel ones, as an integrated one would else stand in for all of the CPUs."""
    torch = imported_torch()
    if torch is None:
        return _count("gpu") or visible_gaudis() or visible_npus() or visible_tpus()
    if not hasattr(torch, "accelerator"):
        return _count("gpu")
    return int(torch.accelerator.device_count()) if torch.accelerator.is_available() else 0


def _none_visible(kind: str) -> UsageError:
    variables = _GPU_MASKS if kind == "gpu" else (defaults.ENV_ZE_AFFINITY_MASK,)
    settings = [f"{variable} is {environment.own[variable]!r}" for variable in variables if variable in environment.own]
    return UsageError(
        f"no {kind} is visible here ({', '.join(settings) or 'the driver shows none'}); give a number, or use cpu or auto"
    )


def _number(asked: str) -> int:
    try:
        return int(asked)
    except ValueError:
        raise UsageError(f"{asked!r} is neither a number nor one of auto, cpu, gpu, xpu") from None
