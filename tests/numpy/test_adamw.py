"""The options of trainfast.numpy.AdamW, alone and in pairs, and its checkpoints."""

import copy
import itertools
import math
import pickle
import warnings

import ml_dtypes
import numpy as np
import pytest

import trainfast
from tests import reference
from tests.arrays import DTYPES
from tests.pairwise import option_cases

pytestmark = pytest.mark.usefixtures("backend")

BF16 = np.dtype(ml_dtypes.bfloat16)
HYPER = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
SHAPES = [(7, 3), (300,), (), (65,)]
# By the coarsest dtype that takes part; relative to values near 1.
TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "float16": 4e-3, "bfloat16": 3e-2}
OPTIONS = {
    "max_grad_norm": 0.5,
    "ema_decay": 0.75,
    "weight_copy_dtype": BF16,
    "master_weights": True,
    "zero_grad": True,
    "write_back_grads": True,
    "state_dtype": np.float32,
    "amsgrad": True,
    "maximize": True,
}
CONTRADICTIONS = [
    {"master_weights", "weight_copy_dtype"},
    {"zero_grad", "write_back_grads"},
]


@pytest.fixture(autouse=True)
def host_only(device):
    if device == "cuda":
        pytest.skip("NumPy arrays")


def arrays(rng, dtype, factor=1.0):
    return [np.array(factor * rng.standard_normal(s), DTYPES[dtype]) for s in SHAPES]


def wide(array):
    return np.asarray(array).astype(np.float64)


class Exact:
    """The next step in float64, from what the optimizer holds before it.

    From there each time: the rounding of small half moments adds up over steps.
    """

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def read(self):
        own = self.optimizer
        self.params = [wide(p) for p in own.master_params or own.params]
        self.m, self.v, self.top, self.emas = (
            [wide(a) for a in arrays]
            for arrays in (
                own.exp_avgs,
                own.exp_avg_sqs,
                own.max_exp_avg_sqs or own.exp_avg_sqs,
                own.emas or own.params,
            )
        )

    def step(self, grads, options, grad_scale=1.0):
        self.read()
        self.steps += 1
        grads = [wide(g) for g in grads]
        self.norm = reference.norm(grads, grad_scale)
        coef = 1.0
        if options.get("max_grad_norm"):
            coef = reference.clip_coefficient(self.norm, options["max_grad_norm"])
        self.grads = [g * coef / grad_scale for g in grads]
        for i, grad in enumerate(grads):
            top = self.top[i] if options.get("amsgrad") else None
            self.params[i], self.m[i], self.v[i], self.top[i] = reference.adamw(
                self.params[i], grad, self.m[i], self.v[i], top,
                step=self.steps, grad_scale=grad_scale, clip_coef=coef,
                maximize=options.get("maximize", False), **HYPER,
            )  # fmt: skip
            decay = options.get("ema_decay", 0.0)
            self.emas[i] += (1 - decay) * (self.params[i] - self.emas[i])


def assert_all_close(got, exact, tolerance):
    for a, b in zip(got, exact, strict=True):
        np.testing.assert_allclose(wide(a), b, rtol=tolerance, atol=tolerance)


def check_against(optimizer, exact, grads, options, dtype):
    """Compares everything the optimizer wrote with the float64 reference."""
    own = TOLERANCE[dtype]
    # With masters and wide state only the parameters themselves are coarse.
    inner = own
    if options.get("master_weights") and options.get("state_dtype"):
        inner = max(TOLERANCE["float32"], TOLERANCE[dtype] if dtype == "float64" else 0)
    if options.get("state_dtype") and dtype == "float64":
        own = inner = TOLERANCE["float32"]
    assert_all_close(optimizer.params, exact.params, own)
    assert_all_close(optimizer.exp_avgs, exact.m, inner)
    assert_all_close(optimizer.exp_avg_sqs, exact.v, inner)
    if options.get("amsgrad"):
        assert_all_close(optimizer.max_exp_avg_sqs, exact.top, inner)
    if options.get("master_weights"):
        assert_all_close(optimizer.master_params, exact.params, inner)
    if options.get("ema_decay"):
        assert_all_close(optimizer.emas, exact.emas, own)
    if options.get("weight_copy_dtype"):
        assert {c.dtype for c in optimizer.weight_copies} == {BF16}
        assert_all_close(optimizer.weight_copies, exact.params, TOLERANCE["bfloat16"])
    if options.get("max_grad_norm"):
        assert optimizer.grad_norm == pytest.approx(exact.norm, rel=1e-5)
    else:
        assert optimizer.grad_norm is None
    if options.get("zero_grad"):
        assert all((g == 0).all() for g in grads)
    elif options.get("write_back_grads"):
        assert_all_close(grads, exact.grads, own)


# In full for each dtype, because each has loops of its own.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", option_cases(OPTIONS, CONTRADICTIONS), ids="+".join)
def test_every_pair_of_options_matches_the_reference(rng, options, dtype):
    optimizer = trainfast.numpy.AdamW(arrays(rng, dtype), **HYPER, **options)
    exact = Exact(optimizer)
    for _ in range(3):
        grads = arrays(rng, dtype, factor=8.0)
        before = [g.copy() for g in grads]
        exact.step(before, options, grad_scale=8.0)
        optimizer.step(grads, grad_scale=8.0)
        check_against(optimizer, exact, grads, options, dtype)
        if not {"zero_grad", "write_back_grads"} & set(options):
            for a, b in zip(grads, before, strict=True):
                assert a.tobytes() == b.tobytes()


def test_all_compatible_options_together_match_the_reference(rng):
    for leave_out in itertools.product(*CONTRADICTIONS):
        options = {n: v for n, v in OPTIONS.items() if n not in leave_out}
        optimizer = trainfast.numpy.AdamW(arrays(rng, "float32"), **HYPER, **options)
        exact = Exact(optimizer)
        for _ in range(2):
            grads = arrays(rng, "float32")
            exact.step(grads, options)
            optimizer.step(grads)
            check_against(optimizer, exact, grads, options, "float32")


@pytest.mark.parametrize("clip", [None, 0.5, float("inf")])
def test_parameters_and_gradients_of_several_dtypes(rng, clip):
    kinds = ["float32", "float16", "bfloat16", "float64"]
    params = [rng.standard_normal(40).astype(DTYPES[k]) for k in kinds]
    grads = [rng.standard_normal(40).astype(DTYPES[k]) for k in kinds[::-1]]
    options = dict(max_grad_norm=clip, master_weights=True, ema_decay=0.5)
    optimizer = trainfast.numpy.AdamW(
        params, **HYPER, **options, state_dtype=np.float32
    )
    assert [m.dtype.name for m in optimizer.master_params] == (
        ["float32"] * 3 + ["float64"]
    )
    assert [e.dtype.name for e in optimizer.emas] == ["float32"] * 3 + ["float64"]
    assert optimizer.master_params[0] is params[0]
    exact = Exact(optimizer)
    exact.step(grads, options)
    optimizer.step(grads)
    assert_all_close(optimizer.master_params, exact.params, 1e-5)
    assert_all_close(optimizer.emas, exact.emas, 1e-5)
    for param, master in zip(params, optimizer.master_params, strict=True):
        assert param.tobytes() == master.astype(param.dtype).tobytes()
    if clip is not None:
        assert optimizer.grad_norm == pytest.approx(exact.norm, rel=1e-6)


def test_masters_keep_what_half_parameters_would_lose():
    small = dict(lr=1e-5, weight_decay=0.0)
    params = [np.ones(8, BF16)]
    optimizer = trainfast.numpy.AdamW(params, **small, master_weights=True)
    plain = [np.ones(8, BF16)]
    rival = trainfast.numpy.AdamW(plain, **small)
    for _ in range(500):
        optimizer.step([np.ones(8, np.float32)])
        rival.step([np.ones(8, np.float32)])
    np.testing.assert_allclose(wide(params[0]), 0.995, atol=4e-3)
    assert (plain[0] == 1).all()


@pytest.mark.parametrize("found", [1.0, 2.0, True, np.nan, np.float32([1.0])])
@pytest.mark.parametrize("zero", [False, True])
def test_a_skipped_step_changes_nothing_but_zeroed_gradients(rng, found, zero):
    options = dict(ema_decay=0.9, max_grad_norm=1.0, zero_grad=zero)
    params = arrays(rng, "bfloat16")
    optimizer = trainfast.numpy.AdamW(params, **HYPER, **options, master_weights=True)
    optimizer.step(arrays(rng, "bfloat16"))
    before = everything(optimizer)
    grads = arrays(rng, "bfloat16")
    kept = [g.tobytes() for g in grads]
    optimizer.step(grads, grad_scale=4.0, found_inf=found)
    assert everything(optimizer) == before
    assert optimizer.step_count == 1
    if zero:
        assert all((g == 0).all() for g in grads)
    else:
        assert [g.tobytes() for g in grads] == kept


def everything(optimizer):
    state = optimizer.state_dict()
    columns = [optimizer.params, *(v for v in state.values() if isinstance(v, list))]
    return [a.tobytes() for column in columns for a in column]


def test_read_only_and_strided_gradients_are_clipped(rng):
    values = rng.standard_normal((6, 8))
    params = [[np.ones((3, 4))] for _ in range(2)]
    strided, plain = values[::2, ::2], values[::2, ::2].copy()
    strided.flags.writeable = plain.flags.writeable = False
    norms = []
    for param, grad in zip(params, (strided, plain), strict=True):
        optimizer = trainfast.numpy.AdamW(param, max_grad_norm=0.1)
        optimizer.step([grad])
        norms.append(optimizer.grad_norm)
    np.testing.assert_array_equal(params[0], params[1])
    assert norms[0] == norms[1] == pytest.approx(np.linalg.norm(plain))


def test_fortran_order_is_kept_by_all_state(rng):
    param = np.asfortranarray(rng.standard_normal((4, 5)).astype(BF16))
    optimizer = trainfast.numpy.AdamW([param], master_weights=True, ema_decay=0.5)
    optimizer.step([np.ones((4, 5), BF16)])
    for array in (optimizer.master_params[0], optimizer.emas[0], optimizer.exp_avgs[0]):
        assert array.strides == tuple(
            s * array.itemsize // param.itemsize for s in param.strides
        )


@pytest.mark.parametrize("later", [False, True])
def test_max_grad_norm_0_is_off(later):
    params = [[np.ones(3)] for _ in range(2)]
    for param, limit in zip(params, (None, 0), strict=True):
        optimizer = trainfast.numpy.AdamW(param, max_grad_norm=1.0 if later else limit)
        optimizer.max_grad_norm = limit
        optimizer.step([np.full(3, 1e-9)])
        assert optimizer.max_grad_norm == limit and optimizer.grad_norm is None
    np.testing.assert_array_equal(*params)


@pytest.mark.parametrize("option", [False, True])
def test_zero_grad_is_a_method_beside_the_option(option):
    """A loop written for torch calls it without arguments."""
    param, grad = np.ones(3), np.full(3, 2.0)
    optimizer = trainfast.numpy.AdamW([param], zero_grad=option)
    for twin in (optimizer, copy.deepcopy(optimizer)):
        grad[:] = 2.0
        twin.zero_grad()
        twin.step([grad])
        assert grad.tolist() == [0.0 if option else 2.0] * 3
        grad[:] = 2.0
        twin.zero_grad([grad])
        assert not grad.any()


# ---- Bad input -----------------------------------------------------------------------

BAD = [
    (dict(ema_decay=1.0), "ema_decay must be None or in"),
    (dict(ema_decay=-0.1), "ema_decay must be None or in"),
    (dict(ema_decay=float("nan")), "ema_decay must be None or in"),
    (dict(max_grad_norm=-1.0), "max_grad_norm must be None or >= 0, got -1.0; None"),
    (dict(max_grad_norm=float("nan")), "max_grad_norm must be None or >= 0, got nan"),
    (dict(weight_copy_dtype=np.int32), "weight_copy_dtype must be None or one of"),
    (dict(state_dtype="float8"), "state_dtype must be None or one of"),
    (dict(zero_grad=True, write_back_grads=True), "zero_grad and write_back_grads"),
    (
        dict(master_weights=True, weight_copy_dtype="bfloat16"),
        "master_weights and weight_copy_dtype",
    ),
]


@pytest.mark.parametrize("options, message", BAD)
def test_bad_options_are_refused_when_made(options, message):
    with pytest.raises(ValueError, match=message):
        trainfast.numpy.AdamW([np.zeros(3, np.float32)], **options)


def test_bad_gradients_change_nothing(rng):
    options = dict(max_grad_norm=1.0, ema_decay=0.5, zero_grad=True)
    optimizer = trainfast.numpy.AdamW(arrays(rng, "float32"), **options)
    optimizer.step(arrays(rng, "float32"))
    before, norm = everything(optimizer), optimizer.grad_norm
    good = arrays(rng, "float32")
    read_only = [g.copy() for g in good]
    read_only[1].flags.writeable = False
    strided = [*good[:1], np.ones(600, np.float32)[::2], *good[2:]]
    strided[1].flags.writeable = False
    for grads, error in [
        (good[:2], ValueError),
        ([*good[:3], np.ones(66, np.float32)], ValueError),
        ([*good[:3], "text"], TypeError),
        ([*good[:3], None], TypeError),
        (read_only, ValueError),
        (strided, ValueError),
    ]:
        with pytest.raises(error):
            optimizer.step(grads)
        assert everything(optimizer) == before
        assert (optimizer.step_count, optimizer.grad_norm) == (1, norm)


@pytest.mark.parametrize("name", ["emas", "copies"])
def test_extra_lists_are_checked(name):
    def step(extra):
        four = [[np.ones(4, np.float32)] for _ in range(4)]
        trainfast.numpy.adamw_step(
            *four, step=1, lr=0.1, **{name: extra}, ema_decay=0.5
        )

    step([np.ones(4, np.float16)])
    step([None])
    with pytest.raises(ValueError, match=f"{name} must hold 1 arrays"):
        step([])
    with pytest.raises(ValueError, match=rf"{name}\[0\] must have shape \(4,\)"):
        step([np.ones(5, np.float32)])
    with pytest.raises(ValueError, match=rf"{name}\[0\] must have the strides"):
        step([np.ones(8, np.float32)[::2]])
    with pytest.raises(NotImplementedError, match=rf"{name}\[0\] must be float64"):
        step([np.ones(4, np.int32)])


@pytest.mark.parametrize(
    "scale", [0, 0.0, -1.0, math.inf, math.nan, 1e39, np.float16(0)]
)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_numbers_that_are_no_scale_are_refused(scale, clip):
    optimizer = trainfast.numpy.AdamW([np.ones(3, np.float32)], max_grad_norm=clip)
    before = everything(optimizer)
    with pytest.raises(ValueError, match="grad_scale must be a float32 > 0 and finite"):
        optimizer.step([np.ones(3, np.float32)], grad_scale=scale)
    assert everything(optimizer) == before and optimizer.step_count == 0


def test_scalars_of_another_kind_are_refused(rng):
    optimizer = trainfast.numpy.AdamW([np.ones(3, np.float32)])
    for name in ("grad_scale", "found_inf"):
        with pytest.raises(ValueError, match=f"{name} must hold one float32"):
            optimizer.step([np.ones(3, np.float32)], **{name: np.ones(2, np.float32)})
    assert optimizer.step_count == 0


# ---- Checkpoints ---------------------------------------------------------------------

LAYOUTS = [
    {},
    dict(ema_decay=0.5),
    dict(master_weights=True),
    dict(weight_copy_dtype=np.float16),
    dict(state_dtype=np.float32, master_weights=True, ema_decay=0.5),
    dict(amsgrad=True, max_grad_norm=1.0, state_dtype=BF16),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", LAYOUTS)
def test_every_layout_round_trips_and_continues_bit_for_bit(rng, options, dtype):
    optimizer = trainfast.numpy.AdamW(arrays(rng, dtype), **HYPER, **options)
    for _ in range(2):
        optimizer.step(arrays(rng, dtype))
    state = optimizer.state_dict()
    params = [p.copy() for p in optimizer.params]
    again = trainfast.numpy.AdamW(
        params, **{**options, "amsgrad": "amsgrad" in options}
    )
    again.load_state_dict(state)
    assert everything(again) == everything(optimizer)
    for _ in range(2):
        grads = arrays(rng, dtype)
        optimizer.step(grads)
        again.step(grads)
    assert everything(again) == everything(optimizer)
    kinds = {k: [a.dtype for a in v] for k, v in state.items() if isinstance(v, list)}
    now = again.state_dict()
    assert kinds == {
        k: [a.dtype for a in v] for k, v in now.items() if isinstance(v, list)
    }


@pytest.mark.parametrize("saved, wanted", list(itertools.permutations(LAYOUTS[:5], 2)))
def test_a_state_of_another_layout_is_converted(rng, saved, wanted):
    old = trainfast.numpy.AdamW(arrays(rng, "bfloat16"), **HYPER, **saved)
    old.step(arrays(rng, "bfloat16"))
    params = [p.copy() for p in old.params]
    new = trainfast.numpy.AdamW([np.zeros_like(p) for p in params], **HYPER, **wanted)
    for mine, value in zip(new.params, params, strict=True):
        mine[...] = value
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        new.load_state_dict(old.state_dict())
    lost = {"emas": "ema_decay", "master_params": "master_weights"}
    lost = {n for n, o in lost.items() if o in saved and o not in wanted}
    assert {str(w.message).split()[2] for w in caught} == lost
    assert {w.filename for w in caught} <= {__file__}
    assert new.step_count == 1
    for mine, theirs in zip(new.exp_avgs, old.exp_avgs, strict=True):
        np.testing.assert_array_equal(mine, theirs.astype(mine.dtype))
    for name in ("master_params", "weight_copies", "emas"):
        mine, theirs = getattr(new, name), getattr(old, name)
        if mine is None:
            continue
        started = new.master_params if name == "emas" else None
        for i, array in enumerate(mine):
            source = (theirs or started or params)[i]
            np.testing.assert_array_equal(array, source.astype(array.dtype))
    new.step(arrays(rng, "bfloat16"))


def test_masters_that_are_the_parameters_are_not_missed(rng):
    old = trainfast.numpy.AdamW(arrays(rng, "float32"), master_weights=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainfast.numpy.AdamW(arrays(rng, "float32")).load_state_dict(old.state_dict())


def test_a_state_from_before_the_options_loads(rng):
    optimizer = trainfast.numpy.AdamW(arrays(rng, "float32"), ema_decay=0.5)
    optimizer.params[0][...] = 3
    state = optimizer.state_dict()
    for name in ("emas", "weight_copies", "master_params"):
        del state[name]
    optimizer.load_state_dict(state)
    assert (optimizer.emas[0] == 3).all()


def test_what_cannot_be_converted_is_named_and_changes_nothing(rng):
    optimizer = trainfast.numpy.AdamW(arrays(rng, "float32"), ema_decay=0.5)
    optimizer.step(arrays(rng, "float32"))
    before, state = everything(optimizer), optimizer.state_dict()
    other = trainfast.numpy.AdamW(arrays(rng, "float32"), amsgrad=True).state_dict()
    for bad, message in [
        (other, "max_exp_avg_sqs must be None, got 4 arrays"),
        ({**state, "emas": state["emas"][:3]}, "emas must be 4 arrays, got 3"),
        ({**state, "emas": [np.zeros(1)] * 4}, r"emas\[0\] must be floats of shape"),
        ({**state, "more": 1}, "state must have the keys"),
        ({k: v for k, v in state.items() if k != "lr"}, "state must have the keys"),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict({**bad, "step_count": 9})
        assert everything(optimizer) == before
        assert optimizer.step_count == 1


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
@pytest.mark.parametrize("options", LAYOUTS)
def test_copies_of_an_optimizer_go_on_by_themselves(rng, way, options):
    optimizer = trainfast.numpy.AdamW(arrays(rng, "bfloat16"), **HYPER, **options)
    grads = [arrays(rng, "bfloat16") for _ in range(3)]
    optimizer.step(grads[0])
    twin = way(optimizer)
    optimizer.step(grads[1])
    optimizer.step(grads[2])
    after = everything(optimizer)
    twin.step(grads[1])
    twin.step(grads[2])
    assert everything(twin) == after == everything(optimizer)


def test_a_state_in_an_npz_file_goes_on_bit_for_bit(rng, tmp_path):
    params = [rng.standard_normal(7).astype(np.float32) for _ in range(2)]
    optimizer = trainfast.numpy.AdamW(params, lr=0.1, betas=(0.8, 0.9), ema_decay=0.5)
    optimizer.step([np.ones(7, np.float32)] * 2)
    np.savez(tmp_path / "state.npz", **optimizer.state_dict())
    again = trainfast.numpy.AdamW([p.copy() for p in params], ema_decay=0.5)
    with np.load(tmp_path / "state.npz", allow_pickle=True) as file:  # for None
        again.load_state_dict(dict(file))
    for each in (optimizer, again):
        each.step([np.ones(7, np.float32)] * 2)
    assert everything(again) == everything(optimizer)
    assert (again.lr, again.step_count, again.maximize) == (0.1, 2, False)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", None, "scalars in the state must be numbers"),
        ("lr", -1.0, "lr must be finite and >= 0, got -1"),
        ("betas", (0.9,), "scalars in the state must be numbers"),
        ("betas", (2.0, 0.9), r"betas\[0\] must be in \[0, 1\), got 2"),
        ("eps", "x", "scalars in the state must be numbers"),
        ("step_count", -1, r"step_count must be an int in \[0, 2\^62\), got -1"),
        ("step_count", 1.5, r"step_count must be an int in .*, got 1.5"),
        ("step_count", 10**30, r"step_count must be an int in"),
        ("exp_avgs", 5, "exp_avgs must be a list of arrays, got int"),
        ("exp_avgs", {"a": 1}, "exp_avgs must be a list of arrays, got dict"),
        ("exp_avgs", [[1.0, 2.0, 3.0]], r"exp_avgs\[0\] must be an array, got list"),
    ],
)
def test_a_state_that_no_step_takes_is_not_loaded(name, value, message):
    optimizer = trainfast.numpy.AdamW([np.ones(3, np.float32)])
    optimizer.step([np.ones(3, np.float32)])
    before, state = everything(optimizer), optimizer.state_dict()
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict({**state, "weight_decay": 0.5, name: value})
    assert everything(optimizer) == before
    assert (optimizer.weight_decay, optimizer.step_count) == (0.01, 1)
