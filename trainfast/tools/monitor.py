"""Watches GPUs, this machine and a process while a training runs.

In a terminal a table; elsewhere a line an interval. Utilisation, memory, temperature,
clocks and the bus come with a word where the guides' limits are left.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from trainfast.monitor import formats
from trainfast.monitor.sample import Sample
from trainfast.monitor.system_monitor import LONGEST


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("-i", "--interval"),
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="from one look to the next (1)",
    )
    parser.add_argument(
        "--format",
        choices=("table", "csv", "jsonl"),
        default="table",
        help="csv has nvidia-smi's column names",
    )
    parser.add_argument("--once", action="store_true", help="look once, and end")
    parser.add_argument(
        "--pid", type=int, help="also watch this process and those that it started"
    )
    parser.set_defaults(error=parser.error)


def run(args: argparse.Namespace) -> int:
    if not 0.1 <= args.interval <= LONGEST:
        args.error(f"--interval must be 0.1 to {LONGEST}, got {args.interval}")
    if args.pid is not None and args.pid < 1:
        args.error(f"--pid must be a process, got {args.pid}")
    from trainfast.monitor.eye import Eye

    try:
        eye = Eye(args.pid)
    except ImportError as error:
        print(f"trainfast monitor: {error}", file=sys.stderr)
        return 1
    note = eye.nvml.missing if eye.nvml else None
    kind = "jsonl" if args.json else args.format
    with (
        contextlib.suppress(KeyboardInterrupt, BrokenPipeError),
        _out(kind, note) as out,
    ):
        while True:
            time.sleep(min(args.interval, 0.2) if args.once else args.interval)
            sample = eye.look()
            if args.pid is not None and sample.tree is None:
                print(f"trainfast monitor: process {args.pid} ended", file=sys.stderr)
                return 1
            out(sample)
            if args.once:
                break
    return 0


@contextlib.contextmanager
def _out(kind: str, note: str | None) -> Iterator[Callable[[Sample], None]]:
    """What shows a sample."""

    def printed(lines: Callable[[Sample], list[str]]) -> Callable[[Sample], None]:
        return lambda sample: print("\n".join(lines(sample)), flush=True)

    if kind == "csv":
        print(formats.header(), flush=True)
        yield printed(formats.csv_lines)
    elif kind == "jsonl":
        yield printed(lambda sample: [formats.json_line(sample)])
    elif sys.stdout.isatty() and _has_rich():
        from trainfast.monitor import live

        with live.shown() as show:
            yield lambda sample: show(live.table(sample, note))
    else:
        if note:
            print(note, file=sys.stderr)
        yield printed(lambda sample: [formats.text_line(sample)])


def _has_rich() -> bool:
    from importlib.util import find_spec

    return find_spec("rich") is not None
