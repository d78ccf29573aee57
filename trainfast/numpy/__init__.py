"""The kernels on NumPy arrays, and on any array that exports DLPack; needs no torch."""

from typing import TYPE_CHECKING

from trainfast.numpy.adamw import AdamW, adamw_step
from trainfast.numpy.attention import AttentionGradients, attention, attention_backward
from trainfast.numpy.loss_scaler import LossScaler

__all__ = [
    "AdamW",
    "AttentionGradients",
    "LossScaler",
    "adamw_step",
    "attention",
    "attention_backward",
]

# torch's names that are asked for here, and what arrays have instead.
_INSTEAD = {
    "Adam": "trainfast.numpy.AdamW(..., decoupled_weight_decay=False)",
    "GradScaler": "trainfast.numpy.LossScaler",
    "clip_grad_norm_": "trainfast.numpy.AdamW(..., max_grad_norm=...)",
    "scaled_dot_product_attention": "trainfast.numpy.attention",
}

if not TYPE_CHECKING:  # a type checker reports wrong names itself

    def __getattr__(name: str) -> object:
        error = f"module 'trainfast.numpy' has no attribute {name!r}"
        if name in _INSTEAD:
            error += f"; use {_INSTEAD[name]}, or trainfast.{name} for torch's tensors"
        raise AttributeError(error)
