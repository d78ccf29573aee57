"""Numbers of tensors on a GPU, read without a wait of the host."""

from typing import Any

import torch
from torch import Tensor


class LateValues:
    """Copies of one-element tensors, on their way to the host.

    All values of a device go in one transfer. Without an event (devices other than
    CUDA's), `read` waits for the device, so it is for a step later.

    Args:
        tensors: of one element each, of any dtypes and devices.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._count = len(tensors)
        self._parts: list[tuple[list[int], Tensor, Any]] = []
        places: dict[torch.device, list[int]] = {}
        for i, tensor in enumerate(tensors):
            places.setdefault(tensor.device, []).append(i)
        for device, indices in places.items():
            packed = _pack([tensors[i].detach().reshape(()) for i in indices])
            event = None
            if device.type == "cuda":
                packed = packed.to("cpu", non_blocking=True)  # into pinned memory
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
            self._parts.append((indices, packed, event))

    def has_come(self) -> bool:
        """Whether `read` need not wait, as far as the device tells."""
        return all(event is None or event.query() for _, _, event in self._parts)

    def read(self) -> list[float | int | bool]:
        """The values, in the order of the tensors."""
        values: list[float | int | bool] = [0.0] * self._count
        for indices, packed, event in self._parts:
            if event is not None:
                event.synchronize()
            for i, value in zip(indices, packed.tolist()):
                values[i] = value
        return values


def _pack(scalars: list[Tensor]) -> Tensor:
    """One tensor; numbers of several dtypes become float64, which holds them all."""
    if len({scalar.dtype for scalar in scalars}) > 1:
        on_mps = scalars[0].device.type == "mps"
        widest = torch.float32 if on_mps else torch.float64
        scalars = [scalar.to(widest) for scalar in scalars]
    return torch.stack(scalars)
