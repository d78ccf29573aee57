"""The facts of a machine that rules look at, gathered without CUDA or torch."""

import math
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import trainfast
from trainfast.diagnosis import process
from trainfast.machine import cgroup_quota, cpu_model, read, versions
from trainfast.machine import gpus as listed_gpus

# What rules read beside the variables that start with TRAINFAST_.
VARIABLES = (
    *("CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("TORCH_CUDNN_BENCHMARK", "TORCH_CUDNN_V8_API_ENABLED"),
)
_STATE = (
    *("memory.used", "utilization.gpu", "temperature.gpu", "pstate"),
    *("pcie.link.width.current", "pcie.link.width.max"),
)
_SLOWDOWNS = ("hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU; None for what nvidia-smi does not tell.

    Attributes:
        memory: MiB in all.
        memory_used: MiB that all processes use now.
        utilization: per cent of the last sample period with a kernel running.
        temperature: degrees C.
        pstate: "P0" is the fastest state; an idle GPU is in P8.
        pcie_width: lanes now; an idle GPU may use fewer.
        slowdowns: active reasons for lowered clocks, of heat or the power supply.
    """

    name: str
    capability: tuple[int, int] | None = None
    memory: int | None = None
    driver: str | None = None
    memory_used: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    pstate: str | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    slowdowns: tuple[str, ...] = ()

    def __str__(self) -> str:
        version = ".".join(map(str, self.capability or ()))
        return f"{self.name} (capability {version})" if version else self.name

    @property
    def driver_branch(self) -> int | None:
        """580 of driver 580.65.06."""
        return _number((self.driver or "").partition(".")[0])


@dataclass(frozen=True)
class Machine:
    """What a machine and this process have; sizes in MiB, None for not known.

    Attributes:
        torch: the installed version of torch, None without torch.
        torch_cuda: the CUDA version that torch was built for, None for a CPU build.
        cores: what os.cpu_count() says.
        affinity: the cores that this process may run on.
        quota: the CPU quota of its control groups, in cores.
        memory: RAM, or the control groups' limit if that is less.
        disk: free space in the working directory.
        rotating: whether that directory is on a rotating disk; unknown in a VM.
        shm: the size of /dev/shm.
        compiler: whether a C compiler is found, which torch.compile needs.
        variables: those environment variables that are set and matter.
        running: what the running process has switched on.
    """

    system: str = "Linux"
    python: str = ""
    processor: str = ""
    torch: str | None = None
    torch_cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    cores: int = 1
    affinity: int = 1
    quota: float | None = None
    memory: int | None = None
    disk: int | None = None
    rotating: bool | None = None
    shm: int | None = None
    compiler: bool = True
    variables: dict[str, str] = field(default_factory=dict)
    backends: tuple[dict[str, Any], ...] = ()
    running: process.Running = field(default_factory=process.Running)

    @property
    def usable_cores(self) -> int:
        """Cores that threads and workers can share: affinity and quota, at least 1."""
        limit = math.inf if self.quota is None else self.quota
        return max(1, int(min(self.affinity, limit)))

    @property
    def torch_version(self) -> tuple[int, int] | None:
        """(2, 13) of torch 2.13.0+cpu."""
        return version(self.torch)


def gather(folder: str | Path = ".") -> Machine:
    """Describes this machine.

    Args:
        folder: where training reads its data and writes its cache.
    """
    name, _ = cpu_model(read("/proc/cpuinfo"))
    return Machine(
        system=platform.system(),
        python=platform.python_version(),
        processor=name,
        torch=versions()["torch"],
        torch_cuda=_torch_cuda(),
        gpus=tuple(gpus()),
        cores=os.cpu_count() or 1,
        affinity=len(os.sched_getaffinity(0)),
        quota=cgroup_quota(),
        memory=memory(),
        disk=_free(folder),
        rotating=rotating(folder),
        shm=_size("/dev/shm"),
        compiler=_has_compiler(),
        variables={k: os.environ[k] for k in VARIABLES if k in os.environ},
        backends=tuple(trainfast.backends()),
        running=process.look(),
    )


def version(text: str | None) -> tuple[int, int] | None:
    """(2, 9) of "2.9.1+cu128"; None for None and for what is no version."""
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None


def gpus() -> list[Gpu]:
    """The NVIDIA GPUs, by nvidia-smi."""
    listed = listed_gpus()
    states = _query(_STATE) if listed else []
    # The names of driver 535 and later; earlier drivers know only the second.
    slow: list[list[str]] = []
    for prefix in ("clocks_event_reasons", "clocks_throttle_reasons"):
        if listed and not slow:
            slow = _query([f"{prefix}.{reason}" for reason in _SLOWDOWNS])
    found = []
    for i, gpu in enumerate(listed):
        state = states[i] if i < len(states) else [""] * len(_STATE)
        reasons = slow[i] if i < len(slow) else []
        found.append(_gpu(gpu, state, reasons))
    return found


def _gpu(listed: dict[str, str], state: list[str], reasons: list[str]) -> Gpu:
    used, busy, heat, pstate, width, widest = state
    return Gpu(
        name=listed["name"],
        capability=version(listed["capability"]),
        memory=_number(listed["memory"]),
        driver=listed["driver"] if listed["driver"][:1].isdigit() else None,
        memory_used=_number(used),
        utilization=_number(busy),
        temperature=_number(heat),
        pstate=pstate if re.fullmatch(r"P\d+", pstate) else None,
        pcie_width=_number(width),
        pcie_width_max=_number(widest),
        slowdowns=tuple(
            name for name, state in zip(_SLOWDOWNS, reasons) if state == "Active"
        ),
    )


def _query(fields: list[str] | tuple[str, ...]) -> list[list[str]]:
    """nvidia-smi's rows for these fields; [] if it does not know one of them."""
    command = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in x.split(",")] for x in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def memory(meminfo: str = "", groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """MiB of RAM, or of the control group's limit if that is less.

    Args:
        meminfo: /proc/meminfo's text, for tests.
        groups: where the control groups are mounted, for tests.
    """
    match = re.search(r"MemTotal:\s*(\d+) kB", meminfo or read("/proc/meminfo"))
    sizes = [int(match[1]) << 10] if match else []
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = read(groups / name).strip()
        sizes += [int(limit)] if limit.isdigit() else []
    return min(sizes) >> 20 if sizes else None


def rotating(folder: str | Path, root: Path = Path("/sys")) -> bool | None:
    """Whether a folder is on a rotating disk; None where the system cannot say.

    A virtual machine's disks call themselves rotating whatever they are.

    Args:
        folder: any folder.
        root: where sysfs is mounted, for tests.
    """
    if _on_virtual_machine():
        return None
    try:
        device = os.stat(folder).st_dev
    except OSError:
        return None
    block = root / f"dev/block/{os.major(device)}:{os.minor(device)}"
    for place in (block, block / ".."):  # a partition has its disk's queue
        text = read(place / "queue/rotational").strip()
        if text in ("0", "1"):
            return text == "1"
    return None


def _has_compiler() -> bool:
    """Whether Triton finds a C compiler: CC, or else gcc or clang."""
    chosen = os.environ.get("CC")
    return any(map(shutil.which, [chosen] if chosen else ["gcc", "clang"]))


def _on_virtual_machine() -> bool:
    flags = re.search(r"^flags\s*:(.*)$", read("/proc/cpuinfo"), re.MULTILINE)
    return flags is not None and "hypervisor" in flags[1].split()


def _torch_cuda() -> str | None:
    """The CUDA version in torch/version.py, read without importing torch."""
    try:
        spec = find_spec("torch")
    except ValueError:  # a module without a spec stands in torch's place
        return None
    if spec is None or not spec.origin:
        return None
    text = read(Path(spec.origin).with_name("version.py"))
    match = re.search(r"^(?:cuda|hip)\b[^=]*= *'([\d.]+)", text, re.MULTILINE)
    return match[1] if match else None


def _free(folder: str | Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free >> 20
    except OSError:
        return None


def _size(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).total >> 20
    except OSError:
        return None


def _number(text: str) -> int | None:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None
