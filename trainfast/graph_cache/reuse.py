"""Whether a build may use graphs again that are in the cache already."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from os import urandom
from typing import Any

from trainfast import _core
from trainfast.graph_cache import keys
from trainfast.graph_cache.digest import digest
from trainfast.graph_cache.job import Job, failure
from trainfast.graph_cache.origin import (
    AGAIN,
    NOT_STORED,
    DrawnError,
    Origin,
    Origins,
    Sampler,
    StaleCacheError,
    as_stored,
    compare_all,
    difference,
    input_changed,
    sampled_places,
    spread,
    warn_of_unknown,
)
from trainfast.graph_cache.schema import Schema

_MOST_AGAIN = 16  # graphs that are compared where they need not be made


@dataclass(frozen=True)
class Source:
    """What graphs are made from, as far as it can be compared.

    functions: that make them, by the names of their arguments; none where the user's
    own transform_id answers for them. named: there is such an id. given: the inputs are
    the graphs, so that another one costs a read.
    """

    functions: Mapping[str, Any]
    named: bool
    given: bool


class Reuse:
    """Compares what made a cache's graphs with what would make them now."""

    def __init__(
        self, job: Job, source: Source, name: str, rebuild: bool | None
    ) -> None:
        self._job, self._source, self._name = job, source, name
        self._origins = Origins(job.path)
        self._before = self._origins.get(name)
        self.now = Origin.now(source.functions)
        self._keep = rebuild is False
        self._new_salt(bool(rebuild))
        self._sampler = Sampler()
        self._digests: dict[int, str | None] = {}  # by place
        self._stored = False
        self._first_seen = False
        self._last: tuple[int, bytes, Any] | None = None  # reused, of a stream
        self._compared = 0

    def _new_salt(self, fresh: bool) -> None:
        """No graph with an older salt is used again."""
        if fresh:
            self.now.salt, self._before = urandom(8).hex(), None
        elif self._before is not None:
            self.now.salt = self._before.salt

    def forsake(self) -> bool:
        """Whether graphs of this id that nothing wants now must never be wanted again,
        as other functions made them: keys are others then."""
        before = self._before
        stale = before is not None and bool(before.differences(self.now))
        stale = stale and not self._keep
        if stale:
            self._new_salt(fresh=True)
        return stale

    # ---- Inputs that can be asked for -----------------------------------------------

    def check(
        self, wanted: Sequence[bytes], reused: list[int], item: Callable[[int], Any]
    ) -> None:
        """Raises StaleCacheError; `item` reads the input of a place."""
        changed = self._functions_changed()
        if self._before is not None and not (self._source.given or self._keep):
            stored = self._before.inputs
            for place in [p for p, key in enumerate(wanted) if key.hex() in stored]:
                value = item(place)
                self._digests[place] = digest(value)
                before = stored[wanted[place].hex()]
                again = partial(item, place)
                changed += self._input_changed(place, before, value, again)
        if not changed and (self._source.given or not self._source.named):
            most = _MOST_AGAIN if self._source.given else AGAIN

            def compare(place: int) -> str:
                return self._made_again(place, wanted[place], partial(item, place))

            changed, self._compared = compare_all(spread(reused, most), compare)
        if changed:
            raise StaleCacheError(self._job.path, changed)
        self._warn()

    def compare_given(
        self, places: Sequence[int], compare: Callable[[int], str], most: int
    ) -> None:
        """The same where somebody else compares graphs: by `compare`, "" or what
        differs."""
        changed = self._functions_changed()
        if not changed:
            changed, self._compared = compare_all(spread(places, most), compare)
        if changed:
            raise StaleCacheError(self._job.path, changed)
        self._warn()

    def sample(
        self, n: int, key_of: Callable[[int], bytes], item: Callable[[int], Any]
    ) -> None:
        """Notes the content of some of n inputs."""
        for place in [] if self._source.given else sampled_places(n):
            if place not in self._digests:
                self._digests[place] = digest(item(place))
            self._note_input(key_of(place), self._digests[place])

    # ---- Inputs as they come --------------------------------------------------------

    def check_functions(self) -> None:
        """Raises StaleCacheError where functions have changed."""
        changed = self._functions_changed()
        if changed:
            raise StaleCacheError(self._job.path, changed)

    def take(self, place: int, key: bytes, item: Any, reused: bool) -> None:
        """Notes, and compares, one input. Raises StaleCacheError."""
        stored = self._before.inputs.get(key.hex()) if self._before else None
        changed: list[str] = []
        if not self._source.given:
            if reused and stored is not None and not self._keep:
                changed = self._input_changed(place, stored, item, lambda: item)
            if self._sampler.takes(place):
                self._note_input(key, digest(item))
                if self._stored:
                    self.store()
        if changed:
            raise StaleCacheError(self._job.path, changed)
        if reused and not self._first_seen:
            self._first_seen = True
            self._compare_one(place, key, item)
        elif reused:
            self._last = place, key, item

    def end_of_stream(self) -> None:
        """Compares the last one that is used again, too."""
        if self._last is not None:
            self._compare_one(*self._last)
        if self._first_seen:
            self._warn()

    def _compare_one(self, place: int, key: bytes, item: Any) -> None:
        if self._source.given or not self._source.named:
            changed = self._made_again(place, key, lambda: item)
            if changed:
                raise StaleCacheError(self._job.path, [changed])
            self._compared += 1

    # ---- Both -----------------------------------------------------------------------

    def _functions_changed(self) -> list[str]:
        if self._before is None:
            return []
        changed = self._before.differences(self.now)
        self.now.forget(self._before.unknown)
        return [] if self._keep else changed

    def _input_changed(
        self, place: int, stored: str, item: Any, again: Callable[[], Any]
    ) -> list[str]:
        how = input_changed(stored, item, again)
        if how == "drawn" and not self._source.named:
            raise DrawnError(self._job.path, f"input {place}")
        return [f"input {place}"] if how == "changed" else []

    def _made_again(self, place: int, key: bytes, item: Callable[[], Any]) -> str:
        """How a graph differs from the stored one; "": not at all."""
        rules = self._job.rules
        made = as_stored(self._make(place, item()), rules)
        what = difference(self._in_cache(key), made)
        if not what:
            return ""
        if difference(made, as_stored(self._make(place, item()), rules)):
            if self._source.named:
                return ""
            raise DrawnError(self._job.path, f"graph {place} ({what} differs)")
        return f"graph {place}, which made again differs in {what}"

    def _make(self, place: int, item: Any) -> Any:
        if self._job.make is None:
            return item
        try:
            return self._job.make(item)
        except Exception as error:
            raise failure(place, f"{type(error).__name__}: {error}") from error

    def _in_cache(self, key: bytes) -> dict[Any, Any]:
        """The newest graph with the key."""
        core, found = self._cache
        end = None
        while True:
            at = found.rfind(key, 0, end)
            if at % keys.SIZE == 0:
                break
            end = at + len(key) - 1
        assert core.schema is not None  # it has a record
        schema = Schema.decode(core.schema)
        values = zip(schema.keys, core.get(at // keys.SIZE))
        return {name: value for name, value in values if value is not None}

    @cached_property
    def _cache(self) -> tuple[_core.GraphCache, bytes]:
        """The cache as it was before, and the keys of all its records."""
        core = _core.GraphCache(self._job.path, partial=True)
        return core, keys.stored(self._job.path, partial=True)

    def _note_input(self, key: bytes, content: str | None) -> None:
        if content is not None:
            self.now.inputs[key.hex()] = content
        elif not self._source.named:
            self.now.unknown["the inputs"] = "cannot be hashed"

    def _warn(self) -> None:
        """Says what could not be compared."""
        if self._source.named or (self._source.given and not self._source.functions):
            return
        before = self._before
        unknown = NOT_STORED
        if before is not None:
            unknown = {**before.unknown, **self.now.unknown}
        warn_of_unknown(self._job.path, unknown, self._compared)

    def store(self, alone: bool = False) -> None:
        """Stores what makes the graphs that follow."""
        self._origins.keep(self._name, self.now, alone)
        self._stored = True

    def end(self, begun: bool) -> None:
        """After a build: what it has changed itself says nothing."""
        if self._source.functions:
            self.now.note_changes(Origin.now(self._source.functions))
        try:
            self.store(alone=True)
        except OSError:  # a cache that cannot be written to is enough for this
            if begun:
                raise

    def failed(self) -> None:
        """After a build that failed."""
        if self._stored:
            self.now.note_changes(Origin.now(self._source.functions))
            with suppress(OSError):
                self.store()
