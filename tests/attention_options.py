"""A value of each option of attention, and designs of which options go together."""

import numpy as np

from tests.arrays import DTYPES


def option_values(rng, batch=2, heads=4, n_q=33, n_k=49):
    """A value of each option, by a name for the case."""
    normal = rng.standard_normal
    causal, left = {"is_causal": True}, {"window_size": (3, None)}
    return {
        "mask": {"mask": rng.random((batch, 1, n_q, n_k)) < 0.6},
        "float_mask": {"mask": normal((n_q, n_k)).astype("f")},
        "infinite_mask": {
            "mask": np.where(rng.random((batch, 1, 1, n_k)) < 0.5, -np.inf, 0.5)
        },
        "bias": {"bias": normal((1, heads, n_q, n_k)).astype("f")},
        "column_bias": {"bias": normal((batch, 1, 1, n_k)).astype("f")},
        "causal": causal,
        "bottom_right": causal | {"causal_align": "lower_right"},
        "window_size": {"window_size": (5, 9), "causal_align": "lower_right"},
        "left_window": left,
        "causal_left": causal | left,
        "bottom_right_left": causal | left | {"causal_align": "lower_right"},
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": rng.random(heads).astype("f")},
        "item_alibi": {
            "alibi_slopes": rng.random((batch, heads)).astype("f"),
            "causal_align": "lower_right",
        },
        "sinks": {"sinks": normal(heads).astype("f")},
        "dropout": {"dropout_p": 0.3, "seed": -7},
        "kv_lens": {"kv_lens": np.array([n_k - 11, 20])[:batch]},
        "scale": {"scale": -0.4},
    }


# Bounds are one factor: two of them together would hide what one does alone.
# Options of the fast path have a design of their own: most cases of the other design
# have an option that takes the general path.
FAST = {
    "dtype": DTYPES,
    "bounds": (
        None,
        "causal",
        "bottom_right",
        "window_size",
        "left_window",
        "causal_left",
        "bottom_right_left",
    ),
    "sinks": (None, "sinks"),
    "lengths": (None, "kv_lens"),
    "scale": (None, "scale"),
    "layout": ("bhsd", "bshd"),
    "kv_heads": (2, 4),
}
GENERAL = {
    **FAST,
    "mask": (None, "mask", "float_mask", "infinite_mask"),
    "bias": (None, "bias", "column_bias"),
    "alibi": (None, "alibi", "item_alibi"),
    "softcap": (None, "softcap"),
    "dropout": (None, "dropout"),
}


def options_of(case, rng, **sizes):
    """The options of a case of one of these designs."""
    values = option_values(rng, **sizes)
    fixed = {name: case[name] for name in ("dtype", "layout", "kv_heads")}
    options = {}
    for name, value in case.items():
        if name not in fixed and value is not None:
            options |= values[value]
    if case["dtype"] == "float64":
        options = {
            k: v.astype(float) if isinstance(v, np.ndarray) and v.dtype == "f" else v
            for k, v in options.items()
        }
    return fixed | options
