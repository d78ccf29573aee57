"""AdamW, Adam and gradient clipping with torch's names, on trainfast's kernels."""

from trainfast.torch.optim.adamw import Adam, AdamW
from trainfast.torch.optim.clip import clip_grad_norm_, clip_grad_value_, get_total_norm

__all__ = ["Adam", "AdamW", "clip_grad_norm_", "clip_grad_value_", "get_total_norm"]
