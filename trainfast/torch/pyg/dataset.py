"""PyG datasets whose graphs are stored in a graph cache."""

import copy
import json
import os
import warnings
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    MutableSequence,
    Sequence,
)
from contextlib import suppress
from os import PathLike
from types import EllipsisType
from typing import Any, SupportsIndex

import numpy as np
import torch
import torch.utils.data
from torch_geometric.data import Batch, Data, Dataset, HeteroData

from trainfast._core import GraphBatch, GraphSelection, graph_collate
from trainfast.graph_cache import BuildError, Cache, keys
from trainfast.graph_cache.batch import plan_batches
from trainfast.graph_cache.build import run
from trainfast.graph_cache.digest import is_own
from trainfast.graph_cache.job import Job
from trainfast.graph_cache.origin import DrawnError
from trainfast.graph_cache.reuse import Reuse, Source
from trainfast.graph_cache.schema import Schema
from trainfast.graph_cache.writer import as_path, has_manifest
from trainfast.torch.pyg.assemble import assembler, item_assembler
from trainfast.torch.pyg.rules import Flattener

__all__ = ["Batcher", "CachedDataset", "Picked", "cached"]


def cached(
    dataset: Any,
    path: str | PathLike[str],
    *,
    transform_id: keys.Key | None = None,
    workers: int = 0,
    verify: str = "once",
    transform: Callable[[Any], Any] | EllipsisType | None = ...,
    progress: bool = True,
    rebuild: bool | None = None,
) -> "CachedDataset":
    """A drop-in for the dataset whose graphs are stored in the cache at `path`.

    Graphs that the cache lacks are taken from `dataset` and stored, once. They come
    back as they were: the same class (a subclass must be importable by the processes
    that use it), the same attributes. How a class's own `__inc__` and `__cat_dim__`
    batch them is stored, too.

    A graph is known by its place and `transform_id`. Before stored graphs are used, the
    dataset's first, last and middle one, and up to 1,000 spread ones within a quarter
    of a second, are compared with them, and so is the code of the dataset's class and
    of its `pre_transform` and `pre_filter`, and of its transform where that is applied
    before storing, as far as they are your own (see `trainfast.graph_cache.build`). A
    difference is a StaleCacheError that says what has changed. Of a filtered dataset
    the last graph is another; a shuffled one of n graphs is missed once in n**3 times
    at most, two graphs that changed places where neither is compared.

    Args:
        dataset: a PyG dataset, a torch Subset of one, or any sequence of `Data` or
            `HeteroData`, all of one class.
        path: a directory, made if it is not there; "~" is the home.
        transform_id: str, bytes, int or a tuple of them: names what makes the graphs.
            Another one makes all again. It is yours to change: code is not compared
            then, and a dataset that draws other graphs each time may be used again.
        workers: processes that take graphs from the dataset while the cache is built.
        verify: "once", "always" or "never": when checksums are compared; see
            `trainfast.graph_cache.open`.
        transform: applied to each graph when it is read. Left out, it is the dataset's
            own, which is then not applied before storing. None, or another function:
            what is stored has gone through the dataset's own.
        progress: show a bar while building.
        rebuild: True: all graphs are stored anew; False: the stored ones are kept where
            only code has changed and the compared graphs are the same.

    Raises:
        NotImplementedError: an attribute that cannot be stored, by its name: sparse
            tensors, lists, nested dicts, NumPy arrays, subclasses of Tensor, tensors
            that require gradients.
        ValueError: an empty dataset, or graphs that do not fit together.
        StaleCacheError: a ValueError; the cache is of something else.
        BuildError: the dataset failed; what was built before is kept.
        OSError: the disk is full or fails.
    """
    path = as_path(path)
    size = len(dataset)
    if not size:
        raise ValueError("dataset is empty; give one with at least one graph")
    named = transform_id is not None
    transformed = transform is not ...
    if transform is ...:
        dataset, transform = _split_transform(dataset)
    else:
        transform_id = (b"transformed", () if transform_id is None else transform_id)
    functions = {} if named else _functions(dataset, transformed)
    source = Source(functions, named=named, given=True)
    first = dataset[0]
    known = has_manifest(path)
    cache = None if rebuild else _complete(path, size, transform_id, verify)
    if cache is None:
        some = [first, *(dataset[i] for i in range(1, min(8, size)))]
        flatten = Flattener(some)
        job = Job(path, _Make(dataset, flatten), flatten.rules)
        _build(job, size, source, transform_id, workers, progress, rebuild)
        cache = Cache(path, verify)
        _write_note(cache, transform_id)
        if not known:
            _warn_of_random(CachedDataset(cache, type(first)), some)
        return CachedDataset(cache, type(first), transform)
    made = CachedDataset(cache, type(first), transform)
    reuse = Reuse(Job(path, None, {}), source, keys.name_of(transform_id), rebuild)
    reuse.compare_given(
        range(size), lambda i: _changed(made, dataset, i, named), _MOST_COMPARED
    )
    reuse.end(begun=False)
    return made


def _changed(made: "CachedDataset", dataset: Any, i: int, named: bool) -> str:
    """What differs in graph i of the cache and of the dataset; "": nothing."""
    graph = dataset[i]
    if type(graph) is not made.kind:
        got, kind = type(graph).__name__, made.kind.__name__
        return f"graph {i}, which is a {got}, not a {kind}"
    other = _difference(graph, made.get(i))
    if not other:
        return ""
    if _difference(graph, dataset[i]):
        if named:
            return ""
        raise DrawnError(str(made.cache.path), f"graph {i} ({other!r} differs)")
    return f"graph {i}, which differs in {other!r}"


def _functions(dataset: Any, transformed: bool) -> dict[str, Any]:
    """The functions that make a dataset's graphs, by name; `transformed`: all three."""
    parts = [dataset]
    while any(hasattr(part, "datasets") or hasattr(part, "dataset") for part in parts):
        parts = [
            inner
            for part in parts
            for inner in getattr(part, "datasets", [getattr(part, "dataset", part)])
        ]
    found: dict[str, Any] = {}
    for number, part in enumerate(parts):
        which = f" of part {number}" if len(parts) > 1 else ""
        if is_own(type(part).__module__):
            found[f"dataset{which}"] = type(part)
        names = ("transform", "pre_transform", "pre_filter")[not transformed :]
        for name in names:
            function = getattr(part, name, None)
            if callable(function):
                found[name + which] = function
    return found


def _warn_of_random(made: "CachedDataset", some: list[Any]) -> None:
    """Warns if the dataset gives another graph than the one that was stored."""
    for i, graph in enumerate(some):
        other = _difference(graph, made.get(i))
        if other:
            _warn_of_drawing(i, other, stacklevel=4)
            return


def _warn_of_drawing(i: int, name: str, stacklevel: int) -> None:
    warnings.warn(
        f"the dataset's graph {i} is another each time ({name!r} differs): the cache "
        "has one of them for good; give what draws as transform=",
        stacklevel=stacklevel,
    )


def _difference(a: Any, b: Any) -> str:
    """The name of what differs in two graphs; "": nothing."""
    theirs, ours = _values(a), _values(b)
    if theirs.keys() != ours.keys():
        return sorted(map(str, theirs.keys() ^ ours.keys()))[0]
    wrong = [name for name in theirs if not _same(theirs[name], ours[name])]
    return str(wrong[0]) if wrong else ""


def _values(graph: Any) -> dict[Any, Any]:
    return {
        (name if store._key is None else (store._key, name)): value
        for store in graph.stores
        for name, value in store._mapping.items()
        if value is not None
    }


def _places(graph: Any) -> dict[Any, Any]:
    """The properties of a tensor besides its values."""
    return {
        name: (value.device, value.requires_grad)
        for name, value in _values(graph).items()
        if isinstance(value, torch.Tensor)
    }


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and (a == b or a != a)
    if a.device.type != "cpu":
        return True  # not worth a wait for the device
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False  # what is stored never is
    # As bits: NaN is what it was.
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _build(
    job: Job,
    size: int,
    source: Source,
    transform_id: keys.Key | None,
    workers: int,
    progress: bool,
    rebuild: bool | None,
) -> None:
    """Builds the missing graphs; keeps NotImplementedError for unsupported graphs."""
    try:
        run(job, range(size), source, None, transform_id, workers, rebuild, progress)
    except BuildError as error:
        if isinstance(error.__cause__, NotImplementedError):
            raise NotImplementedError(str(error)) from error
        raise


class _Make:
    """A function from a place to the dataset's graph there, as it is stored."""

    def __init__(self, dataset: Any, flatten: Flattener) -> None:
        self.dataset, self.flatten = dataset, flatten

    def __call__(self, place: int) -> Any:
        return self.flatten(self.dataset[place])


def _split_transform(dataset: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """The dataset without its transform, and the transform."""
    if type(dataset) is torch.utils.data.Subset:
        inner, transform = _split_transform(dataset.dataset)
        return torch.utils.data.Subset(inner, dataset.indices), transform
    if type(dataset) is torch.utils.data.ConcatDataset:
        split = [_split_transform(part) for part in dataset.datasets]
        transform = split[0][1]
        if any(own is not transform for _, own in split):
            return dataset, None  # each part's own is applied before storing
        return torch.utils.data.ConcatDataset([part for part, _ in split]), transform
    if isinstance(dataset, Dataset) and dataset.transform is not None:
        plain = copy.copy(dataset)
        plain.transform = None
        return plain, dataset.transform
    return dataset, None


_MOST_COMPARED = 1000  # graphs, before stored ones are used
_NOTE = "pyg.json"  # beside the cache's own files, which leave it alone


def _complete(
    path: str, size: int, transform_id: keys.Key | None, verify: str
) -> Cache | None:
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


def _note_of(cache: Cache, transform_id: keys.Key | None) -> dict[str, str]:
    """What says that a cache, which its fingerprint names, has what is wanted."""
    made = keys.key_maker(None, transform_id)(0, None)
    return {"fingerprint": cache.fingerprint, "key": made.hex()}


def _read_note(cache: Cache) -> Any:
    try:
        return json.loads((cache.path / _NOTE).read_bytes())
    except (OSError, ValueError):
        return None


def _write_note(cache: Cache, transform_id: keys.Key | None) -> None:
    text = json.dumps(_note_of(cache, transform_id))
    with suppress(OSError):  # a directory that only others may write to
        fresh = cache.path / f"{_NOTE}.{os.getpid()}"
        fresh.write_text(text)
        fresh.replace(cache.path / _NOTE)


class CachedDataset(Dataset):
    """A PyG dataset whose graphs are stored in a graph cache.

    As with PyG's datasets, integers give graphs, slices, lists, masks and tensors give
    datasets, `transform` is applied on access, and `dataset.y` is the concatenation of
    all graphs' y. A graph owns its tensors and may be changed. A subclass may have its
    own `get`. `trainfast.torch.pyg.DataLoader` makes batches from the file.

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

    def __getattr__(self, name: str) -> Any:
        """An attribute of all the dataset's graphs, as their batch has it: read anew
        each time."""
        own = self.__dict__  # is empty while a copy is made
        cache, kind = own.get("cache"), own.get("kind", Data)
        hetero = issubclass(kind, HeteroData)
        schema = None if cache is None or hetero else cache.schema
        field = None if schema is None else dict(zip(schema.keys, schema.fields))
        if field is None or name not in field or field[name].optional:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, nor have "
                "all its graphs"
            )
        plain = copy.copy(self)
        plain.transform = None
        graphs = plain.__getitems__(range(len(plain)))
        others = [key for key in field if key != name]
        batch = graphs.batch((), others) if isinstance(graphs, Picked) else None
        if batch is None:
            batch = Batch.from_data_list(list(graphs), exclude_keys=others)
        return batch[name]

    @property
    def num_classes(self) -> int:
        """The number of classes in the whole cache, also for a slice of the dataset;
        with a transform, in the dataset's own graphs."""
        whole = copy.copy(self)
        whole._indices = None
        y = None if self.transform is not None else getattr(whole, "y", None)
        if not isinstance(y, torch.Tensor):
            return super().num_classes
        return self._infer_num_classes(y)

    def get(self, idx: SupportsIndex) -> Any:
        """A graph of the cache, without the transform.

        Args:
            idx: its place.
        """
        place = range(len(self.cache))[idx]
        fields: tuple[int, ...] = ()
        schema = self.cache.schema
        if schema is not None and any(field.optional for field in schema.fields):
            values = self.cache._core.get(place)
            fields = tuple(i for i, value in enumerate(values) if value is not None)
        selection, assemble = self._once(("get", fields), self._make_getter, fields)
        return assemble(graph_collate(selection, [place]))

    def __getitems__(self, indices: Iterable[int]) -> Sequence[Any]:
        """The graphs of a batch; unchanged graphs are not created yet."""
        if self.transform is not None or type(self) is not CachedDataset:
            return [self[i] for i in indices]
        return Picked(self, indices)

    def batcher(self, follow: Iterable[str], exclude: Iterable[str]) -> "Batcher":
        """A function from places in the cache to their batch.

        Args:
            follow, exclude: as `follow_batch` and `exclude_keys` of PyG's DataLoader.
        """
        what = tuple(follow), tuple(exclude)
        return self._once(what, Batcher, self.cache, self.kind, *what)

    def _once(self, what: Any, make: Callable[..., Any], *given: Any) -> Any:
        self.cache._check_open()
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


class Picked(MutableSequence[Any]):
    """A list of graphs of a dataset that are created at the first access."""

    def __init__(self, dataset: CachedDataset, indices: Iterable[int]) -> None:
        self.dataset = dataset
        self.indices = indices if isinstance(indices, list) else list(indices)
        self._first: Any = None  # loaders inspect the first graph only
        self._graphs: list[Any] | None = None  # all, once another was accessed

    def __len__(self) -> int:
        return len(self.indices if self._graphs is None else self._graphs)

    def __getitem__(self, index: Any) -> Any:
        if self._graphs is not None or type(index) is not int or index:
            return self._all()[index]
        if self._first is None:
            self._first = self.dataset[self.indices[0]]
        return self._first

    def __setitem__(self, index: Any, value: Any) -> None:
        self._all()[index] = value

    def __delitem__(self, index: Any) -> None:
        del self._all()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())

    def __add__(self, other: Any) -> list[Any]:
        return self._all() + list(other)

    def __radd__(self, other: Any) -> list[Any]:
        return list(other) + self._all()

    def __mul__(self, times: int) -> list[Any]:
        return self._all() * times

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, Picked) else other)

    def __repr__(self) -> str:
        return repr(self._all())

    def insert(self, index: int, value: Any) -> None:
        self._all().insert(index, value)

    def sort(self, **options: Any) -> None:
        self._all().sort(**options)

    def copy(self) -> list[Any]:
        return self._all().copy()

    def _all(self) -> list[Any]:
        if self._graphs is None:
            self._graphs = [self.dataset[i] for i in self.indices]
            if self._first is not None:
                self._graphs[0] = self._first
        return self._graphs

    def _as_cached(self) -> bool:
        """Whether no graph can have been changed."""
        if self._graphs is not None or not self.indices:
            return False
        first = self._first
        if first is None:
            return True
        again = self.dataset[self.indices[0]]
        placed = type(first) is type(again) and _places(first) == _places(again)
        return placed and not _difference(first, again)

    def batch(
        self, follow: Iterable[str] | None, exclude: Iterable[str] | None
    ) -> Any | None:
        """The graphs' batch, made natively; None if that is not possible."""
        batcher = self.dataset.batcher(follow or (), exclude or ())
        if batcher.reason is not None or not self._as_cached():
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
        plan = plan_batches(
            schema, None, _named(schema, exclude), _named(schema, follow)
        )
        if any(schema.fields[i].optional for i in plan.fields) or _some_lack(schema):
            self.reason = "an attribute that not all graphs have"
            return
        core = cache._core
        self.selection = plan.selection(core, torch.Tensor)
        self.assemble: Callable[[GraphBatch], Any] = assembler(plan, kind)

    def __call__(self, places: Any) -> Any:
        """The batch of these graphs of the cache."""
        return self.assemble(graph_collate(self.selection, places))


def _named(schema: Schema, names: Iterable[str]) -> list[Hashable]:
    """The keys with one of these names: of every type, and of the whole graph."""
    wanted = set(names)
    return [k for k, f in zip(schema.keys, schema.fields) if f.name in wanted]


def _some_lack(schema: Schema) -> bool:
    """Whether a graph may lack all attributes of some type."""
    lacking: dict[Any, bool] = {}
    for key, field in zip(schema.keys, schema.fields):
        if isinstance(key, tuple):
            lacking[key[0]] = lacking.get(key[0], True) and field.optional
    return any(lacking.values())


def in_range(indices: Any, n: int) -> Any:
    """Indices into n graphs as the core takes them; IndexError if out of range."""
    if type(indices) is not list or {*map(type, indices)} != {int}:
        if not hasattr(indices, "__getitem__"):
            indices = list(indices)  # a set or the like
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
    """Places in the cache; raises IndexError if out of range."""
    return (np.arange(n) if places is None else places)[own]
