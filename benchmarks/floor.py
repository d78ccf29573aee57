"""Builds and calls floor.c, the memory bound of an optimizer step on the CPU."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import native

if TYPE_CHECKING:
    import torch

SOURCE = Path(__file__).with_name("floor.c")
READ, UPDATE, WRITE = range(3)  # what is done with an array


class Array(ctypes.Structure):
    """floor_array of floor.c."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("how", ctypes.c_int64),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """Compile and load floor.c. Raises RuntimeError where that cannot be done.

    torch must be imported before, so that the OpenMP runtime found is its own.
    """
    loaded = native.build(SOURCE)
    loaded.floor_run.restype = ctypes.c_int
    loaded.floor_run.argtypes = [
        ctypes.POINTER(Array),
        ctypes.POINTER(ctypes.c_int64),
        *[ctypes.c_int64] * 2,
        *[ctypes.c_int] * 2,
        ctypes.POINTER(ctypes.c_uint8),
    ]
    return loaded


def openmp_runtimes() -> list[str]:
    """Return the paths of the OpenMP runtimes that the process has loaded."""
    text = Path("/proc/self/maps").read_text()
    found = re.findall(r"(/\S*/lib(?:g|i|)omp[^/\s]*\.so[^/\s]*)", text)
    return sorted(set(found))


def make_floor(
    columns: Sequence[tuple[Sequence[torch.Tensor], int]], threads: int, zero: int = 0
) -> Callable[[], None]:
    """Return a call that touches all tensors in one pass.

    Each column is a list with one contiguous tensor for each of the first column, and
    READ, UPDATE or WRITE. Tensors of one row may differ in their number of elements. A
    `zero` that is not 0 is added to each byte, for tests.
    """
    run = library().floor_run
    rows = list(zip(*(tensors for tensors, _ in columns), strict=True))
    numels = (ctypes.c_int64 * len(rows))(*(row[0].numel() for row in rows))
    arrays = (Array * (len(rows) * len(columns)))(
        *[
            Array(tensor.data_ptr(), tensor.nbytes, how)
            for row in rows
            for tensor, (_, how) in zip(row, columns, strict=True)
        ]
    )
    sink = ctypes.c_uint8()

    def floor() -> None:
        # `rows` keeps the arrays alive as long as their addresses are in use.
        counts = (len(rows), len(columns), threads, zero)
        used = run(arrays, numels, *counts, ctypes.byref(sink))
        if used != threads:
            raise RuntimeError(f"the floor must run on {threads} threads, got {used}")

    return floor
