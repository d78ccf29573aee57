"""AdamW, Adam, Muon and gradient clipping, with torch's names."""

from trainfast.torch.optim.adamw import Adam, AdamW
from trainfast.torch.optim.clip import clip_grad_norm_, clip_grad_value_, get_total_norm
from trainfast.torch.optim.muon import Muon

__all__ = [
    "Adam",
    "AdamW",
    "Muon",
    "clip_grad_norm_",
    "clip_grad_value_",
    "get_total_norm",
]
