"""What the memory of a process says step by step: cheap enough for every step."""

import ctypes
import statistics
import sys
from collections import deque

import torch

from trainfast.machine import resident_memory

EVERY = 2  # steps between two samples: the objects' count takes 0.1 ms
_SAMPLES = 12
# A step. Reference cycles that wait for the garbage collector are a few objects.
_LEAST = {"host bytes": 4096, "Python objects": 8, "GPU bytes": 4096}


class Signals:
    """The last samples of what is allocated: bytes that C's allocator gave out, blocks
    of Python's allocator, bytes of torch's GPU allocator."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, dict[str, int]]] = deque(maxlen=_SAMPLES)
        self.first: tuple[int, dict[str, int]] | None = None

    def take(self, step: int) -> None:
        now = {"host bytes": host_bytes(), "Python objects": sys.getallocatedblocks()}
        if torch.cuda.is_initialized():
            devices = range(torch.cuda.device_count())
            now["GPU bytes"] = sum(map(torch.cuda.memory_allocated, devices))
        self._samples.append((step, now))
        self.first = self.first or self._samples[0]

    def clear(self) -> None:
        self._samples.clear()

    def slopes(self) -> dict[str, float]:
        """Growth a step, by name: medians over all pairs of samples (Theil 1950, Sen
        1968), which single outliers do not move. Empty until there are enough."""
        if len(self._samples) < _SAMPLES:
            return {}
        samples = list(self._samples)
        return {
            name: statistics.median(
                (b[name] - a[name]) / (j - i)
                for place, (i, a) in enumerate(samples)
                for j, b in samples[place + 1 :]
                if name in a
            )
            for name in samples[-1][1]
            if name in samples[0][1]
        }

    def last(self) -> dict[str, int]:
        return self._samples[-1][1] if self._samples else {}


def grows(slopes: dict[str, float]) -> bool:
    return any(slope >= _LEAST[name] for name, slope in slopes.items())


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks"),
            *("fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _mallinfo2() -> "ctypes._NamedFuncPointer | None":
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33
    if function is not None:
        function.restype = _MallInfo2
    return function


_allocator = _mallinfo2()


def host_bytes() -> int:
    """Bytes that malloc has given out; where C's library does not tell, or another
    allocator serves: the resident memory, which holes in the heap make noisy."""
    if _allocator is not None:
        info = _allocator()
        return int(info.uordblks + info.hblkhd)
    return resident_memory()
