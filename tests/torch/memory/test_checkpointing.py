"""Activation checkpointing: the same gradients with fewer activations."""

import copy
import pickle
from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import trainfast  # noqa: E402
from benchmarks.estimates.models import MODELS, resnet_of  # noqa: E402
from trainfast.torch.memory.checkpointing import _cost, best_ends  # noqa: E402


def encoder():
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 4), torch.randn(8, 32, 64)


def gpt():
    model, (tokens, _), _ = MODELS["gpt"]()
    return model, tokens[:2, :32]


def convolutions():
    return resnet_of((2, 1, 1, 1)), torch.randn(2, 3, 64, 64)


def mlp():
    layers = [m for _ in range(5) for m in (nn.Linear(64, 64), nn.Dropout(0.3))]
    return nn.Sequential(*layers), torch.randn(16, 64)


def gradients(model, x):
    torch.manual_seed(3)
    model.zero_grad()
    out = model(x)
    out.square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def saved_bytes(model, x):
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x)
    del out
    return sum(found.values())


@pytest.mark.parametrize("make", [encoder, gpt, mlp])
@pytest.mark.parametrize("offload", [False, True])
def test_gradients_are_the_same_bits(make, offload):
    torch.manual_seed(0)
    model, x = make()
    keys, plain = list(model.state_dict()), gradients(model, x)
    handle = trainfast.enable_checkpointing(model, offload=offload)
    assert handle.modules and handle.how == "blocks"
    again = gradients(model, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert list(model.state_dict()) == keys
    handle.remove()
    handle.remove()
    assert not any(hasattr(m, "_recomputed") for m in model.modules())
    assert all(
        torch.equal(a, b) for a, b in zip(plain, gradients(model, x), strict=True)
    )


def normed():
    layers = [m for _ in range(4) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8))]
    layers[3] = nn.BatchNorm1d(8, momentum=None)
    return nn.Sequential(*layers), torch.randn(16, 8)


@pytest.mark.parametrize("make", [convolutions, normed])
def test_running_statistics_count_each_batch_once(make):
    model, x = make()
    plain = copy.deepcopy(model)
    trainfast.enable_checkpointing(model)
    for one in (model, plain):
        gradients(one, x)
        gradients(one, x)
    found = dict(model.named_buffers())
    assert "running_var" in str(found.keys())
    for name, expected in plain.named_buffers():
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("make", [encoder, gpt, convolutions, mlp])
def test_fewer_bytes_are_saved(make):
    model, x = make()
    plain = saved_bytes(model, x)
    trainfast.enable_checkpointing(model)
    assert saved_bytes(model, x) < 0.75 * plain


def test_blocks_run_twice_only_where_gradients_are_wanted():
    model, x = gpt()
    calls = []
    model.blocks[0].ln1.register_forward_hook(lambda *_: calls.append(1))
    trainfast.enable_checkpointing(model)
    with torch.no_grad():
        model(x)
    assert len(calls) == 1
    gradients(model, x)
    assert len(calls) == 3


def test_a_copy_is_checkpointed_and_a_pickle_is_not():
    model, x = encoder()
    trainfast.enable_checkpointing(model)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert type(copied.layers[0]) is type(model.layers[0])
    assert copied.layers[0].linear1.weight is not model.layers[0].linear1.weight
    assert type(pickled.layers[0]) is nn.TransformerEncoderLayer
    for other in (copied, pickled):
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        assert torch.equal(other(x), expected)


def test_estimate_of_a_checkpointed_model_is_that_with_checkpointing():
    model, x = encoder()
    plain = trainfast.estimate_memory(model, x, device="cpu")
    asked = trainfast.estimate_memory(model, x, device="cpu", checkpointing=True)
    trainfast.enable_checkpointing(model)
    found = trainfast.estimate_memory(model, x, device="cpu")
    assert found.allocated == asked.allocated < plain.allocated
    assert found.settings["checkpointing"]


def pyramid():
    """Convolutions whose activations become smaller, as in VGG: cuts of one length put
    the large ones into one segment."""
    layers, channels = [], 3
    for width in (16, 32, 64, 64):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)]
            layers.append(nn.Softplus())
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(64 * 16, 10)]
    model = nn.Sequential(OrderedDict((f"l{i}", m) for i, m in enumerate(layers)))
    return model, torch.randn(16, 3, 64, 64)


def test_segments_are_chosen_by_what_layers_keep():
    model, x = pyramid()
    plain = trainfast.estimate_memory(model, x, device="cpu", steps=1).allocated
    equal = trainfast.estimate_memory(
        model, x, device="cpu", steps=1, checkpointing=True
    ).allocated
    before = gradients(model, x)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    state = torch.get_rng_state()
    handle = trainfast.enable_checkpointing(model, x)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before))
    assert handle.before.memory == plain
    assert handle.after.memory < 0.9 * equal < plain
    assert handle.before.seconds > 0 and handle.after.seconds > 0
    assert "after=" in repr(handle) and "MiB" in repr(handle)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(model, x)))
    handle.remove()
    assert not any(hasattr(m, "_recomputed") for m in model.modules())


def test_a_step_that_fails_leaves_the_model_as_it_was():
    class Failing(Exception):
        pass

    model, x = encoder()
    model.eval()
    calls = []

    def fail_at_last(module, args):
        calls.append(module)
        if len(calls) > most[0]:
            raise Failing

    model.layers[0].linear1.register_forward_pre_hook(fail_at_last)
    most = [1000]
    trainfast.enable_checkpointing(model, x).remove()
    assert not model.training and not model.layers[0].training
    for most[0] in range(len(calls)):  # in each estimate and run
        calls.clear()
        with pytest.raises(Failing):
            trainfast.enable_checkpointing(model, x)
        assert not any(hasattr(m, "_recomputed") for m in model.modules())
        assert not model.training and all(p.grad is None for p in model.parameters())


def cost_of(made, ends):
    inputs, last = [0], 0
    for size in made[:-1]:
        last = size or last
        inputs.append(last)
    begins = (0, *ends[:-1])
    inner = max(sum(made[a:b]) for a, b in zip(begins, ends))
    return sum(inputs[a] for a in begins) + inner


@pytest.mark.parametrize("seed", range(20))
def test_best_ends_are_the_best_of_all(seed):
    made = torch.randint(0, 9, (7,), generator=torch.Generator().manual_seed(seed))
    made = made.tolist()
    every = [(*(i + 1 for i in range(6) if cuts >> i & 1), 7) for cuts in range(64)]
    ends = best_ends(made)
    assert ends in every
    assert cost_of(made, ends) == min(cost_of(made, each) for each in every)


def test_what_does_not_fit_is_not_timed():
    model, x = encoder()
    cost = _cost(trainfast.estimate_memory(model, x, gpu=1 << 20), model, x, None)
    assert cost.seconds is None and cost.memory > 1 << 20


@pytest.mark.parametrize("make", [encoder, mlp])
def test_offloaded_models_are_told_too(make):
    model, x = make()
    x = x.repeat(100, *[1] * (x.dim() - 1))  # the optimizer's state is smaller then
    handle = trainfast.enable_checkpointing(model, x, offload=True)
    assert handle.after.memory < handle.before.memory


def test_a_models_own_switch_is_used():
    pytest.importorskip("transformers")
    model = MODELS["bert"]()[0]
    handle = trainfast.enable_checkpointing(model)
    assert handle.how == "gradient_checkpointing_enable"
    assert model.is_gradient_checkpointing
    handle.remove()
    assert not model.is_gradient_checkpointing


def test_what_cannot_be_checkpointed_says_so():
    with pytest.raises(ValueError, match="neither repeated blocks"):
        trainfast.enable_checkpointing(nn.Linear(3, 3))
    model, _ = gpt()
    trainfast.enable_checkpointing(model)
    with pytest.raises(ValueError, match="checkpointed already"):
        trainfast.enable_checkpointing(model)


@pytest.mark.slow
def test_the_estimate_knows_it():
    model, batch, options = MODELS["gpt"]()
    estimate = trainfast.estimate_memory(model, batch, **options)
    less = trainfast.estimate_memory(model, batch, checkpointing=True, **options)
    checkpointed = MODELS["gpt_checkpointed"]()[0]
    same = trainfast.estimate_memory(checkpointed, batch, **options)
    assert less.allocated == same.allocated < 0.7 * estimate.allocated
