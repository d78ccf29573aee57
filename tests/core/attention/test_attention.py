"""Attention against the float64 reference: sizes, dtypes, options and their pairs."""

import itertools

import numpy as np
import pytest

import trainfast
from tests import reference_attention
from tests.arrays import DTYPES
from tests.attention_calls import Problem, on_device, to_float64
from tests.attention_options import FAST, GENERAL, option_values, options_of
from tests.pairwise import pairwise

SIZES = [1, 7, 15, 16, 17, 31, 33, 49, 96, 97, 127, 129, 200]
DIMS = [1, 5, 16, 40, 64, 72, 80, 96, 128, 192, 256]


def check(rng, device, *arguments, **options):
    """Forward and backward of one problem against the reference."""
    Problem(rng, *arguments, device=device, **options).check()


# ---- Sizes ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_every_size_agrees_with_the_reference(rng, device, n):
    for n_q, n_k in {(n, n), (n, 33), (17, n)}:
        for options in ({}, {"is_causal": True}):
            check(rng, device, (1, 2, n_q, n_k, 16), **options)


@pytest.mark.parametrize("dim", DIMS)
def test_every_head_dim_agrees_with_the_reference(rng, device, dim):
    check(rng, device, (1, 2, 21, 35, dim))
    for dim_v in {1, 24, 256} - {dim}:
        check(rng, device, (1, 1, 19, 18, dim), dim_v=dim_v, is_causal=True)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_grouped_heads_share_their_keys(rng, device, batch, heads, layout):
    for kv_heads in (1, heads // 2 or 1, heads):
        check(
            rng,
            device,
            (batch, heads, 18, 34, 8),
            kv_heads=kv_heads,
            layout=layout,
        )


# Shapes that other implementations once got wrong.
@pytest.mark.parametrize(
    "shape",
    [(2, 2, 49, 49, 32), (1, 3, 1, 1, 1), (4, 4, 16, 256, 24), (1, 1, 257, 3, 2)],
)
def test_regression_shapes_agree_with_the_reference(rng, device, shape):
    check(rng, device, shape)
    check(rng, device, shape, is_causal=True, causal_align="lower_right")


@pytest.mark.parametrize("bias", ["1111", "11qk", "1hqk", "b1qk", "bhqk", "1h1k", "qk"])
@pytest.mark.parametrize(
    "shape", [(0, 2, 3, 4), (2, 0, 3, 4), (0, 0, 3, 4), (2, 2, 0, 4), (20, 0, 3, 4)]
)
def test_without_a_row_the_output_is_empty_and_gradients_are_zero(
    rng, device, shape, bias
):
    sizes = dict(zip("bhqk", shape)) | {"1": 1}
    term = np.ones([sizes[d] for d in bias], "f")
    problem = Problem(rng, (*shape, 8), device=device, bias=term)
    out, lse = (to_float64(x) for x in problem.forward())
    assert out.shape == (*shape[:3], 8)
    assert lse.shape == shape[:3]
    for gradient in problem.backward():
        if gradient is not None:
            assert not to_float64(gradient).any()


def test_lengths_may_be_those_of_no_item(rng, device):
    problem = Problem(rng, (0, 2, 3, 4, 8), device=device, kv_lens=np.zeros(0, int))
    assert problem.forward()[0].shape == (0, 2, 3, 8)
    assert problem.backward().dk.shape == (0, 2, 4, 8)


def test_without_a_key_the_output_is_zero(rng, device):
    options = dict(bias=np.ones((1, 2, 3, 1), "f"), sinks=np.ones(2, "f"))
    problem = Problem(rng, (2, 2, 3, 0, 8), device=device, **options)
    out, lse = (to_float64(x) for x in problem.forward())
    assert out.shape == (2, 2, 3, 8)
    assert not out.any()
    assert np.isneginf(lse).all()
    gradients = problem.backward()
    assert to_float64(gradients.dk).shape == (2, 2, 0, 8)
    for gradient in gradients:
        if gradient is not None:
            assert not to_float64(gradient).any()


# ---- Dtypes --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_every_dtype_agrees_with_the_reference(rng, device, dtype, layout):
    for is_causal in (False, True):
        check(
            rng,
            device,
            (2, 4, 65, 49, 40),
            kv_heads=2,
            dim_v=24,
            dtype=dtype,
            layout=layout,
            is_causal=is_causal,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", DTYPES)
def test_mask_and_bias_may_have_any_float_dtype(rng, device, dtype, kind):
    term = rng.standard_normal((2, 1, 33, 49)).astype(DTYPES[kind])
    check(rng, device, dtype=dtype, mask=term, bias=term[:1, :, :, :1].copy())


ITEMS = 37
ENDS = np.cumsum([0] + [2 + i % 4 for i in range(ITEMS)])


@pytest.mark.parametrize("shape", ["hqk", "1qk", "hq1", "h1k", "qk"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"kv_lens": np.arange(ITEMS) % 18},
        {"kv_heads": 1, "dtype": "float64"},
        {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS},
        {"alibi_slopes": np.ones(2, "f"), "sinks": np.ones(2, "f")},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_bias_that_many_items_share(rng, device, shape, options):
    """Its gradient is summed for groups of items, then for all."""
    packed = "cu_seqlens_q" in options
    n_q, n_k = (5, 5) if packed else (13, 17)
    sizes = {"h": 2, "q": n_q, "k": n_k, "1": 1}
    bias = rng.standard_normal([sizes[d] for d in shape]).astype("f")
    rows = (ENDS[-1], ENDS[-1]) if packed else (n_q, n_k)
    batch = 1 if packed else ITEMS
    check(rng, device, (batch, 2, *rows, 8), bias=bias, **options)


# ---- Options, alone and in pairs -----------------------------------------------------


@pytest.mark.parametrize("case", pairwise(FAST) + pairwise(GENERAL))
def test_every_pair_of_options_agrees_with_the_reference(rng, device, case):
    check(rng, device, **options_of(case, rng))


def test_all_options_together_agree_with_the_reference(rng, device):
    values = option_values(rng)
    names = ("mask", "bias", "bottom_right", "window_size", "softcap", "item_alibi")
    names += ("sinks", "dropout", "kv_lens")
    options = {k: v for name in names for k, v in values[name].items()}
    check(rng, device, kv_heads=2, **options)


@pytest.mark.parametrize(
    "shape", list(itertools.product([1, 2], [1, 4], [1, 33], [1, 49]))
)
def test_terms_broadcast_over_any_dimension(rng, device, shape):
    bias = rng.standard_normal(shape).astype("f")
    check(rng, device, bias=bias, mask=rng.random(shape) < 0.8)


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
def test_terms_may_have_any_rank(rng, device, rank):
    bias = rng.standard_normal((2, 4, 33, 49)[4 - rank :]).astype("f")
    check(rng, device, bias=bias, mask=bias > -1)


def test_terms_may_have_any_strides(rng, device):
    big = rng.standard_normal((49, 66, 4, 2)).astype("f").transpose(3, 2, 1, 0)
    check(rng, device, bias=big[:, :, ::2], mask=big[:, ::-1, 33:, ::-1] > -0.5)
    expanded = np.broadcast_to(big[:1, :, :33], (2, 4, 33, 49))
    check(rng, device, bias=expanded)


# ---- Rows without a key --------------------------------------------------------------


def masked_rows(rng):
    mask = rng.random((2, 1, 33, 49)) < 0.7
    mask[:, :, [0, 5, 32]] = False
    mask[1, :, 16:20] = False
    return mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("additive", [False, True])
def test_rows_without_a_key_are_zero(rng, device, dtype, additive):
    mask = masked_rows(rng)
    empty = np.broadcast_to(~mask.any(-1), (2, 4, 33))
    if additive:
        mask = np.where(mask, 0, -np.inf).astype("f")
    wide = np.float64 if dtype == "float64" else np.float32
    sinks = np.array([0.5, -1, 2, 3], wide)
    for options in ({}, {"sinks": sinks}):
        problem = Problem(rng, dtype=dtype, device=device, mask=mask, **options)
        problem.check()
        out, lse = (to_float64(x) for x in problem.forward())
        assert not out[empty].any()
        assert np.isneginf(lse[empty]).all()
        assert not to_float64(problem.backward().dq)[empty].any()


def test_causal_rows_before_the_first_key_are_zero(rng, device):
    options = dict(is_causal=True, causal_align="lower_right", dim_v=3)
    problem = Problem(rng, (1, 2, 50, 20, 8), device=device, **options)
    problem.check()
    out = to_float64(problem.forward()[0])
    assert not out[:, :, :30].any()
    assert out[:, :, 30:].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_masked_keys_and_values_hold_does_not_leak(rng, device, dtype, bad):
    hidden = np.zeros(49, bool)
    hidden[[0, 7, 16, 48]] = True
    cases = [
        {"mask": ~hidden},
        {"mask": np.where(hidden, -np.inf, 0).astype("f")},
        {"mask": ~hidden, "dropout_p": 0.5, "seed": 1, "softcap": 2.0},
    ]
    for options in cases:
        problem = Problem(rng, dtype=dtype, device=device, **options)
        problem.k[:, :, hidden] = bad
        problem.v[:, :, hidden] = bad
        problem.check()
        assert np.isfinite(to_float64(problem.forward()[0])).all()
        for gradient in problem.backward()[:3]:
            assert np.isfinite(to_float64(gradient)).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"window_size": (4, 2)}])
def test_what_lies_past_the_diagonal_does_not_leak(rng, device, options, dtype):
    options = dict(options, dtype=dtype, device=device)
    problem = Problem(rng, (1, 2, 40, 60, 8), **options)
    for array in (problem.k, problem.v):
        array[:, :, 45:] = np.nan
    problem.check()
    problem = Problem(rng, (1, 2, 40, 60, 8), **options)
    problem.v[:, :, 30] = np.nan
    seen = np.isnan(to_float64(problem.forward()[0])).any((0, 1, 3))
    expected = np.isnan(problem.expected()[0]).any((0, 1, 3))
    np.testing.assert_array_equal(seen, expected)
    assert 0 < expected.sum() < 40


def test_keys_past_kv_lens_do_not_leak(rng, device):
    problem = Problem(rng, device=device, kv_lens=np.array([0, 21]))
    problem.k[1, :, 21:] = problem.v[1, :, 21:] = np.nan
    problem.k[0] = problem.v[0] = np.inf
    problem.check()


def test_a_query_without_a_key_may_be_nan(rng, device):
    mask = masked_rows(rng)
    problem = Problem(rng, device=device, mask=mask)
    problem.q[np.broadcast_to(~mask.any(-1), (2, 4, 33))] = np.nan
    problem.check()


@pytest.mark.parametrize("rows", [1, 200])
def test_a_nan_query_reaches_no_key_that_it_must_not_see(rng, device, rows):
    bias = np.zeros((1, 1, rows, 200), np.float32)
    window = {"window_size": (10, 0), "bias": bias, "device": device}
    problem = Problem(rng, (1, 1, 200, 200, 16), **window)
    problem.q[0, 0, 110] = np.nan
    found = problem.backward(dlse=False)
    for name in ("dk", "dv", "dbias"):
        grad = to_float64(getattr(found, name))
        keys = np.isnan(grad).any((0, 1, 2 if name == "dbias" else 3))
        assert np.flatnonzero(keys).tolist() == list(range(100, 111)), name


# ---- Numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-30, 3.0])
def test_any_finite_scale_agrees_with_the_reference(rng, device, scale):
    check(rng, device, scale=scale)
    check(rng, device, scale=scale, softcap=0.5, is_causal=True)


@pytest.mark.parametrize("order", [1, -1])
def test_scores_that_grow_along_the_keys_stay_exact(rng, device, order):
    bias = (np.linspace(-3e4, 3e4, 300)[::order]).astype("f")
    bias = bias.reshape(1, 1, 1, 300)
    problem = Problem(rng, (1, 2, 20, 300, 8), device=device, mask=bias)
    out, lse = (to_float64(x) for x in problem.forward())
    expected, expected_lse = problem.expected()
    np.testing.assert_allclose(out, expected, atol=2e-3)
    np.testing.assert_allclose(lse, expected_lse, rtol=3e-7)


def test_a_long_sum_keeps_its_precision(rng, device):
    """dV of a causal head adds up all later queries; one float32 chain loses digits."""
    problem = Problem(rng, (1, 1, 1500, 1500, 8), is_causal=True, device=device)
    problem.dout = abs(problem.dout)
    problem.check(factor=0.5, dlse=False)


def test_the_gradient_of_lse_counts(rng, device):
    problem = Problem(rng, device=device, sinks=rng.standard_normal(4).astype("f"))
    problem.check_backward(dlse=False)
    without = to_float64(problem.backward(dlse=False).dk)
    assert abs(to_float64(problem.backward().dk) - without).max() > 1e-3


@pytest.mark.parametrize("side", [200, 2**62, 2**63 - 1, 2**70])
def test_windows_past_every_key_are_none(rng, device, side):
    problem = Problem(rng, device=device, is_causal=True)
    expected = [to_float64(x) for x in problem.forward()]
    for window in ((side, None), (None, side), (side, side)):
        problem.options["window_size"] = window
        for mine, true in zip(problem.forward(), expected):
            np.testing.assert_array_equal(to_float64(mine), true)


# ---- Lengths -------------------------------------------------------------------------


def cumulated(lengths, dtype=np.int64):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)


VARIED = [([5, 0, 33, 1, 16], [7, 4, 40, 0, 16]), ([0, 0], [3, 0]), ([129], [70])]


@pytest.mark.parametrize("lengths_q, lengths_k", VARIED)
@pytest.mark.parametrize(
    "name", ["", "bottom_right", "window_size", "dropout", "sinks"]
)
def test_packed_items_agree_with_the_reference(rng, device, lengths_q, lengths_k, name):
    options = option_values(rng)[name] if name else {}
    problem = Problem(
        rng,
        (1, 4, sum(lengths_q), sum(lengths_k), 16),
        kv_heads=2,
        dim_v=8,
        device=device,
        cu_seqlens_q=cumulated(lengths_q),
        cu_seqlens_k=cumulated(lengths_k, np.int32),
        **options,
    )
    problem.check()


def test_packed_items_take_terms_and_lengths_of_their_own(rng, device):
    lengths_q, lengths_k = VARIED[0]
    problem = Problem(
        rng,
        (1, 4, sum(lengths_q), sum(lengths_k), 16),
        device=device,
        cu_seqlens_q=cumulated(lengths_q),
        cu_seqlens_k=cumulated(lengths_k),
        kv_lens=np.array([3, 4, 40, 0, 2]),
        mask=rng.random((5, 1, 33, 40)) < 0.8,
        bias=rng.standard_normal((1, 4, 33, 40)).astype("f"),
        alibi_slopes=rng.random((5, 4)).astype("f"),
        causal_align="lower_right",
    )
    problem.check()


def test_rows_past_the_last_packed_item_belong_to_none(rng, device):
    problem = Problem(
        rng,
        (1, 2, 20, 30, 8),
        device=device,
        cu_seqlens_q=cumulated([4, 9]),
        cu_seqlens_k=cumulated([10, 11]),
    )
    problem.check()
    out, lse = (to_float64(x) for x in problem.forward())
    assert not out[13:].any()
    assert np.isneginf(lse[:, 13:]).all()
    assert not to_float64(problem.backward().dv)[21:].any()


def test_packed_items_equal_separate_calls(rng, device):
    lengths = [31, 64, 2]
    at = cumulated(lengths)
    options = dict(is_causal=True, device=device)
    problem = Problem(
        rng, (1, 2, 97, 97, 16), cu_seqlens_q=at, cu_seqlens_k=at, **options
    )
    packed = to_float64(problem.forward()[0])
    for first, last in itertools.pairwise(at):
        q, k, v = (
            on_device(x[None, first:last].copy(), device)
            for x in (problem.q, problem.k, problem.v)
        )
        one = trainfast.numpy.attention(q, k, v, is_causal=True, layout="bshd")
        np.testing.assert_allclose(packed[first:last], to_float64(one)[0], atol=1e-6)


@pytest.mark.parametrize("n_q", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_queries_against_many_keys_agree_with_the_reference(
    rng, device, n_q, dtype
):
    bottom_right = {"causal_align": "lower_right"}
    sinks = np.ones(4, "f")
    for options in (
        {},
        {"is_causal": True, **bottom_right},
        {"window_size": (777, 0), "sinks": sinks, **bottom_right},
        {"kv_lens": np.array([1234]), "dropout_p": 0.1, "seed": 3},
        {"kv_lens": np.array([5])},
    ):
        Problem(
            rng,
            (1, 4, n_q, 2500, 32),
            kv_heads=2,
            dtype=dtype,
            device=device,
            **options,
        ).check()


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("dim", [8, 24, 32, 64, 128, 136, 256])
def test_one_query_agrees_at_every_width_of_rows(rng, device, dim, kv_heads):
    for options in ({}, {"kv_lens": np.array([1029])}):
        shape = (1, 2, 1, 1100, dim)
        Problem(rng, shape, kv_heads=kv_heads, device=device, **options).check()


def test_neighbouring_blocks_of_ragged_items_agree_with_the_reference(rng, device):
    at = cumulated([301, 0, 97, 192, 5])
    shape = (5, 2, 595, 595, 16)
    for options in ({"is_causal": True}, {"window_size": (50, 3)}):
        Problem(
            rng, shape, cu_seqlens_q=at, cu_seqlens_k=at, device=device, **options
        ).check()


def test_more_keys_than_32_bits_count_are_found(rng, device):
    if device == "cuda":
        pytest.skip("needs an array without memory")
    n_k = 2**32 + 5
    k, v = (rng.standard_normal((1, 1, 1, 8)).astype("f") for _ in range(2))
    k, v = (np.broadcast_to(x, (1, 1, n_k, 8)) for x in (k, v))
    q = rng.standard_normal((1, 1, 2, 8)).astype("f")
    options = dict(window_size=(3, 0), causal_align="lower_right", return_lse=True)
    out, lse = trainfast.numpy.attention(q, k, v, **options)
    np.testing.assert_allclose(out, np.broadcast_to(v[:, :, :2], out.shape), rtol=1e-6)
    few, few_lse = trainfast.numpy.attention(
        q, k[:, :, :9].copy(), v[:, :, :9].copy(), **options
    )
    np.testing.assert_array_equal(lse, few_lse)
    np.testing.assert_array_equal(out, few)


# ---- Dropout -------------------------------------------------------------------------


def test_philox_gives_its_published_words():
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    known = [
        ((0,) * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ones,) * 4, (ones, ones), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi, (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ]
    for counter, key, words in known:
        found = reference_attention.philox(counter, key)
        assert " ".join(f"{int(word):08x}" for word in found) == words


@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345])
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.999])
def test_dropout_drops_the_elements_that_philox_says(rng, device, seed, p):
    """With the identity for values the output is the probabilities."""
    options = dict(dropout_p=p, seed=seed, scale=0.0)
    problem = Problem(rng, (2, 3, 70, 200, 4), dim_v=200, device=device, **options)
    problem.v[:] = np.eye(200)
    out = to_float64(problem.forward()[0])
    kept = np.stack(
        [
            reference_attention.dropout_factors(p, seed, number, 70, 200)
            for number in range(6)
        ]
    ).reshape(2, 3, 70, 200)
    np.testing.assert_array_equal(out != 0, kept != 0)
    np.testing.assert_allclose(out, kept / 200, rtol=1e-5)


def test_the_seed_may_be_an_array(rng, device):
    by_number = Problem(rng, device=device, dropout_p=0.4, seed=-(2**40) - 3)
    expected = to_float64(by_number.forward()[0])
    by_number.options["seed"] = np.array([-(2**40) - 3])
    np.testing.assert_array_equal(to_float64(by_number.forward()[0]), expected)
    by_number.check()


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("hole", [False, True])
def test_padding_at_either_end_is_left_out(rng, device, hole, bottom_right):
    """A mask of keys alone, in batch items of other lengths each, one without a key."""
    allowed = np.zeros((4, 1, 1, 230), bool)
    for item, (begin, end) in zip(allowed, [(0, 230), (0, 131), (97, 200), (0, 0)]):
        item[..., begin:end] = True
        if hole:
            item[..., 120:125] = False
    align = "lower_right" if bottom_right else "upper_left"
    for options in ({}, {"is_causal": True, "causal_align": align}):
        problem = Problem(
            rng,
            (4, 2, 150, 230, 24),
            kv_heads=1,
            device=device,
            mask=allowed,
            **options,
        )
        hidden = ~allowed[:, 0, 0]
        for array in (problem.k, problem.v):
            array.swapaxes(1, 2)[hidden] = np.nan
        problem.check()
