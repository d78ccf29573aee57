"""A GPU for tests without one: host memory that says through DLPack that it lies there,
and the SIMT library in the place of the CUDA library, which takes it as it is.

A process opens its CUDA library once, so `run` starts another one.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).parents[1]
DLPACK_CUDA = 2

pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
pointer_of.restype = ctypes.c_void_p
pointer_of.argtypes = ctypes.py_object, ctypes.c_char_p


def claimed(capsule, index=0):
    """The DLPack capsule, which then says that its data lie on GPU `index`."""
    # A DLTensor begins with its data's address, its device's type and index.
    at = pointer_of(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    (ctypes.c_int32 * 2).from_address(at)[:] = DLPACK_CUDA, index
    return capsule


class OnDevice:
    """A NumPy array that says it lies on GPU `index`."""

    def __init__(self, array, index=0):
        self.array, self.index = np.asarray(array), index
        self.shape, self.dtype, self.device = self.array.shape, self.array.dtype, index

    def __dlpack_device__(self):
        return DLPACK_CUDA, self.index

    def __dlpack__(self):
        return claimed(self.array.__dlpack__(), self.index)

    def __array_namespace__(self):
        def empty(shape, dtype, device):
            return OnDevice(np.empty(shape, dtype), device)

        return SimpleNamespace(empty=empty, float32=np.float32, float64=np.float64)

    def __setitem__(self, where, value):
        self.array[where] = value

    def get(self):
        return self.array


def run(code, library=None, **environment):
    """Runs Python code with this CUDA library, by default the SIMT one; what it printed
    and its errors. It finds the names of this module and the tests' others."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRAINFAST_")}
    env["TRAINFAST_CUDA_LIBRARY"] = str(library or os.environ["TRAINFAST_SIMT_LIBRARY"])
    found = env.get("PYTHONPATH", "").split(os.pathsep)
    env["PYTHONPATH"] = os.pathsep.join([*filter(None, found), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", "from tests.fake_device import *\n" + code],
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


# For the beginning of such code: what tensors on a GPU are to functions that do not ask
# for torch's own type.
TENSORS = """
import torch

class Tensor(OnDevice):
    requires_grad = False

    def __init__(self, array, index=0):
        super().__init__(array, index)
        self.device = torch.device("cuda", index)

    def __len__(self):
        return len(self.array)

    def __getitem__(self, i):
        return Tensor(self.array[i])

    def detach(self):
        return self

    def cpu(self):
        return torch.from_numpy(self.array)

    def new_empty(self, shape, dtype=None):
        return Tensor(torch.empty(shape, dtype=dtype or torch.float32).numpy())

class Stream:
    cuda_stream = 0

torch.cuda.current_stream = lambda device: Stream()
torch.Tensor.to = lambda self, device: Tensor(self.numpy()) # it never was elsewhere
"""
