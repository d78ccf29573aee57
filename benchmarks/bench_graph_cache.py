"""Batches of graphs: trainfast's cache against what people use today.

    python -m benchmarks.bench_graph_cache                 every case
    python -m benchmarks.bench_graph_cache --case small-hot mid-hot
    python -m benchmarks.bench_graph_cache --json auto     into benchmarks/results/

All files are in the page cache. "hot": each contender makes an epoch's batches in a
row, after epochs of at least 10 ms outside the clock, for the turns of the others have
put its code and data out of the processor's caches; ratios are of whole turns. "cold":
a training step of a small network comes before each batch, outside the clock, so that
code and data must come back. A loader is drained for whole epochs, after others outside
the clock, too. Between steps, what is timed is how long next() keeps the loop waiting,
and how long the step itself takes beside the loader's threads.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks import command, machine
from benchmarks.graph_cache import MID, SMALL
from benchmarks.graph_cache_cases import Bench, batch_case, patch_case
from benchmarks.graph_cache_disk import disk_sizes, open_case, verify_case, write_case
from benchmarks.graph_cache_loading import loader_case, steps_case

PROBLEMS = (SMALL, MID)


def cases() -> dict[str, Callable[[Bench], dict | list[dict] | None]]:
    """Return all cases by name."""
    made: dict[str, Callable] = {}
    for cold in (False, True):
        for problem in PROBLEMS:
            name = f"{problem.name}-{'cold' if cold else 'hot'}"
            made[name] = partial(batch_case, problem=problem, cold=cold)
    for problem in PROBLEMS:
        made[f"{problem.name}-loader"] = partial(loader_case, problem=problem)
    for threads in (1, 2):
        for problem in PROBLEMS:
            run = partial(steps_case, problem=problem, threads=threads)
            made[f"{problem.name}-step{threads}"] = run
    for problem in PROBLEMS:
        made[f"{problem.name}-ram"] = partial(patch_case, problem=problem)
    made["write"] = partial(write_case, durable=False)
    made["write-durable"] = partial(write_case, durable=True)
    return made | {"open": open_case, "verify": verify_case}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.make_parser("bench_graph_cache", __doc__, list(cases()), [])
    add = parser.add_argument
    add("--without-ours", action="store_true", help="rivals only")
    add("--folder", type=Path, default=machine.ROOT / "build",
        help="for the files, on a real disk (default build/)")  # fmt: skip
    return command.parse(parser, argv, lambda args: args.without_ours)


def run_cases(args: argparse.Namespace, bench: Bench) -> Iterator[Callable]:
    """Yield a call for each report; a case may have several."""
    for name, case in cases().items():
        if args.case and name not in args.case:
            continue
        reports = case(bench)
        for report in reports if isinstance(reports, list) else [reports]:
            if args.json == "auto" and report is not None:
                require_ours(report)
            yield lambda report=report: report


def require_ours(report: dict) -> None:
    """Results that are published have all of ours in them."""
    missing = [n for n in report["skipped"] if n.startswith("trainfast")]
    if missing:
        why = report["skipped"][missing[0]]
        raise SystemExit(f"{report['name']}: results need {missing[0]}: {why}")


def run(args: argparse.Namespace) -> dict:
    """Run the chosen cases and return the report, with the sizes on disk."""
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench_graph_cache-", dir=args.folder))
    budget, with_ours = command.make_budget(args), not args.without_ours
    bench = Bench(folder, budget, args.smoke, with_ours)
    backend = command.backend_in_use(args.device) if with_ours else "none"
    conditions = "files in the page cache, batches of 32; hot: turns of an epoch, each "
    conditions += "after 10 ms and more that are not timed"
    try:
        report = command.run(
            "graph-cache", "Graph cache", args, conditions, backend,
            run_cases(args, bench),
        )  # fmt: skip
        if not args.case:
            report["disk"] = [disk_sizes(bench, problem) for problem in PROBLEMS]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the process's exit status."""
    args = parse(argv)
    command.write(args, run(args), "graph-cache")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
