"""The dtype and shape of a value of a graph, without a copy."""

from typing import Any

import numpy as np

from trainfast.graph_cache.schema import DTYPES

_OF_PYTHON = {bool: "bool", int: "int64", float: "float64", str: "string"}
_OF_PYTHON |= {bytes: "bytes"}


def dtype_and_shape(value: Any) -> tuple[str, tuple[int, ...]]:
    """A value's dtype, by its name in `DTYPES`, and its shape in elements.

    Values are arrays (NumPy's, torch's, others with `dtype` and `shape` or that export
    DLPack), and Python's bool, int, float, str and bytes. Raises TypeError for others,
    ValueError for an int beyond int64 and text that UTF-8 cannot encode.
    """
    name = _OF_PYTHON.get(type(value))
    if name == "string":
        try:
            return name, (len(value.encode()),)
        except UnicodeEncodeError:
            rule = "a str must be one that UTF-8 can encode"
            raise ValueError(f"{rule}, got {value!r}") from None
    if name == "int64" and not -(2**63) <= value < 2**63:
        raise ValueError(f"an int must fit int64, got {value}")
    if name is not None:
        return name, (len(value),) if name == "bytes" else ()
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "shape"):
        if not hasattr(value, "__dlpack__"):
            kinds = "an array, or a bool, int, float, str or bytes"
            raise TypeError(f"a value must be {kinds}, got {type(value).__name__}")
        value = np.from_dlpack(value)
        dtype = value.dtype
    name = getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
    if name not in DTYPES[1:-2]:
        known = ", ".join(DTYPES[1:-2])
        raise TypeError(f"an array's dtype must be one of {known}, got {dtype}")
    return name, tuple(value.shape)


def is_scalar(value: Any) -> bool:
    """Whether a value is read back as a Python bool, int or float."""
    return type(value) in (bool, int, float)


def largest(value: Any, row: int | None = None) -> int:
    """The largest of an array's integers (of one of its rows), -1 if it has none."""
    array = _array(value, row)
    return int(array.max()) if array.size else -1


def smallest(value: Any, row: int | None = None) -> int:
    """The smallest of an array's integers (of one of its rows), 0 if it has none."""
    array = _array(value, row)
    return int(array.min()) if array.size else 0


def _array(value: Any, row: int | None) -> np.ndarray[Any, Any]:
    array = np.asarray(value) if hasattr(value, "__array__") else np.from_dlpack(value)
    return array if row is None else array[row]
