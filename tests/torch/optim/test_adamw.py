"""trainfast.torch.AdamW and Adam as drop-ins for torch's, on every backend."""

import copy
import io
import pickle

import pytest
import torch
from torch.testing._internal.common_optimizers import (
    optim_db,
    optim_error_inputs_func_adam,
)

import trainfast
from tests.torch_loops import OURS, assert_same_state, make_params, set_grads, train
from trainfast.torch import AdamW
from trainfast.torch.optim.state import OPTIONS


@pytest.fixture(autouse=True)
def forget_stats():
    torch.manual_seed(0)
    trainfast.reset_stats()


# ---- torch's own option matrix -----------------------------------------------------


def entries():
    for info in optim_db:
        if info.optim_cls.__name__ in OURS:
            for entry in info.optim_inputs_func(device="cpu"):
                yield pytest.param(
                    info.optim_cls, entry.kwargs, id=f"{info.name}-{entry.desc}"
                )
            for extra in (
                {"lr": torch.tensor(0.01), "capturable": True},
                {"lr": torch.tensor(0.01), "amsgrad": True, "weight_decay": 0.1},
                {"capturable": True, "maximize": True},
            ):
                yield pytest.param(info.optim_cls, extra, id=f"{info.name}-{extra}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cls, options", list(entries()))
def test_every_entry_of_torchs_matrix_agrees_with_the_for_loop(
    backend, device, cls, options, dtype
):
    def on_device(value):
        return value.to(device) if isinstance(value, torch.Tensor) else value

    options = {k: on_device(v) for k, v in options.items()}
    plain = {k: v for k, v in options.items() if k not in ("fused", "foreach")}
    plain.pop("capturable", None)  # asserts a GPU, and rounds scalars to float32
    ours = train(OURS[cls.__name__], make_params(device, dtype), **options)
    theirs = train(cls, make_params(device, dtype), foreach=False, **plain)
    assert_same_state(ours, theirs)
    assert trainfast.stats().to_dict()["fallbacks"] == {}


@pytest.mark.parametrize("name", OURS)
def test_errors_of_torchs_matrix_are_torchs(name):
    for entry in optim_error_inputs_func_adam("cpu", torch.float32):
        kwargs = entry.optimizer_error_input.kwargs
        params = entry.optimizer_error_input.params
        if issubclass(entry.error_type, Warning):
            continue
        with pytest.raises(entry.error_type) as torchs:
            getattr(torch.optim, name)(params, **kwargs)
        with pytest.raises(entry.error_type) as mine:
            OURS[name](params, **kwargs)
        assert str(mine.value) == str(torchs.value)


# ---- Half types and mixed dtypes ---------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_where_torchs_fused_step_rounds(backend, device, dtype):
    ours = train(AdamW, make_params(device, dtype), lr=0.01)
    theirs = train(torch.optim.AdamW, make_params(device, dtype), lr=0.01, fused=True)
    for p, q in zip(ours.state, theirs.state, strict=True):
        for a, b in (
            (p, q),
            *zip(ours.state[p].values(), theirs.state[q].values(), strict=True),
        ):
            # at most a unit in the last place, and nearly all bits the same
            if device == "cpu":
                torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)
            else:  # torch's kernel contracts: a unit of a small exp_avg_sq moves more
                close = torch.isclose(a, b, rtol=2**-7, atol=1e-6)
                assert (~close).sum() <= a.numel() // 100
            if a.numel() > 1000:
                assert (a == b).double().mean() > 0.99


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("param", [torch.float32, torch.bfloat16, torch.float16])
def test_state_dtype_is_free_and_kept(backend, device, param, state):
    params = make_params(device, param)
    ours = train(AdamW, params, lr=0.01, state_dtype=state)
    exact = train(torch.optim.AdamW, make_params(device, param), lr=0.01, steps=0)
    for p in params:
        assert ours.state[p]["exp_avg"].dtype == state
        assert ours.state[p]["step"].dtype == torch.float32
    saved = io.BytesIO()
    torch.save(ours.state_dict(), saved)
    saved.seek(0)
    again = AdamW(make_params(device, param), state_dtype=state)
    again.load_state_dict(torch.load(saved))
    assert_same_state_values(again, ours)
    assert again.param_groups[0]["lr"] == 0.01
    exact.load_state_dict(ours.state_dict())  # torch casts it to its own layout
    assert exact.state[exact.param_groups[0]["params"][3]]["exp_avg"].dtype == param


def assert_same_state_values(a, b):
    for p, q in zip(
        a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True
    ):
        assert a.state[p].keys() == b.state[q].keys()
        for name in a.state[p]:
            x, y = a.state[p][name], b.state[q][name]
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_bfloat16_parameters_with_float32_state_follow_the_exact_path(backend, device):
    """The state is exact; only the parameter is rounded, once a step."""
    ours = train(AdamW, make_params(device, torch.bfloat16), state_dtype=torch.float32)
    exact = train(AdamW, make_params(device, torch.float32), steps=0)
    for step in range(5):
        set_grads(exact.param_groups[0]["params"], step + 100)
        for p in exact.param_groups[0]["params"]:
            p.grad = p.grad.bfloat16().float()
        exact.step()
    for p, q in zip(ours.state, exact.state, strict=True):
        torch.testing.assert_close(
            ours.state[p]["exp_avg_sq"], exact.state[q]["exp_avg_sq"]
        )


def test_gradients_of_another_dtype_work(backend, device):
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch ties a gradient's dtype to its parameter's")
    params = make_params(device, torch.bfloat16, shapes=[(40,)])
    exact = torch.nn.Parameter(params[0].detach().double())
    ours = AdamW(params, lr=0.1, state_dtype=torch.float32)
    theirs = torch.optim.AdamW([exact], lr=0.1, foreach=False)
    params[0].grad_dtype = torch.float32
    params[0].grad = torch.randn(40, device=device) / 3  # not bfloat16s
    exact.grad = params[0].grad.double()
    ours.step()
    theirs.step()
    torch.testing.assert_close(params[0].double(), exact, rtol=2**-8, atol=1e-6)
    mine, torchs = (o.state[p] for o, p in ((ours, params[0]), (theirs, exact)))
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(
            mine[name].double(), torchs[name], rtol=1e-6, atol=1e-12
        )
    assert trainfast.stats().to_dict()["fallbacks"] == {}


def test_several_dtypes_in_one_group(backend, device):
    def params():
        return [
            p
            for i, dtype in enumerate(
                (torch.float64, torch.bfloat16, torch.float32, torch.float16)
            )
            for p in make_params(device, dtype, shapes=[(33,), (5, 4)], seed=i)
        ]

    ours, theirs = (
        train(AdamW, params()),
        train(torch.optim.AdamW, params(), fused=True),
    )
    for p, q in zip(ours.state, theirs.state, strict=True):
        tolerance = 1e-2 if p.element_size() == 2 else 1e-6
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


# ---- Checkpoints -------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("first, second", [(AdamW, "torch"), ("torch", AdamW)])
def test_checkpoints_move_both_ways(backend, device, first, second, amsgrad):
    first, second = (torch.optim.AdamW if c == "torch" else c for c in (first, second))
    params = make_params(device)
    begun = train(first, params, amsgrad=amsgrad, lr=0.02)
    buffer = io.BytesIO()
    torch.save(begun.state_dict(), buffer)
    buffer.seek(0)
    continued = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = second(continued, amsgrad=amsgrad)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for step in range(3):
        set_grads(params, step)
        set_grads(continued, step)
        begun.step()
        other.step()
    assert_same_state(other, begun)
    assert other.param_groups[0]["lr"] == 0.02


def test_old_checkpoints_load():
    params = make_params(shapes=[(5,)])
    saved = train(AdamW, params).state_dict()
    for name in ("amsgrad", "maximize", "foreach", "capturable", "differentiable",
                 "fused", "decoupled_weight_decay", "state_dtype"):  # fmt: skip
        del saved["param_groups"][0][name]
    saved["state"][0]["step"] = 5  # before it was a tensor
    optimizer = AdamW(params)
    optimizer.load_state_dict(saved)
    set_grads(params, 0)
    optimizer.step()
    assert float(optimizer.state[params[0]]["step"]) == 6


def test_optimizers_pickled_before_the_options_step():
    params = make_params(shapes=[(5,), (3,)])
    state = train(AdamW, params, steps=1).__getstate__()
    for name in OPTIONS:
        del state["param_groups"][0][name], state["defaults"][name]
    del state["max_grad_norm"]
    optimizer = AdamW.__new__(AdamW)
    optimizer.__setstate__(state)
    set_grads(params, 101)
    optimizer.step()
    theirs = train(torch.optim.AdamW, make_params(shapes=[(5,), (3,)]), steps=2)
    assert_same_state(optimizer, theirs)


@pytest.mark.parametrize("extra", [None, 3, [torch.ones(2)], torch.arange(3)])
def test_entries_of_others_in_a_state_are_loaded_as_torch_does(extra):
    params = make_params(shapes=[(5,), (3, 4)])
    saved = copy.deepcopy(train(torch.optim.AdamW, params).state_dict())
    if extra is not None:
        saved["state"][0]["theirs"] = extra
    saved["state"]["nobody's"] = {"value": 1}
    loaded = []
    for cls in (torch.optim.AdamW, AdamW):
        optimizer = cls(params)
        optimizer.load_state_dict(saved)
        loaded.append(optimizer)
    theirs, ours = (dict(optimizer.state) for optimizer in loaded)
    assert ours.keys() == theirs.keys()
    for key, wanted in theirs.items():
        assert list(ours[key]) == list(wanted)
        for name, value in wanted.items():
            torch.testing.assert_close(ours[key][name], value)


def test_state_of_the_wrong_shape_is_refused(backend, device):
    params = make_params(device, shapes=[(5,)])
    optimizer = train(AdamW, params)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.zeros(6)
    optimizer.load_state_dict(saved)
    before = params[0].detach().clone()
    set_grads(params, 0)
    with pytest.raises(ValueError, match=r"exp_avgs\[0\] must have shape \(5,\)"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert float(optimizer.state[params[0]]["step"]) == 5


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_continue_independently(how):
    model = torch.nn.Linear(4, 3)
    optimizer = AdamW(model.parameters(), state_dtype=torch.float64, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    both = (model, optimizer)
    twin, twin_optimizer = (
        copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    )
    for m, o in ((model, optimizer), (twin, twin_optimizer)):
        o.zero_grad()
        m(torch.ones(2, 4)).square().sum().backward()
        o.step()
    assert torch.equal(model.weight, twin.weight)
    assert twin_optimizer.state[twin.weight]["exp_avg"].dtype == torch.float64
    twin_optimizer.step()
    assert not torch.equal(model.weight, twin.weight)


def test_names_and_types_are_torchs():
    params = make_params()
    for name, cls in OURS.items():
        optimizer = cls(params, fused=True)
        assert cls.__name__ == name
        assert isinstance(optimizer, getattr(torch.optim, name))
        theirs = getattr(torch.optim, name)(params, fused=True)
        mine = {k: v for k, v in optimizer.defaults.items() if k not in OPTIONS}
        assert mine == theirs.defaults
        assert optimizer.param_groups[0]["fused"] is True
    with pytest.raises(ValueError, match="state_dtype must be"):
        AdamW(params, state_dtype=torch.int8)


# ---- Training loops ----------------------------------------------------------------


def test_schedulers_hooks_closure_and_groups(backend, device):
    def run(cls):
        params = make_params(device)
        optimizer = cls(
            [
                {"params": params[:3], "weight_decay": 0.5},
                {"params": params[3:6], "betas": (0.5, 0.6), "lr": torch.tensor(0.1)},
            ]
        )
        optimizer.add_param_group({"params": params[6:], "lr": 0.3})
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        seen = []
        optimizer.register_step_pre_hook(lambda *a: seen.append("pre"))
        optimizer.register_step_post_hook(lambda *a: seen.append("post"))

        def closure():
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = sum((p * p).sum() for p in params)
            loss.backward()
            return loss

        losses = []
        for _ in range(5):
            losses.append(float(optimizer.step(closure).detach()))
            scheduler.step()
        assert seen == ["pre", "post"] * 5
        return optimizer, losses

    (ours, a), (theirs, b) = run(AdamW), run(torch.optim.AdamW)
    assert a == pytest.approx(b, rel=1e-5)
    assert_same_state(ours, theirs)


def test_gradients_that_come_and_go(backend, device):
    def run(cls):
        params = make_params(device)
        optimizer = cls(params)
        for step in range(6):
            set_grads(params, step)
            for i, p in enumerate(params):
                if (i + step) % 3 == 0:
                    p.grad = None
            if step < 2:
                params[0].grad = None  # appears late
            optimizer.step()
        return optimizer

    ours, theirs = run(AdamW), run(torch.optim.AdamW)
    assert_same_state(ours, theirs)


def test_gradients_are_what_the_attribute_says(backend, device, monkeypatch):
    """The step looks `grad` up once a group, where that cannot make a difference."""
    plain, other = make_params(device, shapes=[(6,), (6,)])
    set_grads([plain, other], 0)
    before = [p.detach().clone() for p in (plain, other)]
    gradient = torch.ones_like(other)
    torchs = torch.nn.Parameter.grad
    monkeypatch.setattr(
        torch.nn.Parameter,
        "grad",
        property(lambda p: gradient if p is other else torchs.__get__(p)),
        raising=False,
    )
    AdamW([plain, other], lr=0.5, weight_decay=0, eps=0).step()
    signs = torchs.__get__(plain).sign(), gradient
    for p, old, sign in zip((plain, other), before, signs, strict=True):
        torch.testing.assert_close(p, old - 0.5 * sign)


def test_step_without_any_gradient_does_nothing(backend, device):
    params = make_params(device)
    optimizer = AdamW(params)
    optimizer.step()
    assert len(optimizer.state) == 0


def test_gradients_that_are_views_of_one_bucket(backend, device):
    """As DistributedDataParallel makes them: one flat buffer, any offset."""

    def run(cls):
        params = make_params(device)
        optimizer = cls(params)
        bucket = torch.zeros(sum(p.numel() for p in params) + 1, device=device)
        at = 1
        for p in params:
            p.grad = bucket[at : at + p.numel()].view_as(p)
            at += p.numel()
        for step in range(3):
            bucket.copy_(
                torch.randn(
                    bucket.numel(), generator=torch.Generator().manual_seed(step)
                )
            )
            optimizer.step()
        return optimizer

    assert_same_state(run(AdamW), run(torch.optim.AdamW))


def test_gradients_in_other_layouts(backend, device):
    """torch's fused CPU step reads a transposed gradient as if it were not."""

    def run(cls, **options):
        gen = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(6, 4, generator=gen).to(device)),
            torch.nn.Parameter(
                torch.randn(2, 3, 4, 5, generator=gen)
                .to(device)
                .to(memory_format=torch.channels_last)
            ),
        ]
        optimizer = cls(params, **options)
        for _ in range(3):
            params[0].grad = torch.randn(4, 6, generator=gen).to(device).t()
            params[1].grad = torch.randn(2, 3, 4, 5, generator=gen).to(device)
            optimizer.step()
        return optimizer

    ours, theirs = run(AdamW), run(torch.optim.AdamW, foreach=False)
    assert_same_state(ours, theirs)
    assert "layout" not in str(trainfast.stats().to_dict()["fallbacks"])


@pytest.mark.parametrize("amsgrad", [False, True])
def test_infinities_and_nans_spread_as_with_torch(backend, device, amsgrad):
    def run(cls, **options):
        params = make_params(device, shapes=[(300,), (2,)])
        optimizer = cls(params, amsgrad=amsgrad, lr=0.1, **options)
        for step in range(4):
            set_grads(params, step)
            for at, value in ((0, "nan"), (7, "inf"), (299, "-inf"), (64, "3e38")):
                params[0].grad[at] = float(value) if step == 1 else 1.0
            optimizer.step()
        return optimizer

    ours, theirs = run(AdamW), run(torch.optim.AdamW, foreach=False)
    assert_same_state(ours, theirs, equal_nan=True, rtol=1.3e-6, atol=1e-5)
    assert not ours.param_groups[0]["params"][0].isfinite().all()


def test_negative_views_are_read_with_their_sign(backend, device):
    def run(cls):
        z = torch.randn(3, dtype=torch.complex64, generator=torch.Generator())
        params = [torch.nn.Parameter(torch.ones(n, device=device)) for n in (1, 3)]
        params[0].grad = z.to(device).conj().imag[:1]
        params[1].grad = z.to(device).conj().imag
        assert params[0].grad.is_neg()
        optimizer = cls(params)
        optimizer.step()
        return optimizer

    assert_same_state(run(AdamW), run(torch.optim.AdamW))


def test_transposed_and_channels_last_parameters(backend, device):
    def run(cls):
        gen = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.randn(6, 4, generator=gen).to(device).t())
        optimizer = cls([p])
        for _ in range(3):
            p.grad = torch.randn(4, 6, generator=gen).to(device)
            optimizer.step()
        return optimizer

    assert_same_state(run(AdamW), run(torch.optim.AdamW))


def test_many_tensors_are_stepped_and_their_versions_bumped_once(backend, device):
    """More than are bumped at a time; some small, some large, some without gradient."""

    def run(cls, **options):
        shapes = [(5000,) if i % 3 else (10,) for i in range(300)]
        params = make_params(device, shapes=shapes)
        optimizer = cls(params, **options)
        for step in range(3):
            set_grads(params, step)
            for param in params[5::7]:
                param.grad = None
            if step == 2:  # these have state, but no gradient
                params[0].grad = params[-1].grad = None
            before = [p._version for p in params]
            grads = [p.grad if p.grad is None else p.grad._version for p in params]
            optimizer.step()
            if not options:
                continue
            for param, old, grad in zip(params, before, grads, strict=True):
                assert param._version == old + (grad is not None)
                assert grad is None or param.grad._version == grad + 1
        return optimizer

    assert_same_state(run(AdamW, zero_grad=True), run(torch.optim.AdamW))


def test_in_place_changes_are_seen_by_autograd(backend, device):
    w = torch.nn.Parameter(torch.ones(3, device=device))
    frozen = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = AdamW([w, frozen])
    loss = (w * w * frozen.detach()).sum()
    loss.backward(retain_graph=True)
    versions = w._version, frozen._version
    optimizer.step()
    assert w._version > versions[0]
    assert frozen._version == versions[1]  # has no gradient, was not written
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- torch.compile -----------------------------------------------------------------


@pytest.mark.parametrize("backend_name", ["eager", "aot_eager"])
def test_a_compiled_loop_takes_the_same_steps(backend_name):
    def run(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = AdamW(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run_step = torch.compile(step, backend=backend_name) if compiled else step
        return [float(run_step(torch.ones(3, 4)).detach()) for _ in range(4)]

    assert run(True) == pytest.approx(run(False), rel=1e-4)


def test_a_compiled_model_trains():
    model = torch.nn.Linear(4, 4)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = AdamW(compiled.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = compiled(torch.ones(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert trainfast.stats().to_dict()["calls"]["adamw"]


def test_loaded_groups_share_nothing_that_can_change():
    saved = make_plain_state()
    saved["param_groups"][0] |= {"lr": torch.tensor(0.5), "betas": [0.8, 0.9]}
    saved["param_groups"][0]["note"] = {"tags": [1]}
    optimizer = trainfast.torch.AdamW([torch.nn.Parameter(torch.zeros(3))])
    optimizer.load_state_dict(saved)
    group, before = optimizer.param_groups[0], saved["param_groups"][0]
    for name in ("lr", "betas", "note"):
        assert group[name] == before[name] and group[name] is not before[name]
    assert before["params"] == [0] and len(group["params"]) == 1


@pytest.mark.parametrize("change", ["groups", "params", "names", "unknown"])
def test_what_loads_by_torch_loads_or_fails_as_torch_does(change):
    saved = make_plain_state()
    group = saved["param_groups"][0]
    if change == "groups":
        saved["param_groups"].append(group)
    elif change == "params":
        group["params"] = [0, 1]
    elif change == "names":
        group["param_names"] = ["weight"]
    else:
        saved["state"]["other"] = {"note": 1}

    def load(cls):
        optimizer = cls([torch.nn.Parameter(torch.zeros(3))])
        try:
            optimizer.load_state_dict(saved)
        except (KeyError, ValueError) as error:
            return type(error), str(error)
        state = optimizer.state_dict()
        return state["param_groups"][0].get("param_names"), optimizer.state.get("other")

    assert load(trainfast.torch.AdamW) == load(torch.optim.AdamW)


def make_plain_state():
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([param])
    optimizer.step()
    return optimizer.state_dict()
