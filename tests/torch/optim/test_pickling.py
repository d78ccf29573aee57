"""Whole optimizers in pickles: where they load, and as what."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import trainfast
from tests.torch_loops import make_params, set_grads
from trainfast.torch import Adam, AdamW

CLASSES = [Adam, AdamW]
ELSEWHERE = """
import pickle, sys
sys.modules["trainfast"] = None  # as if it were not installed
import torch
optimizer = torch.load(sys.argv[1], weights_only=False)
assert type(optimizer) is getattr(torch.optim, sys.argv[2])
twin = type(optimizer)([torch.nn.Parameter(torch.ones(1))], fused=sys.argv[3] == "True")
assert optimizer.defaults.keys() == twin.defaults.keys()
assert optimizer.param_groups[0].keys() == twin.param_groups[0].keys()
assert vars(optimizer).keys() >= vars(pickle.loads(pickle.dumps(twin))).keys()
params = optimizer.param_groups[0]["params"]
for param in params:
    param.grad = torch.ones_like(param)
optimizer.step()
torch.save([param.detach() for param in params], sys.argv[1])
"""


def trained(cls, **options):
    optimizer = cls(make_params(shapes=[(5,), (3, 4)]), lr=0.1, **options)
    set_grads(optimizer.param_groups[0]["params"], 0)
    optimizer.step()
    return optimizer


def step(optimizer):
    params = optimizer.param_groups[0]["params"]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.slow
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_patched_optimizer_loads_as_torchs_without_trainfast(name, fused, tmp_path):
    path = tmp_path / "optimizer.pt"
    with trainfast.patch("adamw"):
        optimizer = trained(getattr(torch.optim, name), fused=fused)
        assert isinstance(optimizer, (Adam, AdamW))
        torch.save(optimizer, path)
        again = torch.load(path, weights_only=False)
        assert type(again) is type(optimizer)  # as the name is patched here
    assert type(torch.load(path, weights_only=False)) is getattr(torch.optim, name)
    command = [sys.executable, "-c", ELSEWHERE, str(path), name, str(fused)]
    subprocess.run(command, check=True, cwd=tmp_path)
    for theirs, one, other in zip(
        torch.load(path), step(optimizer), step(again), strict=True
    ):
        torch.testing.assert_close(theirs, one)
        assert torch.equal(one, other)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copies_stay_trainfasts(duplicate, cls, patched):
    optimizer = trained(cls)
    if patched:
        with trainfast.patch("adamw"):
            twin = duplicate(optimizer)
    else:
        twin = duplicate(optimizer)
    assert type(twin) is cls
    assert twin.param_groups[0].keys() == optimizer.param_groups[0].keys()
    assert (twin.state is optimizer.state) == (duplicate is copy.copy)
    for one, other in zip(step(copy.deepcopy(twin)), step(optimizer), strict=True):
        assert torch.equal(one, other)


def test_copies_and_pickles_can_be_copied_again():
    with trainfast.patch("adamw"):
        optimizer = trained(AdamW)
        for again in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
            twin = again(again(optimizer))
            assert type(twin) is AdamW
            for one, other in zip(step(twin), step(copy.copy(optimizer)), strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 1.0},
        {"ema_decay": 0.9},
        {"state_dtype": torch.bfloat16},
        {"zero_grad": True},
        {"amp_scaling": False},
        {"amp_scaling": True},
    ],
)
@pytest.mark.parametrize("patched", [False, True])
def test_options_keep_an_optimizer_trainfasts(options, patched):
    optimizer = trained(AdamW, **options)
    if patched:
        with trainfast.patch("adamw"):
            data = pickle.dumps(optimizer)
    else:
        data = pickle.dumps(optimizer)
    again = pickle.loads(data)
    assert type(again) is AdamW
    assert again.__getstate__().keys() == optimizer.__getstate__().keys()
    for name, value in options.items():
        kept = {**again.param_groups[0], **vars(again)}
        kept["amp_scaling"] = kept.get("_step_supports_amp_scaling")
        assert kept[name] == value


def test_outside_of_patch_and_in_subclasses_it_stays_what_it_is():
    assert type(pickle.loads(pickle.dumps(trained(AdamW)))) is AdamW
    with trainfast.patch("adamw"):
        assert type(pickle.loads(pickle.dumps(trained(Mine)))) is Mine


class Mine(AdamW):
    pass
