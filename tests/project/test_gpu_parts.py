""".ci/gpu: each part's steps on the SIMT runner, beside fakes of NVIDIA's tools."""

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.cublas_stub import shared_stub

ROOT = Path(__file__).parents[2]
SMI = """#!/bin/sh
echo 'name, compute_cap, driver_version, clocks.sm'
echo 'A card, 9.0, 580.0, 1980'
"""
# Runs what stands behind its own options.
TOOL = """#!/bin/sh
echo "$0" "$@" >>"$USED"
while [ "$1" != "$INNER" ]; do shift; done
exec "$@"
"""
BENCHES = {"attention": ["attention"], "rest": ["adamw", "amp", "gemm"]}


@pytest.fixture
def gpu():
    spec = importlib.util.spec_from_file_location("gpu", ROOT / ".ci" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = module  # where dataclass looks for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu"]


@pytest.fixture
def run(tmp_path):
    """Runs a part; returns the process's results and what is in the tar."""
    tools = {"nvidia-smi": SMI, "compute-sanitizer": TOOL, "ncu": TOOL}
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    more = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "INNER": sys.executable,
        "USED": str(tmp_path / "used"),
        "OUT": str(tmp_path / "out"),
    }

    def run(part, **others):
        done = subprocess.run(
            [ROOT / ".ci" / "gpu", part, "--dry"],
            env={**os.environ, **more, **others},
            capture_output=True,
            text=True,
        )
        with tarfile.open(tmp_path / "out" / f"gpu-{part}.tar") as tar:
            # Python has the filter from 3.11.4 on.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(tmp_path)
        return done, tmp_path / f"gpu-{part}"

    return run


@pytest.mark.slow
@pytest.mark.parametrize("part", ["correctness", "sanitize", "attention", "rest"])
def test_every_step_runs(run, gpu, tmp_path, part):
    if "TRAINFAST_SIMT_LIBRARY" not in os.environ:
        pytest.skip("no SIMT library")
    done, folder = run(part, TRAINFAST_CUBLAS=str(shared_stub()))
    assert done.returncode == 0, done.stdout + done.stderr
    about = json.loads((folder / "about.json").read_text())
    planned = gpu.Plan(folder, False).parts()[part]()  # what runs on a GPU
    assert [step["step"] for step in about["steps"]] == [step.name for step in planned]
    assert all(step["status"] == 0 for step in about["steps"])
    assert "9.0, 580.0, 1980" in about["gpu"] and about["steps"][0]["gpu"]
    for name in BENCHES.get(part, ()):
        report = json.loads((folder / f"{name}.json").read_text())
        for case in report["cases"]:  # ours was left out of none
            assert "ours" in [line["role"] for line in case["lines"]], case["name"]
    if part in ("sanitize", "rest"):
        used = (tmp_path / "used").read_text().splitlines()
        assert len(used) == (4 if part == "sanitize" else 1)


def test_failed_step_leaves_a_tar_with_its_output(run):
    done, folder = run("sanitize", TRAINFAST_SIMT_LIBRARY="/nowhere.so")
    assert (done.returncode, done.stderr) == (1, "failed: build\n")
    assert "/nowhere.so" in (folder / "build.log").read_text()
    (step,) = json.loads((folder / "about.json").read_text())["steps"]  # and no other
    assert step["status"] == 1


def test_steps_are_ended_in_time(gpu, tmp_path):
    forever = gpu.Step("forever", 60, ["sh", "-c", "echo begun; sleep 60 & sleep 60"])
    about = gpu.run_step(forever, tmp_path, 1.5)
    assert about["status"] == "stopped after 2 s" and about["seconds"] < 30
    assert (tmp_path / "forever.log").read_text() == "begun\n"
    late = gpu.run_step(forever, tmp_path, 0.5)
    assert late["status"] == "not started, the time is up"


@pytest.mark.parametrize("part", ["correctness", "sanitize", "attention", "rest"])
def test_limits_leave_time_for_every_step(gpu, tmp_path, part):
    steps = gpu.Plan(tmp_path, False).parts()[part]()
    assert steps[0].name == "build"
    for step in steps:
        assert not {"--dry", "--smoke", "--collect-only", "simt"} & set(step.command)
        assert step.seconds <= gpu.LIMIT


def test_ended_part_leaves_its_tar(gpu, monkeypatch, tmp_path):
    """Its time limit sends SIGTERM."""
    monkeypatch.setattr(sys, "argv", [".ci/gpu", "sanitize", "--dry"])
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu, "said", lambda *command: "")

    def end(*_):
        os.kill(os.getpid(), gpu.signal.SIGTERM)

    monkeypatch.setattr(gpu, "run_step", end)
    before = gpu.signal.getsignal(gpu.signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="terminated"):
            gpu.main()
    finally:
        gpu.signal.signal(gpu.signal.SIGTERM, before)
    assert (tmp_path / "gpu-sanitize.tar").exists()
