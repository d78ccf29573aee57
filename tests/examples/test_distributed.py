"""examples/distributed.py: with a rank killed and resumed, the loss ends the same."""

import json
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
KINDS = ["ddp", "fsdp2"]
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
# Runs the example once with each of several lists of arguments, in one process group:
# torchrun's store has keys for one.
SEVERAL = """
import json, os, sys
sys.path.insert(0, {examples!r})
import distributed as example
group = example.distributed
init, destroy = group.init_process_group, group.destroy_process_group
group.destroy_process_group = lambda: None
group.init_process_group = lambda kind: group.is_initialized() or init(kind)
for run in json.loads(sys.argv[1]):
    sys.argv[1:] = run
    if os.environ["RANK"] == "0":
        print("run", flush=True)
    example.main()
destroy()
sys.stdout.flush()
os._exit(0)  # torch's caches keep FSDP2's group: at exit its threads may abort
"""


def torchrun(folder, script, *arguments):
    path = folder / "script.py"
    path.write_text(script.format(examples=str(ROOT / "examples")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", "2", str(path), *arguments],
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def arguments(kind, out, *others):
    return [*SMALL, "--kind", kind, "--out", str(out), *others]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What runs of each kind print: killed; resumed; and whole ones.

    The resumed runs and the whole ones share their two processes.
    """
    folder = tmp_path_factory.mktemp("distributed")
    killed = []
    for kind in KINDS:
        done = torchrun(folder, KILLER, *arguments(kind, folder / kind))
        assert done.returncode != 0
        killed.append(done.stdout)
    runs = [arguments(kind, folder / kind, "--resume") for kind in KINDS]
    runs += [arguments(kind, folder / f"whole-{kind}") for kind in KINDS]
    done = torchrun(folder, SEVERAL, json.dumps(runs))
    assert done.returncode == 0, done.stdout + done.stderr
    resumed_and_whole = done.stdout.split("run\n")[1:]
    return {
        kind: (killed[i], resumed_and_whole[i], resumed_and_whole[2 + i])
        for i, kind in enumerate(KINDS)
    }


def last_step(text):
    return [line for line in text.splitlines() if line.startswith("step ")][-1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_is_resumed(printed, kind):
    killed, resumed, whole = printed[kind]
    assert "step     4" in killed and "step     6" not in killed
    assert "resumed from" in resumed and "step-000004" in resumed
    assert last_step(whole).startswith("step     6")
    assert last_step(whole) == last_step(resumed)
    assert "fallbacks: none" in whole
