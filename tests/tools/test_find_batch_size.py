"""`trainfast find-batch-size`."""

import json

import pytest

pytest.importorskip("torch")
from trainfast.cli import main

MODULE = """
import torch
from torch import nn

def setup():
    model = nn.Linear(64, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, lambda n: (torch.randn(n, 64), torch.randn(n, 8)), optimizer

def fails():
    raise OSError("no data")

loss = nn.functional.mse_loss
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "batch_setup.py").write_text(MODULE)
    (tmp_path / "config.yaml").write_text("batch_size: 1024\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_report_and_json(capsys):
    words = ["find-batch-size", "batch_setup:setup", "--loss", "batch_setup:loss"]
    limits = ["--max-batch-size", "256", "--config", "config.yaml"]
    assert main([*words, *limits]) == 0
    text = capsys.readouterr().out
    assert "Take batch_size=" in text and "from batch 1024: learning rate" in text
    assert main([*words, *limits, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch_size"] == found["probes"][-1]["size"] == 256


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "return model, make_batch, optimizer"),
        (["batch_setup:missing"], 2, "must be importable"),
        (["batch_setup:fails"], 1, "OSError: no data"),
        (["batch_setup:setup", "--multiple", "0"], 2, "positive integer"),
    ],
)
def test_what_is_wrong_is_said(capsys, words, status, message):
    try:
        found = main(["find-batch-size", *words])
    except SystemExit as end:
        found = end.code
    assert found == status and message in capsys.readouterr().err
