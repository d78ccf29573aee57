"""What the probe has seen of a script's training loop, and what it changes there."""

import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

clock = time.perf_counter

# Phases that can happen rarely. Their time is kept out of blocks, and their cost a step
# is their mean time multiplied by how often they happen.
EVENTS = ("save", "evaluation", "logging", "worker-start")
LONGEST_PERIOD = 64  # steps of an epoch that a block may hold whole
STEP = ("forward", "backward", "optimizer")  # phases that are the step itself
_MOST_NOTES = 20  # of the lines of a phase


class Loop:
    """A script's training loop, as the hooks see it.

    Attributes:
        switch: the counterfactual in force; a plain Switch changes nothing.
        optimizers: in the order of their first step; the first one's step ends a step
            of the loop.
        model: the outermost module that has parameters and was called in training.
        loader: the DataLoader that training batches come from.
        order: the last steps, by their optimizers, and backward passes (None).
        batches: copies of training batches, to use in place of the loader's.
        keeps_batches: whether more copies are to be kept.
        steps: optimizer steps so far.
        seconds: time by phase ("data", "forward", "backward", "optimizer", and EVENTS),
            of the outermost phase only.
        lines: lines of the script that lead to a phase, innermost alone.
        work: all lines of the script that lead to the step itself.
        restarts: the steps at which the training loader was iterated anew.
        once: seconds that a switch takes before its first step, by its name.
        scratch: a folder that goes with the probe; None: every one does, in a sandbox.
    """

    def __init__(self, script: str) -> None:
        self.script = script
        self.switch = Switch()
        self.reset()
        self.batches: list[Any] = []
        self.keeps_batches = True
        self.steps = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.event_total = 0.0  # seconds of all events that have ended
        self.counts: Counter[str] = Counter()
        self.events: list[tuple[str, float, int]] = []  # phase, seconds, step
        self.steps_under: Counter[str] = Counter()  # optimizer steps by switch
        self.lines: defaultdict[str, set[int]] = defaultdict(set)
        self.once: dict[str, float] = {}
        self.scratch: str | None = None
        self.work: set[int] = set()
        self.stack: list[int] = []  # lines at the first optimizer step, innermost first
        self.restarts: list[int] = []
        self.last_period = 0
        self.forward_backward = 0.0  # seconds from a batch's arrival to its gradients
        self.stepped: float | None = None  # when the last step ended
        # Seconds from a step's start to its backward pass, and of the whole step.
        self.own: list[tuple[float, float]] = []
        self.backward_began: float | None = None

    def reset(self) -> None:
        """Forgets the objects of a run of the script that has ended."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self.model: torch.nn.Module | None = None
        self.loader: Any = None
        self.phases: list[str] = []
        self.order: deque[torch.optim.Optimizer | None] = deque(maxlen=64)
        self.backwards = 0
        self.evaluating_since: float | None = None
        self.arrived: float | None = None

    # ---- The stopwatch ---------------------------------------------------------------

    def timed(self, phase: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function; what it takes counts for the outermost phase alone."""
        if self.phases or (self.evaluating_since is not None and phase != "save"):
            return function(*args, **kwargs)
        self.phases.append(phase)
        if phase in EVENTS:
            return self._timed_event(phase, function, args, kwargs)
        start = clock()
        try:
            return function(*args, **kwargs)
        finally:
            self.seconds[phase] += clock() - start
            self.counts[phase] += 1
            self.phases.clear()

    def _timed_event(self, phase: str, function: Any, args: Any, kwargs: Any) -> Any:
        self.synchronize()
        start = clock()
        try:
            return function(*args, **kwargs)
        finally:
            self.synchronize()
            took = clock() - start
            self.phases.clear()
            self._count_event(phase, took)
            if self.evaluating_since is not None:  # a save is no part of an evaluation
                self.evaluating_since += took

    def _count_event(self, name: str, took: float) -> None:
        self.seconds[name] += took
        self.counts[name] += 1
        self.event_total += took
        before = self.events[-1] if self.events else None
        if name == "worker-start" and before and before[::2] == (name, self.steps):
            took += before[1]  # the loader's iterator and its first batch: one start
            self.events.pop()
        self.events.append((name, took, self.steps))

    def evaluation_begins(self) -> None:
        if self.evaluating_since is None and not self.phases:
            self.synchronize()
            self.evaluating_since = clock()
            self.note("evaluation")

    def evaluation_ends(self) -> None:
        """Training goes on; an evaluation lasts until then."""
        if self.evaluating_since is not None:
            self.synchronize()
            since, self.evaluating_since = self.evaluating_since, None
            self._count_event("evaluation", clock() - since)

    def trains(self, phase: str) -> None:
        """Ends an evaluation, and notes lines, as a phase of the step begins."""
        if self.evaluating_since is not None:
            self.evaluation_ends()
        if self.counts[phase] < _MOST_NOTES:
            self.note(phase)

    def event_seconds(self) -> dict[str, float]:
        """Seconds of each kind of event so far, one that goes on included."""
        found = {name: self.seconds[name] for name in EVENTS}
        if self.evaluating_since is not None:
            found["evaluation"] += clock() - self.evaluating_since
        return found

    def synchronize(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    # ---- Places in the script --------------------------------------------------------

    def script_lines(self) -> list[int]:
        """The lines of the script that are being executed, innermost first."""
        frame, found = sys._getframe(1), []
        while frame is not None:
            if frame.f_code.co_filename == self.script:
                found.append(frame.f_lineno)
            frame = frame.f_back  # type: ignore[assignment]
        return found

    def note(self, phase: str) -> None:
        """Notes which lines of the script lead to a phase, for its first few times."""
        if self.counts[phase] < _MOST_NOTES:
            lines = self.script_lines()
            self.lines[phase].update(lines[:1])
            if phase in STEP:
                self.work.update(lines)
            if phase == "forward":
                self.counts[phase] += 1

    # ---- Evaluation ------------------------------------------------------------------

    def in_evaluation(self, loader: Any = None) -> bool:
        """Whether the model is in eval mode, or a loader other than that of training is
        read without gradients."""
        if self.model is not None and not self.model.training:
            return True
        others = loader is not None and self.loader not in (None, loader)
        return others and not torch.is_grad_enabled()

    def period(self) -> int:
        """Steps from one start of the training loader to the next; 0: not known.

        Until a run of the script shows a period of its own, it is that of the last run.
        """
        gaps = [b - a for a, b in zip(self.restarts, self.restarts[1:]) if b > a]
        if gaps:
            self.last_period = sorted(gaps)[len(gaps) // 2]
        return self.last_period


class Switch:
    """Changes nothing: what each counterfactual is compared with.

    A counterfactual overrides the methods whose part of the loop it changes. Each of
    these gets torch's own function as `original`. Everything must be undone by `leave`:
    blocks with and without the switch interleave in one process.

    Attributes:
        name: unique in a plan.
        warm: optimizer steps to drop after the switch has been entered.
        settle: seconds from then on in which steps are dropped, too, where a block may
            wait (see `Schedule.may_wait`).
        by_name: tried only where a plan names it: it takes long, or needs a process of
            its own, because a mistake of the script under it could outlast it.
        skipped: the number of a statement that does not run.
    """

    name = "base"
    warm = 1
    settle = 0.0
    by_name = False
    skipped = -1

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        """Whether the switch applies here and could gain anything.

        Args:
            loop: the loop after its warm-up.
            share: the share of the time that a phase has taken.
        """
        return True

    def enter(self, loop: Loop) -> None: ...

    def leave(self, loop: Loop) -> None: ...

    def used(self) -> bool:
        """Whether the steps since `enter` met what the switch changes."""
        return True

    def iterate(self, loop: Loop, loader: Any, original: Any) -> Any:
        return original(loader)

    def next_batch(self, loop: Loop, iterator: Any, original: Any) -> Any:
        return original(iterator)

    def backward(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> None:
        original(*args, **kwargs)

    def step(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> Any:
        return original(*args, **kwargs)

    def save(self, loop: Loop, original: Any, args: Any, kwargs: Any) -> Any:
        """Calls torch.save, whose time is an event's."""
        return loop.timed("save", original, *args, **kwargs)
