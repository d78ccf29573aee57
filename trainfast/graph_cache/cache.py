"""Reading a graph cache: graph by graph, or as what a Loader takes its batches from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from trainfast._core import GraphCache
from trainfast.graph_cache.schema import Schema
from trainfast.graph_cache.writer import as_path
from trainfast.report import Report, Table

VERIFY = {"never": 0, "once": 1, "always": 2}
MODES = ("mmap", "pread")


def open(
    path: str | PathLike[str],
    verify: str = "once",
    *,
    mode: str | None = None,
    partial: bool = False,
) -> "Cache":
    """Opens the graph cache in the directory `path` for reading.

    verify: when checksums are compared: "once" for each graph the first time that this
    process reads it, "always", or "never".
    mode: "mmap" maps the files, "pread" reads them graph by graph. None: "pread" on
    network file systems (NFS, SMB, FUSE such as gcsfuse, Lustre, Ceph, 9p and others),
    "mmap" on all others. With "mmap" a file that is cut short while the cache is open
    kills the process by SIGBUS, without an exception; with "pread" it is an OSError.
    A cache that is written again beside its readers is safe in both: files are
    replaced, never shortened.
    partial: opens what is sealed although a build has not ended or a writer still
    lives or was killed; without it that is an error.

    Raises ValueError for what is not a cache, is damaged or unfinished (the message
    says what can be done), OSError for what cannot be read.
    """
    return Cache(path, verify, mode=mode, partial=partial)


@dataclass(frozen=True)
class Sizes:
    """How big each graph is, int64 [graphs], from the index alone.

    `nodes` and `edges` are arrays, or in heterogeneous graphs dicts of them by type.
    """

    nodes: Any
    edges: Any
    bytes: np.ndarray  # in the file, checksums and padding included

    def total_nodes(self) -> np.ndarray:
        """Nodes of all types, int64 [graphs]."""
        return _total(self.nodes, self.bytes)

    def total_edges(self) -> np.ndarray:
        """Edges of all types, int64 [graphs]."""
        return _total(self.edges, self.bytes)

    def take(self, indices: Any) -> "Sizes":
        """The sizes of some of the graphs."""
        return Sizes(
            _take(self.nodes, indices), _take(self.edges, indices), self.bytes[indices]
        )


def _total(sizes: Any, like: np.ndarray) -> np.ndarray:
    if not isinstance(sizes, dict):
        return np.asarray(sizes)
    total = np.zeros(like.shape, np.int64)
    for part in sizes.values():
        total += part
    return total


def _take(sizes: Any, index: Any) -> Any:
    if isinstance(sizes, dict):
        return {name: part[index] for name, part in sizes.items()}
    return sizes[index]


def _is_many(index: Any) -> bool:
    """False for one number: an int, or an array of rank 0."""
    return not hasattr(index, "__index__") or bool(np.ndim(index))


class Graphs:
    """What a cache and a subset of one have in common: a sequence of graphs."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        """Graph `index` as a dict; a Subset for a slice, mask or array of indices."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[Any, Any]]:
        for index in range(len(self)):
            yield self[index]

    def get_many(self, indices: Any) -> list[dict[Any, Any]]:
        """The graphs at these indices, as a list of dicts."""
        return [self[index] for index in self._places(indices).tolist()]

    def _places(self, index: Any) -> np.ndarray:
        """What a slice, mask or array of indices selects, int64."""
        if isinstance(index, slice):
            return np.arange(len(self), dtype=np.int64)[index]
        index = np.asarray(index)
        if index.ndim != 1:
            kinds = "an integer, a slice, a mask, or one row of integers"
            got = f"shape {index.shape}" if index.ndim else repr(index.item())
            raise IndexError(f"index must be {kinds}, got {got}")
        if index.dtype == bool:
            if len(index) != len(self):
                raise IndexError(
                    f"mask must have {len(self)} elements, got {len(index)}"
                )
            return np.flatnonzero(index)
        if index.size and index.dtype.kind not in "iu":
            raise IndexError(f"indices must be integers, got {index.dtype}")
        wrong = (index < -len(self)) | (index >= len(self))
        if wrong.any():
            raise IndexError(
                f"index must be in {-len(self)} .. {len(self) - 1}, got "
                f"{index[wrong][0]}"
            )
        index = index.astype(np.int64)  # not before: uint64 would wrap
        return np.where(index < 0, index + len(self), index)


class Cache(Graphs):
    """An open graph cache: a sequence of dicts of NumPy arrays.

    `cache[i]` is graph i: an array for each field that it has (a read-only view of the
    file where it is stored as its dtype), and str, bytes, bool, int or float where the
    graph was given one. `cache[2:5]` and `cache[array]` are Subsets: nothing is copied.

    Any number of threads may read it at once, and it works on in a forked process. It
    pickles as its path and fingerprint: unpickled in another process it is opened
    again, and a cache that has changed since is an error.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        verify: str = "once",
        *,
        mode: str | None = None,
        partial: bool = False,
    ) -> None:
        if verify not in VERIFY:
            raise ValueError(f"verify must be one of {list(VERIFY)}, got {verify!r}")
        if mode not in (None, *MODES):
            raise ValueError(f"mode must be one of {list(MODES)}, got {mode!r}")
        self.path = Path(as_path(path))
        self._options = {"verify": verify, "mode": mode, "partial": partial}
        self._core = GraphCache(
            str(self.path),
            verify=VERIFY[verify],
            pread=None if mode is None else mode == "pread",
            partial=bool(partial),
        )
        encoded = self._core.schema
        self.schema = None if encoded is None else Schema.decode(encoded)
        self._get = self._core.get
        self._len = len(self._core)
        fields = () if self.schema is None else self.schema.fields
        self._keys = () if self.schema is None else self.schema.keys
        self._optional = [
            key for key, field in zip(self._keys, fields) if field.optional
        ]

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that change whenever the cache does."""
        return self._core.fingerprint.hex()

    @property
    def mode(self) -> str:
        """How files are read: "mmap" or "pread"."""
        return MODES[self._core.pread]

    @cached_property
    def sizes(self) -> Sizes:
        """How many nodes, edges and bytes each graph has."""
        schema = self.schema
        return Sizes(
            self._by_type(schema.nodes if schema else {}),
            self._by_type(schema.edges if schema else {}),
            self.counts(-1),
        )

    def counts(self, place: int) -> np.ndarray:
        """One of the schema's counts for each graph, int64 [graphs]."""
        counts = np.asarray(self._core.counts(place))
        counts.flags.writeable = False
        return counts

    def _by_type(self, places: dict[Any, int]) -> Any:
        """By type, or an array where there are no types."""
        counts = {name: self.counts(place) for name, place in places.items()}
        if not counts and (self.schema is None or not self.schema.nodes.keys() - {""}):
            return np.zeros(self._len, np.int64)
        return counts[""] if list(counts) == [""] else counts

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            if _is_many(index):
                return Subset(self, self._places(index))
            index = index.__index__()
        place = index + self._len if index < 0 else index
        if not 0 <= place < self._len:
            raise IndexError(
                f"index must be in {-self._len} .. {self._len - 1}, got {index}"
            )
        graph = dict(zip(self._keys, self._get(place)))
        if self._optional:
            for key in self._optional:
                if graph[key] is None:
                    del graph[key]
        return graph

    def verify(self, *, values: bool = False) -> "VerifyReport":
        """Checks everything: checksums, sizes, indices, text, what lies between.

        values: also that floating-point values are finite. The report lists the
        damaged graphs; it is true when there are none.
        """
        from time import perf_counter

        start = perf_counter()
        damaged = self._core.verify(0, self._len, values)
        seconds = perf_counter() - start
        return VerifyReport(
            str(self.path), self._len, self._core.file_bytes, seconds, damaged
        )

    def __reduce__(self) -> Any:
        return _reopen, (str(self.path.absolute()), self.fingerprint, self._options)

    def __repr__(self) -> str:
        return (
            f"<graph cache {str(self.path)!r}: {self._len} graphs, "
            f"{len(self._keys)} fields, {self._core.file_bytes} bytes>"
        )


def _reopen(path: str, fingerprint: str, options: dict[str, Any]) -> Cache:
    cache = Cache(path, **options)
    if cache.fingerprint != fingerprint:
        raise ValueError(
            f"the cache at {path} must be the one that was pickled ({fingerprint}), "
            f"got {cache.fingerprint}: it has changed since"
        )
    return cache


class Subset(Graphs):
    """Some graphs of a cache, in an order of their own; a view, like a slice.

    `indices` says which, as int64. It can be indexed, sliced and given to a Loader as
    the cache can.
    """

    def __init__(self, cache: Cache, indices: Sequence[int] | np.ndarray) -> None:
        self.cache = cache
        self.indices = np.ascontiguousarray(cache._places(indices))
        self.indices.flags.writeable = False

    @property
    def schema(self) -> Schema | None:
        return self.cache.schema

    @property
    def sizes(self) -> Sizes:
        return self.cache.sizes.take(self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            if _is_many(index):
                return Subset(self.cache, self.indices[self._places(index)])
            index = index.__index__()
        if not -len(self.indices) <= index < len(self.indices):
            raise IndexError(
                f"index must be in {-len(self)} .. {len(self) - 1}, got {index}"
            )
        return self.cache[int(self.indices[index])]

    def __reduce__(self) -> Any:
        return Subset, (self.cache, self.indices)

    def __repr__(self) -> str:
        return f"<{len(self)} graphs of {self.cache!r}>"


class VerifyReport(Report):
    """What `Cache.verify` found: `damaged` is a list of (graph, message).

    Graph -1 stands for what lies between the graphs.
    """

    def __init__(
        self,
        path: str,
        graphs: int,
        file_bytes: int,
        seconds: float,
        damaged: list[tuple[int, str]],
    ) -> None:
        self.path = path
        self.graphs = graphs
        self.bytes = file_bytes
        self.seconds = seconds
        self.damaged = damaged

    @property
    def ok(self) -> bool:
        return not self.damaged

    def __bool__(self) -> bool:
        return self.ok

    def tables(self) -> list[Table]:
        rate = self.bytes / 1e9 / max(self.seconds, 1e-9)
        title = f"{self.path}: {self.graphs} graphs checked at {rate:.2f} GB/s"
        return [Table(title, ("graph", "damage"), list(self.damaged), "all intact")]

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "graphs": self.graphs,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "ok": self.ok,
            "damaged": [{"graph": i, "message": text} for i, text in self.damaged],
        }
