"""trainfast.torch.scaled_dot_product_attention as torch's, and attention() against the
float64 reference."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_methods_invocations import op_db

import trainfast
from tests import reference_attention as reference
from trainfast.torch import attention, scaled_dot_product_attention
from trainfast.torch.attention import dispatch
from trainfast.torch.attention import sdpa as sdpa_module

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
TOLERANCE |= {torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    trainfast.reset_stats()


def calls():
    return sum(trainfast.stats().calls.get("attention", {}).values())


def reasons():
    return trainfast.stats().fallbacks.get("attention", {})


def rows(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).requires_grad_()


def math_path(*args, **kwargs):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def with_grads(function, inputs, **kwargs):
    """The output and gradients of `inputs`, a list of tensors."""
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    out = function(*inputs, **kwargs)
    leaves = [x for x in inputs if x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def agree(inputs, dtype=None, **kwargs):
    """Output and gradients agree with torch's math path in float64, by our kernel."""
    dtype = dtype or inputs[0].dtype
    mine = with_grads(scaled_dot_product_attention, inputs, **kwargs)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    wide = [w.detach().requires_grad_(x.requires_grad) for w, x in zip(wide, inputs)]
    theirs = with_grads(math_path, wide, **kwargs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        tolerance = TOLERANCE[dtype] * scale * 4
        torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=0)
    assert calls() == 2 and reasons() == {}
    assert mine[0].dtype == inputs[0].dtype


# ---- torch's function ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_agrees_with_torch(dtype, is_causal):
    q, k = rows(2, 3, 17, 24, dtype=dtype), rows(2, 3, 33, 24, dtype=dtype)
    v = rows(2, 3, 33, 40, dtype=dtype)
    agree([q, k, v], is_causal=is_causal)


SHAPES = {
    "2 dims": ((5, 8), (7, 8), (7, 6)),
    "3 dims": ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
    "5 dims": ((2, 3, 2, 5, 8), (2, 3, 2, 7, 8), (2, 3, 2, 7, 6)),
    "swin": ((2, 2, 49, 32),) * 3,
    "one query": ((2, 4, 1, 64), (2, 4, 300, 64), (2, 4, 300, 64)),
    "one key": ((2, 4, 9, 16), (2, 4, 1, 16), (2, 4, 1, 16)),
    "dim 1": ((1, 2, 5, 1), (1, 2, 5, 1), (1, 2, 5, 1)),
    "dim 256": ((1, 2, 5, 256), (1, 2, 5, 256), (1, 2, 5, 256)),
    "one kv head": ((2, 4, 5, 8), (2, 1, 6, 8), (2, 1, 6, 8)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_sdpa_takes_shape(shapes):
    agree([rows(*shape) for shape in shapes], scale=0.3)


@pytest.mark.parametrize("shapes", [(6, 2), (6, 1), (6, 6)])
@pytest.mark.parametrize("batch", [(2,), (2, 2), ()])
def test_sdpa_takes_grouped_heads(shapes, batch):
    heads, kv_heads = shapes
    q, k = rows(*batch, heads, 5, 8), rows(*batch, kv_heads, 7, 8)
    agree([q, k, rows(*batch, kv_heads, 7, 8)], enable_gqa=True)


@pytest.mark.parametrize("kind", ["bool", "float", "learned"])
@pytest.mark.parametrize(
    "shape", [(5, 7), (3, 1, 7), (1, 3, 5, 1), (2, 1, 1, 7), (2, 3, 5, 7), (1, 1, 1, 1)]
)
def test_sdpa_takes_mask(kind, shape):
    mask = torch.randn(shape)
    mask = mask > -0.5 if kind == "bool" else mask.requires_grad_(kind == "learned")
    agree([rows(2, 3, 5, 8), rows(2, 3, 7, 8), rows(2, 3, 7, 8), mask])


@pytest.mark.parametrize("shape", [(4, 5, 7), (2, 1, 1, 5, 7), (2, 3, 4, 5, 7)])
@pytest.mark.parametrize("learned", [False, True])
def test_sdpa_takes_mask_of_five_dims(shape, learned):
    mask = torch.randn(shape).requires_grad_(learned)
    sizes = (2, 3, 4)
    agree([rows(*sizes, 5, 8), rows(*sizes, 7, 8), rows(*sizes, 7, 8), mask])


def test_sdpa_takes_float32_mask_with_half_query():
    q = rows(2, 3, 5, 8, dtype=torch.bfloat16)
    agree([q, q, q, torch.randn(5, 5)])


def test_sdpa_of_a_row_without_keys_is_zero():
    q = rows(1, 2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    out, grad = with_grads(lambda q: scaled_dot_product_attention(q, q, q, mask), [q])
    theirs = with_grads(lambda q: math_path(q, q, q, mask), [q])
    assert (out[:, :, 1] == 0).all() and (theirs[0][:, :, 1] == 0).all()
    torch.testing.assert_close([out, grad], theirs)


def test_sdpa_keeps_nan_of_masked_keys_out():
    q, k, v = (rows(1, 2, 4, 8).detach() for _ in range(3))
    mask = torch.tensor([True, True, True, False])
    clean = scaled_dot_product_attention(q, k, v, mask[None])
    k[:, :, 3], v[:, :, 3] = math.nan, math.inf
    assert torch.equal(scaled_dot_product_attention(q, k, v, mask[None]), clean)


LAYOUTS = {
    "bhsd": lambda: torch.randn(2, 3, 5, 8),
    "bnhd": lambda: torch.randn(2, 5, 3, 8).transpose(1, 2),
    "nbhd": lambda: torch.randn(5, 2, 3, 8).permute(1, 2, 0, 3),
    "packed": lambda: torch.randn(2, 5, 3, 3, 8)[:, :, 1].transpose(1, 2),
    "gaps": lambda: torch.randn(2, 3, 5, 11)[..., 2:10],
    "expanded": lambda: torch.randn(1, 1, 5, 8).expand(2, 3, 5, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sdpa_output_lies_in_memory_as_torchs(layout):
    q, k, v = (LAYOUTS[layout]() for _ in range(3))
    agree([x.requires_grad_() for x in (q, k, v)])
    if layout != "gaps" and layout != "expanded":
        theirs = F.scaled_dot_product_attention(q, k, v)
        assert scaled_dot_product_attention(q, k, v).stride() == theirs.stride()


def test_sdpa_copies_rows_with_gaps_and_counts_it():
    q = torch.randn(2, 3, 8, 5).transpose(2, 3)
    out = scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q))
    assert reasons() == {"an array without stride 1 was copied": 3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sdpa_follows_autocast(dtype):
    q, k, v = rows(2, 3, 5, 8), rows(2, 3, 5, 8, dtype=torch.float16), rows(2, 3, 5, 8)
    with torch.autocast("cpu", dtype):
        out = scaled_dot_product_attention(q, k, v, torch.randn(5, 5))
        assert F.scaled_dot_product_attention(q, k, v).dtype == out.dtype == dtype
    grads = torch.autograd.grad(out.sum(), [q, k, v])
    assert [x.dtype for x in grads] == [torch.float32, torch.float16, torch.float32]
    assert calls() == 2


@pytest.mark.parametrize("learned", [False, True])
def test_sdpa_takes_mask_of_autocasts_dtype(learned):
    q, mask = rows(2, 3, 5, 8), torch.randn(5, 5, dtype=torch.bfloat16)
    mask.requires_grad_(learned)
    with torch.autocast("cpu", torch.bfloat16):  # as normalised q and k, and a Linear
        out = scaled_dot_product_attention(q, q, q, mask)
        expected = F.scaled_dot_product_attention(q, q, q, mask)
    assert out.dtype == torch.bfloat16 and calls() == 1 and not reasons()
    torch.testing.assert_close(out, expected, atol=3e-2, rtol=3e-2)
    if learned:
        assert torch.autograd.grad(out.sum(), mask)[0].dtype == torch.bfloat16
    compiled = torch.compile(
        scaled_dot_product_attention, fullgraph=True, backend="aot_eager"
    )
    trainfast.reset_stats()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(q, q, q, mask), out)
    assert calls() == 1 and not reasons()


def test_sdpa_leaves_float64_alone_under_autocast():
    q = rows(2, 3, 5, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert scaled_dot_product_attention(q, q, q).dtype == torch.float64
        with pytest.raises(RuntimeError, match="same dtype"):
            scaled_dot_product_attention(q, q.float(), q)


def samples():
    name = "nn.functional.scaled_dot_product_attention"
    operator = next(x for x in op_db if x.name == name)
    return operator.sample_inputs("cpu", torch.float64, requires_grad=True)


def test_sdpa_agrees_with_torch_on_torchs_samples():
    compared = 0
    for sample in samples():
        if sample.kwargs.get("dropout_p", 0) > 0:
            out = scaled_dot_product_attention(
                sample.input, *sample.args, **sample.kwargs
            )
            assert out.isfinite().all()
            continue
        inputs = [sample.input, *sample.args]
        mine = with_grads(scaled_dot_product_attention, inputs, **sample.kwargs)
        theirs = with_grads(math_path, inputs, **sample.kwargs)
        torch.testing.assert_close(mine, theirs)
        compared += 1
    assert compared > 10
    assert set(reasons()) <= {
        "numbers of dims that differ, or below 2",
        "numbers of heads that differ",
        "batch dims that differ",
    }


# ---- What torch's function does ------------------------------------------------------

q4 = torch.ones(2, 3, 5, 8)
REFUSED = {
    "a head dim of 0 or above 256": (torch.ones(1, 1, 3, 257),) * 3,
    "a size of 0": (torch.ones(1, 2, 0, 8), q4[:1, :2], q4[:1, :2]),
    "batch dims that differ": (q4, q4[:1], q4[:1]),
    "numbers of dims that differ, or below 2": (q4, q4[0], q4[0]),
    "numbers of heads that differ": (q4[:, :1], q4, q4),
    "dropout_p outside [0, 1)": (q4, q4, q4, None, 1.0),
    "scale must be finite, got nan": (q4, q4, q4, None, 0.0, False),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_sdpa_leaves_what_it_cannot_do_to_torch(reason):
    args = REFUSED[reason]
    kwargs = {"scale": math.nan} if len(args) == 6 else {}
    out = scaled_dot_product_attention(*args, **kwargs)
    theirs = F.scaled_dot_product_attention(*args, **kwargs)
    torch.testing.assert_close(out, theirs, equal_nan=True)
    assert reasons() == {reason: 1} and calls() == 0


WRONG = {
    "mask and is_causal": (q4, q4, q4[..., :7], torch.ones(5, 5).bool(), 0.0, True),
    "int mask": (q4, q4, q4, torch.ones(5, 5, dtype=torch.int32)),
    "float64 mask": (q4, q4, q4, torch.ones(5, 5, dtype=torch.float64)),
    "mask of another size": (q4, q4, q4, torch.ones(5, 6)),
    "mask of 1 dim": (q4, q4, q4, torch.ones(5)),
    "key of another dim": (q4, q4[..., :7], q4),
    "value of another length": (q4, q4, q4[:, :, :4, :7]),
    "dtypes": (q4, q4.double(), q4),
    "ints": (q4.int(), q4.int(), q4.int()),
    "heads": (q4, q4[:, :2], q4[:, :2]),
    "1 dim": (q4[0, 0, 0], q4, q4),
    "devices": (q4, q4.to("meta"), q4),
}


@pytest.mark.parametrize("case", WRONG)
def test_sdpa_raises_torchs_error(case):
    with pytest.raises((RuntimeError, IndexError, ValueError)) as theirs:
        F.scaled_dot_product_attention(*WRONG[case])
    with pytest.raises(theirs.type) as mine:
        scaled_dot_product_attention(*WRONG[case])
    assert str(mine.value) == str(theirs.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"query": None},
        {"key": None},
        {"value": q4.numpy()},
        {"is_causal": 1},
        {"is_causal": None},
        {"scale": "a"},
        {"scale": torch.ones(1)},
        {"scale": torch.tensor(0.3).requires_grad_()},
        {"dropout_p": None},
    ],
    ids=str,
)
def test_sdpa_refuses_other_kinds_as_torch_does(changes):
    given = {"query": q4, "key": q4, "value": q4} | changes
    with pytest.raises(TypeError):
        F.scaled_dot_product_attention(**given)
    with pytest.raises(TypeError):
        scaled_dot_product_attention(**given)


def test_sdpa_leaves_a_user_who_wants_the_math_path_alone():
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(q4, q4, q4)
        assert torch.equal(out, F.scaled_dot_product_attention(q4, q4, q4))
    assert reasons() == {"sdpa_kernel(SDPBackend.MATH)": 1} and calls() == 0


def test_backend_without_attention_leaves_it_to_torch(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("this backend has no attention")

    monkeypatch.setattr(trainfast._core, "attention", refuse)
    q = rows(2, 3, 5, 8)
    out = scaled_dot_product_attention(q, q, q)
    assert torch.equal(out, F.scaled_dot_product_attention(q, q, q))
    out = attention(q, q, q, is_causal=True)
    theirs = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(out, theirs)
    grads = [torch.autograd.grad(x.sum(), q) for x in (out, theirs)]
    torch.testing.assert_close(*grads)
    assert reasons() == {"this backend has no attention": 2} and calls() == 0


FLASH = "CUDA: torch's flash attention, which was faster"
NO_TENSOR_CORES = "CUDA: no kernel with tensor cores for this dtype"


def test_sdpa_leaves_a_gpu_to_torch_where_its_kernels_are_faster(monkeypatch):
    # In torch 2.6 its function asks the driver, which is missing here.
    monkeypatch.setattr(sdpa_module, "torchs_sdpa", lambda query, *_, **__: query)
    with FakeTensorMode():
        q = torch.empty(1, 2, 5, 8, dtype=torch.float16, device="cuda")
        assert scaled_dot_product_attention(q, q, q) is q
    assert reasons() == {FLASH: 1} and calls() == 0


@pytest.mark.parametrize(
    "dtype, expected",
    [
        (torch.float16, None),
        (torch.bfloat16, None),
        (torch.float32, NO_TENSOR_CORES),
    ],
)
def test_a_gpu_without_flash_attention_takes_what_tensor_cores_do(
    monkeypatch, dtype, expected
):
    monkeypatch.setattr(dispatch, "has_flash_attention", lambda device: False)
    with FakeTensorMode():
        q = torch.empty(1, 2, 5, 8, dtype=dtype, device="cuda")
        assert dispatch.torchs_are_faster(q) == expected


def test_sdpa_scale_is_keyword_only_as_in_torch():
    for function in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        with pytest.raises(TypeError):
            function(q4, q4, q4, None, 0.0, False, 0.5)


def test_sdpa_leaves_nested_tensors_and_subclasses_to_torch():
    class Mine(torch.Tensor):
        pass

    out = scaled_dot_product_attention(*[q4.as_subclass(Mine)] * 3)
    assert type(out) is Mine
    nested = torch.nested.nested_tensor([q4[0], q4[1]])
    assert scaled_dot_product_attention(nested, nested, nested).is_nested
    assert reasons() == {"a tensor of type Mine": 1, "a nested or sparse tensor": 1}


def test_sdpa_works_in_inference_mode_and_with_its_tensors():
    with torch.inference_mode():
        x = torch.randn(2, 3, 5, 8)
        out = scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(out, scaled_dot_product_attention(x, x, x))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        scaled_dot_product_attention(rows(2, 3, 5, 8), x, x)


def test_sdpa_sees_the_negative_bit():
    x = torch.randn(2, 3, 5, 8, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    out = scaled_dot_product_attention(x, x, x)
    clean = x.resolve_neg()
    torch.testing.assert_close(out, scaled_dot_product_attention(clean, clean, clean))


# ---- All features --------------------------------------------------------------------


def to_numpy(x):
    return x.detach().double().numpy() if x.is_floating_point() else x.numpy()


def compare_with_reference(q, k, v, core=None, **options):
    """attention(), output, lse and gradients, and the reference with `core` options."""
    tensors = {n: x for n, x in options.items() if isinstance(x, torch.Tensor)}
    out, lse = attention(q, k, v, return_lse=True, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    total = (out * dout).sum() + lse.masked_fill(lse.isinf(), 0).mul(dlse).sum()
    leaves = {"q": q, "k": k, "v": v}
    leaves |= {n: x for n, x in tensors.items() if x.requires_grad}
    grads = torch.autograd.grad(total, list(leaves.values()))
    given = {"scale": q.shape[-1] ** -0.5, **(core or {})}
    given |= {n: to_numpy(x) for n, x in tensors.items()}
    arrays = [to_numpy(x) for x in (q, k, v)]
    wanted = reference.attention(*arrays, **given)
    made = reference.attention_backward(
        to_numpy(dout), *arrays, dlse=to_numpy(dlse), **given
    )
    names = ("q", "k", "v", "bias", "alibi_slopes", "sinks")
    made = [made[names.index(name)] for name in leaves]
    for a, b in zip((out, lse, *grads), (*wanted[:2], *made), strict=True):
        b = torch.from_numpy(b).reshape(a.shape)
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-4)
    assert reasons() == {} and calls() == 2


FEATURES = {
    "mask": ({"mask": torch.rand(2, 1, 9, 11) > 0.4}, {}),
    "float mask": ({"mask": torch.randn(9, 11)}, {}),
    "bias": ({"bias": torch.randn(1, 4, 9, 11).requires_grad_()}, {}),
    "row bias": ({"bias": torch.randn(2, 1, 1, 11).requires_grad_()}, {}),
    "causal": ({"is_causal": True}, {"is_causal": True}),
    "bottom right": (
        {"is_causal": True, "causal_align": "lower_right"},
        {"is_causal": True, "bottom_right": True},
    ),
    "window_size": ({"window_size": (2, None)}, {"window_left": 2}),
    "scale": ({"scale": 0.7}, {"scale": 0.7}),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "alibi": ({"alibi_slopes": torch.rand(2, 4).requires_grad_()}, {}),
    "sinks": ({"sinks": torch.randn(4).requires_grad_()}, {}),
    "dropout": ({"dropout_p": 0.3, "seed": 7}, {"dropout_p": 0.3, "seed": 7}),
    "lengths": ({"kv_lens": torch.tensor([4, 11])}, {}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_attention_agrees_with_reference(feature):
    options, core = FEATURES[feature]
    q, k, v = rows(2, 4, 9, 8), rows(2, 2, 11, 8), rows(2, 2, 11, 6)
    compare_with_reference(q, k, v, core=core, **options)


def test_attention_takes_batch_first_layout():
    q, k, v = rows(2, 9, 4, 8), rows(2, 11, 2, 8), rows(2, 11, 2, 6)
    core = {"bnhd": True, "is_causal": True}
    compare_with_reference(q, k, v, core=core, is_causal=True, layout="bshd")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rest", [0, 3])
def test_attention_takes_variable_lengths(dtype, rest):
    q, k, v = rows(14 + rest, 4, 8), rows(11 + rest, 2, 8), rows(11 + rest, 2, 6)
    compare_with_reference(
        q,
        k,
        v,
        core={"is_causal": True, "bottom_right": True},
        is_causal=True,
        causal_align="lower_right",
        cu_seqlens_q=torch.tensor([0, 5, 5, 14], dtype=dtype),
        cu_seqlens_k=torch.tensor([0, 4, 6, 11], dtype=dtype),
    )


def test_attention_rows_after_the_last_item_are_empty():
    q, ends = rows(9, 2, 8), torch.tensor([0, 5])
    torch.full((9, 2, 8), 7.0)  # what fresh memory may hold
    out, lse = attention(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, return_lse=True)
    assert (out[5:] == 0).all() and (lse[:, 5:] == -math.inf).all()
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert (grad[5:] == 0).all()


BAD = {
    "causal_align": {"causal_align": "left"},
    "layout": {"layout": "nbhd"},
    "dropout_p": {"dropout_p": 1.0},
    "softcap": {"softcap": 0.0},
    "window_size": {"window_size": (-1, 2)},
    "mask": {"mask": torch.ones(5, 5).requires_grad_()},
    "bias": {"bias": torch.ones(5, 6)},
    "sinks": {"sinks": torch.ones(2)},
    "kv_lens": {"kv_lens": torch.tensor([6, 6])},
    "alibi_slopes": {"alibi_slopes": torch.ones(5)},
    "cu_seqlens_q": {
        "cu_seqlens_q": torch.zeros(0, dtype=torch.int64),
        "cu_seqlens_k": torch.zeros(0, dtype=torch.int64),
    },
}


@pytest.mark.parametrize("name", BAD)
def test_attention_names_the_bad_argument(name):
    q = q4[0] if name == "cu_seqlens_q" else q4
    with pytest.raises(ValueError, match=rf"^{name}.* must .*, got "):
        attention(q, q, q, **BAD[name])


def learned(value):
    return torch.tensor(value).requires_grad_()


OTHERS = [
    (TypeError, "q must be a tensor, got NoneType", {"q": None}),
    (TypeError, "k must be a tensor, got ndarray", {"k": q4.numpy()}),
    (TypeError, "mask must be a tensor, got bool", {"mask": True}),
    (TypeError, "sinks must be a tensor, got list", {"sinks": [1.0] * 3}),
    (TypeError, "kv_lens must be a tensor, got list", {"kv_lens": [1, 2]}),
    (TypeError, "scale must be a number, got 'a'", {"scale": "a"}),
    (TypeError, "softcap must be a number, got 'a'", {"softcap": "a"}),
    (TypeError, "dropout_p must be a number, got None", {"dropout_p": None}),
    (ValueError, "scale must fit into float64, got 1000", {"scale": 10**400}),
    (ValueError, "scale must not require a gradient", {"scale": learned(0.3)}),
    (ValueError, "softcap must not require a gradient", {"softcap": learned(2.0)}),
    (
        ValueError,
        "window_size must be (left, right) or None, got 3",
        {"window_size": 3},
    ),
    (
        NotImplementedError,
        "mask must be bool or of floats, got torch.int32",
        {"mask": torch.ones(5, 5).int()},
    ),
    (
        NotImplementedError,
        "bias must be of floats, got torch.bool",
        {"bias": torch.ones(5, 5).bool()},
    ),
    (
        ValueError,
        "kv_lens must be int32 or int64, got torch.float32",
        {"kv_lens": torch.ones(2)},
    ),
    (
        ValueError,
        "seed must be int64, got torch.float32",
        {"seed": torch.ones(()), "dropout_p": 0.5},
    ),
]


@pytest.mark.parametrize("error, message, changes", OTHERS)
def test_attention_refuses_what_is_of_another_kind(error, message, changes):
    given = {"q": q4, "k": q4, "v": q4} | changes
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        attention(**given)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_attention_of_another_dtype_is_not_implemented(dtype):
    q = torch.ones(1, 2, 3, 4, dtype=dtype)
    with pytest.raises(NotImplementedError, match=rf"^q must be .*, got {dtype}$"):
        attention(q, q, q)


def test_attention_without_a_kernel_takes_plain_operations():
    class Mine(torch.Tensor):
        pass

    q = torch.randn(2, 3, 5, 8)
    out = attention(q.as_subclass(Mine), q, q, sinks=torch.zeros(3))
    torch.testing.assert_close(
        out.as_subclass(torch.Tensor), attention(q, q, q, sinks=torch.zeros(3))
    )
    assert reasons() == {"a tensor of type Mine": 1} and calls() == 1
