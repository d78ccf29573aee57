"""Measures kernels, loaders and training steps here against their rivals and roofs.

Each case runs in several independent processes, in which trainfast and its rivals take
turns. The exit status is 1 if a case fails, or if something has become slower than in
the base that --compare names.
"""

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainfast import _core

if TYPE_CHECKING:
    from trainfast.bench.results import Results

_SECONDS = 0.5  # for all devices together
_PROCESSES = 5
_WITHIN = 110.0  # seconds for all processes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices",
        nargs="+",
        choices=("cpu", "cuda"),
        help="default: the CPU, and a GPU if there is one",
    )
    parser.add_argument(
        "--cases", nargs="+", metavar="NAME", help="only cases with this in their name"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="for each case in each process (default: 0.5, on two devices 0.25)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        help="how many (default: 5, fewer if they would take more than two minutes)",
    )
    parser.add_argument("--save", metavar="FILE", help="write the times to this file")
    parser.add_argument(
        "--compare", metavar="FILE", help="say what changed since this was saved"
    )
    parser.set_defaults(error=parser.error)


def run(args: argparse.Namespace) -> int:
    from trainfast.bench.report import BenchReport
    from trainfast.bench.results import save
    from trainfast.bench.run import BenchError, bench

    devices = _devices(args)
    names = _names(args, devices)
    base = _base(args, names, devices)
    seconds = _SECONDS / len(devices) if args.seconds is None else args.seconds
    _check(args, seconds)
    within = _WITHIN if args.processes is None else math.inf
    processes = args.processes or _PROCESSES
    try:
        results = bench(names, devices, seconds, processes, within, _progress)
        if args.save:
            save(results, args.save)
    except (BenchError, OSError) as error:
        print(f"trainfast bench: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("trainfast bench: interrupted, nothing was saved", file=sys.stderr)
        return 1
    finally:
        _progress("")
    report = BenchReport(results, base)
    print(report.for_terminal(args.json))
    return 0 if report.ok else 1


def _progress(stage: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{stage}", end="", file=sys.stderr, flush=True)


# ---- The command line ----------------------------------------------------------------


def _devices(args: argparse.Namespace) -> list[str]:
    listed = {name: why for name, why, _ in _core.backends()}
    present = ["cpu", "cuda"] if listed["cuda"] is None else ["cpu"]
    devices = list(dict.fromkeys(args.devices or present))
    if not set(devices) <= set(present):
        args.error(
            f"--devices must be of {', '.join(present)}, got cuda: {listed['cuda']}"
        )
    return devices


def _names(args: argparse.Namespace, devices: list[str]) -> list[str]:
    from trainfast.bench.cases import CASES

    words = args.cases or [""]
    for word in words:
        if not any(word in name for name in CASES):
            args.error(f"--cases must be parts of {', '.join(CASES)}, got {word!r}")
    names = [
        name
        for name, where in CASES.items()
        if any(word in name for word in words) and set(where) & set(devices)
    ]
    if not names:
        args.error(f"--cases must name one that runs on {devices[0]}")
    return names


def _base(
    args: argparse.Namespace, names: list[str], devices: list[str]
) -> "Results | None":
    from trainfast.bench.results import load

    if args.compare is None:
        return None
    try:
        base = load(args.compare)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        args.error(f"--compare {args.compare!r}: {why}")
    if not any(t.name in names and t.device in devices for t in base.timings):
        args.error(f"--compare {args.compare!r}: has none of the cases to measure")
    return base


def _check(args: argparse.Namespace, seconds: float) -> None:
    if not 0 < seconds < math.inf:
        args.error(f"--seconds must be above 0, got {seconds}")
    if args.processes is not None and args.processes < 1:
        args.error(f"--processes must be at least 1, got {args.processes}")
    if args.save is not None:
        path = Path(args.save)
        folder = path.parent
        if "\0" in args.save or path.is_dir() or not os.access(folder, os.W_OK):
            args.error(
                f"--save must be a file in a folder to write to, got {args.save!r}"
            )
