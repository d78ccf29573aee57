"""Threads (csrc/parallel.c) and CPU features (csrc/cpuid.c), each compiled by itself.

Which runtime is entered depends on what the process has loaded and forked, so every
test runs a script of its own in a fresh interpreter, and a hang is a failed time-out.
"""

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
SOURCES = [CSRC / name for name in ("parallel.c", "openmp.c", "cpus.c", "cpuid.c")]
COMPILER = shutil.which(os.environ.get("CC", "cc").split()[0])
STRESS = HERE / "threads_stress.c"
FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
LIBRARIES = ["-pthread", "-ldl"]

needs_torch = pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

PRELUDE = """
import ctypes, json, os, sys, threading
def load():
    library = ctypes.CDLL(sys.argv[1])
    library.tfast_thread_runtime.restype = ctypes.c_char_p
    library.slow.argtypes = [ctypes.c_double]
    return library
def runtime():
    return lib.tfast_thread_runtime().decode()
def counts(parts):
    cells = (ctypes.c_int * (parts + 1))()
    lib.count(parts, cells)
    return list(cells)
def once(parts):
    return counts(parts) == [1] * parts + [0]
def in_child(check):
    '''What check() returned in a forked child; None if it hung or died.'''
    import select, signal
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writes, json.dumps(check()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    ready = select.select([reads], [], [], 120)[0]
    data = os.read(reads, 65536) if ready else b''
    os.close(reads)
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return json.loads(data) if data else None
def answer(**values):
    print(json.dumps(values))
"""


def build(output, *arguments):
    command = [COMPILER, *FLAGS, *arguments, "-o", output, *LIBRARIES]
    done = subprocess.run([str(a) for a in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not COMPILER:
        pytest.skip("needs a C compiler")
    return tmp_path_factory.mktemp("threads")


@pytest.fixture(scope="module")
def library(folder):
    """The sources and the harness as one shared library."""
    harness = HERE / "threads_harness.c"
    sources = [path for path in SOURCES if path.name != "cpus.c"]
    return build(folder / "harness.so", "-shared", "-fPIC", harness, *sources)


@pytest.fixture(scope="module")
def run(library):
    """Runs a script in a fresh interpreter and returns what it passed to answer()."""

    def run(script, threads=None):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        code = PRELUDE + textwrap.dedent(script)
        done = subprocess.run(
            [sys.executable, "-c", code, str(library)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


# ---- The own pool


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_part_runs_exactly_once(run, threads):
    found = run(
        """
        lib = load()
        answer(wrong=[n for n in [0, 1, 2, 3, 1000] * 20 if not once(n)])
        """,
        threads,
    )
    assert found == {"wrong": []}


@pytest.mark.parametrize("threads", [2, 3])
def test_parts_run_at_the_same_time(run, threads):
    """Right away, while workers still spin, and after they fell asleep."""
    found = run(
        """
        import time
        lib = load()
        n = lib.tfast_num_threads()
        met = []
        for pause in (0, 0, 0.02, 0.02):
            time.sleep(pause)
            met.append(lib.meet(n))
        answer(runtime=runtime(), n=n, met=met)
        """,
        threads,
    )
    assert found == {"runtime": "own", "n": threads, "met": [1, 1, 1, 1]}


@pytest.mark.parametrize(
    ("asked", "expected"), [("3", 3), ("2,4,1", 2), (" 5", 5), ("99999", 1024)]
)
def test_omp_num_threads_sets_the_count(run, asked, expected):
    found = run("lib = load(); answer(n=lib.tfast_num_threads())", asked)
    assert found == {"n": expected}


@linux_only
@pytest.mark.parametrize("asked", [None, "", "many", "0", "-2"])
def test_count_without_omp_num_threads_is_that_of_usable_processors(run, asked):
    found = run(
        """
        lib = load()
        limit = lib.quota(b'/proc/self/cgroup', b'/sys/fs/cgroup')
        cpus = len(os.sched_getaffinity(0))
        answer(n=lib.tfast_num_threads(), cpus=min(limit or cpus, cpus))
        """,
        asked,
    )
    assert found["n"] == found["cpus"]


@linux_only
def test_affinity_mask_limits_the_count(run):
    found = run(
        """
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        lib = load()
        answer(n=lib.tfast_num_threads(), once=once(3))
        """
    )
    assert found == {"n": 1, "once": True}


def test_nested_region_runs_in_its_thread(run):
    found = run(
        """
        lib = load()
        cells = (ctypes.c_int * 35)()
        most = lib.nested(5, 7, cells)
        answer(most=most, once=set(cells) == {1}, after=lib.meet(3))
        """,
        3,
    )
    assert found == {"most": 1, "once": True, "after": 1}


def test_concurrent_callers_each_get_every_part_once(run):
    found = run(
        """
        lib = load()
        wrong = []
        def call():
            for n in [2, 3, 40] * 100:
                if not once(n):
                    wrong.append(n)
        threads = [threading.Thread(target=call) for _ in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
        answer(wrong=wrong, after=lib.meet(3))
        """,
        3,
    )
    assert found == {"wrong": [], "after": 1}


@linux_only
def test_workers_block_every_signal(run):
    """Ctrl-C must reach a thread of Python's, whose mask in turn is left alone."""
    found = run(
        """
        lib = load()
        lib.meet(2)
        masks = {}
        for task in os.listdir('/proc/self/task'):
            for line in open(f'/proc/self/task/{task}/status'):
                if line.startswith('SigBlk'):
                    masks[int(task)] = int(line.split()[1], 16)
        main = masks.pop(os.getpid())
        answer(main=main, workers=[bool(m >> 1 & 1) for m in masks.values()])
        """,
        2,
    )
    assert found == {"main": 0, "workers": [True]}


# ---- Fork


def test_forked_child_gets_a_pool_of_its_own(run):
    found = run(
        """
        lib = load()
        def check():
            return [lib.meet(2), once(1000), in_child(lambda: lib.meet(2))]
        answer(before=lib.meet(2), child=in_child(check), after=lib.meet(2))
        """,
        2,
    )
    assert found == {"before": 1, "child": [1, True, 1], "after": 1}


def test_fork_while_another_thread_is_in_a_region_is_safe(run):
    """Both inside a long region and at any moment of many short ones."""
    found = run(
        """
        lib = load()
        stop = False
        def short():
            while not stop:
                lib.count(2, (ctypes.c_int * 2)())
        long = threading.Thread(target=lib.slow, args=(0.3,))
        long.start()
        met = [in_child(lambda: lib.meet(2))]
        long.join()
        busy = threading.Thread(target=short)
        busy.start()
        met += [in_child(lambda: lib.meet(2)) for _ in range(20)]
        stop = True
        busy.join()
        answer(met=met, after=lib.meet(2))
        """,
        2,
    )
    assert found == {"met": [1] * 21, "after": 1}


@linux_only
def test_forked_child_counts_processors_afresh(run):
    found = run(
        """
        lib = load()
        before = lib.tfast_num_threads()
        def check():
            os.environ['OMP_NUM_THREADS'] = '5'
            return lib.tfast_num_threads()
        answer(before=before, child=in_child(check), after=lib.tfast_num_threads())
        """,
        3,
    )
    assert found == {"before": 3, "child": 5, "after": 3}


# ---- An OpenMP runtime that is already there


@linux_only
def test_loaded_openmp_runtime_is_used(run):
    """Any library may have brought one; it is found whenever it came."""
    found = run(
        """
        lib = load()
        before = [runtime(), lib.meet(2)]
        try:
            openmp = ctypes.CDLL('libgomp.so.1')
        except OSError:
            openmp = None
        else:
            openmp.omp_set_num_threads(2)
            two = [lib.tfast_num_threads(), lib.meet(2), once(1000)]
            cells = (ctypes.c_int * 35)()
            most = lib.nested(5, 7, cells)
            openmp.omp_set_num_threads(1)
            one = [lib.tfast_num_threads(), once(3)]
            answer(before=before, now=runtime(), two=two, one=one,
                   most=most, once=set(cells) == {1})
        if not openmp:
            answer(before=None)
        """,
        2,
    )
    if not found["before"]:
        pytest.skip("needs libgomp.so.1")
    assert found["before"] == ["own", 1]
    assert found["now"].startswith("openmp (/") and "libgomp.so.1" in found["now"]
    assert (found["two"], found["one"]) == ([2, 1, True], [1, True])
    assert (found["most"], found["once"]) == (1, True)


@pytest.mark.slow
@needs_torch
@linux_only
@pytest.mark.parametrize("torch_first", [True, False])
def test_beside_torch_its_runtime_and_thread_count_are_used(run, torch_first):
    found = run(
        f"""
        if {torch_first}:
            import torch
            lib = load()
        else:
            lib = load()
            assert runtime() == 'own' and lib.meet(2)
            import torch
        """
        """
        def state():
            return [lib.tfast_num_threads(), torch.get_num_threads()]
        def in_thread(f):
            answers = []
            t = threading.Thread(target=lambda: answers.append(f()))
            t.start()
            t.join()
            return answers[0]
        first = state()
        by_count = {}
        for n in (1, 3, 2):
            torch.set_num_threads(n)
            fresh = in_thread(lib.tfast_num_threads)
            by_count[n] = [*state(), fresh, lib.meet(n), once(1000)]
        torch.ones(1_000_000).add_(1)
        cells = (ctypes.c_int * 35)()
        most = lib.nested(5, 7, cells)
        name = runtime()[len('openmp ('):-1]
        loaded = any(line.rstrip().endswith(name) for line in open('/proc/self/maps'))
        built = torch.__config__.parallel_info()
        answer(first=first, by_count=by_count, most=most, once=set(cells) == {1},
               runtime=runtime(), loaded=loaded,
               in_openmp='ATen parallel backend: OpenMP' in built)
        """,
        2,
    )
    if not found["in_openmp"]:
        pytest.skip("needs a torch that is built on OpenMP")
    assert found["runtime"].startswith("openmp (/") and found["loaded"]
    assert found["first"][0] == found["first"][1]
    assert found["by_count"] == {str(n): [n, n, n, 1, True] for n in (1, 2, 3)}
    assert (found["most"], found["once"]) == (1, True)


@needs_torch
@linux_only
def test_fork_after_torch_used_its_threads_does_not_hang(run):
    """libgomp itself would: its pool in the child has no threads."""
    found = run(
        """
        import torch
        lib = load()
        torch.set_num_threads(2)
        torch.ones(1_000_000).add_(1)
        before = lib.meet(2)
        def check():
            two = [runtime(), lib.tfast_num_threads(), lib.meet(2), once(1000)]
            torch.set_num_threads(1)
            one = [lib.tfast_num_threads(), once(3)]
            return two, one, in_child(lambda: [runtime(), lib.tfast_num_threads()])
        child = in_child(check)
        answer(before=before, child=child, after=[runtime() != 'own', lib.meet(2)])
        """
    )
    assert found["before"] == 1 and found["after"] == [True, 1]
    assert found["child"] == [["own", 2, 1, True], [1, True], ["own", 1]]


@needs_torch
@linux_only
def test_library_loaded_only_in_a_forked_child_does_not_hang(run):
    """It has not seen the fork, and torch's threads were used before."""
    found = run(
        """
        import torch
        torch.set_num_threads(2)
        torch.ones(1_000_000).add_(1)
        def check():
            global lib
            lib = load()
            return [runtime(), lib.tfast_num_threads(), lib.meet(2)]
        answer(child=in_child(check))
        """
    )
    assert found == {"child": ["own", 2, 1]}


@needs_torch
@linux_only
def test_torch_imported_only_in_a_forked_child_is_used(run):
    found = run(
        """
        lib = load()
        before = lib.meet(2)
        def check():
            import torch
            torch.set_num_threads(2)
            torch.ones(1_000_000).add_(1)
            return [runtime() != 'own', lib.tfast_num_threads(), lib.meet(2)]
        answer(before=before, child=in_child(check))
        """,
        2,
    )
    assert found == {"before": 1, "child": [True, 2, 1]}


# ---- Control groups


def quota(library, groups, files, folder):
    """cgroup_cpus() for a /proc/self/cgroup and the files under /sys/fs/cgroup."""
    mount = folder / "cgroup"
    for name, content in files.items():
        path = mount / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (folder / "list").write_text(groups)
    found = ctypes.CDLL(str(library)).quota(
        str(folder / "list").encode(), str(mount).encode()
    )
    return found


V1 = "4:memory:/a\n3:cpuset:/a\n2:cpuacct,cpu:/a/b\n1:name=systemd:/a\n"


@linux_only
@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a\n", {"a/cpu.max": "200000 100000\n"}, 2),
        ("0::/a\n", {"a/cpu.max": "150000 100000\n"}, 2),
        ("0::/a\n", {"a/cpu.max": "1000 100000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, 0),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/a/b\n", {"a/cpu.max": "3000 1000", "a/b/cpu.max": "5000 1000"}, 3),
        ("0::/not/here\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/a\n", {"a/cpu.max": "400000 0\n"}, 0),
        ("0::/a\n", {"a/cpu.max": ""}, 0),
        ("0::/a\n", {"a/cpu.max": "9999999999999 1\n"}, 1024),
        ("", {}, 0),
        ("nonsense\n1:cpu\n::\n", {}, 0),
        (
            V1,
            {
                "cpu/a/b/cpu.cfs_quota_us": "250000",
                "cpu/a/b/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            V1,
            {"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"},
            0,
        ),
        (
            V1 + "0::/c\n",
            {
                "c/cpu.max": "100000 100000",
                "cpu/cpu.cfs_quota_us": "200000",
                "cpu/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        ("1:cpuset:/a\n", {"cpu/a/cpu.cfs_quota_us": "1000"}, 0),
    ],
)
def test_cgroup_quota_is_rounded_up(library, tmp_path, groups, files, expected):
    assert quota(library, groups, files, tmp_path) == expected


# ---- Builds


def test_thread_sanitizer_finds_no_race_in_the_own_pool(folder):
    program = folder / "stress"
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    compiled = subprocess.run(
        [COMPILER, "-fsanitize=thread", probe, "-o", folder / "probe"],
        capture_output=True,
    )
    # With much address randomisation an older sanitizer cannot place its shadow.
    fixed = [shutil.which("setarch"), "-R"] if shutil.which("setarch") else []
    if compiled.returncode or subprocess.run([*fixed, folder / "probe"]).returncode:
        pytest.skip("needs a working -fsanitize=thread")
    sources = [path for path in SOURCES if path.name != "cpuid.c"]
    build(program, "-fsanitize=thread", STRESS, *sources)
    done = subprocess.run(
        [*fixed, program],
        env={**os.environ, "OMP_NUM_THREADS": "4"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")


@linux_only
def test_sources_compile_without_linux(folder):
    """As on a system that has pthreads but no dl_iterate_phdr; and it still runs."""
    program = build(folder / "stress_elsewhere", "-U__linux__", STRESS, *SOURCES)
    assert subprocess.run([program], timeout=240).returncode == 0


# ---- CPU features


@linux_only
def test_cpu_features_are_those_of_proc_cpuinfo(library):
    """The kernel hides what it does not save the registers of."""
    expected = 0
    if platform.machine() == "x86_64":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = set(next(line for line in lines if line.startswith("flags")).split())
        avx2 = {"avx2", "fma", "f16c", "bmi1", "pclmulqdq"} <= flags
        avx512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags
        expected = avx2 * 1 + (avx2 and avx512) * 2
        expected += (avx2 and avx512 and "vpclmulqdq" in flags) * 4
        expected += (avx2 and avx512 and "avx512_bf16" in flags) * 8
    assert ctypes.CDLL(str(library)).tfast_cpu_features() == expected
