"""Memory of large results on the CPU, kept for the next call.

malloc gives what is as large as this back to the system as soon as it is freed. The
next result then has fresh pages, each of which the system zeroes and, in a virtual
machine, often has to get from the host first. The storages are torch's own; one that
nothing but this list refers to any more is handed out again.

Backward in ms, fresh and kept, on 2 cores of a virtual EPYC (Zen 4):

    [32, 12, 512, 64], 150 MB of gradients    654    408    (torch's own 682)
    [2, 8, 1024, 64] and a bias's, 33 MB       86     74    (torch's own 147)
"""

import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 32 << 20  # bytes of a result: glibc keeps what is smaller by itself
MOST = 256 << 20  # bytes of all that is kept

_storage_uses = getattr(torch._C, "_storage_Use_Count", None)


class _Kept(NamedTuple):
    storage: torch.UntypedStorage
    address: int
    bytes: int

    def is_as_made(self) -> bool:
        """Whether nobody has resized it, or moved it into memory that is shared."""
        storage = self.storage
        return storage.nbytes() == self.bytes and storage.data_ptr() == self.address

    def is_idle(self) -> bool:
        # this tuple, and the argument of getrefcount
        return _uses(self.storage) == 1 and sys.getrefcount(self.storage) == 2


_lock = threading.Lock()
_kept: list[_Kept] = []  # in the order of their last use


def _uses(storage: torch.UntypedStorage) -> int:
    """How many tensors have it, and one for the storage's Python object."""
    assert _storage_uses is not None
    return int(_storage_uses(storage._cdata))


def empty_large(shape: Sequence[int], strides: Sequence[int], like: Tensor) -> Tensor:
    """An uninitialised dense tensor on the CPU of like's dtype and at least LEAST
    bytes."""
    n = like.itemsize
    for size in shape:
        n *= size
    with _lock:
        storage = _take(n)
        made = torch.empty(0, dtype=like.dtype, device="cpu")
        return made.set_(storage, 0, tuple(shape), tuple(strides))


def is_large(like: Tensor, numel: int) -> bool:
    """Whether a result of so many elements, of the dtype of `like` and beside it, has
    its memory from here."""
    return (
        type(like) in (Tensor, torch.nn.Parameter)
        and numel * like.itemsize >= LEAST
        and like.device.type == "cpu"
        and torch._C._functorch.maybe_current_level() is None
        and _storage_uses is not None
    )


def _take(n: int) -> torch.UntypedStorage:
    _kept[:] = [kept for kept in _kept if kept.is_as_made()]
    for i, kept in enumerate(_kept):
        if kept.bytes == n and kept.is_idle():
            _kept.append(_kept.pop(i))
            return kept.storage
    try:
        storage = torch.empty(n, dtype=torch.uint8, device="cpu").untyped_storage()
    except RuntimeError:  # no memory
        _kept.clear()
        storage = torch.empty(n, dtype=torch.uint8, device="cpu").untyped_storage()
    if n <= MOST:
        _make_room(n)
        _kept.append(_Kept(storage, storage.data_ptr(), n))
    return storage


def _make_room(n: int) -> None:
    """Forgets first what nobody uses, then what has been in use for longest."""
    _kept.sort(key=lambda kept: not kept.is_idle())  # stable
    while sum(kept.bytes for kept in _kept) + n > MOST:
        del _kept[0]
