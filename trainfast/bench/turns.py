"""The measuring core: contenders take turns in one process.

Memory bandwidth on a shared machine drifts by more than the differences of interest,
so contenders run A B C A B C ... and every ratio is formed within a round. Garbage
collection is off while the clock runs.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

ROLES = ("ours", "rival", "bound")
# Runs a call and returns its nanoseconds, and those of the host or None.
Clock = Callable[[Callable[[], object]], tuple[float, float | None]]


@dataclass(frozen=True)
class Case:
    """What every contender computes; what has no meaning for a case is 0.

    nbytes: the least that one call must move. flops: what one call must compute.
    """

    name: str
    title: str
    dtype: str
    tensors: int = 0
    params: int = 0
    nbytes: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Contender:
    """One way to do a case.

    run: the timed call. prepare: called before each of them, outside the clock.
    nbytes: what this one must move, where it differs from the case. calls: how often
    run does the case, of which the mean counts; a fraction where it does other work.
    """

    name: str
    run: Callable[[], object]
    role: str = "rival"
    prepare: Callable[[], object] | None = None
    nbytes: int | None = None
    note: str = ""
    calls: float = 1

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role must be one of {ROLES}, got {self.role!r}")


@dataclass(frozen=True)
class Budget:
    """Rounds: as many as fit in `seconds`, within the two limits."""

    seconds: float = 10.0
    warmup: int = 3
    min_rounds: int = 9
    max_rounds: int = 2000


# ---- Clocks --------------------------------------------------------------------------


def cpu_clock(run: Callable[[], object]) -> tuple[float, None]:
    """Time a call that has done its work when it returns."""
    start = time.perf_counter_ns()
    run()
    return time.perf_counter_ns() - start, None


def cuda_clock(run: Callable[[], object]) -> tuple[float, float]:
    """Time a call that enqueues work on the current stream, by events around it.

    The stream is empty at the start, so the first number is what a caller who waits
    for the result sees; the second is how long the call kept the host.
    """
    import torch

    before = torch.cuda.Event(enable_timing=True)
    after = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before.record()
    start = time.perf_counter_ns()
    run()
    host = time.perf_counter_ns() - start
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) * 1e6, host


# ---- Measuring -----------------------------------------------------------------------


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Garbage is collected before, and not while, what is in it runs."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def measure(
    contenders: Sequence[Contender],
    budget: Budget,
    clock: Clock = cpu_clock,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Run the contenders in turn.

    Returns two dicts from name to one time a round in ns: whole call, host only (empty
    lists on the CPU).
    """
    names = [contender.name for contender in contenders]
    if len(set(names)) != len(names):
        raise ValueError(f"contenders must have different names, got {names}")
    times: dict[str, list[float]] = {name: [] for name in names}
    hosts: dict[str, list[float]] = {name: [] for name in names}

    def one_round(keep: bool) -> None:
        for contender in contenders:
            if contender.prepare is not None:
                contender.prepare()
            elapsed, host = clock(contender.run)
            if keep:
                times[contender.name].append(elapsed / contender.calls)
                if host is not None:
                    hosts[contender.name].append(host / contender.calls)

    with no_garbage_collection():
        for _ in range(budget.warmup):
            one_round(keep=False)
        end = time.perf_counter() + budget.seconds
        for done in range(budget.max_rounds):
            if done >= budget.min_rounds and time.perf_counter() >= end:
                break
            one_round(keep=True)
    return times, hosts
