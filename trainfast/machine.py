"""What a machine is, as files and nvidia-smi describe it: CUDA and torch stay as they
are."""

import contextlib
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from trainfast._core import version as trainfast_version

_PACKAGES = ("numpy", "torch", "ml_dtypes")
# Of /proc/cpuinfo's flags (x86) and features (Arm), those that kernels may choose by.
_FEATURES = (
    *("sse4_2", "avx2", "fma", "f16c", "bmi2"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_fp16"),
    *("asimd", "sve", "bf16"),
)


def versions() -> dict[str, str | None]:
    """Versions of what matters; None for a package that is not installed."""
    found: dict[str, str | None] = {
        "trainfast": trainfast_version,
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


def cpu_model(cpuinfo: str) -> tuple[str, list[str]]:
    """The model's name and those of its features that matter here."""
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    have = set(flags[1].split()) if flags else set()
    name = model[1].strip() if model else platform.machine()
    return name, [feature for feature in _FEATURES if feature in have]


_GROUPS = Path("/sys/fs/cgroup")


def _groups(controller: str, root: Path, own: str) -> Iterator[Path]:
    """The folders of this process's control groups, in version 1 those of one
    controller, up to the root's. own: /proc/self/cgroup's text."""
    for line in (own or read("/proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(top):
                break
            yield place


def cgroup_quota(root: Path = _GROUPS, own: str = "") -> float | None:
    """The smallest CPU quota of this process's control groups, in cores; None: none.

    `root` and `own` (/proc/self/cgroup's text) are for tests. Version 2 writes
    "max 100000" or "200000 100000" (microseconds in a period) to cpu.max, version 1 the
    same two numbers to two files, -1 for none.
    """
    quotas = []
    for place in _groups("cpu", root, own):
        words = read(place / "cpu.max").split() or [
            read(place / "cpu.cfs_quota_us").strip(),
            read(place / "cpu.cfs_period_us").strip(),
        ]
        if len(words) == 2 and all(word.isdigit() for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _memory_left(place: Path) -> int | None:
    """Bytes up to a control group's limit; None: it has none. The kernel gives pages of
    files back before it refuses memory, so they count as free."""
    most = read(place / "memory.max") or read(place / "memory.limit_in_bytes")
    used = read(place / "memory.current") or read(place / "memory.usage_in_bytes")
    if not (most.strip().isdigit() and used.strip().isdigit()):
        return None
    pattern = r"^(total_)?(?:in)?active_file (\d+)$"
    pages = re.findall(pattern, read(place / "memory.stat"), re.MULTILINE)
    totals = [size for total, size in pages if total]  # version 1, with groups below
    files = sum(map(int, totals or [size for _, size in pages]))
    return max(0, int(most) - int(used) + files)


def usable_cores() -> int:
    """Cores that this process may use: its affinity and its groups' quota, at least 1.

    A part of a core counts as a whole one.
    """
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def resident_memory() -> int:
    """Bytes of this process that are in memory."""
    found = re.search(r"^VmRSS:\s*(\d+) kB", read("/proc/self/status"), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def available_memory(root: Path = _GROUPS, own: str = "") -> int:
    """Bytes that this process may still take, of the machine and its control groups.

    `root` and `own` (/proc/self/cgroup's text) are for tests.
    """
    info = read("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s*(\d+) kB", info, re.MULTILINE)
    free = int(found[1]) << 10 if found else sys.maxsize
    limits = map(_memory_left, _groups("memory", root, own))
    return min([free, *(left for left in limits if left is not None)])


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


def descendants(pid: int) -> list[int]:
    """Processes that a process and its children have started. psutil would read the
    files of all processes of the machine."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            children = read(f"/proc/{pid}/task/{thread}/children")
            for child in map(int, children.split()):
                found += [child, *descendants(child)]
    return found


def read(path: str | Path) -> str:
    """A file's text; "" if it cannot be read."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
