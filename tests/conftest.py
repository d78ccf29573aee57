"""Every test that takes `backend` runs on each backend that can run here.

The CUDA sources are among them on any machine: tests/simt compiles them for the CPU, as
the backend `simt`.
"""

import importlib.util
import multiprocessing.popen_fork
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass
else:
    # The same examples on every run, however long a busy machine takes for them; others
    # are tried by --hypothesis-profile=default.
    slow = [HealthCheck.too_slow]
    settings.register_profile(
        "same", deadline=None, derandomize=True, suppress_health_check=slow
    )
    settings.load_profile("same")

HERE = Path(__file__).parent

# A shell's background job, and what it starts, has Ctrl-C ignored; some tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _refuse_to_fork(*_):
    raise RuntimeError("AddressSanitizer is here: mark this test `forks`")


# An older AddressSanitizer does not hold its allocator's locks while a process forks: a
# child waits for ever for the one that a thread had, were it but ending. Threads end
# beside workers, which torch's queues feed, and JAX starts its own.
if "libasan" in os.environ.get("LD_PRELOAD", ""):
    sys.modules["jax"] = sys.modules["jraph"] = None
    multiprocessing.popen_fork.Popen._launch = _refuse_to_fork


def _build_library(name: str) -> str | None:
    """Builds the library of the backend `name` and puts its path into the environment;
    returns why there is none.

    The library that the variable names already is taken; empty, it says that the tests
    are to do without.
    """
    variable = f"TRAINFAST_{name.upper()}_LIBRARY"
    named = os.environ.get(variable)
    if named:
        return None
    if named is not None:
        del os.environ[variable]
        return f"{variable} is empty"
    spec = importlib.util.spec_from_file_location("build", HERE / name / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        os.environ[variable] = str(module.build())
    except module.NoCompiler as reason:
        return str(reason)
    return None


NO_SIMT = _build_library("simt")
NO_WIDE = _build_library("wide")

import trainfast  # noqa: E402  (after the environment is set)

REASONS = {b["name"]: b["reason"] for b in trainfast.backends()}
NO_SIMT = REASONS["simt"] = NO_SIMT or REASONS["simt"]
REASONS["wide"] = NO_WIDE or REASONS["wide"]
USABLE = [name for name, reason in REASONS.items() if reason is None]


def pytest_report_header():
    missing = [f"{name} ({why})" for name, why in REASONS.items() if why]
    return [f"backends: {', '.join(USABLE)}", f"not here: {'; '.join(missing)}"]


@pytest.fixture(params=USABLE)
def backend(request):
    """The name of the backend in use during the test."""
    trainfast.use_backend(request.param)
    yield request.param
    trainfast.use_backend(None)


@pytest.fixture(scope="module")
def simt():
    """The SIMT library by itself, through ctypes."""
    from simt_library import Simt

    if NO_SIMT:
        pytest.skip(NO_SIMT)
    return Simt(os.environ["TRAINFAST_SIMT_LIBRARY"])


TENSOR_CORES = [(75, "float16"), (75, "bfloat16"), (80, "float16"), (80, "bfloat16")]


@pytest.fixture(params=TENSOR_CORES, ids=lambda path: f"{path[0]}-{path[1]}")
def dtype(request, monkeypatch, simt):
    """One that tensor cores take, with the instructions that take it, on `simt`."""
    ptx, name = request.param
    monkeypatch.setenv("TRAINFAST_SIMT_PTX", str(ptx))
    trainfast.use_backend("simt")
    yield name
    trainfast.use_backend(None)


@pytest.fixture
def device(backend):
    """Where the backend's arrays live, for torch."""
    return "cuda" if backend == "cuda" else "cpu"


@pytest.fixture
def stopped_clock(monkeypatch):
    """Writers of graphs commit by number alone, however long a test takes."""
    writer = importlib.import_module("trainfast.graph_cache.writer")
    monkeypatch.setattr(writer, "monotonic", lambda: 0.0)


@pytest.fixture
def rng():
    return np.random.default_rng(1234)


@pytest.fixture
def amp_kernels_at_any_size(monkeypatch):
    """trainfast.torch.GradScaler leaves nothing to torch for its size."""
    from trainfast.torch import amp

    monkeypatch.setattr(amp, "_are_small", lambda grads: False)
    monkeypatch.setattr(amp, "_is_torchs_update", lambda scaler, flags: False)


@pytest.fixture
def kernels_at_any_size(monkeypatch):
    """trainfast.patch("attention") leaves no call to torch for its size."""
    from trainfast.torch import attention_patch

    monkeypatch.setattr(attention_patch, "is_small", lambda *tensors: False)
    monkeypatch.setattr(attention_patch, "is_fused_faster", lambda *sizes: False)
