"""Digests of values that are the same in every process and version of Python."""

import dis
import marshal
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
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
    ModuleType,
)
from typing import Any

import numpy as np

from trainfast._core import crc32c

_SCALARS = {int, float, complex, bool, str, bytes, type(None), type(Ellipsis)}
_FLAGS = CO_VARARGS | CO_VARKEYWORDS | CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_MOST_OBJECTS = 100_000  # of one value; a larger one is not hashed
_BLOCK = 1 << 20  # arrays are hashed in blocks of bytes
_MOST_BLOCKS = 256  # of a larger array as many are hashed, spread evenly
_MARSHAL = 2  # a version without references, whose bytes follow from the value alone


def digest(value: Any) -> str | None:
    """A digest of what `value` holds; None: it cannot be hashed."""
    content = Content(_class_name)
    content.add_guarded(value)
    return None if content.unknown else content.hexdigest()


def _class_name(value: Any) -> str:
    if isinstance(value, type):
        return value.__qualname__
    raise TypeError("has functions in it")


class _TooLargeError(Exception):
    pass


class Content:
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
            self.tag("cycle", len(self._path) - self._path[id(value)])
            return
        self._path[id(value)] = len(self._path)
        try:
            self._add_object(value, kind)
        finally:
            del self._path[id(value)]

    def tag(self, *facts: Any) -> None:
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
            self.tag("module", value.__name__)
        elif not self._add_torch(value):
            self._add_instance(value, kind)

    def _add_sequence(self, value: Any, kind: type) -> None:
        self.tag(kind.__name__, len(value))
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
        self.tag(name, len(digests))
        self._hash.update(b"".join(sorted(digests)))

    def _add_array(self, array: Any) -> None:
        array = np.asarray(array)
        self.tag("array", str(array.dtype), array.shape)
        if array.dtype.hasobject:
            self.add(array.tolist())
        elif array.size:
            plain = np.ascontiguousarray(array).reshape(-1)
            self._add_bytes(plain.view(np.uint8))

    def _add_bytes(self, data: Any) -> None:
        self.tag("bytes", len(data))
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
        self.tag(type(value).__name__, value.__name__)
        if is_own(module_of(value)):
            self.tag(self._refer(value))
        elif isinstance(value, FunctionType):
            self.tag(value.__module__, value.__qualname__)
            for cell in value.__closure__ or ():  # a decorator's has the user's own
                with suppress(ValueError):
                    self.add(cell.cell_contents)
        else:
            self.tag(value.__module__, value.__qualname__)

    def _add_torch(self, value: Any) -> bool:
        """Whether it is a tensor, or a graph of PyG; torch is loaded then."""
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                return False
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            self.tag(type(value).__name__, str(plain.dtype), tuple(plain.shape))
            self._add_bytes(plain.reshape(-1).view(torch.uint8).numpy())
            return True
        pyg: Any = sys.modules.get("torch_geometric.data")
        if pyg is not None and isinstance(value, pyg.Data | pyg.HeteroData):
            self.tag(type(value).__name__)
            self.add(value.to_dict())
            return True
        return False

    def _add_instance(self, value: Any, kind: type) -> None:
        """Anything else: as pickle would see it."""
        wrapped = getattr(value, "__wrapped__", None) or getattr(value, "py_func", None)
        if callable(wrapped):
            self.tag("wrapped", kind.__name__)
            self.add(wrapped)
            return
        if isinstance(value, BuiltinFunctionType):
            self.tag("builtin", value.__name__)
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
            self.tag("global", kind.__name__, reduced)
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
    return is_own_file(name, getattr(sys.modules.get(name), "__file__", None))


def is_own_file(name: str, file: str | None) -> bool:
    if file is None:
        return name.partition(".")[0] not in sys.stdlib_module_names
    path = Path(file)
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return False
    libraries = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return not any(path.is_relative_to(library) for library in libraries)
