"""A warm step allocates nothing for its tensors, and says so when there is no memory.

The counter is preloaded into a process of its own, whose Python takes all memory from
malloc.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
from tests.torch_version import TORCH

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(
    not COMPILER
    or not sys.platform.startswith("linux")
    or "libasan" in os.environ.get("LD_PRELOAD", ""),
    reason="needs a C compiler, and malloc for itself",
)

BEGINNING = """
import ctypes, json, os
import torch
import trainfast
from trainfast import _core
from trainfast.torch import AdamW, clip_grad_norm_

counter = ctypes.CDLL(os.environ["LD_PRELOAD"])
counter.watch.argtypes = [ctypes.c_size_t] * 2
lines = [l for l in open("/proc/self/maps") if l.rstrip().endswith(_core.__file__)]
addresses = [int(a, 16) for l in lines for a in l.split()[0].split("-")]
counter.watch(min(addresses), max(addresses))

def make(n, **options):
    params = [torch.nn.Parameter(torch.ones(40)) for _ in range(n)]
    for p in params:
        p.grad = torch.ones(40)
    return params, AdamW(params, **options)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs Python code after BEGINNING; what its last line prints, as JSON."""
    folder = tmp_path_factory.mktemp("counter")
    counter = folder / "counter.so"
    source = Path(__file__).parent / "allocation_counter.c"
    command = [COMPILER, "-O1", "-shared", "-fPIC", "-fno-builtin"]
    subprocess.run([*command, "-o", counter, source], check=True)

    def run(code):
        done = subprocess.run(
            [sys.executable, "-c", BEGINNING + code],
            env={**os.environ, "LD_PRELOAD": str(counter), "PYTHONMALLOC": "malloc"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "max_grad_norm=1.0, ema_decay=0.9"])
def test_warm_step_allocates_nothing_for_a_tensor(run, options):
    found = run(f"""
def most(n):
    optimizer = make(n, {options})[1]
    for _ in range(20):  # what is kept of the state is looked up every 16th step
        optimizer.step()
    counts = []
    for _ in range(20):
        counter.count(1)
        optimizer.step()
        counter.count(0)
        counts.append((counter.counted(0), counter.counted(1)))
    return [max(column) for column in zip(*counts)]
few, many = most(3), most(3000)
counter.count(1)
make(3)[1].step()
counter.count(0)
print(json.dumps([few, many, counter.counted(0)]))
""")
    (few, few_own), (many, many_own), cold = found
    assert few_own == many_own <= 1  # what the groups share
    if TORCH >= (2, 10):  # before it attributes of tensors are read, as new objects
        assert many <= few + 3  # Python's and torch's own, the same for any number
    assert cold > few  # so it does count


@pytest.mark.slow
def test_pass_without_memory_raises_and_changes_nothing(run):
    found = run("""
params, optimizer = make(3, max_grad_norm=1.0)
errors = []
counter.fail(1)
for call in (optimizer.step, lambda: clip_grad_norm_(params, 1.0)):
    try:
        call()
    except MemoryError as error:
        errors.append(str(error))
counter.fail(0)
ones = [bool((t == 1).all()) for p in params for t in (p, p.grad)]
steps = [float(optimizer.state[p]["step"]) for p in params]
optimizer.step()
print(json.dumps([errors, ones, steps, float(optimizer.state[params[0]]["step"])]))
""")
    errors, ones, steps, after = found
    assert errors == ["no memory for the sums of 3 chunks"] * 2
    assert all(ones) and steps == [0, 0, 0] and after == 1
