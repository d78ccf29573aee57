"""The shortest way of attention: which calls take it, and that it is the same."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import trainfast
from tests.torch_version import TORCH
from trainfast import _core
from trainfast.torch import attention, scaled_dot_product_attention
from trainfast.torch.attention import dispatch, fast_path, sdpa

FUNCTIONS = [attention, scaled_dot_product_attention]
# q and k, v: self-attention, cross-attention, one query, keys and values of their own
SHAPES = [
    ((2, 3, 17, 8), (2, 3, 17, 8), 8),
    ((2, 3, 5, 8), (2, 3, 40, 8), 8),
    ((1, 2, 1, 16), (1, 2, 33, 16), 16),
    ((2, 1, 9, 8), (2, 1, 12, 8), 4),
]


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    trainfast.reset_stats()


@pytest.fixture(params=FUNCTIONS, ids=lambda function: function.__name__)
def function(request):
    return request.param


@pytest.fixture
def taken(monkeypatch):
    """A list that gets an item for each call that goes the other way."""
    others = []
    refusal_of = dispatch.refusal_of

    def record(tensors):
        others.append(tensors)
        return refusal_of(tensors)

    monkeypatch.setattr(dispatch, "refusal_of", record)
    monkeypatch.setattr(sdpa, "refusal_of", record)
    return others


def rows(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).requires_grad_()


def inputs(case=SHAPES[0], dtype=torch.float32):
    q_shape, k_shape, dim_v = case
    return [
        rows(*q_shape, dtype=dtype),
        rows(*k_shape, dtype=dtype),
        rows(*k_shape[:-1], dim_v, dtype=dtype),
    ]


def calls():
    return sum(trainfast.stats().calls.get("attention", {}).values())


def results(function, tensors, **options):
    """out, gradients, and gradients of the gradients."""
    out = function(*tensors, **options)
    dout = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
    grads = torch.autograd.grad(out, tensors, dout, create_graph=True)
    norm = sum(grad.double().square().sum() for grad in grads)
    return [out, *grads, *torch.autograd.grad(norm, tensors)]


def mask_of(kind, case, dtype=torch.float32):
    """Some keys are forbidden to some rows, and mostly all to the first."""
    (batch, heads, n_q, _), (_, _, n_k, _), _ = case
    allowed = torch.rand(batch, 1, n_q, n_k) < 0.7
    allowed[0, :, 0] = False
    if kind == "bool":
        return allowed
    if kind == "float":
        floats = torch.randn(batch, heads, n_q, n_k, dtype=dtype)
        return floats.masked_fill(~allowed, -torch.inf)
    if kind == "of rows":
        return allowed[-1, 0]
    return (torch.arange(n_k) < n_k - 1).expand(batch, 1, 1, n_k)


NAMES = {attention: "mask", scaled_dot_product_attention: "attn_mask"}
MASKS = [None, "bool", "float", "of rows", "expanded"]


def check_both_ways(function, monkeypatch, case, options, kind):
    tensors = inputs(case)
    if kind is not None:
        options = options | {NAMES[function]: mask_of(kind, case)}
    straight = results(function, tensors, **options)
    with torch.no_grad():
        straight.append(function(*tensors, **options))
    monkeypatch.setattr(fast_path, "is_open", lambda *tensors: False)
    other = results(function, tensors, **options)
    with torch.no_grad():
        other.append(function(*tensors, **options))
    for a, b in zip(straight, other, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"scale": 0.7}], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_both_ways_give_the_same_bits(function, monkeypatch, case, options, kind):
    check_both_ways(function, monkeypatch, case, options, kind)


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("function", "kind"),
    [(scaled_dot_product_attention, None), *[(attention, kind) for kind in MASKS]],
)
def test_both_ways_give_the_same_bits_for_causal(function, monkeypatch, case, kind):
    check_both_ways(function, monkeypatch, case, {"is_causal": True}, kind)


def check_as_torch(*tensors, **options):
    """Our function has torch's result, or its error."""
    try:
        expected = F.scaled_dot_product_attention(*tensors, **options)
    except (RuntimeError, TypeError) as error:
        with pytest.raises(type(error)) as mine:
            scaled_dot_product_attention(*tensors, **options)
        assert str(mine.value) == str(error)
    else:
        out = scaled_dot_product_attention(*tensors, **options)
        same = torch.Tensor(out), torch.Tensor(expected).nan_to_num()
        torch.testing.assert_close(*same)


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("kind", MASKS[1:])
def test_causal_with_a_mask_is_torchs(taken, case, kind):
    tensors = [x.detach() for x in inputs(case)]
    check_as_torch(*tensors, mask_of(kind, case), is_causal=True)
    assert len(taken) == 1


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_usual_calls_go_straight(function, taken, dtype):
    q, k, v = inputs(dtype=dtype)
    function(q, k, v).sum().backward()
    function(q, torch.nn.Parameter(k.detach()), v, is_causal=True, scale=0.5)
    with torch.no_grad():
        function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    assert taken == [] and calls() == 4
    assert q.grad is not None


@pytest.mark.parametrize("kind", MASKS[1:])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_masked_calls_go_straight(function, taken, dtype, kind):
    q, k, v = inputs(dtype=dtype)
    mask = mask_of(kind, SHAPES[0], dtype)
    name = NAMES[function]
    out = function(q, k, v, **{name: mask})
    out.sum().backward()
    with torch.no_grad():
        assert torch.equal(function(q, k, v, **{name: mask}), out)
    assert taken == [] and calls() == 3
    # A row without a key is 0 here and NaN in some of torch's ways.
    expected = F.scaled_dot_product_attention(
        q.double(),
        k.double(),
        v.double(),
        mask if mask.dtype == torch.bool else mask.double(),
    ).nan_to_num()
    atol = {2: 2e-2, 4: 1e-5, 8: 1e-12}[q.element_size()]
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_grouped_queries_go_straight(function, taken, kv_heads):
    q, k, v = inputs(((2, 6, 5, 8), (2, kv_heads, 7, 8), 8))
    options = {} if function is attention else {"enable_gqa": True}
    out = function(q, k, v, **options)
    grads = torch.autograd.grad(out.sum(), [q, k, v])
    assert taken == []
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected.sum(), [q, k, v])
    torch.testing.assert_close(grads, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_heads", [0, 4, 12])
@pytest.mark.parametrize("enable_gqa", [True, False, 1])
def test_heads_that_do_not_go_together_have_torchs_result(kv_heads, enable_gqa):
    if kv_heads == 0 and enable_gqa and TORCH < (2, 13):
        pytest.skip("torch's own function divides by zero, which ends the process")
    q, k, v = inputs(((2, 6, 5, 8), (2, kv_heads, 7, 8), 8))
    check_as_torch(q, k, v, enable_gqa=enable_gqa)


class Subclass(torch.Tensor):
    pass


def odd_masks():
    mask = mask_of("float", SHAPES[0])
    return {
        "with a gradient": mask.requires_grad_(),
        "of a subclass": torch.ones(17, 17, dtype=torch.bool).as_subclass(Subclass),
        "negated": torch._neg_view(torch.randn(17, 17)),
        "that does not fit": torch.ones(17, 16, dtype=torch.bool),
        "of integers": torch.ones(17, 17, dtype=torch.int64),
        "of another float": torch.zeros(17, 17, dtype=torch.float64),
        "of three rows too many": torch.zeros(1, 1, 1, 17, 17),
    }


@pytest.mark.parametrize("name", odd_masks())
def test_odd_masks_have_torchs_result_or_error(taken, name):
    q, k, v = (x.detach() for x in inputs())
    check_as_torch(q, k, v, odd_masks()[name])
    if name != "of a subclass":
        assert len(taken) == 1


def test_mask_changed_before_the_backward_is_an_error(function):
    q, k, v = inputs()
    mask = mask_of("bool", SHAPES[0])
    out = function(q, k, v, **{NAMES[function]: mask})
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_that_nobody_wants_are_not_made(function, monkeypatch):
    q, k, v = inputs()
    k.requires_grad_(False)
    made = []

    class Core:
        backend_in_use = _core.backend_in_use
        attention = _core.attention

        @staticmethod
        def attention_backward(*args, **kwargs):
            made.append([x is not None for x in args[7:]])
            _core.attention_backward(*args, **kwargs)

    monkeypatch.setattr(fast_path, "_core", Core)
    function(q, k, v).sum().backward()
    assert made == [[True, False, True, False, False, False]]
    assert k.grad is None and q.grad is not None and v.grad is not None


@contextlib.contextmanager
def forward_mode():
    with forward_ad.dual_level():
        yield


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


WATCHED = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a dispatch mode": Watching,
    "forward mode": forward_mode,
}


@pytest.mark.parametrize("name", WATCHED)
def test_calls_that_somebody_watches_go_the_other_way(function, taken, name):
    q, k, v = inputs()
    with WATCHED[name]():
        out = function(q, k, v)
    assert len(taken) == 1
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=0)


def test_function_transforms_and_tracers_go_the_other_way(function, taken):
    q, k, v = (x.detach() for x in inputs())
    expected = F.scaled_dot_product_attention(q, k, v)
    out = torch.vmap(lambda q: function(q, k, v))(q[None])
    torch.testing.assert_close(out[0], expected)
    traced = torch.jit.trace(lambda q: function(q, k, v), q)
    torch.testing.assert_close(traced(q), expected)
    assert len(taken) >= 2
    before = len(taken)
    grad = torch.func.grad(lambda q: function(q, k, v).sum())(q)
    [expected] = torch.autograd.grad(
        F.scaled_dot_product_attention(q.requires_grad_(), k, v).sum(), [q]
    )
    torch.testing.assert_close(grad, expected)
    assert len(taken) == before + 1


UNUSUAL = {
    "a gap between elements": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "the negative bit": torch._neg_view,
    "a meta tensor": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.parametrize("which", range(3))
def test_what_the_core_refuses_is_found_the_other_way(function, taken, name, which):
    tensors = [x.detach() for x in inputs()]
    if name == "a meta tensor":
        tensors = [UNUSUAL[name](x) for x in tensors]
        assert function(*tensors).is_meta
    else:
        tensors[which] = UNUSUAL[name](tensors[which])
        expected = F.scaled_dot_product_attention(*tensors)
        torch.testing.assert_close(function(*tensors), expected)
    assert len(taken) == 1


def test_a_gradient_without_memory_is_zero(function):
    q, k, v = inputs()
    out = function(q, k, v)
    zero = torch._efficientzerotensor(out.shape)
    grads = torch.autograd.grad(out, [q, k, v], grad_outputs=zero)
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_among_others_raise_torchs_error(taken, which):
    tensors = [x.detach() for x in inputs()]
    tensors[which] = torch.nested.nested_tensor([torch.zeros(3, n, 8) for n in (4, 9)])
    with pytest.raises(RuntimeError) as theirs:
        F.scaled_dot_product_attention(*tensors)
    with pytest.raises(RuntimeError) as mine:
        scaled_dot_product_attention(*tensors)
    assert str(mine.value) == str(theirs.value) and len(taken) == 1


def test_inputs_changed_before_the_backward_are_an_error(function):
    q, k, v = inputs()
    out = function(q, k, v)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
