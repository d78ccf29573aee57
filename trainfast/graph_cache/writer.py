"""Appends graphs to a cache from a loop of one's own."""

import os
import sys
import warnings
from collections.abc import Hashable, Mapping
from contextlib import suppress
from importlib import import_module
from os import PathLike
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, SupportsIndex

from trainfast import _core
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

# What the core raises where a graph cannot be cached.
REFUSED = (ValueError, TypeError, NotImplementedError)


class Writer:
    """Appends graphs to the cache at `path`, which it makes if there is none.

    A graph is a dict of arrays (NumPy's, torch's on the CPU, whatever offers DLPack),
    Python's bool, int, float, str and bytes: {"x": ..., "edge_index": ..., "y": 3}, or
    with types {("paper", "x"): ..., (("paper", "cites", "paper"), "edge_index"): ...}.
    Also PyG's Data and HeteroData, what else has `to_dict()`, and `Counted`. Nothing of
    it is kept after `append`.

    `schema`: what the graphs look like; None: that of the cache, if it has graphs, else
    made from the first `samples` graphs and `rules` (see `Rule`). A graph whose sizes
    contradict it, or whose keys do, makes the writer go on with a more general schema
    in a new segment: a key that it lacks, or that none had before (which is worth a
    warning), is optional there. A batch takes graphs that all have it or all lack it.
    Each `commit_every` graphs, and when `commit_seconds` have passed since the last
    commit, all that was appended becomes durable: no crash loses it. `durable=False`
    leaves it to the system when to write.

    Use it as a context manager: `close` at the end; after an exception the cache has
    what was committed. A writer that is dropped without either is a ResourceWarning
    that says how many graphs are lost. Several writers, of any processes, may write one
    cache.

    Raises ValueError or TypeError that name the graph and its key, where a graph does
    not fit; nothing is written of it then, and the writer goes on. OSError: the disk
    failed or is full; what was committed is safe, the writer is of no use any more.
    """

    _closed = True  # until it is made

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
        self._core: _core.GraphWriter | None = None
        self._flattener: Any = None  # of PyG's graphs
        self._schema: Schema | None = None
        self._plain = False  # whether dicts go to the core as they are
        self._pending = 0
        self._process = os.getpid()
        self._before = 0  # graphs in segments that this writer has closed
        self._deadline = monotonic() + commit_seconds
        if has_manifest(self._path):
            _core.graph_adopt(self._path)
            schema = schema or self._schema_before()
        if schema is not None:
            self._open(schema)
        self._closed = False

    def append(self, graph: Any, key: bytes | None = None) -> None:
        """Appends a graph; `key`: 16 bytes that say what it was made from, or None."""
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
        """What is appended next looks like this; None: not known yet."""
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
        """Makes all that was appended durable; returns how many graphs that are."""
        self._check_open()
        self._take_waiting()
        if self._core is not None:
            self._core.commit()
        self._pending = 0
        self._deadline = monotonic() + self._commit_seconds
        return self.committed

    def close(self) -> None:
        """Commits, and enters the graphs into the cache. Closing twice does nothing."""
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
        """Gives up what is not committed, and enters the rest into the cache."""
        self._abandon(adopt=True)

    def _abandon(self, adopt: bool) -> None:
        """Without `adopt` the next writer enters what was committed: Ctrl-C, which may
        have ended a wait for the cache's lock, must not be followed by another."""
        if self._closed:
            return
        if self._core is not None:
            self._core.abandon()  # or raises: another thread is in it
        self._closed = True
        self._plain = False
        self._waiting.clear()
        if adopt and self._core is not None:
            _core.graph_adopt(self._path)

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
        with suppress(OSError):  # the next writer adopts what could not be entered now
            self.abandon()

    def __del__(self) -> None:
        if self._closed or self._process != os.getpid():
            return
        lost = f"{self.appended - self.committed} of {self.appended} graphs are lost"
        message = f"the writer of {self._path} must be closed, got dropped: {lost}"
        warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the writer must be open, got a closed one")
        self._check_process()

    def _check_process(self) -> None:
        """A forked child would write the graphs that wait a second time."""
        if self._process != os.getpid():
            raise RuntimeError(
                "the writer must be used by the process that made it, got a forked "
                "child"
            )

    def __reduce__(self) -> Any:
        raise TypeError("a writer cannot be pickled or copied: open another one")

    def _schema_before(self) -> Schema | None:
        """What graphs that are in the cache look like."""
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
        """Takes the schema of another writer that was faster, where they disagree:
        graphs that do not fit that one are refused, one by one."""
        try:
            self._open(schema)
        except ValueError:
            found = _core.graph_schema(self._path) if has_manifest(self._path) else None
            other = None if found is None else Schema.decode(found)
            if other is None or agrees(schema, other):
                raise
            self._open(other)

    def _append_other(self, graph: Any, key: bytes | None) -> int | None:
        """For graphs that are no plain dicts or whose counts must be found out, and as
        long as there is no schema."""
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
        """Appends a refused graph if it only lacks something that none has lacked yet,
        or has something that none had, in a new segment where that is optional. Raises
        the error else, with the graph's number before its message."""
        if self._closed:
            raise error  # it is about the writer
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
        """Goes on with what the graph lacks, and what it adds, as optional; False: it
        has just the keys that it must have."""
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
        """This writer's schema, or that of another one that has added keys to it."""
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
        """A graph as a dict; PyG's with the counts that its class says."""
        pyg: Any = sys.modules.get("torch_geometric.data")
        if pyg is None or not isinstance(graph, pyg.Data | pyg.HeteroData):
            return as_mapping(graph)
        if self._flattener is None or self._flattener.kind is not type(graph):
            rules: Any = import_module("trainfast.torch.pyg.rules")
            self._flattener = rules.Flattener([graph])
        return self._flattener(graph)

    def _rules_of(self, graphs: list[Mapping[Any, Any]]) -> dict[Hashable, Rule]:
        known = {key for graph in graphs for key in graph}
        of_pyg = {} if self._flattener is None else self._flattener.rules
        rules = {**of_pyg, **self._rules}
        return {key: rule for key, rule in rules.items() if key in known}

    def _take_waiting(self) -> None:
        """Makes the schema of the graphs that waited for it, and appends them."""
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
        """Goes on in a new segment whose schema fits `graph`, and appends it there."""
        graph = self._flat(graph)
        while misfit is not None:
            assert self._schema is not None
            self._go_on(generalise(self._schema, graph, misfit, given_counts(graph)))
            misfit = self._append_other(graph, key)

    def _go_on(self, schema: Schema) -> None:
        """Goes on in a new segment."""
        before = self._core
        assert before is not None
        self._open(schema)  # which fails before anything has changed
        before.close()
        self._before += before.committed


def as_path(path: Any) -> str:
    """A cache's path as text, absolute, so that it stays the same path when the working
    directory changes; TypeError or ValueError: it is none."""
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
    """A graph as a dict with flat keys; what has `to_dict()` is asked for it.

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
    """A graph that stays as it is though the caller writes into its arrays again."""
    copied = {}
    for key, value in graph.items():
        copy = getattr(value, "clone", None) or getattr(value, "copy", None)
        copied[key] = value if copy is None else copy()
    return Counted(copied, graph.counts) if isinstance(graph, Counted) else copied
