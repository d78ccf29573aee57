"""torch.amp.GradScaler on trainfast's kernels."""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp import grad_scaler as torchs  # not patched, unlike torch.amp
from torch.amp.grad_scaler import OptState
from typing_extensions import deprecated

from trainfast import _core
from trainfast.report import attributes, one_line
from trainfast.stats import CallTally, count_call, count_fallback
from trainfast.torch.amp.checks import check_init_scale, check_options, check_state
from trainfast.torch.optim import half, shards
from trainfast.torch.optim.clip import (
    Measured,
    call_core,
    combine_flags,
    current_stream,
    each_device,
    measure,
    moved,
)
from trainfast.torch.optim.fused_step import FusedStep
from trainfast.torch.optim.state import NO_CHECKS, bump_versions, has_grads
from trainfast.torch.private import (
    disable_dynamo,
    global_step_hooks,
    increment_version,
    new_optimizer_state,
    unscale_and_check,
    update_scale,
)

__all__ = ["CudaGradScaler", "GradScaler", "Measured", "measure"]

_MAX_FOUND = 16  # what _core.amp_update takes at once
_FEW, _SMALL = 2, 1024  # tensors, and elements of each
_WRAPPERS = ("torch.optim.optimizer", "torch.optim.lr_scheduler")  # of step()


class GradScaler(torchs.GradScaler):
    """torch.amp.GradScaler: same arguments, methods, state dict and errors.

    With trainfast's optimizers `step()` is one call that reads the gradients once for
    infinities (and the norm to clip) and once for the update; they stay as backward()
    left them. With optimizers that take a scale, torch's fused ones among them, nothing
    in an iteration waits for the GPU, so that all of it can be captured in a graph.
    More than torch's: bfloat16 gradients on every device, float16 gradients of
    parameters with master weights, and:

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as
            in torch.amp.GradScaler.
        min_scale: what the scale is not backed off below; None: nothing.
        max_scale: what the scale does not grow above; None: float32's range.
        hysteresis: reduce the scale only after this many consecutive overflows.
        repeated_unscale: `unscale_` of gradients that are unscaled already does nothing
            instead of raising RuntimeError.

    Raises:
        ValueError: a scale that is not a positive number, bounds that contradict it or
            each other, a hysteresis below 1.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        repeated_unscale: bool = False,
    ) -> None:
        rule = growth_factor, backoff_factor, growth_interval
        torchs.GradScaler.__init__(self, device, init_scale, *rule, enabled)
        check_options(min_scale, max_scale, hysteresis)
        if self._enabled:
            check_init_scale(init_scale, min_scale, max_scale)
        self._min_scale = min_scale
        self._max_scale = max_scale
        self._hysteresis = hysteresis
        self._repeated_unscale = repeated_unscale
        self._init_hysteresis_tracker = hysteresis
        self._hysteresis_tracker: Tensor | None = None  # where there is a _scale
        # The flags of each optimizer's last step, and those of the last one to step.
        self._steps: WeakKeyDictionary[Any, list[Tensor]] = WeakKeyDictionary()
        self._last_step: list[Tensor] | None = None

    def __repr__(self) -> str:
        """The settings: reading the current scale would wait for the GPU."""
        names = "_device _enabled _init_scale _growth_factor _backoff_factor "
        names += "_growth_interval _min_scale _max_scale _hysteresis"
        return one_line(self, **attributes(self, names))

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._place_hysteresis_tracker()

    def _place_hysteresis_tracker(self) -> None:
        """Where it is already it stays, for graphs that were captured with it."""
        if self._hysteresis == 1:
            self._hysteresis_tracker = None
            return
        if self._hysteresis_tracker is None:
            assert self._scale is not None
            device = self._scale.device
            self._hysteresis_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)

    # ---- An iteration --------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, in place.

        Does not wait for the GPU.

        Args:
            optimizer: the optimizer that will step with the gradients.

        Raises:
            RuntimeError: a second call before step(), unless `repeated_unscale` is set;
                then the second call does nothing.
        """
        if torch.compiler.is_compiling():
            self._uncompiled(self._unscale, optimizer)
        else:
            self._unscale(optimizer)

    @disable_dynamo  # a compiled loop breaks its graph here and goes on
    def _uncompiled(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            if self._repeated_unscale:
                return
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last "
                "update()."
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        if scale.is_cpu:
            inverse = scale.reciprocal()
        else:  # where float32 may be divided less exactly, as in torch
            inverse = scale.double().reciprocal().float()
        state["found_inf_per_device"] = self._unscale_grads_(
            optimizer, inverse, None, False
        )
        state["stage"] = OptState.UNSCALED

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor | None,  # torch's hook for scripts that allow float16
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        grads = _grads_of(optimizer, allow_fp16)
        if _are_small(grads):
            count_fallback("amp", "small gradients, which torch unscales sooner")
            found = torch.zeros(())
            unscale_and_check(grads, found, inv_scale)
            return {found.device: found}
        tally = CallTally("amp")

        def on_core(part: list[Tensor]) -> Tensor:
            device = part[0].device
            found = torch.empty((), dtype=torch.float32, device=device)
            factor = moved(inv_scale, device, torch.float64)
            call_core(tally, part, "multiply", found_inf=found, factor=factor)
            return found

        @torch.no_grad()
        def by_torch(part: list[Tensor]) -> Tensor:
            device = part[0].device
            found = torch.zeros((), dtype=torch.float32, device=device)
            inverse = inv_scale.to(device)
            for kind in dict.fromkeys((type(grad), grad.dtype) for grad in part):
                same = [grad for grad in part if (type(grad), grad.dtype) == kind]
                unscale_and_check(same, found, inverse)
            return found

        parts = shards.locals_of(grads)
        flags = each_device(tally, parts, on_core, by_torch) if grads else []
        if parts is not grads:
            increment_version(grads)
            flags = [shards.anywhere(combine_flags(flags), grads)]
        return {flag.device: flag for flag in flags}

    @torch.no_grad()
    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Looks for infinities without writing, for optimizers that unscale."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        parts: dict[torch.device, list[Tensor]] = {}
        for grad in _grads_of(optimizer, allow_fp16=True):
            parts.setdefault(grad.device, []).append(grad)
        found = {device: measure(part).found_inf for device, part in parts.items()}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def step(
        self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> float | None:
        """Steps the optimizer unless its gradients have infinities or NaNs.

        Unscales the gradients if unscale_() has not: trainfast's and torch's fused
        optimizers do that as they step, without waiting for the GPU. For others the
        gradients are unscaled in place, and the host waits to know whether to step.

        Args:
            optimizer: any of torch's or trainfast's.
            *args, **kwargs: for the optimizer's step().

        Returns:
            What the optimizer's step() returned; None if it was skipped.
        """
        if torch.compiler.is_compiling():
            return self._uncompiled(self._step, optimizer, *args, **kwargs)
        return self._step(optimizer, *args, **kwargs)

    def _step(
        self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> float | None:
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if "closure" in kwargs or not _takes_scale(optimizer):
            result = super().step(optimizer, *args, **kwargs)
        else:
            result = self._step_with_scale(optimizer, args, kwargs)
        flags = self._steps.get(optimizer)
        if flags is None:
            flags = self._steps[optimizer] = []
        flags[:] = self._found_inf_per_device(optimizer).values()
        self._last_step = flags
        return result

    def _step_with_scale(self, optimizer: Any, args: Any, kwargs: Any) -> float | None:
        """optimizer.step() with `grad_scale` and `found_inf` on it.

        trainfast's optimizers look for infinities themselves if asked to, and leave the
        flag; for the others it is 0 or 1, for torch's would not skip at 2.
        """
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        ready, flags = state["stage"] is OptState.READY, state["found_inf_per_device"]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update()."
            )
        measures = ready and isinstance(optimizer, FusedStep)
        offers = getattr(optimizer, "_step_supports_amp_scaling", None)
        if not (offers or (has_grads(optimizer.param_groups) if ready else flags)):
            raise AssertionError(NO_CHECKS)  # as torch does where it unscales itself
        if ready and not measures:
            self._check_inf_per_device(optimizer)
        given = getattr(optimizer, "grad_scale", None)  # the user's own, to clip
        if ready and (given is not None or not measures):
            given = scale * (1 if given is None else given)
        elif ready:  # only read; others get a copy, which they may write
            given = scale
        try:
            optimizer.grad_scale = given
            if measures:
                vars(optimizer).pop("found_inf", None)
                optimizer._measure_inf = True
            else:
                optimizer.found_inf = _flag_for(optimizer, state, scale)
            result = optimizer.step(*args, **kwargs)
            found = vars(optimizer).get("found_inf")
            if measures and found is not None:
                state["found_inf_per_device"] = {found.device: found}
        finally:
            for name in ("grad_scale", "found_inf", "_measure_inf"):
                with suppress(AttributeError):
                    delattr(optimizer, name)
        state["stage"] = OptState.STEPPED
        return result

    def step_was_skipped(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Whether the optimizer's last step() was skipped. Waits for that step's flag.

        Can be called after update(), and with torch's optimizers.

        Args:
            optimizer: the optimizer; None: the one that stepped last.

        Raises:
            RuntimeError: the optimizer has not stepped with this scaler.
        """
        return any(float(flag) != 0 for flag in self._flags_of(optimizer))

    def _flags_of(self, optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
        if not self._enabled:
            return []
        if optimizer is None and self._last_step is not None:
            return self._last_step
        if optimizer is None or optimizer not in self._steps:
            raise RuntimeError(
                "step_was_skipped() must come after a step() of this scaler"
            )
        return self._steps[optimizer]

    # ---- The scale -----------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale at the end of an iteration.

        Args:
            new_scale: sets the scale; None: the scale grows or backs off.
        """
        if torch.compiler.is_compiling():
            self._uncompiled(self._update, new_scale)
        else:
            self._update(new_scale)

    def _update(self, new_scale: float | Tensor | None) -> None:
        if not self._enabled or new_scale is not None:
            super().update(new_scale)
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        device = scale.device
        flags = [
            flag if flag.device == device else moved(flag, device)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if not flags:
            raise AssertionError("No inf checks were recorded prior to update.")
        if len(flags) > _MAX_FOUND:
            flags = [combine_flags(flags)]
        try:
            if _is_torchs_update(self, flags):
                count_fallback("amp", "a plain update, which torch does sooner")
                rule = self._growth_factor, self._backoff_factor, self._growth_interval
                update_scale(scale, tracker, flags[0], *rule)
            else:
                self._update_on_core(scale, tracker, flags)
        except (NotImplementedError, ValueError, OverflowError) as reason:
            count_fallback("amp", str(reason))  # torch takes any factor and interval
            self._update_by_torch(scale, tracker, combine_flags(flags))
        self._per_optimizer_states = defaultdict(new_optimizer_state)

    def _update_on_core(
        self, scale: Tensor, tracker: Tensor, flags: list[Tensor]
    ) -> None:
        left = self._hysteresis_tracker
        _core.amp_update(
            scale,
            tracker,
            flags,
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
            min_scale=0.0 if self._min_scale is None else self._min_scale,
            max_scale=math.inf if self._max_scale is None else self._max_scale,
            hysteresis=self._hysteresis,
            hysteresis_tracker=left,
            stream=current_stream(scale.device),
        )
        bump_versions([scale, tracker] if left is None else [scale, tracker, left])
        device = scale.device.type
        count_call("amp", "cuda" if device == "cuda" else _core.backend_in_use())

    @torch.no_grad()
    def _update_by_torch(self, scale: Tensor, tracker: Tensor, found: Tensor) -> None:
        """The rule of tfast_amp_update in csrc/tfast.h on torch's kernel."""
        before, overflow = scale.clone(), found != 0
        update_scale(
            scale,
            tracker,
            found,
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
        )
        if self._min_scale is not None:
            floor = before.clamp(max=self._min_scale)
            scale.copy_(torch.where(overflow, torch.maximum(scale, floor), scale))
        if self._max_scale is not None:
            ceiling = before.clamp(min=self._max_scale)
            scale.copy_(torch.where(overflow, scale, torch.minimum(scale, ceiling)))
        if self._hysteresis_tracker is not None:
            left = (self._hysteresis_tracker - 1).clamp(min=0)
            scale.copy_(torch.where(overflow & (left > 0), before, scale))
            left.masked_fill_(~overflow, self._hysteresis)
            self._hysteresis_tracker.copy_(left)

    # ---- State ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's entries, and those of the options that differ from torch's rule."""
        state = super().state_dict()
        if not state:
            return state
        for name in ("min_scale", "max_scale"):
            if getattr(self, f"_{name}") is not None:
                state[name] = getattr(self, f"_{name}")
        if self._hysteresis > 1:
            state["hysteresis"] = self._hysteresis
            state["_hysteresis_tracker"] = self._overflows_left()
        return state

    def _overflows_left(self) -> int:
        if self._hysteresis_tracker is None:
            return self._init_hysteresis_tracker
        return int(self._hysteresis_tracker)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of torch's.

        Options that the state lacks stay as they are.

        Args:
            state_dict: what `state_dict` returned.

        Raises:
            KeyError: one of torch's entries is missing.
            ValueError: an entry is not a number, or out of range.
            Nothing has changed when it raises.
        """
        if self._enabled and len(state_dict) != 0:
            check_state(state_dict)
            own = (self._min_scale, self._max_scale, self._hysteresis)
            names = ("min_scale", "max_scale", "hysteresis")
            options: list[Any]
            options = [state_dict.get(n, o) for n, o in zip(names, own, strict=True)]
            check_options(*options)
            left = state_dict.get("_hysteresis_tracker", options[2])
        super().load_state_dict(state_dict)
        if self._enabled:
            self._min_scale, self._max_scale, self._hysteresis = options
            self._init_hysteresis_tracker = min(int(left), self._hysteresis)
            if self._scale is not None:
                self._place_hysteresis_tracker()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_init_hysteresis_tracker"] = self._overflows_left()
        state["_hysteresis_tracker"] = None
        del state["_steps"], state["_last_step"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._steps = WeakKeyDictionary()
        self._last_step = None


class CudaGradScaler(GradScaler, torch.cuda.amp.GradScaler):
    """torch.cuda.amp.GradScaler for patched scripts; use GradScaler("cuda") instead.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in
            torch.cuda.amp.GradScaler.
    """

    @deprecated(
        "`torch.cuda.amp.GradScaler(args...)` is deprecated. "
        "Please use `torch.amp.GradScaler('cuda', args...)` instead.",
        category=FutureWarning,
    )
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        GradScaler.__init__(
            self,
            "cuda",
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )


def _takes_scale(optimizer: torch.optim.Optimizer) -> bool:
    """True for torch's contract of `grad_scale` and `found_inf`, not its older one.

    trainfast's optimizers need no flag for it, unless code of others is called with
    each step: that code expects what it sees with torch's optimizers, which is
    unscaled gradients, and no call for a step that is skipped.
    """
    offered = getattr(optimizer, "_step_supports_amp_scaling", None)
    if isinstance(optimizer, FusedStep):
        return offered is True or (offered is None and _is_unobserved(optimizer))
    if not offered:
        return False
    return "grad_scaler" not in inspect.signature(optimizer.step).parameters


def _is_unobserved(optimizer: FusedStep) -> bool:
    """True where only torch's own wrappers come between a call and the core's step.

    accelerate replaces the step() of an optimizer to see it called; subclasses override
    it, and hooks run around it. Hooks of SkipAwareScheduler have `reads_no_grads`.
    """
    function: Any = getattr(optimizer.step, "__func__", optimizer.step)
    while function is not FusedStep.step:
        if getattr(function, "__globals__", {}).get("__name__") not in _WRAPPERS:
            return False
        function = function.__wrapped__
    hooks = (
        *global_step_hooks(),
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    )
    return all(hasattr(hook, "reads_no_grads") for hook in hooks)


def _flag_for(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], scale: Tensor
) -> Tensor:
    if flags := list(state["found_inf_per_device"].values()):
        return combine_flags(flags, scale.device)
    if has_grads(optimizer.param_groups):  # they came after unscale_()
        raise AssertionError(NO_CHECKS)
    return torch.zeros_like(scale)


def _grads_of(optimizer: torch.optim.Optimizer, allow_fp16: bool) -> list[Tensor]:
    """All gradients; the values of sparse ones, which may replace `param.grad`."""
    ours, grads = isinstance(optimizer, FusedStep), []
    for group in optimizer.param_groups:
        shards.align_grads(group["params"], "amp")
        fine = allow_fp16 or (ours and half.keeps_weights(group))
        for param in group["params"]:
            if not isinstance(param, Tensor):
                raise AssertionError(
                    f"expected param to be torch.Tensor, got {type(param).__name__}"
                )
            grad = param.grad
            if grad is None:
                continue
            if grad.dtype == torch.float16 and not fine:
                raise ValueError("Attempting to unscale FP16 gradients.")
            if grad.is_sparse:
                if grad.dtype == torch.float16:
                    # duplicates may add up to an infinity that neither of them is
                    grad = param.grad = grad.coalesce()
                grad = grad._values()
            grads.append(grad)
    return grads


def _are_small(grads: list[Tensor]) -> bool:
    """True for few elements, for which a call of the core takes longer than torch's.

    The bits are the same for float32 on the CPU.
    """
    return 0 < len(grads) <= _FEW and all(
        type(grad) is Tensor
        and grad.is_cpu
        and grad.dtype is torch.float32
        and grad.numel() <= _SMALL
        for grad in grads
    )


def _is_torchs_update(scaler: GradScaler, flags: list[Tensor]) -> bool:
    """True on the CPU for one flag and torch's rule, where torch's kernel is faster."""
    plain = scaler._min_scale is scaler._max_scale is None and scaler._hysteresis == 1
    return plain and len(flags) == 1 and flags[0].is_cpu
