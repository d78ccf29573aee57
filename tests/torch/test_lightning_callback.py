"""trainfast.lightning.Callback in Lightning's Trainer: what it prints and logs."""

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning", reason="an adapter's test, by hand")

import trainfast  # noqa: E402
from tests.log.far_tensors import Far, use_fake_gpu  # noqa: E402
from tests.torch.epoch_lines import lines_in, watch_epochs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def epochs(monkeypatch):
    return watch_epochs(monkeypatch)


SIZES = (8, 8, 4)  # of the batches in an epoch
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def batches():
    gen = torch.Generator().manual_seed(1)
    return [torch.randn(size, 16, generator=gen) for size in SIZES]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(batches())


def known():
    return torch.utils.data.DataLoader(torch.cat(batches()), SIZES[0])


def unknown():
    return torch.utils.data.DataLoader(Stream(), batch_size=None)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(16, 1)
        self.losses = []

    def training_step(self, batch, index):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return trainfast.AdamW(self.parameters(), lr=1e-2, max_grad_norm=1.0)


def fit(callback, model=None, loader=None, val=None, ckpt_path=None, **options):
    trainer = lightning.Trainer(**QUIET | options, callbacks=[callback])
    loader = known() if loader is None else loader
    trainer.fit(model or Model(), loader, val, ckpt_path=ckpt_path)
    return trainer


def means(losses, sizes=SIZES):
    """The mean over each epoch's samples, in float64."""
    found = []
    for begin in range(0, len(losses), len(sizes)):
        part = losses[begin : begin + len(sizes)]
        weighted = [float(x) * n for x, n in zip(part, sizes)]
        found.append(sum(weighted) / sum(sizes[: len(part)]))
    return found


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("loader", [known, unknown])
def test_each_epoch_has_its_lines(capsys, epochs, loader, accumulated):
    model = Model()
    fit(
        trainfast.lightning.Callback(),
        model,
        loader(),
        max_epochs=3,
        accumulate_grad_batches=accumulated,
    )
    lines, wanted = lines_in(capsys.readouterr().out), means(model.losses)
    assert [line[:2] for line in lines] == [(1, 3), (2, 3), (3, 3)]
    assert [line.loss for line in lines] == pytest.approx(wanted, abs=6e-5)
    assert [epoch.loss for epoch in epochs] == pytest.approx(wanted, rel=1e-12)
    assert [epoch.samples for epoch in epochs] == [sum(SIZES)] * 3
    assert all(line.throughput > 0 for line in lines)


@pytest.mark.parametrize("loader", [known, unknown])
def test_a_run_of_some_steps_reports_the_epoch_that_it_ends_in(capsys, epochs, loader):
    model = Model()
    fit(trainfast.lightning.Callback(remaining=True), model, loader(), max_steps=4)
    lines = lines_in(capsys.readouterr().out)
    assert [line[:2] for line in lines] == [(1, None), (2, None)]
    assert [epoch.samples for epoch in epochs] == [20, 8]
    assert [e.loss for e in epochs] == pytest.approx(means(model.losses), rel=1e-12)


def test_each_run_logs_from_its_own_first_step_on(tmp_path, capsys):
    with trainfast.Logger(jsonl=tmp_path / "log") as logger:
        callback = trainfast.lightning.Callback(logger)
        trainer = fit(callback, max_epochs=2, log_every_n_steps=4)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        again = {"ckpt_path": tmp_path / "last.ckpt", "max_epochs": 4}
        fit(callback, log_every_n_steps=4, **again)
        fit(callback, max_epochs=2, log_every_n_steps=4)
    found = [row["step"] for row in records(tmp_path / "log") if "train_loss" in row]
    assert found == [4, 6 + 4, 4]


def test_a_resumed_run_goes_on_counting(tmp_path, capsys, epochs):
    callback = trainfast.lightning.Callback()
    fit(callback, max_epochs=2).save_checkpoint(tmp_path / "last.ckpt")
    capsys.readouterr()
    model = Model()
    fit(callback, model, ckpt_path=tmp_path / "last.ckpt", max_epochs=4)
    lines = lines_in(capsys.readouterr().out)
    assert [line[:2] for line in lines] == [(3, 4), (4, 4)]
    assert [e.loss for e in epochs[2:]] == pytest.approx(means(model.losses))
    assert (callback.report.epochs, callback.report.start) == (4, 2)


class Breaks(Model):
    def training_step(self, batch, index):
        if len(self.losses) == 4:
            raise KeyError("stop")
        return super().training_step(batch, index)


def test_an_exception_passes_and_the_next_run_is_whole(capsys, epochs):
    callback = trainfast.lightning.Callback()
    with pytest.raises(KeyError, match="stop"):
        fit(callback, Breaks(), max_epochs=3)
    assert [line[:2] for line in lines_in(capsys.readouterr().out)] == [(1, 3)]
    model = Model()
    fit(callback, model, max_epochs=1)
    assert [line[:2] for line in lines_in(capsys.readouterr().out)] == [(1, 1)]
    assert epochs[-1].samples == 20
    assert epochs[-1].loss == pytest.approx(means(model.losses)[0])


class OnGpu(Model):
    """A loss that says it lies on a GPU, which tells when it is read."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu, self.reads = gpu, []

    def training_step(self, batch, index):
        self.reads.append(self.gpu.reads)
        return super().training_step(batch, index).as_subclass(Far)


def test_the_loss_is_read_once_an_epoch(monkeypatch, capsys, tmp_path, epochs):
    gpu = use_fake_gpu(monkeypatch)
    model = OnGpu(gpu)
    with trainfast.Logger(jsonl=tmp_path / "log") as logger:
        fit(
            trainfast.lightning.Callback(logger),
            model,
            max_epochs=2,
            log_every_n_steps=1,
        )
        assert model.reads == [0, 0, 0, 1, 1, 1] and gpu.reads == 2
        assert gpu.waits == 0
        gpu.finished = True
    assert [e.loss for e in epochs] == pytest.approx(means(model.losses), rel=1e-6)
    losses = [x for x in records(tmp_path / "log") if "train_loss" in x]
    assert [x["train_loss"] for x in losses] == pytest.approx(
        [float(x.as_subclass(torch.Tensor)) for x in model.losses]
    )


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Validates(Model):
    def training_step(self, batch, index):
        self.log("step", float(index))  # the Logger has a column of this name
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.log("val_loss", self.net(batch).square().mean())

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def test_steps_epochs_and_validation_are_logged(tmp_path, capsys, epochs):
    model = Validates()
    with trainfast.Logger(jsonl=tmp_path / "log", csv=tmp_path / "csv") as logger:
        fit(
            trainfast.lightning.Callback(logger),
            model,
            val=known(),
            max_epochs=2,
            log_every_n_steps=2,
        )
    found = records(tmp_path / "log")
    by_name = {
        name: [(row["step"], row[name]) for row in found if name in row]
        for name in {name for row in found for name in row}
    }
    assert [step for step, _ in by_name["train_loss"]] == [2, 4, 6]
    losses = [float(model.losses[i]) for i in (1, 3, 5)]
    assert [x for _, x in by_name["train_loss"]] == pytest.approx(losses)
    assert by_name["learning_rate"] == [(2, 1e-2), (4, 5e-3), (6, 5e-3)]
    assert [step for step, _ in by_name["grad_norm"]] == [2, 4, 6]
    assert all(norm > 0 for _, norm in by_name["grad_norm"])
    assert by_name["epoch"] == [(3, 1), (6, 2)]
    wanted = [(3, epochs[0].loss), (6, epochs[1].loss)]
    assert by_name["train_loss_epoch"] == wanted
    assert [step for step, _ in by_name["throughput"]] == [3, 6]
    assert [step for step, _ in by_name["val_loss"]] == [3, 6]


class Slow(Validates):
    def on_validation_start(self):
        self.printed = self.output()

    output = staticmethod(lambda: "")


def test_validation_comes_after_the_report(capsys, epochs):
    model = Slow()
    seen = []
    model.output = lambda: seen.append(capsys.readouterr().out)
    fit(trainfast.lightning.Callback(), model, val=known(), max_epochs=1)
    sanity_check, after_epoch = seen
    assert sanity_check == "" and len(lines_in(after_epoch)) == 1


class Manual(Model):
    def __init__(self, returns):
        super().__init__()
        self.automatic_optimization, self.returns = False, returns

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return self.returns(loss)


@pytest.mark.parametrize(
    "returns", [lambda x: x, lambda x: {"loss": x}, lambda _: None]
)
def test_manual_optimization_is_reported(capsys, epochs, returns):
    model = Manual(returns)
    fit(trainfast.lightning.Callback(), model, max_epochs=1)
    (line,) = lines_in(capsys.readouterr().out)
    assert epochs[0].samples == 20 and line.throughput > 0
    if returns(1) is None:
        assert math.isnan(line.loss)
    else:
        assert epochs[0].loss == pytest.approx(means(model.losses)[0])


def test_a_batch_that_is_skipped_does_not_count(capsys, epochs):
    class Skips(Model):
        def training_step(self, batch, index):
            return None if index == 1 else super().training_step(batch, index)

    model = Skips()
    fit(trainfast.lightning.Callback(), model, max_epochs=1)
    assert epochs[0].samples == 12
    assert epochs[0].loss == pytest.approx(means(model.losses, (8, 4))[0])


@dataclasses.dataclass
class Named:
    name: str
    image: torch.Tensor


class Graphs:
    num_graphs = 5
    x = torch.zeros(70, 3)


x = torch.zeros(6, 2)
BATCHES = [x, [x], (x, torch.zeros(3)), {"weight": torch.tensor(2.0), "x": x}]
BATCHES += [{"text": ["a"] * 6, "inner": {"x": x}}, Named("cats", x)]


@pytest.mark.parametrize("batch", BATCHES)
def test_samples_are_the_first_dimension_of_the_first_tensor(batch):
    assert trainfast.lightning.Callback()._run.samples(batch) == 6


def test_samples_of_graphs_and_by_a_function_and_of_nothing(epochs):
    count = trainfast.lightning.Callback()._run.samples
    assert count(Graphs()) == 5
    with pytest.raises(TypeError, match="samples of a batch of type list; pass `samp"):
        count(["a", 3, torch.tensor(1.0)])
    fit(trainfast.lightning.Callback(samples=lambda x: 3 * len(x)), max_epochs=1)
    assert epochs[0].samples == 60


def test_wrong_options_are_told_before_the_run():
    with pytest.raises(ValueError, match="`bands` must"):
        trainfast.lightning.Callback(bands="RTX 2")
    with pytest.raises(TypeError, match="unexpected keyword argument 'band'"):
        trainfast.lightning.Callback(band="RTX 4080 SUPER")


def test_options_are_the_reports(capsys):
    fit(
        trainfast.lightning.Callback(bands=[(0, "any")], remaining=True, epochs=7),
        max_epochs=1,
    )
    out = capsys.readouterr().out
    assert "Epoch [1/7]" in out and "samples/sec (any)\n  Remaining: " in out
