"""What building and installing does: from the tree, from a wheel, from the sdist."""

import fcntl
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import trainfast

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "trainfast/libtrainfast_cuda.so"
spec = importlib.util.spec_from_file_location("nvrtc", ROOT / "cuda/nvrtc.py")
nvrtc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nvrtc)
WHEEL = "cp311-abi3-linux_"


def python(code, *options, **kwargs):
    """What another interpreter prints; -P: only what is installed can be imported."""
    command = [sys.executable, "-P", *options, "-c", code]
    return subprocess.check_output(command, text=True, **kwargs).strip()


# ---- Wheels ------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")), reason="needs a C compiler"
)


def build(source, command, out, cuda="0", **settings):
    """Builds "sdist" or "wheel" of the tree at `source` into the folder `out`."""
    # A package in the tree must not stand in for one that is missing: -P again.
    code = f"""
import sys
sys.path.insert(0, "cuda")
import build_backend as backend
print(backend.build_{command}({str(out)!r}))
"""
    out.mkdir(exist_ok=True)
    environment = {**os.environ, "TRAINFAST_CUDA": cuda, **settings}
    if not settings:
        environment.pop("TRAINFAST_CUDA_ARCHS", None)
    name = python(code, cwd=source, env=environment).splitlines()[-1]
    return out / name


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The sdist, made from a copy so that the tree's own build/ stays as it is."""
    tree = tmp_path_factory.mktemp("tree") / "trainfast"
    ignored = (".git", ".venv", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*ignored))
    (tree / "trainfast/_core.abi3.so").write_bytes(b"of an earlier build in place")
    return build(tree, "sdist", tree.parent / "dist")


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    """The sdist, unpacked in an otherwise empty directory."""
    empty = tmp_path_factory.mktemp("empty")
    with tarfile.open(sdist) as archive:
        # Python has the filter from 3.11.4 on.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(empty)
    (tree,) = empty.iterdir()
    assert list(tree.rglob("*.[do]")) == []
    take_objects(tree)
    return tree


def take_objects(tree):
    """Gives the tree at `tree` this tree's objects. One is compiled again if a file of
    it is newer or not there, and a source that is not there is not linked."""
    objects = Path("build/objects")
    if (ROOT / objects).exists():
        with open(ROOT / objects / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # while nobody builds
            shutil.copytree(ROOT / objects, tree / objects)


@pytest.fixture(scope="module")
def wheel(unpacked):
    return build(unpacked, "wheel", unpacked.parent / "dist")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the wheel installed in it and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.check_call([*pip, "--target", str(target), str(wheel)])
    return target


def names(archive):
    with zipfile.ZipFile(archive) as file:
        return set(file.namelist())


@pytest.mark.slow
def test_sdist_holds_everything_that_is_needed(unpacked):
    kinds = (".c", ".h", ".cu", ".cuh", ".cpp", ".py", ".pyi", ".typed", ".md")
    tops = (".ci", "benchmarks", "csrc", "cuda", "docs", "examples", "tests")
    tree = {
        path.relative_to(ROOT)
        for top in (*tops, "trainfast")
        for path in (ROOT / top).rglob("*")
        if path.suffix in kinds
    }
    tree |= {Path(name) for name in ("LICENSE", "Makefile", "README.md", ".ci/run")}
    assert len(tree) > 40
    assert {path for path in tree if not (unpacked / path).exists()} == set()
    assert list(unpacked.rglob("*.so")) == []


@needs_compiler
@pytest.mark.slow
def test_wheel_of_sdist_is_tagged_for_every_python_from_311(wheel):
    assert f"-{WHEEL}" in wheel.name
    inside = names(wheel)
    assert {"trainfast/_core.abi3.so", "trainfast/_core.pyi"} <= inside
    assert "trainfast/py.typed" in inside
    assert any(name.endswith("licenses/LICENSE") for name in inside) or any(
        name.endswith("dist-info/LICENSE") for name in inside
    )
    strangers = {name for name in inside if not name.startswith("trainfast")}
    assert strangers == set()


@needs_compiler
@pytest.mark.slow
def test_wheel_without_cuda_has_no_cuda_library(wheel):
    assert LIBRARY not in names(wheel)


@needs_compiler
@pytest.mark.slow
def test_installed_wheel_works_without_the_tree(installed, tmp_path):
    code = """
import numpy as np
import trainfast
print(trainfast.__file__)
param, grad, m, v = (np.full(5, value, np.float32) for value in (1, 1, 0, 0))
trainfast.numpy.adamw_step([param], [grad], [m], [v], step=1, lr=0.1,
                           betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
print(np.allclose(param, 0.9))
"""
    path = {**os.environ, "PYTHONPATH": str(installed)}
    lines = python(code, cwd=tmp_path, env=path).splitlines()
    assert lines == [str(installed / "trainfast/__init__.py"), "True"]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("editable", [False, True])
def test_pip_installs_the_folder(unpacked, wheel, tmp_path, editable):
    """`pip install .` and `pip install -e .`"""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-build-isolation", "--ignore-installed", "--prefix", str(tmp_path)]
    pip += ["--editable"] if editable else []
    environment = {**os.environ, "TRAINFAST_CUDA": "0"}
    environment["PIP_CONFIG_FILE"] = os.devnull
    subprocess.check_call([*pip, str(unpacked)], env=environment)
    (site,) = tmp_path.rglob("site-packages")
    code = f"""
import os, site, sys
sys.path[:] = [p for p in sys.path if not os.path.exists(p + "/trainfast")]
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f)]
site.addsitedir({str(site)!r})
sys.path.insert(0, {str(site)!r})
import trainfast
print(trainfast.__file__)
print([b["name"] for b in trainfast.backends() if b["in_use"]] != [])
"""
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    where = unpacked if editable else site
    lines = python(code, cwd=tmp_path, env=plain).splitlines()
    assert lines == [str(where / "trainfast/__init__.py"), "True"]


@needs_compiler
@pytest.mark.slow
def test_wheel_does_not_keep_the_cuda_library_of_an_earlier_build(unpacked, wheel):
    """setuptools reuses build/lib, where another build's library may still lie."""
    (left,) = unpacked.glob("build/lib*/trainfast")
    (left / "libtrainfast_cuda.so").write_bytes(b"of an earlier build with CUDA")
    again = build(unpacked, "wheel", unpacked.parent / "again")
    assert LIBRARY not in names(again)


@needs_compiler
@pytest.mark.slow
def test_wheel_with_failing_nvrtc_is_for_the_cpu_and_says_so(unpacked, wheel, tmp_path):
    broken = tmp_path / "libnvrtc.so.12"
    broken.write_text("not a library")
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib"]
    environment = {**os.environ, "TRAINFAST_NVRTC": str(broken)}
    environment.pop("TRAINFAST_WERROR", None)

    def run(want):
        library = tmp_path / want
        done = subprocess.run(
            [*command, str(library)],
            cwd=unpacked,
            env={**environment, "TRAINFAST_CUDA": want},
            capture_output=True,
            text=True,
        )
        return done, sorted(path.name for path in library.rglob("*.so"))

    done, built = run("auto")
    assert done.returncode == 0
    assert built == ["_core.abi3.so"]
    assert "ERROR: CUDA failed, so this build is for the CPU only" in done.stdout
    assert "NVRTC cannot be opened" in done.stdout
    done, _ = run("1")
    assert done.returncode != 0
    assert "NVRTC cannot be opened" in done.stderr


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(not nvrtc.find(), reason="needs NVRTC")
def test_wheel_of_sdist_with_images_has_cuda_without_nvrtc(unpacked, tmp_path):
    """Those of one architecture, which this tree has compiled, or it takes minutes."""
    said = ROOT / "build/objects/cuda.json"
    archs = list(json.loads(said.read_text())) if said.exists() else []
    if not archs:
        pytest.skip("needs a build with CUDA")
    settings = {"TRAINFAST_CUDA_ARCHS": archs[-1]}  # whose PTX was compiled, too
    made = build(unpacked, "sdist", tmp_path / "sdist", cuda="1", **settings)
    with tarfile.open(made) as archive:
        # Python has the filter from 3.11.4 on.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path / "tree")
    (tree,) = (tmp_path / "tree").iterdir()
    take_objects(tree)
    nowhere = {"TRAINFAST_NVRTC": str(tmp_path / "nowhere"), "TRAINFAST_CUDA_ARCHS": ""}
    with_cuda = build(tree, "wheel", tmp_path / "wheel", cuda="1", **nowhere)
    assert LIBRARY in names(with_cuda)


@needs_compiler
@pytest.mark.slow
def test_build_compiles_only_what_changed(unpacked, wheel):
    command = [sys.executable, "setup.py", "-q", "build"]
    environment = {**os.environ, "TRAINFAST_CUDA": "0"}

    def compiled():
        out = subprocess.check_output(command, cwd=unpacked, env=environment, text=True)
        return int(out.split("compiled ")[1].split()[0]) if "compiled" in out else 0

    compiled()
    assert compiled() == 0
    (unpacked / "csrc/status.c").touch()
    assert compiled() == 1
    (unpacked / "csrc/graph_cache/cache.h").touch()  # a few files have it
    assert 1 < compiled() < 20


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TRAINFAST_CUDA", "yes", "TRAINFAST_CUDA must be auto, 0 or 1, got 'yes'"),
        ("CC", "/nowhere/cc", "CC must name a compiler, got '/nowhere/cc'"),
        ("CFLAGS", "-include nowhere.h", "nowhere.h"),
    ],
)
def test_build_with_wrong_setting_fails_and_says_why(
    unpacked, tmp_path, name, value, message
):
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(tmp_path)]
    environment = {**os.environ, "TRAINFAST_CUDA": "0", name: value}
    done = subprocess.run(
        command, cwd=unpacked, env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("debug", ["1", "0"])
def test_debug_build_has_symbols_and_asserts(unpacked, tmp_path, debug):
    """What a compiler that only writes down its words is told; .ci/sanitize runs the
    tests on such a build."""
    said = tmp_path / "said"
    command(
        tmp_path / "cc",
        f"""case $1 in -dumpmachine) echo x86_64-linux-gnu; exit;; esac
        echo "$@" >>"{said}"
        while [ "$#" -gt 0 ] && [ "$1" != -o ]; do shift; done
        touch "$2"
        """,
    )
    environment = {**os.environ, "TRAINFAST_DEBUG": debug, "TRAINFAST_CUDA": "0"}
    environment["CC"] = shlex.quote(str(tmp_path / "cc"))
    build = ["setup.py", "-q", "build", "--build-lib", str(tmp_path / "lib")]
    subprocess.check_call([sys.executable, *build], cwd=unpacked, env=environment)
    lines = [set(line.split()) for line in said.read_text().splitlines()]
    compiled = [words for words in lines if "-c" in words]
    (linked,) = [words for words in lines if "-c" not in words]
    assert len(compiled) > 40
    for words in compiled:
        assert ({"-g", "-O1"} <= words) == (debug == "1")
        assert ("-DNDEBUG" in words) == (debug == "0")
    assert ("-s" in linked) == (debug == "0")


# ---- setup.py's own decisions ------------------------------------------------------

SETUP = """
import runpy, sys
from pathlib import Path
import setuptools
setuptools.setup = lambda **_: None
made = runpy.run_path("setup.py")
"""


def test_setup_refuses_a_python_without_a_gil():
    code = "import sysconfig\nsysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1\n"
    done = subprocess.run(
        [sys.executable, "-c", code + SETUP], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "Python must have its GIL, got a free-threaded build" in done.stderr


def test_setup_needs_neither_torch_nor_numpy_to_say_what_it_is():
    code = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None  # importing them fails
sys.argv = ["setup.py", "--version"]
exec(compile(open("setup.py").read(), "setup.py", "exec"))
"""
    assert python(code, cwd=ROOT).splitlines()[-1] == trainfast.__version__


def command(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("want", "said"),
    [
        (
            "auto",
            "trainfast: CPU only (NVRTC was not found; "
            "TRAINFAST_CUDA=1 pip install . brings it)",
        ),
        ("0", "trainfast: CPU only (TRAINFAST_CUDA=0)"),
        (
            "1",
            "CompileError with TRAINFAST_CUDA=1 there must be NVRTC, but NVRTC was not "
            "found; pip install nvidia-cuda-nvrtc-cu12==12.9.86, or name its "
            "libnvrtc.so.12 in TRAINFAST_NVRTC",
        ),
    ],
)
def test_build_without_nvrtc_is_for_the_cpu_or_says_what_it_lacks(tmp_path, want, said):
    code = (
        SETUP
        + """
made["nvrtc"].find = lambda: None
try:
    print(made["try_cuda"](lambda: made["link_cuda"](Path(sys.argv[1]), False)))
except Exception as error:
    print(type(error).__name__, error)
"""
    )
    settings = {"TRAINFAST_CUDA": want, "TRAINFAST_CUDA_ARCHS": "75"}
    lines = subprocess.check_output(
        [sys.executable, "-c", code, str(tmp_path / "library.so")],
        cwd=ROOT,
        env={**os.environ, **settings},
        text=True,
    ).splitlines()
    assert lines == ([said] if want == "1" else [said, "False"])


# ---- The Python that is too old ----------------------------------------------------


def test_makefile_names_the_python_it_needs(tmp_path):
    """With an interpreter that says it is 3.9, make stops with a clear line."""
    make = shutil.which("make")
    if not make:
        pytest.skip("needs make")
    tree = tmp_path / "tree"
    (tree / ".ci").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tree / name)
    script = (ROOT / ".ci/venv.py").read_text()
    old = "import sys\nsys.version_info = (3, 9, 18)\n"
    (tree / ".ci/venv.py").write_text(old + script)
    done = subprocess.run(
        [make, "test", f"PYTHON={sys.executable}"],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "python must be 3.11 or newer, got 3.9.18" in done.stderr
    assert not (tree / ".venv").exists()
