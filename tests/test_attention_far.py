"""Rows whose scores are all far from 0: masks of -1e9 or of a dtype's least number.

float32 has steps of 64 at -1e9, so that the scores of such a row are all the same, and
its logarithm of a sum says nothing about how many there were. Weights must sum to 1 in
the backward pass, too.
"""

import numpy as np
import pytest
from arrays import DTYPES
from attention_calls import Problem, for_reference, to_float64
from reference_attention import attention, attention_backward

LEAST = float(np.finfo("f").min)


@pytest.fixture
def cpu(backend):
    if backend in ("cuda", "simt"):
        pytest.skip("there, weights are made anew from the rounded lse alone")
    return backend


class Rounded(Problem):
    """Products of query and key are exact in float32, so that the reference can round
    their sums with masks as the core does."""

    def __init__(self, rng, *arguments, **options):
        super().__init__(rng, *arguments, **options, scale=0.25)
        self.q, self.k = (self.quarters(x) for x in (self.q, self.k))

    def quarters(self, x):
        return (self.rng.integers(-8, 9, x.shape) / 4).astype(DTYPES[self.dtype])

    def rounded_options(self):
        return for_reference(self.options) | {"score_dtype": self.wide}

    def expected(self):
        return attention(self.q, self.k, self.v, **self.rounded_options())

    def expected_gradients(self, dlse=True):
        return attention_backward(
            self.dout,
            self.q,
            self.k,
            self.v,
            dlse=self.dlse if dlse else None,
            **self.rounded_options(),
        )


def far_rows(value, n_q=33, n_k=49, heads=1):
    """An additive mask: some keys of all rows, and all keys of some."""
    mask = np.zeros((2, heads, n_q, n_k), "f")
    mask[..., 40:] = mask[..., [0, 3, 17, 32], :] = mask[1, :, 20:29] = value
    return mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [-300.0, -1e4, -65504.0, -1e9, -1e30, LEAST])
def test_rows_masked_by_large_numbers_agree_with_the_reference(rng, cpu, dtype, value):
    Rounded(rng, dtype=dtype, mask=far_rows(value)).check()
    Rounded(rng, kv_heads=2, dtype=dtype, bias=far_rows(value, heads=4)).check()


OPTIONS = {
    "causal": {"is_causal": True},
    "window": {"window": (7, 3)},
    "bias": {"bias": np.linspace(-2, 2, 49, dtype="f").round(2)},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "sinks": {"sinks": np.array([0, -1e9, 3e4, LEAST], "f")},
    "kv_lens": {"kv_lens": np.array([31, 49])},
    "bnhd": {"layout": "bnhd"},
}


@pytest.mark.parametrize("value", [-1e9, LEAST])
@pytest.mark.parametrize("name", OPTIONS)
def test_far_rows_agree_with_the_reference_beside_every_option(rng, cpu, name, value):
    mask = far_rows(value)
    Rounded(rng, kv_heads=2, mask=mask, **OPTIONS[name]).check()


def test_sinks_as_far_as_the_scores_take_their_share(rng, cpu):
    bias = np.full((4, 33, 1), 3e4, "f")
    bias[:, 9:] = -3e4
    sinks = np.array([3e4, 3e4 + 2, -3e4, -3e4 - 2], "f")
    Rounded(rng, bias=bias, sinks=sinks).check()


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(2, 4, 33, 49, 16), (1, 1, 120, 500, 16)])
def test_far_rows_without_a_mask_agree_with_the_reference(rng, cpu, shape, dropout_p):
    """All keys are the same, so that scores are, however they are rounded."""
    options = dict(dropout_p=dropout_p, seed=1)
    problem = Rounded(rng, shape, **options)
    problem.k[:] = abs(problem.k[:, :, :1])
    problem.q[:, :, 5:] = 4096 * abs(problem.q[:, :, 5:])
    problem.check()


@pytest.mark.parametrize("n_q", [1, 3])
def test_few_far_rows_on_many_keys_agree_with_the_reference(rng, cpu, n_q):
    for value in (-1e9, LEAST):
        mask = np.full((n_q, 1), value, "f")
        Rounded(rng, (1, 4, n_q, 2500, 16), kv_heads=2, mask=mask).check()


def test_rows_beside_far_ones_keep_their_bits(rng, cpu):
    mask = rng.integers(-2, 3, (33, 49)).astype("f")
    problem = Rounded(rng, mask=mask)
    near = to_float64(problem.backward().dq)
    rows = [0, 3, 17, 32]
    mask[rows] = -1e9
    far = to_float64(problem.backward().dq)
    assert (far[:, :, rows] != near[:, :, rows]).any()
    near[:, :, rows] = far[:, :, rows]
    np.testing.assert_array_equal(far, near)
