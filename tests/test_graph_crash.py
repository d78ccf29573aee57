"""The graph cache after a loss of power, on a full disk, after failed syncs and without
memory: graph_crash_harness.c runs csrc/graph_cache on a disk in memory that has these
faults at every place in turn, under AddressSanitizer and UBSan. It tries
TRAINFAST_CRASH_VARIANTS (16) variants of each loss, chosen by TRAINFAST_CRASH_SEED.
"""

import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CSRC = TESTS.parent / "csrc"
CORE = sorted((CSRC / "graph_cache").glob("*.c"))
HELPERS = ("status.c", "scratch.c", "parallel.c", "openmp.c", "cpus.c", "cpuid.c")
COMPILER = shutil.which(os.environ.get("CC", "cc").split()[0])
FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
FLAGS += ["-D_DEFAULT_SOURCE", "-D_POSIX_C_SOURCE=200809L"]
FLAGS += ["-msse4.2"] if platform.machine() == "x86_64" else []
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
ALLOCATIONS = ("malloc", "calloc", "realloc", "posix_memalign")


def compile_with(*arguments):
    command = [COMPILER, *FLAGS, *arguments]
    done = subprocess.run([str(a) for a in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def has_sanitizers(folder):
    source = folder / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    command = [COMPILER, *SANITIZE, str(source), "-o", str(folder / "empty")]
    if subprocess.run(command, capture_output=True).returncode:
        return False
    return subprocess.run([str(folder / "empty")], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    if not COMPILER:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("graph_crash")
    sanitize = SANITIZE if has_sanitizers(folder) else []
    tested = [f"-D{name}=tested_{name}" for name in ALLOCATIONS]
    objects = []
    for source in CORE:
        objects.append(folder / f"{source.stem}.o")
        compile_with(*sanitize, *tested, "-c", source, "-o", objects[-1])
    sources = [TESTS / "graph_crash_harness.c", *(CSRC / name for name in HELPERS)]
    program = folder / "campaign"
    libraries = ["-pthread", "-ldl", "-lm"]
    compile_with(*sanitize, *sources, *objects, "-o", program, *libraries)
    return program


def test_cache_shows_promised_graphs_after_every_fault(campaign, record_property):
    variants = os.environ.get("TRAINFAST_CRASH_VARIANTS", "16")
    seed = os.environ.get("TRAINFAST_CRASH_SEED", "1")
    done = subprocess.run(
        [str(campaign), variants, seed], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    for name, count in counts.items():
        record_property(name, count)
    print(counts)
    assert counts["crash_points"] > 100
    assert counts["recoveries"] > int(variants) * 50
    assert min(counts.values()) > 0
