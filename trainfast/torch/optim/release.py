"""Steps each parameter during backward() and frees its gradient there."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from trainfast.torch import private
from trainfast.torch.optim import half

_CONTRADICTING = ("differentiable", "zero_grad", "write_back_grads")


class _Hook:
    """What autograd calls when a parameter's gradient is complete.

    It holds no reference to the optimizer, which would keep it alive as long as the
    model.
    """

    def __init__(self, optimizer: Any, place: tuple[int, int]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.place = place  # index of the group, index of the parameter in it
        self.round = -1  # the last one in which the parameter was stepped

    def __call__(self, param: Tensor) -> None:
        optimizer = self.optimizer()
        if optimizer is not None:
            optimizer._step_released(self, param)


class _Release:
    """The hooks of an optimizer. A round lasts from one step() to the next."""

    def __init__(self) -> None:
        self.handles: dict[Tensor, Any] = {}
        self.round = 0
        self.begun = False  # a parameter was stepped in this round
        self.looked = False  # for wrappers of the model, during a backward()

    def attach(self, optimizer: Any) -> None:
        for i, group in enumerate(optimizer.param_groups):
            for j, param in enumerate(group["params"]):
                if param.requires_grad and param not in self.handles:
                    hook = _Hook(optimizer, (i, j))
                    handle = param.register_post_accumulate_grad_hook(hook)
                    self.handles[param] = handle

    def remove(self) -> None:
        for handle in self.handles.values():
            handle.remove()

    def close(self, optimizer: Any) -> None:
        """Ends the round. Gradients that no hook has freed are freed here."""
        params = (p for group in optimizer.param_groups for p in group["params"])
        left = [param for param in params if param.grad is not None]
        for param in left:
            param.grad = None
        if left:
            self.attach(optimizer)  # they may have been frozen before
        self.round += 1
        self.begun = False


class _OffersScaling:
    """`_step_supports_amp_scaling` where the instance has none.

    With it a gradient scaler calls step(), which says why there must be no scaler.
    """

    def __get__(self, optimizer: Any, owner: type) -> bool:
        if optimizer is None or optimizer._release is None:
            raise AttributeError("_step_supports_amp_scaling")
        return True


class ReleasedGradients:
    """The part of trainfast's torch optimizers that steps during backward()."""

    param_groups: list[dict[str, Any]]
    _before_ema: list[tuple[Tensor, Tensor]]
    _masters_loaded: bool
    _release: _Release | None = None
    _ready_groups: Callable[[], list[dict[str, Any]]]
    _step_all: Callable[..., None]
    _step_supports_amp_scaling: Any = _OffersScaling()

    def release_gradients(self, enabled: bool = True) -> None:
        """Steps each parameter as soon as backward() has completed its gradient.

        The gradient is freed then, so that the gradients of a model are never all in
        memory. The loop stays as it is: step() follows each backward(), runs the hooks
        of a step once, and steps the parameters that have a gradient from elsewhere.
        After it no parameter has a gradient. The results are those of the usual step,
        bit for bit.

        The learning rate and all other options are read during backward(). A copy of
        the optimizer, and one from a pickle, releases nothing until it is told to.

        Args:
            enabled: False: all parameters are stepped in step() again.

        Raises:
            ValueError: max_grad_norm, zero_grad, write_back_grads or differentiable is
                set.
            RuntimeError: the model is wrapped in DistributedDataParallel or
                FullyShardedDataParallel; fully_shard is supported. Raised by
                backward(): the same, and a second gradient of a parameter before
                step(). Raised by step(): a closure, or a gradient scaler.
        """
        if not enabled:
            if self._release is not None:
                self._release.remove()
                self._release = None
            return
        self._check_release()
        _check_wrappers(self.param_groups)
        if self._release is None:
            self._release = _Release()
        self._release.attach(self)

    def _check_release(self) -> None:
        """Raises ValueError where an option needs all gradients, or keeps them."""
        max_grad_norm = self.__dict__.get("max_grad_norm")
        if max_grad_norm:
            raise ValueError(
                "max_grad_norm must be None with release_gradients(), got "
                f"{max_grad_norm}: the norm of all gradients is known only when "
                "backward() has ended; set max_grad_norm to None"
            )
        for group in self.param_groups:
            for name in _CONTRADICTING:
                if group.get(name):
                    raise ValueError(
                        f"{name} must be False with release_gradients(), got "
                        f"{group[name]}: no gradient is left after its step"
                    )

    def _check_released_step(self, closure: Any) -> None:
        """Raises RuntimeError for a step() that is not one of released gradients."""
        if closure is not None:
            raise RuntimeError(
                "closure must be None with release_gradients(): its backward() steps "
                "the parameters; call backward(), then step()"
            )
        marks = (self.__dict__.get(name) for name in ("grad_scale", "found_inf"))
        if any(mark is not None for mark in marks):
            raise RuntimeError(
                "a gradient scaler must not be used with release_gradients(): the "
                "parameters were stepped with scaled gradients; train in bfloat16 "
                "without a scaler, or call release_gradients(False)"
            )

    def _step_released(self, hook: _Hook, param: Tensor) -> None:
        """Steps one parameter, whose gradient is complete, and frees the gradient."""
        release = self._release
        if release is None:
            return
        group = self._group_of(hook, param)
        if group is None:  # it was taken out of the optimizer
            return
        if hook.round == release.round:
            raise RuntimeError(
                f"{_name_of(group, hook.place)} has a second gradient before step(): "
                "release_gradients() needs one backward() to each step(), without "
                "accumulation and without reentrant checkpointing of a shared parameter"
            )
        if not release.looked:
            _check_wrappers(self.param_groups)
            release.looked = True
        if not release.begun or self._masters_loaded or self._before_ema:
            self._check_release()
            half.draw_seed(self._ready_groups())
            release.begun = True
        self._step_all([{**group, "params": [param]}], ("released", hook.place))
        hook.round = release.round
        param.grad = None

    def _group_of(self, hook: _Hook, param: Tensor) -> dict[str, Any] | None:
        i, j = hook.place
        groups = self.param_groups
        known = groups[i]["params"] if i < len(groups) else ()
        if j < len(known) and known[j] is param:
            return groups[i]
        for i, group in enumerate(groups):  # the groups were edited
            for j, other in enumerate(group["params"]):
                if other is param:
                    hook.place = i, j
                    return group
        return None


def _name_of(group: dict[str, Any], place: tuple[int, int]) -> str:
    i, j = place
    if "param_names" in group:
        return f"parameter {group['param_names'][j]!r}"
    return f"parameter {j} of param group {i}"


def _check_wrappers(groups: Iterable[dict[str, Any]]) -> None:
    """Raises RuntimeError if a wrapper reduces the gradients after their hooks.

    A parameter does not know its wrapper, so all objects are looked through.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    kinds: tuple[type, ...] = (torch.nn.parallel.DistributedDataParallel,)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        kinds += (getattr(fsdp, "FullyShardedDataParallel", kinds[0]),)
    own = {id(param) for group in groups for param in group["params"]}
    for module in gc.get_objects():
        if not issubclass(type(module), kinds):
            continue
        if any(id(param) in own for param in module.parameters()):
            raise RuntimeError(
                "release_gradients() must not be used with a model in "
                f"{type(module).__name__}, which averages a gradient after its hook "
                "has run; use torch.distributed.fsdp.fully_shard"
            )


def refuse_clipping(params: Iterable[Tensor]) -> None:
    """Raises RuntimeError if gradients of these were released before clipping."""
    for param in params:
        for hook in private.post_accumulate_hooks(param):
            optimizer = hook.optimizer() if isinstance(hook, _Hook) else None
            if optimizer is not None and hook.round == optimizer._release.round:
                raise RuntimeError(
                    "gradients must not be clipped with release_gradients(): the "
                    "parameters were stepped with their gradients as they were; call "
                    "release_gradients(False)"
                )
