"""Where graph_syntax_trees.py gets its batches from: source, files, or a cache."""

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import syntax_graphs
import torch
from torch import Tensor
from tqdm import tqdm

import trainfast

KEYS = ("x", "walks", "edge_index", "edge_attr", "y", "batch")
Batch = Mapping[str, Tensor]
Order = Sequence[Sequence[int]]


class Graphs:
    """The functions, and where what was made of them lies."""

    def __init__(
        self, out: Path, limit: int | None, batch: int, workers: int, fresh: bool
    ) -> None:
        self.functions = syntax_graphs.functions(limit)
        self.batch, self.workers = batch, workers
        digest = hashlib.blake2b(repr(syntax_graphs.VERSION).encode(), digest_size=4)
        for function in self.functions:
            digest.update(function.source.encode())
        self.cache = out / "cache"
        self.files = out / f"files-{digest.hexdigest()}"
        if fresh:
            for folder in (self.cache, self.files):
                shutil.rmtree(folder, ignore_errors=True)
        # Every tenth module is for validation: no function has its siblings in both.
        unseen = set(list(dict.fromkeys(f.module for f in self.functions))[::10])
        places = range(len(self.functions))
        in_unseen = [function.module in unseen for function in self.functions]
        self.validation = [i for i in places if in_unseen[i]]
        self.train = [i for i in places if not in_unseen[i]]
        self.epoch = len(self.train) // self.batch  # batches

    def order(self, steps: int, seed: int) -> list[list[int]]:
        """The graphs of each batch of a training, which is one or more epochs."""
        generator = torch.Generator().manual_seed(seed)
        batches: list[list[int]] = []
        while len(batches) < steps:
            shuffled = torch.randperm(len(self.train), generator=generator).tolist()
            for at in range(0, self.epoch * self.batch, self.batch):
                batches.append([self.train[i] for i in shuffled[at : at + self.batch]])
        return batches[:steps]


# ---- The ways to get a batch ---------------------------------------------------------


def collate(graphs: Sequence[Mapping[str, Tensor]]) -> Batch:
    """One graph that is all of them side by side."""
    counts = torch.tensor([len(graph["x"]) for graph in graphs])
    edges = torch.tensor([graph["edge_index"].shape[1] for graph in graphs])
    batch = {
        key: torch.cat([graph[key] for graph in graphs])
        for key in ("x", "walks", "edge_attr", "y")
    }
    offsets = (counts.cumsum(0) - counts).repeat_interleave(edges)
    batch["edge_index"] = torch.cat([g["edge_index"] for g in graphs], 1) + offsets
    batch["batch"] = torch.arange(len(graphs)).repeat_interleave(counts)
    return batch


def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


def built(graphs: Graphs, order: Order) -> Iterator[Batch]:
    """Without a cache: from source, each time."""
    for batch in order:
        functions = [graphs.functions[i] for i in batch]
        yield collate([tensors(syntax_graphs.build(f)) for f in functions])


def loaded(graphs: Graphs, order: Order) -> Iterator[Batch]:
    """From a file for each graph."""
    for batch in order:
        yield collate([torch.load(graphs.files / f"{i}.pt") for i in batch])


def cached(graphs: Graphs, order: Order) -> Iterator[Batch]:
    """From trainfast's cache."""
    cache = trainfast.graph_cache.open(graphs.cache)
    for batch in trainfast.graph_cache.Loader(cache, batch_sampler=order):
        yield {key: torch.from_numpy(batch[key]) for key in KEYS}


def loaded_by_pyg(graphs: Graphs, order: Order) -> Iterator[Batch]:
    """From a file for each graph, into PyG's batches by its own loader."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    class Files(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(graphs.functions)

        def __getitem__(self, i: int) -> Data:
            return Data(**torch.load(graphs.files / f"{i}.pt"))

    yield from DataLoader(Files(), batch_sampler=order)


def cached_by_pyg(graphs: Graphs, order: Order) -> Iterator[Batch]:
    """From trainfast's cache as PyG's batches."""
    cache = trainfast.graph_cache.open(graphs.cache)
    loader = trainfast.graph_cache.Loader
    yield from loader(cache, batch_sampler=order, output="pyg")


@dataclass
class Way:
    name: str
    batches: Callable[[Graphs, Order], Iterator[Batch]]
    needs: str = ""  # "cache" or "files"
    pyg: bool = False


WAYS = {
    "none": Way("no cache", built),
    "files": Way(".pt per graph", loaded, "files"),
    "cache": Way("trainfast", cached, "cache"),
    "pyg-files": Way(".pt, PyG batches", loaded_by_pyg, "files", pyg=True),
    "pyg-cache": Way("trainfast, PyG batches", cached_by_pyg, "cache", pyg=True),
}


# ---- Building ------------------------------------------------------------------------


def build_cache(graphs: Graphs) -> str:
    """Makes what is missing in trainfast's cache; says what that took."""
    report = trainfast.graph_cache.build(
        graphs.cache,
        graphs.functions,
        syntax_graphs.build,
        key=lambda function: function.source,
        transform_id=syntax_graphs.VERSION,
        workers=graphs.workers,
        progress=sys.stderr.isatty(),
    )
    cache = trainfast.graph_cache.open(graphs.cache)
    return (
        f"cache: {report.made:,} graphs built and {report.reused:,} found in "
        f"{report.seconds:.1f} s, {megabytes([graphs.cache])} for {len(cache):,}"
    )


def write_files(graphs: Graphs, from_cache: bool) -> str:
    """Writes the `.pt` files that are missing; says what that took."""
    graphs.files.mkdir(parents=True, exist_ok=True)
    have = {entry.name for entry in os.scandir(graphs.files)}
    missing = [i for i in range(len(graphs.functions)) if f"{i}.pt" not in have]
    cache = trainfast.graph_cache.open(graphs.cache) if from_cache else None
    began = time.perf_counter()
    for i in tqdm(missing, "writing .pt files", disable=None, unit="graph"):
        graph = cache[i] if cache else syntax_graphs.build(graphs.functions[i])
        # copied: a tensor of the cache's read-only map is none that torch likes to see
        arrays = {key: np.array(graph[key]) for key in KEYS if key in graph}
        new = graphs.files / f"{i}.new"
        torch.save(tensors(arrays), new)
        new.replace(graphs.files / f"{i}.pt")  # whatever happens, it is whole
    seconds = time.perf_counter() - began
    return (
        f".pt:   {len(missing):,} files written in {seconds:.1f} s, graphs "
        f"{'from the cache' if cache else 'built'}, {megabytes([graphs.files])} in all"
    )


def megabytes(folders: Sequence[Path]) -> str:
    """What the files in folders take on the disk, which is whole blocks."""
    sizes = [entry.stat().st_blocks * 512 for f in folders for entry in os.scandir(f)]
    return f"{sum(sizes) / 1e6:,.0f} MB"
