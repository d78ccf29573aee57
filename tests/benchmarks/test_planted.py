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
    advised = {"accumulation_micro_batch_advised", "gin_transform_advised"}
    assert files == set(planted.FAULTS) | twins | advised


@pytest.mark.parametrize("name", planted.FAULTS)
def test_twin_differs_in_the_fault_alone(name):
    for twin in list(planted.scripts_of(name).values())[1:]:
        changes = difflib.unified_diff(lines(name), lines(twin), n=0)
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


def test_advised_script_is_measured_beside_the_twin(monkeypatch):
    name = "accumulation_micro_batch"
    seconds = {name: 6.0, f"{name}_mended": 2.0, f"{name}_advised": 4.0}
    ran = []
    monkeypatch.setattr(planted, "run", lambda x: (ran.append(x), (seconds[x], 9))[1])
    row = planted.measure(name, 2)
    assert ran == [*seconds, *reversed(seconds)]
    assert row["gain"] == 3.0 and row["advised"]["gain"] == 1.5


def finding(kind, line, gain, exact=False):
    gains = {"gain": gain, "low": gain, "high": gain}
    return {"id": kind, "line": line, "exact": exact, **gains}


def test_score_compares_with_mending_or_with_the_probes_own_cure():
    rows = {
        "bert_padding": {"gain": 2.0},
        "accumulation_micro_batch": {"gain": 9.0, "advised": {"gain": 1.25}},
        "yaml_anomaly": {"gain": 2.0},
        "image_folder": {"gain": 5.0},
        "gin_transform": {"gain": 3.0},
        "simclr_augment": {"gain": 3.0},
    }
    found = {
        "bert_padding": finding("padding", 1, 2.2, True),
        "accumulation_micro_batch": finding("batch", 1, 1.5, True),
        "yaml_anomaly": finding("anomaly", 1, 2.0, True),
        "image_folder": finding("data", 1, 6.0),
        "gin_transform": finding("data", 1, 2.5),
        "simclr_augment": finding("data", 1, 1.0),  # not the planted one
    }
    entries = {name: {"findings": [each]} for name, each in found.items()}
    (line,) = diagnose._errors(entries, rows)
    assert "3, median error 10%, 90th percentile 20%" in line
    assert line.endswith("Bounds that hold: 1 of 2.")


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
    version = diagnose.digest(planted.HERE / "yaml_anomaly.py")
    in_table = {"findings": [finding("anomaly", 9, 2.0)], "digest": version}
    results["scripts"]["yaml_anomaly"] = in_table  # counts as the first run
    diagnose.repeat(results, ["yaml_anomaly"], 2)
    first, second = results["repeats"]["yaml_anomaly"]["verdicts"]
    assert first.startswith("anomaly, line 9: ") and second == "none"
