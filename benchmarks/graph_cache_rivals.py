"""What people batch graphs with today, each at its best. What is not installed raises
Unavailable when it is asked for."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.graph_cache import BATCH, Arrays, Workload, needs, objects, tensors

COMMIT_EVERY = 256
MAP_BYTES = 8 << 30  # of address space


# ---- A batch of given graphs ---------------------------------------------------------
# Each returns indices -> batch.


def from_files(work: Workload) -> Callable[[Sequence[int]], Any]:
    """One torch.save a graph, as PyG's datasets that do not fit in memory do."""
    collate = needs("torch_geometric.data").Batch.from_data_list
    folder = work.folder / "files"
    folder.mkdir(exist_ok=True)
    for i, graph in enumerate(objects(work)):
        torch.save(graph, folder / f"{i}.pt")
    paths = [str(folder / f"{i}.pt") for i in range(len(work.graphs))]

    def batch(indices: Sequence[int]) -> Any:
        return collate([torch.load(paths[i], weights_only=False) for i in indices])

    return batch


def from_lmdb(work: Workload) -> Callable[[Sequence[int]], Any]:
    """Pickled objects in LMDB, read in one transaction from its map."""
    collate = needs("torch_geometric.data").Batch.from_data_list
    database = needs("lmdb").open(
        str(work.folder / "lmdb"), map_size=MAP_BYTES, readahead=False, sync=False
    )
    with database.begin(write=True) as transaction:
        for i, graph in enumerate(objects(work)):
            transaction.put(b"%d" % i, pickle.dumps(graph, pickle.HIGHEST_PROTOCOL))
    database.sync()
    loads = pickle.loads

    def batch(indices: Sequence[int]) -> Any:
        with database.begin(buffers=True) as transaction:
            return collate([loads(transaction.get(b"%d" % i)) for i in indices])

    return batch


def from_memory(work: Workload) -> Callable[[Sequence[int]], Any]:
    """All objects in RAM, made before."""
    collate = needs("torch_geometric.data").Batch.from_data_list
    made = objects(work)

    def batch(indices: Sequence[int]) -> Any:
        return collate([made[i] for i in indices])

    return batch


# ---- A whole epoch -------------------------------------------------------------------


def loader(work: Workload, workers: int, **options: Any) -> Any:
    """PyG's DataLoader over objects in RAM; its workers live through all epochs."""
    data_loader = needs("torch_geometric.loader").DataLoader
    if "batch_sampler" not in options:
        options = {"batch_size": BATCH, "shuffle": True}
    options |= {"num_workers": workers, "persistent_workers": workers > 0}
    return data_loader(objects(work), **options)


# ---- Writing -------------------------------------------------------------------------
# Each writes graphs, which are arrays, to a new folder.


def write_files(graphs: Sequence[Arrays], folder: Path) -> None:
    for i, graph in enumerate(graphs):
        torch.save(tensors(graph), folder / f"{i}.pt")


def write_lmdb(graphs: Sequence[Arrays], folder: Path, durable: bool) -> None:
    """Pickled arrays in transactions of 256 graphs, each synced where durable."""
    lmdb = needs("lmdb")
    with lmdb.open(str(folder), map_size=MAP_BYTES, sync=durable) as database:
        for some in batched(enumerate(graphs), COMMIT_EVERY):
            with database.begin(write=True) as transaction:
                for i, graph in some:
                    value = pickle.dumps(graph, pickle.HIGHEST_PROTOCOL)
                    transaction.put(b"%08d" % i, value, append=True)


def batched(items: Any, n: int) -> Iterator[list[Any]]:
    """Yield lists of n items, as itertools.batched does from Python 3.12 on."""
    iterator = iter(items)
    while some := list(itertools.islice(iterator, n)):
        yield some
