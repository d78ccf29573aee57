"""Puts trainfast's names in the place of a framework's, and takes them out again.

A capability registers which public names it replaces. `patch()` rebinds these names and
every module's global that was imported from them before; names imported later find the
replacement by themselves, so that it does not matter which comes first. Only globals of
modules are rebound: existing objects, subclasses, defaults of arguments and entries of
containers stay what they are. So do the framework's other modules, which pickle and its
own classes look into, and trainfast's.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from threading import RLock
from types import ModuleType
from typing import Any, NamedTuple

from trainfast.report import Report, Table

# Reads a module's dict without running code that a lazy module may have put in the way.
_namespace_of: Any = vars(ModuleType)["__dict__"].__get__
_MISSING = object()


class Target(NamedTuple):
    """A dotted name to replace, and the dotted name of what takes its place."""

    old: str
    new: str


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


class Replacement:
    """A target in force: both objects, where they are, and where `new` was before."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.old = _resolve(target.old)
        self.new = _resolve(target.new)
        self.places: list[Place] = []
        self.before = {place.key for place in _places_of(self.new)}

    def apply(self) -> list[Place]:
        """Rebinds every name that is bound to `old`; returns those it changed."""
        owner = self.target.old.partition(".")[0]
        changed = []
        places = _places_of(self.old)
        places.sort(key=lambda place: str(place) != self.target.old)  # itself first
        for place in places:
            inside = _in_package(place.module, owner)
            if inside and str(place) != self.target.old:
                continue
            self.places.append(place)
            place.namespace[place.attribute] = self.new
            changed.append(place)
        return changed

    def undo(self) -> tuple[list[Place], list[Place]]:
        """Gives the names back; returns those it changed, and those it left alone."""
        changed, left = [], []
        for place in self.places:
            if place.namespace.get(place.attribute, _MISSING) is self.new:
                place.namespace[place.attribute] = self.old
                changed.append(place)
            else:
                left.append(place)
        for place in _places_of(self.new):  # imported since
            if place.key not in self.before:
                place.namespace[place.attribute] = self.old
                changed.append(place)
        return changed, left


class Changed:
    """A setting in force, and the value that it had before."""

    def __init__(self, setting: Setting) -> None:
        self.target = Target(f"{setting.getter}()", repr(setting.value))
        self.read, self.write = _resolve(setting.getter), _resolve(setting.setter)
        self.value = setting.value
        self.before: Any = _MISSING

    def apply(self) -> list[str]:
        if self.before is not _MISSING:
            return []
        self.before = self.read()
        self.write(self.value)
        return [self.target.old]

    def undo(self) -> tuple[list[str], list[str]]:
        if self.read() != self.value:  # somebody else's by now
            return [], [self.target.old]
        self.write(self.before)
        return [self.target.old], []


_registry: dict[str, list[Target | Setting]] = {}
_opt_in: set[str] = set()
_active: dict[str, list[Replacement | Changed]] = {}
_blocks: Counter[str] = Counter()  # of `patched` that are in force, of each name
_lock = RLock()


def register(
    name: str,
    targets: Iterable[tuple[str, str]],
    settings: Iterable[tuple[str, str, Any]] = (),
    opt_in: bool = False,
) -> None:
    """Makes `patch(name)` replace the first name of each pair by the second.

    Both are dotted names of a module's attribute, looked up when `patch` needs them. So
    are the first two of each setting: what reads it, what writes it, and the value.
    `opt_in`: not without being named, as for a package that few have.
    """
    if name in _registry:
        raise ValueError(f"name must be new, got {name!r}, which is registered")
    _registry[name] = [Target(*pair) for pair in targets]
    _registry[name] += [Setting(*setting) for setting in settings]
    if opt_in:
        _opt_in.add(name)


def patch(*names: str) -> "PatchReport":
    """Replaces a framework's names by trainfast's; without names all of torch's.

    Names: "adamw", "amp", "clip", "attention", and "pyg", which must be asked for: it
    replaces what makes PyG's batches of lists of graphs in RAM.

    Names that modules have already imported are rebound, too. Patching twice changes
    nothing more, except that it finds what was imported around the first one. Objects
    that exist stay what they are: call it before you create an optimizer.

    Returns:
        A report of the names and places that changed; print it.

    Raises:
        ValueError: an unknown name.
        ImportError: what is to be patched is not installed.
        Nothing has changed when it raises.
    """
    with _lock:
        chosen = _chosen(names)
        ready = {name: _active.get(name) or _prepare(name) for name in chosen}
        report = PatchReport("patched")
        for name, replacements in ready.items():
            _active[name] = replacements
            for replacement in replacements:
                report.add(name, replacement.target, replacement.apply())
        return report


def unpatch(*names: str) -> "PatchReport":
    """Takes back what `patch` did; without names all of it.

    Every name bound to a replacement gets the framework's object back, those imported
    since among them, except where it was bound to the replacement before `patch`. What
    is bound to something else by now is left alone, and the report says so.

    Raises:
        ValueError: an unknown name. One that is not patched is fine.
    """
    with _lock:
        report = PatchReport("restored")
        for name in _check(names) or list(_active):
            for replacement in _active.pop(name, []):
                changed, left = replacement.undo()
                report.add(name, replacement.target, changed, left)
        return report


@contextmanager
def patched(*names: str) -> Iterator["PatchReport"]:
    """`patch(*names)` for a `with` block; what was patched before it stays patched, and
    so does what another thread's block has patched, until the last of them ends."""
    with _lock:
        fresh = [n for n in _chosen(names) if n not in _active or _blocks[n]]
        report = patch(*names)
        _blocks.update(fresh)
    try:
        yield report
    finally:
        with _lock:
            _blocks.subtract(fresh)
            ended = [name for name in fresh if not _blocks[name]]
            if ended:
                unpatch(*ended)


class Change(NamedTuple):
    """One replaced name: `places` were rebound, `left` were not found as `patch` left
    them."""

    name: str
    old: str
    new: str
    places: list[str]
    left: list[str]


class PatchReport(Report):
    """What one call of `patch` or `unpatch` changed, in `changes`."""

    def __init__(self, action: str) -> None:
        self.action = action
        self.changes: list[Change] = []

    def add(
        self,
        name: str,
        target: Target,
        places: Sequence[Place | str],
        left: Iterable[Place | str] = (),
    ) -> None:
        changed, kept = ([str(place) for place in some] for some in (places, left))
        self.changes.append(Change(name, *target, changed, kept))

    def tables(self) -> list[Table]:
        columns = ("name", "old", "new", "modules touched")
        rows: list[tuple[Any, ...]] = []
        for change in self.changes:
            first, *others = change.places or ["none"]
            rows.append((change.name, change.old, change.new, first))
            rows += [("", "", "", other) for other in others]
        kept = [(c.name, place) for c in self.changes for place in c.left]
        tables = [Table(self.action, columns, rows, empty="nothing")]
        if kept:
            title = "left alone, because they have been bound to something else since"
            tables.append(Table(title, ("name", "place"), kept))
        return tables

    def to_dict(self) -> dict[str, Any]:
        changes = [change._asdict() for change in self.changes]
        return {"action": self.action, "changes": changes}


def _check(names: tuple[str, ...]) -> list[str]:
    for name in names:
        if name not in _registry:
            known = ", ".join(sorted(_registry))
            raise ValueError(f"name must be one of {known}, got {name!r}")
    return list(dict.fromkeys(names))


def _chosen(names: tuple[str, ...]) -> list[str]:
    return _check(names) or [name for name in _registry if name not in _opt_in]


def _prepare(name: str) -> list[Replacement | Changed]:
    try:
        return [
            Replacement(entry) if isinstance(entry, Target) else Changed(entry)
            for entry in _registry[name]
        ]
    except ImportError as error:
        package = _registry[name][0][0].partition(".")[0]
        raise ImportError(
            f"{package} must be installed to patch {name!r}, got: {error}",
            name=error.name,
            path=error.path,
        ) from error


def _resolve(dotted: str) -> Any:
    module, _, attribute = dotted.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except AttributeError as error:
        raise ImportError(f"cannot find {dotted}", name=module) from error


def _places_of(wanted: Any) -> list[Place]:
    """Every module's global that is this very object, trainfast's own left out.

    From copies, which no thread that imports meanwhile can change."""
    found: dict[tuple[int, str], Place] = {}  # a module may have two names
    for name, module in sys.modules.copy().items():
        if issubclass(type(module), ModuleType) and not _in_package(name, "trainfast"):
            namespace = _namespace_of(module)
            for attribute, value in namespace.copy().items():
                if value is wanted:
                    place = Place(name, attribute, namespace)
                    found.setdefault(place.key, place)
    return list(found.values())


def _in_package(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


register(
    "adamw",
    [
        ("torch.optim.AdamW", "trainfast.torch.AdamW"),
        ("torch.optim.Adam", "trainfast.torch.Adam"),
    ],
)
register(
    "amp",
    [
        ("torch.amp.GradScaler", "trainfast.torch.GradScaler"),
        ("torch.cuda.amp.GradScaler", "trainfast.torch.amp.CudaGradScaler"),
    ],
)
register(
    "clip",
    [
        (f"torch.nn.utils.{name}", f"trainfast.torch.{name}")
        for name in ("clip_grad_norm_", "clip_grad_value_", "get_total_norm")
    ],
)
register(
    "attention",
    [
        (f"torch.nn.functional.{name}", f"trainfast.torch.attention_patch.{name}")
        for name in ("scaled_dot_product_attention", "multi_head_attention_forward")
    ],
    settings=[
        # Outside training, torch's transformer modules would compute all by themselves.
        (
            "torch.backends.mha.get_fastpath_enabled",
            "torch.backends.mha.set_fastpath_enabled",
            False,
        ),
        # What does not go through these names, torch's C++ for one.
        (
            "trainfast.torch.attention_overrides.are_patched",
            "trainfast.torch.attention_overrides.set_patched",
            True,
        ),
    ],
)
register(
    "pyg",
    [
        ("torch_geometric.data.batch.collate", "trainfast.torch.pyg_collate.collate"),
        (
            "torch_geometric.data.in_memory_dataset.collate",
            "trainfast.torch.pyg_collate.collate_dataset",
        ),
    ],
    opt_in=True,
)
