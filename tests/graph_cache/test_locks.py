"""Writers, an adopter and readers at once on one cache: lock_harness.c runs them
as threads on a real file system, where locks take their time. Every graph that was
committed must be there once and no other, and nobody may be refused for what another
does for a moment.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which(os.environ.get("CC", "cc").split()[0])
FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
FLAGS += ["-D_DEFAULT_SOURCE", "-D_POSIX_C_SOURCE=200809L"]
SANITIZERS = {
    "memory": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "threads": ["-fsanitize=thread", "-fno-sanitize-recover=all"],
}
HELPERS = ("status.c", "scratch.c", "parallel.c", "openmp.c", "cpus.c", "cpuid.c")
ROUNDS = os.environ.get("TRAINFAST_LOCK_ROUNDS", "12")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_writers_adopter_and_readers_at_once_lose_nothing(tmp_path, sanitizer):
    if not COMPILER:
        pytest.skip("needs a C compiler")
    sources = [ROOT / "tests/graph_cache/lock_harness.c"]
    sources += sorted((ROOT / "csrc/graph_cache").glob("*.c"))
    sources += [ROOT / "csrc" / name for name in HELPERS]
    program = str(tmp_path / "harness")
    command = [COMPILER, *FLAGS, *SANITIZERS[sanitizer], f"-I{ROOT / 'csrc'}"]
    command += [*map(str, sources), "-o", program, "-pthread", "-lm", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "cannot find" in done.stderr:
        pytest.skip(f"the compiler has no sanitizer for {sanitizer}")
    assert done.returncode == 0, done.stderr
    command = [program, str(tmp_path / "cache"), ROUNDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr
