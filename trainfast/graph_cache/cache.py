"""Reads a graph cache, graph by graph; a Loader reads batches from it."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeAlias, overload

import numpy as np

from trainfast._core import GraphCache
from trainfast.graph_cache.schema import Schema
from trainfast.graph_cache.writer import as_path
from trainfast.report import Report, Table, one_line

Graph: TypeAlias = dict[Hashable, Any]  # arrays, str, bytes, bool, int and float
Indices: TypeAlias = slice | Sequence[int] | np.ndarray  # or a mask of bool
Counts: TypeAlias = np.ndarray | dict[Any, np.ndarray]  # by type, if there are types

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

    `with open(path) as cache:` closes it at the end; see `Cache.close`.

    Args:
        path: the cache's directory; "~" is the home.
        verify: when checksums are compared: "once" for each graph the first time that
            this process reads it, "always", or "never".
        mode: "mmap" maps the files, "pread" reads them graph by graph. None: "pread" on
            network file systems (NFS, SMB, FUSE such as gcsfuse, Lustre, Ceph, 9p and
            others), "mmap" on all others. With "mmap" a file that another program
            truncates while the cache is open kills the process by SIGBUS, without an
            exception; with "pread" it is an OSError. Writers and builds of trainfast
            are safe in both modes: they replace files and never shorten them.
        partial: opens the graphs that are committed although a build has not ended, or
            a writer is at work or was killed. Without it that is an error.

    Returns:
        The open cache, a sequence of graphs.

    Raises:
        ValueError: `path` is not a cache, or the cache is damaged or unfinished; the
            message says what can be done.
        OSError: a file cannot be read.
    """
    return Cache(path, verify, mode=mode, partial=partial)


@dataclass(frozen=True)
class Sizes:
    """The sizes of each graph, int64 [graphs], read from the index alone.

    `nodes` and `edges` are arrays, or in heterogeneous graphs dicts of them by type.
    """

    nodes: Counts
    edges: Counts
    bytes: np.ndarray  # in the file, checksums and padding included

    def total_nodes(self) -> np.ndarray:
        """Nodes of all types, int64 [graphs]."""
        return _total(self.nodes, self.bytes)

    def total_edges(self) -> np.ndarray:
        """Edges of all types, int64 [graphs]."""
        return _total(self.edges, self.bytes)

    def take(self, indices: np.ndarray) -> "Sizes":
        """The sizes of some of the graphs."""
        return Sizes(
            _take(self.nodes, indices), _take(self.edges, indices), self.bytes[indices]
        )


def _total(sizes: Counts, like: np.ndarray) -> np.ndarray:
    if not isinstance(sizes, dict):
        return np.asarray(sizes)
    total = np.zeros(like.shape, np.int64)
    for part in sizes.values():
        total += part
    return total


def _take(sizes: Counts, index: np.ndarray) -> Counts:
    if isinstance(sizes, dict):
        return {name: part[index] for name, part in sizes.items()}
    return sizes[index]


def _is_many(index: Any) -> bool:
    """False for an int and for an array of rank 0."""
    return not hasattr(index, "__index__") or bool(np.ndim(index))


class Graphs:
    """What a cache and a subset of one have in common: a sequence of graphs."""

    def __len__(self) -> int:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int | np.integer) -> Graph: ...

    @overload
    def __getitem__(self, index: Indices) -> "Subset": ...

    def __getitem__(self, index: Any) -> Any:
        """Graph `index` as a dict; a Subset for a slice, mask or array of indices."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Graph]:
        for index in range(len(self)):
            yield self[index]

    def get_many(self, indices: Indices) -> list[Graph]:
        """The graphs at some indices, as a list of dicts.

        Args:
            indices: a slice, a mask, or integers [n].

        Raises:
            IndexError: an index that there is not, or that is no integer.
        """
        return [self[index] for index in self._places(indices).tolist()]

    def _places(self, index: Any) -> np.ndarray:
        """The indices that a slice, mask or array of indices selects, int64."""
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

    Use it as a context manager, or leave closing to the garbage collector.

    `cache[i]` is graph i: an array for each field that it has (a read-only view of the
    file where it is stored as its dtype), and str, bytes, bool, int or float where the
    graph was given one. `cache[2:5]` and `cache[array]` are Subsets: nothing is copied.

    Any number of threads may read it at once, and it works on in a forked process. It
    pickles as its path and fingerprint: unpickled in another process it is opened
    again, and a cache that has changed since is an error.

    Args:
        path, verify, mode, partial: as in `trainfast.graph_cache.open`.
    """

    _opened: GraphCache | None = None  # until it is made

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
        self._opened = GraphCache(
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
    def _core(self) -> GraphCache:
        if self._opened is None:
            _raise_closed(self.path)
        return self._opened

    @property
    def closed(self) -> bool:
        """Whether the cache was closed."""
        return self._opened is None

    def close(self) -> None:
        """Closes the files. Closing twice does nothing.

        Afterwards ValueError is raised when a graph is read, an iteration of a loader
        begins or the cache is pickled. Arrays that were read before stay valid, and
        iterations that have begun continue: each keeps the files that it needs open.
        """
        self._opened = None
        self._get = partial(_raise_closed, self.path)

    def _check_open(self) -> None:
        if self._opened is None:
            _raise_closed(self.path)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

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
        """One of the schema's counts for each graph, int64 [graphs].

        Args:
            place: the count's place in `schema.counts`; -1: the bytes in the file.
        """
        counts = np.asarray(self._core.counts(place))
        counts.flags.writeable = False
        return counts

    def _by_type(self, places: Mapping[Any, int]) -> Counts:
        """Counts by type; an array if the graphs have no types."""
        counts = {name: self.counts(place) for name, place in places.items()}
        if not counts and (self.schema is None or not self.schema.nodes.keys() - {""}):
            return np.zeros(self._len, np.int64)
        return counts[""] if list(counts) == [""] else counts

    def __len__(self) -> int:
        return self._len

    @overload
    def __getitem__(self, index: int | np.integer) -> Graph: ...

    @overload
    def __getitem__(self, index: Indices) -> "Subset": ...

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
        """Reads all graphs and checks checksums, sizes, indices, text and padding.

        Args:
            values: also checks that floating-point values are finite.

        Returns:
            A report that lists the damaged graphs; it is true if there are none.
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
        core, state = self._opened, vars(self)
        return one_line(
            self,
            path=state.get("path"),
            graphs=state.get("_len"),
            fields=None if core is None else len(self._keys),
            bytes=None if core is None else core.file_bytes,
            closed=True if core is None else None,
        )


def _raise_closed(path: Path, place: int = 0) -> NoReturn:
    raise ValueError(f"the cache at {path} is closed; open it again with open()")


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

    A subset can be indexed, sliced and given to a Loader as the cache can.

    Args:
        cache: the cache.
        indices: which graphs, integers [n]; negative ones count from the end. The
            attribute `indices` has them as int64 from 0 on.

    Raises:
        IndexError: an index that the cache lacks, or that is no integer.
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

    @overload
    def __getitem__(self, index: int | np.integer) -> Graph: ...

    @overload
    def __getitem__(self, index: Indices) -> "Subset": ...

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
        state = vars(self)
        indices, cache = state.get("indices"), state.get("cache")
        return one_line(
            self,
            graphs=None if indices is None else len(indices),
            path=None if cache is None else cache.path,
        )


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
