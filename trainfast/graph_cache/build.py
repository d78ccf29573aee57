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
from trainfast.graph_cache.fit import agrees
from trainfast.graph_cache.job import BuildError, Job, Todo
from trainfast.graph_cache.progress import Progress
from trainfast.graph_cache.schema import Rule, Schema
from trainfast.graph_cache.workers import make_in_processes
from trainfast.graph_cache.writer import as_path, has_manifest, schema_of
from trainfast.report import Report, Table

__all__ = ["BuildError", "BuildReport", "build"]


def build(
    path: str | os.PathLike[str],
    inputs: Iterable[Any],
    make: Callable[[Any], Any] | None = None,
    *,
    key: Callable[[Any], Any] | None = None,
    transform_id: Any = None,
    workers: int = 0,
    progress: bool = True,
    resume: bool = True,
    rules: Mapping[Hashable, Rule] | None = None,
    commit_every: int = 256,
    commit_seconds: float = 2.0,
    samples: int = 8,
) -> "BuildReport":
    """Makes the cache at `path` hold `make(input)` for each of `inputs`, in order.

    `make` returns a graph (see `Writer`); None: the inputs are graphs. It runs only for
    inputs that are not in the cache: those whose (`key(input)`, `transform_id`) is new.
    `key` returns str, bytes, int or a tuple of them, None: an input's place is its key.
    `transform_id` is one, too: change it when `make` has changed. Graphs whose input is
    gone leave the cache. `inputs` is gone through once.

    A build that was killed goes on where it was: it has lost at most what it made since
    the last commit (`commit_every` graphs or `commit_seconds`). Until a build has ended
    the cache does not open. `resume=False`: all is made again.

    `workers`: processes that make graphs; inputs and `make` are sent to them, so with
    the start method "spawn" they must pickle. The first few graphs are made here.
    `progress`: a bar with rate and remaining time (needs tqdm). `rules`: see `Rule`.
    `samples`: graphs that are looked at before the first is written.

    Graphs that are made later may differ from those in the cache in their sizes only,
    and lack keys or have more of them (see `Writer`), unless none of those is wanted
    any more.

    Raises BuildError where `make` failed (its cause is what it raised) or a worker
    died, ValueError or TypeError where a graph cannot be cached, OSError (disk full,
    another build of this cache runs). What was made before is kept, after Ctrl-C, too.
    """
    _check_arguments(inputs, make, key, workers)
    sequence: Any = inputs if _is_sequence(inputs) else None
    if make is None and key is None and sequence is not None:
        # The workers get the graphs by themselves, and only those that are missing.
        make, inputs = sequence.__getitem__, range(len(sequence))
    job = Job(
        as_path(path),
        make,
        {} if rules is None else rules,
        commit_every=commit_every,
        commit_seconds=commit_seconds,
        samples=samples,
    )
    key_of = keys.key_maker(key, transform_id)
    with _only_builder(job.path):
        run = _Build(job, key_of, key is not None, workers, resume)
        try:
            return run.run(inputs, progress)
        except KeyboardInterrupt as error:
            error.add_note("What was made is kept; the next build goes on from there.")
            raise


def _check_arguments(inputs: Any, make: Any, key: Any, workers: Any) -> None:
    if not isinstance(workers, SupportsIndex):
        raise TypeError(f"workers must be an integer, got {workers!r}")
    if workers.__index__() < 0:
        raise ValueError(f"workers must be at least 0, got {workers}")
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
    key_of: Callable[[int, Any], bytes]
    has_key: bool  # of the user's own
    workers: int
    resume: bool
    wanted: bytearray = field(default_factory=bytearray)  # keys, in order
    begun: bool = False
    n_before: int = 0  # records that were there when it began
    reused: int = 0

    def run(self, inputs: Iterable[Any], progress: bool) -> BuildReport:
        start = perf_counter()
        path = self.job.path
        old = self._old_keys()
        have = Counter(_split(old)) if self.resume else Counter()
        total = len(inputs) if isinstance(inputs, Sized) else None
        with Progress(progress, total) as bar:
            fresh = not self._may_reuse(inputs, have)
            made = self._make(self._todo(inputs, have, bar), fresh, bar)
        wanted = bytes(self.wanted)
        if wanted != old or self.begun or not has_manifest(path):
            self._begin()
            _core.graph_build_end(path, self._order(wanted))
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
            return _core.GraphCache(self.job.path).keys()
        except (OSError, ValueError):  # a build has not ended; else it fails again
            self._begin()
            return _core.GraphCache(self.job.path, partial=True).keys()

    def _begin(self) -> None:
        """Says in the cache that a build runs, once there is something to do."""
        if not self.begun:
            _core.graph_build_begin(self.job.path)
            self.n_before = len(_core.GraphCache(self.job.path, partial=True))
            self.begun = True

    def _todo(
        self, inputs: Iterable[Any], have: Counter[bytes], bar: Progress
    ) -> Iterator[Todo]:
        """(place, key, input) of what is to be made; notes the keys of all."""
        sequence: Any = inputs if _is_sequence(inputs) else None
        lazy = sequence is not None and not self.has_key
        for place, item in enumerate(range(len(sequence)) if lazy else inputs):
            key = self.key_of(place, item)
            self.wanted += key
            if have[key] > 0:
                have[key] -= 1
                self.reused += 1
                bar.reused()
            else:
                self._begin()
                yield place, key, sequence[place] if lazy else item

    def _may_reuse(self, inputs: Iterable[Any], have: Counter[bytes]) -> bool:
        """Whether some input may be in the cache; False is certain."""
        if not self.has_key:
            transform = self.key_of(0, None)[8:]
            return any(key[8:] == transform for key in have)
        if not have or not _is_sequence(inputs):
            return bool(have)
        return any(self.key_of(i, item) in have for i, item in enumerate(inputs))

    def _make(self, todo: Iterator[Todo], fresh: bool, bar: Progress) -> int:
        """Makes and appends; returns how many. `fresh`: the graphs of the cache tell
        nothing about the new ones."""
        old = schema_of(self.job.path) if has_manifest(self.job.path) else None
        schema = None if fresh else old
        made = 0
        if not self.workers or schema is None:
            made, schema = self._make_here(todo, schema, old, bar)
        if not self.workers or schema is None:
            return made
        return made + make_in_processes(self.job, self.workers, schema, todo, bar)

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
                _core.graph_build_end(self.job.path, np.zeros(0, np.uint64))
                _core.graph_build_begin(self.job.path)
                self.n_before = 0

        on_schema = make_room if schema is None else None
        with self.job.writer(schema, on_schema) as writer:
            while item is not None:
                self.job.append(writer, *item)
                made += 1
                bar.made(1)
                if self.workers and writer.schema is not None:
                    break
                item = next(todo, None)
        return made, writer.schema

    def _order(self, wanted: bytes) -> np.ndarray[Any, Any]:
        """The record of each wanted key: of several with one key the newest."""
        records: dict[bytes, list[int]] = {}
        found = _core.GraphCache(self.job.path, partial=True).keys()
        skip = 0 if self.resume else self.n_before
        for record, key in enumerate(_split(found)):
            if record >= skip:
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
        yield
    finally:
        os.close(directory)
