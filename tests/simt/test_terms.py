"""Gradients of bias, ALiBi's slopes and sinks by tensor cores, on the SIMT library."""

import ctypes
import itertools

import numpy as np
import pytest

import trainfast
from tests.attention_calls import OPTION_GRADIENTS, Problem, to_float64
from tests.attention_options import GENERAL, option_values, options_of
from tests.conftest import TENSOR_CORES
from tests.core.attention import test_fuzz
from tests.core.attention.test_attention import cumulated
from tests.pairwise import pairwise

ARRAYS = ("dout", "q", "k", "v")


def wide_options(options, wide):
    return {
        name: value.astype(wide)
        if name in OPTION_GRADIENTS or (name == "mask" and value.dtype != bool)
        else value
        for name, value in options.items()
    }


def option_gradients(problem, made, wide=None, wanted=OPTION_GRADIENTS):
    """By the backend in use, from what the forward has made; in a wider dtype the same
    numbers."""
    arrays = [getattr(problem, name) for name in ARRAYS] + list(made)
    dlse, options = problem.dlse, problem.options
    if wide:
        arrays, dlse = [x.astype(wide) for x in arrays], dlse.astype(wide)
        options = wide_options(options, wide)
    wanted = [name for name in wanted if options.get(name) is not None]
    found = trainfast.numpy.attention_backward(
        *arrays, dlse=dlse, wanted=wanted, **options
    )
    return {name: getattr(found, f"d{name}") for name in wanted}


def true_gradients(problem, made):
    """In float64, on the CPU."""
    trainfast.use_backend("scalar")
    true = option_gradients(problem, made, np.float64)
    trainfast.use_backend("simt")
    return true


def check(problem, noise=3e-7):
    """Errors are at most twice those of multiply-adds in float32, but for so much of
    the largest gradient."""
    made = problem.forward()
    true = true_gradients(problem, made)
    plain = option_gradients(problem, made, np.float32)
    found = option_gradients(problem, made)
    for name, mine in found.items():
        assert mine.dtype == np.float32
        error, bound = (
            abs(to_float64(x) - true[name]).max(initial=0) for x in (mine, plain[name])
        )
        if name == "alibi_slopes":  # few numbers, of which either may be lucky
            bound += 10 * noise * abs(true[name]).max()
        bound = 2 * bound + noise * abs(true[name]).max(initial=0)
        assert error <= bound, f"{name} is off by {error:.3g}, more than {bound:.3g}"
    return found


def all_options(rng, batch=2, heads=4, n_q=70, n_k=90):
    values = option_values(rng, batch, heads, n_q, n_k)
    names = ("column_bias", "item_alibi", "sinks")
    return {k: v for name in names for k, v in values[name].items()}


# ---- Against float64 -----------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", list(itertools.product([1, 2], [1, 4], [1, 70], [1, 130]))
)
def test_a_bias_broadcast_over_any_dimension_is_right(rng, dtype, shape):
    bias = rng.standard_normal(shape).astype("f")
    check(Problem(rng, (2, 4, 70, 130, 24), kv_heads=2, dtype=dtype, bias=bias))


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 4)])
@pytest.mark.parametrize("causal_align", ["upper_left", "lower_right"])
def test_slopes_are_right(rng, dtype, shape, causal_align):
    options = dict(alibi_slopes=rng.random(shape).astype("f"), is_causal=True)
    options |= dict(causal_align=causal_align, kv_heads=2, dtype=dtype)
    check(Problem(rng, (2, 4, 70, 130, 40), **options))


def test_sinks_are_right(rng, dtype):
    sinks = rng.standard_normal(4).astype("f")
    check(Problem(rng, (3, 4, 300, 20, 40), dtype=dtype, sinks=sinks))


# Each has a bias, slopes and sinks besides.
DESIGN = pairwise({**GENERAL, "dtype": TENSOR_CORES, "bias": ("bias", "column_bias")})


@pytest.mark.parametrize(
    "dtype, case", [(case["dtype"], case) for case in DESIGN], indirect=["dtype"]
)
def test_every_option_is_taken_into_account(rng, dtype, case):
    sizes = dict(batch=2, heads=4, n_q=70, n_k=90)
    options = all_options(rng) | options_of(case, rng, **sizes) | {"dtype": dtype}
    check(Problem(rng, (2, 4, 70, 90, 40), dim_v=72, **options))


@pytest.mark.parametrize("dim", [1, 8, 24, 40, 63, 64, 65, 96, 128, 129, 192, 256])
def test_any_dim_is_right(rng, dtype, dim):
    options = all_options(rng, 2, 2, 33, 49)
    for dim_v in {dim, 257 - dim}:
        shape = (2, 2, 33, 49, dim)
        check(Problem(rng, shape, dim_v=dim_v, dtype=dtype, **options))


@pytest.mark.parametrize("n_q, n_k", [(1, 1), (1, 65), (63, 64), (64, 63), (129, 2)])
def test_any_size_is_right(rng, dtype, n_q, n_k):
    options = all_options(rng, 2, 4, n_q, n_k)
    options["bias"] = rng.standard_normal((1, 4, n_q, n_k)).astype("f")
    check(Problem(rng, (2, 4, n_q, n_k, 16), dtype=dtype, **options))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_terms_may_have_any_strides(rng, dtype, layout):
    big = rng.standard_normal((49, 66, 4, 2)).astype("f").transpose(3, 2, 1, 0)
    options = dict(bias=big[:, :, ::2], dtype=dtype, layout=layout)
    check(Problem(rng, (2, 4, 33, 49, 24), **options))
    options["bias"] = np.broadcast_to(big[:1, :, :33], (2, 4, 33, 49))
    check(Problem(rng, (2, 4, 33, 49, 24), **options))


@pytest.mark.parametrize("name", ["", "bottom_right", "window_size", "dropout"])
def test_packed_items_are_right(rng, dtype, name):
    lengths_q, lengths_k = [5, 0, 80, 1, 16], [7, 4, 100, 0, 16]
    options = option_values(rng)[name] if name else {}
    options |= dict(alibi_slopes=rng.random((5, 4)).astype("f"))
    options |= dict(sinks=rng.standard_normal(4).astype("f"))
    for shape in [(1, 4, 80, 100), (5, 1, 1, 100), (5, 4, 80, 1)]:
        problem = Problem(
            rng,
            (1, 4, sum(lengths_q) + 3, sum(lengths_k) + 2, 16),
            kv_heads=2,
            dtype=dtype,
            cu_seqlens_q=cumulated(lengths_q),
            cu_seqlens_k=cumulated(lengths_k),
            kv_lens=np.array([3, 4, 90, 0, 2]),
            bias=rng.standard_normal(shape).astype("f"),
            **options,
        )
        check(problem)


@pytest.mark.parametrize("seed", range(20))
def test_random_options_are_right(dtype, seed):
    rng = np.random.default_rng(seed)
    dims = (*test_fuzz.DIMS, 72, 136, 192)
    problem = test_fuzz.any_problem(rng, [dtype], dims)
    while not any(name in problem.options for name in OPTION_GRADIENTS):
        problem = test_fuzz.any_problem(rng, [dtype], dims)
    check(problem, 1e-6 * max(1.0, 20 * abs(problem.options["scale"])))


# ---- Long sums -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 1, 700), (1, 1, 600, 1)])
def test_long_sums_keep_their_digits(rng, dtype, shape):
    options = dict(bias=np.zeros(shape, "f"), is_causal=True, dtype=dtype)
    options["alibi_slopes"] = np.full(2, 0.01, "f")
    problem = Problem(rng, (2, 2, 600, 700, 8), **options)
    problem.dout = abs(problem.dout)
    check(problem)


def test_many_small_items_share_their_bias(rng, dtype):
    """Windows of pictures: few tiles of the term, many of scores."""
    bias = rng.standard_normal((1, 2, 49, 49)).astype("f")
    check(Problem(rng, (40, 2, 49, 49, 32), dtype=dtype, bias=bias))


# ---- Numbers that are not finite, or far apart ---------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["mask", "kv_lens", "packed"])
def test_forbidden_keys_may_hold_anything(rng, dtype, bad, kind):
    options = all_options(rng)
    hidden = slice(60, 90)
    if kind == "mask":
        options["mask"] = np.arange(90) < 60
        options |= dict(dropout_p=0.5, seed=1, softcap=2.0)
    else:
        options["kv_lens"] = np.array([60, 60])
    if kind == "packed":
        options["cu_seqlens_q"] = np.array([0, 70, 140])
        options["cu_seqlens_k"] = np.array([0, 90, 180])
        problem = Problem(rng, (2, 4, 140, 180, 24), dtype=dtype, **options)
        for array in (problem.k, problem.v):
            array[hidden] = array[150:] = bad
    else:
        problem = Problem(rng, (2, 4, 70, 90, 24), dtype=dtype, **options)
        problem.k[:, :, hidden] = problem.v[:, :, hidden] = bad
    for gradient in check(problem).values():
        assert np.isfinite(gradient).all()


def test_nan_reaches_the_terms_of_those_who_may_look(rng, dtype):
    bias = rng.standard_normal((2, 2, 70, 90)).astype("f")
    options = dict(bias=bias, is_causal=True, dtype=dtype)
    problem = Problem(rng, (2, 2, 70, 90, 24), **options)
    problem.v[1, 0, 66, 3] = np.nan
    found = option_gradients(problem, problem.forward())["bias"]
    seen = np.zeros(bias.shape, bool)
    seen[1, 0, 66:] = np.tri(4, 90, 66, bool)
    np.testing.assert_array_equal(np.isnan(found), seen)


# Of each head's q, k, v and dout, as powers of two.
MAGNITUDES = {
    "heads far apart": [(0, 0, 30, 30), (0, 0, -30, -30), (0, 0, 0, 60)],
    "q against k": [(60, -60, 0, 0), (-60, 60, 0, 0), (0, 0, 0, 0)],
    "dout against v": [(0, 0, -60, 60), (0, 0, 60, -60), (0, 0, 0, 0)],
    "tiny": [(0, 0, -40, -40), (0, 0, 0, -100), (-20, -20, -60, 40)],
}


@pytest.mark.parametrize("name", MAGNITUDES)
def test_magnitudes_of_heads_count_for_nothing(rng, dtype, name):
    if dtype == "float16":
        pytest.skip("float16 has no room for them")
    slopes = np.zeros(3, "f")
    problem = Problem(rng, (1, 3, 40, 50, 72), dtype=dtype, alibi_slopes=slopes)
    problem.options["bias"] = np.zeros((1, 3, 40, 1), "f")
    problem.dlse[...] = 0
    for array, powers in zip(["q", "k", "v", "dout"], zip(*MAGNITUDES[name])):
        values = getattr(problem, array)
        by = 2.0 ** np.array(powers)[:, None, None]
        setattr(problem, array, (values.astype("f") * by).astype(values.dtype))
    made = problem.forward()
    true = true_gradients(problem, made)
    plain = option_gradients(problem, made, np.float32)
    for key, mine in option_gradients(problem, made).items():
        heads = 1 if key == "bias" else 0
        errors, bounds, largest = (
            np.moveaxis(abs(x), heads, 0).reshape(3, -1).max(1)
            for x in (mine - true[key], plain[key] - true[key], true[key])
        )
        assert (errors <= 2 * bounds + 3e-6 * largest).all(), key


# ---- What a call does ----------------------------------------------------------------


def launches(simt, problem, wanted):
    made = problem.forward()
    simt.counts()
    option_gradients(problem, made, wanted=wanted)
    counts = simt.counts()
    assert (counts["syncs"], counts["allocations"]) == (0, 0)
    return counts["launches"]


# Beside delta, far rows' shares and what makes the exponents of bfloat16 fit: of the
# term's own kernel, and of the one that adds up its parts, which plain ones have not.
@pytest.mark.parametrize(
    "shape, wanted, expected",
    [
        ((2, 4, 70, 90), "bias", 1),
        ((2, 4, 70, 1), "bias", 1),
        ((1, 4, 70, 90), "bias", 1),  # two tiles of scores a tile of the term
        ((2, 1, 1, 90), "bias", 2),
        ((1, 1, 1, 1), "bias", 2),
        ((1, 1), "alibi_slopes", 1),
        ((2, 1, 1, 90), "sinks", 1),
    ],
)
def test_plain_kernels_are_not_used(simt, request, rng, dtype, shape, wanted, expected):
    scaled = request.node.callspec.params["dtype"] == (75, "bfloat16")
    options = all_options(rng) | {"bias": np.zeros(shape, "f")}
    problem = Problem(rng, (2, 4, 70, 90, 40), dtype=dtype, **options)
    before = 4 if scaled else 2
    assert launches(simt, problem, [wanted]) == before + expected


@pytest.mark.parametrize("name", OPTION_GRADIENTS)
def test_gradients_wanted_alone_have_the_same_bits(rng, dtype, name):
    problem = Problem(rng, (2, 4, 70, 90, 40), dtype=dtype, **all_options(rng))
    everything = problem.backward()
    alone = option_gradients(problem, problem.forward(), wanted=[name])[name]
    np.testing.assert_array_equal(alone, getattr(everything, f"d{name}"))


@pytest.mark.parametrize("shape", [(2, 1, 1, 90), (1, 4, 70, 90), (1, 1, 1, 1)])
def test_any_order_of_threads_gives_the_same_bits(simt, rng, dtype, shape):
    options = all_options(rng) | {"bias": rng.standard_normal(shape).astype("f")}
    problem = Problem(
        rng,
        (2, 4, 70, 90, 72),
        kv_heads=2,
        dtype=dtype,
        dropout_p=0.2,
        seed=3,
        **options,
    )
    made, results = problem.forward(), []
    for order in range(3):
        simt.library.tfast_simt_seed(ctypes.c_uint64(order))
        found = option_gradients(problem, made)
        results.append([array.tobytes() for array in found.values()])
    simt.library.tfast_simt_seed(ctypes.c_uint64(0))
    assert results[1:] == results[:1] * 2
