"""Matrix products by cuBLAS and the roof that is measured with them. A stub stands in
for cuBLAS on the backend `simt`, so the loader is tested on any machine."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import trainfast
from tests.arrays import Framed
from tests.cublas_stub import (
    backend,  # noqa: F401  (a fixture, as on_stub)
    build_stub,
    f32,
    on_stub,  # noqa: F401
    seen,
    shared_stub,
)
from trainfast import _core, roof

ROOT = Path(__file__).parents[2]
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


# ---- The product ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (7, 5, 3), (16, 8, 32), (33, 17, 65)], ids=str
)
def test_product_is_right(device, rng, dtype, sizes):
    m, n, k = sizes
    a, b = (
        Framed(rng.standard_normal(shape), dtype, device=device)
        for shape in ((m, k), (k, n))
    )
    out = Framed(np.full((m, n), np.nan), dtype, device=device)
    before = [a.bits(), b.bits()]
    _core.gemm(a.array, b.array, out.array)
    right = a.get() @ b.get()
    assert np.abs(out.get() - right).max() / np.abs(right).max() < TOLERANCE[dtype]
    assert [a.bits(), b.bits()] == before


@pytest.mark.usefixtures("on_stub")
def test_options_reach_cublas():
    for dtype, allowed, compute in (
        ("float32", False, 68),
        ("float32", True, 77),
        ("float16", True, 68),
    ):
        a, b, out = (Framed(np.ones((4, 4)), dtype).array for _ in range(3))
        _core.gemm(a, b, out, allow_tf32=allowed, stream=48)
        assert (seen(shared_stub()).compute, seen(shared_stub()).stream) == (
            compute,
            48,
        )


F64 = {name: f32(4, 4).astype("f8") for name in ("a", "b", "out")}
BAD = [
    (dict(a=f32(4)), ValueError, "a must have two dimensions, got shape (4,)"),
    (dict(a=f32(2, 4, 3)), ValueError, "a must have two dimensions"),
    (dict(a=f32(5, 3)), ValueError, "out must have shape (5, 5), so that a is (m, k)"),
    (dict(b=f32(3, 4)), ValueError, "b (k, n) and out (m, n), got shape (4, 5)"),
    (dict(b=f32(2, 5)), ValueError, "b must have shape (3, 5)"),
    (dict(out=np.ones((), "f4")), ValueError, "out must have two dimensions"),
    (dict(a=f32(4, 6)[:, ::2]), ValueError, "a must be dense and row-major"),
    (dict(a=f32(3, 4).T), ValueError, "strides (1, 4); call .contiguous() on it"),
    (dict(b=f32(3, 5)[::-1]), ValueError, "b must be dense and row-major"),
    (dict(out=f32(4, 10)[:, :5]), ValueError, "out must be dense and row-major"),
    (dict(a=f32(4, 0), b=f32(0, 5)), ValueError, "k must be 1 to 2147483647, got 0"),
    (dict(out=f32(0, 5), a=f32(0, 3)), ValueError, "m must be 1 to 2147483647, got 0"),
    (
        dict(a=f32(4, 3).astype("f2")),
        ValueError,
        "a must be float32, got float16",
    ),
    (F64, NotImplementedError, "out must be float16, bfloat16 or float32, got float64"),
    (dict(out=np.broadcast_to(f32(5), (4, 5))), ValueError, "out must be writable"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
@pytest.mark.usefixtures("on_stub")
def test_bad_input_is_named_and_writes_nothing(changes, error, message):
    given = {"a": f32(4, 3), "b": f32(3, 5), "out": f32(4, 5)} | changes
    with pytest.raises(error, match=re.escape(message)):
        _core.gemm(**given)
    assert (given["out"] == 1).all()


@pytest.mark.usefixtures("on_stub")
def test_out_that_overlaps_is_refused():
    whole = f32(6, 4)
    with pytest.raises(ValueError, match="out must not overlap a"):
        _core.gemm(whole[:4], f32(4, 4), whole[2:])
    with pytest.raises(ValueError, match="out must not overlap b"):
        _core.gemm(f32(4, 4), whole[:4], whole[:4])
    _core.gemm(whole[:3], f32(4, 4), whole[3:])
    assert (whole[3:] == 4).all()


@pytest.mark.parametrize("name", ["scalar", "avx2", "avx512"])
def test_cpu_arrays_are_not_supported(name):
    if name not in {b["name"] for b in trainfast.backends() if b["usable"]}:
        pytest.skip(f"{name} cannot run on this CPU")
    trainfast.use_backend(name)
    try:
        message = f"gemm needs CUDA arrays, got backend {name}"
        with pytest.raises(NotImplementedError, match=message):
            _core.gemm(f32(4, 4), f32(4, 4), f32(4, 4))
    finally:
        trainfast.use_backend(None)


# ---- Opening cuBLAS ------------------------------------------------------------------

CALL = """
import ctypes, sys, numpy as np
sys.path.append({root!r})
from tests.cublas_stub import f32, seen
from trainfast import _core
def call():
    out = f32(4, 4)
    try:
        _core.gemm(f32(4, 4), f32(4, 4), out)
        print("done" if (out == 4).all() else out)
    except Exception as error:
        print(type(error).__name__ + ":", error)
        assert (out == 1).all()
"""


def run(code, **environment):
    """What a process of its own prints; its code has `call`, which tries a product."""
    if "TRAINFAST_SIMT_LIBRARY" not in os.environ:
        pytest.skip("needs the SIMT library")
    names = ("TRAINFAST_CUBLAS", "LD_LIBRARY_PATH")
    env = {k: v for k, v in os.environ.items() if k not in names}
    env |= {"TRAINFAST_BACKEND": "simt", **{k: str(v) for k, v in environment.items()}}
    done = subprocess.run(
        [sys.executable, "-c", CALL.format(root=str(ROOT)) + code],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("major", [12, 13])
def test_loaded_copy_is_used(tmp_path, major):
    """torch has loaded one; another major version could be opened."""
    name = f"libcublas.so.{major}"
    loaded = build_stub(tmp_path, "a.so", version=major * 10000, soname=name)
    other = tmp_path / "other"
    other.mkdir()
    build_stub(other, "libcublas.so.13", soname="libcublas.so.13")
    code = f"keep = ctypes.CDLL({str(loaded)!r}); call()\n"
    code += f"print(seen({str(loaded)!r}).products)"
    assert run(code, LD_LIBRARY_PATH=other) == ["done", "1"]


def test_newest_installed_major_that_the_driver_takes_is_opened(tmp_path):
    for major in (12, 13):
        name = f"libcublas.so.{major}"
        build_stub(tmp_path, name, version=major * 10000, soname=name)
    code = "call(); print(seen('libcublas.so.13').products)"
    assert run(code, LD_LIBRARY_PATH=tmp_path) == ["done", "1"]
    (tmp_path / "libcublas.so.13").unlink()
    code = "call(); print(seen('libcublas.so.12').products)"
    assert run(code, LD_LIBRARY_PATH=tmp_path) == ["done", "1"]


def test_package_beside_ours_is_opened(tmp_path):
    """As pip lays out nvidia-cublas."""
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (tmp_path / "trainfast").mkdir()
    beside = build_stub(folder, "libcublas.so.13", soname="libcublas.so.13")
    ours = tmp_path / "trainfast" / "libtrainfast_simt.so"
    shutil.copy(os.environ.get("TRAINFAST_SIMT_LIBRARY") or pytest.skip("none"), ours)
    code = f"call(); print(seen({str(beside)!r}).products)"
    assert run(code, TRAINFAST_SIMT_LIBRARY=ours) == ["done", "1"]


def test_missing_cublas_says_how_to_get_it_and_is_looked_for_again(tmp_path):
    late = build_stub(tmp_path, "late.so", soname="libcublas.so.13")
    code = f"call(); call(); keep = ctypes.CDLL({str(late)!r}); call()"
    first, second, third = run(code)
    assert first.startswith("RuntimeError: cuBLAS was not found: libcublas.so.")
    assert "import torch first, or pip install nvidia-cublas" in first
    assert (second, third) == (first, "done")


@pytest.mark.parametrize(
    ("version", "defines", "message"),
    [
        (111103, [], "cuBLAS must have major version 12 or 13, got version 111103"),
        (140000, [], "cuBLAS must have major version 12 or 13, got version 140000"),
        (130000, ["WITHOUT_PRODUCT"], "cuBLAS must have cublasGemmEx, got a library"),
        (130000, ["FAILING=CREATE"], "cuBLAS: cublasCreate: no memory, says the stub"),
        (130000, ["FAILING=VERSION_ASKED"], "cuBLAS: cublasGetVersion: no, says the"),
        (130000, ["FAILING=STREAM"], "cuBLAS: cublasSetStream: no, says the stub"),
        (130000, ["FAILING=PRODUCT"], "cublasGemmEx: no, says the stub (status 15)"),
    ],
)
def test_library_that_does_not_do_is_named(tmp_path, version, defines, message):
    stub = build_stub(tmp_path, version=version, defines=defines)
    first, second = run("call(); call()", TRAINFAST_CUBLAS=stub)
    assert first == second and first.startswith("RuntimeError: ") and message in first


def test_file_that_is_truncated_or_missing_is_named(tmp_path):
    short = tmp_path / "short.so"
    short.write_bytes(shared_stub().read_bytes()[:5000])
    (said,) = run("call()", TRAINFAST_CUBLAS=short)
    assert f"cuBLAS cannot be opened: {short} is truncated or not a library" in said
    (said,) = run("call()", TRAINFAST_CUBLAS=tmp_path / "none.so")
    assert "none.so: cannot open shared object file" in said


def test_threads_share_a_handle():
    code = """
from threading import Thread
def calls():
    for i in range(20):
        out = f32(4, 4)
        _core.gemm(f32(4, 4), f32(4, 4), out)
        right.append((out == 4).all())
right = []
threads = [Thread(target=calls) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(sum(right))
"""
    code += f"print(seen({str(shared_stub())!r}).made)"
    assert run(code, TRAINFAST_CUBLAS=shared_stub()) == ["80", "1"]


# ---- The roof ------------------------------------------------------------------------


def test_roof_of_the_cpu_is_measured():
    measured = roof.roof("cpu", 0.01, side=64)
    assert set(measured.matmul) == {"float32", "bfloat16"}
    assert measured.copy > 0.1 and all(rate > 0 for rate in measured.matmul.values())
    assert "matmul float32" in str(measured) and "GB/s" in str(measured)


@pytest.mark.usefixtures("on_stub")
def test_roof_of_a_gpu_is_cublas_rate_without_torch():
    before = seen(shared_stub()).products
    measured = roof._measure(roof._NumPy(np, "stub"), 0.01, 8)
    assert set(measured.matmul) == {"float32", "tf32", "float16"}
    assert seen(shared_stub()).products > before + 3


def test_rate_counts_calls_a_second():
    rate = roof._rate(lambda: time.sleep(0.005), lambda: None, 0.05)
    assert 20 < rate < 200


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:-1"])
def test_roof_of_an_unknown_device_is_refused(name):
    with pytest.raises(ValueError, match="`device` must be cpu, cuda or cuda:<index>"):
        roof.roof(name)


def test_roof_of_a_missing_gpu_names_the_remedy(capsys):
    from trainfast import cli

    assert cli.main(["roof", "--device", "cuda:99"]) == 1
    assert "see `trainfast env`" in capsys.readouterr().err


def test_roof_without_torch_or_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setattr(roof, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install torch"):
        roof.roof("cuda")
    assert set(roof.roof("cpu", 0.0, side=8).matmul) == {"float32"}
