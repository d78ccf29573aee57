"""`find_workers`: how many workers a loader needs, by measuring it."""

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.random import fork_rng
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainfast.graph_cache.loader import Loader as GraphCacheLoader
from trainfast.machine import read, usable_cores
from trainfast.report import Report, Table
from trainfast.torch.data.batches import tensors
from trainfast.torch.data.loaders import like, loader_kwargs

_AHEAD = (
    1.2  # times the consumer's rate: then the loader is not what training waits for
)
_ENOUGH = 0.95  # of the best rate, for fewer workers
_WORSE_IN_A_ROW = 2
_PILOT_SECONDS, _PILOT_BATCHES = 3.0, 64
_WINDOW_SECONDS = 1.5  # of a candidate's steady state
_PREFETCH = 2  # batches a worker, torch's default


@dataclass
class Trial:
    """One number of workers.

    Attributes:
        workers: how many.
        start: seconds until the first batch, the start of the workers included.
        rate: batches a second from then on.
        memory: MB that the workers have for themselves.
        problem: why there is no rate.
    """

    workers: int
    start: float | None = None
    rate: float | None = None
    memory: int | None = None
    problem: str = ""


class WorkersReport(Report):
    """What was measured of a loader.

    Attributes:
        best: the number of workers to take.
        reason: why.
        trials: what was measured, in the order of the candidates.
        cold: batches a second of the first pass over the data, without workers.
        consumer_rate: batches a second that training takes, if it was given.
    """

    def __init__(
        self,
        best: int,
        reason: str,
        trials: list[Trial],
        cold: float | None = None,
        consumer_rate: float | None = None,
    ) -> None:
        self.best = best
        self.reason = reason
        self.trials = trials
        self.cold = cold
        self.consumer_rate = consumer_rate

    def loader_kwargs(self, **options: Any) -> dict[str, Any]:
        """Arguments for torch's DataLoader with the best number of workers."""
        return loader_kwargs(self.best, **options)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "trials": [vars(trial) for trial in self.trials]}

    def tables(self) -> list[Table]:
        rows = [
            (t.workers, _rounded(t.start), _rounded(t.rate), t.memory, t.problem)
            for t in self.trials
        ]
        columns = ("workers", "start s", "batches/s", "memory MB", "problem")
        facts: list[tuple[Any, ...]] = [(self.reason,)]
        if self.cold is not None:
            facts.append((f"first pass, without workers: {self.cold:.4g} batches/s",))
        return [
            Table("Workers", columns, rows),
            Table(f"Take num_workers={self.best}", ("",), facts),
        ]


def find_workers(
    data: Any,
    *,
    batch_size: int = 32,
    consumer_rate: float | None = None,
    candidates: Sequence[int] | None = None,
    seconds: float = 60.0,
    progress: Callable[[str], None] = lambda stage: None,
) -> WorkersReport:
    """Finds how many workers a loader needs.

    Each candidate reads the same batches, after a first pass that has filled the page
    cache. It ends when a candidate is 1.2 times as fast as training, or when two in a
    row are slower than the best before.

    Args:
        data: a Dataset, or a DataLoader, whose batches and options are kept.
        batch_size: of a Dataset's batches.
        consumer_rate: batches a second that training takes; None: as fast as can be.
        candidates: numbers of workers; None: 0, 1, 2, 4, ... up to twice the usable
            cores, while it gets faster.
        seconds: the most that all of it may take.
        progress: called with the name of each stage.

    Raises:
        TypeError: `data` is neither.
        ValueError: there is no batch, or an argument has no meaning.
        Exception: what the data set raises.
    """
    _check(batch_size, consumer_rate, candidates, seconds)
    if isinstance(data, GraphCacheLoader):
        return WorkersReport(0, "a graph cache reads in threads of this process", [])
    if isinstance(data, Dataset) or hasattr(data, "__getitem__"):
        data = DataLoader(data, batch_size=batch_size)
    if not isinstance(data, DataLoader):
        raise TypeError(
            f"data must be a Dataset or a DataLoader, got a {type(data).__name__}"
        )
    ladder = _Ladder(data, consumer_rate, time.monotonic() + seconds)
    return ladder.climb(_candidates(candidates), candidates is not None, progress)


def benchmark_dataloader(
    dataset: Any, num_workers_list: Sequence[int], batch_size: int = 32
) -> int:
    """Times each number of workers, prints a table and returns the best.

    Args:
        dataset: a Dataset.
        num_workers_list: the numbers to try; all are tried.
        batch_size: of the batches.
    """
    report = find_workers(dataset, batch_size=batch_size, candidates=num_workers_list)
    print(report)
    return report.best


def _check(
    batch_size: int,
    consumer_rate: float | None,
    candidates: Sequence[int] | None,
    seconds: float,
) -> None:
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more, got {batch_size!r}")
    if consumer_rate is not None and not consumer_rate > 0:
        raise ValueError(
            f"consumer_rate must be batches a second above 0, got {consumer_rate!r}"
        )
    wrong = [n for n in candidates or () if type(n) is not int or n < 0]
    if wrong or (candidates is not None and not candidates):
        raise ValueError(f"candidates must be numbers of workers, got {candidates!r}")
    if not seconds > 0:
        raise ValueError(f"seconds must be above 0, got {seconds!r}")


def _candidates(given: Sequence[int] | None) -> list[int]:
    if given is not None:
        return list(dict.fromkeys(given))
    cores = usable_cores()
    # Twice as many: workers that wait for a disk or a network leave their core idle.
    powers = itertools.takewhile(lambda n: n <= 2 * cores, (1 << i for i in range(16)))
    return sorted({0, cores, 2 * cores, *powers})


class _Ladder:
    """Tries one number of workers after the other."""

    def __init__(
        self, loader: DataLoader[Any], consumer_rate: float | None, late: float
    ) -> None:
        self.loader = loader
        self.consumer_rate = consumer_rate
        self.late = late
        self.streams = isinstance(loader.dataset, IterableDataset)
        self.batches: list[Any] | None = None  # of indices, the same for each candidate
        self.batch_bytes = 0
        self.rate = 0.0  # of the first pass

    def climb(
        self, candidates: list[int], all_of_them: bool, progress: Callable[[str], None]
    ) -> WorkersReport:
        with fork_rng(devices=()), _kept(self.loader.generator):
            return self._climb(candidates, all_of_them, progress)

    def _climb(
        self, candidates: list[int], all_of_them: bool, progress: Callable[[str], None]
    ) -> WorkersReport:
        progress("first pass")
        cold = self._first_pass()
        trials: list[Trial] = []
        worse = 0
        for workers in candidates:
            progress(f"{workers} workers")
            best = max((t.rate or 0.0 for t in trials), default=0.0)
            trials.append(trial := self._try(workers))
            worse = worse + 1 if (trial.rate or 0.0) < best else 0
            if not all_of_them and (self._feeds(trial) or worse >= _WORSE_IN_A_ROW):
                break
        best_one, reason = self._choose(trials)
        return WorkersReport(best_one, reason, trials, cold, self.consumer_rate)

    def _first_pass(self) -> float:
        """Reads some batches in this process; returns their rate."""
        if not self.streams and self.loader.batch_sampler is not None:
            sampler = iter(self.loader.batch_sampler)
            self.batches = list(itertools.islice(sampler, _PILOT_BATCHES))
            if not self.batches:
                raise ValueError("data must have at least one batch, got none")
        began = time.monotonic()
        late = min(self.late, began + _PILOT_SECONDS)
        count = 0
        for batch in like(self.loader, 0, self.batches):
            count += 1
            size = sum(t.numel() * t.element_size() for t in tensors(batch))
            self.batch_bytes = max(self.batch_bytes, size)
            if time.monotonic() > late or count == _PILOT_BATCHES:
                break
        if not count:
            raise ValueError("data must have at least one batch, got none")
        if self.batches is not None:
            del self.batches[count:]
        self.rate = count / (time.monotonic() - began)
        return self.rate

    def _try(self, workers: int) -> Trial:
        trial = Trial(workers)
        left = self.late - time.monotonic()
        need = workers * _PREFETCH * self.batch_bytes
        if left <= 0:
            trial.problem = "no time was left"
        elif need > _free_shared_memory():
            trial.problem = (
                f"its batches need {need >> 20} MB of /dev/shm, more than free"
            )
        else:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "This DataLoader will create")
                    self._measure(trial, left)
            except RuntimeError as error:  # of torch: a worker was killed, or timed out
                if not workers:
                    raise
                trial.problem = " ".join(str(error).split())[:200]
        return trial

    def _measure(self, trial: Trial, left: float) -> None:
        others = _children()
        began = time.monotonic()
        iterator = self._endless(trial.workers, left)
        next(iterator)
        trial.start = time.monotonic() - began
        for _ in range(_PREFETCH * trial.workers):  # what was ready before we asked
            next(iterator)
        then, count = time.monotonic(), 0
        end = min(self.late, then + _WINDOW_SECONDS)
        while count < 2 or time.monotonic() < end:
            next(iterator)
            count += 1
        trial.rate = count / (time.monotonic() - then)
        if trial.workers:
            trial.memory = round(_own_memory(_children() - others) / 1e6)

    def _endless(self, workers: int, left: float) -> Iterator[Any]:
        """The batches over and over. Raises RuntimeError where there are none."""
        batches = self.batches
        if batches is not None:  # a longer epoch: its start is no part of the rate
            batches = batches * (1 + 64 * max(1, workers) // len(batches))
        options = {"timeout": max(1.0, left)} if workers else {}
        loader = like(self.loader, workers, batches, **options)
        while True:
            empty = True
            for batch in loader:
                empty = False
                yield batch
            if empty:
                raise RuntimeError(
                    "the data gave no batch: it can be read once only, or a worker's "
                    "part of it is smaller than a batch"
                )

    def _feeds(self, trial: Trial) -> bool:
        enough = self.consumer_rate is not None and trial.rate is not None
        return enough and trial.rate >= _AHEAD * self.consumer_rate  # type: ignore

    def _choose(self, trials: list[Trial]) -> tuple[int, str]:
        measured = [t for t in trials if t.rate is not None]
        if not measured:
            return 0, "no candidate could be measured"
        feeding = [t for t in measured if self._feeds(t)]
        if feeding:
            least = min(feeding, key=lambda t: t.workers)
            return least.workers, "1.2 times as fast as training, or more"
        top = max(t.rate or 0.0 for t in measured)
        near = [t for t in measured if (t.rate or 0.0) >= _ENOUGH * top]
        least = min(near, key=lambda t: t.workers)
        if least.workers == 0:
            return (
                0,
                "workers would not load faster: what they load has to be sent here",
            )
        if self.consumer_rate is not None:
            return least.workers, "the fastest, but training still waits for it"
        return least.workers, "the fewest workers that reach 95 % of the best rate"


@contextmanager
def _kept(generator: torch.Generator | None) -> Iterator[None]:
    """Gives the generator its state back, so that the loader shuffles as before."""
    state = None if generator is None else generator.get_state()
    try:
        yield
    finally:
        if generator is not None and state is not None:
            generator.set_state(state)


def _free_shared_memory() -> int:
    try:
        state = os.statvfs("/dev/shm")
    except OSError:
        return 1 << 62
    return state.f_bavail * state.f_frsize


def _children() -> set[str]:
    """The numbers of this process's children."""
    own = str(os.getpid())
    return {
        folder.name
        for folder in Path("/proc").glob("[0-9]*")
        if read(folder / "stat").rpartition(")")[2].split()[1:2] == [own]
    }


def _own_memory(processes: set[str]) -> int:
    """Bytes that the processes share with no other one."""
    total = 0
    for process in processes:
        for line in read(f"/proc/{process}/smaps_rollup").splitlines():
            if line.startswith("Private_"):
                total += int(line.split()[1]) << 10
    return total


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")
