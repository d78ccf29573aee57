"""AdamW of cuda/ through the SIMT library: right against float64, and what a step asks
of the CUDA driver. The backend `simt` also runs every test that takes a backend; here
is what only the library itself can show."""

import ctypes

import numpy as np
import pytest

from tests.arrays import DTYPES
from tests.reference import adamw
from tests.simt_library import (
    ABI,
    BF16,
    F32,
    WARM,
    Capture,
    Extra,
    Step,
    Tensors,
    aligned,
)

SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 255, 256, 257, 5000, 70001]
MIXES = {
    "float32": ["float32"] * 3,
    "bfloat16": ["bfloat16"] * 3,
    "float16": ["float16"] * 3,
    "float64": ["float64"] * 3,
    "bfloat16 with float32 state": ["bfloat16", "bfloat16", "float32"],
    "float32 with bfloat16 state": ["float32", "float16", "bfloat16"],
    "float32 with float64 state": ["float32", "float32", "float64"],
}
ACCURATE_TO = {"float64": 1e-13, "float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
OPTIONS = {
    "AdamW": {},
    "Adam": {"decoupled_weight_decay": False},
    "maximize": {"maximize": True},
    "small beta1": {"beta1": 0.25},
}
OFFSETS = {
    "aligned": [0, 0, 0, 0, 0],
    "all skewed": [3, 3, 3, 3, 3],
    "skewed apart": [1, 0, 3, 2, 5],
}


def assert_step_is_exact(tensors, before, step, options):
    words = {"betas": (options.get("beta1", 0.9), 0.999), "weight_decay": 0.1}
    words |= {k: v for k, v in options.items() if k != "beta1"}
    top = before[4] if tensors.amsgrad else None
    right = adamw(*before[:4], top, step=step, lr=0.01, **words)
    after = [tensors.arrays[i] for i in (0, 2, 3, 4)]
    for got, exact in list(zip(after, right))[: 4 if tensors.amsgrad else 3]:
        limit = ACCURATE_TO[got.dtype.name]
        np.testing.assert_allclose(
            got.astype(np.float64), exact, rtol=limit, atol=limit / 10
        )


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mix", MIXES)
def test_adamw_on_the_runner_matches_float64(simt, rng, mix, options, offsets):
    chosen = OPTIONS[options]
    tensors = [
        Tensors(
            rng,
            numel,
            MIXES[mix],
            offsets=OFFSETS[offsets],
            amsgrad=i % 2 == 1,
            step=0 if i < 9 else 6,
        )
        for i, numel in enumerate(SIZES)
    ]
    step = Step(simt, tensors, **chosen)
    for done in range(2):
        before = [t.copies() for t in tensors]
        assert step() == 0, simt.failures
        for i, (t, arrays) in enumerate(zip(tensors, before)):
            number = (1 if i < 9 else 7) + done
            assert t.step == number
            assert_step_is_exact(t, arrays, number, chosen)
    step.clear()


@pytest.mark.parametrize("value", [1.0, 2.0, -1.0, np.nan, np.inf])
def test_any_found_inf_leaves_everything(simt, rng, value):
    tensors = [Tensors(rng, n, ["float32"] * 3, step=3) for n in (5, 5000)]
    before = [t.copies() for t in tensors]
    found_inf = np.array(value, np.float32)
    step = Step(simt, tensors, found_inf=found_inf)
    assert step() == 0
    for t, arrays in zip(tensors, before):
        assert t.step == 3
        assert all((a == b).all() for a, b in zip(t.arrays, arrays))
    found_inf[...] = 0
    assert step() == 0
    assert [float(t.step) for t in tensors] == [4, 4]
    step.clear()


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("mix", MIXES)
def test_extras_get_the_new_parameter_before_it_is_rounded(simt, rng, mix, offset):
    tensors = [Tensors(rng, n, MIXES[mix]) for n in SIZES]
    emas = [aligned(rng.standard_normal(n), DTYPES["float32"], offset) for n in SIZES]
    copies = [aligned(np.zeros(n), DTYPES["bfloat16"], offset) for n in SIZES]
    extras = [
        Extra(ema.ctypes.data, copy.ctypes.data, ema_dtype=F32, copy_dtype=BF16)
        for ema, copy in zip(emas, copies)
    ]
    step = Step(simt, tensors, extras=extras, ema_decay=0.75)
    before = [(t.copies(), ema.copy()) for t, ema in zip(tensors, emas)]
    assert step() == 0, simt.failures
    for t, (arrays, old), ema, copy in zip(tensors, before, emas, copies):
        assert_step_is_exact(t, arrays, 1, {})
        new = adamw(*arrays[:4], None, step=1, lr=0.01, weight_decay=0.1)[0]
        np.testing.assert_allclose(ema, old + 0.25 * (new - old), rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(copy.astype(float), new, rtol=8e-3, atol=1e-3)
    step.clear()


@pytest.mark.parametrize("found", [0, 1])
@pytest.mark.parametrize("mix", MIXES)
def test_zero_grad_zeroes_also_where_the_step_is_skipped(simt, rng, mix, found):
    tensors = [Tensors(rng, n, MIXES[mix], offsets=[1] * 5) for n in SIZES]
    before = [t.copies() for t in tensors]
    found_inf = np.array(found, np.float32)
    step = Step(simt, tensors, zero_grad=True, found_inf=found_inf)
    assert step() == 0
    for t, arrays in zip(tensors, before):
        assert (t.arrays[1] == 0).all()
        assert t.step == 1 - found
        for i in (0, 2, 3):
            assert not found or (t.arrays[i] == arrays[i]).all()
    step.clear()


def test_clip_coef_multiplies_what_is_written_back(simt, rng):
    tensors = [Tensors(rng, 5000, ["float32"] * 3)]
    grad = tensors[0].arrays[1].copy()
    scale, clip = np.array(4, np.float32), np.array(0.3)
    options = {"grad_scale": scale, "clip_coef": clip, "write_back_grads": True}
    step = Step(simt, tensors, **options)
    assert step() == 0
    assert (tensors[0].arrays[1] == grad * np.float32(0.3 / 4)).all()
    step.clear()


# ---- What a step asks of the driver --------------------------------------------------


def test_warm_step_is_one_launch_and_nothing_else(simt, rng):
    tensors = [Tensors(rng, n, ["float32"] * 3) for n in (5, 0, 5000)]
    step = Step(simt, tensors)
    simt.counts()
    assert step() == 0
    first = simt.counts()
    assert first["launches"] == 1 and first["copies"] == 1 and first["syncs"] == 0
    for _ in range(5):
        assert step() == 0
        assert simt.counts() == WARM
    step.clear()


def test_changed_pointer_costs_one_upload(simt, rng):
    tensors = [Tensors(rng, 300, ["float32"] * 3) for _ in range(3)]
    step = Step(simt, tensors)
    grads = [np.ones(300, np.float32) for _ in range(10)]
    for grad in grads[:4]:  # fills the ring of pinned buffers
        step.slots[1].grad = grad.ctypes.data
        assert step() == 0
    simt.counts()
    for grad in grads[4:]:
        step.slots[1].grad = grad.ctypes.data
        assert step() == 0
        assert simt.counts() == {**WARM, "copies": 1}
        assert step() == 0
        assert simt.counts() == WARM
    assert tensors[1].step == 16
    step.clear()


def test_step_without_workspace_leaves_nothing_allocated(simt, rng):
    tensors = [Tensors(rng, 300, ["float32"] * 3)]
    step = Step(simt, tensors)
    step.args.workspace = None
    before = tensors[0].copies()
    simt.counts()
    assert step() == 0
    assert simt.counts()["syncs"] > 0
    assert_step_is_exact(tensors[0], before, 1, {})


def test_list_that_grows_and_shrinks_stays_right(simt, rng):
    tensors = [Tensors(rng, 40 + i, ["float32"] * 3) for i in range(200)]
    step = Step(simt, tensors)
    for n in (1, 200, 3, 150, 200):
        step.args.n_slots = n
        before = [t.copies() for t in tensors]
        numbers = [int(t.step) + 1 for t in tensors]
        assert step() == 0
        for t, arrays, number in list(zip(tensors, before, numbers))[:n]:
            assert_step_is_exact(t, arrays, number, {})
        assert all((t.arrays[0] == b[0]).all() for t, b in zip(tensors[n:], before[n:]))
    step.clear()


@pytest.mark.parametrize("after", range(5))
def test_failed_allocation_is_reported_and_changes_nothing(simt, rng, after):
    tensors = [Tensors(rng, 300, ["float32"] * 3)]
    before = tensors[0].copies()
    step = Step(simt, tensors)
    simt.failures.clear()
    simt.library.tfast_simt_fail_allocations(after)
    status = step()
    simt.library.tfast_simt_fail_allocations(-1)
    if status == 0:  # the table and its pinned buffer are all it needs
        assert after >= 2
    else:
        assert simt.failures[0][0] == status == 6  # TFAST_ECUDA
        assert (tensors[0].arrays[0] == before[0]).all()
        assert tensors[0].step == 0
        assert step() == 0  # and can be repeated
    assert_step_is_exact(tensors[0], before, 1, {})
    step.clear()


def test_prepared_step_takes_no_memory_and_launches_once(simt, rng):
    tensors = [Tensors(rng, 300, ["float32"] * 3) for _ in range(2)]
    before = [t.copies() for t in tensors]
    step = Step(simt, tensors)
    simt.counts()
    assert simt.backend.adamw_prepare(ctypes.byref(step.args)) == 0
    counts = simt.counts()
    assert counts["allocations"] > 0 and counts["launches"] == counts["syncs"] == 0
    assert all((t.arrays[0] == b[0]).all() for t, b in zip(tensors, before))
    simt.library.tfast_simt_fail_allocations(0)
    assert step() == 0
    simt.library.tfast_simt_fail_allocations(-1)
    assert simt.counts() == {**WARM, "allocations": 0}
    for t, b in zip(tensors, before):
        assert_step_is_exact(t, b, 1, {})
    step.clear()


# ---- Captured steps ------------------------------------------------------------------


def test_captured_step_may_be_prepared(simt, rng):
    tensors = [Tensors(rng, 300, ["float32"] * 3)]
    step = Step(simt, tensors)
    with Capture(simt) as graph:
        assert simt.backend.adamw_prepare(ctypes.byref(step.args)) == 0
        simt.counts()
        assert step() == 0
    # Its graph copies the table once.
    assert simt.counts() == {**WARM, "copies": 1}
    for done in (1, 2):
        before = tensors[0].copies()
        graph.replay()
        assert_step_is_exact(tensors[0], before, done, {})
    step.clear()


@pytest.mark.parametrize("warm", [False, True])
def test_captured_step_replays_beside_eager_ones(simt, rng, warm):
    tensors = [Tensors(rng, n, ["float32"] * 3) for n in (300, 5000)]
    step = Step(simt, tensors)
    before = [t.copies() for t in tensors]
    done = 0
    if warm:
        done = 1
        assert step() == 0
        before = [t.copies() for t in tensors]
    with Capture(simt) as graph:
        assert step() == 0
    assert all((t.arrays[0] == b[0]).all() for t, b in zip(tensors, before))

    def one(run):
        nonlocal done
        done += 1
        arrays = [t.copies() for t in tensors]
        run()
        for t, b in zip(tensors, arrays):
            assert t.step == done
            assert_step_is_exact(t, b, done, {})

    one(graph.replay)
    one(graph.replay)
    one(step)  # the eager table, not the graph's
    # An eager step with other gradients must not reach into the graph.
    old = step.slots[0].grad
    other = np.full(300, np.nan, np.float32)
    step.slots[0].grad = other.ctypes.data
    param = tensors[0].arrays[0].copy()
    assert step() == 0
    done += 1
    assert np.isnan(tensors[0].arrays[0]).all()
    for array, clean in zip(tensors[0].arrays[2:4], (0, 1)):
        array[...] = clean
    tensors[0].arrays[0][...] = param
    one(graph.replay)
    step.slots[0].grad = old
    one(step)
    step.clear()


def test_capturing_again_takes_no_more_memory(simt, rng):
    tensors = [Tensors(rng, 300, ["float32"] * 3)]
    step = Step(simt, tensors)
    assert step() == 0
    with Capture(simt):
        assert step() == 0
    simt.counts()
    with Capture(simt) as graph:
        assert step() == 0
        assert step() == 0
    assert simt.counts() == {**WARM, "launches": 2, "copies": 2}
    graph.replay()
    assert tensors[0].step == 3
    step.clear()


def test_library_of_another_version_is_refused(simt):
    assert not simt.library.tfast_library_open(ABI + 1, simt.fail)
    assert not simt.library.tfast_library_open(ABI - 1, simt.fail)
    assert simt.backend.abi == ABI and simt.backend.name == b"simt"
    assert simt.backend.unusable() is None
