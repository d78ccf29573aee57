"""The model of torch's caching allocator: its rules, and random histories."""

import itertools
import random

import pytest

from trainfast.memory.allocator import MIB, Allocator, OutOfMemory


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 1024, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_a_request_reserves_the_segment_of_its_size(size, segment):
    allocator = Allocator()
    allocator.allocate(size)
    assert allocator.reserved == segment


def test_small_requests_share_a_segment_and_are_rounded_to_512_bytes():
    allocator = Allocator()
    for _ in range(4096):
        allocator.allocate(1)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 2 * MIB)
    allocator.allocate(1)
    assert allocator.reserved == 4 * MIB


def test_a_large_block_is_split_only_where_more_than_one_mib_is_left():
    allocator = Allocator()
    allocator.release(allocator.allocate(20 * MIB))
    allocator.allocate(19 * MIB)
    assert allocator.allocated == 20 * MIB  # the last MiB stays with its block
    allocator = Allocator()
    allocator.release(allocator.allocate(20 * MIB))
    allocator.allocate(18 * MIB)
    assert allocator.allocated == 18 * MIB
    allocator.allocate(2 * MIB)
    assert allocator.reserved == 20 * MIB


def test_the_smallest_block_that_fits_is_taken():
    allocator = Allocator()
    wide, narrow = allocator.allocate(64 * MIB), allocator.allocate(32 * MIB)
    allocator.release(wide)
    allocator.release(narrow)
    taken = allocator.allocate(30 * MIB)
    assert taken.segment == narrow.segment


def test_neighbours_are_merged_whatever_the_order_of_their_release():
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        allocator = Allocator()
        blocks = [allocator.allocate(2 * MIB) for _ in range(10)]
        for i in order:
            allocator.release(blocks[i])
        allocator.allocate(6 * MIB)
        assert allocator.reserved == 20 * MIB


def test_cached_segments_are_given_back_before_a_failure():
    allocator = Allocator(capacity=100 * MIB)
    allocator.release(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert allocator.reserved == 80 * MIB
    with pytest.raises(OutOfMemory):
        allocator.allocate(30 * MIB)


def test_fragments_fail_where_expandable_segments_do_not():
    def run(expandable):
        allocator = Allocator(capacity=300 * MIB, expandable=expandable)
        for block in [allocator.allocate(100 * MIB) for _ in range(3)]:
            allocator.release(block)
        for _ in range(5):
            allocator.allocate(40 * MIB)  # without: in three segments
        allocator.allocate(100 * MIB)

    with pytest.raises(OutOfMemory):
        run(expandable=False)
    run(expandable=True)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("capacity", [None, 300 * MIB])
def test_random_histories_keep_the_books(expandable, capacity):
    chance = random.Random(7)
    allocator = Allocator(capacity, expandable)
    used = []
    for _ in range(1500):
        if used and chance.random() < 0.3:
            allocator.release(used.pop(chance.randrange(len(used))))
        else:
            size = int(10 ** chance.uniform(0, 7.3))
            try:
                block = allocator.allocate(size)
            except OutOfMemory:
                continue
            assert block.size >= size and not block.free
            used.append(block)
        assert allocator.allocated == sum(block.size for block in used)
        assert allocator.allocated <= allocator.reserved
        assert capacity is None or allocator.reserved <= capacity
        spans = sorted((b.segment, b.offset, b.offset + b.size) for b in used)
        for one, other in itertools.pairwise(spans):
            assert one[0] != other[0] or one[2] <= other[1]
    assert capacity is None or allocator.most_reserved > 200 * MIB
    for block in used:
        allocator.release(block)
    assert allocator.allocated == 0
