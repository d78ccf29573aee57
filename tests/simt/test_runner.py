"""The SIMT runner runs what is right and finds what it promises to find: in kernels
made for that and in the library's own, which pass under every check as they are."""

import importlib.util
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # a run waits for its program to be built
]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def module(name):
    path = HERE / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"simt_{name}", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


build, faults = module("build"), module("faults")

# ---- Programs ------------------------------------------------------------------------


@cache
def program(name, mode, planted=False):
    """One of tests/simt with the library, if it calls it: as it is, or planted.
    Under a sanitizer they are always planted, which saves a build of minutes: a fault
    that is off is a branch beside what is tested."""
    planted = name.endswith("_harness.cpp") and (planted or mode != "plain")
    sources = [build.HERE / name]
    if name.endswith("_harness.cpp"):
        sources += build.library_of(plant() if planted else build.CUDA)
    suffix = "_planted" if planted else ""
    try:
        target = build.BUILT / f"{Path(name).stem}_{mode}{suffix}"
        return build.program(mode, sources, target)
    except build.NoCompiler as reason:
        pytest.skip(str(reason))


def plant():
    with build.locked(build.BUILT / "planted"):
        return faults.plant(build.BUILT / "planted")


def execute(exe, *words, fault=0):
    """Runs a program; its exit status and what it wrote to stderr."""
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("LD_", "TRAINFAST"))
    }
    env["ASAN_OPTIONS"] = "detect_leaks=0"
    env["TSAN_OPTIONS"] = "halt_on_error=1:atexit_sleep_ms=0"
    env["TRAINFAST_SIMT_FAULT"] = str(fault)
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    # ThreadSanitizer cannot place its shadow under every randomised layout.
    for prefix in [[], fixed]:
        command = [*prefix, exe, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if "unexpected memory mapping" not in done.stderr:
            return done.returncode, done.stderr
    pytest.skip("ThreadSanitizer cannot run here: " + done.stderr.strip())


class Run(NamedTuple):
    """A harness with the kernels as they are, or with a fault."""

    harness: str
    mode: str
    seed: int
    amount: int
    fault: str = ""
    planted: bool = False

    def outcome(self):
        planted = self.planted or bool(self.fault)
        exe = program(f"{self.harness}_harness.cpp", self.mode, planted)
        number = faults.number_of(self.fault) if self.fault else 0
        return execute(exe, self.seed, self.amount, fault=number)


@pytest.fixture(scope="module", autouse=True)
def outcome_of(request):
    """The function that gives a run's outcome. All chosen runs keep every core busy
    from the start; of pytest-xdist's processes each has its own share of the tests, and
    runs what they ask for."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        yield Run.outcome
        return
    chosen = [getattr(item, "callspec", None) for item in request.session.items]
    runs = [spec.params["run"] for spec in chosen if spec and "run" in spec.params]
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    begun = {run: pool.submit(run.outcome) for run in dict.fromkeys(runs)}
    yield lambda run: begun[run].result()
    pool.shutdown(cancel_futures=True)


def test_object_that_programs_share_is_compiled_once(tmp_path):
    # Nothing of the module is replaced: its other programs are being built meanwhile.
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\necho compiled >>"$0.log"\n'
        "sleep 0.1 # the other threads come to the same question\n"
        'for last; do :; done\n>"$last"\n'
    )
    compiler.chmod(0o755)
    source = build.HERE / "selftest.cu"
    with ThreadPoolExecutor(4) as pool:
        made = [
            pool.submit(build._compile, [compiler], source, tmp_path) for _ in range(4)
        ]
        found = {future.result() for future in made}
    assert [path.exists() for path in found] == [True]
    assert (tmp_path / "compiler.log").read_text() == "compiled\n"


# ---- The runner ----------------------------------------------------------------------

MODES = list(build.MODES)
SEEDS = {mode: range(2 if mode == "thread" else 4) for mode in MODES}  # 1 s each
RACE, BOUNDS = "data race", "heap-buffer-overflow"
BARRIER = "__syncthreads after a thread left|a thread left while the others wait"
# What each check must say of a planted fault; where it says nothing the fault may pass.
FAULTS = {
    "missing_barrier": {"thread": RACE},
    "missing_syncwarp": {"thread": RACE},
    "missing_fence_before": {"thread": RACE},
    "missing_fence_after": {"thread": RACE},
    "colliding_blocks": {"thread": RACE},
    "past_shared": {"address": BOUNDS},
    "misaligned": {"address": "misaligned address"},
    "unasked_shared": dict.fromkeys(MODES, "attribute does not allow"),
    "uneven_barrier": dict.fromkeys(MODES, BARRIER),
    "absent_lanes": dict.fromkeys(MODES, "deadlock"),
    "diverged_warp": dict.fromkeys(MODES, "a warp diverged"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["works", "both_fences", "waited_read"])
def test_runner_runs_what_is_right(case, mode):
    for seed in SEEDS[mode]:
        assert execute(program("selftest.cu", mode), case, seed) == (0, "")


@pytest.mark.parametrize(
    "case, mode", [(case, mode) for case, modes in FAULTS.items() for mode in modes]
)
def test_runner_sees_a_planted_fault(case, mode):
    for seed in SEEDS[mode]:
        status, said = execute(program("selftest.cu", mode), case, seed)
        assert status != 0
        assert any(words in said for words in FAULTS[case][mode].split("|")), said


@pytest.mark.parametrize("case", ["missing_barrier", "missing_syncwarp"])
def test_shuffled_order_breaks_what_launch_order_hides(case):
    exe = program("selftest.cu", "plain")
    assert execute(exe, case, 0)[0] == 0
    assert any(execute(exe, case, seed)[0] == 1 for seed in range(1, 9))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["unwritten_shared", "early_read"])
def test_memory_that_is_not_there_yet_reads_as_nan(case, mode):
    assert execute(program("selftest.cu", mode), case, 0)[0] == 1


# ---- The library's kernels under the sanitizers --------------------------------------

# The largest tensor's elements, or attention's problems: as many as take seconds.
AMOUNTS = {"adamw": 70001, "amp": 70001, "attention": 30, "host": 0}
AMOUNTS |= {"neighbours": 40, "trajectory": 60}
FEW = {"adamw": 5000, "amp": 600, "attention": 8, "host": 0}  # under ThreadSanitizer
FEW |= {"neighbours": 16, "trajectory": 12}
FAULTS_NEED = {"adamw": 5000, "amp": 9000, "attention": 60, "host": 0}
FAULTS_NEED |= {"neighbours": 60, "trajectory": 60}
# A seed chooses the problems, too. With 1 most faults are seen within seconds; these
# took up to half a minute, and are seen at once with another.
SEED_OF = {
    "query past the end looks": 2,
    "walk over the first head alone": 2,
    "attention_plain_backward.cuh load_numbers without __syncthreads 0": 2,
    "attention_plain_backward.cuh plain_term_tile without __syncthreads 2": 2,
    "attention_term.cuh reduce_tile without __syncthreads 0": 2,
    "attention_term.cuh reduce_tile without __syncthreads 1": 2,
    "first tile of a window left out": 3,
    "term past its end written": 3,
    "keys before the window in bounds": 3,
    "tile's first keys taken for in bounds": 3,
    "slope of the softcap left out": 3,
    "list filled past its room": 3,
    "attention_plain_far.cuh plain_shares_tile without __syncthreads_or 0": 3,
    "first keys of a window left out": 4,
    "keys past the term's tile": 4,
    "attention_decode.cuh tile_barrier without __syncthreads 0": 4,
    "attention_decode.cuh tile_vote without __syncthreads_or 2": 4,
    "attention_decode.cuh add_products without __syncthreads 4": 4,
    "attention_mma_backward_tiles.cuh multiply_pair without __syncthreads 0": 4,
    "second of a pair past the dims written": 5,
    "output taken for aligned": 5,
    "fragment's halves dropped for one another": 5,
    "gradients taken for aligned": 5,
    "term past its keys written": 5,
    "rows taken for aligned": 6,
    "keys fetched where they are read": 6,
    "part of the last split left out": 10,
    "attention_mma_backward.cuh walk_steps without __syncthreads 3": 10,
    "attention_decode.cuh attention_decode without tile_barrier<S> 8": 11,
    "attention_plain_backward.cuh attention_plain_dsinks without __syncthreads 4": 12,
    "piece brought where it is read": 13,
    "attention_mma_term.cuh walk_keys without __syncthreads 0": 13,
    "attention_mma_term.cuh walk_keys without __syncthreads 1": 13,
    "attention_mma_term.cuh store_sums without __syncthreads 2": 13,
    "attention_mma_term.cuh attention_mma_term without __syncthreads 3": 13,
    "attention_mma_term.cuh attention_mma_term without __syncthreads 4": 13,
    "attention_plain_forward.cuh attention_plain_forward without __syncthreads 1": 15,
    "term's keys before its tile": 16,
    "neighbours.cu neighbours_scan without __syncthreads 1": 19,
}
assert SEED_OF.keys() <= faults.FAULTS.keys()


def runs(names_and_runs):
    return pytest.mark.parametrize(
        "run", [pytest.param(run, id=name) for name, run in names_and_runs.items()]
    )


@runs(
    {f"{name} address": Run(name, "address", 1, n) for name, n in AMOUNTS.items()}
    | {f"{name} thread": Run(name, "thread", 1, n) for name, n in FEW.items()}
)
def test_kernel_is_right_and_clean_under(run, outcome_of):
    assert outcome_of(run) == (0, "")


@runs(
    {
        f"{name} {seed}": Run(name, "plain", seed, n)
        for name, n in AMOUNTS.items()
        for seed in range(4)
    }
)
def test_kernel_is_right_in_any_order(run, outcome_of):
    assert outcome_of(run) == (0, "")


@runs(
    {
        name: Run(f.harness, f.mode, SEED_OF.get(name, 1), FAULTS_NEED[f.harness], name)
        for name, f in faults.FAULTS.items()
    }
)
def test_planted_fault_in_a_kernel_is_seen(run, outcome_of):
    status, said = outcome_of(run)
    assert status != 0
    assert re.search(faults.FAULTS[run.fault].words, said), said


@runs({name: Run(name, "plain", 1, n, planted=True) for name, n in FAULTS_NEED.items()})
def test_faults_that_are_off_change_nothing(run, outcome_of):
    assert outcome_of(run) == (0, "")


# ---- Shared memory -------------------------------------------------------------------

# Of 8 lanes that store a row of 96 dims, half lie in the next panel's same banks.
STORES = {96: 5 / 3}


def test_tiles_lie_in_all_banks():
    done = subprocess.run(
        [program("layouts.cu", "plain")], capture_output=True, text=True
    )
    assert done.returncode == 0
    pattern = r"dims (\d+), (.*): stores (\d+) of (\d+), matrices (\d+) of (\d+)\n"
    lines = re.findall(pattern, done.stdout)
    assert {int(dims) for dims, *_ in lines} >= {32, 64, 96, 128, 192, 256}
    for dims, layout, *counts in lines:
        stores, least_stores, matrices, least_matrices = map(int, counts)
        assert stores == least_stores * STORES.get(int(dims), 1), (dims, layout)
        assert matrices == least_matrices, (dims, layout)
