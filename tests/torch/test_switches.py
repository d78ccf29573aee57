"""torch's switches: what is set, and what is said with and without a GPU."""

import pytest

torch = pytest.importorskip("torch")
from trainfast.torch.switches import set_switches  # noqa: E402


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    # torch's own test helpers, which other tests import, forbid to set its flags.
    names = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(names, "flags_frozen", lambda: False)
    precision = torch.get_float32_matmul_precision()
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.parametrize(
    ("gpus", "tf32", "on", "notes"),
    [
        (1, True, ["Enabled TF32 for matrix products (high precision)"], []),
        (1, False, [], ["TF32 is off: a GPU here has none"]),
        (0, True, [], ["TF32 is off: no GPU"]),
    ],
)
def test_tf32_is_said_to_be_on_only_where_it_is(monkeypatch, gpus, tf32, on, notes):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert set_switches("high", None, tf32) == (on, notes)
    assert torch.get_float32_matmul_precision() == "high"


def test_benchmark_is_set_and_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    on, notes = set_switches(None, True, True)
    assert len(on) == 1 and not notes and torch.backends.cudnn.benchmark
    assert set_switches(None, False, True) == ([], [])
    assert not torch.backends.cudnn.benchmark


def test_nothing_asked_changes_nothing():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    assert set_switches(None, None, True) == ([], [])
    after = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    assert after == before
