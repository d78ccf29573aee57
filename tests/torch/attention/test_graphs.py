"""trainfast.torch's attention where torch looks at operators: torch.compile, fake
tensors, tracers, exports and function transforms."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import trainfast
from trainfast.torch import attention, scaled_dot_product_attention
from trainfast.torch.attention import math_backend
from trainfast.torch.attention.math_backend import Extras, Inputs, Options

forward_op = torch.ops.trainfast.attention.default
backward_op = torch.ops.trainfast.attention_backward.default
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
    trainfast.reset_stats()


def rows(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def fallbacks():
    return trainfast.stats().fallbacks.get("attention", {})


# ---- The operators -------------------------------------------------------------------


def cases():
    q, k, v = rows(2, 4, 5, 8), rows(2, 2, 6, 8), rows(2, 2, 6, 3)
    plain = Inputs(q, k, v), Extras(), Options(0.3, is_causal=True)
    everything = (
        Inputs(q, k, v, rows(4, 1, 6), rows(4), rows(4)),
        Extras(torch.rand(5, 6) > 0.3, torch.tensor(3), kv_lens=torch.tensor([4, 6])),
        Options(0.3, dropout_p=0.2, softcap=2.0),
    )
    swapped = Inputs(*(x.detach().transpose(1, 2).contiguous() for x in (q, k, v)))
    swapped = swapped, Extras(), Options(0.3, bnhd=True)
    ends = torch.tensor([0, 2, 7])
    lengths = (
        Inputs(rows(7, 4, 8), rows(7, 2, 8), rows(7, 2, 8)),
        Extras(cu_seqlens_q=ends, cu_seqlens_k=ends),
        Options(0.3),
    )
    half = Inputs(*(rows(1, 2, 5, 8, dtype=torch.bfloat16) for _ in range(3)))
    return {
        "plain": plain,
        "everything": everything,
        "bnhd": swapped,
        "lengths": lengths,
        "bfloat16": (half, Extras(), Options(0.3)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", cases())
def test_operators_pass_opcheck(case):
    inputs, extras, options = cases()[case]
    arguments = (*inputs, *extras, *options)
    torch.library.opcheck(forward_op, arguments)
    out, lse = forward_op(*arguments)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    wanted = [x is not None for x in inputs]
    backward = (dout, dlse, out.detach(), lse.detach(), wanted, *arguments)
    torch.library.opcheck(backward_op, backward, test_utils=CHECKS)
    # In graphs it has no derivative: torch.compile differentiates once.
    plain = tree_map_only(torch.Tensor, torch.detach, backward)
    torch.library.opcheck(backward_op, plain)


def test_operators_have_second_derivatives():
    (q, k, v, *_), _, options = cases()["plain"]
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))

    def function(q, k, v):
        return forward_op(*Inputs(q, k, v), *Extras(), *options)

    assert torch.autograd.gradcheck(function, (q, k, v), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (q, k, v), fast_mode=True)


def test_fake_and_meta_tensors_have_the_layout_of_real_ones():
    for layout in ((2, 4, 5, 8), (2, 5, 4, 8)):
        q = torch.randn(layout)
        q = q if layout[1] == 4 else q.transpose(1, 2)
        real = scaled_dot_product_attention(q, q, q[..., :3])
        meta = q.to("meta")
        assert meta.stride() == q.stride()
        made = [scaled_dot_product_attention(meta, meta, meta[..., :3])]
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(q)
            made.append(scaled_dot_product_attention(fake, fake, fake[..., :3]))
        outside = scaled_dot_product_attention(fake, fake, fake[..., :3])
        for out in (*made, outside):
            assert out.shape == real.shape and out.stride() == real.stride()
    assert fallbacks() == {}


# ---- torch.compile -------------------------------------------------------------------


def learned():
    return rows(4, 6, 6)


COMPILED = {
    "plain": lambda q, x: scaled_dot_product_attention(q, q, q),
    "causal": lambda q, x: scaled_dot_product_attention(q, q, q, is_causal=True),
    "mask": lambda q, x: scaled_dot_product_attention(q, q, q, x.detach() > -1),
    "bias": lambda q, x: scaled_dot_product_attention(q, q, q, x),
    "3 dims": lambda q, x: scaled_dot_product_attention(q[0], q[0], q[0]),
    "gqa": lambda q, x: scaled_dot_product_attention(
        q, q[:, :2], q[:, :2], enable_gqa=True
    ),
    "dropout": lambda q, x: attention(q, q, q, dropout_p=0.4, seed=3),
    "window_size": lambda q, x: attention(q, q, q, window_size=(1, None), softcap=2.0),
    "sinks": lambda q, x: attention(q, q, q, sinks=x[:, 0, 0]),
    "lse": lambda q, x: sum(attention(q, q, q, bias=x, return_lse=True)[1:]),
    "too wide": lambda q, x: scaled_dot_product_attention(*[q.repeat(1, 1, 1, 40)] * 3),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_function_has_no_break_and_the_same_values(name):
    function = COMPILED[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = []
    q, x = rows(2, 4, 6, 8), learned()
    for each in (function, compiled):
        leaves = [y.detach().requires_grad_() for y in (q, x)]
        out = each(*leaves)
        grads = torch.autograd.grad(out.pow(2).sum(), leaves, allow_unused=True)
        found.append([out, *grads])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
    reason = "a head dim of 0 or above 256"
    assert fallbacks() == ({reason: 2} if name == "too wide" else {})


def test_inductor_compiles_it():
    def function(q):
        return scaled_dot_product_attention(q * 2, q, q, is_causal=True) + 1

    q = rows(2, 4, 6, 8)
    out = torch.compile(function, fullgraph=True)(q)
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert sum(trainfast.stats().calls["attention"].values()) == 2  # nothing again
    torch.testing.assert_close(out, function(q))
    torch.testing.assert_close(grad, torch.autograd.grad(function(q).sum(), q)[0])


def test_compiled_function_takes_any_length_without_compiling_again():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def function(q, k):
        return scaled_dot_product_attention(q, k, k, is_causal=True)

    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    counts = set()
    for n, m in ((5, 7), (9, 11), (16, 13)):
        q, k = rows(2, 4, n, 8), rows(2, 4, m, 8)
        torch.testing.assert_close(compiled(q, k), function(q, k))
        counts.add(counter.frame_count)
    assert len(counts) == 1


def test_compiled_function_takes_numbers_that_change():
    """The compiler makes them symbols of its own at the second call."""

    def function(q, n, x):
        options = {
            "window_size": (n, 0),
            "softcap": x,
            "scale": x / 2,
            "dropout_p": x / 9,
        }
        return attention(q, q, q, seed=n, **options)

    q = rows(1, 2, 20, 8, grad=False)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for n, x in ((1, 0.5), (4, 0.7), (9, 1.5)):
        torch.testing.assert_close(compiled(q, n, x), function(q, n, x))
    assert fallbacks() == {}


def test_compiled_math_path_stays_torchs():
    def function(q):
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, q, q)

    q = rows(1, 2, 20, 8, grad=False)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), function(q))
    assert fallbacks() == {"sdpa_kernel(SDPBackend.MATH)": 2}
    assert trainfast.stats().calls == {}


def test_compiled_dropout_follows_manual_seed():
    def function(q):
        return scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    q, outs = rows(1, 2, 20, 8, grad=False), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(compiled(q))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_compiled_function_follows_autocast():
    def function(q):
        return scaled_dot_product_attention(q, q, q)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    q = rows(1, 2, 20, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(q).dtype == torch.bfloat16
    assert compiled(q).dtype == torch.float32


# ---- Tracers and modes ---------------------------------------------------------------


class Model(torch.nn.Module):
    def forward(self, q):
        return scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_has_torchs_operator(strict):
    q = rows(2, 4, 6, 8, grad=False)
    program = torch.export.export(Model(), (q,), strict=strict)
    targets = {str(node.target) for node in program.graph.nodes}
    assert "aten.scaled_dot_product_attention.default" in targets
    torch.testing.assert_close(program.module()(q), Model()(q))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "causal_align": "lower_right", "return_lse": True},
        {"window_size": (2, 1), "softcap": 3.0, "dropout_p": 0.2, "seed": 3},
    ],
    ids=["causal", "window_size"],
)
def test_exported_program_takes_any_length(options):
    class Model(torch.nn.Module):
        def forward(self, q, k, bias):
            return trainfast.torch.attention(q, k, k, bias=bias, **options)

    def inputs(batch, n_q, n_k):
        q, k = torch.randn(batch, 2, n_q, 8), torch.randn(batch, 2, n_k, 8)
        return q, k, torch.randn(2, n_q, n_k)

    batch, n_q, n_k = (torch.export.Dim(name, max=99) for name in ("b", "n_q", "n_k"))
    sizes = ({0: batch, 2: n_q}, {0: batch, 2: n_k}, {1: n_q, 2: n_k})
    program = torch.export.export(
        Model(), inputs(2, 5, 7), dynamic_shapes=sizes, strict=False
    )
    for shape in ((3, 20, 4), (2, 3, 33)):
        given = inputs(*shape)
        torch.testing.assert_close(program.module()(*given), Model()(*given))


def test_exported_program_of_fixed_length_has_tiles(monkeypatch):
    monkeypatch.setattr(math_backend, "TILE", 1 << 12)

    class Model(torch.nn.Module):
        def forward(self, q):
            return trainfast.torch.attention(q, q, q, window_size=(9, 9))

    q = torch.randn(1, 2, 120, 8)
    program = torch.export.export(Model(), (q,))
    made = [node.meta.get("val") for node in program.graph.nodes]
    sizes = [tuple(x.shape[-2:]) for x in made if isinstance(x, torch.Tensor)]
    assert (120, 8) in sizes and (120, 120) not in sizes
    torch.testing.assert_close(program.module()(q), Model()(q))


def test_make_fx_traces_the_operator():
    q = rows(2, 4, 6, 8, grad=False)
    traced = make_fx(lambda q: scaled_dot_product_attention(q, q, q))(q)
    assert forward_op in {node.target for node in traced.graph.nodes}
    assert torch.equal(traced(q), Model()(q))


def test_symbolic_trace_and_jit_trace_keep_torchs_operator():
    q, k = rows(2, 4, 6, 8, grad=False), rows(2, 4, 6, 8, grad=False)
    graph = torch.fx.symbolic_trace(Model())
    torch.testing.assert_close(graph(q), Model()(q))
    traced = torch.jit.trace(Model(), (q,))
    torch.testing.assert_close(traced(k), Model()(k))
    assert "torch.jit.trace" in fallbacks()


@pytest.mark.slow
def test_importing_does_not_import_torchs_compiler():
    code = (
        "import sys, torch; before = 'torch._dynamo' in sys.modules;"
        "import trainfast.torch, trainfast.torch.flash_attn;"
        "assert before or 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flops_are_counted_as_torchs():
    q = rows(2, 4, 6, 8)
    counts = []
    for function in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        with FlopCounterMode(display=False) as mode:
            out = function(q, q, q)
        counts.append(mode.get_total_flops())
        if function is scaled_dot_product_attention:
            with mode:
                out.sum().backward()
            assert mode.get_total_flops() == 2.5 * counts[0]
    assert counts[0] == 4 * 2 * 4 * 6 * 6 * 8
    assert counts[1] in (0, counts[0])  # this torch does not count its own on the CPU


# ---- Function transforms -------------------------------------------------------------


def test_vmap_and_grad_take_torchs_path():
    q = rows(3, 2, 4, 6, 8, grad=False)
    out = torch.func.vmap(lambda x: scaled_dot_product_attention(x, x, x))(q)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, q, q))
    grad = torch.func.grad(lambda x: scaled_dot_product_attention(x, x, x).sum())(q)
    leaf = q.clone().requires_grad_()
    scaled_dot_product_attention(leaf, leaf, leaf).sum().backward()
    torch.testing.assert_close(grad, leaf.grad)
    assert fallbacks() == {"a function transform (vmap, grad)": 2}


@pytest.mark.parametrize(
    "function", [scaled_dot_product_attention, attention], ids=["torch's", "all"]
)
def test_forward_mode_takes_plain_operations(function):
    q, t = rows(1, 2, 4, 3, dtype=torch.float64), torch.randn(1, 2, 4, 3).double()
    value, tangent = torch.func.jvp(lambda x: function(x, x, x), (q,), (t,))
    (grad,) = torch.autograd.grad(function(q, q, q).sum(), q)
    torch.testing.assert_close(tangent.sum(), (grad * t).sum())
    torch.testing.assert_close(value, function(q, q, q))
    assert fallbacks()["forward-mode differentiation"] == 1


TRANSFORMED = {
    "grad": lambda q: torch.func.grad(
        lambda x: scaled_dot_product_attention(x, x, x).square().sum()
    )(q),
    "jvp": lambda q: torch.func.jvp(
        lambda x: scaled_dot_product_attention(x, x, x), (q,), (q + 1,)
    )[1],
    "vmap": lambda q: torch.func.vmap(
        lambda x: attention(x[None], x[None], x[None], window_size=(1, 1))
    )(q),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_compiled_function_transforms_have_the_same_values(name):
    q = rows(2, 4, 6, 8, grad=False)
    torch._dynamo.reset()
    compiled = torch.compile(TRANSFORMED[name], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), TRANSFORMED[name](q))
