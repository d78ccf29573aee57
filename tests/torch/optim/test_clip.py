"""trainfast.torch's clipping as a drop-in for torch.nn.utils', on every backend."""

import math
import threading
import warnings

import pytest
import torch

import trainfast
from tests.torch_version import TORCH
from trainfast.stats import CallTally
from trainfast.torch import clip_grad_norm_, clip_grad_value_, get_total_norm
from trainfast.torch.optim import state as adamw_state
from trainfast.torch.optim.clip import _Measuring, measure

SHAPES = [(), (1,), (7,), (10, 10), (257,), (0, 4), (300, 61)]
NORMS = [2.0, 1, 0.5, 1.5, 3, 4, "inf", math.inf]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def forget_stats():
    trainfast.reset_stats()


def make_params(device="cpu", dtype=torch.float32, shapes=SHAPES, factor=1.0):
    gen = torch.Generator().manual_seed(3)
    params = []
    for shape in shapes:
        param = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
        grad = factor * torch.randn(shape, generator=gen, dtype=torch.float64)
        param.grad = grad.to(device, dtype)
        params.append(param)
    return params


def grads_of(params):
    return [p.grad for p in params]


def exact_norm(params, norm_type):
    flat = torch.cat([p.grad.double().cpu().reshape(-1) for p in params])
    return torch.linalg.vector_norm(flat, float(norm_type))


def fallbacks():
    return trainfast.stats().fallbacks.get("clip", {})


# ---- As torch ------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_total_norm_is_that_of_all_elements(backend, device, dtype, norm_type):
    params = make_params(device, dtype)
    total = get_total_norm(grads_of(params), norm_type)
    assert total.dtype == dtype
    assert total.shape == () and total.device.type == device
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5}.get(
        dtype, torch.finfo(dtype).eps
    )
    exact = exact_norm(params, norm_type).to(dtype)
    torch.testing.assert_close(total.cpu(), exact, rtol=rtol, atol=0)
    assert fallbacks() == {}


@pytest.mark.parametrize("max_norm", [0.5, 1e9, 0, -1, math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_clipping_agrees_with_torchs(backend, device, dtype, norm_type, max_norm):
    shapes = [shape for shape in SHAPES if 0 not in shape]  # torch's infinity norm
    ours, theirs = (make_params(device, dtype, shapes) for _ in range(2))
    mine = clip_grad_norm_(ours, max_norm, norm_type)
    torchs = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=0)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_are_measured_in_float32(backend, device, dtype):
    params = make_params(device, dtype, factor=8)
    exact = [p.grad.double() for p in params]
    norm = exact_norm(params, 2)
    total = clip_grad_norm_(params, 1.0)
    assert torch.equal(total.cpu(), norm.to(dtype))
    for p, grad in zip(params, exact, strict=True):
        wanted = (grad / (norm.to(device) + 1e-6)).to(dtype)
        torch.testing.assert_close(p.grad, wanted, rtol=2**-7, atol=1e-7)


@pytest.mark.parametrize("first", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("second", DTYPES)
def test_the_norm_has_torchs_dtype(first, second):
    params = make_params("cpu", first, [(3,)]) + make_params("cpu", second, [(4,)])
    wanted = torch.nn.utils.clip_grad_norm_(params, 1e9).dtype
    assert clip_grad_norm_(params, 1e9).dtype == wanted
    assert get_total_norm(grads_of(params)).dtype == wanted


def test_squares_that_overflow_float32_are_summed_up(backend, device):
    params = make_params(device, shapes=[(9,)])
    params[0].grad.fill_(1e30)
    assert clip_grad_norm_(params, 1.0).item() == pytest.approx(3e30)
    torch.testing.assert_close(params[0].grad, torch.full((9,), 1 / 3, device=device))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 3, -1])
def test_not_finite_gradients_end_as_torchs(backend, device, bad, place):
    ours, theirs = (make_params(device, shapes=[(3,), (17,)]) for _ in range(2))
    for params in (ours, theirs):
        params[1].grad[place] = bad
    mine = clip_grad_norm_(ours, 1.0)
    torchs = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(mine, torchs, equal_nan=True)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


@pytest.mark.parametrize("norm_type", [2.0, 1.5, "inf"])
def test_error_if_nonfinite_has_torchs_text_and_changes_nothing(backend, norm_type):
    params = make_params(shapes=[(5,), (4,)])
    params[0].grad[2] = math.nan
    before = [grad.clone() for grad in grads_of(params)]
    calls = (
        lambda f: f(params, 1.0, norm_type, error_if_nonfinite=True),
        lambda f: f(grads_of(params), norm_type, error_if_nonfinite=True),
    )
    names = ("clip_grad_norm_", "get_total_norm")
    for name, call in zip(names, calls, strict=True):
        with pytest.raises(RuntimeError) as torchs:
            call(getattr(torch.nn.utils, name))
        with pytest.raises(RuntimeError) as mine:
            call(getattr(trainfast.torch, name))
        assert str(mine.value) == str(torchs.value)
    for grad, old in zip(grads_of(params), before, strict=True):
        torch.testing.assert_close(grad, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [0.3, 0, 6e4, math.inf, -0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clamping_agrees_with_torchs(backend, device, dtype, value):
    ours, theirs = make_params(device, dtype), make_params(device, dtype)
    for params in (ours, theirs):
        params[2].grad[-1] = math.nan
        params[2].grad[0] = -math.inf
    clip_grad_value_(ours, value)
    torch.nn.utils.clip_grad_value_(theirs, value)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0, equal_nan=True)


def test_a_single_tensor_and_a_generator_are_taken(backend):
    (param,) = make_params(shapes=[(6,)])
    whole = param.grad.norm()
    torch.testing.assert_close(get_total_norm(param.grad), whole)
    torch.testing.assert_close(clip_grad_norm_(param, 1.0), whole)
    torch.testing.assert_close(param.grad.norm(), torch.tensor(1.0))
    assert clip_grad_norm_((p for p in [param]), 0.5).item() == pytest.approx(1)
    clip_grad_value_((p for p in [param]), 0.01)
    assert param.grad.abs().max() == pytest.approx(0.01)


def test_nothing_to_clip_is_a_norm_of_zero():
    no_grad = torch.zeros(3, requires_grad=True)
    for nothing in ([], [no_grad], no_grad):
        assert clip_grad_norm_(nothing, 1.0) == 0
        clip_grad_value_(nothing, 1.0)
    assert get_total_norm([]) == 0
    with pytest.warns(UserWarning, match="is an empty generator") as caught:
        clip_grad_norm_((p for p in []), 1.0)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_grad_norm_(iter([]), 1.0)


def test_foreach_is_taken_and_ignored(backend):
    for foreach in (None, False, True):
        params = make_params(shapes=[(6,)])
        norm = params[0].grad.norm()
        torch.testing.assert_close(clip_grad_norm_(params, 1.0, foreach=foreach), norm)
        get_total_norm(grads_of(params), foreach=foreach)
        clip_grad_value_(params, 0.1, foreach=foreach)
    assert fallbacks() == {}


def test_no_norm_at_all_leaves_zeros(backend, device):
    params = make_params(device, factor=0)
    assert clip_grad_norm_(params, 1.0) == 0
    assert all((grad == 0).all() for grad in grads_of(params))


# ---- More than torch -----------------------------------------------------------------


def test_mixed_dtypes_are_one_call(backend, device):
    params = [p for dtype in DTYPES for p in make_params(device, dtype)]
    exact = exact_norm(params, 2)
    total = clip_grad_norm_(params, 1.0)
    assert total.dtype == torch.float64
    torch.testing.assert_close(total.cpu(), exact, rtol=1e-6, atol=0)
    assert exact_norm(params, 2) == pytest.approx(1, rel=2e-3)
    assert trainfast.stats().calls["clip"] == {backend: 1}


def test_a_call_of_several_passes_is_counted_once(backend, device):
    params = make_params(device, shapes=[(5,), (3, 4)])
    for _ in range(10):
        clip_grad_norm_(params, 1e-3)
    assert trainfast.stats().calls["clip"] == {backend: 10}
    gaps = torch.nn.Parameter(torch.zeros(4, device=device))
    gaps.grad = torch.ones(4, 2, device=device)[:, 0]
    for _ in range(10):
        gaps.grad.fill_(1.0)
        clip_grad_norm_([gaps, *params], 1e-3)
    assert list(fallbacks().values()) == [10]
    assert trainfast.stats().calls["clip"] == {backend: 10}


def test_autograd_learns_that_gradients_were_written(backend):
    params = make_params(shapes=[(6,)])
    grad = params[0].grad
    version = grad._version
    get_total_norm([grad])
    assert grad._version == version
    clip_grad_norm_(params, 0.1)
    assert grad._version > version


def test_the_norm_has_the_same_bits_in_any_thread(backend, device):
    params = make_params(device)
    norms = []

    def measure_it():
        norms.append(get_total_norm(grads_of(params)).item())

    for _ in range(4):
        thread = threading.Thread(target=measure_it)
        thread.start()
        thread.join()
    measure_it()
    assert len(set(norms)) == 1


def test_permuted_dense_gradients_are_taken(backend):
    param = torch.zeros(4, 5, requires_grad=True)
    param.grad = torch.randn(5, 4).t()
    norm = param.grad.norm()
    torch.testing.assert_close(clip_grad_norm_(param, 0.5), norm)
    torch.testing.assert_close(param.grad.norm(), torch.tensor(0.5))
    assert fallbacks() == {}


# ---- Torch's way ---------------------------------------------------------------------


def gaps():
    return torch.randn(8, 2)[:, 0]


def sparse():
    return torch.sparse_coo_tensor([[0, 2]], torch.tensor([3.0, 4.0]), (8,))


def complex_numbers():
    return torch.randn(8, dtype=torch.complex64)


@pytest.mark.parametrize("make", [gaps, complex_numbers])
def test_what_the_core_refuses_goes_torchs_way(backend, make):
    ours, theirs = (
        torch.zeros(8, dtype=make().dtype, requires_grad=True) for _ in range(2)
    )
    torch.manual_seed(0)
    ours.grad = make()
    theirs.grad = ours.grad.clone()
    other, another = (make_params(shapes=[(5,)])[0] for _ in range(2))
    mine = clip_grad_norm_([ours, other], 0.5)
    torchs = torch.nn.utils.clip_grad_norm_([theirs, another], 0.5)
    torch.testing.assert_close(mine, torchs)
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(other.grad, another.grad)
    assert sum(fallbacks().values()) == 1


def test_sparse_gradients_fail_as_with_torch(backend):
    param = torch.zeros(8, requires_grad=True)
    param.grad = sparse()
    names = ("clip_grad_norm_", "clip_grad_value_")
    for name in names:
        if (name, TORCH >= (2, 15)) == ("clip_grad_norm_", True):
            continue  # torch has a norm of sparse gradients
        with pytest.raises(NotImplementedError) as torchs:
            getattr(torch.nn.utils, name)(param, 1.0)
        with pytest.raises(NotImplementedError) as mine:
            getattr(trainfast.torch, name)(param, 1.0)
        assert str(mine.value)[:60] == str(torchs.value)[:60]


@pytest.mark.skipif(TORCH < (2, 15), reason="torch has no norm of sparse gradients")
def test_sparse_gradients_are_clipped_by_torch(backend):
    found = []
    for function in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_):
        param = torch.zeros(8, requires_grad=True)
        param.grad = sparse()
        found.append((function(param, 1.0), param.grad.to_dense()))
    torch.testing.assert_close(*found)


def test_a_gradient_listed_twice_counts_and_shrinks_twice_as_with_torch(backend):
    (ours,), (theirs,) = (make_params(shapes=[(5,)]) for _ in range(2))
    mine = clip_grad_norm_([ours, ours], 0.5)
    torchs = torch.nn.utils.clip_grad_norm_([theirs, theirs], 0.5)
    torch.testing.assert_close(mine, torchs)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert sum(fallbacks().values()) == 1


def test_the_zero_norm_is_torchs(backend):
    params = make_params(shapes=[(5,), (4,)])
    wanted = torch.nn.utils.get_total_norm(grads_of(params), 0)
    assert get_total_norm(grads_of(params), 0) == wanted
    assert clip_grad_norm_(params, 1.0, 0) == wanted
    assert list(fallbacks()) == ["norm_type is 0.0"]


def test_what_was_measured_apart_is_combined_as_for_several_devices(backend):
    parts = [torch.randn(5), torch.randn(6).double(), torch.randn(7).half()]
    how = _Measuring(2.0, 0.5, None, True, CallTally("clip"), wide=True)
    together = how.combine([how.on_core([grad]) for grad in parts])
    exact = torch.cat([grad.double() for grad in parts]).norm()
    close = {"rtol": 1e-6, "atol": 0}
    torch.testing.assert_close(together.total_norm, exact, **close)
    torch.testing.assert_close(together.clip_coef, 0.5 / (exact + 1e-6), **close)
    assert together.found_inf == 0
    parts[0][2] = parts[2][3] = math.inf
    flag = how.combine([how.on_core([grad]) for grad in parts]).found_inf
    assert flag == 1  # and not their sum, at which torch's fused step does not skip


# ---- measure() -----------------------------------------------------------------------


@pytest.mark.parametrize("make", [None, gaps])
def test_measure_divides_by_the_scale_and_writes_nothing(backend, make):
    grads = [torch.randn(40), torch.randn(3, 3)] + ([make()] if make else [])
    before = [grad.clone() for grad in grads]
    scale = torch.tensor(4.0)
    dense = torch.cat([grad.reshape(-1) for grad in grads])
    found, norm, coef = measure(grads, max_norm=0.5, grad_scale=scale)
    assert found == 0 and found.dtype == torch.float32
    torch.testing.assert_close(norm, dense.norm() / 4)
    torch.testing.assert_close(coef, 0.5 / (dense.norm().double() / 4 + 1e-6))
    for grad, old in zip(grads, before, strict=True):
        torch.testing.assert_close(grad, old, rtol=0, atol=0)
    assert measure(grads).total_norm is measure(grads).clip_coef is None
    assert measure(grads, find_inf=False).found_inf is None


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("make", [gaps, sparse, lambda: torch.ones(1000)])
def test_measure_finds_what_is_not_finite(backend, make, bad):
    grads = [torch.randn(4), make()]
    (grads[1]._values() if grads[1].is_sparse else grads[1])[-1] = bad
    assert measure(grads).found_inf == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_clips_by_the_coefficient_of_the_pass_alone(dtype):
    """Bit for bit: float32's is formed in float32, for the step as for the pass."""
    for seed in range(20):
        torch.manual_seed(seed)
        params = [torch.nn.Parameter(torch.randn(37, dtype=dtype)) for _ in range(6)]
        for param in params:
            param.grad = torch.randn(37, dtype=dtype)
        twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
        for twin, param in zip(twins, params, strict=True):
            twin.grad = param.grad.clone()
        inside = trainfast.torch.AdamW(params, max_grad_norm=0.7)
        inside.step()
        apart = trainfast.torch.AdamW(twins)
        found = measure([p.grad for p in twins], max_norm=0.7, find_inf=False)
        scalars = {"found_inf": None, "clip_coef": found.clip_coef}
        groups = apart.param_groups
        adamw_state.make_state(groups[0], apart.state)
        apart._call_core("all", groups, scalars)
        assert inside.grad_norm.dtype == found.total_norm.dtype == dtype
        for param, twin in zip(params, twins, strict=True):
            assert torch.equal(param, twin)
            got, want = inside.state[param], apart.state[twin]
            assert all(torch.equal(got[name], want[name]) for name in want)
