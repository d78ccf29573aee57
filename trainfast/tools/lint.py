"""Reads scripts and notebooks for faults that cost a run; nothing is run.

Eight faults, such as losses that are kept with their graph, or checkpoints outside the
epoch loop. `# trainfast: ignore=ID` on a line keeps it out.
"""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="scripts, notebooks, or folders"
    )
    parser.add_argument(
        "--hints", action="store_true", help="also tell what only slows the loop"
    )
    parser.set_defaults(error=parser.error)


def run(args: argparse.Namespace) -> int:
    from trainfast.lint.report import lint_files

    if not args.paths:
        args.error("pass a script or a folder")
    try:
        report = lint_files([Path(path) for path in args.paths], hints=args.hints)
    except (OSError, RecursionError, SyntaxError, ValueError) as error:
        line = " ".join(str(error).split())
        print(f"trainfast lint: {line}", file=sys.stderr)
        return 1
    print(report.for_terminal(args.json))
    return 1 if report.findings else 0
