"""The random states of Python, NumPy and torch, kept together."""

import random
from typing import Any

import numpy as np
import torch


class RandomStates:
    """The states of now, or those given; `restore()` sets them.

    Attributes:
        states: as tensors, numbers and strings, which a checkpoint can hold.
    """

    def __init__(self, states: dict[str, Any] | None = None) -> None:
        self.states = states if states is not None else _now()

    def restore(self) -> None:
        random.setstate(self.states["python"])
        kind, key, *rest = self.states["numpy"]
        np.random.set_state((kind, key.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(self.states["torch"])
        devices = self.states["cuda"]
        if devices is not None and torch.cuda.is_available():
            for device, state in enumerate(devices[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, device)


def _now() -> dict[str, Any]:
    state: Any = np.random.get_state()
    kind, key, *rest = state
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(key.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }
