"""torch.optim.Muon with batched Newton-Schulz iterations, and AdamW beside it."""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainfast.stats import count_fallback
from trainfast.torch import private
from trainfast.torch.optim import state as adamw_state
from trainfast.torch.optim.adamw import AdamW
from trainfast.torch.optim.muon_assignment import HIDDEN, MuonAssignment, assign
from trainfast.torch.optim.newton_schulz import (
    NS_DTYPES,
    batches,
    orthogonalize,
    resolve_dtype,
)
from trainfast.torch.optim.state import OPTIONS
from trainfast.torch.optim.torch_step import unhooked_step

__all__ = ["Muon"]

_TORCHS: Any = getattr(torch.optim, "Muon", None)  # torch has it from 2.9 on
if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    _Base = _TORCHS or torch.optim.Optimizer

_OWN = ("use_muon", "ns_dtype")  # entries of a group that torch's have not
_MUONS = (  # entries that a group of AdamW has not
    *("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn"),
    "ns_dtype",
)


class Muon(_Base):
    """torch.optim.Muon: same arguments, groups, state and errors, and AdamW beside it.

    Momentum, then a matrix that is nearly orthogonal in place of the gradient (see
    torch.optim.Muon). Matrices of one shape go through the Newton-Schulz iteration in
    batches where that is faster. The step does not wait for the GPU.

    Args:
        params: tensors or param groups as in torch.optim.Muon, all 2-D; or a model, or
            its named_parameters(). Of these Muon steps the matrices of hidden layers,
            and AdamW the rest: embeddings, heads that are tied to them, output heads,
            norms, biases and whatever is not 2-D. In a model they are known by the
            modules' types and names, in named parameters by names alone. `assignment`
            says which is which. A param group with `use_muon=False` is AdamW's.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps,
            adjust_lr_fn: as in torch.optim.Muon, with its defaults; of Muon alone.
        ns_dtype: dtype of the iteration's matrices: "bfloat16" as torch has, "float16",
            "float32", or "auto", which is float16 on GPUs that emulate bfloat16,
            float32 on CPUs that do, and bfloat16 elsewhere.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: of the parameters that
            AdamW steps, with trainfast.AdamW. In its param groups they are `lr`,
            `betas`, `eps` and `weight_decay`.

    `assignment` is a report that can be printed; None where the caller has chosen.

    The state is torch's (`momentum_buffer`), and of AdamW's parameters AdamW's.
    Checkpoints of optimizers without AdamW load both ways. Tensor subclasses such as
    DTensor run torch's own step, which trainfast.stats() counts.

    Unlike torch's, the momentum of bfloat16 parameters without Nesterov stays as it is:
    up to 2.13 torch divides it by its norm.

    Raises:
        ValueError: a parameter of Muon that is not 2-D, or an argument out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: str = "bfloat16",
        adamw_lr: float | Tensor = 3e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "use_muon": True,
        }
        _check(defaults)
        # Steps the groups that are not Muon's: its lists are set anew in each step.
        self._adamw = AdamW(
            [torch.empty(0)], adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay
        )
        self.assignment: MuonAssignment | None = None
        if isinstance(params, Iterable) and not isinstance(
            params, Tensor | dict | nn.Module
        ):
            params = list(params)
        assigned = assign(params)
        if assigned is not None:
            named, self.assignment = assigned
            params = _groups(named, self.assignment.reasons)
        torch.optim.Optimizer.__init__(self, params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters.

        Args:
            param_group: as in torch.optim.Optimizer; with `use_muon=False` its
                parameters are AdamW's, of any shape; its options are those of
                torch.optim.AdamW.

        Raises:
            ValueError: a parameter of Muon that is not 2-D, or an option out of range.
        """
        if not isinstance(param_group, dict) or param_group.get("use_muon", True):
            super().add_param_group(param_group)
            complete = _check_group
        else:
            super().add_param_group({**self._adamw.defaults, **param_group})
            complete = self._complete_adamw
        try:
            complete(self.param_groups[-1])
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def _complete_adamw(self, group: dict[str, Any]) -> None:
        for name in _MUONS:
            group.pop(name, None)
        adamw_state.complete(group, self._adamw.defaults, is_adam=False)
        changed = [name for name, plain in OPTIONS.items() if group[name] != plain]
        if changed:
            raise ValueError(
                f"{', '.join(changed)} must not be set in a group of Muon; step these "
                "parameters with a trainfast.AdamW of their own"
            )

    # ---- The step ------------------------------------------------------------------

    @private.disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step.

        torch's own step runs first, on the parameters that this one does not support,
        then AdamW, then Muon.

        Args:
            closure: computes the loss that is returned, with gradients; or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        muons = [group for group in self.param_groups if group.get("use_muon", True)]
        others = [group for group in self.param_groups if not group["use_muon"]]
        parts = [(group, *_split(group)) for group in muons]
        for group, _, refused in parts:
            for reason, params in refused.items():
                self._fall_back({**group, "params": params}, reason)
        if others:
            self._adamw.param_groups, self._adamw.state = others, self.state
            self._adamw._own_step(None)
        for group, params, _ in parts:
            self._step_muon(group, params)
        return loss

    def _fall_back(self, group: dict[str, Any], reason: str) -> None:
        count_fallback("muon", reason)
        if _TORCHS is None:
            raise NotImplementedError(
                f"{reason} needs torch.optim.Muon, which torch has from 2.9 on, got "
                f"torch {torch.__version__}; upgrade torch"
            )
        groups = self.param_groups
        try:
            self.param_groups = [group]
            unhooked_step(_TORCHS)(self)
        finally:
            self.param_groups = groups

    @torch.no_grad()
    def _step_muon(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for param in params:
            state = self.state[param]
            if "momentum_buffer" not in state:
                grad: Any = param.grad
                state["momentum_buffer"] = torch.zeros_like(grad)
        params = [param for param in params if param.numel()]
        for batch in batches(params):
            self._step_batch(group, [params[index] for index in batch])

    def _step_batch(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Steps matrices of one shape, dtype and device."""
        grads: list[Any] = [param.grad for param in params]
        buffers = [self.state[param]["momentum_buffer"] for param in params]
        momentum, lr = group["momentum"], group["lr"]
        private.foreach_lerp(buffers, grads, 1 - momentum)
        if group["nesterov"]:
            updates = torch.stack(grads).lerp_(torch.stack(buffers), momentum)
        else:
            updates = torch.stack(buffers)
        first = params[0]
        is_tall = first.shape[0] > first.shape[1]  # then the other Gram matrix is small
        found = orthogonalize(
            updates.mT.contiguous() if is_tall else updates,
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
            resolve_dtype(group["ns_dtype"], first.device),
        )
        # In the parameters' dtype and layout, so that one launch adds all of them.
        updates = updates.to(first.dtype).copy_(found.mT if is_tall else found)
        if isinstance(lr, Tensor):
            lr = lr.squeeze() if lr.is_cuda and first.is_cuda else lr.item()
        decay = 1 - lr * group["weight_decay"]
        rate = -lr * _ratio(group["adjust_lr_fn"], first.shape)
        private.foreach_mul(params, decay)
        if isinstance(rate, Tensor):  # as a number it would be read from the GPU
            private.foreach_add(params, list(updates.mul_(rate)))
        else:
            private.foreach_add(params, list(updates), alpha=rate)

    # ---- State ---------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        own = {"assignment": self.assignment, "adamw_defaults": self._adamw.defaults}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        adamw_defaults = state.pop("adamw_defaults", None)
        super().__setstate__(state)
        if adamw_defaults is not None:  # else load_state_dict() is running
            self._adamw = AdamW([torch.empty(0)])
            self._adamw.defaults = adamw_defaults
        for group in self.param_groups:
            if not group.setdefault("use_muon", True):
                self._complete_adamw(group)
            else:
                group.setdefault("ns_dtype", self.defaults["ns_dtype"])

    @private.disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of torch.optim.Muon.

        `use_muon` and `ns_dtype` of the groups keep their values, whatever was saved.

        Args:
            state_dict: as in torch.optim.Optimizer.
        """
        groups = state_dict["param_groups"]
        if len(groups) == len(self.param_groups):  # else torch has an error for it
            kept = (
                {name: group[name] for name in _OWN if name in group}
                for group in self.param_groups
            )
            groups = [
                {**theirs, **own} for theirs, own in zip(groups, kept, strict=True)
            ]
        super().load_state_dict({**state_dict, "param_groups": groups})


def _groups(
    named: list[tuple[str, Tensor]], reasons: dict[str, str]
) -> list[dict[str, Any]]:
    hidden = [entry for entry in named if reasons[entry[0]] == HIDDEN]
    others = [entry for entry in named if reasons[entry[0]] != HIDDEN]
    if not hidden:
        raise ValueError(
            "params must have a matrix of a hidden layer for Muon, got none among "
            f"{len(named)} parameters; use trainfast.AdamW"
        )
    groups: list[dict[str, Any]] = [{"params": hidden, "use_muon": True}]
    return groups + ([{"params": others, "use_muon": False}] if others else [])


def _split(group: dict[str, Any]) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """The parameters with gradients: those stepped here, and others by the reason why
    torch's step does it, which raises for some."""
    params: list[Tensor] = []
    refused: dict[str, list[Tensor]] = {}
    for param in group["params"]:
        grad = param.grad
        if grad is None:
            continue
        reason = None
        if type(param) not in (Tensor, nn.Parameter) or type(grad) is not Tensor:
            reason = "a tensor subclass, such as DTensor"
        elif grad.layout is not torch.strided:
            reason = "a sparse gradient"
        elif param.is_complex():
            reason = "a complex parameter"
        if reason is None:
            params.append(param)
        else:
            refused.setdefault(reason, []).append(param)
    return params, refused


def _ratio(adjust_lr_fn: str | None, shape: torch.Size) -> float:
    """What the learning rate of a matrix of this shape is multiplied by."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _check_group(group: dict[str, Any]) -> None:
    _check(group)
    for param in group["params"]:
        if param.ndim != 2:
            raise ValueError(
                "Muon only supports 2D parameters whereas we found a parameter with "
                f"size: {param.size()}"
            )


def _check(group: dict[str, Any]) -> None:
    """Raises ValueError for an option out of range, with torch's words where it has."""
    lr, adjust = group["lr"], group["adjust_lr_fn"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not isinstance(lr, Tensor) and not lr >= 0:
        raise ValueError(f"Learning rate should be >= 0 but is: {lr}")
    if not group["momentum"] >= 0:
        raise ValueError(f"momentum should be >= 0 but is: {group['momentum']}")
    if not group["weight_decay"] >= 0:
        raise ValueError(f"weight decay should be >= 0 but is: {group['weight_decay']}")
    if adjust not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"Adjust learning rate function {adjust} is not supported")
    if group["ns_steps"] >= 100:
        raise ValueError(
            "Number of steps must be less than 100 for computational efficiency"
        )
    if len(group["ns_coefficients"]) != 3:
        raise ValueError("Coefficients must be a tuple of exactly 3 values")
    if group["ns_dtype"] not in (*NS_DTYPES, "auto"):
        raise ValueError(
            f"ns_dtype must be one of {', '.join(NS_DTYPES)} and auto, got "
            f"{group['ns_dtype']!r}"
        )
