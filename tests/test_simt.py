"""The SIMT runner runs what is right and finds what it promises to find: in kernels
made for that and in the library's own, which pass under every check as they are."""

import importlib.util
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
SPEC = importlib.util.spec_from_file_location("simt_build", HERE / "simt" / "build.py")
build = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(build)

# ---- Programs ------------------------------------------------------------------------


@cache
def program(name, mode):
    sources = [build.HERE / name]
    if name.endswith("_harness.cpp"):
        sources += build.kernels()
    return compiled(mode, sources, build.BUILT / f"{Path(name).stem}_{mode}")


def compiled(mode, sources, target):
    try:
        return build.program(mode, sources, target)
    except build.NoCompiler as reason:
        pytest.skip(str(reason))


def execute(exe, *words):
    """Runs a program; its exit status and what it wrote to stderr."""
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("LD_", "TRAINFAST"))
    }
    env["ASAN_OPTIONS"] = "detect_leaks=0"
    env["TSAN_OPTIONS"] = "halt_on_error=1:atexit_sleep_ms=0"
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    # ThreadSanitizer cannot place its shadow under every randomised layout.
    for prefix in [[], fixed]:
        command = [*prefix, exe, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if "unexpected memory mapping" not in done.stderr:
            return done.returncode, done.stderr
    pytest.skip("ThreadSanitizer cannot run here: " + done.stderr.strip())


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
AMOUNTS = {"adamw": 70001, "amp": 70001, "attention": 40}
FEW = {"adamw": 5000, "amp": 600, "attention": 20}  # under ThreadSanitizer
MUTANTS_NEED = {"adamw": 5000, "amp": 9000, "attention": 60}


@pytest.mark.parametrize("mode", ["address", "thread"])
@pytest.mark.parametrize("name", AMOUNTS)
def test_kernel_is_right_and_clean_under(name, mode):
    exe = program(f"{name}_harness.cpp", mode)
    amount = (FEW if mode == "thread" else AMOUNTS)[name]
    assert execute(exe, 1, amount) == (0, "")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", AMOUNTS)
def test_kernel_is_right_in_any_order(name, seed):
    exe = program(f"{name}_harness.cpp", "plain")
    assert execute(exe, seed, AMOUNTS[name]) == (0, "")


# Faults planted in the kernels: (the harness that runs, the file, text, replacement,
# the check, what it says).
MUTANTS = {
    "counters advanced without a fence before": (
        *("adamw", "rows.cuh"),
        "__threadfence();\n        /* back",
        "/* back",
        "thread",
        RACE,
    ),
    "counters advanced without a fence after": (
        *("adamw", "rows.cuh"),
        "gridDim.x - 1;\n        __threadfence();",
        "gridDim.x - 1;",
        "thread",
        RACE,
    ),
    "counters advanced by the first block": (
        *("adamw", "rows.cuh"),
        "gridDim.x - 1) == gridDim.x - 1",
        "gridDim.x - 1) == 0",
        "thread",
        RACE,
    ),
    "row overwritten while lanes read it": (
        *("adamw", "rows.cuh"),
        "__syncwarp(); /* all lanes are done with the row before */",
        "",
        "thread",
        RACE,
    ),
    "scalars used before they are there": (
        *("adamw", "adamw_kernel.cuh"),
        "    __syncthreads();\n\n    for (int item",
        "    for (int item",
        "thread",
        RACE,
    ),
    "one element too many": (
        *("adamw", "adamw_kernel.cuh"),
        "if (odd < (lane < 16 ? head : end))",
        "if (odd <= (lane < 16 ? head : end))",
        "address",
        BOUNDS,
    ),
    "last vector of an item left out": (
        *("adamw", "adamw_kernel.cuh"),
        "limit = aligned + ITEM;",
        "limit = aligned + ITEM - 4;",
        "plain",
        "differs",
    ),
    "copy rounded from the old parameter": (
        *("adamw", "adamw_kernel.cuh"),
        "set_element(&copied, d.copy, e, p);",
        "set_element(&copied, d.copy, e, g);",
        "plain",
        "differs",
    ),
    "ema taken for aligned": (
        *("adamw", "adamw_rows.cu"),
        "aligned_at(row->ema, row->ema_dtype, head, vector)",
        "true",
        "address",
        "misaligned address",
    ),
    "copy taken for aligned": (
        *("adamw", "adamw_rows.cu"),
        "aligned_at(row->copy, row->copy_dtype, head, vector)",
        "true",
        "address",
        "misaligned address",
    ),
    "sums over the chunks read without a fence before": (
        *("amp", "rows.cuh"),
        "__threadfence();\n        /* back",
        "/* back",
        "thread",
        RACE,
    ),
    "blocks counted on from the launch before": (
        *("amp", "rows.cuh"),
        "atomicInc(blocks_done, gridDim.x - 1)",
        "atomicAdd(blocks_done, 1u)",
        "plain",
        "differs",
    ),
    "sums over the chunks halved without a barrier": (
        *("amp", "amp_kernel.cuh"),
        "            __syncthreads();\n            if (k < half)",
        "            if (k < half)",
        "thread",
        RACE,
    ),
    "multiplier used before it is there": (
        *("amp", "amp_kernel.cuh"),
        "    __syncthreads();\n    return number[0];",
        "    return number[0];",
        "thread",
        RACE,
    ),
    "tail of a tensor read past its end": (
        *("amp", "amp_kernel.cuh"),
        "if (i + e < chunk.n) {\n                quad.set",
        "if (i + e <= chunk.n) {\n                quad.set",
        "address",
        BOUNDS,
    ),
    "vector across the end of a tensor": (
        *("amp", "amp_kernel.cuh"),
        "if (chunk.vectors && i + QUAD <= chunk.n) {\n        quad.read",
        "if (chunk.vectors && i < chunk.n) {\n        quad.read",
        "address",
        BOUNDS,
    ),
    "found kept for the next launch": (
        *("amp", "amp_kernel.cuh"),
        "    table->found = 0; /* for the next launch */\n",
        "",
        "plain",
        "differs",
    ),
    "lanes halved in another order": (
        *("amp", "amp_kernel.cuh"),
        "for (int half = 16; half > 0; half /= 2) {",
        "for (int half = 1; half < 32; half *= 2) {",
        "plain",
        "differs",
    ),
    "chunk overwritten while it is multiplied": (
        *("attention", "attention_plain.cuh"),
        "__syncthreads(); /* nobody reads any more what was there */",
        "",
        "thread",
        RACE,
    ),
    "weights read before they are there": (
        *("attention", "attention_plain.cuh"),
        "__syncthreads(); /* the weights are there, and the chunk is free */",
        "",
        "thread",
        RACE,
    ),
    "weights written where products are still made": (
        *("attention", "attention_plain_backward.cuh"),
        "__syncthreads(); /* add_products reads what lies there */\n    put_weights",
        "put_weights",
        "thread",
        RACE,
    ),
    "rows' numbers overwritten while they are used": (
        *("attention", "attention_plain_backward.cuh"),
        "__syncthreads(); /* nobody reads the last tile's any more */",
        "",
        "thread",
        RACE,
    ),
    "row past the end read": (
        *("attention", "attention_plain.cuh"),
        "row < rows.n && dim + column",
        "row <= rows.n && dim + column",
        "address",
        BOUNDS,
    ),
    "dropout of the block's other half": (
        *("attention", "attention_head.cuh"),
        "(j & 8) != 0 ? word[1] : word[0]",
        "(j & 8) != 0 ? word[0] : word[1]",
        "plain",
        "differs",
    ),
    "last tile of keys left out": (
        *("attention", "attention_plain_forward.cuh"),
        "key < end; key += TILE",
        "key + TILE < end; key += TILE",
        "plain",
        "differs",
    ),
    "heads that share keys left out": (
        *("attention", "attention_plain_backward.cuh"),
        "kv_head * group + i",
        "kv_head * group",
        "plain",
        "differs",
    ),
    "keys multiplied before they are there": (
        *("attention", "attention_mma_forward.cuh"),
        "__syncthreads(); /* keys are there, and nobody reads the old values",
        "/*",
        "thread",
        RACE,
    ),
    "copies not waited for": (
        *("attention", "attention_mma.cuh"),
        "cp_async_wait<LATER>();",
        "cp_async_wait<LATER + 1>();",
        "plain",
        "never waited for",
    ),
    "chunks of a tile not permuted": (
        *("attention", "attention_mma.cuh"),
        "return CHUNKS == 8 ? row & 7 : row >> 1 & 3;",
        "return row * 0;",
        "plain",
        "wavefronts",
    ),
    "number of a row past the end written": (
        *("attention", "attention_mma_forward.cuh"),
        "lane % 4 == 0 && row < out.n",
        "lane % 4 == 0 && row <= out.n",
        "address",
        BOUNDS,
    ),
    "fragment's halves dropped for one another": (
        *("attention", "attention_mma_forward.cuh"),
        "word[i / 2 % 2 * 2 + i / 4]",
        "word[i / 4 * 2 + i / 2 % 2]",
        "plain",
        "differs",
    ),
    "step taken before its tiles are there": (
        *("attention", "attention_mma_backward.cuh"),
        "careful = __syncthreads_or(!finite) != 0",
        "careful = false",
        "thread",
        RACE,
    ),
    "step's numbers from the other stage": (
        *("attention", "attention_mma_backward.cuh"),
        "(stage * 2 + second) * S::STREAMED + fragment",
        "((stage ^ 1) * 2 + second) * S::STREAMED + fragment",
        "plain",
        "differs",
    ),
    "step's head always the first": (
        *("attention", "attention_mma_backward.cuh"),
        "h.head += S::KEYS ? step.head : 0;",
        "h.head += 0 * step.head;",
        "plain",
        "differs",
    ),
    "step's bounds ignored": (
        *("attention", "attention_mma_backward.cuh"),
        "return key < first_key(args, h, last) ||",
        "return last < 0 &&",
        "plain",
        "differs",
    ),
    "slope of the softcap left out": (
        *("attention", "attention_mma_backward.cuh"),
        "x != 0 ? x * slope.at[n][i] : x",
        "x != 0 ? x : slope.at[n][i] * 0",
        "plain",
        "differs",
    ),
}


def headers_of(path):
    """Those of cuda/ that a file includes, and that they include."""
    found = set()
    for name in re.findall(r'#include "(.*?)"', path.read_text()):
        if (path.parent / name).exists():
            found |= {name} | headers_of(path.parent / name)
    return found


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_fault_in_a_kernel_is_seen(name, tmp_path):
    harness, file, text, replacement, mode, words = MUTANTS[name]
    for path in (ROOT / "cuda").glob("*.cu*"):
        if path.suffix == ".cuh" or file in (path.name, *headers_of(path)):
            shutil.copy(path, tmp_path)
    source = (ROOT / "cuda" / file).read_text()
    assert source.count(text) == 1
    (tmp_path / file).write_text(source.replace(text, replacement))
    own = sorted(tmp_path.glob("*.cu"))
    names = [path.name for path in own]
    others = [path for path in build.kernels() if path.name not in names]
    sources = [build.HERE / f"{harness}_harness.cpp", *own, *others]
    exe = compiled(mode, sources, tmp_path / "harness")
    status, said = execute(exe, 1, MUTANTS_NEED[harness])
    assert status != 0
    assert words in said


# ---- The instructions ----------------------------------------------------------------


def test_twins_of_ptx_give_the_kept_vectors():
    kept = (build.HERE / "ptx_vectors.txt").read_text()
    done = subprocess.run(
        [program("ptx_vectors.cu", "plain")], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, kept)


def test_ptx_gives_the_kept_vectors_on_the_gpu(tmp_path):
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not nvcc or not shutil.which("nvidia-smi"):
        pytest.skip("needs nvcc and a GPU")
    found = subprocess.run(query, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"needs a GPU: {found.stdout.strip()}")
    arch = int(found.stdout.split()[0].replace(".", ""))
    command = [nvcc, "-std=c++17", "-O3", "-fmad=false", f"-arch=sm_{arch}"]
    command += [f"-I{ROOT / 'cuda'}", f"-I{ROOT / 'csrc'}", "-o", tmp_path / "vectors"]
    subprocess.run([*command, build.HERE / "ptx_vectors.cu"], check=True)
    older = ["older"] if arch < 80 else []
    done = subprocess.run(
        [tmp_path / "vectors", *older], capture_output=True, text=True
    )
    kept = (build.HERE / "ptx_vectors.txt").read_text().splitlines(keepends=True)
    right = [line for line in kept if not (older and " arch 80 " in line)]
    assert (done.returncode, done.stdout) == (0, "".join(right))


# Bytes of local memory that a kernel may use. Those of attention.cu are left out: they
# hold up to 256 dims in registers, in float64 too, and are none of the fast ones.
LOCAL_BYTES = {"adamw": 0, "amp": 0}
LOCAL_BYTES |= {"attention_mma_forward": 0, "attention_mma_backward": 24}


@pytest.mark.slow
@pytest.mark.parametrize("arch", [75, 90])
@pytest.mark.parametrize("name", LOCAL_BYTES)
def test_kernels_keep_nothing_in_local_memory(name, arch, tmp_path):
    """Spilled registers and a stack frame (arrays that the compiler could not keep in
    registers) are both traffic that no kernel's floor counts."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not nvcc:
        pytest.skip("needs nvcc")
    command = [nvcc, "-std=c++17", "-O3", "-fmad=false", f"-arch=sm_{arch}"]
    command += ["-Xptxas=-v", f"-I{ROOT / 'csrc'}", "-o", tmp_path / "object", "-c"]
    source = ROOT / "cuda" / f"{name}.cu"
    done = subprocess.run([*command, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pattern = r"entry function '(\w+)'.*?\n.*?\n\s*(\d+) bytes stack frame, (\d+) bytes"
    frames = re.findall(pattern, done.stderr)
    spilled = {kernel: max(int(a), int(b)) for kernel, a, b in frames if a + b != "00"}
    assert len(frames) >= 3
    assert len(spilled) <= 1 and all(n <= LOCAL_BYTES[name] for n in spilled.values())
