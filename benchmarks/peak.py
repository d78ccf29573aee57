"""Builds and calls peak.c: the multiply-add peak and a plain read, on the CPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import native

if TYPE_CHECKING:
    import torch

SOURCE = Path(__file__).with_name("peak.c")
# How many float32 numbers an instruction of a backend holds: `wide` is 16 lanes on what
# the compiler's vector extensions make of them, which is AVX2.
LANES = {"avx512": 16, "avx2": 8, "wide": 8, "scalar": 4}
PAIRS = 32  # how many products one of AVX512_BF16's multiply-adds has


@functools.cache
def library() -> ctypes.CDLL:
    """Compile and load peak.c. Raises RuntimeError where that cannot be done."""
    loaded = native.build(SOURCE)
    loaded.peak_multiply_adds.restype = ctypes.c_int
    loaded.peak_multiply_adds.argtypes = [
        ctypes.c_int64,
        *[ctypes.c_int] * 2,
        ctypes.POINTER(ctypes.c_float),
    ]
    loaded.peak_read.restype = ctypes.c_int
    loaded.peak_read.argtypes = [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_int64),
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_uint64),
    ]
    return loaded


def has(lanes: int) -> bool:
    """Return whether this machine has multiply-adds of so many lanes, or PAIRS."""
    sink = ctypes.c_float()
    return library().peak_multiply_adds(0, lanes, 1, ctypes.byref(sink)) == 1


def widest() -> int:
    """Return how many lanes this machine's widest float32 multiply-add has."""
    return next(filter(has, (16, 8, 4)))


def products(backend: str, dtype: str) -> int:
    """Return how many products a backend's instruction has for a dtype."""
    lanes = LANES.get(backend) or widest()
    return PAIRS if dtype == "bfloat16" and lanes == 16 and has(PAIRS) else lanes


def make_multiply_adds(flops: int, lanes: int, threads: int) -> Callable[[], None]:
    """Return a call that computes `flops` operations, two a multiply-add."""
    run, sink = library().peak_multiply_adds, ctypes.c_float()

    def peak() -> None:
        used = run(flops // 2, lanes, threads, ctypes.byref(sink))
        if used != threads:
            raise RuntimeError(
                f"the peak must run on {threads} threads with {lanes} lanes, got {used}"
            )

    return peak


def make_read(arrays: Sequence[torch.Tensor], threads: int) -> Callable[[], None]:
    """Return a call that reads all of the arrays, whose bytes are multiples of 8."""
    run, sink = library().peak_read, ctypes.c_uint64()
    data = (ctypes.c_void_p * len(arrays))(*[array.data_ptr() for array in arrays])
    words = (ctypes.c_int64 * len(arrays))(*[array.nbytes // 8 for array in arrays])

    def read() -> None:
        # `arrays` keeps them alive as long as their addresses are in use.
        used = run(data, words, len(arrays), threads, ctypes.byref(sink))
        if used != threads:
            raise RuntimeError(f"the read must run on {threads} threads, got {used}")

    return read
