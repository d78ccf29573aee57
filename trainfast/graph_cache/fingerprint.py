"""Digests of functions and values that are the same in every process.

A function is its bytecode, constants, names, defaults and closure values, and so are
the functions, classes and plain values of the user's own modules that it refers to.
Names of local variables, line numbers, file names, comments and docstrings are not part
of it. Modules of the standard library, of site-packages and trainfast's own count as
unchanged. Bytecode differs between versions of Python, digests of values do not.
"""

import dis
import marshal
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import EnumMeta
from functools import cached_property, partial
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec, resolve_name
from inspect import (
    CO_ASYNC_GENERATOR,
    CO_COROUTINE,
    CO_GENERATOR,
    CO_VARARGS,
    CO_VARKEYWORDS,
)
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np

from trainfast._core import crc32c

_SCALARS = {int, float, complex, bool, str, bytes, type(None), type(Ellipsis)}
_FLAGS = CO_VARARGS | CO_VARKEYWORDS | CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_MOST_OBJECTS = 100_000  # of one value; a larger one is not hashed
_REDUCE = "__reduce__"
_BLOCK = 1 << 20  # arrays are hashed in blocks of bytes
_MOST_BLOCKS = 256  # of a larger array as many are hashed, spread evenly
_MARSHAL = 2  # a version without references, whose bytes follow from the value alone


@dataclass
class Fingerprint:
    """What made graphs, by names for people: "the code of `make`" -> digest."""

    code: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)  # name -> why


def digest(value: Any) -> str | None:
    """A digest of what `value` holds; None: it cannot be hashed."""
    content = _Content(_class_name)
    content.add_guarded(value)
    return None if content.unknown else content.hexdigest()


def _class_name(value: Any) -> str:
    if isinstance(value, type):
        return value.__qualname__
    raise TypeError("has functions in it")


def fingerprint(roots: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint of callables, or classes, by the name of their argument."""
    survey = _Survey()
    for name, root in roots.items():
        survey.add_root(name, root)
    survey.finish()
    return survey.found


class _TooLargeError(Exception):
    pass


class _Content:
    """Feeds a value to a digest. `refer` names a function or class of the user's own,
    which is hashed by itself."""

    def __init__(self, refer: Callable[[Any], str]) -> None:
        self._refer = refer
        self._hash = blake2b(digest_size=16)
        self._path: dict[int, int] = {}  # id -> depth, of what the value lies in
        self._left = _MOST_OBJECTS
        self.unknown = ""  # why a part of the value could not be hashed

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def add_guarded(self, value: Any) -> None:
        """Adds a value of any kind; sets `unknown` where that is not possible."""
        try:
            self.add(value)
        except (_TooLargeError, RecursionError):
            self.unknown = f"holds more than {_MOST_OBJECTS:,} objects"
        except Exception as error:  # of the object's own methods
            self.unknown = f"{type(value).__name__}: {error}"

    def add(self, value: Any) -> None:
        kind = type(value)
        if kind in _SCALARS:
            self._hash.update(marshal.dumps(value, _MARSHAL))
            return
        self._left -= 1
        if self._left < 0:
            raise _TooLargeError
        if id(value) in self._path:
            self._tag("cycle", len(self._path) - self._path[id(value)])
            return
        self._path[id(value)] = len(self._path)
        try:
            self._add_object(value, kind)
        finally:
            del self._path[id(value)]

    def _tag(self, *facts: Any) -> None:
        self._hash.update(repr(facts).encode("utf-8", "surrogatepass"))

    def _add_object(self, value: Any, kind: type) -> None:
        if kind in (list, tuple):
            self._add_sequence(value, kind)
        elif kind in (dict, MappingProxyType):
            self._add_unordered("dict", value.items())
        elif kind in (set, frozenset):
            self._add_unordered("set", value)
        elif isinstance(value, CodeType):
            self.add_code(value)
        elif isinstance(value, np.ndarray | np.generic):
            self._add_array(value)
        elif isinstance(value, bytearray | memoryview):
            self._add_bytes(np.frombuffer(value, np.uint8))
        elif isinstance(value, FunctionType | type):
            self._add_named(value)
        elif isinstance(value, ModuleType):
            self._tag("module", value.__name__)
        elif not self._add_torch(value):
            self._add_instance(value, kind)

    def _add_sequence(self, value: Any, kind: type) -> None:
        self._tag(kind.__name__, len(value))
        if _SCALARS.issuperset(map(type, value)):
            self._hash.update(marshal.dumps(value, _MARSHAL))
            return
        for item in value:
            self.add(item)

    def _add_unordered(self, name: str, items: Any) -> None:
        """Items whose order is by chance, or means nothing."""
        outer, digests = self._hash, []
        try:
            for item in items:
                self._hash = blake2b(digest_size=16)
                self.add(item)
                digests.append(self._hash.digest())
        finally:
            self._hash = outer
        self._tag(name, len(digests))
        self._hash.update(b"".join(sorted(digests)))

    def _add_array(self, array: Any) -> None:
        array = np.asarray(array)
        self._tag("array", str(array.dtype), array.shape)
        if array.dtype.hasobject:
            self.add(array.tolist())
        elif array.size:
            plain = np.ascontiguousarray(array).reshape(-1)
            self._add_bytes(plain.view(np.uint8))

    def _add_bytes(self, data: Any) -> None:
        self._tag("bytes", len(data))
        if len(data) <= _BLOCK:
            self._hash.update(data)
            return
        starts = range(0, len(data), _BLOCK)
        if len(starts) > _MOST_BLOCKS:
            last = len(data) - _BLOCK
            starts_of = np.linspace(0, last, _MOST_BLOCKS).astype(np.int64)
            starts = starts_of.tolist()
        for start in starts:
            crc = crc32c(np.ascontiguousarray(data[start : start + _BLOCK]))
            self._hash.update(crc.to_bytes(4, "little"))

    def _add_named(self, value: Any) -> None:
        """A function or a class."""
        self._tag(type(value).__name__, value.__name__)
        if is_own(module_of(value)):
            self._tag(self._refer(value))
        elif isinstance(value, FunctionType):
            self._tag(value.__module__, value.__qualname__)
            for cell in value.__closure__ or ():  # a decorator's has the user's own
                with suppress(ValueError):
                    self.add(cell.cell_contents)
        else:
            self._tag(value.__module__, value.__qualname__)

    def _add_torch(self, value: Any) -> bool:
        """Whether it is a tensor, or a graph of PyG; torch is loaded then."""
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                return False
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            self._tag(type(value).__name__, str(plain.dtype), tuple(plain.shape))
            self._add_bytes(plain.reshape(-1).view(torch.uint8).numpy())
            return True
        pyg: Any = sys.modules.get("torch_geometric.data")
        if pyg is not None and isinstance(value, pyg.Data | pyg.HeteroData):
            self._tag(type(value).__name__)
            self.add(value.to_dict())
            return True
        return False

    def _add_instance(self, value: Any, kind: type) -> None:
        """Anything else: as pickle would see it."""
        wrapped = getattr(value, "__wrapped__", None) or getattr(value, "py_func", None)
        if callable(wrapped):
            self._tag("wrapped", kind.__name__)
            self.add(wrapped)
            return
        if isinstance(value, BuiltinFunctionType):
            self._tag("builtin", value.__name__)
            if not isinstance(value.__self__, ModuleType | type(None)):
                self.add(value.__self__)
            return
        if isinstance(value, random.Random) or _draws(kind):
            self.unknown = "is a random generator"
            return
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:
            self.unknown = f"cannot be hashed: {error}"
            return
        if isinstance(reduced, str):
            self._tag("global", kind.__name__, reduced)
            return
        make, arguments, *more = reduced
        self.add(make)
        self.add(arguments)
        for part in more:
            if isinstance(part, Iterator):
                part = list(part)
            self.add(without_cached(kind, part))

    def add_code(self, code: CodeType) -> None:
        """Instructions with the constants that they load: docstrings are not loaded."""
        n = code.co_argcount + code.co_kwonlyargcount
        n += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        self.add((code.co_exceptiontable, code.co_flags & _FLAGS, counts))
        self.add((code.co_names, code.co_freevars, code.co_varnames[:n]))
        for instruction in dis.Bytecode(code):
            self.add(instruction.opcode)
            if instruction.opcode in dis.hasconst:
                self.add(instruction.argval)
            else:
                self.add(instruction.arg)


def _draws(kind: type) -> bool:
    """Whether objects of the class are random generators."""
    names = {f"{base.__module__}.{base.__name__}" for base in kind.__mro__}
    return any(
        name.startswith("numpy.random.") or name.endswith("torch._C.Generator")
        for name in names
    )


def without_cached(kind: type, state: Any) -> Any:
    """An object's state without what its cached properties have left there."""
    if not isinstance(state, dict):
        return state
    return {
        name: value
        for name, value in state.items()
        if not isinstance(getattr(kind, str(name), None), cached_property)
    }


def module_of(value: Any) -> str | None:
    """The module whose source a function or a class is from, also if it is wrapped."""
    if isinstance(value, FunctionType):
        return value.__globals__.get("__name__")
    return getattr(value, "__module__", None)


def is_own(name: str | None) -> bool:
    """Whether a module is the user's own: neither Python's, nor installed, nor ours."""
    if name is None or name == "__main__":
        return True
    if name.partition(".")[0] == "trainfast" or name in sys.builtin_module_names:
        return False
    return _is_own_file(name, getattr(sys.modules.get(name), "__file__", None))


def _is_own_file(name: str, file: str | None) -> bool:
    if file is None:
        return name.partition(".")[0] not in sys.stdlib_module_names
    path = Path(file)
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return False
    libraries = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return not any(path.is_relative_to(library) for library in libraries)


def _imported(name: str, level: int, package: str | None) -> ModuleType | None:
    """The module that an import statement of a function finds; None: none of the
    user's own."""
    full = resolve_name("." * level + name, package) if level else name
    root = full.partition(".")[0]
    if full not in sys.modules:
        spec = find_spec(root)
        if spec is None or not _is_own_file(root, spec.origin):
            return None
    return import_module(full) if is_own(root) else None


# ---- Functions -----------------------------------------------------------------------


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
        content = _Content(self._refer)
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
        content = _Content(self._refer)
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
        content = _Content(self._refer)
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
            content._tag(name)
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
