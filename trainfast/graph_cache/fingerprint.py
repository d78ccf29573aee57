"""Fingerprints of functions: whether the code that made graphs is the same still.

A function is its bytecode, constants, names, defaults and closure values, and so are
the functions, classes and plain values of the user's own modules that it refers to.
Names of local variables, line numbers, file names, comments and docstrings are not part
of it. Modules of the standard library, of site-packages and trainfast's own count as
unchanged. Bytecode differs between versions of Python, digests of values do not.
"""

import dis
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import EnumMeta
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec, resolve_name
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

from trainfast.graph_cache.digest import (
    Content,
    is_own,
    is_own_file,
    module_of,
    without_cached,
)

_REDUCE = "__reduce__"


@dataclass
class Fingerprint:
    """What made graphs, by names for people: "the code of `make`" -> digest."""

    code: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)  # name -> why


def fingerprint(roots: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint of callables, or classes, by the name of their argument."""
    survey = _Survey()
    for name, root in roots.items():
        survey.add_root(name, root)
    survey.finish()
    return survey.found


def _imported(name: str, level: int, package: str | None) -> ModuleType | None:
    """The module that an import statement of a function finds; None: none of the
    user's own."""
    full = resolve_name("." * level + name, package) if level else name
    root = full.partition(".")[0]
    if full not in sys.modules:
        spec = find_spec(root)
        if spec is None or not is_own_file(root, spec.origin):
            return None
    return import_module(full) if is_own(root) else None


class _Survey:
    """Goes through functions and all of the user's own that they refer to."""

    def __init__(self) -> None:
        self.found = Fingerprint()
        self._names: dict[int, str] = {}  # id of a function, class or globals' value
        self._alive: list[Any] = []  # so that no id comes twice
        self._used: set[str] = set()
        self._seen: set[tuple[int, str]] = set()  # globals: id of their dict, name
        self._queue: deque[tuple[str, Any]] = deque()

    def add_root(self, name: str, root: Any) -> None:
        label = f"`{name}`"
        while isinstance(root, partial):
            for place, argument in enumerate(root.args):
                self._value(f"argument {place} of {label}", argument)
            for key, argument in root.keywords.items():
                self._value(f"the argument `{key}` of {label}", argument)
            root = root.func
        if isinstance(root, MethodType):
            self._instance(label, root.__self__)
            root = root.__func__
        if isinstance(root, FunctionType) and is_own(module_of(root)):
            self._refer(root, f"the code of {label}")
        elif isinstance(root, FunctionType | type | BuiltinFunctionType):
            self._value(label, root)
        else:
            self._instance(label, root)

    def finish(self) -> None:
        while self._queue:
            label, value = self._queue.popleft()
            if isinstance(value, FunctionType):
                self._function(label, value)
            else:
                self._class(label, value)

    def _refer(self, value: Any, label: str | None = None) -> str:
        """The label of a function or class, whose turn comes if it is new."""
        if id(value) not in self._names:
            kind = "class" if isinstance(value, type) else "function"
            label = self._unique(label or f"the {kind} `{value.__name__}`")
            self._names[id(value)] = label
            self._alive.append(value)
            self._queue.append((label, value))
        return self._names[id(value)]

    def _unique(self, label: str) -> str:
        name, number = label, 1
        while name in self._used:
            number += 1
            name = f"{label} ({number})"
        self._used.add(name)
        return name

    def _value(self, label: str, value: Any) -> None:
        if isinstance(value, ModuleType):
            return
        content = Content(self._refer)
        content.add_guarded(value)
        label = self._unique(label)
        if content.unknown:
            self.found.unknown[label] = content.unknown
        else:
            self.found.values[label] = content.hexdigest()

    def _instance(self, label: str, value: Any) -> None:
        """A callable object: its class, and each of its attributes."""
        state = getattr(value, "__dict__", None)
        plain: Any = object.__reduce__
        if not isinstance(state, dict) or getattr(type(value), _REDUCE) is not plain:
            self._value(label, value)
            return
        self._value(f"the class of {label}", type(value))
        for name, attribute in without_cached(type(value), state).items():
            self._value(f"the attribute `{name}` of {label}", attribute)

    def _function(self, label: str, function: FunctionType) -> None:
        content = Content(self._refer)
        content.add_guarded(function.__code__)
        self.found.code[label] = content.hexdigest()
        of = "" if label.startswith("the code of ") else f" of {label}"
        names = function.__code__.co_varnames
        defaults = function.__defaults__ or ()
        n = function.__code__.co_argcount
        given = dict(zip(names[n - len(defaults) : n], defaults))
        for name, value in (given | (function.__kwdefaults__ or {})).items():
            self._value(f"the default of `{name}`{of}", value)
        cells = zip(function.__code__.co_freevars, function.__closure__ or ())
        for name, cell in cells:
            with suppress(ValueError):  # not set yet
                self._value(f"the closure value `{name}`{of}", cell.cell_contents)
        try:
            for names_of, chain in _names_in(function.__code__, function.__globals__):
                self._global(chain, names_of)
        except Exception as error:  # of a module of the user's own that is imported
            self.found.unknown[f"what {label} imports"] = str(error)

    def _global(self, chain: tuple[str, ...], names: dict[str, Any]) -> None:
        """A global name, or what dots behind it find in modules of the user's own."""
        if chain[0] not in names:
            return  # a builtin
        value, used, owner = names[chain[0]], 1, names
        while isinstance(value, ModuleType) and is_own(value.__name__):
            if used == len(chain):
                self._module(value)
                return
            owner = vars(value)
            value = getattr(value, chain[used], None)
            used += 1
        if isinstance(value, FunctionType | type) and is_own(module_of(value)):
            self._refer(value)
        elif not isinstance(value, FunctionType | type | ModuleType):
            place = id(owner), chain[used - 1]
            if place not in self._seen:
                self._seen.add(place)
                self._value(f"the global `{'.'.join(chain[:used])}`", value)

    def _module(self, module: ModuleType) -> None:
        """A module of the user's own that is used as a whole: all that it defines."""
        for name, value in sorted(vars(module).items()):
            if isinstance(value, FunctionType | type):
                if module_of(value) == module.__name__:
                    self._refer(value)
            elif not name.startswith("__") and not isinstance(value, ModuleType):
                self._global((name,), vars(module))

    def _class(self, label: str, kind: type) -> None:
        content = Content(self._refer)
        content.add_guarded([base for base in kind.__mro__[1:] if base is not object])
        if isinstance(kind, EnumMeta):
            members: Any = kind.__members__
            content.add_guarded({name: one.value for name, one in members.items()})
        attributes = {} if isinstance(kind, EnumMeta) else vars(kind)
        for name, value in sorted(attributes.items()):
            for function in _functions_of(value):
                if is_own(module_of(function)):
                    self._refer(function, f"the method `{kind.__name__}.{name}`")
            if not _is_plain(name, value):
                continue
            content.tag(name)
            content.add_guarded(value)
        self.found.code[label] = content.hexdigest()
        if content.unknown:
            self.found.unknown[f"{label}'s attributes"] = content.unknown


def _functions_of(value: Any) -> list[FunctionType]:
    """The functions of a class's attribute."""
    if isinstance(value, property):
        found: list[Any] = [value.fget, value.fset, value.fdel]
    elif isinstance(value, cached_property):
        found = [value.func]
    else:
        inner = getattr(value, "__wrapped__", None)  # of class and static methods, too
        found = [value, getattr(value, "__func__", None), inner]
    return list({id(f): f for f in found if isinstance(f, FunctionType)}.values())


def _is_plain(name: str, value: Any) -> bool:
    """Whether a class's attribute is a value that somebody has given it."""
    if name.startswith("__") or name in ("_abc_impl",) or _functions_of(value):
        return False
    return not hasattr(type(value), "__set__")  # the descriptor of a slot


def _names_in(
    code: CodeType, names: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Global names that code loads, each with the attributes that follow at once, and
    what it imports from modules of the user's own: (where it is found, the names)."""
    chain: list[str] = []
    constants: list[Any] = [0, None]
    module: ModuleType | None = None
    for instruction in dis.Bytecode(code):
        name, value = instruction.opname, instruction.argval
        if chain and name in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(value)
            continue
        if chain:
            yield names, tuple(chain)
            chain = []
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = [value]
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants.append(value)
        elif name == "IMPORT_NAME":
            level, wanted = constants[-2:]
            module = _imported(value, level, names.get("__package__"))
            if module is not None and not wanted:
                yield {value: module}, (value,)
        elif name == "IMPORT_FROM" and module is not None:
            yield vars(module), (value,)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant, names)
