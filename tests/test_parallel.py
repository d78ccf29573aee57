"""parallel_map: order, errors, and no items."""

import os
import time

import pytest

import trainfast


def slow_square(number):
    time.sleep(0.02 if number == 0 else 0)
    return number * number, os.getpid()


def fails_at_three(number):
    if number == 3:
        raise ValueError("no three")
    return number


def dies(number):
    os._exit(3)


def test_results_are_in_the_order_of_the_items():
    results = trainfast.parallel_map(slow_square, range(8), workers=2, progress=False)
    assert [square for square, _ in results] == [n * n for n in range(8)]
    assert os.getpid() not in {process for _, process in results}


def test_error_names_its_item():
    with pytest.raises(ValueError, match="no three") as caught:
        trainfast.parallel_map(fails_at_three, range(8), workers=2, progress=False)
    assert caught.value.__notes__ == ["item 3: 3"]


def test_process_that_dies_is_an_error():
    with pytest.raises(RuntimeError, match="terminated abruptly"):
        trainfast.parallel_map(dies, [1], progress=False)


def test_nothing_to_do():
    assert trainfast.parallel_map(slow_square, []) == []
    with pytest.raises(ValueError, match="workers must be 1 or more"):
        trainfast.parallel_map(slow_square, [1], workers=0)
