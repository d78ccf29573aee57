"""What tells a leak from a cache that fills."""

import random

import pytest

pytest.importorskip("torch")

from trainfast.torch.leaks import verdict
from trainfast.torch.leaks.census import Growth


def growth(kind, additions, first=0):
    lengths = [first]
    for n in additions:
        lengths.append(lengths[-1] + n)
    return Growth(kind(), lengths)


@pytest.mark.parametrize("kind", [list, dict, set])
def test_same_addition_in_every_step_since_the_start(kind):
    assert growth(kind, [2] * 8, first=70).is_steady(44)
    assert not growth(kind, [2] * 7 + [3], first=70).is_steady(44)
    assert not growth(kind, [2] * 7 + [0], first=70).is_steady(44)
    assert not growth(kind, [0] * 8, first=70).is_steady(44)


def test_set_has_no_order_so_that_all_its_elements_share_the_steps():
    numbers = set(range(1000))
    small = Growth(numbers, [1000 - 8 + i for i in range(9)])
    assert len(small.new()) == 1000 and small.span() == 1000  # 1 number a step
    assert not verdict._Contents(small.new(), small.old(), small.span()).matters
    arrays = Growth([bytearray(1 << 20) for _ in range(9)], list(range(1, 10)))
    contents = verdict._Contents(arrays.new(), arrays.old(), arrays.span())
    assert contents.matters and contents.text == "1 bytearray a step"


def test_cache_with_luck_is_shorter_than_a_leak():
    """27 keys in 36 steps, and then 8 new ones in a row."""
    assert not growth(dict, [1] * 8, first=27).is_steady(44)
    assert growth(list, [1] * 8, first=27).is_steady(44)


@pytest.mark.parametrize("kind", [list, dict])
def test_every_tenth_step(kind):
    pattern = [int(step % 10 == 3) for step in range(72)]
    assert not growth(kind, pattern[:8]).is_steady(44)
    assert growth(kind, pattern).is_steady(108)


def test_now_and_then_is_a_leak_of_a_list_only():
    pattern = [0, 1, 1, 0, 1, 0, 0, 1] * 9
    assert growth(list, pattern).is_steady(108)
    assert not growth(dict, pattern).is_steady(108)


@pytest.mark.parametrize("keys", [50, 127])
def test_caches_of_few_random_keys_raise_no_alarm(keys):
    alarms = 0
    for seed in range(1000):
        draw = random.Random(seed)
        seen, lengths = set(), []
        for _ in range(108):
            seen.add(draw.randrange(keys))
            lengths.append(len(seen))
        alarms += Growth({}, lengths[35:44]).is_steady(44)
        alarms += Growth({}, lengths[35:108]).is_steady(108)
    assert alarms <= 5
