"""What a benchmark ran on: machine, software, and how busy other processes kept it."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


# What decides which instructions contenders use; named with the command that ran.
VARIABLES = (
    "TRAINFAST_BACKEND",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
)


def _output(*command: str) -> str:
    """Return what `command` prints, or an empty string where it cannot run."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, cwd=ROOT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpuinfo(text: str) -> tuple[str, list[str]]:
    """Return the CPU's model and which of the instruction sets that matter it has."""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    have = set(flags.group(1).split()) if flags else set()
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16")
    name = model.group(1).strip() if model else platform.machine()
    return name, [flag for flag in wanted if flag in have]


def describe(device: str = "cpu") -> dict:
    """Return a JSON-ready description of the machine and the software."""
    import numpy
    import torch

    try:
        cpu, flags = _cpuinfo(Path("/proc/cpuinfo").read_text())
    except OSError:
        cpu, flags = platform.processor() or platform.machine(), []
    driver = ""
    gpu = ""
    if device == "cuda":
        gpu = torch.cuda.get_device_name()
        query = ("--query-gpu=driver_version", "--format=csv,noheader")
        driver = _output("nvidia-smi", *query).split("\n")[0]
    return {
        "cpu": cpu,
        "flags": flags,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
        ),
        "kernel": platform.release(),
        "glibc": platform.libc_ver()[1],
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpu,
        "driver": driver,
        "cuda": torch.version.cuda or "",
    }


def slug(machine: dict) -> str:
    """Return a file name's part for the machine: its GPU, or CPU, width and cores."""
    if machine["gpu"]:
        words = machine["gpu"]
    else:
        wide = "avx512" if "avx512f" in machine["flags"] else ""
        wide = wide or ("avx2" if "avx2" in machine["flags"] else "baseline")
        cpu = re.sub(r"\((R|TM)\)|CPU|@.*|Processor|\d+-Core", " ", machine["cpu"])
        words = f"{cpu} {wide} {machine['cores']}c"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def describe_run(threads: int, backend: str) -> dict:
    """Return when, from which commit and how the benchmark was started."""
    name = sys.argv[0]
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if main is not None and main.name:
        name = f"python -m {main.name}"
    try:
        load = round(os.getloadavg()[0], 2)
    except OSError:
        load = None
    told = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "command": " ".join([*told, name, *map(shlex.quote, sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds"),
        "commit": _output("git", "rev-parse", "HEAD") or None,
        "changed_since_commit": bool(changed),
        "threads": threads,
        "backend": backend,
        "load_average_at_start": load,
    }


def available_bytes() -> int | None:
    """Return how much memory can still be taken, where the system says so."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None
