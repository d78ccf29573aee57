"""How far memory estimates for a GPU are from what its allocator counts.

    python -m benchmarks.estimates.gpu              all models; writes the results
    python -m benchmarks.estimates.gpu gpt unet     these, without writing
    python -m benchmarks.estimates.gpu --dry        the estimates alone, without a GPU

Each model is estimated in one process and trained for two steps in another, with
batches of TIMES the size that the CPU's comparison has.
"""

import argparse
import json
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.estimates import truth
from benchmarks.estimates.models import MODELS, enlarged

PATH = Path(__file__).parent / "measured_gpu.json"
MIB = 1 << 20
TIMES = 8


def estimated(name: str) -> dict[str, Any]:
    from trainfast.torch.memory import estimate_memory

    torch.manual_seed(0)
    model, batch, options = MODELS[name]()
    found = estimate_memory(model, enlarged(batch, TIMES), gpu="H100", **options)
    return {
        "allocated": found.allocated,
        "reserved": found.reserved,
        "method": found.method,
        "seconds": found.seconds,
    }


def trained(name: str) -> dict[str, int]:
    return truth.on_gpu(name, TIMES)


PARTS = {"estimated": estimated, "trained": trained}


def compared(name: str, parts: list[str]) -> dict[str, Any]:
    module = "benchmarks.estimates.gpu"
    return {part: truth.in_child(module, part, name) for part in parts}


def row(name: str, found: dict[str, Any]) -> str:
    estimate = found["estimated"]
    cells = [name]
    for what in ("allocated", "reserved"):
        cells.append(f"{estimate[what] / MIB:.0f}")
        if "trained" in found:
            real = found["trained"][what]
            cells += [f"{real / MIB:.0f}", f"{estimate[what] / real - 1:+.1%}"]
    cells += [estimate["method"], f"{estimate['seconds']:.1f}"]
    return f"| {' | '.join(cells)} |"


def errors(results: dict[str, Any], what: str) -> str:
    off = [abs(r["estimated"][what] / r["trained"][what] - 1) for r in results.values()]
    return f"{what}: median error {statistics.median(off):.1%}, worst {max(off):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--json", type=Path, default=PATH)
    parser.add_argument("names", nargs="*", metavar="model")
    args = parser.parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part](args.names[0])))
        return
    parts = list(PARTS)[: 1 if args.dry else None]
    workers = max(1, (os.cpu_count() or 1) // 3)
    results: dict[str, Any] = {}
    with ThreadPoolExecutor(workers) as pool:
        names = args.names or list(MODELS)
        jobs = {name: pool.submit(compared, name, parts) for name in names}
        for name, job in jobs.items():
            try:
                results[name] = job.result()
                print(row(name, results[name]), flush=True)
            except Exception as error:
                said = getattr(error, "stderr", None) or str(error)
                print(f"{name} failed: {said[-600:]}", flush=True)
    failed = [name for name in names if name not in results]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
    if args.dry:
        return
    for what in ("allocated", "reserved"):
        print(errors(results, what))
    if not args.names:
        about = {"gpu": torch.cuda.get_device_name(), "times": TIMES}
        text = {"machine": machine.describe() | about, "models": results}
        args.json.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
