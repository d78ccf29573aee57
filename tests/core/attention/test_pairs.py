"""bfloat16 attention on processors that multiply pairs (AVX512_BF16), and on `wide`,
which imitates them: odd sizes, and rows that share a pair."""

import platform
from pathlib import Path

import numpy as np
import pytest

import trainfast
from tests.arrays import DTYPES
from tests.attention_calls import Problem, to_float64
from tests.conftest import REASONS, USABLE
from trainfast import _core

CPU = Path("/proc/cpuinfo")
HAS_PAIRS = platform.machine() == "x86_64" and "avx512_bf16" in CPU.read_text()
BFLOAT16 = DTYPES["bfloat16"]


@pytest.fixture(params=["avx512", "avx2", "scalar", "wide"])
def backend(request):
    """One on the host."""
    if request.param not in [b["name"] for b in trainfast.backends() if b["usable"]]:
        pytest.skip("not here")
    trainfast.use_backend(request.param)
    yield request.param
    trainfast.use_backend(None)


def bfloat16(array):
    return np.asarray(array, np.float32).astype(BFLOAT16)


def test_weights_are_rounded_where_pairs_are_multiplied(backend):
    """2 * 0.50087 - 1 is 0 when 0.50087 has been rounded to 8 bits."""
    q = bfloat16(np.ones((1, 1, 20, 1)))
    k = bfloat16([0, -0.69140625]).reshape(1, 1, 2, 1)
    v = bfloat16([-1, 2]).reshape(1, 1, 2, 1)
    out = to_float64(trainfast.numpy.attention(q, k, v, scale=1.0))
    weight = np.exp(-0.69140625)
    pairs = backend == "wide" or (backend == "avx512" and HAS_PAIRS)
    expected = 0 if pairs else (2 * weight - 1) / (1 + weight)
    np.testing.assert_allclose(out, expected, rtol=4e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"shape": (1, 1, 9, 1, 1)},
        {"shape": (1, 2, 33, 47, 31), "dim_v": 17},
        {"shape": (2, 1, 97, 131, 20)},
        {"shape": (1, 1, 130, 129, 65), "is_causal": True},
        {"shape": (1, 1, 45, 99, 7), "window_size": (5, 3)},
        {"shape": (1, 2, 65, 65, 33), "window_size": (0, 0), "layout": "bshd"},
        # The last query that looks at a block of keys has an even number.
        {"shape": (1, 1, 150, 150, 16), "window_size": (5, 3)},
        {"shape": (1, 1, 150, 150, 16), "window_size": (5, 0), "softcap": 2.0},
        {
            "shape": (1, 1, 45, 24, 7),
            "window_size": (5, 3),
            "dropout_p": 0.2,
            "seed": 1,
        },
        {"shape": (1, 2, 400, 100, 24), "window_size": (31, 0)},
        {"shape": (1, 2, 260, 260, 24), "window_size": (127, 0), "kv_heads": 1},
        {"shape": (1, 4, 35, 41, 16), "kv_heads": 2, "softcap": 3.0},
        {"shape": (1, 1, 99, 97, 8), "dropout_p": 0.25, "seed": 3},
    ],
    ids=str,
)
def test_odd_sizes(rng, backend, options):
    options = dict(options)
    Problem(rng, options.pop("shape"), dtype="bfloat16", **options).check()


def test_rows_need_not_lie_on_pairs(rng, backend):
    """Arrays that begin in the middle of a word, or whose rows do."""
    whole = [bfloat16(rng.standard_normal((1, 2, 37, 19))) for _ in range(4)]
    odd = [x[..., 1:17] for x in whole]
    dense = [np.ascontiguousarray(x) for x in odd]
    results = []
    for dout, q, k, v in (odd, dense):
        out, lse = trainfast.numpy.attention(q, k, v, return_lse=True, is_causal=True)
        grads = trainfast.numpy.attention_backward(
            dout, q, k, v, out, lse, is_causal=True
        )
        results.append([to_float64(x) for x in (out, *grads) if x is not None])
    for mine, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_a_forbidden_neighbour_may_be_nan(rng, backend):
    """A key shares its pair with one that only later queries may look at."""
    q, k, v, dout = (bfloat16(rng.standard_normal((1, 1, 50, 16))) for _ in range(4))
    k[..., 25:, :] = v[..., 25:, :] = np.nan
    out, lse = trainfast.numpy.attention(q, k, v, return_lse=True, is_causal=True)
    dq = trainfast.numpy.attention_backward(dout, q, k, v, out, lse, is_causal=True)[0]
    few = trainfast.numpy.attention(
        *(np.ascontiguousarray(x[..., :25, :]) for x in (q, k, v)), is_causal=True
    )
    np.testing.assert_allclose(
        to_float64(out)[..., :25, :], to_float64(few), rtol=0.01, atol=0.01
    )
    assert np.isfinite(to_float64(dq)[..., :25, :]).all()
    assert np.isnan(to_float64(out)[..., 25:, :]).all()


def test_the_imitation_is_as_good(rng):
    """`wide` and the processor: as far apart as one rounding of a weight."""
    if not HAS_PAIRS:
        pytest.skip("this CPU has no AVX512_BF16")
    if "wide" not in USABLE:
        pytest.skip(REASONS["wide"])
    problem = Problem(rng, (1, 2, 133, 135, 40), dtype="bfloat16", is_causal=True)
    results = []
    try:
        for name in ("wide", "avx512"):
            trainfast.use_backend(name)
            assert _core.backend_in_use() == name
            made = (*problem.forward(), *problem.backward())
            results.append([to_float64(x) for x in made if x is not None])
    finally:
        trainfast.use_backend(None)
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0.01, atol=0.01)
