"""Tensors whose autograd graph goes through the steps before: each step makes it
longer, and no container grows."""

import gc
from typing import Any

import torch

_MARK = "trainfast.LeakTracker"
_MOST_NODES = 50_000


def mark(look: int) -> None:
    """Leaves the number of this look at the graph of every tensor that has one. The
    nodes' own metadata keep it: nothing is held."""
    for tensor in _with_graph():
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata.setdefault(_MARK, look)


def chained(looks: set[int]) -> tuple[torch.Tensor, int] | None:
    """The tensor whose graph holds ends of graphs of all these looks, and how many
    nodes its graph has; None if there is none."""
    longest: tuple[torch.Tensor, int] | None = None
    for tensor in _with_graph():
        marks, nodes = _walk(tensor.grad_fn)
        if marks >= looks and (longest is None or nodes > longest[1]):
            longest = tensor, nodes
    return longest


def _walk(root: Any) -> tuple[set[int], int]:
    """Marks behind the root, and the number of nodes."""
    marks: set[int] = set()
    seen = {root}
    waiting = [root]
    while waiting and len(seen) < _MOST_NODES:
        for node, _ in waiting.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting.append(node)
            found = node.metadata.get(_MARK)
            if found is not None:
                marks.add(found)
    return marks, len(seen)


def _with_graph() -> list[torch.Tensor]:
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor) and each.grad_fn is not None
    ]
