"""accelerate's loop, which knows a skipped step by step() not having been called."""

import pytest
import torch

pytest.importorskip("accelerate", reason="an adapter's test, by hand")

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

import trainfast

OVERFLOW = 1  # the step


def train(scaler, cls, **options):
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
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped.append(optimizer.step_was_skipped)
    return model.weight.detach(), skipped, scheduler.get_last_lr()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, trainfast.torch.GradScaler])
def test_clipped_steps_are_torchs(scaler):
    want, _, _ = train(torch.amp.GradScaler, torch.optim.AdamW, fused=True)
    weights, _, _ = train(scaler, trainfast.torch.AdamW)
    torch.testing.assert_close(weights, want)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, trainfast.torch.GradScaler])
def test_skipped_steps_are_seen_without_the_amp_flag(scaler):
    want, _, rate = train(torch.amp.GradScaler, torch.optim.AdamW)
    weights, skipped, mine = train(scaler, trainfast.torch.AdamW, amp_scaling=False)
    torch.testing.assert_close(weights, want)
    assert skipped == [False, True, False]
    assert mine == rate == [0.025]
