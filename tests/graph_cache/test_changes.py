"""A cache's file that changes or is cut short under its readers, and where it lies.

What was checked must be what is used: change_harness.c changes a map between a
check and the use of what was checked, under the address sanitizer. And on file systems
where others may cut a mapped file short, files are not mapped.
"""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.graph_cache.core_calls import one_field, write
from trainfast import graph_cache as gc

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which(os.environ.get("CC", "cc").split()[0])
FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]
FLAGS += ["-Wno-unused-function", "-fsanitize=address,undefined"]
FLAGS += ["-fno-sanitize-recover=all"]
HELPERS = ("status", "scratch", "cpuid", "parallel", "openmp", "cpus")
READS = os.environ.get("TRAINFAST_CHANGE_READS", "200000")


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    if not COMPILER:
        pytest.skip("needs a C compiler")
    target = tmp_path_factory.mktemp("changes") / "harness"
    sources = [ROOT / "tests/graph_cache/change_harness.c"]
    sources += sorted((ROOT / "csrc/graph_cache").glob("*.c"))
    sources += [ROOT / f"csrc/{name}.c" for name in HELPERS]
    command = [COMPILER, *FLAGS, f"-I{ROOT / 'csrc'}"]
    command += [*map(str, sources), "-o", str(target), "-pthread", "-ldl", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "cannot find" in done.stderr:
        pytest.skip("the compiler has no sanitizer")
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.slow
@pytest.mark.parametrize("what", ["index", "heads", "meanwhile", "schema"])
def test_what_was_checked_is_what_is_used(harness, what):
    command = [str(harness), what, READS]
    env = {**os.environ, "LD_PRELOAD": "", "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(command, env=env, **options)
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr[-4000:]


# ---- Where it lies -------------------------------------------------------------------

SCHEMA = one_field("int64")

# A statfs() that gives the answer that the environment names.
STATFS = r"""
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>

int
statfs(const char *path, struct statfs *status)
{
    const char *answer = getenv("STATFS_ANSWER");

    (void)path;
    memset(status, 0, sizeof *status);
    status->f_type = (__typeof__(status->f_type))strtoul(answer, NULL, 16);
    return answer[0] == '-' ? -1 : 0;
}
"""
REMOTE = {
    "NFS": "6969",
    "SMB": "517b",
    "CIFS": "ff534d42",
    "SMB 2": "fe534d42",
    "FUSE": "65735546",
    "9p": "1021997",
    "Lustre": "bd00bd0",
    "Ceph": "c36400",
    "GPFS": "47504653",
    "BeeGFS": "19830326",
    "OrangeFS": "20030528",
    "OpenAFS": "5346414f",
    "AFS": "6b414653",
    "Coda": "73757245",
    "vboxsf": "786f4256",
}
LOCAL = {
    "ext4": "ef53",
    "XFS": "58465342",
    "btrfs": "9123683e",
    "tmpfs": "1021994",
    "overlay": "794c7630",
    "ZFS": "2fc12fc1",
    "none": "-1",
}


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "c", SCHEMA, [{"x": np.arange(3)}])
    return tmp_path / "c"


def test_files_are_read_on_network_file_systems_and_mapped_on_others(tmp_path, path):
    if not COMPILER:
        pytest.skip("needs a C compiler")
    library = tmp_path / "statfs.so"
    (tmp_path / "statfs.c").write_text(STATFS)
    command = [COMPILER, "-shared", "-fPIC", "-o", library, tmp_path / "statfs.c"]
    subprocess.run(command, check=True)
    code = """
import os, sys
from trainfast import graph_cache as gc
for answer in sys.argv[2:]:
    os.environ["STATFS_ANSWER"] = answer
    caches = [gc.open(sys.argv[1], mode=mode) for mode in (None, "mmap", "pread")]
    mapped = sum("segment-" in line for line in open("/proc/self/maps"))
    assert mapped == sum(cache.mode == "mmap" for cache in caches)
    print(*(cache.mode for cache in caches))
"""
    preloaded = f"{os.environ.get('LD_PRELOAD', '')} {library}".strip()
    answers = [*REMOTE.values(), *LOCAL.values()]
    said = subprocess.check_output(
        [sys.executable, "-c", code, str(path), *answers],
        env={**os.environ, "LD_PRELOAD": preloaded},
        text=True,
    )
    modes = len(REMOTE) * ["pread mmap pread"] + len(LOCAL) * ["mmap mmap pread"]
    assert said.splitlines() == modes


def test_mode_is_the_users_or_is_chosen_again_where_a_cache_is_unpickled(path):
    for mode in ("mmap", "pread"):
        cache = gc.open(path, mode=mode)
        assert cache.mode == pickle.loads(pickle.dumps(cache)).mode == mode
    cache = gc.open(path)
    assert cache.__reduce__()[1][2]["mode"] is None
    assert cache.mode == pickle.loads(pickle.dumps(cache)).mode
    with pytest.raises(ValueError, match=r"mode must be one of \['mmap', "):
        gc.open(path, mode="read")
