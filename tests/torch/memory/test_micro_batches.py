"""`auto_micro_batch`: the gradient of the whole batch, whatever the parts."""

import copy
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainfast
from trainfast.torch.memory.batches import split

OOM = torch.OutOfMemoryError


def fails_above(most, part):
    """As a forward pass of more samples than fit."""
    if len(part) > most:
        raise OOM("CUDA out of memory. Tried to allocate 2.00 GiB")


class FailingBackward(torch.autograd.Function):
    """Runs out of memory in its backward pass, when gradients are there in part."""

    @staticmethod
    def forward(ctx, x, most):
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        fails_above(ctx.most, grad)
        return grad, None


def model_of(*extra):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), *extra, nn.Tanh(), nn.Linear(16, 4)]
    return nn.Sequential(*layers).double()


def batch_of(n=24):
    return torch.randn(n, 6).double(), torch.randint(4, (n,))


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def whole(model, batch):
    """What the plain loop does."""
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    return loss.detach(), found


def run(train, *args):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss = train(*args)
    return loss, [str(w.message) for w in said]


@pytest.mark.parametrize("most", [24, 23, 12, 7, 1])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradient_and_loss_are_the_whole_batchs(most, where):
    model, batch = model_of(), batch_of()
    expected_loss, expected = whole(model, batch)

    @trainfast.auto_micro_batch(model)
    def train(batch):
        x, y = batch
        hidden = model[0](x)
        if where == "forward":
            fails_above(most, x)
        else:
            hidden = FailingBackward.apply(hidden, most)
        return functional.cross_entropy(model[1:](hidden), y)

    loss, said = run(train, batch)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradients(model), expected)
    assert not loss.requires_grad
    assert train.size == {24: None, 23: 12, 12: 12, 7: 6, 1: 1}[most]
    assert len(said) == (most < 24)
    size, calls = train.size, []
    model.zero_grad()
    train._loss_of = lambda batch: calls.append(1) or model(batch[0]).mean()
    assert run(train, batch)[1] == [] and train.size == size  # remembered, said once
    assert len(calls) == (24 // size if size else 1)


def test_accumulated_gradients_buffers_and_random_states_return():
    model, batch = model_of(nn.BatchNorm1d(16), nn.Dropout(0.5)), batch_of()
    twin = copy.deepcopy(model)
    seen = []

    def train(net, batch, most=100):
        x, y = batch
        hidden = FailingBackward.apply(net(x), most)
        seen.append(torch.rand(1).item())
        return functional.cross_entropy(hidden, y)

    for net in (model, twin):  # gradients from an earlier backward pass
        net[0].weight.grad = torch.ones_like(net[0].weight)
    kept = model[0].weight.grad
    torch.manual_seed(3)
    step = trainfast.auto_micro_batch(model)(lambda b: train(model, b, 12))
    _, said = run(step, batch)
    assert "at most 12 samples" in said[0] and "BatchNorm" in said[0]
    assert model[0].weight.grad is kept
    torch.manual_seed(3)
    plain = trainfast.auto_micro_batch(twin, size=12)(lambda b: train(twin, b))
    assert run(plain, batch)[1] == []
    assert seen[1:3] == seen[3:]  # the first is of the attempt that failed
    for a, b in zip(model.state_dict().values(), twin.state_dict().values()):
        assert torch.equal(a, b)
    for a, b in zip(gradients(model), gradients(twin)):
        assert torch.equal(a, b)


def test_mean_over_tokens_needs_their_number():
    model = model_of()
    x, y = torch.randn(8, 5, 6).double(), torch.randint(4, (8, 5))
    y[0, 1:] = y[3, :2] = y[6] = y[7] = -100

    def loss_of(batch):
        logits = model(batch[0])
        return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    loss = loss_of((x, y))
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    train = trainfast.auto_micro_batch(model, size=2)(loss_of)
    with pytest.raises(ValueError, match=r"0 to 5 labels of -100.*pass count="):
        train((x, y))
    with pytest.raises(ValueError, match="pass count="):  # at once, not in hour three
        trainfast.auto_micro_batch(model)(loss_of)((x, y))
    train = trainfast.auto_micro_batch(
        model, size=2, count=lambda b: (b[1] != -100).sum()
    )(loss_of)
    torch.testing.assert_close(train((x, y)), loss.detach())
    torch.testing.assert_close(gradients(model), expected)
    per_sample = trainfast.auto_micro_batch(model, size=4, count="samples")(
        lambda b: model(b[0]).mean()
    )
    per_sample((x, y))
    with pytest.raises(ValueError, match="must not be negative"):
        trainfast.auto_micro_batch(model, size=2, count=lambda b: -1)(loss_of)((x, y))


def test_scaler_and_arguments():
    model, batch = model_of(), batch_of()
    _, expected = whole(model, batch)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    @trainfast.auto_micro_batch(model, size=5, scaler=scaler)
    def train(batch, power, scale=1.0):
        """Mine."""
        x, y = batch
        return functional.cross_entropy(model(x), y) * scale**power

    assert train.__doc__ == "Mine." and "size=5" in repr(train)
    train(batch, 2, scale=0.5)
    torch.testing.assert_close(gradients(model), [g * 8 / 4 for g in expected])


def test_no_memory_is_held_by_what_failed():
    model, alive = model_of(), []

    class Big:
        pass

    @trainfast.auto_micro_batch(model)
    def train(batch):
        big = Big()
        assert all(ref() is None for ref in alive)
        alive.append(weakref.ref(big))
        fails_above(3, batch[0])
        return model(batch[0]).mean()

    run(train, batch_of())
    assert train.size == 3 and len(alive) == 3 + 8


def test_single_sample_that_does_not_fit_and_other_errors():
    model = model_of()
    train = trainfast.auto_micro_batch(model)(lambda b: fails_above(0, b[0]))
    with pytest.raises(OOM, match="Tried to allocate") as caught:
        train(batch_of())
    assert caught.value.__notes__ == ["A single sample at a time does not fit."]
    broken = trainfast.auto_micro_batch(model)(lambda b: {}["mine"])
    with pytest.raises(KeyError, match="mine"):
        broken(batch_of())
    for wrong, what in ((None, "NoneType"), (torch.ones(2), r"shape \[2\]")):
        train = trainfast.auto_micro_batch(model)(lambda b, wrong=wrong: wrong)
        with pytest.raises(TypeError, match=f"must return the mean loss.*{what}"):
            train(batch_of())
    with pytest.raises(ValueError, match="no samples"):
        train(())
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are off"):
        train(batch_of())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "`size` must be a positive integer, got 0"),
        ({"count": "tokens"}, '`count` must be "samples" or a function'),
        ({"model": 3}, "`model` must be a torch.nn.Module, got 3"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        trainfast.auto_micro_batch(**{"model": nn.Linear(1, 1), **options})


def test_batches_are_split_as_they_are_made():
    batch = {
        "x": torch.arange(5),
        "names": list("abcde"),
        "pair": (torch.ones(5, 2), [torch.zeros(5), "kept"]),
        "table": torch.ones(3, 5),
    }
    a, b = split(batch, [3, 2])
    assert a["x"].tolist() == [0, 1, 2] and b["x"].tolist() == [3, 4]
    assert a["names"] == ["a", "b", "c"] and b["names"] == ["d", "e"]
    assert b["pair"][0].shape == (2, 2) and b["pair"][1][1] == "kept"
    assert a["table"].shape == (3, 5)
    assert a["x"].data_ptr() == batch["x"].data_ptr()  # no copy
    with pytest.raises(TypeError, match="list of samples"):
        split([torch.ones(2), [{"boxes": torch.ones(3, 4)}, {"boxes": 0}]], [1, 1])
    inputs, targets = split(({"x": torch.ones(4)}, {"y": torch.ones(4)}), [2, 2])[0]
    assert inputs["x"].shape == targets["y"].shape == (2,)


def test_other_containers_are_split():
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.arange(6).view(3, 2)})
    parts = split(encoding, [2, 1])
    assert isinstance(parts[1], transformers.BatchEncoding)
    assert parts[1]["input_ids"].tolist() == [[4, 5]]
    assert encoding["input_ids"].shape == (3, 2)
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(x=torch.full((n, 2), n)) for n in (1, 2, 3)]
    parts = split(data.Batch.from_data_list(graphs), [2, 1])
    assert [part.num_graphs for part in parts] == [2, 1]
    assert parts[1].x.tolist() == [[3, 3]] * 3


RANKS = """
import sys, warnings, torch
from torch import distributed, nn
from torch.nn import functional
import trainfast

rank, path, how, at = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
distributed.init_process_group(
    "gloo", init_method=f"file://{path}", rank=rank, world_size=2
)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
net = net.double().eval()  # BatchNorm's buffers are broadcast all the same
model = nn.parallel.DistributedDataParallel(net)
x, y = torch.randn(2, 16, 6).double(), torch.randint(4, (2, 16))
calls = 0

@trainfast.auto_micro_batch(model, size=None if how == "whole" else 4)
def train(batch):
    global calls
    calls += 1
    out = model(batch[0])
    if rank == 1 and calls == at:  # after the forward pass, before the backward pass
        raise KeyError("mine") if how == "error" else torch.OutOfMemoryError("no")
    return functional.cross_entropy(out, batch[1])

mine = x[rank][: 9 + 7 * rank], y[rank][: 9 + 7 * rank]
try:
    loss = train(mine)
    later = train(mine)  # all ranks are where they should be
    assert torch.allclose(loss, later)
    found = [p.grad / 2 for p in net.parameters()]
    single = nn.Sequential(*net)
    single.zero_grad()
    for r in range(2):
        n = 9 + 7 * r
        (functional.cross_entropy(single(x[r][:n]), y[r][:n]) / 2).backward()
    for a, p in zip(found, single.parameters()):
        torch.testing.assert_close(a, p.grad)
    print("equal", train.size)
except Exception as error:
    print(type(error).__name__, error, *getattr(error, "__notes__", []))
distributed.destroy_process_group()
"""


def ranks(tmp_path, how, at):
    words = [sys.executable, "-W", "ignore", "-c", RANKS]
    running = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path / "init"), how, str(at)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    # gloo may write to stdout as well.
    return [r.communicate(timeout=100)[0].strip().splitlines()[-1] for r in running]


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 2, 3])
def test_ranks_begin_again_together(tmp_path, at):
    assert ranks(tmp_path, "parts", at) == ["equal 2"] * 2


@pytest.mark.slow
def test_failure_while_gradients_are_reduced_ends_with_advice(tmp_path):
    other, failed = ranks(tmp_path, "parts", 4)
    assert failed.startswith("OutOfMemoryError no Memory ran out while the ranks")
    assert "use auto_micro_batch(size=2)" in failed
    assert not other.startswith("equal")  # its connection was closed


@pytest.mark.slow
def test_whole_batch_is_rehearsed_before_ranks_wait(tmp_path):
    assert ranks(tmp_path, "whole", 1) == ["equal 8"] * 2


@pytest.mark.slow
def test_nothing_fails_on_any_rank(tmp_path):
    assert ranks(tmp_path, "whole", 0) == ["equal None"] * 2


@pytest.mark.slow
def test_error_of_one_rank_ends_all(tmp_path):
    said = ranks(tmp_path, "error", 2)
    assert said[0].startswith("RuntimeError the step failed on another rank")
    assert said[1] == "KeyError 'mine'"
