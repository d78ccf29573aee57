"""Puts trainfast's names in the place of a framework's, and takes them out again.

A capability registers which public names it replaces. `patch()` rebinds these names and
every module's global that was imported from them before; names imported later find the
replacement by themselves, so that it does not matter which comes first. Only globals of
modules are rebound: existing objects, subclasses, defaults of arguments and entries of
containers stay what they are. So do the framework's other modules, which pickle and its
own classes look into, and trainfast's. What this version of the framework lacks is
skipped, and the report says so.
"""

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import import_module
from threading import RLock
from types import ModuleType
from typing import Any, NamedTuple

from trainfast.report import Report, Table

# Reads a module's dict without running code that a lazy module may have put in the way.
_namespace_of: Any = vars(ModuleType)["__dict__"].__get__
_MISSING = object()
_OWN = "trainfast"


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
        self.entry = self.target = target
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
            if place.key not in self.before and not _imports_from_trainfast(place):
                place.namespace[place.attribute] = self.old
                changed.append(place)
        return changed, left


class Changed:
    """A setting in force, and the value that it had before."""

    def __init__(self, setting: Setting) -> None:
        self.entry = setting
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
_by_name: dict[str, list[Setting]] = {}
_opt_in: set[str] = set()
_active: dict[str, list[Replacement | Changed]] = {}
# How many `with patch()` blocks hold what was not in force before them.
_blocks: Counter[Target | Setting] = Counter()
_lock = RLock()


def register(
    name: str,
    targets: Iterable[tuple[str, str]],
    settings: Iterable[tuple[str, str, Any]] = (),
    opt_in: bool = False,
    by_name: Iterable[tuple[str, str, Any]] = (),
) -> None:
    """Makes `patch(name)` replace the first name of each pair by the second.

    Both are dotted names of a module's attribute, looked up when `patch` needs them. So
    are the first two of each setting: what reads it, what writes it, and the value.
    `opt_in`: not without being named, as for a package that few have. `by_name`:
    settings that are made only when `patch` is given the name.
    """
    if name in _registry:
        raise ValueError(f"name must be new, got {name!r}, which is registered")
    _registry[name] = [Target(*pair) for pair in targets]
    _registry[name] += [Setting(*setting) for setting in settings]
    _by_name[name] = [Setting(*setting) for setting in by_name]
    if opt_in:
        _opt_in.add(name)


def patch(*names: str) -> "Patch":
    """Replaces a framework's names by trainfast's; without names all of torch's.

    Names: "adamw", "amp", "clip" and "attention"; and three that must be asked for:
    "attention_operators" puts the kernels under torch's operators, for C++, scripted
    code and direct calls of torch.ops.aten (small calls become slower); "huggingface"
    is trainfast.torch.huggingface.register(); "pyg" replaces what makes PyG's batches
    of lists of graphs in RAM.

    On a GPU where torch has flash attention, "attention" changes nothing unless it is
    given by name.

    Names that modules have already imported are rebound, too. Patching twice changes
    nothing more, except that it finds what was imported around the first one. Objects
    that exist stay what they are: call it before you create an optimizer.

    `with trainfast.patch(...):` takes it back at the end of the block. What was patched
    before the block stays patched, and so does what another thread's block has patched,
    until the last of these blocks ends.

    Returns:
        A report of the names and places that changed; print it.

    Raises:
        ValueError: an unknown name.
        ImportError: what is to be patched is not installed.
        Nothing has changed when it raises. A single name that the installed version
        lacks is no error: it is skipped, and the report lists it.
    """
    with _lock:
        wanted = [e for n in _chosen(names) for e in _entries(n, n in names)]
        ready = {name: _prepare(name, name in names) for name in _chosen(names)}
        known = _known()
        report = Patch(names, [e for e in wanted if e not in known or _blocks[e]])
        for name, (replacements, skipped) in ready.items():
            _active[name] = replacements
            for replacement in replacements:
                report.add(name, replacement.target, replacement.apply())
            report.skipped += skipped
        return report


def unpatch(*names: str) -> "PatchReport":
    """Takes back what `patch` did; without names all of it.

    Every name bound to a replacement gets the framework's object back, those imported
    since among them, except where it was bound to the replacement before `patch`, or
    where the source of the module (or a cell of the notebook) imports it from
    trainfast. What is bound to something else by now is left alone, and the report says
    so.

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


def is_patched(name: str) -> bool:
    """Whether `patch` has replaced what this name stands for, such as "adamw".

    Raises:
        ValueError: an unknown name.
    """
    return all(each in _active for each in _check((name,)))


def _known() -> set[Target | Setting]:
    """What is in force."""
    return {each.entry for ready in _active.values() for each in ready}


def _end(entries: set[Target | Setting]) -> None:
    """Undoes these; of a name of which nothing else is left, its by-name settings."""
    for name, ready in list(_active.items()):
        kept = [each for each in ready if each.entry not in entries]
        if not any(each.entry in _registry[name] for each in kept):
            unpatch(name)
        else:
            _active[name] = kept
            for each in ready:
                if each not in kept:
                    each.undo()


class Change(NamedTuple):
    """One replaced name: `places` were rebound, `left` were not found as `patch` left
    them."""

    name: str
    old: str
    new: str
    places: list[str]
    left: list[str]


class Skipped(NamedTuple):
    """A name that was not replaced, and why."""

    name: str
    old: str
    reason: str


class PatchReport(Report):
    """What one call of `patch` or `unpatch` changed, in `changes`, and what `patch` had
    to leave out, in `skipped`."""

    def __init__(self, action: str) -> None:
        self.action = action
        self.changes: list[Change] = []
        self.skipped: list[Skipped] = []

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
        if self.skipped:
            title = "skipped, because this version does not have them"
            tables.append(Table(title, Skipped._fields, list[Any](self.skipped)))
        return tables

    def to_dict(self) -> dict[str, Any]:
        changes = [change._asdict() for change in self.changes]
        skipped = [each._asdict() for each in self.skipped]
        return {"action": self.action, "changes": changes, "skipped": skipped}


class Patch(PatchReport):
    """What `patch` returns: its report, and a context manager that takes it back."""

    def __init__(self, names: tuple[str, ...], fresh: list[Target | Setting]) -> None:
        super().__init__("patched")
        self._names = names
        self._fresh = fresh  # what no patch() outside a block had put in force before

    def __enter__(self) -> PatchReport:
        with _lock:
            if not _known().issuperset(self._fresh):  # another thread's block has ended
                patch(*self._names)
            _blocks.update(self._fresh)
        return self

    def __exit__(self, *error: object) -> None:
        with _lock:
            _blocks.subtract(self._fresh)
            _end({entry for entry in self._fresh if not _blocks[entry]})


def _check(names: tuple[str, ...]) -> list[str]:
    for name in names:
        if name not in _registry:
            known = ", ".join(sorted(_registry))
            raise ValueError(f"name must be one of {known}, got {name!r}")
    return list(dict.fromkeys(names))


def _chosen(names: tuple[str, ...]) -> list[str]:
    return _check(names) or [name for name in _registry if name not in _opt_in]


def _entries(name: str, by_name: bool) -> list[Target | Setting]:
    return [*_registry[name], *(_by_name[name] if by_name else [])]


def _prepare(
    name: str, by_name: bool
) -> tuple[list[Replacement | Changed], list[Skipped]]:
    """What is in force already and what is new, not yet applied; what is missing."""
    ready = list(_active.get(name, []))
    known = {each.entry for each in ready}
    skipped = []
    for entry in _entries(name, by_name):
        if entry in known:
            continue
        try:
            _resolve(entry[0])
        except ImportError as error:
            package = entry[0].partition(".")[0]
            _must_be_installed(package, name, error)
            skipped.append(Skipped(name, entry[0], str(error)))
        else:
            kind = Replacement if isinstance(entry, Target) else Changed
            ready.append(kind(entry))  # type: ignore[arg-type]
    return ready, skipped


def _must_be_installed(package: str, name: str, error: ImportError) -> None:
    """Raises where it is not the version of the package that the error is about."""
    try:
        import_module(package)
    except ImportError:
        raise ImportError(
            f"{package} must be installed to patch {name!r}, got: {error}",
            name=error.name,
            path=error.path,
        ) from error
    if package == _OWN:
        raise error


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
        if issubclass(type(module), ModuleType) and not _in_package(name, _OWN):
            namespace = _namespace_of(module)
            for attribute, value in namespace.copy().items():
                if value is wanted:
                    place = Place(name, attribute, namespace)
                    found.setdefault(place.key, place)
    return list(found.values())


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
        if isinstance(node, ast.ImportFrom) and _in_package(node.module or "", _OWN)
        for alias in node.names
    )


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
        *(
            (f"torch.nn.functional.{name}", f"trainfast.torch.attention_patch.{name}")
            for name in ("scaled_dot_product_attention", "multi_head_attention_forward")
        ),
        (
            "torch.backends.mha.get_fastpath_enabled",
            "trainfast.torch.attention_patch.get_fastpath_enabled",
        ),
    ],
    settings=[
        # Outside training, torch's transformer modules would compute all by themselves.
        (
            "trainfast.torch.attention_patch.are_modules_patched",
            "trainfast.torch.attention_patch.set_modules_patched",
            True,
        ),
    ],
    by_name=[
        # Also where torch has flash attention.
        (
            "trainfast.torch.attention_route.is_named",
            "trainfast.torch.attention_route.set_named",
            True,
        ),
    ],
)
register(
    "attention_operators",
    [],
    settings=[
        (
            "trainfast.torch.attention_overrides.are_patched",
            "trainfast.torch.attention_overrides.set_patched",
            True,
        ),
    ],
    opt_in=True,
)
register(
    "huggingface",
    [],
    settings=[
        (
            "trainfast.torch.huggingface.are_tables_completed",
            "trainfast.torch.huggingface.set_tables_completed",
            True,
        ),
    ],
    opt_in=True,
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
