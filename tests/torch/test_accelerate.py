"""accelerate's loop, which knows a skipped step by step() not having been called."""

import pytest
import torch

pytest.importorskip("accelerate", reason="an adapter's test, by hand")

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState

import trainfast

OVERFLOW = 1  # the step
SCALERS = [torch.amp.GradScaler, trainfast.torch.GradScaler]


def train(scaler, cls, max_norm=0.1, **options):
    """The weights, which steps were seen to be skipped, and the rate at the end."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.scaler, accelerator.native_amp = scaler("cpu", 64.0), True
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    plain = cls(model.parameters(), lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = AcceleratedOptimizer(plain, scaler=accelerator.scaler)
    scheduler = AcceleratedScheduler(scheduler, optimizer)
    accelerator._optimizers = [optimizer]
    skipped = []
    loader = accelerator.prepare(
        torch.utils.data.DataLoader(torch.randn(24, 8), batch_size=4)
    )
    for i, x in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(x).square().mean() / 2
            loss = loss * (float("inf") if i // 2 == OVERFLOW else 1.0)
            accelerator.scaler.scale(loss).backward()
            if accelerator.sync_gradients and max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped.append(optimizer.step_was_skipped)
    return model.weight.detach(), skipped, scheduler.get_last_lr()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("amp_scaling", [None, False])
@pytest.mark.parametrize("max_norm", [0.1, None])
@pytest.mark.parametrize("scaler", SCALERS)
def test_clipped_and_skipped_steps_are_torchs(scaler, max_norm, amp_scaling):
    want, _, rate = train(torch.amp.GradScaler, torch.optim.AdamW, max_norm)
    weights, skipped, mine = train(
        scaler, trainfast.torch.AdamW, max_norm, amp_scaling=amp_scaling
    )
    torch.testing.assert_close(weights, want)
    assert skipped == [False, True, False]
    assert mine == rate == [0.025]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaler", SCALERS)
def test_fused_optimizers_clip_as_torchs_fused(scaler):
    want, seen, _ = train(torch.amp.GradScaler, torch.optim.AdamW, fused=True)
    weights, skipped, _ = train(scaler, trainfast.torch.AdamW, fused=True)
    torch.testing.assert_close(weights, want)
    assert skipped == seen


def prepared(patched):
    """accelerate's own scaler and wrappers, found under torch's names."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    assert isinstance(accelerator.scaler, trainfast.torch.GradScaler) == patched
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    skipped = []
    for factor in (1.0, float("inf"), 1.0):
        loss = model(torch.ones(4, 8)).square().mean() * factor
        accelerator.scaler.scale(loss).backward()
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        scheduler.step()
        optimizer.zero_grad()
    return model.weight.detach(), skipped, scheduler.get_last_lr()


@pytest.mark.filterwarnings("ignore")
def test_patched_loop_sees_skipped_steps_as_before():
    want, skipped, rates = prepared(False)
    with trainfast.patch():
        weights, *mine = prepared(True)
    torch.testing.assert_close(weights, want)
    assert mine == [skipped, rates] == [[False, True, False], [0.025]]
