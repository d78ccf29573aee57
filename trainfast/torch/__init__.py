"""Adapters for torch: the same names, arguments and state as torch's own."""

from trainfast.torch.adamw import Adam, AdamW

__all__ = ["Adam", "AdamW"]
