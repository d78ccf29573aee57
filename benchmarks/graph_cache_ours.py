"""bench_graph_cache.py's contenders that are trainfast's, and the plain copies that
bound them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.graph_cache import (
    BATCH,
    MANY,
    Arrays,
    Unavailable,
    Workload,
    collated,
    needs,
    objects,
)


def library() -> Any:
    """Return trainfast.graph_cache, or raise Unavailable."""
    try:
        import trainfast.graph_cache as library
    except ImportError as error:
        raise Unavailable(f"not in this build: {error}") from None
    return library


def cache_path(work: Workload) -> Path:
    """Return the path of the cache of a workload, written the first time."""
    path = work.folder / "cache"
    if not path.exists():
        write(work.graphs, path, durable=False)
    return path


def many_path(work: Workload) -> Path:
    """Return the path of a cache of 185,000 graphs, which are the workload's in turn.

    The page cache holds 0.5 GB of them, the processor's caches next to nothing.
    """
    path = work.folder / "many"
    if not path.exists():
        graphs = itertools.islice(itertools.cycle(work.graphs), many(work))
        write(graphs, path, durable=False)
    return path


def many(work: Workload) -> int:
    """Return 185,000; fewer in a smoke test, whose problems have few graphs."""
    return min(MANY, len(work.graphs) ** 2)


def write(graphs: Iterable[Arrays], path: Path, durable: bool) -> None:
    """Write graphs as a user would; durable: synced every 256 and at the end."""
    with library().Writer(path, durable=durable, commit_every=256) as writer:
        append = writer.append
        for graph in graphs:
            append(graph)


def loader(path: Path, **options: Any) -> Any:
    """Return a Loader over a cache, in shuffled order where none is given."""
    if options["output"] == "pyg":
        needs("torch_geometric")
    verify = options.pop("verify", "once")
    if "batch_sampler" not in options:
        options |= {"batch_size": BATCH, "shuffle": True, "seed": 0}
    cache = library().open(path, verify=verify)
    return library().Loader(cache, **options)


def endless(loader: Any) -> Iterator[Any]:
    """Yield the batches of one epoch after another."""
    while True:
        yield from loader


def make_next(
    work: Workload, of_many: bool = False, **options: Any
) -> Callable[[], Any]:
    """Return a call that makes the next batch, on the calling thread."""
    options = {"output": "pyg", "threads": 0} | options
    path = cache_path(work)
    first = next(iter(loader(path, batch_sampler=work.batches[:1], **options)))
    work.check(f"trainfast, {options}", work.batches[0], first)
    if of_many:
        path = many_path(work)
    return endless(loader(path, **options)).__next__


def drop_in(work: Workload, **options: Any) -> Any:
    """Return the DataLoader that has PyG's signature, over a cached dataset."""
    needs("torch_geometric")
    from trainfast.torch import pyg

    dataset = pyg.cached(objects(work), work.folder / "drop-in", progress=False)
    if "batch_sampler" not in options:
        options |= {"batch_size": BATCH, "shuffle": True}
    return pyg.DataLoader(dataset, **options)


def patch_pyg() -> None:
    """Put trainfast's collate in PyG's place, or raise Unavailable."""
    needs("torch_geometric")
    import trainfast

    try:
        trainfast.patch("pyg")
    except ValueError as error:  # an unknown name
        raise Unavailable(str(error)) from None


def unpatch_pyg() -> None:
    import trainfast

    trainfast.unpatch("pyg")


# ---- Bounds --------------------------------------------------------------------------


def make_copy(work: Workload, n_sources: int) -> Callable[[], None]:
    """Return a call that copies as many bytes as a batch has, from one of n places."""
    count = work.batch_bytes
    sources = itertools.cycle([np.ones(count, np.uint8) for _ in range(n_sources)])
    target = np.zeros(count, np.uint8)

    def copy() -> None:
        np.copyto(target, next(sources))

    return copy


def write_plainly(path: Path, n_bytes: int, parts: int, durable: bool) -> None:
    """Write bytes to a new file in a number of calls; durable: synced after each."""
    part = bytes(-(-n_bytes // parts))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for _ in range(parts):
            os.write(file, part)
            if durable:
                os.fdatasync(file)
    finally:
        os.close(file)


def one_file(graphs: Sequence[Arrays], path: Path, count: int) -> None:
    """torch.save of `count` graphs as one, with where each begins, as PyG's datasets
    that fit in memory do. The graphs come in turn."""
    whole = {k: torch.from_numpy(array) for k, array in collated(graphs).items()}
    times = -(-count // len(graphs))
    along = {key: -1 if key == "edge_index" else 0 for key in whole}
    torch.save({k: torch.cat([t] * times, along[k]) for k, t in whole.items()}, path)
