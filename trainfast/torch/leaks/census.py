"""Which containers grow, and which classes get more objects: looks at all objects,
some steps apart."""

import gc
import itertools
import sys
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainfast.torch.leaks import scopes

_CONTAINERS = (list, dict, set, deque)
_MOST_CANDIDATES = 64
_MANY = 32  # steps, of which some may add nothing
_LEAST_OBJECTS = 4  # of a class, between two looks


@dataclass
class Growth:
    """A container that grew from the first look to the second.

    Attributes:
        container: it.
        lengths: at the second look and after each step since.
    """

    container: Any
    lengths: list[int] = field(default_factory=list)

    @property
    def grew(self) -> bool:
        return self.lengths[-1] > self.lengths[0]

    def is_steady(self, steps: int) -> bool:
        """Whether it is no cache that fills, which gets less and less.

        Few steps: each adds as much; to a dict or set also all steps before, or a cache
        has had luck with its keys. Many steps: additions of one size at equal
        distances; to others the second half may add a tenth less than the first.

        Args:
            steps: that the tracker has seen.
        """
        added = [b - a for a, b in itertools.pairwise(self.lengths)]
        places = [place for place, n in enumerate(added) if n]
        gaps = {b - a for a, b in itertools.pairwise(places)}
        regular = len({added[place] for place in places}) == 1 and len(gaps) == 1
        may_be_cache = issubclass(type(self.container), dict | set)
        if len(added) < _MANY:
            regular = regular and gaps == {1} and len(places) == len(added)
            since_start = self.lengths[-1] >= added[-1] * (steps - 1)
            return regular and (since_start or not may_be_cache)
        half = len(added) // 2
        lasting = sum(added[half:]) >= 0.9 * sum(added[:half]) > 0
        return regular or (lasting and not may_be_cache)

    def new(self) -> list[Any]:
        """What it got since the second look; of a set all, which has no order."""
        if issubclass(type(self.container), set):
            return gc.get_referents(self.container)
        return list(itertools.islice(_values(self.container), self.lengths[0], None))

    def span(self) -> float:
        """The steps in which `new` came; of a set as if it had always grown so."""
        steps = len(self.lengths) - 1
        if issubclass(type(self.container), set):
            return steps * self.lengths[-1] / (self.lengths[-1] - self.lengths[0])
        return steps

    def old(self) -> list[Any]:
        """The last element of before, if there is one."""
        if issubclass(type(self.container), set):
            return []
        end = self.lengths[0]
        return list(itertools.islice(_values(self.container), max(0, end - 1), end))


class Census:
    """The first look is the constructor's, the second `look_again`; `follow` notes the
    lengths after each step from then on.

    A container's address may be another's at the second look, so its first element must
    be the same too. From then on the few candidates are held.
    """

    def __init__(self) -> None:
        objects = _objects()
        self._lengths = {id(each): _seen(each) for each in _containers(objects)}
        self._first = Counter(map(type, objects))
        self._second: Counter[type] = Counter()
        self._candidates: list[Growth] = []

    def look_again(self) -> bool:
        """The second look: whether any container grew."""
        objects = _objects()
        grown: list[tuple[int, Any]] = []
        for each in _containers(objects):
            length, first = _seen(each)
            before = self._lengths.get(id(each), (length, 0))
            if length > before[0] and before[1] in (0, first):
                grown.append((length - before[0], each))
        self._lengths.clear()
        self._second = Counter(map(type, objects))
        grown.sort(key=lambda candidate: -candidate[0])
        del grown[_MOST_CANDIDATES:]
        self._candidates = [Growth(each) for _, each in grown]
        self.follow()
        return bool(grown)

    def follow(self) -> None:
        for each in self._candidates:
            each.lengths.append(_length(each.container))

    def grown(self) -> list[Growth]:
        """The candidates that grew since the second look, and that others hold."""
        # One reference is the Growth's, one the call's own.
        self._candidates = [
            each
            for each in self._candidates
            if each.grew and sys.getrefcount(each.container) > 2
        ]
        return self._candidates

    def more(self) -> dict[type, tuple[list[Any], int]]:
        """The classes that got more objects each time: all their objects, and how many
        more there are than at the second look."""
        objects = _objects()
        now = Counter(map(type, objects))
        found: dict[type, tuple[list[Any], int]] = {}
        for kind, n in self._second.items():
            if min(n - self._first[kind], now[kind] - n) >= _LEAST_OBJECTS:
                found[kind] = [], now[kind] - n
        for each in objects:
            if type(each) in found:
                found[type(each)][0].append(each)
        return found


def _objects() -> list[Any]:
    """All objects that the garbage collector knows, once what nobody holds has gone;
    and dicts without such objects, which it does not know, behind variables."""
    gc.collect()
    objects = gc.get_objects()
    dicts = {id(x): x for x in gc.get_referents(*objects) if type(x) is dict}
    dicts |= {id(x): x for x in scopes.local_values() if type(x) is dict}
    untracked = [x for x in dicts.values() if not gc.is_tracked(x)]
    return objects + untracked


def _containers(objects: list[Any]) -> Iterator[Any]:
    own = id(objects)
    for each in objects:
        if issubclass(type(each), _CONTAINERS) and id(each) != own:
            yield each


def _length(container: Any) -> int:
    for kind in _CONTAINERS:
        if issubclass(type(container), kind):
            return kind.__len__(container)
    return 0


def _values(container: Any) -> Iterator[Any]:
    # The class's own method, which a subclass may have replaced, is not run.
    if issubclass(type(container), dict):
        return iter(dict.values(container))
    kind = list if issubclass(type(container), list) else deque
    return kind.__iter__(container)


def _seen(container: Any) -> tuple[int, int]:
    """Length, and identity of the first element; of a set 0."""
    length = _length(container)
    if not length or issubclass(type(container), set):
        return length, 0
    return length, id(next(_values(container)))
