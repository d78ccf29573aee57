"""How busy other processes keep the cores that this process may use."""

import os
from pathlib import Path


def _busy_seconds() -> float | None:
    """Return the CPU time spent on this process's cores by everybody, stolen included.

    Fields of /proc/stat: user nice system idle iowait irq softirq steal (proc(5)).
    """
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    ticks = 0
    for line in lines:
        name, *fields = line.split()
        if name in cores:
            ticks += sum(int(field) for field in fields[:3] + fields[5:8])
    return ticks / os.sysconf("SC_CLK_TCK")


class OtherLoad:
    """Measures the share of this process's cores that others used in a `with` block."""

    share: float | None = None

    def __enter__(self) -> "OtherLoad":
        self._before = (_busy_seconds(), os.times())
        return self

    def __exit__(self, *_exception: object) -> None:
        busy, times = _busy_seconds(), os.times()
        busy_before, times_before = self._before
        wall = (times.elapsed - times_before.elapsed) * len(os.sched_getaffinity(0))
        if busy is None or busy_before is None or wall <= 0:
            return
        own = sum(times[:4]) - sum(times_before[:4])
        self.share = min(1.0, max(0.0, (busy - busy_before - own) / wall))
