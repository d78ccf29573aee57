"""One look at the GPUs, the machine and a tree of processes.

Sizes are bytes, and None is what the system does not tell.
"""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU.

    Attributes:
        utilization: per cent of the last period in which a kernel ran.
        temperature: degrees C.
        power, power_limit: watts.
        clock, clock_max: of the multiprocessors, MHz.
        throttled: why clocks are lowered, in words.
        pcie_width, pcie_generation: of the link now, beside the highest ones.
        processes: bytes by process id.
    """

    index: int
    name: str
    memory_total: int | None = None
    memory_used: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None
    clock: int | None = None
    clock_max: int | None = None
    throttled: tuple[str, ...] = ()
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    processes: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """The machine, as far as this process may use it.

    Attributes:
        cores: by affinity and control group.
        cpu: per cent of all cores in use, by any program.
        memory_available: bytes until the machine's or the control group's limit.
        shared, shared_total: /dev/shm, through which workers hand batches over.
        disk_free: of the current folder.
    """

    cores: int
    cpu: float
    memory_available: int
    shared: int | None = None
    shared_total: int | None = None
    disk_free: int | None = None


@dataclass(frozen=True)
class Tree:
    """A process and those that it started.

    Attributes:
        memory: bytes, with each shared page counted once: half for each of two.
        processes, threads: how many.
        cpu: per cent of one core, of all of them together.
    """

    pid: int
    name: str
    memory: int
    processes: int
    threads: int
    cpu: float


@dataclass(frozen=True)
class Sample:
    """What was seen at a time, in seconds since 1970."""

    time: float
    host: Host
    gpus: tuple[Gpu, ...] = ()
    tree: Tree | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def numbers(self) -> dict[str, float]:
        """The numbers by name, such as "gpu0.utilization"; for statistics."""
        found: dict[str, Any] = {}
        parts: list[tuple[str, Any]] = [("host", self.host)]
        parts += [(f"gpu{gpu.index}", gpu) for gpu in self.gpus]
        if self.tree is not None:
            parts.append(("process", self.tree))
        for prefix, part in parts:
            for name, value in vars(part).items():
                if isinstance(value, int | float) and name not in ("index", "pid"):
                    found[f"{prefix}.{name}"] = value
        return found
