"""Graphs from files of torch and PyG, for `trainfast cache import`.

Loading a pickle runs whatever is in it. So only tensors, plain containers and PyG's own
graph classes are loaded, unless the file is trusted.
"""

import pickle
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_OF_PYG = {
    "torch_geometric.data.data": ("Data", "DataEdgeAttr", "DataTensorAttr"),
    "torch_geometric.data.hetero_data": ("HeteroData",),
    "torch_geometric.data.storage": (
        *("BaseStorage", "NodeStorage", "EdgeStorage", "GlobalStorage"),
    ),
    "torch_geometric.data.graph_store": ("EdgeAttr", "EdgeLayout"),
    "torch_geometric.data.feature_store": ("TensorAttr", "_FieldStatus"),
}


def load_graphs(path: str | Path, trust: bool = False) -> Iterator[Any]:
    """The graphs in a `.pt` file: one (a dict, or PyG's Data), a list of them, or what
    PyG's InMemoryDataset has saved ((data, slices), or with the class).

    `trust` loads any pickle: it can run code. Without it that is a ValueError.
    """
    content = _load(path, trust)
    if isinstance(content, tuple) and _is_sliced(content):
        yield from _slices(*content)
    elif isinstance(content, list | tuple):
        yield from content
    else:
        yield content


def _load(path: str | Path, trust: bool) -> Any:
    classes = []
    if _pyg() is not None:
        for module, names in _OF_PYG.items():
            classes += [getattr(import_module(module), name) for name in names]
    try:
        with torch.serialization.safe_globals(classes):
            return torch.load(path, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        unsupported = re.search(r"(Unsupported|GLOBAL) [^\n]{,120}", str(error))
        reason = unsupported[0] if unsupported else str(error).partition("\n")[0]
        rule = (
            "must have only tensors, containers and PyG's graphs unless it is trusted"
        )
        raise ValueError(f"{path} {rule}, got {reason}") from error
    except (OSError, MemoryError, ImportError, AttributeError):
        raise  # the last two: a class that the file names is not here
    except Exception as error:  # torch's reader ends in any of them
        got = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} must be what torch.save wrote, got {got}") from error


def _pyg() -> ModuleType | None:
    try:
        return import_module("torch_geometric.data")
    except ImportError:
        return None


def _is_sliced(content: tuple[Any, ...]) -> bool:
    if len(content) not in (2, 3):
        return False
    data, slices, *kind = content
    sliced = isinstance(slices, Mapping) or (slices is None and bool(kind))
    return sliced and (isinstance(data, Mapping) or hasattr(data, "to_dict"))


def _slices(
    data: Any, slices: Mapping[Any, Any] | None, kind: Any = None
) -> Iterator[Any]:
    """The graphs of PyG's InMemoryDataset: all in one, and where each begins."""
    if slices is None:  # it has one graph
        yield (
            data
            if kind is None or not isinstance(data, Mapping)
            else (kind.from_dict(dict(data)))
        )
        return
    pyg: Any = _pyg()
    if pyg is None:
        raise ValueError("a processed file of PyG must be read where PyG is installed")
    separate = import_module("torch_geometric.data.separate").separate
    if isinstance(data, Mapping):
        hetero = any(isinstance(value, Mapping) for value in data.values())
        kind = kind or (pyg.HeteroData if hetero else pyg.Data)
        data = kind.from_dict(dict(data))
    for i in range(_length(slices)):
        kind = type(data)
        yield separate(kind, data, idx=i, slice_dict=slices, decrement=False)


def _length(slices: Mapping[Any, Any]) -> int:
    for value in slices.values():
        n = _length(value) if isinstance(value, Mapping) else len(value) - 1
        if n >= 0:
            return n
    return -1
