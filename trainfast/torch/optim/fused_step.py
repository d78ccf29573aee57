"""The step that AdamW and Adam of this package share."""

from collections.abc import Callable
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainfast import _core
from trainfast.numpy.adamw_state import check_max_grad_norm
from trainfast.stats import count_call, count_fallback
from trainfast.torch import private
from trainfast.torch.optim import half, shards
from trainfast.torch.optim import state as adamw_state
from trainfast.torch.optim.clip import measure
from trainfast.torch.optim.ema import EmaWeights
from trainfast.torch.optim.pickling import reduce_as_torchs
from trainfast.torch.optim.release import ReleasedGradients
from trainfast.torch.optim.state import OPTIONS
from trainfast.torch.optim.torch_step import (
    DIFFERENTIABLE,
    NEGATIVE,
    OWN_GROUPS,
    Part,
    TorchStep,
    is_for_torch,
    warn_of_fallback,
)

if TYPE_CHECKING:
    _Mixin = torch.optim.Optimizer  # what it is mixed into
else:
    _Mixin = object


class FusedStep(EmaWeights, ReleasedGradients, TorchStep, _Mixin):
    """A torch Adam whose step() is one call into the core."""

    # What gradient scalers and frameworks look for. As in torch it is missing where
    # step() is not to be given scaled gradients; torch's __init__ sets it for `fused`.
    _step_supports_amp_scaling: bool
    _is_adam: bool  # whose weight decay is not decoupled

    def _finish_init(
        self,
        max_grad_norm: float | None,
        amp_scaling: bool | None,
        options: tuple[Any, ...],
    ) -> None:
        self.defaults.update(zip(OPTIONS, options, strict=True))
        check_max_grad_norm(max_grad_norm)
        self.max_grad_norm = max_grad_norm
        if amp_scaling is not None:
            self._step_supports_amp_scaling = amp_scaling
        self._reset()
        self._offer_scaling(self.param_groups)

    def _offer_scaling(self, groups: list[dict[str, Any]]) -> None:
        """Lets scalers call step() with scaled gradients where the groups need that."""
        offered = self.__dict__.get("_step_supports_amp_scaling")
        if adamw_state.needs_scaling(groups, offered) and offered is None:
            self._step_supports_amp_scaling = True

    def _reset(self) -> None:
        """Completes the groups; forgets what is kept between steps."""
        for group in self.param_groups:
            adamw_state.complete(group, self.defaults, self._is_adam)
        self.grad_norm: Tensor | None = None
        self._workspaces: dict[Any, _core.Workspace] = {}
        self._before_ema = []
        self._places = half.Places()
        self._masters_loaded = True  # or copied; there may be none

    def __getstate__(self) -> dict[str, Any]:
        if self._before_ema:
            raise RuntimeError(
                "an optimizer must not be copied while the EMA is in the parameters"
            )
        kept = ("max_grad_norm", "_step_supports_amp_scaling")
        own = {name: self.__dict__[name] for name in kept if name in self.__dict__}
        return {**super().__getstate__(), **own}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_as_torchs(self) or super().__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        twin = object.__new__(type(self))
        twin.__setstate__(self.__getstate__())
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("max_grad_norm", None)
        self._reset()
        self._offer_scaling(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters.

        Args:
            param_group: as in torch.optim.Optimizer, with this class's options.
        """
        try:
            super().add_param_group(param_group)
        except TypeError as error:
            if "can only optimize Tensors" in str(error):
                error.add_note("For other arrays there is trainfast.numpy.AdamW.")
            raise
        if "_workspaces" in self.__dict__:  # else torch's constructor is running
            try:
                last = self.param_groups[-1]
                adamw_state.complete(last, self.defaults, self._is_adam)
                self._offer_scaling([last])
            except (TypeError, ValueError):
                del self.param_groups[-1]
                raise
            if self._release is not None:
                self._release.attach(self)

    # ---- The step ------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step.

        torch's own step runs first, on the groups that the kernel does not support (see
        trainfast.stats()). The step is skipped, counters included, if a gradient scaler
        has found infinities. If it raises, out of memory for example, parameters and
        states have not changed, except those that torch's own step has changed.

        Args:
            closure: computes the loss that is returned, with gradients; or None.
        """
        if not torch.compiler.is_compiling():
            return self._own_step(closure)
        if self._is_plain() and self._release is None:
            return self._torch_step(closure)
        return self._uncompiled_step(closure)

    def _is_plain(self) -> bool:
        """True where torch's step does all that is asked of this one."""
        scalars = (self.max_grad_norm or None, getattr(self, "grad_scale", None))
        if any(v is not None for v in (*scalars, getattr(self, "found_inf", None))):
            return False
        return all(
            group.get(name, plain) == plain
            for group in self.param_groups
            for name, plain in OPTIONS.items()
        )

    @private.disable_dynamo  # a compiled step breaks its graph here and goes on
    def _uncompiled_step(self, closure: Callable[[], Any] | None) -> Any:
        return self._own_step(closure)

    def _own_step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if self._release is not None:
            self._check_released_step(closure)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self._ready_groups()
        if groups and not self.state and private.is_called_to_make_state():
            self.make_state()
        elif groups and self._has_flag(groups):
            half.draw_seed(groups)
            self._step_all(groups, "all")
        if self._release is not None:
            self._release.close(self)
        return loss

    def _ready_groups(self) -> list[dict[str, Any]]:
        """The groups that have parameters, with all options and matching masters."""
        if "_workspaces" not in self.__dict__:  # a subclass's own constructor
            self._finish_init(None, None, tuple(OPTIONS.values()))
        if self._before_ema:
            raise RuntimeError("step() must not run while the EMA is in the parameters")
        groups = [group for group in self.param_groups if group["params"]]
        for group in groups:
            if "write_back_grads" not in group:  # it was put into the list by hand
                adamw_state.complete(group, self.defaults, self._is_adam)
        if self._masters_loaded:
            if self.max_grad_norm and any(
                private.is_flat_shard(p) for group in groups for p in group["params"]
            ):
                raise RuntimeError(
                    "max_grad_norm must be None with FullyShardedDataParallel, whose "
                    "ranks hold shards: call its clip_grad_norm_(), or use fully_shard"
                )
            adamw_state.match_masters(groups, self.state)
            self._masters_loaded = False
        return groups

    def _has_flag(self, groups: list[dict[str, Any]]) -> bool:
        """False where torch's scaler has found no gradients, and there are none.

        Its found_inf is a plain 0 then, the sum of no flags. Gradients that came after
        its unscale_() are neither checked nor unscaled.
        """
        if isinstance(self.__dict__.get("found_inf"), (Tensor, type(None))):
            return True
        if adamw_state.has_grads(groups):
            raise AssertionError(adamw_state.NO_CHECKS)
        return False

    def _step_all(self, groups: list[dict[str, Any]], key: Any) -> None:
        """Steps all groups; first drops stale leftovers of changed parameters."""
        tailed = half.with_tails(groups)
        self._places.drop_stale(tailed, self.state)
        self._step_groups(groups, key)
        self._places.record(tailed)

    def _step_groups(self, groups: list[dict[str, Any]], key: Any) -> None:
        """Steps all groups in one call, or apart where that cannot be."""
        measured = self._measure_shards(groups)
        if self._whole_refusal(groups) is None:
            try:
                if self._call_core(key, groups, measured) is not None:
                    return
                for group in groups:
                    shards.align_grads(group["params"], "adamw")
                    adamw_state.make_state(group, self.state)
                if self._call_core(key, groups, measured) is not None:
                    return
            except NotImplementedError:
                pass  # found again, and counted, with the group that it is about
            except ValueError as reason:
                if not is_for_torch(reason, groups):
                    raise
        scalars = measured or self._measure_apart(groups)
        parts = [
            part
            for index, group in enumerate(groups)
            for part in self._split(index, group, scalars)
        ]
        if key == "all":  # it warns where no parameter has run the kernel
            warn_of_fallback(self._torch_class.__name__, parts)
        # torch's step, which may raise for reasons of its own, before all that cannot
        for part in parts:
            if part.refusal is not None:
                self._fall_back(part.group, part.refusal, scalars)
        for part in parts:
            if part.refusal is None:
                self._call_core(part.key, [part.group], scalars)

    def _whole_refusal(self, groups: list[dict[str, Any]]) -> str | None:
        """Why torch's step must do all of them, whatever their tensors are."""
        own: Any = type(self)
        mine, torchs = own._init_group, own._torch_class._init_group
        # torch.compile wraps that of each class in torch.optim, ours under patch()
        if mine is not torchs and unwrap(mine) is not unwrap(torchs):
            return OWN_GROUPS  # it chooses what is stepped
        if any(group["differentiable"] for group in groups):
            return DIFFERENTIABLE
        return None

    def _measure_shards(self, groups: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Pass 1 where processes reduce its results; None where the core does it."""
        own = self.__dict__
        find_inf = own.get("found_inf") is None and "_measure_inf" in own
        if not (find_inf or self.max_grad_norm):
            return None
        if not any(shards.any_sharded(group["params"]) for group in groups):
            return None
        for group in groups:
            shards.align_grads(group["params"], "adamw")
        return self._measure_apart(groups)

    def _measure_apart(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """Pass 1 over gradients of any kind; what _call_core then needs no more do."""
        found = self.__dict__.get("found_inf")
        find_inf = found is None and self.__dict__.get("_measure_inf", False)
        scalars = {"found_inf": found, "clip_coef": None}
        if not find_inf and not self.max_grad_norm:
            return scalars
        grads = [p.grad for g in groups for p in g["params"] if p.grad is not None]
        if grads:
            measured = measure(
                grads,
                max_norm=self.max_grad_norm or None,
                grad_scale=self.__dict__.get("grad_scale"),
                find_inf=find_inf,
            )
            if find_inf:
                scalars["found_inf"] = self.found_inf = measured.found_inf
            if self.max_grad_norm:
                scalars["clip_coef"] = measured.clip_coef
                self.grad_norm = measured.total_norm
        return scalars

    def _split(
        self, index: int, group: dict[str, Any], scalars: dict[str, Any]
    ) -> list[Part]:
        """The group device by device, each ready for its step; nothing has changed."""
        refusal = self._whole_refusal([group])
        if refusal is not None:
            parts = [Part(index, group, refusal)]
        else:
            shards.align_grads(group["params"], "adamw")
            adamw_state.make_state(group, self.state)
            devices: dict[torch.device, list[Tensor]] = {}
            for param in group["params"]:
                devices.setdefault(param.device, []).append(param)
            parts = []
            for device, params in devices.items():
                there = {**group, "params": params}
                refusal = self._refusal_of((index, device), there, scalars)
                parts.append(Part((index, device), there, refusal))
        for part in parts:
            if part.refusal is None:
                continue
            adamw_state.check_devices(part.group, self.state)
            if half.keeps_weights(part.group):
                count_fallback("adamw", part.refusal)
                raise RuntimeError(
                    "torch, to fall back on, has neither master weights nor another "
                    f"way of rounding: {part.refusal}"
                )
        return parts

    def _refusal_of(
        self, key: Any, part: dict[str, Any], scalars: dict[str, Any]
    ) -> str | None:
        """Why torch's step must do this part; None: the core is ready to."""
        try:
            done = self._call_core(key, [part], scalars, only_prepare=True)
        except (NotImplementedError, ValueError) as reason:
            if not is_for_torch(reason, [part]):
                raise
            return str(reason)
        if done is None:
            raise RuntimeError(f"params on {key[1]} cannot be stepped together")
        return None

    def _call_core(
        self,
        key: Any,
        groups: list[dict[str, Any]],
        measured: dict[str, Any] | None = None,
        only_prepare: bool = False,
        retry: bool = True,
    ) -> int | None:
        """Both passes over the groups; `measured` is what stands for the first.

        Returns the number of gradients; None where state is missing or tensors are on
        several devices. Then, where it raises, and with `only_prepare`, which takes all
        memory that the call needs, nothing has changed.
        """
        first, own = _first_with_grad(groups), self.__dict__
        if first is None:
            return 0
        found = own.get("found_inf") if measured is None else measured["found_inf"]
        clip = None if measured is None else measured["clip_coef"]
        norm = norm_f64 = None  # where pass 1 puts the norm
        find_inf = measured is None and found is None and "_measure_inf" in own
        find_norm = measured is None and bool(self.max_grad_norm)
        if find_inf:
            found = torch.empty((), dtype=torch.float32, device=first.device)
        if find_norm:
            clip = torch.empty((), dtype=torch.float64, device=first.device)
            norm = torch.empty((), dtype=torch.float32, device=first.device)
            norm_f64 = torch.empty((), dtype=torch.float64, device=first.device)
        copies: list[tuple[Tensor, Tensor]] = []
        try:
            done = shards.caller_for(first)(
                _core.adamw_groups,
                [self._core_group(key, i, g, first) for i, g in enumerate(groups)],
                self.state,
                private.increment_version,
                adamw_state.recording_relayout(copies),
                self._workspace((key, "grads")),
                find_inf,
                find_norm,
                self.max_grad_norm or 0.0,
                _scalar_on(own.get("grad_scale"), first),
                _scalar_on(found, first),
                norm,
                norm_f64,
                _scalar_on(clip, first, torch.float64),
                _current_stream(first),
                only_prepare,
                shards.reader(),
            )
        except ValueError:
            if retry and adamw_state.mend_state(groups, self.state):
                return self._call_core(key, groups, measured, only_prepare, False)
            raise
        if done is None or only_prepare:
            return done and done[0]
        stepped, is_wide = done
        if any(group["zero_grad"] or group["write_back_grads"] for group in groups):
            for grad, copy in copies:
                grad.copy_(copy)
        if stepped:
            count_call("adamw", "cuda" if first.is_cuda else _core.backend_in_use())
            if find_inf:
                self.found_inf = found
            if find_norm:
                self.grad_norm = norm_f64 if is_wide else norm
        return stepped

    def _core_group(
        self, key: Any, index: int, group: dict[str, Any], first: Tensor
    ) -> tuple[Any, ...]:
        """A group as _core.adamw_groups takes it, where `first` is."""
        beta1, beta2 = group["betas"]
        lr, params = group["lr"], group["params"]
        if isinstance(lr, Tensor) and first.is_cuda:
            lr = _scalar_on(lr, first)
        else:
            lr = lr.item() if isinstance(lr, Tensor) else float(lr)
            if lr < 0 or group["weight_decay"] < 0:  # torch takes any number, such as
                # that of a schedule which has passed its end
                raise NotImplementedError(NEGATIVE)
        return (
            params if type(params) is list else list(params),
            self._workspace((key, index)),
            lr,
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            group["amsgrad"],
            group["maximize"],
            group["decoupled_weight_decay"],
            group["ema_decay"],
            group["master_weights"] is True,
            group["weight_copy_dtype"] is not None,
            group["zero_grad"],
            group["write_back_grads"],
            half.rounding_of(group),
            group.get(half.SEED, 0),
            self._places.origins(self.param_groups, group),
        )

    def _workspace(self, key: Any) -> _core.Workspace:
        workspace = self._workspaces.get(key)
        if workspace is None:
            workspace = self._workspaces[key] = _core.Workspace()
        return workspace

    # ---- State ---------------------------------------------------------------------

    def make_state(self) -> None:
        """Makes the state of parameters that have a gradient, without a step.

        A step takes no other memory.
        """
        for group in self._ready_groups():
            adamw_state.make_state(group, self.state)

    @private.disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of torch's, keeping this optimizer's layout.

        torch casts all state to the parameter's dtype. Here the moments take the
        group's `state_dtype`, else the parameter's dtype, and `step` becomes a float32
        on the parameter's device. The options of this class keep their values, whatever
        was saved. A master weight, copy or EMA that the state lacks starts from the
        parameter at the next step. State that no option asks for is dropped, master
        weights and EMAs with a UserWarning, since nothing can restore them.

        Args:
            state_dict: as in torch.optim.Optimizer.
        """
        if self._before_ema:
            raise RuntimeError(
                "load_state_dict() must not run while the EMA is in the parameters"
            )
        adamw_state.load_state_dict(self, state_dict, super().load_state_dict)


def _first_with_grad(groups: list[dict[str, Any]]) -> Tensor | None:
    """The parameter whose device is that of the call; a frozen one may be elsewhere."""
    params = (p for group in groups for p in group["params"] if p.grad is not None)
    return next(params, None)


def _current_stream(param: Tensor) -> int:
    index = param.device.index
    return private.cuda_stream(index) if param.is_cuda else 0


def _scalar_on(
    value: Tensor | None, param: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    if value is None or (value.device == param.device and value.dtype == dtype):
        return value
    return value.to(device=param.device, dtype=dtype)
