"""Runs torch's own step on a group that the core does not support."""

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from trainfast import _core
from trainfast.stats import count_fallback
from trainfast.torch.optim import codes


class TorchStep:
    """The part of trainfast's torch optimizers that calls torch's step."""

    param_groups: list[dict[str, Any]]
    state: Any
    # torch's class of the same name: its step() is the fallback
    _torch_class: type[torch.optim.Optimizer]

    @torch.no_grad()
    def _fall_back(
        self, group: dict[str, Any], reason: str, scalars: dict[str, Any]
    ) -> None:
        """Runs torch's own step on one group, with what a scaler and clipping ask."""
        count_fallback("adamw", reason)
        once = {id(p.grad): p.grad for p in group["params"] if p.grad is not None}
        grads = [grad.detach() for grad in once.values()]
        found, clip = scalars["found_inf"], scalars["clip_coef"]
        scale = self.__dict__.get("grad_scale")
        if found is None or float(found) == 0:
            for grad in grads:
                if scale is not None:
                    grad.div_(scale.to(grad.device))
                if clip is not None:
                    grad.mul_(clip.to(grad.device))
            self._step_by_torch(group)
        if group["zero_grad"]:
            for grad in grads:
                grad.zero_()

    def _step_by_torch(self, group: dict[str, Any]) -> None:
        groups = self.param_groups
        hidden: dict[str, Any] = {}
        for name in ("grad_scale", "found_inf"):
            if name in self.__dict__:
                hidden[name] = self.__dict__.pop(name)
        coded = [
            param
            for param in group["params"]
            if param.grad is not None and codes.is_coded(self.state.get(param, {}))
        ]
        for param in coded:
            self.state[param] = codes.decode(self.state[param], param.dtype)
        try:
            self.param_groups = [{**group, "fused": None}]
            self._torch_step(None)
        finally:
            self.param_groups = groups
            self.__dict__.update(hidden)
            for param in coded:
                self.state[param] = codes.encode(
                    self.state[param], param, group["amsgrad"]
                )
        for param in group["params"]:
            state = self.state.get(param, {})
            if param.grad is not None and group["ema_decay"] is not None:
                ema = state.setdefault("ema", param.detach().clone())
                ema.lerp_(param.to(ema.dtype), 1 - group["ema_decay"])
            if param.grad is not None and "weight_copy" in state:
                state["weight_copy"].copy_(param)

    def _torch_step(self, closure: Callable[[], Any] | None) -> Any:
        return unhooked_step(self._torch_class)(self, closure)


def unhooked_step(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """step() of torch's class without its hooks, which the caller's step() has run."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


DIFFERENTIABLE = "differentiable=True"
NEGATIVE = "lr or weight_decay is negative"
OWN_GROUPS = "the class has an _init_group() of its own"
_DENSE = (
    "give dense float64, float32, float16 or bfloat16 tensors of no subclass on the "
    "CPU or a CUDA device, or "
)
_REMEDIES = {  # what to do first, where it is not the tensors
    DIFFERENTIABLE: "drop it unless gradients flow through the step, or ",
    NEGATIVE: "give numbers >= 0, or ",
    OWN_GROUPS: "",
}
_warned: set[tuple[str, str]] = set()  # classes and reasons


def warn_of_fallback(name: str, parts: Sequence["Part"]) -> None:
    """Warns once for each reason why torch's step runs for all gradients."""
    stepped = [
        part
        for part in parts
        if any(param.grad is not None for param in part.group["params"])
    ]
    reasons = dict.fromkeys(part.refusal for part in stepped)
    if None in reasons or any(
        param.grad is not None and param.grad.is_sparse
        for part in stepped
        for param in part.group["params"]
    ):  # torch refuses sparse gradients, and says what to do
        return
    for reason in map(str, reasons):
        key = name, re.sub("0x[0-9a-f]+", "", reason)  # addresses differ in each step
        if key not in _warned:
            _warned.add(key)
            warnings.warn(
                f"torch's own step runs for all parameters of an {name}, not the "
                f"kernel: {reason}; {_REMEDIES.get(reason, _DENSE)}leave them to "
                f"torch's {name} (with patch(): after unpatch('adamw'))",
                stacklevel=7,  # the caller of step(), which torch has wrapped
            )


class Part(NamedTuple):
    """What is stepped of a group by a call of its own, where one for all cannot be."""

    key: Any  # of its workspace
    group: dict[str, Any]
    refusal: str | None  # why torch's step does it; None: the core does


def is_for_torch(reason: Exception, groups: list[dict[str, Any]]) -> bool:
    """Whether torch's step runs on groups that the core has refused.

    torch's step supports tensors that share memory, such as tied weights that are two
    parameters, and tensors that are not aligned. But gradients that are shared would be
    unscaled and zeroed twice.
    """
    if isinstance(reason, NotImplementedError):
        return True
    if any(group["zero_grad"] or group["write_back_grads"] for group in groups):
        return False
    return isinstance(reason, _core.PlacementError)
