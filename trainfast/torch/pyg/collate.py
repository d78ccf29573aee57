"""The replacement of PyG's collate under trainfast.patch("pyg").

The result is PyG's, in every attribute. What is faster: sizes and increments of all
graphs are computed at once, values are concatenated once and incremented in place, and
the batch comes without a call of its class. An attribute that is not a dense tensor on
the CPU or a number is left to PyG; so is a list whose class has collate rules of its
own, in whole, which trainfast.stats() counts.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.batch import collate as _first_found
from torch_geometric.data.storage import N_KEYS, EdgeStorage, NodeStorage

from trainfast.stats import count_call, count_fallback
from trainfast.torch.pyg.blank_batch import blank
from trainfast.torch.pyg.dataset import Picked
from trainfast.torch.pyg.rules import as_in_pyg

__all__ = ["collate", "collate_dataset"]

_theirs: Callable[..., Any] = _first_found
_inside = inspect.getmodule(_theirs)
_collate: Any = getattr(_inside, "_collate", None)
_batch_and_ptr: Any = getattr(_inside, "_batch_and_ptr", None)

# A class that has other ones is batched by its own rules.
_RULES = (
    *("__inc__", "__cat_dim__", "__getattr__", "__getattribute__", "__getitem__"),
    *("stores", "node_stores", "stores_as", "num_nodes"),
)
_PLAIN = {
    base: {name: as_in_pyg(base, name) for name in _RULES}
    for base in (Data, HeteroData)
}
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


class _UnsuitableError(Exception):
    """Why the graphs of a list are left to PyG."""


def collate(
    cls: type,
    data_list: Iterable[Any],
    increment: bool = True,
    add_batch: bool = True,
    follow_batch: Iterable[str] | None = None,
    exclude_keys: Iterable[str] | None = None,
) -> tuple[Any, dict[Any, Any], dict[Any, Any]]:
    """`torch_geometric.data.collate.collate`, with the same results.

    Args:
        cls: `Batch`, or the class of the graphs.
        data_list: graphs: `Data` or `HeteroData`, all with the first one's attributes.
        increment: make node numbers those of the batch.
        add_batch: add `batch` and `ptr`.
        follow_batch: attributes that get a `{name}_batch` and a `{name}_ptr`.
        exclude_keys: attributes to leave out.

    Returns:
        The batch, its slices and its increments by attribute.

    Raises:
        What PyG raises for graphs that do not fit together.
    """
    follow, exclude = set(follow_batch or ()), set(exclude_keys or ())
    if type(data_list) is Picked and cls is Batch and increment and add_batch:
        batch = data_list.batch(sorted(follow), sorted(exclude))
        if batch is not None:
            count_call("pyg", "collate")
            return batch, batch._slice_dict, batch._inc_dict
    graphs = data_list if isinstance(data_list, (list, tuple)) else list(data_list)
    try:
        job = _Job(cls, graphs, increment, add_batch, follow, exclude)
        try:
            result = job.run()
        finally:
            job.by_key.clear()  # a cycle would keep the batch's memory for long
    except _UnsuitableError as error:
        count_fallback("pyg", str(error))
    except Exception as error:  # PyG's collate runs next and raises its own
        count_fallback("pyg", f"{type(error).__name__} in collate")
    else:
        count_call("pyg", "collate")
        return result
    return _theirs(cls, graphs, increment, add_batch, follow, exclude)


def collate_dataset(*args: Any, **kwargs: Any) -> Any:
    """`collate` again: as the name that `InMemoryDataset` looks up."""
    return collate(*args, **kwargs)


_largest = 0  # bytes of a batch so far


def _keep_memory(batch: int) -> None:
    """Makes the C library keep a batch's memory, in bytes, from one batch to the next.

    A batch's arrays lie one after another, so that dropping the batch frees them at the
    heap's end, where glibc returns more than twice its largest block so far to the
    system: each batch would fault all its pages in again, which takes 15 times as long
    as filling them. A larger block that comes and goes, untouched, raises that limit.
    """
    global _largest
    if batch > _largest:
        _largest = 2 * batch
        torch.empty(_largest, dtype=torch.uint8)


def _kind_of(graphs: Sequence[Any]) -> type:
    """`Data` or `HeteroData`, where all graphs follow its rules."""
    kinds = {type(graph) for graph in graphs}
    base = HeteroData if issubclass(type(graphs[0]), HeteroData) else Data
    for kind in kinds:
        if not issubclass(kind, base) or issubclass(kind, Batch):
            raise _UnsuitableError(f"{kind.__name__} in a list")
        for name, rule in _PLAIN[base].items():
            if getattr(kind, name) is not rule:
                raise _UnsuitableError(f"a class with {name} of its own")
    return base


class _Job:
    """One call of collate: what is the same for all stores."""

    def __init__(
        self,
        cls: type,
        graphs: Sequence[Any],
        increment: bool,
        add_batch: bool,
        follow: set[str],
        exclude: set[str],
    ) -> None:
        if _collate is None or _batch_and_ptr is None:
            raise _UnsuitableError("another version of PyG")
        if not torch.empty(0).is_cpu:  # quicker than torch.get_default_device()
            raise _UnsuitableError("a default device that is not the CPU")
        self.base = _kind_of(graphs)
        self.cls, self.graphs = cls, graphs
        self.own_class = cls is type(graphs[0])
        if not (self.own_class or cls is Batch):
            raise _UnsuitableError(f"a batch of class {cls.__name__}")
        self.increment, self.add_batch = increment, add_batch
        self.follow, self.exclude = follow, exclude
        self.n = len(graphs)
        self.ones = torch.from_numpy(numpy.arange(self.n + 1))
        self.zeros = torch.from_numpy(numpy.zeros(self.n, numpy.int64))
        self.in_worker = get_worker_info() is not None
        self.known: dict[tuple[int, ...], Tensor] = {}  # slices by their sizes
        self.by_key: dict[Any, _Group] = {}

    def run(self) -> tuple[Any, dict[Any, Any], dict[Any, Any]]:
        groups = self.groups()
        self.by_key = {group.key: group for group in groups}
        for group in groups:
            group.gather()
        slices: dict[Any, Any] = {}
        incs: dict[Any, Any] = {}
        for group in groups:
            group.collate()
            for whole, part in ((slices, group.slices), (incs, group.incs)):
                if group.key is None:
                    whole.update(part)
                elif part:
                    whole[group.key] = part
        _keep_memory(sum(group.nbytes for group in groups))
        return self.assemble(groups), slices, incs

    def groups(self) -> list["_Group"]:
        """The stores of all graphs, by their key in the first one."""
        graphs = self.graphs
        if self.base is Data:
            return [_Group(self, None, [g.__dict__["_store"] for g in graphs])]
        groups = [_Group(self, None, [g.__dict__["_global_store"] for g in graphs])]
        for name in ("_node_store_dict", "_edge_store_dict"):
            dicts = [g.__dict__[name] for g in graphs]
            groups += [_Group(self, key, [d[key] for d in dicts]) for key in dicts[0]]
        return groups

    def assemble(self, groups: list["_Group"]) -> Any:
        if self.own_class:
            out = self.cls()
            out.stores_as(self.graphs[0])
            inside = {
                group.key: store.__dict__ for group, store in zip(groups, out.stores)
            }
            for group in groups:
                inside[group.key]["_mapping"].update(group.out)
        elif self.base is Data:
            out, only = blank(type(self.graphs[0])).new(groups[0].out)
            inside = {None: only}
        else:
            mappings = {group.key: group.out for group in groups}
            out, inside = blank(type(self.graphs[0])).new_hetero(mappings)
        for group in groups:
            if "num_nodes" in group.gathered:
                inside[group.key]["_num_nodes"] = group.gathered["num_nodes"]
        return out

    def slices(self, sizes: list[int]) -> Tensor:
        """Sums that attributes of the same sizes share; they must not be written to."""
        key = tuple(sizes)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self.sums(sizes)
        return found

    def sums(self, sizes: list[int]) -> Tensor:
        return torch.from_numpy(numpy.array([0, *accumulate(sizes)]))

    def numbers(self, sizes: list[int]) -> Tensor:
        """The number of its graph for each of what the sizes count."""
        return torch.from_numpy(numpy.repeat(numpy.arange(self.n), sizes))


class _Group:
    """The stores of one key: of the graphs, of a node type or of an edge type."""

    def __init__(self, job: _Job, key: Any, stores: list[Any]) -> None:
        self.job, self.key, self.stores = job, key, stores
        self.mappings = [store.__dict__["_mapping"] for store in stores]
        self.is_edges = isinstance(stores[0], EdgeStorage) and job.base is HeteroData
        self.gathered: dict[str, list[Any]] = {}
        self.sizes: dict[str, list[int]] = {}
        self.lengths: dict[str, list[int]] = {}  # of what tells the number of nodes
        self.nodes: Sequence[int | None] | None = None
        self.nbytes = 0
        self.out: dict[str, Any] = {}
        self.slices: dict[str, Any] = {}
        self.incs: dict[str, Any] = {}

    def gather(self) -> None:
        for name in self.mappings[0]:
            if name not in self.job.exclude:
                self.gathered[name] = [mapping[name] for mapping in self.mappings]

    def collate(self) -> None:
        out, job = self.out, self.job
        for name, values in self.gathered.items():
            if name == "num_nodes":
                out[name] = sum(values)
                continue
            if name == "ptr":
                continue
            out[name] = self.collate_one(name, values)
            if name in job.follow:
                self.add_follow(name)
        if (
            job.add_batch
            and isinstance(self.stores[0], NodeStorage)
            and self.stores[0].can_infer_num_nodes
        ):
            nodes = [n or 0 for n in self.num_nodes()]
            out["batch"] = job.numbers(nodes)
            out["ptr"] = job.sums(nodes)

    def collate_one(self, name: str, values: list[Any]) -> Any:
        job, elem = self.job, values[0]
        kind = type(elem)
        if kind is Tensor:
            if (
                elem.layout is torch.strided
                and elem.is_cpu
                and not elem.is_nested
                and "batch" not in name
            ):
                return self.collate_tensor(name, values)
        elif (kind is int or kind is float or kind is bool) and not self.is_index(name):
            self.sizes[name] = [1] * job.n
            self.slices[name] = job.ones
            self.incs[name] = job.zeros if job.increment else None
            return torch.tensor(values)
        value, self.slices[name], self.incs[name] = _collate(
            name, values, job.graphs, self.stores, job.increment
        )
        if isinstance(value, Tensor) and value.is_cuda:
            raise _UnsuitableError("values on the GPU")
        return value

    def is_index(self, name: str) -> bool:
        if self.job.base is Data:
            return "index" in name or name == "face"
        return self.is_edges and "index" in name

    def collate_tensor(self, name: str, values: list[Tensor]) -> Tensor:
        job = self.job
        is_index = self.is_index(name)
        dim = -1 if is_index else 0
        if values[0].dim() == 0:
            values = [value.unsqueeze(0) for value in values]
        sizes = self.lengths.get(name)
        if sizes is None:
            sizes = [value.shape[dim] for value in values]
        self.sizes[name] = sizes
        self.slices[name] = job.slices(sizes)
        if is_index and job.increment:
            return self.collate_index(name, values, sizes)
        self.incs[name] = job.zeros if job.increment else None
        return self.concatenate(values, dim, sizes)

    def collate_index(
        self, name: str, values: list[Tensor], sizes: list[int]
    ) -> Tensor:
        """Concatenates numbers of nodes, and adds the nodes of the graphs before."""
        job = self.job
        dtypes = {value.dtype for value in values}
        if len(dtypes) > 1 or dtypes - _INTEGERS:
            raise _UnsuitableError("node numbers that are not integers of one dtype")
        if any(type(value) is not Tensor for value in values):
            raise _UnsuitableError("a subclass of Tensor among the node numbers")
        incs = self.increments()
        value = self.concatenate(values, -1, sizes)
        if self.is_edges:
            if value.dim() != 2 or value.shape[0] != 2:
                raise _UnsuitableError("edges that are not two rows")
            self.incs[name] = torch.from_numpy(incs.T.reshape(job.n, 2, 1).copy())
        else:
            self.incs[name] = torch.from_numpy(incs)
            if incs[-1] == 0:
                return value
        # NumPy's threads do not wait for each other: it has one.
        array = value.numpy()
        array += numpy.repeat(incs.astype(array.dtype), sizes, axis=-1)
        return value

    def increments(self) -> Any:
        """int64 [graphs], or [2, graphs] for edges: what is added to each graph's."""
        if not self.is_edges:
            return self.node_sums()
        try:
            ends = (self.job.by_key[self.key[0]], self.job.by_key[self.key[-1]])
        except KeyError:
            raise _UnsuitableError("edges of a node type that is not there") from None
        return numpy.array([end.node_sums() for end in ends])

    def node_sums(self) -> Any:
        nodes = self.num_nodes()
        if None in nodes:
            raise _UnsuitableError("no number of nodes")
        return numpy.array([0, *accumulate(nodes[:-1])])

    def concatenate(self, values: list[Tensor], dim: int, sizes: list[int]) -> Tensor:
        if not self.job.in_worker:
            value = torch.cat(values, dim)
            self.nbytes += value.nbytes
            return value
        # As PyG does: into shared memory, from where the main process takes it.
        elem = values[0]
        shape = list(elem.shape)
        shape[dim] = sum(sizes)
        size = sum(value.numel() for value in values) * elem.element_size()
        storage = elem.untyped_storage()._new_shared(size, device=elem.device)
        out = elem.new(storage).resize_(*shape)
        return torch.cat(values, dim, out=out)

    def add_follow(self, name: str) -> None:
        sizes = self.sizes.get(name)
        if sizes is None:
            pair = _batch_and_ptr(self.slices[name], None)
        else:
            pair = self.job.numbers(sizes), self.job.sums(sizes)
        for ending, value in zip(("batch", "ptr"), pair):
            if value is None:
                self.out.pop(f"{name}_{ending}", None)
            else:
                self.out[f"{name}_{ending}"] = value

    def num_nodes(self) -> Sequence[int | None]:
        """The number of nodes of each graph, as PyG infers it."""
        if self.nodes is None:
            self.nodes = self.known_nodes() or [
                store.num_nodes for store in self.stores
            ]
            if any(type(n) is not int and n is not None for n in self.nodes):
                raise _UnsuitableError("a number of nodes that is not an int")
        return self.nodes

    def known_nodes(self) -> list[int] | None:
        """The same without asking each graph, where all that could tell it agrees."""
        first = self.mappings[0]
        if any(mapping.keys() != first.keys() for mapping in self.mappings):
            return None
        if "num_nodes" in first:
            return [mapping["num_nodes"] for mapping in self.mappings]
        nodes = None
        for name in first:
            if name in N_KEYS:
                values = [mapping[name] for mapping in self.mappings]
                if any(type(value) is not Tensor for value in values):
                    return None
                sizes = self.lengths[name] = [value.shape[0] for value in values]
                if nodes is not None and sizes != nodes:
                    return None
                nodes = sizes
        return nodes
