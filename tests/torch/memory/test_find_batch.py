"""The batch size that fits: found by running it, and nothing is changed by that."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import trainfast  # noqa: E402
from trainfast.memory.batch_size import BatchSizeReport, Probe  # noqa: E402
from trainfast.torch.memory import find_batch  # noqa: E402

MIB = 1 << 20


def model_of(width=8):
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5))
    return model, torch.optim.AdamW(model.parameters())


def make_batch(n):
    return torch.randn(n, 4), torch.randn(n, 8)


@pytest.fixture
def samples(monkeypatch):
    """Peaks by a formula instead of this process's memory; returns the sizes run."""
    ran = []
    peaks = {"of": lambda size: (10 + size) * MIB, "fails": lambda size: False}

    def run(self, size):
        ran.append(size)
        if peaks["fails"](size):
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.meter.size = size
        return 100.0 * size / (size + 16)

    class Meter(find_batch.Meter):
        size = 0

        @property
        def peak(self):
            return peaks["of"](self.size)

        @peak.setter
        def peak(self, value): ...

        def _free(self):
            return 1 << 40

    def estimated(self, size):
        return int(1.2 * peaks["of"](size))  # an estimate that is too high

    monkeypatch.setattr(find_batch._Runner, "run", run)
    monkeypatch.setattr(find_batch._Runner, "estimated", estimated)
    monkeypatch.setattr(find_batch, "Meter", Meter)
    return ran, peaks


def found(limit, **options):
    model, optimizer = model_of()
    options = {"target": 1.0, "loss_fn": functional.mse_loss, **options}
    return trainfast.find_batch_size(
        model, make_batch, optimizer, limit=limit * MIB, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("limit", [27, 100, 1000, 30000])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("fixed", [0, 64, 500])
def test_the_largest_size_that_fits_is_found_with_five_probes(
    samples, limit, multiple, fixed
):
    ran, peaks = samples
    # The optimizer's step decides for small batches, the activations for large ones.
    peaks["of"] = lambda size: max(10 + size, min(fixed, limit // 2)) * MIB
    report = found(limit, multiple=multiple)
    best = limit - 10
    assert report.batch_size in ran and len(ran) <= 5
    assert best - multiple - best // 33 <= report.batch_size <= best
    assert all(size % multiple == 0 for size in ran)


def test_sizes_that_run_out_of_memory_are_bounds(samples):
    ran, peaks = samples
    peaks["fails"] = lambda size: size > 300
    report = found(10000)
    assert 150 < report.batch_size <= 300 and len(ran) <= 5
    assert report.batch_size in ran
    assert any(probe.peak is None for probe in report.probes)
    assert "out of memory" in str(report)


@pytest.mark.slow
def test_less_than_a_multiple_and_nothing_at_all(samples):
    assert found(13).batch_size in (1, 2, 3)
    assert "not a multiple" in found(13).notes[0]
    with pytest.raises(ValueError, match="a single sample does not fit into 5 MiB: it"):
        found(5)


@pytest.mark.slow
def test_throughput_gives_the_knee(samples):
    ran, _ = samples
    report = found(2000, objective="throughput", dataset_size=10000)
    rates = {probe.size: probe.rate for probe in report.probes}
    assert rates[report.batch_size] >= 0.97 * max(rates.values())
    assert report.batch_size < 1000 and {64, 96, 128} <= set(ran)
    assert "updates an epoch" in str(report)


def test_max_batch_size_is_kept(samples):
    assert found(10000, max_batch_size=100).batch_size == 96


def state_of(model, optimizer):
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    for state in optimizer.state.values():
        tensors += state.values()
    return [None if t is None else t.clone() for t in tensors], torch.get_rng_state()


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back_bit_for_bit(trained, fails):
    torch.manual_seed(0)
    model, optimizer = model_of()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if trained:
        model(torch.randn(9, 4)).sum().backward()
        optimizer.step()
    model.eval()
    before, rng = state_of(model, optimizer)
    objects = [id(p) for p in model.parameters()]

    def step(model, batch):
        scheduler.step()
        if fails and len(batch[0]) > 8:
            raise KeyError("of the user")
        return functional.mse_loss(model(batch[0]), batch[1])

    def run():
        trainfast.find_batch_size(
            *(model, make_batch, optimizer),
            step=step,
            schedulers=[scheduler],
            max_batch_size=32,
        )

    if fails:
        with pytest.raises(KeyError, match="of the user"):
            run()
    else:
        run()
    after, rng_after = state_of(model, optimizer)
    assert len(after) == len(before)
    for a, b in zip(after, before, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert torch.equal(rng, rng_after) and not model.training
    assert [id(p) for p in model.parameters()] == objects
    assert optimizer.param_groups[0]["lr"] == 1e-3


# A model whose activations are 4 MiB a sample, in a process of its own.
HEAVY = """
import json, sys, torch, trainfast
from torch import nn

model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.Tanh()) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
make_batch = lambda n: torch.randn(n, 1 << 17, 1)
"""
FIND = """
report = trainfast.find_batch_size(
    model, make_batch, optimizer, limit=int(sys.argv[1]), target=1.0, multiple=2
)
print(json.dumps(report.to_dict()))
"""
ONE = """
for _ in range(3):
    model(make_batch(int(sys.argv[1]))).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
text = open("/proc/self/status").read()
print(int(text.partition("VmHWM:")[2].split()[0]) << 10)
"""


def child(code, argument):
    words = [sys.executable, "-c", textwrap.dedent(HEAVY + code), str(argument)]
    # Tensors in mappings of their own: holes in the heap differ from size to size.
    mapped = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=mapped)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_real_memory_beside_an_exhaustive_search_in_fresh_processes():
    peaks = {n: child(ONE, n) for n in (20, 22, 26)}
    slope = (peaks[26] - peaks[20]) / 6
    assert slope > 2 * MIB  # a sample is more than what a process varies by
    limit = int(peaks[22] + slope)  # 22 fits with one sample to spare, 24 does not
    report = child(FIND, limit)
    assert report["batch_size"] in (20, 22, 24)
    assert child(ONE, report["batch_size"]) <= limit
    assert len(report["probes"]) <= 5


RANKS = """
import os, sys, torch
from torch import distributed, nn
import trainfast
from trainfast.torch.memory import find_batch

rank = int(sys.argv[1])
distributed.init_process_group(
    "gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2
)
def run(self, size):
    if rank == 1 and size > 40 and sys.argv[3] == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if rank == 1 and size > 8 and sys.argv[3] == "error":
        raise KeyError("mine")
    sizes.append(size)
    return 1.0
find_batch._Runner.run = run
sizes = [1]
if sys.argv[3] == "limits":  # a MiB a sample; rank 1 has less memory
    find_batch.Meter.peak = property(lambda self: sizes[-1] << 20, lambda self, n: None)
    find_batch.Meter.budget = lambda self, target: (300, 200)[rank] << 20
model = nn.Linear(2, 2)
try:
    print(trainfast.find_batch_size(
        model, lambda n: torch.randn(n, 2), torch.optim.SGD(model.parameters()),
        max_batch_size=512,
    ).batch_size)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("memory", ("32", "32", "40", "40")),
        ("limits", ("192", "200")),
        ("error", ("RuntimeError the step failed on another rank", "KeyError 'mine'")),
    ],
)
def test_ranks_agree(tmp_path, how, expected):
    words = [sys.executable, "-c", RANKS]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path / "init"), how],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    # gloo may write to stdout as well.
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    texts = [output.strip().splitlines()[-1] for output in outputs]
    if how != "error":
        assert texts[0] == texts[1] and texts[0] in expected
    else:
        assert texts[0].startswith(expected[0]) and texts[1] == expected[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multiple": 0}, "`multiple` must be a positive integer"),
        ({"target": 1.5}, "`target` must be above 0"),
        ({"objective": "speed"}, '"memory" or "throughput"'),
        ({"mode": "eval"}, '"train" or "forward"'),
        ({"max_batch_size": -1}, "`max_batch_size` must be"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        found(100, **options)


def test_wrong_batches_and_a_missing_optimizer_are_named():
    model, optimizer = model_of()
    with pytest.raises(TypeError, match="`make_batch` returned None"):
        trainfast.find_batch_size(model, lambda n: None, optimizer)
    with pytest.raises(TypeError, match="`optimizer` is needed"):
        trainfast.find_batch_size(model, make_batch)


@pytest.mark.slow
def test_the_guides_function():
    model = nn.Linear(4, 4)
    before = model.weight.clone()
    assert trainfast.find_max_batch_size(model, (4,), mode="forward") > 100
    assert torch.equal(model.weight, before)


def test_report_and_learning_rates(tmp_path):
    probes = [Probe(16, 50 * MIB, 90.0), Probe(32, 100 * MIB, 100.0), Probe(64, None)]
    report = BatchSizeReport(24, probes, 128 * MIB, 0.9)
    assert report.accumulation(192) == (24, 8)
    assert report.accumulation(100) == (20, 5)
    assert report.accumulation(97) == (24, 5)  # a prime: larger instead
    assert report.accumulation(7) == (7, 1)
    with pytest.raises(ValueError, match="`effective` must be positive"):
        report.accumulation(0)
    assert report._repr_html_().count("<table") == 1 and "39%" in str(report)
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_learning_rates():
    assert trainfast.scale_lr(1e-3, 8, 32) == pytest.approx(2e-3)
    assert trainfast.scale_lr(1e-3, 8, 32, "linear") == pytest.approx(4e-3)
    assert trainfast.scale_lr(1e-3, 8, 32, None) == 1e-3
    with pytest.raises(ValueError, match="`rule` must be"):
        trainfast.scale_lr(1e-3, 8, 32, "cubic")
    with pytest.raises(ValueError, match="must be positive"):
        trainfast.scale_lr(1e-3, 0, 32)


def test_a_size_runs_eight_steps_on_the_cpu_where_its_peak_rises_for_long():
    model, optimizer = model_of()
    sizes = []

    def counted(n):
        sizes.append(n)
        return make_batch(n)

    report = trainfast.find_batch_size(
        model,
        counted,
        optimizer,
        loss_fn=functional.mse_loss,
        max_batch_size=16,
        validation=make_batch,
    )
    for probe in report.probes:
        assert sizes.count(probe.size) in (8, 9)  # one of a first size is estimated
