"""PyG datasets whose graphs lie in a graph cache."""

import copy
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from os import PathLike
from types import EllipsisType
from typing import Any, SupportsIndex

import numpy as np
import torch
import torch.utils.data
from torch_geometric.data import Data, Dataset

from trainfast._core import GraphBatch, GraphSelection, graph_collate
from trainfast.graph_cache import BuildError, Cache, build, keys
from trainfast.graph_cache.batch import plan_batches
from trainfast.graph_cache.writer import as_path, has_manifest
from trainfast.torch.pyg_assemble import assembler, item_assembler
from trainfast.torch.pyg_rules import Flattener

__all__ = ["Batcher", "CachedDataset", "Picked", "cached"]


def cached(
    dataset: Any,
    path: str | PathLike[str],
    *,
    transform_id: Any = None,
    workers: int = 0,
    verify: str = "once",
    transform: Callable[[Any], Any] | EllipsisType | None = ...,
    progress: bool = True,
) -> "CachedDataset":
    """The dataset, with its graphs in the cache at `path`: a drop-in for it.

    Graphs that the cache lacks are taken from `dataset` and stored, once; after that
    only the first one is asked for, for its class. They come back as they were: the
    same class (a subclass must be importable by the processes that use it), the same
    attributes. How a class's own `__inc__` and `__cat_dim__` batch them is stored, too.

    A graph is known by its place and `transform_id`: change that, or take another path,
    when what makes the graphs has changed.

    Args:
        dataset: a PyG dataset, a torch Subset of one, or any sequence of `Data` or
            `HeteroData`, all of one class.
        path: a directory, made if it is not there.
        transform_id: str, bytes, int or a tuple of them.
        workers: processes that take graphs from the dataset while the cache is built.
        verify: "once", "always" or "never": when checksums are compared; see
            `trainfast.graph_cache.open`.
        transform: applied to each graph when it is read. Left out, it is the dataset's
            own, which is then not applied before storing. None, or another function:
            what is stored has gone through the dataset's own.
        progress: show a bar while building.

    Raises:
        NotImplementedError: an attribute that cannot be stored, by its name: sparse
            tensors, lists, nested dicts, NumPy arrays, subclasses of Tensor, tensors
            that require gradients.
        ValueError: an empty dataset, or graphs that do not fit together.
        BuildError: the dataset failed; what was built before is kept.
        OSError: the disk is full or fails.
    """
    path = as_path(path)
    size = len(dataset)
    if not size:
        raise ValueError("dataset must have graphs, got an empty one")
    if transform is ...:
        dataset, transform = _split_transform(dataset)
    else:
        transform_id = (b"transformed", () if transform_id is None else transform_id)
    first = dataset[0]
    known = has_manifest(path)
    cache = _complete(path, size, transform_id, verify)
    if cache is None:
        some = [first, *(dataset[i] for i in range(1, min(8, size)))]
        _build(path, dataset, Flattener(some), transform_id, workers, progress)
        cache = Cache(path, verify)
        _write_note(cache, transform_id)
    made = CachedDataset(cache, type(first), transform)
    if known:
        _warn_of_another(made, first)
    return made


def _warn_of_another(made: "CachedDataset", first: Any) -> None:
    """Warns where the cache's first graph is not the dataset's: the cache may be of
    another dataset (the training set's, for the test set), or of older code."""
    theirs, ours = _values(first), _values(made.get(0))
    if theirs.keys() != ours.keys():
        other = sorted(map(str, theirs.keys() ^ ours.keys()))[0]
    else:
        wrong = [name for name in theirs if not _same(theirs[name], ours[name])]
        if not wrong:
            return
        other = str(wrong[0])
    warnings.warn(
        f"the dataset's first graph is not the one in {made.cache.path} ({other!r} "
        "differs), and the cache's graphs are what you get: for another dataset take "
        "another path, after a change another transform_id",
        stacklevel=3,
    )


def _values(graph: Any) -> dict[Any, Any]:
    return {
        (store._key, name): value
        for store in graph.stores
        for name, value in store._mapping.items()
        if value is not None
    }


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and (a == b or a != a)
    if a.device.type != "cpu":
        return True  # not worth a wait for the device
    # As bits: NaN is what it was.
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _build(
    path: str,
    dataset: Any,
    flatten: Flattener,
    transform_id: Any,
    workers: int,
    progress: bool,
) -> None:
    """Builds what is missing; what cannot be stored is the error that it is."""
    try:
        build(
            path,
            range(len(dataset)),
            _Make(dataset, flatten),
            transform_id=transform_id,
            workers=workers,
            progress=progress,
            rules=flatten.rules,
        )
    except BuildError as error:
        if isinstance(error.__cause__, NotImplementedError):
            raise NotImplementedError(str(error)) from error
        raise


class _Make:
    """place -> what is stored of the dataset's graph there."""

    def __init__(self, dataset: Any, flatten: Flattener) -> None:
        self.dataset, self.flatten = dataset, flatten

    def __call__(self, place: int) -> Any:
        return self.flatten(self.dataset[place])


def _split_transform(dataset: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """The dataset without its transform, and the transform."""
    if type(dataset) is torch.utils.data.Subset:
        inner, transform = _split_transform(dataset.dataset)
        return torch.utils.data.Subset(inner, dataset.indices), transform
    if isinstance(dataset, Dataset) and dataset.transform is not None:
        plain = copy.copy(dataset)
        plain.transform = None
        return plain, dataset.transform
    return dataset, None


_NOTE = "pyg.json"  # beside the cache's own files, which leave it alone


def _complete(path: str, size: int, transform_id: Any, verify: str) -> Cache | None:
    """The cache, if it has exactly the graphs that are wanted."""
    if not has_manifest(path):
        return None
    try:
        cache = Cache(path, verify)
    except (ValueError, OSError):  # unfinished: it goes on; damaged: build says so
        return None
    if len(cache) != size:
        return None
    if _read_note(cache) == _note_of(cache, transform_id):
        return cache
    # From another build; this reads from each record.
    key_of = keys.key_maker(None, transform_id)
    wanted = b"".join(key_of(place, None) for place in range(size))
    if cache._core.keys() != wanted:
        return None
    _write_note(cache, transform_id)
    return cache


def _note_of(cache: Cache, transform_id: Any) -> dict[str, str]:
    """What says that a cache, which its fingerprint names, has what is wanted."""
    made = keys.key_maker(None, transform_id)(0, None)
    return {"fingerprint": cache.fingerprint, "key": made.hex()}


def _read_note(cache: Cache) -> Any:
    try:
        return json.loads((cache.path / _NOTE).read_bytes())
    except (OSError, ValueError):
        return None


def _write_note(cache: Cache, transform_id: Any) -> None:
    text = json.dumps(_note_of(cache, transform_id))
    with suppress(OSError):  # a directory that only others may write to
        fresh = cache.path / f"{_NOTE}.{os.getpid()}"
        fresh.write_text(text)
        fresh.replace(cache.path / _NOTE)


class CachedDataset(Dataset):
    """A PyG dataset whose graphs lie in a graph cache.

    It does what PyG's datasets do: integers give graphs, slices, lists, masks and
    tensors give datasets, `transform` is applied on access. The tensors of a graph are
    its own: write into them as you like. Batches come from
    `trainfast.torch.pyg.DataLoader`, or from PyG's, which makes them of graphs.

    Args:
        cache: an open cache; see `trainfast.graph_cache.open`.
        kind: the class of the graphs: `Data`, `HeteroData` or a subclass.
        transform: applied to each graph on access.
    """

    def __init__(
        self,
        cache: Cache,
        kind: type = Data,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(None, transform)
        self.cache = cache
        self.kind = kind
        self._made: dict[Any, Any] = {}  # shared with the dataset's slices

    def len(self) -> int:
        """Graphs in the cache."""
        return len(self.cache)

    def get(self, idx: SupportsIndex) -> Any:
        """Graph `idx` of the cache, without the transform."""
        place = idx.__index__()
        fields: tuple[int, ...] = ()
        schema = self.cache.schema
        if schema is not None and any(field.optional for field in schema.fields):
            values = self.cache._core.get(place)
            fields = tuple(i for i, value in enumerate(values) if value is not None)
        selection, assemble = self._once(("get", fields), self._make_getter, fields)
        return assemble(graph_collate(selection, [place]))

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """The graphs of a batch; without a transform they are not made yet."""
        if self.transform is not None:
            return [self[i] for i in indices]
        return Picked(self, indices)

    def batcher(self, follow: Iterable[str], exclude: Iterable[str]) -> "Batcher":
        """What makes batches of places in the cache."""
        what = tuple(follow), tuple(exclude)
        return self._once(what, Batcher, self.cache, self.kind, *what)

    def _once(self, what: Any, make: Callable[..., Any], *given: Any) -> Any:
        if what not in self._made:
            self._made[what] = make(*given)
        return self._made[what]

    def _make_getter(self, fields: tuple[int, ...]) -> tuple[Any, Any]:
        schema = self.cache.schema
        if schema is None:
            raise IndexError("the cache has no graphs")
        wanted = [schema.keys[i] for i in fields] if fields else None
        plan = plan_batches(schema, wanted)
        core = self.cache._core
        selection = GraphSelection(core, plan.fields, (), array_type=torch.Tensor)
        return selection, item_assembler(plan, self.kind)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}


class Picked(Sequence[Any]):
    """Graphs of a dataset that are made when they are looked at."""

    def __init__(self, dataset: CachedDataset, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.dataset[i] for i in self.indices[index]]
        return self.dataset[self.indices[index]]

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[i] for i in self.indices)

    def batch(
        self, follow: Iterable[str] | None, exclude: Iterable[str] | None
    ) -> Any | None:
        """Their batch, made natively; None where that is not possible."""
        batcher = self.dataset.batcher(follow or (), exclude or ())
        if batcher.reason is not None or not len(self.indices):
            return None
        own, places = self.dataset._indices, self.indices
        if own is not None:
            places = [own[i] for i in places]
        return batcher(in_range(places, len(self.dataset.cache)))


class Batcher:
    """Makes a cache's batches for one choice of `follow_batch` and `exclude_keys`.

    `reason` is why it cannot, None where it can.
    """

    def __init__(
        self, cache: Cache, kind: type, follow: Iterable[str], exclude: Iterable[str]
    ) -> None:
        self.reason: str | None = None
        schema = cache.schema
        if schema is None:
            self.reason = "a cache without graphs"
            return
        names = {field.name for field in schema.fields}
        plan = plan_batches(
            schema, None, exclude, [name for name in follow if name in names]
        )
        if any(schema.fields[i].optional for i in plan.fields):
            self.reason = "an attribute that not all graphs have"
            return
        core = cache._core
        self.selection = plan.selection(core, torch.Tensor)
        self.assemble: Callable[[GraphBatch], Any] = assembler(plan, kind)

    def __call__(self, places: Any) -> Any:
        """The batch of these graphs of the cache."""
        return self.assemble(graph_collate(self.selection, places))


def in_range(indices: Any, n: int) -> Any:
    """Indices into n graphs as the core takes them; IndexError for those beyond."""
    if type(indices) is not list or {*map(type, indices)} != {int}:
        array = np.asarray(indices)
        if array.dtype.kind not in "iu" or array.ndim != 1 or not array.size:
            raise IndexError(f"a batch must be a list of indices, got {indices!r}")
        indices = array.tolist()
    low, high = min(indices), max(indices)
    if low < -n or high >= n:
        raise IndexError(f"index must be in {-n} .. {n - 1}, got {low} .. {high}")
    return [i + n if i < 0 else i for i in indices] if low < 0 else indices


def places_in(dataset: Any) -> tuple[CachedDataset | None, np.ndarray | None]:
    """The cached dataset behind a dataset, and which of its cache's graphs it has.

    (None, None) where there is none, or something between that changes the graphs; all
    graphs of the cache in their order are (dataset, None).
    """
    if type(dataset) is torch.utils.data.Subset:
        inner, places = places_in(dataset.dataset)
        own = np.asarray(dataset.indices, np.int64).reshape(-1)
        if inner is None:
            return None, None
        return inner, _compose(len(inner.cache), places, own)
    if type(dataset) is not CachedDataset or dataset.transform is not None:
        return None, None
    if dataset._indices is None:
        return dataset, None
    own = np.asarray(dataset._indices, np.int64).reshape(-1)
    return dataset, _compose(len(dataset.cache), None, own)


def _compose(n: int, places: np.ndarray | None, own: np.ndarray) -> np.ndarray:
    """Places in the cache; raises IndexError for those beyond."""
    return (np.arange(n) if places is None else places)[own]
