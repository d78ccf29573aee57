"""Appends graphs to a cache, one by one."""

import os
import sys
import warnings
from collections.abc import Hashable, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, SupportsIndex

from trainfast import _core, adapters
from trainfast.graph_cache.fit import (
    Counter,
    agrees,
    check_indices,
    generalise,
    with_late,
    without,
)
from trainfast.graph_cache.infer import infer
from trainfast.graph_cache.schema import Counted, Rule, Schema
from trainfast.report import attributes, one_line

# What the core raises where a graph cannot be cached.
REFUSED = (ValueError, TypeError, NotImplementedError)


class Writer:
    """Appends graphs to the cache at `path`, and creates the cache if there is none.

    A graph is a dict of arrays (NumPy's, torch's on the CPU, any that export DLPack),
    Python's bool, int, float, str and bytes: {"x": ..., "edge_index": ..., "y": 3}, or
    with types {("paper", "x"): ..., (("paper", "cites", "paper"), "edge_index"): ...}.
    PyG's Data and HeteroData, other objects with `to_dict()`, and `Counted` are graphs,
    too. The writer keeps no reference to a graph after `append`.

    A graph whose sizes or keys contradict the schema makes the writer continue with a
    more general schema in a new segment. A key that this graph lacks is optional there.
    So is a key that no graph had before, with a warning. All graphs of a batch must
    have an optional key, or all must lack it.

    Use it as a context manager: it closes the writer at the end; after an exception the
    cache has the committed graphs. A writer that is garbage-collected without `close`
    emits a ResourceWarning with the number of lost graphs. Several writers, of any
    processes, may write one cache.

    Args:
        path: the cache's directory; "~" is the home.
        schema: what the graphs look like. None: the cache's schema if it has graphs,
            else made from the first `samples` graphs and `rules`.
        rules: by key how graphs are batched; see `Rule`.
        durable: syncs each commit to the disk. False leaves it to the system when to
            write: until it has, a loss of power may take the whole cache, with what is
            committed to it later.
        commit_every: graphs after which all that was appended is committed. No crash
            loses a committed graph.
        commit_seconds: seconds since the last commit after which the next append
            commits.
        samples: graphs that the schema is made from.

    Raises:
        ValueError, TypeError: an argument, or a graph that does not fit: the message
            names the graph and its key. Nothing of that graph is written, and the
            writer can be used further.
        OSError: the disk failed or is full. Committed graphs are safe; the writer
            cannot be used any more.
    """

    _closed = True  # until it is made
    _core: "_core.GraphWriter | None" = None
    _before = 0  # graphs in segments that this writer has closed

    def __init__(
        self,
        path: str | PathLike[str],
        schema: Schema | None = None,
        *,
        rules: Mapping[Hashable, Rule] | None = None,
        durable: bool = True,
        commit_every: int = 256,
        commit_seconds: float = 2.0,
        samples: int = 8,
    ) -> None:
        for name, number in (("commit_every", commit_every), ("samples", samples)):
            if not isinstance(number, SupportsIndex):
                raise TypeError(f"{name} must be an integer, got {number!r}")
            if number.__index__() < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if schema is not None and not isinstance(schema, Schema):
            raise TypeError(f"schema must be a Schema or None, got {schema!r}")
        for key, rule in () if rules is None else rules.items():
            if not isinstance(rule, Rule):
                raise TypeError(f"rules[{key!r}] must be a Rule, got {rule!r}")
        if not commit_seconds > 0:
            raise ValueError(f"commit_seconds must be positive, got {commit_seconds}")
        self._path = as_path(path)
        self._rules = {} if rules is None else rules
        self._durable = durable
        self._commit_every = commit_every
        self._commit_seconds = commit_seconds
        self._samples = samples
        self._waiting: list[tuple[Mapping[Any, Any], bytes | None]] = []
        self._flattener: Any = None  # of PyG's graphs
        self._schema: Schema | None = None
        self._plain = False  # whether dicts go to the core as they are
        self._pending = 0
        self._process = os.getpid()
        self._deadline = monotonic() + commit_seconds
        if has_manifest(self._path):
            _core.graph_adopt(self._path)
            schema = schema or self._schema_before()
        if schema is not None:
            self._open(schema)
        self._closed = False

    def append(self, graph: Any, key: bytes | None = None) -> None:
        """Appends a graph.

        Args:
            graph: a dict, PyG's Data or HeteroData, or another object with `to_dict()`.
            key: 16 bytes that identify what the graph was made from, or None.
        """
        try:
            if self._plain and type(graph) is dict:
                misfit = self._append(graph, key)
            else:
                misfit = self._append_other(graph, key)
            if misfit is not None:
                self._widen(graph, key, misfit)
        except REFUSED as error:
            self._append_refused(graph, key, error)
        if len(self._waiting) >= self._samples:
            self._take_waiting()
        self._pending += 1
        if self._pending >= self._commit_every or monotonic() >= self._deadline:
            self.commit()

    @property
    def schema(self) -> Schema | None:
        """The schema of the next graph; None: not known yet."""
        return self._schema

    @property
    def appended(self) -> int:
        """Graphs appended so far."""
        core = self._core
        return self._before + len(self._waiting) + (core.appended if core else 0)

    @property
    def committed(self) -> int:
        """Graphs that no crash can lose."""
        return self._before + (self._core.committed if self._core else 0)

    def commit(self) -> int:
        """Makes all appended graphs durable; returns their number."""
        self._check_open()
        self._take_waiting()
        if self._core is not None:
            self._core.commit()
        self._pending = 0
        self._deadline = monotonic() + self._commit_seconds
        return self.committed

    def close(self) -> None:
        """Commits, and adds the graphs to the cache. Closing twice does nothing."""
        if self._closed:
            return
        self._check_process()
        try:
            self._take_waiting()
            if self._core is not None:
                self._core.close()
            elif not has_manifest(self._path):
                _core.graph_build_begin(self._path)  # a cache without graphs
                _core.graph_build_end(self._path, None)
        except BaseException as error:
            if type(error) is not RuntimeError:  # another thread is in it
                with suppress(OSError):
                    self._abandon(adopt=isinstance(error, Exception))
            raise
        self._closed = True
        self._plain = False

    def abandon(self) -> None:
        """Drops the graphs that are not committed, and adds the others to the cache."""
        self._abandon(adopt=True)

    def _abandon(self, adopt: bool) -> None:
        """Without `adopt` the next writer adds the committed graphs to the cache.
        Ctrl-C may have ended a wait for the cache's lock: this must not wait again."""
        if self._closed:
            return
        if self._core is not None:
            self._core.abandon()  # or raises: another thread is in it
        self._closed = True
        self._plain = False
        self._waiting.clear()
        if adopt and self._core is not None:
            _core.graph_adopt(self._path)

    def __repr__(self) -> str:
        made = "_waiting" in vars(self)
        return one_line(
            self,
            **attributes(self, "_path"),
            appended=self.appended if made else None,
            committed=self.committed if made else None,
            **attributes(self, "_closed"),
        )

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        with suppress(OSError):  # the next writer adopts what could not be added now
            self.abandon()

    def __del__(self) -> None:
        if self._closed or self._process != os.getpid():
            return
        lost = f"{self.appended - self.committed} of {self.appended} graphs were lost"
        message = f"Writer of {self._path} was garbage-collected without close(): "
        message += f"{lost}; use `with Writer(...)`"
        warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the writer is closed; open another Writer")
        self._check_process()

    def _check_process(self) -> None:
        """A forked child would write the waiting graphs a second time."""
        if self._process != os.getpid():
            raise RuntimeError(
                "the writer belongs to the process that opened it, got a forked child; "
                "open a Writer in each process"
            )

    def __reduce__(self) -> Any:
        raise TypeError("a writer cannot be pickled or copied: open another one")

    def _schema_before(self) -> Schema | None:
        """The schema of the graphs that are in the cache."""
        return schema_of(self._path)

    def _open(self, schema: Schema) -> None:
        Path(self._path).absolute().parent.mkdir(parents=True, exist_ok=True)
        self._core = _core.GraphWriter(
            self._path, schema.encode(), schema.keys, durable=self._durable
        )
        self._append = self._core.append
        self._schema = schema
        self._counter = Counter(schema)
        self._plain = not self._counter.needed

    def _open_first(self, schema: Schema) -> None:
        """Opens the first segment. If another writer has set another schema meanwhile,
        takes that one; graphs that do not fit it are refused one by one."""
        try:
            self._open(schema)
        except ValueError:
            found = _core.graph_schema(self._path) if has_manifest(self._path) else None
            other = None if found is None else Schema.decode(found)
            if other is None or agrees(schema, other):
                raise
            self._open(other)

    def _append_other(self, graph: Any, key: bytes | None) -> int | None:
        """Appends a graph that is not a plain dict, whose counts must be computed, or
        that comes before there is a schema."""
        self._check_open()
        graph = self._flat(graph)
        if self._core is None:
            self._wait(graph, key)
            return None
        if not self._counter.needed and type(graph) is dict:
            return self._append(graph, key)
        counts = self._counter.counts(graph, given_counts(graph))
        return self._append(graph, key, counts)

    def _append_refused(self, graph: Any, key: bytes | None, error: Exception) -> None:
        """Appends a refused graph if only its keys differ from all graphs before: in a
        new segment where these keys are optional. Otherwise raises the error with the
        graph's number before its message."""
        if self._closed:
            raise error  # about the writer, not the graph
        if not isinstance(error, ValueError) or self._core is None:
            raise _numbered(error, self.appended) from error
        try:
            graph = self._flat(graph)
            if not self._open_for_keys(graph):
                raise error
            self._widen(graph, key, self._append_other(graph, key))
        except REFUSED as other:
            raise _numbered(other, self.appended) from other

    def _open_for_keys(self, graph: Mapping[Any, Any]) -> bool:
        """Continues in a segment where the keys that the graph lacks or adds are
        optional. Returns False if the graph has exactly the required keys."""
        while True:
            assert self._schema is not None
            base = self._widest()
            wider = without(base, graph)
            late = [key for key in graph if key not in base.keys]
            if late:
                wider = with_late(wider, graph, self._rules_of([graph]))
            if wider == self._schema:
                return False
            try:
                self._go_on(wider)
            except ValueError:
                if agrees(wider, self._widest()):
                    raise
                continue  # another writer had other new keys meanwhile
            if late:
                names = ", ".join(map(repr, late))
                message = f"graph {self.appended} is the first with {names}: optional, "
                message += "and no batch can have it from some of its graphs only; if "
                message += "all should have it, make them again (build: transform_id)"
                warnings.warn(message, stacklevel=4)
            return True

    def _widest(self) -> Schema:
        """This writer's schema, or that of another writer that has added keys to it."""
        assert self._schema is not None
        found = _core.graph_schema(self._path)
        other = self._schema if found is None else Schema.decode(found)
        longer = len(other.fields) > len(self._schema.fields)
        return other if longer else self._schema

    def _wait(self, graph: Mapping[Any, Any], key: bytes | None) -> None:
        if key is not None and (type(key) is not bytes or len(key) != 16):
            raise ValueError(f"key must be 16 bytes, got {key!r}")
        graphs = [*(graph for graph, _ in self._waiting), graph]
        schema = infer(graphs, self._rules_of(graphs))
        check_indices(schema, graph, given_counts(graph))
        self._waiting.append((_copy(graph), key))

    def _flat(self, graph: Any) -> Mapping[Any, Any]:
        """A graph as a dict; a PyG graph with the counts that its class defines."""
        pyg: Any = sys.modules.get("torch_geometric.data")
        if pyg is None or not isinstance(graph, pyg.Data | pyg.HeteroData):
            return as_mapping(graph)
        if self._flattener is None or self._flattener.kind is not type(graph):
            self._flattener = adapters.load("pyg").Flattener([graph])
        return self._flattener(graph)

    def _rules_of(self, graphs: list[Mapping[Any, Any]]) -> dict[Hashable, Rule]:
        known = {key for graph in graphs for key in graph}
        of_pyg = {} if self._flattener is None else self._flattener.rules
        rules = {**of_pyg, **self._rules}
        return {key: rule for key, rule in rules.items() if key in known}

    def _take_waiting(self) -> None:
        """Makes the schema of the waiting graphs, and appends them."""
        if not self._waiting:
            return
        graphs = [graph for graph, _ in self._waiting]
        rules = self._rules_of(graphs)
        unknown = ", ".join(repr(key) for key in self._rules if key not in rules)
        if unknown:
            message = f"rules for keys that the first graphs do not have: {unknown}"
            warnings.warn(message, stacklevel=3)
        self._open_first(infer(graphs, rules))
        waiting, self._waiting = self._waiting, []
        failed = None
        for graph, key in waiting:
            try:
                misfit = self._append_other(graph, key)
                if misfit is not None:
                    self._widen(graph, key, misfit)
            except REFUSED as error:
                try:
                    self._append_refused(graph, key, error)
                except REFUSED as other:
                    failed = failed or other
        if failed is not None:
            raise failed

    def _widen(self, graph: Any, key: bytes | None, misfit: int | None) -> None:
        """Continues in a new segment whose schema fits `graph`; appends the graph."""
        graph = self._flat(graph)
        while misfit is not None:
            assert self._schema is not None
            self._go_on(generalise(self._schema, graph, misfit, given_counts(graph)))
            misfit = self._append_other(graph, key)

    def _go_on(self, schema: Schema) -> None:
        """Continues in a new segment."""
        before = self._core
        assert before is not None
        self._open(schema)  # if this fails, nothing has changed
        before.close()
        self._before += before.committed


def as_path(path: Any) -> str:
    """A cache's path as text, absolute: it stays valid when the working directory
    changes. Raises TypeError or ValueError."""
    try:
        text = os.fsdecode(path)
    except TypeError:
        rule = "path must be a str, bytes or os.PathLike"
        raise TypeError(f"{rule}, got {path!r}") from None
    if not text or "\0" in text:
        raise ValueError(f"path must have characters and no zeros, got {path!r}")
    return str(Path(os.path.expanduser(text)).absolute())


def has_manifest(path: str) -> bool:
    return (Path(path) / "manifest").is_file()


def schema_of(path: str) -> Schema | None:
    """The schema of the graphs in the cache at `path`; None: it has none."""
    data = _core.GraphCache(path, partial=True).schema
    return None if data is None else Schema.decode(data)


def as_mapping(graph: Any) -> Mapping[Any, Any]:
    """A graph as a dict with flat keys, by its `to_dict()` if it is not a mapping.

    {"paper": {"x": ...}} becomes {("paper", "x"): ...}.
    """
    if isinstance(graph, Mapping):
        return graph
    if not hasattr(graph, "to_dict"):
        kind = type(graph).__name__
        raise TypeError(f"a graph must be a dict or have to_dict(), got {kind}")
    flat: dict[Any, Any] = {}
    for key, value in graph.to_dict().items():
        if key == "_global_store":  # of PyG's HeteroData: what no type has
            flat |= value
        elif isinstance(value, Mapping):
            flat |= {(key, name): inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


def given_counts(graph: Mapping[Any, Any]) -> Mapping[tuple[Any, ...], int]:
    return graph.counts if isinstance(graph, Counted) else {}


def _numbered(error: Exception, number: int) -> Exception:
    kind = next(kind for kind in REFUSED if isinstance(error, kind))
    return kind(f"graph {number}: {error}")


def _copy(graph: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """A copy: the caller may reuse the graph's arrays."""
    copied = {}
    for key, value in graph.items():
        copy = getattr(value, "clone", None) or getattr(value, "copy", None)
        copied[key] = value if copy is None else copy()
    return Counted(copied, graph.counts) if isinstance(graph, Counted) else copied
