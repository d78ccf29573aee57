"""DataLoader workers that copy their dataset page by page.

A forked worker shares its parent's memory until it writes. Reading a Python object
counts a reference, which writes: in time every worker has its own copy of a list of
Python objects.
"""

import gc
import itertools
import os
import sys
import time
from typing import Any

from torch.utils.data import DataLoader

from trainfast.machine import descendants, read
from trainfast.torch.leaks.owner import attribute_of, place
from trainfast.torch.leaks.reach import reach
from trainfast.torch.leaks.verdict import MIB, Leak, size

_SECONDS = 0.5  # between two looks, and of the time
_SHARE = 0.02  # at most for asking the kernel
_LEAST = 128 * MIB  # of Python objects in a dataset
_COPIED = 0.6  # of them, in each worker's own pages
_MOST_OBJECTS = 50_000  # of a dataset that are looked at
_SAMPLE = 1000  # first elements, whose size is taken for all


class Workers:
    """The children of this process, and what they no longer share with it."""

    def __init__(self) -> None:
        self._due = 0.0
        self._found = False

    def look(self) -> Leak | None:
        """Asks the kernel if it is time to; the leak, once."""
        began = time.monotonic()
        if self._found or began < self._due:
            return None
        own = [_own_bytes(pid) for pid in descendants(os.getpid())]
        leak = _leak(own) if max(own, default=0) >= _COPIED * _LEAST else None
        self._found = leak is not None
        self._due = began + max(_SECONDS, (time.monotonic() - began) / _SHARE)
        return leak


def _leak(own: list[int]) -> Leak | None:
    """The largest container of a dataset, if workers have as much memory of their own.

    Args:
        own: of each child, bytes that it does not share.
    """
    for loader in gc.get_objects():
        if not issubclass(type(loader), DataLoader) or not loader.num_workers:
            continue
        found = _largest(loader.dataset)
        if found is None:
            continue
        path, container, taken = found
        copies = [each for each in own if each >= _COPIED * taken]
        if len(copies) < loader.num_workers:
            continue
        kind = type(loader.dataset)
        file, line = (path and attribute_of(kind, path)) or place(kind)
        return Leak(
            f"{type(container).__name__} `{kind.__qualname__}{path}`",
            f"each of {len(copies)} workers has copied its {len(container):,} objects "
            "by reading them",
            file,
            line,
            f"+{size(sum(copies))}",
            "keep the data in one NumPy array or tensor",
        )
    return None


def _largest(dataset: Any) -> tuple[str, Any, float] | None:
    """The container of a dataset whose Python objects take the most bytes: its path,
    itself, the bytes."""
    found = reach(dataset, most=_MOST_OBJECTS)
    largest: tuple[str, Any, float] | None = None
    for number, each in enumerate(found.objects):
        if not issubclass(type(each), list | tuple | dict):
            continue
        taken = _taken(each)
        if taken >= (largest[2] if largest else _LEAST):
            largest = found.path(number), each, taken
    return largest


def _taken(container: Any) -> float:
    """About the bytes of a container's elements."""
    elements = container.values() if isinstance(container, dict) else container
    seen = [sys.getsizeof(each) for each in itertools.islice(elements, _SAMPLE)]
    return len(elements) * sum(seen) / len(seen) if seen else 0.0


def _own_bytes(pid: int) -> int:
    for line in read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    return 0  # it has ended, or this system does not tell
