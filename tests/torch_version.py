"""Torch's version, for tests of what it does itself."""

import pytest
import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def from_capsule(capsule):
    """A capsule of DLPack 1.0 as a tensor; skips the test where torch has none."""
    if TORCH < (2, 10):
        pytest.skip("torch before 2.10 reads only capsules of DLPack before 1.0")
    return torch.from_dlpack(capsule)
