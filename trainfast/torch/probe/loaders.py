"""Switches of what a training loop waits for: its data."""

import copy
import os
from collections.abc import Callable, Sized
from inspect import unwrap
from typing import Any

from torch.utils.data import DataLoader

from trainfast.torch.data.batches import tensors
from trainfast.torch.data.loaders import like
from trainfast.torch.probe.loop import LONGEST_PERIOD, Loop
from trainfast.torch.probe.switch import Switch

_LEAST_SHARE = 0.05  # of waiting for data that could be worth a finding


class CachedBatches(Switch):
    """Copies of a few batches in place of the loader's: a bound for all cures of it."""

    name = "data"

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


class KeptLoader(Switch):
    """Loaders that are kept alive over the epochs, each read to its end."""

    name = "worker-restart"

    def __init__(self) -> None:
        self.loaders: dict[Any, Any] = {}  # by the place where the script builds them
        self.iterators: dict[Any, Any] = {}

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
        self.iterators.clear()

    def iterate(self, loop: Loop, loader: Any, original: Any) -> Any:
        batches = len(loader) if isinstance(loader.dataset, Sized) else -1
        place = str(getattr(loader, "_probe_place", None)), batches
        if place not in self.loaders:
            self.loaders[place] = like(loader, loader.num_workers)
        iterator = self.iterators.get(place)
        if iterator is None or iterator._probe_unread == 0:
            iterator = self.iterators[place] = original(self.loaders[place])
            iterator._probe_unread = batches
        return iterator

    def next_batch(self, loop: Loop, iterator: Any, original: Any) -> Any:
        iterator._probe_unread -= 1
        try:
            return original(iterator)
        except StopIteration:
            iterator._probe_unread = 0
            raise


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
