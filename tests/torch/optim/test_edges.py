"""What trainfast.torch.AdamW does at the edges: replaced tensors, what the kernel does
not take, gradient scalers, on every backend."""

import warnings
import weakref

import numpy as np
import pytest
import torch

import trainfast
from tests import reference
from tests.pairwise import parametrize_pairs
from tests.torch_loops import assert_same_state, make_params, set_grads, train
from trainfast.torch import Adam, AdamW


@pytest.fixture(autouse=True)
def forget_stats():
    torch.manual_seed(0)
    trainfast.reset_stats()


# ---- What moves between steps ------------------------------------------------------


@pytest.mark.parametrize("size", [10, 5000])
@pytest.mark.parametrize("what", ["data", "state", "dict", "grad", "state_data"])
def test_what_is_replaced_between_steps_is_noticed(backend, device, what, size):
    def run(cls, steps=20):
        params = make_params(device, shapes=[(size,), (size,)])
        optimizer = cls(params)
        for step in range(steps):
            set_grads(params, step)
            optimizer.step()
            p, state = params[0], optimizer.state[params[0]]
            if step == 5 and what == "data":
                p.data = torch.full_like(p, 2.0)
            elif step == 5 and what == "state":
                state["exp_avg"] = torch.full_like(p, 0.5).detach()
                state["step"] = torch.tensor(50.0, device=p.device)
            elif step == 5 and what == "dict":
                optimizer.state[p] = {
                    k: torch.full_like(v, 3.0).detach() for k, v in state.items()
                }
            elif what == "grad":
                p.grad = None  # freed; the next step makes another
            elif step == 5 and what == "state_data":
                state["exp_avg"].data = torch.zeros_like(state["exp_avg"])
        return optimizer

    assert_same_state(run(AdamW), run(torch.optim.AdamW))


@parametrize_pairs(
    size=[10, 4095, 5000],
    name=["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"],
    how=["data", "set_", "both moved"],
)
def test_state_given_other_memory_is_stepped_there_at_once(
    backend, device, name, how, size
):
    """`tensor.data = x` keeps the tensor object; so do set_() and Module._apply()."""

    def run(cls):
        params = make_params(device, shapes=[(size,), (size,)])
        optimizer = cls(params, amsgrad=True)
        for step in range(6):
            set_grads(params, step)
            optimizer.step()
            value = optimizer.state[params[1]][name]
            other = torch.full_like(value, 1.0 + step)
            if how == "set_":
                value.set_(other.untyped_storage(), 0, other.shape)
            else:
                value.data = other
            if how == "both moved":
                params[1].data = params[1].data.clone()
        return optimizer

    assert_same_state(run(AdamW), run(torch.optim.AdamW))


@pytest.mark.parametrize("option", ["ema", "master_param", "weight_copy"])
def test_extra_state_given_other_memory_is_stepped_there_at_once(
    backend, device, option
):
    options = {
        "ema": {"ema_decay": 0.5},
        "master_param": {"master_weights": True},
        "weight_copy": {"weight_copy_dtype": torch.float16},
    }[option]
    dtype = torch.bfloat16 if option == "master_param" else torch.float32
    params = make_params(device, shapes=[(64,)], dtype=dtype)
    optimizer = train(AdamW, params, steps=2, **options)
    value = optimizer.state[params[0]][option]
    before = value.untyped_storage()
    left = value.detach().clone()
    value.data = torch.full_like(value, 7.0)
    set_grads(params, 3)
    (param,), state = params, optimizer.state[params[0]]
    source = value if option == "master_param" else param
    arrays = (source, param.grad, state["exp_avg"], state["exp_avg_sq"])
    arrays = [x.detach().double().cpu().numpy() for x in arrays]
    stepped = torch.from_numpy(reference.adamw(*arrays, step=3, lr=1e-3)[0])
    optimizer.step()
    wanted = 7 + 0.5 * (stepped - 7) if option == "ema" else stepped
    tolerance = 1e-3 if option == "weight_copy" else 1e-6
    torch.testing.assert_close(
        value.double().cpu(), wanted, rtol=tolerance, atol=tolerance
    )
    assert state[option] is value
    old = torch.empty(0, dtype=value.dtype, device=device).set_(before, 0, left.shape)
    assert torch.equal(old, left)  # the memory that it had is not written


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_that_was_moved_to_a_dtype_is_stepped_there(backend, device, dtype):
    """Module.to() gives the parameters other memory; the moments keep their dtype."""
    model = torch.nn.Linear(5, 3, bias=False, device=device)
    optimizer = AdamW(model.parameters(), lr=0.125)
    set_grads([model.weight], 1)
    optimizer.step()
    model.to(dtype)
    param, state = model.weight, optimizer.state[model.weight]
    param.grad = None
    set_grads([param], 2)
    arrays = (param, param.grad, state["exp_avg"], state["exp_avg_sq"])
    arrays = [x.detach().double().cpu().numpy() for x in arrays]
    wanted = map(torch.from_numpy, reference.adamw(*arrays, step=2, lr=0.125))
    optimizer.step()
    assert param.dtype == dtype and state["exp_avg"].dtype == torch.float32
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
    for found, right in zip((param, state["exp_avg"], state["exp_avg_sq"]), wanted):
        torch.testing.assert_close(
            found.detach().double().cpu(), right, rtol=tolerance, atol=1e-7
        )
    assert trainfast.stats().fallbacks == {}


def test_a_gradient_given_other_memory_is_read_there(backend, device):
    def run(cls):
        params = make_params(device, shapes=[(10,), (4095,)])
        optimizer = cls(params)
        set_grads(params, 0)
        for step in range(4):
            for param in params:
                param.grad.data = torch.full_like(param, 0.5 + step)
            optimizer.step()
        return optimizer

    assert_same_state(run(AdamW), run(torch.optim.AdamW))


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step", "ema"])
def test_state_on_another_device_is_an_error_and_nothing_changes(backend, name):
    """torch's own step would have changed the first parameter by then."""
    params = make_params(shapes=[(10,), (10,)])
    optimizer = train(AdamW, params, steps=2, ema_decay=0.5)
    first, second = (optimizer.state[param] for param in params)
    second[name] = second[name].to("meta")
    set_grads(params, 3)
    kept = [*params, *first.values(), *(p.grad for p in params)]
    before = [value.detach().clone() for value in kept]
    message = f"^{name} in the state .* must be on cpu, got meta; move the state with"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert all(map(torch.equal, kept, before))


def test_a_property_that_empties_the_list_of_params_is_survived(backend, device):
    """The call walks a copy of the list: reading .grad may run anything."""
    params = make_params(device, shapes=[(8,)] * 40)
    optimizer = train(AdamW, params, steps=1)
    emptied = []

    class Emptying(torch.nn.Parameter):
        @property
        def grad(self):
            emptied.append(len(optimizer.param_groups[0]["params"]))
            del optimizer.param_groups[0]["params"][1:]
            return super().grad

        @grad.setter
        def grad(self, value):
            torch.Tensor.grad.__set__(self, value)

    set_grads(params, 2)
    listed = optimizer.param_groups[0]["params"]
    listed[3] = Emptying(torch.zeros(8, device=device))
    listed[3].grad = torch.ones(8, device=device)
    optimizer.step()
    assert emptied


@pytest.mark.parametrize("size", [10, 5000])
@pytest.mark.parametrize("how", ["share", "resize"])
def test_state_whose_memory_moves_under_it_is_noticed(backend, device, how, size):
    """As when it is sent to another process: multiprocessing shares it first."""
    if device == "cuda" and how == "share":
        pytest.skip("shares no memory of the host")

    def run(cls):
        params = make_params(device, shapes=[(size,), (size,)])
        optimizer = cls(params)
        for step in range(10):
            set_grads(params, step)
            optimizer.step()
            for value in optimizer.state[params[0]].values() if step == 3 else ():
                if how == "share":
                    value.share_memory_()
                else:
                    storage = value.untyped_storage()
                    storage.resize_(3 * storage.nbytes())
        return optimizer

    assert_same_state(run(AdamW), run(torch.optim.AdamW))


def test_a_resized_gradient_is_refused(backend, device):
    params = make_params(device, shapes=[(6,), (6,)])
    optimizer = train(AdamW, params)
    params[0].grad.resize_(3)
    with pytest.raises(ValueError, match=r"grads\[0\] must have shape \(6,\)"):
        optimizer.step()
    assert all(float(optimizer.state[p]["step"]) == 5 for p in params)


@pytest.mark.parametrize("what", ["params", "grads", "exp_avgs"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids="+".join)
def test_a_freed_tensor_is_refused(backend, device, what, options):
    """As sharding libraries free memory; torch's own step reads it and crashes."""
    params = make_params(device, shapes=[(5000,), (5000,)])
    optimizer = train(AdamW, params, **options)
    state = optimizer.state[params[1]]
    freed = {"params": params[1], "grads": params[1].grad, "exp_avgs": state["exp_avg"]}
    freed[what].untyped_storage().resize_(0)
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match=rf"{what}\[1\] must have data, got a tensor"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert [float(optimizer.state[p]["step"]) for p in params] == [5, 5]
    assert fallbacks() == {}


@pytest.mark.parametrize("option", ["zero_grad", "write_back_grads"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_written_gradient_that_two_parameters_share_is_refused(
    backend, device, option, apart
):
    params = [torch.nn.Parameter(torch.ones(8, device=device)) for _ in range(3)]
    groups = [[params[0], params[1]], [params[2]]] if apart else [params]
    optimizer = AdamW([{"params": g} for g in groups], **{option: True})
    own = [torch.ones(9, device=device) for _ in params]
    for param, grad in zip(params, own, strict=True):
        param.grad = grad[:8]
    optimizer.step()
    before = [p.detach().clone() for p in params]
    own[0].fill_(1.0)
    for grad in (own[0][:8], own[0][1:]):  # all of it, or a part
        params[2].grad, params[0].grad = grad, own[0][:8]
        text = (
            r"grads\[\d\] of group \d .* of group" if apart else r"grads\[2\] .*s\[0\]"
        )
        for _ in range(2):  # what was refused is not trusted the next time
            with pytest.raises(ValueError, match=text):
                optimizer.step()
    assert all((g == 1).all() for g in own[:1])
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param, value)
    params[2].grad = own[2][:8]
    optimizer.step()


def test_a_parameter_that_changes_shape_takes_new_state(backend, device):
    p = torch.nn.Parameter(torch.ones(2, 3, device=device))
    optimizer = AdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.data = p.data.t().contiguous().t()  # the same shape, other strides
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].stride() == p.stride()
    torch.testing.assert_close(p, p[:1, :1].expand(2, 3))


def test_missing_state_is_named(backend, device):
    params = make_params(device, shapes=[(6,)])
    optimizer = train(AdamW, params)
    del optimizer.state[params[0]]["exp_avg_sq"]
    with pytest.raises(KeyError, match="exp_avg_sq"):
        optimizer.step()
    optimizer.state[params[0]] = "nonsense"
    with pytest.raises((TypeError, AttributeError)):
        optimizer.step()


@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_arrays_of_numpy_are_sent_to_trainfast_numpy(cls):
    with pytest.raises(TypeError, match="optimizer can only optimize Tensors") as seen:
        cls([np.zeros(3)])
    assert seen.value.__notes__ == ["For other arrays there is trainfast.numpy.AdamW."]
    with pytest.raises(TypeError) as seen:
        cls(3)
    assert not hasattr(seen.value, "__notes__")


def test_state_that_is_given_up_is_freed(backend, device):
    """Whoever moves a large state elsewhere wants its memory back, before a step."""
    params = make_params(device, shapes=[(5000,)])
    optimizer = train(AdamW, params)
    gone = [weakref.ref(s) for s in optimizer.state[params[0]].values()]
    storage = weakref.ref(optimizer.state[params[0]]["exp_avg"].untyped_storage())
    optimizer.state.clear()
    assert [r() for r in gone] == [None] * 3
    assert storage() is None


# ---- What the kernel does not take -------------------------------------------------


def fallbacks():
    return trainfast.stats().to_dict()["fallbacks"].get("adamw", {})


def test_complex_parameters_run_torchs_step(backend, device):
    def run(cls):
        gen = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(
            torch.randn(5, dtype=torch.complex64, generator=gen).to(device)
        )
        q = torch.nn.Parameter(torch.ones(3, device=device))
        optimizer = cls([p, q])
        for _ in range(3):
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
            optimizer.step()
        return optimizer

    ours, theirs = run(AdamW), run(torch.optim.AdamW)
    assert_same_state(ours, theirs)
    (reason,) = fallbacks()
    assert "must be float64, float32" in reason
    assert fallbacks()[reason] == 3


def test_sparse_gradients_raise_as_torch_does(backend, device):
    p = torch.nn.Parameter(torch.ones(5, 2, device=device))
    p.grad = torch.eye(5, 2, device=device).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        AdamW([p]).step()
    assert len(fallbacks()) == 1


def test_differentiable_runs_torchs_step(backend, device):
    p = torch.ones(3, requires_grad=True, device=device)
    clone = p.clone()
    optimizer = AdamW([p], differentiable=True)
    optimizer.param_groups[0]["params"] = [clone]
    clone.grad = (p * 2).detach()
    optimizer.step()
    assert clone.grad_fn is not None
    assert fallbacks() == {"differentiable=True": 1}


def test_subclasses_run_torchs_step(backend, device):
    class Mine(torch.Tensor):
        pass

    p = torch.nn.Parameter(torch.ones(3, device=device).as_subclass(Mine))
    q = torch.nn.Parameter(torch.ones(3, device=device))
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    AdamW([p]).step()
    AdamW([q]).step()
    assert "subclass" in str(fallbacks())
    torch.testing.assert_close(p.as_subclass(torch.Tensor), q.detach())


def test_fake_tensors_run_torchs_step(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        AdamW([p]).step()
    assert "subclass" in str(fallbacks()) or "null pointer" in str(fallbacks())


def test_meta_tensors_run_torchs_step(backend):
    params = make_params("meta", shapes=[(4,), (2, 3)])
    optimizer = train(AdamW, params, steps=2, amsgrad=True)
    for p in params:
        assert optimizer.state[p]["max_exp_avg_sq"].is_meta
        assert optimizer.state[p]["step"] == 2
    (reason,) = fallbacks()
    assert "meta" in reason


@pytest.mark.parametrize("cls", [AdamW, Adam])
def test_whole_fallbacks_are_warned_of_once(backend, monkeypatch, cls):
    monkeypatch.setattr("trainfast.torch.optim.torch_step._warned", set())
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)) for _ in "ab"]
    params += [torch.nn.Parameter(torch.ones(3))]

    def step(*groups):
        optimizer = cls([{"params": group} for group in groups])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.step()
        return caught

    params[0].grad = torch.ones(3, dtype=torch.complex64)
    params[2].grad = torch.ones(3)
    assert step(params[:2], params[2:]) == []  # a part of it runs on the core
    params[2].grad = None
    (warning,) = step(params[:2], params[2:])
    assert f"for all parameters of an {cls.__name__}, not the" in str(warning.message)
    assert "got complex64; give" in str(warning.message)
    assert warning.filename == __file__
    assert step(params[:2]) == []
    assert sum(fallbacks().values()) == 6


def test_a_fallback_does_not_run_hooks_twice():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    torch.optim.AdamW([p])  # torch wraps its step() when one is made
    optimizer, seen = AdamW([p]), []
    optimizer.register_step_pre_hook(lambda *a: seen.append(1))
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert seen == [1]


# ---- AMP with torch's own scaler ---------------------------------------------------


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_torchs_grad_scaler(backend, device, overflow, unscale):
    def run(cls, **options):
        model = torch.nn.Linear(6, 5).to(device)
        with torch.no_grad():
            gen = torch.Generator().manual_seed(3)
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=gen))
        optimizer = cls(model.parameters(), lr=0.1, **options)
        scaler = torch.amp.GradScaler(device, init_scale=128.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 6, device=device)).square().sum()
            scaler.scale(loss).backward()
            if overflow and step == 1:
                next(model.parameters()).grad[0, 0] = float("inf")
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return optimizer, scaler

    ours, a = run(AdamW, write_back_grads=True, amp_scaling=True)
    theirs, b = run(torch.optim.AdamW, fused=True)
    assert_same_state(ours, theirs)
    for p, q in zip(ours.state, theirs.state, strict=True):
        torch.testing.assert_close(p.grad, q.grad)  # written back unscaled
    assert a.get_scale() == b.get_scale()
    assert fallbacks() == {}


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids="+".join)
def test_torchs_grad_scaler_without_gradients(backend, device, options):
    """Its flag is an int then."""
    (param,) = make_params(device, shapes=[(5,)])
    optimizer = AdamW([param], amp_scaling=True, **options)
    before = param.detach().clone()
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    scaler.scale(param.sum())
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to"):
        scaler.update()
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    loss = scaler.scale(param.sum())
    scaler.unscale_(optimizer)
    loss.backward()  # too late: these are neither checked nor unscaled
    with pytest.raises(AssertionError, match="No inf checks were recorded for this"):
        scaler.step(optimizer)
    assert torch.equal(param, before) and not optimizer.state


def test_grad_scaler_with_a_transposed_gradient_writes_it_back(backend, device):
    p = torch.nn.Parameter(torch.ones(2, 3, device=device))
    optimizer = AdamW([p], write_back_grads=True)
    p.grad = (torch.arange(6.0, device=device).reshape(3, 2) * 8).t()
    optimizer.grad_scale = torch.tensor(8.0, device=device)
    optimizer.found_inf = torch.tensor(0.0, device=device)
    optimizer.step()
    want = torch.arange(6.0, device=device).reshape(3, 2).t()
    torch.testing.assert_close(p.grad, want)


def test_a_fallback_unscales_and_skips_too(backend, device):
    for found in (0.0, 1.0):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64, device=device))
        p.grad = torch.full_like(p, 8.0)
        optimizer = AdamW([p])
        optimizer.grad_scale = torch.tensor(8.0, device=device)
        optimizer.found_inf = torch.tensor(found, device=device)
        optimizer.step()
        assert optimizer.grad_scale == 8
        changed = not torch.equal(p, torch.ones_like(p))
        assert changed == (found == 0)
        if changed:
            torch.testing.assert_close(p.grad, torch.ones_like(p))
