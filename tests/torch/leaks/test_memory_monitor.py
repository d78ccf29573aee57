"""`MemoryMonitor`: every storage once, by device and dtype, and reference cycles."""

import functools
import json
from collections import OrderedDict, deque

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import trainfast
from trainfast.torch.leaks.reach import reach


def sizes(obj, **options):
    monitor = trainfast.MemoryMonitor().add(obj, "it", **options)
    return monitor.stats().sizes["it"]


def test_model_and_optimizer_are_counted_once():
    model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    found = trainfast.MemoryMonitor().add(model, "model").add(optimizer, "adam").stats()
    parameters = 4 * sum(p.numel() for p in model.parameters())
    buffers = 4 * 2 * 20
    assert found.sizes["model"] == {
        ("cpu", "float32"): 2 * parameters + buffers,  # with gradients
        ("cpu", "int64"): 8,
    }
    steps = 4 * len(list(model.parameters()))
    assert found.sizes["adam"] == {("cpu", "float32"): 2 * parameters + steps}
    assert found.shared == {"model": 0, "adam": 2 * parameters}
    assert found.total == 4 * parameters + buffers + 8 + steps
    assert "counted above" in str(found)
    assert json.loads(found.to_json())["total"] == found.total
    assert "float32" in found._repr_html_()


class Slotted:
    __slots__ = ("inside", "unset")


class Owner:
    def __init__(self, inside):
        self.inside = inside

    @property
    def forbidden(self):
        raise AssertionError("a property was run")

    def method(self):
        return self.inside


def slotted(x):
    made = Slotted()
    made.inside = x
    return made


class Rude(dict):
    def items(self):
        raise AssertionError("the class's own code was run")

    __iter__ = __len__ = values = keys = items


HOLDERS = {
    "attribute": lambda x: Owner(x),
    "slot": slotted,
    "list": lambda x: [[x]],
    "tuple": lambda x: Owner((1, x)),
    "dict": lambda x: {"a": {3: x}},
    "ordered": lambda x: OrderedDict(a=x),
    "set": lambda x: {x},
    "deque": lambda x: deque([x]),
    "closure": lambda x: lambda: x,
    "default": lambda x: lambda y=x: y,
    "partial": lambda x: functools.partial(print, x),
    "method": lambda x: Owner(x).method,
    "generator": lambda x: (y for y in [x]),
    "subclass": lambda x: Rude(a=x),
    "view": lambda x: [x[:1], x.T],
    "numpy": lambda x: [x.numpy()[1:]],
    "detached": lambda x: nn.Parameter(x),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_tensor_is_found_behind(name):
    assert sizes(HOLDERS[name](torch.ones(3, 5))) == {("cpu", "float32"): 60}


def test_attributes_are_followed_only_if_asked():
    held = [Owner(torch.ones(2)), torch.ones(3)]
    assert sizes(held) == {("cpu", "float32"): 20}
    assert sizes(held, track_attributes=False) == {("cpu", "float32"): 12}


def test_memory_of_both_kinds_is_one():
    x = torch.ones(100)
    assert sizes([x, x.numpy(), x.view(10, 10).numpy()]) == {("cpu", "float32"): 400}


def test_dtypes_and_layouts():
    sparse = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (5,))
    held = [sparse, torch.ones(3, dtype=torch.bfloat16), np.zeros(4, np.int16)]
    rows, columns = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1])
    held.append(torch.sparse_csr_tensor(rows, columns, torch.ones(4), (2, 2)))
    held.append(torch.empty(7, device="meta"))
    assert sizes(held) == {
        ("cpu", "int64"): 16 + (3 + 4) * 8,
        ("cpu", "float32"): 8 + 16,
        ("cpu", "bfloat16"): 6,
        ("cpu", "int16"): 8,
        ("meta", "float32"): 28,
    }


def test_classes_modules_and_globals_are_not_followed():
    def function():
        return torch, HOLDERS

    assert sizes([function, torch, nn.Linear]) == {}


def test_object_that_is_gone_is_said():
    monitor = trainfast.MemoryMonitor()
    monitor.add(Owner(torch.ones(2)), "short")
    found = monitor.stats()
    assert found.gone == ["short"] and "no longer exists" in str(found)
    monitor.remove("short")
    assert monitor.stats().gone == []


def test_container_without_weak_references_is_held_until_removed():
    monitor = trainfast.MemoryMonitor().add([torch.ones(2)])
    assert monitor.stats().sizes == {"list": {("cpu", "float32"): 8}}
    assert repr(monitor) == "MemoryMonitor(names=['list'])"
    with pytest.raises(ValueError, match="`name` must be new, got 'list'"):
        monitor.add([])


def test_cycles_that_hold_tensors_are_shown_with_their_path():
    root, empty = Owner([]), Owner(None)
    child = Owner(torch.ones(2))
    child.parent = root
    root.children = {"left": child}
    root.plain = empty
    empty.itself = empty  # holds no tensor
    found = trainfast.MemoryMonitor().add(root, "tree").stats()
    path = ".children['left'].parent is the object itself"
    assert found.cycles == {"tree": [path]}
    assert path in str(found)


def test_long_chains_and_large_lists_end():
    first = last = Owner(None)
    for _ in range(50_000):
        last.inside = last = Owner(None)
    last.inside = torch.ones(1)
    assert sizes(first) == {("cpu", "float32"): 4}
    found = reach([object() for _ in range(100)], most=10)
    assert len(found.objects) == 10 and not found.complete
