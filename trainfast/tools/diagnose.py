"""Runs a training script with one thing changed at a time and says what each gives.

The script runs unchanged in child processes, in a sandbox: whatever it writes or
deletes is gone when the probe ends, and it has no network.
"""

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--probe", action="store_true", help="run the script")
    parser.add_argument("--deep", action="store_true", help="try more, for minutes")
    parser.add_argument("script", nargs="?", help="the training script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    parser.set_defaults(error=parser.error)


def run(args: argparse.Namespace) -> int:
    if not (args.probe and args.script):
        args.error("pass --probe and a training script")
    from trainfast.probe.diagnosis import diagnose
    from trainfast.probe.run import ProbeError

    def progress(stage: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{stage} ...", end="", file=sys.stderr, flush=True)

    try:
        report = diagnose(
            args.script, args.arguments, deep=args.deep, progress=progress
        )
    except (ProbeError, OSError, SyntaxError) as error:
        print(f"trainfast diagnose: {error}", file=sys.stderr)
        return 1
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
    print(report.to_json() if args.json else report)
    return 1 if report.findings else 0
