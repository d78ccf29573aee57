"""Ratios of times with intervals that are honest for a few processes.

Processes are independent, their rounds are not: one process may get memory that suits
it, and all of its rounds are faster. So processes are drawn first, then rounds in each.
A bootstrap of few processes is still too narrow: it knows their spread only from
themselves. The interval is stretched as Student's t stretches a normal interval.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence

from trainfast.bench.results import Processes
from trainfast.probe.gains import STUDENT, Gain, bootstrap, choose

TOLERANCE = 1.05  # what is within counts as the same
_NORMAL = 1.96


def faster(over: Processes, under: Processes) -> Gain:
    """How many times as fast `under` is as `over`, which took turns with it."""
    ratios = [
        [a / b for a, b in zip(*rounds, strict=True)]
        for rounds in zip(over, under, strict=True)
    ]
    return _interval(lambda draw: _typical(ratios, draw), [ratios])


def changed(base: Processes, now: Processes) -> Gain:
    """How many times as fast `now` is as `base`, which other processes measured."""
    return _interval(
        lambda draw: _typical(base, draw) - _typical(now, draw), [base, now]
    )


def beside(times: dict[str, Processes], who: str, rivals: Sequence[str]) -> Processes:
    """A contender's rounds, each over the geometric mean of its rivals' there."""
    return [
        [
            t / statistics.geometric_mean(times[rival][process][i] for rival in rivals)
            for i, t in enumerate(rounds)
        ]
        for process, rounds in enumerate(times[who])
    ]


def verdict(gain: Gain) -> str:
    """FASTER or SLOWER if the whole interval is beyond the tolerance, SAME if it is
    within, and otherwise UNDECIDED."""
    if gain.low > TOLERANCE:
        return "FASTER"
    if gain.high < 1 / TOLERANCE:
        return "SLOWER"
    inside = gain.low >= 1 / TOLERANCE and gain.high <= TOLERANCE
    return "SAME" if inside else "UNDECIDED"


def _typical(processes: Processes, draw: random.Random | None) -> float:
    """The mean over processes of the logarithm of the median round."""
    return statistics.fmean(
        math.log(statistics.median(choose(rounds, draw)))
        for rounds in choose(processes, draw)
    )


def _interval(
    logarithm: Callable[[random.Random | None], float], samples: Sequence[Processes]
) -> Gain:
    """From 0 to infinity where a sample is of one process, which says nothing about
    others."""
    fewest = min(map(len, samples))
    if fewest == 1:
        return Gain(math.exp(logarithm(None)), 0.0, math.inf)
    found = bootstrap(logarithm)
    assert found is not None
    freedom = sum(len(sample) - 1 for sample in samples)
    stretch = STUDENT[min(freedom, len(STUDENT)) - 1] / _NORMAL
    stretch *= math.sqrt(fewest / (fewest - 1))
    low, high = (
        found.gain + stretch * (end - found.gain) for end in (found.low, found.high)
    )
    return Gain(*map(math.exp, (found.gain, low, high)))
