"""The pass over gradients and the loss scale, bit by bit, on every backend."""

import math

import numpy as np
import pytest

from tests import reference
from tests.arrays import DTYPES, EDGES, Framed
from tests.pairwise import parametrize_pairs
from trainfast import _core

SIZES = [*EDGES, 63, 64, 65, 127, 128, 129, 1023, 8191, 8192, 8193, 50000]


def scalar(device, dtype="float32", value=-7.0):
    return Framed(np.array(value), dtype, device=device)


RESULTS = {
    "found_inf": "float32",
    "total_norm": "float32",
    "total_norm_f64": "float64",
    "clip_coef": "float64",
}


class Pass:
    """A call of amp_grads, and its results."""

    def __init__(self, device, grads, results=tuple(RESULTS), **options):
        self.device = device
        self.results = {n: scalar(device, RESULTS[n]) for n in results}
        for name in ("grad_scale", "factor"):
            if name in options:
                kind = "float32" if name == "grad_scale" else "float64"
                options[name] = scalar(device, kind, options[name]).array
        _core.amp_grads(
            [g.array for g in grads],
            _core.Workspace(),
            **{n: r.array for n, r in self.results.items()},
            **options,
        )

    def __getitem__(self, name):
        return float(self.results[name].get())


def framed(rng, sizes, dtype, device, offset=0, factor=1.0):
    return [
        Framed(rng.standard_normal(n) * factor, dtype, offset=offset, device=device)
        for n in sizes
    ]


def values(grads):
    return [g.inside(g.whole) for g in grads]


# ---- The norm ------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_squares_has_the_promised_bits(backend, device, rng, dtype, offset):
    grads = framed(rng, SIZES, dtype, device, offset)
    measured = Pass(device, grads)
    want = math.sqrt(reference.amp_sum(values(grads)))
    assert measured["total_norm_f64"] == want
    assert measured["total_norm"] == np.float32(want)
    assert measured["found_inf"] == 0


def test_float64_is_summed_up_in_float64(backend, device, rng):
    grads = framed(rng, SIZES, "float64", device)
    exact = math.sqrt(math.fsum(float(x) ** 2 for v in values(grads) for x in v))
    assert Pass(device, grads)["total_norm_f64"] == pytest.approx(exact, rel=1e-14)


def test_sum_over_many_chunks_of_every_dtype_has_the_promised_bits(
    backend, device, rng
):
    """More chunks than sums between them, of sizes that float64 cannot add exactly."""
    grads = []
    for i, n in enumerate(rng.integers(0, 400, 600)):
        factor = 10.0 ** rng.integers(-6, 5)
        grads += framed(rng, [n], list(DTYPES)[i % 4], device, factor=factor)
    squares, sizes = (reference.amp_sum(values(grads), k) for k in ("squares", "abs"))
    assert Pass(device, grads)["total_norm_f64"] == math.sqrt(squares)
    assert Pass(device, grads, norm_type=1)["total_norm_f64"] == sizes


def test_chunk_that_overflows_float32_has_the_promised_bits(backend, device, rng):
    for dtype in ("float32", "bfloat16"):
        grads = framed(rng, [100, 9000, 8192], dtype, device, factor=1e30)
        grads += framed(rng, [5000], dtype, device)
        measured = Pass(device, grads)
        assert measured["total_norm_f64"] == math.sqrt(reference.amp_sum(values(grads)))
        assert measured["found_inf"] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1, 2, 3, 0.5, -1, math.inf, -math.inf])
def test_any_norm_agrees_with_float64(backend, device, rng, dtype, p):
    grads = framed(rng, [1, 300, 8193], dtype, device)
    flat = np.concatenate(values(grads)).astype(np.float64)
    if p == math.inf:
        want = np.abs(flat).max()
    elif p == -math.inf:
        want = np.abs(flat).min()
    elif dtype in ("float16", "bfloat16") and (p < 0 and (flat == 0).any()):
        want = 0.0
    else:
        want = (np.abs(flat) ** p).sum() ** (1 / p)
    got = Pass(device, grads, norm_type=p)
    assert got["total_norm_f64"] == pytest.approx(want, rel=1e-6)


def test_one_norm_has_the_promised_bits(backend, device, rng):
    grads = framed(rng, SIZES, "float32", device)
    want = reference.amp_sum(values(grads), "abs")
    assert Pass(device, grads, norm_type=1)["total_norm_f64"] == want


def test_nothing_gives_norm_zero(backend, device):
    lists = [[Framed(np.zeros(0), device=device)]]
    if device == "cpu":  # a call without gradients belongs to the CPU
        lists.append([])
    for grads in lists:
        measured = Pass(device, grads, max_norm=1.0)
        assert [measured[n] for n in RESULTS] == [0, 0, 0, 1]


def test_squares_beyond_float32_still_have_a_norm(backend, device):
    grads = [Framed(np.full(100, 1e30), device=device)]
    measured = Pass(device, grads)
    assert measured["total_norm_f64"] == pytest.approx(1e31, rel=1e-6)
    assert measured["found_inf"] == 0


@parametrize_pairs(
    dtype=DTYPES,
    bad=[np.inf, -np.inf, np.nan],
    place=[0, 8191, 8192, 20000],
)
@pytest.mark.parametrize("p", [2, 1, 3, math.inf, -math.inf])  # each has its loop
def test_one_bad_element_is_found(backend, device, dtype, bad, place, p):
    values = np.ones(20001)
    values[place] = bad
    grads = [Framed(np.ones(5), dtype, device=device)]
    grads.append(Framed(values, dtype, device=device))
    measured = Pass(device, grads, norm_type=p)
    assert measured["found_inf"] == 1
    assert Pass(device, grads, ["found_inf"])["found_inf"] == 1
    if math.isnan(bad):
        assert math.isnan(measured["total_norm"])
    elif p == -math.inf:
        assert measured["total_norm"] == 1
    else:
        assert measured["total_norm"] == math.inf


def test_float16_overflow_is_found(backend, device):
    big = Framed(np.array([65504.0, 1.0]), "float16", device=device)
    assert Pass(device, [big])["found_inf"] == 0
    with np.errstate(over="ignore"):
        over = Framed(np.array([65520.0, 1.0]), "float16", device=device)
    assert Pass(device, [over])["found_inf"] == 1


@pytest.mark.parametrize("max_norm", [0.0, -1.0, 0.5, 5.0, 50.0, math.inf, math.nan])
def test_coefficient_is_torchs(backend, device, max_norm):
    torch = pytest.importorskip("torch")
    grads = [Framed(np.array([3.0, 4.0]), device=device)]
    for scale in (1.0, 4.0):
        got = Pass(
            device,
            grads,
            ["total_norm", "clip_coef"],
            max_norm=max_norm,
            grad_scale=scale,
        )
        total = torch.tensor(5.0 / scale)
        want = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        assert got["total_norm"] == float(total)
        np.testing.assert_equal(got["clip_coef"], float(want))


# ---- Rewriting -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_multiply_rounds_once(backend, device, rng, dtype, offset):
    grads = framed(rng, SIZES, dtype, device, offset)
    before = [v.copy() for v in values(grads)]
    wide = np.float64 if dtype == "float64" else np.float32
    measured = Pass(device, grads, rewrite="multiply", grad_scale=8.0, factor=0.3)
    for grad, old in zip(grads, before, strict=True):
        grad.get()
        want = (old.astype(wide) * wide(0.3 / 8.0)).astype(DTYPES[dtype])
        np.testing.assert_array_equal(grad.inside(grad.whole), want)
    assert measured["total_norm_f64"] == pytest.approx(
        math.sqrt(reference.amp_sum(before)) / 8.0, rel=1e-15
    )


def test_multiply_without_results_and_by_one(backend, device, rng):
    grads = framed(rng, [300], "float32", device)
    before = grads[0].bits()
    Pass(device, grads, [], rewrite="multiply", factor=1.0)
    assert grads[0].bits() == before
    Pass(device, grads, [], rewrite="multiply", factor=2.0)
    np.testing.assert_array_equal(
        grads[0].get(), 2 * np.frombuffer(before, np.float32).astype(np.float64)
    )


@pytest.mark.parametrize("bound", [0.5, 0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clamp_is_torchs(backend, device, rng, dtype, bound):
    torch = pytest.importorskip("torch")
    data = rng.standard_normal(1000)
    data[[0, 500, 999]] = [np.nan, np.inf, -np.inf]
    grad = Framed(data, dtype, device=device)
    old = torch.from_numpy(values([grad])[0].astype(np.float64))
    want = old.clamp(-bound, bound).numpy()
    Pass(device, [grad], [], rewrite="clamp", clip_value=bound)
    np.testing.assert_array_equal(grad.get(), want)


# ---- The loss scale ------------------------------------------------------------------


class Scale:
    """What amp_update changes."""

    def __init__(self, device, scale=8.0, growth=0, tracker=None, **options):
        self.device = device
        self.scale = scalar(device, "float32", scale)
        self.growth = self.counter(growth)
        self.hysteresis = None if tracker is None else self.counter(tracker)
        self.options = {
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2,
            **options,
        }

    def counter(self, value):
        return Framed(np.array(value), "int32", device=self.device)

    def __call__(self, *founds):
        flags = [scalar(self.device, "float32", f) for f in founds]
        extra = {}
        if self.hysteresis is not None:
            extra["hysteresis_tracker"] = self.hysteresis.array
        _core.amp_update(
            self.scale.array,
            self.growth.array,
            [f.array for f in flags],
            **self.options,
            **extra,
        )
        return float(self.scale.get()), int(self.growth.get())


def test_update_is_torchs_rule(backend, device):
    scale = Scale(device)
    assert scale(0.0) == (8.0, 1)
    assert scale(0.0) == (16.0, 0)
    assert scale(0.0) == (16.0, 1)
    assert scale(1.0) == (8.0, 0)
    assert scale(0.0, 0.0, 2.0) == (4.0, 0)
    assert scale(math.nan) == (2.0, 0)


def test_update_stops_at_bounds(backend, device):
    scale = Scale(device, min_scale=3.0, max_scale=20.0, growth_interval=1)
    assert [scale(0.0)[0] for _ in range(3)] == [16.0, 20.0, 20.0]
    assert [scale(1.0)[0] for _ in range(4)] == [10.0, 5.0, 3.0, 3.0]
    assert Scale(device, scale=2e38, growth_interval=1)(0.0)[0] == np.float32(2e38)


def test_update_waits_for_hysteresis(backend, device):
    scale = Scale(device, tracker=2, hysteresis=2, growth_interval=10)
    assert scale(0.0) == (8.0, 1)
    assert scale(1.0) == (8.0, 0)
    assert scale(1.0) == (4.0, 0)
    assert scale(1.0) == (2.0, 0)
    assert scale(0.0) == (2.0, 1)
    assert scale(1.0) == (2.0, 0)


# ---- Bad input -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"growth_factor": 1.0}, "growth_factor must be > 1, got 1"),
        ({"backoff_factor": 1.0}, r"backoff_factor must be in \(0, 1\), got 1"),
        ({"growth_interval": 0}, "growth_interval must be at least 1, got 0"),
        ({"hysteresis": 0}, "hysteresis must be at least 1, got 0"),
        ({"min_scale": -1.0}, "min_scale must be finite and >= 0, got -1"),
        ({"min_scale": 2.0, "max_scale": 1.0}, "max_scale must be > 0 and >= min"),
    ],
)
def test_bad_scale_options_are_refused(change, message):
    scale = Scale("cpu", **change)
    with pytest.raises(ValueError, match=message):
        scale(0.0)
    assert float(scale.scale.get()) == 8.0


def test_bad_calls_are_refused(rng):
    grads = framed(rng, [4], "float32", "cpu")
    before = grads[0].bits()
    for options, message in [
        ({"norm_type": 0.0}, "norm_type must not be 0 or NaN"),
        ({"norm_type": math.nan}, "norm_type must not be 0 or NaN"),
        ({"rewrite": "square"}, "rewrite must be 'read', 'multiply' or 'clamp'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Pass("cpu", grads, **options)
    with pytest.raises(ValueError, match="found_inf must hold one float32"):
        _core.amp_grads([], _core.Workspace(), found_inf=np.zeros(2, np.float32))
    same = grads[0].array
    message = r"grads\[1\] must not overlap grads\[0\]"
    with pytest.raises(_core.PlacementError, match=message):
        _core.amp_grads([same, same], _core.Workspace(), rewrite="multiply")
    same.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        _core.amp_grads([same], _core.Workspace(), rewrite="multiply")
    with pytest.raises(NotImplementedError, match=r"grads\[0\] must be dense"):
        _core.amp_grads([np.zeros(10)[::2]], _core.Workspace())
    with pytest.raises(ValueError, match="found_infs must hold 1 to 16"):
        Scale("cpu")()
    assert grads[0].bits() == before


def test_any_number_of_threads_gives_the_same_bits(backend, device, rng):
    torch = pytest.importorskip("torch")
    grads = framed(rng, [300_001, 5, 120_000], "float32", device)  # enough for three
    threads = torch.get_num_threads()
    try:
        norms = set()
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            norms.add(Pass(device, grads)["total_norm_f64"])
    finally:
        torch.set_num_threads(threads)
    assert norms == {math.sqrt(reference.amp_sum(values(grads)))}
