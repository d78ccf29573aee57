"""benchmarks.probe_hooks, in a process of its own: it replaces torch's functions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_hooks_cost_some_of_a_step_and_less_than_the_step(tmp_path):
    output = tmp_path / "hooks.json"
    command = [sys.executable, "-m", "benchmarks.probe_hooks", "--pairs", "2"]
    text = subprocess.check_output(
        [*command, "--output", str(output)], cwd=ROOT, text=True
    )
    found = json.loads(output.read_text())
    for size in ("small", "medium"):
        row = found[size]
        assert row["pairs"] == 2 and size in text and row["step_ms"] > 0
        assert 0.3 < row["low"] <= row["ratio"] <= row["high"] < 3  # two pairs alone
