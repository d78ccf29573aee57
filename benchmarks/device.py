"""What a benchmark needs of a GPU, and what stands for it on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks import harness

FILL_BYTES, SMOKE_FILL_BYTES = 2**30, 2**10
CONDITIONS = "each call queued behind two fills of 1 GiB, which empty L2"


def clock(device: str) -> Callable[[Callable[[], object]], tuple[float, float | None]]:
    return harness.queued_clock if device == "cuda" else harness.cpu_clock


def make_fill(device: str, smoke: bool = False) -> Callable[[], object]:
    """Return a call that fills more memory than any cache has."""
    nbytes = SMOKE_FILL_BYTES if smoke else FILL_BYTES
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def fill() -> None:
        memory.zero_()
        memory.zero_()  # long enough for the host to enqueue a backward meanwhile

    return fill


def free_bytes(device: str) -> int:
    """Return what can still be allocated; more than there is where nobody knows."""
    if device != "cuda":
        return 2**62
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
