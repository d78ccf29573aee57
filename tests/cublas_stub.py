"""What tests of cuBLAS share: the stub that stands in for it, and the fixtures of the
backends that have products of matrices."""

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

import trainfast

HERE = Path(__file__).parent


def build_stub(folder, name="stub.so", *, version=130100, soname="", defines=()):
    """Compiles cublas_stub.c; the test is left out where that cannot be done."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    target = folder / name
    flags = ["-std=c11", "-O1", "-fPIC", "-shared", f"-DVERSION={version}"]
    flags += [f"-D{define}" for define in defines]
    flags += [f"-Wl,-soname,{soname}"] if soname else []
    source = HERE / "cublas_stub.c"
    subprocess.run([compiler, *flags, source, "-o", target], check=True)
    return target


@functools.cache
def shared_stub():
    """One stub a process, because the process opens one cuBLAS."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return build_stub(Path(folder))


class Seen(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("made", "products", "compute")],
        ("stream", ctypes.c_void_p),
    ]


def seen(path):
    """What this process has had the stub do."""
    return Seen.in_dll(ctypes.CDLL(str(path)), "stub_seen")


def use(name, monkeypatch):
    """Makes a backend that has gemm the one in use."""
    (reason,) = (b["reason"] for b in trainfast.backends() if b["name"] == name)
    if reason:
        pytest.skip(reason)
    if name == "simt":
        monkeypatch.setenv("TRAINFAST_CUBLAS", str(shared_stub()))
    else:
        pytest.importorskip("torch")  # whose cuBLAS it is
    trainfast.use_backend(name)


@pytest.fixture(params=["cuda", "simt"])
def backend(request, monkeypatch):
    use(request.param, monkeypatch)
    yield request.param
    trainfast.use_backend(None)


@pytest.fixture
def on_stub(monkeypatch):
    """The stub's path, with arrays in the host's memory."""
    use("simt", monkeypatch)
    yield shared_stub()
    trainfast.use_backend(None)


def f32(*shape):
    return np.ones(shape, np.float32)
