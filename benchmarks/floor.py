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


class Slot(ctypes.Structure):
    """floor_slot of floor.c."""

    _fields_ = [
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
    ]


class AmpSlot(ctypes.Structure):
    """floor_amp_slot of floor.c."""

    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in ("param", "grad", "exp_avg", "exp_avg_sq", "ema", "copy")
        ],
        ("numel", ctypes.c_int64),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """Compile and load floor.c. Raises RuntimeError where that cannot be done.

    torch must be imported before, so that the OpenMP runtime found is its own.
    """
    loaded = native.build(SOURCE)
    loaded.floor_run.restype = ctypes.c_int
    loaded.floor_run.argtypes = [
        ctypes.POINTER(Slot),
        ctypes.c_int64,
        *[ctypes.c_int] * 4,
    ]
    loaded.floor_amp_run.restype = ctypes.c_int
    loaded.floor_amp_run.argtypes = [
        ctypes.POINTER(AmpSlot),
        ctypes.c_int64,
        *[ctypes.c_int] * 4,
        ctypes.POINTER(ctypes.c_uint32),
    ]
    return loaded


def openmp_runtimes() -> list[str]:
    """Return the paths of the OpenMP runtimes that the process has loaded."""
    text = Path("/proc/self/maps").read_text()
    found = re.findall(r"(/\S*/lib(?:g|i|)omp[^/\s]*\.so[^/\s]*)", text)
    return sorted(set(found))


def make_floor(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    threads: int,
) -> Callable[[], None]:
    """Return a call that reads all four lists and writes all but the gradients."""
    run = library().floor_run
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    slots = (Slot * len(params))(
        *[
            Slot(*(tensor.data_ptr() for tensor in slot), slot[0].numel())
            for slot in zip(*lists, strict=True)
        ]
    )
    sizes = (params[0].element_size(), exp_avgs[0].element_size())

    def floor() -> None:
        # `lists` keeps the arrays alive as long as their addresses are in use.
        used = run(slots, len(lists[0]), *sizes, threads, 0)
        if used != threads:
            raise RuntimeError(f"the floor must run on {threads} threads, got {used}")

    return floor


def make_amp_floor(
    columns: dict[str, Sequence[torch.Tensor]],
    zero: bool,
    threads: int,
    read_only: bool = False,
) -> Callable[[], None]:
    """Return a call that reads `grad`, then, if not `read_only`, reads and writes all
    columns.

    The columns are fields of AmpSlot; a gradient is written with `zero`, or when it is
    alone, which is clipping.
    """
    run = library().floor_amp_run
    numels = [tensor.numel() for tensor in columns["grad"]]
    slots = (AmpSlot * len(numels))()
    for i, numel in enumerate(numels):
        slots[i].numel = numel
        for name, tensors in columns.items():
            setattr(slots[i], name, tensors[i].data_ptr())
    sink = ctypes.c_uint32()

    def floor() -> None:
        # `columns` keeps the arrays alive as long as their addresses are in use.
        options = threads, 0, zero, read_only
        used = run(slots, len(columns["grad"]), *options, ctypes.byref(sink))
        if used != threads:
            raise RuntimeError(f"the floor must run on {threads} threads, got {used}")

    return floor
