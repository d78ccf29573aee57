"""Prefetches batches with native threads."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from trainfast._core import GraphPrefetch

__all__ = ["Ahead", "Place"]


@dataclass(slots=True)
class Place:
    """The position of an iteration: batches handed out, not batches prefetched."""

    epoch: int = 0
    position: int = 0
    done: bool = False


class Ahead(Iterator[Any]):
    """Hands out the batches of a source in order, each once.

    No batch is lost if a signal handler raises (Ctrl-C): the next call of `__next__`
    continues. Python handles signals after a call, not between assignments. So all
    calls can be repeated, because a prefetch identifies batches by number, and plain
    assignments after the last call record that a batch was handed out.

    An error of the source is raised after the batches before it. An error of a batch
    is raised once; the next attempt goes on after that batch.

    Args:
        source: an iterator of what `_plan` understands; None: `_begin` sets `_source`.
        ahead: batches that are prefetched while the user has one.
    """

    def __init__(self, source: Iterator[Any] | None, ahead: int) -> None:
        self._source, self._ahead = source, ahead
        self._given: Any = None  # by the source, not submitted yet
        self._prefetches: dict[int, GraphPrefetch] = {}  # for `_plan`
        self._waiting: dict[int, tuple[GraphPrefetch, int]] = {}  # with its position
        self._submitted = self._taken = 0  # batches
        self._error: Exception | None = None  # of the source
        self._busy = False
        self._place = Place()

    def _begin(self) -> None:
        """Sets `_source`; called until it has."""
        raise NotImplementedError

    def _plan(self, given: Any) -> tuple[GraphPrefetch, Any, int]:
        """The prefetch for a source's item, its graphs, and the position after it.

        It may be called again for the same item.
        """
        raise NotImplementedError

    def _assemble(self, batch: Any) -> Any:
        """The user's batch for a GraphBatch."""
        raise NotImplementedError

    def __next__(self) -> Any:
        if self._busy:
            raise RuntimeError(
                "an iteration must not be used by two threads at once, nor by its own "
                "sampler; give each thread an iteration of its own"
            )
        self._busy = True
        try:
            if self._source is None:
                self._begin()
            number = self._taken
            if number == self._submitted:
                self._fill(max(self._ahead, 1))
                if number == self._submitted:
                    self._end()
            prefetch, position = self._waiting[number]
            try:
                batch = prefetch.next(number)
            except Exception:
                # No call here, after which Python would handle a further signal.
                if prefetch.failed_number == number:
                    del self._waiting[number]
                    self._taken = number + 1
                raise
            self._fill(self._ahead + 1)
            try:
                made = self._assemble(batch)
            except Exception:
                del self._waiting[number]
                self._taken = number + 1
                raise
            del self._waiting[number]
            self._taken = number + 1
            self._place.position = position
            return made
        finally:
            self._busy = False

    def _end(self) -> NoReturn:
        """Raises the source's error once, and then StopIteration."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # or this frame and the error would keep each other
        self._place.done = True
        self._prefetches.clear()  # ends their threads
        raise StopIteration

    def _fill(self, most: int) -> None:
        """Submits batches until `most` are submitted and not yet handed out, or until
        the source's end or error."""
        while (number := self._submitted) - self._taken < most:
            try:
                if self._given is None:
                    assert self._source is not None
                    # A loop stores an item without a call that Ctrl-C could follow.
                    for given in self._source:
                        self._given = given
                        break
                    else:
                        self._source = iter(())
                        return
                prefetch, graphs, position = self._plan(self._given)
                self._waiting[number] = prefetch, position
                prefetch.submit(number, graphs)
            except Exception as error:
                self._waiting.pop(number, None)
                self._given, self._source, self._error = None, iter(()), error
                return
            self._given = None
            self._submitted = number + 1

    def __reduce__(self) -> Any:
        raise TypeError("an iteration cannot be pickled; pickle its loader instead")
