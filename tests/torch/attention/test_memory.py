"""Large results' memory: kept for the next call, and never anybody else's."""

import gc
import os
import threading

import pytest

torch = pytest.importorskip("torch")

import trainfast.torch as tt  # noqa: E402
from trainfast.torch.attention import autograd, kept_memory  # noqa: E402
from trainfast.torch.attention.kept_memory import LEAST, MOST, empty_large  # noqa: E402

ROWS = LEAST // 4 // 64


@pytest.fixture(autouse=True)
def nothing_kept():
    gc.collect()
    kept_memory._kept.clear()
    yield
    kept_memory._kept.clear()


def large(rows=ROWS, dtype=torch.float32):
    return empty_large((rows, 64), (64, 1), torch.empty(0, dtype=dtype))


def kept_bytes():
    return sum(kept.bytes for kept in kept_memory._kept)


def test_memory_that_nobody_uses_is_handed_out_again():
    first = large()
    assert first.shape == (ROWS, 64) and first.is_contiguous()
    address = first.data_ptr()
    assert address % 64 == 0
    del first
    again = large(ROWS * 2, torch.bfloat16)  # as many bytes
    assert again.data_ptr() == address and again.dtype == torch.bfloat16
    assert again.untyped_storage().nbytes() == LEAST
    del again
    assert large(ROWS + 1).untyped_storage().nbytes() == LEAST + 256


@pytest.mark.slow
@pytest.mark.parametrize(
    "hold",
    [
        lambda x: x,
        lambda x: x[5:7, 3],
        lambda x: x.view(torch.int32).t(),
        lambda x: x.detach(),
        lambda x: x.numpy(),
        lambda x: torch.nn.Parameter(x),
        lambda x: memoryview(x.numpy()),
        lambda x: torch.utils.dlpack.to_dlpack(x),
        lambda x: x.untyped_storage(),
        lambda x: x.requires_grad_().mul(2).grad_fn,
    ],
)
def test_memory_that_somebody_uses_is_not_handed_out(hold):
    x = large()
    address = x.data_ptr()
    held = hold(x)
    del x
    others = [large() for _ in range(2)]
    assert address not in [other.data_ptr() for other in others]
    del held
    gc.collect()
    assert large().data_ptr() == address


def test_storage_that_was_resized_or_shared_is_forgotten():
    resized, shared = large(), large()
    resized.untyped_storage().resize_(2 * LEAST)
    shared.share_memory_()
    addresses = [resized.data_ptr(), shared.data_ptr()]
    del resized, shared
    new = large()
    assert new.data_ptr() not in addresses and not new.is_shared()
    assert kept_bytes() == LEAST


def test_no_more_is_kept_than_is_said_and_the_idle_go_first():
    n = MOST // LEAST
    held = [large() for _ in range(n)]
    idle = held.pop(3).data_ptr()
    larger = large(ROWS + 1)
    assert kept_bytes() <= MOST
    assert idle not in [kept.address for kept in kept_memory._kept]
    more = [large() for _ in range(n)]  # the longest in use are forgotten, not taken
    assert kept_bytes() <= MOST
    addresses = {x.data_ptr() for x in (*held, larger, *more)}
    assert len(addresses) == len(held) + 1 + len(more)
    assert large(MOST // 256 + 1).untyped_storage().nbytes() > MOST
    assert kept_bytes() <= MOST


def test_threads_do_not_share_a_result():
    wrong = []

    def work(number):
        for _ in range(50):
            x = large()
            row = x[7]
            row.fill_(number)
            if not bool((row == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_who_comes_in_between_does_not_wait(monkeypatch):
    """A finaliser, or a signal's handler, that calls attention itself."""
    between = []
    fresh = kept_memory._fresh

    def interrupted(n):
        if not between:
            between.append(None)
            between.append(large())
        return fresh(n)

    monkeypatch.setattr(kept_memory, "_fresh", interrupted)
    outer = large()
    assert outer.data_ptr() != between[1].data_ptr()
    assert not kept_memory._lock.locked()


def test_no_memory_is_an_error_and_frees_what_is_kept(monkeypatch):
    idle = large()
    del idle

    def none(n):
        raise RuntimeError("no memory")

    monkeypatch.setattr(kept_memory, "_fresh", none)
    with pytest.raises(RuntimeError, match="no memory"):
        large(2 * ROWS)
    assert not kept_memory._kept and not kept_memory._lock.locked()


@pytest.fixture
def little_is_large(monkeypatch):
    monkeypatch.setattr(kept_memory, "LEAST", 1024)


@pytest.mark.parametrize("value_dim", [8, 16])
@pytest.mark.parametrize("bnhd", [False, True])
def test_results_are_right_in_used_memory(little_is_large, value_dim, bnhd):
    """Steps whose results lie where those before have been."""
    addresses = set()
    bias = torch.randn(1, 2, 40, 40, requires_grad=True)
    for _ in range(4):
        q, k = (torch.randn(2, 2, 40, 16) for _ in range(2))
        v = torch.randn(2, 2, 40, value_dim)
        if bnhd:
            q, k, v = (
                x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)
            )
        inputs = [x.requires_grad_() for x in (q, k, v)] + [bias]
        out = tt.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, inputs, dout)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.double() for x in (q, k, v)), attn_mask=bias.double()
        )
        assert out.stride() == q.expand_as(q).stride() or value_dim != 16
        torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-4)
        for got, want in zip(
            grads, torch.autograd.grad(expected, inputs, dout.double())
        ):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        addresses.add(grads[3].data_ptr())
        addresses.add(grads[0].data_ptr())
        del grads, got, out, expected, want
    assert len(addresses) == 2


@pytest.mark.parametrize("heads", [(1, 2), (2, 1), (1, 1)])
def test_large_results_lie_as_small_ones(monkeypatch, heads):
    """Also those of expanded tensors, whose strides say no order."""

    def strides():
        base = torch.randn(heads[0], heads[1], 40, 16, requires_grad=True)
        x = base.expand(2, 2, 40, 16)
        out = tt.scaled_dot_product_attention(x, x, x)
        made = [out, *torch.autograd.grad(out.sum(), x)]
        made += [autograd.empty_grad(x)]
        y = x.transpose(1, 2)
        made += [autograd.empty_rows(y, 16), autograd.empty_rows(y, 8)]
        return [tuple(m.stride()) for m in made]

    small = strides()
    monkeypatch.setattr(kept_memory, "LEAST", 1024)
    assert strides() == small
    assert kept_memory._kept


def test_modes_that_see_operators_see_torchs_own_memory(little_is_large):
    from torch._subclasses import FakeTensorMode

    q = torch.randn(1, 2, 40, 16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        autograd.empty_rows(q, 16)
    assert not kept_memory._kept


def test_gradient_that_a_parameter_keeps_is_its_own(little_is_large):
    weight = torch.nn.Parameter(torch.randn(2, 2, 40, 8))
    for _ in range(3):
        tt.scaled_dot_product_attention(weight, weight, weight).sum().backward()
        kept = weight.grad.clone()
        x = torch.randn(2, 2, 40, 8, requires_grad=True)
        tt.scaled_dot_product_attention(x, x, x).sum().backward()
        assert torch.equal(weight.grad, kept)


def test_function_transforms_and_fakes_have_their_own_memory(little_is_large):
    q = torch.randn(3, 2, 2, 40, 16)

    def loss(x):
        return tt.scaled_dot_product_attention(x, x, x).square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss))(q)
    single = torch.stack([torch.func.grad(loss)(x) for x in q])
    torch.testing.assert_close(mapped, single)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(q[0]), loss(q[0]))
    assert autograd.empty(q.to("meta"), (1 << 40,)).device.type == "meta"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_child_has_its_own_pages():
    x = large()
    x[0] = 1
    address = x.data_ptr()
    del x
    child = os.fork()
    if child == 0:
        try:
            again = large()
            again[0] = 2
            os._exit(0 if again.data_ptr() == address else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    again = large()
    assert again.data_ptr() == address and bool((again[0] == 1).all())
