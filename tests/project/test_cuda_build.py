"""The build of CUDA's machine code: when NVRTC is needed, what is compiled for which
GPUs, and what becomes of the results. Where NVRTC is not installed, what needs it is
skipped, and fails with TRAINFAST_CUDA=1."""

import ctypes
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "cuda"))
try:
    import build_cuda
    import nvrtc
finally:
    sys.path.remove(str(ROOT / "cuda"))

CC = [shutil.which("cc") or shutil.which("gcc") or "cc"]
needs_compiler = pytest.mark.skipif(not shutil.which(CC[0]), reason="needs a compiler")
WHEEL = "nvidia-cuda-nvrtc-cu12==12.9.86"


@pytest.fixture
def plain(monkeypatch, tmp_path):
    """An empty source tree on a machine without a GPU, and no settings."""
    for name in ("TRAINFAST_CUDA", "TRAINFAST_CUDA_ARCHS", "TRAINFAST_NVRTC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(nvrtc, "gpu_archs", lambda: [])
    monkeypatch.setattr(nvrtc, "has_gpu", lambda: False)
    monkeypatch.chdir(tmp_path)
    return monkeypatch


# ---- When NVRTC is asked for ---------------------------------------------------------


@pytest.mark.parametrize(
    ("want", "gpu", "more", "needed"),
    [
        ("1", False, {}, True),
        ("auto", True, {}, True),
        ("", True, {}, True),
        ("auto", False, {}, False),
        ("0", True, {}, False),
        ("yes", True, {}, False),  # setup.py says what is wrong
        ("1", True, {"TRAINFAST_NVRTC": "/opt/libnvrtc.so.12"}, False),
        ("1", True, {"prebuilt": "1"}, False),
        ("1", False, {"prebuilt": "1", "TRAINFAST_CUDA_ARCHS": "75"}, True),
    ],
)
def test_build_requires_nvrtc_only_where_it_compiles(plain, want, gpu, more, needed):
    plain.setenv("TRAINFAST_CUDA", want)
    plain.setattr(nvrtc, "has_gpu", lambda: gpu)
    for name, value in more.items():
        plain.setenv(name, value)
    if "prebuilt" in more:
        nvrtc.PREBUILT.parent.mkdir(parents=True)
        nvrtc.PREBUILT.write_text("[]")
    assert nvrtc.requirements() == ([WHEEL] if needed else [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable", "sdist"])
@pytest.mark.parametrize("want", ["0", "1"])
def test_backend_of_pyproject_adds_what_is_required(tmp_path, kind, want):
    """As pip asks it, from an environment with nothing but setuptools."""
    code = f"""
import sys, tomllib
build = tomllib.load(open("pyproject.toml", "rb"))["build-system"]
sys.path[:0] = build["backend-path"]
backend = __import__(build["build-backend"])
print(backend.get_requires_for_build_{kind}())
assert callable(backend.build_{kind})
"""
    environment = {**os.environ, "TRAINFAST_CUDA": want}
    environment.pop("TRAINFAST_NVRTC", None)
    out = subprocess.check_output(
        [sys.executable, "-P", "-c", code], cwd=ROOT, env=environment, text=True
    )
    assert out.splitlines()[-1] == str([WHEEL] if want == "1" else [])


def installed_wheel(folder, version):
    """Site-packages with a wheel of NVRTC in it."""
    about = folder / f"nvidia_cuda_nvrtc_cu12-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Name: nvidia-cuda-nvrtc-cu12\nVersion: {version}")
    library = folder / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
    library.parent.mkdir(parents=True)
    library.touch()
    return str(library)


def test_only_the_pinned_wheel_is_found(plain, tmp_path):
    other, right = tmp_path / "other", tmp_path / "right"
    installed_wheel(other, "12.8.93")
    plain.setattr(sys, "path", [str(other)])
    assert nvrtc.find() is None
    library = installed_wheel(right, "12.9.86")
    plain.setattr(sys, "path", [str(other), str(right)])
    assert nvrtc.find() == library


def test_named_library_is_used_and_must_be_there(plain, tmp_path):
    library = tmp_path / "libnvrtc.so.12"
    plain.setenv("TRAINFAST_NVRTC", str(library))
    with pytest.raises(ValueError, match=r"TRAINFAST_NVRTC must name libnvrtc\.so\.12"):
        nvrtc.find()
    library.touch()
    assert nvrtc.find() == str(library)


# ---- Architectures -------------------------------------------------------------------

KNOWN = [50, 60, 70, 75, 80, 86, 87, 89, 90, 100, 120]


@pytest.mark.parametrize(
    ("wanted", "gpus", "archs", "ptx"),
    [
        ("", [], [75, 80, 90], 80),
        ("all", [], [75, 80, 90, 120], 80),
        ("all", [86], [75, 80, 90, 120], 80),
        ("", [86], [86], None),
        ("", [75, 90], [75, 90], None),
        ("", [86, 130], [86], 80),
        ("", [130], [], 80),
        ("75", [90], [75], 75),
        ("75;86", [90], [75, 86], 80),
        ("90, 100", [], [90, 100], 80),
    ],
)
def test_architectures_are_those_of_the_gpu_or_of_the_release(
    plain, wanted, gpus, archs, ptx
):
    plain.setattr(nvrtc, "gpu_archs", lambda: gpus)
    assert build_cuda.choose_archs(KNOWN, "12.9", wanted) == (archs, ptx)


@pytest.mark.parametrize(
    ("wanted", "gpus", "said"),
    [
        (
            "sm_90",
            [],
            'TRAINFAST_CUDA_ARCHS must be "all" or numbers such as '
            "\"75;86\", got 'sm_90'",
        ),
        ("60", [], "got '60'; NVRTC 12.9 has 75, 80, 86, 87, 89, 90, 100, 120"),
        ("75;130", [], "TRAINFAST_CUDA_ARCHS must be architectures that can be built"),
        ("", [61], "the GPU's architecture must be at least 75, got 61"),
    ],
)
def test_wrong_architectures_are_named(plain, wanted, gpus, said):
    plain.setattr(nvrtc, "gpu_archs", lambda: gpus)
    with pytest.raises(Exception, match=re.escape(said)):
        build_cuda.choose_archs(KNOWN, "12.9", wanted)


def test_every_kernel_of_the_tree_is_listed(monkeypatch):
    monkeypatch.chdir(ROOT)
    listed = build_cuda.kernel_list(CC)
    files = {path.stem for path in Path("cuda/device").glob("*.cu")}
    assert set(listed) == files
    ids = [id for kernels in listed.values() for _, id, _ in kernels]
    assert len(ids) == len(set(ids)) > 100
    assert {path for kernels in listed.values() for path, _, _ in kernels} == {
        0,
        75,
        80,
    }


# ---- A small tree, compiled ----------------------------------------------------------

KERNELS_H = """
#define KERNELS_OF_fill(K) K(0, fill_2, args, 1, 32, 0, fill<float, 2>)
#define KERNELS_OF_paths(K) \\
    K(75, old, args, 1, 32, 0, on_path<75>) K(80, new, args, 1, 32, 0, on_path<80>)
#define TFAST_DEVICE_FILES(F) F(fill) F(paths)
enum { FILE_fill, FILE_paths };
enum { KERNEL_fill_2, KERNEL_old, KERNEL_new, N_KERNELS };
"""
FILL = """
#include "value.cuh"
static __device__ __noinline__ int twice(int i) { return i * 2; }
template <typename T, int N> __global__ void fill(T *x)
{
    x[twice(threadIdx.x)] = N * VALUE;
}
"""
PATHS = "template <int PATH> __global__ void on_path(int *x) { *x = PATH; }\n"


@pytest.fixture
def tree(plain, tmp_path):
    device = tmp_path / "cuda/device"
    device.mkdir(parents=True)
    (tmp_path / "cuda/kernels.h").write_text(KERNELS_H)
    shutil.copy(ROOT / "cuda/images.h", tmp_path / "cuda")
    (device / "fill.cu").write_text(FILL)
    (device / "value.cuh").write_text("#define VALUE 3\n")
    (device / "paths.cu").write_text(PATHS)
    return tmp_path


LIBRARY = nvrtc.find()


@pytest.fixture
def compiled(tree, plain):
    """A function that builds the tree's images and returns them with what was said."""
    if not LIBRARY:
        assert os.environ.get("TRAINFAST_CUDA") != "1", f"pip install {WHEEL}"
        pytest.skip("needs NVRTC")
    plain.setenv("TRAINFAST_NVRTC", LIBRARY)
    plain.setenv("TRAINFAST_CUDA_ARCHS", "75;80")

    def build(force=False, strict=False):
        said = []
        kernels, images = build_cuda.find_images(
            CC,
            "build",
            release=False,
            force=force,
            say=said.append,
            strict=strict,
        )
        return kernels, images, said

    return build


@needs_compiler
def test_each_architecture_has_the_kernels_of_its_path(compiled):
    _, images, said = compiled()
    names = {image.filename: image.names for image in images}
    fill = {"fill_2": "_Z4fillIfLi2EEvPT_"}
    assert names == {
        "fill.sm_75.cubin": fill,
        "fill.sm_80.cubin": fill,
        "fill.compute_80.ptx": fill,
        "paths.sm_75.cubin": {"old": "_Z7on_pathILi75EEvPi"},
        "paths.sm_80.cubin": {"new": "_Z7on_pathILi80EEvPi"},
        "paths.compute_80.ptx": {"new": "_Z7on_pathILi80EEvPi"},
    }
    assert said[0].startswith("compiling 6 of 6 files of device code by NVRTC 12.9 for")
    for image in images:
        data = Path(image.path).read_bytes()
        assert data.endswith(b"\0") if image.is_ptx else data.startswith(b"\x7fELF")
        for id, values in image.registers.items():
            assert 2 <= values["registers"] <= 32 and values["spill_stores"] == 0, id
        assert set(image.registers) == (set() if image.is_ptx else set(image.names))


@needs_compiler
def test_only_changed_content_is_compiled_again(compiled, tree):
    compiled()
    (tree / "cuda/device/fill.cu").touch()
    assert compiled()[2] == []
    (tree / "cuda/device/value.cuh").write_text("#define VALUE 4\n")
    assert compiled()[2][0].startswith("compiling 3 of 6 files")
    (tree / "cuda/device/value.cuh").write_text("#define VALUE 3\n")
    assert compiled()[2] == []


@needs_compiler
def test_source_changed_while_it_is_compiled_is_not_kept(compiled, tree, plain):
    run = build_cuda.Compiler.run

    def saved_meanwhile(self, *job):
        if job:
            (tree / "cuda/device/value.cuh").write_text("#define VALUE 4\n")
        return run(self, *job)

    plain.setattr(build_cuda.Compiler, "run", saved_meanwhile)
    with pytest.raises(build_cuda.CompileError, match="was changed while it was"):
        compiled()
    assert list(tree.glob("build/*/fill.*.json")) == []


@needs_compiler
def test_same_source_gives_the_same_bytes(compiled):
    _, images, _ = compiled()
    first = [Path(image.path).read_bytes() for image in images]
    assert [b"INTERNAL" in data for data in first[:2]] == [True, True]  # of twice()
    again, said = compiled(force=True)[1:]
    assert "compiled 6 of 6" in said[-1]
    assert [Path(image.path).read_bytes() for image in again] == first


@needs_compiler
def test_error_in_device_code_names_file_and_line(compiled, tree):
    (tree / "cuda/device/paths.cu").write_text(PATHS + "int wrong = missing;\n")
    said = r'cuda/device/paths.cu\(2\): error: identifier "missing" is undefined'
    with pytest.raises(build_cuda.CompileError, match=said):
        compiled()


@needs_compiler
def test_warning_is_an_error_only_where_warnings_are(compiled, tree, capfd):
    code = PATHS.replace("*x =", "int unused = 1; *x =")
    (tree / "cuda/device/paths.cu").write_text(code)
    compiled()
    assert 'variable "unused" was declared' in capfd.readouterr().out
    with pytest.raises(build_cuda.CompileError, match="warnings are errors"):
        compiled(strict=True)


class Row(ctypes.Structure):
    """tfast_image of cuda/images.h."""

    _fields_ = (
        ("arch", ctypes.c_int),
        ("file", ctypes.c_int),
        ("is_ptx", ctypes.c_bool),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
    )


@needs_compiler
def test_library_carries_the_images(compiled, tree):
    kernels, images, _ = compiled()
    source = build_cuda.write_images(kernels, images, "build")
    assert build_cuda.write_images(kernels, images, "build") == source
    library = tree / "images.so"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Icuda"]
    subprocess.check_call([*CC, *flags, source, "-o", str(library)])
    opened = ctypes.CDLL(str(library))
    count = ctypes.c_int.in_dll(opened, "tfast_n_images").value
    rows = (Row * count).in_dll(opened, "tfast_images")
    assert [(row.arch, row.file, row.is_ptx) for row in rows] == [
        (75, 0, False),
        (80, 0, False),
        (80, 0, True),
        (75, 1, False),
        (80, 1, False),
        (80, 1, True),
    ]
    for row, image in zip(rows, images, strict=True):
        data = ctypes.string_at(row.data, row.bytes)
        assert data == Path(image.path).read_bytes()
        assert row.data % 64 == 0
    names = (ctypes.c_char_p * 3).in_dll(opened, "tfast_kernel_names")
    assert names[1] == b"_Z7on_pathILi75EEvPi"
    mapped = Path("/proc/self/maps").read_text().splitlines()
    (place,) = [line for line in mapped if holds(line, rows[0].data)]
    assert " r--p " in place  # neither written nor run
    said = json.loads(Path("build/cuda.json").read_text())
    assert {arch: set(ids) for arch, ids in said.items()} == {
        "75": {"fill_2", "old"},
        "80": {"fill_2", "new"},
    }


def holds(line, address):
    first, last = line.split()[0].split("-")
    return int(first, 16) <= address < int(last, 16)


@needs_compiler
def test_sdist_with_images_needs_no_nvrtc_until_its_code_changes(compiled, tree, plain):
    _, images, _ = compiled()
    build_cuda.save_prebuilt(images, tree)
    for name in ("TRAINFAST_CUDA_ARCHS", "TRAINFAST_NVRTC"):
        plain.delenv(name)
    plain.setattr(nvrtc, "find", lambda: None)
    _, carried, said = compiled()
    assert said == []
    for image, other in zip(images, carried, strict=True):
        assert Path(other.path).parent == Path("cuda/images")
        assert Path(other.path).read_bytes() == Path(image.path).read_bytes()
        assert (other.names, other.registers) == (image.names, image.registers)
    (tree / "cuda/device/value.cuh").write_text("#define VALUE 4\n")
    rule = "cuda/images/ is of other sources than these, and NVRTC was not found"
    with pytest.raises(build_cuda.NoNvrtc, match=rule):
        compiled()


def test_kernel_has_one_name_for_all_architectures():
    image = build_cuda.Image("fill", 0, 75, False, {}, "", names={"fill_2": "_Z1a"})
    other = build_cuda.replace(image, arch=80, names={"fill_2": "_Z1b"})
    with pytest.raises(build_cuda.CompileError, match="fill_2 must have one name"):
        build_cuda.kernel_names([image, other])


# ---- What ptxas said of the kernels --------------------------------------------------

# Architectures and kernels that use local memory: how many bytes at most, and why.
BLOCKS = "around calls of the loops for the usual slots, and in the loop for any slot"
REGISTERS = "the compiler needs more registers on sm_120"
SLOW = {
    ".* plain_.*": (math.inf, "up to 256 dims in registers, in float64 too"),
    "(75|80) adamw_BLOCKS": (244, BLOCKS),
    "90 adamw_BLOCKS": (308, BLOCKS),
    "120 adamw_BLOCKS": (168, BLOCKS),
    "75 backward_75_mma_bf16_as_f16_256_1_1": (8, "it fills all 255 registers"),
    "120 forward_80_mma_.*_192_0": (24, REGISTERS),
    "120 forward_80_mma_.*_192_1": (8, REGISTERS),
    "120 forward_80_mma_.*_256_1": (144, REGISTERS),
    "120 amp": (8, "with 80 registers three blocks run on a multiprocessor"),
}


def test_kernels_keep_nothing_in_local_memory():
    """Spilled registers and a stack frame (arrays that the compiler could not keep in
    registers) are both traffic that no kernel's floor counts. This is what ptxas said
    when the CUDA part was built, for all of its architectures."""
    said = ROOT / "build" / "objects" / "cuda.json"
    if not said.exists():
        assert os.environ.get("TRAINFAST_CUDA") != "1", "build with CUDA first"
        pytest.skip("needs a build with CUDA")
    archs = json.loads(said.read_text())
    assert all(archs.values())
    for arch, kernels in archs.items():
        for id, had in kernels.items():
            assert had["shared"] <= 48 << 10, f"{id} for sm_{arch}"
            local = max(had["stack"], had["spill_stores"], had["spill_loads"])
            of = [SLOW[name][0] for name in SLOW if re.fullmatch(name, f"{arch} {id}")]
            assert local <= max(of, default=0), f"{id} for sm_{arch}"
