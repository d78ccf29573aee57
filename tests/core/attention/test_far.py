"""Rows whose scores are all far from 0: masks of -1e9 or of a dtype's least number.

float32 has steps of 64 at -1e9, so that the scores of such a row are all the same, and
its logarithm of a sum says nothing about how many there were. Weights must sum to 1 in
the backward pass, too.
"""

import numpy as np
import pytest

import trainfast
from tests.arrays import DTYPES
from tests.attention_calls import Problem, for_reference, to_float64
from tests.reference_attention import attention, attention_backward

LEAST = float(np.finfo("f").min)


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
def test_rows_masked_by_large_numbers_agree_with_the_reference(
    rng, device, dtype, value
):
    options = {"dtype": dtype, "device": device}
    Rounded(rng, mask=far_rows(value), **options).check()
    Rounded(rng, kv_heads=2, bias=far_rows(value, heads=4), **options).check()


OPTIONS = {
    "causal": {"is_causal": True},
    "window_size": {"window_size": (7, 3)},
    "bias": {"bias": np.linspace(-2, 2, 49, dtype="f").round(2)},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "sinks": {"sinks": np.array([0, -1e9, 3e4, LEAST], "f")},
    "kv_lens": {"kv_lens": np.array([31, 49])},
    "bnhd": {"layout": "bshd"},
}


@pytest.mark.parametrize("value", [-1e9, LEAST])
@pytest.mark.parametrize("name", OPTIONS)
def test_far_rows_agree_with_the_reference_beside_every_option(
    rng, device, name, value
):
    options = {"mask": far_rows(value), "device": device, **OPTIONS[name]}
    Rounded(rng, kv_heads=2, **options).check()


def test_sinks_as_far_as_the_scores_take_their_share(rng, device):
    bias = np.full((4, 33, 1), 3e4, "f")
    bias[:, 9:] = -3e4
    sinks = np.array([3e4, 3e4 + 2, -3e4, -3e4 - 2], "f")
    Rounded(rng, bias=bias, sinks=sinks, device=device).check()


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(2, 4, 33, 49, 16), (1, 1, 120, 500, 16)])
def test_far_rows_without_a_mask_agree_with_the_reference(
    rng, backend, shape, dropout_p
):
    """All keys are the same, so that scores are, however they are rounded."""
    if backend in ("cuda", "simt"):
        pytest.skip("there, calls without terms have the weights of the rounded lse")
    options = dict(dropout_p=dropout_p, seed=1)
    problem = Rounded(rng, shape, **options)
    problem.k[:] = abs(problem.k[:, :, :1])
    problem.q[:, :, 5:] = 4096 * abs(problem.q[:, :, 5:])
    problem.check()


@pytest.mark.parametrize("n_q", [1, 3])
def test_few_far_rows_on_many_keys_agree_with_the_reference(rng, backend, device, n_q):
    for value in (-1e9, LEAST):
        mask = np.full((n_q, 1), value, "f")
        n_k = 700 if backend == "simt" else 2500
        options = {"mask": mask, "device": device}
        Rounded(rng, (1, 4, n_q, n_k, 16), kv_heads=2, **options).check()


def test_rows_beside_far_ones_keep_their_bits(rng, device):
    mask = rng.integers(-2, 3, (33, 49)).astype("f")
    problem = Rounded(rng, mask=mask, device=device)
    near = to_float64(problem.backward().dq)
    rows = [0, 3, 17, 32]
    mask[rows] = -1e9
    far = to_float64(problem.backward().dq)
    assert (far[:, :, rows] != near[:, :, rows]).any()
    near[:, :, rows] = far[:, :, rows]
    np.testing.assert_array_equal(far, near)


def test_an_lse_of_more_keys_is_no_rounding(rng, backend, device):
    """The keys of a call may be a part of those that its out and lse are of."""
    if backend not in ("cuda", "simt"):
        pytest.skip("there, weights of far rows sum to 1 over the keys of the call")
    problem = Rounded(rng, bias=np.full((33, 1), 1e3, "f"), device=device)
    dout, q = problem.moved(problem.dout, problem.q)
    out, lse = problem.forward()
    whole = to_float64(problem.backward(dlse=False).dq)
    parts = 0
    for keys in (slice(20), slice(20, None)):
        k, v = problem.moved(problem.k[:, :, keys], problem.v[:, :, keys])
        options = problem.moved_options()
        part = trainfast.numpy.attention_backward(dout, q, k, v, out, lse, **options)
        parts = parts + to_float64(part.dq)
    np.testing.assert_allclose(parts, whole, atol=1e-3)


# ---- On tensor cores -----------------------------------------------------------------


def far_parts(n_q, n_k, value):
    """Far rows beside others in some tiles, alone in some, and in others none."""
    mask = np.zeros((n_q, n_k), "f")
    mask[:, n_k - 9 :] = mask[[1, 8, 30]] = mask[64:] = value
    return mask


@pytest.mark.parametrize("dim", [32, 40, 96, 128, 192, 256])
def test_far_rows_agree_on_tensor_cores(rng, dtype, dim):
    problem = Rounded(rng, (1, 2, 83, 70, dim), kv_heads=1, dtype=dtype, is_causal=True)
    problem.options["bias"] = far_parts(83, 70, -1e9)
    problem.check()


@pytest.mark.parametrize("name", OPTIONS)
def test_far_rows_agree_on_tensor_cores_beside_every_option(rng, dtype, name):
    mask = far_rows(-1e9)
    Rounded(rng, kv_heads=2, dtype=dtype, mask=mask, **OPTIONS[name]).check()


@pytest.mark.parametrize("n_q", [1, 3])
def test_few_far_rows_agree_on_tensor_cores(rng, dtype, n_q):
    """Their lse is of the kernels that split keys."""
    mask = np.full((n_q, 1), -1e9, "f")
    shape = (1, 4, n_q, 700, 16)
    Rounded(rng, shape, kv_heads=2, dtype=dtype, mask=mask).check()


def test_far_rows_of_packed_items_agree_on_tensor_cores(rng, dtype):
    ends = np.array([0, 20, 20, 61])
    bias = np.full((4, 41, 1), -1e9, "f")
    bias[:, 5:17] = 0
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "bias": bias}
    Rounded(rng, (1, 4, 61, 61, 16), dtype=dtype, **options).check()
