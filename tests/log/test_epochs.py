"""The report of an epoch: exact lines, numbers, and that no step waits for a GPU."""

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributed, multiprocessing, nn

import trainfast
from tests.log.far_tensors import far, use_fake_gpu
from trainfast.log import epochs
from trainfast.log.epochs import Epoch


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until `clock.now` is set."""
    clock = SimpleNamespace(now=1000.0)
    fake = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(epochs, "time", fake)
    return clock


def test_lines_are_the_guides(clock, capsys):
    report = trainfast.EpochReport(epochs=25)
    report.step(2.1234, 1420)
    clock.now += 1.0
    report.end_epoch()
    report.step(torch.tensor(2.0), 128)
    report.step(np.float32(1.0), 128)
    clock.now += 180.46
    report.end_epoch()
    assert capsys.readouterr().out == (
        "Epoch [1/25] Average Train Loss: 2.1234\n"
        "  Epoch time: 1.0s | Throughput: 1420 samples/sec\n"
        "Epoch [2/25] Average Train Loss: 1.5000\n"
        "  Epoch time: 180.5s | Throughput: 1 samples/sec\n"
    )


def test_all_options_add_a_word_or_a_line_each(clock, capsys):
    report = trainfast.EpochReport(
        epochs=25,
        start=22,
        remaining=True,
        bands="NVIDIA GeForce RTX 4080 Super",
        flops_per_sample=1e10,
        roof=65.0,
    )
    mask = torch.ones(4, 10, dtype=torch.int64)
    mask[:, 7:] = 0
    report.step(1.0, 1600 * 100, mask=mask)
    clock.now += 100
    report.end_epoch()
    clock.now += 5000
    report.start_epoch()
    report.step(1.0, 90, tokens=(75, 25))
    report.step(1.0, 10, mask=mask.numpy() > 0)
    clock.now += 100
    report.end_epoch()
    assert capsys.readouterr().out == (
        "Epoch [23/25] Average Train Loss: 1.0000\n"
        "  Epoch time: 100.0s | Throughput: 1600 samples/sec (good)\n"
        "  Remaining: 3min\n"
        "  Padding: 30.0% of the tokens\n"
        "  MFU: 24.6% of 65 TFLOP/s\n"
        "Epoch [24/25] Average Train Loss: 1.0000\n"
        "  Epoch time: 100.0s | Throughput: 1 samples/sec (problem, check GPU usage)\n"
        "  Remaining: 43min\n"
        "  Padding: 26.4% of the tokens\n"
        "  MFU: 0.0% of 65 TFLOP/s\n"
    )


@pytest.mark.parametrize(
    ("throughput", "word"),
    [
        (0, "problem, check GPU usage"),
        (499, "problem, check GPU usage"),
        (500, "below acceptable"),
        (1000, "acceptable"),
        (1500, "good"),
        (2000, "excellent"),
        (9e9, "excellent"),
    ],
)
def test_bands_are_the_guides(throughput, word, clock):
    report = trainfast.EpochReport(bands="RTX 4080 SUPER")
    report.step(1.0, int(throughput * 10))
    clock.now += 10
    assert report.end_epoch().verdict == word


def test_own_bands(clock):
    report = trainfast.EpochReport(bands=[(10, "well"), (20, "better")])
    for samples, word in ((9, None), (10, "well"), (20, "better")):
        report.step(1.0, samples)
        clock.now += 1
        assert report.end_epoch().verdict == word


def test_remaining_time_in_words():
    for seconds, text in ((3, "3s"), (29, "29s"), (90, "2min"), (3600 * 3, "3h 00min")):
        assert epochs._duration(seconds) == text
    assert epochs._duration(4330) == "1h 12min"


def test_numbers_are_returned(clock):
    report = trainfast.EpochReport(epochs=2, remaining=True)
    report.step(1.0, 3)
    report.step(4.0, 1)
    clock.now += 2
    epoch = report.end_epoch()
    assert epoch == Epoch(1, 2, 1.75, 2.0, 4, 2.0, remaining=2.0)
    assert epoch.to_dict()["throughput"] == 2.0
    clock.now += 1
    report.step(7.0, 1)
    assert report.end_epoch() == Epoch(2, 2, 7.0, 1.0, 1, 1.0, remaining=0.0)


def test_edges(clock, capsys):
    report = trainfast.EpochReport()
    with pytest.raises(RuntimeError, match=r"without a step\(\) in this epoch"):
        report.end_epoch()
    report.step(math.nan, 2)
    report.step(1.0, 2)
    clock.now += 1
    assert math.isnan(report.end_epoch().loss)
    report.step(torch.tensor(math.nan), 0)  # the mean over nothing
    clock.now += 1
    empty = report.end_epoch()
    assert math.isnan(empty.loss) and (empty.samples, empty.throughput) == (0, 0)
    report.step(math.inf, 1)  # in no time
    assert report.end_epoch().throughput > 0
    out = capsys.readouterr().out
    assert out.startswith("Epoch [1] Average Train Loss: nan\n")
    assert "Loss: inf\n" in out
    with pytest.raises(RuntimeError, match="without a step"):
        report.end_epoch()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trainfast.EpochReport(2.5), "`epochs` must be a count of epochs"),
        (lambda: trainfast.EpochReport(start=-1), "`start` must be a count"),
        (lambda: trainfast.EpochReport(remaining=True), "`remaining` needs `epochs`"),
        (lambda: trainfast.EpochReport(roof=0), "`roof` must be a rate in TFLOP/s"),
        (lambda: trainfast.EpochReport(bands="T4"), "`bands` must be .*RTX 4080 SUPER"),
        (lambda: trainfast.EpochReport(bands=[(2, "a"), (1, "b")]), "must rise"),
        (lambda: trainfast.EpochReport().step(1.0, -1), "`samples` must not be neg"),
        (
            lambda: trainfast.EpochReport().step(torch.ones(2), 1),
            r"`loss` must be the batch's mean, got a tensor of shape \(2,\)",
        ),
        (
            lambda: trainfast.EpochReport().step(1.0, 1, tokens=(3, -1)),
            "`tokens` must not be negative",
        ),
        (lambda: trainfast.EpochReport().count_flops(int, 0), "`samples` must be pos"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_losses_on_a_gpu_are_read_once_an_epoch(monkeypatch, capsys):
    gpu = use_fake_gpu(monkeypatch)
    report = trainfast.EpochReport(1)
    for i in range(1000):
        loss = far(0.1 * i).requires_grad_()
        report.step(loss, 3, mask=far([1, 0, 1, 1], torch.int64))
    assert (gpu.reads, gpu.transfers) == (0, 0)
    epoch = report.end_epoch()
    assert gpu.reads == 2
    assert epoch.loss == pytest.approx(49.95, rel=1e-7) and epoch.padding == 0.25
    report.step(far([0.5]), 1)
    assert report.end_epoch().loss == 0.5


def test_losses_of_inference_mode_are_added_up(monkeypatch):
    use_fake_gpu(monkeypatch)
    report = trainfast.EpochReport()
    with torch.inference_mode():
        report.step(far(1.0), 1)
    report.step(far(2.0), 1)
    assert report.end_epoch().loss == 1.5


def test_remaining_time_begins_with_the_first_epoch(clock):
    report = trainfast.EpochReport(3, remaining=True)
    clock.now += 1000  # a model is loaded
    report.start_epoch()
    report.step(1.0, 1)
    clock.now += 10
    assert report.end_epoch().remaining == 20


@pytest.mark.filterwarnings("error")
def test_loss_that_requires_grad_is_taken_without_a_warning(capsys):
    report = trainfast.EpochReport()
    report.step(torch.tensor(0.5, requires_grad=True), 2)
    assert report.end_epoch().loss == 0.5


def test_steps_of_the_model_flops_are_counted():
    model = nn.Linear(32, 16)

    def step():
        model(torch.ones(4, 32, requires_grad=True)).sum().backward()

    report = trainfast.EpochReport(roof=1.0)
    assert report.count_flops(step, 4) == 3 * 2 * 32 * 16 == report.flops_per_sample
    report.step(1.0, 4)
    assert report.end_epoch().mfu > 0
    with pytest.raises(RuntimeError, match="pass `flops_per_sample` instead"):
        report.count_flops(lambda: torch.ones(2) + 1, 4)


def _rank(rank, folder):
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", store, rank=rank, world_size=2)
    with open(f"{folder}/{rank}", "w") as out, contextlib.redirect_stdout(out):
        _report(rank)
    distributed.destroy_process_group()


def _report(rank):
    own = 1 + rank, 1 + rank, rank / (1 + rank)
    for all_ranks in (False, True):
        report = trainfast.EpochReport(
            3, all_ranks=all_ranks, flops_per_sample=1e12, roof=1.0
        )
        report.step(1.0 + rank, 1 + rank, tokens=(1, rank))
        epoch = report.end_epoch()
        loss, samples, padding = (5 / 3, 3, 1 / 3) if all_ranks else own
        assert (epoch.loss, epoch.samples) == (pytest.approx(loss), samples)
        assert epoch.padding == pytest.approx(padding)
        devices = 2 if all_ranks else 1
        assert epoch.mfu == pytest.approx(epoch.throughput / devices)


@pytest.mark.slow
def test_rank_0_prints_and_ranks_are_added_up_where_asked(tmp_path):
    multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    first = (tmp_path / "0").read_text().splitlines()
    assert [line for line in first if "Epoch [" in line] == [
        "Epoch [1/3] Average Train Loss: 1.0000",
        "Epoch [1/3] Average Train Loss: 1.6667",
    ]
    assert (tmp_path / "1").read_text() == ""
