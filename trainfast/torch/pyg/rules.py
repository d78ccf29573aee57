"""Converts PyG's graphs to flat dicts for the graph cache, with batching rules.

PyG asks each graph's `__cat_dim__` and `__inc__` how to batch an attribute. For `Data`
and `HeteroData` the answers follow from names and numbers of nodes. A class with own
methods is asked for every graph when it is stored: what `__inc__` says is stored with
the graph, as one number, or as two for the rows of an index between two node types.

Sources: torch_geometric.data.collate, Data.__inc__ and HeteroData.__inc__ (2.8).
"""

from collections.abc import Hashable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.storage import EdgeStorage, NodeStorage

from trainfast.graph_cache.schema import Counted, Rule

__all__ = ["Flattener"]

_KINDS = {Tensor, bool, int, float, str, bytes}
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
# Of a class with another one of these, each graph is asked.
_ASKED = ("__getattr__", "__getattribute__", "stores", "node_stores", "num_nodes")
_ASKED_FOR = {"__inc__": ("__inc__", *_ASKED), "__cat_dim__": ("__cat_dim__", *_ASKED)}


def as_in_pyg(base: type, name: str) -> Any:
    """The attribute of PyG's class; None if a script has replaced it."""
    found = getattr(base, name)
    function = found.fget if isinstance(found, property) else found
    module = getattr(function, "__module__", None)
    inherited = found is getattr(object, name, None)
    return found if inherited or str(module).startswith("torch_geometric.") else None


_PLAIN = {
    base: {name: as_in_pyg(base, name) for name in ("__inc__", "__cat_dim__", *_ASKED)}
    for base in (Data, HeteroData)
}
_LARGEST = 2**32 - 1  # of a count
# What `__inc__` says, apart from 0: each key's number of nodes, one number, or two.
_NODES, _ONE, _TWO = "nodes", "increment", "increments"


class Flattener:
    """Converts graphs of one class to flat dicts of arrays; knows the keys' rules.

    `kind` is the class, `rules` what `trainfast.graph_cache.build` is to be told; a key
    that comes later enters the rules when it does. Called with a graph it returns a
    `Counted`: arrays by name, (node type, name) or (edge type, name).

    Args:
        samples: the first graphs; increments that none of them has are refused later.

    Raises:
        NotImplementedError: what cannot be stored, naming the attribute.
    """

    def __init__(self, samples: Sequence[Any]) -> None:
        self.kind = type(samples[0])
        if not issubclass(self.kind, (Data, HeteroData)) or issubclass(
            self.kind, Batch
        ):
            name = self.kind.__name__
            raise NotImplementedError(f"graphs must be Data or HeteroData, got {name}")
        self.hetero = issubclass(self.kind, HeteroData)
        plain = _PLAIN[HeteroData if self.hetero else Data]
        self.own = [
            method
            for method, names in _ASKED_FOR.items()
            if any(getattr(self.kind, name) is not plain[name] for name in names)
        ]
        self.rules: dict[Hashable, Rule] = {}
        for sample in samples:
            for store, key, name, value in self._attributes(sample):
                if key not in self.rules or self.rules[key].add is None:
                    self.rules[key] = self._rule(sample, store, key, name, value)

    def __call__(self, graph: Any) -> Counted:
        """The graph's attributes and counts. Raises NotImplementedError."""
        flat: dict[Hashable, Any] = {}
        counts: dict[tuple[Any, ...], int] = {}
        for store in graph.stores:
            if isinstance(store, NodeStorage):
                # Asked where nothing tells it, PyG would warn, and answer None.
                known = store.can_infer_num_nodes
                nodes = store.num_nodes if known else None
                counts["nodes", store._key or ""] = nodes or 0
        for store, key, name, value in self._attributes(graph):
            rule = self.rules.get(key)
            if rule is None:
                rule = self.rules[key] = self._rule(graph, store, key, name, value)
            if self.own or rule.add in (_ONE, _TWO):
                self._count(graph, store, key, name, value, rule, counts)
            flat[key] = value
        return Counted(flat, counts)

    def _attributes(self, graph: Any) -> list[tuple[Any, Hashable, str, Any]]:
        """(store, key, name, value) of all that a graph has, checked."""
        if type(graph) is not self.kind:
            wanted, got = self.kind.__name__, type(graph).__name__
            raise NotImplementedError(f"all graphs must be {wanted}, got a {got}")
        found = []
        for store in graph.stores:
            kind = store._key
            if kind is not None and not store._mapping:
                rule = "must have an attribute, num_nodes at least, to be stored"
                raise NotImplementedError(f"type {kind!r} {rule}, got none")
            for name, value in store._mapping.items():
                key = name if kind is None else (kind, name)
                _check_value(key, value)
                if name == "num_nodes" and type(value) is not int:
                    got = type(value).__name__
                    raise NotImplementedError(f"{key!r} must be an int, got {got}")
                found.append((store, key, name, value))
        return found

    def _rule(
        self, graph: Any, store: Any, key: Hashable, name: str, value: Any
    ) -> Rule:
        """How a key is batched. In PyG the first graph of a batch decides."""
        if name in ("num_nodes", "ptr") or isinstance(value, str | bytes):
            return Rule(add=None)
        cat_dim = self._cat_dim(graph, store, key, name, value)
        add: Any = None
        if "__inc__" in self.own:
            add = _form_of(key, value, _increment(graph, store, key, name, value))
            if add is None and self._plain_add(store, name, value) is not None:
                add = _ONE  # a name that increments: this graph's 0 tells nothing
        else:
            add = self._plain_add(store, name, value)
            if add == _TWO and (value.dim() != 2 or value.size(0) != 2):
                got = tuple(value.shape)
                raise NotImplementedError(f"{key!r} must have two rows, got {got}")
            if add == _NODES and name not in ("edge_index", "face"):
                add = _ONE  # its values need not be numbers of nodes
        _check_incremented(key, value, add)
        if add == _TWO and name == "edge_index" and "__inc__" not in self.own:
            add = ("rows", store._key[0], store._key[-1])
        return Rule(cat_dim=cat_dim, add=add)

    def _plain_add(self, store: Any, name: str, value: Any) -> str | None:
        """What `Data.__inc__` or `HeteroData.__inc__` adds, by the name."""
        if "batch" in name and isinstance(value, Tensor):
            return _ONE
        if self.hetero:
            is_index = isinstance(store, EdgeStorage) and "index" in name
            return _TWO if is_index else None
        return _NODES if "index" in name or name == "face" else None

    def _cat_dim(
        self, graph: Any, store: Any, key: Hashable, name: str, value: Any
    ) -> int | None:
        """The dimension, or None where graphs are stacked."""
        if not isinstance(value, Tensor):
            return None
        dim = graph.__cat_dim__(name, value, store)
        if dim is not None and type(dim) is not int:
            rule = "must be concatenated along one dimension"
            raise NotImplementedError(f"{key!r} {rule}, got __cat_dim__ {dim!r}")
        return dim if value.dim() else None

    def _count(
        self,
        graph: Any,
        store: Any,
        key: Hashable,
        name: str,
        value: Any,
        rule: Rule,
        counts: dict[tuple[Any, ...], int],
    ) -> None:
        """Records what this graph adds to the values of the graphs after it."""
        if name in ("num_nodes", "ptr") or isinstance(value, str | bytes):
            return
        if "__cat_dim__" in self.own:
            dim = self._cat_dim(graph, store, key, name, value)
            if dim != rule.cat_dim:
                rule_text = f"must have the __cat_dim__ of the first, {rule.cat_dim}"
                raise NotImplementedError(f"{key!r} {rule_text}, got {dim}")
        inc = _increment(graph, store, key, name, value)
        form = _form_of(key, value, inc)
        if rule.add == _TWO:
            if form != _TWO:
                raise NotImplementedError(f"{key!r} must add two numbers, got {inc}")
            for row, number in enumerate(inc.flatten().tolist()):
                counts["increment", key, row] = _checked(key, number)
        elif rule.add == _ONE and form != _TWO:
            counts["increment", key] = _checked(key, inc)
        elif form is not None and "__inc__" in self.own:
            rule_text = "must add the same kind of number as in the first graphs"
            raise NotImplementedError(f"{key!r} {rule_text}, got __inc__ {inc}")


def _check_value(key: Hashable, value: Any) -> None:
    """Raises NotImplementedError for a value that the cache would not restore."""
    kind = type(value)
    if kind not in _KINDS:
        kinds = "a dense tensor, bool, int, float, str or bytes to be stored"
        raise NotImplementedError(f"{key!r} must be {kinds}, got {kind.__name__}")
    if kind is Tensor:
        if value.layout is not torch.strided or value.is_nested:
            got = "a nested tensor" if value.is_nested else value.layout
            raise NotImplementedError(f"{key!r} must be dense, got {got}")
        if value.requires_grad:
            raise NotImplementedError(f"{key!r} requires gradients; .detach() it first")


def _increment(graph: Any, store: Any, key: Hashable, name: str, value: Any) -> Any:
    """The result of `__inc__`: an int, or a tensor of ints with dimensions."""
    said = graph.__inc__(name, value, store)
    try:
        inc: Any = torch.as_tensor(said) if isinstance(said, list | tuple) else said
        if isinstance(inc, Tensor) and inc.dim():
            if inc.dtype in _INTEGERS:
                return inc
        else:
            number: Any = inc.item() if isinstance(inc, Tensor) else inc
            return index(number)
    except (TypeError, ValueError, RuntimeError):
        pass
    rule = "must add an integer, or two of them"
    raise NotImplementedError(f"{key!r} {rule}, got __inc__ {said!r}")


def _form_of(key: Hashable, value: Any, inc: Any) -> str | None:
    """The form of a result of `__inc__`: nothing to add, one number or two."""
    if isinstance(inc, Tensor) and inc.dim():
        if tuple(inc.shape) != (2, 1):
            got = tuple(inc.shape)
            rule = "must add a number or a tensor of shape (2, 1)"
            raise NotImplementedError(f"{key!r} {rule}, got one of {got}")
        if not isinstance(value, Tensor) or value.dim() != 2 or value.size(0) != 2:
            raise NotImplementedError(f"{key!r} must have two rows to add two numbers")
        return _TWO
    return _ONE if inc != 0 else None


def _check_incremented(key: Hashable, value: Any, add: str | None) -> None:
    if add is None or type(value) is int:
        return
    if not isinstance(value, Tensor) or value.dtype not in _INTEGERS:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        rule = "must be integers, as PyG adds to them in batches; rename it otherwise"
        raise NotImplementedError(f"{key!r} {rule}, got {got}")


def _checked(key: Hashable, number: int) -> int:
    if not 0 <= number <= _LARGEST:
        rule = f"must add a number in 0 .. {_LARGEST}"
        raise NotImplementedError(f"{key!r} {rule}, got {number}")
    return number
