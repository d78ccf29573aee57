"""Derivatives of trainfast.torch's attention: of the first, second and third order,
under checkpointing, and what a seed does to them."""

import math

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import trainfast
from trainfast.torch import attention, scaled_dot_product_attention
from trainfast.torch.attention import math_backend
from trainfast.torch.attention.math_backend import Extras, Inputs, Options
from trainfast.torch.flash_attn import flash_attn_qkvpacked_func


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    torch.manual_seed(0)
    trainfast.reset_stats()


def rows(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype).requires_grad_()


def qkv(dtype=torch.float64, n_q=4, n_k=5):
    shapes = (1, 4, n_q, 3), (1, 2, n_k, 3), (1, 2, n_k, 2)
    return [rows(*shape, dtype=dtype) for shape in shapes]


ends = torch.tensor
FEATURES = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_align": "lower_right"},
    "window_size": {"window_size": (1, 1)},
    "softcap": {"softcap": 0.8},
    "mask": {"mask": torch.tensor([True, False, True, True, False])},
    "empty row": {"mask": torch.arange(4)[:, None] > 1},
    "float mask": {"mask": torch.linspace(-1, 1, 5).double()},
    "bias": {"bias": rows(4, 4, 5)},
    "head bias": {"bias": rows(4, 1, 1)},
    "row bias": {"bias": rows(4, 1)},
    "key bias": {"bias": rows(1, 1, 1, 5)},
    "alibi": {"alibi_slopes": rows(4)},
    "alibi of items": {"alibi_slopes": rows(1, 4), "causal_align": "lower_right"},
    "sinks": {"sinks": rows(4)},
    "dropout": {"dropout_p": 0.4, "seed": 3},
    "lengths": {"kv_lens": torch.tensor([3])},
    "all": {
        "is_causal": True,
        "bias": rows(1, 4, 5),
        "alibi_slopes": rows(4),
        "sinks": rows(4),
        "softcap": 2.0,
        "dropout_p": 0.2,
        "seed": 5,
    },
}


def function_of_leaves(options, return_lse=True):
    """attention() of q, k, v and the options that have a gradient, and these."""
    learned = [
        name
        for name, x in options.items()
        if isinstance(x, torch.Tensor) and x.requires_grad
    ]

    def function(q, k, v, *values):
        given = {**options, **dict(zip(learned, values, strict=True))}
        out, lse = attention(q, k, v, return_lse=True, **given)
        return out, lse.masked_fill(lse.isinf(), 0)

    return function, [options[name] for name in learned]


@pytest.mark.parametrize("feature", FEATURES)
def test_first_and_second_derivatives_are_right(feature):
    function, learned = function_of_leaves(FEATURES[feature])
    inputs = (*qkv(), *learned)
    assert gradcheck(function, inputs, fast_mode=True)
    assert gradgradcheck(function, inputs, fast_mode=True)
    assert set(trainfast.stats().fallbacks["attention"]) == {"double backward"}


def test_every_element_of_the_derivatives_is_right():
    """Not only their product with a random vector, as the fast mode checks."""
    function, learned = function_of_leaves(FEATURES["all"])
    inputs = (*qkv(n_q=3, n_k=5), *learned)
    function, learned = function_of_leaves({"is_causal": True, "softcap": 0.8})
    assert gradcheck(function, inputs[:3])
    assert gradgradcheck(function, inputs[:3])


@pytest.mark.parametrize("layout", ["bshd", "lengths"])
def test_derivatives_of_layout_are_right(layout):
    q, k, v = [rows(7, 4, 3), rows(9, 2, 3), rows(9, 2, 2)]
    options = {
        "cu_seqlens_q": ends([0, 3, 3, 7]),
        "cu_seqlens_k": ends([0, 3, 4, 8]),
        "is_causal": True,
    }
    if layout == "bshd":
        q, k, v, options = q[None], k[None], v[None], {"layout": "bshd"}
    function, _ = function_of_leaves(options)
    assert gradcheck(function, (q, k, v), fast_mode=True)
    assert gradgradcheck(function, (q, k, v), fast_mode=True)


EMPTY = {
    "keys": ([0, 3, 7], [0, 0, 4]),
    "queries": ([0, 0, 3], [0, 4, 6]),
    "last": ([0, 3, 5], [0, 4, 4]),
    "all keys": ([0, 3, 7], [0, 0, 0]),
    "all queries": ([0, 0], [0, 5]),
}


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("options", ["plain", "sinks", "all"])
def test_items_without_queries_or_keys_have_derivatives(case, options):
    ends_q, ends_k = (ends(x) for x in EMPTY[case])
    given = dict(FEATURES[options], cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
    given.pop("bias", None)
    function, learned = function_of_leaves(given)
    inputs = (rows(7, 4, 3), rows(6, 2, 3), rows(6, 2, 2), *learned)
    assert gradcheck(function, inputs, fast_mode=True)
    assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_plain_operations_take_items_without_queries_or_keys(case, dtype):
    ends_q, ends_k = (ends(x) for x in EMPTY[case])
    q, k, v = (
        rows(n, h, d, dtype=dtype) for n, h, d in [(7, 4, 3), (6, 2, 3), (6, 2, 2)]
    )
    q.data[ends_q[-1] :] = math.nan  # rows of no item
    extras = Extras(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
    found = math_backend.attention(Inputs(q, k, v), extras, Options(0.5))
    wanted = attention(
        q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, scale=0.5, return_lse=True
    )
    for a, b in zip(found, wanted):
        assert a.dtype == b.dtype and a.requires_grad
        torch.testing.assert_close(a, b)


def test_second_derivatives_of_one_tensor_in_all_places():
    def function(x):
        return scaled_dot_product_attention(x, x, x, is_causal=True)

    assert gradgradcheck(function, rows(1, 2, 4, 3))


def test_third_derivative_agrees_with_torchs():
    def third(function):
        value = function(x, x, x).pow(2).sum()
        for _ in range(2):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = grad.pow(3).sum()
        return torch.autograd.grad(value, x)[0]

    x = rows(1, 2, 4, 3)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted = third(torch.nn.functional.scaled_dot_product_attention)
    torch.testing.assert_close(third(scaled_dot_product_attention), wanted)


def test_second_derivative_does_not_depend_on_tiles(monkeypatch):
    def second():
        out, lse = attention(
            q, k, v, is_causal=True, dropout_p=0.3, seed=2, return_lse=True
        )
        grads = torch.autograd.grad(
            out.pow(2).sum() + lse.sum(), (q, k, v), create_graph=True
        )
        return torch.autograd.grad(sum(x.pow(2).sum() for x in grads), (q, k, v))

    q, k, v = qkv(n_q=50, n_k=60)
    whole = second()
    monkeypatch.setattr(math_backend, "TILE", 1)
    for a, b in zip(second(), whole, strict=True):
        torch.testing.assert_close(a, b)


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor had that an operator made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.numel())
        return made


def test_second_derivative_needs_no_square_of_the_length(monkeypatch):
    n = 256
    monkeypatch.setattr(math_backend, "TILE", 32 * n)
    x = rows(1, 1, n, 4)
    out = scaled_dot_product_attention(x, x, x)
    (grad,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
    with Largest() as largest:
        torch.autograd.grad(grad.pow(2).sum(), x)
    assert 32 * n <= largest.most < n * n / 4


def test_second_derivative_of_half_precision_is_close():
    x = rows(1, 2, 16, 8)
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        y = x.detach().to(dtype).requires_grad_()
        out = scaled_dot_product_attention(y, y, y)
        (grad,) = torch.autograd.grad(out.float().pow(2).sum(), y, create_graph=True)
        found.append(torch.autograd.grad(grad.float().pow(2).sum(), y)[0].double())
    assert found[1].dtype == torch.float64
    error = (found[1] - found[0]).norm() / found[0].norm()
    assert error < 0.05


def test_only_wanted_gradients_are_made():
    for wanted in range(3):
        q, k, v = (x.detach().requires_grad_(i == wanted) for i, x in enumerate(qkv()))
        out = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        out.sum().backward()
        assert [x.grad is not None for x in (q, k, v)] == [
            i == wanted for i in range(3)
        ]


def test_gradient_of_lse_alone():
    q, k, v = qkv()
    _, lse = attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / math.sqrt(3)
    wanted = torch.autograd.grad(scores.logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close([dq, dk], list(wanted))
    assert (dv == 0).all()


def test_in_place_change_before_backward_is_noticed():
    q, k, v = qkv()
    mask = torch.ones(5, dtype=torch.bool)
    out = attention(q * 1, k, v, mask=mask)
    mask[0] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- Dropout -------------------------------------------------------------------------


def dropped(function=scaled_dot_product_attention, n=33):
    """[n, n] of the probabilities that one head kept, of equal scores."""
    q = torch.zeros(1, 1, n, 8)
    return function(q, q, torch.eye(n)[None, None], dropout_p=0.5)[0, 0]


def test_manual_seed_repeats_dropout_and_other_calls_differ():
    torch.manual_seed(3)
    first, second = dropped(), dropped()
    torch.manual_seed(3)
    assert torch.equal(dropped(), first) and not torch.equal(first, second)
    kept = first != 0
    assert 0.4 < kept.double().mean() < 0.6
    assert torch.allclose(first[kept], torch.tensor(2 / 33))


def test_plain_operations_drop_what_the_kernel_drops():
    q, k, v = qkv(n_q=37, n_k=41)
    q, k, v = (x.expand(2, -1, -1, -1) for x in (q, k, v))
    seed = torch.tensor(-(2**62) + 12345)
    out, lse = attention(q, k, v, dropout_p=0.7, seed=seed, return_lse=True)
    options = Options(3**-0.5, dropout_p=0.7)
    plain = math_backend.attention(Inputs(q, k, v), Extras(seed=seed), options)
    torch.testing.assert_close((out, lse), plain)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_drops_the_same_again(use_reentrant):
    x = rows(1, 2, 40, 8, dtype=torch.float32)

    def function(x):
        return scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    torch.manual_seed(1)
    plain = function(x)
    torch.manual_seed(1)
    again = checkpoint(function, x, use_reentrant=use_reentrant)
    assert torch.equal(plain, again)
    weights = torch.randn_like(plain)
    grads = []
    for out in (plain, again):
        x.grad = None
        (out * weights).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_seed_may_be_a_tensor():
    q, k, v = qkv()
    outs = [
        attention(q, k, v, dropout_p=0.5, seed=seed) for seed in (9, torch.tensor(9))
    ]
    assert torch.equal(*outs)


# ---- Many gradients at once ----------------------------------------------------------

MAPPED = {
    "straight": lambda x: attention(x, x, x),
    "options": lambda x: attention(x, x, x, window_size=(1, 2), softcap=2.0),
    "packed": lambda x: flash_attn_qkvpacked_func(torch.stack([x, x, x], 2)),
    "lse": lambda x: attention(x, x, x, return_lse=True)[1],
}


@pytest.mark.parametrize("name", MAPPED)
def test_gradients_of_many_at_once_are_those_of_each(name):
    x = torch.randn(1, 3, 2, 4, dtype=torch.float64).requires_grad_()
    function = MAPPED[name]
    out = function(x)
    douts = torch.randn(3, *out.shape, dtype=torch.float64)

    def grad(dout, **options):
        return torch.autograd.grad(out, x, dout, retain_graph=True, **options)[0]

    expected = torch.stack([grad(dout) for dout in douts])
    torch.testing.assert_close(grad(douts, is_grads_batched=True), expected)
    torch.testing.assert_close(torch.vmap(grad)(douts), expected)
    created = torch.vmap(lambda dout: grad(dout, create_graph=True))(douts)
    torch.testing.assert_close(created, expected)


@pytest.mark.parametrize("name", MAPPED)
def test_vectorised_hessian_is_that_of_a_loop(name):
    def function(x):
        return MAPPED[name](x).square().sum()

    x = torch.randn(1, 3, 1, 2, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian
    expected = hessian(function, x)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(hessian(function, x, vectorize=True), expected)


@pytest.mark.parametrize("name", MAPPED)
def test_tangent_of_a_gradient_is_refused(name):
    x = torch.randn(1, 3, 2, 4).requires_grad_()
    out = MAPPED[name](x)
    with forward_ad.dual_level():
        dout = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.autograd.grad(out, x, dout)
