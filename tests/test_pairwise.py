"""Every design holds every pair, and few cases."""

import itertools

import pytest

from tests.pairwise import pairwise

# How many values each factor has, and how many cases a design may have. The product of
# the two largest numbers is a lower bound.
SHAPES = [
    ((2, 2), 4),
    ((3, 2, 2), 6),
    ((2,) * 10, 12),
    ((4, 4, 3, 5), 22),
    ((4,) + (2,) * 9, 12),
    ((1, 3, 1), 3),
    ((5, 4, 4, 3, 3, 2, 2, 2), 24),
]


def pairs(case):
    return set(itertools.combinations(case.items(), 2))


def every_pair(factors):
    return {
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
    }


@pytest.mark.parametrize("shape, most", SHAPES)
def test_every_pair_is_held(shape, most):
    factors = {f"factor {i}": range(n) for i, n in enumerate(shape)}
    cases = pairwise(factors)
    assert all(list(case) == list(factors) for case in cases)
    assert set().union(*map(pairs, cases)) == every_pair(factors)
    assert len(cases) <= most
    assert pairwise(factors) == cases


def test_pairs_that_are_not_allowed_are_left_out():
    factors = {name: (False, True) for name in "abcdef"}

    def allowed(case):
        return not (case.get("a") and case.get("b")) and not (
            case.get("c") and case.get("f")
        )

    cases = pairwise(factors, allowed)
    assert all(map(allowed, cases))
    forbidden = {(("a", True), ("b", True)), (("c", True), ("f", True))}
    assert set().union(*map(pairs, cases)) == every_pair(factors) - forbidden


def test_values_need_not_be_hashable():
    cases = pairwise({"a": [{}, {"x": 1}], "b": [[1], [2]]})
    assert len(cases) == 4
    assert {"a": {"x": 1}, "b": [2]} in cases
