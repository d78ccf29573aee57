"""The most memory that a piece of a program takes, on a GPU or in this process."""

import contextlib
import ctypes
import gc
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from trainfast.machine import available_memory, read, resident_memory

_STATUS = "/proc/self/status"
_SECONDS = 0.005  # between two looks, where the kernel's mark cannot be reset


class Meter:
    """Measures peaks against a limit.

    On the CPU what the process has got between the making of the meter and the first
    measurement does not count: a copy of the state, and what an estimate has imported.

    Args:
        device: the device of the training step.
        limit: bytes; None: what is there now, with what this process has already.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self.cuda = device.type == "cuda"
        self.device = device
        self.peak = 0
        self.clear()
        self._there = self._free()
        self._before = 0 if self.cuda else resident_memory()
        self._held = 0
        self._begun = self.cuda
        self.limit = self._there if limit is None else limit

    def budget(self, target: float) -> float:
        """Bytes that a step may take: this share of the limit, and no more than there
        are besides what the search holds."""
        share = target * self.limit
        return share if self.cuda else min(share, self._there - self._held)

    def _free(self) -> int:
        if self.cuda:
            free, total = torch.cuda.mem_get_info(self.device)
            # What set_per_process_memory_fraction() left; torch 2.6 cannot say.
            get = getattr(torch.cuda, "get_per_process_memory_fraction", None)
            most = total if get is None else int(get(self.device) * total)
            return min(most, free + torch.cuda.memory_reserved(self.device))
        return resident_memory() + available_memory()

    def clear(self) -> None:
        """Gives what is not in use back to the system."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            return
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """`peak` is the most that the block takes, this process's rest included."""
        self.clear()
        if not self._begun:  # later a step's own code is there, too
            self._begun = True
            self._held = max(0, resident_memory() - self._before)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            try:
                yield
            finally:
                self.peak = torch.cuda.max_memory_reserved(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        except OSError:
            with self._sampled():
                yield
            return
        try:
            yield
        finally:
            found = re.search(r"^VmHWM:\s*(\d+) kB", read(_STATUS), re.MULTILINE)
            mark = int(found[1]) << 10 if found else resident_memory()
            self.peak = mark - self._held

    @contextlib.contextmanager
    def _sampled(self) -> Iterator[None]:
        self.peak = resident_memory() - self._held
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_SECONDS):
                self.peak = max(self.peak, resident_memory() - self._held)

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch's errors for it, whatever their type."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = (
        *("out of memory", "can't allocate memory"),
        *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def without_frames(error: Exception) -> Exception:
    """The error without its traceback, which would keep the failed step's tensors."""
    error.__context__ = None
    return error.with_traceback(None)
