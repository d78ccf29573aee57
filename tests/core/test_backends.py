"""Which backends there are, and what is said where one cannot run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trainfast
from trainfast import _core

PACKAGE = Path(_core.__file__).parent
CUDA_LIBRARY = PACKAGE / "libtrainfast_cuda.so"


def run(code, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRAINFAST_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def reason(name, **environment):
    code = f"""
import trainfast
print(next(b["reason"] for b in trainfast.backends() if b["name"] == {name!r}))"""
    done = run(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_backends_are_listed_best_first():
    names = [b["name"] for b in trainfast.backends()]
    assert names[0] == "cuda" and names[-1] == "simt"
    assert names[-3:] == ["scalar", "wide", "simt"]
    for b in trainfast.backends():
        assert b["usable"] == (b["reason"] is None)
    assert sum(b["in_use"] for b in trainfast.backends() if b["name"] != "cuda") == 1


def test_the_best_usable_one_is_in_use():
    usable = [b for b in trainfast.backends() if b["usable"] and b["name"] != "cuda"]
    assert _core.backend_in_use() == usable[0]["name"]


def test_second_load_of_the_module_keeps_the_backend():
    code = """
import importlib.util
from trainfast import _core
_core.use_backend("scalar")
spec = importlib.util.spec_from_file_location("trainfast._core", _core.__file__)
again = importlib.util.module_from_spec(spec)
spec.loader.exec_module(again)
print(again is _core, again.backend_in_use(), _core.backend_in_use())"""
    done = run(code)
    assert done.stdout == "False scalar scalar\n", done.stderr


@pytest.mark.parametrize("name", ["scalar", "wide"])
def test_the_environment_forces_one(name):
    code = "from trainfast import _core; print(_core.backend_in_use())"
    library = os.environ.get("TRAINFAST_WIDE_LIBRARY", "")
    if name == "wide" and not library:
        pytest.skip("no library of wide")
    done = run(code, TRAINFAST_BACKEND=name, TRAINFAST_WIDE_LIBRARY=library)
    assert done.stdout.strip() == name, done.stderr


def test_an_unknown_name_is_an_error():
    message = (
        "backend must be one of cuda, avx512, avx2, scalar, wide, simt, got 'sse9'"
    )
    done = run("import trainfast", TRAINFAST_BACKEND="sse9")
    assert done.returncode == 1
    assert f"ValueError: {message}" in done.stderr
    before = _core.backend_in_use()
    with pytest.raises(ValueError, match="got 'sse9'"):
        trainfast.use_backend("sse9")
    assert _core.backend_in_use() == before
    with pytest.raises(TypeError):
        trainfast.use_backend(3)


def test_an_unusable_name_is_an_error_and_not_a_fallback():
    for name in [b["name"] for b in trainfast.backends() if not b["usable"]]:
        with pytest.raises(ValueError, match=f"backend {name} cannot run here: "):
            trainfast.use_backend(name)
    for name in ("simt", "wide"):
        done = run("import trainfast", TRAINFAST_BACKEND=name)
        variable = f"TRAINFAST_{name.upper()}_LIBRARY"
        message = f"backend {name} cannot run here: {variable} is not set"
        assert message in done.stderr


def test_a_cuda_library_that_is_missing_says_so(tmp_path):
    nowhere = str(tmp_path / "none.so")
    said = reason("cuda", TRAINFAST_CUDA_LIBRARY=nowhere)
    assert said.startswith("cannot open the cuda library: ") and nowhere in said
    done = run(
        "import trainfast", TRAINFAST_BACKEND="cuda", TRAINFAST_CUDA_LIBRARY=nowhere
    )
    assert "ValueError: backend cuda cannot run here: cannot open" in done.stderr


@pytest.mark.parametrize("part", [0.0, 0.002, 0.3])
def test_a_cuda_library_that_is_truncated_says_so(tmp_path, part):
    """The loader itself would die of SIGBUS."""
    whole = (
        CUDA_LIBRARY if CUDA_LIBRARY.exists() else Path(_core.__file__)
    ).read_bytes()
    short = tmp_path / "short.so"
    short.write_bytes(whole[: int(part * len(whole))])
    said = reason("cuda", TRAINFAST_CUDA_LIBRARY=str(short))
    assert said == f"cannot open the cuda library: {short} is truncated or no library"
    short.write_text("#!/bin/sh" + "\n" * 100)
    assert "is truncated" in reason("cuda", TRAINFAST_CUDA_LIBRARY=str(short))


def test_a_cuda_library_of_another_version_says_so(tmp_path):
    source, other = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("void *tfast_library_open(unsigned abi, void *f) { return 0; }\n")
    compiler = shutil.which("cc") or shutil.which("gcc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", other, source], check=True)
    said = reason("cuda", TRAINFAST_CUDA_LIBRARY=str(other))
    assert said == f"{other} is not a cuda library of this version of trainfast"
    foreign = reason("cuda", TRAINFAST_CUDA_LIBRARY=_core.__file__)
    assert foreign.endswith("is not a cuda library of this version of trainfast")


@pytest.mark.skipif(not CUDA_LIBRARY.exists(), reason="built without CUDA")
def test_no_gpu_is_named():
    said = reason("cuda", CUDA_VISIBLE_DEVICES="")
    assert said in ("no CUDA driver is installed", "no GPU is visible")


OLD = (
    "driver too old: it supports CUDA 11.8, this library needs 12.0; install driver "
    "525 or newer"
)


@pytest.mark.parametrize(
    "driver, message", [("11080", OLD), ("0", "no CUDA driver is installed")]
)
def test_a_driver_older_than_the_library_is_named(driver, message):
    simt = os.environ.get("TRAINFAST_SIMT_LIBRARY")
    if not simt:
        pytest.skip("no SIMT library")
    environment = {"TRAINFAST_CUDA_LIBRARY": simt, "TRAINFAST_SIMT_DRIVER": driver}
    assert reason("cuda", **environment) == message
    done = run("import trainfast", TRAINFAST_BACKEND="cuda", **environment)
    assert f"ValueError: backend cuda cannot run here: {message}" in done.stderr


def test_a_forced_backend_serves_forked_children():
    code = """
import os, sys, trainfast
pid = os.fork()
if pid == 0:
    os._exit(0 if trainfast._core.backend_in_use() == "scalar" else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run(code, TRAINFAST_BACKEND="scalar").returncode == 0
