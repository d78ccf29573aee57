"""Makes graphs by tasks of a concurrent.futures executor, on any number of machines.

Each task writes a segment of its own into the cache on shared storage. A task whose
result is lost is looked up in the cache, and only what it has not committed is
submitted again. Tasks that run twice are harmless: the order that ends a build has one
record for each key, and segments without wanted graphs are deleted then.
"""

import pickle
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from trainfast import _core
from trainfast.graph_cache import keys
from trainfast.graph_cache.job import BuildError, Job, Todo
from trainfast.graph_cache.progress import Progress
from trainfast.graph_cache.schema import Schema
from trainfast.graph_cache.workers import error_of, packed_error

_TASK_SECONDS = 5.0  # what a task is to take: each writes a file
_TASK_LIMIT = 1024  # inputs in a task
_FIRST_IN_FLIGHT = 16  # tasks
_MOST_IN_FLIGHT = 4096
_ATTEMPTS = 4  # of a task whose result is lost
_NOT_PICKLED = (pickle.PicklingError, AttributeError, TypeError)


@dataclass
class _Task:
    """What an executor runs: inputs whose graphs become one segment."""

    job: Job
    schema: bytes
    chunk: list[Todo]
    number: int  # no two are equal: some executors run equal tasks once
    attempt: int = 1
    submitted: float = field(default_factory=perf_counter)

    def named(self) -> str:
        first, last = self.chunk[0][0], self.chunk[-1][0]
        return f"input {first}" if first == last else f"inputs {first} .. {last}"


def run_task(task: _Task) -> tuple[float, Any]:
    """In a worker: returns the seconds that the task took, and its error or None."""
    start = perf_counter()
    try:
        _make_all(task)
    except Exception as error:
        return perf_counter() - start, packed_error(error)
    return perf_counter() - start, None


def _make_all(task: _Task) -> None:
    if not _core.graph_is_building(task.job.path):
        return  # the executor has repeated a task of a build that has ended
    with task.job.writer(Schema.decode(task.schema)) as writer:
        for place, key, item in task.chunk:
            task.job.append(writer, place, key, item)
        writer.commit()
        if not _core.graph_is_building(task.job.path):
            writer._abandon(adopt=False)  # the cache is complete without these graphs


def make_by_executor(
    job: Job, executor: Any, schema: Schema, todo: Iterator[Todo], bar: Progress
) -> int:
    """Makes all of `todo` with the schema; returns how many were made."""
    tasks = _Tasks(job, executor, schema.encode(), bar)
    try:
        tasks.run(todo)
    finally:
        tasks.stop()
    return tasks.made


class _Tasks:
    """Keeps a bounded number of tasks in flight, and submits lost ones again."""

    def __init__(self, job: Job, executor: Any, schema: bytes, bar: Progress) -> None:
        self.job, self.executor, self.schema, self.bar = job, executor, schema, bar
        self.made = 0
        self.number = 0
        self.limit = _FIRST_IN_FLIGHT
        self.in_task = 1
        self.in_flight: dict[Any, _Task] = {}
        self.keys = self._stored()
        self.twice: set[bytes] = set()  # keys of several inputs
        # Not concurrent.futures.wait: it never hears of futures that are cancelled
        # before they run.
        self.finished: SimpleQueue[Any] = SimpleQueue()

    def run(self, todo: Iterator[Todo]) -> None:
        left = True
        while left or self.in_flight:
            while left and len(self.in_flight) < self.limit:
                chunk = list(islice(todo, self.in_task))
                for _, key, _ in chunk:
                    (self.twice if key in self.keys else self.keys).add(key)
                left = bool(chunk)
                if chunk:
                    self._submit(chunk, 1)
            if self.in_flight:
                self._take(self.finished.get())

    def stop(self) -> None:
        """Cancels what has not begun, and waits for what runs: it writes the cache."""
        # An interrupt may have come between any two statements, so `finished` may lack
        # futures.
        for future in [each for each in self.in_flight if not each.cancel()]:
            with suppress(CancelledError):
                future.exception()

    def _submit(self, chunk: list[Todo], attempt: int) -> None:
        self.number += 1
        task = _Task(self.job, self.schema, chunk, self.number, attempt)
        try:
            future = self.executor.submit(run_task, task)
        except BrokenExecutor as error:
            raise _lost(task, error) from error
        except _NOT_PICKLED as error:
            raise _not_pickled(task, error) from error
        self.in_flight[future] = task
        future.add_done_callback(self.finished.put)

    def _take(self, future: Any) -> None:
        task = self.in_flight.pop(future)
        if future.cancelled():
            self._again(task, None)
            return
        error = future.exception()
        if error is None:
            seconds, failed = future.result()
            if failed is not None:
                raise error_of(*failed)
            self._done(len(task.chunk))
            self._pace(task, seconds)
        elif isinstance(error, _NOT_PICKLED):
            raise _not_pickled(task, error) from error
        else:
            self._again(task, error)

    def _again(self, task: _Task, error: BaseException | None) -> None:
        """After a task was lost: submits what it has not committed."""
        with suppress(OSError):
            _core.graph_adopt(self.job.path)
        have = self._stored()
        # Of inputs with one key nothing tells which was committed: all are made again.
        have -= self.twice
        chunk = [one for one in task.chunk if one[1] not in have]
        self._done(len(task.chunk) - len(chunk))
        if not chunk:
            return
        task.chunk = chunk
        if task.attempt == _ATTEMPTS:
            raise _lost(task, error) from error
        # In halves, so that an input that kills its worker is found.
        half = (len(chunk) + 1) // 2
        for part in (chunk[:half], chunk[half:]):
            if part:
                # A part that is smaller has told something new, and starts over.
                self._submit(part, task.attempt + 1 if len(chunk) == 1 else 1)

    def _stored(self) -> set[bytes]:
        """The keys of the graphs that are in the cache."""
        found = keys.stored(self.job.path, partial=True)
        return {found[i : i + keys.SIZE] for i in range(0, len(found), keys.SIZE)}

    def _done(self, n: int) -> None:
        self.made += n
        self.bar.made(n)

    def _pace(self, task: _Task, seconds: float) -> None:
        """Tasks as long as wanted, and enough of them that no worker waits."""
        size = int(len(task.chunk) * _TASK_SECONDS / max(seconds, 1e-9))
        self.in_task = max(1, min(_TASK_LIMIT, size, 2 * self.in_task))
        if perf_counter() - task.submitted < 2 * seconds:  # it hardly had to queue
            self.limit = min(_MOST_IN_FLIGHT, self.limit + 1)


def _not_pickled(task: _Task, error: BaseException) -> TypeError:
    rule = f"make and {task.named()} must pickle to be sent to the executor"
    return TypeError(f"{rule}, got {task.job.make!r}: {error}")


def _lost(task: _Task, error: BaseException | None) -> BuildError:
    why = "it was cancelled" if error is None else f"{type(error).__name__}: {error}"
    kept = "what was committed is kept, and the next build goes on from there"
    what = f"a task that made {task.named()} was lost {task.attempt} times: {why}"
    return BuildError(f"{what}; {kept}", task.chunk[0][0])
