"""What the benchmarks' command lines share: options, the backend's name, the report."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import floor, harness, machine
from benchmarks.harness import Budget

RESULTS = Path(__file__).resolve().parent / "results"
SECONDS = {"cpu": 10.0, "cuda": 3.0}


def make_parser(
    bench: str, doc: str | None, cases: Sequence[str], contenders: Sequence[str]
) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    summary = (doc or "").split("\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser(f"python -m benchmarks.{bench}", None, summary)
    add = parser.add_argument
    add("--case", nargs="+", choices=cases, metavar="NAME", help=", ".join(cases))
    add("--contender", nargs="+", choices=contenders, metavar="NAME",
        help=", ".join(contenders))  # fmt: skip
    add("--threads", type=int, default=2, help="torch.set_num_threads (default 2)")
    add("--json", help="write the report to this file; auto: benchmarks/results/")
    add("--seconds", type=float, help="per case (default 10, on a GPU 3)")
    add("--smoke", action="store_true", help="tiny cases: does it run, not how fast")
    parser.set_defaults(device="cpu")
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """Let the benchmark run on a GPU, too."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    partial: Callable[[argparse.Namespace], Any] = lambda args: False,
) -> argparse.Namespace:
    """Return the arguments, checked; `partial` says whether more is left out."""
    args = parser.parse_args(argv)
    if args.threads < 1:
        parser.error(f"--threads must be at least 1, got {args.threads}")
    if args.seconds is None:
        args.seconds = SECONDS[args.device]
    if not args.seconds >= 0:
        parser.error(f"--seconds must be at least 0, got {args.seconds}")
    chosen = args.smoke or args.case or args.contender or partial(args)
    if args.json == "auto" and chosen:
        parser.error("--json must be a path unless everything runs, got auto")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device must be usable, got cuda without a GPU that torch sees")
    return args


def make_budget(args: argparse.Namespace) -> Budget:
    """Return how long to measure a case."""
    if args.smoke:
        return Budget(0.02, warmup=1, min_rounds=3, max_rounds=50)
    return Budget(args.seconds)


def backend_in_use(device: str) -> str:
    """Return the name of trainfast's backend for the device."""
    import trainfast

    for backend in trainfast.backends():
        if backend["in_use"] and (backend["name"] == "cuda") == (device == "cuda"):
            return str(backend["name"])
    return "unknown"


def run(
    bench: str,
    title: str,
    args: argparse.Namespace,
    conditions: str,
    backend: str,
    cases: Iterable[Callable[[], dict | None]],
    **how: Any,
) -> dict:
    """Run the cases, printing each as it is done; return the report.

    cases: calls that each return a case's report, or None where it did not run. how:
    more of what the report says about this run.
    """
    torch.set_num_threads(args.threads)
    about = machine.describe(args.device)
    where = machine.describe_run(args.threads, backend)
    where["conditions"] = conditions + ", SMOKE: sizes without meaning" * args.smoke
    where |= {"smoke": args.smoke, "device": args.device, **how}
    print(harness.heading(title, about, where) + "\n", flush=True)
    done = []
    for measure in cases:
        case = measure()
        if case is not None:
            done.append(case)
            print(harness.case_text(case) + "\n", flush=True)
    where["openmp"] = [Path(path).name for path in floor.openmp_runtimes()]
    return harness.make_report(bench, about, where, done)


def write(args: argparse.Namespace, report: dict, kind: str) -> None:
    """Write the report where --json says, if it does."""
    if not args.json:
        return
    path = Path(args.json)
    if args.json == "auto":
        backend = os.environ.get("TRAINFAST_BACKEND")
        if backend:  # beside the results of the best one
            kind += f"-{backend}"
        path = RESULTS / f"{machine.slug(report['machine'])}_{kind}.json"
    harness.write_json(report, path)
    print(f"wrote {path}")
