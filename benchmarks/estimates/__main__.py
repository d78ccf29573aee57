"""How far memory estimates are from the truth, on the CPU.

    python -m benchmarks.estimates              all models; writes the results
    python -m benchmarks.estimates gpt unet     these, without writing

Each model is estimated in one process, run under torch.profiler in a second one, and
run alone in a third one, whose high-water mark the kernel keeps.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import machine
from benchmarks.estimates import truth
from benchmarks.estimates.models import MODELS

PATH = Path(__file__).parent / "measured.json"
MIB = 1 << 20


def estimated(name: str) -> dict[str, Any]:
    import torch

    from trainfast.torch.memory import estimate_memory

    torch.manual_seed(0)
    model, batch, options = MODELS[name]()
    found = estimate_memory(model, batch, device="cpu", **options)
    return {
        "allocated": found.allocated,
        "total": found.total,
        "method": found.method,
        "seconds": found.seconds,
    }


PARTS = {
    "estimated": estimated,
    "profiled": truth.profiled_peak,
    "high_water": truth.high_water,
}


def row(name: str, found: dict[str, Any]) -> str:
    estimate, profiled = found["estimated"], found["profiled"]
    error = estimate["allocated"] / profiled - 1
    above = found["high_water"] / estimate["total"] - 1
    return (
        f"| {name} | {estimate['allocated'] / MIB:.0f} | {profiled / MIB:.0f} | "
        f"{error:+.1%} | {estimate['total'] / MIB:.0f} | "
        f"{found['high_water'] / MIB:.0f} | {above:+.1%} | {estimate['method']} | "
        f"{estimate['seconds']:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("names", nargs="*", metavar="model")
    args = parser.parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part](args.names[0])))
        return
    names = [
        "model",
        "tensors MiB",
        "profiled",
        "error",
        "total",
        "high water",
        "above",
        "how",
        "s",
    ]
    print(f"| {' | '.join(names)} |")
    print("|---|---:|---:|---:|---:|---:|---:|---|---:|")
    results = {}
    for name in tqdm(args.names or MODELS):
        results[name] = {
            part: truth.in_child("benchmarks.estimates", part, name) for part in PARTS
        }
        print(row(name, results[name]), flush=True)
    if not args.names:
        text = json.dumps({"machine": machine.describe(), "models": results}, indent=1)
        PATH.write_text(text + "\n")


if __name__ == "__main__":
    main()
