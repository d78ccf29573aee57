"""Adapters for torch: the same names, arguments and state as torch's own.

`trainfast.torch.pyg`, for PyTorch Geometric, is loaded when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

import trainfast.torch.versions  # noqa: F401  (first: refuses a torch too old)
from trainfast.torch import flash_attn, huggingface
from trainfast.torch.accumulator import Accumulator
from trainfast.torch.adamw import Adam, AdamW
from trainfast.torch.amp import GradScaler
from trainfast.torch.attention import attention
from trainfast.torch.clip import clip_grad_norm_, clip_grad_value_, get_total_norm
from trainfast.torch.flash_attention_impl import register_flash_attention_impl
from trainfast.torch.scheduler import SkipAwareScheduler
from trainfast.torch.sdpa import scaled_dot_product_attention

if TYPE_CHECKING:  # __getattr__ loads it
    from trainfast.torch import pyg as pyg

__all__ = [
    "Accumulator",
    "Adam",
    "AdamW",
    "GradScaler",
    "SkipAwareScheduler",
    "attention",
    "clip_grad_norm_",
    "clip_grad_value_",
    "flash_attn",
    "get_total_norm",
    "huggingface",
    "register_flash_attention_impl",
    "scaled_dot_product_attention",
]


def __getattr__(name: str) -> object:
    if name == "pyg":
        return import_module("trainfast.torch.pyg")
    raise AttributeError(f"module 'trainfast.torch' has no attribute {name!r}")
