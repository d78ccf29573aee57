"""One target of a logger: a bounded queue, and a thread that empties it."""

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

PERIOD = 0.25  # seconds from one write to the next: a killed process loses no more
LONGEST_PAUSE = 60.0  # seconds between two tries of a writer that fails
CAPACITY = 10_000  # records that may wait


class Record(NamedTuple):
    """What one call of `log` says; `time` is in seconds since 1970."""

    step: int
    time: float
    values: dict[str, Any]


class Writer(Protocol):
    """Writes records. All its methods are called in one thread, which is its own."""

    name: str  # in warnings
    keeps_whole: bool  # After an OSError of `write` nothing of the records is written.

    def write(self, records: Sequence[Record]) -> None: ...

    def close(self) -> None: ...


class Target:
    """A writer behind its queue.

    The caller never waits: the thread looks into the queue four times a second, so that
    `put` neither takes a lock nor wakes the thread.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.warnings: deque[str] = deque()  # for the training thread to give
        self._waiting: deque[Record] = deque()
        self._batch: list[Record] = []  # taken from the queue, not yet written
        self._lost = 0
        self._failed = self._ended = False
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, record: Record) -> None:
        if self._thread is None:
            self._start()
        if self._ended:
            self._lost += 1
        elif len(self._waiting) >= CAPACITY:
            if not self._lost:
                self._warn("is slower than the run; records are dropped")
            self._lost += 1
        else:
            self._waiting.append(record)

    def end(self) -> None:
        """Asks the thread to write what waits, and to end."""
        self._end.set()

    def join(self, deadline: float) -> None:
        """Waits for the thread until `time.monotonic()` is `deadline`."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
        if thread is not None and not self._ended:
            left = len(self._waiting) + len(self._batch)
            what = f"with {_records(left)} to write" if left else "at its end"
            self._warn(f"was still busy {what}; close(timeout=30) waits longer")
        if self._lost:
            self._warn(f"dropped {_records(self._lost)}")

    def _start(self) -> None:
        # Not in the constructor: processes that are forked before the first record
        # are forked without a thread.
        name = f"trainfast.Logger {self.writer.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread can be started any more
            self._thread, self._ended = None, True
            self._fail(error)

    def _run(self) -> None:
        pause = PERIOD
        while True:
            is_last = self._end.wait(pause)
            try:
                self._write()
                if is_last:
                    self.writer.close()
            except BaseException as error:
                self._fail(error)
                again = isinstance(error, OSError) and self.writer.keeps_whole
                if is_last or not again:
                    self._ended = True
                    self._lost += len(self._batch) + len(self._waiting)
                    return
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            pause = PERIOD
            if is_last:
                self._ended = True
                return

    def _write(self) -> None:
        if self._batch:  # again
            self.writer.write(self._batch)
        waiting = self._waiting
        self._batch = [waiting.popleft() for _ in range(len(waiting))]
        if self._batch:
            self.writer.write(self._batch)
            self._batch = []

    def _fail(self, error: BaseException) -> None:
        if not self._failed:
            self._failed = True
            again = isinstance(error, OSError) and self.writer.keeps_whole
            then = "it is tried again" if again else "nothing more is logged there"
            self._warn(f"failed with {type(error).__name__}: {error}; {then}")

    def _warn(self, text: str) -> None:
        self.warnings.append(f"logging to {self.writer.name} {text}")


class Targets:
    """All targets of a logger, and the records whose values are still on a GPU.

    Several threads may call. The lock is one that a signal handler may take again.
    """

    def __init__(self, writers: Sequence[Writer]) -> None:
        self.targets = [Target(writer) for writer in writers]
        self.process = os.getpid()
        self._warnings: list[str] = []
        self._late: deque[tuple[Record, Any]] = deque()
        self._lock = threading.RLock()

    def put(self, record: Record, late: Any = None) -> None:
        """Hands a record to all targets, in order.

        Args:
            record: its values that are None are those of `late`.
            late: trainfast.torch.late_values.LateValues, or None.
        """
        with self._lock:
            if self._late:
                self._pass_on(wait=False)
            if late is not None or self._late:
                self._late.append((record, late))
            else:
                for target in self.targets:
                    target.put(record)

    def close(self, seconds: float) -> list[str]:
        """Ends all threads.

        Returns:
            What the user has to be told.
        """
        if os.getpid() != self.process:
            return []  # a forked child has none of the threads
        with self._lock:
            self._pass_on(wait=True)
        for target in self.targets:
            target.end()
        deadline = time.monotonic() + seconds
        for target in self.targets:
            target.join(deadline)
        return self.warnings()

    def warnings(self) -> list[str]:
        """The new ones."""
        found, self._warnings = self._warnings, []
        for target in self.targets:
            while target.warnings:
                found.append(target.warnings.popleft())
        return found

    def _pass_on(self, wait: bool) -> None:
        """Hands on the records whose values have arrived; with `wait`, all of them.

        The queue is bounded by the driver's: each record with late values has launched
        work, and a launch blocks while about a thousand are outstanding.
        """
        while self._late:
            record, late = self._late[0]
            if late is not None:
                try:
                    if not (wait or late.has_come()):
                        return
                    values = iter(late.read())
                except RuntimeError as error:  # the GPU's: the training gets it, too
                    self._late.clear()
                    self._warnings.append(f"values on a GPU are lost: {error}")
                    return
                for name, value in record.values.items():
                    if value is None:
                        record.values[name] = next(values)
            self._late.popleft()
            for target in self.targets:
                target.put(record)


def _records(count: int) -> str:
    return f"{count} record{'s' if count > 1 else ''}"
