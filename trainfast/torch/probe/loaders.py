"""Switches of what a training loop waits for: its data."""

import copy
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sized
from inspect import unwrap
from typing import Any

from torch.utils.data import DataLoader

from trainfast.torch.data.batches import tensors
from trainfast.torch.data.loaders import like
from trainfast.torch.probe.loop import LONGEST_PERIOD, Loop, Switch, clock

_LEAST_SHARE = 0.05  # of waiting for data that could be worth a finding
_BUILD_SECONDS = 2.0  # for which graphs are taken into a cache
# For so long, threads of the libraries that made the last batch may go on: NumPy's
# OpenBLAS waits for more work on a core that torch would use.
_SETTLE_SECONDS = 0.15


class CachedBatches(Switch):
    """Copies of a few batches in place of the loader's: a bound for all cures of it."""

    name = "data"
    settle = _SETTLE_SECONDS

    def __init__(self, least_share: float = _LEAST_SHARE) -> None:
        self.least_share = least_share

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        return bool(loop.batches) and share("data") >= self.least_share

    def enter(self, loop: Loop) -> None:
        self.pristine = loop.batches
        self.given = [copy.deepcopy(batch) for batch in loop.batches]
        self.versions = [_versions(batch) for batch in self.given]
        self.next = 0

    def next_batch(self, loop: Loop, iterator: Any, original: Any) -> Any:
        i = self.next = (self.next + 1) % len(self.given)
        if _versions(self.given[i]) != self.versions[i]:  # the script writes into it
            self.given[i] = copy.deepcopy(self.pristine[i])
            self.versions[i] = _versions(self.given[i])
        return copy.copy(self.given[i])


class Workers(Switch):
    """The loader with another number of workers, which stay alive."""

    by_name = True

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.name = f"workers {workers}"
        self.warm = 2 + 2 * workers
        self.batches: Any = None

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        loader = loop.loader
        if loader is None or loader.num_workers == self.workers:
            return False
        return self.workers <= len(os.sched_getaffinity(0))

    def next_batch(self, loop: Loop, iterator: Any, original: Any) -> Any:
        if self.batches is None:
            self.batches = _endless(like(loop.loader, self.workers), original)
        return next(self.batches)


class GraphCache(Switch):
    """PyG's graphs from trainfast's cache, as the data set has returned them once.

    The cache holds at least a batch of them, and no more than a short time allows.
    """

    name = "graph cache"
    settle = _SETTLE_SECONDS
    by_name = True

    def __init__(self) -> None:
        self.batches: Any = None

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        pyg, loader = sys.modules.get("torch_geometric.loader"), loop.loader
        if pyg is None or not isinstance(loader, pyg.DataLoader):
            return False
        ours = type(loader).__module__.startswith("trainfast")
        return bool(loader.batch_size and batches_of(loader) > 0 and not ours)

    def enter(self, loop: Loop) -> None:
        if self.batches is None:
            self.batches = _endless_cache(loop.loader, loop.scratch)

    def next_batch(self, loop: Loop, iterator: Any, original: Any) -> Any:
        return next(self.batches)


def _endless_cache(loader: Any, scratch: str | None) -> Any:
    """Batches of graphs from a new cache in a scratch folder, in shuffled order."""
    from trainfast.torch.pyg import DataLoader as CacheLoader
    from trainfast.torch.pyg import cached

    size = len(loader.dataset)
    least = min(loader.batch_size, size)
    graphs: list[Any] = []
    began = clock()
    for i in random.Random(0).sample(range(size), size):
        if len(graphs) >= least and clock() - began > _BUILD_SECONDS:
            break
        graphs.append(loader.dataset[i])
    folder = tempfile.mkdtemp(dir=scratch)
    ours = CacheLoader(
        cached(graphs, folder, progress=False),
        least,
        shuffle=True,
        drop_last=True,
        follow_batch=loader.follow_batch,
        exclude_keys=loader.exclude_keys,
        pin_memory=loader.pin_memory,
    )
    while True:
        yield from ours


class KeptLoader(Switch):
    """Loaders that are kept alive over the epochs, each read to its end."""

    name = "worker-restart"

    def __init__(self) -> None:
        # By the place where the script builds a loader, and of several from one place
        # by the order in which a step begins to read them.
        self.kept: dict[tuple[str, int], _Kept] = {}
        self.begun: Counter[str] = Counter()  # in this step, by place
        self.step_of_begun = 0

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        period = loop.period()
        loader = loop.loader
        if (
            loader is None
            or not 0 < period <= LONGEST_PERIOD
            or loader.persistent_workers
        ):
            return False
        self.warm = max(1, period)
        return loader.num_workers > 0 or period == 1

    def enter(self, loop: Loop) -> None:
        for kept in self.kept.values():
            kept.unread = 0  # or a block would get what was prefetched before it

    def iterate(self, loop: Loop, loader: Any, original: Any) -> Any:
        if loop.steps != self.step_of_begun:
            self.step_of_begun = loop.steps
            self.begun.clear()
        place = str(getattr(loader, "_probe_place", None))
        key = place, self.begun[place]
        self.begun[place] += 1
        if key not in self.kept:
            self.kept[key] = _Kept(like(loader, loader.num_workers), original)
        kept = self.kept[key]
        if kept.unread == 0:
            kept.begin()
        return kept.iterator

    def next_batch(self, loop: Loop, iterator: Any, original: Any) -> Any:
        kept = getattr(iterator, "_probe_kept", None)
        if kept is None:  # an epoch that began before the switch was entered
            return original(iterator)
        if kept.unread == 0:
            kept.begin()
        kept.unread -= 1
        try:
            return original(kept.iterator)
        except StopIteration:
            kept.unread = 0
            raise


class _Kept:
    """A loader that is kept, and its iterator."""

    def __init__(self, loader: Any, iterate: Any) -> None:
        self.loader = loader
        self.iterate = iterate
        self.iterator: Any = None
        self.unread = 0  # batches until the iterator's end; < 0: not known

    def begin(self) -> None:
        self.iterator = self.iterate(self.loader)
        self.iterator._probe_kept = self
        self.unread = batches_of(self.loader)


def batches_of(loader: Any) -> int:
    """How many a loader has; -1: not known."""
    return len(loader) if isinstance(loader.dataset, Sized) else -1


def _versions(batch: Any) -> list[int]:
    return [tensor._version for tensor in tensors(batch)]


def _endless(loader: Any, original: Any) -> Any:
    while True:
        iterator = unwrap(DataLoader.__iter__)(loader)  # the hook would take it for new
        while True:
            try:
                batch = original(iterator)
            except StopIteration:
                break
            yield batch
