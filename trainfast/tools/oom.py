"""Reads an out-of-memory error in a log, and says what helps.

The error may be torch's on a GPU, a worker that the system killed, or shared memory
that ran out. Fragmentation is told apart from need.
"""

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", nargs="?", help="a file, or - for standard input")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML: its batch size and accumulation"
    )
    parser.add_argument("--batch-size", type=int, metavar="N")
    parser.add_argument("--accumulation", type=int, default=1, metavar="N")
    parser.set_defaults(error=parser.error)


def run(args: argparse.Namespace) -> int:
    from trainfast.diagnosis.settings import of_file
    from trainfast.memory.advice import oom_advice

    if not args.log:
        args.error("pass a log, or - for standard input")
    if args.accumulation < 1 or (args.batch_size is not None and args.batch_size < 1):
        args.error("--batch-size and --accumulation must be positive")
    try:
        if args.log == "-":
            text = sys.stdin.read()
        else:
            with open(args.log, errors="replace") as file:
                text = file.read()
        advice = oom_advice(
            text,
            batch_size=args.batch_size,
            accumulation=args.accumulation,
            settings=of_file(args.config) if args.config else None,
        )
    except (OSError, ValueError, ImportError) as error:
        print(f"trainfast oom: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(advice.for_terminal(args.json))
    if advice.batch is not None and not args.json:
        print(f"\n{advice.to_yaml()}", end="")
    return 0
