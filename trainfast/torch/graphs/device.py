"""Graph batches on a device: one copy of a whole batch, on a stream of its own.

A batch's arrays lie in one arena, so that one copy moves them all; what the training
step gets are views of it. On CUDA:

    arena -> pinned memory   torch's allocator of pinned memory, which hands a block out
                             again only when the copy from it is done
    pinned -> device         on this mover's stream
    event                    the consumer's stream waits for it, the CPU does not
    record_stream            the device memory is not used again before the work that
                             the consumer's stream had at its release is done
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["MovedBatch", "Tensor", "mover", "tensor"]

Move = Callable[[Any], "MovedBatch"]


def tensor(array: np.ndarray, device: Any) -> Tensor:
    """An array as a tensor on a device."""
    return torch.from_numpy(array).to(device)


class MovedBatch:
    """A core GraphBatch whose arrays have moved; the same attributes.

    arena: uint8 [nbytes], of which fields, ptrs and batches are views. host: the batch
    it was moved from, for what is to stay on the CPU.
    """

    __slots__ = (
        "arena",
        "batches",
        "fields",
        "host",
        "n_graphs",
        "n_slots",
        "nbytes",
        "offsets",
        "ptrs",
        "totals",
    )

    def __init__(self, batch: Any, arena: Tensor) -> None:
        self.host = batch
        self.n_graphs, self.n_slots = batch.n_graphs, batch.n_slots
        self.totals, self.nbytes = batch.totals, batch.nbytes
        self.offsets, self.arena = batch.offsets, arena
        storage = arena.untyped_storage()
        first = int(arena.storage_offset())
        fields, ptrs, batches = batch.offsets
        self.fields = _views(storage, first, arena.device, batch.fields, fields)
        self.ptrs = _views(storage, first, arena.device, batch.ptrs, ptrs)
        self.batches = _views(storage, first, arena.device, batch.batches, batches)


def _views(
    storage: Any, first: int, device: Any, like: list[Any], offsets: list[int]
) -> list[Any]:
    """Tensors of the storage with the shapes and dtypes of others."""
    views: list[Any] = []
    for other, offset in zip(like, offsets):
        if other is None:
            views.append(None)
            continue
        view = torch.empty(0, dtype=other.dtype, device=device)
        place = (first + offset) // other.element_size()
        views.append(view.set_(storage, place, other.shape, other.stride()))
    return views


def mover(device: Any, pin_memory: bool) -> Move | None:
    """A function that moves core batches to a device; None: they stay on the CPU.

    The core batches must have tensors as arrays. A device that is no CUDA device gets
    a plain copy.
    """
    if device is None:
        if pin_memory and not torch.accelerator.is_available():
            # As torch's own loader: a script with a GPU in mind runs without one.
            message = "pin_memory does nothing without an accelerator"
            warnings.warn(message, stacklevel=5)
            return None
        return _pinned if pin_memory else None
    device = torch.device(device)
    if device.type == "cuda":
        return _CudaMover(device)
    if device.type == "cpu":
        return mover(None, pin_memory)
    return lambda batch: MovedBatch(batch, _arena(batch).to(device))


def _arena(batch: Any) -> Tensor:
    arena = batch.arena
    return arena if isinstance(arena, Tensor) else torch.as_tensor(arena)


def _pinned(batch: Any) -> MovedBatch:
    return MovedBatch(batch, _arena(batch).pin_memory())


class _CudaMover:
    """Moves batches to a CUDA device; its stream is made when the first one comes.

    `cuda` is torch.cuda, or what a test puts there: everything of CUDA goes through it.
    """

    def __init__(self, device: Any, cuda: Any = None) -> None:
        self.device = device
        self.cuda = torch.cuda if cuda is None else cuda
        self._stream: Any = None

    def __call__(self, batch: Any) -> MovedBatch:
        cuda = self.cuda
        if self._stream is None:
            self._stream = cuda.Stream(self.device)
            # "cuda" is the GPU that is current now, also when another one is
            self.device = self._stream.device
        consumer = cuda.current_stream(self.device)
        # Memory of this stream's own: nobody else's work is waited for.
        with cuda.stream(self._stream):
            pinned = _arena(batch).pin_memory()
            arena = pinned.to(self.device, non_blocking=True)
        consumer.wait_stream(self._stream)
        arena.record_stream(consumer)
        return MovedBatch(batch, arena)
