"""`LeakTracker`: notices that memory grows with every step, and names what holds it."""

import contextlib
import os
import time
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainfast.report import Report, Table, one_line
from trainfast.torch.leaks import graphs, verdict
from trainfast.torch.leaks.census import Census
from trainfast.torch.leaks.signals import EVERY, Signals, grows
from trainfast.torch.leaks.verdict import Leak
from trainfast.torch.leaks.workers import Workers

_WARM_UP = 4  # steps: the optimizer's state comes with the first
_HALF = 8  # steps from one look at all objects to the next
_LONGER = 64  # steps, where a container grows, but not with every step
_FRAMES = 24  # of a traceback, so that libraries' frames leave one of the script's
_PATIENCE = 50  # steps until the next looks; doubled each time
_SHARE = 0.01  # of the time, at most for looks


class LeakWarning(UserWarning):
    """Memory grows with every step."""


@dataclass(repr=False)
class LeakReport(Report):
    """What `LeakTracker.report` returns.

    Attributes:
        steps: so many were seen.
        leaks: what grows, in the order in which it was found.
        slopes: growth a step over the last samples, by signal.
    """

    steps: int
    leaks: list[Leak] = field(default_factory=list)
    slopes: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "leaks": [vars(leak) for leak in self.leaks]}

    def tables(self) -> list[Table]:
        rows = [(name, round(slope, 1)) for name, slope in self.slopes.items()]
        leaks = [
            (
                leak.what,
                f"{leak.file}:{leak.line}" if leak.line else "",
                leak.growth,
                leak.contents,
                leak.remedy,
            )
            for leak in self.leaks
        ]
        columns = ("what", "where", "growth", "contents", "remedy")
        return [
            Table(f"Leaks in {self.steps} steps", columns, leaks),
            Table("Growth now", ("signal", "a step"), rows, "too few steps to tell"),
        ]


class LeakTracker:
    """Notices that memory grows with every step, and names what holds it.

        with trainfast.LeakTracker() as tracker:
            train()
        print(tracker.report())

    Every second step it samples what the host's allocator, Python's and torch's GPU
    allocator have given out (0.1 ms). Once the robust slope of one of them leaves zero,
    it looks at all of Python's objects three times within 16 steps; a look takes about
    a second for half a million objects, and collects garbage. If a container has grown,
    tracemalloc is on for the last 8 of these steps. A leak is warned of once; without a
    container, graph or class that grows there is no warning.

    Args:
        on_leak: called with each `Leak`; None: it is a `LeakWarning`.

    A step is a call of the first optimizer's step(), or of `step` if that is called. A
    forked child is not watched.
    """

    def __init__(self, on_leak: Callable[[Leak], None] | None = None) -> None:
        self.leaks: list[Leak] = []
        self.steps = 0
        self._on_leak = on_leak
        self._signals = Signals()
        self._workers = Workers()
        self._due = _WARM_UP
        self._patience = _PATIENCE
        self._looks: Generator[int | list[Leak], None, None] | None = None
        self._wait = 0  # steps until the next look
        self._looked = 0.0  # seconds, these looks
        self._not_before = 0.0  # time.monotonic() of the next looks
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._hook: Any = None
        self._broken = False
        self._owner = os.getpid()

    def __repr__(self) -> str:
        found = len(getattr(self, "leaks", ()))
        return one_line(self, steps=getattr(self, "steps", 0), leaks=found)

    def start(self) -> "LeakTracker":
        """Counts the steps of the first optimizer that steps, of the next one where
        that is gone."""
        if self._hook is None:
            self._owner = os.getpid()
            self._hook = register_optimizer_step_post_hook(self._after_optimizer)
        return self

    def stop(self) -> "LeakTracker":
        """Ends the watch; `start` goes on later."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._optimizer = None
        if self._looks is not None:
            self._looks.close()
        self._looks = None
        self._signals.clear()
        return self

    def __enter__(self) -> "LeakTracker":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def report(self) -> LeakReport:
        return LeakReport(self.steps, list(self.leaks), self._signals.slopes())

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def _after_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        first = None if self._optimizer is None else self._optimizer()
        if first is None:  # none has stepped, or the one that did is gone
            first, self._optimizer = optimizer, weakref.ref(optimizer)
        if first is optimizer:
            self.step()

    def step(self) -> None:
        """One step has ended. Called by hand, such as once an epoch, without `start`,
        it counts these."""
        if self._owner != os.getpid():
            return
        self.steps += 1
        if self._broken:
            return
        try:
            found = self._watch()
        except Exception as error:  # objects of others may do anything when looked at
            self._broken = True
            self.stop()
            text = f"LeakTracker has stopped: {type(error).__name__}: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return
        known = {(leak.file, leak.line, leak.what) for leak in self.leaks}
        for leak in found:
            if (leak.file, leak.line, leak.what) not in known:
                self.leaks.append(leak)
                if self._on_leak is None:
                    warnings.warn(str(leak), LeakWarning, stacklevel=2)
                else:
                    self._on_leak(leak)

    def _watch(self) -> list[Leak]:
        """What this step shows: the leaks that are known now."""
        copied = self._workers.look()
        found = [copied] if copied is not None else []
        if self._looks is not None:
            self._wait -= 1
            return found + self._go_on() if self._wait <= 0 else found
        if self.steps < self._due or self.steps % EVERY:
            return found
        if time.monotonic() < self._not_before:
            return found
        self._signals.take(self.steps)
        slopes = self._signals.slopes()
        if grows(slopes):
            measured = sum(n for name, n in slopes.items() if "bytes" in name)
            self._looks = _look(self.steps, measured)
            found += self._go_on()
        return found

    def _go_on(self) -> list[Leak]:
        """The next look; after the last one the leaks."""
        assert self._looks is not None
        began = time.monotonic()
        found = next(self._looks)
        now = time.monotonic()
        self._looked += now - began
        if isinstance(found, int):
            self._wait = found
            return []
        self._looks = None
        self._signals.clear()
        self._due = self.steps + self._patience
        self._patience *= 2
        self._not_before = now + self._looked / _SHARE
        self._looked = 0.0
        return found


def _look(steps: int, measured: float) -> Generator[int | list[Leak], None, None]:
    """Looks at all objects, some steps apart; yields how many steps to wait for the
    next look, and at last the leaks.

    Args:
        steps: seen until now.
        measured: bytes a step that the process got.
    """
    census = Census()
    graphs.mark(1)
    yield _HALF
    any_grew = census.look_again()
    graphs.mark(2)
    with _tracing() if any_grew else contextlib.nullcontext():
        for _ in range(_HALF):
            yield 1
            census.follow()
        grown = census.grown()
        steady = [each for each in grown if each.is_steady(steps + 2 * _HALF)]
        leaks = verdict.of_containers(steady, measured)
        if not leaks:
            other = verdict.of_graph({1, 2}, measured)
            other = other or verdict.of_classes(census.more(), _HALF, measured)
            leaks = [other] if other else []
    if not leaks and len(grown) > len(steady):
        for _ in range(_LONGER):  # some may be caches that fill
            yield 1
            census.follow()
        steps += 2 * _HALF + _LONGER
        steady = [each for each in census.grown() if each.is_steady(steps)]
        leaks = verdict.of_containers(steady, measured)
    yield leaks


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """Python remembers where objects are made."""
    if tracemalloc.is_tracing():
        yield
        return
    tracemalloc.start(_FRAMES)
    try:
        yield
    finally:
        tracemalloc.stop()
