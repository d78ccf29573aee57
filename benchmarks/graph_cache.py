"""The graphs of bench_graph_cache.py, what a batch of them is, and checks of it."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 32
EDGE_FEATURES = 4
Arrays = Mapping[str, np.ndarray]


class Unavailable(Exception):
    """A contender needs what is not here."""


def needs(module: str) -> Any:
    """Import a module or raise Unavailable."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise Unavailable(f"{module.partition('.')[0]} is not installed") from None


@dataclass(frozen=True)
class Problem:
    """Graphs of one kind. Numbers of nodes are evenly spread around `nodes`."""

    name: str
    nodes: int
    degree: int  # edges a node
    features: int
    graphs: int
    spread: float = 0.5  # of the number of nodes, to either side

    @property
    def title(self) -> str:
        return f"{self.name} graphs"

    def shrunk(self) -> Problem:
        return replace(self, graphs=2 * BATCH)

    def make(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return a graph as a dict of arrays, with the names that PyG gives them."""
        least, most = (round(self.nodes * (1 + s * self.spread)) for s in (-1, 1))
        n = int(rng.integers(least, most + 1))
        edges = n * self.degree
        return {
            "x": rng.standard_normal((n, self.features), np.float32),
            "edge_index": rng.integers(0, n, (2, edges)),
            "edge_attr": rng.standard_normal((edges, EDGE_FEATURES), np.float32),
            "y": rng.standard_normal(1, np.float32),
        }


SMALL = Problem("small", 20, 4, 16, 4096)
MID = Problem("mid", 200, 8, 32, 1024)
WRITTEN = Problem("25-node", 25, 4, 16, 2048, spread=0.0)
MANY = 185_000


def problems() -> list[Problem]:
    return [SMALL, MID]


def collated(graphs: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """Return the batch of graphs: PyG's rules for these names, spelled out."""
    counts = np.array([len(graph["x"]) for graph in graphs])
    ptr = np.concatenate([[0], counts.cumsum()])
    batch = {
        key: np.concatenate([graph[key] for graph in graphs])
        for key in ("x", "edge_attr", "y")
    }
    batch["edge_index"] = np.concatenate(
        [graph["edge_index"] + at for graph, at in zip(graphs, ptr[:-1], strict=True)],
        1,
    )
    batch["batch"] = np.repeat(np.arange(len(graphs)), counts)
    batch["ptr"] = ptr
    return batch


def nbytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())


def narrowed(graphs: Sequence[Arrays]) -> int:
    """Return the bytes of graphs, each integer array in the narrowest type for it."""
    total = 0
    for graph in graphs:
        for array in graph.values():
            most = int(array.max(initial=0)) if array.dtype.kind in "iu" else 0
            narrow = array.dtype.kind in "iu"
            total += array.size * (
                np.min_scalar_type(most).itemsize if narrow else array.itemsize
            )
    return total


class Workload:
    """A problem's graphs, the folder for what is made of them, and batches to ask for.

    Every contender asks for the same batches in the same order.
    """

    def __init__(self, problem: Problem, folder: Path, seed: int = 0) -> None:
        self.problem = problem
        self.folder = folder / f"{problem.name}-{problem.graphs}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        rng = np.random.default_rng(seed)
        self.graphs = [problem.make(rng) for _ in range(problem.graphs)]
        whole = problem.graphs // BATCH * BATCH
        passes = [rng.permutation(problem.graphs)[:whole] for _ in range(4)]
        self.batches = np.concatenate(passes).reshape(-1, BATCH).tolist()

    @cached_property
    def batch_bytes(self) -> int:
        """The mean over an epoch's batches."""
        epoch = self.batches[: self.problem.graphs // BATCH]
        total = [nbytes(collated([self.graphs[i] for i in each])) for each in epoch]
        return round(sum(total) / len(total))

    def check(self, name: str, indices: Sequence[int], batch: Any) -> None:
        """Raise RuntimeError unless a contender's batch is the one of these graphs."""
        for key, expected in collated([self.graphs[i] for i in indices]).items():
            got = np.asarray(batch[key])
            if got.dtype != expected.dtype or not np.array_equal(got, expected):
                raise RuntimeError(
                    f"{name} must collate {key!r} as {expected.dtype}"
                    f"{list(expected.shape)}, got {got.dtype}{list(got.shape)}"
                    + " with other values"
                    * (got.shape == expected.shape)
                )


def tensors(graph: Arrays) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(array) for key, array in graph.items()}


def objects(work: Workload) -> list[Any]:
    """Return the graphs as PyG's objects."""
    data = needs("torch_geometric.data").Data
    return [data(**tensors(graph)) for graph in work.graphs]


def disk_bytes(folder: Path) -> int:
    """Return what the files below a folder take on the disk, which is whole blocks."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sum(path.stat().st_blocks * 512 for path in files)
