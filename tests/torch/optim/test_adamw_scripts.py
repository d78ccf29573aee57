"""What training scripts do to their optimizer by hand, against torch's."""

import copy
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.optim import adam

import trainfast
from tests.torch_loops import assert_same_state, make_params, set_grads, train
from trainfast import _core
from trainfast.torch import AdamW
from trainfast.torch.optim import torch_step


@pytest.fixture(autouse=True)
def forget_stats():
    trainfast.reset_stats()


def fallbacks():
    return trainfast.stats().fallbacks.get("adamw", {})


def run_both(change, device="cpu", **options):
    """Two steps, the change, and two more; of torch's and of ours."""
    made = []
    for cls in (torch.optim.AdamW, AdamW):
        params = make_params(device, shapes=[(5,), (4, 6), (3,)])
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
        optimizer = train(cls, groups, steps=0, lr=0.01, **options)
        for step in range(4):
            if step == 2:
                change(optimizer)
            set_grads(params, step)
            optimizer.step()
        made.append(optimizer)
    return made


# ---- Groups that are edited --------------------------------------------------------


@pytest.mark.parametrize(
    "lr", [np.float32(0.125), np.array(0.1), Fraction(1, 8), 1, torch.tensor([0.125])]
)
def test_a_rate_may_be_any_kind_of_number(backend, device, lr):
    if isinstance(lr, torch.Tensor) and not hasattr(adam, "_to_scalar"):
        pytest.skip("this torch's own step takes no tensor with a dimension as lr")
    theirs, ours = run_both(lambda o: o.param_groups[0].update(lr=lr), device)
    assert_same_state(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not fallbacks()


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_a_negative_number_runs_torchs_step(backend, device, name):
    """A schedule may pass its end; torch takes that, so a run must not end of it."""
    theirs, ours = run_both(lambda o: o.param_groups[0].update({name: -0.05}), device)
    assert_same_state(ours, theirs, rtol=1e-5, atol=1e-6)
    assert fallbacks() == {"lr or weight_decay is negative": 2}


@pytest.mark.parametrize("kind", [tuple, torch.nn.ParameterList])
def test_params_of_a_group_may_be_another_sequence(backend, device, kind):
    def change(optimizer):
        group = optimizer.param_groups[0]
        group["params"] = kind(group["params"])

    theirs, ours = run_both(change, device)
    assert_same_state(ours, theirs, rtol=1e-5, atol=1e-6)


def test_groups_of_ones_own_making_are_completed(backend, device):
    def change(optimizer):
        keys = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
        optimizer.param_groups = [
            {key: group[key] for key in keys} for group in optimizer.param_groups
        ]

    theirs, ours = run_both(change, device)
    assert_same_state(ours, theirs, rtol=1e-5, atol=1e-6)
    assert ours.param_groups[0]["ema_decay"] is None


def test_a_group_that_is_refused_is_not_added():
    optimizer = AdamW(make_params()[:1])
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": make_params(), "ema_decay": "0.9"})
    assert len(optimizer.param_groups) == 1


def test_a_subclass_may_have_a_constructor_of_its_own(backend, device):
    def steps(cls):
        class Mine(cls):
            def __init__(self, params):
                defaults = torch.optim.AdamW([torch.zeros(1)]).defaults
                torch.optim.Optimizer.__init__(self, params, dict(defaults))

        return train(Mine, make_params(device))

    assert_same_state(steps(AdamW), steps(torch.optim.AdamW), rtol=1e-5, atol=1e-6)
    assert not fallbacks()


# ---- State that others have made or moved ------------------------------------------


def test_a_subclass_that_chooses_what_is_stepped_runs_torchs_step(backend, device):
    def run(base):
        class Frozen(base):
            def _init_group(self, group, *lists, **more):
                stepped = {**group, "params": group["params"][1:]}
                return super()._init_group(stepped, *lists, **more)

        return train(Frozen, make_params(device, shapes=[(4,), (5,)]))

    ours, theirs = run(AdamW), run(torch.optim.AdamW)
    for one, other in zip(*(o.param_groups[0]["params"] for o in (ours, theirs))):
        torch.testing.assert_close(one, other)
    assert fallbacks() == {"the class has an _init_group() of its own": 5}


def refused(reason):
    """An optimizer on which torch's step runs, for this reason."""
    options = {"differentiable": True} if reason == "differentiable" else {}
    optimizer = AdamW(make_params(shapes=[(4,)]), **options)
    if reason == "lr":
        optimizer.param_groups[0]["lr"] = -0.1
    set_grads(optimizer.param_groups[0]["params"], 0)
    return optimizer


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("differentiable", "drop it unless gradients flow through the step, or leave"),
        ("lr", "is negative; give numbers >= 0, or leave them to torch's AdamW"),
    ],
)
def test_the_warning_of_a_fallback_says_what_to_do(monkeypatch, reason, remedy):
    monkeypatch.setattr(torch_step, "_warned", set())
    optimizer = refused(reason)
    if reason == "differentiable":
        optimizer.param_groups[0]["params"][0].requires_grad_(False)
    with pytest.warns(UserWarning, match=remedy):
        optimizer.step()


def test_sparse_gradients_raise_torchs_error_without_a_warning(monkeypatch, recwarn):
    monkeypatch.setattr(torch_step, "_warned", set())
    table = torch.nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="not support sparse gradients"):
        AdamW(table.parameters()).step()
    assert not [w for w in recwarn if "torch's own step" in str(w.message)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_counters_of_another_dtype_become_float32(backend, device, dtype):
    def change(optimizer):
        for state in optimizer.state.values():
            state["step"] = state["step"].to(dtype)

    # torch's foreach refuses such counters on a GPU.
    _, changed = run_both(change, device, foreach=False)
    _, plain = run_both(lambda optimizer: None, device)
    assert_same_state(changed, plain, rtol=0, atol=0)
    assert all(s["step"].dtype == torch.float32 for s in changed.state.values())


def test_counters_that_torchs_compiled_step_has_made_are_taken(backend, device):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # torch's counters are of this dtype
    try:
        (param,) = make_params(device, shapes=[(5,)])
        optimizer = AdamW([param])
        step = torch.compile(lambda: optimizer.step(), backend="eager")
        for each in (step, optimizer.step, step):
            set_grads([param], 1)
            each()
    finally:
        torch.set_default_dtype(before)
    assert float(optimizer.state[param]["step"]) == 3


@pytest.mark.parametrize("kind", [np.int64, np.float32, np.array])
def test_counters_of_numpy_are_loaded(kind):
    optimizer = train(AdamW, make_params(), steps=3)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = kind(state["step"].item())
    again = AdamW(make_params())
    if kind is np.array:  # torch iterates over it
        with pytest.raises(TypeError, match="iteration over a 0-d array"):
            again.load_state_dict(saved)
        return
    again.load_state_dict(saved)
    assert all(float(state["step"]) == 3 for state in again.state.values())


# ---- Memory that the core does not take --------------------------------------------


def tied(cls, device, same=False, **options):
    """An optimizer of weights that share memory, after three steps.

    Without foreach, which on a GPU steps both at once.
    """
    weight = torch.nn.Parameter(torch.ones(6, device=device))
    other = weight if same else torch.nn.Parameter(weight.data[2:])
    options["foreach"] = False
    optimizer = cls([torch.nn.Parameter(torch.ones(3, device=device))], **options)
    params = optimizer.param_groups[0]["params"]
    params += [weight, other]
    for step in range(3):
        for i, param in enumerate(params):
            param.grad = torch.full_like(param, i + step + 1.0)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("same", [False, True])
def test_tied_weights_run_torchs_step(backend, device, same):
    theirs, ours = (tied(c, device, same) for c in (torch.optim.AdamW, AdamW))
    assert_same_state(ours, theirs, rtol=1e-5, atol=1e-6)
    (reason,) = fallbacks()
    assert "must not overlap" in reason


@pytest.mark.parametrize("option", ["zero_grad", "write_back_grads"])
def test_tied_weights_whose_gradients_are_written_are_refused(device, option):
    with pytest.raises(_core.PlacementError, match="must not overlap"):
        tied(AdamW, device, same=True, **{option: True})


def test_a_shared_counter_runs_torchs_step(backend, device):
    def change(optimizer):
        (a, b), _ = (group["params"] for group in optimizer.param_groups)
        optimizer.state[b]["step"] = optimizer.state[a]["step"]

    theirs, ours = run_both(change, device, foreach=False)  # or it counts in parallel
    assert_same_state(ours, theirs, rtol=1e-5, atol=1e-6)
    assert fallbacks()


@pytest.mark.parametrize("what", ["param", "grad"])
def test_misaligned_tensors_run_torchs_step(backend, what, monkeypatch):
    def steps(cls):
        odd = torch.frombuffer(bytearray(64), dtype=torch.float32, count=8, offset=1)
        odd.fill_(0.5)
        param = torch.nn.Parameter(odd if what == "param" else torch.ones(8))
        param.grad = odd if what == "grad" else torch.ones(8)
        optimizer = cls([param])
        optimizer.step()
        return optimizer

    monkeypatch.setattr(torch_step, "_warned", set())
    with pytest.warns(UserWarning, match="must be aligned") as warned:
        kept = [steps(AdamW) for _ in range(3)]  # at other addresses
    assert len(warned) == 1
    assert_same_state(kept[0], steps(torch.optim.AdamW))
    assert all("must be aligned" in reason for reason in fallbacks())


def test_a_fallback_unscales_a_shared_gradient_once(backend, device):
    param, other = make_params(device, shapes=[(4,), (4,)])
    gaps = torch.nn.Parameter(torch.ones(8, device=device)[::2])
    for each in (param, other, gaps):
        each.data.fill_(1.0)
    param.grad = other.grad = gaps.grad = torch.full((4,), 8.0, device=device)
    optimizer = AdamW([param, other, gaps], lr=0.1, max_grad_norm=1.0)
    optimizer.grad_scale = torch.tensor(8.0, device=device)
    optimizer.step()
    assert fallbacks()
    assert optimizer.grad_norm.item() == pytest.approx(12**0.5)
    torch.testing.assert_close(param.grad, torch.full_like(param, 12**-0.5))


# ---- The call ----------------------------------------------------------------------


def test_scalars_lie_beside_the_first_parameter_that_is_stepped(monkeypatch):
    """Not beside a frozen one before it, which may be on another device."""
    from trainfast import _core

    seen = []

    def spy(groups, *arguments):
        seen.append([a.device.type for a in arguments if isinstance(a, torch.Tensor)])
        return call(groups, *arguments)

    call = _core.adamw_groups
    monkeypatch.setattr(_core, "adamw_groups", spy)
    params = [*make_params("meta", shapes=[(2,)]), *make_params(shapes=[(3,)])]
    optimizer = AdamW(params, max_grad_norm=1.0)
    set_grads(params[1:], 1)
    optimizer.step()
    assert seen and {kind for kinds in seen for kind in kinds} == {"cpu"}
    assert not fallbacks()


# ---- The EMA -----------------------------------------------------------------------


def test_an_ema_block_inside_another_leaves_the_ema_there():
    params = make_params(shapes=[(4,)])
    optimizer = train(AdamW, params, ema_decay=0.5)
    (param,) = params
    weight, ema = param.detach().clone(), optimizer.state[param]["ema"].clone()
    with optimizer.ema_weights():
        with optimizer.ema_weights():
            assert torch.equal(param, ema)
        assert torch.equal(param, ema)
    assert torch.equal(param, weight)


@pytest.mark.parametrize("how", ["first steps", "put back"])
def test_an_ema_block_never_ends_with_the_ema_in_place(how):
    params = make_params(shapes=[(4,)])
    optimizer = train(AdamW, params, steps=3 * (how == "put back"), ema_decay=0.5)
    (param,) = params
    with optimizer.ema_weights():
        if how == "put back":
            optimizer.swap_ema()
        else:  # there is no EMA yet, so that these are not refused
            set_grads(params, 1)
            optimizer.step()
        weight = param.detach().clone()
    assert torch.equal(param, weight)
    optimizer.step()


def test_a_swap_that_fails_puts_back_what_was_there():
    params = make_params(shapes=[(4,), (5,)])
    optimizer = train(AdamW, params, ema_decay=0.5)
    weights = [p.detach().clone() for p in params]
    optimizer.state[params[1]]["ema"] = torch.zeros(7)
    with pytest.raises(RuntimeError):
        optimizer.swap_ema()
    assert all(map(torch.equal, params, weights))
    set_grads(params[:1], 1)
    params[1].grad = None
    optimizer.step()


def test_an_optimizer_is_not_copied_while_the_ema_is_in_place():
    optimizer = train(AdamW, make_params(shapes=[(4,)]), ema_decay=0.5)
    with (
        optimizer.ema_weights(),
        pytest.raises(RuntimeError, match="must not be copied while the EMA"),
    ):
        copy.deepcopy(optimizer)
    copy.deepcopy(optimizer)
