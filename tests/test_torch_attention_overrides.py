"""The kernels under torch's own operators: what trainfast.patch("attention_operators")
serves of calls that do not go through torch's names. Operators of CUDA run here on the
CPU, where torch has none of that name, with a stand-in for torch's own kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as registry
from torch_version import TORCH

import trainfast
from trainfast.torch import attention_overrides, register_flash_attention_impl
from trainfast.torch import scaled_dot_product_attention as sdpa

pytestmark = pytest.mark.skipif(
    not hasattr(torch.library, "get_kernel"), reason="this torch cannot get a kernel"
)
RESTORES = pytest.mark.skipif(
    not hasattr(registry, "restore_flash_attention_impl"),
    reason="this torch cannot take an implementation away again",
)
aten = torch.ops.aten
FLASH_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu
FLASH_ON_CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
EFFICIENT = aten._scaled_dot_product_efficient_attention
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward
FLASH = aten._scaled_dot_product_flash_attention
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    trainfast.reset_stats()
    yield
    trainfast.unpatch()


def calls():
    return sum(trainfast.stats().calls.get("attention", {}).values())


def fallbacks():
    return trainfast.stats().fallbacks.get("attention", {})


def rows(*shape, layout="bhnd", dtype=torch.float32):
    if layout == "bnhd":
        batch, heads, n, dim = shape
        return torch.randn(batch, n, heads, dim, dtype=dtype).transpose(1, 2)
    return torch.randn(shape, dtype=dtype)


def with_grads(function, *tensors, **options):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves, **options)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def same_layout(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


# ---- What reaches them ---------------------------------------------------------------


def scripted(q, k, v, is_causal: bool):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


DIRECT = {
    "aten": aten.scaled_dot_product_attention,
    "_nn": torch._C._nn.scaled_dot_product_attention,
    "script": scripted,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", DIRECT)
def test_direct_calls_run_on_the_kernel_while_patched(name):
    q, k, function = rows(2, 3, 5, 8), rows(2, 3, 7, 8), DIRECT[name]
    if name == "script":
        function = torch.jit.script(function)
    wanted = with_grads(function, q, k, k, is_causal=True)
    assert calls() == 0
    with trainfast.patch("attention_operators"):
        out = with_grads(function, q, k, k, is_causal=True)
    assert calls() == 2 and fallbacks() == {}
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    again = with_grads(function, q, k, k, is_causal=True)
    assert calls() == 2
    assert all(torch.equal(a, b) for a, b in zip(again, wanted))


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_compiled_calls_of_torchs_operator_run_on_the_kernel(layout):
    def function(q):
        return aten.scaled_dot_product_attention(q * 2, q, q, is_causal=True) + 1

    q = rows(2, 3, 5, 8, layout=layout)
    wanted = with_grads(function, q)
    torch._dynamo.reset()
    with trainfast.patch("attention_operators"):
        out = with_grads(torch.compile(function, fullgraph=True), q)
    assert calls() == 2
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


def test_what_our_function_leaves_to_torch_is_torchs_and_counted_once(
    kernels_at_any_size,
):
    q = rows(1, 2, 5, 300)
    with trainfast.patch("attention", "attention_operators"):
        F.scaled_dot_product_attention(q, q, q)
        assert calls() == 0
        assert fallbacks() == {"a head dim of 0 or above 256": 1}
        trainfast.reset_stats()
        torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, x, x))(
            rows(3, 1, 2, 5, 8)
        )
    assert calls() == 0
    assert fallbacks() == {"a function transform (vmap, grad)": 1}


def test_what_the_kernel_refuses_goes_on_to_torchs_own():
    q = rows(1, 2, 5, 300)
    wanted = with_grads(DIRECT["aten"], q, q, q)
    with trainfast.patch("attention_operators"):
        out = with_grads(DIRECT["aten"], q, q, q)
        with pytest.raises(RuntimeError, match="only 4 dims"):
            FLASH_ON_CPU(*[q[0, ..., :8]] * 3)
    assert all(torch.equal(a, b) for a, b in zip(out, wanted))
    assert calls() == 0
    assert fallbacks() == {"a head dim of 0 or above 256": 1, "other than 4 dims": 1}


def test_what_the_core_refuses_goes_on_to_torchs_own(monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("nothing here computes it")

    q = rows(1, 2, 5, 8)
    wanted = with_grads(DIRECT["aten"], q, q, q)
    monkeypatch.setattr(attention_overrides.attention_ops, "forward", refuse)
    monkeypatch.setattr(attention_overrides.attention_ops, "backward", refuse)
    with trainfast.patch("attention_operators"):
        out = with_grads(DIRECT["aten"], q, q, q)
    assert all(torch.equal(a, b) for a, b in zip(out, wanted))
    assert fallbacks() == {"nothing here computes it": 2}


# ---- What they return ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("masked", [False, True])
def test_results_on_the_cpu_are_laid_out_as_torchs(dtype, layout, masked):
    q, k = (rows(2, 3, n, 8, layout=layout, dtype=dtype) for n in (5, 7))
    mask = None
    if masked:
        mask = torch.rand(5, 7, dtype=dtype)
        mask[1] = -torch.inf  # a row without a key
    found = []
    for names in (["attention_operators"], ["clip"]):
        with trainfast.patch(*names):
            out, lse = FLASH_ON_CPU(q, k, k, attn_mask=mask)
            grads = FLASH_ON_CPU_BACKWARD(
                torch.ones_like(out), q, k, k, out, lse, 0.0, False, attn_mask=mask
            )
            found.append((out, lse, *grads))
    assert calls() == 2
    same_layout(*found)
    tolerance = {"atol": 0.03, "rtol": 0.03} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(*found, **tolerance)
    if dtype == torch.float64 and TORCH < (2, 13):
        return  # torch's own fake lse is a float32, its real one a float64
    with trainfast.patch("attention_operators"):
        meta = [x.to("meta") for x in (q, k)]
        made = FLASH_ON_CPU(meta[0], meta[1], meta[1])
    same_layout([x.to("meta") for x in found[0][:2]], made)
    assert calls() == 2


@pytest.mark.parametrize("forwards", ["attention_operators", "clip"])
def test_forward_and_backward_may_be_on_either_side_of_patch(forwards):
    q, mask = rows(2, 3, 40, 8).requires_grad_(), torch.rand(40, 40) > 0.5
    mask[3] = False
    with trainfast.patch(forwards):
        out = aten.scaled_dot_product_attention(q, q, q, mask)
    with trainfast.patch(
        "clip" if forwards == "attention_operators" else "attention_operators"
    ):
        (grad,) = torch.autograd.grad(out.square().sum(), q)
    assert calls() == 1
    leaf = q.detach().requires_grad_()
    out = aten.scaled_dot_product_attention(leaf, leaf, leaf, mask)
    (wanted,) = torch.autograd.grad(out.square().sum(), leaf)
    torch.testing.assert_close(grad, wanted, atol=1e-5, rtol=1e-5)


# ---- CUDA's operators ----------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch):
    """CUDA's operators under the CPU's key, above what counts calls of torch's own."""
    own = []

    def torchs(*args, **kwargs):
        own.append(args)
        raise RuntimeError("torch's own")

    library = torch._C._dispatch_library("IMPL", "aten", "", __file__, 0)
    for pair in attention_overrides.PAIRS[1:]:
        for name in (pair.name, f"{pair.name}_backward"):
            library.impl(name, "CPU", torchs, False)
    pairs = [pair._replace(key="CPU") for pair in attention_overrides.PAIRS]
    monkeypatch.setattr(attention_overrides, "PAIRS", pairs)
    yield own
    trainfast.unpatch()
    library.reset()


def efficient(q, k, v, mask=None, **options):
    return EFFICIENT(q, k, v, mask, True, **options)[0]


def flash(q, k, v, **options):
    return FLASH(q, k, v, **options)[0]


@pytest.mark.parametrize("n", [5, 32, 70])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("masked", [False, True])
def test_efficient_attention_has_torchs_layout_and_autograd(on_cpu, n, layout, masked):
    q, k = rows(2, 3, n, 8, layout=layout), rows(2, 3, 9, 8, layout=layout)
    v, mask = rows(2, 3, 9, 6, layout=layout), None
    if masked:
        mask = torch.where(torch.rand(2, 3, n, 9) > 0.4, 0.0, -torch.inf)
        mask[:, :, 1] = -torch.inf
    wanted = with_grads(sdpa, q, k, v, attn_mask=mask)
    trainfast.reset_stats()
    with trainfast.patch("attention_operators"):
        found = with_grads(efficient, q, k, v, mask=mask)
        made = EFFICIENT(q, k, v, mask, True)
        short = EFFICIENT(q, k, v, mask, False)
        grads = EFFICIENT_BACKWARD(
            *(made[0], q, k, v, mask, *made, 0.0, [True, True, True, False])
        )
        meta = [x if x is None else x.to("meta") for x in (q, k, v, mask)]
        theirs = [EFFICIENT(*meta, log_sumexp) for log_sumexp in (True, False)]
        ones = [x.to("meta") for x in made]
        wanted_grads = EFFICIENT_BACKWARD(
            *(ones[0], *meta, *ones, 0.0, [True, True, True, False])
        )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert (calls(), on_cpu, fallbacks()) == (5, [], {})
    for mine, other in zip((made, short), theirs):
        same_layout([x.to("meta") for x in mine], other)
    same_layout([x if x is None else x.to("meta") for x in grads], wanted_grads)
    lse = made[1]
    assert lse[..., n:].isposinf().all()
    true = trainfast.attention(q, k, v, mask=mask, return_lse=True)[1]
    true[true.isneginf()] = 0  # as torch has it
    torch.testing.assert_close(lse[..., :n], true)


def test_dropout_and_gradients_of_a_mask_are_torchs_own(on_cpu):
    q, mask = rows(1, 2, 5, 8), rows(1, 2, 5, 5)
    with trainfast.patch("attention_operators"):
        with pytest.raises(RuntimeError, match="torch's own"):
            efficient(q, q, q, dropout_p=0.5)
        out = EFFICIENT(q, q, q, mask, True)
        with pytest.raises(RuntimeError, match="torch's own"):
            EFFICIENT_BACKWARD(*(out[0], q, q, q, mask, *out, 0.0, [True] * 4))
        with pytest.raises(RuntimeError, match="torch's own"):
            wanted = [True, True, True, False]
            EFFICIENT_BACKWARD(*(out[0], q, q, q, mask, *out, 0.5, wanted))
    assert len(on_cpu) == 3 and calls() == 1
    assert fallbacks() == {
        "dropout under torch's operator": 1,
        "the gradient of a mask under torch's operator": 1,
    }


@RESTORES
def test_flash_attention_is_overridden_only_by_choice(on_cpu):
    q, k = rows(2, 3, 70, 8, layout="bnhd"), rows(2, 3, 9, 8)
    with (
        trainfast.patch("attention_operators"),
        pytest.raises(RuntimeError, match="own"),
    ):
        flash(q, k, k)
    register_flash_attention_impl()
    registry.activate_flash_attention_impl("trainfast")
    try:
        found = with_grads(flash, q, k, k, is_causal=True)
        assert calls() == 2
        mine, ones = FLASH(q, k, k), [x.to("meta") for x in (q, k, k)]
        grads = FLASH_BACKWARD(
            *(mine[0], q, k, k, *mine[:6], 0.0, False, *mine[6:8]), scale=0.3
        )
        theirs = FLASH(*ones)
    finally:
        registry.restore_flash_attention_impl()
    torch.testing.assert_close(found, with_grads(sdpa, q, k, k, is_causal=True))
    to_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in mine]
    same_layout(to_meta, theirs)
    assert [x.stride() for x in grads] == [x.stride() for x in (q, k, k)]
    with pytest.raises(RuntimeError, match="torch's own"):
        flash(q, k, k)


# ---- Registration --------------------------------------------------------------------


def kernel_of(name, key):
    return str(torch.library.get_kernel(f"aten::{name}", key))


@RESTORES
@pytest.mark.parametrize("patch_first", [False, True])
def test_patch_and_choice_may_end_in_any_order(patch_first):
    register_flash_attention_impl()
    q, name = rows(1, 2, 5, 8), "_scaled_dot_product_flash_attention_for_cpu"
    torchs = kernel_of(name, "CPU")
    if patch_first:
        trainfast.patch("attention_operators")
    registry.activate_flash_attention_impl("trainfast")
    if not patch_first:
        trainfast.patch("attention_operators")
        registry.restore_flash_attention_impl()
    else:
        trainfast.unpatch("attention_operators")
    assert kernel_of(name, "CPU") != torchs
    DIRECT["aten"](q, q, q)
    assert calls() == 1 and fallbacks() == {}
    if patch_first:
        registry.restore_flash_attention_impl()
    else:
        trainfast.unpatch("attention_operators")
    assert kernel_of(name, "CPU") == torchs
    DIRECT["aten"](q, q, q)
    assert calls() == 1


def test_what_is_unregistered_is_kept_as_a_thread_may_be_in_it():
    """Torch frees it, and the thread's process ends with a fault."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    with trainfast.patch("attention_operators"):
        ours = kernel_of(name, "CPU")
    assert ours != kernel_of(name, "CPU")
    assert ours in map(str, attention_overrides._kept)


def test_operators_of_cuda_are_overridden_where_torch_has_them():
    pairs = attention_overrides.PAIRS[1:]
    names = [n for p in pairs for n in (p.name, f"{p.name}_backward")]
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{names[0]}", "CUDA"):
        pytest.skip("this torch has them")
    trainfast.patch("attention_operators")
    for name in names:
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{name}", "CUDA"
        )
    trainfast.unpatch("attention_operators")
    library = torch._C._dispatch_library("IMPL", "aten", "", __file__, 0)
    for name in names:
        library.impl(name, "CUDA", lambda *_: None, False)
    before = [kernel_of(name, "CUDA") for name in names]
    with trainfast.patch("attention_operators"):
        ours = [kernel_of(name, "CUDA") for name in names]
    after = [kernel_of(name, "CUDA") for name in names]
    library.reset()
    assert [a != b for a, b in zip(ours, before)] == [True, True, False, False]
    assert "attention_overrides" in ours[0] and after == before


def test_what_another_library_overrides_is_left_to_it():
    name = "_scaled_dot_product_flash_attention_for_cpu"
    theirs = torch.library.Library("aten", "IMPL")
    seen = []

    def other(*args, **kwargs):
        seen.append(args)
        return args[0].clone(), args[0][..., 0].clone()

    theirs.impl(name, other, "CPU")
    q = rows(1, 2, 5, 8)
    with trainfast.patch("attention_operators"):
        FLASH_ON_CPU(q, q, q)
        theirs._destroy()
        FLASH_ON_CPU(q, q, q)
    assert len(seen) == 1 and calls() == 0


def test_a_torch_that_cannot_get_kernels_is_left_alone(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel")
    assert not register_flash_attention_impl()
    q = rows(1, 2, 5, 8)
    with trainfast.patch("attention_operators"):
        DIRECT["aten"](q, q, q)
    assert calls() == 0
