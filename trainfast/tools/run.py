"""Runs a training script with trainfast's kernels, without a change to the script."""

import argparse
import os
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="YAML", help="what to turn on")
    parser.add_argument(
        "--leaks", action="store_true", help="name what grows with every step"
    )
    parser.add_argument("--quiet", action="store_true", help="print no start-up lines")
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the script is a module's name"
    )
    parser.add_argument("script", nargs="?", help="the training script, or a notebook")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    parser.set_defaults(error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Replaces this process by the script's; returns only if that cannot be done."""
    if not args.script:
        args.error("pass a training script")
    if not args.module and not os.path.exists(args.script):
        args.error(f"cannot find the script {args.script!r}; check its path")
    from trainfast.config import load_config
    from trainfast.launch.environment import cores_of_quota
    from trainfast.launch.launcher import launch
    from trainfast.launch.settings import read_settings
    from trainfast.machine import cgroup_quota, gpus

    try:
        settings = read_settings(load_config(args.config) if args.config else {})
        kind = "module" if args.module else "script"
        show = "none" if args.quiet else "json" if args.json else "text"
        launch(
            settings,
            kind,
            args.script,
            args.arguments,
            show=show,
            leaks=args.leaks,
            cores=cores_of_quota(cgroup_quota(), len(os.sched_getaffinity(0))),
            # nvidia-smi tells them: torch's own answer would start CUDA.
            gpus=gpus() if settings.float32_matmul_precision else [],
        )
    except (ImportError, OSError, ValueError) as error:
        text = " ".join(str(error).splitlines())
        print(f"trainfast run: {text}", file=sys.stderr)
    return 1
