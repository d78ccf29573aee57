"""Compiles the backend `wide` to a library that TRAINFAST_WIDE_LIBRARY can name.

    python tests/wide/build.py

builds it and prints its path. With TRAINFAST_SANITIZE set, as for setup.py, it gets
these sanitizers. Nothing is compiled again until a source or the command changes.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from multiprocessing.pool import ThreadPool
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILT = ROOT / "build" / "wide"
SOURCES = [*sorted(HERE.glob("*.c"))]
CORE = ("cpuid", "cpus", "neighbour_find", "neighbour_grid", "neighbour_search")
CORE += ("openmp", "parallel", "scratch")
SOURCES += [ROOT / "csrc" / f"{name}.c" for name in CORE]
# Optimised fully it compiles for longer than the whole module.
FLAGS = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-DNDEBUG"]
FLAGS += ["-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
FLAGS += [f"-I{ROOT / 'csrc'}", f"-I{HERE}"]
X86 = ["-mssse3", "-msse4.2", "-mpopcnt", "-mcx16", "-mprefer-vector-width=256"]
X86 += ["-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mpclmul"]
LINK = ["-shared", "-Wl,-z,now,-z,defs", "-lpthread", "-ldl", "-lm"]


class NoCompiler(RuntimeError):
    """There is no C compiler here."""


def _compiler():
    words = shlex.split(os.environ.get("CC", "cc"))
    if not shutil.which(words[0]):
        raise NoCompiler(f"a C compiler must be on PATH, got no {words[0]}")
    return words


def _run(command):
    # A sanitizer that is preloaded into Python is none of the compiler's business.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def build():
    """The path of the library, compiled if it is not up to date."""
    command = [*_compiler(), *FLAGS]
    if platform.machine() == "x86_64":
        command += X86
    if sanitizers := os.environ.get("TRAINFAST_SANITIZE"):
        command += ["-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
        # As in setup.py: these take half of the time to compile and say little here.
        command += ["-fno-sanitize=null,pointer-overflow,object-size"]
    version = _run([command[0], "--version"])
    digest = hashlib.sha256(repr((command, LINK, version)).encode())
    for folder in ("csrc", "csrc/simd", "csrc/kernels", HERE):
        for path in sorted((ROOT / folder).glob("*.[ch]")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    target = BUILT / f"libtrainfast_wide-{digest.hexdigest()[:20]}.so"
    if target.exists():
        return target
    BUILT.mkdir(parents=True, exist_ok=True)
    objects = [BUILT / f"{path.stem}.{os.getpid()}.o" for path in SOURCES]
    jobs = [
        [*command, "-c", path, "-o", made]
        for path, made in zip(SOURCES, objects, strict=True)
    ]
    with ThreadPool(len(os.sched_getaffinity(0))) as pool:
        pool.map(_run, jobs, chunksize=1)
    fresh = BUILT / f"fresh.{os.getpid()}"
    _run([*command, *objects, *LINK, "-o", fresh])
    for made in objects:
        made.unlink()
    fresh.replace(target)  # a process that has an old one loaded lives on
    return target


if __name__ == "__main__":
    print(build())
