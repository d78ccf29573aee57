"""Finds the settings that make a script faster, or without one those for a machine.

With a script: it runs unchanged in a sandbox, and each setting is measured alone and
together with the others. What is faster is written as a configuration. Without a script
nothing is measured: the configuration is one to start from, chosen by the hardware.
"""

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from trainfast.machine import gpus, usable_cores
from trainfast.presets.machine import DEVICES, machine_of
from trainfast.presets.text import to_yaml, write_new
from trainfast.presets.values import PROFILES, Value, preset, progressive
from trainfast.probe.candidates import ALLOWED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", metavar="FILE", help="the file to write; without it: print"
    )
    parser.add_argument("--force", action="store_true", help="replace the file")
    measured = parser.add_argument_group("with a script")
    measured.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=ALLOWED,
        help="keep this although it changes what is learned (may be repeated)",
    )
    measured.add_argument(
        "--plot", metavar="PNG", help="draw the losses with and without the settings"
    )
    measured.add_argument(
        "script", nargs="?", help="the training script, or a notebook"
    )
    measured.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    presets = parser.add_argument_group("without a script")
    presets.add_argument(
        "--device", choices=DEVICES, help="without it: a GPU if there is one"
    )
    kind = presets.add_mutually_exclusive_group()
    kind.add_argument("--profile", choices=PROFILES, help="what the runs are for")
    kind.add_argument(
        "--progressive",
        action="store_true",
        help="three files of rising memory: FILE_1, FILE_2, FILE_3",
    )
    parser.set_defaults(error=parser.error)


def run(args: argparse.Namespace) -> int:
    if args.script:
        if args.device or args.profile or args.progressive:
            args.error("pass a script, or --device, --profile, --progressive")
        if not os.path.isfile(args.script):
            args.error(f"cannot find the script {args.script!r}; check its path")
        if args.plot and find_spec("matplotlib") is None:
            args.error("--plot needs matplotlib: pip install 'trainfast[tools]'")
        return _measure(args)
    if args.allow or args.plot:
        args.error("--allow and --plot need a script")
    return _write_preset(args)


def _measure(args: argparse.Namespace) -> int:
    from trainfast.probe.optimize import optimize
    from trainfast.probe.run import ProbeError
    from trainfast.tools.diagnose import show_progress

    try:
        if args.output and not args.force and os.path.exists(args.output):
            raise FileExistsError(f"{args.output} exists; pass --force to replace it")
        with show_progress() as progress:
            report = optimize(
                args.script, args.arguments, allow=args.allow, progress=progress
            )
        if args.plot and report.curves:
            report.plot(args.plot)
        if args.output:
            write_new({Path(args.output): to_yaml(report.values())}, args.force)
    except (ProbeError, OSError, SyntaxError) as error:
        print(f"trainfast optimize: {error}", file=sys.stderr)
        return 1
    print(report.for_terminal(args.json))
    if args.json:
        return 0
    if args.output:
        print(f"\nwrote {args.output}")
    else:
        print(f"\n{to_yaml(report.values())}", end="")
    return 0


def _write_preset(args: argparse.Namespace) -> int:
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = machine_of(gpus(), ram, usable_cores(), args.device)
    try:
        if args.progressive:
            configs = progressive(machine)
        else:
            configs = [preset(machine, args.profile)]
        paths = _paths(args.output, len(configs)) if args.output else []
        write_new(dict(zip(paths, map(to_yaml, configs))), args.force)
    except (OSError, ValueError) as error:
        text = " ".join(str(error).splitlines())
        print(f"trainfast optimize: {text}", file=sys.stderr)
        return 1
    if args.json:
        print(_json(configs, paths))
    elif paths:
        for path in paths:
            print(f"wrote {path}")
    else:
        print("---\n".join(map(to_yaml, configs)), end="")
    return 0


def _paths(output: str, count: int) -> list[Path]:
    path = Path(output)
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}_{i + 1}{path.suffix}") for i in range(count)]


def _json(configs: list[list[Value]], paths: list[Path]) -> str:
    values = [[value._asdict() for value in config] for config in configs]
    return json.dumps({"files": [str(path) for path in paths], "configs": values})
