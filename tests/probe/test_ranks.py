"""The probe of distributed training: ranks that switch at the same step."""

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.probe.test_gains import result
from trainfast import cli
from trainfast.probe import run
from trainfast.probe.diagnosis import RANK_SAFE, diagnose
from trainfast.probe.findings import idle_gpus, slow_rank
from trainfast.torch.probe.child import switches
from trainfast.torch.probe.result import _idle_gpus

needs_sandbox = pytest.mark.skipif(
    run.best_sandbox() is None, reason="no sandbox works on this machine"
)
SCRIPT = """\
import time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        time.sleep({slow} if rank == 1 else 0.0005)
        return torch.full((8,), float(i)), i % 2


torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
data = Rows()
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
step = 0
while step < {steps}:
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
        {statement}
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SECONDS", 2.0)

    def write(slow=0.0005, steps=100000, statement="pass"):
        path = tmp_path / "train.py"
        path.write_text(SCRIPT.format(slow=slow, steps=steps, statement=statement))
        return str(path)

    return write


@pytest.mark.slow
@needs_sandbox
def test_rank_that_the_others_wait_for_is_named(script, capsys):
    path = script(slow=0.004)
    assert cli.main(["diagnose", "--probe", "--json", "--ranks", "2", path]) == 1
    found = json.loads(capsys.readouterr().out)
    causes = {finding["id"]: finding for finding in found["findings"]}
    assert "rank 1 " in causes["slow-rank"]["fix"]
    assert causes["slow-rank"]["gain"] > 1.5 and not causes["slow-rank"]["exact"]
    assert causes["data"]["gain"] > 1.5


@pytest.mark.slow
@needs_sandbox
def test_ranks_agree_on_the_plan_in_200_steps(script):
    found = run.child(script(0.01, 192), ranks=2, switches=["data", "threads"])
    names = [name for _, name, _, _ in found["blocks"]]
    assert {"base", "data"} <= set(names)
    assert found["steps"] <= 200 and found["ranks"][1] > 2 * found["ranks"][0]


@pytest.mark.slow
@needs_sandbox
def test_script_that_ends_before_the_plan_begins_says_so(script):
    report = diagnose(script(0.01, 8), ranks=2)
    assert "rank 1" in report.findings[0].fix
    assert any("before anything could be compared" in note for note in report.notes)


@pytest.mark.slow
@needs_sandbox
def test_balanced_ranks_have_no_slow_one(script):
    report = diagnose(script(), ranks=2)
    if os.getloadavg()[0] > len(os.sched_getaffinity(0)):
        pytest.skip("other programs use this machine: a rank may wait for them")
    assert "slow-rank" not in {finding.id for finding in report.findings}


@pytest.mark.slow
@needs_sandbox
def test_error_of_one_rank_ends_all(script):
    wrong = "rank == 1 and step == 20 and 1 / 0"
    with pytest.raises(run.ProbeError, match=r"rank 1: (.|\n)*ZeroDivisionError"):
        run.child(script(statement=wrong), ranks=2, switches=list(RANK_SAFE))


@pytest.mark.slow
@needs_sandbox
def test_rank_that_dies_ends_all(script):
    wrong = "rank == 1 and step == 20 and __import__('os')._exit(3)"
    with pytest.raises(run.ProbeError, match="rank 1 ended without a word"):
        run.child(script(statement=wrong), ranks=2, switches=list(RANK_SAFE))


@pytest.mark.slow
@needs_sandbox
def test_no_process_is_left(script):
    path = script(steps=60)
    run.child(path, ranks=2, switches=["data"])
    for process in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            assert path.encode() not in process.read_bytes()


def test_every_safe_switch_exists():
    assert [switch.name for switch in switches(list(RANK_SAFE))]


def ranked(own, seed=0):
    return result({}, seed=seed, ranks=own, whole_seconds=0.01)


def test_slow_rank_is_found_from_its_time_before_the_backward_pass():
    (found,) = slow_rank([ranked([0.001, 0.006]), ranked([0.001, 0.005])], "train.py")
    assert found.id == "slow-rank" and "rank 1" in found.fix
    assert found.low == pytest.approx(10 / 6) and found.high == pytest.approx(2)
    assert slow_rank([ranked([0.001, 0.002])], "train.py") == []
    once_each = [ranked([0.001, 0.006]), ranked([0.006, 0.001])]
    assert slow_rank(once_each, "train.py") == []
    assert slow_rank([result({})], "train.py") == []


def test_idle_gpus_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    model = torch.nn.Linear(2, 2)
    assert _idle_gpus("cuda:0", model) == 1
    assert _idle_gpus("cpu", model) == 0
    assert _idle_gpus("cuda:0", torch.nn.DataParallel(model)) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _idle_gpus("cuda:0", model) == 0


def test_idle_gpu_is_a_bound():
    (found,) = idle_gpus([result({}, idle_gpus=1)], "train.py")
    assert (found.id, found.gain, found.exact) == ("idle-gpu", 2.0, False)
    assert "--nproc-per-node 2" in found.fix
    assert idle_gpus([result({})], "train.py") == []


@pytest.mark.parametrize("ranks", ["1", "0", "-2", "two"])
def test_wrong_number_of_ranks_is_a_usage_error(ranks, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["diagnose", "--probe", "--ranks", ranks, sys.executable])
    assert end.value.code == 2 and "--ranks" in capsys.readouterr().err
