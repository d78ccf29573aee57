"""What an object holds: the objects behind its attributes, items and closures."""

import functools
import gc
import itertools
import types
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trainfast.torch.private import sparse_parts, storage_key

# Without tensors of their own, or not the object's: a function's module, an object's
# class, the frame that runs.
_NOT_FOLLOWED = (
    *(type, types.ModuleType, types.CodeType, types.FrameType, weakref.ref),
    *(str, bytes, bytearray, int, float, complex, bool, type(None)),
    *(torch.dtype, torch.device, torch.Generator),
)
_MOST_CYCLES = 20


@dataclass
class Buffer:
    """Memory of tensors or NumPy arrays that share it."""

    size: int  # bytes
    device: str
    dtype: str


@dataclass
class Reach:
    """What `reach` has found.

    Attributes:
        objects: in the order of their distance; the first is the root.
        edges: of each object, the places in `objects` of what it holds, with the label
            that leads there: ".weight", "[0]", "['loss']".
        parents: of each object but the root, the place of the object that led to it.
        complete: False if there were more objects than asked for.
    """

    objects: list[Any]
    edges: list[list[tuple[str, int]]] = field(default_factory=list)
    parents: list[tuple[int, str]] = field(default_factory=list)
    complete: bool = True

    def path(self, place: int) -> str:
        """How the object is reached from the root, such as ".layers[0].weight"."""
        labels = []
        while place:
            place, label = self.parents[place]
            labels.append(label)
        return "".join(reversed(labels))

    def buffers(self) -> dict[int, Buffer]:
        """The memory behind all tensors and arrays, each buffer once, by address."""
        found: dict[int, Buffer] = {}
        for each in self.objects:
            for key, buffer in _buffers(each):
                found.setdefault(key, buffer)
        return found


def reach(root: Any, attributes: bool = True, most: int = 1_000_000) -> Reach:
    """Walks from an object to what it holds, without running code of the objects.

    Weak references, classes, modules and the globals of functions are not followed.

    Args:
        root: where to start.
        attributes: whether to follow attributes; False: items of containers only.
        most: objects to visit.
    """
    found = Reach([root], parents=[(0, "")])
    places = {id(root): 0}
    for place, each in enumerate(found.objects):  # grows on the way
        edges: list[tuple[str, int]] = []
        for label, child in _held(each, attributes, most):
            known = places.get(id(child))
            if known is None:
                if len(found.objects) >= most:
                    found.complete = False
                    continue
                known = places[id(child)] = len(found.objects)
                found.objects.append(child)
                found.parents.append((place, label))
            edges.append((label, known))
        found.edges.append(edges)
    return found


def cycles(found: Reach) -> list[str]:
    """Reference cycles that hold a tensor or array, as "path is path"."""
    holds = _holders(found)
    loops = []
    for members in _strong_components(found.edges):
        first = min(members)  # the nearest to the root
        if first not in holds:
            continue
        back = _way_back(found.edges, first, members)
        if back is not None:
            path = found.path(first)
            loops.append(f"{path}{back} is {path or 'the object itself'}")
    return loops[:_MOST_CYCLES]


def _held(owner: Any, attributes: bool, most: int) -> Iterator[tuple[str, Any]]:
    """What the object holds directly, with the labels that lead there; of a container
    the first `most` items."""
    for label, child in itertools.islice(_items(owner), most):
        if _kept(child):
            yield label, child
    if not attributes or issubclass(type(owner), np.ndarray):
        return
    if isinstance(owner, types.FunctionType):
        for name, cell in zip(owner.__code__.co_freevars, owner.__closure__ or ()):
            contents = gc.get_referents(cell)
            yield from ((f".{name}", value) for value in contents if _kept(value))
        named: dict[str, Any] = dict(owner.__dict__)
        named["__defaults__"] = owner.__defaults__
        named["__kwdefaults__"] = owner.__kwdefaults__
        yield from ((f".{k}", v) for k, v in named.items() if _kept(v))
        return
    seen = set()
    attributes_of = state(owner)
    for name, value in list(attributes_of.items()):
        if _kept(value):
            seen.add(id(value))
            yield f".{name}", value
    if issubclass(type(owner), torch.Tensor):
        if owner.is_leaf and owner.grad is not None:
            yield ".grad", owner.grad
        return
    if issubclass(type(owner), list | tuple | dict | set | frozenset | deque):
        return
    for value in gc.get_referents(owner):  # slots, and attributes of C types
        if _kept(value) and id(value) not in seen and value is not attributes_of:
            yield _label(owner, value), value


def _items(owner: Any) -> Iterator[tuple[str, Any]]:
    # The classes' own methods, which a subclass may have replaced, are not run.
    if issubclass(type(owner), dict):
        yield from ((f"[{_short(k)}]", v) for k, v in list(dict.items(owner)))
    elif issubclass(type(owner), list):
        yield from ((f"[{i}]", v) for i, v in enumerate(list.__iter__(owner)))
    elif issubclass(type(owner), tuple):
        yield from ((f"[{i}]", v) for i, v in enumerate(tuple.__iter__(owner)))
    elif issubclass(type(owner), deque):
        yield from ((f"[{i}]", v) for i, v in enumerate(deque.copy(owner)))
    elif issubclass(type(owner), set | frozenset):
        yield from (("{}", v) for v in gc.get_referents(owner))


def _kept(value: Any) -> bool:
    return not issubclass(type(value), _NOT_FOLLOWED)


def state(owner: Any) -> dict[str, Any]:
    """The instance's attributes; properties are not run."""
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _label(owner: Any, value: Any) -> str:
    if isinstance(owner, types.MethodType):
        return ".__self__" if value is owner.__self__ else ".__func__"
    if isinstance(owner, functools.partial):
        return ".args" if type(value) is tuple else ".func"
    for kind in type(owner).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    if slot.__get__(owner) is value:
                        return f".{name}"
                except AttributeError:  # a slot without a value
                    continue
    return f".<{type(owner).__name__}>"


def _short(key: Any) -> str:
    if type(key) in (str, int, float, bool):
        text = repr(key)
        return text if len(text) <= 40 else f"{text[:37]}..."
    return f"<{type(key).__name__}>"


def _buffers(each: Any) -> Iterator[tuple[int, Buffer]]:
    """Address and memory of a tensor or array; several of a sparse tensor."""
    if issubclass(type(each), np.ndarray):
        root = each
        while isinstance(root.base, np.ndarray):
            root = root.base
        yield root.ctypes.data or id(root), Buffer(root.nbytes, "cpu", str(root.dtype))
    elif issubclass(type(each), torch.Tensor):
        for part in _dense(each):
            try:
                storage = part.untyped_storage()
                address = storage.data_ptr()
                size = storage.nbytes()
            except (NotImplementedError, RuntimeError):  # it has no memory
                continue
            key = address or storage_key(storage)
            dtype = str(part.dtype).removeprefix("torch.")
            yield key, Buffer(size, str(part.device), dtype)


def _dense(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor,)


def _holders(found: Reach) -> set[int]:
    """Places from which a tensor or array can be reached."""
    into: list[list[int]] = [[] for _ in found.objects]
    for place, edges in enumerate(found.edges):
        for _, child in edges:
            into[child].append(place)
    waiting = [
        place
        for place, each in enumerate(found.objects)
        if issubclass(type(each), torch.Tensor | np.ndarray)
    ]
    holds = set(waiting)
    while waiting:
        for place in into[waiting.pop()]:
            if place not in holds:
                holds.add(place)
                waiting.append(place)
    return holds


def _strong_components(edges: list[list[tuple[str, int]]]) -> list[set[int]]:
    """Sets of places that all reach each other (Tarjan 1972), without recursion."""
    count = len(edges)
    order, low = [-1] * count, [0] * count
    on_stack = bytearray(count)
    stack: list[int] = []
    found = []
    time = 0
    work = [(0, 0)]  # everything is reached from the root
    while work:
        place, next_edge = work.pop()
        if next_edge == 0:
            order[place] = low[place] = time
            time += 1
            stack.append(place)
            on_stack[place] = 1
        if next_edge < len(edges[place]):
            work.append((place, next_edge + 1))
            child = edges[place][next_edge][1]
            if order[child] < 0:
                work.append((child, 0))
            elif on_stack[child]:
                low[place] = min(low[place], order[child])
            continue
        if work:
            parent = work[-1][0]
            low[parent] = min(low[parent], low[place])
        if low[place] == order[place]:
            members = set()
            while True:
                member = stack.pop()
                on_stack[member] = 0
                members.add(member)
                if member == place:
                    break
            if len(members) > 1 or any(c == place for _, c in edges[place]):
                found.append(members)
    return found


def _way_back(
    edges: list[list[tuple[str, int]]], first: int, members: set[int]
) -> str | None:
    """Labels of the shortest way from a place to itself within its component."""
    ways = {first: ""}
    waiting = deque([first])
    while waiting:
        place = waiting.popleft()
        for label, child in edges[place]:
            if child == first:
                return ways[place] + label
            if child in members and child not in ways:
                ways[child] = ways[place] + label
                waiting.append(child)
    return None
