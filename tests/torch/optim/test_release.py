"""release_gradients(): steps during backward() beside the usual step, and refusals."""

import copy
import gc
import importlib
import pickle
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

import trainfast
from tests.torch_loops import assert_same_state
from trainfast.torch import Accumulator, Adam, AdamW, GradScaler


class Model(nn.Module):
    """A tied matrix, a frozen bias, and a parameter that gets no gradient."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.middle = nn.Linear(8, 8)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.norm.bias.requires_grad_(False)
        self.to(dtype)

    def forward(self, x):
        return self.head(self.norm(self.middle(self.embedding(x)).tanh()))


def loss_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(11, (6,), generator=generator)
    return F.cross_entropy(model(x).float(), x)


def groups_of(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def released(cls=AdamW, **options):
    model = Model()
    optimizer = cls(model.parameters(), lr=0.01, **options)
    optimizer.release_gradients()
    return model, optimizer


def grads_of(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def train(release, cls, dtype, options):
    """The optimizer of a model after six steps; its state is loaded after three."""
    model = Model(dtype)
    optimizer = cls(groups_of(model), lr=0.01, weight_decay=0.1, **options)
    if release:
        optimizer.release_gradients()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    for step in range(6):
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()
        if release:
            assert not grads_of(model)
        optimizer.zero_grad()
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer


@pytest.mark.parametrize(
    "cls, dtype, options",
    [
        (AdamW, torch.float32, {}),
        (Adam, torch.float32, {"amsgrad": True, "ema_decay": 0.9, "maximize": True}),
        (AdamW, torch.bfloat16, {"master_weights": True, "ema_decay": 0.9}),
        (AdamW, torch.bfloat16, {"state_dtype": torch.float32, "amsgrad": True}),
    ],
    ids=["plain", "options", "masters", "state_dtype"],
)
def test_bits_are_those_of_the_usual_step(cls, dtype, options):
    ours = train(True, cls, dtype, options)
    theirs = train(False, cls, dtype, options)
    assert_same_state(ours, theirs, rtol=0, atol=0)
    assert len([state for state in ours.state.values() if state]) == 4


def test_torchs_step_releases_gradients_too():
    params = [nn.Parameter(torch.ones(5, dtype=torch.complex64)) for _ in range(2)]
    for param, release in zip(params, (True, False), strict=True):
        optimizer = AdamW([param], lr=0.1)
        optimizer.release_gradients(release)
        for step in range(3):
            (param - step).abs().square().sum().backward()
            assert (param.grad is None) is release
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(*params)


def test_step_follows_each_gradient_with_the_learning_rate_of_backward():
    model, optimizer = released()
    before = copy.deepcopy(model)
    loss_of(model).backward()
    for group in optimizer.param_groups:
        group["lr"] = 100.0
    after = copy.deepcopy(model)
    optimizer.step()
    changed = 0
    for old, new, now in zip(
        *(m.parameters() for m in (before, after, model)), strict=True
    ):
        assert torch.equal(new, now)
        changed += not torch.equal(old, new)
        assert (old - new).abs().max() < 0.02  # lr was 0.01
    assert changed == 4  # all but the frozen and the unused ones


def test_hooks_of_step_run_once_and_calls_are_counted():
    model, optimizer = released()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    trainfast.reset_stats()
    loss_of(model).backward()
    assert seen == []
    assert sum(trainfast.stats().to_dict()["calls"]["adamw"].values()) == 4
    optimizer.step()
    assert seen == ["before", "after"]


# ---- Gradients from elsewhere --------------------------------------------------------


def test_gradients_from_elsewhere_are_stepped_by_step():
    models = [Model(), Model()]
    for model, release in zip(models, (True, False), strict=True):
        optimizer = AdamW(model.parameters(), lr=0.01)
        if release:
            optimizer.release_gradients()
        for step in range(3):
            loss_of(model, step).backward()
            model.unused.weight.grad = torch.ones(3, 3)  # set by hand
            optimizer.step()
            optimizer.zero_grad()
            model.norm.bias.requires_grad_(True)  # unfrozen after the first step
    for ours, theirs in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(ours, theirs)
    assert not grads_of(models[0])


def test_groups_that_are_added_or_edited_later_are_released():
    model, optimizer = released()
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra], "lr": 1.0})
    (loss_of(model) + extra.sum()).backward()
    assert extra.grad is None and (extra < 0.1).all()
    optimizer.step()
    del optimizer.param_groups[0]  # its parameters are no longer the optimizer's
    before = copy.deepcopy(model)
    (loss_of(model) + extra.sum()).backward()
    optimizer.step()
    assert (extra < -0.8).all() and len(grads_of(model)) == 4
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        assert torch.equal(old, new)


# ---- Memory --------------------------------------------------------------------------


def most_gradient_bytes(model, release):
    """The most bytes in gradients at once in a step, and the size of each gradient."""
    optimizer = AdamW(model.parameters())
    optimizer.release_gradients(release)
    alive, most, sizes = set(), 0, []

    def see(grad):
        nonlocal most
        storage = grad.untyped_storage()
        entry = (id(storage), storage.nbytes())
        weakref.finalize(storage, alive.discard, entry).atexit = False
        alive.add(entry)
        sizes.append(entry[1])
        most = max(most, sum(size for _, size in alive))

    handles = [p.register_hook(see) for p in model.parameters()]  # before it is stored
    x = torch.arange(64).reshape(2, 32)
    F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    optimizer.step()
    for handle in handles:
        handle.remove()
    return most, sizes


def test_gradients_of_the_char_transformer_are_never_all_alive(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    model = importlib.import_module("small_gpt").GPT(64, 32, 4, 32, 2)
    usual, sizes = most_gradient_bytes(model, release=False)
    assert usual == sum(sizes) and len(sizes) == len(list(model.parameters()))
    model.zero_grad()
    most, _ = most_gradient_bytes(model, release=True)
    assert most <= 3 * max(sizes) < usual / 4


def test_hooks_do_not_keep_the_optimizer_alive():
    model, optimizer = released()
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    loss_of(model).backward()
    assert len(grads_of(model)) == 4  # no optimizer, no step


# ---- Undone, copied ------------------------------------------------------------------


def test_false_undoes_it():
    model, optimizer = released()
    optimizer.release_gradients()  # a second call changes nothing
    optimizer.release_gradients(False)
    optimizer.release_gradients(False)
    before = copy.deepcopy(model)
    loss_of(model).backward()
    loss_of(model).backward()
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        assert torch.equal(old, new)
    optimizer.step(lambda: None)
    assert len(grads_of(model)) == 4
    assert not hasattr(optimizer, "_step_supports_amp_scaling")


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
def test_copies_release_nothing(copied):
    model, optimizer = copied(released())
    loss_of(model).backward()
    assert len(grads_of(model)) == 4 and not optimizer.state
    optimizer.step()
    assert len(optimizer.state) == 4
    assert "_release" not in vars(optimizer)


def test_bits_of_8_bit_state_are_those_of_the_usual_step():
    found = []
    for release in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        optimizer = AdamW(model.parameters(), lr=0.01, state_dtype="int8")
        if release:
            optimizer.release_gradients()
        for _ in range(4):
            model(torch.ones(2, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert "exp_avg_q8" in optimizer.state[model[0].weight]
        found.append(optimizer)
    assert_same_state(*found, rtol=0, atol=0)
    for ours, theirs in zip(*(o.param_groups[0]["params"] for o in found), strict=True):
        assert torch.equal(ours, theirs)


# ---- Refusals ------------------------------------------------------------------------


def test_second_gradient_before_step_names_the_parameter():
    model = Model()
    optimizer = AdamW(list(model.middle.named_parameters()), lr=0.01)
    optimizer.release_gradients()
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"'(weight|bias)' has a second gradient"):
        loss_of(model).backward()
    optimizer.zero_grad()
    optimizer.step()  # closes the round
    loss_of(model).backward()
    model, optimizer = released()
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="parameter 0 of param group 0 has a second"):
        model.embedding.weight.sum().backward()


def test_reentrant_checkpointing_of_a_shared_parameter_is_refused():
    shared, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    optimizer = AdamW(shared.parameters())
    optimizer.release_gradients()
    once = checkpoint(shared, x, use_reentrant=True)
    once.sum().backward()
    optimizer.step()
    twice = checkpoint(
        shared, checkpoint(shared, x, use_reentrant=True).tanh(), use_reentrant=True
    )
    with pytest.raises(RuntimeError, match="has a second gradient before step"):
        twice.sum().backward()


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_grad_norm", 1.0),
        ("zero_grad", True),
        ("write_back_grads", True),
        ("differentiable", True),
    ],
)
def test_options_that_need_gradients_are_refused(name, value):
    model = Model()
    optimizer = AdamW(model.parameters(), **{name: value})
    with pytest.raises(ValueError, match=f"{name} must be .* with release_gradients"):
        optimizer.release_gradients()
    loss_of(model).backward()
    assert len(grads_of(model)) == 4 and not optimizer.state
    model, optimizer = released()
    if name == "max_grad_norm":
        optimizer.max_grad_norm = value
    else:
        optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"{name} must be"):
        loss_of(model).backward()
    assert not optimizer.state


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("unscale", [False, True])
def test_gradient_scaler_is_refused(scaler, unscale):
    model, optimizer = released()
    scaler = scaler("cpu")
    scaler.scale(loss_of(model)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="a gradient scaler must not be used"):
        scaler.step(optimizer)


def test_closures_clipping_and_accumulation_are_refused():
    model, optimizer = released()
    with pytest.raises(RuntimeError, match="closure must be None"):
        optimizer.step(lambda: loss_of(model).backward())
    assert not optimizer.state
    assert trainfast.torch.clip_grad_norm_(model.parameters(), 1.0) == 0  # none yet
    loss_of(model).backward()
    for clip in (trainfast.torch.clip_grad_norm_, trainfast.torch.clip_grad_value_):
        with pytest.raises(RuntimeError, match="gradients must not be clipped"):
            clip(model.parameters(), 1.0)
    for options in ({"steps": 2}, {"steps": 1, "max_grad_norm": 1.0}):
        with pytest.raises(ValueError, match="steps must be 1"):
            Accumulator(optimizer, **options)
    optimizer.step()
    Accumulator(optimizer, 1).backward(loss_of(model))
    assert not grads_of(model)


def test_swapped_ema_is_refused():
    model, optimizer = released(ema_decay=0.9)
    loss_of(model).backward()
    optimizer.step()
    with optimizer.ema_weights(), pytest.raises(RuntimeError, match="the EMA is in"):
        loss_of(model).backward()


# ---- Many processes ------------------------------------------------------------------


@pytest.fixture
def process_group():
    if not distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_ddp_is_refused(process_group):
    model = Model()
    optimizer = AdamW(model.parameters())
    optimizer.release_gradients()
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel.*fully_shard"):
        loss_of(wrapped).backward()
    assert not optimizer.state
    with pytest.raises(RuntimeError, match="in DistributedDataParallel"):
        AdamW(model.parameters()).release_gradients()
    other = Model()  # the wrapper of another model does not matter
    optimizer = AdamW(other.parameters())
    optimizer.release_gradients()
    loss_of(other).backward()
    assert not grads_of(other)


def test_fully_shard_is_stepped_on_the_reduced_shard(process_group):
    from torch.distributed.fsdp import fully_shard

    if not hasattr(torch.cpu.Stream(), "record_event"):
        pytest.skip("fully_shard of this torch needs a GPU")
    losses = []
    for release in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=distributed.init_device_mesh("cpu", (1,)))
        optimizer = AdamW(model.parameters(), lr=0.01)
        if release:
            optimizer.release_gradients()
        for _ in range(3):
            loss = model(torch.ones(2, 8)).square().sum()
            loss.backward()
            assert bool(grads_of(model)) is not release
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:] and losses[0] > losses[2]


# ---- torch.compile -------------------------------------------------------------------


def test_compiled_step_closes_the_round():
    model, optimizer = released()
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for seed in range(3):
        loss_of(model, seed).backward()
        step()
    assert int(optimizer.state[model.middle.weight]["step"]) == 3
