"""A stand-in for the module pynvml that gives recorded answers."""

import sys
import types

import pytest


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__({1: "Uninitialized", 3: "Not Supported"}.get(value, value))
        self.value = value


# What NVML says of a T4 in training, of a laptop's RTX 3050 that idles, and of a card
# that is too hot; None is an answer "Not Supported".
T4 = {
    "Name": b"Tesla T4",
    "MemoryInfo": types.SimpleNamespace(total=15843721216, used=13958643712),
    "UtilizationRates": types.SimpleNamespace(gpu=97, memory=60),
    "CurrentClocksThrottleReasons": 0x4,
    "PowerUsage": 69870,
    "EnforcedPowerLimit": 70000,
    "Temperature": 76,
    "ClockInfo": 885,
    "MaxClockInfo": 1590,
    "CurrPcieLinkWidth": 16,
    "MaxPcieLinkWidth": 16,
    "CurrPcieLinkGeneration": 3,
    "MaxPcieLinkGeneration": 3,
    "ComputeRunningProcesses": [types.SimpleNamespace(pid=77, usedGpuMemory=13 << 30)],
}
LAPTOP = {
    **T4,
    "Name": "NVIDIA GeForce RTX 3050 Laptop GPU",
    "MemoryInfo": types.SimpleNamespace(total=4 << 30, used=300 << 20),
    "UtilizationRates": types.SimpleNamespace(gpu=12, memory=1),
    "CurrentClocksThrottleReasons": 0x1,
    "PowerUsage": None,
    "EnforcedPowerLimit": None,
    "Temperature": 51,
    "CurrPcieLinkWidth": 4,
    "MaxPcieLinkWidth": 8,
    "ComputeRunningProcesses": [types.SimpleNamespace(pid=5, usedGpuMemory=None)],
}
HOT = {
    **T4,
    "Name": "Tesla T4",
    "Temperature": 92,
    "CurrentClocksThrottleReasons": 0x60,
}


def module(*gpus):
    """pynvml for these GPUs; `closed` of it makes every answer "Uninitialized"."""
    fake = types.ModuleType("pynvml")
    fake.NVMLError, fake.NVML_ERROR_UNINITIALIZED = NVMLError, 1
    fake.closed, fake.opened = False, 0

    def init():
        fake.closed, fake.opened = False, fake.opened + 1

    def asked(answer):
        if fake.closed:
            raise NVMLError(1)
        if answer is None:
            raise NVMLError(3)
        return answer

    fake.nvmlInit = init
    fake.nvmlDeviceGetCount = lambda: asked(len(gpus))
    fake.nvmlDeviceGetHandleByIndex = lambda index: asked(gpus[index])
    for name in T4:
        setattr(
            fake,
            f"nvmlDeviceGet{name}",
            lambda gpu, *_, name=name: asked(gpu[name]),
        )
    return fake


@pytest.fixture
def nvml(monkeypatch):
    """Puts a fake pynvml in place: nvml(T4, LAPTOP)."""

    def put(*gpus):
        fake = module(*gpus)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return put
