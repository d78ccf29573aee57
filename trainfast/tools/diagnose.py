"""Says what slows training: this machine and a configuration, or with --probe a script.

Without --probe nothing is run: the machine and the configuration are compared with what
is known to slow training. With it the script runs unchanged in child processes with one
thing changed at a time, in a sandbox: whatever it writes or deletes is gone when the
probe ends, and it has no network. TRAINFAST_SANDBOX=none runs it without one.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="a YAML configuration")
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="FILE",
        help="a script to read for deprecated calls; it does not run (may be repeated)",
    )
    parser.add_argument(
        "--checklist", action="store_true", help="add the guides' checklists"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print Markdown, for a bug report"
    )
    parser.add_argument("--probe", action="store_true", help="run the script")
    parser.add_argument("--deep", action="store_true", help="try more, for minutes")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="run the script in N processes, as torchrun --nproc-per-node does",
    )
    parser.add_argument("script", nargs="?", help="the training script, or a notebook")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    parser.set_defaults(error=parser.error)


def run(args: argparse.Namespace) -> int:
    static = args.config or args.source or args.checklist or args.markdown
    if args.probe or args.script or args.deep or args.ranks:
        if not (args.probe and args.script):
            args.error("pass --probe and a training script")
        if args.ranks is not None and args.ranks < 2:
            args.error(f"--ranks must be 2 or more, got {args.ranks}")
        if static:
            args.error("pass --config, --source, --checklist, --markdown or --probe")
        return _probe(args)
    if args.json and args.markdown:
        args.error("pass --json or --markdown")
    from trainfast.diagnosis.report import check

    try:
        report = check(args.config, sources=args.source, checklist=args.checklist)
    except (ImportError, OSError, RecursionError, SyntaxError, ValueError) as error:
        line = " ".join(str(error).split())
        print(f"trainfast diagnose: {line}", file=sys.stderr)
        return 1
    if args.markdown:
        print(report.to_markdown())
    else:
        print(report.for_terminal(args.json))
    return 1 if report.findings else 0


def _probe(args: argparse.Namespace) -> int:
    from trainfast.probe.diagnosis import diagnose
    from trainfast.probe.run import ProbeError

    try:
        with show_progress() as progress:
            report = diagnose(
                args.script,
                args.arguments,
                deep=args.deep,
                ranks=args.ranks,
                progress=progress,
            )
    except (ProbeError, OSError, SyntaxError) as error:
        print(f"trainfast diagnose: {error}", file=sys.stderr)
        return 1
    print(report.for_terminal(args.json))
    return 1 if report.findings else 0


@contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """Shows the stage in the terminal's last line, and clears it at the end."""
    terminal = sys.stderr.isatty()

    def progress(stage: str) -> None:
        if terminal:
            print(f"\r\033[K{stage} ...", end="", file=sys.stderr, flush=True)

    try:
        yield progress
    finally:
        if terminal:
            print("\r\033[K", end="", file=sys.stderr)
