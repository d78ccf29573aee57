"""trainfast.accelerate.Tracker in accelerate's loop, and EpochReport beside it."""

import json

import pytest
import torch

pytest.importorskip("accelerate", reason="an adapter's test, by hand")

from accelerate import Accelerator
from accelerate.state import AcceleratorState

import trainfast
from tests.log.far_tensors import far, use_fake_gpu
from tests.torch.epoch_lines import lines_in


@pytest.fixture(autouse=True)
def fresh():
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log.jsonl"


def records(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "time"} for row in found]


def accelerator_of(log, **options):
    tracker = trainfast.accelerate.Tracker(trainfast.Logger(jsonl=log))
    return Accelerator(cpu=True, log_with=tracker, **options)


def test_a_loop_logs_and_reports(log, capsys):
    accelerator = accelerator_of(log, gradient_accumulation_steps=2)
    accelerator.init_trackers("project", config={"lr": 0.1, "name": "first"})
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = trainfast.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)
    loader = torch.utils.data.DataLoader(torch.randn(20, 8), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    report, losses, step = trainfast.EpochReport(epochs=2), [], 0
    for _ in range(2):
        report.start_epoch()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            report.step(loss, len(batch))
            losses.append((loss.item(), len(batch)))
            accelerator.log({"train_loss": loss}, step=step)
            step += 1
        report.end_epoch()
    accelerator.end_training()
    config, *rows = records(log)
    assert config == {"step": 0, "lr": 0.1, "name": "first"}
    assert [row["step"] for row in rows] == list(range(6))
    found = [row["train_loss"] for row in rows]
    assert found == pytest.approx([loss for loss, _ in losses])
    lines = lines_in(capsys.readouterr().out)
    wanted = [sum(x * n for x, n in losses[i : i + 3]) / 20 for i in (0, 3)]
    assert [line[:2] for line in lines] == [(1, 2), (2, 2)]
    assert [line.loss for line in lines] == pytest.approx(wanted, abs=6e-5)


def test_steps_may_be_left_to_the_tracker(log):
    accelerator = accelerator_of(log)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 2.0})
    accelerator.log({"loss": 3.0}, step=7)
    accelerator.log({"loss": 4.0})
    accelerator.end_training()
    assert [(row["step"], row["loss"]) for row in records(log)] == [
        (0, 1.0),
        (1, 2.0),
        (7, 3.0),
        (8, 4.0),
    ]


def test_values_on_a_gpu_are_not_waited_for(log, monkeypatch):
    gpu = use_fake_gpu(monkeypatch)
    accelerator = accelerator_of(log)
    accelerator.init_trackers("project")
    for step in range(3):
        accelerator.log({"loss": far(float(step))}, step=step)
    assert (gpu.reads, gpu.waits, gpu.transfers) == (0, 0, 3)
    accelerator.end_training()
    assert [row["loss"] for row in records(log)] == [0.0, 1.0, 2.0]


def test_configuration_of_any_values_is_logged(log):
    accelerator = accelerator_of(log)
    config = {"betas": (0.9, 0.95), "seed": None, "fused": True, "layers": 3}
    accelerator.init_trackers("project", config=config)
    accelerator.end_training()
    (row,) = records(log)
    assert row == {"step": 0, "betas": "(0.9, 0.95)", "seed": "None"} | {
        "fused": True,
        "layers": 3,
    }


def test_accelerate_finds_the_tracker_by_name(log):
    accelerator = accelerator_of(log)
    accelerator.init_trackers("project")
    tracker = accelerator.get_tracker("trainfast")
    assert isinstance(tracker, trainfast.accelerate.Tracker)
    logger = accelerator.get_tracker("trainfast", unwrap=True)
    assert logger is tracker.tracker and isinstance(logger, trainfast.Logger)
    assert not logger.closed
    accelerator.end_training()
    assert logger.closed


def test_an_exception_in_the_loop_loses_no_record(log):
    accelerator = accelerator_of(log)
    accelerator.init_trackers("project")
    with pytest.raises(KeyError, match="stop"):
        for step in range(5):
            accelerator.log({"loss": float(step)}, step=step)
            if step == 2:
                raise KeyError("stop")
    accelerator.trackers[0].tracker.close()
    assert [row["step"] for row in records(log)] == [0, 1, 2]
