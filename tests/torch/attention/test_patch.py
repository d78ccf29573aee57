"""trainfast.patch("attention")."""

import threading
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

import trainfast
from trainfast.torch import scaled_dot_product_attention
from trainfast.torch.attention import dispatch, replacements

FLASH = "CUDA: torch's flash attention, which was faster"


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    trainfast.reset_stats()
    yield
    trainfast.unpatch()
    assert torch.backends.mha.get_fastpath_enabled()
    assert "__call__" not in vars(torch.nn.MultiheadAttention)


@pytest.fixture
def kernel(kernels_at_any_size):
    """Tests that count calls of the kernel have small tensors."""


def calls():
    return sum(trainfast.stats().calls.get("attention", {}).values())


def fallbacks():
    return trainfast.stats().fallbacks.get("attention", {})


def test_patch_reroutes_the_function_and_unpatch_restores_it(kernel, monkeypatch):
    before = F.scaled_dot_product_attention, F.multi_head_attention_forward
    user = types.ModuleType("user")
    user.sdpa = before[0]
    monkeypatch.setitem(__import__("sys").modules, "user", user)
    with trainfast.patch("attention") as report:
        assert F.scaled_dot_product_attention is not before[0]
        assert user.sdpa is F.scaled_dot_product_attention
        assert "torch.backends.mha.get_fastpath_enabled" in str(report.table())
        q = torch.randn(1, 2, 5, 8)
        F.scaled_dot_product_attention(q, q, q)
        assert calls() == 1
    assert (F.scaled_dot_product_attention, F.multi_head_attention_forward) == before
    assert user.sdpa is before[0]
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer_encoder_layer_runs_on_the_kernel(kernel, training, batch_first):
    layer = torch.nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, batch_first=batch_first
    ).train(training)
    x, mask = (
        torch.randn(3, 5, 16),
        torch.nn.Transformer.generate_square_subsequent_mask(5 if batch_first else 3),
    )
    found = []
    for names in ([], ["attention"]):
        with trainfast.patch(*names) if names else trainfast.patch("clip"):
            leaf = x.clone().requires_grad_()
            out = layer(leaf, mask)
            found.append((out, *torch.autograd.grad(out.pow(2).sum(), leaf)))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)
    assert calls() == 2 and fallbacks() == {}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_multihead_attention_with_weights_is_counted(kernel, training, grad):
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True).train(training)
    with torch.set_grad_enabled(grad):
        check_multihead_attention_with_weights(layer)


def check_multihead_attention_with_weights(layer):
    x = torch.randn(2, 5, 16)
    wanted, _ = layer(x, x, x)
    with trainfast.patch("attention"):
        out, weights = layer(x, x, x)
        assert weights is not None and torch.equal(out, wanted)
        assert fallbacks() == {"need_weights=True of multi-head attention": 1}
        assert calls() == 0
        out, _ = layer(x, x, x, need_weights=False)
        assert calls() == 1
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_padding_masks_of_multihead_attention_run_on_the_kernel(kernel, kind):
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x, padding = torch.randn(2, 5, 16), torch.tensor([[0, 0, 0, 1, 1], [0] * 5]).bool()
    if kind == "float":
        padding = torch.zeros(2, 5).masked_fill(padding, -torch.inf)
    wanted, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)
    with trainfast.patch("attention"):
        out, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)
    torch.testing.assert_close(out, wanted)
    assert calls() == 1


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("align", [causal_upper_left, causal_lower_right])
def test_causal_bias_of_torch_is_understood(kernel, align, patched):
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    wanted = F.scaled_dot_product_attention(q, k, k, align(3, 5))
    with trainfast.patch("attention" if patched else "clip"):
        out = scaled_dot_product_attention(q, k, k, align(3, 5))
    torch.testing.assert_close(out, wanted)
    assert (calls(), len(fallbacks())) == ((1, 0) if patched else (0, 1))


@pytest.mark.parametrize("patched", [False, True])
def test_function_modes_see_the_call_and_leave_it_to_the_kernel(kernel, patched):
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen, q = [], torch.randn(1, 2, 3, 8)
    with trainfast.patch("attention" if patched else "clip"), Mode():
        scaled_dot_product_attention(q, q, q)
    assert scaled_dot_product_attention in seen and calls() == 1


@pytest.mark.parametrize("patched", [False, True])
def test_jagged_tensors_stay_torchs(patched):
    parts = [torch.randn(n, 2, 8, requires_grad=True) for n in (3, 5)]
    jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    with trainfast.patch("attention" if patched else "clip"):
        function = F if patched else trainfast.torch
        out = function.scaled_dot_product_attention(jagged, jagged, jagged)
        for part, mine in zip(parts, out.transpose(1, 2).unbind(), strict=True):
            x = part.detach().transpose(0, 1)
            theirs = scaled_dot_product_attention(x, x, x).transpose(0, 1)
            torch.testing.assert_close(mine, theirs)
    assert fallbacks() == {"a tensor of type NestedTensor": 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_can_still_be_scripted():
    layer = torch.nn.MultiheadAttention(16, 4)
    x = torch.randn(2, 5, 16)
    with trainfast.patch("attention"):
        scripted = torch.jit.script(layer)
        out, _ = scripted(x, x, x, need_weights=False)
    torch.testing.assert_close(out, layer(x, x, x, need_weights=False)[0])


def test_patched_model_compiles_without_a_break():
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(3, 5, 16)
    wanted = layer(x)
    with trainfast.patch("attention"):
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), wanted)
    assert calls() == 1


def encoder():
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)


def attend_itself(module, x):
    return module(query=x, key=x, value=x, need_weights=False)[0]


NESTED = {
    "attention": lambda: torch.nn.MultiheadAttention(16, 4, batch_first=True),
    "layer": lambda: encoder().layers[0],
    "encoder": encoder,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", NESTED)
def test_nested_tensors_work_as_without_the_patch(kind, grad):
    module = NESTED[kind]().eval().requires_grad_(False)
    x = torch.nested.nested_tensor([torch.randn(n, 16) for n in (3, 5, 2)])
    run = attend_itself if kind == "attention" else (lambda module, x: module(x))
    with torch.set_grad_enabled(grad):
        wanted = run(module, x)
        with trainfast.patch("attention"):
            found = run(module, x)
            assert "a nested tensor, in multi-head attention" in fallbacks()
            with pytest.raises(AssertionError, match="does not support NestedTensor"):
                run(module.train(), x)  # torch has none either
    assert found.is_nested
    torch.testing.assert_close(found.to_padded_tensor(0), wanted.to_padded_tensor(0))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_hinder_no_other_thread():
    module = NESTED["attention"]().eval().requires_grad_(False)
    x = torch.nested.nested_tensor([torch.randn(n, 16) for n in (3, 5)])
    wanted = attend_itself(module, x).to_padded_tensor(0)
    both_inside = threading.Barrier(2, timeout=20)
    found, stuck = [], []

    def patch_meanwhile(module, args):
        both_inside.wait()
        thread = threading.Thread(target=trainfast.patch, args=("attention",))
        thread.start()
        thread.join(20)
        stuck.append(thread.is_alive())
        both_inside.wait()

    def attend():
        found.append(attend_itself(module, x).to_padded_tensor(0))

    module.register_forward_pre_hook(patch_meanwhile)
    with trainfast.patch("attention"):
        threads = [threading.Thread(target=attend) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert stuck == [False, False]
    torch.testing.assert_close(found, [wanted, wanted])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_patch_may_end_while_a_nested_tensor_is_inside():
    module = NESTED["attention"]().eval().requires_grad_(False)
    x = torch.nested.nested_tensor([torch.randn(n, 16) for n in (3, 5)])
    wanted = attend_itself(module, x)
    module.register_forward_pre_hook(lambda *_: trainfast.unpatch() and None)
    trainfast.patch("attention")
    found = attend_itself(module, x)
    torch.testing.assert_close(found.to_padded_tensor(0), wanted.to_padded_tensor(0))
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("n", [5, 300])
def test_padded_batch_of_an_encoder_is_right_where_it_has_rows(n):
    """At any size on the kernel: torch's fused path has other rows where it pads."""
    model, x = encoder().eval(), torch.randn(3, n, 16)
    padded = torch.arange(n) >= torch.tensor([3, n, 2])[:, None]
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        wanted = model(x, src_key_padding_mask=padded)
        with trainfast.patch("attention"):
            found = model(x, src_key_padding_mask=padded)
    assert calls() == 2
    torch.testing.assert_close(found[~padded], wanted[~padded])


def test_the_users_own_setting_of_the_fused_path_holds():
    with trainfast.patch("attention"):
        assert torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        assert not torch.backends.mha.get_fastpath_enabled()
    assert not torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(True)


# ---- What is left to torch for its size ----------------------------------------------

SMALL = "a small call: torch's function is faster"
FUSED = "a small input: torch's fused inference path is faster"


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}], ids=str
)
def test_small_calls_are_torchs_and_counted(options, grad):
    q, k, v = (torch.randn(1, 4, 8, 16, requires_grad=grad) for _ in range(3))
    wanted = F.scaled_dot_product_attention(q, k, v, **options)
    with trainfast.patch("attention"):
        out = F.scaled_dot_product_attention(q, k, v, **options)
    assert torch.equal(out, wanted) and out.requires_grad == grad
    assert fallbacks() == {SMALL: 1} and calls() == 0


def test_large_calls_are_the_kernels():
    q = torch.randn(1, 4, 128, 16)
    with trainfast.patch("attention"):
        F.scaled_dot_product_attention(q, q, q)
    assert fallbacks() == {} and calls() == 1


def test_masks_and_dropout_stay_with_the_kernel_at_any_size():
    """A row without a key is 0 at any size, in any version of torch."""
    q, mask = torch.randn(1, 4, 8, 16), torch.zeros(8, 8, dtype=torch.bool)
    with trainfast.patch("attention"):
        assert not F.scaled_dot_product_attention(q, q, q, mask).any()
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert calls() == 2 and fallbacks() == {}


def test_by_its_own_name_the_kernel_runs_at_any_size():
    q = torch.randn(1, 4, 8, 16)
    with trainfast.patch("attention"):
        scaled_dot_product_attention(q, q, q)
        trainfast.torch.attention(q, q, q)
    assert calls() == 2 and fallbacks() == {}


@pytest.mark.parametrize("arguments", [(None,) * 3, (1, 2, 3), ()], ids=str)
def test_arguments_that_are_no_tensors_have_torchs_error(arguments):
    with pytest.raises(TypeError):
        F.scaled_dot_product_attention(*arguments)
    with trainfast.patch("attention"), pytest.raises(TypeError):
        F.scaled_dot_product_attention(*arguments)


@pytest.mark.parametrize("n", [8, 300])
@pytest.mark.parametrize("kind", NESTED)
def test_inference_takes_the_faster_way_and_counts_it_once(kind, n):
    module = NESTED[kind]().eval()
    x, layers = torch.randn(2, n, 16), 2 if kind == "encoder" else 1
    run = attend_itself if kind == "attention" else (lambda module, x: module(x))
    with torch.no_grad():
        wanted = run(module, x)
        with trainfast.patch("attention"):
            found = run(module, x)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    if n == 8:
        assert torch.equal(found, wanted)
        assert fallbacks() == {FUSED: layers} and calls() == 0
    else:
        assert fallbacks() == {} and calls() == layers


def test_a_module_that_has_no_fused_path_counts_its_own_calls():
    layer = torch.nn.TransformerEncoderLayer(
        16, 4, 32, activation=torch.tanh, batch_first=True
    ).eval()
    with torch.no_grad(), trainfast.patch("attention"):
        layer(torch.randn(2, 8, 16))  # its attention has one
        assert fallbacks() == {FUSED: 1}
    trainfast.reset_stats()
    with trainfast.patch("attention"):
        layer(torch.randn(2, 8, 16))
    assert fallbacks() == {SMALL: 1}


def on_gpu(*shape):
    try:
        return torch.empty(shape, dtype=torch.float16, device="cuda")
    except RuntimeError as error:  # torch before 2.7 built for CUDA
        pytest.skip(f"a fake tensor needs a driver here: {error}")


def test_where_torch_has_flash_attention_patch_leaves_attention_alone(monkeypatch):
    monkeypatch.setattr(dispatch, "has_flash_attention", lambda device: True)
    # In torch 2.6 its function asks the driver, which is missing here.
    monkeypatch.setattr(replacements, "torchs_sdpa", lambda query, *_, **__: query)
    left, named = [], []
    with FakeTensorMode():
        q = on_gpu(8, 8, 128, 64)
        trainfast.patch()
        assert dispatch.torchs_are_faster(q) == FLASH
        F.scaled_dot_product_attention(q, q, q)
        left.append(fallbacks())
        trainfast.patch("attention")
        assert dispatch.torchs_are_faster(q) is None
        named.append(str(trainfast.unpatch().table()))
        assert dispatch.torchs_are_faster(q) == FLASH
    assert left == [{FLASH: 1}] and "is_named" in named[0]


def test_a_block_within_patch_takes_the_setting_of_its_name_back():
    trainfast.patch()
    patched = F.scaled_dot_product_attention
    with trainfast.patch("attention"):
        with trainfast.patch("attention"):
            assert dispatch.is_named()
        assert dispatch.is_named()
    assert not dispatch.is_named()
    assert F.scaled_dot_product_attention is patched
    trainfast.unpatch()
    with trainfast.patch("attention"):
        assert dispatch.is_named()
    assert not dispatch.is_named()


@pytest.mark.parametrize("flash", [False, True])
def test_fused_path_stays_where_our_kernels_would_refuse(monkeypatch, flash):
    """A GPU's tensors; the CPU's stand in for them."""
    monkeypatch.setattr(dispatch, "has_flash_attention", lambda device: flash)
    with FakeTensorMode():
        x = on_gpu(2, 300, 16)
        reason = replacements._stays_fused(x, weights=False)
    assert reason == (FLASH if flash else None)


def test_traced_attention_is_no_nested_tensor():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    with trainfast.patch("attention"):
        traced = torch.fx.symbolic_trace(Model().eval())
    assert any(node.op == "call_module" for node in traced.graph.nodes)
