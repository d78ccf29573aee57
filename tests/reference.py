"""What is right: AdamW in float64, one plain line for each line of the formula."""

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


def amp_sum(tensors, kind="squares"):
    """The sum of squares (or of |x|) in the order that csrc/amp_sum.h promises.

    Exact to the last bit: float32 lanes (float64 for float64 tensors), with fma for
    squares, halved until one is left; float64 between the chunks.
    """
    chunks = []
    for x in (np.asarray(t).reshape(-1) for t in tensors):
        lane_type = np.float64 if x.dtype == np.float64 else np.float32
        for first in range(0, x.size, 8192):
            chunk = x[first : first + 8192]
            total = _lane_sum(chunk, lane_type, kind)
            chunks.append(total if np.isfinite(total) else _wide(chunk, kind))
    sums = np.zeros(256)
    for i, chunk in enumerate(chunks):
        sums[i % 256] += chunk
    return float(_halve(sums))


def _wide(chunk, kind):
    return _lane_sum(chunk, np.float64, kind)


def _lane_sum(chunk, lane_type, kind):
    rows = -(-chunk.size // 128)
    padded = np.zeros(rows * 128, np.longdouble)
    padded[: chunk.size] = chunk.astype(lane_type)
    lanes = np.zeros(128, lane_type)
    for row in padded.reshape(rows, 128):
        # 64 bits of mantissa: exact for products of float32, so rounding once is fma
        term = row * row if kind == "squares" else abs(row)
        with np.errstate(over="ignore", invalid="ignore"):
            lanes = (term + lanes).astype(lane_type)
    return np.float64(_halve(lanes))


def _halve(values):
    with np.errstate(over="ignore", invalid="ignore"):
        while values.size > 1:
            half = values.size // 2
            values = values[:half] + values[half:]
    return values[0]
