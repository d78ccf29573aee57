"""Memory of GPUs, and what a process takes of it before its first tensor.

The memory is what nvidia-smi shows in total. A process's context holds the driver's
tables and the kernels that were loaded; the figures here are those of CUDA 12 with
lazy loading after a training step of torch, rounded up, and no more than a guide: they
differ by some 100 MiB between drivers, torch versions and models.
"""

import os
import re
from typing import NamedTuple

from trainfast.machine import gpus

MIB = 1 << 20


class Gpu(NamedTuple):
    """A GPU as an estimate sees it; sizes in bytes, the capability times ten."""

    name: str
    memory: int
    capability: int
    context: int
    processors: int  # streaming multiprocessors


# Name: memory MiB, capability, context MiB, streaming multiprocessors.
_GPUS = {
    "GTX 1080 Ti": (11264, 61, 300, 28),
    "P100": (16384, 60, 300, 56),
    "T4": (15360, 75, 300, 40),
    "V100": (16160, 70, 310, 80),
    "V100 32GB": (32510, 70, 310, 80),
    "RTX 2080 Ti": (11264, 75, 300, 68),
    "RTX 3050 Laptop": (4096, 86, 300, 16),
    "RTX 3050": (8192, 86, 300, 20),
    "RTX 3060": (12288, 86, 310, 28),
    "RTX 3080": (10240, 86, 330, 68),
    "RTX 3090": (24576, 86, 340, 82),
    "RTX 4060 Ti": (8188, 89, 320, 34),
    "RTX 4070": (12282, 89, 330, 46),
    "RTX 4080": (16376, 89, 360, 76),
    "RTX 4090": (24564, 89, 380, 128),
    "RTX 5090": (32607, 120, 420, 170),
    "A10G": (23028, 86, 340, 72),
    "L4": (23034, 89, 340, 58),
    "L40S": (46068, 89, 400, 142),
    "A100": (40960, 80, 420, 108),
    "A100 80GB": (81920, 80, 420, 108),
    "H100": (81559, 90, 520, 132),
    "H200": (143771, 90, 520, 132),
}
_CAUTIOUS = 75  # for a number of bytes: torch's flash attention is not used there


def gpu_of(named: str | int | Gpu | None) -> Gpu:
    """The GPU of a name ("T4", "rtx4090"), or one with this many bytes ("16GB", int);
    None: this machine's, or a T4 if it has none.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(named, Gpu):
        return named
    if named is None:
        return _own_gpu() or gpu_of("T4")
    if isinstance(named, int) and not isinstance(named, bool):
        if named <= 0:
            raise ValueError(f"`gpu` must be a positive number of bytes, got {named}")
        return Gpu(f"{named / 2**30:.4g} GiB", named, _CAUTIOUS, 300 * MIB, 80)
    if not isinstance(named, str):
        raise TypeError(
            f"`gpu` must be a name or a number of bytes, got {type(named).__name__}"
        )
    size = re.fullmatch(r"\s*([\d.]+)\s*(G|M)i?B?\s*", named, re.IGNORECASE)
    if size:
        unit = 2**30 if size[2].upper() == "G" else MIB
        return gpu_of(int(float(size[1]) * unit))
    for name, (memory, capability, context, processors) in _GPUS.items():
        if _key(name) == _key(named):
            return Gpu(name, memory * MIB, capability, context * MIB, processors)
    raise ValueError(
        f"`gpu` must be a number of bytes, a size such as '16GB', or one of "
        f"{', '.join(_GPUS)}; got {named!r}"
    )


def _own_gpu() -> Gpu | None:
    """The first GPU of this machine that the process may use."""
    found = gpus()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if not found or first in ("", "-1"):
        return None
    index = int(first) if first.isdecimal() else 0  # a UUID: mostly all GPUs are alike
    name, capability, memory = (
        found[min(index, len(found) - 1)][key]
        for key in ("name", "capability", "memory")
    )
    try:
        own = gpu_of(int(memory.split()[0]) * MIB)._replace(
            name=name, capability=int(capability.replace(".", ""))
        )
    except ValueError:  # "[N/A]", where the processor's memory is the GPU's
        return None
    # Most names are a known one with what follows: "NVIDIA A100-SXM4-40GB".
    chips = {each: re.sub(r" \d+GB$", "", each) for each in _GPUS}
    known = [gpu_of(each) for each, chip in chips.items() if _key(chip) in _key(name)]
    alike = [
        each
        for each in known
        if each.capability == own.capability
        and abs(each.memory - own.memory) < 0.1 * own.memory
    ]
    best = max(alike, key=lambda each: len(each.name), default=own)
    return best._replace(memory=own.memory)


def _key(name: str) -> str:
    name = re.sub(r"nvidia|tesla|geforce", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", name)
