"""`print_gpu_memory`: torch's allocator beside the driver's view."""

import os
from typing import Any

import torch

from trainfast.monitor.nvml import Nvml
from trainfast.monitor.sample import Gpu
from trainfast.report import Table

MIB = 1 << 20


def print_gpu_memory() -> None:
    """Prints for each GPU what torch's tensors and its allocator hold, what the driver
    counts, and which other processes are on the card.

    Without a GPU it says so. The driver's part needs the package nvidia-ml-py.
    """
    if not torch.cuda.is_available():
        print("torch sees no GPU")
        return
    nvml = Nvml()
    seen = {gpu.index: gpu for gpu in nvml.gpus()}
    for device in range(torch.cuda.device_count()):
        # The driver's order is torch's where nothing hides a GPU; but CUDA puts the
        # fastest of unlike GPUs first, unless it is told not to.
        unlike = len({gpu.name for gpu in seen.values()}) > 1
        by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        hidden = "CUDA_VISIBLE_DEVICES" in os.environ or (unlike and not by_bus)
        print(_table(device, None if hidden else seen.get(device)))
    if nvml.missing:
        print(nvml.missing)


def _table(device: int, gpu: Gpu | None) -> Table:
    free, total = torch.cuda.mem_get_info(device)
    rows: list[tuple[Any, ...]] = [
        ("in tensors", torch.cuda.memory_allocated(device) // MIB),
        ("in tensors, at most", torch.cuda.max_memory_allocated(device) // MIB),
        ("reserved by torch", torch.cuda.memory_reserved(device) // MIB),
        ("in use on the card", (total - free) // MIB),
        ("free on the card", free // MIB),
        ("the card's memory", total // MIB),
    ]
    if gpu is not None:
        others = {p: size for p, size in gpu.processes.items() if p != os.getpid()}
        rows += [(f"process {p}", size // MIB) for p, size in sorted(others.items())]
    name = torch.cuda.get_device_name(device)
    return Table(f"GPU {device}: {name}", ("", "MiB"), rows)
