"""trainfast.torch's scaler, clipping and scheduler at the edges: compiled loops,
checkpoints between two decisions, optimizers that write what a scaler gives them."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from trainfast.torch import AdamW, GradScaler, SkipAwareScheduler, clip_grad_norm_

MAKERS = {
    "ours": lambda params: AdamW(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler])
def test_a_compiled_loop_takes_the_same_steps(maker, kind):
    def run(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = MAKERS[maker](model.parameters())
        scaler = kind("cpu", 8.0)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        step = torch.compile(step, backend="eager") if compiled else step
        return [float(step(torch.ones(3, 4)).detach()) for _ in range(4)]

    assert run(True) == pytest.approx(run(False), rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        dict(max_grad_norm=0.5),
        dict(ema_decay=0.5, weight_copy_dtype=torch.float16),
        dict(master_weights=True, zero_grad=True),
        dict(state_dtype=torch.float32, write_back_grads=True),
    ],
    ids="+".join,
)
def test_options_hold_in_a_compiled_step(options):
    def run(compiled):
        torch._dynamo.reset()
        param = torch.nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.bfloat16))
        param.grad = torch.empty_like(param)
        optimizer = AdamW([param], lr=0.1, **options)

        def step():
            optimizer.step()

        step = torch.compile(step, backend="eager") if compiled else step
        for value in (1.0, 2.0, 3.0):
            param.grad.fill_(value)
            step()
        return [param.detach(), param.grad, *optimizer.state[param].values()]

    compiled, plain = run(True), run(False)
    assert len(compiled) == len(plain)
    assert all(map(torch.equal, compiled, plain))


class Loop:
    """Iterations under a helped scheduler; notes the rate of each optimizer step."""

    def __init__(self):
        self.param = torch.nn.Parameter(torch.ones(3))
        self.optimizer = AdamW([self.param], lr=1.0)
        self.scaler = GradScaler("cpu", init_scale=8.0)
        self.scaler.scale(torch.zeros(()))
        inner = ExponentialLR(self.optimizer, 0.5)
        self.scheduler = SkipAwareScheduler(inner, self.scaler)
        self.rates = []

    def run(self, steps, bad):
        for step in steps:
            value = math.inf if step in bad else 1.0
            self.param.grad = torch.full_like(self.param, value)
            self.scaler.step(self.optimizer)
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.scaler.update()
            self.scheduler.step()


def test_an_optimizers_checkpoint_has_the_rate_of_the_next_step():
    bad = (1, 5)
    whole, begun, resumed = Loop(), Loop(), Loop()
    whole.run(range(8), bad)
    begun.run(range(4), bad)
    saved = begun.optimizer.state_dict(), begun.scheduler.state_dict()
    assert saved[0]["param_groups"][0]["lr"] == 0.125
    resumed.run(range(1), ())  # what is due here must not reach what is loaded
    resumed.optimizer.load_state_dict(saved[0])
    resumed.scheduler.load_state_dict(saved[1])
    resumed.rates.clear()
    resumed.run(range(4, 8), bad)
    assert begun.rates + resumed.rates == whole.rates


def test_an_optimizer_may_write_the_scale_that_it_is_given(backend, device):
    class Writes(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self):
            self.grad_scale.mul_(4.0)

    param = torch.nn.Parameter(torch.ones(3, device=device))
    param.grad = torch.ones_like(param)
    scaler = GradScaler(device, init_scale=8.0)
    scaler.scale(torch.zeros((), device=device))
    scaler.step(Writes([param]))
    assert scaler.get_scale() == 8


def test_gradients_that_need_no_clipping_keep_their_version(backend, device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    param.grad = torch.ones_like(param)
    version = param.grad._version
    clip_grad_norm_([param], 100.0)
    assert param.grad._version == version or device == "cuda"
    clip_grad_norm_([param], 0.1)
    assert param.grad._version > version
