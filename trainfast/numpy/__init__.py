"""The kernels on NumPy arrays, and on any array that exports DLPack; needs no torch."""

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
