"""The AdamW kernel on every backend, against tests/reference.py."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import trainfast
from tests import reference
from tests.arrays import DTYPES, EDGES, Framed, Slot, lists

HYPER = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)

# Half a unit in the last place of a value near 1, times what a few roundings may add.
TOLERANCE = {"float64": 1e-14, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


def step_both(slots, **options):
    """Steps the slots and returns, for each, what the reference makes of them."""
    positional, keywords = lists(slots)
    exact = []
    reference_options = {
        k: v for k, v in options.items() if k not in ("found_inf", "grad_scale")
    }
    if "grad_scale" in options:
        reference_options["grad_scale"] = float(options["grad_scale"])
    for slot in slots:
        top = None if slot.max_exp_avg_sq is None else slot.max_exp_avg_sq.get()
        at = options.get("step") or float(slot.step.get()) + 1
        exact.append(
            reference.adamw(
                slot.param.get(),
                slot.grad.get(),
                slot.exp_avg.get(),
                slot.exp_avg_sq.get(),
                top,
                **{**reference_options, "step": at},
            )
        )
    trainfast.numpy.adamw_step(*positional, **{**options, **keywords})
    return exact


def assert_close(framed, exact):
    name = next(n for n, d in DTYPES.items() if d == framed.dtype)
    np.testing.assert_allclose(
        framed.get(), exact, rtol=TOLERANCE[name], atol=TOLERANCE[name]
    )


def assert_slot(slot, exact):
    for framed, values in zip(
        (slot.param, slot.exp_avg, slot.exp_avg_sq, slot.max_exp_avg_sq),
        exact,
        strict=True,
    ):
        if framed is not None:
            assert_close(framed, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", EDGES)
def test_step_matches_the_reference(backend, device, rng, numel, dtype):
    slot = Slot(rng, (numel,), param=dtype, device=device)
    for step in range(1, 4):
        (exact,) = step_both([slot], step=step, **HYPER)
        assert_slot(slot, exact)


@pytest.mark.parametrize(
    "param, grad, state", list(itertools.product(DTYPES, DTYPES, DTYPES))
)
def test_any_mix_of_dtypes_matches_the_reference(
    backend, device, rng, param, grad, state
):
    slot = Slot(
        rng, (23, 19), param=param, grad=grad, state=state, amsgrad=True, device=device
    )
    (exact,) = step_both([slot], step=3, **HYPER)
    assert_slot(slot, exact)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5), (0.5, 0.0)])
def test_options_match_the_reference(
    backend, device, rng, amsgrad, maximize, decoupled, betas
):
    slots = [Slot(rng, (300,), amsgrad=amsgrad, device=device) for _ in range(2)]
    options = dict(
        HYPER, betas=betas, maximize=maximize, decoupled_weight_decay=decoupled
    )
    for exact, slot in zip(step_both(slots, step=7, **options), slots, strict=True):
        assert_slot(slot, exact)


@pytest.mark.parametrize("numel", [1, 33, 257, 5000])
def test_misaligned_arrays_give_the_same_bits(backend, device, numel):
    def after(offsets):
        slot = Slot(
            np.random.default_rng(5),
            (numel,),
            amsgrad=True,
            offsets=offsets,
            device=device,
        )
        positional, keywords = lists([slot])
        trainfast.numpy.adamw_step(*positional, step=2, **HYPER, **keywords)
        return slot.bits()

    want = after((0, 0, 0, 0, 0))
    for offsets in ((1, 1, 1, 1, 1), (0, 1, 2, 3, 5), (3, 0, 0, 0, 0), (8, 4, 4, 8, 8)):
        assert after(offsets) == want


@pytest.mark.parametrize("dtype", DTYPES)
def test_backends_agree_bit_for_bit(backend, device, dtype):
    def run(name, where):
        trainfast.use_backend(name)
        rng = np.random.default_rng(11)
        slots = [
            Slot(rng, (n,), param=dtype, amsgrad=True, device=where, step=4)
            for n in (1, 100, 3000)
        ]
        slots[1].grad.array[:3] = 0
        positional, keywords = lists(slots)
        for _ in range(3):
            trainfast.numpy.adamw_step(*positional, **HYPER, **keywords, maximize=True)
        return [s.bits() for s in slots]

    assert run(backend, device) == run("scalar", "cpu")


@pytest.mark.parametrize("decay", [0.0, 1e-9, 0.9])
@pytest.mark.parametrize(
    "param, grad, state, copy",
    [
        ("float32", "float32", "float32", "bfloat16"),
        ("float32", "bfloat16", "float32", "float16"),
        ("bfloat16", "bfloat16", "float32", "float32"),
        ("float64", "float32", "float64", "float16"),
    ],
)
def test_backends_agree_on_extras_bit_for_bit(
    backend, device, decay, param, grad, state, copy
):
    def run(name, where):
        trainfast.use_backend(name)
        rng = np.random.default_rng(12)
        slots = [
            Slot(rng, (n,), param=param, grad=grad, state=state, device=where)
            for n in (1, 100, 3001)
        ]
        emas, copies = (
            [Framed(rng.standard_normal(s.param.size), d, device=where) for s in slots]
            for d in ("float32", copy)
        )
        trainfast.numpy.adamw_step(
            *lists(slots)[0],
            step=3,
            **HYPER,
            emas=[a.array for a in emas],
            copies=[a.array for a in copies],
            ema_decay=decay,
            zero_grad=True,
        )
        return [s.bits() for s in slots], [a.bits() for a in emas + copies]

    assert run(backend, device) == run("scalar", "cpu")


def test_the_last_bits_of_every_half_are_right(backend, device):
    """A step of lr 0 rounds every half value to itself, and rounds ties to even."""
    if device == "cuda":
        pytest.skip("the same conversion runs in test_backends_agree_bit_for_bit")
    for dtype in (np.float16, ml_dtypes.bfloat16):
        every = np.arange(65536, dtype=np.uint16).view(dtype)
        param = every.copy()
        zeros = [np.zeros(65536, dtype) for _ in range(3)]
        trainfast.numpy.adamw_step(
            [param], [zeros[0]], [zeros[1]], [zeros[2]], step=1, lr=0.0, eps=1.0
        )
        numbers = ~np.isnan(every.astype(np.float32))
        assert (param[numbers].view(np.uint16) == every[numbers].view(np.uint16)).all()
        assert np.isnan(param[~numbers].astype(np.float32)).all()
        # rounding: exp_avg becomes float32(0.5 * g) with beta1 = 0.5
        grads = np.concatenate(
            [np.random.default_rng(0).standard_normal(5000).astype(np.float32)]
            + [
                np.float32(s) * (1 + np.arange(64, dtype=np.float32) / 65536)
                for s in (1, 6e-5, 1e-7, 3e4, 65504, 3e-40, 3.3e38)
            ]
        )
        m = np.zeros(grads.size, dtype)
        trainfast.numpy.adamw_step(
            [np.zeros_like(grads, dtype)], [grads], [m], [np.zeros_like(m)],
            step=1, lr=0.0, eps=1.0, betas=(0.5, 0.5),
        )  # fmt: skip
        with np.errstate(over="ignore"):
            want = (grads * np.float32(0.5)).astype(dtype)
        assert (m.view(np.uint16) == want.view(np.uint16)).all()


def test_halves_of_any_bits_on_every_backend(backend, device):
    """Neighbours may be NaN, infinite, subnormal and ties, in any order."""

    def run(name, where, dtype):
        trainfast.use_backend(name)
        rng = np.random.default_rng(13)
        bits = rng.integers(0, 1 << 16, (4, 200_011), np.uint16)
        bits[2, ::2] = bits[1, ::2]  # a state near its gradient: more ties
        arrays = [Framed(row.view(DTYPES[dtype]), dtype, device=where) for row in bits]
        trainfast.numpy.adamw_step(
            *([a.array] for a in arrays), step=3, lr=0.5, betas=(0.75, 0.75)
        )
        return np.array([a.get() for a in arrays])

    for dtype in ("float16", "bfloat16"):
        want = run("scalar", "cpu", dtype)
        assert 0.02 < np.isnan(want).mean() < 0.7
        np.testing.assert_array_equal(run(backend, device, dtype), want)


def test_a_nan_of_any_bits_stays_nan_in_halves(backend, device):
    """Rounding 0x7FFFFFFF as a number would make it -0."""
    scale = Framed(np.array([0x7FFFFFFF], np.uint32).view(np.float32), device=device)
    for dtype in ("float16", "bfloat16"):
        arrays = [Framed(np.ones(50), dtype, device=device) for _ in range(4)]
        lists = ([a.array] for a in arrays)
        trainfast.numpy.adamw_step(*lists, step=3, lr=0.5, grad_scale=scale.array)
        assert all(np.isnan(arrays[i].get()).all() for i in (0, 2, 3))


def test_step_arrays_are_advanced_and_used(backend, device, rng):
    slots = [Slot(rng, (40,), step=s, device=device) for s in (0, 6, 100_000)]
    for exact, slot in zip(step_both(slots, **HYPER), slots, strict=True):
        assert_slot(slot, exact)
    assert [float(s.step.get()) for s in slots] == [1, 7, 100_001]


@pytest.mark.parametrize("found", [1.0, 2.0, -1.0, np.inf, np.nan])
def test_found_inf_changes_nothing(backend, device, rng, found):
    slots = [Slot(rng, (40,), step=3, device=device, amsgrad=True) for _ in range(2)]
    before = [s.bits() for s in slots]
    positional, keywords = lists(slots)
    flag = Framed(np.array([found]), device=device)
    scale = Framed(np.array([4.0]), device=device)
    trainfast.numpy.adamw_step(
        *positional, **HYPER, **keywords, found_inf=flag.array, grad_scale=scale.array
    )
    assert [s.bits() for s in slots] == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("back", [False, True])
def test_grad_scale_divides_and_is_written_back_if_asked(
    backend, device, rng, dtype, back
):
    slot = Slot(rng, (500,), param=dtype, device=device, grad_factor=64.0)
    grad = slot.grad.get()
    scale = Framed(np.array([64.0]), device=device)
    flag = Framed(np.array([0.0]), device=device)
    positional, _ = lists([slot])
    top = slot.max_exp_avg_sq
    exact = reference.adamw(
        slot.param.get(), grad, slot.exp_avg.get(), slot.exp_avg_sq.get(), top,
        step=2, grad_scale=64.0, maximize=True, **HYPER,
    )  # fmt: skip
    trainfast.numpy.adamw_step(
        *positional,
        step=2,
        grad_scale=scale.array,
        found_inf=flag.array,
        maximize=True,
        write_back_grads=back,
        **HYPER,
    )
    assert_slot(slot, exact)
    np.testing.assert_array_equal(slot.grad.get(), grad / 64 if back else grad)


def test_lr_may_be_an_array(backend, device, rng):
    a, b = (Slot(np.random.default_rng(1), (99,), device=device) for _ in range(2))
    lr = np.float32(0.0125)
    on_device = Framed(np.array([lr]), device=device)
    trainfast.numpy.adamw_step(
        *lists([a])[0], step=2, **{**HYPER, "lr": on_device.array}
    )
    trainfast.numpy.adamw_step(*lists([b])[0], step=2, **{**HYPER, "lr": float(lr)})
    assert a.bits() == b.bits()


def test_nan_and_inf_in_gradients_propagate(backend, device, rng):
    slot = Slot(rng, (64,), device=device)
    slot.grad.array[3] = np.nan
    slot.grad.array[40] = np.inf
    positional, _ = lists([slot])
    trainfast.numpy.adamw_step(*positional, step=1, **HYPER)
    bad = {3, 40}
    assert set(np.flatnonzero(np.isnan(slot.param.get()))) == bad
    assert set(np.flatnonzero(~np.isfinite(slot.exp_avg.get()))) == bad


def test_amsgrad_keeps_nan(backend, device, rng):
    slot = Slot(rng, (40,), device=device, amsgrad=True)
    slot.grad.array[5] = np.nan
    positional, keywords = lists([slot])
    for step in (1, 2):
        trainfast.numpy.adamw_step(*positional, step=step, **HYPER, **keywords)
    assert set(np.flatnonzero(np.isnan(slot.max_exp_avg_sq.get()))) == {5}


def test_infinite_parameters_stay_without_weight_decay(backend, device, rng):
    slot = Slot(rng, (20,), device=device)
    slot.param.array[2] = np.inf
    positional, _ = lists([slot])
    options = {**HYPER, "weight_decay": 0.0, "decoupled_weight_decay": False}
    trainfast.numpy.adamw_step(*positional, step=1, **options)
    assert slot.param.get()[2] == np.inf


def test_many_slots_of_every_size_match_the_reference(backend, device, rng):
    sizes = [*EDGES, 70_001, 3, 0, 64]
    slots = [Slot(rng, (n,), step=i, device=device) for i, n in enumerate(sizes)]
    for exact, slot in zip(step_both(slots, **HYPER), slots, strict=True):
        assert_slot(slot, exact)


def test_nothing_to_do_is_fine(backend, device, rng):
    trainfast.numpy.adamw_step([], [], [], [], step=1, lr=0.1)
    slot = Slot(rng, (0, 3), device=device, step=2)
    positional, keywords = lists([slot])
    trainfast.numpy.adamw_step(*positional, **HYPER, **keywords)
    assert slot.step.get() == 3


def test_layouts_in_any_order_of_dimensions_work(backend, device, rng):
    if device == "cuda":
        pytest.skip("NumPy arrays; tests/torch/optim has the same for torch")
    values = rng.standard_normal((4, 5, 6)).astype(np.float32)
    grad = rng.standard_normal((4, 5, 6)).astype(np.float32)
    results = []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):

        def laid_out(a, order=order):
            return a.transpose(order).copy().transpose(np.argsort(order))

        param, g = laid_out(values), laid_out(grad)
        m, v = (laid_out(np.zeros_like(values)) for _ in range(2))
        trainfast.numpy.adamw_step([param], [g], [m], [v], step=1, **HYPER)
        results.append(np.ascontiguousarray(param))
        param = laid_out(values)
        m[...] = v[...] = 0
        trainfast.numpy.adamw_step([param], [grad], [m], [v], step=1, **HYPER)
        results.append(np.ascontiguousarray(param))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize("numel", [20_000, 1_000_003])
def test_any_number_of_threads_gives_the_same_bits(numel):
    torch = pytest.importorskip("torch")
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        rng = np.random.default_rng(3)
        slots = [Slot(rng, (n,), step=1) for n in (numel, 5, numel // 3)]
        positional, keywords = lists(slots)
        trainfast.numpy.adamw_step(*positional, **HYPER, **keywords)
        results.append([s.bits() for s in slots])
    torch.set_num_threads(before)
    assert all(r == results[0] for r in results)


class TestForNumPyUsers:
    def test_trains_float64_as_the_reference_does(self, backend, device, rng):
        if device == "cuda":
            pytest.skip("NumPy arrays")
        w, b = rng.standard_normal((7, 3)), np.zeros(3)
        exact = [[a.copy(), np.zeros_like(a), np.zeros_like(a)] for a in (w, b)]
        optimizer = trainfast.numpy.AdamW([w, b], lr=0.05, weight_decay=0.2)
        for step in range(1, 6):
            grads = [rng.standard_normal(a.shape) for a in (w, b)]
            optimizer.step(grads)
            for i, g in enumerate(grads):
                p, m, v = exact[i]
                exact[i] = reference.adamw(
                    p, g, m, v, step=step, lr=0.05, weight_decay=0.2
                )[:3]
        assert w.dtype == np.float64
        np.testing.assert_allclose(w, exact[0][0], rtol=1e-13)
        np.testing.assert_allclose(b, exact[1][0], rtol=1e-13)

    def test_state_dict_continues_where_it_was_taken(self, rng):
        w = rng.standard_normal(50)
        grads = [rng.standard_normal(50) for _ in range(4)]
        optimizer = trainfast.numpy.AdamW([w], lr=0.1, amsgrad=True)
        optimizer.step([grads[0]])
        state, there = optimizer.state_dict(), w.copy()
        for g in grads[1:]:
            optimizer.step([g])
        again = trainfast.numpy.AdamW([there], amsgrad=True)
        again.load_state_dict(state)
        for g in grads[1:]:
            again.step([g])
        np.testing.assert_array_equal(w, there)

    def test_torch_tensors_are_sent_to_the_torch_optimizer(self):
        torch = pytest.importorskip("torch")
        for tensor in (torch.zeros(3), torch.nn.Parameter(torch.zeros(3))):
            with pytest.raises(TypeError, match=r"trainfast\.AdamW"):
                trainfast.numpy.AdamW([tensor])

    def test_loading_what_does_not_fit_changes_nothing(self, rng):
        optimizer = trainfast.numpy.AdamW([rng.standard_normal(5)])
        optimizer.step([rng.standard_normal(5)])
        before = optimizer.state_dict()
        for name, value in [
            ("exp_avgs", [np.zeros(6)]),
            ("exp_avgs", [np.zeros(5, np.int32)]),
            ("exp_avg_sqs", []),
            ("max_exp_avg_sqs", [np.zeros(5)]),
        ]:
            with pytest.raises(ValueError, match=f"{name}.* must be"):
                optimizer.load_state_dict({**before, name: value})
        with pytest.raises(ValueError, match="keys"):
            optimizer.load_state_dict({})
        after = optimizer.state_dict()
        np.testing.assert_array_equal(after["exp_avgs"], before["exp_avgs"])

    def test_parameters_that_are_no_list_of_arrays_are_refused(self):
        with pytest.raises(TypeError, match="params must be arrays"):
            trainfast.numpy.AdamW([[1.0, 2.0]])
        with pytest.raises(TypeError, match="list of arrays"):
            trainfast.numpy.AdamW(np.zeros(3))
