"""trainfast.torch.flash_attn has the flash-attn package's signatures and semantics."""

import inspect

import numpy as np
import pytest
import torch

import trainfast
from tests import reference_attention as reference
from trainfast.torch import attention, flash_attn

COMMON = [
    ("dropout_p", 0.0),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("alibi_slopes", None),
    ("deterministic", False),
    ("return_attn_probs", False),
]
NONE = "k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad"
CACHE = [
    *((name, None) for name in NONE.split()),
    ("block_table", None),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("rotary_interleaved", True),
    ("alibi_slopes", None),
    ("num_splits", 0),
    ("return_softmax_lse", False),
]
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
# Of flash_attn/flash_attn_interface.py, version 2.8.
SIGNATURES = {
    "flash_attn_func": (["q", "k", "v"], COMMON),
    "flash_attn_kvpacked_func": (["q", "kv"], COMMON),
    "flash_attn_qkvpacked_func": (["qkv"], COMMON),
    "flash_attn_varlen_func": (
        ["q", "k", "v", *LENGTHS],
        [*COMMON, ("block_table", None)],
    ),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *LENGTHS], COMMON),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], COMMON),
    "flash_attn_with_kvcache": (["q", "k_cache", "v_cache"], CACHE),
}


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    trainfast.reset_stats()


def rows(*shape):
    return torch.randn(shape).requires_grad_()


def array(x):
    return None if x is None else x.detach().double().numpy()


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_packages(name):
    required, optional = SIGNATURES[name]
    assert sorted(SIGNATURES) == flash_attn.__all__
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    assert [p.name for p in parameters if p.default is p.empty] == required
    found = [(p.name, p.default) for p in parameters if p.default is not p.empty]
    assert found == optional
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"is_causal": True}),
    "window_size": ({"window_size": (3, 0)}, {"window_left": 3, "window_right": 0}),
    "left window": ({"window_size": (3, -1)}, {"window_left": 3}),
    "scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "softcap": ({"softcap": 2.0}, {"softcap": 2.0}),
    "no softcap": ({"softcap": -1.0}, {}),
    "alibi": ({"alibi_slopes": torch.rand(4)}, {}),
}


def compare(out, leaves, q, k, v, options, **lengths):
    """An output and its gradients with the reference; `leaves` pack q, k, v."""
    given, core = OPTIONS[options]
    core = {"scale": q.shape[-1] ** -0.5, "bottom_right": True, **core, **lengths}
    if given.get("alibi_slopes") is not None:
        core["alibi_slopes"] = array(given["alibi_slopes"])
    arrays = [array(x) for x in (q, k, v)]
    wanted, _ = reference.attention(*arrays, **core)
    np.testing.assert_allclose(array(out), wanted, atol=1e-5)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    dq, dk, dv = reference.attention_backward(array(dout), *arrays, **core)[:3]
    for leaf, grad in zip(leaves, grads, strict=True):
        dim = leaf.dim() - 3
        packs = {3: (dq, dk, dv), 2: (dk, dv)}
        if leaf.dim() > q.dim():
            wanted = np.stack(packs[leaf.shape[dim]], dim)
        else:
            wanted = [dq, dk, dv][[x is leaf for x in (q, k, v)].index(True)]
        np.testing.assert_allclose(array(grad), wanted, atol=1e-4)
    assert trainfast.stats().fallbacks == {}


@pytest.mark.parametrize("options", OPTIONS)
def test_flash_attn_func_agrees_with_reference(options):
    q, k, v = rows(2, 7, 4, 8), rows(2, 11, 2, 8), rows(2, 11, 2, 8)
    out = flash_attn.flash_attn_func(q, k, v, **OPTIONS[options][0])
    compare(out, [q, k, v], q, k, v, options, bnhd=True)


@pytest.mark.parametrize("options", ["plain", "causal", "alibi"])
def test_packed_functions_agree_with_reference(options):
    q, kv, qkv = rows(2, 7, 4, 8), rows(2, 11, 2, 2, 8), rows(2, 9, 3, 4, 8)
    given = OPTIONS[options][0]
    out = flash_attn.flash_attn_kvpacked_func(q, kv, **given)
    compare(out, [q, kv], q, *kv.unbind(2), options, bnhd=True)
    out = flash_attn.flash_attn_qkvpacked_func(qkv, **given)
    compare(out, [qkv], *qkv.unbind(2), options, bnhd=True)


@pytest.mark.parametrize("options", OPTIONS)
def test_varlen_functions_agree_with_reference(options):
    ends_q = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    ends_k = torch.tensor([0, 4, 6, 11], dtype=torch.int32)
    lengths = {"cu_seqlens_q": ends_q.numpy(), "cu_seqlens_k": ends_k.numpy()}
    q, k, v = rows(14, 4, 8), rows(11, 2, 8), rows(11, 2, 8)
    kv, qkv = rows(11, 2, 2, 8), rows(14, 3, 4, 8)
    given = OPTIONS[options][0]
    out = flash_attn.flash_attn_varlen_func(q, k, v, ends_q, ends_k, 9, 5, **given)
    compare(out, [q, k, v], q, k, v, options, **lengths)
    out = flash_attn.flash_attn_varlen_kvpacked_func(
        q, kv, ends_q, ends_k, 9, 5, **given
    )
    compare(out, [q, kv], q, *kv.unbind(1), options, **lengths)
    lengths["cu_seqlens_k"] = lengths["cu_seqlens_q"]
    out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, ends_q, 9, **given)
    compare(out, [qkv], *qkv.unbind(1), options, **lengths)


def test_gradient_of_qkv_is_made_in_one_piece():
    qkv = rows(2, 5, 3, 4, 8)
    out = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    assert out.grad_fn.next_functions[0][0].variable is qkv
    with torch.no_grad():
        again = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(out, again) and again.grad_fn is None


def test_derivatives_of_qkv_are_right():
    qkv = torch.randn(1, 4, 3, 2, 3, dtype=torch.float64).requires_grad_()
    slopes = torch.rand(2, dtype=torch.float64)

    def function(qkv):
        return flash_attn.flash_attn_qkvpacked_func(qkv, alibi_slopes=slopes)

    assert torch.autograd.gradcheck(function, qkv, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, qkv, fast_mode=True)


@pytest.mark.parametrize("case", ["slopes", "autocast", "gaps"])
def test_qkv_takes_other_ways_too(case):
    qkv = rows(1, 4, 3, 2, 8)
    slopes = torch.rand(2).requires_grad_() if case == "slopes" else None
    given = qkv.mT.contiguous().mT if case == "gaps" else qkv
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        out = flash_attn.flash_attn_qkvpacked_func(given, alibi_slopes=slopes)
        wanted = flash_attn.flash_attn_func(*qkv.unbind(2), alibi_slopes=slopes)
    torch.testing.assert_close(out, wanted)
    leaves = [qkv] if slopes is None else [qkv, slopes]
    grads = [torch.autograd.grad(x.float().pow(2).sum(), leaves) for x in (out, wanted)]
    torch.testing.assert_close(*grads)


def test_dropout_keeps_the_mean():
    q = rows(1, 64, 4, 16)
    v = torch.ones(1, 64, 4, 16)
    out = flash_attn.flash_attn_func(q, q, v, dropout_p=0.5)
    assert 0.9 < out.mean() < 1.1 and out.std() > 0.01


def test_return_attn_probs_gives_the_logarithms_of_the_sums():
    q, k, v = rows(2, 5, 4, 8), rows(2, 7, 2, 8), rows(2, 7, 2, 8)
    out, lse, probs = flash_attn.flash_attn_func(
        q, k, v, causal=True, return_attn_probs=True
    )
    arrays = [array(x) for x in (q, k, v)]
    core = {"scale": 8**-0.5, "is_causal": True, "bottom_right": True}
    wanted, wanted_lse = reference.attention(*arrays, **core, bnhd=True)
    np.testing.assert_allclose(array(out), wanted, atol=1e-5)
    np.testing.assert_allclose(array(lse), wanted_lse, atol=1e-5)
    assert probs.shape == (0,) and probs.dtype == q.dtype
    ends = torch.tensor([0, 5], dtype=torch.int32)
    given = {"causal": True, "return_attn_probs": True}
    qkv = torch.stack([q[0], q[0], q[0]], 1)
    kv = qkv[:, 1:]
    results = [
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv, ends, 5, **given),
        flash_attn.flash_attn_varlen_kvpacked_func(q[0], kv, ends, ends, 5, 5, **given),
    ]
    assert [x.shape for x in results[0]] == [(5, 4, 8), (4, 5), (0,)]
    torch.testing.assert_close(*results)


def test_what_is_missing_is_named():
    q, ends = rows(1, 5, 2, 8), torch.tensor([0, 5])
    with pytest.raises(NotImplementedError, match=r"^return_attn_probs must be False"):
        flash_attn.flash_attn_func(q, q, q, 0.1, return_attn_probs=True)
    with pytest.raises(NotImplementedError, match=r"^block_table must be None"):
        flash_attn.flash_attn_varlen_func(
            q[0], q[0], q[0], ends, ends, 5, 5, block_table=ends
        )
    with pytest.raises(NotImplementedError, match=r"^flash_attn_with_kvcache is for"):
        flash_attn.flash_attn_with_kvcache(q, q, q, causal=True)


def test_cache_goes_in_with_its_lengths_as_the_message_says():
    q, k, v = rows(2, 1, 4, 8), rows(2, 9, 2, 8), rows(2, 9, 2, 8)
    lens = torch.tensor([9, 4])
    options = {"layout": "bshd", "is_causal": True, "causal_align": "lower_right"}
    out = attention(q, k, v, kv_lens=lens, **options)
    for b, n in enumerate(lens):
        one = slice(b, b + 1)
        wanted = flash_attn.flash_attn_func(q[one], k[one, :n], v[one, :n], causal=True)
        torch.testing.assert_close(out[one], wanted)
