"""examples/image_classifier.py: both ways learn, the table says what was measured."""

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

SCRIPT = Path(__file__).parents[2] / "examples" / "image_classifier.py"
SMALL = ["--size", "16", "--batch", "32", "--device", "cpu"]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.delitem(sys.modules, "image_classifier", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on more
    yield importlib.import_module("image_classifier")
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_both_ways_learn_and_only_after_steps_with_leftovers(example, monkeypatch):
    monkeypatch.setattr(example, "cnn", functools.partial(example.cnn, width=16))
    runs = example.main([*SMALL, "--epochs", "4", "--workers", "0"])
    before, after = runs
    for run in runs:
        assert run.losses[-1] < 0.6 * run.losses[0]
        assert run.accuracy() > 0.5
    # the same weights and nearly the same loss at first, but for bfloat16
    assert after.losses[0] == pytest.approx(before.losses[0], rel=0.1)
    # 1,437 images are 45 batches: 11 groups of 4, and one batch
    assert (before.updates, after.updates) == (4 * 11, 4 * 12)
    assert float(after.optimizer.grad_norm) > 0
    head, *rows = example.table(runs).columns, *example.table(runs).rows
    before_row, after_row = (dict(zip(head, row, strict=True)) for row in rows)
    assert (before_row[""], after_row[""]) == ("before", "after")
    assert (before_row["dtype"], after_row["dtype"]) == ("float32", "bfloat16")
    for run, row in zip(runs, (before_row, after_row), strict=True):
        assert row["samples/s"] == round(1437 / run.epoch_seconds())
        assert row["accuracy"] == f"{run.accuracy():.1%}"


@pytest.mark.slow
def test_script_prints_its_table_with_a_worker():
    command = [sys.executable, SCRIPT, *SMALL, "--size", "8", "--epochs", "1"]
    command += ["--workers", "1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "torch sees no GPU" or "MiB" in done.stdout
    assert "epoch 1 of 1  after" in done.stdout
    before, after = (line.split() for line in lines[-3:-1])
    assert before[:5] == ["before", "32", "4", "0", "float32"]
    assert after[:5] == ["after", "32", "4", "1", "bfloat16"]
    assert lines[-1].startswith("After is ")


def test_verdict_says_where_after_is_not_faster(example):
    args = example.parse([*SMALL, "--workers", "0"])
    data = torch.rand(400, 8, 8), torch.arange(400) % 10
    before, after = example.Before(args, *data), example.After(args, *data)
    before.seconds = [9.0, 4.0, 2.0, 6.0]
    after.seconds = [1.0, 2.0]
    assert example.verdict(before, after).startswith("After is 2.00 times as fast")
    after.seconds = [1.0, 4.0]
    assert "not faster on this machine: 1.00 times" in example.verdict(before, after)


def test_images_from_the_cache_are_the_enlarged_ones(example):
    images, labels = torch.rand(5, 8, 8), torch.arange(5)
    plain = example.Digits(images, labels, 24)
    cached = example.Digits(images, labels, 24, cache=True)
    for i in range(5):
        assert torch.equal(plain[i][0], cached[i][0])
        assert plain[i][0].shape == (1, 24, 24)


@pytest.mark.slow
def test_script_without_scikit_learn_says_what_to_install():
    code = (
        "import sys, runpy; sys.modules['sklearn'] = None; runpy.run_path(sys.argv[1])"
    )
    command = [sys.executable, "-c", code, SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "the images need scikit-learn: pip install scikit-learn\n"
