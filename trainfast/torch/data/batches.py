"""What a batch holds, whatever made it."""

from collections.abc import MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors in a batch: of nested containers, dataclasses, or a PyG batch."""
    if hasattr(batch, "to_dict") and callable(batch.to_dict):
        batch = batch.to_dict()
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, MutableMapping):
        return [leaf for value in batch.values() for leaf in tensors(value)]
    if isinstance(batch, list | tuple):
        return [leaf for value in batch for leaf in tensors(value)]
    if is_dataclass(batch):
        values = (getattr(batch, field.name, None) for field in fields(batch))
        return [leaf for value in values for leaf in tensors(value)]
    return []
