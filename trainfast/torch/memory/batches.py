"""Batches of another size."""

from collections import Counter
from typing import Any

import torch

from trainfast.torch.private import tree_leaves, tree_map


def batch_size(batch: Any) -> int | None:
    """The most common first dimension of the batch's tensors, or graphs in a batch of
    PyG; None where there is none."""
    graphs = getattr(batch, "num_graphs", None)
    if graphs is not None:
        return int(graphs)
    tensors = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()]
    sizes = Counter(tensor.shape[0] for tensor in tensors)
    return sizes.most_common(1)[0][0] if sizes else None


def resized(batch: Any, size: int) -> Any:
    """The batch with `size` samples: its first ones, and over again where it has fewer.

    Tensors whose first dimension is not the batch's size are kept.
    """
    have = batch_size(batch)
    if have is None:
        return batch
    if hasattr(batch, "to_data_list"):
        graphs = batch.to_data_list()
        return type(batch).from_data_list([graphs[i % have] for i in range(size)])

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        if leaf.shape[0] != have:
            return leaf
        return leaf[torch.arange(size) % have]

    return tree_map(resize, batch)
