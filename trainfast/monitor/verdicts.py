"""What a number means, in a word and a colour; the limits are the guides'."""

from trainfast.monitor.sample import Gpu, Host

GOOD, FAIR, BAD = "green", "yellow", "red"
# Highest temperature that is well, and from which on it is bad, by part of the name.
_HOT = {"T4": (80, 90), "A100": (80, 90), "H100": (80, 87), "V100": (78, 85)}
_HOT_OTHERS = (83, 88)
_BUSY, _IDLE = 90, 50  # per cent: guides call the first well, the second a fault
_FULL = 0.95  # of memory: the next larger batch fails
_SPARE = 0.25  # of memory in use: the batch could be larger

Verdict = tuple[str, str]  # colour, word


def utilization(gpu: Gpu) -> Verdict:
    value = gpu.utilization
    if value is None:
        return "", ""
    if value >= _BUSY:
        return GOOD, "busy"
    return (FAIR, "waits at times") if value >= _IDLE else (BAD, "waits")


def memory(gpu: Gpu) -> Verdict:
    if not gpu.memory_total or gpu.memory_used is None:
        return "", ""
    share = gpu.memory_used / gpu.memory_total
    if share > _FULL:
        return BAD, "nearly full"
    return (FAIR, "room for a larger batch") if share < _SPARE else (GOOD, "")


def temperature(gpu: Gpu) -> Verdict:
    if gpu.temperature is None:
        return "", ""
    limits = (hot for name, hot in _HOT.items() if name in gpu.name)
    well, bad = next(limits, _HOT_OTHERS)
    if gpu.temperature >= bad:
        return BAD, "too hot"
    return (FAIR, "hot") if gpu.temperature > well else (GOOD, "")


def link(gpu: Gpu) -> Verdict:
    """The bus, which an idle GPU makes narrower by itself."""
    now, most = gpu.pcie_width, gpu.pcie_width_max
    if now is None or most is None or not gpu.utilization or now >= most:
        return "", ""
    return FAIR, f"{now} of {most} lanes: another slot?"


def shared(host: Host) -> Verdict:
    if not host.shared_total or host.shared is None:
        return "", ""
    if host.shared > _FULL * host.shared_total:
        return BAD, "workers fail when it is full"
    return "", ""
