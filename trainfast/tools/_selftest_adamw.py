"""AdamW's kernel against its formula in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np

import trainfast
from trainfast.tools._selftest_arrays import EPS, Array

# Around the edges of vectors and tiles; every second array is misaligned.
SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 255, 256, 257, 5000)
ADAMW_DTYPES: list[tuple[str, ...]] = [  # of parameter, gradient and state
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    ("float16", "float16", "float16"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "bfloat16", "float32"),
    ("float32", "bfloat16", "float32"),
]
ADAMW_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0, "step": 1},
    {"amsgrad": True},
    {"maximize": True},
    {"decoupled_weight_decay": False},
    {"grad_scale": 1024.0},
    {"found_inf": 1.0},
]


def check_adamw(dtypes: tuple[str, ...], arrays: Array) -> tuple[float, float]:
    """The largest error over all sizes and options, and the one that is allowed: a few
    roundings of the arithmetic, and half a unit of the dtype that stores the result."""
    arithmetic = "float64" if "float64" in dtypes else "float32"
    errors = [
        _adamw_error(dtypes, arrays, seed, **options)
        for seed, options in enumerate(ADAMW_OPTIONS)
    ]
    store = max(EPS[dtypes[0]], EPS[dtypes[2]])
    rounding = store / 2 if store > EPS[arithmetic] else 0.0
    return float(np.max(errors)), 4 * EPS[arithmetic] + rounding


def _adamw_error(
    dtypes: tuple[str, ...],
    arrays: Array,
    seed: int,
    *,
    step: int = 7,
    amsgrad: bool = False,
    grad_scale: float = 1.0,
    found_inf: float | None = None,
    **options: Any,
) -> float:
    """One step over all sizes at once; compares p, g, m, v and v's maximum."""
    lists = _adamw_inputs(dtypes, arrays, np.random.default_rng(seed), grad_scale)
    before = [np.concatenate([arrays.get(array) for array in some]) for some in lists]
    scalars: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}
    scalars |= {"weight_decay": 0.1, **options}
    device: dict[str, Array] = {}
    if grad_scale != 1.0:
        device["grad_scale"] = arrays.put(np.array([grad_scale]), "float32")
    if found_inf is not None:
        device["found_inf"] = arrays.put(np.array([found_inf]), "float32")
    params, grads, exp_avgs, exp_avg_sqs, maxima = lists
    trainfast.numpy.adamw_step(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs=maxima if amsgrad else None,
        step=step,
        write_back_grads=True,
        **scalars,
        **device,
    )

    after = [np.concatenate([arrays.get(array) for array in some]) for some in lists]
    want = before
    if found_inf is None:
        want = adamw_reference(before, step, amsgrad, grad_scale, **scalars)
    errors = [
        np.abs(got - right) / (np.abs(old) + np.abs(right))
        for got, right, old in zip(after, want, before, strict=True)
    ]
    return float(np.max(errors))


def _adamw_inputs(
    dtypes: tuple[str, ...], arrays: Array, rng: np.random.Generator, grad_scale: float
) -> list[list[Array]]:
    """Lists of p, g, m, v and v's maximum, each with one array of every size."""

    def variances(n: int) -> np.ndarray:
        return rng.uniform(0.5, 2.0, n)  # clear of float16's subnormals

    def gradients(n: int) -> np.ndarray:
        return rng.standard_normal(n) * grad_scale

    param, grad, state = dtypes
    makers: list[tuple[str, Callable[[int], np.ndarray]]] = [
        (param, rng.standard_normal),
        (grad, gradients),
        (state, rng.standard_normal),
        (state, variances),
        (state, variances),
    ]
    return [
        [arrays.put(make(n), dtype, i % 2 == 1) for i, n in enumerate(SIZES)]
        for dtype, make in makers
    ]


def adamw_reference(
    arrays: list[np.ndarray],
    step: int,
    amsgrad: bool,
    grad_scale: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    decoupled_weight_decay: bool = True,
) -> list[np.ndarray]:
    """The step in float64, straight from the formula in `numpy.adamw_step`."""
    p, g, m, v, v_max = arrays
    unscaled = g / grad_scale
    g = -unscaled if maximize else unscaled
    if decoupled_weight_decay:
        p = p * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    m = m + (1 - betas[0]) * (g - m)
    v = betas[1] * v + (1 - betas[1]) * g**2
    v_max = np.maximum(v_max, v) if amsgrad else v_max
    corrected = np.sqrt((v_max if amsgrad else v) / (1 - betas[1] ** step))
    p = p - lr / (1 - betas[0] ** step) * m / (corrected + eps)
    return [p, unscaled, m, v, v_max]
