"""Estimates of scripts: data, model and loop are their own."""

import json
import subprocess
import sys
import traceback

import pytest

pytest.importorskip("torch")
from trainfast.cli import main
from trainfast.probe import run
from trainfast.probe.headline import headline
from trainfast.probe.memory import estimate_script

pytestmark = [
    pytest.mark.skipif(run.best_sandbox() is None, reason="no sandbox here"),
    pytest.mark.forks,
]

LOOP = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=512)
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = TensorDataset(torch.randn(400, 64), torch.randint(10, (400,)))
loader = DataLoader(data, batch_size=100, pin_memory=True)
model = nn.Sequential(nn.Linear(64, args.width), nn.ReLU(), nn.Linear(args.width, 10))
model = model.to(device)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
for epoch in range(1000):
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device)
        with torch.autocast(device.type, enabled=device.type == "cuda"):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"{loss.item():.3f}", loss.detach().cpu().numpy())
    torch.save(model.state_dict(), "model.pt")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(LOOP)
    return path


@pytest.mark.slow
def test_script_is_estimated_for_a_gpu_that_is_not_there(script):
    estimate = estimate_script(str(script), ["--width", "4096"], gpu="T4")
    weights = 4 * (64 * 4096 + 4096 + 4096 * 10 + 10)
    assert estimate.kinds["weights"] == pytest.approx(weights, rel=0.01)
    assert estimate.kinds["optimizer state"] == pytest.approx(2 * weights, rel=0.01)
    assert estimate.batch_size == 100 and estimate.fits
    assert estimate.method == "the script on fake tensors"
    # Half precision: the script took its path for a GPU.
    assert estimate.activations["1"] == pytest.approx(100 * 4096 * 2, rel=0.01)
    assert list(script.parent.iterdir()) == [script]


@pytest.mark.slow
def test_data_parallel_runs_its_module_on_the_one_gpu(script):
    text = script.read_text()
    script.write_text(
        text.replace("model.to(device)", "nn.DataParallel(model.to(device))")
    )
    estimate = estimate_script(str(script))
    assert estimate.method == "the script on fake tensors"


@pytest.mark.slow
def test_fakes_take_what_real_tensors_take(script):
    job = {"gpu": None, "steps": 2, "expandable": False}
    fake, real = (
        run.estimated(str(script), [], job | {"fake": on})["replay"]
        for on in (True, False)
    )
    assert fake["allocated"] == pytest.approx(real["allocated"], rel=0.01)


@pytest.mark.slow
def test_a_loop_that_fakes_cannot_run_runs_really(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        LOOP.replace("optimizer.zero_grad()", "hash(x.data_ptr() or 1 / 0)")
    )
    estimate = estimate_script(str(path))
    assert estimate.method == "the script on the CPU, really" and not estimate.exact
    assert any("fake tensors cannot run" in note for note in estimate.notes)
    assert "guessed" not in str(estimate)


def test_headline_is_the_exceptions_first_line():
    with pytest.raises(ValueError) as caught:
        raise ValueError("found invalid values:\n    1.5\nFakeTensor(...)")
    text = "".join(traceback.format_exception(caught.value))
    assert headline(text) == "ValueError: found invalid values:"
    assert headline("SystemExit: 3") == "SystemExit: 3"


ASKS_THE_TERMINAL = """
import os
assert os.get_terminal_size(0) == (80, 24)
try:
    input()
except EOFError:
    raise KeyError("input ended")
"""


@pytest.mark.slow
def test_loop_that_updates_its_parameters_by_hand_ends_after_two_steps(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("""
import torch
model = torch.nn.Linear(1024, 1024)
for step in range(10**9):
    model.zero_grad()
    model(torch.randn(8, 1024)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
""")
    estimate = estimate_script(str(path))
    assert estimate.method.startswith("the script on fake tensors")
    assert estimate.kinds["weights"] == pytest.approx(4 * 1024 * 1025, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('no loop')", "without a training step"),
        ("raise KeyError('mine')", "KeyError: 'mine'"),
        (ASKS_THE_TERMINAL, "KeyError: 'input ended'"),
    ],
)
def test_no_step_is_an_error_that_shows_what_to_write(tmp_path, text, message):
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(run.ProbeError, match=message) as error:
        estimate_script(str(path))
    assert "trainfast.estimate_memory(model, batch" in str(error.value)


@pytest.mark.slow
def test_command_line(script):
    words = [sys.executable, "-m", "trainfast", "estimate-memory"]
    done = subprocess.run(
        [*words, "--gpu", "4GB", "--json", str(script), "--width", "64"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["device"] == "4 GiB" and found["verdict"] == "fits"


@pytest.mark.slow
def test_command_line_shows_a_traceback_as_lines(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("raise KeyError('mine')")
    assert main(["estimate-memory", str(path)]) == 1
    assert "\nKeyError: 'mine'\n" in capsys.readouterr().err


def test_options_of_a_function_are_refused_with_a_script(script, capsys):
    words = ["estimate-memory", "--amp", "fp16", "--checkpointing", str(script)]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "--amp, --checkpointing cannot be combined with a script" in said
