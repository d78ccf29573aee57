"""Estimates the memory of a training step, without a GPU and without the memory.

With module:function, which builds the model, and --batch module:name, a batch of it.
With a script: it runs unchanged in a sandbox, on the CPU, up to its first batch. Its
next two steps run on fake tensors, as if on the GPU asked.
"""

import argparse
import os
import sys
from importlib.util import find_spec
from typing import Any

# Options that a script does not take: it decides by itself.
_OF_A_FUNCTION = (
    *("batch", "loss", "amp", "optimizer", "checkpointing", "expandable_segments"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch", help="a batch, or a function that makes one, as module:name"
    )
    parser.add_argument(
        "--loss", help="a function of the output and the target, as module:name"
    )
    parser.add_argument(
        "--gpu",
        help="a GPU's name, or its memory such as 16GB; default: this machine's, or T4",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--amp", choices=("fp16", "bf16"), help="with autocast")
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "adam", "sgd", "trainfast"),
        help="default: adamw",
    )
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--expandable-segments", action="store_true")
    parser.add_argument("--plot", metavar="PNG", help="draw the memory over the steps")
    parser.add_argument(
        "target", nargs="?", help="a script, a notebook, or a function as module:name"
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    parser.set_defaults(error=parser.error, parse=parser.parse_args)


def run(args: argparse.Namespace) -> int:
    if not args.target:
        args.error("pass a script, or a function that builds the model as module:name")
    if args.plot and find_spec("matplotlib") is None:
        args.error("--plot needs matplotlib: pip install 'trainfast[tools]'")
    is_script = ":" not in args.target
    if not is_script and args.arguments:  # options that follow the function
        args = args.parse([*args.arguments, args.target], args)
    if is_script and not os.path.isfile(args.target):
        args.error(f"cannot find the script {args.target!r}; check its path")
    given = [name for name in _OF_A_FUNCTION if getattr(args, name)]
    if is_script and given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        args.error(f"{names} cannot be combined with a script; change the script")
    if not is_script and not args.batch:
        args.error("a batch is needed as well: --batch module:name")
    if find_spec("torch") is None:
        print("trainfast estimate-memory: torch must be installed", file=sys.stderr)
        return 1
    from trainfast.memory.gpus import gpu_of
    from trainfast.probe.run import ProbeError
    from trainfast.tools.diagnose import show_progress

    try:
        gpu_of(args.gpu)
        with show_progress() as progress:
            progress("estimating")
            if is_script:
                from trainfast.probe.memory import estimate_script

                estimate = estimate_script(
                    args.target, args.arguments, device=args.device, gpu=args.gpu
                )
                tables = {}
            else:
                estimate = _of_function(args)
                tables = _what_if(estimate, progress)
    except (TypeError, ValueError) as error:
        args.error(" ".join(str(error).split()))
    except ProbeError as error:  # a traceback, and what to write instead
        print(f"trainfast estimate-memory: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # of the user's model
        line = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"trainfast estimate-memory: {line}", file=sys.stderr)
        return 1
    if args.plot:
        estimate.plot(args.plot)
    if args.json:
        import json

        print(json.dumps(estimate.to_dict() | tables, indent=2))
    else:
        print(estimate.for_terminal(False))
    return 0 if estimate.fits else 1


def _of_function(args: argparse.Namespace) -> Any:
    from trainfast.tools._objects import object_of
    from trainfast.torch.memory.estimate import estimate_memory

    batch = object_of(args.batch)
    return estimate_memory(
        object_of(args.target),
        batch() if callable(batch) else batch,
        loss_fn=object_of(args.loss) if args.loss else None,
        optimizer=args.optimizer or "adamw",
        amp=args.amp,
        device=args.device,
        gpu=args.gpu,
        checkpointing=args.checkpointing,
        expandable_segments=args.expandable_segments,
    )


def _what_if(estimate: Any, progress: Any) -> dict[str, Any]:
    """Adds what would save memory and the largest batch to the estimate's tables."""
    from trainfast.memory.knobs import largest_batch, savings, savings_table

    found = savings(estimate, progress)
    estimate.more.append(savings_table(estimate, found))
    best = largest_batch(estimate, progress)
    if best is not None:
        estimate.facts["largest batch that fits"] = str(best)
    return {
        "with": {name: other.total for name, other in found.items()},
        "largest_batch": best,
    }
