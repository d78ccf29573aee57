"""The globals of modules, found and rebound."""

import ast
import inspect
import sys
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

# Reads a module's dict without running code that a lazy module may have put in the way.
_namespace_of: Any = vars(ModuleType)["__dict__"].__get__
_MISSING = object()
OWN = "trainfast"


class Target(NamedTuple):
    """A dotted name to replace, and the dotted name of what takes its place."""

    old: str
    new: str
    everywhere: bool = False  # also in the framework's other modules


class Setting(NamedTuple):
    """A framework's setting, by the dotted names of the functions that read and write
    it, and the value that it shall have."""

    getter: str
    setter: str
    value: Any


class Place(NamedTuple):
    """A global of a module."""

    module: str
    attribute: str
    namespace: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"

    @property
    def key(self) -> tuple[int, str]:
        return id(self.namespace), self.attribute


class Found:
    """Every module's global that is bound to an object of these replacements,
    trainfast's own globals left out: one scan of all modules."""

    def __init__(self, replacements: "Iterable[Replacement | Changed]") -> None:
        self._of: dict[int, dict[tuple[int, str], Place]] = {}
        for each in replacements:
            if isinstance(each, Replacement):
                self._of[id(each.old)] = {}
                self._of[id(each.new)] = {}
        if not self._of:
            return
        # Copies, which no thread that imports meanwhile can change.
        for name, module in sys.modules.copy().items():
            if issubclass(type(module), ModuleType) and not _in_package(name, OWN):
                namespace = _namespace_of(module)
                for attribute, value in namespace.copy().items():
                    places = self._of.get(id(value))
                    if places is not None:  # a module may have two names
                        place = Place(name, attribute, namespace)
                        places.setdefault(place.key, place)

    def places_of(self, wanted: Any) -> list[Place]:
        return list(self._of[id(wanted)].values())


class Replacement:
    """A target in force: both objects, where they are, and where `new` was before."""

    def __init__(self, target: Target) -> None:
        self.entry = self.target = target
        self.old = resolve(target.old)
        self.new = resolve(target.new)
        self.places: list[Place] = []
        self.before: set[tuple[int, str]] | None = None  # until it is applied

    def apply(self, found: Found) -> list[Place]:
        """Rebinds every name that is bound to `old`; returns those it changed."""
        if self.before is None:
            self.before = {place.key for place in found.places_of(self.new)}
        owner = self.target.old.partition(".")[0]
        changed = []
        places = found.places_of(self.old)
        places.sort(key=lambda place: str(place) != self.target.old)  # itself first
        for place in places:
            inside = _in_package(place.module, owner)
            if inside and str(place) != self.target.old and not self.target.everywhere:
                continue
            self.places.append(place)
            place.namespace[place.attribute] = self.new
            changed.append(place)
        return changed

    def undo(self, found: Found) -> tuple[list[Place], list[Place]]:
        """Gives the names back; returns those it changed, and those it left alone."""
        changed, left = [], []
        for place in self.places:
            if place.namespace.get(place.attribute, _MISSING) is self.new:
                place.namespace[place.attribute] = self.old
                changed.append(place)
            else:
                left.append(place)
        for place in found.places_of(self.new):  # imported since
            fresh = self.before is not None and place.key not in self.before
            if (
                fresh
                and place.namespace.get(place.attribute) is self.new
                and not _imports_from_trainfast(place)
            ):
                place.namespace[place.attribute] = self.old
                changed.append(place)
        return changed, left


class Changed:
    """A setting in force, and the value that it had before."""

    def __init__(self, setting: Setting) -> None:
        self.entry = setting
        self.target = Target(f"{setting.getter}()", repr(setting.value))
        self.read, self.write = resolve(setting.getter), resolve(setting.setter)
        self.value = setting.value
        self.before: Any = _MISSING

    def apply(self, _: Found) -> list[str]:
        if self.before is not _MISSING:
            return []
        self.before = self.read()
        self.write(self.value)
        return [self.target.old]

    def undo(self, _: Found) -> tuple[list[str], list[str]]:
        if self.read() != self.value:  # somebody else's by now
            return [], [self.target.old]
        self.write(self.before)
        return [self.target.old], []


def resolve(dotted: str) -> Any:
    module, _, attribute = dotted.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except AttributeError as error:
        raise ImportError(f"cannot find {dotted}", name=module) from error


def _imports_from_trainfast(place: Place) -> bool:
    """Whether the source of the place's module binds its name by an import from
    trainfast. The object alone cannot tell: torch's name is bound to the same one."""
    cells = place.namespace.get("In")
    try:
        sources = [inspect.getsource(sys.modules[place.module])]
    except (OSError, TypeError, KeyError):
        sources = cells if isinstance(cells, list) else []  # a notebook's
    return any(_binds_by_import(str(text), place.attribute) for text in sources)


def _binds_by_import(source: str, attribute: str) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # a cell may be more than Python
        return False
    return any(
        (alias.asname or alias.name) == attribute
        for node in nodes
        if isinstance(node, ast.ImportFrom) and _in_package(node.module or "", OWN)
        for alias in node.names
    )


def _in_package(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")
