"""Builds trainfast: the module trainfast._core in C, and where NVRTC is found the plain
C library libtrainfast_cuda.so beside it. pyproject.toml says everything else.

Read from the environment:
  TRAINFAST_CUDA        auto (default): with CUDA where the source carries its machine
                        code or NVRTC is found and works; 0: never; 1: or fail
  TRAINFAST_CUDA_ARCHS  "75;86", or "all" (what a release ships): compile for these. By
                        default the machine code that the source carries, or else the
                        visible GPU's own, and without a GPU 75, 80 and 90. PTX, which
                        newer GPUs run too, is added except for a visible GPU
  TRAINFAST_NVRTC       the path of a libnvrtc.so.12; by default that of the wheel
                        nvidia-cuda-nvrtc-cu12
  TRAINFAST_DEBUG=1     -O1, debug symbols, no -DNDEBUG; of no effect when it runs
  TRAINFAST_SANITIZE    address,undefined or thread: what -fsanitize= takes
  TRAINFAST_WERROR=1    warnings are errors
  CC, CFLAGS as usual; our own flags come after CFLAGS

Objects lie in build/objects/, in a folder named after their whole command, so builds
with other settings do not disturb each other and only what changed is compiled again.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError, OptionError

sys.path.insert(0, "cuda")
import build_cuda
import nvrtc

OBJECTS = Path("build/objects")
CUDA_LIBRARY = "libtrainfast_cuda.so"

DEBUG = os.environ.get("TRAINFAST_DEBUG", "0") not in ("", "0")
SANITIZE = os.environ.get("TRAINFAST_SANITIZE", "")
WERROR = os.environ.get("TRAINFAST_WERROR", "0") not in ("", "0")

# Bits must agree between instruction sets, CUDA and compilers: no contraction.
C_FLAGS = ["-std=c11", "-O3", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden"]
C_FLAGS += ["-ffp-contract=off", "-fno-math-errno"]
C_FLAGS += ["-ffunction-sections", "-fdata-sections", "-Icsrc"]
C_FLAGS += ["-Wno-psabi"]  # vectors wider than registers pass only between statics
# None of Python's own link flags: they can carry the build machine's RUNPATH.
LINK_FLAGS = ["-shared", "-Wl,--exclude-libs,ALL,--gc-sections,-z,now,--as-needed"]
LINK_LIBRARIES = ["-lpthread", "-ldl", "-lm"]

# x86-64-v2 by its parts, because -march=x86-64-v2 needs gcc 11.
X86_BASE = ["-mssse3", "-msse4.2", "-mpopcnt", "-mcx16"]
X86_AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mpclmul"]
X86_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
# By what the files of csrc/simd/ begin with, up to a "_".
X86_FLAGS = {
    "avx2": [*X86_AVX2, "-mprefer-vector-width=256"],
    "avx512": [*X86_AVX2, *X86_AVX512, "-mprefer-vector-width=512"],
}

# The folders whose files include Python.h.
PYTHON_FOLDERS = ("csrc/python/", "csrc/graph_cache/python/")

# In kernels these take half of the time to compile, and say little that the address
# sanitizer does not.
UNSEEN = "null,pointer-overflow,object-size"


def say(*words):
    print("trainfast:", *words, flush=True)


def output_of(*command):
    """What a command prints, or "" if it cannot run or fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def run(command):
    """Runs one command of a parallel build; returns what it said."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise CompileError(f"{shlex.join(command)}\n{done.stdout}")
    return done.stdout


def outdated(target):
    """Whether one of the files in an object's dependency file has changed since."""
    depends, said = target.with_suffix(".d"), target.with_suffix(".log")
    if not (target.exists() and depends.exists() and said.exists()):
        return True
    files = re.sub(r"\\\n", " ", depends.read_text()).split(":", 1)[1].split()
    built = target.stat().st_mtime_ns
    return any(
        not os.path.exists(file) or os.stat(file).st_mtime_ns > built for file in files
    )


def compile_all(jobs, force, what):
    """Compiles (command, source) pairs in parallel and returns the objects."""
    targets, stale = [], []
    for command, source in jobs:
        key = hashlib.sha256("\0".join([*command, source]).encode()).hexdigest()[:16]
        target = OBJECTS / key / (Path(source).stem + ".o")
        targets.append(target)
        if force or outdated(target):
            stale.append((command, source, target))
    if stale:
        say(f"compiling {len(stale)} of {len(jobs)} files of {what} (can take minutes)")
    start = time.monotonic()
    with ThreadPool(len(os.sched_getaffinity(0))) as pool:
        pool.map(compile_one, stale, chunksize=1)
    if stale:
        seconds = time.monotonic() - start
        say(f"compiled {len(stale)} of {len(jobs)} files of {what} in {seconds:.1f} s")
    return [str(target) for target in targets]


def compile_one(job):
    command, source, target = job
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    depends = str(target.with_suffix(".d"))
    start = time.time_ns()
    said = run([*command, "-MMD", "-MF", depends, "-c", source, "-o", str(target)])
    target.with_suffix(".log").write_text(said)
    print(said, end="", flush=True)  # of one compiler in one piece
    os.utime(target, ns=(start, start))  # a source saved while it compiles is newer


def link(command, target):
    """Links to a new file and renames it: a process that has the old one lives on."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_suffix(".new")
    print(run([*command, "-o", str(new)]), end="", flush=True)
    new.replace(target)


def c_compiler():
    """CC, or else Python's own compiler, cc or gcc: the first one that is there."""
    if os.environ.get("CC"):
        words = shlex.split(os.environ["CC"])
        if not shutil.which(words[0]):
            raise OptionError(f"CC must name a compiler, got {os.environ['CC']!r}")
        return words
    own = shlex.split(sysconfig.get_config_var("CC") or "")[:1]
    for name in [*own, "cc", "gcc"]:
        if shutil.which(name):
            return [name]
    raise CompileError("a C compiler must be on PATH, got none (install gcc)")


def c_flags(source, x86):
    flags = [*shlex.split(os.environ.get("CFLAGS", "")), *C_FLAGS]
    if x86:
        flags += X86_BASE
    if x86 and source.startswith("csrc/simd/"):
        flags += X86_FLAGS.get(Path(source).stem.partition("_")[0], [])
    if source.startswith(PYTHON_FOLDERS):
        flags += ["-DPy_LIMITED_API=0x030B0000"]
        flags += ["-isystem", sysconfig.get_paths()["include"]]
    if DEBUG or SANITIZE:
        flags += ["-O1", "-g", "-fno-omit-frame-pointer"]
    if not DEBUG:
        flags += ["-DNDEBUG"]
    if SANITIZE:
        # Reports name lines alone; following variables too takes as long as the rest.
        flags += ["-g1", f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all"]
        if source.startswith("csrc/simd/"):
            flags += [f"-fno-sanitize={UNSEEN}"]
    return [*flags, "-Werror"] if WERROR else flags


def numpy_flags():
    """For the file that knows NumPy: built on NumPy 2, it runs on 1.23 and later."""
    import numpy

    # 0x12 is NPY_2_0_API_VERSION, a name that NumPy 1's headers do not have.
    defines = ["-DNPY_NO_DEPRECATED_API=0x12", "-DNPY_TARGET_VERSION=0x10"]
    return [*defines, "-isystem", numpy.get_include()]


def compiler_and_machine():
    """The C compiler's command, and whether it compiles for x86-64."""
    cc = c_compiler()
    return cc, output_of(*cc, "-dumpmachine").startswith("x86_64")


def sanitize_or_strip():
    if SANITIZE:
        return [f"-fsanitize={SANITIZE}"]
    return [] if DEBUG else ["-s"]


def build_core(target, version, force):
    cc, x86 = compiler_and_machine()
    jobs = []
    for folder in ("csrc", "csrc/graph_cache", *PYTHON_FOLDERS, "csrc/simd"):
        for path in sorted(Path(folder).glob("*.c")):
            source = path.as_posix()
            command = [*cc, *c_flags(source, x86)]
            if source == "csrc/python/producer_numpy.c":
                command += numpy_flags()
            if source == "csrc/python/module.c":
                command += [f'-DTRAINFAST_VERSION="{version}"']
            jobs.append((command, source))
    objects = compile_all(jobs, force, f"_core with {cc[0]}")
    link([*cc, *LINK_FLAGS, *objects, *LINK_LIBRARIES, *sanitize_or_strip()], target)


# ---- CUDA ----------------------------------------------------------------------------


def cuda_images(force, release=False):
    """The list of kernels and their machine code, as cuda/build_cuda.py makes it."""
    return build_cuda.find_images(
        c_compiler(),
        OBJECTS,
        release=release,
        force=force,
        say=say,
        debug=DEBUG,
        strict=WERROR,
    )


def link_cuda(target, force):
    cc, x86 = compiler_and_machine()
    kernels, images = cuda_images(force)
    sources = sorted(path.as_posix() for path in Path("cuda").glob("*.c"))
    sources.append(build_cuda.write_images(kernels, images, OBJECTS))
    jobs = [([*cc, *c_flags(source, x86), "-Icuda"], source) for source in sources]
    words = build_cuda.words(images)
    objects = compile_all(jobs, force, f"{CUDA_LIBRARY} ({words}) with {cc[0]}")
    link([*cc, *LINK_FLAGS, *objects, *LINK_LIBRARIES, *sanitize_or_strip()], target)


def wants_cuda():
    """TRAINFAST_CUDA: "auto", "0" or "1"."""
    want = os.environ.get("TRAINFAST_CUDA", "") or "auto"
    if want not in ("auto", "0", "1"):
        raise OptionError(f"TRAINFAST_CUDA must be auto, 0 or 1, got {want!r}")
    return want


def try_cuda(make):
    """Calls make(), which needs NVRTC, as TRAINFAST_CUDA says; whether that worked."""
    want = wants_cuda()
    if want == "0":
        say("CPU only (TRAINFAST_CUDA=0)")
        return False
    try:
        make()
        return True
    except build_cuda.NoNvrtc as error:
        if want == "1":
            raise CompileError(
                f"with TRAINFAST_CUDA=1 there must be NVRTC, but {error}; "
                f"pip install {nvrtc.WHEEL}, or name its libnvrtc.so.12 in "
                "TRAINFAST_NVRTC"
            ) from None
        say(f"CPU only ({error}; TRAINFAST_CUDA=1 pip install . brings it)")
    except (CompileError, OSError) as error:
        if want == "1" or WERROR:
            raise
        say(f"ERROR: CUDA failed, so this build is for the CPU only:\n{error}")
    return False


class Build(build_ext):
    """One module and one plain library beside it; setuptools knows only the first."""

    def build_extension(self, ext):
        module = Path(self.get_ext_fullpath(ext.name))
        OBJECTS.mkdir(parents=True, exist_ok=True)
        with open(OBJECTS / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # `make -j test demo` builds only once
            build_core(module, self.distribution.get_version(), self.force)
            self.library = module.with_name(CUDA_LIBRARY)
            self.library.unlink(missing_ok=True)  # of a build with other settings
            self.with_cuda = try_cuda(lambda: link_cuda(self.library, self.force))

    def copy_extensions_to_source(self):
        """For editable installs, which run the module from the source folder."""
        super().copy_extensions_to_source()
        copy = Path("trainfast", CUDA_LIBRARY)
        if self.with_cuda:
            self.copy_file(str(self.library), str(copy))
        else:
            copy.unlink(missing_ok=True)

    def get_outputs(self):
        library = getattr(self, "library", None)
        found = [str(library)] if library and self.with_cuda else []
        return [*super().get_outputs(), *found]


class Sdist(sdist):
    """Adds the machine code for all GPUs, so that who installs it needs no NVRTC."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        if not nvrtc.uses_prebuilt():  # or it is among the files
            OBJECTS.mkdir(parents=True, exist_ok=True)
            try_cuda(lambda: self.add_images(Path(base_dir)))

    def add_images(self, root):
        with open(OBJECTS / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _, images = cuda_images(False, release=True)
            build_cuda.save_prebuilt(images, root)


if not sys.platform.startswith("linux"):
    raise SystemExit(f"the platform must be Linux, got {sys.platform}")
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit("Python must have its GIL, got a free-threaded build")

setup(
    license="Apache-2.0",
    ext_modules=[Extension("trainfast._core", [], py_limited_api=True)],
    cmdclass={"build_ext": Build, "sdist": Sdist},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
