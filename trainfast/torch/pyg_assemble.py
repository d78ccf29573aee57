"""PyG's graphs and batches from what the graph cache's core has put together.

A batch is equal to `Batch.from_data_list` of the same graphs, in every attribute, down
to the slices and increments by which PyG takes it apart again. The core has computed
them all on its way; here they only get their names.

Source: torch_geometric.data.collate (2.8).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
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
from trainfast.torch.pyg_batch import blank

__all__ = ["assembler", "item_assembler"]

_NO_INCREMENT, _ZEROS = 0, 1  # places in the table of increments


def assembler(plan: BatchPlan, kind: type | None = None) -> Callable[[Any], Any]:
    """Makes a `DataBatch` or `HeteroDataBatch` of a `GraphBatch` of torch tensors.

    Args:
        plan: what the batches hold.
        kind: the class of the graphs; None: `Data`, or `HeteroData` if there are types.
    """
    kind = kind or _kind_of(plan.schema)
    return _Assembler(plan, kind)


def item_assembler(plan: BatchPlan, kind: type) -> Callable[[Any], Any]:
    """Makes a graph of class `kind` of a `GraphBatch` that holds one."""
    return _ItemAssembler(plan, kind)


def _kind_of(schema: Schema) -> type:
    return HeteroData if any(isinstance(k, tuple) for k in schema.keys) else Data


@dataclass
class _Store:
    """The attributes of one store: of the whole graph, a node type or an edge type."""

    key: Hashable
    names: list[str] = field(default_factory=list)  # of all that a batch has
    places: list[int] = field(default_factory=list)  # theirs in the batch's fields
    sliced: list[str] = field(default_factory=list)  # names that have slices
    slices: list[int] = field(default_factory=list)  # places in the table of slices
    incs: list[int] = field(default_factory=list)  # places in the table of increments
    # name -> what makes the value of the core's array, the batch and the field's place
    converts: dict[str, Callable[..., Any]] = field(default_factory=dict)
    follows: dict[str, Follow] = field(default_factory=dict)
    num_nodes: bool = False
    nodes: int | None = None  # the count whose batch vector it gets
    batch: int = 0  # the batch vector's place

    def freeze(self) -> "_Store":
        self.take_fields = _taker(self.places)
        self.take_slices = _taker(self.slices)
        self.take_incs = _taker(self.incs)
        return self


def _taker(places: list[int]) -> Callable[[Sequence[Any]], Any]:
    """table -> the entries at these places, as a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda table: [table[place] for place in places]


class _Tables:
    """Which slices and increments a plan's batches need, each made once a batch."""

    def __init__(self, n_counts: int) -> None:
        self.n_counts = n_counts
        self.sizes: list[int] = []  # fixed ones: slices that depend on nothing else
        self.adds: list[tuple[int, ...]] = []
        self.constants: dict[int, tuple[list[Tensor], Tensor]] = {}

    def slices_place(self, entry: Field) -> int:
        """In [the counts' sums, then those of the fixed sizes]."""
        size = 1
        if entry.cat_dim is not None and entry.dtype not in ("string", "bytes"):
            size = entry.dims[entry.cat_dim]
        if size < 0:
            return -1 - size
        if size not in self.sizes:
            self.sizes.append(size)
        return self.n_counts + self.sizes.index(size)

    def incs_place(self, entry: Field) -> int:
        """In [None, zeros, then what `adds` says]."""
        if entry.dtype in ("string", "bytes"):
            return _NO_INCREMENT
        if not entry.add:
            return _ZEROS
        if entry.add not in self.adds:
            self.adds.append(entry.add)
        return 2 + self.adds.index(entry.add)

    def of_batch(self, ptrs: list[Tensor], n: int) -> tuple[list[Any], list[Any]]:
        """The tables of slices and increments of a batch of n graphs."""
        made = self.constants.get(n)
        if made is None:
            made = self.make_constants(n)
        fixed, zeros = made
        incs: list[Any] = [None, zeros]
        for add in self.adds:
            if len(add) == 1:
                incs.append(ptrs[add[0]][:-1])
            else:  # int64 [graphs, 2, 1]; NumPy takes a third of torch.stack's time
                rows = np.empty((n, 2, 1), np.int64)
                rows[:, 0, 0] = ptrs[add[0]].numpy()[:-1]
                rows[:, 1, 0] = ptrs[add[1]].numpy()[:-1]
                incs.append(torch.from_numpy(rows))
        return [*ptrs, *fixed], incs

    def make_constants(self, n: int) -> tuple[list[Tensor], Tensor]:
        if len(self.constants) > 256:  # batches of ever new sizes
            self.constants.clear()
        slots = torch.arange(n + 1, device="cpu")
        fixed = [slots * size for size in self.sizes]
        made = fixed, torch.zeros(n, dtype=torch.int64, device="cpu")
        return self.constants.setdefault(n, made)


class _Assembler:
    """Makes batches by one plan."""

    def __init__(self, plan: BatchPlan, kind: type) -> None:
        self.plan = plan
        self.blank = blank(kind)
        self.tables = _Tables(len(plan.schema.counts))
        self.stores = [self._store(key) for key in _store_keys(plan.schema, kind)]
        self.by_key = {store.key: store for store in self.stores}
        follows = {follow.key: follow for follow in plan.follow}
        for place, (key, number) in enumerate(zip(plan.keys, plan.fields)):
            owner, name = _split(key)
            store, entry = self.by_key[owner], plan.schema.fields[number]
            self._add(store, name, place, entry, follows.get(key))
        for store in self.stores:
            store.freeze()
        only = self.stores[0]
        self.homogeneous = not self.blank.hetero
        self.simple = self.homogeneous and not (
            only.converts or only.follows or only.num_nodes or plan.padded
        )

    def _store(self, key: Hashable) -> _Store:
        store, schema = _Store(key), self.plan.schema
        if isinstance(key, tuple) or (key is None and self.blank.hetero):
            return store
        names = [name for owner, name in map(_split, schema.keys) if owner == key]
        nodes = schema.nodes.get("" if key is None else key)
        if nodes is not None and _can_infer_num_nodes(names):
            store.nodes = nodes
            store.batch = self.plan.batch_of.index(nodes)
        return store

    def _add(
        self, store: _Store, name: str, place: int, entry: Field, follow: Follow | None
    ) -> None:
        if name == "ptr":  # PyG leaves it out of batches
            return
        store.names.append(name)
        store.places.append(place)
        if name == "num_nodes":
            store.num_nodes = True
            return
        store.sliced.append(name)
        store.slices.append(self.tables.slices_place(entry))
        store.incs.append(self.tables.incs_place(entry))
        if entry.dtype in ("string", "bytes"):
            store.converts[name] = _text_of(entry)
        elif entry.scalar and entry.dtype == "float64":
            store.converts[name] = _as_default_float
        if follow is not None:
            store.follows[name] = follow

    def __call__(self, core: Any) -> Any:
        n, ptrs, fields = core.n_slots, core.ptrs, core.fields
        # Slices and increments stay on the CPU, as they do in batch.to(device).
        host = getattr(core, "host", None)
        slices, incs = self.tables.of_batch(ptrs if host is None else host.ptrs, n)
        if not self.simple:
            return self._assemble(core, n, ptrs, fields, slices, incs)
        store = self.stores[0]
        mapping = dict(zip(store.names, store.take_fields(fields)))
        if store.nodes is not None:
            mapping["batch"] = core.batches[store.batch]
            mapping["ptr"] = ptrs[store.nodes].clone()  # its slices stay as they are
        out, inside = self.blank.new(mapping)
        inside["_num_graphs"] = n
        inside["_slice_dict"] = dict(zip(store.sliced, store.take_slices(slices)))
        inside["_inc_dict"] = dict(zip(store.sliced, store.take_incs(incs)))
        return out

    def _assemble(
        self,
        core: Any,
        n: int,
        ptrs: list[Tensor],
        fields: list[Any],
        slices: list[Any],
        incs: list[Any],
    ) -> Any:
        """Batches of several stores, and whatever is not a plain tensor in them."""
        mappings: dict[Any, dict[str, Any]] = {}
        slice_dict: dict[Any, Any] = {}
        inc_dict: dict[Any, Any] = {}
        numbers: dict[Any, list[int]] = {}
        for store in self.stores:
            key = store.key
            mappings[key] = self._mapping(store, core, ptrs, fields, numbers)
            for whole, take, table in (
                (slice_dict, store.take_slices, slices),
                (inc_dict, store.take_incs, incs),
            ):
                part = dict(zip(store.sliced, take(table)))
                if key is None:
                    whole.update(part)
                elif part:
                    whole[key] = part
        if self.plan.padded:
            mappings[None]["graph_mask"] = graph_mask(core)
        if self.homogeneous:
            out, only = self.blank.new(mappings[None])
            inside = {None: only}
        else:
            out, inside = self.blank.new_hetero(mappings)
        for key, values in numbers.items():
            inside[key]["_num_nodes"] = values
        inside[None].update(_num_graphs=n, _slice_dict=slice_dict, _inc_dict=inc_dict)
        return out

    def _mapping(
        self,
        store: _Store,
        core: Any,
        ptrs: list[Tensor],
        fields: list[Any],
        numbers: dict[Any, list[int]],
    ) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for name, place, value in zip(
            store.names, store.places, store.take_fields(fields)
        ):
            convert = store.converts.get(name)
            mapping[name] = value if convert is None else convert(value, core, place)
            follow = store.follows.get(name)
            if follow is not None:
                pair = followed(self.plan, core, ptrs, follow)
                mapping[f"{name}_batch"], mapping[f"{name}_ptr"] = map(_own, pair)
        if store.num_nodes:
            place = store.places[store.names.index("num_nodes")]
            numbers[store.key] = _host(core).fields[place].tolist()
            mapping["num_nodes"] = sum(numbers[store.key])
        if store.nodes is not None:
            mapping["batch"] = core.batches[store.batch]
            mapping["ptr"] = ptrs[store.nodes].clone()
        return mapping


class _ItemAssembler:
    """Makes single graphs by one plan."""

    def __init__(self, plan: BatchPlan, kind: type) -> None:
        self.blank = blank(kind, batched=False)
        self.stores = [_Store(key) for key in _store_keys(plan.schema, kind)]
        by_key = {store.key: store for store in self.stores}
        for place, (key, number) in enumerate(zip(plan.keys, plan.fields)):
            owner, name = _split(key)
            store, entry = by_key[owner], plan.schema.fields[number]
            store.names.append(name)
            store.places.append(place)
            if entry.dtype in ("string", "bytes"):
                text = _text_of(entry)
                store.converts[name] = lambda *given, text=text: text(*given)[0]
            elif entry.scalar:
                store.converts[name] = lambda value, *_: value.item()
            elif entry.cat_dim is None:
                store.converts[name] = lambda value, *_: value[0]
        for store in self.stores:
            store.freeze()

    def __call__(self, core: Any) -> Any:
        fields = core.fields
        mappings = {}
        for store in self.stores:
            mapping = dict(zip(store.names, store.take_fields(fields)))
            places = dict(zip(store.names, store.places))
            for name, convert in store.converts.items():
                mapping[name] = convert(mapping[name], core, places[name])
            mappings[store.key] = mapping
        if self.blank.hetero:
            return self.blank.new_hetero(mappings)[0]
        return self.blank.new(mappings[None])[0]


def _store_keys(schema: Schema, kind: type) -> list[Hashable]:
    """The keys of a graph's stores in PyG's order: None, node types, edge types."""
    owners = dict.fromkeys(_split(key)[0] for key in schema.keys)
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
    return getattr(core, "host", core)


def _text_of(entry: Field) -> Callable[..., list[Any]]:
    """(value, batch, place) -> the strings, or bytes, of the batch's field there."""
    count, is_string = -1 - entry.dims[0], entry.dtype == "string"

    def text(value: Tensor, core: Any, place: int) -> list[Any]:
        host = _host(core)
        ends = host.ptrs[count]
        return split_text(host.fields[place], ends, is_string, core.n_graphs)

    return text


def _as_default_float(value: Tensor, *_: Any) -> Tensor:
    """As torch.tensor makes it of Python's floats."""
    return value.to(torch.get_default_dtype())


def _own(value: Tensor) -> Tensor:
    """Memory of its own: a user may write into one of two equal vectors."""
    return value.clone()
