"""examples/distributed.py: with a rank killed and resumed, the loss ends the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.forks]  # half a minute for each kind

ROOT = Path(__file__).parents[2]
SMALL = ["--device", "cpu", "--preset", "tiny", "--steps", "6", "--save-every", "2"]
# Kills rank 1 in its fifth step: after the checkpoint of the fourth.
KILLER = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import distributed as example
step = example.Run.step

def step_or_end(run):
    if run.done == 4 and run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(run)

example.Run.step = step_or_end
example.main()
"""


def torchrun(script, kind, out, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), *SMALL, "--kind", kind]
    return subprocess.run(
        [*command, "--out", str(out), *arguments],
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def lines(run):
    assert run.returncode == 0, run.stdout + run.stderr
    return [line for line in run.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_killed_rank_is_resumed(tmp_path, kind):
    script = ROOT / "examples" / "distributed.py"
    whole = torchrun(script, kind, tmp_path / "whole")
    killer = tmp_path / "killer.py"
    killer.write_text(KILLER.format(examples=str(ROOT / "examples")))
    killed = torchrun(killer, kind, tmp_path / "halves")
    assert killed.returncode != 0 and "step     6" not in killed.stdout
    resumed = torchrun(script, kind, tmp_path / "halves", "--resume")
    assert "resumed from" in resumed.stdout and "step-000004" in resumed.stdout
    assert lines(whole)[-1] == lines(resumed)[-1]
    assert "fallbacks: none" in whole.stdout
