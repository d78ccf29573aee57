"""AdamW and Adam with state_dtype="int8"."""

import copy
import io
import warnings

import pytest
import torch

import trainfast
from tests.pairwise import option_cases
from tests.torch.optim.test_options import CONTRADICTIONS, OPTIONS
from trainfast.torch import Adam, AdamW

SHAPES = [(4096,), (70, 90), (3, 2000), (4095,), ()]
CODES = ("exp_avg_q8", "exp_avg_sq_q8", "scales_q8")


def train(optimizer, params, steps=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=rng).to(p.dtype)
        optimizer.step()


def made(cls=AdamW, dtype=torch.float32, shapes=SHAPES, **options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    return params, cls(params, lr=0.01, **{"state_dtype": "int8", **options})


def moved(params, start):
    return torch.cat([(p - s).detach().flatten() for p, s in zip(params, start)])


@pytest.mark.parametrize("cls", [AdamW, Adam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", option_cases(OPTIONS, CONTRADICTIONS), ids=str)
def test_options_follow_float_state(fresh_stats, backend, cls, dtype, options):
    options = {k: v for k, v in options.items() if k != "grad_scale"}
    coded, ours = made(cls, dtype, **options)
    plain, theirs = made(cls, dtype, state_dtype=torch.float32, **options)
    start = [p.detach().clone() for p in plain]
    train(ours, coded)
    train(theirs, plain)
    assert not trainfast.stats().to_dict()["fallbacks"]
    right = moved(plain, start)
    assert (moved(coded, start) - right).norm() < 0.15 * right.norm()
    for p in coded:
        has = set(CODES) <= set(ours.state[p])
        assert has == (p.numel() >= 4096) != ("exp_avg" in ours.state[p])


def test_state_takes_about_two_bytes_a_parameter():
    (param,), optimizer = made(shapes=[(1000, 128)])
    train(optimizer, [param], 1)
    state = [v for k, v in optimizer.state[param].items() if k != "step"]
    assert sum(v.nbytes for v in state) == 128_000 * 2 + 1000 * 3 * 4


@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_a_copy_goes_on_with_the_same_bits(way):
    params, optimizer = made(amsgrad=True)
    train(optimizer, params)
    if way == "state_dict":
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        others, twin = made(amsgrad=True)
        with torch.no_grad():
            for p, q in zip(params, others, strict=True):
                q.copy_(p)
        twin.load_state_dict(torch.load(file, weights_only=True))
    elif way == "deepcopy":
        others, twin = copy.deepcopy((params, optimizer))
    else:
        file = io.BytesIO()
        torch.save((params, optimizer), file)
        file.seek(0)
        others, twin = torch.load(file, weights_only=False)
    train(optimizer, params, seed=1)
    train(twin, others, seed=1)
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        for name, value in optimizer.state[p].items():
            assert torch.equal(value, twin.state[q][name]), name


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "by torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_load_both_ways(hook, dtype):
    coded, ours = made(dtype=dtype)
    plain, theirs = made(dtype=dtype, state_dtype=torch.float32)
    train(ours, coded)
    train(theirs, plain)
    for optimizer in (ours, theirs):
        if hook:
            optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    saved = copy.deepcopy(ours.state_dict()), copy.deepcopy(theirs.state_dict())
    theirs.load_state_dict(saved[0])
    ours.load_state_dict(saved[1])
    for p, q, shape in zip(coded, plain, SHAPES, strict=True):
        assert "exp_avg" in theirs.state[q] and "exp_avg_q8" not in theirs.state[q]
        assert ("exp_avg_q8" in ours.state[p]) == (p.numel() >= 4096), shape
        assert theirs.state[q]["exp_avg"].dtype == torch.float32
    before = theirs.state_dict()["state"][1]["exp_avg"]
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))  # there and back
    after = theirs.state_dict()["state"][1]["exp_avg"]
    assert (after - before).norm() < 0.03 * before.norm()
    train(ours, coded, 1)
    train(theirs, plain, 1)


def test_torchs_class_does_not_take_codes_for_floats():
    params, optimizer = made(shapes=[(64, 64)])
    train(optimizer, params)
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(optimizer.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        theirs.step()


def test_codes_of_another_layout_are_converted():
    (param,), optimizer = made(shapes=[(8, 16, 8, 8)])
    train(optimizer, [param])
    (other,), twin = made(shapes=[(8, 16, 8, 8)])
    other.data = param.detach().clone(memory_format=torch.channels_last)
    twin.load_state_dict(optimizer.state_dict())
    train(optimizer, [param], 2, seed=1)
    start = other.detach().clone()
    train(twin, [other], 2, seed=1)
    assert twin.state[other]["exp_avg_q8"].stride() == other.stride()
    assert (param - other).norm() < 0.2 * (other - start).norm()


def test_a_parameter_that_changes_its_layout_keeps_its_moments():
    (param,), optimizer = made(shapes=[(8, 16, 8, 8)])
    (same,), twin = made(shapes=[(8, 16, 8, 8)])
    train(optimizer, [param])
    train(twin, [same])
    param.data = param.detach().clone(memory_format=torch.channels_last)
    start = same.detach().clone()
    train(optimizer, [param], 2, seed=1)
    train(twin, [same], 2, seed=1)
    assert (param - same).norm() < 0.2 * (same - start).norm()


def test_amsgrad_can_be_switched_off():
    params, optimizer = made(amsgrad=True)
    train(optimizer, params)
    optimizer.param_groups[0]["amsgrad"] = False
    train(optimizer, params)
    assert optimizer.state[params[0]]["scales_q8"].shape == (32, 3)


def test_what_torch_steps_is_decoded_and_counted(fresh_stats):
    params, optimizer = made(shapes=[(64, 64)])
    plain, theirs = made(shapes=[(64, 64)], state_dtype=None)
    for o, p in ((optimizer, params), (theirs, plain)):
        train(o, p)
        o.param_groups[0]["lr"] = -0.01
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # once a process
            train(o, p, 1)
    assert trainfast.stats().to_dict()["fallbacks"]
    assert "exp_avg_q8" in optimizer.state[params[0]]
    assert (params[0] - plain[0]).abs().max() < 2e-3


def test_skipped_step_keeps_every_bit():
    params, optimizer = made()
    train(optimizer, params)
    before = copy.deepcopy(optimizer.state_dict())
    for p in params:
        p.grad.fill_(torch.inf)
    optimizer.found_inf = torch.ones(())
    optimizer.grad_scale = torch.ones(())
    optimizer.step()
    for i, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(value, optimizer.state_dict()["state"][i][name])


def test_another_text_is_refused():
    with pytest.raises(ValueError, match='torch or "int8", got int4'):
        made(state_dtype="int4")
    with pytest.raises(ValueError, match="weight_copy_dtype must be None or a"):
        made(weight_copy_dtype="int8")
