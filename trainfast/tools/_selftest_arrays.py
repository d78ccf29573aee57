"""Where selftest's kernels find their arrays: NumPy's, or torch's on a GPU."""

from importlib import import_module
from typing import Any

import numpy as np

Array = Any

EPS = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}


class NumpyArrays:
    """Arrays on the CPU, as NumPy's; bfloat16 comes from ml_dtypes."""

    def has(self, dtype: str) -> bool:
        try:
            self._dtype(dtype)
        except ImportError:
            return False
        return True

    def put(self, values: np.ndarray, dtype: str, misaligned: bool = False) -> Array:
        """A copy, rounded; misaligned by one element."""
        start = int(misaligned)
        array = np.zeros(values.size + start, self._dtype(dtype))[start:]
        array = array.reshape(values.shape)
        array[...] = values
        return array

    def get(self, array: Array) -> np.ndarray:
        return array.astype(np.float64)

    @staticmethod
    def _dtype(name: str) -> np.dtype:
        if name == "bfloat16":
            return np.dtype(import_module("ml_dtypes").bfloat16)
        return np.dtype(name)


class TorchArrays:
    """Arrays on the current CUDA device, as torch's (on the CPU for a test)."""

    def __init__(self, device: str = "cuda") -> None:
        try:
            self.torch = import_module("torch")
        except ImportError as error:
            raise ImportError("arrays on the GPU need torch") from error
        self.device = device
        if device == "cuda" and not self.torch.cuda.is_available():
            raise ImportError("arrays on the GPU need a torch with CUDA")

    def has(self, dtype: str) -> bool:
        return hasattr(self.torch, dtype)

    def put(self, values: np.ndarray, dtype: str, misaligned: bool = False) -> Array:
        start = int(misaligned)
        kind = getattr(self.torch, dtype)
        size = values.size + start
        array = self.torch.zeros(size, dtype=kind, device=self.device)[start:]
        array = array.view(values.shape)
        array.copy_(self.torch.from_numpy(np.ascontiguousarray(values)))
        return array

    def get(self, array: Array) -> np.ndarray:
        return array.double().cpu().numpy()
