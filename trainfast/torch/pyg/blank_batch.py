"""Empty PyG batches, made without the 46 us that the class itself takes for each."""

from collections.abc import Mapping
from typing import Any
from weakref import ref

from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.storage import (
    BaseStorage,
    EdgeStorage,
    GlobalStorage,
    NodeStorage,
)

_DATA_NAMES = {"_edge_attr_cls", "_tensor_attr_cls", "_store"}
_HETERO_STORES = ("_global_store", "_node_store_dict", "_edge_store_dict")
_HETERO_NAMES = {"_edge_attr_cls", "_tensor_attr_cls", *_HETERO_STORES}

Mappings = Mapping[Any, dict[str, Any]]


class Blank:
    """Makes objects of one class around mappings of attributes.

    Args:
        base: `Data`, `HeteroData` or a subclass: what is batched.
        batched: make `Batch` objects of it, as calling the class makes them: what its
            own `__init__` sets is there first. Otherwise objects of the class itself,
            as unpickling makes them: `__init__` is not called.
    """

    def __init__(self, base: type, batched: bool = True) -> None:
        self.hetero = issubclass(base, HeteroData)
        self.call = lambda: Batch(_base_cls=base)
        sample = self.call() if batched else (HeteroData if self.hetero else Data)()
        self.kind = type(sample) if batched else base
        self.simple = _is_empty(sample)
        self.common = {
            name: value
            for name, value in sample.__dict__.items()
            if name in ("_edge_attr_cls", "_tensor_attr_cls")
        }

    def new(self, mapping: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A homogeneous graph with these attributes, and its store's own names.

        The mapping becomes the object's own.
        """
        if not self.simple:
            out: Any = self.call()
            out._store._mapping.update(mapping)
            return out, out._store.__dict__
        out = object.__new__(self.kind)
        names = out.__dict__
        names.update(self.common)
        store = names["_store"] = object.__new__(GlobalStorage)
        inside = store.__dict__
        inside["_mapping"] = mapping
        inside["_parent"] = ref(out)
        return out, inside

    def new_hetero(self, mappings: Mappings) -> tuple[Any, dict[Any, dict[str, Any]]]:
        """A heterogeneous graph, and the own names of its stores by key.

        Args:
            mappings: attributes by node type (str), edge type (tuple) and of the whole
                graph (None, which comes first).
        """
        if not self.simple:
            return self._called_hetero(mappings)
        out: Any = object.__new__(self.kind)
        names, owner = out.__dict__, ref(out)
        names.update(self.common)
        nodes: dict[Any, Any] = {}
        edges: dict[Any, Any] = {}
        names.update(zip(_HETERO_STORES, (None, nodes, edges)))
        inside: dict[Any, dict[str, Any]] = {}
        for key, mapping in mappings.items():
            if key is None:
                store = names["_global_store"] = object.__new__(BaseStorage)
                inside[key] = store.__dict__
                store.__dict__.update(_mapping=mapping, _parent=owner)
                continue
            if type(key) is str:
                store = nodes[key] = object.__new__(NodeStorage)
            else:
                store = edges[key] = object.__new__(EdgeStorage)
            inside[key] = store.__dict__
            store.__dict__.update(_mapping=mapping, _parent=owner, _key=key)
        return out, inside

    def _called_hetero(self, mappings: Mappings) -> tuple[Any, dict[Any, Any]]:
        out = self.call()
        inside: dict[Any, dict[str, Any]] = {}
        for key, mapping in mappings.items():
            if key is None:
                store = out._global_store
            elif type(key) is str:
                store = out.get_node_store(key)
            else:
                store = out.get_edge_store(*key)
            store._mapping.update(mapping)
            inside[key] = store.__dict__
        return out, inside


def _is_empty(sample: Any) -> bool:
    """True where the object is nothing but empty stores of the known kind."""
    names = sample.__dict__
    if isinstance(sample, HeteroData):
        return (
            set(names) == _HETERO_NAMES
            and _is_bare(names["_global_store"], BaseStorage)
            and not names["_node_store_dict"]
            and not names["_edge_store_dict"]
        )
    if isinstance(sample, Data):
        return set(names) == _DATA_NAMES and _is_bare(names["_store"], GlobalStorage)
    return False


def _is_bare(store: Any, kind: type) -> bool:
    bare = type(store) is kind and set(store.__dict__) == {"_mapping", "_parent"}
    return bare and not store.__dict__["_mapping"]


_blanks: dict[tuple[type, bool], Blank] = {}


def blank(base: type, batched: bool = True) -> Blank:
    """The `Blank` of a class; each is made once."""
    try:
        return _blanks[base, batched]
    except KeyError:
        return _blanks.setdefault((base, batched), Blank(base, batched))
