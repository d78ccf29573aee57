"""copy_ema_to(): whose EMA goes where, and what is refused beforehand."""

import copy

import pytest
import torch

from trainfast.torch import AdamW


class Model(torch.nn.Module):
    """Equal shapes among its parameters, of which some are tied and one is frozen."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.last = torch.nn.Linear(4, 4)
        self.tied = torch.nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.norm.bias.requires_grad_(False)


def trained(make):
    """A model and its optimizer after two steps."""
    torch.manual_seed(0)
    model = Model()
    optimizer = make(model)
    for seed in range(2):
        torch.manual_seed(seed)
        for param in model.parameters():
            if param.requires_grad:
                param.grad = torch.randn(param.shape)
        optimizer.step()
    return model, optimizer


def split(model):
    """Groups with and without decay, which is not the model's order."""
    decay = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decay}]
    return AdamW(groups, lr=0.1, ema_decay=0.5)


def single(model):
    return AdamW(model.parameters(), lr=0.1, ema_decay=0.5)


def assert_holds_ema(other, model, optimizer):
    names = dict(model.named_parameters())
    targets = dict(other.named_parameters())
    frozen = 0
    for name, param in names.items():
        if "ema" in optimizer.state[param]:
            assert torch.equal(targets[name], optimizer.state[param]["ema"]), name
        else:
            frozen += 1
    assert frozen == 1


@pytest.mark.parametrize("make", [split, single])
def test_another_model_gets_each_parameters_ema(make):
    model, optimizer = trained(make)
    other = Model()
    frozen = other.norm.bias.detach().clone()
    for target in (other, other.named_parameters(), other.state_dict()):
        for source in (model, model.named_parameters()):
            with torch.no_grad():
                other.first.weight.zero_()
            optimizer.copy_ema_to(target, source=source)
            assert_holds_ema(other, model, optimizer)
            if not isinstance(target, (torch.nn.Module, dict)):
                break  # it is used up
    assert torch.equal(other.norm.bias, frozen)


def test_names_that_the_optimizer_has_need_no_source():
    def named(model):
        return AdamW(reversed(list(model.named_parameters())), ema_decay=0.5)

    model, optimizer = trained(named)
    other = Model()
    optimizer.copy_ema_to(other)
    assert_holds_ema(other, model, optimizer)


def test_tensors_of_a_single_group_follow_its_order():
    model, optimizer = trained(single)
    other = Model()
    optimizer.copy_ema_to(other.parameters())
    assert_holds_ema(other, model, optimizer)


@pytest.mark.parametrize("make", [split, single])
def test_own_parameters_are_known_in_any_order(make):
    for arguments in ((), ("parameters",), ("model",)):
        model, optimizer = trained(make)
        targets = {"parameters": list(model.parameters())[::-1], "model": model}
        optimizer.copy_ema_to(*(targets[name] for name in arguments))
        assert_holds_ema(model, model, optimizer)


def test_untied_targets_get_the_ema_under_both_names():
    model, optimizer = trained(split)
    other = Model()
    other.tied.weight = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer.copy_ema_to(other, source=model)
    ema = optimizer.state[model.first.weight]["ema"]
    assert torch.equal(other.tied.weight, ema)
    assert torch.equal(other.first.weight, ema)


class Wider(Model):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(4, 5)


@pytest.mark.parametrize(
    ("make", "give", "message"),
    [
        (split, lambda m, o: (o.parameters(),), "tensors without names, whose order"),
        (
            single,
            lambda m, o: (list(o.parameters())[1:],),
            "must have 6 tensors, got 5",
        ),
        (single, lambda m, o: ([],), "must have 6 tensors, got 0"),
        (split, lambda m, o: (o,), "source must be given where the optimizer knows no"),
        (split, lambda m, o: (o, o), "source must be the model that the optimizer st"),
        (split, lambda m, o: (o, m.parameters()), "source must be a module or its nam"),
        (split, lambda m, o: (o.first, m), "target must have the parameter 'first.bi"),
        (
            split,
            lambda m, o: (Wider(), m),
            r"last.bias must have shape \(4,\), got \(5",
        ),
        (single, lambda m, o: (Wider().parameters(),), r"target\[4\] must have shape"),
    ],
)
def test_what_has_no_counterpart_is_refused_before_anything_is_written(
    make, give, message
):
    model, optimizer = trained(make)
    other = Model()
    weights = [*model.parameters(), *other.parameters()]
    before = copy.deepcopy(weights)
    with pytest.raises(ValueError, match=message):
        optimizer.copy_ema_to(*give(model, other))
    for now, was in zip(weights, before, strict=True):
        assert torch.equal(now, was)


def test_shapes_are_checked_before_anything_is_written():
    model, optimizer = trained(split)
    other = Wider()
    before = copy.deepcopy(list(other.parameters()))
    with pytest.raises(ValueError, match="give a target of the same architecture"):
        optimizer.copy_ema_to(other, source=model)
    for now, was in zip(other.parameters(), before, strict=True):
        assert torch.equal(now, was)


def test_without_an_ema_there_is_nothing_to_copy():
    model = Model()
    with pytest.raises(RuntimeError, match="give AdamW an ema_decay"):
        AdamW(model.parameters()).copy_ema_to()
