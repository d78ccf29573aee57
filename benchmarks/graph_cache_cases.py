"""The cases of bench_graph_cache.py: who takes part, and what one call is."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import graph_cache_ours as ours
from benchmarks import graph_cache_rivals as rivals
from benchmarks import harness, peak
from benchmarks.graph_cache import (
    BATCH,
    MANY,
    SMALL,
    WRITTEN,
    Problem,
    Unavailable,
    Workload,
    disk_bytes,
    narrowed,
)
from benchmarks.harness import Budget, Case, Contender
from benchmarks.machine import OtherLoad

HOT_CALLS = 40
STEPS = 32  # of a block with a loader between them
WRITES = 8  # times as many graphs as the problem has, of ours
Call = Callable[[], Any]


@dataclass(frozen=True)
class Entry:
    """A contender that is still to be made, which may turn out to be Unavailable.

    make: returns the timed call, which does the case `calls` times.
    """

    name: str
    role: str
    make: Callable[[], Call]
    calls: int = 1
    prepare: Callable[[], object] | None = None

    def contender(self) -> Contender:
        how = {"prepare": self.prepare, "calls": self.calls}
        return Contender(self.name, self.make(), self.role, **how)


class Bench:
    """What cases share: workloads, rivals with their files, and how long to measure."""

    def __init__(
        self, folder: Path, budget: Budget, smoke: bool = False, with_ours: bool = True
    ) -> None:
        self.folder, self.budget, self.smoke = folder, budget, smoke
        self.with_ours = with_ours
        self.works: dict[str, Workload] = {}
        self.batches: dict[tuple[str, Callable], Call] = {}

    def work(self, problem: Problem) -> Workload:
        if problem.name not in self.works:
            chosen = problem.shrunk() if self.smoke else problem
            self.works[problem.name] = Workload(chosen, self.folder)
        return self.works[problem.name]

    def rival(self, work: Workload, make: Callable[[Workload], Callable]) -> Call:
        """Return a rival's call for its next batch; made and checked the first time."""
        key = (work.problem.name, make)
        if key not in self.batches:
            batch, indices = make(work), itertools.cycle(work.batches)
            work.check(make.__name__, work.batches[0], batch(work.batches[0]))
            self.batches[key] = lambda: batch(next(indices))
        return self.batches[key]

    def contenders(
        self, entries: Iterable[Entry]
    ) -> tuple[list[Contender], dict[str, str]]:
        """Make the contenders; the dict says why some cannot be."""
        made, skipped = [], {}
        for entry in entries:
            if entry.role == "ours" and not self.with_ours:
                continue
            try:
                made.append(entry.contender())
            except Unavailable as error:
                skipped[entry.name] = str(error)
        return made, skipped

    def measure(self, case: Case, entries: Iterable[Entry]) -> dict | None:
        """Make and measure the contenders of a case; None where there is none."""
        made, skipped = self.contenders(entries)
        if not made:
            print(f"{case.title}: no contender can run: {skipped}\n", flush=True)
            return None
        return harness.run_case(case, made, self.budget, harness.cpu_clock, skipped)

    @cached_property
    def network(self) -> Callable[[], None]:
        """A training step of a small network: other code, and other data."""
        layers = [torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)]
        model, x = torch.nn.Sequential(*layers), torch.randn(256, 256)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return step


def repeated(make: Callable[[], Call], times: int) -> Call:
    """Return a call that does a made one several times."""
    call = make()

    def run() -> None:
        for _ in range(times):
            call()

    return call if times == 1 else run


def copy_entry(work: Workload) -> Entry:
    """The bound of a batch: its bytes copied, many times in a row."""
    make = partial(repeated, partial(ours.make_copy, work, 1), HOT_CALLS)
    return Entry("copy", "bound", make, HOT_CALLS)


# ---- One batch -----------------------------------------------------------------------


def batch_case(bench: Bench, problem: Problem, cold: bool) -> dict | None:
    """A batch of 32 graphs as PyG's object, on the calling thread."""
    work = bench.work(problem)
    make = partial(ours.make_next, work)
    whole_epoch = len(work.graphs) // BATCH
    table: list[tuple[str, str, Callable[[], Call], int]] = [
        ("trainfast", "ours", make, HOT_CALLS),
        ("trainfast, checked", "ours", partial(make, verify="always"), HOT_CALLS),
        ("trainfast, dict", "ours", partial(make, output="dict"), HOT_CALLS),
        ("torch.load", "rival", partial(bench.rival, work, rivals.from_files), 1),
        ("LMDB", "rival", partial(bench.rival, work, rivals.from_lmdb), 1),
        ("objects in RAM", "rival", partial(bench.rival, work, rivals.from_memory), 5),
        ("copy", "bound", partial(ours.make_copy, work, 1), HOT_CALLS),
        (
            "copy of more",
            "bound",
            partial(ours.make_copy, work, whole_epoch),
            HOT_CALLS,
        ),
    ]
    if problem is SMALL:
        many = f"trainfast, {MANY:,} graphs"
        table.insert(3, (many, "ours", partial(make, of_many=True), HOT_CALLS))
    entries = []
    for name, role, make, calls in table:
        times = 1 if cold else calls
        prepare = bench.network if cold else None
        entries.append(
            Entry(name, role, partial(repeated, make, times), times, prepare)
        )
    how = "cold" if cold else "hot"
    title = f"{problem.name} graphs, a `DataBatch`, {how}"
    case = Case(f"{problem.name}-{how}", title, "float32", nbytes=work.batch_bytes)
    return bench.measure(case, entries)


def patch_case(bench: Bench, problem: Problem) -> dict | None:
    """PyG's own collate of objects in RAM, and what trainfast.patch replaces it by."""
    work = bench.work(problem)
    calls = HOT_CALLS // 4
    collate = partial(bench.rival, work, rivals.from_memory)

    def patched() -> Call:
        ours.patch_pyg()
        try:
            batch = rivals.from_memory(work)(work.batches[0])
        finally:
            ours.unpatch_pyg()
        work.check("trainfast.patch", work.batches[0], batch)
        return repeated(collate, calls)

    # Patching looks through all modules, so it is not on the clock.
    entries = [
        Entry("trainfast.patch", "ours", patched, calls, ours.patch_pyg),
        Entry("PyG", "rival", partial(repeated, collate, calls), calls),
        copy_entry(work),
    ]
    if bench.with_ours:
        entries[1] = replace(entries[1], prepare=ours.unpatch_pyg)
    title = f"{problem.name} graphs, objects in RAM to a `DataBatch`"
    case = Case(f"{problem.name}-ram", title, "float32", nbytes=work.batch_bytes)
    return bench.measure(case, entries)


# ---- Loaders -------------------------------------------------------------------------


def loaders(work: Workload, **options: Any) -> list[tuple[str, str, Callable]]:
    """Return (name, role, what makes a loader). options: batch_sampler, or nothing."""

    def own(threads: int) -> Any:
        path = ours.cache_path(work)
        return ours.loader(path, output="pyg", threads=threads, **options)

    return [
        ("trainfast", "ours", partial(own, 1)),
        ("trainfast, no thread", "ours", partial(own, 0)),
        ("trainfast, DataLoader", "ours", partial(ours.drop_in, work, **options)),
        ("DataLoader", "rival", partial(rivals.loader, work, 0, **options)),
        ("DataLoader, 2 workers", "rival", partial(rivals.loader, work, 2, **options)),
    ]


def loader_case(bench: Bench, problem: Problem) -> dict | None:
    """Whole epochs, with nothing between the batches."""
    work = bench.work(problem)
    calls = len(work.graphs) // BATCH

    def drain(make: Callable[[], Any]) -> Call:
        loader = make()

        def run() -> None:
            count = sum(1 for _ in loader)
            if count != calls:
                raise RuntimeError(f"an epoch must have {calls} batches, got {count}")

        return run

    entries = [
        Entry(name, role, partial(drain, make), calls)
        for name, role, make in loaders(work)
    ]
    entries.append(copy_entry(work))
    title = f"{problem.name} graphs, a loader drained, a batch"
    case = Case(f"{problem.name}-loader", title, "float32", nbytes=work.batch_bytes)
    return bench.measure(case, entries)


def make_step(bench: Bench) -> Callable[[], None]:
    """Return what stands for a training step: about 2 ms of matrix products."""
    size = 64 if bench.smoke else 384
    weight, x = torch.randn(size, size), torch.randn(size, size)

    def step() -> None:
        for _ in range(3):
            torch.mm(x, weight).relu_()

    return step


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def block(loader: Iterable[Any], step: Callable[[], None]) -> tuple[float, float]:
    """Do an epoch of steps; return the mean ns of next() and of a step.

    The first batch is left out: waiting for it is starting the loader.
    """
    iterator = iter(loader)
    next(iterator)
    waiting = stepping = count = 0
    now = time.perf_counter_ns
    before = now()
    step()
    stepping += now() - before
    while True:
        before = now()
        batch = next(iterator, None)
        ready = now()
        if batch is None:
            break
        step()
        waiting, stepping = waiting + ready - before, stepping + now() - ready
        count += 1
    return waiting / max(count, 1), stepping / (count + 1)


def steps_case(bench: Bench, problem: Problem, threads: int) -> list[dict]:
    """Steps on some threads with a loader between: the wait, and the step itself."""
    work, step = bench.work(problem), make_step(bench)
    table = loaders(work, batch_sampler=work.batches[:STEPS])
    table.append(("no loader", "bound", lambda: range(STEPS)))
    made, skipped = bench.contenders(
        Entry(name, role, lambda make=make: partial(block, make(), step))
        for name, role, make in table
    )
    waits: dict[str, list[float]] = {contender.name: [] for contender in made}
    steps: dict[str, list[float]] = {contender.name: [] for contender in made}
    with OtherLoad() as others, torch_threads(threads), harness.no_garbage_collection():
        end = time.perf_counter() + bench.budget.seconds
        for done in range(-1, bench.budget.max_rounds):
            if done >= bench.budget.min_rounds and time.perf_counter() >= end:
                break
            for contender in made:
                wait, stepping = contender.run()
                if done >= 0:  # the round before the first one is for warming up
                    waits[contender.name].append(wait)
                    steps[contender.name].append(stepping)
    name = f"{problem.name}-step{threads}"
    where = f"{problem.name} graphs, {threads} thread{'s' * (threads > 1)}"
    loading = [contender for contender in made if contender.role != "bound"]
    cases = []
    for of, title, times, who in (
        ("next", f"{where}: `next()` between steps", waits, loading),
        ("step", f"{where}: the step itself", steps, made),
    ):
        if who:
            case = Case(f"{name}-{of}", title, "float32")
            own = {contender.name: times[contender.name] for contender in who}
            cases.append(harness.report_case(case, who, own, {}, others.share, skipped))
    return cases


# ---- Files ---------------------------------------------------------------------------


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
