"""Attention on trainfast's kernels: with torch's signature, and with every option."""

from trainfast.torch.attention.functional import attention
from trainfast.torch.attention.sdpa import scaled_dot_product_attention

__all__ = ["attention", "scaled_dot_product_attention"]
