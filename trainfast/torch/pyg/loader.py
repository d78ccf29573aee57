"""PyG's DataLoader, with batches of cached graphs made natively."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch_geometric.loader import DataLoader as TheirLoader
from torch_geometric.loader.dataloader import Collater as TheirCollater

from trainfast._core import GraphPrefetch
from trainfast.graph_cache.ahead import Ahead
from trainfast.report import attributes, one_line
from trainfast.stats import count_call, count_fallback
from trainfast.torch.graphs.device import mover
from trainfast.torch.pyg.dataset import Batcher, Picked, in_range, places_in

__all__ = ["DataLoader"]

_MOST_THREADS = 4


class _Collater(TheirCollater):
    """PyG's collater, but unchanged graphs of a cache are batched natively.

    So batches stay native in other loaders that use this dataset and collate_fn:
    accelerate's, and torch's in worker processes.
    """

    def __call__(self, batch: Any) -> Any:
        if type(batch) is Picked:
            made = batch.batch(self.follow_batch, self.exclude_keys)
            if made is not None:
                return made
        return super().__call__(batch)


class DataLoader(TheirLoader):
    """`torch_geometric.loader.DataLoader`: the same arguments, the same batches.

    Over a dataset of `trainfast.torch.pyg.cached` (or its slices, or torch's Subset of
    it) batches are put together natively, straight from the file, equal to PyG's in
    every attribute. Samplers, batch samplers and generators do what they do in torch,
    and draw the same random numbers, so the order under a seed is the same.

    `num_workers` is a number of native threads (four at most) that prefetch batches,
    `prefetch_factor` each, 2 by default. They are no processes: nothing is copied,
    pickled or put into shared memory, and `worker_init_fn`, `multiprocessing_context`,
    `timeout` and `persistent_workers` have no effect. With 0, batches are made when
    they are asked for, which is as fast unless graphs are large. `pin_memory` copies a
    batch in one piece.

    A batch's tensors share one block of memory, which is reused when all of them are
    freed.

    PyG's loader runs, and trainfast.stats() counts the reason, for another dataset, a
    transform, `batch_size=None`, and attributes that only some graphs have.

    Args:
        dataset: where the graphs come from.
        batch_size: graphs in a batch.
        shuffle: another order each epoch.
        follow_batch: attributes that get a `{name}_batch` and a `{name}_ptr`.
        exclude_keys: attributes to omit; they are not read from the file.
        **kwargs: as in `torch.utils.data.DataLoader`.
    """

    _has_drawn = False  # a seed for workers

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        follow_batch: list[str] | None = None,
        exclude_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset, batch_size, shuffle, follow_batch, exclude_keys, **kwargs
        )
        self.collate_fn = _Collater(dataset, follow_batch, exclude_keys)

    def __repr__(self) -> str:
        names = "dataset batch_size sampler num_workers pin_memory drop_last"
        return one_line(self, **attributes(self, names))

    def __iter__(self) -> Iterator[Any]:
        try:
            batcher, places = self._native()
        except _UnsuitableError as error:
            count_fallback("pyg", str(error))
        else:
            count_call("pyg", "loader")
            return _Iteration(self, batcher, places)
        # Not above: errors of its workers would come with ours as their cause.
        return super().__iter__()

    def _native(self) -> tuple[Batcher, np.ndarray | None]:
        """The batcher, and the dataset's places in its cache; None: all."""
        if self.batch_sampler is None:
            raise _UnsuitableError("batch_size=None")
        collate = self.collate_fn
        if type(collate) is not _Collater:
            raise _UnsuitableError("a collate_fn of its own")
        dataset, places = places_in(self.dataset)
        if dataset is None:
            name = type(self.dataset).__name__
            changed = getattr(self.dataset, "transform", None) is not None
            raise _UnsuitableError("a transform" if changed else f"dataset: {name}")
        batcher = dataset.batcher(
            collate.follow_batch or (), collate.exclude_keys or ()
        )
        if batcher.reason is not None:
            raise _UnsuitableError(batcher.reason)
        return batcher, places


class _UnsuitableError(Exception):
    """The reason why PyG's loader runs instead."""


class _Iteration(Ahead):
    """One epoch. With threads, batches are submitted ahead of those handed out."""

    def __init__(
        self, loader: DataLoader, batcher: Batcher, places: np.ndarray | None
    ) -> None:
        threads = min(loader.num_workers, _MOST_THREADS, os.cpu_count() or 1)
        ahead = loader.num_workers * (loader.prefetch_factor or 2) if threads else 0
        super().__init__(iter(loader.batch_sampler), ahead)
        self._loader, self._batcher, self._places = loader, batcher, places
        self._n = len(loader.dataset)
        # Torch's loaders draw a seed here, before the sampler draws its own; workers
        # that persist keep theirs.
        if not (loader.persistent_workers and loader._has_drawn):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            loader._has_drawn = True
        self._move = None
        if loader.pin_memory and torch.accelerator.is_available():
            self._move = mover(None, pin_memory=True)
        self._prefetches[0] = GraphPrefetch(batcher.selection, threads)
        self._fill(ahead)

    def __len__(self) -> int:
        return len(self._loader)

    def _assemble(self, batch: Any) -> Any:
        if self._move is not None:
            batch = self._move(batch)
        return self._batcher.assemble(batch)

    def _plan(self, given: Any) -> tuple[GraphPrefetch, Any, int]:
        """A sampler's batch as places in the cache."""
        prefetch, places = self._prefetches[0], self._places
        if places is None:
            return prefetch, in_range(given, self._n), 0
        array = np.asarray(given if hasattr(given, "__getitem__") else list(given))
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise IndexError(f"a batch must be a list of indices, got {given!r}")
        return prefetch, places[array], 0
