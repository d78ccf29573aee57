"""Cases of bench_graph_cache.py: loaders drained, and between steps of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks import graph_cache_ours as ours
from benchmarks import graph_cache_rivals as rivals
from benchmarks import harness
from benchmarks.graph_cache import BATCH, Problem, Workload
from benchmarks.graph_cache_cases import Bench, Call, Entry, copy_entry
from benchmarks.harness import Case
from trainfast.bench.load import OtherLoad
from trainfast.bench.turns import no_garbage_collection

STEPS = 32  # of a block with a loader between them


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
        Entry(name, role, partial(drain, make), calls, warm=True)
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
    with OtherLoad() as others, torch_threads(threads), no_garbage_collection():
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
