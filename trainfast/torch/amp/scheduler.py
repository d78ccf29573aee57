"""Learning rate schedulers that know which steps a gradient scaler skipped."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainfast.report import attributes, one_line
from trainfast.torch.amp.grad_scaler import GradScaler


class SkipAwareScheduler:
    """A learning rate scheduler that does not advance with a skipped step.

    Call step() after each iteration, with what the scheduler takes. It notes whether
    the optimizer's step was skipped without waiting to know; the scheduler advances, or
    not, at the beginning of the optimizer's next step, or at the next step() here. The
    rates are those of `if not scaler.step_was_skipped(optimizer): scheduler.step()`, so
    that, as with torch's, every call counts: two after one step that was not skipped
    advance twice, and a schedule in epochs needs the scheduler itself, not this. All
    else is the scheduler's: what is read here is up to date, `param_groups` is not
    before the next step.

    Args:
        scheduler: any that has step().
        scaler: the trainfast.torch.GradScaler whose step() steps the optimizer.
        optimizer: whose steps count; None: the scheduler's own.
    """

    def __init__(
        self,
        scheduler: Any,
        scaler: GradScaler,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._scaler = scaler
        self._optimizer = scheduler.optimizer if optimizer is None else optimizer
        self._pending: tuple[list[Callable[[], bool]], Any, Any] | None = None
        self._register_hooks()

    def __repr__(self) -> str:
        """Names the parts, without deciding about a step that is due."""
        return one_line(self, **attributes(self, "scheduler _scaler _optimizer"))

    def _register_hooks(self) -> None:
        def before_step(*_: Any) -> None:
            self._decide()

        before_step.reads_no_grads = True  # type: ignore[attr-defined] # for GradScaler
        self._optimizer.register_step_pre_hook(before_step)
        for owner in {
            id(o): o for o in (self._optimizer, self.scheduler.optimizer)
        }.values():
            # its groups hold the rates: a checkpoint must have those of the next step
            owner.register_state_dict_pre_hook(lambda *_: self._decide())
            owner.register_load_state_dict_pre_hook(lambda *_: self._decide())

    def __getstate__(self) -> dict[str, Any]:
        """Decides nothing: the optimizer may have been copied already."""
        state = vars(self).copy()
        if self._pending is not None:
            notes, args, kwargs = self._pending
            state["_pending"] = [partial(bool, note()) for note in notes], args, kwargs
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._register_hooks()  # a copy of an optimizer has none

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Notes how the last step of the optimizer went; see the class."""
        flags = self._scaler._flags_of(self._optimizer)
        self._decide()
        self._pending = [_note(flag) for flag in flags], args, kwargs

    def _decide(self) -> None:
        """Advances the scheduler if a step() is due and was not skipped."""
        if self._pending is not None:
            notes, args, kwargs = self._pending
            self._pending = None
            if not any([note() for note in notes]):
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """The rates of the next step; waits for the last one's flag."""
        self._decide()
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, up to date; waits for the last step's flag."""
        self._decide()
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the scheduler's state, after a decision that is due.

        Args:
            state_dict: what `state_dict` returned.
        """
        self._decide()
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "scheduler":  # also before __init__
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._decide()
        return getattr(self.scheduler, name)


def _note(flag: Tensor) -> Callable[[], bool]:
    """Copies a flag to the host without waiting; what is returned waits, and reads."""
    if not flag.is_cuda:
        value = flag.clone()
        return lambda: float(value) != 0
    here = torch.empty((), dtype=flag.dtype, pin_memory=True)
    here.copy_(flag, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(flag.device))

    def read() -> bool:
        done.synchronize()
        return float(here) != 0

    return read
