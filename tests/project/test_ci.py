""".ci/run, with a Makefile and a compiler of the test's own; .ci/compat.py's page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MAKEFILE = """
%:
	@echo make $@
lint:
	@cat compiles
	@false
"""

# Lives as long as what it has started, which is some processes deep.
PYTHON = """#!/bin/sh
echo begun >compiles
sh -c 'sleep 100; true'
true
"""


@pytest.fixture
def checkout(tmp_path):
    files = {
        ".ci/run": (ROOT / ".ci" / "run").read_text(encoding="utf-8"),
        ".venv/bin/python": PYTHON,
        "Makefile": MAKEFILE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    subprocess.run(["mkfifo", "compiles"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize("how", [["bash"], ["setsid", "--wait", "nohup", "bash"]])
def test_failed_step_ends_what_goes_on_beside_it(checkout, how):
    # It ends when the last process that could still write to its output has ended.
    done = subprocess.run(
        [*how, ".ci/run"], cwd=checkout, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and "begun" in done.stdout
    assert "took" in done.stdout and "make stubs" not in done.stdout


def test_what_the_quick_tests_skip_runs_among_all_others(tmp_path):
    pytest.importorskip("xdist")
    listed = tmp_path / "quick.json"
    needs_simt = (
        "tests/core/attention/test_device.py::test_right_lengths_pass_the_check"
    )
    paths = [needs_simt, "tests/test_pairwise.py"]
    env = {**os.environ, "TRAINFAST_QUICK_TESTS": str(listed), "PYTEST_ADDOPTS": ""}
    env.pop("TRAINFAST_SIMT_LIBRARY", None)  # which the quick tests do without

    def pytest_(*options):
        command = [sys.executable, "-m", "pytest", "-q", *options, *paths]
        return subprocess.check_output(command, cwd=ROOT, env=env, text=True)

    pytest_("--quick", "-n", "2")
    passed = json.loads(listed.read_text())
    assert passed and all("test_pairwise" in name for name in passed)
    env |= {"TRAINFAST_SIMT_LIBRARY": "", "TRAINFAST_WIDE_LIBRARY": ""}  # not to build
    rest = pytest_("--collect-only")
    assert needs_simt in rest and not any(name in rest for name in passed)


def test_page_of_compatibility_is_what_its_results_make(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / ".ci")
    import compat

    committed = {path: path.read_text() for path in (compat.PAGE, compat.RESULTS)}
    results = json.loads(committed[compat.RESULTS])
    monkeypatch.setattr(compat, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(compat, "RESULTS", tmp_path / "results.json")
    compat.write(results)
    made = [compat.PAGE.read_text(), compat.RESULTS.read_text()]
    assert made == list(committed.values())
    assert all(not row["failed"] for row in results if "failed" in row)
