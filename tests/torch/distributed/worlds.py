"""Runs the cases of a module in the processes of a world, each by its name.

    python -m tests.torch.distributed.worlds MODULE SIZE RANK FOLDER

A case is a function `case_...(folder)`. After the first that fails, the rest are not
run: the processes may be in different collectives.
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from tests.graph_samples import environment

SECONDS = 240


def names_of(module):
    return [name for name in vars(module) if name.startswith("case_")]


def run_world(module, size, folder):
    """What each rank says of each case: "" if it passed, else what went wrong."""
    Path(folder, f"store-{size}-{module.__name__}").unlink(missing_ok=True)
    command = [sys.executable, "-m", __name__, module.__name__, str(size)]
    env = {**environment(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder)], env=env)
        for rank in range(size)
    ]
    try:
        for process in ranks:
            process.wait(SECONDS)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    said = {name: "" for name in names_of(module)}
    for rank in range(size):
        path = Path(folder, f"{module.__name__}-{rank}.json")
        report = json.loads(path.read_text()) if path.exists() else {}
        for name in said:
            if problem := report.get(name, "not run"):
                said[name] += f"rank {rank}: {problem}\n"
    return said


def main(name, size, rank, folder):
    module, path = importlib.import_module(name), Path(folder, f"store-{size}-{name}")
    store = distributed.FileStore(str(path), size)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    report = {}
    for case in names_of(module):
        torch.manual_seed(7)
        try:
            getattr(module, case)(Path(folder))
        except BaseException:  # CheckpointException is no Exception
            report[case] = traceback.format_exc()
            break
        report[case] = ""
    Path(folder, f"{name}-{rank}.json").write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)  # now and then one of torch's threads aborts at exit


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
