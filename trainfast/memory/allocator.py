"""A model of torch's caching allocator for CUDA memory, for one stream.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings:
sizes are rounded up to 512 bytes; requests up to 1 MiB come from segments of 2 MiB,
below 10 MiB from segments of 20 MiB, larger ones from a segment of their own, rounded
up to 2 MiB; the smallest free block that is large enough is taken and split where the
rest is worth it; neighbours that are free are merged. A segment that does not fit
makes the allocator give all segments without a used block back first.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 1 << 20
_SMALLEST = 512
_SMALL = 1 * MIB  # the largest request that the small pool serves
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB  # requests from here on get a segment of their own
_ROUNDED = 2 * MIB


class OutOfMemory(Exception):
    """A segment is larger than what is left of the capacity."""


@dataclass(eq=False)
class Block:
    """A stretch of a segment, free or in use."""

    size: int
    offset: int
    segment: int
    small: bool
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def key(self) -> tuple[int, int, int]:
        return self.size, self.segment, self.offset


@dataclass
class _Pool:
    """Free blocks by size, then address."""

    keys: list[tuple[int, int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int, int], Block] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        block.free = True
        insort(self.keys, block.key)
        self.blocks[block.key] = block

    def remove(self, block: Block) -> None:
        block.free = False
        del self.keys[bisect_left(self.keys, block.key)]
        del self.blocks[block.key]

    def best_fit(self, size: int) -> Block | None:
        place = bisect_left(self.keys, (size, -1, -1))
        return self.blocks[self.keys[place]] if place < len(self.keys) else None


class Allocator:
    """Replays requests; tells bytes in use (`allocated`) and in segments (`reserved`).

    Args:
        capacity: bytes for all segments together; None for no limit.
        expandable: as with `expandable_segments:True`: one segment a pool, which grows
            at its end by 2 or 20 MiB.
    """

    def __init__(self, capacity: int | None = None, expandable: bool = False) -> None:
        self.capacity, self.expandable = capacity, expandable
        self.allocated = self.reserved = 0
        self.most_allocated = self.most_reserved = 0
        self._pools = {True: _Pool(), False: _Pool()}
        self._segments = 0
        self._last: dict[bool, Block] = {}  # of an expandable segment

    def allocate(self, size: int) -> Block:
        """Raises: OutOfMemory, after free segments were given back."""
        size = max(_SMALLEST, _rounded(size, _SMALLEST))
        small = size <= _SMALL
        pool = self._pools[small]
        block = pool.best_fit(size)
        if block is not None:
            pool.remove(block)
        elif self.expandable:
            block = self._grown(size, small)
        else:
            block = self._new_segment(size, small)
        self._split(block, size)
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block

    def release(self, block: Block) -> None:
        pool = self._pools[block.small]
        self.allocated -= block.size
        if block.after is not None and block.after.free:
            pool.remove(block.after)
            self._merge(block, block.after)
        if block.before is not None and block.before.free:
            pool.remove(block.before)
            block = self._merge(block.before, block)
        pool.add(block)

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        worth = rest >= _SMALLEST if block.small or self.expandable else rest > _SMALL
        if not worth:
            return
        block.size = size
        other = Block(
            rest, block.offset + size, block.segment, block.small, before=block
        )
        self._insert_after(block, other)
        self._pools[block.small].add(other)

    def _insert_after(self, block: Block, other: Block) -> None:
        other.before, other.after = block, block.after
        if block.after is not None:
            block.after.before = other
        block.after = other
        if self._last.get(block.small) is block:
            self._last[block.small] = other

    def _merge(self, block: Block, next_one: Block) -> Block:
        block.size += next_one.size
        block.after = next_one.after
        if next_one.after is not None:
            next_one.after.before = block
        if self._last.get(block.small) is next_one:
            self._last[block.small] = block
        return block

    def _new_segment(self, size: int, small: bool) -> Block:
        if small:
            total = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            total = _LARGE_SEGMENT
        else:
            total = _rounded(size, _ROUNDED)
        self._reserve(total)
        self._segments += 1
        return Block(total, 0, self._segments, small)

    def _grown(self, size: int, small: bool) -> Block:
        """A free block of `size` at least at the end of the pool's segment."""
        page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        last = self._last.get(small)
        have = last.size if last is not None and last.free else 0
        more = _rounded(size - have, page)
        if have and not self._has_room(more):
            self._give_back()  # the free block at the end, too
            have, more = 0, _rounded(size, page)
        self._reserve(more)
        if last is None:
            self._last[small] = Block(more, 0, -1 - small, small)
            return self._last[small]
        if have:
            self._pools[small].remove(last)
            last.size += more
            return last
        block = Block(more, last.offset + last.size, last.segment, small)
        self._insert_after(last, block)
        return block

    def _has_room(self, size: int) -> bool:
        return self.capacity is None or self.reserved + size <= self.capacity

    def _reserve(self, size: int) -> None:
        if not self._has_room(size):
            self._give_back()
        if not self._has_room(size):
            raise OutOfMemory(size)
        self.reserved += size

    def _give_back(self) -> None:
        """What torch does before it fails: segments without a used block are freed.

        Of expandable segments the pages of free blocks are unmapped. Their addresses
        are not used again here: the segment grows at its end instead.
        """
        for small, pool in self._pools.items():
            page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
            for block in list(pool.blocks.values()):
                if self.expandable:
                    pages = block.size // page * page
                elif block.before is None and block.after is None:
                    pages = block.size
                else:
                    pages = 0
                if pages:
                    pool.remove(block)
                    self.reserved -= pages


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step
