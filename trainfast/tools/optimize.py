"""Writes a configuration to start from, chosen by the hardware; measures nothing."""

import argparse
import json
import math
import os
import sys
from pathlib import Path

from trainfast.presets.machine import DEVICES, machine_of
from trainfast.presets.text import to_yaml, write_new
from trainfast.presets.values import PROFILES, Value, preset, progressive
from trainfast.machine import cgroup_quota, gpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", metavar="FILE", help="the file to write; without it: print"
    )
    parser.add_argument("--force", action="store_true", help="replace the file")
    parser.add_argument(
        "--device", choices=DEVICES, help="without it: a GPU if there is one"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--profile", choices=PROFILES, help="what the runs are for")
    kind.add_argument(
        "--progressive",
        action="store_true",
        help="three files of rising memory: FILE_1, FILE_2, FILE_3",
    )


def run(args: argparse.Namespace) -> int:
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_quota()
    if quota is not None:
        cores = max(1, min(cores, math.ceil(quota)))
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = machine_of(gpus(), ram, cores, args.device)
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
    values = [
        [{**value._asdict(), "measured": False} for value in config]
        for config in configs
    ]
    return json.dumps({"files": [str(path) for path in paths], "configs": values})
