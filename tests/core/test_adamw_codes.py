"""AdamW with 8-bit state: the kernel's codes bit for bit, and what they cost."""

import itertools

import numpy as np
import pytest

import trainfast
from tests.arrays import DTYPES, Framed, Slot
from tests.reference_codes import BLOCK, by_dynamic_map, decode, encode

HYPER = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
EDGES = [0, 1, 127, 128, 129, 511, 512, 513, 5000]  # around blocks and chunks


class CodedSlot:
    """A slot whose state is codes, and the same slot with the state that they mean."""

    def __init__(self, rng, shape, device="cpu", amsgrad=False, **dtypes):
        self.plain = Slot(
            rng, shape, state="float32", device="cpu", amsgrad=amsgrad, **dtypes
        )
        self.names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"][: 2 + amsgrad]
        scales, self.codes = [], {}
        for name in self.names:
            codes, scale = encode(self.values(name), name == "exp_avg")
            self.codes[name] = Framed(codes, "uint8", offset=3, device=device)
            scales.append(scale)
        whole = np.concatenate(scales, 1)
        self.scales = Framed(whole, "float32", device=device)
        self.param, self.grad = (
            Framed(
                framed.inside(framed.whole),
                framed.dtype.name,
                offset=offset,
                device=device,
            )
            for framed, offset in ((self.plain.param, 1), (self.plain.grad, 0))
        )
        self._decode()

    def values(self, name):
        framed = getattr(self.plain, name)
        return framed.inside(framed.whole)

    def _columns(self, name):
        at = {"exp_avg": slice(0, 1), "exp_avg_sq": slice(1, 3)}
        return at.get(name, slice(3, 5))

    def _decode(self):
        for name in self.names:
            codes = self.codes[name].get().astype(np.uint8)
            scales = self.scales.get().astype(np.float32)[:, self._columns(name)]
            if codes.size:
                self.values(name)[...] = decode(codes, scales)

    def check(self):
        """The kernel's parameters and codes are those of the float32 kernel's state."""
        if self.param.on_device:  # a GPU's NaN has other bits
            np.testing.assert_array_equal(self.param.get(), self.plain.param.get())
        else:
            assert self.param.bits() == self.plain.param.bits()
        for name in self.names:
            if not self.scales.size:
                continue
            codes, scales = encode(self.values(name), name == "exp_avg")
            assert self.codes[name].bits() == codes.tobytes(), name
            got = self.scales.get().astype(np.float32)[:, self._columns(name)]
            np.testing.assert_array_equal(got, scales.astype(np.float32), name)
        self._decode()


def step(slots, plain=False, **options):
    names = ("param", "grad", *slots[0].names)
    columns = {}
    for name in names:
        columns[name] = [
            getattr(s.plain, name).array
            if plain
            else (s.codes[name] if name in s.codes else getattr(s, name)).array
            for s in slots
        ]
    top = columns.pop("max_exp_avg_sq", None)
    options = {**HYPER, **options, "max_exp_avg_sqs": top}
    if not plain:
        options["scales"] = [s.scales.array for s in slots]
    trainfast.numpy.adamw_step(*columns.values(), **options)


def step_both(slots, number, **options):
    step(slots, step=number, **options)
    step(slots, plain=True, step=number, **options)
    for slot in slots:
        slot.check()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_codes_are_those_of_the_reference(backend, device, rng, amsgrad):
    slots = [CodedSlot(rng, (n,), device, amsgrad) for n in EDGES]
    for number in range(1, 4):
        step_both(slots, number)


@pytest.mark.parametrize(
    "param, grad", list(itertools.product(["float32", "float16", "bfloat16"], DTYPES))
)
def test_any_mix_of_dtypes(backend, device, rng, param, grad):
    slots = [CodedSlot(rng, (n,), device, param=param, grad=grad) for n in (77, 777)]
    step_both(slots, 3)


@pytest.mark.parametrize(
    "options",
    [
        dict(maximize=True, decoupled_weight_decay=False),
        dict(betas=(0.0, 0.9), write_back_grads=True),
        dict(zero_grad=True),
    ],
    ids=str,
)
def test_options(backend, device, rng, options):
    slots = [CodedSlot(rng, (n,), device) for n in (129, 700)]
    step_both(slots, 2, **options)
    if "zero_grad" in options:
        assert not slots[1].grad.get().any()


def test_bits_do_not_depend_on_the_number_of_threads(rng):
    torch = pytest.importorskip("torch")
    values = rng.standard_normal((2, 200_001)).astype(np.float32)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        param, grad = values.copy()
        state = [np.zeros(param.size, np.uint8) for _ in range(2)]
        scales = np.zeros((-(-param.size // BLOCK), 3), np.float32)
        lists = [[param], [grad], *([codes] for codes in state)]
        for number in (1, 2):
            trainfast.numpy.adamw_step(*lists, scales=[scales], step=number, **HYPER)
        results.append([a.tobytes() for a in (param, *state, scales)])
    torch.set_num_threads(before)
    assert results[1:] == results[:1] * 2


def test_float_and_coded_state_in_one_call(backend, device, rng):
    coded, plain = CodedSlot(rng, (300,), device), Slot(rng, (300,), device=device)
    alone = Slot(np.random.default_rng(0), (300,))
    for name in ("param", "grad", "exp_avg", "exp_avg_sq"):
        framed = getattr(alone, name)
        framed.inside(framed.whole)[...] = getattr(plain, name).get()
    trainfast.numpy.adamw_step(
        [coded.param.array, plain.param.array],
        [coded.grad.array, plain.grad.array],
        [coded.codes["exp_avg"].array, plain.exp_avg.array],
        [coded.codes["exp_avg_sq"].array, plain.exp_avg_sq.array],
        scales=[coded.scales.array, None],
        step=1,
        **HYPER,
    )
    step([coded], plain=True, step=1)
    coded.check()
    step_plain = [[getattr(alone, n).array] for n in ("param", "grad")]
    step_plain += [[alone.exp_avg.array], [alone.exp_avg_sq.array]]
    trainfast.numpy.adamw_step(*step_plain, step=1, **HYPER)
    for name in ("param", "exp_avg", "exp_avg_sq"):
        assert getattr(alone, name).bits() == getattr(plain, name).bits()


def test_a_gradient_that_is_not_finite_does_not_spread(backend, device, rng):
    for bad in (np.inf, -np.inf, np.nan):
        slot = CodedSlot(rng, (300,), device)
        for framed in (slot.grad, slot.plain.grad):
            whole = framed.torch if framed.on_device else framed.whole
            framed.inside(whole)[5] = bad
        step_both([slot], 1)
        for framed in (slot.grad, slot.plain.grad):
            whole = framed.torch if framed.on_device else framed.whole
            framed.inside(whole)[5] = 0
        step_both([slot], 2)
        finite = np.isfinite(slot.param.get())
        assert not finite[5] and finite.sum() == 299


def test_skipped_step_changes_nothing(backend, device, rng):
    slot = CodedSlot(rng, (300,), device)
    arrays = (slot.param, slot.scales, *slot.codes.values())
    before = [a.bits() for a in arrays]
    found = Framed(np.ones(1), device=device)
    step([slot], step=1, found_inf=found.array)
    assert [a.bits() for a in arrays] == before


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("scales", np.zeros((3, 5), np.float32), r"scales\[0\] must be 9 float32"),
        ("scales", np.zeros((3, 3)), r"scales\[0\] must be 9 float32"),
        ("scales", np.zeros((3, 3), np.float32).T, r"scales\[0\] must be contiguous"),
        ("scales", None, r"exp_avgs\[0\] must be floats, got uint8"),
        ("state", np.zeros(300, np.float32), r"must be uint8 codes with scales"),
        ("param", np.zeros(300), r"params\[0\] must not be float64"),
    ],
)
def test_wrong_arrays_are_refused(name, value, message):
    arrays = {
        "param": np.zeros(300, np.float32),
        "grad": np.ones(300, np.float32),
        "state": np.zeros(300, np.uint8),
        "scales": np.zeros((3, 3), np.float32),
    }
    arrays[name] = value
    lists = [[arrays["param"]], [arrays["grad"]], [arrays["state"]]]
    with pytest.raises(ValueError, match=message):
        trainfast.numpy.adamw_step(
            *lists, [arrays["state"].copy()], scales=[arrays["scales"]], step=1, lr=0.1
        )
    assert not arrays["param"].any()


def gradients(stream, steps, rng):
    """What 4096 parameters get: sizes that differ by element, with slow means."""
    scale = np.exp(rng.standard_normal(4096) * (stream != "equal"))
    mean = 0.3 * rng.standard_normal(4096)
    for t in range(steps):
        grad = scale * (rng.standard_normal(4096) + mean * np.cos(t / 100))
        if stream == "fading":
            grad *= np.exp(-t / 200)
        if stream == "rare":  # as of embeddings
            grad *= rng.random(4096) < 0.05
        yield grad.astype(np.float32)


SLOW = [("equal", False), ("lognormal", False), ("fading", False), ("rare", True)]


@pytest.mark.parametrize(
    "stream, amsgrad",
    [("rare", False), *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)],
)
def test_error_of_the_update_is_below_that_of_bitsandbytes(rng, stream, amsgrad):
    """Relative RMS difference from updates with float64 state, over 1,000 steps."""
    n, beta1, beta2, eps = 4096, 0.9, 0.999, 1e-8
    param = np.zeros(n, np.float32)
    codes = [np.zeros(n, np.uint8) for _ in range(2 + amsgrad)]
    scales = np.zeros((n // BLOCK, 3 + 2 * amsgrad), np.float32)
    exact = [np.zeros(n) for _ in range(3)]
    rival = [np.zeros(n, np.float32) for _ in range(3)]
    errors, size = np.zeros(2), 0.0
    for t, grad in enumerate(gradients(stream, 1000, rng), 1):

        def update(state, grad=grad, t=t):
            m, v, top = state
            m[...] = beta1 * m + (1 - beta1) * grad
            v[...] = beta2 * v + (1 - beta2) * grad.astype(v.dtype) ** 2
            top[...] = np.maximum(top, v) if amsgrad else v
            return m / (1 - beta1**t) / (np.sqrt(top / (1 - beta2**t)) + eps)

        right, theirs = update(exact), update(rival)
        for i in range(3):
            rival[i][...] = by_dynamic_map(rival[i], i == 0)
        param[...] = 0
        trainfast.numpy.adamw_step(
            [param],
            [grad],
            *([c] for c in codes[:2]),
            max_exp_avg_sqs=[codes[2]] if amsgrad else None,
            scales=[scales],
            step=t,
            lr=1.0,
            weight_decay=0.0,
        )
        errors += [((-param - right) ** 2).sum(), ((theirs - right) ** 2).sum()]
        size += (right**2).sum()
    ours, theirs = np.sqrt(errors / size)
    print(f"{stream}: ours {ours:.4f}, dynamic map {theirs:.4f}")
    assert ours < min(0.12, 0.9 * theirs)
