"""Measures the matrix-product and memory rates that bound the kernels of a device.

A kernel's rate divided by the measured rate says how much is left to gain; rates from
data sheets differ from what a card reaches by up to a factor of two.
"""

import argparse
import sys

from trainfast.roof import roof


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:1; default: a GPU if there is one"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="for each rate (default: 0.3)"
    )


def run(args: argparse.Namespace) -> int:
    try:
        report = roof(args.device, args.seconds)
    except (ValueError, RuntimeError) as error:
        print(f"trainfast roof: {error}", file=sys.stderr)
        return 1
    print(report.for_terminal(args.json))
    return 0
