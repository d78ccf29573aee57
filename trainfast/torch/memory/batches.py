"""Batches of another size."""

import copy
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate, islice
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


def split(batch: Any, sizes: list[int]) -> list[Any]:
    """Parts of the batch with so many samples, which share its memory.

    Tensors are split where their first dimension is the batch's size, lists of other
    things where they have as many items; everything else is in each part.

    Raises:
        TypeError: the batch is a list of samples.
    """
    if hasattr(batch, "to_data_list"):
        graphs = iter(batch.to_data_list())
        make = type(batch).from_data_list
        return [make(list(islice(graphs, size))) for size in sizes]
    samples = sum(sizes)
    ends = list(accumulate(sizes))

    def part(value: Any, begin: int, end: int) -> Any:
        if isinstance(value, torch.Tensor):
            return value[begin:end] if value.dim() and len(value) == samples else value
        if isinstance(value, Mapping):
            made = {name: part(item, begin, end) for name, item in value.items()}
            return made if type(value) is dict else _like(value, made)
        if not isinstance(value, list | tuple):
            return value
        if value and all(isinstance(item, Mapping) for item in value):
            inside = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
            if not any(t.dim() and len(t) == samples for t in inside):
                raise TypeError(
                    "the batch holds a list of samples, which is not split; stack "
                    "them into tensors"
                )
        if len(value) == samples and not any(
            isinstance(item, torch.Tensor | list | tuple) for item in value
        ):
            return value[begin:end]
        items = [part(item, begin, end) for item in value]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return type(value)(items)

    return [part(batch, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _like(value: Any, made: dict[Any, Any]) -> Any:
    """The mapping with other values, such as BatchEncoding of transformers."""
    other = copy.copy(value)
    for name, item in made.items():
        other[name] = item
    return other
