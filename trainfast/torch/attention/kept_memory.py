"""Memory of large results on the CPU, kept for the next call.

malloc gives what is as large as this back to the system as soon as it is freed. The
next result then has fresh pages, each of which the system zeroes and, in a virtual
machine, often has to get from the host first. The storages are torch's own; one that
nothing but this list refers to any more is handed out again.

Backward in ms, fresh and kept, on 2 cores of a virtual EPYC (Zen 4):

    [32, 12, 512, 64], 150 MB of gradients    654    408    (torch's own 682)
    [2, 8, 1024, 64] and a bias's, 33 MB       86     74    (torch's own 147)

What it costs: torch does not add up gradients in place in such a storage, which has one
reference more; and one that its user has resized or shared is let go of only at the
next large result.
"""

import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainfast.torch.private import (
    n_dispatch_modes,
    storage_uses,
    transform_level,
)

LEAST = 32 << 20  # bytes of a result: glibc keeps what is smaller by itself
MOST = 256 << 20  # bytes of all that is kept


class _Kept(NamedTuple):
    storage: torch.UntypedStorage
    address: int
    bytes: int

    def is_as_made(self) -> bool:
        """Whether nobody has resized it, or moved it into memory that is shared."""
        storage = self.storage
        return storage.nbytes() == self.bytes and storage.data_ptr() == self.address

    def references(self) -> tuple[int, int, int]:
        """By C++, by Python, and by C++ again, as another thread may go on between."""
        assert storage_uses is not None
        data = self.storage._cdata
        first = storage_uses(data)
        return first, sys.getrefcount(self.storage), storage_uses(data)

    def is_idle(self) -> bool:
        return self.references() == _ALONE


def _alone() -> tuple[int, int, int]:
    """References to a storage that only a _Kept has: by its Python object; by the _Kept
    and, if this Python counts it, the argument of getrefcount."""
    if storage_uses is None:
        return 0, 0, 0
    return _Kept(torch.UntypedStorage(), 0, 0).references()


_ALONE = _alone()
_lock = threading.Lock()
_kept: list[_Kept] = []  # in the order of their last use


def empty_large(shape: Sequence[int], strides: Sequence[int], like: Tensor) -> Tensor:
    """An uninitialised dense tensor on the CPU of like's dtype and at least LEAST
    bytes."""
    n = like.itemsize
    for size in shape:
        n *= size
    made = torch.empty(0, dtype=like.dtype, device="cpu")
    # Not waited for: what runs in between, as a finaliser, may come here again.
    if not _lock.acquire(blocking=False):
        return made.set_(_fresh(n), 0, tuple(shape), tuple(strides))
    try:
        return made.set_(_take(n), 0, tuple(shape), tuple(strides))
    finally:
        _lock.release()


def is_large(like: Tensor, numel: int) -> bool:
    """Whether a result of so many elements, of the dtype of `like` and beside it, has
    its memory from here."""
    return (
        type(like) in (Tensor, torch.nn.Parameter)
        and numel * like.itemsize >= LEAST
        and like.device.type == "cpu"
        and transform_level() is None
        and n_dispatch_modes() == 0
        and storage_uses is not None
    )


def _take(n: int) -> torch.UntypedStorage:
    _kept[:] = [kept for kept in _kept if kept.is_as_made()]
    for i, kept in enumerate(_kept):
        if kept.bytes == n and kept.is_idle():
            _kept.append(_kept.pop(i))
            return kept.storage
    try:
        storage = _fresh(n)
    except RuntimeError:  # no memory
        _kept.clear()
        storage = _fresh(n)
    if n <= MOST:
        _make_room(n)
        _kept.append(_Kept(storage, storage.data_ptr(), n))
    return storage


def _fresh(n: int) -> torch.UntypedStorage:
    return torch.empty(n, dtype=torch.uint8, device="cpu").untyped_storage()


def _make_room(n: int) -> None:
    """Forgets first what nobody uses, then what has been in use for longest."""
    _kept.sort(key=lambda kept: not kept.is_idle())  # stable
    while sum(kept.bytes for kept in _kept) + n > MOST:
        del _kept[0]
