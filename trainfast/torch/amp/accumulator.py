"""Gradient accumulation in a loop that stays the user's own."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainfast.report import attributes, one_line
from trainfast.torch.amp.grad_scaler import GradScaler
from trainfast.torch.amp.scheduler import SkipAwareScheduler
from trainfast.torch.optim import shards
from trainfast.torch.optim.clip import clip_grad_norm_
from trainfast.torch.optim.fused_step import FusedStep
from trainfast.torch.ranks import is_distributed

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
            float32. None: in one process, where optimizer and torch (from 2.10 on) can.
            DDP and FSDP2 refuse gradients of another dtype than the parameter's.
        model: the DistributedDataParallel or FSDP2 module that is trained: in `batches`
            its processes reduce gradients only in the last backward pass of a step.
            FSDP2 keeps whole gradients until then.

    Attributes:
        steps_done: how many steps there were, skipped ones included.
        grad_norm: of the last step, before clipping, on the device; None without.

    Raises:
        ValueError: steps below 1, a ReduceLROnPlateau, clipping asked for in two
            places, or a model that cannot put off the reduction.
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
        model: Any = None,
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
        if model is not None and not _can_wait(model):
            raise ValueError(
                "model must be a DistributedDataParallel or FSDP2 module, got "
                f"{type(model).__name__}; leave it out where gradients are not reduced"
            )
        self.model = model
        self._no_sync = ExitStack()  # holds the model's no_sync() for one pass
        self._reduces = True  # as the model is told
        self._unit = 0.0  # tokens that weigh as one pass; 0: not known yet
        releases = getattr(optimizer, "_release", None) is not None
        scaled = scaler is not None and scaler.is_enabled()
        if releases and (steps > 1 or max_grad_norm or scaled):
            raise ValueError(
                "steps must be 1, scaler and max_grad_norm None with an optimizer that "
                "releases gradients in backward(); call release_gradients(False) first"
            )
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
        self._weight = 0.0  # of their losses
        self._by_tokens = False
        self._divisor: float = self.steps  # by which those losses were divided
        self._ready = False  # their gradients want nothing but the step
        self._is_pending = False  # gradients of the last pass were not reduced

    def _prepare_pass(self, reduces: bool) -> None:
        """Tells the model, before a forward pass, whether backward() reduces."""
        self._reduces = reduces
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(reduces)
        elif self.model is not None:
            self._no_sync.close()
            if not reduces:
                self._no_sync.enter_context(self.model.no_sync())

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
        if wanted is None:  # DDP and FSDP2 reduce in the parameter's dtype alone
            wanted = not is_distributed()
        if possible and wanted and self.steps > 1:
            for param in self._params():
                if param.dtype in _HALF and param.grad is None and param.is_leaf:
                    param.grad_dtype = torch.float32

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the loader's batches, and steps at the end if a step is due.

        Args:
            loader: an iterable of batches.
        """
        if self.model is None:
            yield from loader
        else:
            try:
                for batch, is_last in _mark_last(loader):
                    self._prepare_pass(is_last or self._waiting + 1 >= self.steps)
                    yield batch
            finally:
                self._prepare_pass(True)
        self.flush()

    def backward(self, loss: Tensor, tokens: float | None = None) -> bool:
        """One backward pass, and a step if it is the last of `steps`.

        Args:
            loss: the mean loss of the batch, a tensor of one element.
            tokens: how many tokens (or samples) the loss is the mean of. The gradient
                of the step is then the mean over the tokens of all its passes, with
                `model` those of all processes, instead of the mean over passes.

        Returns:
            Whether the optimizer has stepped.

        Raises:
            ValueError: tokens are negative, or given for some passes of a step only.
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
        share = self._share_of(loss, tokens)
        if self.scaler is not None:
            share = self.scaler.scale(share)
        share.backward()
        self._waiting += 1
        self._ready = False
        self._is_pending = not self._reduces
        if self._waiting < self.steps:
            return False
        self._step()
        return True

    def _share_of(self, loss: Tensor, tokens: float | None) -> Tensor:
        """The loss as a part of the step's, which _make_ready() corrects."""
        if self._waiting and self._by_tokens is (tokens is None):
            raise ValueError(
                "tokens must be given for all passes of a step or for none"
            )
        if tokens is None:
            self._by_tokens = False
            self._weight += 1
            return loss / self._divisor
        if not float(tokens) >= 0:
            raise ValueError(f"tokens must be a number >= 0, got {tokens}")
        self._by_tokens = True
        if self._unit == 0:
            self._unit = max(self._mean(float(tokens)), 1.0)
        weight = float(tokens) / self._unit
        self._weight += weight
        return loss * (weight / self._divisor)

    def _mean(self, number: float) -> float:
        """The mean over the processes that average the model's gradients."""
        if self.model is None:
            return number
        params: list[Any] = self._params()
        mesh = next((p.device_mesh for p in params if shards.is_sharded(p)), None)
        value = torch.tensor([number], dtype=torch.float64, device=params[0].device)
        if mesh is not None:
            total = shards.reduce(value, mesh, torch.distributed.ReduceOp.SUM)
            return float(total) / int(mesh.size())
        group = self.model.process_group
        torch.distributed.all_reduce(value, group=group)
        return float(value) / torch.distributed.get_world_size(group)

    def flush(self) -> bool:
        """Steps with the backward passes since the last step; False if there are none.

        For loops that do not use `batches`, at their end; and again, where it failed.

        Raises:
            RuntimeError: with `model`, `batches` was left before the pass that reduces.
        """
        if self._waiting == 0:
            return False
        if self._is_pending:
            raise RuntimeError(
                "flush() must come after a pass that reduces gradients over processes, "
                f"got {self._waiting} of {self.steps} passes; iterate over "
                "batches(loader) to its end"
            )
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
        if self._by_tokens:
            self._weight = self._mean(self._weight)
            self._by_tokens = False  # the step may fail, and is repeated as it is
        if self._weight not in (self._divisor, 0):  # less; more after a failed step
            for grad in grads:
                grad.mul_(self._divisor / self._weight)
            self._divisor = self._weight
        if self.max_grad_norm is not None:
            if self.scaler is not None and not self._is_unscaled():
                self.scaler.unscale_(self.optimizer)
            self.grad_norm = clip_grad_norm_(self._params(), self.max_grad_norm)
        self._ready = True

    def discard(self) -> None:
        """Forgets the backward passes since the last step, and their gradients.

        For what failed half-way, such as a batch that ran out of memory: its backward
        pass may have left a part of its gradients.

        Raises:
            RuntimeError: FSDP2 keeps gradients of its own that have not been reduced.
        """
        fsdp = hasattr(self.model, "set_requires_gradient_sync")
        if fsdp and self._is_pending:
            raise RuntimeError(
                "discard() must not come before FSDP2 has reduced the gradients; go on "
                "to the pass that reduces"
            )
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


def _can_wait(model: Any) -> bool:
    """True for modules that can put off the reduction of gradients."""
    names = ("set_requires_gradient_sync", "no_sync")
    return any(callable(getattr(model, name, None)) for name in names)


def _mark_last(loader: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Each batch, and whether it is the last one."""
    rest = iter(loader)
    for batch in rest:
        for following in rest:
            yield batch, False
            batch = following
        yield batch, True
