"""Makes graphs in several processes, each of which writes a segment of its own.

The parent sends chunks of inputs to each worker through a pipe, two at a time so that
no worker waits, and receives the number of graphs made. A worker whose parent was
killed commits and ends.
"""

import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait
from time import monotonic, perf_counter
from typing import Any

from trainfast.graph_cache.job import BuildError, Job, Todo, failure
from trainfast.graph_cache.progress import Progress
from trainfast.graph_cache.schema import Schema
from trainfast.graph_cache.writer import REFUSED

_CHUNK_SECONDS = 0.1  # what a chunk is to take
_CHUNK_LIMIT = 256
_AHEAD = 2  # chunks that a worker has
_POLL_SECONDS = 0.25  # between looks whether the parent is still there
# What pickle raises for what it cannot pickle.
_NOT_PICKLED = (pickle.PicklingError, AttributeError, TypeError)
_GRACE_SECONDS = 30.0  # for a worker to end after Ctrl-C or an error, then it is killed


def make_in_processes(
    job: Job, n_workers: int, schema: Schema, todo: Iterator[Todo], bar: Progress
) -> int:
    """Makes all of `todo` with the schema; returns how many were made."""
    pool = _Pool(job, schema, bar)
    try:
        first = list(islice(todo, n_workers))
        for _ in first:
            pool.start()
        pool.run(iter(_chained(first, todo)))
    finally:
        pool.stop()
    return pool.made


def _chained(first: list[Todo], rest: Iterator[Todo]) -> Iterator[Todo]:
    yield from first
    yield from rest


@dataclass
class _Worker:
    """A worker as its parent sees it."""

    process: Any
    pipe: Connection
    chunks: list[list[int]] = field(default_factory=list)  # places, not done yet
    ending: bool = False  # has been told that there are no more


class _Pool:
    def __init__(self, job: Job, schema: Schema, bar: Progress) -> None:
        self.job = job
        self.schema = schema.encode()
        self.bar = bar
        self.made = 0
        self.workers: list[_Worker] = []
        self.context = multiprocessing.get_context()
        self.stopping = self.context.RawValue("b", 0)
        self.begun = perf_counter()

    def start(self) -> None:
        here, there = self.context.Pipe()
        process: Any = self.context.Process(
            target=_work,
            args=(there, self.stopping, self.job, self.schema, os.getpid()),
        )
        with _ctrl_c_held():
            try:
                process.start()
            except _NOT_PICKLED as error:
                method = self.context.get_start_method()
                rule = f'must pickle for workers that start by "{method}"'
                got = f"got {self.job.make!r}: {error}"
                raise TypeError(f"make {rule}, {got}") from error
            there.close()
            self.workers.append(_Worker(process, here))

    def run(self, todo: Iterator[Todo]) -> None:
        """Hands out all of `todo`, and waits until the workers have closed."""
        left = bool(self.workers)
        while left or self.workers:
            for worker in list(self.workers):
                while left and len(worker.chunks) < _AHEAD:
                    left = self._send(worker, todo)
            for worker in [] if left else list(self.workers):
                if not (worker.chunks or worker.ending):
                    worker.ending = True
                    self._tell(worker, None)
            for worker in self._ready():
                self._hear(worker)

    def stop(self) -> None:
        """Ends the remaining workers; each commits its graphs."""
        self.stopping.value = 1
        for worker in self.workers:
            worker.pipe.close()
        deadline = monotonic() + _GRACE_SECONDS
        try:
            for worker in self.workers:
                worker.process.join(max(0.0, deadline - monotonic()))
        finally:
            for worker in self.workers:
                worker.process.kill()
                worker.process.join()

    def _send(self, worker: _Worker, todo: Iterator[Todo]) -> bool:
        """Sends a chunk; False if no input is left."""
        chunk = list(islice(todo, self._chunk_size()))
        if chunk:
            worker.chunks.append([place for place, _, _ in chunk])
            self._tell(worker, chunk)
        return bool(chunk)

    def _tell(self, worker: _Worker, message: Any) -> None:
        try:
            worker.pipe.send(message)
        except _NOT_PICKLED as error:
            places = worker.chunks[-1]
            what = f"inputs {places[0]} .. {places[-1]}"
            rule = "must pickle to be sent to workers"
            raise TypeError(f"{what} {rule}, got {error}") from error
        except OSError:  # it has died; its pipe still tells why, or that it has
            self._hear(worker)

    def _ready(self) -> list[_Worker]:
        ready = wait([worker.pipe for worker in self.workers])
        return [worker for worker in self.workers if worker.pipe in ready]

    def _hear(self, worker: _Worker) -> None:
        """Receives one message of a worker. Raises the worker's error."""
        try:
            kind, *rest = worker.pipe.recv()
        except (EOFError, OSError):
            raise self._death(worker) from None
        if kind == "done":
            done = len(worker.chunks.pop(0))
            self.made += done
            self.bar.made(done)
        elif kind == "closed":
            worker.process.join()
            self.workers.remove(worker)
        else:
            raise error_of(*rest)

    def _death(self, worker: _Worker) -> BuildError:
        worker.process.join()
        places = [place for chunk in worker.chunks for place in chunk]
        code = worker.process.exitcode
        how = f"killed by signal {-code}" if code < 0 else f"gone with status {code}"
        what = f"making one of inputs {places[0]} .. {places[-1]}" if places else "idle"
        kept = "what it committed is kept, and the next build goes on from there"
        place = places[0] if places else None
        return BuildError(f"a worker was {how} while {what}; {kept}", place)

    def _chunk_size(self) -> int:
        """The inputs in a chunk that takes about _CHUNK_SECONDS."""
        seconds = perf_counter() - self.begun
        each = self.made / max(seconds, 1e-9) / max(1, len(self.workers))
        return max(1, min(_CHUNK_LIMIT, int(each * _CHUNK_SECONDS)))


@contextmanager
def _ctrl_c_held() -> Iterator[None]:
    """Blocks Ctrl-C until the end of the block, when `stop` knows the started process.
    The process inherits the blocked signal and unblocks it itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def error_of(place: int | None, kind: str, text: str, trace: str, data: Any) -> Any:
    """The error that a worker met, as the parent raises it."""
    error: BaseException
    if kind == "make":
        assert place is not None
        error = failure(place, text)
        try:
            error.__cause__ = pickle.loads(data)
        except Exception:
            error.__cause__ = None
    else:
        error = {refused.__name__: refused for refused in REFUSED}.get(
            kind, BuildError
        )(text)
        if kind == "OSError":
            error = pickle.loads(data)
    error.add_note(f"In a worker:\n{trace}")
    return error


# ---- In the worker -------------------------------------------------------------------


def _work(
    pipe: Connection, stopping: Any, job: Job, schema: bytes, parent: int
) -> None:
    """The main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        _make_all(pipe, stopping, job, schema, parent)
    except BaseException as error:
        with suppress(OSError):  # nobody listens any more
            pipe.send(("failed", *packed_error(error)))


def _make_all(
    pipe: Connection, stopping: Any, job: Job, schema: bytes, parent: int
) -> None:
    with job.writer(Schema.decode(schema)) as writer:
        while not stopping.value:
            chunk = _receive(pipe, stopping, parent)
            if chunk is None:
                break
            for place, key, item in chunk:
                if stopping.value or os.getppid() != parent:
                    return
                job.append(writer, place, key, item)
            pipe.send(("done",))
    if not stopping.value:
        pipe.send(("closed",))


def _receive(pipe: Connection, stopping: Any, parent: int) -> list[Todo] | None:
    """The next chunk; None: no chunk is left, or the parent has died."""
    while os.getppid() == parent and not stopping.value:
        if pipe.poll(_POLL_SECONDS):
            try:
                return pipe.recv()
            except (EOFError, OSError):
                return None
    return None


def packed_error(error: BaseException) -> tuple[int | None, str, str, str, bytes]:
    """What `error_of` makes the error from; it pickles whatever the error is."""
    place = getattr(error, "place", None)
    kind = type(error).__name__
    text = str(error)
    cause: BaseException | None = error
    if isinstance(error, BuildError):
        kind, cause = "make", error.__cause__
        text = f"{type(cause).__name__}: {cause}"
    elif isinstance(error, OSError):
        kind = "OSError"
    elif type(error) not in REFUSED:
        text = f"a worker failed: {kind}: {text}"
    try:
        data = pickle.dumps(cause)
        pickle.loads(data)
    except Exception:
        data = b""
    trace = "".join(traceback.format_exception(error))
    return place, kind, text, trace, data
