"""Checkpoints: whole or not there; training goes on with the same bits."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainfast
from trainfast.torch import checkpoints


def training(directory):
    """A loop with everything that has a state, and shuffling and dropout besides."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(
        *(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
    )
    optimizer = trainfast.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    accumulator = trainfast.Accumulator(optimizer, steps=2, scaler=scaler)
    data = TensorDataset(torch.randn(24, 4), torch.randint(2, (24,)))
    saving = trainfast.CheckpointEvery(
        *(2, directory),
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        accumulator=accumulator,
    )
    return model, accumulator, scheduler, DataLoader(data, 4, shuffle=True), saving


def run(directory, epochs):
    model, accumulator, scheduler, loader, saving = training(directory)
    first = saving.resume().get("epoch", 0)
    for epoch in range(first, epochs):
        losses = []
        for x, y in accumulator.batches(loader):
            x = x + random.random() + np.random.rand()
            loss = nn.functional.cross_entropy(model(x.float()), y)
            accumulator.backward(loss)
            losses.append(loss.item())
        scheduler.step(np.mean(losses))  # its best loss is NumPy's
        saving(epoch + 1, losses=losses)
    return first, model.state_dict(), losses, accumulator.steps_done


def test_resumed_training_has_the_bits_of_an_uninterrupted_one(tmp_path):
    _, expected, losses, steps = run(tmp_path / "one", 7)
    run(tmp_path / "two", 5)  # ends after a fifth epoch, which is not saved
    first, found, found_losses, found_steps = run(tmp_path / "two", 7)
    assert first == 4 and found_losses == losses and found_steps == steps
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_newest_are_kept_and_later_ones_of_another_run_left(tmp_path):
    model = nn.Linear(2, 2)
    saving = trainfast.CheckpointEvery(5, tmp_path, keep=2, model=model)
    assert saving.resume() == {} and "model" in repr(saving)
    written = [saving(epoch) for epoch in range(1, 21)]
    assert [path.name for path in written if path] == [
        *("epoch_0005.pt", "epoch_0010.pt", "epoch_0015.pt", "epoch_0020.pt")
    ]
    names = lambda: sorted(path.name for path in tmp_path.iterdir())  # noqa: E731
    assert names() == ["epoch_0015.pt", "epoch_0020.pt"]
    again = trainfast.CheckpointEvery(1, tmp_path, keep=1, model=model)
    again(7), again(8)
    assert names() == ["epoch_0008.pt", "epoch_0015.pt", "epoch_0020.pt"]
    assert again.resume()["epoch"] == 20
    every = trainfast.CheckpointEvery(1, tmp_path, keep=None, model=model)
    for epoch in range(30, 35):
        every(epoch)
    assert len(names()) == 8


def test_damaged_newest_gives_the_one_before(tmp_path):
    model = nn.Linear(2, 2)
    saving = trainfast.CheckpointEvery(1, tmp_path, model=model)
    saving(1, note="good")
    newest = saving(2)
    newest.write_bytes(newest.read_bytes()[:700])
    with pytest.warns(UserWarning, match=r"epoch_0002.pt is damaged.*before is taken"):
        saved = saving.resume()
    assert saved == {"epoch": 1, "note": "good"}
    with pytest.raises(RuntimeError, match=r"epoch_0002.pt is damaged"):
        trainfast.resume(newest, model=model)
    torch.save([1], newest)
    with pytest.raises(RuntimeError, match="no checkpoint: it holds a"):
        trainfast.resume(newest)


def test_wrappers_and_plain_models_load_each_others(tmp_path):
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    trainfast.save_checkpoint(tmp_path / "a.pt", model=compiled)
    other = nn.Linear(2, 2)
    assert trainfast.resume(tmp_path / "a.pt", model=other) == {}
    assert torch.equal(other.weight, model.weight)
    trainfast.save_checkpoint(tmp_path / "a.pt", model=nn.Linear(2, 2))
    trainfast.resume(tmp_path / "a.pt", model=compiled)
    assert not torch.equal(other.weight, model.weight)


def test_what_cannot_be_loaded_again_leaves_the_last_one(tmp_path):
    path = trainfast.save_checkpoint(tmp_path / "new" / "a.pt", model=nn.Linear(2, 2))
    before = path.read_bytes()

    class Mine:
        pass

    with pytest.raises(TypeError, match="mine could not be loaded again"):
        trainfast.save_checkpoint(path, model=nn.Linear(2, 2), mine=print)
    with pytest.raises((TypeError, AttributeError)):
        trainfast.save_checkpoint(path, mine=Mine())
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["a.pt"]
    with pytest.raises(KeyError, match=r"has no optimizer, ema; it has model"):
        trainfast.resume(path, model=nn.Linear(2, 2), optimizer=None, ema=None)
    with pytest.raises(TypeError, match="the checkpoint's own"):
        trainfast.save_checkpoint(path, **{"random states": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "`every` must be a positive integer, got 0"),
        ({"every": 1.5}, "`every` must be"),
        ({"every": 1, "keep": 0}, "`keep` must be a positive integer, got 0"),
    ],
)
def test_wrong_arguments_are_named(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainfast.CheckpointEvery(directory=tmp_path, **options)


def test_file_and_then_its_name_reach_the_disk(tmp_path, monkeypatch):
    said = []

    def noted(name, function):
        def call(*args):
            said.append(name)
            return function(*args)

        return call

    monkeypatch.setattr(os, "fsync", noted("fsync", os.fsync))
    monkeypatch.setattr(os, "replace", noted("replace", os.replace))
    trainfast.save_checkpoint(tmp_path / "a.pt", model=nn.Linear(2, 2))
    assert said == ["fsync", "replace", "fsync"]


# Children of one process end at each call in turn, as a killed process does.
KILLED = """
import json, os, sys, torch
from torch import nn
import trainfast
from trainfast.torch import checkpoints

torch.set_num_threads(1)
directory = sys.argv[1]
model = nn.Linear(3, 3)

def saving():
    return trainfast.CheckpointEvery(1, directory, keep=1, model=model)

def dies_at(count):
    def tick():
        nonlocal count
        count -= 1
        if count < 0:
            os._exit(9)

    class File:
        def __init__(self, *args):
            tick()
            self.file = open(*args, buffering=0)
        def write(self, data):
            half = bytes(data)[: len(data) // 2]  # a write that is cut short
            if count == 0:
                self.file.write(half)
            tick()
            return self.file.write(data)
        def flush(self):
            tick()
        def fileno(self):
            return self.file.fileno()
        def __enter__(self):
            return self
        def __exit__(self, *args):
            self.file.close()

    class Os:
        def __getattr__(self, name):
            if name in ("fsync", "replace"):
                tick()
            return getattr(os, name)

    checkpoints.open, checkpoints.os = File, Os()

saving()(1, weight=1.0)
ends = []
for at in range(1000):
    child = os.fork()
    if not child:
        dies_at(at)
        nn.init.constant_(model.weight, 2.0)
        saving()(2, weight=2.0)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    saved = saving().resume()
    ends.append([status, saved["epoch"]])
    if not status:
        break
    assert float(model.weight[0, 0]) == 2.0 or saved["epoch"] == 1
    for path in checkpoints._files(checkpoints.Path(directory)):
        if path.name != "epoch_0001.pt":
            path.unlink()
    saving()(1, weight=1.0)
print(json.dumps(ends))
"""


@pytest.mark.slow
def test_killed_at_any_call_it_leaves_a_whole_checkpoint(tmp_path):
    words = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    *killed, last = json.loads(done.stdout.splitlines()[-1])
    assert last == [0, 2] and len(killed) > 15
    assert {status for status, _ in killed} == {9}
    epochs = [epoch for _, epoch in killed]
    assert epochs == sorted(epochs) and epochs[0] == 1 and epochs[-1] == 2


FULL = """
import resource, sys, trainfast
from torch import nn
path = trainfast.save_checkpoint(sys.argv[1] + "/a.pt", model=nn.Linear(2, 2), epoch=1)
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
try:
    trainfast.save_checkpoint(path, model=nn.Linear(300, 300), epoch=2)
except Exception as error:
    print(type(error).__name__, error)
print(trainfast.resume(path, model=nn.Linear(2, 2)))
"""


def test_full_disk_leaves_the_last_one(tmp_path):
    words = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    error, saved = done.stdout.splitlines()[-2:]
    assert "Error" in error and saved == "{'epoch': 1}"
    assert os.listdir(tmp_path) == ["a.pt"]


def test_only_rank_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "rank", lambda: 1)
    trainfast.save_checkpoint(tmp_path / "a.pt", model=nn.Linear(2, 2))
    saving = trainfast.CheckpointEvery(1, tmp_path, model=nn.Linear(2, 2))
    saving(1)
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(checkpoints, "rank", lambda: 0)
    saving(1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    monkeypatch.setattr(checkpoints, "rank", lambda: 1)
    assert saving.resume() == {"epoch": 1}
    assert torch.equal(torch.get_rng_state(), before)  # each rank keeps its own


def test_shards_of_fsdp_are_refused_before_ranks_wait(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    model.weight._fsdp_flattened = True  # as FullyShardedDataParallel marks them
    monkeypatch.setattr(checkpoints, "rank", lambda: 1)
    with pytest.raises(NotImplementedError, match="spread over ranks"):
        trainfast.save_checkpoint(tmp_path / "a.pt", model=model)
    optimizer = trainfast.AdamW(model.parameters(), max_grad_norm=1.0)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="max_grad_norm must be None with Fully"):
        optimizer.step()


def test_spread_weights_are_refused(tmp_path):
    class DTensor(torch.Tensor):
        pass

    spread = {"weight": torch.ones(2).as_subclass(DTensor)}
    with pytest.raises(NotImplementedError, match=r"torch\.distributed\.checkpoint"):
        trainfast.save_checkpoint(tmp_path / "a.pt", model=spread)
