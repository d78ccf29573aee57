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
    row = planted.measure("lightning_validation", 1)
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


def rounds(found, mending):
    """As many as there are findings, each with its first one and the seconds."""
    return {"rounds": [{"findings": [f], "mending": [mending]} for f in found]}


def test_score_compares_with_mending_or_with_the_probes_own_cure():
    one = {"slow": 4.0, "mended": 2.0, "advised": 3.2}
    scripts = {
        "bert_padding": rounds([finding("padding", 1, 2.2, True)], one),
        "accumulation_micro_batch": rounds([finding("batch", 1, 1.5, True)], one),
        "yaml_anomaly": rounds([finding("anomaly", 1, 2.0, True)], one),
        "image_folder": rounds([finding("data", 1, g) for g in (6, 1.9)], one),
        "simclr_augment": rounds([finding("data", 1, 1.0)], one),  # not the planted one
    }
    (line,) = diagnose._errors(scripts)
    assert "3, median error 10%, 90th percentile 20%" in line
    assert line.endswith("Bounds that hold: 1 of 2.")
    text = diagnose.table(scripts)
    assert text.startswith(
        "Fault named first: 5 of 6 runs. The same cause and line: 6 of 6.\n" + line
    )
    row = "| image_folder | data | 2.00 (2.00-2.00) | data 2 of 2 | 3.95 (1.90-6.00) |"
    assert row in text


def test_prediction_is_compared_with_the_median_over_all_rounds():
    script = rounds([finding("data", 1, 2.0, True)] * 3, {"slow": 6.0, "mended": 3.0})
    script["rounds"][0]["mending"] = [{"slow": 60.0, "mended": 3.0}]
    bound = rounds([finding("save", 1, 2.0)], {"slow": 6.0, "mended": 3.0})
    (line,) = diagnose._errors({"best_checkpoint": bound, "image_folder": script})
    assert "3, median error 0%, 90th percentile 0%" in line


def test_rounds_are_run_until_there_are_enough(tmp_path, monkeypatch):
    path = tmp_path / "diagnosed.json"
    monkeypatch.setattr(diagnose, "PATH", path)
    monkeypatch.setattr(planted, "run", lambda name: (float(len(name)), 9))
    found = iter([[finding("data", 3, 2.0)], [], [finding("data", 4, 1.5)], [], []])
    monkeypatch.setattr(diagnose, "examine", lambda script: {"findings": next(found)})
    results = {"scripts": {}}
    diagnose.examine_all(results, ["next_iter", "clean/conv_vae"], 2)
    diagnose.examine_all(results, ["next_iter"], 3)  # only what is missing
    assert next(found, None) is None
    kept = json.loads(path.read_text())["scripts"]
    script, clean = kept["next_iter"]["rounds"], kept["clean/conv_vae"]["rounds"]
    assert [diagnose.first_of(entry) for entry in script] == ["data", "data", "none"]
    assert diagnose.agreeing(script) == 1
    assert script[0]["mending"] == [{"slow": 9.0, "mended": 16.0}] * diagnose.PAIRS
    assert "mending" not in clean[0]
    assert "With a finding: 0 of 2 runs." in diagnose.verdicts(
        {"clean": kept["clean/conv_vae"]}
    )
    results["scripts"]["next_iter"]["digest"] = "of another probe"
    monkeypatch.setattr(diagnose, "examine", lambda script: {"findings": []})
    diagnose.examine_all(results, ["next_iter"], 1)
    assert len(results["scripts"]["next_iter"]["rounds"]) == 1


def test_scripts_that_are_named_are_examined_anew_and_no_others(tmp_path, monkeypatch):
    path = tmp_path / "diagnosed.json"
    twin = "yaml_anomaly_mended"
    scripts = {
        name: {"digest": diagnose.digest(name), "rounds": [{"findings": [], "old": 1}]}
        for name in ("yaml_anomaly", twin)
    }
    path.write_text(json.dumps({"scripts": scripts}))
    monkeypatch.setattr(diagnose, "PATH", path)
    monkeypatch.setattr(diagnose, "examine", lambda script: {"findings": []})
    arguments = ["benchmarks.diagnose", "--mended", "yaml_anomaly"]
    monkeypatch.setattr("sys.argv", arguments)
    diagnose.main()
    kept = json.loads(path.read_text())["scripts"]
    assert kept["yaml_anomaly"] == scripts["yaml_anomaly"]
    assert kept[twin]["rounds"] == [{"findings": []}]
