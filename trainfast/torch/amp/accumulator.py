"""Gradient accumulation in a loop that stays the user's own."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainfast.report import attributes, one_line
from trainfast.torch.amp.grad_scaler import GradScaler
from trainfast.torch.amp.scheduler import SkipAwareScheduler
from trainfast.torch.optim.clip import clip_grad_norm_
from trainfast.torch.optim.fused_step import FusedStep

Batch = TypeVar("Batch")
_HALF = (torch.float16, torch.bfloat16)
_MARKS = ("grad_scale", "found_inf")


class Accumulator:
    """Steps an optimizer once for every `steps` backward passes.

        accumulator = Accumulator(optimizer, steps=4, scaler=scaler, max_grad_norm=1.0)
        for x, y in accumulator.batches(loader):
            accumulator.backward(loss_of(model(x), y))

    The gradient of a step is the mean over its backward passes, also in the last group
    of `batches`, which may be shorter. Scaler, clipping, step, zero_grad and scheduler
    are called here, in the right order, and nowhere else.

    Args:
        optimizer: any of torch's or trainfast's.
        steps: backward passes to a step, at least 1.
        scaler: a GradScaler, or None.
        scheduler: a learning rate scheduler to advance with each step, but not with one
            that the scaler skips (exactly so with trainfast.torch.GradScaler), or None.
        max_grad_norm: clips the 2-norm over all gradients; None or 0 is off. With
            trainfast's optimizers better given to them, which saves a pass.
        float32_grads: accumulates gradients of float16 and bfloat16 parameters in
            float32. None: where optimizer and torch (from 2.10 on) can.

    Attributes:
        steps_done: how many steps there were, skipped ones included.
        grad_norm: of the last step, before clipping, on the device; None without.

    Raises:
        ValueError: steps below 1, a ReduceLROnPlateau, or clipping asked for in two
            places.
        NotImplementedError: float32_grads=True where they cannot be had.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        steps: int,
        *,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: Any = None,
        max_grad_norm: float | None = None,
        float32_grads: bool | None = None,
    ) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be a whole number >= 1, got {steps!r}")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "scheduler must be one that advances with each step, got "
                "ReduceLROnPlateau: call it yourself with what it watches"
            )
        if max_grad_norm and getattr(optimizer, "max_grad_norm", None):
            raise ValueError("max_grad_norm must not be given to the optimizer as well")
        self.optimizer = optimizer
        self.steps = steps
        self.scaler = scaler
        self.scheduler = scheduler
        if isinstance(scaler, GradScaler) and scaler.is_enabled() and scheduler:
            self.scheduler = SkipAwareScheduler(scheduler, scaler, optimizer)
        self.max_grad_norm = max_grad_norm or None
        self.steps_done = 0
        self.grad_norm: Tensor | None = None
        self._begin()
        self._use_float32_grads(float32_grads)

    def __repr__(self) -> str:
        names = "optimizer steps scaler scheduler max_grad_norm steps_done"
        return one_line(self, **attributes(self, names))

    def _begin(self) -> None:
        """Begins the next step's backward passes."""
        self._waiting = 0  # how many there were
        self._divisor = self.steps  # by which the losses of those were divided
        self._ready = False  # their gradients want nothing but the step

    def _params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _use_float32_grads(self, wanted: bool | None) -> None:
        possible = isinstance(self.optimizer, FusedStep) and hasattr(
            Tensor, "grad_dtype"
        )
        if wanted and not possible:
            raise NotImplementedError(
                "float32_grads needs trainfast's optimizer and torch 2.10 or newer"
            )
        if possible and wanted is not False and self.steps > 1:
            for param in self._params():
                if param.dtype in _HALF and param.grad is None and param.is_leaf:
                    param.grad_dtype = torch.float32

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the loader's batches, and steps at the end if a step is due.

        Args:
            loader: an iterable of batches.
        """
        yield from loader
        self.flush()

    def backward(self, loss: Tensor) -> bool:
        """One backward pass, and a step if it is the last of `steps`.

        Args:
            loss: the mean loss of the batch, a tensor of one element.

        Returns:
            Whether the optimizer has stepped.

        Raises:
            RuntimeError: the gradients are unscaled or clipped already, because a step
                has failed: `flush` repeats the step, `discard` drops the gradients.
        """
        clipped = self._ready and self.max_grad_norm is not None
        if self._waiting and (clipped or self._is_unscaled()):
            raise RuntimeError(
                "backward() must not add to gradients that are unscaled or clipped "
                "already (has a step failed?): flush() steps with them, discard() "
                "forgets them"
            )
        share = loss / self._divisor
        if self.scaler is not None:
            share = self.scaler.scale(share)
        share.backward()
        self._waiting += 1
        self._ready = False
        if self._waiting < self.steps:
            return False
        self._step()
        return True

    def flush(self) -> bool:
        """Steps with the backward passes since the last step; False if there are none.

        For loops that do not use `batches`, at their end; and again, where it failed.
        """
        if self._waiting == 0:
            return False
        self._step()
        return True

    def _is_unscaled(self) -> bool:
        """True once the scaler has unscaled gradients that were not stepped with."""
        states = getattr(self.scaler, "_per_optimizer_states", {})
        state = states.get(id(self.optimizer))
        return state is not None and state["stage"] is OptState.UNSCALED

    @torch.no_grad()
    def _step(self) -> None:
        if not self._ready:
            self._make_ready()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self._step_with(self.scaler)
        self._begin()
        self.steps_done += 1
        if self.max_grad_norm is None:
            self.grad_norm = getattr(self.optimizer, "grad_norm", None)
        if not all(g.get("zero_grad", False) for g in self.optimizer.param_groups):
            self.optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()

    def _step_with(self, scaler: torch.amp.GradScaler) -> None:
        """torch's scaler leaves its marks on an optimizer whose step raises, and at the
        next one would multiply its scale into them."""
        marks = vars(self.optimizer)
        before = {name: marks[name] for name in _MARKS if name in marks}
        try:
            scaler.step(self.optimizer)
        except BaseException:
            for name in _MARKS:
                marks.pop(name, None)
            marks.update(before)
            raise

    def _make_ready(self) -> None:
        """Turns the gradients into those of a step, once even where the step fails."""
        grads = [p.grad for p in self._params() if p.grad is not None]
        if self._waiting != self._divisor:  # fewer; more after a failed step
            if grads:
                for grad in grads:
                    grad.mul_(self._divisor / self._waiting)
            self._divisor = self._waiting
        if self.max_grad_norm is not None:
            if self.scaler is not None and not self._is_unscaled():
                self.scaler.unscale_(self.optimizer)
            self.grad_norm = clip_grad_norm_(self._params(), self.max_grad_norm)
        self._ready = True

    def discard(self) -> None:
        """Forgets the backward passes since the last step, and their gradients.

        For what failed half-way, such as a batch that ran out of memory: its backward
        pass may have left a part of its gradients.
        """
        self._begin()
        if self.scaler is not None and self._is_unscaled():
            self.scaler._per_optimizer_states.pop(id(self.optimizer))
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, int]:
        """What is needed to go on, beside the states of what is accumulated for.

        RuntimeError between the backward passes of one step: gradients are not saved.
        """
        if self._waiting:
            raise RuntimeError(
                f"state_dict() must come after a step, got {self._waiting} backward "
                "passes since the last one (see flush)"
            )
        return {"steps_done": self.steps_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Loads a state; drops the backward passes since the last step.

        Args:
            state: what `state_dict` returned.
        """
        self.steps_done = int(state["steps_done"])
        self.discard()
