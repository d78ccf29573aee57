"""The command line: `python -m trainfast <verb>`, or `trainfast <verb>`.

Exit status: 0 fine, 1 a problem was found, 2 the command line was wrong.
"""

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

import trainfast
from trainfast import tools


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line, sys.argv's by default, and returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.verb is None:
        parser.print_help()
        return 0
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # as of other programs in front of head


def _reader_has_gone() -> bool:
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors are told without being asked for
    return bool(poll.poll(0))


def make_parser() -> argparse.ArgumentParser:
    """The parser with every verb of trainfast.tools."""
    parser = argparse.ArgumentParser(
        prog="trainfast", description="Fast kernels for existing training scripts."
    )
    version = f"trainfast {trainfast.__version__}"
    parser.add_argument("--version", action="version", version=version)
    verbs = parser.add_subparsers(dest="verb", metavar="<verb>", title="verbs")
    for name, module in verb_modules().items():
        summary = _summary(module)
        verb = verbs.add_parser(name, help=summary, description=summary)
        verb.add_argument("--json", action="store_true", help="print JSON")
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser


def verb_modules() -> dict[str, ModuleType]:
    """Each verb's module by the verb's name, sorted."""
    found = sorted(module.name for module in iter_modules(tools.__path__))
    return {
        name.replace("_", "-"): import_module(f"trainfast.tools.{name}")
        for name in found
        if not name.startswith("_")
    }


def _summary(module: ModuleType) -> str:
    """The first sentence of a verb's docstring; argparse takes % for a format."""
    first = (module.__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(first.split()).replace("%", "%%")
