"""Compiles the sources of cuda/ for the CPU, with the SIMT runner in place of NVRTC and
the twin of its driver in place of the GPU's.

    python tests/simt/build.py [plain|address|thread|portable]

builds the library and prints its path. `address` and `thread` add that sanitizer; such
a library can only be loaded by a program that is built with it, see `program()`.
`portable` switches fibers as on processors other than x86-64.
Nothing is compiled again until a source, a flag or the compiler changes.
"""

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import get_ident

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILT = ROOT / "build" / "simt"

MODES = {
    "plain": ["-O2", "-g1"],
    "address": ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover"],
    "thread": ["-O1", "-g1", "-fsanitize=thread"],
    "portable": ["-O1", "-g1"],
}
# These make half of the code, and say little that the address sanitizer does not; sizes
# at which integers overflow are none that the runner could run.
UNSEEN = "null,pointer-overflow,object-size,vptr,signed-integer-overflow"
MODES["address"] += [f"-fno-sanitize={UNSEEN}"]
# Each access asks by a call, as under ThreadSanitizer: written out in place, the checks
# take gcc nearly half of its time.
MODES["address"] += ["--param", "asan-instrumentation-with-call-threshold=0"]
# The runner tells the sanitizer about its fibers, but is not looked at itself; nor are
# the harnesses, which would spend most of the time on their plain loops.
RUNNER_MODES = {
    "plain": ["-O2", "-g1"],
    "address": ["-O2", "-g", "-DSIMT_ADDRESS"],
    "thread": ["-O2", "-g", "-DSIMT_THREAD"],
    "portable": ["-O1", "-g1", "-DSIMT_UCONTEXT"],
}
# -ffp-contract=off as NVRTC's -fmad=false: what is fused says so.
FLAGS = ["-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
FLAGS += ["-Wall", "-Wextra", "-Werror"]
CXX_FLAGS = ["-std=c++17", "-Wno-unknown-pragmas"]  # of unroll
C_FLAGS = ["-std=c11", "-DTFAST_SIMT"]
CUDA = ROOT / "cuda"
INCLUDED = [HERE, CUDA / "device", CUDA, ROOT / "csrc"]
RUNNER = [HERE / name for name in ("fibers.cpp", "warp.cpp")]
DRIVER = [HERE / name for name in ("driver_twin.cpp", "work.cpp", "images.cpp")]


class NoCompiler(RuntimeError):
    """There is no compiler here."""


def compiler(language):
    variable, *usual = ("CC", "gcc", "cc") if language == "c" else ("CXX", "g++", "c++")
    words = shlex.split(os.environ.get(variable, ""))
    for name in [words[:1], *([name] for name in usual)]:
        if name and shutil.which(name[0]):
            return words if name == words[:1] else name
    long = "C" if language == "c" else "C++"
    raise NoCompiler(
        f"a {long} compiler must be on PATH, got none (install {usual[0]})"
    )


def library_of(cuda):
    """Sources of the library: the kernels and the host's files that lie in `cuda`, and
    the twin of the driver."""
    return [*sorted(cuda.glob("device/*.cu")), *sorted(cuda.glob("*.c")), *DRIVER]


def _run(command):
    # A sanitizer that is preloaded into Python is none of the compiler's business.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(map(str, command))}\n{done.stderr}")


def _key(command, files):
    """Changes with a command, with the compiler behind it and with these files."""
    version = subprocess.run([command[0], "--version"], capture_output=True).stdout
    digest = hashlib.sha256(repr(command).encode() + version)
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def locked(target):
    """For one thread of one process at a time: others may come to build the same."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f"{target.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(command, source, objects=BUILT / "objects"):
    """The object of a source file, named after all that it can depend on."""
    folders = dict.fromkeys([source.parent, *INCLUDED])
    headers = [file for folder in folders for file in sorted(folder.glob("*.*h"))]
    key = _key(command, [source, *headers])
    target = objects / f"{source.stem}-{key}.o"
    with locked(target):
        if not target.exists():
            fresh = target.with_name(f"{target.name}.{os.getpid()}.{get_ident()}")
            language = "c" if source.suffix == ".c" else "c++"
            _run([*command, "-x", language, "-c", source, "-o", fresh])
            fresh.replace(target)
    return target


def _build(target, mode, sources, link):
    """Compiles `sources` and the runner, and links them to `target`."""
    cxx = compiler("c++")
    start = {".cu": [*cxx, *CXX_FLAGS, *MODES[mode]]}
    start[".cpp"] = [*cxx, *CXX_FLAGS, *RUNNER_MODES[mode]]
    start[".c"] = [*compiler("c"), *C_FLAGS, *MODES[mode]]
    include = [f"-I{folder}" for folder in INCLUDED]
    jobs = [
        ([*start[path.suffix], *FLAGS, *include], path) for path in [*sources, *RUNNER]
    ]
    with locked(target):
        with ThreadPool(len(os.sched_getaffinity(0))) as pool:
            objects = pool.starmap(_compile, jobs, chunksize=1)
        command = [*cxx, *MODES[mode], *link, *map(str, objects)]
        stamp = target.with_name(f"{target.name}.key")
        key = _key(command, [])
        if target.exists() and stamp.exists() and stamp.read_text() == key:
            return target
        fresh = target.with_name(f"{target.name}.{os.getpid()}")
        _run([*command, "-o", fresh])
        fresh.replace(target)  # a process that has the old one loaded lives on
        stamp.write_text(key)
    return target


def build(mode="plain"):
    """The path of the library for `mode`, compiled if it is not up to date."""
    suffix = "" if mode == "plain" else f"_{mode}"
    target = BUILT / f"libtrainfast_simt{suffix}.so"
    link = ["-shared", "-Wl,-z,now", "-lpthread", "-ldl"]
    return _build(target, mode, library_of(CUDA), link)


def program(mode, sources, target):
    """Builds a program from sources and the runner, as `build` does."""
    return _build(Path(target), mode, list(sources), ["-lpthread", "-ldl"])


if __name__ == "__main__":
    modes = sys.argv[1:] or ["plain"]
    if not set(modes) <= set(MODES):
        sys.exit(f"the mode must be one of {', '.join(MODES)}, got {shlex.join(modes)}")
    for mode in modes:
        print(build(mode))
