"""trainfast.torch.Accumulator against the same batches in one."""

import copy

import pytest
import torch

from trainfast.torch import Accumulator, AdamW, GradScaler


def make(dtype=torch.float32):
    gen = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=gen))
    data = [torch.randn(4, 8, generator=gen).to(dtype) for _ in range(7)]
    return model.to(dtype), data


def loss_of(model, x):
    return model(x).float().square().mean()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("clip", ["no", "apart", "inside"])
@pytest.mark.parametrize("cls", [AdamW, torch.optim.AdamW])
def test_groups_are_means_also_the_short_last_one(cls, clip, scaled):
    if cls is not AdamW and clip == "inside":
        return
    model, data = make()
    inside = {"max_grad_norm": 0.5} if clip == "inside" else {}
    optimizer = cls(model.parameters(), lr=0.1, **inside)
    scaler = GradScaler("cpu", init_scale=64.0) if scaled else None
    accumulator = Accumulator(
        optimizer,
        3,
        scaler=scaler,
        max_grad_norm=0.5 if clip == "apart" else None,
    )
    stepped = [
        accumulator.backward(loss_of(model, x)) for x in accumulator.batches(data)
    ]
    assert stepped == [False, False, True, False, False, True, False]
    assert accumulator.steps_done == 3

    truth, data = make()
    theirs = torch.optim.AdamW(truth.parameters(), lr=0.1)
    for group in (data[:3], data[3:6], data[6:]):
        theirs.zero_grad()
        loss_of(truth, torch.cat(group)).backward()
        if clip != "no":
            norm = torch.nn.utils.clip_grad_norm_(truth.parameters(), 0.5)
        theirs.step()
    for p, q in zip(model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert p.grad is None
    if clip != "no":
        torch.testing.assert_close(accumulator.grad_norm, norm, rtol=1e-4, atol=1e-5)


def test_half_gradients_accumulate_in_float32():
    model, data = make(torch.bfloat16)
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has gradients of the parameter's dtype only")
    exact = copy.deepcopy(model).float()
    optimizer = AdamW(model.parameters(), master_weights=True)
    accumulator = Accumulator(optimizer, 8)
    for x in data:
        accumulator.backward(loss_of(model, x))
        (loss_of(exact, x.float()) / 8).backward()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.05)
    assert accumulator.flush()
    assert not accumulator.flush()


def test_scheduler_does_not_advance_with_a_skipped_step():
    model, data = make()
    optimizer = AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = GradScaler("cpu", init_scale=4.0)
    accumulator = Accumulator(optimizer, 1, scaler=scaler, scheduler=scheduler)
    rates = []
    for i, x in enumerate(data[:4]):
        accumulator.backward(loss_of(model, x) * (float("inf") if i == 1 else 1.0))
        rates.append(accumulator.scheduler.get_last_lr()[0])
    assert rates == [0.5, 0.5, 0.25, 0.125]


def test_zeroed_gradients_stay():
    model, data = make()
    optimizer = AdamW(model.parameters(), zero_grad=True)
    accumulator = Accumulator(optimizer, 2)
    for x in data[:2]:
        accumulator.backward(loss_of(model, x))
    for p in model.parameters():
        assert not p.grad.any()


def test_state_is_saved_between_steps_only():
    model, data = make()
    accumulator = Accumulator(AdamW(model.parameters()), 2)
    accumulator.backward(loss_of(model, data[0]))
    with pytest.raises(RuntimeError, match="got 1 backward passes since the last one"):
        accumulator.state_dict()
    accumulator.flush()
    other = Accumulator(AdamW(model.parameters()), 2)
    other.load_state_dict(accumulator.state_dict())
    assert other.steps_done == 1


def test_max_grad_norm_0_is_off():
    for inside in (None, 0.0, 1.0):
        model, _ = make()
        optimizer = AdamW(model.parameters(), max_grad_norm=inside)
        accumulator = Accumulator(optimizer, 1, max_grad_norm=0)
        accumulator.backward(sum(p.sum() for p in model.parameters()))
        assert (accumulator.grad_norm is None) == (not inside)
        for param in model.parameters():
            assert param.detach().abs().max() > 0 and accumulator.max_grad_norm is None


def test_half_gradients_stay_half_beside_other_processes(monkeypatch):
    for several in (False, True):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda x=several: x)
        model = torch.nn.Linear(2, 2).bfloat16()
        Accumulator(AdamW(model.parameters()), 2)
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        wide = not several and hasattr(torch.Tensor, "grad_dtype")
        assert model.weight.grad.dtype == (torch.float32 if wide else torch.bfloat16)


def test_bad_arguments_are_refused():
    model, _ = make()
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0)
    for steps in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="steps must be a whole number >= 1"):
            Accumulator(optimizer, steps)
    with pytest.raises(ValueError, match="must not be given to the optimizer as well"):
        Accumulator(optimizer, 2, max_grad_norm=1.0)
    with pytest.raises(NotImplementedError, match="float32_grads needs"):
        Accumulator(torch.optim.SGD(model.parameters()), 2, float32_grads=True)


def check_step(model, optimizer_class, batches):
    """The model must have made one step, on the mean of so many first batches."""
    truth, data = make()
    theirs = optimizer_class(truth.parameters(), lr=0.1)
    loss_of(truth, torch.cat(data[:batches])).backward()
    theirs.step()
    for p, q in zip(model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_a_batch_that_failed_is_discarded():
    model, data = make()
    accumulator = Accumulator(AdamW(model.parameters(), lr=0.1), 2)
    accumulator.backward(loss_of(model, data[6]))
    accumulator.discard()
    assert all(p.grad is None for p in model.parameters())
    assert [accumulator.backward(loss_of(model, x)) for x in data[:2]] == [False, True]

    check_step(model, torch.optim.AdamW, 2)


def test_a_step_that_failed_is_made_with_the_next_batch():
    model, data = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(optimizer, 2)
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    accumulator.backward(loss_of(model, data[0]))
    with pytest.raises(ZeroDivisionError):
        accumulator.backward(loss_of(model, data[1]))
    hook.remove()
    assert accumulator.backward(loss_of(model, data[2]))
    assert accumulator.steps_done == 1

    check_step(model, torch.optim.SGD, 3)


def fail_once(optimizer):
    """The optimizer's next step raises ZeroDivisionError, those after it do not."""

    def fail(*_):
        hook.remove()
        raise ZeroDivisionError

    hook = optimizer.register_step_pre_hook(fail)


@pytest.mark.parametrize("scaled", ["no", "ours", "torch's"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("cls", [AdamW, torch.optim.AdamW])
def test_flush_after_one_that_failed_makes_the_same_step(cls, clip, scaled):
    kinds = {"ours": GradScaler, "torch's": torch.amp.GradScaler}
    trained = []
    for fails in (True, False):
        model, data = make()
        optimizer = cls(model.parameters(), lr=0.1)
        scaler = kinds[scaled]("cpu", 64.0) if scaled != "no" else None
        accumulator = Accumulator(optimizer, 3, scaler=scaler, max_grad_norm=clip)
        for x in data[:5]:
            accumulator.backward(loss_of(model, x))
        if fails:
            fail_once(optimizer)
            with pytest.raises(ZeroDivisionError):
                accumulator.flush()
            with pytest.raises(RuntimeError, match="got 2 backward passes"):
                accumulator.state_dict()
        assert accumulator.flush() and not accumulator.flush()
        accumulator.backward(loss_of(model, data[5]))
        accumulator.flush()
        assert accumulator.state_dict() == {"steps_done": 3}
        trained.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*trained, strict=True):
        assert torch.equal(p, q)


def test_batch_after_a_flush_that_failed_joins_its_step():
    model, data = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(optimizer, 3)
    accumulator.backward(loss_of(model, data[0]))
    fail_once(optimizer)
    with pytest.raises(ZeroDivisionError):
        accumulator.flush()
    assert not accumulator.backward(loss_of(model, data[1]))
    assert accumulator.backward(loss_of(model, data[2]))
    check_step(model, torch.optim.SGD, 3)


def test_gradients_unscaled_for_a_step_that_failed_take_no_others():
    model, data = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=64.0)
    accumulator = Accumulator(optimizer, 2, scaler=scaler)
    accumulator.backward(loss_of(model, data[4]))
    fail_once(optimizer)
    with pytest.raises(ZeroDivisionError):
        accumulator.backward(loss_of(model, data[5]))
    with pytest.raises(RuntimeError, match="must not add to gradients"):
        accumulator.backward(loss_of(model, data[6]))
    accumulator.discard()
    assert [accumulator.backward(loss_of(model, x)) for x in data[:2]] == [False, True]
    check_step(model, torch.optim.SGD, 2)


def test_gradients_clipped_for_a_step_that_failed_take_no_others():
    model, data = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(optimizer, 2, max_grad_norm=0.1)
    accumulator.backward(loss_of(model, data[0]))
    fail_once(optimizer)
    with pytest.raises(ZeroDivisionError):
        accumulator.backward(loss_of(model, data[1]))
    with pytest.raises(RuntimeError, match="must not add to gradients"):
        accumulator.backward(loss_of(model, data[2]))
    assert accumulator.flush() and accumulator.steps_done == 1


def test_a_scheduler_that_fails_leaves_the_step_done():
    model, data = make()
    optimizer = AdamW(model.parameters(), lr=0.1)

    class Broken:
        def step(self):
            raise ZeroDivisionError

    accumulator = Accumulator(optimizer, 2, scheduler=Broken())
    accumulator.backward(loss_of(model, data[0]))
    with pytest.raises(ZeroDivisionError):
        accumulator.backward(loss_of(model, data[1]))
    assert accumulator.state_dict() == {"steps_done": 1}
    assert not accumulator.backward(loss_of(model, data[2]))


def test_a_scheduler_that_wants_a_metric_is_refused():
    optimizer = AdamW([torch.zeros(1)])
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="must be one that advances with each step"):
        Accumulator(optimizer, 2, scheduler=scheduler)


@pytest.mark.parametrize("cls", [AdamW, torch.optim.AdamW])
def test_tokens_weigh_the_passes(cls):
    model, data = make()
    parts = [x[: 1 + i % 4] for i, x in enumerate(data)]
    accumulator = Accumulator(cls(model.parameters(), lr=0.1), 3)
    for x in accumulator.batches(parts):
        accumulator.backward(loss_of(model, x), tokens=len(x))
    truth, _ = make()
    theirs = torch.optim.AdamW(truth.parameters(), lr=0.1)
    for group in (parts[:3], parts[3:6], parts[6:]):
        theirs.zero_grad()
        loss_of(truth, torch.cat(group)).backward()
        theirs.step()
    for p, q in zip(model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_bad_tokens_and_models_are_refused():
    model, data = make()
    optimizer = AdamW(model.parameters())
    with pytest.raises(ValueError, match="model must be a DistributedDataParallel"):
        Accumulator(optimizer, 2, model=model)
    accumulator = Accumulator(optimizer, 2)
    with pytest.raises(ValueError, match="tokens must be a number >= 0, got -1"):
        accumulator.backward(loss_of(model, data[0]), tokens=-1)
    accumulator.backward(loss_of(model, data[0]), tokens=3)
    with pytest.raises(ValueError, match="for all passes of a step or for none"):
        accumulator.backward(loss_of(model, data[0]))
