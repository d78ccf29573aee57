"""Options and state of trainfast.numpy.AdamW: checked, made, saved and loaded."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainfast.numpy.arrays import FLOATS, HALVES, Array, dtype_name, new_like

_SCALARS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "maximize",
    "decoupled_weight_decay",
    "step_count",
)
_MOMENTS = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
_EXTRAS = ("master_params", "weight_copies", "emas")  # an EMA may start from a master


class AdamWState:
    """The attributes of trainfast.numpy.AdamW that these functions read and fill in."""

    params: list[Array]
    max_grad_norm: float | None
    ema_decay: float | None
    weight_copy_dtype: Any
    master_weights: bool
    zeroes_grads: bool
    write_back_grads: bool
    master_params: list[Array] | None
    weight_copies: list[Array | None] | None

    def check_scalars(self) -> None:
        raise NotImplementedError


# ---- Options -------------------------------------------------------------------------


def check_params(params: Sequence[Array]) -> list[Array]:
    """The list of parameters; raises TypeError for anything else."""
    if hasattr(params, "dtype"):
        raise TypeError("params must be a list of arrays, got one array")
    params = list(params)
    for param in params:
        if any(c.__module__.split(".")[0] == "torch" for c in type(param).__mro__):
            raise TypeError(
                "params must not be torch tensors here; use trainfast.AdamW"
            )
        if not hasattr(param, "dtype") or not hasattr(param, "shape"):
            raise TypeError(f"params must be arrays, got {type(param).__name__}")
    return params


def check_options(optimizer: AdamWState) -> None:
    """Raises ValueError for an option out of range, and for two that contradict."""
    decay = optimizer.ema_decay
    if decay is not None and not 0.0 <= decay < 1.0:
        raise ValueError(f"ema_decay must be None or in [0, 1), got {decay}")
    check_max_grad_norm(optimizer.max_grad_norm)
    if optimizer.master_weights and optimizer.weight_copy_dtype is not None:
        raise ValueError(
            "master_weights and weight_copy_dtype must not be given together: with "
            "master weights the parameter is the copy"
        )
    if optimizer.zeroes_grads and optimizer.write_back_grads:
        raise ValueError(
            "zero_grad and write_back_grads must not be given together: one gradient "
            "cannot be both zeroed and kept"
        )


def check_max_grad_norm(value: float | None) -> None:
    """Raises ValueError unless it is None or a number >= 0; infinity only measures."""
    if value is not None and not value >= 0:
        raise ValueError(
            f"max_grad_norm must be None or >= 0, got {value}; None or 0 turns "
            "clipping off"
        )


def check_scale(name: str, scale: Any) -> float:
    """A loss scale rounded to float32; ValueError if that is not a positive number."""
    with np.errstate(over="ignore"):
        rounded = float(np.float32(scale))
    if not 0 < rounded < math.inf:
        raise ValueError(f"{name} must be a float32 > 0 and finite, got {scale}")
    return rounded


# ---- Making it -----------------------------------------------------------------------


def _wide(param: Array) -> Any:
    return "float32" if dtype_name(param) in HALVES else param.dtype


def new_masters(optimizer: AdamWState) -> list[Array]:
    """Float32 weights of half parameters; any other parameter is its own master."""
    return [
        new_like(p, "float32", p) if dtype_name(p) in HALVES else p
        for p in optimizer.params
    ]


def new_copies(optimizer: AdamWState) -> list[Array] | None:
    """The parameters in `weight_copy_dtype`."""
    dtype = optimizer.weight_copy_dtype
    return None if dtype is None else [new_like(p, dtype, p) for p in optimizer.params]


def new_emas(optimizer: AdamWState) -> list[Array]:
    """The EMAs before the first step: the weights as they are."""
    masters = optimizer.master_params or optimizer.params
    return [
        new_like(p, _wide(p), m) for p, m in zip(optimizer.params, masters, strict=True)
    ]


def written_copies(optimizer: AdamWState) -> list[Array | None] | None:
    """The arrays that get rounded weights; with masters, the parameters."""
    if optimizer.master_params is None:
        return optimizer.weight_copies
    pairs = zip(optimizer.params, optimizer.master_params, strict=True)
    return [None if param is master else param for param, master in pairs]


# ---- Saving and loading it -----------------------------------------------------------


def state_dict(optimizer: AdamWState) -> dict[str, Any]:
    """See AdamW.state_dict."""
    arrays = {name: getattr(optimizer, name) for name in (*_MOMENTS, *_EXTRAS)}
    copies = {
        name: None if own is None else [a.copy() for a in own]
        for name, own in arrays.items()
    }
    return {**{name: getattr(optimizer, name) for name in _SCALARS}, **copies}


def load_state_dict(optimizer: AdamWState, state: dict[str, Any]) -> None:
    """See AdamW.load_state_dict."""
    needed = {*_SCALARS, *_MOMENTS}
    if not needed <= set(state) <= needed | set(_EXTRAS):
        raise ValueError(
            f"state must have the keys {sorted(needed)} and may have "
            f"{sorted(_EXTRAS)}, got {sorted(state)}"
        )
    state = {name: plain(value) for name, value in state.items()}
    scalars = {name: state[name] for name in _SCALARS}
    _check_scalars(optimizer, scalars)
    for name in _MOMENTS:
        _check_arrays(name, getattr(optimizer, name), state[name])
    for name in _EXTRAS:
        if getattr(optimizer, name) is not None and state.get(name) is not None:
            _check_arrays(name, getattr(optimizer, name), state[name])
    _warn_of_loss(optimizer, state)
    makers = {
        "master_params": new_masters,
        "weight_copies": new_copies,
        "emas": new_emas,
    }
    for name in (*_MOMENTS, *_EXTRAS):
        mine: Any = getattr(optimizer, name)
        new: Any = state.get(name)
        if mine is not None and new is None:
            new = makers[name](optimizer)
        for i, to in enumerate(mine or ()):
            if to is not optimizer.params[i]:
                to[...] = new[i]
    for name, value in scalars.items():
        setattr(optimizer, name, value)


def plain(value: Any) -> Any:
    """Unwraps arrays of no dimensions, which numpy.savez makes of scalars."""
    is_one = isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0
    return value.item() if is_one else value


def _check_scalars(optimizer: AdamWState, scalars: dict[str, Any]) -> None:
    """Raises ValueError for arrays that step() would refuse."""
    count = scalars["step_count"]
    if not hasattr(count, "__index__") or not 0 <= count.__index__() < 2**62:
        raise ValueError(f"step_count must be an int in [0, 2^62), got {count!r}")
    before = {name: getattr(optimizer, name) for name in scalars}
    vars(optimizer).update(scalars)
    try:
        optimizer.check_scalars()
    except (TypeError, IndexError, KeyError) as error:
        raise ValueError(
            f"the scalars in the state must be numbers: {error}"
        ) from error
    finally:
        vars(optimizer).update(before)


def _warn_of_loss(optimizer: AdamWState, state: dict[str, Any]) -> None:
    """Warns of saved arrays that this optimizer drops and nothing can restore."""
    options = {"emas": "ema_decay"}
    if any(dtype_name(param) in HALVES for param in optimizer.params):
        options["master_params"] = "master_weights"
    for name, option in options.items():
        if state.get(name) is not None and getattr(optimizer, name) is None:
            warnings.warn(
                f"the saved {name} are dropped: this optimizer has no {option}",
                stacklevel=4,  # who calls AdamW.load_state_dict
            )


def _check_arrays(name: str, mine: list[Array] | None, new: Any) -> None:
    if not (new is None or type(new) in (list, tuple, np.ndarray)):
        raise ValueError(f"{name} must be a list of arrays, got {type(new).__name__}")
    if (mine is None) != (new is None) or (mine and len(mine) != len(new)):
        have = "None" if new is None else f"{len(new)} arrays"
        want = "None" if mine is None else f"{len(mine)} arrays"
        raise ValueError(f"{name} must be {want}, got {have}")
    for i, a in enumerate(mine or ()):
        b = new[i]
        if not hasattr(b, "shape") or not hasattr(b, "dtype"):
            raise ValueError(f"{name}[{i}] must be an array, got {type(b).__name__}")
        if a.shape != b.shape or dtype_name(b) not in FLOATS:
            raise ValueError(
                f"{name}[{i}] must be floats of shape {a.shape}, "
                f"got {b.dtype} of shape {b.shape}"
            )
        with np.errstate(over="ignore"):
            overflows = np.isfinite(b) & ~np.isfinite(b.astype(a.dtype))
        if bool(overflows.any()):
            raise ValueError(
                f"{name}[{i}] must fit into {a.dtype}, got {b.dtype} beyond its range"
            )
