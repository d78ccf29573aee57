"""Covering arrays of strength 2: few cases that hold every pair of values of any two
factors (all-pairs testing).

Own code instead of allpairspy: the tests also run where no package index can be
reached, such as a machine that is lent for its GPU; there a further dependency costs
more than these lines.
"""

import itertools

import pytest


def pairwise(factors, allowed=lambda case: True):
    """Cases, dicts {factor: value}, that together hold every allowed pair of values.

    Greedy and deterministic. A case begins with the first pair that no case holds yet;
    each further factor then takes the value with which most new pairs are covered.

    Args:
        factors: {name: values}.
        allowed: says of a partial case whether it may stand. Whatever it allows must
            have an allowed value for each factor that is still missing.
    """
    names = list(factors)
    values = {name: list(factors[name]) for name in names}

    def case_of(chosen):
        return {name: values[name][i] for name, i in chosen.items()}

    def fits(chosen):
        return allowed(case_of(chosen))

    # A dict, not a set: the order is the same on every run.
    missing = {
        ((a, i), (b, j)): None
        for a, b in itertools.combinations(names, 2)
        for i in range(len(values[a]))
        for j in range(len(values[b]))
        if fits({a: i, b: j})
    }

    def gained(chosen):
        *others, new = chosen.items()
        pairs = ((old, new) for old in others)
        return sum(pair in missing or pair[::-1] in missing for pair in pairs)

    cases = []
    while missing:
        chosen = dict(next(iter(missing)))
        for name in names:
            if name not in chosen:
                tries = [{**chosen, name: i} for i in range(len(values[name]))]
                chosen = max(filter(fits, tries), key=gained)
        chosen = {name: chosen[name] for name in names}
        for pair in itertools.combinations(chosen.items(), 2):
            missing.pop(pair, None)
        cases.append(case_of(chosen))
    return cases


def parametrize_pairs(**factors):
    """`pytest.mark.parametrize` with a pairwise design instead of the full product."""
    cases = [tuple(case.values()) for case in pairwise(factors)]
    return pytest.mark.parametrize(list(factors), cases)


def option_cases(options, contradictions):
    """A pairwise design of options that are on, with `options`' value, or off.

    No case has all options of one of the `contradictions`.
    """

    def allowed(case):
        return not any(all(map(case.get, names)) for names in contradictions)

    cases = pairwise(dict.fromkeys(options, (False, True)), allowed)
    return [{n: options[n] for n in options if case[n]} for case in cases]
