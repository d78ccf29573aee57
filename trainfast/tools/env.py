"""Shows versions, processor, GPUs, and which backends can run here."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import trainfast
from trainfast import _core
from trainfast.cuda_library import code_for, find_cuda_library, library_code
from trainfast.machine import cgroup_quota, cpu_model, gpus, read, versions
from trainfast.report import Report, Table

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTORCH_CUDA_ALLOC_CONF",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing but `--json`, which every verb has."""


def run(args: argparse.Namespace) -> int:
    report = env()
    print(report.for_terminal(args.json))
    return 0


def env() -> "EnvReport":
    """Describes this machine and process; does not load torch.

    Opens the CUDA library to say whether it works, so call it in no process that forks
    afterwards.
    """
    library = cuda_library()
    return EnvReport(
        versions=versions(),
        cpu=cpu(),
        gpus=[gpu | needs(gpu, library["code"]) for gpu in gpus()],
        backends=trainfast.backends(),
        cuda_library=library,
        variables=variables(),
    )


class EnvReport(Report):
    """What `env` found, each part as an attribute."""

    def __init__(
        self,
        versions: dict[str, str | None],
        cpu: dict[str, Any],
        gpus: list[dict[str, str]],
        backends: list[dict[str, Any]],
        cuda_library: dict[str, Any],
        variables: dict[str, str],
    ) -> None:
        self.versions = versions
        self.cpu = cpu
        self.gpus = gpus
        self.backends = backends
        self.cuda_library = cuda_library
        self.variables = variables

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def tables(self) -> list[Table]:
        library = self.cuda_library
        state = "found" if library["exists"] else "missing: built without CUDA"
        gpu_rows = [tuple(gpu.values()) for gpu in self.gpus]
        gpu_columns = tuple(self.gpus[0]) if self.gpus else ()
        return [
            _pairs(
                "versions", {k: v or "not installed" for k, v in self.versions.items()}
            ),
            _pairs("processor", self.cpu),
            Table("GPUs", gpu_columns, gpu_rows, empty="none (nvidia-smi lists none)"),
            Table(
                "backends, best first",
                ("name", "usable", "in use", "why not"),
                [
                    (b["name"], b["usable"], b["in_use"], b["reason"])
                    for b in self.backends
                ],
            ),
            _pairs(
                "CUDA library",
                {"path": library["path"], "state": state, "code": library["code"]},
            ),
            _pairs("environment variables", self.variables),
        ]


def cpu() -> dict[str, Any]:
    """The processor, and how much of it this process may use."""
    model, features = cpu_model(read("/proc/cpuinfo"))
    runtime = _core.thread_runtime()
    if "torch" not in sys.modules:
        runtime += " (torch is not loaded here; beside it, its OpenMP runtime)"
    return {
        "model": model,
        "features": " ".join(features),
        "cores": os.cpu_count(),
        "cores by affinity": len(os.sched_getaffinity(0)),
        "cores by cgroup quota": cgroup_quota(),
        "threads used": _core.num_threads(),
        "thread runtime": runtime,
    }


def cuda_library() -> dict[str, Any]:
    """Where the CUDA library is looked for, whether a file is there, and its code."""
    path = Path(find_cuda_library())
    found = {"path": str(path), "exists": path.exists()}
    return found | {"code": library_code(str(path))}


def needs(gpu: dict[str, str], library: str | None) -> dict[str, str]:
    """What a GPU runs of the CUDA library's code, and the least driver for it."""
    if library is None:
        return {}
    digits = gpu["capability"].replace(".", "")
    if not digits.isdecimal():  # "[N/A]"
        return {"code": "unknown", "driver needed": "unknown"}
    code, driver = code_for(int(digits), library)
    least = f"{driver} or newer" if driver else "no driver helps"
    return {"code": code, "driver needed": least}


def variables() -> dict[str, str]:
    """The environment variables that are set and change what trainfast does."""
    names = [name for name in os.environ if name.startswith("TRAINFAST_")]
    names += [name for name in _VARIABLES if name in os.environ]
    return {name: os.environ[name] for name in sorted(names)}


def _pairs(title: str, pairs: dict[str, Any]) -> Table:
    rows = [(key, "none" if value is None else value) for key, value in pairs.items()]
    return Table(title, ("what", "value"), [(key, str(value)) for key, value in rows])
