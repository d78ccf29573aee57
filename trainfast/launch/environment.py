"""Environment variables that must be set before the interpreter starts."""

import math
from collections.abc import Mapping
from importlib import metadata

from trainfast.launch.settings import Settings

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# glibc gives memory back when the top of its heap is free, and takes it again a moment
# later, page by page. With these variables it keeps what a training step needs.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
}
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NEW_ALLOCATOR = (2, 12)  # torch 2.9 to 2.11 do not read all options of the new name
_WITHOUT_EFFECT = {
    "TORCH_CUDNN_V8_API_ENABLED": "cuDNN's v8 API is on by default",
    "TORCH_CUDNN_BENCHMARK": "torch does not read it; use `cudnn_benchmark: true`",
}


def changed_variables(
    settings: Settings,
    environment: Mapping[str, str],
    torch: tuple[int, ...] | None,
    cores: int | None,
) -> tuple[dict[str, str | None], list[str]]:
    """The variables to set, or to remove (None), and what to tell about them.

    A default never replaces a variable that the user has set; a configuration does.

    Args:
        settings: what the configuration asks for.
        environment: the present variables.
        torch: torch's version, None without torch.
        cores: of a CPU quota below the machine's cores, else None.
    """
    asked: dict[str, str | None] = dict(settings.env_vars)
    if settings.threads is not None:
        for name in _THREADS:
            asked.setdefault(name, str(settings.threads))
    default = dict(KEEP_MEMORY) if settings.malloc else {}
    if cores is not None:
        default["OMP_NUM_THREADS"] = str(cores)
    changed: dict[str, str | None] = {
        name: value
        for name, value in default.items()
        if name not in asked and name not in environment
    }
    notes = [
        f"{name} has no effect: {reason}"
        for name, reason in _WITHOUT_EFFECT.items()
        if name in asked
    ]
    allocator = [asked.pop(name) for name in _ALLOCATOR if name in asked]
    if allocator:
        new = torch is not None and torch >= _NEW_ALLOCATOR
        used, unused = _ALLOCATOR[new], _ALLOCATOR[not new]
        asked[used] = allocator[-1]
        if unused in environment:
            asked[unused] = None
    return changed | asked, notes


def torch_version() -> tuple[int, ...] | None:
    """(major, minor) of the installed torch, without loading it."""
    try:
        major, minor = metadata.version("torch").split(".")[:2]
    except metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def cores_of_quota(quota: float | None, available: int) -> int | None:
    """Whole cores of a CPU quota, None where the quota limits nothing.

    Args:
        quota: in cores, None without a quota.
        available: cores that the process may run on.
    """
    if quota is None or math.ceil(quota) >= available:
        return None
    return max(1, math.ceil(quota))
