"""Switches that are a setting of torch."""

import os
from collections.abc import Callable
from typing import Any

import torch

from trainfast.torch.probe.loop import Loop, Switch


class Setting(Switch):
    """A setting of torch that costs time, with the value that does not."""

    def __init__(
        self,
        name: str,
        read: Callable[[], Any],
        write: Callable[[Any], Any],
        wanted: Callable[[Any], Any],
        by_name: bool = False,
    ) -> None:
        self.name = name
        self.by_name = by_name
        self.read = read
        self.write = write
        self.wanted = wanted

    def possible(self, loop: Loop, share: Callable[[str], float]) -> bool:
        return self.read() != self.wanted(self.read())

    def enter(self, loop: Loop) -> None:
        self.before = self.read()
        self.write(self.wanted(self.before))

    def leave(self, loop: Loop) -> None:
        self.write(self.before)


def settings() -> list[Setting]:
    cores = len(os.sched_getaffinity(0))
    return [
        Setting(
            "anomaly",
            torch.is_anomaly_enabled,
            torch.autograd.set_detect_anomaly,
            lambda now: False,
        ),
        Setting(
            "threads",
            torch.get_num_threads,
            torch.set_num_threads,
            lambda now: max(now, cores),
        ),
        Setting(
            "one thread",
            torch.get_num_threads,
            torch.set_num_threads,
            lambda now: now if torch.cuda.is_available() else 1,
            by_name=True,  # threads that start anew slow the steps behind it
        ),
        Setting(
            "deterministic",
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
            lambda now: False,
        ),
        Setting(
            "cudnn benchmark",
            lambda: torch.backends.cudnn.benchmark,
            _set_cudnn_benchmark,
            lambda now: now or torch.cuda.is_available(),
        ),
        Setting(
            "tf32",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
            lambda now: "high" if now == "highest" and _has_tf32() else now,
        ),
    ]


def _set_cudnn_benchmark(value: bool) -> None:
    torch.backends.cudnn.benchmark = value


def _has_tf32() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
