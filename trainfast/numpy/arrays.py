"""Arrays of NumPy, and of libraries that follow its array API, such as CuPy."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from trainfast import _core
from trainfast.stats import count_fallback

Array = Any  # a NumPy array, or an object that exports DLPack or a buffer

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


def current_stream(array: Array) -> int:
    """The stream on which torch, or CuPy, enqueues work for an array on a GPU; 0, which
    is the default stream, for arrays of other libraries."""
    device = getattr(array, "device", None)
    stream = 0
    if getattr(device, "type", None) == "cuda":
        stream = sys.modules["torch"].cuda.current_stream(device).cuda_stream
    elif type(array).__module__.partition(".")[0] == "cupy":
        stream = sys.modules["cupy"].cuda.get_current_stream().ptr
    return stream


def beside(like: Array, array: Array) -> Array:
    """A tensor where the tensor `like` is; other arrays as they are."""
    if not (hasattr(like, "to") and hasattr(array, "to")):
        return array
    return array if array.device == like.device else array.to(like.device)


def is_on_cpu(array: Array) -> bool:
    """Whether an array's data lie in the host's memory."""
    device = getattr(array, "__dlpack_device__", None)
    return device is None or device()[0] in (1, 3)  # 3: pinned memory


def to_numpy(array: Array) -> np.ndarray:
    """The same values as NumPy's array; waits for the device."""
    if isinstance(array, np.ndarray):
        return array
    return np.asarray(array.get() if hasattr(array, "get") else array.cpu())


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


def _from_dlpack(name: str, value: Any) -> np.ndarray:
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError) as error:
        raise NotImplementedError(
            f"{name} must be an array that NumPy takes by DLPack, if it has no shape "
            f"and dtype: {error}"
        ) from None


def as_array(name: str, value: Any) -> Array:
    """The same, or as NumPy's if its library gives it no shape or dtype.

    Raises TypeError for what is not an array.
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return value
    if hasattr(value, "__dlpack__"):
        return _from_dlpack(name, value)
    try:
        return np.asarray(memoryview(value))
    except TypeError:
        raise TypeError(
            f"{name} must be an array (NumPy, torch, DLPack or a buffer), "
            f"got {type(value).__name__}"
        ) from None


def _is_frozen(array: Array) -> bool:
    """Whether its library's arrays cannot be written."""
    return type(array).__module__.startswith("jax")


def empty(
    like: Array,
    shape: Sequence[int],
    dtype: str | None = None,
    fill: float | None = None,
) -> Array:
    """A dense array of this shape where `like` is, of its dtype or another one; NumPy's
    if like's library makes none, or none that can be written.

    Raises TypeError if NumPy does not know the dtype.
    """
    if isinstance(like, np.ndarray):
        made = np.empty(shape, dtype or like.dtype)
    elif hasattr(like, "new_empty"):  # torch, which has then been imported
        kind = None if dtype is None else getattr(sys.modules["torch"], dtype)
        made = like.new_empty(tuple(shape), dtype=kind)
    elif hasattr(like, "__array_namespace__") and not _is_frozen(like):
        space = like.__array_namespace__()
        kind = like.dtype if dtype is None else getattr(space, dtype)
        made = space.empty(tuple(shape), dtype=kind, device=like.device)
    else:
        try:
            made = np.empty(shape, dtype or like.dtype)
        except TypeError:
            raise TypeError(
                f"out must be given for arrays of {type(like).__name__}"
            ) from None
    if fill is not None:
        made[...] = fill
    return made


def cast(array: Array, dtype: str) -> Array:
    """The same values in another dtype; the same array if it has that one."""
    if dtype_name(array) == dtype:
        return array
    if hasattr(array, "astype"):
        return array.astype(dtype)
    return array.to(getattr(sys.modules["torch"], dtype))


def row_major(array: Array) -> Array:
    """The same array if it is dense in C order, otherwise a copy that is."""
    if isinstance(array, np.ndarray):
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return array.contiguous() if hasattr(array, "contiguous") else array


def unit_stride(array: Array) -> Array:
    """The same array if its last dimension has stride 1 and none runs backwards,
    otherwise a copy in C order."""
    if isinstance(array, np.ndarray):
        strides = [s for s, n in zip(array.strides, array.shape) if n > 1]
        last = array.ndim > 0 and array.shape[-1] > 1
        fits = min(strides, default=0) >= 0
        fits &= not last or array.strides[-1] == array.itemsize
        return array if fits else np.ascontiguousarray(array)
    if hasattr(array, "contiguous"):
        layout = str(getattr(array, "layout", "strided"))
        if "strided" not in layout or array.stride(-1) == 1:
            return array  # or a sparse one, which the core refuses by name
        return array.contiguous()
    return array


def autograd_notice(written: Iterable[Array]) -> Callable[[], None]:
    """A function that tells autograd which of these tensors were written in place.

    Get it before the write and call it after: whatever can fail here fails while
    nothing has changed. Without tensors it does nothing, and loads nothing.
    """
    torch: Any = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if tensor is None:  # torch is not loaded, or is loading
        return _say_nothing
    arrays = (array for array in written if type(array) is not np.ndarray)
    tensors = [array for array in arrays if isinstance(array, tensor)]
    if not tensors:
        return _say_nothing
    return partial(torch.autograd.graph.increment_version, tensors)


def _say_nothing() -> None:
    pass


class Measured(NamedTuple):
    """The results of one pass over gradients: arrays of one element, or None."""

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
    """One pass over gradients: finiteness, norm and clipping coefficient."""
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
