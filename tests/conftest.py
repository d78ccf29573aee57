"""Every test that takes `backend` runs on each backend that can run here.

The CUDA sources are among them on any machine: tests/simt compiles them for the CPU, as
the backend `simt`.
"""

import gc
import importlib.util
import json
import multiprocessing.popen_fork
import os
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import trainfast

# OpenMP's idle threads sleep; by default they spin, on cores that other test processes
# need, which made one test take 7 times the processor time. The OpenMP runtime reads it
# when torch is loaded. tests/core/test_threads.py runs under the default.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

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

QUICK_CASES = 8

# A shell's background job, and what it starts, has Ctrl-C ignored; some tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _refuse_to_fork(*_):
    raise RuntimeError("AddressSanitizer is here: mark this test `forks`")


# An older AddressSanitizer does not hold its allocator's locks while a process forks: a
# child waits for ever for the one that a thread had, were it but ending. Threads end
# beside workers, which torch's queues feed, and JAX starts its own.
if "libasan" in os.environ.get("LD_PRELOAD", ""):
    sys.modules["jax"] = None
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


# Filled by pytest_configure(): why a backend cannot run here, and those that can.
REASONS: dict[str, str | None] = {}
USABLE: list[str] = []
PASSED: list[str] = []


def pytest_addoption(parser):
    parser.addoption(
        "--quick",
        action="store_true",
        help="the best backend and `scalar`, and at most "
        f"{QUICK_CASES} cases of each test: minutes instead of half an hour",
    )
    parser.addoption(
        "--cases",
        type=int,
        metavar="N",
        help="at most N cases of each test, the same ones on every run",
    )


def pytest_configure(config):
    quick = config.getoption("--quick")
    left_out = "--quick leaves it out" if quick else None
    # With pytest-xdist, workers inherit what the first process has built.
    names = ("simt", "wide")
    with ThreadPoolExecutor() as pool:  # one is compiled beside the other
        found = pool.map(lambda name: left_out or _build_library(name), names)
        reasons = dict(zip(names, found, strict=True))
    for b in trainfast.backends():
        REASONS[b["name"]] = reasons.get(b["name"]) or b["reason"]
    USABLE.extend(name for name, reason in REASONS.items() if reason is None)
    if quick:
        USABLE[1:] = [name for name in USABLE[1:] if name == "scalar"]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Freezes the objects of the collected modules, which stay alive.

    `gc.collect()` in a test then visits newer objects only, in a tenth of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_report_header():
    missing = [f"{name} ({why})" for name, why in REASONS.items() if why]
    return [f"backends: {', '.join(USABLE)}", f"not here: {'; '.join(missing)}"]


def pytest_generate_tests(metafunc):
    if "usable_backend" in metafunc.fixturenames:
        metafunc.parametrize("usable_backend", USABLE)


def pytest_collection_modifyitems(config, items):
    """With --quick: leaves out slow tests, and of each test all but a sample of its
    cases. Without it: leaves out those that the file of TRAINFAST_QUICK_TESTS lists.
    With --cases: a sample of so many cases, in both.
    """
    cases = config.getoption("--cases")
    if config.getoption("--quick"):
        fast = [item for item in items if item.get_closest_marker("slow") is None]
        kept = _sample(fast, cases or QUICK_CASES)
    else:
        listed = os.environ.get("TRAINFAST_QUICK_TESTS")
        done = set(json.loads(Path(listed).read_text())) if listed else ()
        kept = _sample(items, cases) if cases else items
        kept = {item for item in kept if item.nodeid not in done}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        PASSED.append(report.nodeid)


def pytest_sessionfinish(session):
    """With --quick: lists what passed, but not what was skipped, in the file that
    TRAINFAST_QUICK_TESTS names, so that .ci/run runs no test twice."""
    listed = os.environ.get("TRAINFAST_QUICK_TESTS")
    worker = hasattr(session.config, "workerinput")
    if listed and session.config.getoption("--quick") and not worker:
        Path(listed).write_text(json.dumps(PASSED))


def _sample(items, most):
    """At most so many cases of each test."""
    cases = {}
    for item in items:
        cases.setdefault((item.path, item.originalname), []).append(item)
    kept = set()
    for (path, name), all_cases in cases.items():
        few = min(most, len(all_cases))
        kept.update(random.Random(f"{path.name} {name}").sample(all_cases, few))
    return kept


@pytest.fixture
def backend(usable_backend):
    """The name of the backend in use during the test."""
    trainfast.use_backend(usable_backend)
    yield usable_backend
    trainfast.use_backend(None)


@pytest.fixture(autouse=True)
def fresh_stats():
    """No test sees what another one has counted."""
    trainfast.reset_stats()


@pytest.fixture(scope="module")
def simt():
    """The SIMT library by itself, through ctypes."""
    from tests.simt_library import Simt

    if REASONS["simt"]:
        pytest.skip(REASONS["simt"])
    library = Simt(os.environ["TRAINFAST_SIMT_LIBRARY"])
    yield library
    library.close()


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
    from trainfast.torch.amp import grad_scaler as amp

    monkeypatch.setattr(amp, "_are_small", lambda grads: False)
    monkeypatch.setattr(amp, "_is_torchs_update", lambda scaler, flags: False)


@pytest.fixture
def kernels_at_any_size(monkeypatch):
    """trainfast.patch("attention") leaves no call to torch for its size."""
    from trainfast.torch.attention import replacements

    monkeypatch.setattr(replacements, "is_small", lambda *tensors: False)
    monkeypatch.setattr(replacements, "is_fused_faster", lambda *sizes: False)
