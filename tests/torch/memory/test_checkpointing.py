"""Activation checkpointing: the same gradients with fewer activations."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import trainfast  # noqa: E402
from benchmarks.estimates.models import MODELS, resnet_of  # noqa: E402


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
    assert not any(hasattr(m, "_checkpointed") for m in model.modules())
    assert all(
        torch.equal(a, b) for a, b in zip(plain, gradients(model, x), strict=True)
    )


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


def test_copies_and_pickles_are_without_it():
    model, x = encoder()
    trainfast.enable_checkpointing(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.layers[0]) is nn.TransformerEncoderLayer
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        assert torch.equal(other(x), expected)


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
