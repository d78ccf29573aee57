"""Attention with random options, all at once: whatever the combination, the reference
says what is right."""

import numpy as np
import pytest
from arrays import DTYPES
from attention_calls import Problem

CASES = 100  # on each backend
DIMS = (1, 3, 8, 16, 17, 32, 40, 64, 80, 100, 128, 256)


def any_of(rng, *values):
    return values[rng.integers(len(values))]


def any_size(rng):
    """Around multiples of what kernels take at a time, and often small."""
    near = any_of(rng, 1, 1, 8, 16, 32, 48, 64, 96, 128)
    return max(1, near + int(rng.integers(-2, 3)))


def broadcast_shape(rng, full):
    shape = [size if rng.random() < 0.6 else 1 for size in full]
    return tuple(shape[rng.integers(5) :])


def any_lengths(rng, items, total):
    """Boundaries of packed items, some of them empty, and rows that are left over."""
    cuts = np.sort(rng.integers(0, total + 1, items))
    return np.concatenate([[0], cuts]).astype(any_of(rng, np.int32, np.int64))


def any_terms(rng, full, wide):
    options = {}
    kind = any_of(rng, "none", "bool", "float", "infinite")
    shape = broadcast_shape(rng, full)
    if kind == "bool":
        options["mask"] = rng.random(shape) < any_of(rng, 0.1, 0.7)
    elif kind == "float":
        options["mask"] = rng.standard_normal(shape).astype(
            any_of(rng, *DTYPES.values())
        )
    elif kind == "infinite":
        options["mask"] = np.where(rng.random(shape) < 0.3, -np.inf, 0).astype(wide)
    if rng.random() < 0.4:
        shape = broadcast_shape(rng, full)
        options["bias"] = rng.standard_normal(shape).astype(wide)
    return options


def any_options(rng, full, wide, packed):
    batch, heads, _, n_k = full
    options = any_terms(rng, full, wide)
    options["is_causal"] = bool(rng.random() < 0.4)
    options["causal_align"] = any_of(rng, "upper_left", "lower_right")
    if rng.random() < 0.3:
        options["window_size"] = tuple(
            None if rng.random() < 0.3 else int(rng.integers(0, 70)) for _ in range(2)
        )
    if rng.random() < 0.2:
        options["softcap"] = float(rng.uniform(0.5, 4))
    if rng.random() < 0.3:
        shape = any_of(rng, (heads,), (batch, heads), (1, heads))
        options["alibi_slopes"] = rng.random(shape).astype(wide)
    if rng.random() < 0.3:
        options["sinks"] = rng.standard_normal(heads).astype(wide)
    if rng.random() < 0.3:
        options["dropout_p"] = float(rng.uniform(0, 0.9))
        options["seed"] = int(rng.integers(-(2**63), 2**63 - 1))
    if rng.random() < 0.3 and not packed:
        options["kv_lens"] = rng.integers(0, n_k + 1, batch)
    if rng.random() < 0.2:
        options["scale"] = float(rng.normal())
    return options


def any_problem(rng, device, dtypes=tuple(DTYPES), dims=DIMS):
    dtype = any_of(rng, *dtypes)
    wide = np.float64 if dtype == "float64" else np.float32
    kv_heads = any_of(rng, 1, 2, 3)
    heads = kv_heads * any_of(rng, 1, 1, 2, 3)
    batch, n_q, n_k = any_of(rng, 1, 2, 3), any_size(rng), any_size(rng)
    packed = rng.random() < 0.25
    options = {"layout": any_of(rng, "bhsd", "bshd")}
    full = (batch, heads, n_q, n_k)
    if packed:
        at_q, at_k = (any_lengths(rng, batch, n) for n in (n_q, n_k))
        longest = (int(np.diff(at).max()) for at in (at_q, at_k))
        full = (batch, heads, *longest)
        options = {"cu_seqlens_q": at_q, "cu_seqlens_k": at_k}
    options |= any_options(rng, full, wide, packed)
    return Problem(
        rng,
        (batch, heads, n_q, n_k, any_of(rng, *dims)),
        kv_heads=kv_heads,
        dim_v=any_of(rng, *dims),
        dtype=dtype,
        device=device,
        **options,
    )


def check(problem):
    # with scores far apart, rounding of a score is a relative error of its weight
    problem.check(factor=max(1.0, 20 * abs(problem.options["scale"])))


@pytest.mark.parametrize("seed", range(CASES))
def test_random_options_agree_with_the_reference(device, seed):
    check(any_problem(np.random.default_rng(seed), device))
