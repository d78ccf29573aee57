"""`trainfast bench` as a user runs it: its processes, files and command line."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.bench.planted import results, seeded, timing
from trainfast import _core, roof
from trainfast.bench import cases, child
from trainfast.bench import run as run_module
from trainfast.bench.results import load, save
from trainfast.bench.run import BenchError, bench

TORCHS = [name for name in cases.CASES if name not in cases._NUMPY]
TINY = ("bench", "--seconds", "0.01", "--processes", "1")


def command(*arguments):
    return [sys.executable, "-m", "trainfast", *arguments]


def run(*arguments, **options):
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=300, **options
    )


def site(folder, code):
    """The environment of a Python that runs `code` as it starts."""
    (folder / "sitecustomize.py").write_text(code)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path}


@pytest.fixture
def small_roof(tmp_path, monkeypatch):
    """The environment of a bench whose roof takes no time; the true one takes seconds
    where the CPU has no bfloat16."""
    monkeypatch.setattr(roof, "_SIDE", {"cpu": 64})
    code = "from trainfast import roof\nroof._SIDE = {'cpu': 64}\n"
    return site(tmp_path, code)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "base.json"
    save(results(timing("numpy-adamw", rng=seeded())), path)
    return path


# ---- Running -------------------------------------------------------------------------


@pytest.mark.slow
def test_every_case_that_runs_here_has_a_row():
    done = run(*TINY, "--devices", "cpu", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, found["results"]["failed"]
    rows = {row["case"] for row in found["rows"]}
    missing = {name.split(" on ")[0] for name in found["results"]["missing"]}
    assert rows | missing == set(cases.CASES) and not rows & missing
    assert missing == (set() if find_spec("torch") else set(TORCHS))


@pytest.mark.slow
def test_without_torch_there_are_the_rows_of_numpy(tmp_path):
    code = "import sys\nsys.modules['torch'] = sys.modules['torch_geometric'] = None\n"
    done = run(*TINY, "--json", env=site(tmp_path, code))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["case"] for row in found["rows"]}
    assert rows == {"loader", "numpy-adamw", "numpy-attention"}
    why = found["results"]["missing"]
    assert set(why) == {f"{name} on cpu" for name in TORCHS}
    assert set(why.values()) == {"needs torch, which is not installed"}


def test_patched_and_plain_steps_are_what_they_say():
    pytest.importorskip("torch")
    from contextlib import ExitStack

    import trainfast

    with ExitStack() as stack:
        made = cases.make("train-gpt", cases.Setup("cpu", stack))
        used = {}
        for contender in made.contenders:
            contender.prepare()
            trainfast.reset_stats()
            contender.run()
            used[contender.name] = set(trainfast.stats().calls)
        assert used["torch"] == set()
        assert used["trainfast.patch()"] >= {"adamw", "attention", "clip"}
    assert not trainfast.is_patched("adamw")


def test_contender_that_computes_something_else_is_an_error():
    import numpy as np

    good = np.ones(3)
    cases.require_same({"a": good, "b": good * (1 + 1e-5)})
    for bad in (good * 1.1, good * np.nan):
        with pytest.raises(RuntimeError, match="b and a must agree"):
            cases.require_same({"a": good, "b": bad})


def test_failed_case_does_not_take_the_others_with_it(monkeypatch, small_roof):
    def failing(_setup):
        raise OSError("disk full")

    monkeypatch.setitem(cases._NUMPY, "loader", failing)
    found = list(child.results(["loader", "numpy-adamw"], ["cpu"], 0.01))
    assert found[1]["failed"] == "OSError: disk full"
    assert set(found[2]["times"]) == {"trainfast", "NumPy"}


def test_rounds_are_condensed_to_medians_in_order():
    assert child.condensed([3e9, 1e9]) == [3.0, 1.0]
    many = child.condensed([i * 1e9 for i in range(3000)])
    assert len(many) == 15 and many == sorted(many) and many[0] == 99.5


def test_process_that_crashes_is_one_error(monkeypatch, tmp_path):
    code = "import sys\nif 'bench.child' in str(sys.orig_argv):\n"
    code += "    sys.exit('the library is broken')\n"
    monkeypatch.setenv("PYTHONPATH", site(tmp_path, code)["PYTHONPATH"])
    with pytest.raises(BenchError, match=r"status 1 after the roof: .* is broken"):
        bench(["numpy-adamw"], ["cpu"], 0.01, 1)


def test_processes_that_do_not_fit_are_left_out(monkeypatch):
    """Each takes a second by this clock; two are run in any case."""
    clock = iter(range(100))
    monkeypatch.setattr(run_module.time, "monotonic", lambda: next(clock))
    line = {"name": "loader", "device": "cpu", "missing": "x"}
    monkeypatch.setattr(run_module, "_child", lambda job: [line, {"threads": 2}])
    for within, expected in ((0.5, 2), (5.0, 3), (math.inf, 5)):
        assert bench(["loader"], ["cpu"], 0.1, 5, within).processes == expected


def test_processes_that_others_disturbed_are_left_out(monkeypatch):
    assert run_module.undisturbed([0.0, 0.3, 0.05, 0.0, 0.5]) == [0, 2, 3]
    assert run_module.undisturbed([0.0, 0.3, 0.3, 0.0]) == [0, 1, 2, 3]  # too few
    case = {"title": "", "dtype": "float32", "nbytes": 1, "flops": 0, "skipped": {}}
    case |= {"name": "loader", "device": "cpu", "roles": {"trainfast": "ours"}}
    made = iter((share, seconds) for share, seconds in
                ((0.0, 1.0), (0.9, 7.0), (0.0, 2.0), (0.0, 3.0)))  # fmt: skip

    def child(job):
        share, seconds = next(made)
        return [
            case | {"others": share, "times": {"trainfast": [seconds]}},
            {"threads": 2},
        ]

    monkeypatch.setattr(run_module, "_child", child)
    found = bench(["loader"], ["cpu"], 0.1, 4)
    assert found.timings[0].times == {"trainfast": [[1.0], [2.0], [3.0]]}
    assert (found.left_out, found.processes) == (1, 4)


def children_of(pid):
    """Processes whose parent this is."""
    return [
        int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_a_bench_that_is_stopped(kill, tmp_path):
    file = tmp_path / "out.json"
    with subprocess.Popen(
        command("bench", "--cases", "numpy", "--seconds", "60", "--save", str(file)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts pytest in the background has it ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        (started,) = wait_for(lambda: children_of(process.pid))
        time.sleep(0.3)
        process.send_signal(kill)
        out, error = process.communicate(timeout=30)
    wait_for(lambda: not alive(started))
    assert out == "" and list(tmp_path.iterdir()) == []
    if kill == signal.SIGINT:
        assert process.returncode == 1
        assert error == "trainfast bench: interrupted, nothing was saved\n"


# ---- Files ---------------------------------------------------------------------------


def test_saved_results_are_read_back(saved):
    assert load(saved) == results(timing("numpy-adamw", rng=seeded()))
    save(load(saved), saved)  # over an older one
    assert [path.name for path in saved.parent.iterdir()] == ["base.json"]


def test_failed_save_leaves_the_older_file(saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        save(results(timing(rng=seeded(1))), saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["base.json"]


def damaged(change):
    def write(path):
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return write


DAMAGE = {
    "empty": (lambda path: path.write_bytes(b""), "is not JSON"),
    "cut off": (lambda p: p.write_bytes(p.read_bytes()[:500]), "is not JSON"),
    "binary": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "is not JSON"),
    "deep": (lambda path: path.write_text("[" * 10**5), "is not JSON"),
    "foreign": (lambda path: path.write_text("{}"), "was not written by"),
    "a list": (lambda path: path.write_text("[1]"), "was not written by"),
    "older": (damaged(lambda d: d.update(schema=0)), "has schema 0"),
    "no schema": (damaged(lambda d: d.pop("schema")), "has schema None"),
    "no timings": (damaged(lambda d: d.pop("timings")), "is damaged"),
    "more": (damaged(lambda d: d.update(more=1)), "is damaged"),
    "no times": (damaged(lambda d: d["timings"][0].update(times={})), "is damaged"),
    "no roofs": (damaged(lambda d: d.update(roofs=3)), "is damaged"),
    "odd rate": (damaged(lambda d: d["roofs"]["cpu"].update(copy="x")), "is damaged"),
    "odd machine": (damaged(lambda d: d.update(machine=[])), "is damaged"),
    "odd roles": (damaged(lambda d: d["timings"][0].update(roles=[])), "is damaged"),
}
for value in (None, "1", 0.0, -1.0, 1e999, float("nan"), []):

    def plant(data, value=value):
        data["timings"][0]["times"]["trainfast"][1][2] = value

    DAMAGE[f"time {value!r}"] = (damaged(plant), "is damaged")


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_base_is_an_error_that_says_so(name, saved):
    damage, message = DAMAGE[name]
    damage(saved)
    with pytest.raises(ValueError, match=message):
        load(saved)


# ---- The command line ----------------------------------------------------------------


@pytest.mark.slow
def test_saved_run_is_compared(tmp_path, small_roof):
    file = str(tmp_path / "base.json")
    done = run(*TINY, "--cases", "numpy-adamw", "--save", file, env=small_roof)
    assert done.returncode == 0 and "numpy-adamw" in done.stdout, done.stderr
    done = run(*TINY, "--cases", "numpy-adamw", "--compare", file, env=small_roof)
    assert done.returncode == 0, done.stderr
    assert "Changes since the base" in done.stdout and "UNDECIDED" in done.stdout


@pytest.mark.slow
def test_slower_than_the_base_exits_with_1(tmp_path, small_roof):
    """A base a thousand times as fast as anything."""
    file = tmp_path / "base.json"
    save(results(timing("numpy-adamw", 1e-6, rng=seeded())), file)
    options = ("--cases", "numpy-adamw", "--compare", str(file), "--json")
    done = run(*TINY[:-1], "3", *options, env=small_roof)
    (change,) = json.loads(done.stdout)["changes"]
    assert (done.returncode, change["verdict"]) == (1, "SLOWER")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cases", "adam", "nothing"), "--cases must be parts of adamw-large, "),
        (("--devices", "tpu"), "invalid choice: 'tpu'"),
        (("--seconds", "0"), "--seconds must be above 0, got 0.0"),
        (("--seconds", "nan"), "--seconds must be above 0, got nan"),
        (("--processes", "0"), "--processes must be at least 1, got 0"),
        (("--save", "no/such/folder/x"), "--save must be a file in a folder"),
        (("--save", "."), "--save must be a file in a folder"),
        (("--compare", "no_such_file"), "--compare 'no_such_file': No such file"),
        (("--compare", "foreign"), "--compare 'foreign': was not written by"),
        (("--compare", "base.json", "--cases", "loader"), "none of the cases"),
    ],
)
def test_wrong_command_line_is_a_usage_error(arguments, message, saved):
    (saved.parent / "foreign").write_text("{}")
    done = run("bench", *arguments, cwd=saved.parent)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("usage: ") and message in done.stderr


def test_absent_device_is_a_usage_error_that_names_the_others():
    if all(why is None for name, why, _ in _core.backends() if name == "cuda"):
        pytest.skip("there is a GPU")
    done = run("bench", "--devices", "cpu", "cuda")
    assert done.returncode == 2
    assert "error: --devices must be of cpu, got cuda: " in done.stderr


def test_names_of_torch_cases_are_those_of_the_table():
    pytest.importorskip("torch")
    from trainfast.torch.bench import CASES

    assert list(CASES) == TORCHS
