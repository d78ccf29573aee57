"""Batch sizes that were run: the report, the matching accumulation, learning rates."""

import math
from dataclasses import dataclass, field
from typing import Any

from trainfast.report import Report, Table

MIB = 1 << 20
_KNEE = 0.97  # of the best rate, for a smaller batch


@dataclass
class Probe:
    """One batch size that was run.

    Attributes:
        size: samples.
        peak: bytes at most, of this process or on its GPU; None where memory ran out.
        rate: samples a second, without the first step.
    """

    size: int
    peak: int | None
    rate: float | None = None


@dataclass(repr=False)
class BatchSizeReport(Report):
    """What `find_batch_size` found.

    Attributes:
        batch_size: the answer, which has run.
        probes: what was run, in this order.
        limit: bytes that there are.
        target: the share of the limit that the batch may take.
        objective: "memory" or "throughput".
        dataset_size: samples in the data set, if it was given.
        notes: what the reader should know.
    """

    batch_size: int
    probes: list[Probe]
    limit: int
    target: float
    objective: str = "memory"
    dataset_size: int | None = None
    notes: list[str] = field(default_factory=list)

    def accumulation(self, effective: int) -> tuple[int, int]:
        """(batch size, steps) whose product is the effective batch, if it can be.

        The largest divisor of `effective` that is no larger than the batch size; it is
        not used where it is less than half of it: then the product is larger.
        """
        if effective < 1:
            raise ValueError(f"`effective` must be positive, got {effective}")
        most = min(self.batch_size, effective)
        exact = max(n for n in range(1, most + 1) if effective % n == 0)
        size = exact if exact * 2 > most else most
        return size, math.ceil(effective / size)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "probes": [vars(probe) for probe in self.probes]}

    def tables(self) -> list[Table]:
        columns = ["batch", "peak MiB", "of the limit", "samples/s"]
        if self.dataset_size:
            columns.append("updates an epoch")
        rows: list[tuple[Any, ...]] = []
        for probe in sorted(self.probes, key=lambda probe: probe.size):
            row: list[Any] = [probe.size, "out of memory", "", ""]
            if probe.peak is not None:
                share = f"{probe.peak / self.limit:.0%}"
                rate = None if probe.rate is None else float(f"{probe.rate:.4g}")
                row = [probe.size, round(probe.peak / MIB), share, rate]
            if self.dataset_size:
                row.append(math.ceil(self.dataset_size / probe.size))
            rows.append(tuple(row))
        facts = [(note,) for note in self.notes]
        tables = [Table("Batch sizes that were run", tuple(columns), rows)]
        return [*tables, Table(f"Take batch_size={self.batch_size}", ("",), facts, "")]

    def plot(self, path: str) -> None:
        """Writes rate and memory by batch size as a picture (needs matplotlib)."""
        from matplotlib.figure import Figure

        ran = sorted(
            (probe for probe in self.probes if probe.peak is not None),
            key=lambda probe: probe.size,
        )
        figure = Figure(figsize=(7, 4), layout="constrained")
        left = figure.subplots()
        right = left.twinx()
        sizes = [probe.size for probe in ran]
        left.plot(sizes, [p.rate or math.nan for p in ran], "o-", label="samples/s")
        memory = [p.peak / MIB for p in ran if p.peak is not None]
        right.plot(sizes, memory, "s--", color="0.5", label="memory")
        left.axvline(self.batch_size, color="0.7", linewidth=1)
        left.set(xlabel="batch size", ylabel="samples a second", ylim=(0, None))
        right.set(ylabel="MiB", ylim=(0, None))
        figure.legend(loc="outside upper right", ncols=2)
        figure.savefig(path)


def knee(probes: list[Probe]) -> int:
    """The smallest batch within 3 % of the best rate."""
    rates = {probe.size: probe.rate for probe in probes if probe.rate}
    best = max(rates.values())
    return min(size for size, rate in rates.items() if rate >= _KNEE * best)


def scale_lr(
    lr: float, old_batch: int, new_batch: int, rule: str | None = "sqrt"
) -> float:
    """The learning rate for another batch size.

    Args:
        lr: the rate at `old_batch`.
        old_batch, new_batch: effective batch sizes, accumulation included.
        rule: "sqrt" for Adam and AdamW (Malladi et al. 2022, arXiv:2205.10287),
            "linear" for SGD (Goyal et al. 2017, arXiv:1706.02677), None to keep it.
            Both are starting points: warm the new rate up.

    Raises:
        ValueError: a batch size is not positive, or the rule is unknown.
    """
    if old_batch < 1 or new_batch < 1:
        raise ValueError(
            f"batch sizes must be positive, got {old_batch} and {new_batch}"
        )
    ratio = new_batch / old_batch
    if rule is None:
        return lr
    if rule == "sqrt":
        return lr * math.sqrt(ratio)
    if rule == "linear":
        return lr * ratio
    raise ValueError(f'`rule` must be "sqrt", "linear" or None, got {rule!r}')
