"""AdamW on lists of any arrays, in place."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainfast import _core
from trainfast.stats import count_call, count_fallback

Array = Any  # whatever exports DLPack, a buffer, or is a NumPy array


def adamw_step(
    params: Sequence[Array],
    grads: Sequence[Array],
    exp_avgs: Sequence[Array],
    exp_avg_sqs: Sequence[Array],
    *,
    step: int | Sequence[Array],
    lr: float | Array,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    max_exp_avg_sqs: Sequence[Array] | None = None,
    maximize: bool = False,
    decoupled_weight_decay: bool = True,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
    workspace: "_core.Workspace | None" = None,
    stream: int = 0,
) -> None:
    """One AdamW step (Loshchilov and Hutter, arXiv:1711.05101), in place.

    With g the gradient (negated for `maximize`) and t the step::

        p = p * (1 - lr * weight_decay)
        m = m + (1 - betas[0]) * (g - m)
        v = betas[1] * v + (1 - betas[1]) * g**2
        p = p - lr / (1 - betas[0]**t) * m / (sqrt(v / (1 - betas[1]**t)) + eps)

    Args:
        params, grads, exp_avgs, exp_avg_sqs: lists of as many arrays; those at the same
            place have the same shape and strides, without gaps (a gradient in another
            layout is copied). float64, float32, float16 or bfloat16, where the two
            states share a dtype; arithmetic is float32, float64 where the parameter or
            its state is. All on the CPU, or all on one CUDA device.
        step: the number of this step, from 1, or a list of arrays of one float32, each
            the number of steps done; these are advanced.
        lr: a number, or an array of one float32 on the arrays' device.
        max_exp_avg_sqs: the running maxima of `exp_avg_sqs` (AMSGrad).
        decoupled_weight_decay: False adds `weight_decay * p` to g instead (Adam).
        grad_scale: an array of one float32; gradients are divided by it, and written
            back so.
        found_inf: an array of one float32; if it is not zero nothing changes.
        workspace: a `trainfast._core.Workspace` to reuse between steps.
        stream: the cudaStream_t to launch on, as an integer; 0 is the default stream.

    Raises:
        ValueError: shapes, lengths, devices or scalars that break a rule; arrays that
            are read-only, overlap, or are not aligned to their elements.
        TypeError: not an array.
        NotImplementedError: another dtype or device, a parameter with gaps.
        Nothing has changed when it raises.
    """
    copies: list[tuple[Array, Array]] = []
    _core.adamw(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        step,
        _core.Workspace() if workspace is None else workspace,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
        decoupled_weight_decay=decoupled_weight_decay,
        grad_scale=grad_scale,
        found_inf=found_inf,
        relayout=_relayout(copies),
        stream=stream,
    )
    count_call("adamw", _core.backend_in_use())
    if grad_scale is not None:
        for grad, copy in copies:
            grad[...] = copy
    if "torch" in sys.modules:
        from trainfast.torch.adamw import bump_versions

        bump_versions([*params, *exp_avgs, *exp_avg_sqs, *(max_exp_avg_sqs or ())])


def _relayout(copies: list[tuple[Array, Array]]) -> Callable[[Array, Array], Array]:
    """A function that copies an array into another's layout, and remembers both."""

    def copy(like: Array, array: Array) -> Array:
        if hasattr(like, "untyped_storage"):
            from trainfast.torch.adamw import relayout

            made = relayout(like, array)
        else:
            made = np.empty_like(like, dtype=array.dtype)
            made[...] = array
        count_fallback("adamw", "a gradient was copied to its parameter's layout")
        copies.append((array, made))
        return made

    return copy


class AdamW:
    """AdamW for NumPy users: holds the state of a list of arrays and steps in place.

    Args:
        params: arrays to optimise, in place; NumPy, CuPy or anything else writable that
            `adamw_step` takes. For torch tensors there is `trainfast.torch.AdamW`.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.AdamW, with
            its defaults.
        decoupled_weight_decay: False makes it Adam with an L2 term.

    The state has each parameter's dtype; `lr` may be set between steps.

    Raises:
        TypeError: torch tensors, or not a list of arrays.
        ValueError: a hyperparameter out of range (when stepping, too).
    """

    def __init__(
        self,
        params: Sequence[Array],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
    ) -> None:
        if hasattr(params, "dtype"):
            raise TypeError("params must be a list of arrays, got one array")
        self.params = list(params)
        for param in self.params:
            if any(c.__module__.split(".")[0] == "torch" for c in type(param).__mro__):
                raise TypeError(
                    "params must not be torch tensors here: use trainfast.torch.AdamW"
                )
            if not hasattr(param, "dtype") or not hasattr(param, "shape"):
                raise TypeError(f"params must be arrays, got {type(param).__name__}")
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.maximize = maximize
        self.decoupled_weight_decay = decoupled_weight_decay
        self.step_count = 0
        self.exp_avgs = [_zeros_like(p) for p in self.params]
        self.exp_avg_sqs = [_zeros_like(p) for p in self.params]
        self.max_exp_avg_sqs = (
            [_zeros_like(p) for p in self.params] if amsgrad else None
        )
        self._workspace = _core.Workspace()
        if not self.params:
            return
        # No elements: checks the hyperparameters, changes nothing.
        empty = [np.empty(0, np.float32)]
        self._step(empty, empty[:], [np.empty(0)], [np.empty(0)], None, 1)

    def step(self, grads: Sequence[Array]) -> None:
        """Updates the parameters by their gradients, one array for each.

        Raises what `adamw_step` raises; nothing has changed then.
        """
        self._step(
            self.params,
            grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.max_exp_avg_sqs,
            self.step_count + 1,
        )
        self.step_count += 1

    def _step(self, params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, step):
        adamw_step(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            step=step,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_exp_avg_sqs=max_exp_avg_sqs,
            maximize=self.maximize,
            decoupled_weight_decay=self.decoupled_weight_decay,
            workspace=self._workspace,
        )

    def state_dict(self) -> dict[str, Any]:
        """Hyperparameters, the step count, and copies of the state arrays."""
        copies = {
            name: None if arrays is None else [a.copy() for a in arrays]
            for name, arrays in self._arrays().items()
        }
        return {**{n: getattr(self, n) for n in _SCALARS}, **copies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave.

        Raises ValueError where names, numbers of arrays, shapes or dtypes do not fit;
        nothing has changed then.
        """
        arrays = self._arrays()
        wanted = {*_SCALARS, *arrays}
        if set(state) != wanted:
            raise ValueError(
                f"state must have the keys {sorted(wanted)}, got {sorted(state)}"
            )
        for name, mine in arrays.items():
            _check_state(name, mine, state[name])
        for name, mine in arrays.items():
            for to, new in zip(mine or (), state[name] or (), strict=True):
                to[...] = new
        for name in _SCALARS:
            setattr(self, name, state[name])

    def _arrays(self) -> dict[str, list[Array] | None]:
        return {
            "exp_avgs": self.exp_avgs,
            "exp_avg_sqs": self.exp_avg_sqs,
            "max_exp_avg_sqs": self.max_exp_avg_sqs,
        }


_SCALARS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "maximize",
    "decoupled_weight_decay",
    "step_count",
)


def _zeros_like(param: Array) -> Array:
    if isinstance(param, np.ndarray):
        return np.zeros_like(param, subok=False)
    return param.__array_namespace__().zeros_like(param)  # CuPy and others


def _check_state(name: str, mine: list[Array] | None, new: Any) -> None:
    if (mine is None) != (new is None) or (mine and len(mine) != len(new)):
        have = "None" if new is None else f"{len(new)} arrays"
        want = "None" if mine is None else f"{len(mine)} arrays"
        raise ValueError(f"{name} must be {want}, got {have}")
    for i, (a, b) in enumerate(zip(mine or (), new or (), strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(
                f"{name}[{i}] must be {a.dtype} of shape {a.shape}, "
                f"got {b.dtype} of shape {b.shape}"
            )
