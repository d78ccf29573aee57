"""The report, and the command line around it."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

import trainfast
from tests.diagnosis.machines import HEALTHY, KAGGLE
from trainfast import cli
from trainfast.diagnosis import facts
from trainfast.diagnosis.rules import RULES

SLOW = {"training": {"precision": "bf16", "batch_size": 16}, "num_workers": 8}
CONFIG = """
training:
  precision: bf16
  batch_size: 16
num_workers: 8
"""


@pytest.fixture
def machine(monkeypatch):
    """Puts facts in place of this machine's, for the command line."""
    return lambda facts_: monkeypatch.setattr(facts, "gather", lambda folder: facts_)


def report(machine=KAGGLE, config=SLOW, **options):
    return trainfast.diagnose.check(config, machine=machine, **options)


def test_report_names_findings_with_evidence_cure_and_source():
    text = str(report())
    assert [finding.id for finding in report().findings] == [
        "bfloat16-emulated",
        "workers-exceed-cores",
    ]
    assert "bfloat16-emulated: training.precision: bf16, and Tesla T4" in text
    assert "  cure: use float16 with trainfast.GradScaler;" in text
    assert "  source: guide rows 1.7, 2.3; torch/cuda/__init__.py" in text
    assert max(map(len, text.splitlines())) <= 100


def test_healthy_machine_says_how_many_rules_were_tried():
    text = str(report(HEALTHY, None))
    assert text.startswith(f"Findings: none of {len(RULES)} rules applies\n")


def grades(machine):
    profiles = report(machine, None).to_dict()["profiles"]
    return {row["resource"]: row["verdict"] for row in profiles}


def test_machine_is_graded_against_the_profiles():
    assert grades(HEALTHY) == {
        "GPU memory": "recommended",
        "RAM": "recommended",
        "free disk": "recommended",
        "cores": "recommended",
    }
    small = replace(KAGGLE, gpus=(), quota=2.0, disk=None, memory=20 << 10)
    assert grades(small) == {
        "GPU memory": "no GPU",
        "RAM": "minimum",
        "free disk": "not known",
        "cores": "below minimum",
    }


def works(machine):
    return {r["what"]: r["works"] for r in report(machine, None).to_dict()["works"]}


def test_what_works_follows_the_compute_capability():
    kaggle, healthy = works(KAGGLE), works(HEALTHY)
    assert set(healthy.values()) == {True}
    lost = {what for what, can in kaggle.items() if not can}
    assert lost == {"torch's flash attention", "TF32", "bfloat16"}
    assert works(replace(KAGGLE, gpus=())) == {}


def test_what_works_names_the_backends():
    cuda = {"name": "cuda", "usable": False, "in_use": False, "reason": "no driver"}
    scalar = {"name": "scalar", "usable": True, "in_use": True, "reason": None}
    simt = {"name": "simt", "usable": False, "in_use": False, "reason": "not built"}
    found = works(replace(KAGGLE, gpus=(), backends=(cuda, scalar, simt)))
    assert list(found.items()) == [
        ("trainfast's cuda kernels", False),
        ("trainfast's scalar kernels", True),
    ]


def test_report_is_json_html_and_markdown():
    found = report(checklist=True)
    assert json.loads(found.to_json()) == json.loads(json.dumps(found.to_dict()))
    assert found._repr_html_().count("<table") == len(found.tables()) == 5
    lines = found.to_markdown().splitlines()
    assert "| finding | evidence | cure | guide row |" in lines
    assert any(line.startswith("| bfloat16-emulated | training.prec") for line in lines)


def test_markdown_keeps_its_columns():
    variables = {"OMP_NUM_THREADS": "a|b\nc"}
    text = report(replace(HEALTHY, variables=variables), None).to_markdown()
    assert "| OMP_NUM_THREADS | a\\|b c |" in text.splitlines()


# ---- Checklist -----------------------------------------------------------------------


def steps(machine=KAGGLE, config=None):
    found = report(machine, config, checklist=True).checklist
    return {(step.when, step.text.removeprefix("1. ")): step for step in found}


def test_checklist_says_what_is_done_and_which_rule_finds_the_rest():
    found = steps(config=SLOW | {"pin_memory": True, "cache_dir": "graphs"})
    before = {text: s.state for (when, text), s in found.items() if "before" in when}
    assert before["mixed precision"] == "bfloat16-emulated"
    assert before["pinned memory"] == before["data are cached"] == "done"
    assert before["the number of workers is measured"] == "workers-exceed-cores"
    assert before["the batch size is measured"] == ""


@pytest.mark.parametrize(
    ("config", "how"),
    [
        ({}, "half the batch, twice the accumulation steps"),
        ({"batch_size": 16, "accumulate_grad_batches": 12}, "16 x 12 becomes 8 x 24"),
        ({"batch_size": 7}, "7 x 1 becomes 3 x 3"),
        ({"batch_size": 1}, "half the batch, twice the accumulation steps"),
    ],
)
def test_less_memory_keeps_the_effective_batch(config, how):
    key = ("CUDA is out of memory", "smaller batches, more accumulation")
    assert steps(config=config)[key].how == how


def test_rules_of_the_checklist_exist():
    from trainfast.diagnosis.checklist import STEPS

    names = {rule.id for rule in RULES}
    assert {name for step in STEPS for name in step.rules} <= names


# ---- Command line --------------------------------------------------------------------


def test_status_is_0_without_a_finding_and_1_with_one(machine, capsys):
    machine(HEALTHY)
    assert cli.main(["diagnose"]) == 0
    assert "none of" in capsys.readouterr().out
    machine(replace(HEALTHY, shm=64))
    assert cli.main(["diagnose", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [finding["id"] for finding in found["findings"]] == ["shm-small"]
    assert found["machine"]["gpus"][0]["capability"] == [8, 9]
    assert "checklist" not in found


def test_options_of_the_command_line(machine, capsys, tmp_path):
    machine(HEALTHY)
    script = tmp_path / "train.py"
    script.write_text("from torch.cuda.amp import GradScaler\n")
    words = ["--checklist", "--markdown", "--source", str(script)]
    assert cli.main(["diagnose", *words]) == 1
    out = capsys.readouterr().out
    assert f"{script}:1: torch.cuda.amp.GradScaler is now" in out
    assert "**Checklist**" in out


@pytest.mark.parametrize(
    "words",
    [
        ["--json", "--markdown"],
        ["train.py"],
        ["--probe"],
        ["--deep"],
        ["--checklist", "--probe", "train.py"],
        ["--config", "a.yaml", "train.py"],
    ],
)
def test_wrong_command_lines_say_what_to_pass(words, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["diagnose", *words])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: ") and " error: pass --" in error


def test_configuration_is_read_from_yaml(machine, capsys, tmp_path):
    pytest.importorskip("yaml")
    machine(KAGGLE)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    assert cli.main(["diagnose", "--config", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["evidence"] for finding in found] == [
        "training.precision: bf16, and Tesla T4 (capability 7.5) emulates bfloat16",
        "num_workers: 8 on 4 usable cores",
    ]
    assert trainfast.diagnose.check(path, machine=KAGGLE).findings == report().findings


@pytest.mark.parametrize("content", [None, "a: [", "- 1", "a\0"])
def test_configuration_that_cannot_be_read_is_a_problem(
    machine, capsys, tmp_path, content
):
    pytest.importorskip("yaml")
    machine(HEALTHY)
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    assert cli.main(["diagnose", "--config", str(path)]) == 1
    out, error = capsys.readouterr()
    assert out == "" and len(error.splitlines()) == 1
    assert error.startswith("trainfast diagnose: ") and "config.yaml" in error


def test_configuration_without_pyyaml_names_the_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    assert cli.main(["diagnose", "--config", str(path)]) == 1
    assert "pip install 'trainfast[tools]'" in capsys.readouterr().err


def test_configuration_that_holds_itself_is_read(tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    path.write_text("a: &x\n  num_workers: 32\n  b: *x\n  c: *x\n")
    found = trainfast.diagnose.check(path, machine=HEALTHY).findings
    assert [finding.id for finding in found] == ["workers-exceed-cores"]


@pytest.mark.parametrize("content", [None, "def (", "\0"])
def test_source_that_cannot_be_read_is_a_problem(machine, capsys, tmp_path, content):
    machine(HEALTHY)
    path = tmp_path / "train.py"
    if content is not None:
        path.write_text(content)
    assert cli.main(["diagnose", "--source", str(path)]) == 1
    out, error = capsys.readouterr()
    assert out == "" and len(error.splitlines()) == 1
    assert error.startswith("trainfast diagnose: ")


def test_diagnosis_loads_no_torch():
    code = "import sys; from trainfast.cli import main; main(['diagnose', '--json'])"
    code += "; print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "False\n"
    assert json.loads(done.stdout)["machine"]["cores"] >= 1
