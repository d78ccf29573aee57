"""Attention of few queries against many keys on CUDA, by the SIMT library: the keys are
split over blocks, heads that share them are rows of one tile."""

import ctypes
import itertools

import numpy as np
import pytest

from tests.arrays import Framed
from tests.attention_calls import Problem, to_float64
from tests.core.attention import test_fuzz
from tests.simt_library import NUMBERS, AttentionArgs, AttentionRows, Capture

LAUNCHES = 2  # the splits, and what combines them
LEAST_KEYS = 256  # with fewer the keys are not split


@pytest.fixture
def launches(simt, dtype, request):
    """How many launches a function's calls take, without those for exponents."""
    scaled = request.node.callspec.params["dtype"] == (75, "bfloat16")

    def count(function):
        simt.counts()
        function()
        return simt.counts()["launches"] - scaled

    return count


# ---- Against the reference -----------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n_q", [1, 2, 3, 5])
def test_few_queries_agree_with_the_reference(launches, rng, dtype, n_q, group):
    n_k = int(rng.integers(LEAST_KEYS, 700))
    shape = (1, 2 * group, n_q, n_k, 64)
    options = dict(is_causal=n_q > 1, causal_align="lower_right")
    problem = Problem(rng, shape, kv_heads=2, dtype=dtype, **options)
    assert launches(problem.check_forward) == LAUNCHES


@pytest.mark.parametrize(
    "dim, dim_v",
    [(dim, dim) for dim in (8, 40, 64, 80, 96, 100, 128, 136, 160, 192, 200, 248, 256)]
    + [(1, 128), (65, 64), (16, 129), (129, 16), (1, 193), (191, 130), (255, 1)],
)
def test_any_dim_is_right(launches, rng, dtype, dim, dim_v):
    problem = Problem(rng, (2, 4, 1, 300, dim), kv_heads=2, dim_v=dim_v, dtype=dtype)
    assert launches(problem.check_forward) == LAUNCHES


@pytest.mark.parametrize("dim", [192, 256])
@pytest.mark.parametrize("n_q, group, n_k", [(1, 1, 1000), (3, 7, 257), (2, 8, 4097)])
def test_warps_that_share_a_tile_agree(launches, rng, dtype, dim, n_q, group, n_k):
    shape = (1, 2 * group, n_q, n_k, dim)
    options = dict(is_causal=n_q > 1, causal_align="lower_right")
    problem = Problem(rng, shape, kv_heads=2, dtype=dtype, **options)
    assert launches(problem.check_forward) == LAUNCHES


@pytest.mark.parametrize("n_k", [256, 257, 383, 384, 511, 1000, 4095, 4096, 5000])
def test_any_number_of_keys_is_right(launches, rng, dtype, n_k):
    problem = Problem(rng, (1, 4, 1, n_k, 64), kv_heads=1, dtype=dtype)
    assert launches(problem.check_forward) == LAUNCHES


@pytest.mark.parametrize("dim", [32, 200])
@pytest.mark.parametrize(
    "lengths", [[0, 1, 15, 16], [17, 63, 64, 65], [300, 1, 0, 299]]
)
def test_lengths_on_the_device_bound_the_keys(launches, rng, dtype, lengths, dim):
    problem = Problem(
        rng,
        (4, 4, 2, 300, dim),
        kv_heads=2,
        dtype=dtype,
        kv_lens=np.array(lengths),
        is_causal=True,
        causal_align="lower_right",
    )
    assert launches(problem.check_forward) == LAUNCHES


@pytest.mark.parametrize(
    "n_q, group, dim",
    [(13, 1, 32), (20, 3, 32), (64, 1, 32), (13, 1, 192), (5, 3, 256)],
)
def test_dropped_elements_are_those_of_the_contract(
    launches, rng, dtype, n_q, group, dim
):
    shape, options = (1, 2 * group, n_q, 290, dim), dict(dropout_p=0.5, seed=-7)
    problem = Problem(rng, shape, kv_heads=2, dtype=dtype, **options)
    assert launches(problem.check_forward) == LAUNCHES


def any_few(rng, dtype):
    """Random options of a call whose keys are split."""
    kv_heads = int(rng.integers(1, 4))
    group = int(rng.integers(1, 9))
    n_q = int(rng.integers(1, 6))
    batch, n_k = int(rng.integers(1, 4)), int(rng.integers(LEAST_KEYS, 600))
    dims = (1, 16, 17, 40, 64, 80, 100, 128, 136, 192, 200, 256)
    packed = rng.random() < 0.25
    options = {"layout": ("bhsd", "bshd")[rng.integers(2)]}
    if packed:
        total_q, total_k = batch * n_q, batch * n_k
        at_q = test_fuzz.any_lengths(rng, batch, total_q)
        at_k = test_fuzz.any_lengths(rng, batch, total_k)
        options = {"cu_seqlens_q": at_q, "cu_seqlens_k": at_k}
        n_q, n_k = total_q, total_k
    longest = [int(np.diff(at).max()) for at in options.values()] if packed else None
    full = (batch, kv_heads * group, *(longest or (n_q, n_k)))
    options |= test_fuzz.any_options(rng, full, np.float32, packed)
    return Problem(
        rng,
        (batch, kv_heads * group, n_q, n_k, int(rng.choice(dims))),
        kv_heads=kv_heads,
        dim_v=int(rng.choice(dims)),
        dtype=dtype,
        **options,
    )


@pytest.mark.parametrize("seed", range(25))
def test_random_options_agree_with_the_reference(rng, dtype, seed):
    problem = any_few(np.random.default_rng(seed), dtype)
    problem.check_forward(factor=max(1.0, 20 * abs(problem.options["scale"])))


def test_most_random_options_are_calls_whose_keys_are_split(launches, dtype):
    problems = [any_few(np.random.default_rng(seed), dtype) for seed in range(25)]
    taken = [launches(problem.forward) == LAUNCHES for problem in problems]
    assert sum(taken) >= 15


# ---- Which calls ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, kv_heads, expected",
    [
        ((1, 2, 1, LEAST_KEYS, 16), 2, LAUNCHES),
        ((1, 2, 1, LEAST_KEYS - 1, 16), 2, 1),
        ((1, 8, 8, 256, 16), 1, LAUNCHES),  # 64 rows
        ((1, 5, 13, 256, 16), 1, 1),  # 65
        ((1, 2, 64, 256, 16), 2, LAUNCHES),
        ((2, 66, 16, 256, 16), 66, LAUNCHES),
        ((2, 66, 17, 256, 16), 66, 1),  # heads enough, two tiles of each
        ((2, 66, 16, 256, 16), 33, LAUNCHES),  # that two heads share
    ],
)
def test_keys_are_split_where_it_pays(launches, rng, dtype, shape, kv_heads, expected):
    problem = Problem(rng, shape, kv_heads=kv_heads, dtype=dtype)
    assert launches(problem.forward) == expected


def test_float32_is_left_to_the_plain_kernels(simt, dtype, rng):
    problem = Problem(rng, (1, 2, 1, 300, 16))
    simt.counts()
    problem.check_forward()
    assert simt.counts()["launches"] == 1


# ---- Numbers that are not finite -----------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n_q, dim", [(1, 48), (3, 48), (3, 168), (1, 256)])
def test_forbidden_keys_may_hold_anything(launches, rng, dtype, value, n_q, dim):
    allowed = rng.random((2, 1, n_q, 400)) < 0.5
    allowed[..., 100:300] = False
    allowed[0, 0, -1] = False  # a row without a key
    shape = (2, 4, n_q, 400, dim)
    problem = Problem(rng, shape, kv_heads=2, dtype=dtype, mask=allowed)
    problem.k[:, :, 100:200] = value
    problem.v[:, :, 200:300:7, ::5] = value
    assert launches(problem.check_forward) == LAUNCHES


@pytest.mark.parametrize("array", ["k", "v"])
@pytest.mark.parametrize("dim", [32, 192])
def test_nan_reaches_those_who_may_look(rng, dtype, array, dim):
    allowed = np.ones((1, 1, 2, 512), bool)
    allowed[0, 0, 1, 400] = False
    problem = Problem(rng, (1, 4, 2, 512, dim), kv_heads=2, dtype=dtype, mask=allowed)
    getattr(problem, array)[0, 1, 400, 3] = np.nan
    out = to_float64(problem.forward()[0])
    true = problem.expected()[0]
    np.testing.assert_array_equal(np.isnan(out), np.isnan(true))
    assert np.isnan(out).any() and not np.isnan(out).all()


@pytest.mark.parametrize("dim", [64, 256])
def test_scores_far_apart_between_splits_are_right(rng, dtype, dim):
    bias = np.zeros((1, 1, 1, 2000), np.float32)
    bias[..., 1500:1510], bias[..., :500] = 3e4, -3e4
    problem = Problem(rng, (1, 2, 1, 2000, dim), dtype=dtype, bias=bias)
    problem.check_forward(factor=10)


# ---- The same bits -------------------------------------------------------------------


@pytest.mark.parametrize("dim", [80, 256])
def test_any_order_of_threads_gives_the_same_bits(simt, dtype, dim):
    options = dict(dropout_p=0.2, seed=3, is_causal=True, causal_align="lower_right")
    results = []
    for order in range(3):
        simt.library.tfast_simt_seed(ctypes.c_uint64(order))
        rng = np.random.default_rng(5)
        problem = Problem(rng, (2, 8, 3, 700, dim), kv_heads=2, dtype=dtype, **options)
        results.append([array.tobytes() for array in problem.forward()])
    simt.library.tfast_simt_seed(ctypes.c_uint64(0))
    assert results[1:] == results[:1] * 2


# ---- What a call asks of the driver --------------------------------------------------


class Call:
    """A forward call by address, its scratch full of NaNs and framed."""

    def __init__(self, simt, problem):
        self.simt, self.problem = simt, problem
        arrays = {name: getattr(problem, name) for name in "qkv"}
        batch, heads, n_q, _ = arrays["q"].shape
        kv_heads, n_k, dim_v = arrays["v"].shape[1:]
        arrays["out"] = np.zeros((batch, heads, n_q, dim_v))
        self.frames = {k: Framed(v, problem.dtype) for k, v in arrays.items()}
        self.frames["lse"] = Framed(np.zeros((batch, heads, n_q)))
        self.args = AttentionArgs(
            **{name: self.rows(self.frames[name]) for name in arrays},
            lse=self.frames["lse"].array.ctypes.data,
            **dict(lse_batch=heads * n_q, lse_head=n_q, n_q=n_q, n_k=n_k),
            **dict(batch=batch, heads=heads, kv_heads=kv_heads),
            **dict(dim=arrays["q"].shape[3], dim_v=dim_v, device_type=1),
            **dict(window_left=-1, window_right=-1, dtype=NUMBERS[problem.dtype]),
            scale=problem.options["scale"],
        )
        size, address = ctypes.c_int64(), ctypes.addressof(self.args)
        assert simt.backend.attention_scratch(ctypes.byref(size), address, False) == 0
        self.frames["scratch"] = Framed(np.full(-(-size.value // 4), np.nan))
        self.args.scratch = self.frames["scratch"].array.ctypes.data

    @staticmethod
    def rows(frame):
        strides = [stride // frame.dtype.itemsize for stride in frame.array.strides]
        return AttentionRows(frame.array.ctypes.data, *strides[:3])

    def __call__(self):
        assert self.simt.backend.attention(ctypes.byref(self.args)) == 0

    def check(self):
        """That the arrays hold what they should, and nothing else has changed."""
        found = [self.frames[name].get() for name in self.frames]
        self.problem.forward = lambda: (found[3], found[4].astype(np.float32))
        self.problem.check_forward()


@pytest.mark.parametrize(
    "n_q, group, dim", list(itertools.product([1, 3], [1, 7], [9, 64, 250]))
)
def test_scratch_is_as_large_as_it_says(simt, launches, rng, dtype, n_q, group, dim):
    shape = (3, 2 * group, n_q, 513, dim)
    call = Call(simt, Problem(rng, shape, kv_heads=2, dtype=dtype))
    assert launches(call) == LAUNCHES
    call.check()


def test_a_call_neither_allocates_nor_waits(simt, dtype, rng):
    call = Call(simt, Problem(rng, (1, 4, 1, 600, 64), kv_heads=1, dtype=dtype))
    simt.counts()
    call()
    counts = simt.counts()
    assert counts.pop("launches") >= LAUNCHES
    assert not any(counts.values())


@pytest.mark.parametrize("dim", [64, 256])
def test_a_captured_call_may_be_replayed(simt, dtype, rng, dim):
    problem = Problem(rng, (1, 4, 1, 600, dim), kv_heads=2, dtype=dtype)
    call = Call(simt, problem)
    with Capture(simt) as capture:
        call()
    problem.q = problem.normal(problem.q.shape)
    call.frames["q"].array[...] = problem.q
    capture.replay()
    call.check()


def test_results_do_not_depend_on_what_scratch_held(simt, dtype, rng):
    call = Call(simt, Problem(rng, (2, 4, 2, 300, 40), kv_heads=2, dtype=dtype))
    results = []
    for value in (np.nan, np.inf, 0, 1):
        call.frames["scratch"].array[...] = value
        call()
        results.append([call.frames[name].bits() for name in ("out", "lse")])
    assert results[1:] == results[:1] * 3
