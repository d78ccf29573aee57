"""Attention with many options at once, of random values and shapes: whatever the
combination, the reference says what is right."""

import numpy as np
import pytest

from tests.arrays import DTYPES
from tests.attention_calls import Problem
from tests.pairwise import pairwise

# Multiples of what kernels take at a time, and often small.
NEAR = (1, 1, 8, 16, 32, 48, 64, 96, 128)
DIMS = (1, 3, 8, 16, 17, 32, 40, 64, 80, 100, 128, 256)
# Which options a call has, and near which sizes. The first value is "without". Those of
# the fast path have a design of their own; most cases of the other take another path.
FAST = {
    "near_q": (1, 16, 48, 128),
    "near_k": (1, 16, 48, 128),
    "layout": ("bhsd", "bshd", "packed"),
    # One factor: two bounds together would hide what one does alone.
    "bounds": ("none", "causal", "both", "left", "right", "causal left", "causal both"),
    "causal_align": ("upper_left", "lower_right"),
    "sinks": (False, True),
    "kv_lens": (False, True),
    "scale": (False, True),
}
TERMS = {
    "mask": ("none", "bool", "float", "infinite"),
    "bias": (False, True),
    "softcap": (False, True),
    "alibi_slopes": (False, True),
    "dropout_p": (False, True),
}
OTHER = {"dtype": tuple(DTYPES), "kv_heads": (1, 2, 3), "group": (1, 2, 3)}
WITHOUT = {name: values[0] for name, values in TERMS.items()}
DESIGN = [{**case, **WITHOUT} for case in pairwise({**OTHER, **FAST})]
DESIGN += pairwise({**OTHER, **FAST, **TERMS})


def any_of(rng, *values):
    return values[rng.integers(len(values))]


def any_size(rng, near):
    return max(1, near + int(rng.integers(-2, 3)))


def broadcast_shape(rng, full):
    shape = [size if rng.random() < 0.6 else 1 for size in full]
    return tuple(shape[rng.integers(5) :])


def any_lengths(rng, items, total):
    """Boundaries of packed items, some of them empty, and rows that are left over."""
    cuts = np.sort(rng.integers(0, total + 1, items))
    return np.concatenate([[0], cuts]).astype(any_of(rng, np.int32, np.int64))


def any_case(rng):
    """Options as in DESIGN, at random: each left out more often than not."""
    return {
        name: values[0] if rng.random() < 0.65 else any_of(rng, *values[1:])
        for name, values in {**FAST, **TERMS}.items()
    }


def any_terms(rng, full, wide, case):
    options = {}
    kind = case["mask"]
    shape = broadcast_shape(rng, full)
    if kind == "bool":
        options["mask"] = rng.random(shape) < any_of(rng, 0.1, 0.7)
    elif kind == "float":
        options["mask"] = rng.standard_normal(shape).astype(
            any_of(rng, *DTYPES.values())
        )
    elif kind == "infinite":
        options["mask"] = np.where(rng.random(shape) < 0.3, -np.inf, 0).astype(wide)
    if case["bias"]:
        shape = broadcast_shape(rng, full)
        options["bias"] = rng.standard_normal(shape).astype(wide)
    return options


def any_options(rng, full, wide, packed, case=None):
    case = case or any_case(rng)
    batch, heads, _, n_k = full
    options = any_terms(rng, full, wide, case)
    bounds = case["bounds"].split()
    options["is_causal"] = "causal" in bounds
    options["causal_align"] = case["causal_align"]
    if bounds[-1] in ("both", "left", "right"):
        options["window_size"] = tuple(
            int(rng.integers(0, 70)) if bounds[-1] in ("both", side) else None
            for side in ("left", "right")
        )
    if case["softcap"]:
        options["softcap"] = float(rng.uniform(0.5, 4))
    if case["alibi_slopes"]:
        shape = any_of(rng, (heads,), (batch, heads), (1, heads))
        options["alibi_slopes"] = rng.random(shape).astype(wide)
    if case["sinks"]:
        options["sinks"] = rng.standard_normal(heads).astype(wide)
    if case["dropout_p"]:
        options["dropout_p"] = float(rng.uniform(0, 0.9))
        options["seed"] = int(rng.integers(-(2**63), 2**63 - 1))
    if case["kv_lens"] and not packed:
        options["kv_lens"] = rng.integers(0, n_k + 1, batch)
    if case["scale"]:
        options["scale"] = float(rng.normal())
    return options


def problem_of(case, rng, device="cpu", dims=DIMS):
    """Random values, sizes and parameters of the options that a case has."""
    dtype = case["dtype"]
    wide = np.float64 if dtype == "float64" else np.float32
    kv_heads = case["kv_heads"]
    heads = kv_heads * case["group"]
    batch = any_of(rng, 1, 2, 3)
    n_q, n_k = (any_size(rng, case[name]) for name in ("near_q", "near_k"))
    full = (batch, heads, n_q, n_k)
    packed = case["layout"] == "packed"
    options = {"layout": case["layout"]}
    if packed:
        at_q, at_k = (any_lengths(rng, batch, n) for n in (n_q, n_k))
        longest = (int(np.diff(at).max()) for at in (at_q, at_k))
        full = (batch, heads, *longest)
        options = {"cu_seqlens_q": at_q, "cu_seqlens_k": at_k}
    options |= any_options(rng, full, wide, packed, case)
    return Problem(
        rng,
        (batch, heads, n_q, n_k, any_of(rng, *dims)),
        kv_heads=kv_heads,
        dim_v=any_of(rng, *dims),
        dtype=dtype,
        device=device,
        **options,
    )


def any_problem(rng, dtypes, dims=DIMS):
    case = any_case(rng) | {
        "dtype": any_of(rng, *dtypes),
        "kv_heads": any_of(rng, 1, 2, 3),
        "group": any_of(rng, 1, 1, 2, 3),
        "near_q": any_of(rng, *NEAR),
        "near_k": any_of(rng, *NEAR),
    }
    return problem_of(case, rng, dims=dims)


def check(problem):
    # with scores far apart, rounding of a score is a relative error of its weight
    problem.check(factor=max(1.0, 20 * abs(problem.options["scale"])))


@pytest.mark.parametrize("seed, case", list(enumerate(DESIGN)))
def test_many_options_agree_with_the_reference(device, seed, case):
    check(problem_of(case, np.random.default_rng(seed), device))
