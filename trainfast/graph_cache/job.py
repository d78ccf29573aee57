"""What a build does for each input, in whichever process."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from trainfast.graph_cache.schema import Rule, Schema
from trainfast.graph_cache.writer import REFUSED, Writer

Todo = tuple[int, bytes, Any]  # an input's place, its key, the input


class BuildError(RuntimeError):
    """`make` failed, or a worker died; `place` is the number of the input, from 0."""

    def __init__(self, message: str, place: int | None = None) -> None:
        super().__init__(message)
        self.place = place


@dataclass
class Job:
    """What makes graphs, and where they go."""

    path: str
    make: Callable[[Any], Any] | None
    rules: Mapping[Hashable, Rule]
    commit_every: int
    commit_seconds: float

    @contextmanager
    def writer(self, schema: Schema | None) -> Iterator[Writer]:
        """A writer that keeps what was made, whatever happens, if the disk can."""
        writer = Writer(
            self.path,
            schema,
            rules=self.rules,
            commit_every=self.commit_every,
            commit_seconds=self.commit_seconds,
        )
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
            reason = error.__cause__ or error
            raise kind(f"input {place}: {reason}") from error


def failure(place: int, reason: str) -> BuildError:
    kept = "what was made before is kept, and the next build goes on from there"
    return BuildError(f"make() failed on input {place}: {reason}; {kept}", place)
