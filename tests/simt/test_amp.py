"""AMP of cuda/ through the SIMT library: bit by bit in the order of amp_sum.h, and what
a call asks of the CUDA driver. tests/simt/amp_harness.cpp compares more values."""

import ctypes

import numpy as np
import pytest

from tests.arrays import DTYPES
from tests.simt_library import (
    CLAMP,
    MULTIPLY,
    READ,
    RESULTS,
    WARM,
    AmpUpdateArgs,
    Capture,
    Pass,
    Step,
    Tensors,
    aligned,
)

CHUNK, LANES, SUMS = 8192, 128, 256
SIZES = [0, 1, 5, 127, 128, 129, 5000, 8192, 8193, 70001]


def halved(sums):
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return sums[0]


def one_norm(arrays):
    """The sum of |x| in the order of amp_sum.h: NumPy has no fma for squares."""
    chunks = []
    for array in arrays:
        real = np.float64 if array.dtype == np.float64 else np.float32
        for first in range(0, array.size, CHUNK):
            rows = np.zeros(CHUNK, real)
            part = np.abs(array[first : first + CHUNK].astype(real))
            rows[: part.size] = part
            lanes = np.zeros(LANES, real)
            for row in rows.reshape(-1, LANES):
                lanes = lanes + row
            chunks.append(float(halved(lanes)))
    sums = np.zeros(SUMS)
    for i, chunk in enumerate(chunks):
        sums[i % SUMS] += chunk
    return float(halved(sums))


def gradients(rng, dtypes, *, offset=0):
    return [
        aligned(rng.standard_normal(n), DTYPES[dtypes[i % len(dtypes)]], offset)
        for i, n in enumerate(SIZES)
    ]


def results():
    kinds = {"found_inf": np.float32, "total_norm": np.float32}
    return {name: np.full(1, 7, kinds.get(name, np.float64)) for name in RESULTS}


MIXES = {
    "float32": ["float32"],
    "halves": ["bfloat16", "float16", "float32"],
    "with float64": ["float64", "float32", "bfloat16"],
}


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("mix", MIXES)
def test_norm_is_that_of_the_written_order_and_right(simt, rng, mix, offset):
    arrays = gradients(rng, MIXES[mix], offset=offset)
    out = results()
    scale = np.array([4], np.float32)
    run = Pass(simt, arrays, **out, norm_type=1.0, max_norm=2.0, grad_scale=scale)
    assert run() == 0, simt.failures
    norm = one_norm(arrays) / 4
    assert out["total_norm_f64"] == norm and out["total_norm"] == np.float32(norm)
    assert out["found_inf"] == 0
    assert out["clip_coef"] == 1 / (norm + 1e-6) * 2.0
    every = np.concatenate([a.astype(np.float64) for a in arrays])
    for p in (2.0, 3.0, -1.0, np.inf, -np.inf):
        run.args.norm_type = p
        assert run() == 0
        exact = np.linalg.norm(every, p) / 4
        np.testing.assert_allclose(out["total_norm_f64"], exact, rtol=1e-5)
    run.clear()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, np.inf, -np.inf, 3.0])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_found_inf_says_what_was_read_and_is_set_back(simt, rng, value, norm_type):
    arrays = gradients(rng, MIXES["halves"])
    out = results()
    options = {"norm_type": norm_type, "rewrite": CLAMP, "clip_value": 0.5}
    with_norm = Pass(simt, arrays, **out, **options)
    alone = Pass(simt, arrays, found_inf=out["found_inf"], **options)
    for run in (with_norm, alone):
        arrays[-1][-1] = value
        assert run() == 0
        assert out["found_inf"] == 1
        arrays[-1][-1] = 0
        assert run() == 0
        assert out["found_inf"] == 0
        run.clear()


def test_squares_that_overflow_are_no_infinities(simt):
    array = np.full(9000, 1e30, np.float32)
    out = results()
    run = Pass(simt, [array], **out)
    assert run() == 0
    assert out["found_inf"] == 0
    exact = float(np.float32(1e30)) * np.sqrt(9000)
    np.testing.assert_allclose(out["total_norm_f64"], exact, rtol=1e-12)
    run.clear()


@pytest.mark.parametrize("wanted", [(), ("found_inf",), RESULTS])
@pytest.mark.parametrize("mix", MIXES)
def test_rewriting_is_exact(simt, rng, mix, wanted):
    arrays = gradients(rng, MIXES[mix], offset=1)
    before = [a.copy() for a in arrays]
    scale, factor = np.array([3], np.float32), np.array([0.7])
    out = {name: array for name, array in results().items() if name in wanted}
    run = Pass(simt, arrays, **out, grad_scale=scale, factor=factor, rewrite=MULTIPLY)
    assert run() == 0
    for array, old in zip(arrays, before):
        real = np.float64 if array.dtype == np.float64 else np.float32
        right = (old.astype(real) * real(0.7 / 3)).astype(array.dtype)
        assert array.tobytes() == right.tobytes()
    run.args.rewrite, run.args.clip_value = CLAMP, 0.125
    before = [a.copy() for a in arrays]
    assert run() == 0
    for array, old in zip(arrays, before):
        bound = old.dtype.type(0.125)
        right = np.clip(old, -bound, bound).astype(old.dtype)
        assert array.tobytes() == right.tobytes()
    run.clear()


def test_multiplying_by_one_writes_nothing(simt):
    # A signalling NaN: a product would make it a quiet one.
    array = np.full(5000, 0x7F800001, np.uint32).view(np.float32)
    run = Pass(simt, [array], rewrite=MULTIPLY)
    assert run() == 0
    assert (array.view(np.uint32) == 0x7F800001).all()
    run.clear()


@pytest.mark.parametrize("arrays", [[], [np.zeros(0, np.float32)]])
@pytest.mark.parametrize("norm_type", [2.0, -np.inf, -1.0])
def test_no_elements_have_norm_zero(simt, arrays, norm_type):
    out = results()
    run = Pass(simt, arrays, **out, norm_type=norm_type, max_norm=1.0)
    assert run() == 0
    assert [float(out[name][0]) for name in RESULTS] == [0, 0, 0, 1]
    run.clear()


# ---- What a call asks of the driver --------------------------------------------------


def test_warm_pass_is_one_launch_and_nothing_else(simt, rng):
    run = Pass(simt, gradients(rng, MIXES["halves"]), **results())
    simt.counts()
    assert run() == 0
    first = simt.counts()
    assert first["launches"] == 1 and first["copies"] == 1 and first["syncs"] == 0
    for p in (2.0, 1.0, np.inf):
        run.args.norm_type = p
        assert run() == 0
        assert simt.counts() == WARM
    run.clear()


def test_pass_that_is_asked_for_nothing_launches_nothing(simt, rng):
    run = Pass(simt, gradients(rng, MIXES["float32"]), rewrite=READ)
    simt.counts()
    assert run() == 0
    assert simt.counts() == {**WARM, "launches": 0}


def test_captured_pass_replays_with_another_scale(simt, rng):
    arrays = gradients(rng, MIXES["float32"])
    out, scale = results(), np.array([2], np.float32)
    run = Pass(simt, arrays, **out, grad_scale=scale, norm_type=1.0)
    assert run() == 0
    with Capture(simt) as graph:
        assert run() == 0
    for value in (4, 16):
        scale[...] = value
        arrays[6][0] += 1
        graph.replay()
        assert out["total_norm_f64"] == one_norm(arrays) / value
        assert run() == 0  # the eager table, not the graph's
        assert out["total_norm_f64"] == one_norm(arrays) / value
    run.clear()


def test_workspace_changes_hands_between_adamw_and_amp(simt, rng):
    tensors = [Tensors(rng, 300, ["float32"] * 3)]
    step = Step(simt, tensors)
    out = results()
    run = Pass(simt, [tensors[0].arrays[1]], workspace=step.workspace, **out)
    for done in range(3):
        assert step() == 0 and run() == 0
        assert tensors[0].step == done + 1
        exact = np.linalg.norm(tensors[0].arrays[1].astype(np.float64))
        np.testing.assert_allclose(out["total_norm_f64"], exact, rtol=1e-6)
    step.clear()


@pytest.mark.parametrize("after", range(4))
def test_failed_allocation_is_reported_and_changes_nothing(simt, rng, after):
    array = aligned(rng.standard_normal(300), DTYPES["float32"], 0)
    before = array.copy()
    half = np.array([0.5])
    run = Pass(simt, [array], factor=half, rewrite=MULTIPLY)
    simt.library.tfast_simt_fail_allocations(after)
    status = run()
    simt.library.tfast_simt_fail_allocations(-1)
    if status != 0:
        assert status == 6  # TFAST_ECUDA
        assert (array == before).all()
        assert run() == 0
    assert (array == before * np.float32(0.5)).all()
    run.clear()


# ---- The loss scale ------------------------------------------------------------------


def test_update_backs_off_and_grows(simt):
    scale, tracker = np.array([8], np.float32), np.array([0], np.int32)
    flags = [np.zeros(1, np.float32) for _ in range(2)]
    args = AmpUpdateArgs(
        scale=scale.ctypes.data,
        growth_tracker=tracker.ctypes.data,
        n_found_infs=2,
        growth_interval=2,
        hysteresis=1,
        growth_factor=2.0,
        backoff_factor=0.5,
        max_scale=np.inf,
        device_type=1,
    )
    args.found_infs[:2] = [flag.ctypes.data for flag in flags]
    simt.counts()
    seen = []
    for overflow in (0, 0, 1, 0, 0):
        flags[1][...] = overflow
        assert simt.backend.amp_update(ctypes.byref(args)) == 0
        seen.append((float(scale[0]), int(tracker[0])))
    assert seen == [(8, 1), (16, 0), (8, 0), (8, 1), (16, 0)]
    assert simt.counts() == {**WARM, "launches": 5}
