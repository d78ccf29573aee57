"""Products of matrices by cuBLAS: what is computed, and how the library is opened. The
loader runs on any machine: a stub stands in for cuBLAS, on the backend `simt`."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from arrays import Framed
from cublas_stub import (
    SCRATCH,
    backend,  # noqa: F401  (a fixture, as on_stub)
    build_stub,
    f32,
    on_stub,  # noqa: F401
    scratch,
    seen,
    shared_stub,
)

import trainfast
from trainfast import _core

HERE = Path(__file__).parent
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


@pytest.fixture
def gemm(device):
    """_core.gemm with scratch."""
    return lambda *arrays, **options: _core.gemm(
        *arrays, scratch=lambda n: scratch(n, device), **options
    )


def swapped(array, do):
    return np.ascontiguousarray(np.swapaxes(array, -1, -2)) if do else array


# ---- What is computed ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("transposed", [*itertools.product([False, True], repeat=2)])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (7, 5, 3), (16, 8, 32), (33, 17, 65)], ids=str
)
def test_product_is_right(gemm, device, rng, dtype, transposed, sizes):
    m, n, k = sizes
    a, b = rng.standard_normal((3, m, k)), rng.standard_normal((3, k, n))
    first = rng.standard_normal((3, m, n))
    given = [
        Framed(swapped(value, do), dtype, device=device)
        for value, do in zip((a, b), transposed, strict=True)
    ]
    out = Framed(first, dtype, device=device)
    before = [array.bits() for array in given]
    exact = [swapped(g.get(), do) for g, do in zip(given, transposed, strict=True)]
    right = 0.5 * exact[0] @ exact[1] - 2 * out.get()
    options = dict(zip(("transpose_a", "transpose_b"), transposed, strict=True))
    gemm(*[g.array for g in given], out.array, alpha=0.5, beta=-2, **options)
    error = np.abs(out.get() - right).max() / np.abs(right).max()
    assert error < TOLERANCE[dtype]
    assert [g.bits() for g in given] == before


def test_beta_zero_does_not_read_out(gemm, device):
    a, b = (Framed(np.ones((4, 4)), device=device) for _ in range(2))
    out = Framed(np.full((4, 4), np.nan), device=device)
    gemm(a.array, b.array, out.array)
    assert (out.get() == 4).all()


def test_one_matrix_serves_all_items_and_heads_may_lie_side_by_side(gemm, device, rng):
    b, h, n, d = 2, 3, 5, 4
    rows = Framed(rng.standard_normal((b, n, h, d)), device=device)
    one = Framed(rng.standard_normal((d, d)), device=device)
    out = Framed(np.zeros((b, n, h, d)), device=device)
    for item in range(b):
        a, c = rows.array[item], out.array[item]
        heads_first = (0, 1) if device == "cuda" else (1, 0, 2)
        gemm(a.transpose(*heads_first), one.array, c.transpose(*heads_first))
    assert np.allclose(out.get(), rows.get() @ one.get(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 4, 4), (3, 0, 4), (3, 4, 0)])
def test_empty_product_does_nothing(gemm, device, shape):
    batch, m, n = shape
    a, b = np.ones((batch, m, 5)), np.ones((batch, 5, n))
    arrays = [Framed(x, device=device).array for x in (a, b, np.ones(shape))]
    gemm(*arrays)


@pytest.mark.usefixtures("on_stub")
def test_tf32_is_only_for_float32_that_allows_it():
    for dtype, allowed, compute in (
        ("float32", False, 68),
        ("float32", True, 77),
        ("float16", True, 68),
    ):
        a, b, out = (Framed(np.ones((4, 4)), dtype).array for _ in range(3))
        _core.gemm(a, b, out, allow_tf32=allowed, scratch=scratch)
        assert seen(shared_stub()).compute == compute


@pytest.mark.usefixtures("on_stub")
def test_one_handle_sums_in_float32_with_the_callers_memory_and_stream(simt):
    a, b, out = (Framed(np.ones((4, 4))).array for _ in range(3))
    _core.gemm(a, b, out, scratch=scratch)
    simt.counts()
    before = seen(shared_stub()).products
    _core.gemm(a, b, out, stream=48, scratch=scratch)
    now = seen(shared_stub())
    assert (now.made, now.destroyed, now.products) == (1, 0, before + 1)
    assert (now.math_mode, now.workspace, now.stream) == (16, SCRATCH, 48)
    counts = simt.counts()
    assert counts["syncs"] == counts["allocations"] == 0


# ---- Bad input -----------------------------------------------------------------------


BAD = [
    (dict(a=f32(4)), ValueError, "a must have at least two dimensions, got shape (4,)"),
    (dict(a=f32(2, 5, 3)), ValueError, "a must have out's rows, got shape (2, 5, 3)"),
    (dict(b=f32(2, 3, 4)), ValueError, "b must have out's columns, got shape"),
    (dict(b=f32(2, 7, 5)), ValueError, "b must have as many rows as a has columns"),
    (dict(a=f32(3, 4, 3)), ValueError, "a must have out's batch, or two dimensions"),
    (dict(a=f32(1, 2, 4, 3)), ValueError, "a must have out's batch, or two"),
    (dict(a=f32(2, 4, 6)[..., ::2]), ValueError, "a must have rows without gaps"),
    (dict(a=f32(2, 4, 3)[:, ::-1]), ValueError, "a must not have negative strides"),
    (
        dict(a=f32(2, 9, 4, 3)[:, :2], b=f32(3, 5), out=f32(2, 2, 4, 5)),
        *(ValueError, "a must have one stride for all items of the batch"),
    ),
    (dict(a=f32(2, 4, 0), b=f32(2, 0, 5)), ValueError, "k must be 1 to 2147483647"),
    (dict(a=f32(2, 4, 3).astype("f2")), TypeError, "a must be float32, got float16"),
    (
        {name: f32(2, *shape).astype("f8") for name, shape in
         (("a", (4, 3)), ("b", (3, 5)), ("out", (4, 5)))},
        *(NotImplementedError, "out must be float16, bfloat16 or float32, got float64"),
    ),
    (
        dict(out=np.broadcast_to(f32(4, 5), (2, 4, 5))),
        *(ValueError, "out must be writable"),
    ),
    (dict(scratch=None), ValueError, "scratch must be 33554432 bytes aligned to 256"),
    (
        dict(scratch=lambda n: scratch(n + 8)[8:]),
        *(ValueError, "scratch must be 33554432 bytes aligned to 256"),
    ),
    (dict(scratch=lambda n: f32(n - 1)), ValueError, "scratch's array must be dense"),
    (
        dict(scratch=lambda n: np.ones(n)),
        *(TypeError, "scratch's array must be float32, got float64"),
    ),
    (dict(scratch=lambda n: 1 / 0), ZeroDivisionError, "division by zero"),
    (dict(alpha="x"), TypeError, "must be real number"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
@pytest.mark.usefixtures("on_stub")
def test_bad_input_is_named_and_writes_nothing(changes, error, message):
    given = {"a": f32(2, 4, 3), "b": f32(2, 3, 5), "out": f32(2, 4, 5)} | changes
    options = {"scratch": scratch} | given
    arrays = [options.pop(name) for name in ("a", "b", "out")]
    with pytest.raises(error, match=re.escape(message)):
        _core.gemm(*arrays, **options)
    assert (arrays[2] == 1).all()


@pytest.mark.usefixtures("on_stub")
def test_out_that_overlaps_is_refused():
    whole = f32(3, 4, 4)
    with pytest.raises(ValueError, match="out must not overlap a"):
        _core.gemm(whole[:2], f32(4, 4), whole[1:], scratch=scratch)
    with pytest.raises(ValueError, match="out must not overlap b"):
        _core.gemm(f32(4, 4), whole[0], whole[0], scratch=scratch)
    memory = scratch(SCRATCH // 4)
    with pytest.raises(ValueError, match="scratch's array must not overlap out"):
        out = memory[:16].reshape(4, 4)
        _core.gemm(f32(4, 4), f32(4, 4), out, scratch=lambda n: memory)
    items = np.lib.stride_tricks.as_strided(f32(40), (2, 4, 4), (32, 16, 4))
    with pytest.raises(ValueError, match="out's items must not overlap, got 8 apart"):
        _core.gemm(f32(4, 4), f32(4, 4), items, scratch=scratch)


@pytest.mark.parametrize("name", ["scalar", "wide", "avx2", "avx512"])
def test_cpu_arrays_are_not_supported(name):
    usable = {b["name"] for b in trainfast.backends() if b["usable"]}
    if name not in usable:
        pytest.skip("it cannot run here")
    trainfast.use_backend(name)
    try:
        message = f"gemm must have CUDA arrays, got them on backend {name}"
        with pytest.raises(NotImplementedError, match=message):
            _core.gemm(f32(4, 4), f32(4, 4), f32(4, 4))
    finally:
        trainfast.use_backend(None)


# ---- How cuBLAS is opened ------------------------------------------------------------

CALL = """
import ctypes, sys, numpy as np
sys.path.insert(0, {here!r})
from cublas_stub import f32, scratch, seen
from trainfast import _core
def call():
    out = f32(4, 4)
    try:
        _core.gemm(f32(4, 4), f32(4, 4), out, scratch=scratch)
        print("done" if (out == 4).all() else out)
    except Exception as error:
        print(type(error).__name__ + ":", error)
        assert (out == 1).all()
"""


def run(code, **environment):
    """What a process of its own prints, with `call` to try a product."""
    if "TRAINFAST_SIMT_LIBRARY" not in os.environ:
        pytest.skip("needs the SIMT library")
    names = ("TRAINFAST_CUBLAS", "LD_LIBRARY_PATH")
    env = {k: v for k, v in os.environ.items() if k not in names}
    env |= {"TRAINFAST_BACKEND": "simt", **{k: str(v) for k, v in environment.items()}}
    done = subprocess.run(
        [sys.executable, "-c", CALL.format(here=str(HERE)) + code],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("major", [12, 13])
def test_copy_that_is_loaded_is_taken(tmp_path, major):
    """As torch loads it, and not the one of our own major that could be opened."""
    name = f"libcublas.so.{major}"
    loaded = build_stub(tmp_path, "a.so", version=major * 10000, soname=name)
    other = tmp_path / "other"
    other.mkdir()
    build_stub(other, "libcublas.so.13", soname="libcublas.so.13")
    code = f"keep = ctypes.CDLL({str(loaded)!r}); call()\n"
    code += f"print(seen({str(loaded)!r}).products)"
    assert run(code, LD_LIBRARY_PATH=other) == ["done", "1"]


def test_major_of_our_cuda_is_opened_where_none_is_loaded(tmp_path):
    for major in (12, 13):
        name = f"libcublas.so.{major}"
        build_stub(tmp_path, name, version=major * 10000, soname=name)
    code = "call(); print(seen('libcublas.so.13').products)"
    assert run(code, LD_LIBRARY_PATH=tmp_path) == ["done", "1"]


def test_package_beside_ours_is_opened_where_none_is_loaded(tmp_path):
    """As pip lays out nvidia-cublas."""
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (tmp_path / "trainfast").mkdir()
    beside = build_stub(folder, "libcublas.so.13", soname="libcublas.so.13")
    ours = tmp_path / "trainfast" / "libtrainfast_simt.so"
    shutil.copy(os.environ.get("TRAINFAST_SIMT_LIBRARY") or pytest.skip("none"), ours)
    code = f"call(); print(seen({str(beside)!r}).products)"
    assert run(code, TRAINFAST_SIMT_LIBRARY=ours) == ["done", "1"]
    beside.write_bytes(beside.read_bytes()[:5000])
    (said,) = run("call()", TRAINFAST_SIMT_LIBRARY=ours)
    assert said.endswith("/nvidia/cu13/lib/libcublas.so.13 is truncated or no library")


def test_missing_cublas_says_how_to_get_it_and_is_looked_for_again(tmp_path):
    late = build_stub(tmp_path, "late.so", soname="libcublas.so.13")
    code = f"call(); call(); keep = ctypes.CDLL({str(late)!r}); call()"
    first, second, third = run(code)
    assert first.startswith(
        "RuntimeError: cuBLAS must be loaded (import torch), installed (pip install "
        "nvidia-cublas) or named by TRAINFAST_CUBLAS: libcublas.so.13: cannot open"
    )
    assert (second, third) == (first, "done")


@pytest.mark.parametrize("version", [111103, 140000, 0])
def test_other_major_is_refused(tmp_path, version):
    stub = build_stub(tmp_path, version=version)
    assert run("call(); call()", TRAINFAST_CUBLAS=stub) == 2 * [
        f"RuntimeError: cuBLAS must be of version 12 or 13, got version {version}"
    ]


def test_two_majors_are_refused(tmp_path):
    loaded = build_stub(tmp_path, "a.so", version=120000, soname="libcublas.so.12")
    forced = build_stub(tmp_path, "b.so", version=130000)
    code = f"keep = ctypes.CDLL({str(loaded)!r}); call()"
    assert run(code, TRAINFAST_CUBLAS=forced) == [
        "RuntimeError: cuBLAS must be the 12 that is loaded already, got version "
        "130000 in TRAINFAST_CUBLAS"
    ]


@pytest.mark.parametrize(
    ("define", "symbol"),
    [
        ("WITHOUT_PRODUCT", "cublasGemmStridedBatchedEx"),
        ("WITHOUT_VERSION", "cublasGetVersion_v2"),
    ],
)
def test_missing_symbol_is_named(tmp_path, define, symbol):
    stub = build_stub(tmp_path, defines=[define])
    message = f"RuntimeError: cuBLAS must have {symbol}, got a library without it"
    assert run("call()", TRAINFAST_CUBLAS=stub) == [message]


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("CREATE", "cublasCreate: no memory, says the stub (status 3)"),
        ("VERSION_ASKED", "cublasGetVersion: no, says the stub (status 7)"),
        ("STREAM", "cublasSetStream: no, says the stub (status 7)"),
        ("WORKSPACE", "cublasSetWorkspace: no, says the stub (status 7)"),
        ("MATH_MODE", "cublasSetMathMode: no, says the stub (status 7)"),
        ("PRODUCT", "cublasGemmStridedBatchedEx: no, says the stub (status 15)"),
    ],
)
def test_failing_call_is_named(tmp_path, failing, message):
    stub = build_stub(tmp_path, defines=[f"FAILING={failing}"])
    code = f"call(); call(); s = seen({str(stub)!r}); print(s.made - s.destroyed)"
    first, second, kept = run(code, TRAINFAST_CUBLAS=stub)
    assert first == second == f"RuntimeError: cuBLAS: {message}"
    assert int(kept) == (failing in ("STREAM", "WORKSPACE", "PRODUCT"))


def test_failure_without_a_text_has_its_number(tmp_path):
    stub = build_stub(tmp_path, defines=["FAILING=PRODUCT", "WITHOUT_STATUS_STRING"])
    (said,) = run("call()", TRAINFAST_CUBLAS=stub)
    assert said.endswith("cublasGemmStridedBatchedEx: failed (status 15)")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
def test_truncated_file_is_refused(tmp_path, share):
    whole, short = shared_stub().read_bytes(), tmp_path / "short.so"
    short.write_bytes(whole[: int(share * len(whole))])
    message = f"cuBLAS cannot be opened: {short} is truncated or no library"
    assert run("call()", TRAINFAST_CUBLAS=short) == [f"RuntimeError: {message}"]


def test_file_that_is_not_there_is_named(tmp_path):
    (said,) = run("call()", TRAINFAST_CUBLAS=tmp_path / "none.so")
    assert said.startswith("RuntimeError: cuBLAS cannot be opened: ")
    assert "none.so: cannot open shared object file" in said


def test_first_call_must_not_be_captured():
    library = os.environ.get("TRAINFAST_SIMT_LIBRARY")
    code = f"""
simt = ctypes.CDLL({library!r})
simt.tfast_simt_capture_begin(); call(); simt.tfast_simt_capture_end()
call()
simt.tfast_simt_capture_begin(); call(); simt.tfast_simt_capture_end()"""
    first, second, third = run(code, TRAINFAST_CUBLAS=shared_stub())
    assert first.startswith("RuntimeError: gemm must have been called once on the")
    assert (second, third) == ("done", "done")


def test_threads_share_a_handle():
    stub = shared_stub()
    code = """
from threading import Thread
def calls():
    for _ in range(20):
        a = f32(4, 4)
        _core.gemm(f32(4, 4), f32(4, 4), a, scratch=scratch)
        right.append((a == 4).all())
right = []
threads = [Thread(target=calls) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(sum(right))
"""
    code += f"print(seen({str(stub)!r}).made)"
    assert run(code, TRAINFAST_CUBLAS=stub) == ["80", "1"]
