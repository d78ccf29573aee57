"""Scripts with planted faults: each has a mended twin and a measured gain."""

import difflib
import json

import pytest

from benchmarks import diagnose
from benchmarks.planted import __main__ as planted

MEASURED = json.loads(planted.MEASURED.read_text())["scripts"]


def lines(name):
    return (planted.HERE / f"{name}.py").read_text().splitlines()


def test_every_script_has_a_twin_and_a_fault():
    files = {path.stem for path in planted.HERE.glob("[a-z]*.py")}
    twins = {f"{name}_mended" for name in planted.FAULTS}
    assert len(planted.FAULTS) >= 20
    assert files == set(planted.FAULTS) | twins


@pytest.mark.parametrize("name", planted.FAULTS)
def test_twin_differs_in_the_fault_alone(name):
    changes = difflib.unified_diff(lines(name), lines(f"{name}_mended"), n=0)
    parts = [line for line in changes if line.startswith("@@")]
    assert 1 <= len(parts) <= 7


@pytest.mark.parametrize("name", planted.FAULTS)
def test_fault_was_measured_on_these_files_and_is_worth_finding(name):
    row = MEASURED[name]
    assert row["id"] == planted.FAULTS[name]
    assert row["sha256"] == planted.digest(name), "run python -m benchmarks.planted"
    assert row["low"] <= row["gain"] <= row["high"]
    assert row["gain"] >= planted.LEAST_GAIN


def test_scripts_that_train_differently_are_refused(monkeypatch):
    steps = {"yaml_anomaly": 3, "yaml_anomaly_mended": 4}
    monkeypatch.setattr(planted, "run", lambda name: (1.0, steps[name]))
    with pytest.raises(RuntimeError, match="must take the same steps, got"):
        planted.measure("yaml_anomaly", 1)


@pytest.mark.slow
def test_pair_is_measured(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads wait where tests share cores
    row = planted.measure("gradient_histograms", 1)
    assert row["steps"] > 100
    assert row["gain"] == pytest.approx(
        row["seconds"]["slow"] / row["seconds"]["mended"], abs=0.02
    )


def finding(kind, line, gain):
    return {"id": kind, "line": line, "gain": gain, "low": gain, "high": gain}


def test_repeats_count_the_runs_that_name_the_same_place(tmp_path, monkeypatch):
    path = tmp_path / "diagnosed.json"
    found = iter([[finding("data", 3, 2.0)], [], [finding("data", 3, 1.5)], [], []])
    monkeypatch.setattr(diagnose, "PATH", path)
    monkeypatch.setattr(diagnose, "examine", lambda script: {"findings": next(found)})
    results = {"scripts": {}}
    diagnose.repeat(results, ["next_iter", "clean/conv_vae"], 2)
    diagnose.repeat(results, ["next_iter"], 3)  # only what is missing
    assert next(found, None) is None
    kept = json.loads(path.read_text())["repeats"]
    verdicts = kept["next_iter"]["verdicts"]
    assert [verdict[:14] for verdict in verdicts] == ["data, line 3: "] * 2 + ["none"]
    assert kept["clean/conv_vae"]["verdicts"] == ["none", "none"]
    assert "Same verdict: 4 of 5 runs." in diagnose.same_text(kept)
    results["repeats"]["next_iter"]["digest"] = "of another probe"
    monkeypatch.setattr(diagnose, "examine", lambda script: {"findings": []})
    diagnose.repeat(results, ["next_iter"], 1)
    assert results["repeats"]["next_iter"]["verdicts"] == ["none"]
