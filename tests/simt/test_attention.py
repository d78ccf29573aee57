"""Attention of cuda/ through the SIMT library: what the core lets no caller on the CPU
do, and what a call asks of the CUDA driver. tests/core/attention runs it, too."""

import ctypes

import numpy as np
import pytest

import trainfast
from tests.arrays import DTYPES, Framed
from tests.attention_calls import Problem, to_float64
from tests.core.attention import test_fuzz
from tests.reference_attention import attention, attention_backward
from tests.simt_library import F32, AttentionArgs, AttentionRows, Capture


class Call:
    """Forward and backward on dense rows, [batch, heads, n, dim] or [total, heads,
    dim]; options that are arrays go by address."""

    def __init__(self, simt, rng, shape, **options):
        self.simt, self.options = simt, options
        self.frames = {}
        for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
            self.frames[name] = Framed(rng.standard_normal(shape[name[-1]]))
        rows = {name: self.rows(frame) for name, frame in self.frames.items()}
        self.frames["lse"] = Framed(np.zeros(shape["lse"]))
        self.args = AttentionArgs(
            **rows,
            lse=self.frames["lse"].array.ctypes.data,
            dtype=F32,
            device_type=1,
            dim=shape["q"][-1],
            dim_v=shape["v"][-1],
            scale=0.25,
            **{
                name: value.ctypes.data if isinstance(value, np.ndarray) else value
                for name, value in {
                    "window_left": -1,
                    "window_right": -1,
                    **options,
                }.items()
            },
        )

    @staticmethod
    def rows(frame):
        strides = [stride // 4 for stride in frame.array.strides]
        if len(strides) == 3:  # [total, heads, dim]
            return AttentionRows(frame.array.ctypes.data, 0, strides[1], strides[0])
        return AttentionRows(frame.array.ctypes.data, *strides[:3])

    def forward(self):
        self.take_scratch(backward=False)
        assert self.simt.backend.attention(ctypes.byref(self.args)) == 0

    def backward(self):
        self.take_scratch(backward=True)
        address = ctypes.addressof(self.args)
        assert self.simt.backend.attention_backward(address) == 0

    def take_scratch(self, backward):
        size, address = ctypes.c_int64(), ctypes.addressof(self.args)
        backend = self.simt.backend
        assert backend.attention_scratch(ctypes.byref(size), address, backward) == 0
        self.frames["scratch"] = Framed(np.zeros(-(-size.value // 4)))
        self.args.scratch = self.frames["scratch"].array.ctypes.data

    def get(self, name):
        """The values now; fails if anything outside the array has changed."""
        return self.frames[name].get()


def dense(simt, rng, batch=2, heads=2, n_q=70, n_k=90, dim=8, **options):
    q, k = (batch, heads, n_q, dim), (batch, heads, n_k, dim)
    shape = {"q": q, "t": q, "k": k, "v": k, "lse": q[:3]}
    sizes = dict(batch=batch, heads=heads, kv_heads=heads, n_q=n_q, n_k=n_k)
    sizes |= dict(lse_batch=heads * n_q, lse_head=n_q)
    return Call(simt, rng, shape, **sizes, **options)


def packed(simt, rng, at_q, at_k, heads=2, n_q=40, n_k=50, total=(100, 120), dim=8):
    q, k = (total[0], heads, dim), (total[1], heads, dim)
    shape = {"q": q, "t": q, "k": k, "v": k, "lse": (heads, total[0])}
    sizes = dict(batch=len(at_q) - 1, heads=heads, kv_heads=heads, n_q=n_q, n_k=n_k)
    sizes |= dict(total_q=total[0], total_k=total[1], lse_head=total[0])
    return Call(simt, rng, shape, cu_seqlens_q=at_q, cu_seqlens_k=at_k, **sizes)


def check(call, **options):
    """Against the reference, with these options."""
    given = [call.get(name) for name in ("dout", "q", "k", "v")]
    options["scale"] = call.args.scale
    out, lse = attention(*given[1:], **options)
    np.testing.assert_allclose(call.get("out"), out, atol=1e-5)
    np.testing.assert_allclose(call.get("lse"), lse, rtol=1e-5)
    gradients = attention_backward(*given, **options)
    for name in ("dq", "dk", "dv"):
        true = getattr(gradients, name)
        np.testing.assert_allclose(call.get(name), true, atol=1e-4)


# ---- Lengths that lie ----------------------------------------------------------------


def test_lengths_of_keys_are_clamped(simt, rng):
    call = dense(simt, rng, kv_lens=np.array([-(2**40), 2**62]))
    call.forward()
    call.backward()
    check(call, kv_lens=np.array([0, 90]))


def test_boundaries_past_the_rows_are_clamped(simt, rng):
    at_q, at_k = (np.array([0, 30, 70, 2**62]), np.array([0, 50, 90, 2**61]))
    call = packed(simt, rng, at_q, at_k)
    call.forward()
    call.backward()
    at_q[-1], at_k[-1] = 100, 120
    check(call, cu_seqlens_q=at_q, cu_seqlens_k=at_k)


@pytest.mark.parametrize(
    "at_q, at_k",
    [
        ([0, 30, 20, 2**62], [0, 50, -3, 2**61]),
        ([-(2**62), 10, 90, 200], [-1, -1, 2**63 - 1, 5]),
        ([2**63 - 1] * 4, [-(2**63)] * 4),
        ([0, 2**63 - 1, -(2**63), 100], [0, 120, 120, 2**62]),
    ],
)
def test_whatever_boundaries_say_nothing_outside_is_written(simt, rng, at_q, at_k):
    call = packed(simt, rng, np.array(at_q), np.array(at_k))
    call.forward()
    call.backward()
    for name in call.frames:
        call.get(name)


# ---- Instruction paths ---------------------------------------------------------------


@pytest.fixture
def backend_simt():
    trainfast.use_backend("simt")
    yield
    trainfast.use_backend(None)


@pytest.mark.usefixtures("simt", "backend_simt")
@pytest.mark.parametrize("ptx", [75, 80])
@pytest.mark.parametrize("seed", range(60))
def test_tensor_cores_agree_with_the_reference(monkeypatch, seed, ptx):
    monkeypatch.setenv("TRAINFAST_SIMT_PTX", str(ptx))
    dims = (*test_fuzz.DIMS, 72, 136, 160, 192, 200)
    rng = np.random.default_rng(seed)
    test_fuzz.check(test_fuzz.any_problem(rng, ["float16", "bfloat16"], dims))


@pytest.fixture
def cut_sums(simt):
    """Products are summed as by the coarsest of cards: see tests/simt/warp.cpp."""
    simt.library.tfast_simt_sums(4, 0)
    yield
    simt.library.tfast_simt_sums(0, 0)


@pytest.mark.usefixtures("backend_simt", "cut_sums")
@pytest.mark.parametrize("ptx", [75, 80])
@pytest.mark.parametrize("seed", range(100, 112))
def test_sums_cut_off_as_by_cards_are_near_enough(monkeypatch, seed, ptx):
    """What the tests ask for elsewhere, on a GPU too, has room for its sums."""
    monkeypatch.setenv("TRAINFAST_SIMT_PTX", str(ptx))
    rng = np.random.default_rng(seed)
    halves = ["float16", "bfloat16"]
    test_fuzz.check(test_fuzz.any_problem(rng, halves))


@pytest.mark.usefixtures("backend_simt")
def test_sums_cut_off_are_below_those_that_are_not(simt, cut_sums):
    k = (np.random.default_rng(0).random((1, 1, 64, 256)) + 0.5).astype("e")
    cut = trainfast.numpy.attention(k, k, k, return_lse=True)[1]
    simt.library.tfast_simt_sums(0, 0)
    whole = trainfast.numpy.attention(k, k, k, return_lse=True)[1]
    assert (whole * (1 - 1e-5) < cut).all() and (cut < whole).all()


@pytest.mark.usefixtures("backend_simt")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("ptx", [75, 80])
def test_any_order_of_threads_gives_the_same_bits(monkeypatch, simt, rng, dtype, ptx):
    monkeypatch.setenv("TRAINFAST_SIMT_PTX", str(ptx))
    bias = rng.standard_normal((1, 4, 70, 1)).astype("f")
    results = []
    for order in range(3):
        simt.library.tfast_simt_seed(ctypes.c_uint64(order))
        problem = Problem(
            np.random.default_rng(5),
            (2, 4, 70, 90, 40),
            kv_heads=2,
            dtype=dtype,
            bias=bias,
            dropout_p=0.1,
            seed=3,
        )
        made = [*problem.forward(), *problem.backward()[:4]]
        results.append([array.tobytes() for array in made])
    simt.library.tfast_simt_seed(ctypes.c_uint64(0))
    assert results[1:] == results[:1] * 2


@pytest.mark.usefixtures("simt", "backend_simt")
@pytest.mark.parametrize("wanted", [["q"], ["k"], ["v"], ["k", "v"]])
def test_gradients_wanted_alone_have_the_same_bits(rng, wanted):
    problem = Problem(rng, (1, 2, 70, 90, 40), dtype="float16", is_causal=True)
    everything = dict(zip("qkv", problem.backward()))
    arrays = (problem.dout, problem.q, problem.k, problem.v, *problem.forward())
    few = trainfast.numpy.attention_backward(
        *arrays, dlse=problem.dlse, wanted=wanted, **problem.options
    )
    for name, mine in zip("qkv", few):
        assert (mine is not None) == (name in wanted)
        if mine is not None:
            np.testing.assert_array_equal(mine, everything[name])


@pytest.mark.usefixtures("simt", "backend_simt")
@pytest.mark.parametrize("n_q", [32, 33])
def test_key_whose_scores_are_infinitely_low_has_no_gradient(rng, n_q):
    problem = Problem(rng, (1, 2, n_q, 64, 64), dtype="float16")
    problem.q[...] = abs(problem.q)
    problem.k[:, :, 5, 0] = -np.inf
    for gradient in problem.backward()[1:3]:
        assert (to_float64(gradient)[:, :, 5] == 0).all()


# ---- What a call asks of the driver --------------------------------------------------

QUIET = {"syncs": 0, "allocations": 0, "copies": 0}


def test_a_call_neither_allocates_nor_waits(simt, rng):
    call = dense(simt, rng)
    simt.counts()
    call.forward()
    assert simt.counts() == QUIET | {"launches": 1}
    call.backward()
    assert simt.counts() == QUIET | {"launches": 2}


def test_gradients_that_are_not_wanted_cost_no_launch(simt, rng):
    call = dense(simt, rng)
    call.forward()
    before = call.get("dq")
    call.args.dq.data = None
    call.args.dk.data = None
    simt.counts()
    call.backward()
    assert simt.counts()["launches"] == 1
    np.testing.assert_array_equal(call.get("dq"), before)


def test_a_captured_call_may_be_replayed(simt, rng):
    call = dense(simt, rng, is_causal=True)
    with Capture(simt) as capture:
        call.forward()
        call.backward()
    call.frames["q"].array[...] = rng.standard_normal((2, 2, 70, 8))
    capture.replay()
    check(call, is_causal=True)


# ---- bfloat16 by float16's tensor cores ----------------------------------------------


def scale_heads(problem, name, powers):
    """Multiplies each head of a tensor [batch, heads, n, dim] by a power of two."""
    array = getattr(problem, name)
    factors = np.exp2(np.array(powers, float))[:, None, None]
    array[...] = (array.astype(float) * factors).astype(array.dtype)


def far_apart(problem):
    scale_heads(problem, "q", [30, -30, 0, 100])
    scale_heads(problem, "k", [-30, 30, 0, -100])
    scale_heads(problem, "v", [-30, 30, 0, 100])


def outliers(problem):
    """2^20 above the rest; q's and k's meet nothing but small ones."""
    problem.v[0, 0, 5, 3] = 2.0**20
    problem.q[0, 1, 7, 3] = problem.k[0, 2, 9, 4] = 2.0**20
    problem.k[0, 1, :, 3] = problem.q[0, 2, :, 4] = 2.0**-20


def zeros(problem):
    for head, name in enumerate("qkv"):
        getattr(problem, name)[:, head] = 0


def denormals(problem):
    scale_heads(problem, "q", [-131, 120, 0, 0])
    scale_heads(problem, "k", [120, -131, 0, -131])
    scale_heads(problem, "v", [-126, -131, -133, 0])


def largest_of_all(problem):
    """That the sums of weighted values take without scaling, too."""
    scale_heads(problem, "v", [119, 118, 117, 110])
    scale_heads(problem, "q", [60, 0, 0, 0])
    scale_heads(problem, "k", [-60, 0, 0, 0])


def errors_by_head(monkeypatch, problem, ptx):
    """Of out, the largest in each column of each head; of lse, in each head."""
    monkeypatch.setenv("TRAINFAST_SIMT_PTX", str(ptx))
    found, true = problem.forward(), problem.expected()
    assert np.isfinite(found[0].astype(float)).all()
    out, lse = (abs(x.astype(float) - y) for x, y in zip(found, true))
    return out.max((0, 2)), (lse / (1 + abs(true[1]))).max((0, 2))


@pytest.mark.usefixtures("simt", "backend_simt")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "change", [None, far_apart, outliers, zeros, denormals, largest_of_all]
)
def test_bfloat16_as_float16_errs_no_more_than_bfloat16(monkeypatch, rng, change, bias):
    problem = Problem(rng, (1, 4, 70, 90, 40), dtype="bfloat16", is_causal=True)
    if bias:
        problem.options["bias"] = np.zeros((1, 1, 1, 1), "f")
    if change:
        change(problem)
    out, lse = errors_by_head(monkeypatch, problem, 75)
    bound, _ = errors_by_head(monkeypatch, problem, 80)
    assert (out <= 2 * bound).all()
    assert (lse <= 2e-6).all()


@pytest.mark.usefixtures("simt", "backend_simt")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dropout_p", [0, 0.5])
def test_only_finite_elements_set_the_power(monkeypatch, rng, bad, dropout_p):
    monkeypatch.setenv("TRAINFAST_SIMT_PTX", "75")
    problem = Problem(rng, (2, 2, 70, 70, 24), dtype="bfloat16", is_causal=True)
    problem.options |= {"dropout_p": dropout_p, "seed": 3}
    scale_heads(problem, "v", [40, -40])
    right = to_float64(problem.forward()[0])
    problem.v[:, :, 50, 7] = problem.k[:, :, 60, 2] = bad
    found = to_float64(problem.forward()[0])
    seen = np.zeros(found.shape, bool)
    seen[:, :, 50:, 7] = seen[:, :, 60:] = True
    noise = 2e-2 * abs(right).max((0, 2, 3), keepdims=True)
    assert (abs(found - right) <= noise)[~seen].all()
    if dropout_p == 0:
        assert not np.isfinite(found[:, :, 50:60, 7]).any()


@pytest.mark.usefixtures("simt", "backend_simt")
def test_keys_past_their_end_do_not_set_the_power(monkeypatch, rng):
    monkeypatch.setenv("TRAINFAST_SIMT_PTX", "75")
    problem = Problem(rng, (2, 2, 33, 70, 24), dtype="bfloat16")
    problem.options["kv_lens"] = np.array([20, 41])
    right = [x.tobytes() for x in problem.forward()]
    for item, n in enumerate((20, 41)):
        problem.k[item, :, n:] = problem.v[item, :, n:] = 2.0**126
    assert [x.tobytes() for x in problem.forward()] == right


@pytest.mark.usefixtures("backend_simt")
@pytest.mark.parametrize("ptx, launches", [(75, 2), (80, 1)])
def test_finding_powers_is_one_launch(monkeypatch, simt, rng, ptx, launches):
    monkeypatch.setenv("TRAINFAST_SIMT_PTX", str(ptx))
    problem = Problem(rng, (2, 4, 33, 49, 16), kv_heads=2, dtype="bfloat16")
    simt.counts()
    problem.forward()
    assert simt.counts() == QUIET | {"launches": launches}


# ---- bfloat16 by float16's tensor cores, backward ------------------------------------


def rounded(x):
    return x.astype(np.float32).astype(DTYPES["bfloat16"]).astype(np.float64)


def gradients_with_bfloat16(dout, q, k, v, scale):
    """(dq, dk, dv) of one head, whose out, weights and gradients of scores are rounded
    to bfloat16 as by a kernel that multiplies it."""
    s = scale * q @ k.T
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    delta = (dout * rounded(p @ v)).sum(-1, keepdims=True)
    ds = rounded(p * (dout @ v.T - delta))
    made = (scale * ds @ k, scale * ds.T @ q, rounded(p).T @ dout)
    return [rounded(x) for x in made]


# What each head's q, k, v and dout are multiplied by, as powers of two.
MAGNITUDES = {
    "as they are": [(0, 0, 0, 0)] * 3,
    "heads far apart": [(0, 0, 30, 30), (0, 0, -30, -30), (0, 0, 0, 60)],
    "q against k": [(60, -60, 0, 0), (-60, 60, 0, 0), (0, 0, 0, 0)],
    "dout against v": [(0, 0, -60, 60), (0, 0, 60, -60), (0, 0, 0, 0)],
    "tiny": [(0, 0, -40, -40), (0, 0, 0, -100), (-20, -20, -100, 40)],
}


@pytest.mark.usefixtures("simt", "backend_simt")
@pytest.mark.parametrize("dim", [40, 128, 256])
@pytest.mark.parametrize("name", MAGNITUDES)
def test_bfloat16_as_float16_is_as_exact(monkeypatch, rng, name, dim):
    monkeypatch.setenv("TRAINFAST_SIMT_PTX", "75")
    problem = Problem(rng, (1, 3, 40, 50, dim), dtype="bfloat16", is_causal=False)
    for array, powers in zip(["q", "k", "v", "dout"], zip(*MAGNITUDES[name])):
        by = 2.0 ** np.array(powers)[:, None, None]
        values = getattr(problem, array).astype(np.float64) * by
        setattr(problem, array, values.astype(np.float32).astype(DTYPES["bfloat16"]))
    found = problem.backward(dlse=False)[:3]
    true = problem.expected_gradients(dlse=False)[:3]
    heads = [getattr(problem, x)[0].astype(np.float64) for x in ("dout", *"qkv")]
    for h, head in enumerate(zip(*heads)):
        for mine, theirs, exact in zip(
            found, gradients_with_bfloat16(*head, problem.options["scale"]), true
        ):
            error = np.linalg.norm(np.float64(mine[0, h]) - exact[0, h])
            assert error <= 2 * np.linalg.norm(theirs - exact[0, h])


@pytest.mark.usefixtures("simt", "backend_simt")
@pytest.mark.parametrize("far", [0, 40])
def test_heads_of_a_group_may_be_far_apart_in_bfloat16(monkeypatch, rng, far):
    """dk and dv are sums over heads whose q and dout have other exponents: small q with
    large dout, and the other way round, count alike in dk."""
    monkeypatch.setenv("TRAINFAST_SIMT_PTX", "75")
    problem = Problem(rng, (2, 4, 40, 50, 64), kv_heads=2, dtype="bfloat16", scale=0.1)
    by = 2.0 ** (far * np.array([1, -1, -1, 0]))[:, None, None]
    bf16 = DTYPES["bfloat16"]
    problem.dout = (np.float64(problem.dout) * by).astype("f").astype(bf16)
    problem.q = (np.float64(problem.q) / np.maximum(by, 1)).astype("f").astype(bf16)
    found = problem.backward(dlse=False)[:3]
    for mine, true in zip(found, problem.expected_gradients(dlse=False)):
        error = np.linalg.norm(np.float64(mine) - true, axis=(2, 3))
        assert (error <= 0.01 * np.linalg.norm(true, axis=(2, 3))).all()
