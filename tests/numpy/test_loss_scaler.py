"""trainfast.numpy.LossScaler: its scale against torch's, order of calls, steps."""

import copy
import pickle

import numpy as np
import pytest

import trainfast
from tests.arrays import DTYPES

pytestmark = pytest.mark.usefixtures("backend")

HYPER = dict(lr=1e-2, weight_decay=0.1)


@pytest.fixture(autouse=True)
def host_only(device):
    if device == "cuda":
        pytest.skip("NumPy arrays")


def make(dtype="float32", **options):
    params = [np.ones(5, DTYPES[dtype]), np.ones((2, 3), DTYPES[dtype])]
    return trainfast.numpy.AdamW(params, **HYPER, **options)


def grads_of(optimizer, scale=1.0, bad=None):
    rng = np.random.default_rng(optimizer.step_count)
    grads = [
        (scale * rng.standard_normal(p.shape)).astype(p.dtype) for p in optimizer.params
    ]
    if bad is not None:
        grads[-1].flat[-1] = bad
    return grads


# ---- A step --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clip", [None, 0.25])
def test_a_scaled_step_is_the_unscaled_one(dtype, clip):
    scaler = trainfast.numpy.LossScaler(1024.0)
    optimizer, plain = make(dtype, max_grad_norm=clip), make(dtype, max_grad_norm=clip)
    for _ in range(3):
        grads = grads_of(optimizer, 1024.0)
        before = [g.tobytes() for g in grads]
        plain.step(grads_of(plain))
        assert scaler.step(optimizer, grads) is True
        assert [g.tobytes() for g in grads] == before
        scaler.update()
    # a power of 2 loses nothing
    for a, b in zip(optimizer.params, plain.params, strict=True):
        np.testing.assert_array_equal(a, b)
    if clip:
        assert optimizer.grad_norm == plain.grad_norm > clip


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_overflow_skips_the_step_and_halves_the_scale(bad, unscale, dtype):
    scaler, optimizer = trainfast.numpy.LossScaler(8.0), make(dtype, ema_decay=0.5)
    scaler.step(optimizer, grads_of(optimizer))
    scaler.update()
    before = [a.tobytes() for a in (*optimizer.params, *optimizer.emas)]
    grads = grads_of(optimizer, bad=bad)
    if unscale:
        assert scaler.unscale_(optimizer, grads) is False
    assert scaler.step(optimizer, grads) is False
    assert [a.tobytes() for a in (*optimizer.params, *optimizer.emas)] == before
    assert optimizer.step_count == 1
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_read_only_gradients_are_stepped_with_but_not_unscaled():
    scaler, optimizer = trainfast.numpy.LossScaler(8.0), make(max_grad_norm=1.0)
    grads = grads_of(optimizer)
    for grad in grads:
        grad.flags.writeable = False
    with pytest.raises(ValueError, match=r"grads\[0\] must be writable"):
        scaler.unscale_(optimizer, grads)
    assert scaler.step(optimizer, grads)
    scaler.update()


def test_unscaled_gradients_are_not_scaled_again():
    scaler, optimizer, plain = trainfast.numpy.LossScaler(64.0), make(), make()
    grads = grads_of(optimizer, 64.0)
    assert scaler.unscale_(optimizer, grads) is True
    np.testing.assert_array_equal(grads[0], grads_of(optimizer)[0])
    assert scaler.step(optimizer, grads)
    plain.step(grads_of(plain))
    np.testing.assert_array_equal(optimizer.params[0], plain.params[0])


@pytest.mark.parametrize("fused", [False, True])
def test_unscaled_gradients_may_become_other_arrays(fused):
    class Notes:
        def step(self, grads):
            self.seen = grads

    scaler, optimizer, plain = trainfast.numpy.LossScaler(64.0), make(), make()
    used = optimizer if fused else Notes()
    for _ in range(2):  # also after an update()
        grads = grads_of(optimizer, 64.0)
        assert scaler.unscale_(used, grads)
        clipped = [np.clip(g, -0.5, 0.5) for g in grads]
        assert scaler.step(used, clipped)
        scaler.update()
        plain.step([np.clip(g, -0.5, 0.5) for g in grads_of(plain)])
        if fused:
            np.testing.assert_array_equal(optimizer.params[0], plain.params[0])
        else:
            assert used.seen[0] is clipped[0] and used.seen[1] is clipped[1]


def test_an_overflow_that_unscaling_found_is_kept_though_clipping_hides_it():
    scaler, optimizer = trainfast.numpy.LossScaler(8.0), make()
    grads = grads_of(optimizer, bad=np.inf)
    assert scaler.unscale_(optimizer, grads) is False
    assert scaler.step(optimizer, [np.clip(g, -1, 1) for g in grads]) is False
    scaler.update()
    assert (optimizer.step_count, scaler.get_scale()) == (0, 4.0)


def test_gradients_with_gaps_are_unscaled_in_place():
    values = np.arange(12, dtype=np.float32)
    assert trainfast.numpy.LossScaler(2.0).unscale_(make(), [values[::2]])
    np.testing.assert_array_equal(values, [0, 1, 1, 3, 2, 5, 3, 7, 4, 9, 5, 11])


def test_another_optimizer_gets_unscaled_gradients_and_no_bad_ones():
    seen = []

    class Descent:
        def step(self, grads):
            seen.append([g.copy() for g in grads])

    scaler, other = trainfast.numpy.LossScaler(4.0), Descent()
    assert scaler.step(other, [np.float32([4, 8])])
    scaler.update()
    assert not scaler.step(other, [np.float32([4, np.nan])])
    scaler.update()
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0][0], [1, 2])
    assert scaler.get_scale() == 2.0


def test_one_overflow_among_two_optimizers_backs_off_once():
    scaler, one, two = trainfast.numpy.LossScaler(8.0), make(), make()
    assert scaler.step(one, grads_of(one))
    assert not scaler.step(two, grads_of(two, bad=np.inf))
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert (one.step_count, two.step_count) == (1, 0)


def test_a_refused_step_can_be_repeated():
    scaler, optimizer = trainfast.numpy.LossScaler(8.0), make()
    with pytest.raises(ValueError, match="grads must hold 2 arrays"):
        scaler.step(optimizer, grads_of(optimizer)[:1])
    with pytest.raises(AssertionError, match="prior to update"):
        scaler.update()
    assert scaler.step(optimizer, grads_of(optimizer))


def test_scale_multiplies_numbers_arrays_and_lists():
    scaler = trainfast.numpy.LossScaler(4.0)
    assert scaler.scale(1.5) == 6.0
    assert scaler.scale((1.0, [2.0])) == (4.0, [8.0])
    for dtype in DTYPES.values():
        scaled = scaler.scale(np.ones(3, dtype))
        assert scaled.dtype == max(
            dtype, np.dtype(np.float32), key=lambda d: d.itemsize
        )
        assert (scaled == 4).all()
    for name in ("float16", "bfloat16"):  # 65536 * 3 is infinite as a float16
        scaled = trainfast.numpy.LossScaler().scale(DTYPES[name].type(3))
        assert scaled == 3 * 65536 and scaled.dtype == np.float32


# ---- The order of calls --------------------------------------------------------------


class Descent:
    """Any other optimizer."""

    def __init__(self):
        self.params, self.step_count = [np.ones(5, np.float32)], 0

    def step(self, grads):
        self.step_count += 1


@pytest.mark.parametrize("maker", [make, Descent])
def test_calls_out_of_order_raise_as_torchs_do(maker):
    scaler, optimizer = trainfast.numpy.LossScaler(), maker()
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to"):
        scaler.update()
    grads = grads_of(optimizer)
    scaler.unscale_(optimizer, grads)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer, grads_of(optimizer))
    scaler.step(optimizer, grads)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer, grads)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step"):
        scaler.unscale_(optimizer, grads)
    assert optimizer.step_count == 1
    scaler.update()
    scaler.unscale_(optimizer, [])
    with pytest.raises(AssertionError, match="No inf checks were recorded for this"):
        scaler.step(optimizer, grads)  # they came after unscale_()
    with pytest.raises(AssertionError, match="No inf checks were recorded for this"):
        scaler.step(maker(), [])


CALLS = ["unscale", "unscale empty", "step", "step empty", "update", "other step"]


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_calls_ends_as_torchs_does(seed):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    theirs = torch.amp.GradScaler("cpu", 8.0, growth_interval=2)
    theirs.scale(torch.ones(()))
    mine = trainfast.numpy.LossScaler(8.0, growth_interval=2)
    param, other = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    descents = [torch.optim.SGD([p], lr=0.5) for p in (param, other)]

    class Same:
        def __init__(self):
            self.param = np.ones(4, np.float32)

        def step(self, grads):
            for grad in grads:
                self.param -= np.float32(0.5) * grad

    sames, outcomes = [Same(), Same()], []
    for _ in range(60):
        call = rng.choice(CALLS)
        which = int(call == "other step")
        grad = rng.integers(-8, 8, 4).astype(np.float32)
        if rng.random() < 0.25:
            grad[2] = np.inf
        empty = call.endswith("empty")
        tensor = None if empty else torch.from_numpy(grad.copy())
        held = descents[which].param_groups[0]["params"][0]
        held.grad, grads = tensor, [] if empty else [grad]
        for scaler, optimizer, arguments in (
            (theirs, descents[which], ()),
            (mine, sames[which], (grads,)),
        ):
            try:
                if call == "update":
                    scaler.update()
                elif "step" in call:
                    scaler.step(optimizer, *arguments)
                else:
                    scaler.unscale_(optimizer, *arguments)
                outcomes.append("fine")
            except (AssertionError, RuntimeError) as error:
                outcomes.append(type(error).__name__)
        assert outcomes[-1] == outcomes[-2], (call, outcomes)
        assert mine.get_scale() == theirs.get_scale()
        for same, descent in zip(sames, descents, strict=True):
            value = descent.param_groups[0]["params"][0].detach().numpy()
            np.testing.assert_array_equal(same.param, value)
    assert {"fine", "RuntimeError", "AssertionError"} == set(outcomes)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(init_scale=0.0), "init_scale must be"),
        (dict(init_scale=1e39), "init_scale must be"),
        (dict(init_scale=float("nan")), "init_scale must be"),
        (dict(growth_factor=1.0), "growth_factor must be > 1"),
        (dict(backoff_factor=1.0), "backoff_factor must be in"),
        (dict(growth_interval=0), "growth_interval must be at least 1"),
        (dict(min_scale=-1.0), "min_scale must be"),
        (dict(init_scale=2.0, min_scale=4.0), r"init_scale must be in \[4.0, inf\]"),
        (dict(init_scale=9.0, max_scale=8.0), r"init_scale must be in \[0.0, 8.0\]"),
        (dict(hysteresis=0), "hysteresis must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        trainfast.numpy.LossScaler(**options)
    with pytest.raises(ValueError, match="new_scale must be"):
        trainfast.numpy.LossScaler().update(float("inf"))


# ---- The scale -----------------------------------------------------------------------


def run(scaler, overflows):
    """The scales after iterations that overflow or do not."""
    optimizer, scales = make(), []
    for overflow in overflows:
        scaler.step(optimizer, grads_of(optimizer, bad=np.inf if overflow else None))
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_the_scale_follows_torchs():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    for _ in range(20):
        arguments = dict(
            init_scale=float(2.0 ** rng.integers(-3, 100)),
            growth_factor=float(rng.choice([1.5, 2.0, 1e9])),
            backoff_factor=float(rng.choice([0.5, 0.3])),
            growth_interval=int(rng.integers(1, 4)),
        )
        overflows = rng.random(30) < 0.3
        theirs = torch.amp.GradScaler("cpu", **arguments)
        param = torch.nn.Parameter(torch.ones(2))
        descent, scales = torch.optim.SGD([param], lr=0.0), []
        for overflow in overflows:
            theirs.scale(torch.ones(()))
            param.grad = torch.full((2,), float("inf") if overflow else 1.0)
            theirs.step(descent)
            theirs.update()
            scales.append(theirs.get_scale())
        mine = trainfast.numpy.LossScaler(**arguments)
        assert run(mine, overflows) == scales
        assert mine.state_dict() == theirs.state_dict()
        theirs.load_state_dict(mine.state_dict())
        again = trainfast.numpy.LossScaler()
        again.load_state_dict(theirs.state_dict())
        assert again.state_dict() == mine.state_dict()


def test_the_scale_stays_within_its_bounds():
    scaler = trainfast.numpy.LossScaler(
        4.0, growth_interval=1, min_scale=3.0, max_scale=10.0
    )
    assert run(scaler, [1, 1, 0, 0, 0]) == [3.0, 3.0, 6.0, 10.0, 10.0]


def test_hysteresis_waits_for_several_overflows():
    scaler = trainfast.numpy.LossScaler(8.0, growth_interval=100, hysteresis=3)
    assert run(scaler, [1, 1, 0, 1, 1, 1, 0, 1]) == [8, 8, 8, 8, 8, 4, 4, 4]
    state = scaler.state_dict()
    again = trainfast.numpy.LossScaler(hysteresis=3)
    again.load_state_dict(state)
    assert run(again, [1, 1]) == run(scaler, [1, 1]) == [4, 2]


def test_a_new_scale_is_taken_as_it_is():
    scaler = trainfast.numpy.LossScaler()
    scaler.update(3.0)
    assert scaler.get_scale() == 3.0


def test_a_saved_scale_beyond_the_bounds_is_taken_as_it_is():
    state = trainfast.numpy.LossScaler(2.0).state_dict()
    scaler = trainfast.numpy.LossScaler(8.0, min_scale=4.0, growth_interval=1)
    scaler.load_state_dict(state)
    assert scaler.get_scale() == 2.0
    assert run(scaler, [1]) == [2.0]  # nor moved by the bound, see csrc/tfast.h


def test_states_that_do_not_fit_change_nothing():
    scaler = trainfast.numpy.LossScaler(8.0)
    before = scaler.state_dict()
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        scaler.load_state_dict({})
    with pytest.raises(KeyError, match="_growth_tracker"):
        scaler.load_state_dict({k: v for k, v in before.items() if k[0] != "_"})
    with pytest.raises(ValueError, match="growth_factor"):
        scaler.load_state_dict({**before, "growth_factor": 0.5})
    assert scaler.state_dict() == before


def test_scale_that_has_backed_off_to_0_is_refused():
    scaler, param = trainfast.numpy.LossScaler(1e-45), np.ones(3, np.float32)
    optimizer, good = trainfast.numpy.AdamW([param]), np.ones(3, np.float32)
    scaler.step(optimizer, [np.full(3, np.inf, np.float32)])
    scaler.update()
    with pytest.raises(ValueError, match=r"the loss scale must be .* got 0"):
        scaler.step(optimizer, [good])
    with pytest.raises(ValueError, match=r"the loss scale must be .* got 0"):
        scaler.unscale_(optimizer, [good])
    assert (param == 1).all() and (good == 1).all()


def test_state_beyond_the_range_of_its_new_dtype_is_refused():
    first = trainfast.numpy.AdamW([np.ones(3, np.float32)])
    first.step([np.full(3, 1e4, np.float32)])
    small = trainfast.numpy.AdamW([np.ones(3, np.float32)], state_dtype="float16")
    with pytest.raises(ValueError, match=r"exp_avg_sqs\[0\] must fit into float16"):
        small.load_state_dict(first.state_dict())
    assert (small.exp_avgs[0] == 0).all() and small.step_count == 0


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda s: dumped(s)])
def test_a_copied_scaler_goes_on_by_itself(way):
    optimizer = trainfast.numpy.AdamW([np.ones(3, np.float32)])
    scaler = trainfast.numpy.LossScaler(8.0, growth_interval=2, hysteresis=2)
    scaler.step(optimizer, [np.ones(3, np.float32)])
    with pytest.raises(AssertionError, match="may only be copied at the beginning"):
        way(scaler)
    scaler.update()
    twin = way(scaler)
    assert twin.state_dict() == scaler.state_dict()
    twin.step(optimizer, [np.ones(3, np.float32)])
    twin.update()
    assert (twin.get_scale(), scaler.get_scale()) == (16.0, 8.0)


def dumped(scaler):
    return pickle.loads(pickle.dumps(scaler))


def test_a_scalers_state_of_numpys_numbers_is_loaded(tmp_path):
    scaler = trainfast.numpy.LossScaler(8.0, growth_interval=7)
    np.savez(tmp_path / "state.npz", **scaler.state_dict())
    again = trainfast.numpy.LossScaler()
    with np.load(tmp_path / "state.npz") as file:
        again.load_state_dict(dict(file))
    assert again.state_dict() == scaler.state_dict()
    assert type(again.growth_interval) is int
