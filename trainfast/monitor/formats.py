"""A sample as lines for people and programs."""

import csv
import io
import json
import time
from typing import Any

from trainfast.monitor.sample import Gpu, Sample

MIB = 1 << 20
GIB = 1 << 30
# nvidia-smi's column names, so that loops around it keep working; then the host's.
_COLUMNS = (
    *("timestamp", "index", "name", "utilization.gpu [%]", "memory.total [MiB]"),
    *("memory.used [MiB]", "memory.free [MiB]", "temperature.gpu", "power.draw [W]"),
    *("clocks.sm [MHz]", "pcie.link.gen.current", "pcie.link.width.current"),
    *("host.cpu [%]", "host.memory.available [MiB]", "process.memory [MiB]"),
    "process.cpu [%]",
)


def header() -> str:
    return _line(_COLUMNS)


def csv_lines(sample: Sample) -> list[str]:
    """A line for each GPU; one without GPU columns where there is none."""
    stamp = time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(sample.time))
    stamp += f".{int(sample.time % 1 * 1000):03d}"
    tree = sample.tree
    of_host = (
        round(sample.host.cpu),
        sample.host.memory_available // MIB,
        tree.memory // MIB if tree else "",
        round(tree.cpu) if tree else "",
    )
    gpus: list[tuple[Any, ...]] = [_gpu_cells(gpu) for gpu in sample.gpus]
    return [_line((stamp, *gpu, *of_host)) for gpu in gpus or [("",) * 11]]


def json_line(sample: Sample) -> str:
    return json.dumps(sample.to_dict())


def text_line(sample: Sample) -> str:
    """One line for a log."""
    host = sample.host
    parts = [time.strftime("%H:%M:%S", time.localtime(sample.time))]
    for gpu in sample.gpus:
        parts.append(
            f"gpu{gpu.index} {_shown(gpu.utilization, '%')} "
            f"{_sizes(gpu.memory_used, gpu.memory_total)} "
            f"{_shown(gpu.temperature, ' C')}"
            + "".join(f" ({reason})" for reason in gpu.throttled)
        )
    parts.append(f"cpu {host.cpu:.0f}% of {host.cores}")
    parts.append(f"{host.memory_available / GIB:.1f} GiB free")
    if sample.tree is not None:
        tree = sample.tree
        parts.append(
            f"{tree.name} {tree.memory / GIB:.2f} GiB in {tree.processes} "
            f"process{'es' * (tree.processes != 1)}, cpu {tree.cpu:.0f}%"
        )
    return "  ".join(parts)


def _gpu_cells(gpu: Gpu) -> tuple[Any, ...]:
    total, used = gpu.memory_total, gpu.memory_used
    free = None if total is None or used is None else total - used
    sizes = ["" if size is None else size // MIB for size in (total, used, free)]
    others = (
        *(gpu.temperature, gpu.power, gpu.clock),
        *(gpu.pcie_generation, gpu.pcie_width),
    )
    shown = ["[N/A]" if value is None else value for value in others]
    utilization = "[N/A]" if gpu.utilization is None else gpu.utilization
    return (gpu.index, gpu.name, utilization, *sizes, *shown)


def _line(cells: tuple[Any, ...]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _shown(value: Any, unit: str) -> str:
    return "-" if value is None else f"{value}{unit}"


def _sizes(used: int | None, total: int | None) -> str:
    if used is None or total is None:
        return "-"
    return f"{used / GIB:.1f}/{total / GIB:.1f} GiB"
