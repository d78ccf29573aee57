"""PyG's graphs and batches, assembled from the arrays of a GraphBatch.

A batch is equal to `Batch.from_data_list` of the same graphs in every attribute,
including the slices and increments with which PyG separates it into graphs again. The
core has computed all of them; here they get their names.

Source: torch_geometric.data.collate (2.8).
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import NodeStorage

from trainfast.graph_cache.batch import (
    BatchPlan,
    Follow,
    followed,
    graph_mask,
    split_text,
)
from trainfast.graph_cache.schema import Field, Schema
from trainfast.torch.graphs.device import MovedBatch
from trainfast.torch.pyg.blank_batch import blank

__all__ = ["assembler", "item_assembler"]


def assembler(plan: BatchPlan, kind: type | None = None) -> Callable[[Any], Any]:
    """Makes a `DataBatch` or `HeteroDataBatch` of a `GraphBatch` of torch tensors.

    Args:
        plan: what the batches hold.
        kind: the class of the graphs; None: `Data`, or `HeteroData` if there are types.
    """
    return _Assembler(plan, kind or _kind_of(plan.schema)).assemble


def item_assembler(plan: BatchPlan, kind: type) -> Callable[[Any], Any]:
    """Makes a graph of class `kind` of a `GraphBatch` that holds one."""
    return _ItemAssembler(plan, kind).assemble


def _kind_of(schema: Schema) -> type:
    return HeteroData if any(isinstance(k, tuple) for k in schema.keys) else Data


Convert = Callable[[Any, Any], Any]  # (the core's array, the core's batch) -> value


@dataclass
class _Store:
    """The attributes of one store: of the whole graph, a node type or an edge type.

    arrays: by name the place in the batch's fields, ptrs and batches, one after
        another.
    slices, starts: by name the place in the batch's own, and then the constants.
    """

    key: Any  # None, a node type (str) or an edge type (tuple)
    arrays: dict[str, int] = field(default_factory=dict)
    slices: dict[str, int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    converts: list[tuple[str, Convert]] = field(default_factory=list)
    num_nodes: int | None = None  # the array


class _Constants:
    """Slices and increments that are not sums of a count.

    The first two are zeros, for fields without increments, and None.
    """

    def __init__(self, n_counts: int) -> None:
        self.n_counts = n_counts
        self.extras: list[int | tuple[int, ...]] = []  # a fixed size, or two counts
        self.pairs: list[tuple[int, tuple[int, ...]]] = []  # with their places
        self.made: dict[int, list[Any]] = {}  # by the number of graphs

    def slices(self, entry: Field) -> int:
        """The number of a field's slices."""
        size = 1
        if entry.cat_dim is not None and entry.dtype not in ("string", "bytes"):
            size = entry.dims[entry.cat_dim]
        return -1 - size if size < 0 else self._place(size)

    def starts(self, entry: Field) -> int:
        """The number of a field's increments."""
        if entry.dtype in ("string", "bytes"):
            return self.n_counts + 1
        if len(entry.add) == 1:
            return entry.add[0]
        return self._place(entry.add) if entry.add else self.n_counts

    def _place(self, extra: int | tuple[int, ...]) -> int:
        if extra not in self.extras:
            self.extras.append(extra)
            if isinstance(extra, tuple):
                self.pairs.append((1 + len(self.extras), extra))
        return self.n_counts + 2 + self.extras.index(extra)

    def of_batch(self, n: int, starts: list[Any]) -> list[Any]:
        """The constants of a batch of n graphs.

        Args:
            n: the batch's graphs, padding included.
            starts: the batch's sums before each graph, on the CPU.
        """
        constants = self.of(n)
        if self.pairs:
            constants = constants.copy()
        for place, pair in self.pairs:
            # int64 [graphs, 2, 1]; NumPy takes a third of torch.stack's time.
            rows = np.empty((n, 2, 1), np.int64)
            for half, count in enumerate(pair):
                rows[:, half, 0] = starts[count].numpy()
            constants[place] = torch.from_numpy(rows)
        return constants

    def of(self, n: int) -> list[Any]:
        """The constants that are the same in all batches of n graphs."""
        constants = self.made.get(n)
        if constants is not None:
            return constants
        if len(self.made) > 256:  # batches of ever new sizes
            self.made.clear()
        slots = torch.arange(n + 1, device="cpu")
        constants = [slots.new_zeros(n), None]
        for extra in self.extras:
            constants.append(slots * extra if isinstance(extra, int) else None)
        return self.made.setdefault(n, constants)


class _Assembler:
    """Makes batches by one plan."""

    def __init__(self, plan: BatchPlan, kind: type) -> None:
        self.plan = plan
        self.blank = blank(kind)
        self.constants = _Constants(len(plan.schema.counts))
        self.stores = [_Store(key) for key in _store_keys(plan.schema.keys, kind)]
        by_key = {store.key: store for store in self.stores}
        follows = {follow.key: follow for follow in plan.follow}
        for place, (key, number) in enumerate(zip(plan.keys, plan.fields)):
            owner, name = _split(key)
            entry = plan.schema.fields[number]
            self._add(by_key[owner], name, place, entry, follows.get(key))
        for store in self.stores:
            self._add_batch_vector(store)
        self.homogeneous = not self.blank.hetero

    def _add(
        self, store: _Store, name: str, place: int, entry: Field, follow: Follow | None
    ) -> None:
        if name == "ptr":  # PyG leaves it out of batches
            return
        store.arrays[name] = place
        if name == "num_nodes":
            store.num_nodes = place
            return
        # A graph's own x_batch takes the place of what following x has made.
        store.converts = [made for made in store.converts if made[0] != name]
        store.slices[name] = self.constants.slices(entry)
        store.starts[name] = self.constants.starts(entry)
        if entry.dtype in ("string", "bytes"):
            store.converts.append((name, _text_of(entry, place)))
        elif entry.scalar and entry.dtype == "float64":
            store.converts.append((name, _as_default_float))
        if follow is not None:
            for i, ending in enumerate(("batch", "ptr")):
                store.arrays[f"{name}_{ending}"] = place
                convert = _follow_of(self.plan, follow, i)
                store.converts.append((f"{name}_{ending}", convert))

    def _add_batch_vector(self, store: _Store) -> None:
        plan, key = self.plan, store.key
        if isinstance(key, tuple) or (key is None and self.blank.hetero):
            return
        names = [name for owner, name in map(_split, plan.schema.keys) if owner == key]
        nodes = plan.schema.nodes.get("" if key is None else key)
        if nodes is None or not _can_infer_num_nodes(names):
            return
        n_fields, n_counts = len(plan.fields), len(plan.schema.counts)
        vector = n_fields + n_counts + plan.batch_of.index(nodes)
        # What has these names already is replaced in its place, as PyG does it.
        store.arrays.update(batch=vector, ptr=n_fields + nodes)

    def assemble(self, core: Any) -> Any:
        host = _host(core)
        arrays = [*core.fields, *core.ptrs, *core.batches]
        # Slices and increments stay on the CPU, as they do in batch.to(device), and
        # share no memory with what the user gets and may write to.
        starts = host.starts
        constants = self.constants.of_batch(core.n_slots, starts)
        slices, starts = [*host.slices, *constants], [*starts, *constants]
        mappings: dict[Any, dict[str, Any]] = {}
        all_slices: dict[Any, Any] = {}
        all_incs: dict[Any, Any] = {}
        numbers: dict[Any, list[int]] = {}
        for store in self.stores:
            key = store.key
            mapping = {name: arrays[i] for name, i in store.arrays.items()}
            own_slices = {name: slices[i] for name, i in store.slices.items()}
            own_incs = {name: starts[i] for name, i in store.starts.items()}
            mappings[key] = mapping
            for name, convert in store.converts:
                mapping[name] = convert(mapping[name], core)
            if store.num_nodes is not None:
                numbers[key] = host.fields[store.num_nodes].tolist()
                mapping["num_nodes"] = sum(numbers[key])
            if key is None:
                all_slices, all_incs = own_slices, own_incs
            elif own_slices:
                all_slices[key], all_incs[key] = own_slices, own_incs
        if self.plan.padded:
            mappings[None]["graph_mask"] = graph_mask(core)
        if self.homogeneous:
            out, only = self.blank.new(mappings[None])
            inside = {None: only}
        else:
            out, inside = self.blank.new_hetero(mappings)
        for key, values in numbers.items():
            inside[key]["_num_nodes"] = values
        inside[None].update(
            _num_graphs=core.n_slots, _slice_dict=all_slices, _inc_dict=all_incs
        )
        return out


class _ItemAssembler:
    """Makes single graphs by one plan."""

    def __init__(self, plan: BatchPlan, kind: type) -> None:
        self.blank = blank(kind, batched=False)
        self.stores = [_Store(key) for key in _store_keys(plan.keys, kind)]
        by_key = {store.key: store for store in self.stores}
        for place, (key, number) in enumerate(zip(plan.keys, plan.fields)):
            owner, name = _split(key)
            store, entry = by_key[owner], plan.schema.fields[number]
            store.arrays[name] = place
            if entry.dtype in ("string", "bytes"):
                text = _text_of(entry, place)
                store.converts.append((name, lambda *given, text=text: text(*given)[0]))
            elif entry.scalar:
                store.converts.append((name, lambda value, _: value.item()))
            elif entry.cat_dim is None:
                store.converts.append((name, lambda value, _: value[0]))

    def assemble(self, core: Any) -> Any:
        mappings, fields = {}, core.fields
        for store in self.stores:
            mapping = {name: fields[i] for name, i in store.arrays.items()}
            for name, convert in store.converts:
                mapping[name] = convert(mapping[name], core)
            mappings[store.key] = mapping
        if self.blank.hetero:
            return self.blank.new_hetero(mappings)[0]
        return self.blank.new(mappings[None])[0]


def _store_keys(keys: Iterable[Hashable], kind: type) -> list[Hashable]:
    """The keys of a graph's stores in PyG's order: None, node types, edge types."""
    owners = dict.fromkeys(_split(key)[0] for key in keys)
    if not issubclass(kind, HeteroData):
        return [None]
    nodes = [owner for owner in owners if isinstance(owner, str)]
    edges = [owner for owner in owners if isinstance(owner, tuple)]
    return [None, *nodes, *edges]


def _split(key: Any) -> tuple[Any, str]:
    """The store's key and the attribute's name."""
    return key if isinstance(key, tuple) else (None, key)


def _can_infer_num_nodes(names: list[str]) -> bool:
    store = NodeStorage()
    store._mapping.update(dict.fromkeys(names, True))
    return store.can_infer_num_nodes


def _host(core: Any) -> Any:
    """The batch as it was before it moved to a device."""
    return core.host if type(core) is MovedBatch else core


def _text_of(entry: Field, place: int) -> Convert:
    """What makes the list of strings, or bytes, of field `place` of a batch."""
    count, is_string = -1 - entry.dims[0], entry.dtype == "string"

    def text(_: Tensor, core: Any) -> list[Any]:
        host = _host(core)
        field, ends = host.fields[place], host.ptrs[count]
        return split_text(field, ends, is_string, core.n_graphs)

    return text


def _follow_of(plan: BatchPlan, follow: Follow, which: int) -> Convert:
    """What makes a followed attribute's batch vector (0) or ptr (1)."""

    def vector(_: Tensor, core: Any) -> Tensor:
        found: Tensor = followed(plan, core, core.ptrs, follow)[which]
        return found.clone()  # a user may write into one of two equal vectors

    return vector


def _as_default_float(value: Tensor, _: Any) -> Tensor:
    """As torch.tensor makes it of Python's floats."""
    return value.to(torch.get_default_dtype())
