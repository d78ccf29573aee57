"""examples/model_pair.py: the fires, the models learn, and the four tables add up."""

import argparse
import functools
import importlib
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[2] / "examples" / "model_pair.py"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.delitem(sys.modules, "model_pair", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module("model_pair")
    torch.set_num_threads(threads)


@pytest.fixture
def in_float32(example, monkeypatch):
    """Without autocast, whose bfloat16 many CPUs emulate."""
    monkeypatch.setattr(
        example.Run, "logits", lambda run, pictures: run.model(pictures)
    )


def on_the_cpu(size):
    return argparse.Namespace(device=torch.device("cpu"), seed=1, size=size)


def as_dicts(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


# ---- The fires and the models --------------------------------------------------------


def test_fires_drift_with_the_wind_and_grow(example):
    pictures, target = example.fires(64, 48, torch.Generator().manual_seed(3))
    assert pictures.shape == (64, example.FRAMES, 3, 48, 48)
    assert target.shape == (64, 48, 48)
    seen = torch.cat([pictures[:, :, 0] > 0.5, target[:, None].bool()], 1)
    line = torch.arange(48.0)
    area = seen.sum((2, 3)).clamp(min=1)
    across = (seen.sum(2) * line).sum(2) / area  # the middle, by time
    down = (seen.sum(3) * line).sum(2) / area
    wind = pictures[:, 0, 1:, 0, 0]
    for middle, blows in ((across, wind[:, 0]), (down, wind[:, 1])):
        moved = middle[:, -1] - middle[:, 0]
        both = torch.corrcoef(torch.stack((moved, blows)))
        assert both[0, 1] > 0.9
    inside = area[:, 0] > 20
    assert (area[:, -1] > area[:, 0])[inside].double().mean() > 0.8


@pytest.mark.parametrize("name", ["small", "medium", "large"])
def test_model_gives_a_logit_for_each_pixel(example, name):
    model = example.EmberFormer(example.CONFIGS[name])
    pictures = torch.randn(2, example.FRAMES, 3, 32, 32)
    logits = model(pictures)
    assert logits.shape == (2, 32, 32)
    logits[0].sum().backward()
    assert model.time.grad.abs().sum() > 0  # the transformer takes part
    other = pictures.clone()
    other[:, 0] += 1  # and sees the first time step
    assert not torch.equal(model(other), logits)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float32")
def test_small_model_learns_more_than_the_last_picture(example):
    args = on_the_cpu(32)
    (run,) = example.train(example.CONFIGS["small"], ("after",), 5e-3, 1200, args)
    first, last = (
        statistics.fmean(run.losses[part]) for part in (slice(10), slice(-10, None))
    )
    assert last < 0.5 * first
    pictures, target = example.unseen(32)
    copied = example.f1(pictures[:, -1, 0] > 0.5, target)
    assert run.f1(32) > copied + 0.03


def test_before_and_after_see_the_same_and_learn_the_same(example):
    args = on_the_cpu(32)
    ways = ("before", "after")
    before, after = example.train(example.CONFIGS["small"], ways, 1e-3, 40, args)
    assert len(before.losses) == len(after.losses) == 5
    assert after.losses == pytest.approx(before.losses, rel=1e-2)
    assert float(after.optimizer.grad_norm) > 0


# ---- The tables ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("in_float32")
def test_tables_are_consistent(example, monkeypatch):
    monkeypatch.setattr(example, "gigabytes", functools.cache(example.gigabytes))
    arguments = ["--device", "cpu", "--samples", "64", "--size", "16"]
    headroom, steps, trade_off, rates = map(as_dicts, example.main(arguments))

    assert [row[""] for row in headroom] == ["small", "medium", "large"]
    used = [float(row["estimate"].split()[0]) for row in headroom]
    assert 2 * used[0] < used[1] < used[2] / 2
    assert used[0] < 2.7 and used[2] < 12  # the guide's, with larger encoders
    for row in headroom:
        config = example.CONFIGS[row[""]]
        predicted, capacity = example.gigabytes(config, "24GB", row["batch for 60 %"])
        assert capacity == 24
        assert predicted == pytest.approx(0.6 * capacity, rel=0.1)

    assert [row["step"][0] for row in steps] == ["1", "2", "3"]
    gigabytes = [float(row["estimate"].split()[0]) for row in steps]
    assert gigabytes == sorted(gigabytes)
    assert all(row["samples/s here"] > 0 for row in steps)

    assert [row["updates"] for row in trade_off] == [8, 4, 2]
    assert trade_off[0]["of small"] == "1.00"
    for row in trade_off:
        ratio = row["after samples/s"] / row["before samples/s"]
        assert float(row["times"]) == pytest.approx(ratio, rel=0.02)

    assert [row["learning rate"] for row in rates] == [1e-3, 2e-3, 4e-3]
    assert [row["rule"] for row in rates] == ["keep", "sqrt", "linear"]


@pytest.mark.slow
def test_script_says_what_a_size_must_be():
    command = [sys.executable, SCRIPT, "--size", "50"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert "--size must be 16 times a number, got 50" in done.stderr
