"""Finds the largest batch size that fits, or the fastest, by running training steps."""

import argparse
import sys
from importlib.util import find_spec
from typing import Any

_ENTRY = """def setup():
    return model, make_batch, optimizer  # make_batch(n) gives a batch of n samples"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "setup",
        nargs="?",
        help="a function as module:name that returns (model, make_batch, optimizer)",
    )
    parser.add_argument(
        "--loss", help="a function of the output and the target, as module:name"
    )
    parser.add_argument("--amp", choices=("fp16", "bf16"), help="with autocast")
    parser.add_argument(
        "--objective", choices=("memory", "throughput"), default="memory"
    )
    parser.add_argument("--target", type=float, default=0.9, metavar="SHARE")
    parser.add_argument("--multiple", type=int, default=8, metavar="N")
    parser.add_argument("--max-batch-size", type=int, default=1 << 16, metavar="N")
    parser.add_argument("--gpu", type=int, metavar="N", help="the GPU's number")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML with `batch_size`, the one to start from"
    )
    parser.add_argument(
        *("--batch-size", "--batch_size"),
        type=int,
        metavar="N",
        help="the batch size so far: the report has the new learning rate",
    )
    parser.add_argument("--dataset-size", type=int, metavar="N")
    parser.add_argument("--plot", metavar="PNG", help="draw rate and memory")
    parser.set_defaults(error=parser.error)


def run(args: argparse.Namespace) -> int:
    if not args.setup:
        args.error(f"pass a function as module:name, such as\n\n{_ENTRY}")
    if args.plot and find_spec("matplotlib") is None:
        args.error("--plot needs matplotlib: pip install 'trainfast[tools]'")
    try:
        import torch

        from trainfast.torch.memory.find_batch import find_batch_size
    except ImportError as error:
        print(f"trainfast find-batch-size: {error}", file=sys.stderr)
        return 1
    from trainfast.tools._objects import object_of
    from trainfast.tools.diagnose import show_progress

    try:
        old = args.batch_size or _batch_size_of(args.config)
        if args.gpu is not None:
            torch.cuda.set_device(args.gpu)
        loss_fn = object_of(args.loss) if args.loss else None
        model, make_batch, *optimizer = object_of(args.setup)()
        with show_progress() as progress:
            report = find_batch_size(
                *(model, make_batch, *optimizer),
                loss_fn=loss_fn,
                amp=args.amp,
                objective=args.objective,
                target=args.target,
                multiple=args.multiple,
                max_batch_size=args.max_batch_size,
                dataset_size=args.dataset_size,
                progress=progress,
            )
    except (TypeError, ValueError) as error:
        args.error(" ".join(str(error).split()))
    except Exception as error:  # of the user's functions
        line = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"trainfast find-batch-size: {line}", file=sys.stderr)
        return 1
    if old:
        report.notes += _advice(old, report.batch_size)
    if args.plot:
        report.plot(args.plot)
    print(report.for_terminal(args.json))
    return 0


def _batch_size_of(path: str | None) -> int | None:
    if path is None:
        return None
    from trainfast.config import load_config

    found: Any = load_config(path).get("batch_size")
    if found is not None and (not isinstance(found, int) or found < 1):
        raise ValueError(f"batch_size in {path} must be a positive integer: {found!r}")
    return found


def _advice(old: int, new: int) -> list[str]:
    from trainfast.memory.batch_size import scale_lr

    root, linear = (scale_lr(1.0, old, new, rule) for rule in ("sqrt", "linear"))
    return [
        f"from batch {old}: learning rate x {root:.3g} for Adam (square root), "
        f"x {linear:.3g} for SGD (linear); warm it up",
    ]
