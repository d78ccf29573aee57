"""What importing does, and where the module can be imported."""

import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import trainfast

HAS_TORCH = pytest.mark.skipif(
    "torch" not in {name.lower() for name in metadata.packages_distributions()},
    reason="needs torch",
)


def python(code):
    """What another interpreter prints; -P: only what is installed can be imported."""
    command = [sys.executable, "-P", "-c", code]
    return subprocess.check_output(command, text=True).strip()


def test_version_is_that_of_the_metadata():
    assert trainfast.__version__ == metadata.version("trainfast")


def test_import_from_an_unbuilt_source_folder_says_so(tmp_path):
    folder = tmp_path / "trainfast"
    folder.mkdir()
    source = Path(trainfast.__file__)
    (folder / "__init__.py").write_text(source.read_text())
    done = subprocess.run(
        [sys.executable, "-c", "import trainfast"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {folder} is a source folder without the comp")
    assert "leave the folder if trainfast is installed, or run `make build`" in last


# What of the standard library an import may load, with what that itself loads. A module
# that costs milliseconds belongs into the function that needs it.
MAY_LOAD = "collections.abc, contextlib, dataclasses, importlib, math, operator, os, "
MAY_LOAD += "sys, threading, types, typing, warnings"


def test_import_loads_numpy_and_little_else():
    """Neither torch, nor CUDA, nor trainfast's packages but the small one of patch."""
    code = f"""
import {MAY_LOAD}
import numpy
before = set(sys.modules)
import trainfast
new = {{name: sys.modules[name] for name in set(sys.modules) - before}}
print(sorted(name for name in new if not name.startswith("trainfast.")))
print(sorted(name for name, module in new.items() if hasattr(module, "__path__")))
mapped = open("/proc/self/maps").read()
print([name for name in ("libcuda", "libcudart", "trainfast_cuda") if name in mapped])
"""
    assert python(code).splitlines() == [
        "['trainfast']",
        "['trainfast', 'trainfast.patching']",
        "[]",
    ]


def test_star_import_leaves_the_users_names_alone():
    code = """
import sys, types
torch = types.ModuleType("torch")
from trainfast import *
print(torch.__name__, "AdamW" in globals(), "trainfast.torch" in sys.modules)
"""
    assert python(code) == "torch False False"


def test_looking_at_the_package_loads_no_torch():
    code = """
import doctest, sys, trainfast
dir(trainfast)
for name in ("AdamV", "LossScaler", "adamw_step", "__wrapped__", "_ipython_display_"):
    assert not hasattr(trainfast, name)
doctest.DocTestFinder().find(trainfast)
print("torch" in sys.modules, "trainfast.torch" in sys.modules)
"""
    assert python(code) == "False False"


def test_a_wrong_guess_is_told_the_right_name():
    for name in ("LossScaler", "adamw_step", "attention_backward"):
        with pytest.raises(AttributeError, match=rf"there is trainfast.numpy.{name}$"):
            getattr(trainfast, name)
    with pytest.raises(AttributeError, match=r"no attribute 'AdamV'$"):
        _ = trainfast.AdamV


def test_torchs_names_in_numpy_are_told_what_arrays_have():
    for name in ("Adam", "GradScaler", "clip_grad_norm_"):
        message = rf"use (trainfast\.numpy\.\w+).*, or trainfast\.{name} for torch's"
        with pytest.raises(AttributeError, match=message) as seen:
            getattr(trainfast.numpy, name)
        instead = re.search(message, str(seen.value))[1].rpartition(".")[2]
        assert instead in trainfast.numpy.__all__
    with pytest.raises(AttributeError, match=r"no attribute 'AdamV'$"):
        _ = trainfast.numpy.AdamV


def test_without_torch_its_names_say_what_is_there():
    code = """
import importlib.machinery, inspect, sys
class WithoutTorch(importlib.machinery.PathFinder):
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] != "torch":
            return importlib.machinery.PathFinder.find_spec(name, path, target)
sys.meta_path[-1] = WithoutTorch
import trainfast
for name in ("AdamW", "GradScaler"):
    try:
        getattr(trainfast, name)
    except ImportError as error:
        print(error)
print("AdamW" in dir(trainfast), "AdamW" in dict(inspect.getmembers(trainfast)))
"""
    says = "takes the place of torch's; install torch"
    assert python(code).splitlines() == [
        f"trainfast.AdamW {says}, or use trainfast.numpy.AdamW, which needs none",
        f"trainfast.GradScaler {says}",
        "False False",
    ]


@HAS_TORCH
def test_names_of_this_level_are_torchs():
    import torch

    assert issubclass(trainfast.AdamW, torch.optim.AdamW)
    assert issubclass(trainfast.GradScaler, torch.amp.GradScaler)
    assert {"AdamW", "attention", "clip_grad_norm_"} < set(dir(trainfast))
    for name in trainfast._TORCHS:
        assert getattr(trainfast, name) is getattr(trainfast.torch, name), name


def test_import_starts_no_thread():
    code = """
import os
import numpy  # its BLAS has threads of its own
before = os.listdir("/proc/self/task")
import trainfast
print(os.listdir("/proc/self/task") == before)
"""
    assert python(code) == "True"


@HAS_TORCH
@pytest.mark.parametrize(
    "order", ["import torch, trainfast", "import trainfast, torch"]
)
def test_import_patches_nothing(order):
    code = f"""
{order}
for name in ("AdamW", "Adam"):
    owner = getattr(torch.optim, name)
    print(owner.__module__, owner.step.__module__)
print(torch.amp.GradScaler.__module__)
print(torch.nn.functional.scaled_dot_product_attention.__module__)
"""
    plain = python(code.replace("trainfast", "sys"))
    assert python(code) == plain
    assert "trainfast" not in plain


def test_import_in_forked_child_works():
    code = """
import os, sys
child = os.fork()
if child == 0:
    import trainfast
    os._exit(0 if trainfast.backends() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code) == "0"


def test_fork_after_import_works():
    code = """
import os, sys
import trainfast
here = [backend["name"] for backend in trainfast.backends()]
child = os.fork()
if child == 0:
    there = [backend["name"] for backend in trainfast.backends()]
    os._exit(0 if there == here else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code) == "0"


# ---- Other Pythons -----------------------------------------------------------------

SELFTEST = """
import trainfast
from trainfast.tools.selftest import selftest
report = selftest()
print(report)
print(trainfast._core.__file__, report.ok)
"""


def load_pythons():
    path = Path(__file__).parent.parent / ".ci" / "pythons.py"
    spec = importlib.util.spec_from_file_location("pythons", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PYTHONS = load_pythons()
OWN = f"3.{sys.version_info.minor}"
OTHERS = sorted(v for v in PYTHONS.candidates() if int(v[2:]) >= 11 and v != OWN)


def fake_python(folder, name, script):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return str(folder)


def test_shim_that_cannot_run_is_no_interpreter(tmp_path, monkeypatch):
    """Nor is a file that cannot be executed, or one of another version."""
    said = "echo 'python3.99: command not found' >&2; exit 127"
    shims = fake_python(tmp_path / "shims", "python3.99", said)
    older = fake_python(tmp_path / "older", "python3.99", "echo 3.9")
    broken = fake_python(tmp_path / "broken", "python3.99", "")
    (Path(broken) / "python3.99").write_text("#!/nowhere/python\n")
    monkeypatch.setenv("PATH", os.pathsep.join([shims, older, broken]))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PYTHONS.find("3.99") is None
    real = fake_python(tmp_path / "real", "python3.99", "echo 3.99")
    monkeypatch.setenv("PATH", os.pathsep.join([shims, older, broken, real]))
    assert PYTHONS.find("3.99") == Path(real) / "python3.99"


def test_own_interpreter_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / f"python{OWN}").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert PYTHONS.find(OWN) == tmp_path / f"python{OWN}"


@pytest.mark.slow
@pytest.mark.parametrize("version", OTHERS)
def test_module_built_here_works_on_another_python(version, tmp_path):
    interpreter = PYTHONS.find(version)
    if interpreter is None:
        pytest.skip(f"no python{version} here runs")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--retries=0"]
    pip += ["--timeout=10", "--disable-pip-version-check", "--no-deps"]
    pip += [f"--python-version={version}", "--only-binary=:all:"]
    pip += ["--target", str(tmp_path), "numpy", "ml_dtypes"]
    try:
        reached = subprocess.run(pip, timeout=40).returncode == 0
    except subprocess.TimeoutExpired:
        reached = False
    if not reached:
        pytest.skip(f"pip must reach numpy for Python {version}")
    module = Path(trainfast._core.__file__)
    folders = [str(tmp_path), str(module.parent.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [str(interpreter), "-P", "-B", "-c", SELFTEST]
    lines = subprocess.check_output(command, env=environment, text=True).splitlines()
    assert lines[-1] == f"{module} True", "\n".join(lines)


# Without the package, whose NumPy does not load in such interpreters. A thread waits
# for a lock in an interpreter of its own, and signals arrive meanwhile.
OWN_GIL = """
import fcntl, signal, sys, threading, time
try:
    import _interpreters as interpreters
    made = interpreters.create("isolated")
except ImportError:  # Python 3.12
    import _xxsubinterpreters as interpreters
    made = interpreters.create(isolated=True)
load = '''
import importlib.util
spec = importlib.util.spec_from_file_location("trainfast._core", FILE)
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
'''.replace("FILE", repr(sys.argv[1]))
exec(load)
cache = sys.argv[2]
core.graph_build_begin(cache)

def run(code):
    error = interpreters.run_string(made, code)
    assert error is None, error

def end_the_build():
    run(load + f"core.graph_build_end({cache!r}, None)")
    ended.append(core.graph_is_building(cache))

ended, signals = [], []
signal.signal(signal.SIGUSR1, lambda *_: signals.append(1))
lock = open(cache + "/lock")
fcntl.flock(lock, fcntl.LOCK_EX)
thread = threading.Thread(target=end_the_build)
thread.start()
for _ in range(5):
    time.sleep(0.1)
    signal.pthread_kill(thread.ident, signal.SIGUSR1)
assert not ended and signals
fcntl.flock(lock, fcntl.LOCK_UN)
thread.join()
run("assert core.crc32c(b'123456789') == 0xE3069283")
interpreters.destroy(made)
print(ended, core.crc32c(b"123456789") == 0xE3069283)
"""


@pytest.mark.parametrize("version", [v for v in OTHERS if int(v[2:]) >= 12])
def test_interpreter_with_its_own_gil_waits_for_a_lock(version, tmp_path):
    interpreter = PYTHONS.find(version)
    if interpreter is None:
        pytest.skip(f"no python{version} here runs")
    arguments = [trainfast._core.__file__, str(tmp_path / "cache")]
    command = [str(interpreter), "-c", OWN_GIL, *arguments]
    assert subprocess.check_output(command, text=True) == "[False] True\n"


# ---- NumPy's calls beside torch ------------------------------------------------------

CALLS = {
    "adamw_step": """
columns = [[np.ones(6, np.float32)] for _ in range(4)]
trainfast.numpy.adamw_step(*columns, step=1, lr=0.1)""",
    "AdamW": """
params = [np.ones(6, np.float32)]
optimizer = trainfast.numpy.AdamW(params, max_grad_norm=1.0, zero_grad=True)
optimizer.step([np.ones(6, "f")])""",
    "attention": """
q = np.ones((1, 2, 4, 8), np.float32)
trainfast.numpy.attention(q, q, q, out=np.empty_like(q))""",
}


@pytest.mark.slow
@HAS_TORCH
@pytest.mark.parametrize("call", CALLS)
def test_calls_with_numpys_arrays_load_no_adapter_of_torch(call):
    code = f"""
import sys, numpy as np, torch, trainfast
{CALLS[call]}
print([name for name in sys.modules if name.startswith("trainfast.torch")])
"""
    assert python(code) == "[]"


@HAS_TORCH
def test_autograd_knows_that_tensors_were_written():
    """All columns; of gradients only where they are written. Nothing is imported, so
    nothing can fail after the write."""
    code = """
import sys, torch, trainfast
sys.modules["trainfast.torch"] = None
columns = [[torch.ones(6)] for _ in range(4)]
ema = [torch.ones(6)]
options = {"step": 1, "lr": 0.1, "emas": ema}
for more in ({}, {"zero_grad": True}, {"write_back_grads": True}):
    before = [c[0]._version for c in (*columns, ema)]
    trainfast.numpy.adamw_step(*columns, **options, **more)
    print([c[0]._version - was for c, was in zip((*columns, ema), before)])
"""
    assert python(code).splitlines() == ["[1, 0, 1, 1, 1]"] + 2 * ["[1, 1, 1, 1, 1]"]
