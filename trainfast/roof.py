"""Measures the matrix-product and memory rates that bound the kernels of a device.

A kernel's rate divided by the measured rate says how much is left to gain; rates from
data sheets differ from what a card reaches by up to a factor of two.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from trainfast import _core
from trainfast.report import Report, Table

# Rows of the square matrices, and bytes to copy: large enough that the start of a call
# does not count, and that no cache holds the copy.
_SIDE = {"cpu": 1024, "cuda": 8192}
_COPY_BYTES = 256 << 20
_ROUND = 0.02  # seconds between two looks at the clock
_SLOW = 0.1  # seconds of an eighth of a product, from which on an eighth will do


class Roof(Report):
    """Rates that were measured on one device.

    Attributes:
        device: "cpu", "cuda:0".
        matmul: TFLOP/s of a square matrix product by dtype; "tf32" is float32 whose
            inputs are rounded to TF32.
        copy: GB/s of a copy, reads and writes counted.
        update: GB/s of an array that is scaled in place. A CPU reads what a copy is
            about to overwrite, too, so this rate can be higher by half.
    """

    def __init__(
        self, device: str, matmul: dict[str, float], copy: float, update: float
    ) -> None:
        self.device = device
        self.matmul = matmul
        self.copy = copy
        self.update = update

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def tables(self) -> list[Table]:
        rows = [(f"matmul {name}", rate, "TFLOP/s") for name, rate in self.rounded()]
        rows.append(("copy", round(self.copy, 1), "GB/s"))
        rows.append(("update in place", round(self.update, 1), "GB/s"))
        return [Table(f"Roof of {self.device}", ("rate", "measured", "unit"), rows)]

    def rounded(self) -> list[tuple[str, float]]:
        return [(name, float(f"{rate:.3g}")) for name, rate in self.matmul.items()]


def roof(
    device: str | None = None, seconds: float = 0.3, *, side: int | None = None
) -> Roof:
    """Measures a device's matrix-product and copy rates.

    The arrays are torch's where torch is installed, otherwise CuPy's on a GPU and
    NumPy's on the CPU. Products on a GPU are cuBLAS's, on the CPU the array library's.

    Args:
        device: "cpu", "cuda" or "cuda:1"; by default a GPU if there is one.
        seconds: how long to measure each rate.
        side: rows of the square matrices.

    Raises:
        ValueError: the device has another name.
        RuntimeError: no installed library can allocate on the device, or there is no
            cuBLAS.
    """
    device = device or ("cuda" if _has_gpu() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in _SIDE or not (index or "0").isdecimal():
        raise ValueError(f"`device` must be cpu, cuda or cuda:<index>, got {device!r}")
    return _measure(_arrays(kind, int(index or 0)), seconds, side or _SIDE[kind])


def _measure(arrays: "_Torch | _NumPy", seconds: float, side: int) -> Roof:
    matmul = {
        name: _product_rate(arrays, name, seconds, side) for name in arrays.dtypes
    }
    source, target = (arrays.ones(_COPY_BYTES // 4) for _ in range(2))
    copy, update = (
        _rate(call, arrays.synchronize, seconds) * 2 * _COPY_BYTES / 1e9
        for call in (
            partial(arrays.copy, target, source),
            partial(target.__imul__, -1.0),
        )
    )
    return Roof(arrays.device, matmul, copy, update)


def _product_rate(
    arrays: "_Torch | _NumPy", name: str, seconds: float, side: int
) -> float:
    """TFLOP/s of a product of square matrices, or of an eighth of its rows."""
    dtype = "float32" if name == "tf32" else name
    a, b, out = (arrays.random(side * side, dtype) for _ in range(3))
    a, b, out = (array.reshape(side, side) for array in (a, b, out))
    multiply = arrays.multiply(name == "tf32")
    if not arrays.on_gpu:
        few = side // 8
        multiply(a[:1], b, out[:1])  # the first call also loads libraries
        began = time.perf_counter()
        multiply(a[:few], b, out[:few])
        if time.perf_counter() - began > _SLOW:  # bfloat16 on a CPU that has none
            a, out = a[:few], out[:few]
    rate = _rate(partial(multiply, a, b, out), arrays.synchronize, seconds)
    return rate * 2 * len(a) * side**2 / 1e12


def _rate(
    call: Callable[[], object], synchronize: Callable[[], object], seconds: float
) -> float:
    """Calls per second: the median of rounds of at least 20 ms each."""
    call()
    synchronize()
    calls = 1
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while not rates or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        elapsed = time.perf_counter() - start
        if elapsed < _ROUND:
            calls *= 2
        else:
            rates.append(calls / elapsed)
    return statistics.median(rates)


# ---- Who allocates -------------------------------------------------------------------


class _Torch:
    def __init__(self, kind: str, index: int) -> None:
        import torch

        self.torch = torch
        self.device = f"cuda:{index}" if kind == "cuda" else "cpu"
        self.on_gpu = kind == "cuda"
        self.dtypes: tuple[str, ...] = ("float32", "bfloat16")
        if self.on_gpu:
            self.dtypes = ("float32", "tf32", "float16", "bfloat16")
            if index >= torch.cuda.device_count():
                raise RuntimeError(
                    f"torch sees {torch.cuda.device_count()} GPUs, got {self.device}; "
                    "see `trainfast env`"
                )

    def random(self, n: int, dtype: str) -> Any:
        values = self.torch.randn(n, device=self.device)
        return values.to(getattr(self.torch, dtype))

    def ones(self, n: int) -> Any:
        return self.torch.ones(n, device=self.device)

    def multiply(self, allow_tf32: bool) -> Callable[..., object]:
        if not self.on_gpu:
            return lambda a, b, out: self.torch.mm(a, b, out=out)
        stream = self.torch.cuda.current_stream(self.device).cuda_stream
        return lambda *arrays: _core.gemm(*arrays, allow_tf32=allow_tf32, stream=stream)

    def copy(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def synchronize(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize(self.device)


class _NumPy:
    """NumPy, or on a GPU CuPy, which has its interface."""

    def __init__(self, numpy: ModuleType, device: str) -> None:
        self.numpy = numpy
        self.device = device
        self.on_gpu = device != "cpu"
        self.dtypes: tuple[str, ...] = ("float32",)
        if self.on_gpu:
            self.dtypes = ("float32", "tf32", "float16")

    def random(self, n: int, dtype: str) -> Any:
        return self.numpy.random.standard_normal(n).astype(dtype)

    def ones(self, n: int) -> Any:
        return self.numpy.ones(n, "float32")

    def multiply(self, allow_tf32: bool) -> Callable[..., object]:
        if not self.on_gpu:
            return lambda a, b, out: self.numpy.matmul(a, b, out=out)
        return lambda *arrays: _core.gemm(*arrays, allow_tf32=allow_tf32)

    def copy(self, target: Any, source: Any) -> None:
        self.numpy.copyto(target, source)

    def synchronize(self) -> None:
        if self.device.startswith("cuda"):
            self.numpy.cuda.Device().synchronize()


def _arrays(kind: str, index: int) -> _Torch | _NumPy:
    if find_spec("torch") is not None:
        return _Torch(kind, index)
    if kind == "cpu":
        return _NumPy(np, "cpu")
    if find_spec("cupy") is None:
        raise RuntimeError(
            "a GPU's roof needs torch or CuPy to allocate memory on it; "
            "pip install torch"
        )
    import cupy  # type: ignore[import-not-found]

    cupy.cuda.Device(index).use()
    return _NumPy(cupy, f"cuda:{index}")


def _has_gpu() -> bool:
    return any(name == "cuda" and why is None for name, why, _ in _core.backends())
