"""Peak memory of attention, forward and backward, each contender in its own process.

python -m benchmarks.bench_attention --memory     measures and reports
python -m benchmarks.attention_memory ours 4      one contender, four heads: its bytes
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import harness, machine
from benchmarks.attention import (
    Inputs,
    Problem,
    Unavailable,
    check,
    forward_math,
    forward_ours,
    forward_torch,
    make_inputs,
    without_fallback,
)

HEADS = (1, 2, 4)
THREADS = (1, 2, 8, 64)
LENGTH, SMOKE_LENGTH, DIM = 16384, 512, 64
FORWARDS = {"ours": forward_ours, "torch": forward_torch, "math": forward_math}
NAMES = {"ours": "trainfast", "torch": "torch", "math": "torch math"}
# The unfused path holds several matrices of N x N: 1 GiB each and head at N16384.
ON_REQUEST = ("math",)


# ---- In a process of its own ---------------------------------------------------------


def peak_bytes(reset: bool = False) -> int:
    """Return the most memory this process has held; `reset`: count from now on.

    proc(5): writing 5 to clear_refs sets VmHWM to what is held.
    """
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    text = Path("/proc/self/status").read_text()
    found = re.search(r"^VmHWM:\s*(\d+) kB", text, re.MULTILINE)
    if not found:
        raise RuntimeError("/proc/self/status must have VmHWM, got none")
    return int(found.group(1)) * 1024


def differentiate(name: str, inputs: Inputs) -> list[torch.Tensor]:
    """Do both passes; return the output and the gradients."""
    out = FORWARDS[name](inputs)()
    return [out, *torch.autograd.grad(out, inputs.leaves, inputs.dout)]


def growth(name: str, heads: int, n: int) -> int:
    """Return by how many bytes both passes raise the most memory held.

    A small problem comes first: it loads what is loaded once, and is checked.
    """
    small = make_inputs(Problem("small", "", 1, heads, 64, DIM))

    def first() -> None:
        out, *grads = differentiate(name, small)
        check(name, small, "forward", [out])
        check(name, small, "backward", grads)

    if name == "ours":
        without_fallback(first)
    else:
        first()
    inputs = make_inputs(Problem("large", "", 1, heads, n, DIM))
    before = peak_bytes(reset=True)
    results = differentiate(name, inputs)
    after = peak_bytes()
    assert all(result.shape == inputs.q.shape for result in results)
    return after - before


# ---- All of them ---------------------------------------------------------------------


def run_child(name: str, heads: int, threads: int, args: argparse.Namespace) -> dict:
    """Return a contender's {"bytes": ...}, or {"skipped": why}."""
    words = [name, str(heads), "--threads", str(threads)]
    if args.smoke:
        words += ["--length", str(SMOKE_LENGTH)]
    command = [sys.executable, "-m", "benchmarks.attention_memory", *words]
    done = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def make_case(
    names: Sequence[str], heads: int, threads: int, args: argparse.Namespace
) -> dict:
    """Return the part of the report of one number of heads and of threads."""
    n = SMOKE_LENGTH if args.smoke else LENGTH
    lines, skipped = [], {}
    for name in names:
        result = run_child(name, heads, threads, args)
        if "skipped" in result:
            skipped[name] = result["skipped"]
        else:
            role = "ours" if name == "ours" else "rival"
            line = {"contender": NAMES[name], "role": role, "bytes": result["bytes"]}
            lines.append(line)
    return {
        "name": f"memory-h{heads}-t{threads}",
        "title": f"f32, B1 H{heads} N{n} D{DIM}, {threads} threads, both passes",
        "dtype": "float32",
        "results_bytes": 4 * heads * n * DIM * torch.float32.itemsize,
        "lines": lines,
        "skipped": skipped,
    }


def case_text(case: dict) -> str:
    """Return one case as a headline, an aligned table and its notes."""
    least = case["results_bytes"] / 2**20
    rows = [["", "MiB"]]
    rows += [
        [line["contender"], f"{line['bytes'] / 2**20:.1f}"] for line in case["lines"]
    ]
    notes = [f"  {name}: not run, {why}" for name, why in case["skipped"].items()]
    title = f"{case['title']}: output and gradients are {least:.0f} MiB of it"
    return "\n".join([title, harness.align(rows), *notes])


def run(args: argparse.Namespace, backend: str) -> dict:
    """Measure, printing each case as it is done; return the report."""
    names = [name for name in FORWARDS if name not in ON_REQUEST]
    if args.contender:
        names = [name for name in FORWARDS if name in args.contender]
    if args.without_ours and "ours" in names:
        names.remove("ours")
    about, how = machine.describe(), machine.describe_run(args.threads, backend)
    how["conditions"] = "growth of the peak, each contender in its own process"
    how["smoke"], how["device"] = args.smoke, args.device
    print(harness.heading("Attention's memory", about, how) + "\n", flush=True)
    cases = []
    for heads, threads in itertools.product(args.heads, THREADS):
        cases.append(make_case(names, heads, threads, args))
        if args.json == "auto" and "ours" in cases[-1]["skipped"]:
            raise SystemExit(f"results need trainfast: {cases[-1]['skipped']['ours']}")
        print(case_text(cases[-1]) + "\n", flush=True)
    return harness.make_report("attention-memory", about, how, cases)


def main(argv: Sequence[str] | None = None) -> int:
    """Print what one contender needs, as JSON; return the exit status."""
    summary = (__doc__ or "").split("\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser(
        "python -m benchmarks.attention_memory", None, summary
    )
    parser.add_argument("contender", choices=list(FORWARDS))
    parser.add_argument("heads", type=int)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    try:
        result = {"bytes": growth(args.contender, args.heads, args.length)}
    except Unavailable as error:
        result = {"skipped": str(error)}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
