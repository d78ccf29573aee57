"""Adapters for torch: the same names, arguments and state as torch's own."""

from trainfast.torch import flash_attn, huggingface
from trainfast.torch.accumulator import Accumulator
from trainfast.torch.adamw import Adam, AdamW
from trainfast.torch.amp import GradScaler
from trainfast.torch.attention import attention, scaled_dot_product_attention
from trainfast.torch.clip import clip_grad_norm_, clip_grad_value_, get_total_norm
from trainfast.torch.scheduler import SkipAwareScheduler

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
    "scaled_dot_product_attention",
]
