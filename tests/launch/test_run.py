"""`trainfast run` beside `python`: the same script sees and gives the same."""

import json
import os
import signal
import subprocess
import sys
import zipfile

import pytest

from trainfast import cli

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_")
PLAIN = "patch: false\nmalloc: false\n"  # nothing is on, so torch is not loaded


def execute(command, folder, **more):
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    environment |= more.pop("env", {})
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        **more,
    )


def under_run(folder, *words, config=None, options=(), python=(), **more):
    """`trainfast run` with these words; `config` is the text of the file."""
    if config is not None:
        (folder / "run.yaml").write_text(config)
        options = ("--config", "run.yaml", *options)
    return execute(
        [*python, "-m", "trainfast", "run", *options, *words], folder, **more
    )


def both(folder, *words, python=(), **more):
    """(python, trainfast run --quiet) with nothing turned on."""
    plain = execute([*python, *words], folder, **more)
    options = ("--quiet",)
    ours = under_run(
        folder, *words, config=PLAIN, options=options, python=python, **more
    )
    return plain, ours


def outcome(done):
    return done.returncode, done.stdout, done.stderr


LOOKS = """
import sys, inspect
print(sys.argv, __name__, __file__, sys.path[0], __spec__ and __spec__.name)
print(__package__, __doc__, sorted(globals()))
print(sys.modules["__main__"].__dict__ is globals(), sys.flags, sys.stdin.read())
print(type(__loader__).__name__, type(__builtins__).__name__)
class A: pass
print(inspect.getsource(A), A.__module__)
"""


@pytest.mark.parametrize(
    "arguments", [(), ("--lr", "3e-4", "--config", "x", "--", "-m", "--json")]
)
def test_script_sees_what_it_sees_under_python(tmp_path, arguments):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "look.py").write_text(LOOKS)
    plain, ours = both(tmp_path, "inner/look.py", *arguments, input="text in")
    assert outcome(ours) == outcome(plain) and plain.returncode == 0
    assert "text in" in ours.stdout


@pytest.mark.slow
def test_module_and_folder_and_zip_run_as_under_python(tmp_path):
    (tmp_path / "pack").mkdir()
    for name in ("__init__.py", "__main__.py", "look.py"):
        (tmp_path / "pack" / name).write_text(LOOKS if name[2] != "i" else "")
    with zipfile.ZipFile(tmp_path / "pack.zip", "w") as archive:
        archive.writestr("__main__.py", LOOKS.split("class")[0])
    for words in (("-m", "pack.look", "-x"), ("-m", "pack"), ("pack",), ("pack.zip",)):
        plain, ours = both(tmp_path, *words, input="")
        assert outcome(ours) == outcome(plain)
        assert plain.returncode == 0


def test_options_of_python_are_passed_on(tmp_path):
    (tmp_path / "a.py").write_text("import sys\nprint(sys.flags, sys.warnoptions)\n")
    plain, ours = both(
        tmp_path, "a.py", python=("-u", "-O", "-W", "error::UserWarning")
    )
    assert outcome(ours) == outcome(plain)
    assert "optimize=1" in ours.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('a message')",
        "import os; os._exit(3)",
        "def f():\n    raise ValueError('x')\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError(1) from e",
        "a = (\n",
        "import nowhere_to_be_found",
        "import atexit\natexit.register(print, 'end')\nraise RuntimeError",
        "import sys\nsys.excepthook = lambda *a: print('hook', a[0])\nraise OSError",
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
        "raise KeyboardInterrupt",
        "import atexit, pickle\nclass A: pass\natexit.register(pickle.dumps, A())",
    ],
)
def test_end_of_the_script_is_as_under_python(tmp_path, code):
    (tmp_path / "a.py").write_text(code)
    plain, ours = both(tmp_path, "a.py")
    assert outcome(ours) == outcome(plain)


def test_signals_reach_the_script_itself(tmp_path):
    code = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(200)\n"
    (tmp_path / "a.py").write_text(code)
    (tmp_path / "run.yaml").write_text(PLAIN)
    command = [sys.executable, "-m", "trainfast", "run", "--config", "run.yaml", "a.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in error and "start.py" not in error


# ---- what is turned on ---------------------------------------------------------------

TRAINS = """
import os, torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
import trainfast
print(type(optimizer).__module__, torch.get_float32_matmul_precision())
print(torch.backends.cudnn.benchmark, torch.get_num_threads())
print("adamw" in str(trainfast.stats()))
print([os.environ.get(n) for n in ("MALLOC_TRIM_THRESHOLD_", "OMP_NUM_THREADS", "A")])
"""


@pytest.mark.slow
def test_without_a_configuration_the_script_is_patched(tmp_path):
    (tmp_path / "a.py").write_text(TRAINS)
    done = under_run(tmp_path, "a.py")
    module, switches, ran, variables = done.stdout.splitlines()
    assert module == "trainfast.torch.optim.adamw highest" and ran == "True"
    assert switches.startswith("False ") and str(16 << 30) in variables
    assert "\u2713 Using fused AdamW and Adam\n" in done.stderr
    assert "TF32" not in done.stderr and "None]" in variables


@pytest.mark.slow
def test_configuration_is_applied_and_reported(tmp_path):
    (tmp_path / "a.py").write_text(TRAINS)
    config = (
        "patch: [clip]\nmalloc: false\nthreads: 1\nfloat32_matmul_precision: high\n"
        "cudnn_benchmark: true\nenv_vars:\n  A: '7'\n"
        "trainer:\n  batch_size: 64\n  compile: true\n"
    )
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    done = under_run(tmp_path, "a.py", config=config, options=("--json",), env=hidden)
    assert done.stdout.splitlines() == [
        "torch.optim.adamw high",
        "True 1",
        "False",
        "[None, '1', '7']",
    ]
    report = json.loads(done.stderr)
    assert report["on"][0] == "Using fused gradient clipping"
    assert "Set OMP_NUM_THREADS=1" in report["on"] and "Set A=7" in report["on"]
    assert report["notes"] == [
        "TF32 is off: no GPU",
        "cudnn_benchmark has no effect: no GPU",
        "Left to the script, which must read them: trainer.batch_size, trainer.compile",
    ]


WORKERS = """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return Item(i)
class Item:
    def __init__(self, i):
        self.i = i
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(
        Data(), None, num_workers=1, multiprocessing_context="spawn"
    )
    print([(type(item) is Item, item.i) for item in loader])
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [("a.py",), ("-m", "a")])
def test_spawned_workers_find_the_classes_of_main(tmp_path, words):
    (tmp_path / "a.py").write_text(WORKERS)
    done = under_run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[(True, 0), (True, 1), (True, 2), (True, 3)]\n"


def test_without_torch_the_script_runs_and_a_line_says_so(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    (tmp_path / "a.py").write_text("print('ran')\n")
    done = under_run(tmp_path, "a.py")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "- nothing is patched: torch must be installed" in done.stderr


# ---- what cannot be run --------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["nowhere.py"], ["a\0b"], ["--bad", "a.py"]])
def test_wrong_command_line_exits_with_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["run", *words])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: ") and " error: " in error


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("a: [", "must be YAML"),
        ("thread: 2", "thread is not a setting; did you mean threads?"),
    ],
)
def test_wrong_configuration_is_one_line(tmp_path, capsys, config, message):
    (tmp_path / "run.yaml").write_text(config)
    words = ["run", "--config", str(tmp_path / "run.yaml"), __file__]
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("trainfast run: ") and message in error
    assert error.count("\n") == 1
