"""AdamW on half parameters that are not rounded to nearest: the kernel's bits are those
of a float32 step and the reference's rounding, and nothing is lost."""

import ml_dtypes
import numpy as np
import pytest

import trainfast
from tests.arrays import EDGES, Framed, Slot
from tests.reference_codes import BLOCK
from tests.reference_half import HALVES, join, round_stochastic, split, words

HYPER = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
SEED = 0x1234_5678_9ABC_DEF0 >> 1
WAYS = [
    ("stochastic", "bfloat16"),
    ("stochastic", "float16"),
    ("kahan", "bfloat16"),
    ("kahan", "float16"),
    ("split", "bfloat16"),
]


def halves(framed):
    """The array of a Framed, on the host, in its own dtype."""
    framed.get()
    return framed.inside(framed.whole)


class HalfSlot:
    """A half parameter, and a twin whose parameter is its float32 weight."""

    def __init__(self, rng, n, rounding, dtype, device="cpu", offset=1, **options):
        self.rounding, self.dtype = rounding, dtype
        options = {"grad": dtype, "state": "float32", **options}
        seed = int(rng.integers(1 << 30))
        offsets = (offset, 0, 0, 0, 0)
        self.half, self.twin = (
            Slot(
                np.random.default_rng(seed),
                (n,),
                param=param,
                offsets=offsets,
                device=where,
                **options,
            )
            for param, where in ((dtype, device), ("float32", "cpu"))
        )
        self.tail = None
        if rounding != "stochastic":
            tail = (1e-4 * rng.standard_normal(n)).astype(HALVES[dtype])
            if rounding == "split":
                bits = rng.integers(-0x8000, 0x7FFF, n, endpoint=True)
                tail = bits.astype(np.int16).view(HALVES[dtype])
            self.tail = Framed(tail, dtype, offset=offset, device=device)
        self.weights = halves(self.twin.param)
        self._join()

    def tails(self):
        return None if self.tail is None else halves(self.tail)

    def _join(self):
        self.weights[...] = join(halves(self.half.param), self.tails(), self.rounding)

    def expected(self, step, index):
        """What the parameter and its tail must be after the twin's step."""
        if self.rounding != "stochastic":
            return split(self.weights, self.dtype, self.rounding)
        random = words(SEED, step, index, np.arange(self.weights.size))
        return round_stochastic(self.weights, self.dtype, random), None

    def check(self, step, index):
        param, tail = self.expected(step, index)
        np.testing.assert_array_equal(
            halves(self.half.param).view(np.uint16), param.view(np.uint16)
        )
        if tail is not None:
            assert self.tail.bits() == tail.tobytes()
        names = ("grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        for name in names[: 4 if self.half.max_exp_avg_sq is not None else 3]:
            assert getattr(self.half, name).bits() == getattr(self.twin, name).bits()
        self._join()


def step(slots, number, twin=False, **options):
    of = [s.twin if twin else s.half for s in slots]
    names = ["param", "grad", "exp_avg", "exp_avg_sq"]
    lists = [[getattr(s, name).array for s in of] for name in names]
    options = {**HYPER, "step": number, **options}
    if of[0].max_exp_avg_sq is not None:
        options["max_exp_avg_sqs"] = [s.max_exp_avg_sq.array for s in of]
    if not twin:
        options |= {"rounding": slots[0].rounding, "seed": SEED}
        if slots[0].tail is not None:
            options["tails"] = [s.tail.array for s in slots]
    trainfast.numpy.adamw_step(*lists, **options)


def step_both(slots, number, **options):
    step(slots, number, **options)
    step(slots, number, twin=True, **options)
    for index, slot in enumerate(slots):
        slot.check(number, index)


@pytest.mark.parametrize("rounding, dtype", WAYS)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_bits_are_those_of_the_reference(
    backend, device, rng, rounding, dtype, amsgrad
):
    slots = [
        HalfSlot(rng, n, rounding, dtype, device, amsgrad=amsgrad, offset=n % 3)
        for n in [*EDGES, 511, 512, 513]
    ]
    for number in (1, 2, 3):
        step_both(slots, number)


@pytest.mark.parametrize(
    "grad, state",
    [(g, s) for g in ("float32", "float16", "bfloat16") for s in (None, "float16")]
    + [("float64", "float32")],
)
@pytest.mark.parametrize("rounding", ["stochastic", "split"])
def test_any_mix_of_dtypes(backend, device, rng, rounding, grad, state):
    slots = [
        HalfSlot(rng, n, rounding, "bfloat16", device, grad=grad, state=state or grad)
        for n in (77, 777)
        if state or grad != "float64"
    ]
    for number in (1, 2) if slots else ():
        step_both(slots, number)


@pytest.mark.parametrize("rounding, dtype", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        dict(maximize=True, decoupled_weight_decay=False),
        dict(betas=(0.0, 0.9), write_back_grads=True),
        dict(zero_grad=True),
    ],
    ids=str,
)
def test_options(backend, device, rng, rounding, dtype, options):
    step_both(
        [HalfSlot(rng, n, rounding, dtype, device) for n in (9, 700)], 2, **options
    )


@pytest.mark.parametrize("rounding, dtype", WAYS)
def test_ema_and_copy_are_of_the_weight(backend, device, rng, rounding, dtype):
    slot = HalfSlot(rng, 700, rounding, dtype, device)
    pairs = [
        [Framed(np.ones(700), "float32", device=where) for _ in range(2)]
        for where in (device, "cpu")
    ]
    for twin, (ema, copy) in enumerate(pairs):
        extras = {"emas": [ema.array], "copies": [copy.array], "ema_decay": 0.9}
        step([slot], 1, twin=bool(twin), **extras)
    slot.check(1, 0)
    for ours, right in zip(*pairs, strict=True):
        assert ours.bits() == right.bits()


@pytest.mark.parametrize("rounding, dtype", WAYS)
def test_with_codes_as_state(backend, device, rng, rounding, dtype):
    """8-bit state beside: all arrays have the bits of the twin with such state."""
    n = 700
    slot = HalfSlot(rng, n, rounding, dtype, device)
    results = []
    for twin in (False, True):
        where = "cpu" if twin else device
        codes = [Framed(np.zeros(n), "uint8", device=where) for _ in range(2)]
        scales = Framed(np.zeros((-(-n // BLOCK), 3)), "float32", device=where)
        of = slot.twin if twin else slot.half
        lists = [[a.array] for a in (of.param, of.grad, *codes)]
        options = {}
        if not twin:
            options = {"rounding": rounding, "seed": SEED}
            options["tails"] = None if slot.tail is None else [slot.tail.array]
        trainfast.numpy.adamw_step(
            *lists, scales=[scales.array], step=1, **HYPER, **options
        )
        results.append([a.bits() for a in (*codes, scales)])
    slot.check(1, 0)
    assert results[0] == results[1]


# ---- Rounding at random --------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_special_values(backend, device, rng, dtype):
    """Through the weight: the update is 0, so the reference says what must come out."""
    tiny = float(np.finfo(np.float32).tiny)
    values = [0, -0.0, np.inf, -np.inf, np.nan, 1, -3, 2**-14, 2**-24, 2**-25, 1e-7]
    values += [65504, -65504, 3e38, -3e38, tiny, 6.1e-5, 3.3e-6]
    with np.errstate(over="ignore"):
        param = np.array(values, np.float32).astype(HALVES[dtype])
    framed = Framed(param, dtype, device=device)
    state = [Framed(np.zeros(param.size), device=device) for _ in range(3)]
    before = halves(framed).copy()
    for number in (1, 2):
        trainfast.numpy.adamw_step(
            [framed.array],
            *([a.array] for a in state),
            step=number,
            **{**HYPER, "weight_decay": 0.0},
            rounding="stochastic",
            seed=3,
        )
        got = halves(framed)
        nan = np.isnan(before)
        assert np.isnan(got[nan]).all()
        assert got[~nan].tobytes() == before[~nan].tobytes()  # exact values stay


@pytest.mark.parametrize("rounding, dtype", WAYS)
def test_ends_of_the_range(backend, device, rng, rounding, dtype):
    """Weights beyond the largest value, and subnormal ones: bits of the reference."""
    if device != "cpu":
        pytest.skip("the values are set on the host")
    info = ml_dtypes.finfo(HALVES[dtype])
    most, least = float(info.max), float(info.smallest_subnormal)
    for value, lr in ((most, most / 2000), (40 * least, 3.3 * least)):
        slot = HalfSlot(rng, 600, rounding, dtype)
        halves(slot.half.param)[...] = np.where(rng.random(600) < 0.5, value, -value)
        slot._join()
        with np.errstate(over="ignore", invalid="ignore"):
            for number in (1, 2, 3):
                step_both([slot], number, lr=lr, weight_decay=0.0)
        after = slot.half.param.get()
        assert np.isinf(after).any() == (value == most)
        assert len(np.unique(after)) > 2


@pytest.mark.parametrize("dtype", HALVES)
def test_mean_is_the_weight(rng, dtype):
    """Unbiased: over elements and steps the mean error is 0, however small a tail."""
    n, steps = 4096, 64
    sizes = 2.0 ** rng.integers(-20 if dtype == "float16" else -30, 3, n)
    weights = (sizes * (1 + rng.random(n))).astype(np.float32)
    param = weights.astype(HALVES[dtype])
    ulp = np.abs(np.spacing(param)).astype(np.float64)
    total = np.zeros(n)
    for number in range(1, steps + 1):
        random = words(SEED, number, 0, np.arange(n))
        total += round_stochastic(weights, dtype, random).astype(np.float64)
    error = (total / steps - weights) / ulp  # of each element: sigma <= 0.5 / 8
    assert abs(error.mean()) < 5 * 0.5 / np.sqrt(n * steps)
    assert 0.02 < error.std() < 0.07


def test_words_are_independent():
    """Bits of neighbours, steps and parameters do not agree more than by chance."""
    n = 1 << 16
    place = np.arange(n)
    base = words(SEED, 1, 0, place)
    others = [words(SEED, 2, 0, place), words(SEED, 1, 1, place)]
    others += [words(SEED + 1, 1, 0, place), np.roll(base, 1), np.roll(base, 128)]
    others.append(words(SEED, 1, 0, place + (1 << 32)))
    for bit in range(32):
        ones = base >> np.uint32(bit) & 1
        assert abs(ones.mean() - 0.5) < 5 * 0.5 / np.sqrt(n)
        for other in others:
            same = (ones == (other >> np.uint32(bit) & 1)).mean()
            assert abs(same - 0.5) < 5 * 0.5 / np.sqrt(n), bit


def test_philox_is_the_published_one():
    """Known answers of Random123's kat_vectors."""
    from tests.reference_half import philox

    assert philox((0, 0, 0, 0), (0, 0)) == (
        *(0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    )
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones,) * 2) == (
        *(0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    )


def test_bits_do_not_depend_on_the_number_of_threads(rng):
    torch = pytest.importorskip("torch")
    values = rng.standard_normal((2, 200_001)).astype(np.float32)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        param, grad = values.astype(HALVES["bfloat16"])
        state = [np.zeros(param.size, np.float32) for _ in range(2)]
        for number in (1, 2):
            trainfast.numpy.adamw_step(
                [param],
                [grad],
                *([a] for a in state),
                step=number,
                rounding="stochastic",
                seed=1,
                **HYPER,
            )
        results.append(param.tobytes())
    torch.set_num_threads(before)
    assert results[1:] == results[:1] * 2


# ---- Nothing lost --------------------------------------------------------------------


def test_split_is_a_float32_master_bit_for_bit(backend, rng):
    """100 steps: the weight is that of float32 parameters with the same gradients."""
    n = 1000
    start = rng.standard_normal(n).astype(HALVES["bfloat16"])
    master = start.astype(np.float32)
    param, tail = start.copy(), np.zeros(n, HALVES["bfloat16"])
    states = [[np.zeros(n, np.float32) for _ in range(2)] for _ in range(2)]
    for number in range(1, 101):
        grad = rng.standard_normal(n).astype(np.float32)
        for weights, state, options in (
            (master, states[0], {}),
            (param, states[1], {"rounding": "split", "tails": [tail]}),
        ):
            trainfast.numpy.adamw_step(
                [weights],
                [grad],
                *([a] for a in state),
                step=number,
                **HYPER,
                **options,
            )
    assert join(param, tail, "split").tobytes() == master.tobytes()
    nearest = master.astype(HALVES["bfloat16"]) != param
    assert not (
        nearest & (tail.view(np.int16) != -0x8000)
    ).any()  # they differ in ties alone


@pytest.mark.parametrize("rounding, dtype", WAYS)
def test_weight_decay_below_an_ulp_is_not_lost(backend, rounding, dtype):
    """pytorch#120376: at lr 1e-4 and weight_decay 0.1 plain bfloat16 stalls."""
    n, steps = 2000, 400
    lr, decay = (1e-3, 0.1) if dtype == "bfloat16" else (1e-3, 0.02)
    results = {}
    for name in ("nearest", rounding):
        param = np.ones(n, HALVES[dtype])
        grad = np.zeros(n, HALVES[dtype])
        state = [np.zeros(n, np.float32) for _ in range(2)]
        tail = np.zeros(n, HALVES[dtype])
        tails = [tail] if name in ("kahan", "split") else None
        for number in range(1, steps + 1):
            trainfast.numpy.adamw_step(
                [param],
                [grad],
                *([a] for a in state),
                step=number,
                lr=lr,
                weight_decay=decay,
                rounding=name,
                seed=1,
                tails=tails,
            )
        results[name] = param.astype(np.float64).mean()
    right = (1 - lr * decay) ** steps
    assert results["nearest"] == 1  # it has stalled
    ulp = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    assert results[rounding] == pytest.approx(right, abs=ulp)
    if rounding == "stochastic":  # the mean of many is nearer than an ulp
        assert results[rounding] == pytest.approx(right, abs=ulp / 8)


def test_a_stale_tail_beside_a_zero_is_dropped(backend):
    param = np.zeros(3, HALVES["bfloat16"])
    param[1] = -0.0
    tail = np.array([-1, -5, 7], np.int16).view(param.dtype)
    state = [np.zeros(3, np.float32) for _ in range(3)]
    trainfast.numpy.adamw_step(
        [param], *([a] for a in state), step=1, rounding="split", tails=[tail], lr=0.1
    )
    assert np.abs(param.astype(np.float32)).max() < 1e-40 and np.isfinite(param).all()


def test_a_gradient_that_is_not_finite_does_not_spread(backend, device, rng):
    for rounding, dtype in WAYS:
        slot = HalfSlot(rng, 300, rounding, dtype, device)
        for framed in (slot.half.grad, slot.twin.grad):
            whole = framed.torch if framed.on_device else framed.whole
            framed.inside(whole)[5] = np.nan
        step([slot], 1)
        finite = np.isfinite(slot.half.param.get())
        assert not finite[5] and finite.sum() == 299


# ---- Errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, dtype, message",
    [
        (dict(rounding="up"), "bfloat16", "rounding must be 'nearest', 'stochastic'"),
        (
            dict(rounding="kahan"),
            "bfloat16",
            r"tails\[0\] must be bfloat16 .* got None",
        ),
        (
            dict(rounding="split"),
            "bfloat16",
            r"tails\[0\] must be bfloat16 .* got None",
        ),
        (
            dict(rounding="split", tails="float32"),
            "bfloat16",
            r"tails\[0\] must be bfloat16 with this rounding of bfloat16, got float32",
        ),
        (
            dict(rounding="split", tails="float16"),
            "float16",
            r"params\[0\] must be bfloat16 with this rounding, got float16",
        ),
        (
            dict(rounding="stochastic", tails="bfloat16"),
            "bfloat16",
            r"tails\[0\] must be None",
        ),
        (
            dict(rounding="kahan", tails="bfloat16"),
            "float32",
            r"tails\[0\] must be None",
        ),
    ],
)
def test_wrong_arguments_are_refused(options, dtype, message):
    dtypes = {**HALVES, "float32": np.float32}
    param, grad = np.ones((2, 10), dtypes[dtype])
    state = [np.zeros(10, np.float32) for _ in range(2)]
    if "tails" in options:
        options = {**options, "tails": [np.zeros(10, dtypes[options["tails"]])]}
    with pytest.raises(ValueError, match=message):
        trainfast.numpy.adamw_step(
            [param], [grad], *([a] for a in state), step=1, lr=0.1, **options
        )
    assert (param == 1).all() and not state[0].any()


def test_float32_parameters_are_rounded_to_nearest_beside_others(backend, rng):
    slots = [HalfSlot(rng, 100, "kahan", "bfloat16"), Slot(rng, (100,))]
    alone = Slot(np.random.default_rng(0), (100,))
    for name in ("param", "grad", "exp_avg", "exp_avg_sq"):
        halves(getattr(alone, name))[...] = halves(getattr(slots[1], name))
    names = ("param", "grad", "exp_avg", "exp_avg_sq")
    lists = [[getattr(s, n).array for s in (slots[0].half, slots[1])] for n in names]
    trainfast.numpy.adamw_step(
        *lists, step=1, rounding="kahan", tails=[slots[0].tail.array, None], **HYPER
    )
    trainfast.numpy.adamw_step(
        *([getattr(alone, n).array] for n in names), step=1, **HYPER
    )
    step([slots[0]], 1, twin=True)
    slots[0].check(1, 0)
    assert alone.bits() == slots[1].bits()
