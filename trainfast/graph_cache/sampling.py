"""Batches of indices from a user's sampler."""

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np


def as_indices(batch: Any) -> np.ndarray:
    """A batch of a batch_sampler as an int64 array."""
    indices = np.asarray(batch)
    if indices.dtype.kind not in "iu" and indices.size:
        raise TypeError(f"a batch_sampler's batch must be integers, got {batch!r}")
    return indices.astype(np.int64, copy=False)


def of_subset(subset: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """The cache's graphs at these places of a subset."""
    wrong = (indices < 0) | (indices >= len(subset))
    if wrong.any():
        raise IndexError(
            f"sampler's indices must be in 0 .. {len(subset) - 1}, got "
            f"{indices[wrong][0]}"
        )
    return subset[indices]


class Cut:
    """A sampler's indices as batches, in their order.

    A batch ends when it has batch_size graphs, or when one more graph would exceed a
    budget of `sizes`. Not a generator, because Ctrl-C in the sampler would end it.
    """

    def __init__(
        self,
        indices: Iterable[Any],
        batch_size: int | None,
        drop_last: bool,
        sizes: list[np.ndarray],
        budgets: list[int],
    ) -> None:
        self._indices = map(operator.index, indices)
        self._batch_size, self._drop_last = batch_size, drop_last
        self._sizes, self._budgets = sizes, budgets
        self._batch: list[int] = []
        self._used = [0] * len(budgets)

    def __iter__(self) -> "Cut":
        return self

    def __next__(self) -> list[int]:
        for index in self._indices:
            more = [_size_of(index, size) for size in self._sizes]
            used = [a + b for a, b in zip(self._used, more)]
            if self._batch and any(a > b for a, b in zip(used, self._budgets)):
                whole, self._batch, self._used = self._batch, [index], more
                return whole
            self._batch.append(index)
            self._used = used
            if len(self._batch) == self._batch_size:
                return self._take()
        if self._batch and not self._drop_last:
            return self._take()
        raise StopIteration

    def _take(self) -> list[int]:
        batch, self._batch, self._used = self._batch, [], [0] * len(self._budgets)
        return batch


def _size_of(index: int, sizes: np.ndarray) -> int:
    if not 0 <= index < len(sizes):
        rule = f"must be in 0 .. {len(sizes) - 1}"
        raise IndexError(f"sampler's indices {rule}, got {index}")
    return int(sizes[index])
