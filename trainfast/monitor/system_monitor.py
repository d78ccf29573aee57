"""`SystemMonitor`: statistics of a run, from a thread that looks once a second."""

import math
import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from trainfast.monitor.eye import Eye
from trainfast.monitor.sample import Sample
from trainfast.report import Report, Table, attributes, one_line

MIB = 1 << 20
_SIZES = ("memory", "shared", "disk")
LONGEST = 86400  # seconds from one look to the next
_MOST_SAMPLES = 100_000  # a day at 1 Hz; then every second one goes


@dataclass
class Statistic:
    """Of one number over a run or a part of it."""

    mean: float
    min: float
    max: float
    last: float


@dataclass(repr=False)
class MonitorStats(Report):
    """Statistics by name, such as "gpu0.utilization" or "process.memory".

    Attributes:
        seconds: from the first sample to the last.
        samples: how many there were.
        values: by name; sizes in bytes, cpu and utilization in per cent.
        note: why no GPU was watched, or None.
    """

    seconds: float
    samples: int
    values: dict[str, Statistic] = field(default_factory=dict)
    note: str | None = None

    def __getitem__(self, name: str) -> Statistic:
        return self.values[name]

    def to_dict(self) -> dict[str, Any]:
        values = {name: vars(value) for name, value in self.values.items()}
        return {**vars(self), "values": values}

    def tables(self) -> list[Table]:
        rows: list[tuple[Any, ...]] = []
        for name, value in self.values.items():
            part = name.partition(".")[2]
            is_size = part.startswith(_SIZES)
            numbers = [value.mean, value.min, value.max, value.last]
            if is_size:
                numbers = [number / MIB for number in numbers]
            label = f"{name} MiB" if is_size else name
            rows.append((label, *(float(f"{n:.4g}") for n in numbers)))
        title = f"{self.samples} samples in {self.seconds:.0f} s"
        tables = [Table(title, ("what", "mean", "min", "max", "last"), rows)]
        if self.note:
            tables.append(Table("Notes", ("",), [(self.note,)]))
        return tables


class SystemMonitor:
    """Watches GPUs, the machine and this process with its workers in a thread.

        monitor = trainfast.SystemMonitor().start()
        ...
        print(monitor.stop().get_stats())

    Args:
        sampling_interval_sec: seconds from one look to the next, 0.05 to 86,400.
        pid: of the process to watch with its children; None: this one.

    A forked child has no such thread: there the monitor is stopped, with what was seen
    until then. The thread ends with the monitor or the process.

    Raises:
        ImportError: psutil is not installed.
        ValueError: the interval or the process id is out of range.
    """

    def __init__(
        self, sampling_interval_sec: float = 1.0, pid: int | None = None
    ) -> None:
        if not 0.05 <= sampling_interval_sec <= LONGEST:
            raise ValueError(
                f"`sampling_interval_sec` must be 0.05 to {LONGEST}, got "
                f"{sampling_interval_sec!r}"
            )
        if pid is not None and pid < 1:
            raise ValueError(f"`pid` must be a process, got {pid}")
        self.sampling_interval_sec = sampling_interval_sec
        self._eye = Eye(os.getpid() if pid is None else pid)
        self._samples: list[Sample] = []
        self._end: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()
        self.thread_seconds = 0.0  # of processor time

    def __repr__(self) -> str:
        seen = len(getattr(self, "_samples", ()))
        running = getattr(self, "_thread", None) is not None and self.is_running()
        interval = attributes(self, "sampling_interval_sec")
        return one_line(self, **interval, samples=seen, running=running)

    def is_running(self) -> bool:
        return self._thread is not None and self._owner == os.getpid()

    def start(self) -> "SystemMonitor":
        """Starts to look; a monitor that runs goes on."""
        if self.is_running():
            return self
        self._owner = os.getpid()
        self._end = threading.Event()
        self._samples.append(self._eye.look())
        self._thread = threading.Thread(
            target=_watch,
            args=(weakref.ref(self), self._end, self.sampling_interval_sec),
            name="trainfast.SystemMonitor",
            daemon=True,
        )
        self._thread.start()
        return self

    def stop(self) -> "SystemMonitor":
        """Looks once more and ends the thread; `start` goes on later."""
        if self.is_running():
            assert self._end is not None and self._thread is not None
            self._end.set()
            self._thread.join(timeout=10)
            self._look()
        self._thread = None
        return self

    def __enter__(self) -> "SystemMonitor":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _look(self) -> None:
        began = time.thread_time()
        self._samples.append(self._eye.look())
        if len(self._samples) > _MOST_SAMPLES:
            del self._samples[::2]
        self.thread_seconds += time.thread_time() - began

    def samples(self, seconds: float | None = None) -> list[Sample]:
        """What was seen, in order.

        Args:
            seconds: only the last ones; None: all.
        """
        seen = list(self._samples)
        if seconds is None or not seen:
            return seen
        return [sample for sample in seen if sample.time >= seen[-1].time - seconds]

    def get_stats(self, seconds: float | None = None) -> MonitorStats:
        """Mean, least, most and last of each number.

        Args:
            seconds: over so many last seconds; None: since the first start.
        """
        seen = self.samples(seconds)
        numbers: dict[str, list[float]] = {}
        for sample in seen:
            for name, number in sample.numbers().items():
                numbers.setdefault(name, []).append(number)
        values = {
            name: Statistic(sum(n) / len(n), min(n), max(n), n[-1])
            for name, n in numbers.items()
        }
        nvml = self._eye.nvml
        took = seen[-1].time - seen[0].time if seen else 0.0
        return MonitorStats(took, len(seen), values, nvml.missing if nvml else None)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes utilisation and memory over the time as a picture.

        Args:
            path: of the picture; its end names the format.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: nothing has been seen yet.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError(
                "plot() needs matplotlib: pip install matplotlib"
            ) from None
        seen = self.samples()
        if not seen:
            raise ValueError("there is nothing to plot; call start() first")
        figure = Figure(figsize=(8, 5), layout="constrained")
        above, below = figure.subplots(2, sharex=True)
        seconds = [sample.time - seen[0].time for sample in seen]
        for name in seen[-1].numbers():
            what = name.partition(".")[2]
            values = [sample.numbers().get(name, math.nan) for sample in seen]
            if what in ("cpu", "utilization"):
                above.plot(seconds, values, label=name.replace("utilization", "use"))
            elif what in ("memory", "memory_used"):
                below.plot(seconds, [n / MIB for n in values], label=name)
        above.set(ylabel="per cent", ylim=(0, None))
        below.set(xlabel="seconds", ylabel="MiB", ylim=(0, None))
        for axes in (above, below):
            axes.legend(loc="upper left", fontsize="small")
        figure.savefig(path)

    def _repr_html_(self) -> str:
        return self.get_stats()._repr_html_()


def _watch(
    monitor: "weakref.ref[SystemMonitor]", end: threading.Event, interval: float
) -> None:
    """The thread. It does not keep the monitor alive."""
    due = time.monotonic() + interval
    while not end.wait(max(0.0, due - time.monotonic())):
        watched = monitor()
        if watched is None:
            return
        watched._look()
        del watched
        due = max(due + interval, time.monotonic())  # never two looks in a row
