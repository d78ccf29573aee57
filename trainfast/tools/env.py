"""Shows versions, processor, GPUs, and which backends can run here."""

import argparse
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import trainfast
from trainfast import _core
from trainfast.cuda_library import find_cuda_library
from trainfast.report import Report, Table

_PACKAGES = ("numpy", "torch", "ml_dtypes")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTORCH_CUDA_ALLOC_CONF",
)
# Of /proc/cpuinfo's flags (x86) and features (Arm), those that kernels may choose by.
_FEATURES = (
    *("sse4_2", "avx2", "fma", "f16c", "bmi2"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_fp16"),
    *("asimd", "sve", "bf16"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing but `--json`, which every verb has."""


def run(args: argparse.Namespace) -> int:
    report = env()
    print(report.to_json() if args.json else report)
    return 0


def env() -> "EnvReport":
    """Describes this machine and process; does not load torch.

    Opens the CUDA library to say whether it works, so call it in no process that forks
    afterwards.
    """
    return EnvReport(
        versions=versions(),
        cpu=cpu(),
        gpus=gpus(),
        backends=trainfast.backends(),
        cuda_library=cuda_library(),
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
            _pairs("CUDA library", {"path": library["path"], "state": state}),
            _pairs("environment variables", self.variables),
        ]


def versions() -> dict[str, str | None]:
    """Versions of what matters; None for a package that is not installed."""
    found: dict[str, str | None] = {
        "trainfast": trainfast.__version__,
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["libc"] = " ".join(platform.libc_ver())
    found["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    return found


def cpu() -> dict[str, Any]:
    """The processor, and how much of it this process may use."""
    model, features = cpu_model(_read("/proc/cpuinfo"))
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


def cpu_model(cpuinfo: str) -> tuple[str, list[str]]:
    """The model's name and those of its features that matter here."""
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    have = set(flags[1].split()) if flags else set()
    name = model[1].strip() if model else platform.machine()
    return name, [feature for feature in _FEATURES if feature in have]


def cgroup_quota(root: Path = Path("/sys/fs/cgroup"), own: str = "") -> float | None:
    """The smallest CPU quota of this process's control groups, in cores; None: none.

    `root` and `own` (/proc/self/cgroup's text) are for tests. Version 2 writes
    "max 100000" or "200000 100000" (microseconds in a period) to cpu.max, version 1 the
    same two numbers to two files, -1 for none.
    """
    own = own or _read("/proc/self/cgroup")
    quotas = []
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(top):
                break
            words = _read(place / "cpu.max").split() or [
                _read(place / "cpu.cfs_quota_us").strip(),
                _read(place / "cpu.cfs_period_us").strip(),
            ]
            if len(words) == 2 and all(word.isdigit() for word in words):
                quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def gpus() -> list[dict[str, str]]:
    """The NVIDIA GPUs and their driver, asked of nvidia-smi: CUDA is not started."""
    fields = ("name", "compute_cap", "memory.total", "driver_version")
    command = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return _gpus_of_torch()
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> list[dict[str, str]]:
    """nvidia-smi's lines "name, 9.0, 81559 MiB, 580.65.06" as dicts."""
    columns = ("name", "capability", "memory", "driver")
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)
    ]


def _gpus_of_torch() -> list[dict[str, str]]:
    """Without nvidia-smi: from torch, if this process already runs it on CUDA."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    found = []
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        found.append(
            {
                "name": gpu.name,
                "capability": f"{gpu.major}.{gpu.minor}",
                "memory": f"{gpu.total_memory >> 20} MiB",
                "driver": "unknown (no nvidia-smi)",
            }
        )
    return found


def cuda_library() -> dict[str, Any]:
    """Where the CUDA library is looked for, and whether a file is there."""
    path = Path(find_cuda_library())
    return {"path": str(path), "exists": path.exists()}


def variables() -> dict[str, str]:
    """The environment variables that are set and change what trainfast does."""
    names = [name for name in os.environ if name.startswith("TRAINFAST_")]
    names += [name for name in _VARIABLES if name in os.environ]
    return {name: os.environ[name] for name in sorted(names)}


def _pairs(title: str, pairs: dict[str, Any]) -> Table:
    rows = [(key, "none" if value is None else value) for key, value in pairs.items()]
    return Table(title, ("what", "value"), [(key, str(value)) for key, value in rows])


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
