"""Builds a cache from inputs: what it has already is not made again."""

import errno
import fcntl
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, SupportsIndex

import numpy as np

from trainfast import _core
from trainfast.graph_cache import keys
from trainfast.graph_cache.executor import make_by_executor
from trainfast.graph_cache.fit import agrees
from trainfast.graph_cache.job import BuildError, Job, Todo
from trainfast.graph_cache.origin import StaleCacheError
from trainfast.graph_cache.progress import Progress
from trainfast.graph_cache.reuse import Reuse, Source
from trainfast.graph_cache.schema import Rule, Schema
from trainfast.graph_cache.workers import make_in_processes
from trainfast.graph_cache.writer import as_path, has_manifest, schema_of
from trainfast.report import Report, Table

__all__ = ["BuildError", "BuildReport", "StaleCacheError", "build"]


def build(
    path: str | os.PathLike[str],
    inputs: Iterable[Any],
    make: Callable[[Any], Any] | None = None,
    *,
    key: Callable[[Any], keys.Key] | None = None,
    transform_id: keys.Key | None = None,
    workers: int = 0,
    executor: Any = None,
    progress: bool = True,
    rebuild: bool | None = None,
    rules: Mapping[Hashable, Rule] | None = None,
    commit_every: int = 256,
    commit_seconds: float = 2.0,
    samples: int = 8,
) -> "BuildReport":
    """Makes the cache at `path` hold `make(input)` for each of `inputs`, in order.

    `make` runs only for inputs whose (`key(input)`, `transform_id`) the cache lacks.
    Graphs whose input is gone are removed from the cache.

    Before stored graphs are reused, what made them is compared with what would make
    them now: the code of `make`, its constants, defaults and closure values, and the
    functions, classes and values of your own modules that it refers to; the content of
    up to 17 inputs; and 3 graphs, which are made again (where the inputs are graphs up
    to 16, within a quarter of a second). A difference raises StaleCacheError. What
    cannot be compared is a warning. If only the version of Python differs, the graphs
    that are made again decide.

    A killed build resumes when it is run again: only the graphs since its last commit
    (`commit_every` graphs or `commit_seconds`) are lost. Until a build has ended the
    cache does not open. A killed build with `rebuild=True` resumes without `rebuild`.

    Graphs that are made later may differ in their sizes from those in the cache, and in
    their keys (see `Writer`). They may differ in more if no stored graph is wanted any
    more.

    Args:
        path: the cache's directory, created if it does not exist; "~" is the home.
        inputs: what graphs are made from; iterated over once.
        make: a function that returns the graph of an input (see `Writer`). None: the
            inputs are graphs.
        key: a function that returns an input's key: str, bytes, int or a tuple of them.
            None: an input's position is its key.
        transform_id: str, bytes, int or a tuple of them that names what `make` does.
            Change it when `make` has changed: all graphs are then made again. With it,
            code is not compared, and no graph is made for comparison. A `make` that
            draws random numbers needs it for its graphs to be reused.
        workers: processes that make graphs. Inputs and `make` are sent to them, so with
            the start method "spawn" they must pickle. The first few graphs are made in
            this process.
        executor: a `concurrent.futures.Executor` whose tasks make the graphs, in place
            of `workers`; of several machines, if `path` is on storage that they share.
            `make` and inputs must pickle. It is not shut down.
        progress: shows a bar with rate and remaining time (needs tqdm).
        rebuild: True makes all graphs again. False keeps the stored graphs where only
            code has changed and the graphs that are made again are the same.
        rules: by key how graphs are batched; see `Rule`.
        commit_every, commit_seconds: graphs, and seconds, after which the graphs made
            so far are committed.
        samples: graphs that the schema is made from.

    Returns:
        A report of how many graphs were made, reused and dropped.

    Raises:
        StaleCacheError: a ValueError; the cache was made by other code or from other
            inputs. Raised before a graph is made, unless `inputs` can only be iterated
            over.
        BuildError: `make` failed (its error is the cause), or a worker died.
        ValueError, TypeError: a graph that cannot be cached.
        OSError: the disk is full, or another build of this cache runs.
        What was made before is kept in all cases, also after Ctrl-C.
    """
    _check_arguments(inputs, make, key, workers, executor)
    sequence: Any = inputs if _is_sequence(inputs) else None
    given = make is None
    sent = executor is not None and isinstance(inputs, list | tuple)
    if make is None and key is None and sequence is not None and not sent:
        # The workers get the graphs by themselves, and only those that are missing.
        # An executor would get a whole list with each task.
        make, inputs = sequence.__getitem__, range(len(sequence))
    job = Job(
        as_path(path),
        make,
        {} if rules is None else rules,
        commit_every=commit_every,
        commit_seconds=commit_seconds,
        samples=samples,
    )
    named = transform_id is not None
    functions = {} if given or named else {"make": make}
    source = Source(functions, named=named, given=given)
    return run(
        job, inputs, source, key, transform_id, workers, rebuild, progress, executor
    )


def run(
    job: Job,
    inputs: Any,
    source: Source,
    key: Callable[[Any], keys.Key] | None,
    transform_id: keys.Key | None,
    workers: int,
    rebuild: bool | None,
    progress: bool,
    executor: Any = None,
) -> "BuildReport":
    """Runs a build whose graphs come from `source`."""
    name = keys.name_of(transform_id)
    with _only_builder(job.path):
        reuse = Reuse(job, source, name, rebuild)

        def key_maker() -> Callable[[int, Any], bytes]:
            return keys.key_maker(key, transform_id, reuse.now.salt)

        try:
            one = _Build(job, key_maker, key is not None, workers, executor, reuse)
            return one.run(inputs, progress)
        except KeyboardInterrupt as error:
            error.add_note("What was made is kept; the next build goes on from there.")
            raise


def _check_arguments(
    inputs: Any, make: Any, key: Any, workers: Any, executor: Any
) -> None:
    if not isinstance(workers, SupportsIndex):
        raise TypeError(f"workers must be an integer, got {workers!r}")
    if workers.__index__() < 0:
        raise ValueError(f"workers must be at least 0, got {workers}")
    if executor is not None and not callable(getattr(executor, "submit", None)):
        rule = "executor must have submit(), as a concurrent.futures.Executor has"
        raise TypeError(f"{rule}, got {executor!r}")
    if executor is not None and workers:
        raise ValueError("`workers` cannot be combined with `executor`; pass one")
    if not hasattr(inputs, "__iter__") and not hasattr(inputs, "__getitem__"):
        raise TypeError(f"inputs must be iterable, got {type(inputs).__name__}")
    for name, function in (("make", make), ("key", key)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable, got {type(function).__name__}")


@dataclass(repr=False)
class BuildReport(Report):
    """What a build did."""

    path: str
    graphs: int  # in the cache now
    made: int
    reused: int  # were in the cache, or left by a build that was killed
    dropped: int  # were in the cache, and are not any more
    seconds: float
    bytes: int  # of the cache's files

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def tables(self) -> list[Table]:
        rows = [(name, value) for name, value in vars(self).items() if name != "path"]
        return [Table(self.path, ("what", "value"), rows)]


@dataclass
class _Build:
    """One run: which graphs there are, which are wanted, which are to be made."""

    job: Job
    key_maker: Callable[[], Callable[[int, Any], bytes]]
    has_key: bool  # of the user's own
    workers: int
    executor: Any
    reuse: Reuse
    key_of: Callable[[int, Any], bytes] = field(init=False)
    keys: list[bytes] | None = None  # of all inputs, where they are known beforehand
    wanted: bytearray = field(default_factory=bytearray)  # keys, in order
    begun: bool = False
    reused: int = 0

    def run(self, inputs: Iterable[Any], progress: bool) -> BuildReport:
        start = perf_counter()
        path = self.job.path
        old = self._old_keys()
        have = Counter(_split(old))
        total = len(inputs) if isinstance(inputs, Sized) else None
        self.key_of = self.key_maker()
        try:
            fresh = not self._may_reuse(inputs, have)
            with Progress(progress, total) as bar:
                made = self._make(self._todo(inputs, have, bar), fresh, bar)
            wanted = bytes(self.wanted)
            if wanted != old or self.begun or not has_manifest(path):
                self._begin()
                _core.graph_build_end(path, self._order(wanted))
        except BaseException:
            self.reuse.failed()
            raise
        self.reuse.end(self.begun)
        return BuildReport(
            path=path,
            graphs=len(wanted) // keys.SIZE,
            made=made,
            reused=self.reused,
            dropped=max(0, len(old) // keys.SIZE - self.reused),
            seconds=perf_counter() - start,
            bytes=_core.GraphCache(path, partial=True).file_bytes,
        )

    def _old_keys(self) -> bytes:
        """The keys of the graphs in the cache, and of those that killed builds left."""
        if not has_manifest(self.job.path):
            return b""
        try:
            _core.graph_adopt(self.job.path)
        except OSError as error:  # a read-only cache is enough where nothing is missing
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
        try:
            return keys.stored(self.job.path)
        except (OSError, ValueError):  # a build has not ended; else it fails again
            self._begin()
            return keys.stored(self.job.path, partial=True)

    def _begin(self) -> None:
        """Says in the cache that a build runs, once there is something to do."""
        if not self.begun:
            _core.graph_build_begin(self.job.path)
            self.begun = True

    def _todo(
        self, inputs: Iterable[Any], have: Counter[bytes], bar: Progress
    ) -> Iterator[Todo]:
        """(place, key, input) of what is to be made; notes the keys of all."""
        sequence: Any = inputs if _is_sequence(inputs) else None
        lazy = sequence is not None and (self.keys is not None or not self.has_key)
        stored = False
        for place, item in enumerate(range(len(sequence)) if lazy else inputs):
            key = self.key_of(place, item) if self.keys is None else self.keys[place]
            self.wanted += key
            if sequence is None:
                self.reuse.take(place, key, item, have[key] > 0)
            if have[key] > 0:
                have[key] -= 1
                self.reused += 1
                bar.reused()
            else:
                self._begin()
                if not stored:
                    self.reuse.store()
                    stored = True
                yield place, key, sequence[place] if lazy else item
        if sequence is None:
            self.reuse.end_of_stream()

    def _may_reuse(self, inputs: Iterable[Any], have: Counter[bytes]) -> bool:
        """Whether some input may be in the cache; False is certain. Raises
        StaleCacheError where its graph would be another."""
        if not _is_sequence(inputs):
            return self._may_reuse_of_stream(have)
        sequence: Any = inputs
        reused: list[int] = []
        if have:
            items = enumerate(sequence if self.has_key else range(len(sequence)))
            wanted = [self.key_of(place, item) for place, item in items]
            reused = [place for place, key in enumerate(wanted) if key in have]
        if reused:
            self.keys = wanted
            self.reuse.check(wanted, reused, sequence.__getitem__)
        elif have and self.reuse.forsake():
            self.key_of = self.key_maker()
        self.reuse.sample(
            len(sequence), lambda p: self._key_at(p, sequence), sequence.__getitem__
        )
        return bool(reused)

    def _key_at(self, place: int, sequence: Any) -> bytes:
        if self.keys is not None:
            return self.keys[place]
        return self.key_of(place, sequence[place] if self.has_key else None)

    def _may_reuse_of_stream(self, have: Counter[bytes]) -> bool:
        found = bool(have)
        if not self.has_key:
            transform = self.key_of(0, None)[8:]
            found = any(key[8:] == transform for key in have)
        if found:
            self.reuse.check_functions()
        elif have and self.reuse.forsake():
            self.key_of = self.key_maker()
        return found

    def _make(self, todo: Iterator[Todo], fresh: bool, bar: Progress) -> int:
        """Makes and appends; returns how many. `fresh`: the graphs of the cache tell
        nothing about the new ones."""
        old = schema_of(self.job.path) if has_manifest(self.job.path) else None
        schema = None if fresh else old
        made = 0
        if not self._sends or schema is None:
            made, schema = self._make_here(todo, schema, old, bar)
        if not self._sends or schema is None:
            return made
        if self.executor is not None:
            return made + make_by_executor(self.job, self.executor, schema, todo, bar)
        return made + make_in_processes(self.job, self.workers, schema, todo, bar)

    @property
    def _sends(self) -> bool:
        """Whether other processes make graphs."""
        return bool(self.workers) or self.executor is not None

    def _make_here(
        self,
        todo: Iterator[Todo],
        schema: Schema | None,
        old: Schema | None,
        bar: Progress,
    ) -> tuple[int, Schema | None]:
        """In this process: all, or until there is a schema for the workers."""
        made = 0
        item = next(todo, None)  # first, so that nothing is written if there is none
        if item is None:
            return 0, schema

        def make_room(new: Schema) -> None:
            # Graphs that differ in more than sizes cannot be in one cache, and those
            # that are there are not wanted any more.
            if old is not None and not agrees(old, new):
                _core.graph_build_anew(self.job.path)

        on_schema = make_room if schema is None else None
        with self.job.writer(schema, on_schema) as writer:
            while item is not None:
                self.job.append(writer, *item)
                made += 1
                bar.made(1)
                if self._sends and writer.schema is not None:
                    break
                item = next(todo, None)
        return made, writer.schema

    def _order(self, wanted: bytes) -> np.ndarray[Any, Any]:
        """The record of each wanted key: of several with one key the newest."""
        records: dict[bytes, list[int]] = {}
        found = keys.stored(self.job.path, partial=True)
        for record, key in enumerate(_split(found)):
            records.setdefault(key, []).append(record)
        order = [records[key].pop() for key in reversed(_split(wanted))]
        return np.array(order[::-1], np.uint64)


def _is_sequence(inputs: Any) -> bool:
    """Whether inputs[i] gives what iteration gives, so that it can be left out."""
    indexed = hasattr(inputs, "__getitem__") and hasattr(inputs, "__len__")
    return indexed and not hasattr(inputs, "keys")  # neither mappings nor tables


def _split(data: bytes) -> list[bytes]:
    return [data[i : i + keys.SIZE] for i in range(0, len(data), keys.SIZE)]


@contextmanager
def _only_builder(path: str) -> Iterator[None]:
    """Holds a lock on the directory at `path`, which it makes; OSError: another does.

    The lock goes with the process, and with its workers, however they end.
    """
    if Path(path).exists() and not Path(path).is_dir():
        raise NotADirectoryError(f"path must be a directory or new, got {path}")
    os.makedirs(path, exist_ok=True)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another build of {path} is running; wait for it or end it"
            raise BlockingIOError(message) from None
        try:
            yield
        finally:  # closing alone keeps the lock if an executor's processes were forked
            fcntl.flock(directory, fcntl.LOCK_UN)
    finally:
        os.close(directory)
