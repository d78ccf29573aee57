"""The table in a terminal."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainfast.monitor import verdicts
from trainfast.monitor.sample import Gpu, Sample

GIB = 1 << 30


def table(sample: Sample, note: str | None = None) -> Any:
    """A rich table of a sample.

    Args:
        sample: what was seen.
        note: a line below it.
    """
    from rich import box
    from rich.table import Table

    clock = time.strftime("%H:%M:%S", time.localtime(sample.time))
    made = Table(title=f"trainfast monitor  {clock}", caption=note, box=box.SIMPLE)
    for name, justify in (
        ("", "left"),
        ("now", "right"),
        ("of", "right"),
        ("", "left"),
    ):
        made.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for gpu in sample.gpus:
        for row in _gpu_rows(gpu):
            made.add_row(*row)
        made.add_section()
    for row in _host_rows(sample):
        made.add_row(*row)
    return made


def _gpu_rows(gpu: Gpu) -> Iterator[tuple[str, str, str, str]]:
    yield f"[bold]GPU {gpu.index}[/] {gpu.name}", "", "", ""
    yield _row("utilisation", gpu.utilization, "100", "%", verdicts.utilization(gpu))
    yield _row(
        *("memory", _gib(gpu.memory_used), _gib(gpu.memory_total), " GiB"),
        verdicts.memory(gpu),
    )
    yield _row("temperature", gpu.temperature, "", " C", verdicts.temperature(gpu))
    yield _row("power", _round(gpu.power), _text(_round(gpu.power_limit)), " W")
    why = ("red", ", ".join(gpu.throttled)) if gpu.throttled else ("", "")
    yield _row("clock", gpu.clock, _text(gpu.clock_max), " MHz", why)
    now, most = (
        f"{generation} x{width}" if generation and width else None
        for generation, width in (
            (gpu.pcie_generation, gpu.pcie_width),
            (gpu.pcie_generation_max, gpu.pcie_width_max),
        )
    )
    yield _row("PCIe", now, _text(most), "", verdicts.link(gpu))


def _host_rows(sample: Sample) -> Iterator[tuple[str, str, str, str]]:
    host, tree = sample.host, sample.tree
    yield "[bold]Host[/]", "", "", ""
    yield _row(
        "cores in use", f"{host.cpu:.0f}", "100", "%", ("", f"{host.cores} cores")
    )
    yield _row("memory free", _gib(host.memory_available), "", " GiB")
    yield _row(
        *("/dev/shm", _gib(host.shared), _gib(host.shared_total), " GiB"),
        verdicts.shared(host),
    )
    yield _row("disk free", _gib(host.disk_free), "", " GiB")
    if tree is not None:
        yield f"[bold]Process {tree.pid}[/] {tree.name}", "", "", ""
        yield _row("memory", _gib(tree.memory), "", " GiB")
        yield _row("processes", tree.processes, "", "")
        yield _row("threads", tree.threads, "", "")
        yield _row("cpu", f"{tree.cpu:.0f}", f"{100 * host.cores}", "%")


def _row(
    name: str,
    now: Any,
    most: str,
    unit: str,
    verdict: verdicts.Verdict = ("", ""),
) -> tuple[str, str, str, str]:
    colour, word = verdict
    value = "-" if now is None else f"{now}{unit}"
    if colour:
        value = f"[{colour}]{value}[/]"
        word = f"[{colour}]{word}[/]" if word else ""
    return f"  {name}", value, most, word


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.1f}"


def _round(value: float | None) -> int | None:
    return None if value is None else round(value)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


@contextmanager
def shown() -> Iterator[Any]:
    """A live view, whose update(table) takes the place of the last table."""
    from rich.live import Live

    with Live(auto_refresh=False, screen=False) as live:
        yield lambda made: live.update(made, refresh=True)
