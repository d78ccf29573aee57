"""What grows, in words: how much a step, what holds it, where, and what to do."""

import os
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from trainfast.notebook import is_cell, place_name
from trainfast.torch.leaks import graphs, scopes
from trainfast.torch.leaks.census import Growth
from trainfast.torch.leaks.owner import Owner, find_owner, place
from trainfast.torch.leaks.reach import reach

_LEAST_BYTES = 32 << 10  # a step
_LEAST_OBJECTS = 10
_MOST_OBJECTS = 20_000  # that are looked at behind new elements
MIB = 1 << 20


@dataclass
class Leak:
    """What grows with every step.

    Attributes:
        what: such as "list `losses`".
        contents: what it gets, such as "1 tensor a step, each keeps its graph".
        file, line: where it is made, or where what it gets is made if a library's
            object holds it; line 0 where no script's line is known.
        growth: such as "+3.1 MiB a step", host and GPU memory together.
        remedy: what to do.
    """

    what: str
    contents: str
    file: str
    line: int
    growth: str
    remedy: str

    def __str__(self) -> str:
        where = f" in {_place_name(self.file, self.line)}" if self.line else ""
        return f"{self.growth}: {self.what}{where}, {self.contents}; {self.remedy}"


def _place_name(path: str, line: int) -> str:
    return place_name(path if is_cell(path) else os.path.basename(path), line)


def size(n: float) -> str:
    """Such as "3.1 MiB" or "12 KiB"."""
    return f"{n / MIB:.1f} MiB" if n >= MIB / 10 else f"{n / 1024:.0f} KiB"


def _a_step(n: float) -> str:
    return f"+{size(n)} a step"


def of_containers(grown: list[Growth], measured: float) -> list[Leak]:
    """The leaks among the containers that grew, the script's and the largest first.

    Args:
        grown: the containers.
        measured: bytes a step that the process got.
    """
    found: list[tuple[bool, float, Leak]] = []
    hidden = {id(grown)} | {id(each) for each in grown}
    hidden |= {id(each.__dict__) for each in grown}
    for growth in grown:
        new = growth.new()
        contents = _Contents(new, growth.old(), growth.span())
        if not contents.matters:
            continue
        owner = find_owner(growth.container, hidden | {id(new)})
        if owner is None or owner.limited:
            continue
        leak = _of_container(growth.container, owner, contents, measured)
        found.append((owner.is_script or bool(contents.made), contents.bytes, leak))
    found.sort(key=lambda each: each[:2], reverse=True)
    return [leak for _, _, leak in found]


def of_graph(looks: set[int], measured: float) -> Leak | None:
    """The tensor whose graph goes through the steps before, or None."""
    found = graphs.chained(looks)
    if found is None:
        return None
    tensor, nodes = found
    owner = find_owner(tensor, {id(found)})
    what = f"the graph of `{owner.name}`" if owner else "a tensor's graph"
    file, line = (owner.file, owner.line) if owner and owner.is_script else ("", 0)
    return Leak(
        what,
        f"{nodes} operations that reach back through the steps before",
        file,
        line,
        _a_step(measured),
        "call .detach() on what one step hands to the next, or add up .item()",
    )


def of_classes(
    more: dict[type, tuple[list[Any], int]], steps: int, measured: float
) -> Leak | None:
    """The class of a script that gets more objects, where no container grows; such as
    the nodes of a linked list."""
    for kind, (members, got) in sorted(more.items(), key=lambda item: -item[1][1]):
        file, line = place(kind)
        if not line:  # a library's class, which something of the script's holds
            continue
        contents = _Contents(members, [], steps * len(members) / got)
        if contents.matters:
            return Leak(
                f"objects of {kind.__qualname__}",
                contents.text,
                file,
                line,
                _a_step(max(measured, contents.bytes)),
                "drop the references that one step leaves to the next",
            )
    return None


class _Contents:
    """New elements: how many a step, what they hold, where they were made."""

    def __init__(self, new: list[Any], old: list[Any], steps: float) -> None:
        known = reach(old, most=_MOST_OBJECTS)
        ids = {id(each) for each in known.objects}
        found = reach(new, most=_MOST_OBJECTS)
        objects = [x for x in found.objects[1:] if id(x) not in ids]
        followed = {id(each) for each in objects}
        atoms = [x for x in new if id(x) not in followed and id(x) not in ids]
        buffers = found.buffers()
        for key in known.buffers():
            buffers.pop(key, None)
        taken = sum(buffer.size for buffer in buffers.values())
        taken += sum(map(_own_size, (*objects, *atoms)))
        tensors = [x for x in objects if issubclass(type(x), torch.Tensor)]
        self.with_graph = any(tensor.grad_fn is not None for tensor in tensors)
        self.bytes = taken / steps
        self.objects = (len(objects) + len(atoms)) / steps
        self.kind = _common_kind(new)
        self.made = _made((*new, *objects))
        self.text = f"{_number(len(new) / steps, self.kind)} a step"
        if tensors and not issubclass(type(new[0]), torch.Tensor):
            self.text += f" with {_number(len(tensors) / steps, 'tensor')}"
        if self.with_graph:
            self.text += ", each keeps its graph"

    @property
    def matters(self) -> bool:
        large = self.bytes >= _LEAST_BYTES or self.objects >= _LEAST_OBJECTS
        return self.with_graph or large


def _of_container(
    container: Any, owner: Owner, contents: _Contents, measured: float
) -> Leak:
    what = f"{type(container).__name__} `{owner.name}`"
    if owner.name.startswith("cache of "):
        what = owner.name
    file, line, text = owner.file, owner.line, contents.text
    if owner.of_library or not owner.is_script:
        file, line = contents.made or (file, line if owner.is_script else 0)
    else:
        added = scopes.additions(file, owner.variable)
        if added:
            text += f" (added in {_place_name(*added[-1])})"
    grows = _a_step(max(measured, contents.bytes))
    return Leak(what, text, file, line, grows, _remedy(container, owner, contents))


def _remedy(container: Any, owner: Owner, contents: _Contents) -> str:
    if owner.name.endswith("_hooks"):
        return "register the hook once, or call remove() of its handle"
    if "figs" in owner.name and "Gcf" in owner.name:
        return "call plt.close(figure)"
    if owner.name.startswith("cache of "):
        return "give functools.lru_cache a maxsize"
    if contents.with_graph:
        return "keep .item() or .detach() of it"
    if "DataLoader" in contents.kind:
        return "make the loader once, before the loop"
    if issubclass(type(container), dict):
        return "clear it, or bound it if it is a cache"
    return "clear it, or keep only what is needed"


def _made(objects: Iterable[Any]) -> tuple[str, int] | None:
    """File and line of the script that made the first object that tracemalloc knows."""
    for each in objects:
        trace = tracemalloc.get_object_traceback(each)
        for frame in reversed(trace or ()):
            if scopes.is_script(frame.filename):
                return frame.filename, frame.lineno
    return None


def _common_kind(new: list[Any]) -> str:
    kind = Counter(map(type, new)).most_common(1)[0][0]
    return "tensor" if issubclass(kind, torch.Tensor) else kind.__name__


def _number(n: float, kind: str) -> str:
    return f"{n:.3g} {kind}{'s' if n > 1 and kind[-1].isalpha() else ''}"


def _own_size(each: Any) -> int:
    try:
        return sys.getsizeof(each)
    except Exception:  # an object's own __sizeof__ may do anything
        return 0
