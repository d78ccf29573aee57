"""What identifies a graph in a cache: 16 bytes of what it was made from.

Without a key of one's own it is the input's place: its number + 1 as little-endian u64,
and 8 bytes of BLAKE2b of the transform's id. With one it is BLAKE2b-128 of both. After
a rebuild a random salt follows the transform's id. Zeros mean "not known" and are never
made here.
"""

import struct
from collections.abc import Callable
from hashlib import blake2b
from operator import index
from typing import Any, SupportsIndex, TypeAlias

from trainfast import _core

SIZE = 16
_LARGE = 4096  # bytes of a graph

Key: TypeAlias = str | bytes | SupportsIndex | tuple["Key", ...]


def key_maker(
    key: Callable[[Any], Key] | None, transform_id: Key | None, salt: str = ""
) -> Callable[[int, Any], bytes]:
    """The function (place, input) -> 16 bytes. Raises TypeError for other ids."""
    transform = _transform(transform_id) + salt.encode()
    if key is None:
        tail = blake2b(transform, digest_size=SIZE - 8).digest()
        pack = struct.Struct("<Q").pack
        return lambda place, _: pack(place + 1) + tail

    def own(place: int, item: Any) -> bytes:
        what = f"the key of input {place}"
        return blake2b(stable(key(item), what) + transform, digest_size=SIZE).digest()

    return own


def name_of(transform_id: Key | None) -> str:
    """A name for a transform's id."""
    return blake2b(_transform(transform_id), digest_size=8).hexdigest()


def _transform(transform_id: Key | None) -> bytes:
    return b"n" if transform_id is None else stable(transform_id, "transform_id")


def stable(value: Key, what: str = "a key") -> bytes:
    """Bytes that are the same in every process and different for different values.

    `value`: str, bytes, int, or a tuple of them.
    """
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"s%d:%s" % (len(data), data)
    if isinstance(value, bytes):
        return b"b%d:%s" % (len(value), value)
    if isinstance(value, tuple):
        parts = [stable(part, what) for part in value]
        return b"t%d:%s" % (len(parts), b"".join(parts))
    try:
        return b"i%d;" % index(value)
    except TypeError:
        kinds = "str, bytes, int or a tuple of them"
        raise TypeError(f"{what} must be {kinds}, got {type(value).__name__}") from None


def stored(path: str, partial: bool = False) -> bytes:
    """The keys of all graphs in a cache, in order.

    Keys of large graphs are read, not mapped: each key is in a page of its own, and the
    kernel maps the pages around it too, in the end the whole file.
    """
    core = _core.GraphCache(path, partial=partial)
    if core.file_bytes > _LARGE * len(core):
        core = _core.GraphCache(path, partial=partial, pread=True)
    return core.keys()
