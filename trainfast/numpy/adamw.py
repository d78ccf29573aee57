"""AdamW on lists of any arrays, in place."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np

from trainfast import _core
from trainfast.numpy import adamw_state
from trainfast.numpy.arrays import (
    Array,
    autograd_notice,
    float_dtype,
    measure,
    new_like,
    number,
    scalar,
)
from trainfast.report import attributes, one_line
from trainfast.stats import count_call, count_fallback


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
    scales: Sequence[Array | None] | None = None,
    emas: Sequence[Array] | None = None,
    copies: Sequence[Array | None] | None = None,
    tails: Sequence[Array | None] | None = None,
    ema_decay: float = 0.0,
    rounding: str = "nearest",
    seed: int = 0,
    maximize: bool = False,
    decoupled_weight_decay: bool = True,
    zero_grad: bool = False,
    write_back_grads: bool = False,
    grad_scale: Array | None = None,
    clip_coef: Array | None = None,
    found_inf: Array | None = None,
    workspace: "_core.Workspace | None" = None,
    stream: int = 0,
) -> None:
    """One AdamW step (Loshchilov and Hutter, arXiv:1711.05101), in place.

    With g the gradient * clip_coef / grad_scale (negated for `maximize`) and t the
    step::

        p = p * (1 - lr * weight_decay)
        m = m + (1 - betas[0]) * (g - m)
        v = betas[1] * v + (1 - betas[1]) * g**2
        p = p - lr / (1 - betas[0]**t) * m / (sqrt(v / (1 - betas[1]**t)) + eps)
        ema = ema + (1 - ema_decay) * (p - ema)

    Args:
        params, grads, exp_avgs, exp_avg_sqs: lists of as many arrays; those at the same
            place have the same shape and strides, without gaps (a gradient in another
            layout is copied). float64, float32, float16 or bfloat16, where the two
            states share a dtype; arithmetic is float32, float64 where the parameter or
            its state is. All on the CPU, or all on one CUDA device.
        step: the number of this step, from 1, or a list of arrays of one float32, each
            the number of steps done; these are advanced.
        lr: a number, or an array of one float32 on the arrays' device.
        betas, eps, weight_decay: as in the formula.
        max_exp_avg_sqs: the running maxima of `exp_avg_sqs` (AMSGrad).
        scales: float32 arrays of shape [blocks, 3], with `max_exp_avg_sqs` [blocks, 5],
            where the state at the same place is 8-bit codes (uint8), in blocks of 128
            elements in the order of memory; None where it is floats. Zeros in all of
            these arrays are the state before the first step. Not for float64.
        emas: moving averages of the parameters, of any of the four dtypes.
        copies: arrays that become the new parameters, rounded to their own dtype, of
            any of the four; None at a place where none is wanted. For half parameters
            with float32 master weights, `params` are the masters and `copies` the
            parameters.
        tails: of float16 and bfloat16 parameters with rounding "kahan" or "split", what
            rounding has cut off, in their dtype; zeros before the first step. None for
            others.
        ema_decay: in [0, 1], for `emas`.
        rounding: of float16 and bfloat16 parameters. "nearest": to nearest even.
            "stochastic": up or down at random, so that the mean is the unrounded value.
            "kahan": to nearest; the tail is the difference, rounded.
            "split": of bfloat16, to nearest, ties away from 0. The 16 bits of the tail,
            as an integer with sign, are added to the bits of the parameter as float32:
            a float32 weight is kept exactly.
        seed: of "stochastic", >= 0. An element's random number depends on it, the step,
            the parameter's place in `params` and the element's place in memory.
        maximize: negates the gradient.
        decoupled_weight_decay: False adds `weight_decay * p` to g instead (Adam).
        zero_grad: sets the gradients to 0, also where `found_inf` skips the step.
        write_back_grads: stores g (not negated) in the gradients; excludes `zero_grad`.
        grad_scale: an array of one float32; gradients are divided by it.
        clip_coef: an array of one float64; gradients are multiplied by it.
        found_inf: an array of one float32; if it is not zero nothing else changes.
        workspace: a `trainfast._core.Workspace` to reuse between steps, on one CUDA
            stream. A graph that the call is captured in reads its memory: then keep it.
        stream: the cudaStream_t to launch on, as an integer; 0 is the default stream.

    Raises:
        ValueError: shapes, lengths, devices or scalars that break a rule; arrays that
            are read-only, overlap, or are not aligned to their elements. With a
            `workspace` overlaps are looked for where a written array has moved.
        TypeError: not an array.
        NotImplementedError: another dtype or device, a parameter with gaps.
        Nothing has changed when it raises.
    """
    lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
    more: dict[str, Any] = {"scales": scales, "emas": emas, "copies": copies}
    more["tails"] = tails
    read = None if zero_grad or write_back_grads else grads
    with _writing([*lists, *more.values()], read) as relaid:
        _core.adamw(
            *lists,
            int(step) if isinstance(step, np.integer) else step,
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
            relayout=_relayout(relaid),
            stream=stream,
            **more,
            ema_decay=ema_decay,
            rounding=rounding,
            seed=seed,
            clip_coef=clip_coef,
            zero_grad=zero_grad,
            write_back_grads=write_back_grads,
        )


@contextmanager
def _writing(lists: list[Any], read: Any) -> Iterator[list[tuple[Array, Array]]]:
    """Tells autograd that the tensors in these lists but `read` were written.

    Yields a list for gradients and what _relayout() has copied them to: copied back if
    they were written.
    """
    written = [a for a in lists if a is not read and hasattr(a, "__len__")]
    tell_autograd = autograd_notice(chain.from_iterable(written))
    relaid: list[tuple[Array, Array]] = []
    yield relaid
    count_call("adamw", _core.backend_in_use())
    for grad, copy in relaid if read is None else ():
        grad[...] = copy
    tell_autograd()


def _relayout(relaid: list[tuple[Array, Array]]) -> Callable[[Array, Array], Array]:
    """A function that copies an array into another's layout, and remembers both."""

    def copy(like: Array, array: Array) -> Array:
        if hasattr(like, "untyped_storage"):
            shape, strides = like.shape, like.stride()
            made = like.new_empty_strided(shape, strides, dtype=array.dtype)
            made.copy_(array.detach())
        else:
            made = np.empty_like(like, dtype=array.dtype)
            made[...] = array
        count_fallback("adamw", "a gradient was copied to its parameter's layout")
        relaid.append((array, made))
        return made

    return copy


class AdamW(adamw_state.AdamWState):
    """AdamW for NumPy users: holds the state of a list of arrays and steps in place.

    Args:
        params: arrays to optimise, in place; NumPy, CuPy or anything else writable that
            `adamw_step` takes. For torch tensors there is `trainfast.AdamW`.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.AdamW, with
            its defaults.
        decoupled_weight_decay: False makes it Adam with an L2 term.
        state_dtype: dtype of the moments; None: each parameter's own.
        max_grad_norm: clips the 2-norm over all gradients inside the step: one read of
            the gradients, no write. None or 0 is off, infinity only measures.
            `grad_norm` is then the norm before clipping, a float.
        ema_decay: keeps `emas`, ema <- ema + (1 - ema_decay) * (param - ema), float32
            for float16 and bfloat16 parameters.
        weight_copy_dtype: keeps `weight_copies`, each parameter in this dtype.
        master_weights: keeps `master_params`, float32 weights for float16 and bfloat16
            parameters, which become their rounded copies.
        zero_grad: leaves zeros in the gradients, also of a step that is skipped.
        write_back_grads: leaves the gradients unscaled and clipped, as the step used
            them; otherwise they are only read.

    Contradictions: master_weights with weight_copy_dtype, zero_grad with
    write_back_grads. The state is made with the optimizer, so values that are written
    into the parameters afterwards do not reach their masters; `lr` may be set between
    steps.

    Raises:
        TypeError: torch tensors, or not a list of arrays.
        ValueError: a hyperparameter out of range (when stepping, too), or two options
            that contradict.
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
        state_dtype: Any = None,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        weight_copy_dtype: Any = None,
        master_weights: bool = False,
        zero_grad: bool = False,
        write_back_grads: bool = False,
    ) -> None:
        self.params = adamw_state.check_params(params)
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.maximize = maximize
        self.decoupled_weight_decay = decoupled_weight_decay
        self.state_dtype = float_dtype("state_dtype", state_dtype)
        self.max_grad_norm = max_grad_norm
        self.ema_decay = ema_decay
        self.weight_copy_dtype = float_dtype("weight_copy_dtype", weight_copy_dtype)
        self.master_weights = master_weights
        self.zeroes_grads = zero_grad
        self.write_back_grads = write_back_grads
        adamw_state.check_options(self)
        self.step_count = 0
        self.grad_norm: float | None = None
        self.exp_avgs = self._moments()
        self.exp_avg_sqs = self._moments()
        self.max_exp_avg_sqs = self._moments() if amsgrad else None
        self.master_params = adamw_state.new_masters(self) if master_weights else None
        self.weight_copies = adamw_state.new_copies(self)
        self.emas = None if ema_decay is None else adamw_state.new_emas(self)
        self._workspace = _core.Workspace()
        self._grads_workspace = _core.Workspace()
        if self.params:
            self.check_scalars()

    def __repr__(self) -> str:
        names = "lr betas eps weight_decay decoupled_weight_decay state_dtype "
        names += "max_grad_norm ema_decay weight_copy_dtype master_weights step_count"
        params = vars(self).get("params")
        return one_line(
            self,
            params=None if params is None else len(params),
            **attributes(self, names),
        )

    def check_scalars(self) -> None:
        """Raises what `step` would for the hyperparameters as they are."""
        empty = [np.empty(0, np.float32)]
        adamw_step(
            empty, empty[:], [np.empty(0)], [np.empty(0)], step=1, **self._options()
        )

    def __getstate__(self) -> dict[str, Any]:
        kept = vars(self).copy()
        del kept["_workspace"], kept["_grads_workspace"]
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._workspace = _core.Workspace()
        self._grads_workspace = _core.Workspace()

    def step(
        self,
        grads: Sequence[Array],
        *,
        grad_scale: float | Array | None = None,
        found_inf: float | Array | None = None,
    ) -> None:
        """Updates the parameters by their gradients.

        Args:
            grads: one array for each parameter.
            grad_scale: what the loss was multiplied by, > 0 and finite: a number, or an
                array of one float32 on the parameters' device, whose value is not
                checked. See also `trainfast.numpy.LossScaler`.
            found_inf: a number or such an array; if it is not zero the step is skipped
                and does not count.

        Raises:
            ValueError: a `grad_scale` that is no scale; and what `adamw_step` raises.
            Nothing has changed then.
        """
        self.step_checked(grads, grad_scale, found_inf, find_inf=False)

    def step_checked(
        self,
        grads: Sequence[Array],
        grad_scale: float | Array | None = None,
        found_inf: float | Array | None = None,
        *,
        find_inf: bool = True,
    ) -> bool:
        """`step` for loss scalers: also skipped if a gradient is not finite.

        Args:
            grads, grad_scale, found_inf: as in `step`.
            find_inf: False does not look for gradients that are not finite.

        Returns:
            Whether the step was done.
        """
        grads = list(grads)
        clip = norm = None
        if isinstance(grad_scale, (int, float, np.generic)):
            grad_scale = adamw_state.check_scale("grad_scale", grad_scale)
        if self.params:
            grad_scale = scalar(self.params[0], grad_scale)
            found_inf = scalar(self.params[0], found_inf)
            find_inf = find_inf and found_inf is None
        if grads and self.params and (find_inf or self.max_grad_norm):
            measured = measure(
                grads,
                self.params[0],
                self._grads_workspace,
                max_norm=self.max_grad_norm or None,
                grad_scale=grad_scale,
                find_inf=find_inf,
            )
            clip, norm = measured.clip_coef, measured.total_norm
            found_inf = measured.found_inf if find_inf else found_inf
        adamw_step(
            self.params if self.master_params is None else self.master_params,
            grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            step=self.step_count + 1,
            max_exp_avg_sqs=self.max_exp_avg_sqs,
            emas=self.emas,
            copies=adamw_state.written_copies(self),
            grad_scale=grad_scale,
            clip_coef=clip,
            found_inf=found_inf,
            workspace=self._workspace,
            **self._options(),
        )
        if norm is not None:
            self.grad_norm = number(norm)
        stepped = found_inf is None or number(found_inf) == 0
        self.step_count += stepped
        return stepped

    def zero_grad(self, grads: Sequence[Array] = ()) -> None:
        """Sets gradients to 0 in place.

        The optimizer keeps no gradients. Without an argument this does nothing, so that
        loops written for torch can call it. The constructor's `zero_grad` does the same
        inside the step.

        Args:
            grads: your own buffers in which gradients are accumulated.
        """
        for grad in grads:
            grad[...] = 0

    def _options(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "ema_decay": 0.0 if self.ema_decay is None else self.ema_decay,
            "maximize": self.maximize,
            "decoupled_weight_decay": self.decoupled_weight_decay,
            "zero_grad": self.zeroes_grads,
            "write_back_grads": self.write_back_grads,
        }

    def _moments(self) -> list[Array]:
        return [new_like(p, self.state_dtype or p.dtype) for p in self.params]

    def state_dict(self) -> dict[str, Any]:
        """Hyperparameters, the step count, and copies of the state arrays.

        The parameters are not among them, and the options from `state_dtype` on are
        not: they are what the optimizer was made with.
        """
        return adamw_state.state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state, also one of an optimizer with other options.

        Arrays are converted to the dtypes of this optimizer. EMAs, copies and masters
        that the state lacks start from the parameters. Arrays that this optimizer does
        not have are dropped, EMAs and masters with a UserWarning, since nothing can
        restore them.

        Args:
            state: what `state_dict` returned.

        Raises:
            ValueError: names, numbers of arrays or shapes that do not fit, a dtype that
                is not a float, or AMSGrad's maxima in one of the two only, which cannot
                be made from the rest. Nothing has changed then.
        """
        adamw_state.load_state_dict(self, state)
