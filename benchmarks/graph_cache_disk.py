"""Cases of bench_graph_cache.py about files: writing, opening, verifying, sizes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import graph_cache_ours as ours
from benchmarks import graph_cache_rivals as rivals
from benchmarks import peak
from benchmarks.graph_cache import (
    SMALL,
    WRITTEN,
    Problem,
    Unavailable,
    disk_bytes,
    narrowed,
)
from benchmarks.graph_cache_cases import Bench, Call, Entry
from benchmarks.harness import Case

WRITES = 8  # times as many graphs as the problem has, of ours


def write_case(bench: Bench, durable: bool) -> dict | None:
    """A graph of NumPy arrays to disk."""
    graphs = bench.work(WRITTEN).graphs
    many = graphs * WRITES
    some = graphs[: len(graphs) // (1 if durable else 4)]
    folder = bench.folder / "written"

    def fresh() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    fresh()
    needed = narrowed(many)

    def ready(call: Callable[..., Any], *arguments: Any) -> Call:
        call(*arguments)  # raises Unavailable where it is
        return partial(call, *arguments)

    def entry(name: str, role: str, calls: int, call: Callable, *rest: Any) -> Entry:
        def make() -> Call:
            fresh()
            return ready(call, *rest)

        return Entry(name, role, make, calls, fresh)

    plain = (folder / "plain", needed, -(-len(many) // 256), durable)
    entries = [
        entry("trainfast", "ours", len(many), ours.write, many, folder / "c", durable),
        entry("LMDB", "rival", len(graphs), rivals.write_lmdb, graphs, folder, durable),
        entry("write()", "bound", len(many), ours.write_plainly, *plain),
    ]
    if not durable:  # files are not synced by what people use
        files = entry(
            "torch.save", "rival", len(some), rivals.write_files, some, folder
        )
        entries.append(files)
    how = ", synced every 256" if durable else ""
    title = f"25-node graphs written{how}, a graph"
    name = "write-durable" if durable else "write"
    case = Case(name, title, "float32", nbytes=needed // len(many))
    try:
        return bench.measure(case, entries)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_case(bench: Bench) -> dict | None:
    """Opening a cache of 185,000 graphs; its rival is one file of the same graphs."""
    work = bench.work(SMALL)
    path = work.folder / "one.pt"

    def opened() -> Call:
        where = ours.many_path(work)
        return partial(ours.library().open, where)

    def loaded(mmap: bool) -> Call:
        if not path.exists():
            ours.one_file(work.graphs, path, ours.many(work))
        return partial(torch.load, path, mmap=mmap)

    entries = [
        Entry("trainfast", "ours", opened),
        Entry("torch.load, mapped", "rival", partial(loaded, True)),
        Entry("torch.load", "rival", partial(loaded, False)),
    ]
    case = Case("open", f"opening {ours.many(work):,} small graphs", "float32")
    try:
        return bench.measure(case, entries)
    finally:
        path.unlink(missing_ok=True)


def verify_case(bench: Bench) -> dict | None:
    """Checking every byte of 185,000 graphs; the bound reads as many on one thread."""
    work = bench.work(SMALL)

    def verified() -> Call:
        cache = ours.library().open(ours.many_path(work))
        cache.verify()
        return cache.verify

    def read() -> Call:
        words = np.ones(
            narrowed(work.graphs) // 8 * ours.many(work) // len(work.graphs)
        )
        return peak.make_read([torch.from_numpy(words)], 1)

    entries = [Entry("trainfast", "ours", verified), Entry("read", "bound", read)]
    title = f"verifying {ours.many(work):,} small graphs"
    return bench.measure(Case("verify", title, "float32"), entries)


def disk_sizes(bench: Bench, problem: Problem) -> dict:
    """Return what a problem's graphs take in bytes: in arrays, and in each format."""
    work = bench.work(problem)
    formats: list[tuple[str, Callable[[], object], str]] = [
        ("torch.save", partial(bench.rival, work, rivals.from_files), "files"),
        ("LMDB", partial(bench.rival, work, rivals.from_lmdb), "lmdb"),
    ]
    if bench.with_ours:
        formats.append(("trainfast", partial(ours.cache_path, work), "cache"))
    sizes = {}
    for name, make, where in formats:
        with suppress(Unavailable):
            make()
            sizes[name] = disk_bytes(work.folder / where)
    return {
        "title": f"{problem.name} graphs",
        "graphs": len(work.graphs),
        "arrays": sum(a.nbytes for graph in work.graphs for a in graph.values()),
        "narrowed": narrowed(work.graphs),
        "bytes": sizes,
    }
