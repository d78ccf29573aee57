"""diagnose.watch() and step(): the probe inside of a loop that runs here."""

import os
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from trainfast import diagnose


class Slow(Dataset):
    """Rows that take 3 ms each."""

    def __init__(self, seconds=0.003):
        self.seconds = seconds
        self.read = 0

    def __len__(self):
        return 64

    def __getitem__(self, i):
        self.read += 1
        time.sleep(self.seconds)
        return torch.full((8,), float(i)), i % 2


@pytest.fixture(autouse=True)
def no_watch(monkeypatch):
    monkeypatch.setattr(diagnose, "_watch", None)


@pytest.fixture
def parts():
    model = torch.nn.Linear(8, 2)
    return model, torch.optim.AdamW(model.parameters())


def train(loader, parts, seconds=1.5, until=None, epochs=400, **watched):
    """Trains until the report is there and some steps longer; returns all batches."""
    model, optimizer = parts
    seen = []
    for _ in range(epochs):
        for x, y in diagnose.watch(loader, seconds=seconds, **watched):
            with diagnose.step():
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            seen.append(x)
            if until and until(len(seen)):
                return seen
        if diagnose._watch.report is not None:
            return seen
    raise AssertionError("no report")


def test_slow_data_is_found_and_printed(parts, capsys):
    loader = DataLoader(Slow(), batch_size=8)
    train(loader, parts)
    report = diagnose.report()
    assert "data" in capsys.readouterr().out
    if os.getloadavg()[0] > len(os.sched_getaffinity(0)) and not report.findings:
        pytest.skip("other programs use this machine: the probe is not sure")
    first = report.findings[0]
    assert (first.id, first.exact) == ("data", False)
    assert first.file == __file__
    assert first.low > 1.1


def test_after_the_report_every_batch_is_the_loaders(parts):
    data = Slow(0.0)
    loader = DataLoader(data, batch_size=8)
    train(loader, parts, seconds=0.5)
    assert diagnose.report() is diagnose.report()
    read = data.read
    xs = [x for x, _ in diagnose.watch(loader)]
    assert torch.equal(torch.cat(xs)[:, 0], torch.arange(64.0))
    assert data.read == read + 64
    with diagnose.step():
        pass


def test_an_epoch_keeps_its_length_under_every_switch(parts):
    loader = DataLoader(Slow(0.001), batch_size=8)
    lengths = []
    while diagnose._watch is None or diagnose._watch.report is None:
        lengths.append(0)
        for x, _ in diagnose.watch(loader, seconds=0.8):
            with diagnose.step():
                parts[0](x).sum().backward()
            lengths[-1] += 1
    assert set(lengths) == {8}
    assert diagnose._watch.loop.steps_under["data"] > 0


class Waiting(torch.optim.AdamW):
    """Each step takes 3 ms longer."""

    def step(self):
        time.sleep(0.003)
        super().step()


def test_optimizer_is_tried_and_given_back():
    model = torch.nn.Linear(8, 2)
    optimizer = Waiting(model.parameters())
    parts = model, optimizer
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    wrapped = optimizer.step
    loader = DataLoader(Slow(0.0), batch_size=8)
    train(loader, parts, seconds=0.5, model=model, optimizer=optimizer)
    assert vars(optimizer)["step"] is wrapped
    scheduler.step()
    names = {row.name for row in diagnose.report().rows}
    assert "no optimizer step" in names
    assert diagnose._watch.loop.seconds["optimizer"] > 0


@pytest.mark.slow
def test_break_and_exception_leave_nothing_switched(parts, monkeypatch):
    loader = DataLoader(Slow(0.001), batch_size=8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for stop in range(20, 60, 3):
            train(loader, parts, seconds=60, until=lambda n, stop=stop: n == stop)
            assert torch.get_num_threads() == 1
        with pytest.raises(ZeroDivisionError):
            for _ in diagnose.watch(loader):
                with diagnose.step():
                    raise ZeroDivisionError
        assert torch.get_num_threads() == 1
        assert diagnose._watch.schedule.blocks
    finally:
        torch.set_num_threads(threads)


def test_a_loop_over_other_batches_begins_anew(parts):
    first = DataLoader(Slow(0.0), batch_size=8)
    train(first, parts, until=lambda n: n == 3, optimizer=parts[1])
    assert "step" in vars(parts[1])
    batches = [(torch.ones(2, 8), torch.zeros(2, dtype=torch.int64))] * 50
    train(batches, parts, seconds=0.3)
    assert "step" not in vars(parts[1])
    assert diagnose.report().facts["threads"] == torch.get_num_threads()


def test_too_early_is_said(parts):
    with pytest.raises(RuntimeError, match="no loop was watched"):
        diagnose.report()
    with pytest.raises(RuntimeError, match="is for a loop over"):
        diagnose.step()
    loader = DataLoader(Slow(0.0), batch_size=8)
    train(loader, parts, until=lambda n: n == 3)
    with pytest.raises(RuntimeError, match="3 steps seen, 0 of 3 rounds; train for"):
        diagnose.report()


@pytest.mark.parametrize("within", [True, False])
def test_report_ends_a_measurement_that_runs(within, capsys):
    loader = DataLoader(Slow(), batch_size=8)
    model = torch.nn.Linear(8, 2)
    optimizer = Waiting(model.parameters())
    while diagnose._watch is None or diagnose._watch.missing():
        for x, y in diagnose.watch(loader, optimizer=optimizer, seconds=600):
            with diagnose.step():
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            if within and not diagnose._watch.missing():
                break
    assert "step" in vars(optimizer)
    names = {row.name for row in diagnose.report().rows}
    assert {"data", "no optimizer step"} <= names
    assert "step" not in vars(optimizer)
    assert diagnose.report() is diagnose.report()
    assert not capsys.readouterr().out  # it is returned, not printed
