"""bench_graph_cache.py's contenders and what cases share; the cases of one batch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import graph_cache_ours as ours
from benchmarks import graph_cache_rivals as rivals
from benchmarks import harness
from benchmarks.graph_cache import (
    BATCH,
    MANY,
    SMALL,
    Problem,
    Unavailable,
    Workload,
)
from benchmarks.harness import Budget, Case, Contender

HOT_CALLS = 40  # of a copy
WARM_SECONDS = 0.01  # after 5 ms a batch took no longer than after any number
Call = Callable[[], Any]


@dataclass(frozen=True)
class Entry:
    """A contender that is still to be made, which may turn out to be Unavailable.

    make: returns the timed call, which does the case `calls` times. warm: it is done
    for WARM_SECONDS before each time that counts, and at least once, because the turns
    of the others have put its code and data out of the processor's caches.
    """

    name: str
    role: str
    make: Callable[[], Call]
    calls: int = 1
    prepare: Callable[[], object] | None = None
    warm: bool = False

    def contender(self) -> Contender:
        run = self.make()
        prepare = partial(warm_up, run) if self.warm else self.prepare
        how = {"prepare": prepare, "calls": self.calls}
        return Contender(self.name, run, self.role, **how)


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


def warm_up(run: Call) -> None:
    end = time.perf_counter() + WARM_SECONDS
    run()
    while time.perf_counter() < end:
        run()


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
    return Entry("copy", "bound", make, HOT_CALLS, warm=True)


# ---- One batch -----------------------------------------------------------------------


def batch_case(bench: Bench, problem: Problem, cold: bool) -> dict | None:
    """A batch of 32 graphs as PyG's object, on the calling thread."""
    work = bench.work(problem)
    make = partial(ours.make_next, work)
    epoch = len(work.graphs) // BATCH
    table: list[tuple[str, str, Callable[[], Call]]] = [
        ("trainfast", "ours", make),
        ("trainfast, checked", "ours", partial(make, verify="always")),
        ("trainfast, dict", "ours", partial(make, output="dict")),
        ("torch.load", "rival", partial(bench.rival, work, rivals.from_files)),
        ("LMDB", "rival", partial(bench.rival, work, rivals.from_lmdb)),
        ("objects in RAM", "rival", partial(bench.rival, work, rivals.from_memory)),
        ("copy", "bound", partial(ours.make_copy, work, 1)),
        ("copy of more", "bound", partial(ours.make_copy, work, epoch)),
    ]
    if problem is SMALL:
        many = f"trainfast, {MANY:,} graphs"
        table.insert(3, (many, "ours", partial(make, of_many=True)))
    entries = []
    for name, role, maker in table:
        if cold:
            entry = Entry(name, role, maker, prepare=bench.network)
        else:
            entry = Entry(name, role, partial(repeated, maker, epoch), epoch, warm=True)
        entries.append(entry)
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
