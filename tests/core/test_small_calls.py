"""_core.SmallCalls: which calls of attention are left to torch for their size."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import trainfast
from tests.torch_version import TORCH
from trainfast import _core

SMALL, AMX = "a small call", "bfloat16 on a CPU with AMX"
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Torch's own function, to which the call is left, takes such tensors.
ATTRIBUTES = "before torch 2.10 layouts and wrappers do not show in what is read"


class Attributes:
    """What a tensor tells by its attributes, for a torch without the exchange API."""

    def __init__(self, tensor):
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.is_cpu, self.requires_grad = tensor.is_cpu, tensor.requires_grad


def by_exchange(amx):
    types = torch.Tensor, torch.nn.Parameter
    return _core.SmallCalls(types, DTYPES, torch.is_grad_enabled, amx), lambda x: x


def by_attributes(amx):
    types = Attributes, Attributes
    return _core.SmallCalls(types, DTYPES, torch.is_grad_enabled, amx), Attributes


@pytest.fixture(params=[by_exchange, by_attributes])
def make(request):
    """Makes a SmallCalls and what turns a tensor into what it reads."""
    return request.param


def tensors(shape, n_k, dtype=torch.float32, grad=False):
    q = torch.empty(shape, dtype=dtype, requires_grad=grad)
    k = torch.empty(*shape[:-2], n_k, shape[-1], dtype=dtype, requires_grad=grad)
    return q, k, k


def reason_of(made, *given, mask=None, dropout_p=0.0):
    calls, turn = made
    calls.counts(True)
    left = calls.leaves_attention(*(turn(x) for x in given), mask, dropout_p)
    counts = dict(zip((SMALL, AMX), calls.counts(True)))
    assert sum(counts.values()) == left
    return max(counts, key=counts.get) if left else None


@pytest.mark.parametrize(
    "shape, n_k, wanted",
    [
        ((1, 4, 32, 16), 128, SMALL),  # 2**14 scores
        ((1, 4, 32, 16), 129, None),
        ((64, 2, 16, 8), 16, SMALL),  # 2**15, half of each tile
        ((65, 2, 16, 8), 16, None),
        ((4, 8, 8, 64), 512, SMALL),  # 2**20 elements of key
        ((4, 8, 8, 64), 513, None),
        ((8, 8, 9, 64), 512, None),
        ((0, 2, 16, 8), 16, SMALL),
        ((1, 2, 16, 0), 16, SMALL),
        ((16, 8), 16, SMALL),
        ((512, 8), 512, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_full_precision_is_left_by_scores_and_queries(make, shape, n_k, wanted, dtype):
    for amx in (False, True):
        given = tensors(shape, n_k, dtype)
        assert reason_of(make(amx), *given) == wanted


@pytest.mark.parametrize(
    "shape, n_k, grad, amx, wanted",
    [
        ((1, 4, 16, 16), 16, False, False, SMALL),  # 2**10 scores
        ((1, 4, 16, 16), 17, False, False, None),
        ((1, 4, 16, 16), 17, False, True, AMX),
        ((1, 4, 16, 16), 17, True, True, None),
        ((1, 4, 8, 16), 512, False, False, SMALL),  # few queries
        ((1, 4, 8, 16), 512, True, False, None),
        ((1, 4, 1, 16), 512, True, False, SMALL),
        ((1, 4, 256, 32), 256, True, True, None),  # 2**21 a head
        ((1, 4, 257, 32), 256, True, True, AMX),
        ((1, 4, 257, 32), 256, True, False, None),
    ],
)
def test_bfloat16_is_left_where_torch_has_amx(make, shape, n_k, grad, amx, wanted):
    assert reason_of(make(amx), *tensors(shape, n_k, torch.bfloat16, grad)) == wanted
    half = tensors(shape, n_k, torch.float16, grad)
    assert reason_of(make(amx), *half) == (None if wanted == AMX else wanted)


def test_gradients_count_only_where_they_are_recorded(make):
    given = tensors((1, 4, 64, 16), 64, torch.bfloat16, grad=True)
    assert reason_of(make(True), *given) is None
    with torch.no_grad():
        assert reason_of(make(True), *given) == AMX
    q, k, v = (x.detach() for x in given)
    assert reason_of(make(True), q, k, v) == AMX
    assert reason_of(make(True), q, k, v.clone().requires_grad_()) is None


@pytest.mark.parametrize(
    "mask, dropout_p", [(1, 0.0), (None, 0.1), (None, None), (None, 2**9999)]
)
def test_masks_and_dropout_are_not_left(make, mask, dropout_p):
    given = tensors((1, 4, 8, 16), 8)
    assert reason_of(make(True), *given, mask=mask, dropout_p=dropout_p) is None
    assert reason_of(make(True), *given, dropout_p=0) == SMALL


def odd_tensors():
    q = torch.randn(1, 4, 8, 16)
    with FakeTensorMode():
        yield "fake", torch.empty(1, 4, 8, 16)
    yield "sparse", q.to_sparse()
    yield "int64", q.to(torch.int64)
    yield "complex", q.to(torch.complex64)
    yield "one dim", q.flatten()
    yield "jagged", torch.nested.nested_tensor([q[0], q[0]], layout=torch.jagged)
    yield "no tensor", 1
    yield "None", None


@pytest.mark.parametrize("name, odd", list(odd_tensors()))
def test_what_is_no_plain_tensor_is_not_left(name, odd):
    if name == "sparse" and TORCH < (2, 10):
        pytest.skip(ATTRIBUTES)
    q = torch.randn(1, 4, 8, 16)
    made = by_exchange(True)
    for given in ((odd, q, q), (q, odd, q), (odd, odd, odd)):
        assert reason_of(made, *given) is None
    assert not made[0].leaves_module(odd, 4)


@pytest.mark.skipif(TORCH < (2, 10), reason=ATTRIBUTES)
def test_inside_a_function_transform_nothing_is_left():
    seen, q = [], torch.randn(3, 4, 8, 16)

    def attend(x):
        seen.append(reason_of(by_exchange(True), x, x, x))
        return x

    torch.func.vmap(attend)(q)
    assert seen == [None]


@pytest.mark.parametrize(
    "shape, heads, left",
    [
        ((2, 256, 128), 4, True),  # 8 head dims
        ((2, 257, 128), 4, False),
        ((2, 256, 128), 8, False),
        ((31, 256, 128), 4, True),  # below 2**23 scores
        ((32, 256, 128), 4, False),
        ((2, 256), 4, False),
        ((0, 256, 128), 4, True),
    ],
)
def test_modules_are_left_by_scores_and_length(make, shape, heads, left):
    calls, turn = make(False)
    assert calls.leaves_module(turn(torch.empty(shape)), heads) == left
    assert calls.leaves_module(turn(torch.empty(shape).half()), heads) == left


def test_modules_of_bfloat16_are_left_where_torch_has_amx(make):
    x = torch.empty(2, 512, 128, dtype=torch.bfloat16)
    for amx in (False, True):
        calls, turn = make(amx)
        assert calls.leaves_module(turn(x), 4) == amx


def test_counts_are_of_modules_too_and_forgotten_on_demand(make):
    calls, turn = make(True)
    q = turn(torch.empty(1, 2, 8, 8))
    calls.leaves_attention(q, q, q, None, 0.0)
    calls.count_module()
    calls.count_module()
    assert calls.counts(False) == calls.counts(True) == (1, 0, 2)
    assert calls.counts(False) == (0, 0, 0)


def test_exception_in_the_middle_comes_through():
    def interrupted():
        raise KeyboardInterrupt

    types = torch.Tensor, torch.nn.Parameter
    calls = _core.SmallCalls(types, DTYPES, interrupted, False)
    given = tensors((1, 8, 4, 64), 512, torch.float16)
    with pytest.raises(KeyboardInterrupt):
        calls.leaves_attention(*given, None, 0.0)


def test_wrong_arguments_are_type_errors(make):
    calls, turn = make(True)
    x = turn(torch.empty(2, 8, 16))
    for wrong in (
        lambda: calls.leaves_attention(x, x, x),
        lambda: calls.leaves_module(x),
        lambda: calls.leaves_module(x, "4"),
        lambda: _core.SmallCalls(),
        lambda: _core.SmallCalls((torch.Tensor, 1), DTYPES, bool, True),
    ):
        with pytest.raises(TypeError):
            wrong()


def test_the_garbage_collector_sees_what_is_held():
    class Tensor:
        pass

    Tensor.calls = _core.SmallCalls((Tensor, Tensor), DTYPES, bool, False)
    alive = weakref.ref(Tensor)
    del Tensor
    gc.collect()
    assert alive() is None


def test_stats_show_what_was_left_and_forget_it():
    trainfast.reset_stats()
    q = torch.randn(1, 4, 8, 16)
    with trainfast.patch("attention"):
        for _ in range(3):
            F.scaled_dot_product_attention(q, q, q)
    reason = "a small call: torch's function is faster"
    assert trainfast.stats().fallbacks["attention"] == {reason: 3}
    trainfast.reset_stats()
    assert trainfast.stats().fallbacks == {}
