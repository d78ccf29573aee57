"""How far `find_batch_size` is from an exhaustive search, on the CPU.

    python -m benchmarks.estimates.batch_sizes            ten models, more than an hour
    python -m benchmarks.estimates.batch_sizes gpt bert   these, anew

The results go to benchmarks/estimates/batch_sizes.json, and count for the sources that
made them: the command goes on where it stopped.

The target of a model is what a batch with about 1 GiB of activations takes: plain
loops of ten steps with one size each, in fresh processes, are searched for the largest
that fits. A size fits if each of three processes stays below the target: of one size
they differ by up to 7 %. The target is 90 % of the limit that the finder gets in a
process of its own, with `multiple=1`. Its answer must fit into the limit in ten plain
loops, too.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import machine
from benchmarks.estimates import truth
from benchmarks.estimates.models import MODELS

HERE = Path(__file__).resolve().parent
PATH = HERE / "batch_sizes.json"
SOURCES = HERE.parents[1] / "trainfast" / "torch" / "memory"
NAMES = (
    *("mlp", "gpt", "gpt_bf16", "gpt_checkpointed", "unet", "transformer_encoder"),
    *("lstm", "bert", "llama", "vit"),
)
ACTIVATIONS = 1 << 30  # bytes, about, of the largest batch
STEPS = 10  # of a plain loop: after two the high-water mark still rises
TRIES = 3  # plain loops of each size in the search
RUNS = 10  # of them at the answer
TARGET = 0.9  # of the limit: the finder's default


def case(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """A model, make_batch(n), and the arguments of `estimate_memory`."""
    torch.manual_seed(0)
    model, batch, options = MODELS[name]()

    def make_batch(n: int) -> Any:
        def rows(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[torch.arange(n) % len(tensor)]

        if isinstance(batch, dict):
            return {key: rows(value) for key, value in batch.items()}
        return tuple(map(rows, batch))

    return model, make_batch, options


def usual_size(name: str) -> int:
    batch = MODELS[name]()[1]
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


def plain(name: str, size: int) -> int:
    """The high-water mark of this process, with a loop of this size."""
    model, make_batch, options = case(name)
    truth.steps(model, make_batch(size), options, count=STEPS)
    return truth.mark()


def found(name: str, limit: int) -> dict[str, Any]:
    """What the finder says, in this process."""
    from trainfast.torch.memory import find_batch_size

    model, make_batch, options = case(name)
    optimizer = torch.optim.AdamW(model.parameters())
    began = time.perf_counter()
    report = find_batch_size(
        model, make_batch, optimizer, limit=limit, target=TARGET, multiple=1, **options
    )
    return report.to_dict() | {"seconds": time.perf_counter() - began}


HEADER = (
    "| model | limit MiB | largest | found | share | fits | highest | sizes run | s |\n"
    "|---|---:|---:|---:|---:|---|---:|---:|---:|"
)
PARTS = {"plain": plain, "found": found}


def in_child(part: str, name: str, number: int) -> Any:
    module = "benchmarks.estimates.batch_sizes"
    return truth.in_child(module, part, name, str(number))


def peaks(name: str, size: int, runs: int) -> list[int]:
    return [in_child("plain", name, size) for _ in range(runs)]


def compared(name: str) -> dict[str, Any]:
    """The exhaustive search and the finder."""
    first, second = (n * usual_size(name) for n in (1, 4))
    low, high = (max(peaks(name, n, 1)) for n in (first, second))
    slope = max(1.0, (high - low) / (second - first))
    largest = int(ACTIVATIONS / slope)
    step = max(1, largest // 100)
    fits = int(max(peaks(name, largest, TRIES)) + slope / 2)
    while max(peaks(name, largest + step, TRIES)) <= fits:
        largest += step
    limit = int(fits / TARGET)
    report = in_child("found", name, limit)
    answer = report["batch_size"]
    peaks_there = peaks(name, answer, RUNS)
    return {
        "limit": limit,
        "largest": largest,
        "found": answer,
        "fits": sum(peak <= limit for peak in peaks_there),
        "highest": max(peaks_there),
        "sizes run": [probe["size"] for probe in report["probes"]],
        "seconds": report["seconds"],
    }


def row(name: str, result: dict[str, Any]) -> str:
    return (
        f"| {name} | {result['limit'] / (1 << 20):.0f} | {result['largest']} | "
        f"{result['found']} | {result['found'] / result['largest']:.1%} | "
        f"{result['fits']} of {RUNS} | {result['highest'] / result['limit']:.1%} | "
        f"{len(result['sizes run'])} | "
        f"{result['seconds']:.1f} |"
    )


def digest() -> str:
    """Of the finder, the models and the loops that the finder is compared with."""
    own = [HERE / f"{name}.py" for name in ("batch_sizes", "models", "truth")]
    files = [*sorted(SOURCES.rglob("*.py")), *own]
    text = b"\0".join(file.read_bytes() for file in files)
    return hashlib.sha256(text).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("names", nargs="*", metavar="model")
    args = parser.parse_args()
    if args.part:
        name, number = args.names
        print(json.dumps(PARTS[args.part](name, int(number))))
        return
    kept = json.loads(PATH.read_text()) if PATH.exists() else {}
    results = kept["models"] if kept.get("digest") == digest() else {}
    for name in tqdm(args.names or [name for name in NAMES if name not in results]):
        results[name] = compared(name)
        results = {name: results[name] for name in NAMES if name in results}
        kept = {"machine": machine.describe(), "digest": digest(), "models": results}
        PATH.write_text(json.dumps(kept, indent=1) + "\n")
    print(HEADER)
    for name, result in results.items():
        print(row(name, result))


if __name__ == "__main__":
    main()
