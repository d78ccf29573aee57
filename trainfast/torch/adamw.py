"""torch.optim.AdamW and Adam on trainfast's kernel."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from trainfast import _core
from trainfast.stats import count_call, count_fallback

__all__ = ["Adam", "AdamW", "bump_versions"]

_STATE = ("step", "exp_avg", "exp_avg_sq")


def bump_versions(tensors: Iterable[Any]) -> None:
    """Tells autograd that the tensors among these were written in place."""
    written = [t for t in tensors if isinstance(t, Tensor)]
    if written:
        torch.autograd.graph.increment_version(written)


class _FusedStep:
    """A torch Adam whose step() is one call into the core for each param group."""

    # torch's class of the same name: its step() is the fallback
    _torch_class: type[torch.optim.Optimizer]

    def _finish_init(self, state_dtype: torch.dtype | None) -> None:
        if state_dtype not in _STATE_DTYPES:
            raise ValueError(
                "state_dtype must be None or a floating dtype of torch, "
                f"got {state_dtype}"
            )
        self.defaults["state_dtype"] = state_dtype
        for group in self.param_groups:
            group.setdefault("state_dtype", state_dtype)
        self._step_supports_amp_scaling = True
        self._workspaces: dict[Any, _core.Workspace] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_step_supports_amp_scaling", True)
        self._workspaces = {}
        for group in self.param_groups:
            group.setdefault("state_dtype", None)

    # ---- The step ------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step; `closure`, if given, computes the loss that is returned.

        Where the kernel does not take a group (see trainfast.stats()), torch's own step
        runs on it. The step is skipped, counters included, when a gradient scaler has
        found infinities.
        """
        if torch.compiler.is_compiling():
            return self._torch_step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            if group["params"]:
                self._step_group(index, group)
        return loss

    def _step_group(self, index: int, group: dict[str, Any]) -> None:
        if group["differentiable"]:
            self._fall_back(group, "differentiable=True")
            return
        try:
            if not self._step_params(index, group, group["params"]):
                self._step_devices(index, group)
        except NotImplementedError as reason:
            self._fall_back(group, str(reason))

    def _step_devices(self, index: int, group: dict[str, Any]) -> None:
        """Steps a group whose parameters are on several devices, one after another."""
        devices: dict[torch.device, list[Tensor]] = {}
        for param in group["params"]:
            devices.setdefault(param.device, []).append(param)
        for device, params in devices.items():
            if not self._step_params((index, device), group, params):
                raise RuntimeError(f"params on {device} cannot be stepped together")

    def _step_params(
        self, key: Any, group: dict[str, Any], params: list[Tensor]
    ) -> bool:
        """Steps the parameters; False if they are on several devices."""
        if self._call_core(key, group, params) is None:
            return True
        self._make_state(group)
        return self._call_core(key, group, params) is None

    def _call_core(
        self, key: Any, group: dict[str, Any], params: list[Tensor], retry: bool = True
    ) -> int | None:
        workspace = self._workspaces.get(key)
        if workspace is None:
            workspace = self._workspaces[key] = _core.Workspace()
        beta1, beta2 = group["betas"]
        lr, scale, found = group["lr"], *_amp_scalars(self, params[0])
        stream, backend = 0, None
        if params[0].is_cuda:
            stream = torch._C._cuda_getCurrentRawStream(params[0].device.index)
            backend = "cuda"
        if isinstance(lr, Tensor):
            lr = _scalar_on(lr, params[0]) if params[0].is_cuda else float(lr)
        copies: list[tuple[Tensor, Tensor]] = []
        try:
            stopped = _core.adamw_group(
                params,
                self.state,
                workspace,
                torch._C._increment_version,
                relayout if scale is None else _recording_relayout(copies),
                lr,
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
                group["amsgrad"],
                group["maximize"],
                group["decoupled_weight_decay"],
                scale,
                found,
                stream,
            )
        except ValueError:
            if retry and self._mend_layouts(params):
                return self._call_core(key, group, params, retry=False)
            raise
        for grad, copy in copies:
            grad.copy_(copy)
        if stopped is None:
            count_call("adamw", backend or _core.backend_in_use())
        return stopped

    # ---- State ---------------------------------------------------------------------

    @torch.no_grad()
    def _make_state(self, group: dict[str, Any]) -> None:
        """Makes the state of the group's parameters that have none, as torch does."""
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                dtype = group["state_dtype"] or param.dtype
                state["step"] = _new_step(param.device)
                state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
                state["exp_avg_sq"] = torch.zeros_like(param, dtype=dtype)
                if group["amsgrad"]:
                    state["max_exp_avg_sq"] = torch.zeros_like(param, dtype=dtype)
            for name in (*_STATE, *(["max_exp_avg_sq"] * group["amsgrad"])):
                if name not in state:
                    raise KeyError(f"state of a parameter has no {name!r}")

    @torch.no_grad()
    def _mend_layouts(self, params: list[Tensor]) -> bool:
        """Copies state that is laid out differently from its parameter."""
        mended = False
        for param in params:
            for name, value in self.state.get(param, {}).items():
                if (
                    name != "step"
                    and isinstance(value, Tensor)
                    and value.shape == param.shape
                    and value.stride() != param.stride()
                ):
                    self.state[param][name] = relayout(param, value)
                    mended = True
        return mended

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of torch's, keeping `state_dtype`.

        torch casts all state to the parameter's dtype; here it takes the group's
        `state_dtype`, else the parameter's dtype, and `step` becomes a float32 on the
        parameter's device. The optimizer's own `state_dtype` stays.
        """
        own = [group["state_dtype"] for group in self.param_groups]
        loaded: dict[str, Any] = {}

        def note(_: Any, final: dict[str, Any]) -> None:
            loaded.update(final)

        def cast(_: Any) -> None:
            for group, dtype in zip(self.param_groups, own, strict=True):
                group["state_dtype"] = dtype
            self._cast_state(loaded)

        before = self.register_load_state_dict_pre_hook(note)
        after = self.register_load_state_dict_post_hook(cast, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    @torch.no_grad()
    def _cast_state(self, loaded: dict[str, Any]) -> None:
        saved = [i for group in loaded["param_groups"] for i in group["params"]]
        mine = [(p, g) for g in self.param_groups for p in g["params"]]
        for place, (param, group) in zip(saved, mine, strict=True):
            for name, value in loaded["state"].get(place, {}).items():
                if name == "step":
                    self.state[param][name] = torch.as_tensor(
                        value, dtype=torch.float32, device=param.device
                    ).reshape(())
                elif isinstance(value, Tensor) and value.is_floating_point():
                    dtype = group["state_dtype"] or param.dtype
                    cast = value.to(device=param.device, dtype=dtype)
                    if cast.shape == param.shape and cast.stride() != param.stride():
                        cast = relayout(param, cast)
                    self.state[param][name] = cast

    # ---- Falling back --------------------------------------------------------------

    def _fall_back(self, group: dict[str, Any], reason: str) -> None:
        """Runs torch's own step on one group, unscaling first if a scaler asks."""
        count_fallback("adamw", reason)
        scale = getattr(self, "grad_scale", None)
        found = getattr(self, "found_inf", None)
        if found is not None and float(found) != 0:
            return
        if scale is not None:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.detach().div_(scale.to(param.grad.device))
        groups, fused = self.param_groups, group["fused"]
        hidden = {
            name: self.__dict__.pop(name)
            for name in ("grad_scale", "found_inf")
            if name in self.__dict__
        }
        try:
            self.param_groups, group["fused"] = [group], None
            self._torch_step(None)
        finally:
            self.param_groups, group["fused"] = groups, fused
            self.__dict__.update(hidden)

    def _torch_step(self, closure: Callable[[], Any] | None) -> Any:
        step = self._torch_class.step
        if getattr(step, "hooked", False):  # else its hooks would run a second time
            step = step.__wrapped__
        return step(self, closure)


def _new_step(device: torch.device) -> Tensor:
    """A step counter at 0, without a copy from the host to a GPU."""
    if device.type == "cpu":
        return torch.tensor(0.0, dtype=torch.float32)  # fake tensors know its value
    return torch.zeros((), dtype=torch.float32, device=device)


_STATE_DTYPES = (None, torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _amp_scalars(optimizer: Any, param: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What a gradient scaler has set on the optimizer, on the parameter's device."""
    scale = getattr(optimizer, "grad_scale", None)
    found = getattr(optimizer, "found_inf", None)
    return (
        None if scale is None else _scalar_on(scale, param),
        None if found is None else _scalar_on(found, param),
    )


def _scalar_on(value: Tensor, param: Tensor) -> Tensor:
    if value.device == param.device and value.dtype == torch.float32:
        return value
    return value.to(device=param.device, dtype=torch.float32)


@torch.no_grad()
def relayout(like: Tensor, value: Tensor) -> Tensor:
    """A copy of `value` with the strides of `like`, which must be dense."""
    copy = torch.empty_strided(
        like.shape, like.stride(), dtype=value.dtype, device=value.device
    )
    return copy.copy_(value)


def _recording_relayout(
    copies: list[tuple[Tensor, Tensor]],
) -> Callable[[Tensor, Tensor], Tensor]:
    """relayout() that remembers what it copied, so that it can be copied back."""

    def record(like: Tensor, value: Tensor) -> Tensor:
        copy = relayout(like, value)
        copies.append((value, copy))
        return copy

    return record


class AdamW(_FusedStep, torch.optim.AdamW):
    """torch.optim.AdamW on trainfast's kernel: same arguments, groups and state.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, capturable,
            differentiable: as in torch.optim.AdamW, with its defaults. `lr` may be a
            tensor. Every step on a CUDA device can be captured in a graph.
        foreach, fused: stored, and otherwise ignored.
        state_dtype: dtype of exp_avg, exp_avg_sq and max_exp_avg_sq (float64, float32,
            float16 or bfloat16); None: each parameter's own. Kept by load_state_dict.

    The state is torch's (`step`, `exp_avg`, `exp_avg_sq`, with amsgrad
    `max_exp_avg_sq`), but `step` is always a float32 on the parameter's device.
    Checkpoints load both ways. Parameters and gradients may be float64, float32,
    float16 or bfloat16, in any mix; anything else runs torch's own step, which
    trainfast.stats() counts with the reason, and so does a step inside torch.compile
    (not counted). State tensors may be replaced between steps, or written in place;
    giving a small one other data through `.data` is noticed within 16 steps.

    Formula and roundings: see trainfast.adamw_step.
    """

    _torch_class = torch.optim.AdamW

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._finish_init(state_dtype)


class Adam(_FusedStep, torch.optim.Adam):
    """torch.optim.Adam on trainfast's kernel; see AdamW here for what that means.

    `weight_decay` is added to the gradient (L2), unless `decoupled_weight_decay`.
    """

    _torch_class = torch.optim.Adam

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._finish_init(state_dtype)
