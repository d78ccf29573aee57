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
):
    """The arrays after a step, as float64: (param, exp_avg, exp_avg_sq, maximum)."""
    p, g, m, v = (
        np.asarray(a).astype(np.float64) for a in (param, grad, exp_avg, exp_avg_sq)
    )
    beta1, beta2 = betas
    g = (-g if maximize else g) / grad_scale
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
