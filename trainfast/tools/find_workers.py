"""Measures how many workers a data loader needs."""

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data",
        nargs="?",
        help="a Dataset, a DataLoader or a function that makes one, as module:name",
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N")
    parser.add_argument(
        "--consumer-rate",
        type=float,
        metavar="R",
        help="batches a second that training takes",
    )
    parser.add_argument(
        "--candidates",
        type=int,
        nargs="+",
        metavar="N",
        help="try all of these; without it: 0, 1, 2, 4, ... while it gets faster",
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="the most that it may take"
    )
    parser.set_defaults(error=parser.error)


def run(args: argparse.Namespace) -> int:
    if not args.data:
        args.error("pass a data set as module:name")
    try:
        from trainfast.torch.data.workers import find_workers
    except ImportError as error:
        print(f"trainfast find-workers: {error}", file=sys.stderr)
        return 1
    from trainfast.tools._objects import object_of
    from trainfast.tools.diagnose import show_progress

    try:
        data = object_of(args.data)
        is_data = hasattr(data, "__getitem__") or hasattr(data, "__iter__")
        if isinstance(data, type) or (not is_data and callable(data)):
            data = data()
        with show_progress() as progress:
            report = find_workers(
                data,
                batch_size=args.batch_size,
                consumer_rate=args.consumer_rate,
                candidates=args.candidates,
                seconds=args.seconds,
                progress=progress,
            )
    except (TypeError, ValueError) as error:
        args.error(" ".join(str(error).split()))
    except Exception as error:  # of the data set
        line = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"trainfast find-workers: {line}", file=sys.stderr)
        return 1
    print(report.for_terminal(args.json))
    return 0
