"""The layouts "thd" and "bshd" of trainfast.attention: output and gradients.

The truth is written out for one item at a time, in float64, on [heads, n, dim].
"""

import math

import pytest
import torch

import trainfast

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 16, 8
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 3e-2}
OPTIONS = {
    "all keys": {},
    "causal": {"is_causal": True},
    "causal, lower right": {"is_causal": True, "causal_align": "lower_right"},
    "window": {"window_size": (3, 1), "causal_align": "lower_right"},
    "scale and softcap": {"scale": 0.3, "softcap": 2.0},
}


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    trainfast.reset_stats()


def allowed(n_q, n_k, options):
    """Which keys each query may see, bool [n_q, n_k]."""
    shift = n_k - n_q if options.get("causal_align") == "lower_right" else 0
    distance = torch.arange(n_k) - torch.arange(n_q)[:, None] - shift
    left, right = options.get("window_size", (None, None))
    right = 0 if options.get("is_causal") else right
    seen = torch.ones(n_q, n_k, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    return seen if right is None else seen & (distance <= right)


def one_item(q, k, v, options):
    """Attention of q [n_q, heads, dim] to k and v [n_k, kv_heads, dim], and lse."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    scores = q @ k.mT * options.get("scale", 1 / math.sqrt(DIM))
    cap = options.get("softcap")
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~allowed(*scores.shape[1:], options), -math.inf)
    probs = torch.softmax(scores, -1).nan_to_num(0.0)  # rows that see no key
    return (probs @ v).transpose(0, 1), scores.logsumexp(-1)


def truth(q, k, v, ends_q, ends_k, options):
    """The items between these ends, one after another: out and lse."""
    parts = [
        one_item(q[a:b], k[c:d], v[c:d], options)
        for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:])
    ]
    outs, lses = zip(*parts)
    return torch.cat(outs), torch.cat(lses, 1)


def leaves(dtype, n_q, n_k):
    sizes = (n_q, HEADS, DIM), (n_k, KV_HEADS, DIM), (n_k, KV_HEADS, DIM_V)
    return [torch.randn(size).to(dtype).requires_grad_() for size in sizes]


def gradients(out, inputs):
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(out, inputs, dout.to(out.dtype), retain_graph=True)


def assert_close(found, true, dtype):
    assert found.shape == true.shape
    bound = TOLERANCE[dtype] * max(1.0, true.detach().abs().max().item())
    torch.testing.assert_close(found.double(), true, atol=bound, rtol=0)


# The lengths of queries and keys of each item: equal, different, of one, of none.
LENGTHS = {
    "one item": ([9], [9]),
    "same": ([5, 17, 1, 33], [5, 17, 1, 33]),
    "more keys": ([3, 1, 20], [7, 40, 20]),
    "more queries": ([12, 5], [4, 5]),
    "empty items": ([0, 6, 0, 4, 0], [0, 6, 3, 4, 0]),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", OPTIONS)
def test_thd_is_attention_of_each_item(dtype, lengths, name):
    options = OPTIONS[name]
    ends = [[0, *torch.tensor(n).cumsum(0).tolist()] for n in LENGTHS[lengths]]
    inputs = leaves(dtype, ends[0][-1], ends[1][-1])
    cu_q, cu_k = (torch.tensor(e, dtype=torch.int32) for e in ends)
    out, lse = trainfast.attention(
        *inputs,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        layout="thd",
        return_lse=True,
        **options,
    )
    wide = [x.detach().double().requires_grad_() for x in inputs]
    true, true_lse = truth(*wide, *ends, options)
    assert_close(out, true, dtype)
    rows = true_lse.isfinite()
    assert torch.equal(rows, lse.isfinite())
    assert_close(lse[rows], true_lse[rows], dtype)
    for found, wanted in zip(gradients(out, inputs), gradients(true, wide)):
        assert_close(found, wanted, dtype)
    assert trainfast.stats().fallbacks == {}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", OPTIONS)
def test_bshd_is_attention_of_each_item(dtype, name):
    options, batch, n_q, n_k = OPTIONS[name], 3, 11, 18
    inputs = leaves(dtype, batch * n_q, batch * n_k)
    q, k, v = (x.unflatten(0, (batch, -1)) for x in inputs)
    out = trainfast.attention(q, k, v, layout="bshd", **options)
    assert out.shape == (batch, n_q, HEADS, DIM_V)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    ends = [range(0, batch * n + 1, n) for n in (n_q, n_k)]
    true, _ = truth(*wide, *ends, options)
    assert_close(out.flatten(0, 1), true, dtype)
    found = gradients(out.flatten(0, 1), inputs)
    for one, other in zip(found, gradients(true, wide)):
        assert_close(one, other, dtype)
    assert trainfast.stats().fallbacks == {}
