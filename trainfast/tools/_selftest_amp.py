"""The passes over gradients, and the loss scale's rule, against float64."""

import math
from typing import Any

import numpy as np

from trainfast import _core
from trainfast.tools._selftest_arrays import EPS, Array

AMP_DTYPES: list[tuple[str, ...]] = [(name,) for name in EPS]
SIZES = (0, 1, 7, 16, 17, 257, 8191, 8193)  # around the edges of vectors and chunks
NORMS = (2.0, 1.0, math.inf)
GRAD_SCALE, MAX_NORM, FACTOR = 8.0, 0.5, 0.3


def check_amp_grads(dtypes: tuple[str, ...], arrays: Array) -> tuple[float, float]:
    """The largest error of norm, clip coefficient and rewritten gradients, and what is
    allowed: some roundings of the arithmetic, half a unit of the gradients' dtype."""
    (dtype,) = dtypes
    arithmetic = EPS["float64" if dtype == "float64" else "float32"]
    store = EPS[dtype] / 2 if EPS[dtype] > arithmetic else 0.0
    errors = [_grads_error(dtype, arrays, norm_type) for norm_type in NORMS]
    errors += [_found_error(dtype, arrays, bad) for bad in (np.inf, np.nan)]
    return float(np.max(errors)), 8 * arithmetic + store


def _run(grads: list[Array], arrays: Array, **options: Any) -> list[float]:
    """found_inf, total norm and clip coefficient; grads become FACTOR / GRAD_SCALE."""
    found = arrays.put(np.full(1, -1.0), "float32")
    norm, clip = (arrays.put(np.full(1, -1.0), "float64") for _ in range(2))
    _core.amp_grads(
        grads,
        _core.Workspace(),
        found_inf=found,
        total_norm_f64=norm,
        clip_coef=clip,
        max_norm=MAX_NORM,
        rewrite="multiply",
        grad_scale=arrays.put(np.array([GRAD_SCALE]), "float32"),
        factor=arrays.put(np.array([FACTOR]), "float64"),
        **options,
    )
    return [float(arrays.get(x)[0]) for x in (found, norm, clip)]


def _grads_error(dtype: str, arrays: Array, norm_type: float) -> float:
    rng = np.random.default_rng(int(min(norm_type, 3)))
    # Clear of float16's subnormals.
    draws = [rng.uniform(0.5, 2.0, n) * rng.choice((-1, 1), n) for n in SIZES]
    grads = [
        arrays.put(values * GRAD_SCALE, dtype, i % 2 == 1)
        for i, values in enumerate(draws)
    ]
    before = np.concatenate([arrays.get(grad) for grad in grads]) / GRAD_SCALE
    found, norm, clip = _run(grads, arrays, norm_type=norm_type)
    after = np.concatenate([arrays.get(grad) for grad in grads])
    want_norm = float(np.linalg.norm(before, norm_type))
    want_clip = min(1.0, MAX_NORM / (want_norm + 1e-6))
    errors = [
        found,
        abs(norm / want_norm - 1),
        abs(clip / want_clip - 1),
        float(np.max(np.abs(after / (before * FACTOR) - 1))),
    ]
    return float(np.max(errors))


def _found_error(dtype: str, arrays: Array, bad: float) -> float:
    """How far found_inf is from 1 where the last element is not finite."""
    values = np.ones(8193)
    values[-1] = bad
    found, *_ = _run([arrays.put(values, dtype)], arrays)
    return abs(found - 1)


# Scale and tracker before, found_inf, scale and tracker after; interval 3, from 2 up.
UPDATES = (
    (16.0, 0, 0.0, 16.0, 1),
    (16.0, 2, 0.0, 32.0, 0),
    (16.0, 2, 1.0, 8.0, 0),
    (2.0, 1, 1.0, 2.0, 0),
)


def check_amp_update(dtypes: tuple[str, ...], arrays: Array) -> tuple[float, float]:
    """The largest error of scale and growth tracker: none is allowed."""
    errors = []
    for scale, growth, found, want_scale, want_growth in UPDATES:
        scale_at = arrays.put(np.array([scale]), "float32")
        growth_at = arrays.put(np.array([growth]), "int32")
        _core.amp_update(
            scale_at,
            growth_at,
            [arrays.put(np.array([found]), "float32")],
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=3,
            min_scale=2.0,
        )
        errors.append(abs(float(arrays.get(scale_at)[0]) - want_scale))
        errors.append(abs(float(arrays.get(growth_at)[0]) - want_growth))
    return max(errors), 0.0
