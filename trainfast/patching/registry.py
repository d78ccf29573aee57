"""`patch` and `unpatch`, and the registry of what they replace."""

import os
import sys
from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from threading import RLock
from typing import Any

from trainfast.cuda_library import find_cuda_library
from trainfast.patching.places import (
    OWN,
    Changed,
    Found,
    Replacement,
    Setting,
    Target,
    resolve,
)
from trainfast.patching.report import PatchReport, Skipped

_registry: dict[str, list[Target | Setting]] = {}
_by_name: dict[str, list[Setting]] = {}
_opt_in: set[str] = set()
_active: dict[str, list[Replacement | Changed]] = {}
# How many `with patch()` blocks hold what was not in force before them.
_blocks: Counter[Target | Setting] = Counter()
_lock = RLock()


def register(
    name: str,
    targets: Iterable[tuple[str, str] | tuple[str, str, bool]],
    settings: Iterable[tuple[str, str, Any]] = (),
    opt_in: bool = False,
    by_name: Iterable[tuple[str, str, Any]] = (),
) -> None:
    """Makes `patch(name)` replace the first name of each pair by the second.

    Both are dotted names of a module's attribute, looked up when `patch` needs them;
    True after them rebinds the name in the framework's other modules, too. So
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

    Names: "adamw", "amp", "clip" and "attention"; and one that must be asked for: "pyg"
    replaces the function that makes PyG's batches of lists of graphs in RAM, and
    `radius_graph`, `knn_graph`, `radius` and `knn`, which then need no pyg-lib.

    On a GPU where torch has flash attention, "attention" changes nothing unless it is
    given by name.

    Names that modules have already imported are rebound, too. Patching twice changes
    nothing more, except that it finds what was imported around the first one. Objects
    that exist stay what they are: call it before you create an optimizer.

    `with trainfast.patch(...):` takes it back at the end of the block. What was patched
    before the block stays patched, and so does what another thread's block has patched,
    until the last of these blocks ends.

    Args:
        *names: which names to patch; none: all but "pyg".

    Returns:
        A report: one line when printed, every name and place with `.table()`.

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
        found = Found(each for some, _ in ready.values() for each in some)
        for name, (replacements, skipped) in ready.items():
            _active[name] = replacements
            for replacement in replacements:
                report.add(name, replacement.target, replacement.apply(found))
            report.skipped += skipped
        report.notes = _notes_on_this_machine(names)
        return report


def unpatch(*names: str) -> "PatchReport":
    """Takes back what `patch` did; without names all of it.

    Every name bound to a replacement gets the framework's object back, those imported
    since among them, except where it was bound to the replacement before `patch`, or
    where the source of the module (or a cell of the notebook) imports it from
    trainfast. What is bound to something else by now is left alone, and the report says
    so.

    Args:
        *names: which names to restore; none: all that are patched.

    Returns:
        A report of what was restored.

    Raises:
        ValueError: an unknown name. One that is not patched is fine.
    """
    with _lock:
        report = PatchReport("restored")
        undone = {name: _active.pop(name, []) for name in _check(names) or [*_active]}
        found = Found(each for some in undone.values() for each in some)
        for name, replacements in undone.items():
            for replacement in replacements:
                changed, left = replacement.undo(found)
                report.add(name, replacement.target, changed, left)
        return report


def is_patched(name: str | None = None) -> bool:
    """Whether `patch` has replaced a framework's names.

    Args:
        name: a name that `patch` takes, such as "adamw"; None: any of them.

    Raises:
        ValueError: an unknown name.
    """
    return bool(_active) if name is None else _check((name,))[0] in _active


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
            gone = [each for each in ready if each not in kept]
            for each in gone:
                each.undo(Found(gone))


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


def _notes_on_this_machine(names: tuple[str, ...]) -> list[str]:
    """What stays torch's on this machine's GPUs. Starts no CUDA in this process, which
    may fork later."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.device_count():
        return []
    if not os.path.exists(find_cuda_library()):
        return ["CUDA tensors keep torch's kernels: built without CUDA"]
    if "attention" in _active and "attention" not in names:
        return [
            "attention on GPUs from sm_80 on keeps torch's flash attention; "
            'trainfast.patch("attention") takes ours'
        ]
    return []


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
            resolve(entry[0])
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
    if package == OWN:
        raise error
