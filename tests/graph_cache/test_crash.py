"""The graph cache after a loss of power, on a full disk, after failed syncs and without
memory: crash_harness.c runs csrc/graph_cache on a disk in memory that has these
faults at every place in turn, under AddressSanitizer and UBSan. It tries
TRAINFAST_CRASH_VARIANTS (16) variants of each loss, chosen by TRAINFAST_CRASH_SEED.

Then malformed caches: fuzz_harness.c, for TRAINFAST_FUZZ_SECONDS (4) or longer.
Also writers that are killed, on the real disk.
"""

import json
import os
import platform
import random
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import trainfast.graph_cache as gc
from trainfast import _core

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
CORPUS = HERE / "corpus"
CORE = sorted((CSRC / "graph_cache").glob("*.c"))
HELPERS = ("status.c", "scratch.c", "parallel.c", "openmp.c", "cpus.c", "cpuid.c")
COMPILER = shutil.which(os.environ.get("CC", "cc").split()[0])
FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
FLAGS += ["-D_DEFAULT_SOURCE", "-D_POSIX_C_SOURCE=200809L"]
FLAGS += ["-msse4.2"] if platform.machine() == "x86_64" else []
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
ALLOCATIONS = ("malloc", "calloc", "realloc", "posix_memalign", "aligned_alloc")


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
def build(tmp_path_factory):
    """Builds a harness of this folder with the core; sanitizers where there are any."""
    if not COMPILER:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("graph_crash")
    sanitize = SANITIZE if has_sanitizers(folder) else []
    tested = [f"-D{name}=tested_{name}" for name in ALLOCATIONS]
    objects = []
    for source in CORE:
        objects.append(folder / f"{source.stem}.o")
        compile_with(*sanitize, *tested, "-c", source, "-o", objects[-1])

    def build(name):
        sources = [HERE / f"{name}.c", *(CSRC / helper for helper in HELPERS)]
        libraries = ["-pthread", "-ldl", "-lm"]
        program = folder / name
        compile_with(*sanitize, *sources, *objects, "-o", program, *libraries)
        return program

    return build


def counts_of(program, *arguments, record_property):
    """Runs a harness, which ends with an error at the first fault; what it counted."""
    command = [str(program), *(str(a) for a in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    for name, count in counts.items():
        record_property(name, count)
    print(counts)
    return counts


@pytest.mark.slow
def test_cache_shows_promised_graphs_after_every_fault(build, record_property):
    variants = int(os.environ.get("TRAINFAST_CRASH_VARIANTS", "16"))
    seed = os.environ.get("TRAINFAST_CRASH_SEED", "1")
    program = build("crash_harness")
    counts = counts_of(program, variants, seed, record_property=record_property)
    assert counts["crash_points"] > 100
    assert counts["recoveries"] > variants * 50
    assert min(counts.values()) > 0


@pytest.mark.slow
def test_fuzzed_cache_cannot_crash(build, record_property):
    seconds = os.environ.get("TRAINFAST_FUZZ_SECONDS", "4")
    first = os.environ.get("TRAINFAST_FUZZ_FIRST", "0")
    corpus = sorted(path for path in CORPUS.iterdir() if path.is_dir())
    program = build("fuzz_harness")
    counts = counts_of(
        program, seconds, first, *corpus, record_property=record_property
    )
    assert min(counts.values()) > 0


# ---- Killed writers ----------------------------------------------------------------


MOST = 3000  # graphs of one writer: few enough to be read again in each round


def graph_of(number):
    values = np.full((1 + number % 7, 3), number, np.float32)
    return {"x": values, "y": np.array([number])}


def write_for_ever(path, first, pipe):
    """Appends graphs first, first + 1, ... and says after commits how many are safe;
    then waits, if nobody has ended it before that."""
    writer = gc.Writer(path, commit_every=10**9, commit_seconds=1e9)
    for number in range(MOST):
        writer.append(graph_of(first + number))
        if number % 7 == 6:
            writer.commit()
            os.write(pipe, (number + 1).to_bytes(8, "little"))
    signal.pause()


def started(path, first):
    """A child that writes; its process id and the pipe on which it tells."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ours)
            write_for_ever(path, first, theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    return child, ours


def killed(child, pipe, first_word):
    """Kills it; how many graphs it has said to be safe. `first_word`: not before it has
    said so for the first time."""
    data = os.read(pipe, 8) if first_word else b""
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with open(pipe, "rb") as said:
        data += said.read()
    return int.from_bytes(data[-8:], "little")


@pytest.mark.slow
def test_killed_writers_lose_nothing_that_was_safe(tmp_path, record_property):
    path, rounds, chance = str(tmp_path / "cache"), 12, random.Random(1)
    with gc.Writer(path) as writer:  # one schema for all
        for number in range(8):
            writer.append(graph_of(number))
    safe = {0: 8}
    for turn in range(1, rounds + 1):
        firsts = [2 * turn * MOST, (2 * turn + 1) * MOST]
        children = [started(path, first) for first in firsts]
        time.sleep(chance.uniform(0.01, 0.1))
        for first, child in zip(firsts, children, strict=True):
            safe[first] = killed(*child, turn % 2)
        _core.graph_adopt(path)
        cache = gc.open(path, verify="always")
        shown = defaultdict(int)
        for graph in cache:
            number = int(graph["y"][0])
            first = number // MOST * MOST
            assert number == first + shown[first], "in order and once"
            np.testing.assert_array_equal(graph["x"], graph_of(number)["x"])
            shown[first] += 1
        assert all(shown[first] >= n for first, n in safe.items())
        assert cache.verify().ok
    record_property("killed_writers", 2 * rounds)
    assert sum(safe.values()) >= 8 + 7 * rounds
