"""Torch's version, for tests of what it does itself."""

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
