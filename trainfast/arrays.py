"""Arrays of NumPy, and of libraries that follow its array API, such as CuPy."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trainfast import _core
from trainfast.stats import count_fallback

Array = Any  # whatever exports DLPack, a buffer, or is a NumPy array

FLOATS = ("float64", "float32", "float16", "bfloat16")
HALVES = ("float16", "bfloat16")


def dtype_name(array: Array) -> str:
    """The name of an array's dtype, as in FLOATS."""
    return str(getattr(array, "dtype", "")).rpartition(".")[2]


def float_dtype(name: str, value: Any) -> np.dtype | None:
    """One of the four dtypes from what NumPy takes for one; None stays None."""
    if value is None:
        return None
    if isinstance(value, str) and value == "bfloat16":
        import ml_dtypes

        value = ml_dtypes.bfloat16
    try:
        dtype = np.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in FLOATS or not dtype.isnative:
        raise ValueError(f"{name} must be None or one of {FLOATS}, got {value!r}")
    return dtype


def new_like(like: Array, dtype: Any, values: Array | None = None) -> Array:
    """An array of the same shape and layout; of zeros, or with these values."""
    if isinstance(like, np.ndarray):
        made = np.zeros_like(like, dtype=dtype, subok=False)
    else:
        made = like.__array_namespace__().zeros_like(like, dtype=dtype)
    if values is not None:
        made[...] = values
    return made


def scalar(like: Array, value: Any, dtype: str = "float32") -> Array:
    """An array of one element where `like` is; one that is an array already stays."""
    if value is None:
        return None
    if hasattr(value, "shape") and not isinstance(value, np.generic):
        return value
    value = float(value)
    if isinstance(like, np.ndarray):
        return np.full(1, value, dtype)
    space = like.__array_namespace__()
    return space.full(1, value, dtype=getattr(space, dtype), device=like.device)


def number(array: Array) -> float:
    """The element of an array of one; waits for the device."""
    return float(array if isinstance(array, (int, float)) else array.reshape(()))


def dense(arrays: Sequence[Array], capability: str) -> list[Array]:
    """The same arrays, but copies of NumPy arrays that leave gaps between elements."""
    made = []
    for array in arrays:
        if isinstance(array, np.ndarray) and not array.flags.forc:
            count_fallback(capability, "a gradient that is not dense was copied")
            array = np.ascontiguousarray(array)
        made.append(array)
    return made


class Measured(NamedTuple):
    """What one pass over gradients found; arrays of one element, None if not asked."""

    found_inf: Array | None
    total_norm: Array | None
    clip_coef: Array | None


def measure(
    grads: Sequence[Array],
    like: Array,
    workspace: "_core.Workspace",
    *,
    max_norm: float | None,
    grad_scale: Array | None,
    find_inf: bool,
) -> Measured:
    """Reads each gradient once: is all finite, how long is it, how much to clip."""
    found = scalar(like, 0.0) if find_inf else None
    norm = norm_f64 = clip = None
    if max_norm is not None:
        clip = scalar(like, 1.0, "float64")
        if any(dtype_name(grad) == "float64" for grad in grads):
            norm_f64 = scalar(like, 0.0, "float64")
        else:
            norm = scalar(like, 0.0)

    def run(arrays: list[Array]) -> None:
        _core.amp_grads(
            arrays,
            workspace,
            found_inf=found,
            total_norm=norm,
            total_norm_f64=norm_f64,
            clip_coef=clip,
            max_norm=math.inf if max_norm is None else max_norm,
            grad_scale=grad_scale,
        )

    try:
        run(list(grads))
    except NotImplementedError:
        run(dense(grads, "amp"))
    return Measured(found, norm if norm_f64 is None else norm_f64, clip)
