"""Static shapes: `pad_to` of a Loader as a number for every count."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainfast.graph_cache.cache import Cache
from trainfast.graph_cache.schema import Schema

_RULE = (
    "pad_to must be (graphs, nodes, edges), a dict with these keys, 'max', or a list "
    "of the first two"
)


@dataclass(frozen=True)
class Bucket:
    """One static shape: the number of graphs, and the total of each count.

    A batch fits if it leaves a graph and a node of each type for the padding. `named`
    are the places of the counts that the user gave; the others fit any batch.
    """

    slots: int
    totals: tuple[int, ...]
    named: tuple[int, ...]

    def lacks(self, schema: Schema, sums: Mapping[int, int], n_graphs: int) -> str:
        """The first size in which a batch exceeds the bucket; "": it fits."""
        if n_graphs >= self.slots:
            return f"{n_graphs} graphs and one for padding in {self.slots}"
        for place in self.named:
            spare = schema.counts[place].role == "nodes"
            if sums[place] + spare > self.totals[place]:
                what = schema.count_name(place)
                more = " and one for padding" if spare else ""
                return f"{sums[place]} {what}{more} in {self.totals[place]}"
        return ""


def plan_buckets(
    pad_to: Any,
    cache: Cache,
    indices: np.ndarray | None,
    graphs: int | None,
    repeats: bool,
    limits: Mapping[str, int],
) -> list[Bucket]:
    """The shapes that `pad_to` names, smallest first.

    Args:
        pad_to: as in Loader.
        cache: the cache.
        indices: the graphs that come into batches; None: all.
        graphs: the most graphs in a batch; None: not known.
        repeats: a graph may come twice in a batch.
        limits: the most "nodes" and "edges" of a batch, where known.
    """
    if cache.schema is None:
        return []
    specs = pad_to if isinstance(pad_to, list) else [pad_to]
    if not specs:
        raise ValueError(f"{_RULE}, got []")
    counts = _Counts(cache, indices, repeats, limits)
    buckets = [_bucket(spec, cache.schema, counts, graphs) for spec in specs]
    return sorted(buckets, key=lambda b: ([b.totals[i] for i in b.named], b.slots))


class _Counts:
    """The counts of the selected graphs, each read from the index once."""

    def __init__(
        self,
        cache: Cache,
        indices: np.ndarray | None,
        repeats: bool,
        limits: Mapping[str, int],
    ) -> None:
        self._cache, self._indices = cache, indices
        self._repeats, self._limits = repeats, limits
        self._known: dict[int, np.ndarray] = {}

    def bound(self, place: int, graphs: int) -> int:
        """The largest total of a count in a batch of `graphs` graphs."""
        largest = self._known.get(place)
        if largest is None:
            counts = self._cache.counts(place)
            if self._indices is not None:
                counts = counts[self._indices]
            largest = self._known[place] = np.sort(counts)[::-1]
        if not len(largest):
            return 0
        top = int(largest[0])
        most = graphs * top if self._repeats else int(largest[:graphs].sum())
        assert self._cache.schema is not None
        limit = self._limits.get(self._cache.schema.counts[place].role)
        return most if limit is None else min(most, max(limit, top))


def _bucket(spec: Any, schema: Schema, counts: _Counts, graphs: int | None) -> Bucket:
    if spec == "max":
        return _largest(schema, counts, graphs)
    given = _as_dict(spec)
    slots = _size("pad_to['graphs']", given.pop("graphs", None))
    if slots < 2:
        rule = "must be at least 2, for a graph and one for padding"
        raise ValueError(f"pad_to['graphs'] {rule}, got {slots}")
    named = {
        **_by_type("nodes", given.pop("nodes", None), schema.nodes),
        **_by_type("edges", given.pop("edges", None), schema.edges),
    }
    for key, size in given.items():
        named[_ragged(schema, key)] = _size(f"pad_to[{key!r}]", size)
    totals = [
        named[place] if place in named else counts.bound(place, slots - 1)
        for place in range(len(schema.counts))
    ]
    return Bucket(slots, tuple(totals), tuple(named))


def _largest(schema: Schema, counts: _Counts, graphs: int | None) -> Bucket:
    if graphs is None:
        raise ValueError(
            "pad_to must name the sizes with a batch_sampler, whose batches may be of "
            "any size, got 'max'"
        )
    totals = [
        counts.bound(place, graphs) + (count.role == "nodes")
        for place, count in enumerate(schema.counts)
    ]
    places = (*schema.nodes.values(), *schema.edges.values())
    return Bucket(graphs + 1, tuple(totals), places)


def _as_dict(spec: Any) -> dict[Any, Any]:
    if isinstance(spec, Mapping):
        return dict(spec)
    if isinstance(spec, tuple) and len(spec) == 3:
        return dict(zip(("graphs", "nodes", "edges"), spec))
    raise ValueError(f"{_RULE}, got {spec!r}")


def _by_type(what: str, size: Any, places: Mapping[Any, int]) -> dict[int, int]:
    """Sizes by count, from a number or a dict by type."""
    if isinstance(size, Mapping):
        if size.keys() != places.keys():
            rule = f"must have the types {list(places)}"
            raise ValueError(f"pad_to[{what!r}] {rule}, got {list(size)}")
        return {
            places[kind]: _size(f"pad_to[{what!r}][{kind!r}]", number)
            for kind, number in size.items()
        }
    if len(places) > 1:
        rule = f"must be a dict with a size for each of {list(places)}"
        raise ValueError(f"pad_to[{what!r}] {rule}, got {size!r}")
    number = _size(f"pad_to[{what!r}]", size)
    return {place: number for place in places.values()}


def _ragged(schema: Schema, key: Any) -> int:
    """The place of the count of a field's ragged dimension."""
    if key not in schema.keys:
        raise ValueError(f"pad_to's keys must be sizes of the cache, got {key!r}")
    field = schema.fields[schema.field_of(key)]
    sizes = [-1 - d for d in field.dims if d < 0]
    sizes = [place for place in sizes if schema.counts[place].role == "size"]
    if len(sizes) != 1:
        rule = "must be of a field with one ragged dimension"
        raise ValueError(f"pad_to[{key!r}] {rule}, got {len(sizes)}")
    return sizes[0]


def _size(name: str, size: Any) -> int:
    if not hasattr(size, "__index__") or size.__index__() < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {size!r}")
    return int(size.__index__())


def chooser(buckets: list[Bucket], cache: Cache) -> Callable[[np.ndarray], int]:
    """A function of a batch's graphs: the place of the smallest bucket they fit in."""
    schema = cache.schema
    assert schema is not None
    named = sorted({place for bucket in buckets for place in bucket.named})
    counts = {place: cache.counts(place) for place in named}

    def choose(indices: np.ndarray) -> int:
        sums = {place: int(counts[place][indices].sum()) for place in named}
        for place, bucket in enumerate(buckets):
            lack = bucket.lacks(schema, sums, len(indices))
            if not lack:
                return place
        raise ValueError(f"pad_to must have room for each batch, got {lack}")

    return choose
