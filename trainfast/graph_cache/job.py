"""What a build does for each input, in whichever process."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from trainfast.graph_cache.fit import looks_like
from trainfast.graph_cache.schema import Rule, Schema
from trainfast.graph_cache.writer import REFUSED, Writer

Todo = tuple[int, bytes, Any]  # an input's place, its key, the input


class BuildError(RuntimeError):
    """`make` failed, or a worker died; `place` is the number of the input, from 0."""

    def __init__(self, message: str, place: int | None = None) -> None:
        super().__init__(message)
        self.place = place


class _FreshWriter(Writer):
    """Ignores the cache's schema; calls `on_schema` with its own before it writes."""

    def __init__(
        self, path: str, *, on_schema: Callable[[Schema], None], **options: Any
    ) -> None:
        self._on_schema = on_schema
        super().__init__(path, **options)

    def _schema_before(self) -> None:
        return None

    def _open(self, schema: Schema) -> None:
        if self.schema is None:
            self._on_schema(schema)
        super()._open(schema)


@dataclass
class Job:
    """The function that makes graphs, and the cache that gets them."""

    path: str
    make: Callable[[Any], Any] | None
    rules: Mapping[Hashable, Rule]
    commit_every: int = 256
    commit_seconds: float = 2.0
    samples: int = 8

    @contextmanager
    def writer(
        self,
        schema: Schema | None = None,
        on_schema: Callable[[Schema], None] | None = None,
    ) -> Iterator[Writer]:
        """A writer that also commits if the block raises.

        With `on_schema` the writer ignores the cache's schema and makes its own; it
        calls `on_schema` with that before it writes.
        """
        options: dict[str, Any] = {
            "rules": self.rules,
            "commit_every": self.commit_every,
            "commit_seconds": self.commit_seconds,
            "samples": self.samples,
        }
        if on_schema is None:
            writer = Writer(self.path, schema, **options)
        else:
            writer = _FreshWriter(self.path, on_schema=on_schema, **options)
        try:
            yield writer
        except BaseException:
            with suppress(OSError, *REFUSED):
                writer.close()
            raise
        writer.close()

    def append(self, writer: Writer, place: int, key: bytes, item: Any) -> None:
        """Makes the graph of one input and appends it."""
        graph = item
        if self.make is not None:
            try:
                graph = self.make(item)
            except Exception as error:
                raise failure(place, f"{type(error).__name__}: {error}") from error
        try:
            writer.append(graph, key)
        except REFUSED as error:
            kind = next(kind for kind in REFUSED if isinstance(error, kind))
            reason = f"input {place}: {error.__cause__ or error}"
            if writer.schema is not None and not looks_like(writer.schema, graph):
                reason += "; all graphs of a cache have the same dtype and rank for a "
                reason += (
                    "key: if all graphs are like this one now, change transform_id"
                )
            raise kind(reason) from error


def failure(place: int, reason: str) -> BuildError:
    kept = "the graphs made before are kept, and the next build resumes there"
    return BuildError(f"make() failed on input {place}: {reason}; {kept}", place)
