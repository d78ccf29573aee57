"""GPUs through NVIDIA's management library, by the package nvidia-ml-py."""

from collections.abc import Callable
from functools import partial
from typing import Any

from trainfast.monitor.sample import Gpu

# nvml.h, nvmlClocksThrottleReasons; an idle GPU and settings of the user are no matter.
_REASONS = {
    0x0000000000000004: "power limit",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "too hot",
    0x0000000000000040: "too hot (hardware)",
    0x0000000000000080: "power brake",
}
_CLOCK_SM, _TEMPERATURE = 1, 0


class Nvml:
    """Asks for all GPUs; a question that one does not answer is None.

    Attributes:
        missing: why there are no GPUs, in a sentence; None where there are.
    """

    def __init__(self) -> None:
        self.missing: str | None = None
        self._nvml: Any = None
        self._open()

    def _open(self) -> None:
        try:
            import pynvml
        except ImportError:
            self.missing = "no GPU is watched: pip install nvidia-ml-py"
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.missing = f"no GPU is watched: {error}"
            return
        self._nvml, self.missing = pynvml, None

    def gpus(self) -> tuple[Gpu, ...]:
        if self._nvml is None:
            return ()
        try:
            count = self._nvml.nvmlDeviceGetCount()
            found = [self._asked(partial(self._gpu, index)) for index in range(count)]
            return tuple(gpu for gpu in found if gpu is not None)
        except self._nvml.NVMLError:
            self._open()  # another part of the process has shut it down
            return ()

    def _gpu(self, index: int) -> Gpu:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)

        def ask(function: str, *args: Any) -> Any:
            return self._asked(lambda: getattr(nvml, function)(handle, *args))

        name = ask("nvmlDeviceGetName") or "GPU"
        memory = ask("nvmlDeviceGetMemoryInfo")
        rates = ask("nvmlDeviceGetUtilizationRates")
        bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        power = ask("nvmlDeviceGetPowerUsage")
        limit = ask("nvmlDeviceGetEnforcedPowerLimit")
        running = ask("nvmlDeviceGetComputeRunningProcesses") or []
        return Gpu(
            index,
            name.decode() if isinstance(name, bytes) else name,
            memory.total if memory else None,
            memory.used if memory else None,
            rates.gpu if rates else None,
            ask("nvmlDeviceGetTemperature", _TEMPERATURE),
            None if power is None else power / 1000,
            None if limit is None else limit / 1000,
            ask("nvmlDeviceGetClockInfo", _CLOCK_SM),
            ask("nvmlDeviceGetMaxClockInfo", _CLOCK_SM),
            tuple(words for bit, words in _REASONS.items() if bits & bit),
            ask("nvmlDeviceGetCurrPcieLinkWidth"),
            ask("nvmlDeviceGetMaxPcieLinkWidth"),
            ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            {p.pid: p.usedGpuMemory or 0 for p in running},
        )

    def _asked(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._nvml.NVMLError as error:
            gone = getattr(self._nvml, "NVML_ERROR_UNINITIALIZED", 1)
            if getattr(error, "value", None) == gone:
                raise
            return None  # not supported by this GPU, or the GPU is lost
