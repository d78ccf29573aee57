"""What is right: AdamW in float64, one plain line for each line of the formula, and the
sums of gradients in the very order that the core promises."""

import ctypes
import ctypes.util

import numpy as np


def adamw(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq=None,
    *,
    step,
    lr,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=1e-2,
    maximize=False,
    decoupled_weight_decay=True,
    grad_scale=1.0,
    clip_coef=1.0,
):
    """The arrays after a step, as float64: (param, exp_avg, exp_avg_sq, maximum)."""
    p, g, m, v = (
        np.asarray(a).astype(np.float64) for a in (param, grad, exp_avg, exp_avg_sq)
    )
    beta1, beta2 = betas
    g = (-g if maximize else g) * clip_coef / grad_scale
    if decoupled_weight_decay:
        p = p * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    top = v
    if max_exp_avg_sq is not None:
        top = np.maximum(np.asarray(max_exp_avg_sq).astype(np.float64), v)
    m_hat = m / (1 - beta1**step)
    v_hat = top / (1 - beta2**step)
    return p - lr * m_hat / (np.sqrt(v_hat) + eps), m, v, top


def norm(grads, grad_scale=1.0):
    """The 2-norm of all gradients together."""
    total = sum(float((np.asarray(g).astype(np.float64) ** 2).sum()) for g in grads)
    return np.sqrt(total) / grad_scale


def clip_coefficient(total_norm, max_norm):
    """What clip_grad_norm_ multiplies the gradients by."""
    return min(1.0, max_norm / (total_norm + 1e-6))


def _libm(name, kind):
    function = getattr(ctypes.CDLL(ctypes.util.find_library("m")), name)
    function.argtypes, function.restype = [kind] * 3, kind
    return np.frompyfunc(function, 3, 1)


# NumPy has no fma, and a sum in a wider type is rounded twice.
_FMA = {
    np.float32: _libm("fmaf", ctypes.c_float),
    np.float64: _libm("fma", ctypes.c_double),
}


def amp_sum(tensors, kind="squares"):
    """The sum of squares (or of |x|) in the order that csrc/amp_sum.h promises.

    Exact to the last bit: float32 lanes (float64 for float64 tensors, and for chunks
    whose sum is not finite), halved until one is left; float64 between the chunks.
    """
    sums, number = np.zeros(256), 0
    for x in (np.asarray(t).reshape(-1) for t in tensors):
        lane_type = np.float64 if x.dtype == np.float64 else np.float32
        for first in range(0, x.size, 8192):
            chunk = x[first : first + 8192]
            total = _lane_sum(chunk, lane_type, kind)
            if not np.isfinite(total):
                total = _lane_sum(chunk, np.float64, kind)
            sums[number % 256] += total
            number += 1
    return float(_halve(sums))


def _lane_sum(chunk, lane_type, kind):
    rows = np.zeros((-(-chunk.size // 128), 128), lane_type)
    rows.reshape(-1)[: chunk.size] = chunk
    lanes = np.zeros(128, lane_type)
    for row in rows:
        with np.errstate(over="ignore", invalid="ignore"):
            if kind == "squares":
                lanes = _FMA[lane_type](row, row, lanes).astype(lane_type)
            else:
                lanes = lanes + abs(row)
    return np.float64(_halve(lanes))


def _halve(values):
    with np.errstate(over="ignore", invalid="ignore"):
        while values.size > 1:
            half = values.size // 2
            values = values[:half] + values[half:]
    return values[0]
