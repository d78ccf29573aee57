"""`Profiler`: a trace of five steps in every interval, and no ended training."""

import gzip
import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch

import trainfast


def train(profiler, steps):
    for _ in range(steps):
        torch.ones(64, 64) @ torch.ones(64, 64)
        profiler.step()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_five_steps_of_each_interval_are_written(tmp_path):
    profiler = trainfast.Profiler(interval=20, dir=tmp_path / "a" / "b", keep=2)
    train(profiler, 70)
    folder = tmp_path / "a" / "b"
    assert names(folder) == [
        *("step-40.json.gz", "step-40.txt", "step-60.json.gz", "step-60.txt")
    ]
    with gzip.open(folder / "step-60.json.gz") as file:
        events = [event["name"] for event in json.load(file)["traceEvents"]]
    assert events.count("aten::mm") == 5
    assert "aten::mm" in (folder / "step-60.txt").read_text()
    assert [path.name for path in profiler.written] == [
        *("step-40.json.gz", "step-60.json.gz")
    ]
    assert repr(profiler).startswith("Profiler(interval=20, ")


def test_zero_is_off(tmp_path):
    profiler = trainfast.Profiler(interval=0, dir=tmp_path)
    train(profiler, 50)
    assert names(tmp_path) == [] and profiler.steps == 0


def test_end_within_a_profile_writes_what_there_is(tmp_path):
    with trainfast.Profiler(interval=10, dir=tmp_path) as profiler:
        train(profiler, 13)
    assert names(tmp_path) == ["step-10.json.gz", "step-10.txt"]


@pytest.mark.slow
def test_process_that_ends_within_a_profile_ends_well(tmp_path):
    """torch ends with a segmentation fault where a profile is under way."""
    code = f"""if True:
        import torch, trainfast
        profiler = trainfast.Profiler(10, {str(tmp_path)!r})
        for _ in range(13):
            torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step()
    """
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
    assert names(tmp_path) == ["step-10.json.gz", "step-10.txt"]


def test_folder_that_cannot_be_written_is_a_warning():
    profiler = trainfast.Profiler(interval=10, dir="/proc/profiles")
    with pytest.warns(RuntimeWarning, match="profile of step 10 cannot be written"):
        train(profiler, 18)
    assert profiler.written == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interval": 6}, "`interval` must be 0 or above 6, got 6"),
        ({"interval": -1}, "`interval` must be 0 or above 6, got -1"),
        ({"keep": 0}, "`keep` must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        trainfast.Profiler(**arguments)
