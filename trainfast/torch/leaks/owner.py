"""Who holds an object: the variable, attribute or cache, with file and line."""

import functools
import gc
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch.utils.data import Dataset

from trainfast.torch.leaks import scopes
from trainfast.torch.leaks.reach import state

_DEEPEST = 8  # objects between a variable and what it holds
_WIDEST = 24  # objects of one distance
_Cache = type(functools.lru_cache(lambda: None))
# From an object to the target, such as (".history", "['loss']").
_Path = tuple[str, ...]


@dataclass
class Owner:
    """A variable, attribute or cache.

    Attributes:
        name: such as "losses" or "trainer.history['loss']".
        file, line: where it is made; line 0 where there is no source.
        limited: a cache that declares how much it may hold, or a dataset's cache of
            its samples.
        of_library: the container is an attribute of a library's class, such as a
            module's hooks; the line is then that of the object that has it.
    """

    name: str
    file: str
    line: int
    limited: bool = False
    of_library: bool = False

    @property
    def variable(self) -> str:
        """The last name of "trainer.history['loss']": "history"."""
        return self.name.split("[")[0].rpartition(".")[2]

    @property
    def is_script(self) -> bool:
        return scopes.is_script(self.file)


def find_owner(target: Any, hidden: set[int]) -> Owner | None:
    """The nearest variable of a function or module, class or cache that holds the
    object; a script's before a library's.

    Args:
        target: the object.
        hidden: ids of objects that are no owners: those of the search itself.
    """
    roots = _Roots()
    level: list[tuple[Any, _Path]] = [(target, ())]
    seen = {id(target), id(level), *hidden}
    best: Owner | None = None
    for _ in range(_DEEPEST):
        above: list[tuple[Any, _Path]] = []
        for each, path in level:
            if isinstance(each, Dataset) and _bounds(each, target):
                return Owner(type(each).__qualname__, *place(type(each)), limited=True)
            owners = list(roots.of(each, path))
            for found in owners:
                if found.is_script or found.limited:
                    return found
                best = best or found
            if not owners:
                above.append((each, path))
        level = _above(above, seen) if above else []
        if not level:
            break
    return best


def _bounds(dataset: Dataset[Any], container: Any) -> bool:
    """Whether a container may be the dataset's cache of its samples."""
    try:
        return len(container) <= len(dataset)  # type: ignore[arg-type]
    except Exception:  # a dataset without a length, or whose own method fails
        return False


class _Roots:
    """Variables of functions, and modules, by the identity of what they are."""

    def __init__(self) -> None:
        self.variables: dict[int, list[tuple[CodeType, str]]] = {}
        for frame in scopes.frames():
            if frame.f_locals is frame.f_globals:  # a script's top level is a module
                continue
            for name, value in scopes.local_variables(frame):
                found = self.variables.setdefault(id(value), [])
                found.append((frame.f_code, name))
        self.modules: dict[int, tuple[str, str]] = {}  # their names and files
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType):
                file = vars(module).get("__file__")
                if isinstance(file, str):
                    self.modules[id(vars(module))] = name, file
        for frame in scopes.frames():  # a notebook's module, and runpy's, have no file
            file = frame.f_code.co_filename
            self.modules.setdefault(id(frame.f_globals), ("__main__", file))

    def of(self, each: Any, path: _Path) -> Iterator[Owner]:
        """Owners that are `each`; `path` leads from it to the target."""
        if id(each) in self.modules and path:
            module, file = self.modules[id(each)]
            variable, rest = path[0][2:-2], path[1:]
            made = scopes.variable_definition(file, variable)
            prefix = "" if scopes.is_script(file) else f"{module}."
            yield _owner(prefix + variable, each.get(variable), rest, made)
            return
        for code, name in self.variables.get(id(each), ()):
            made = code.co_filename, scopes.definition(code, name)
            yield _owner(name, each, path, made)
        if type(each) is _Cache:
            yield _of_cache(each)
        elif isinstance(each, type):
            own = attribute_of(each, path[0]) if path else None
            name = each.__qualname__ + "".join(path)
            yield Owner(name, *(own or place(each)), of_library=own is None)


def _owner(name: str, holder: Any, path: _Path, made: tuple[str, int]) -> Owner:
    """The owner behind a variable: its line is that of the path's last attribute that
    a script's class assigns, or else the variable's."""
    of_library = False
    for label in path:
        if label.startswith("."):
            assigned = attribute_of(type(holder), label)
            of_library = assigned is None
            made = assigned or made
            holder = state(holder).get(label[1:])
        elif issubclass(type(holder), list | tuple | dict):
            holder = _item(holder, label)
    return Owner(name + "".join(path), *made, of_library=of_library)


def _item(holder: Any, label: str) -> Any:
    for key, value in (
        dict.items(holder) if isinstance(holder, dict) else enumerate(holder)
    ):
        if f"[{key!r}]" == label:
            return value
    return None


def attribute_of(kind: type, label: str) -> tuple[str, int] | None:
    """File and line where a script's class assigns the attribute."""
    for each in kind.__mro__:
        file = scopes.file_of(each.__module__)
        if file and scopes.is_script(file):
            line = scopes.top_definition(file, label[1:])
            if line:
                return file, line
    return None


def _of_cache(cache: Any) -> Owner:
    function = inspect.unwrap(cache)
    name = getattr(function, "__qualname__", "a function")
    limited = cache.cache_parameters()["maxsize"] is not None
    return Owner(f"cache of {name}()", *place(function), limited)


def place(what: Any) -> tuple[str, int]:
    """File and first line of a function or a script's class."""
    if isinstance(what, FunctionType):
        return what.__code__.co_filename, what.__code__.co_firstlineno
    file = scopes.file_of(getattr(what, "__module__", ""))
    if not file or not scopes.is_script(file):
        return file, 0
    try:
        return file, inspect.getsourcelines(what)[1]
    except (TypeError, OSError):
        return file, 0


def _above(level: list[tuple[Any, _Path]], seen: set[int]) -> list[tuple[Any, _Path]]:
    """The objects that refer to those of a level, with their paths to the target."""
    by_id = {id(each): (each, path) for each, path in level}
    found: list[tuple[Any, _Path]] = []
    referrers = gc.get_referrers(*(each for each, _ in level))
    seen |= {id(level), id(by_id), id(found), id(referrers)}
    seen |= {id(entry) for entry in (*level, *by_id.values())}
    for holder in referrers:
        if id(holder) in seen or isinstance(holder, FrameType):
            continue
        if len(found) == _WIDEST:
            break
        path = _path(holder, by_id)
        if path is not None:
            seen.add(id(holder))
            found.append((holder, path))
    return found


def _path(holder: Any, below: dict[int, tuple[Any, _Path]]) -> _Path | None:
    """From the holder through one of the objects below to the target; None if it holds
    none as a value."""
    kind = type(holder)
    if issubclass(kind, dict):
        for key, value in list(dict.items(holder)):
            if id(value) in below:
                label = f"[{key!r}]" if type(key) in (str, int) else "[...]"
                return label, *below[id(value)][1]
        return None
    if issubclass(kind, list | tuple):
        for place, value in enumerate(holder):
            if id(value) in below:
                return f"[{place}]", *below[id(value)][1]
        return None
    own = vars(holder) if issubclass(kind, type) else state(holder)
    if id(own) in below:
        path = below[id(own)][1]
        return (f".{path[0][2:-2]}", *path[1:]) if path else None
    for name, value in list(own.items()):
        if id(value) in below:
            return f".{name}", *below[id(value)][1]
    for value in gc.get_referents(holder):
        if id(value) in below:
            path = below[id(value)][1]
            if issubclass(kind, type) and path:  # the class's dict, behind a proxy
                return f".{path[0][2:-2]}", *path[1:]
            return path
    return None
