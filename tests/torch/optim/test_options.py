"""What rides on the step of trainfast.torch.AdamW: each option, and pairs of them."""

import copy
import io
import itertools
import warnings

import pytest
import torch

import trainfast
from tests.pairwise import option_cases
from tests.torch_loops import make_params, set_grads
from trainfast.torch import Adam, AdamW

SHAPES = [(), (7,), (3, 5, 2), (257,), (0, 4), (300, 17)]
SCALE = 64.0
OPTIONS = {
    "max_grad_norm": 0.5,
    "ema_decay": 0.9,
    "weight_copy_dtype": torch.bfloat16,
    "master_weights": True,
    "zero_grad": True,
    "write_back_grads": True,
    "amsgrad": True,
    "grad_scale": SCALE,
}
CONTRADICTIONS = [
    ("weight_copy_dtype", "master_weights"),
    ("zero_grad", "write_back_grads"),
]
DESIGN = option_cases(OPTIONS, CONTRADICTIONS)
# Everything that goes together.
DESIGN += [
    {k: v for k, v in OPTIONS.items() if k not in leave}
    for leave in itertools.product(*CONTRADICTIONS)
]


class Truth:
    """The same in float64, by torch's own pieces, one after another."""

    def __init__(self, params, options):
        self.dtype = params[0].dtype
        self.options = options
        self.params = [torch.nn.Parameter(p.detach().double()) for p in params]
        self.optimizer = torch.optim.AdamW(
            self.params, lr=0.01, foreach=False, amsgrad=options.get("amsgrad", False)
        )
        self.emas = [p.detach().clone() for p in self.params]
        self.norm = None

    def step(self, grads):
        for p, g in zip(self.params, grads, strict=True):
            p.grad = g.double() / self.options.get("grad_scale", 1.0)
        if "max_grad_norm" in self.options:
            clip = torch.nn.utils.clip_grad_norm_
            self.norm = clip(self.params, self.options["max_grad_norm"], foreach=False)
        self.optimizer.step()
        with torch.no_grad():
            for p, ema in zip(self.params, self.emas, strict=True):
                ema.lerp_(p, 1 - self.options.get("ema_decay", 0.0))
                if not self.options.get("master_weights"):
                    p.copy_(p.to(self.dtype).double())


def run(options, dtype, device, steps=3):
    given = {"state_dtype": torch.float32, **options}
    given.pop("grad_scale", None)
    params = make_params(device, dtype, SHAPES)
    optimizer = AdamW(params, lr=0.01, **given)
    truth = Truth(params, options)
    for step in range(steps):
        set_grads(params, step + 100)
        grads = [p.grad.clone() for p in params]
        if "grad_scale" in options:
            optimizer.grad_scale = torch.tensor(SCALE, device=device)
            optimizer.found_inf = torch.tensor(0.0, device=device)
        optimizer.step()
        truth.step(grads)
    return optimizer, params, truth, grads


def close(ours, want, dtype):
    """Within rounding of the arithmetic, and of the dtype that it was stored in."""
    rtol, atol = {
        torch.float32: (3e-5, 3e-6),
        torch.bfloat16: (2**-7, 5e-4),  # a step is 0.01: 5 % of it
        torch.float16: (2**-9, 1e-4),
    }[dtype]
    torch.testing.assert_close(
        ours.double().cpu(), want.detach().cpu(), rtol=rtol, atol=atol
    )


# In full for each dtype, because each has loops of its own.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", DESIGN, ids="+".join)
def test_options_agree_with_float64(backend, device, options, dtype):
    trainfast.reset_stats()
    optimizer, params, truth, grads = run(options, dtype, device)
    half = dtype != torch.float32
    for i, (p, q) in enumerate(zip(params, truth.params, strict=True)):
        state = optimizer.state[p]
        close(p, q, dtype)
        if options.get("master_weights") and half:
            close(state["master_param"], q, torch.float32)
            assert torch.equal(p, state["master_param"].to(dtype))
        else:
            assert "master_param" not in state
        if "ema_decay" in options:
            exact = options.get("master_weights") or not half
            close(state["ema"], truth.emas[i], torch.float32 if exact else dtype)
            assert state["ema"].dtype == torch.float32
        if "weight_copy_dtype" in options:
            # rounded from the unrounded parameter, so equal where it is float32
            assert state["weight_copy"].dtype == torch.bfloat16
            close(state["weight_copy"], p.double(), torch.bfloat16)
            assert half or torch.equal(state["weight_copy"], p.bfloat16())
        if options.get("zero_grad"):
            assert not p.grad.any()
        elif options.get("write_back_grads"):
            close(p.grad, q.grad, dtype)
        else:
            assert torch.equal(p.grad, grads[i])
    if "max_grad_norm" in options:
        assert optimizer.grad_norm.dtype == torch.float32
        close(optimizer.grad_norm, truth.norm, torch.float32)
    assert trainfast.stats().to_dict()["fallbacks"] == {}


def test_float64_is_clipped_in_float64(backend, device):
    params = make_params(device, torch.float64)
    theirs = make_params(device, torch.float64)
    ours, truth = AdamW(params, max_grad_norm=0.3), torch.optim.AdamW(theirs)
    for step in range(3):
        for p in (params, theirs):
            set_grads(p, step)
        ours.step()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.3)
        truth.step()
        torch.testing.assert_close(ours.grad_norm, norm, rtol=1e-14, atol=0)
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("off", [None, 0, 0.0])
def test_max_grad_norm_of_0_is_off(backend, device, off):
    # the key `gradient_clip: 0` of a configuration means no clipping
    params, theirs = (
        make_params(device, torch.float32),
        make_params(device, torch.float32),
    )
    ours, plain = AdamW(params, max_grad_norm=off), AdamW(theirs)
    for step in range(3):
        for p in (params, theirs):
            set_grads(p, step)
        ours.step()
        plain.step()
    assert ours.grad_norm is None
    for p, q in zip(params, theirs, strict=True):
        assert torch.equal(p, q)
    clipped = AdamW(params, max_grad_norm=1e-3)
    clipped.step()
    assert clipped.grad_norm > 1e-3


def test_one_float64_makes_the_norm_a_float64(backend, device):
    params = [torch.nn.Parameter(torch.zeros(2, device=device)) for _ in range(2)]
    optimizer = AdamW(params, max_grad_norm=1.0)
    for wide in (False, True):
        if wide:
            p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64, device=device))
            optimizer.param_groups[0]["params"].append(p)
            p.grad = torch.full_like(p, 1e100)
        for q in params:
            q.grad = torch.ones_like(q)
        optimizer.step()
        want = 2**0.5 * 1e100 if wide else 2.0
        assert float(optimizer.grad_norm) == pytest.approx(want)
        assert optimizer.grad_norm.dtype == (torch.float64 if wide else torch.float32)


def test_norm_is_over_all_groups(backend, device):
    params = make_params(device)
    set_grads(params, 3)
    groups = [{"params": params[:3], "lr": 0.1}, {"params": params[3:]}]
    optimizer = AdamW(groups, max_grad_norm=1.0)
    optimizer.step()
    want = torch.nn.utils.get_total_norm([p.grad for p in params])
    torch.testing.assert_close(optimizer.grad_norm, want)
    assert trainfast.stats().to_dict()["fallbacks"] == {}


@pytest.mark.parametrize("flag", [1.0, 2.0, float("nan"), float("inf")])
def test_skipped_step_changes_only_zeroed_gradients(backend, device, flag):
    options = {"ema_decay": 0.9, "weight_copy_dtype": torch.float16, "zero_grad": True}
    params = make_params(device, shapes=[(300, 300), (5,)])
    optimizer = AdamW(params, max_grad_norm=1.0, **options)
    set_grads(params, 1)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    weights = [p.detach().clone() for p in params]
    set_grads(params, 2)
    optimizer.found_inf = torch.tensor(flag, device=device)
    optimizer.step()
    after = optimizer.state_dict()["state"]
    for i, p in enumerate(params):
        assert torch.equal(p, weights[i])
        assert not p.grad.any()
        for name, value in before[i].items():
            assert torch.equal(after[i][name], value), name


def test_pass_one_finds_infinities_when_asked(backend, device):
    for bad in (False, True):
        params = make_params(device)
        set_grads(params, 1)
        if bad:
            params[-1].grad.view(-1)[-1] = float("inf")
        optimizer = AdamW(params)
        optimizer.grad_scale = torch.tensor(4.0, device=device)
        optimizer._measure_inf = True
        weights = [p.detach().clone() for p in params]
        optimizer.step()
        assert float(optimizer.found_inf) == bad
        unchanged = all(torch.equal(p, w) for p, w in zip(params, weights, strict=True))
        assert unchanged == bad


WHOLE = [
    (torch.float32, {"weight_copy_dtype": torch.bfloat16, "zero_grad": True}),
    (torch.bfloat16, {"master_weights": True, "write_back_grads": True}),
    (torch.float16, {"amsgrad": True, "state_dtype": torch.bfloat16}),
    (torch.float64, {}),
]


def scaled_steps(dtype, options, device, shapes):
    """All that a few clipped steps of a scaler leave behind, one of them skipped."""
    params = make_params(device, dtype, shapes)
    optimizer = AdamW(params, max_grad_norm=0.5, ema_decay=0.9, **options)
    scaler = trainfast.torch.GradScaler(device, 16.0)
    scaler.scale(torch.ones((), device=device))
    left = []
    for step in range(3):
        set_grads(params, step)
        if step == 1:
            params[-1].grad.view(-1)[-1] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        left += [optimizer.grad_norm, scaler._scale.clone()]
    for p in params:
        left += [p.detach(), p.grad, *optimizer.state[p].values()]
    return [value.cpu() for value in left]


@pytest.mark.parametrize("dtype, options", WHOLE, ids=lambda o: str(o)[:14])
def test_scaled_steps_have_the_same_bits_everywhere(backend, device, dtype, options):
    # several threads take part from 131,072 elements on
    shapes = [(3,), (20_001,), (0,), (140_000 if backend != "simt" else 9_000,)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        mine = scaled_steps(dtype, options, device, shapes)
        torch.set_num_threads(1)
        trainfast.use_backend("scalar")
        want = scaled_steps(dtype, options, "cpu", shapes)
    finally:
        trainfast.use_backend(None)
        torch.set_num_threads(threads)
    assert len(mine) == len(want)
    for value, right in zip(mine, want, strict=True):
        assert torch.equal(value.nan_to_num(7.0), right.nan_to_num(7.0))


# ---- Checkpoints -------------------------------------------------------------------

LAYOUTS = [
    {},
    {"ema_decay": 0.9},
    {"master_weights": True},
    {"weight_copy_dtype": torch.float16, "ema_decay": 0.5},
    {"state_dtype": torch.float32, "master_weights": True, "ema_decay": 0.9},
]


def reload(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda o: "+".join(o) or "plain")
def test_resumed_run_has_the_same_bits(backend, device, layout, dtype):
    def steps(params, optimizer, first, last):
        for step in range(first, last):
            set_grads(params, step)
            optimizer.step()

    straight = make_params(device, dtype)
    whole = AdamW(straight, lr=0.01, max_grad_norm=1.0, **layout)
    steps(straight, whole, 0, 4)
    params = make_params(device, dtype)
    first = AdamW(params, lr=0.01, max_grad_norm=1.0, **layout)
    steps(params, first, 0, 2)
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    second = AdamW(again, lr=0.5, max_grad_norm=1.0, **layout)
    second.load_state_dict(reload(first))
    steps(again, second, 2, 4)
    for p, q in zip(straight, again, strict=True):
        assert torch.equal(p, q)
        for name, value in whole.state[p].items():
            assert torch.equal(value, second.state[q][name]), name
            assert value.dtype == second.state[q][name].dtype


@pytest.mark.parametrize("saved", LAYOUTS, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("wanted", LAYOUTS, ids=lambda o: "+".join(o) or "plain")
def test_any_layout_resumes_as_any_other(saved, wanted):
    params = make_params(dtype=torch.bfloat16)
    first = AdamW(params, **saved)
    set_grads(params, 1)
    first.step()
    second = AdamW(params, **wanted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second.load_state_dict(reload(first))
    lost = {"ema": "ema_decay", "master_param": "master_weights"}
    lost = {n for n, o in lost.items() if o in saved and o not in wanted}
    assert {str(w.message).split()[2] for w in caught} == lost
    set_grads(params, 2)
    second.step()
    for p in params:
        state = second.state[p]
        dtype = wanted.get("state_dtype", torch.bfloat16)
        assert state["exp_avg"].dtype == dtype
        assert float(state["step"]) == 2
        assert ("ema" in state) == ("ema_decay" in wanted)
        assert ("master_param" in state) == ("master_weights" in wanted)
        assert ("weight_copy" in state) == ("weight_copy_dtype" in wanted)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda o: "+".join(o) or "plain")
def test_torchs_adamw_loads_every_layout_and_back(layout):
    params, twins = make_params(), make_params()
    ours, other = AdamW(params, **layout), AdamW(twins, **layout)
    for p, optimizer in ((params, ours), (twins, other)):
        set_grads(p, 1)
        optimizer.step()
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(reload(ours))
    for p, optimizer in ((params, theirs), (twins, other)):
        set_grads(p, 2)
        optimizer.step()
    ours.load_state_dict(reload(theirs))
    for p, optimizer in ((params, ours), (twins, other)):
        set_grads(p, 3)
        optimizer.step()
    for p, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(p, twin)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours.state[p][name], other.state[twin][name])
            assert ours.state[p][name].dtype == other.state[twin][name].dtype
    assert float(ours.state[params[0]]["step"]) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_that_torch_has_left_behind_are_not_gone_back_to(
    backend, device, dtype
):
    params = make_params(device, dtype)
    ours = AdamW(params, lr=0.1, master_weights=True)
    theirs = torch.optim.AdamW(params, lr=0.1)
    set_grads(params, 1)
    ours.step()
    theirs.load_state_dict(reload(ours))
    for step in range(5):
        set_grads(params, step)
        theirs.step()
    before = [p.detach().float() for p in params]
    ours = AdamW(params, lr=0.1, master_weights=True)
    ours.load_state_dict(reload(theirs))
    ours.param_groups[0]["lr"] = 0.0
    ours.step()
    for p, value in zip(params, before, strict=True):
        assert torch.equal(ours.state[p]["master_param"], value)
        assert torch.equal(p.float(), value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_are_loaded_after_the_optimizer_are_stepped_from(dtype):
    params = make_params(dtype=dtype)
    first = AdamW(params, lr=0.1, master_weights=True)
    set_grads(params, 1)
    first.step()
    masters = [first.state[p]["master_param"].clone() for p in params]
    second = AdamW(params, lr=0.0, master_weights=True)
    second.load_state_dict(reload(first))
    second.param_groups[0]["lr"] = 0.0
    with torch.no_grad():
        params[-1].fill_(3.0)
        params[2][2] = 3.0
    second.step()
    assert second.state[params[-1]]["master_param"].unique().tolist() == [3.0]
    assert params[2][2] == 3.0
    for i in range(len(params) - 1):  # others keep what a half cannot hold
        kept = torch.arange(masters[i].numel()) != 2 if i == 2 else slice(None)
        now = second.state[params[i]]["master_param"].flatten()
        assert torch.equal(now[kept], masters[i].flatten()[kept])


def test_copies_of_an_optimizer_keep_its_options():
    params = make_params()
    optimizer = AdamW(params, max_grad_norm=2.0, amp_scaling=False, ema_decay=0.9)
    twin = copy.deepcopy(optimizer)
    assert twin.max_grad_norm == 2.0
    assert twin._step_supports_amp_scaling is False
    assert twin.param_groups[0]["ema_decay"] == 0.9


@pytest.mark.parametrize("by_torch", [False, True])
def test_flags_that_saved_options_need_are_not_taken(by_torch):
    saved = AdamW(make_params(), zero_grad=True).state_dict()
    for amp_scaling in (None, False):
        optimizer = AdamW(make_params(), amp_scaling=amp_scaling)
        if by_torch:
            optimizer.register_load_state_dict_pre_hook(lambda *_: None)
        optimizer.load_state_dict(saved)
        assert vars(optimizer).get("_step_supports_amp_scaling") is amp_scaling
        assert optimizer.param_groups[0]["zero_grad"] is False


def test_parameter_added_later_gets_its_own_ema(backend, device):
    params = make_params(device, shapes=[(5,), (6,)])
    optimizer = AdamW(params[:1], ema_decay=0.5, lr=0.1)
    set_grads(params, 1)
    optimizer.step()
    optimizer.add_param_group({"params": params[1:], "ema_decay": 0.0})
    optimizer.step()
    assert torch.equal(optimizer.state[params[1]]["ema"], params[1])
    assert not torch.equal(optimizer.state[params[0]]["ema"], params[0])


# ---- The EMA -----------------------------------------------------------------------


def test_ema_is_swapped_in_and_out():
    params = make_params(dtype=torch.bfloat16)
    optimizer = AdamW(params, ema_decay=0.5, lr=0.1)
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    weights = [p.detach().clone() for p in params]
    emas = [optimizer.state[p]["ema"].clone() for p in params]
    with optimizer.ema_weights():
        for p, ema in zip(params, emas, strict=True):
            assert torch.equal(p, ema.bfloat16())
        with pytest.raises(RuntimeError, match="while the EMA is in the parameters"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="while the EMA is in the parameters"):
            optimizer.load_state_dict(optimizer.state_dict())
    for p, weight in zip(params, weights, strict=True):
        assert torch.equal(p, weight)
    targets = [torch.zeros(p.shape) for p in params]
    optimizer.copy_ema_to(targets)
    for target, ema in zip(targets, emas, strict=True):
        assert torch.equal(target, ema)
    optimizer.copy_ema_to()
    assert torch.equal(params[-1], emas[-1].bfloat16())
    with pytest.raises(ValueError, match=r"target must have \d+ tensors, got 1"):
        optimizer.copy_ema_to(targets[:1])
    with pytest.raises(RuntimeError, match="give AdamW an ema_decay"):
        AdamW(params).swap_ema()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.complex64])
def test_max_grad_norm_0_is_off(kind, later):
    runs = []
    for limit in (None, 0):
        param = torch.nn.Parameter(torch.ones(3, dtype=kind))
        optimizer = AdamW([param], max_grad_norm=1.0 if later else limit)
        optimizer.max_grad_norm = limit
        param.grad = torch.full_like(param, 1e-9)
        optimizer.step()
        assert optimizer.max_grad_norm == limit and optimizer.grad_norm is None
        runs.append(param)
    assert torch.equal(*runs)


# ---- Bad input ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": -1.0}, "max_grad_norm must be None or >= 0, got -1.0; None"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be None or >= 0"),
        ({"ema_decay": 1.0}, r"ema_decay must be None or in \[0, 1\), got 1.0"),
        ({"ema_decay": -0.1}, "ema_decay must be None or in"),
        ({"ema_decay": float("nan")}, "ema_decay must be None or in"),
        ({"weight_copy_dtype": torch.int8}, "weight_copy_dtype must be None or a"),
        (
            {"weight_copy_dtype": torch.float16, "master_weights": True},
            "master_weights and weight_copy_dtype must not be given together",
        ),
        (
            {"zero_grad": True, "write_back_grads": True},
            "zero_grad and write_back_grads must not be given together",
        ),
        (
            {"zero_grad": True, "amp_scaling": False},
            "zero_grad and amp_scaling=False must not be given together",
        ),
        (
            {"differentiable": True, "ema_decay": 0.9},
            "differentiable=True must not be given with ema_decay",
        ),
    ],
)
@pytest.mark.parametrize("cls", [AdamW, Adam])
def test_contradictions_are_refused_at_construction(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(make_params(), **options)
    if "max_grad_norm" in options or "differentiable" in options:
        return
    params = make_params()
    options = dict(options)
    whole = {n: options.pop(n) for n in ("amp_scaling",) if n in options}
    optimizer = cls(params[:1], **whole)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": params[1:], **options})
    assert len(optimizer.param_groups) == 1


def test_bad_second_group_leaves_the_first_as_it_was(backend, device):
    params = make_params(device, shapes=[(5,), (6,)])
    optimizer = AdamW([{"params": [p]} for p in params], max_grad_norm=1.0)
    set_grads(params, 1)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[1]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr must be finite and >= 0, got nan"):
        optimizer.step()
    for p, old in zip(params, before, strict=True):
        assert torch.equal(p, old)
        assert float(optimizer.state[p]["step"]) == 1
