"""trainfast.lightning.Precision in Lightning's Trainer on the CPU."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning", reason="an adapter's test, by hand")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

import trainfast  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, ACCUMULATED, INF_BATCH, CLIP = 15, 4, 42, 1.0
DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def layers(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))


def data(batches=STEPS * ACCUMULATED):
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(batches * 8, 16, generator=gen)
    y = torch.randn(batches * 8, 1, generator=gen)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 8)


def loss_of(net, batch, index):
    loss = nn.functional.mse_loss(net(batch[0]).float(), batch[1])
    return loss * float("inf") if index == INF_BATCH else loss


class Model(lightning.LightningModule):
    def __init__(self, make=trainfast.AdamW, **options):
        super().__init__()
        self.net, self.make, self.options = layers(), make, options
        self.losses, self.norms = [], []

    def training_step(self, batch, index):
        loss = loss_of(self.net, batch, index)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return self.make(self.parameters(), lr=1e-2, **self.options)

    def on_train_batch_end(self, *_):
        optimizer = self.optimizers().optimizer
        assert optimizer.max_grad_norm == self.options.get("max_grad_norm")
        if self.trainer.fit_loop._should_accumulate():
            return
        self.norms.append(optimizer.grad_norm)


def precision(kind="16-mixed", **options):
    scaler = None
    if kind == "16-mixed":
        scaler = trainfast.GradScaler("cpu", init_scale=2.0**12, **options)
    return trainfast.lightning.Precision(kind, "cpu", scaler)


def fit(model, plugin, loader=None, ckpt_path=None, **options):
    options = {"max_epochs": 1, "accumulate_grad_batches": ACCUMULATED} | options
    if model.automatic_optimization:
        options = {"gradient_clip_val": CLIP} | options
    trainer = lightning.Trainer(**QUIET | options, precision=None, plugins=[plugin])
    trainer.fit(model, loader or data(), ckpt_path=ckpt_path)
    return trainer


def plain(kind, optimizer_of, clip=None):
    """A loop of torch with the same batches: losses, norms, weights and scaler."""
    net, losses, norms = layers(), [], []
    optimizer = optimizer_of(net.parameters())
    scaler = trainfast.GradScaler("cpu", 2.0**12, enabled=kind == "16-mixed")
    for index, batch in enumerate(data()):
        with torch.autocast("cpu", DTYPES[kind], cache_enabled=False):
            loss = loss_of(net, batch, index)
        losses.append(loss.detach())
        scaler.scale(loss / ACCUMULATED).backward()
        if (index + 1) % ACCUMULATED:
            continue
        if clip is not None:
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), clip))
        scaler.step(optimizer)
        scaler.update()
        if clip is None:
            norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return losses, norms, list(net.parameters()), scaler.state_dict()


def ours(params):
    return trainfast.AdamW(params, lr=1e-2, max_grad_norm=CLIP)


def torchs(params):
    return torch.optim.AdamW(params, lr=1e-2)


def equal(found, wanted):
    """Bit for bit, also where both are NaN."""
    return len(found) == len(wanted) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("amp_scaling", [None, True, False])
def test_losses_are_those_of_a_plain_loop_bit_for_bit(amp_scaling):
    model, plugin = Model(amp_scaling=amp_scaling), precision()
    fit(model, plugin)
    losses, norms, weights, scaler = plain(
        "16-mixed",
        lambda params: trainfast.AdamW(
            params, lr=1e-2, max_grad_norm=CLIP, amp_scaling=amp_scaling
        ),
    )
    assert len(losses) == STEPS * ACCUMULATED and len(norms) == STEPS
    assert 0.1 < sum(float(norm) > CLIP for norm in norms) / STEPS < 0.9
    assert equal(model.losses, losses)
    assert equal(list(model.parameters()), weights)
    assert equal(model.norms, norms)
    assert plugin.state_dict() == scaler and scaler["scale"] == 2.0**11  # one overflow


def test_losses_are_within_rounding_of_torchs_own_loop():
    model = Model()
    fit(model, precision())
    losses, norms, _, scaler = plain("16-mixed", torchs, CLIP)
    assert scaler["scale"] == 2.0**11
    finite = [i for i in range(len(losses)) if i != INF_BATCH]
    found, wanted = (torch.stack(x)[finite] for x in (model.losses, losses))
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)  # float16's
    found, wanted = torch.stack(model.norms), torch.stack(norms)
    torch.testing.assert_close(
        found.nan_to_num(), wanted.nan_to_num(), rtol=2e-3, atol=2e-3
    )


def test_bfloat16_has_no_scaler_and_the_losses_of_a_plain_loop(monkeypatch):
    monkeypatch.setitem(globals(), "INF_BATCH", None)
    model, plugin = Model(), precision("bf16-mixed")
    fit(model, plugin)
    losses, norms, weights, _ = plain("bf16-mixed", ours)
    assert plugin.scaler is None and plugin.state_dict() == {}
    assert max(norms) > CLIP and equal(model.norms, norms)
    assert equal(model.losses, losses)
    assert equal(list(model.parameters()), weights)


def test_the_default_scaler_is_trainfasts_for_float16_alone():
    plugin = trainfast.lightning.Precision("16-mixed", "cpu")
    assert type(plugin.scaler) is trainfast.GradScaler
    assert plugin.scaler.get_scale() == 2.0**16
    assert trainfast.lightning.Precision("bf16-mixed", "cpu").scaler is None
    assert isinstance(plugin, MixedPrecision)
    assert repr(plugin) == "MixedPrecision(precision='16-mixed', device='cpu')"


@pytest.mark.parametrize("kind", DTYPES)
def test_clipping_reads_the_gradients_in_the_step_alone(monkeypatch, kind):
    def refuse(*_, **__):
        raise AssertionError("a pass of its own over the gradients")

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", refuse)
    monkeypatch.setattr(trainfast.GradScaler, "unscale_", refuse)
    monkeypatch.setattr(trainfast.GradScaler, "_check_inf_per_device", refuse)
    model = Model(max_grad_norm=5.0)
    trainfast.reset_stats()
    fit(model, precision(kind), data(8))
    assert len(model.norms) == 2
    assert sum(trainfast.stats().calls["adamw"].values()) == 2
    assert "clip" not in trainfast.stats().calls


@pytest.mark.parametrize(("own", "clip"), [(0.25, 1.0), (4.0, 1.0), (0.5, None)])
def test_the_smaller_of_both_norms_clips(monkeypatch, own, clip):
    monkeypatch.setitem(globals(), "INF_BATCH", None)
    model = Model(max_grad_norm=own)
    fit(model, precision(), gradient_clip_val=clip)
    smaller = min(own, clip or own)
    losses, *_ = plain(
        "16-mixed",
        lambda params: trainfast.AdamW(params, lr=1e-2, max_grad_norm=smaller),
    )
    assert equal(model.losses, losses)


class Watched(Model):
    """A module that reads gradients before the step, as one that logs them."""

    def on_before_optimizer_step(self, optimizer):
        self.seen = self.net[0].weight.grad.norm()


class Chooses(Model):
    def configure_gradient_clipping(self, optimizer, *_, **__):
        self.seen = self.net[0].weight.grad.norm()
        self.clip_gradients(optimizer, gradient_clip_val=CLIP)


class Watcher(lightning.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        module.seen = module.net[0].weight.grad.norm()


@pytest.mark.parametrize("kind", ["module", "clipping", "callback"])
def test_hooks_see_unscaled_gradients_and_the_losses_stay(kind):
    model = {"module": Watched, "clipping": Chooses}.get(kind, Model)()
    fit(model, precision(), callbacks=[Watcher()] if kind == "callback" else [])
    losses, norms, *_ = plain("16-mixed", ours)
    assert 0 < model.seen <= norms[-1]
    found, wanted = torch.stack(model.losses), torch.stack(losses)
    finite = wanted.isfinite()
    torch.testing.assert_close(found[finite], wanted[finite], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (trainfast.AdamW, {"gradient_clip_algorithm": "value"}),
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"gradient_clip_algorithm": "value"}),
    ],
)
def test_other_clipping_is_lightnings(make, options):
    found = []
    for plugin in (
        precision(),
        MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**12)),
    ):
        model = Model(make)
        model.on_train_batch_end = lambda *_: None
        fit(model, plugin, gradient_clip_val=0.05, **options)
        found.append(torch.stack(model.losses))
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3, equal_nan=True)


def test_fused_optimizer_clips_by_norm_but_not_by_value():
    model = Model(fused=True)
    fit(model, precision())
    assert equal(model.losses, plain("16-mixed", ours)[0])
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Model(fused=True), precision(), gradient_clip_algorithm="value")


class Two(Model):
    """Two optimizers, stepped by hand, each clipped for its own step."""

    def __init__(self):
        super().__init__()
        self.second, self.automatic_optimization = layers(2), False

    def training_step(self, batch, index):
        nets = self.net, self.second
        for net, optimizer, norm in zip(nets, self.optimizers(), (CLIP, 0.5)):
            loss = loss_of(net, batch, index)
            self.losses.append(loss.detach())
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=norm)
            optimizer.step()

    def configure_optimizers(self):
        nets = self.net, self.second
        return [trainfast.AdamW(net.parameters(), lr=1e-2) for net in nets]

    def on_train_batch_end(self, *_):
        assert [x.max_grad_norm for x in self.optimizers()] == [None, None]


def test_two_optimizers_have_the_losses_of_a_plain_loop():
    model, plugin = Two(), precision()
    fit(model, plugin, accumulate_grad_batches=1)
    nets, losses = (layers(0), layers(2)), []
    optimizers = [
        trainfast.AdamW(net.parameters(), lr=1e-2, max_grad_norm=norm)
        for net, norm in zip(nets, (CLIP, 0.5))
    ]
    scaler = trainfast.GradScaler("cpu", 2.0**12)
    for index, batch in enumerate(data()):
        for net, optimizer in zip(nets, optimizers):
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                loss = loss_of(net, batch, index)
            losses.append(loss.detach())
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert equal(model.losses, losses)
    assert plugin.state_dict() == scaler.state_dict()
    assert plugin.state_dict()["scale"] == 2.0**10  # both overflowed once


@pytest.mark.parametrize("saved_by", ["trainfast", "lightning"])
def test_a_checkpoint_resumes_the_scaler(tmp_path, saved_by):
    first = precision(growth_interval=12)
    if saved_by == "lightning":
        scaler = torch.amp.GradScaler("cpu", 2.0**12, growth_interval=12)
        first = MixedPrecision("16-mixed", "cpu", scaler)
    trainer = fit(Model(), first)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = first.state_dict()
    assert state["scale"] == 2.0**11 and state["_growth_tracker"] == 4
    second = precision(growth_interval=12)
    resumed = Model()
    resumed.on_train_start = lambda: seen.append(second.state_dict())
    seen = []
    fit(resumed, second, ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    assert seen == [state]
    assert second.state_dict()["scale"] == 2.0**11  # grew once, overflowed once more


def test_an_interrupted_run_resumes_bit_for_bit(tmp_path):
    whole = Model()
    fit(whole, precision(), max_epochs=2)
    half = Model()
    fit(half, precision()).save_checkpoint(tmp_path / "half.ckpt")
    rest = Model()
    fit(rest, precision(), ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    assert equal([*half.losses, *rest.losses], whole.losses)


@pytest.mark.parametrize("kind", ["16", "fp16", "16-true", 16, None])
def test_unknown_precision_is_refused(kind):
    with pytest.raises(ValueError, match="must be '16-mixed' or 'bf16-mixed'"):
        trainfast.lightning.Precision(kind, "cpu")


def test_a_step_that_raises_restores_the_norm():
    model = Model(max_grad_norm=3.0)

    def fail(*_, **__):
        assert optimizer.max_grad_norm == CLIP
        raise KeyError("stop")

    optimizer = model.configure_optimizers()
    optimizer.register_step_pre_hook(fail)
    model.configure_optimizers = lambda: optimizer
    with pytest.raises(KeyError, match="stop"):
        fit(model, precision())
    assert optimizer.max_grad_norm == 3.0


def test_a_batch_without_a_loss_is_passed_over():
    model = Model()
    step = model.training_step

    def fewer(batch, batch_idx):
        return None if batch_idx in (3, 7) else step(batch, batch_idx)

    model.training_step = fewer
    plugin = precision()
    fit(model, plugin, data(8), accumulate_grad_batches=1)
    assert len(model.losses) == 6
    assert plugin.state_dict()["_growth_tracker"] == 6


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
@pytest.mark.parametrize("kind", DTYPES)
def test_copied_plugin_trains_as_the_first(copied, kind):
    first = precision(kind)
    fit(Model(), first, data(8))
    second = copied(first)
    assert type(second) is type(first) and second.state_dict() == first.state_dict()
    assert second.scaler is None or second.scaler is not first.scaler
    before, after = Model(), Model()
    fit(before, first, data(8))
    fit(after, second, data(8))
    assert equal(before.losses, after.losses)


@pytest.mark.slow
def test_the_plugin_is_of_pytorch_lightning_where_that_is_in_use():
    pytest.importorskip("pytorch_lightning")
    code = """
import pytorch_lightning as L, torch, trainfast
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, _):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return trainfast.AdamW(self.parameters())
plugin = trainfast.lightning.Precision("16-mixed", "cpu")
trainer = L.Trainer(accelerator="cpu", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, plugins=[plugin],
    gradient_clip_val=1e-3)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 4), 4))
assert trainer.precision_plugin is plugin
print(type(plugin).__mro__[1].__module__, float(trainer.optimizers[0].grad_norm) > 1e-3)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    module, clipped = done.stdout.splitlines()[-1].split()
    assert module.startswith("pytorch_lightning.") and clipped == "True"
