"""What the graphs of a cache were made from, and whether that is still so.

`made.json` in the cache's directory has, for each transform_id of a build, a
fingerprint of the functions and digests of some inputs. It is replaced as a whole,
after a build has said that it runs and before its first graph is written, so that it is
true of every graph with a key of that transform_id and salt. Without it a cache is as
readable as before, and graphs that are made again decide.
"""

import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

from trainfast.graph_cache.cache import Cache
from trainfast.graph_cache.digest import digest
from trainfast.graph_cache.fingerprint import Fingerprint, fingerprint
from trainfast.graph_cache.writer import REFUSED, Writer, as_mapping

_NAME = "made.json"
_PACKAGE = "trainfast."
_SAMPLES = 16  # inputs whose content is known, at most, and the last one
AGAIN = 3  # graphs that are made again for a comparison, at least
_SECONDS = 0.25  # for comparing more of them, where that needs no `make`
_PYTHON = ".".join(platform.python_version_tuple()[:2])


class StaleCacheError(ValueError):
    """The graphs in a cache are not those that would be made now.

    `changed` says what differs: "the code of `make`", "input 17", ...
    """

    def __init__(self, path: str, changed: Iterable[str]) -> None:
        self.changed = list(changed)
        shown = self.changed[:8]
        more = len(self.changed) - len(shown)
        text = ", ".join(shown) + (f" and {more} more" if more else "")
        super().__init__(
            f"the cache at {path} is stale, since this has changed: {text}; pass "
            "rebuild=True to make all graphs again, rebuild=False to keep them if a "
            "sample that is made again is the same, transform_id= to tell versions of "
            "`make` apart yourself, or another path"
        )

    def __reduce__(self) -> Any:
        return _unpickled, (str(self), self.changed)


class DrawnError(StaleCacheError):
    """The same input gives another graph each time: which one is in the cache?"""

    def __init__(self, path: str, what: str) -> None:
        ValueError.__init__(
            self,
            f"what is made must be the same each time, got another {what}; what the "
            f"cache at {path} has can only be used again with a transform_id=, with "
            "which you say yourself when graphs are to be made again",
        )
        self.changed = [what]


def _unpickled(message: str, changed: list[str]) -> StaleCacheError:
    error = StaleCacheError("", changed)
    error.args = (message,)
    return error


@dataclass
class Origin:
    """What the graphs of one transform_id were made from."""

    salt: str = ""  # of their keys: another one after each rebuild
    python: str = _PYTHON
    code: dict[str, str] = field(default_factory=dict)  # see Fingerprint
    values: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)  # key -> digest

    @classmethod
    def now(cls, functions: Mapping[str, Any]) -> "Origin":
        """Of functions as they are."""
        found: Fingerprint = fingerprint(functions)
        return cls(code=found.code, values=found.values, unknown=found.unknown)

    def forget(self, unknown: Mapping[str, str]) -> None:
        """Takes out values that are known not to be comparable."""
        for name in unknown.keys() & self.values.keys():
            del self.values[name]
            self.unknown[name] = unknown[name]

    def note_changes(self, later: "Origin") -> None:
        """Takes out values that making graphs has changed."""
        changed = [n for n, d in self.values.items() if later.values.get(n, d) != d]
        self.forget(dict.fromkeys(changed, "changes while graphs are made"))

    def differences(self, now: "Origin") -> list[str]:
        """What of the functions has changed."""
        pairs = [(self.values, now.values)]
        if self.python == now.python:
            pairs.insert(0, (self.code, now.code))
        names = [n for a, b in pairs for n in a if n in b and a[n] != b[n]]
        if not names:
            names = [n for a, b in pairs for n in [*a, *b] if (n in a) != (n in b)]
        return [n for n in names if n not in self.unknown and n not in now.unknown]


class Origins:
    """What a cache's `made.json` says: an Origin by the name of its transform_id."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) / _NAME
        self._known: dict[str, Any] = {}
        try:
            said = json.loads(self._path.read_bytes())
            self._known = {name: Origin(**what) for name, what in said.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            pass  # none, or not ours

    def get(self, name: str) -> Origin | None:
        return self._known.get(name)

    def keep(self, name: str, origin: Origin, alone: bool = False) -> None:
        """Stores it, if it is not there already. `alone`: no other id has graphs."""
        known = {name: origin} if alone else {**self._known, name: origin}
        text = json.dumps({name: asdict(what) for name, what in known.items()})
        self._known = known
        try:
            if self._path.read_text() == text:
                return
        except (OSError, ValueError):
            pass
        self._write(text)

    def _write(self, text: str) -> None:
        fresh = self._path.with_name(f"{_NAME}.{os.getpid()}")
        try:
            with open(fresh, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise


# ---- Samples -------------------------------------------------------------------------


def sampled_places(n: int) -> list[int]:
    """Spread places of n, which stay among those of more: multiples of a power of 2,
    and the last."""
    if not n:
        return []
    step = 1
    while n > _SAMPLES * step:
        step *= 2
    return sorted({*range(0, n, step), n - 1})


class Sampler:
    """The same for inputs of unknown number, as they come."""

    def __init__(self) -> None:
        self._step = 1

    def takes(self, place: int) -> bool:
        if place >= _SAMPLES * self._step:
            self._step *= 2
        return place % self._step == 0


def spread(places: Sequence[int], most: int) -> list[int]:
    """First, last and middle, then between those, and so on."""
    n = len(places)
    if n <= 1:
        return list(places)
    found = {0: None, n - 1: None}
    parts = 2
    while len(found) < min(n, most) and parts <= 2 * n:
        for i in range(1, parts, 2):
            found[i * (n - 1) // parts] = None
        parts *= 2
    return [places[i] for i in list(found)[:most]]


def input_changed(stored: str | None, item: Any, again: Callable[[], Any]) -> str:
    """ "": its content is as stored, or not known; "changed"; "drawn": it is another
    each time."""
    now = None if stored is None else digest(item)
    if stored is None or now is None or now == stored:
        return ""
    return "changed" if digest(again()) == now else "drawn"


def compare_all(
    places: Iterable[int], difference: Callable[[int], str], least: int = AGAIN
) -> tuple[list[str], int]:
    """What differs at the places, and how many were compared: at least a few, and more
    while that takes no time to speak of."""
    found, done, start = [], 0, perf_counter()
    for place in places:
        if done >= least and perf_counter() - start > _SECONDS:
            break
        found.append(difference(place))
        done += 1
    return [what for what in found if what], done


def as_stored(graph: Any, rules: Mapping[Any, Any]) -> Mapping[Any, Any] | str:
    """A graph as a cache gives it back; or why it cannot be stored."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "again"
        try:
            keys = as_mapping(graph).keys()
            known = {key: rule for key, rule in rules.items() if key in keys}
            with Writer(path, rules=known, durable=False) as writer:
                writer.append(graph)
            return {key: _copied(value) for key, value in Cache(path)[0].items()}
        except REFUSED as error:
            return str(error)


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def difference(a: Mapping[Any, Any] | str, b: Mapping[Any, Any] | str) -> str:
    """What differs in two graphs that are as stored, by its key; "": nothing."""
    if isinstance(a, str) or isinstance(b, str):
        return (
            "" if a == b else f"(it cannot be stored: {a if isinstance(a, str) else b})"
        )
    if a.keys() != b.keys():
        return repr(sorted(a.keys() ^ b.keys(), key=str)[0])
    wrong = [key for key in a if not _same(a[key], b[key])]
    return repr(wrong[0]) if wrong else ""


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, str | bytes):
        return a == b
    one, other = np.asarray(a), np.asarray(b)
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and one.tobytes() == other.tobytes()


def warn_of_unknown(path: str, unknown: Mapping[str, str], compared: int) -> None:
    """Says what could not be compared, and what was instead."""
    if unknown:
        shown = [f"{name} {why}" for name, why in list(unknown.items())[:4]]
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        warnings.warn(
            f"not all of what made the cache at {path} can be compared: "
            f"{'; '.join(shown)}{more}. {compared} of its graphs were made again and "
            "are the same; with a transform_id= you say yourself when they are others",
            stacklevel=_frames_of_ours(),
        )


def _frames_of_ours() -> int:
    """The stacklevel of a warning that is about the line that called the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level


NOT_STORED: dict[str, str] = {
    "what made its graphs": "was not stored by the version that built it"
}
