"""Scripts with a planted leak are told apart from clean ones, with file and line."""

import gc
import json
import linecache
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tracemalloc
import warnings
import weakref
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import trainfast
from trainfast.torch.leaks import LeakWarning, signals, tracker

HERE = Path(__file__).parent
PLANTED = sorted(path.stem for path in (HERE / "planted").glob("*.py"))
CLEAN = sorted(path.stem for path in (HERE / "clean").glob("*.py"))
SLOW = {"array_dataset", "copied_dataset"}  # they fork workers
QUICK = {"filling", "lengthening"}  # of the clean ones

# What is said beside file and line.
WORDS = {
    "cache": "cache of features(), 1 tensor a step; give functools.lru_cache",
    "closures": "list `reports.later`, 1 function a step with 1 tensor (added in",
    "copied_dataset": "list `Words.words`, each of 2 workers has copied its 2,400,000",
    "figures": "OrderedDict `Gcf.figs`, 1 FigureManagerBase a step; call plt.close",
    "hidden_state": "the graph of `memory`, N operations that reach back through",
    "hooks": "OrderedDict `model._modules['0']._forward_hooks`, 1 function a step; reg",
    "linked": "objects of Step, 1 Step a step with 1 tensor; drop the references",
    "loaders": "list `open_loaders`, 1 _SingleProcessDataLoaderIter a step (added in",
    "losses": "list `losses`, 1 tensor a step, each keeps its graph (added in",
    "outputs_dict": "dict `self.history['outputs']`, 1 ndarray a step (added in",
    "running_loss": "the graph of `total`, N operations that reach back through the",
    "tensors": "list `seen`, 1 dict a step with 1 tensor (added in tensors.py:15)",
}


@pytest.fixture(autouse=True)
def nothing_of_other_tests(request):
    """Looks leave out the objects that thousands of other tests have left behind.

    All stay frozen after the test: unfrozen, each later gc.collect() takes a second.
    """
    gc.collect()
    gc.freeze()
    if "figures" in request.node.name:  # its leak is in a library that may be there
        gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def watched(script):
    """The leaks of a script, each with the step at which it was told."""
    found = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that busy cores do not hold up tiny operations
    tracking = trainfast.LeakTracker(
        on_leak=lambda leak: found.append((tracking.steps, leak))
    )
    try:
        with tracking:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    assert tracking.steps >= 60  # it did count them
    return found


def marked(names, quick):
    return [
        pytest.param(name, marks=() if name in quick else pytest.mark.slow)
        for name in names
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(PLANTED, set(PLANTED) - SLOW))
def test_planted_leak_is_named_within_50_steps(name):
    script = HERE / "planted" / f"{name}.py"
    lines = script.read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if text.endswith("# LEAK"))
    ((step, leak), *more) = watched(script)
    assert (Path(leak.file).name, leak.line) == (script.name, line), str(leak)
    contents = re.sub(r"^\d+ operations", "N operations", leak.contents)
    text = f"{leak.what}, {contents}; {leak.remedy}"
    assert text.startswith(WORDS[name])
    if name == "copied_dataset":  # by the kernel's count, within two epochs
        assert step <= 300
    else:
        assert step <= 50 and not more
        assert re.match(r"\+[\d.]+ [KM]iB a step: ", str(leak))


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(CLEAN, QUICK))
def test_clean_script_raises_no_alarm(name):
    assert watched(HERE / "clean" / f"{name}.py") == []


def leaking(steps, optimizer_class=torch.optim.SGD, hold=None):
    model = nn.Linear(256, 64)
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    kept = [] if hold is None else hold
    for _ in range(steps):
        out = model(torch.randn(64, 256))
        optimizer.zero_grad()
        out.pow(2).mean().backward()
        optimizer.step()
        kept.append(out)


def test_leak_is_a_warning_once():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with trainfast.LeakTracker() as tracking:
            leaking(200)
    leaks = [each for each in told if each.category is LeakWarning]
    assert len(leaks) == 1 and "list `kept` in test_tracker.py" in str(leaks[0].message)
    report = tracking.report()
    assert [leak.what for leak in report.leaks] == ["list `kept`"]
    assert "Leaks in 200 steps" in str(report) and "list `kept`" in str(report)
    assert json.loads(report.to_json())["leaks"][0]["line"] == report.leaks[0].line
    assert "list `kept`" in tracking._repr_html_()
    assert repr(tracking) == "LeakTracker(steps=200, leaks=1)"


def test_steps_of_our_optimizer_count():
    found = []
    with trainfast.LeakTracker(on_leak=found.append) as tracking:
        leaking(60, trainfast.AdamW)
    assert tracking.steps == 60 and len(found) == 1


def test_steps_of_the_next_optimizer_count_where_the_first_is_gone():
    with trainfast.LeakTracker() as tracker:
        for _ in range(3):
            model = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(4):
                optimizer.step()
            del optimizer
            gc.collect()
    assert tracker.steps == 12


def test_steps_by_hand_count_without_an_optimizer():
    found, kept = [], []
    tracking = trainfast.LeakTracker(on_leak=found.append)
    for _ in range(60):
        kept.append(bytearray(1 << 20))
        tracking.step()
    assert [leak.what for leak in found] == ["list `kept`"]
    assert "1 bytearray a step" in found[0].contents


def test_variable_of_a_notebook_is_found_in_its_cell():
    """As IPython runs cells: no file, the source in linecache."""
    cells = {
        "/tmp/ipykernel_7/1.py": "import torch\n\noutputs = []\n",
        "/tmp/ipykernel_7/2.py": (
            "model = torch.nn.Linear(256, 64)\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
            "for _ in range(60):\n"
            "    out = model(torch.randn(64, 256))\n"
            "    optimizer.zero_grad()\n"
            "    out.pow(2).mean().backward()\n"
            "    optimizer.step()\n"
            "    outputs.append(out)\n"
        ),
    }
    found, variables = [], {"__name__": "__main__"}
    try:
        with trainfast.LeakTracker(on_leak=found.append):
            for name, text in cells.items():
                lines = text.splitlines(keepends=True)
                linecache.cache[name] = len(text), None, lines, name
                exec(compile(text, name, "exec"), variables)
    finally:
        for name in cells:
            linecache.cache.pop(name, None)
    (leak,) = found
    assert (leak.file, leak.line) == ("/tmp/ipykernel_7/1.py", 3)
    expected = "list `outputs` in line 3 of a cell, 1 tensor a step, each keeps its"
    assert expected in str(leak) and "(added in line 8 of a cell)" in str(leak)


def test_looking_holds_nothing():
    """Python keeps the copy of a function's variables that a look reads."""

    def train():
        batch = torch.randn(1000)
        gone = weakref.ref(batch)
        leaking(60)
        del batch
        return gone()

    with pytest.warns(LeakWarning), trainfast.LeakTracker():
        assert train() is None


def test_stop_in_the_middle_of_looks_ends_the_tracing():
    tracking = trainfast.LeakTracker().start()
    leaking(36)
    assert tracemalloc.is_tracing()  # the test is in the middle
    tracking.stop()
    assert not tracemalloc.is_tracing()
    leaking(60)
    assert tracking.steps == 36


def test_tracing_of_the_user_stays_on():
    tracemalloc.start()
    try:
        with pytest.warns(LeakWarning), trainfast.LeakTracker():
            leaking(60)
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


def test_error_while_looking_ends_the_watch_and_not_the_training(monkeypatch):
    def fail():
        raise LookupError("a strange object")

    monkeypatch.setattr(tracker, "Census", fail)
    told = pytest.warns(RuntimeWarning, match="has stopped: LookupError: a strange")
    with told, trainfast.LeakTracker() as tracking:
        leaking(60)
    assert tracking.leaks == []


def forked(tracking):
    before = tracking.steps
    tracking.step()
    os._exit(0 if tracking.steps == before else 1)


@pytest.mark.forks
def test_forked_child_is_not_watched():
    with trainfast.LeakTracker() as tracking:
        leaking(1)
        child = multiprocessing.get_context("fork").Process(
            target=forked, args=(tracking,)
        )
        child.start()
        child.join()
    assert child.exitcode == 0


def test_gpu_memory_counts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    taken = iter(range(0, 1 << 30, 1 << 20))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda d: next(taken))
    found = signals.Signals()
    for step in range(0, 24, 2):
        found.take(step)
    assert found.slopes()["GPU bytes"] == 2 << 20  # 1 MiB a call, 2 devices, 2 steps
    assert signals.grows({"GPU bytes": 2 << 20})


def test_slope_is_that_of_most_samples(monkeypatch):
    sizes = [1000 * step + (10**9 if step == 8 else 0) for step in range(0, 24, 2)]
    given = iter(sizes)
    monkeypatch.setattr(signals, "host_bytes", lambda: next(given))
    found = signals.Signals()
    for step in range(0, 24, 2):
        assert found.slopes() == {}  # too few
        found.take(step)
    assert found.slopes()["host bytes"] == 1000


def test_host_bytes_follow_what_is_allocated():
    before = signals.host_bytes()
    held = torch.ones(5 << 20, dtype=torch.uint8)
    assert signals.host_bytes() - before == pytest.approx(5 << 20, rel=0.01)
    del held


@pytest.mark.slow
def test_run_tells_leaks_of_a_script(tmp_path):
    script = HERE / "planted" / "losses.py"
    command = [sys.executable, "-m", "trainfast", "run", "--leaks", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == ""
    assert "Watching for memory that grows with every step" in done.stderr
    assert "list `losses` in losses.py:8, 1 tensor a step" in done.stderr
    assert done.stderr.endswith("trainfast: leaks in 60 steps: 1 found\n")


def test_garbage_that_waits_for_the_collector_is_no_leak():
    class Cycle:
        pass

    found = []
    tracking = trainfast.LeakTracker(on_leak=found.append)
    gc.disable()
    try:
        for _ in range(100):
            for _ in range(20):
                cycle = Cycle()
                cycle.itself, cycle.data = cycle, bytearray(4096)
            tracking.step()
    finally:
        gc.enable()
    assert found == []
