"""The answer of `estimate_memory`: does a step fit, and what takes the room."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from trainfast.memory.trace import Replay
from trainfast.report import Report, Table

MIB = 1 << 20
# The largest known relative difference between an estimate and a measured figure,
# rounded up: benchmarks/estimates has them.
WORST_MISS = {"gpu": 0.15, "cpu": 0.25}
_MOST_MODULES = 10


@dataclass(repr=False)
class Estimate(Report):
    """Memory of a training step, in bytes.

    Attributes:
        allocated: most bytes that tensors take at once (`max_memory_allocated`).
        reserved: most bytes that torch's allocator takes (`max_memory_reserved`).
        total: `reserved` with the process's context: what nvidia-smi would show.
        capacity: what the GPU, or the machine, has.
        kinds: bytes by kind where `allocated` is reached.
        moments: most allocated bytes by moment of the step.
        activations: bytes by module at the end of the forward pass.
        failed: the moment at which the capacity did not suffice; None where it did.
        exact: every size was known; False where values were guessed, or where another
            device ran the step.
        method: how it was found: "fake tensors" or "two small steps, a line".
        notes: what the reader should know about this estimate.
        batch_size: samples in the batch, None where that cannot be told.
        settings: those that `again` can change.
        facts: further lines of the first table.
        more: further tables.
        again: the same estimate with other settings, such as again(amp="bf16").
    """

    device: str
    allocated: int
    reserved: int
    total: int
    capacity: int
    kinds: dict[str, int]
    moments: dict[str, int]
    activations: dict[str, int]
    failed: str | None
    exact: bool
    method: str
    seconds: float
    batch_size: int | None
    notes: list[str] = field(default_factory=list)
    curve: list[tuple[str, int]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    more: list[Table] = field(default_factory=list)
    again: "Callable[..., Estimate] | None" = None

    @property
    def fits(self) -> bool:
        return self.failed is None and self.total <= self.capacity

    @property
    def verdict(self) -> str:
        """ "fits", "does not fit", or "undecided" within the worst known miss."""
        worst = WORST_MISS["cpu" if self.device == "the CPU" else "gpu"]
        if abs(self.total - self.capacity) <= worst * self.total:
            return "undecided"
        return "fits" if self.fits else "does not fit"

    def tables(self) -> list[Table]:
        verdict = {
            "fits": "fits",
            "does not fit": "DOES NOT FIT",
            "undecided": "UNDECIDED: nearer than the worst known miss of this estimate",
        }[self.verdict]
        of_device = [
            ("verdict", verdict),
            ("total", f"{_mib(self.total)} of {_mib(self.capacity)} MiB"),
            ("reserved by the allocator", f"{_mib(self.reserved)} MiB"),
            ("in tensors at once", f"{_mib(self.allocated)} MiB"),
        ]
        if self.failed:
            of_device.append(("out of memory in", self.failed))
        if self.batch_size:
            of_device.insert(0, ("batch", str(self.batch_size)))
        how = "" if self.exact else ", approximate"
        of_device += self.facts.items()
        of_device.append(("method", f"{self.method}{how}, {self.seconds:.1f} s"))
        tables = [
            Table(f"A training step on {self.device}", ("", ""), of_device),
            Table("At the peak, by kind", ("kind", "MiB"), _rows(self.kinds)),
            Table("Peak by moment", ("moment", "MiB"), _rows(self.moments, sort=False)),
        ]
        modules = _rows(by_pattern(self.activations))[:_MOST_MODULES]
        if modules:
            columns = ("module", "MiB")
            tables.append(Table("Activations by module, largest", columns, modules))
        tables += self.more
        if self.notes:
            rows = [(note,) for note in self.notes]
            tables.append(Table("Notes", ("note",), rows))
        return tables

    def to_dict(self) -> dict[str, Any]:
        names = (
            *("device", "batch_size", "verdict", "fits", "allocated", "reserved"),
            *("total", "capacity", "kinds", "moments", "activations", "failed"),
            *("exact", "method", "seconds", "notes"),
        )
        return {name: getattr(self, name) for name in names}

    def plot(self, path: str) -> None:
        """Writes memory over the step as a picture (needs matplotlib)."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel("allocations and releases")
        axes.set_ylabel("MiB in tensors")
        axes.set_title(f"A training step on {self.device}")
        colours = {moment: f"C{i}" for i, moment in enumerate(self.moments)}
        numbered = enumerate(self.curve)
        for moment, run in groupby(numbered, key=lambda point: point[1][0]):
            points = [(i, size / MIB) for i, (_, size) in run]
            axes.plot(*zip(*points, strict=True), colours.get(moment, "0.5"))
        for moment, colour in colours.items():
            axes.plot([], [], colour, label=moment)
        axes.axhline(self.capacity / MIB, color="0.4", linestyle="--", linewidth=1)
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(path)


def estimate_of(replayed: Replay, **facts: Any) -> Estimate:
    """An estimate from a replay and what only its maker knows."""
    return Estimate(
        allocated=replayed.allocated,
        reserved=replayed.reserved,
        kinds=replayed.kinds,
        moments=replayed.moments,
        activations=replayed.activations,
        failed=replayed.failed,
        curve=replayed.curve,
        **facts,
    )


def by_pattern(modules: dict[str, int]) -> dict[str, int]:
    """Modules that differ in numbers alone, such as layers.0.fc and layers.1.fc,
    together as layers.*.fc."""
    found: dict[str, int] = {}
    for name, size in modules.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name) or "(outside)"
        found[pattern] = found.get(pattern, 0) + size
    return found


def _rows(sizes: dict[str, int], sort: bool = True) -> list[tuple[str, int]]:
    rows = [(name, round(size / MIB)) for name, size in sizes.items()]
    if sort:
        rows = sorted(rows, key=lambda row: -row[1])
    return [row for row in rows if row[1]]


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f}"
